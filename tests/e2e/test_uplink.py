"""A microphone in real Chromium, heard by a call: what our answer makes it send, and what loss then does."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
from playwright.sync_api import Playwright

from breeze_rtc.media.opus import has_fec, packet_ticks
from breeze_rtc.transport.signaling import Offer, check_offer
from breeze_rtc.transport.webrtc import WebRtcCall

from .conftest import chromium, microphone_flags, write_wav

SPEAK = """async () => {
  window.peer = new RTCPeerConnection();
  const media = await navigator.mediaDevices.getUserMedia({ audio: true });
  peer.addTransceiver(media.getAudioTracks()[0], { direction: "sendrecv" });
  await peer.setLocalDescription(await peer.createOffer());
  return peer.localDescription.sdp;
}"""


def test_chromium_sends_wide_band_and_redundancy(playwright: Playwright, loop: Any, tmp_path: Path) -> None:
    """Mono SILK of 20 ms; with 10 % loss told by our reports, most of what is lost comes back."""
    t = np.arange(48_000 * 12) / 48_000
    phase = 2 * np.pi * np.cumsum(120 + 30 * np.sin(2 * np.pi * 1.3 * t)) / 48_000
    buzz = sum(np.sin(k * phase) / k for k in range(1, 12)) * 0.1 * (1.2 + np.sin(2 * np.pi * 2.1 * t))
    microphone = write_wav(tmp_path / "buzz.wav", buzz.astype(np.float32), 48_000)

    def run(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(60)

    payloads: list[bytes] = []

    async def answer(sdp: str) -> tuple[WebRtcCall, str]:
        call = WebRtcCall()
        receiver: Any = call._transceiver.receiver
        take = receiver.take

        def lossy(packet: Any) -> None:
            payloads.append(packet.payload)
            if len(payloads) % 10 != 5:
                take(packet)

        receiver.take = lossy
        return call, await call.answer(Offer(check_offer(sdp), True))

    with chromium(playwright, *microphone_flags(microphone)) as browser:
        page = browser.new_page()
        page.route("http://localhost/", lambda route: route.fulfill(body="<!doctype html>", content_type="text/html"))
        page.goto("http://localhost/")
        call, sdp = run(answer(page.evaluate(SPEAK)))
        page.evaluate("(sdp) => peer.setRemoteDescription({ type: 'answer', sdp })", sdp)
        page.wait_for_timeout(7_000)
        tally = call.stats().uplink
        run(call.close())
    assert len(payloads) > 250
    # Configurations of RFC 6716 section 3.1: SILK, and now and then CELT where the buzz is no speech to libopus; mono.
    forms = Counter((payload[0] >> 3, payload[0] & 4, packet_ticks(payload)) for payload in payloads)
    assert set(forms) <= {(9, 0, 960), (23, 0, 960)}
    assert forms[9, 0, 960] > 0.8 * len(payloads), forms
    # The first report comes within 1.5 s, and redundancy with the next packets.
    later = payloads[125:]
    assert sum(has_fec(payload) for payload in later) > 0.7 * len(later)
    assert tally.recovered_ticks > tally.concealed_ticks
    assert tally.recovered_ticks + tally.concealed_ticks >= (len(payloads) // 10 - 1) * 960
    assert tally.late == tally.strange == tally.duplicate == 0
