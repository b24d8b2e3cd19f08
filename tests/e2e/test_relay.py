"""Real Chromium that reaches nothing but a real coturn."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Coroutine
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from breeze_rtc.agent.session import AgentSession, Callbacks
from breeze_rtc.transport.ice import IceServers
from breeze_rtc.transport.signaling import IceServer

sys.path += [str(Path(__file__).parent.parent / name) for name in ("server", "transport")]

from page import serving
from turn_server import SECRET, coturn

from .test_demo import Visitor

SCRIPT = """
window.peers = [];
window.RTCPeerConnection = class extends RTCPeerConnection {
  constructor(configuration) {
    super({ ...configuration, iceTransportPolicy: "relay" });
    window.peers.push(this);
  }
};
"""
PATH = """async () => {
  const stats = await peers.at(-1).getStats();
  for (const pair of stats.values()) {
    if (pair.type === "candidate-pair" && pair.nominated && pair.state === "succeeded") {
      return stats.get(pair.localCandidateId).candidateType;
    }
  }
}"""


async def enter(session: AgentSession) -> AsyncGenerator[str, None]:
    yield "one two three"


async def reply(session: AgentSession, turn: Any) -> AsyncGenerator[str, None]:
    yield f"you said {turn.text}"


@pytest.mark.parametrize("relay_only", [False, True])
def test_a_browser_behind_a_firewall_talks_through_coturn(
    quiet_browser: Browser, loop: asyncio.AbstractEventLoop, relay_only: bool
) -> None:
    """With credentials of an hour, and others for its next connection; also where the server relays as well.

    Reproduction 39 (aioice#47, pipecat#1808).
    """

    def run(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(60)

    with coturn() as url:
        ice = IceServers((IceServer((url,)),), SECRET)
        server = serving(Callbacks(on_enter=enter, on_user_turn=reply), ice=ice, relay_only=relay_only)
        hall = run(server.__aenter__())
        context = quiet_browser.new_context()
        page = context.new_page()
        try:
            page.add_init_script(SCRIPT)
            visitor = Visitor(page)
            page.goto(hall.http)
            page.click("#start-typing")
            greeting = visitor.spoken()
            assert visitor.ends(greeting)["chars"] == len("one two three")
            assert page.evaluate(PATH) == "relay"
            # The connection ends; the page makes another.
            page.evaluate("peers[0].close()")
            visitor.until(lambda: page.evaluate("peers.length") == 2, "the page makes another connection")
            visitor.until(lambda: page.evaluate("peers[1].connectionState") == "connected", "it is up")
            users = page.evaluate("peers.map((peer) => peer.getConfiguration().iceServers[0].username)")
            assert len(set(users)) == 2
            visitor.type("still there")
            answer = visitor.spoken(after=1)
            assert not visitor.ends(answer)["interrupted"]
            assert page.evaluate(PATH) == "relay"
            assert visitor.faults == []
        finally:
            context.close()
            run(server.__aexit__(None, None, None))
