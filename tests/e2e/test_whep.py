"""Real Chromium, a few lines of JavaScript and POST /whep: no page of ours."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Coroutine
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser

from breeze_rtc.agent.session import AgentSession, Callbacks

sys.path += [str(Path(__file__).parent.parent / name) for name in ("server", "transport")]

from page import serving

PLAY = """async () => {
  const peer = window.peer = new RTCPeerConnection();
  peer.addTransceiver("audio", { direction: "recvonly" });
  peer.ontrack = ({ track }) => {
    const player = window.player = new Audio();
    player.srcObject = new MediaStream([track]);
    player.play();
  };
  await peer.setLocalDescription(await peer.createOffer());
  const answer = await fetch("/whep", {
    method: "POST",
    headers: { "Content-Type": "application/sdp" },
    body: peer.localDescription.sdp,
  });
  window.call = answer.headers.get("Location");
  await peer.setRemoteDescription({ type: "answer", sdp: await answer.text() });
  return answer.status;
}"""
LEVEL = """async () => {
  for (const stats of (await peer.getStats()).values()) if (stats.type === "inbound-rtp") return stats.totalAudioEnergy;
  return 0;
}"""


async def enter(session: AgentSession) -> AsyncGenerator[str, None]:
    yield "one two three"


def test_a_browser_plays_what_it_asked_for_over_http(quiet_browser: Browser, loop: asyncio.AbstractEventLoop) -> None:
    """The agent is heard, and the position at the ear is an estimate; DELETE ends the call at both ends."""

    def run(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(60)

    server = serving(Callbacks(on_enter=enter))
    hall = run(server.__aenter__())
    page = quiet_browser.new_page()
    try:
        page.goto(hall.http)
        assert page.evaluate(PLAY) == 201
        for _ in range(200):
            page.wait_for_timeout(50)
            if page.evaluate(LEVEL) > 0.02 and not hall.engine.open:
                break
        assert page.evaluate(LEVEL) > 0.02
        (call,) = hall.server._calls
        assert call._webrtc.stats().source in {"rtcp", "estimate"}
        assert page.evaluate("async () => (await fetch(call, { method: 'DELETE' })).status") == 200
        page.wait_for_function("['closed', 'failed', 'disconnected'].includes(peer.connectionState)", timeout=15_000)
        assert not hall.server._calls
    finally:
        page.close()
        run(server.__aexit__(None, None, None))
