"""A listener in Python: an aiortc peer that plays into nothing, writes down what it heard and when, and reports like a
page does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction

import av
import numpy as np
from aiortc import MediaStreamTrack, RTCConfiguration, RTCPeerConnection, RTCSessionDescription
from aiortc.mediastreams import MediaStreamError
from numpy.typing import NDArray

from breeze_rtc.clock import MS, MonotonicClock
from breeze_rtc.media import rtp
from breeze_rtc.media.opus import LOOK_AHEAD_48K
from breeze_rtc.transport.signaling import Flushed, Inbox, Offer, Report

EPOCH_MS = 1_796_000_000_000.0
"""The listener's clock is a page's: milliseconds since 1970, unlike the server's."""

clock = MonotonicClock()


@dataclass(frozen=True, slots=True)
class Heard:
    """One decoded frame, mono int16 at 48 kHz from RTP timestamp `rtp` on; the sound card takes it at `pulled_ns`."""

    rtp: int
    pulled_ns: int
    pcm: NDArray[np.int16]


class PythonListener:
    """Connect with `offer` and `accept`; `heard` grows; `close` when done."""

    def __init__(self, *, microphone: MediaStreamTrack | None = None, device_ms: float = 35.0) -> None:
        self.device_ms = device_ms
        self.heard: list[Heard] = []
        self.muted = False
        self.played = asyncio.Event()
        self.on_heard: Callable[[], None] = lambda: None
        self._seq = 0
        self._first_rtp: int | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._inbox = Inbox()
        self.peer = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        if microphone is None:
            self._transceiver = self.peer.addTransceiver("audio", direction="recvonly")
        else:
            self._transceiver = self.peer.addTransceiver(microphone, direction="sendrecv")
        self._has_microphone = microphone is not None
        self.peer.on("track", lambda track: self._tasks.append(asyncio.create_task(self._play(track))))

    async def offer(self) -> Offer:
        """What the page would send, read the way the server reads it."""
        # aiortc leaves the loopback out, which is all that some test machines have.
        gatherer = self._transceiver.receiver.transport.transport.iceGatherer
        await gatherer.gather()
        if not gatherer.getLocalCandidates():
            connection = gatherer._connection
            connection._local_candidates += await connection.get_component_candidates(1, ["127.0.0.1"])
        await self.peer.setLocalDescription(await self.peer.createOffer())
        sdp = self.peer.localDescription.sdp
        message = self._inbox.read(json.dumps({"type": "offer", "sdp": sdp, "microphone": self._has_microphone}))
        assert isinstance(message, Offer)
        return message

    async def accept(self, answer: str) -> None:
        await self.peer.setRemoteDescription(RTCSessionDescription(sdp=answer, type="answer"))
        self._hook()

    def report(self, *, now: int | None = None) -> Report:
        """What the page would say at `now`."""
        now = clock.now() if now is None else now
        last = self.last_pulled(now)
        self._seq += 1
        fields = {
            "type": "report",
            "seq": self._seq,
            "t_ms": now / MS + EPOCH_MS,
            "rtp": last.rtp if last else None,
            "rtp_t_ms": last.pulled_ns / MS + EPOCH_MS if last else None,
            "device_delay_ms": self.device_ms,
            "device_delay_source": "playout",
            "age_ms": (now - last.pulled_ns) / MS if last else 0.0,
            "jitter_buffer_ms": 80.0,
            "jitter_target_ms": 80.0,
            **dict.fromkeys(("concealed", "inserted", "removed", "lost"), 0),
            "muted": self.muted,
            "paused": False,
            "volume": 1.0,
            "visible": True,
            "offset_ms": -EPOCH_MS,
        }
        message = self._inbox.read(json.dumps(fields))
        assert isinstance(message, Report)
        return message

    def mute(self) -> Flushed:
        """Fall silent, and say where."""
        self.muted = True
        now = clock.now()
        last = self.last_pulled(now)
        assert last is not None, "nothing was played yet"
        return Flushed(rtp.add(last.rtp, (now - last.pulled_ns) * 48 // MS), now / MS + EPOCH_MS)

    def start_reports(self, send: Callable[[Report], None], *, interval_s: float = 0.25) -> None:
        """Report from the first played packet on."""

        async def run() -> None:
            await self.played.wait()
            while True:
                send(self.report())
                await asyncio.sleep(interval_s)

        self._tasks.append(asyncio.create_task(run()))

    def last_pulled(self, now: int) -> Heard | None:
        """The frame that the sound card took last."""
        return next((heard for heard in reversed(self.heard) if heard.pulled_ns <= now), None)

    def ticks_at(self, at_ns: int, origin_rtp: int) -> int | None:
        """The truth: ticks since `origin_rtp`, as they went into the encoder, that left the loudspeaker at `at_ns`."""
        pulled_ns = at_ns - round(self.device_ms * MS)
        heard = self.last_pulled(pulled_ns)
        if heard is None:
            return None
        inside = min(len(heard.pcm), (pulled_ns - heard.pulled_ns) * 48 // MS)
        return rtp.distance(origin_rtp, heard.rtp) + inside - LOOK_AHEAD_48K

    def pcm(self, from_rtp: int, samples: int) -> NDArray[np.int16]:
        """What was heard of the 48 kHz samples from `from_rtp` on; zeros where nothing was."""
        sound = np.zeros(samples, np.int16)
        for heard in self.heard:
            at = rtp.distance(from_rtp, heard.rtp)
            start, end = max(at, 0), min(at + len(heard.pcm), samples)
            if start < end:
                sound[start:end] = heard.pcm[start - at : end - at]
        return sound

    async def vanish(self) -> None:
        """Leave without a word: no DTLS goodbye, no RTCP BYE; the socket is simply gone."""
        await self._transceiver.receiver.transport.transport.stop()
        await self.close()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.peer.close()

    def _hook(self) -> None:
        """aiortc counts frames from the first packet; find out which timestamp that had."""
        receiver = self._transceiver.receiver
        handle = receiver._handle_rtp_packet

        async def first(packet, arrival_time_ms):  # type: ignore[no-untyped-def]
            if self._first_rtp is None:
                self._first_rtp = packet.timestamp
            await handle(packet, arrival_time_ms)

        receiver._handle_rtp_packet = first

    async def _play(self, track: MediaStreamTrack) -> None:
        with suppress(MediaStreamError):
            while True:
                frame = await track.recv()
                assert isinstance(frame, av.AudioFrame)
                assert self._first_rtp is not None
                left = frame.to_ndarray().reshape(-1, 2)[:, 0].copy()
                # A sound card plays frames that come in a bunch one after another.
                pulled_ns = max(clock.now(), self.heard[-1].pulled_ns + 20 * MS if self.heard else 0)
                self.heard.append(Heard(rtp.add(self._first_rtp, frame.pts), pulled_ns, left))
                self.played.set()
                self.on_heard()


class Microphone(MediaStreamTrack):
    """Plays 20 ms frames of 48 kHz int16 sound in real time, then silence."""

    kind = "audio"

    def __init__(self, pcm: NDArray[np.int16]) -> None:
        super().__init__()
        self._frames: Iterator[NDArray[np.int16]] = iter(np.split(pcm, range(960, len(pcm), 960)))
        self._sent = 0
        self._start_ns = 0

    async def recv(self) -> av.AudioFrame:
        if self._sent == 0:
            self._start_ns = clock.now()
        wait_ns = self._start_ns + self._sent * 20 * MS - clock.now()
        await asyncio.sleep(max(0, wait_ns) / 1e9)
        piece = next(self._frames, np.zeros(960, np.int16))
        frame = av.AudioFrame.from_ndarray(piece[None], format="s16", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = 48_000, self._sent * 960, Fraction(1, 48_000)
        self._sent += 1
        return frame
