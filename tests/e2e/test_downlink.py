"""Speech that loses packets on its way to a real Chromium."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import numpy as np
from playwright.sync_api import Browser

from breeze_rtc.media.opus import SpeechEncoder
from breeze_rtc.playback import SpeechPacket
from breeze_rtc.transport.playout import Slot
from breeze_rtc.transport.signaling import Offer, check_offer
from breeze_rtc.transport.webrtc import WebRtcCall

LISTEN = """async () => {
  window.peer = new RTCPeerConnection();
  peer.addTransceiver("audio", { direction: "recvonly" });
  peer.ontrack = ({ track }) => {
    window.player = new Audio();
    player.srcObject = new MediaStream([track]);
    player.play();
  };
  await peer.setLocalDescription(await peer.createOffer());
  return peer.localDescription.sdp;
}"""
STATS = """async () => {
  for (const stats of (await peer.getStats()).values()) if (stats.type === "inbound-rtp") return stats;
}"""


def buzz(seconds: float, *, expected_loss: int) -> tuple[SpeechPacket, ...]:
    t = np.arange(round(24_000 * seconds)) / 24_000
    phase = 2 * np.pi * np.cumsum(120 + 30 * np.sin(2 * np.pi * 1.3 * t)) / 24_000
    sound = sum(np.sin(k * phase) / k for k in range(1, 12)) * 0.1 * (1.2 + np.sin(2 * np.pi * 2.1 * t))
    return SpeechEncoder(expected_loss=expected_loss).encode((sound * 32_000).astype(np.int16))


def test_chromium_fills_losses_from_the_packets_after_them(quiet_browser: Browser, loop: Any) -> None:
    """Each tenth packet is lost: with in-band FEC it makes up a fifth of what it makes up without."""

    def run(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(60)

    async def answer(sdp: str, packets: tuple[SpeechPacket, ...]) -> tuple[WebRtcCall, str]:
        call = WebRtcCall(first_report_timeout_s=0.5)
        send = call._sender._send

        def lossy(slot: Slot) -> None:
            if slot.stream is not None and slot.index % 10 == 5:
                call._sender._sequence = (call._sender._sequence + 1) & 0xFFFF
            else:
                send(slot)

        call._sender._send = lossy  # type: ignore[method-assign]
        call.sink.write(1, packets)
        return call, await call.answer(Offer(check_offer(sdp), False))

    concealed: dict[int, float] = {}
    for expected_loss in (0, 10):
        page = quiet_browser.new_page()
        page.route("http://localhost/", lambda route: route.fulfill(body="<!doctype html>", content_type="text/html"))
        page.goto("http://localhost/")
        call, sdp = run(answer(page.evaluate(LISTEN), buzz(12, expected_loss=expected_loss)))
        page.evaluate("(sdp) => peer.setRemoteDescription({ type: 'answer', sdp })", sdp)
        page.wait_for_timeout(3_000)
        before = page.evaluate(STATS)
        page.wait_for_timeout(5_000)
        after = page.evaluate(STATS)
        run(call.close())
        page.close()
        lost = after["packetsLost"] - before["packetsLost"]
        assert lost > 15
        concealed[expected_loss] = (after["concealedSamples"] - before["concealedSamples"]) / (960 * lost)
    assert concealed[10] < 0.5 * concealed[0]
