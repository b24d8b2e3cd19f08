"""What does a microphone cost, how late is it, and what does loss do to it: our receive path and aiortc's own.

Another process sends N microphones (wide-band Opus with redundancy, as our answer asks a browser for) over UDP and
SRTP.  This one receives them with aiortc's jitter buffer, decoder thread and a resampler to 16 kHz, and then with
`transport/uplink.py`: some seconds in peace, the same with 5 % loss, and two seconds in peace again.  Losses are drawn
when a packet has been decrypted.  Processor time is that of this whole process, ICE and SRTP included.  Delay is from a
packet's arrival to its sound in the reader's hands.

    python bench/uplink.py [--quick] [--seed N] [--json FILE] [--sessions N]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import uvloop
from aiortc import MediaStreamTrack, RTCConfiguration, RTCPeerConnection, RTCSessionDescription
from aiortc.mediastreams import MediaStreamError
from origin import origin

from breeze_rtc.clock import MS, MonotonicClock
from breeze_rtc.media import rtp
from breeze_rtc.media.resample import Resampler
from breeze_rtc.transport.jitter_buffer import Source
from breeze_rtc.transport.uplink import Uplink, UplinkReceiver

clock = MonotonicClock()
PATHS = ("stock", "ours")
LOSS = 0.05


# --- the microphones' process


def voice() -> list[bytes]:
    """Ten seconds of something like speech, in packets of 20 ms."""
    t = np.arange(160_000) / 16_000
    phase = 2 * np.pi * np.cumsum(120 + 30 * np.sin(2 * np.pi * 1.3 * t)) / 16_000
    buzz = sum(np.sin(k * phase) / k for k in range(1, 12)) * np.clip(np.sin(2 * np.pi * 0.7 * t) + 0.6, 0, 1)
    pcm = (buzz * 6_000 + np.random.default_rng(1).normal(0, 60, t.size)).astype(np.int16)
    codec = av.CodecContext.create("libopus", "w")
    codec.sample_rate, codec.layout, codec.format, codec.bit_rate = 16_000, "mono", "s16", 32_000
    codec.time_base = Fraction(1, 16_000)
    codec.options = {"application": "voip", "frame_duration": "20", "fec": "1", "packet_loss": "5"}
    codec.open()
    packets: list[bytes] = []
    for start in range(0, pcm.size, 320):
        frame = av.AudioFrame.from_ndarray(pcm[None, start : start + 320], format="s16", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = 16_000, start, Fraction(1, 16_000)
        packets += [bytes(packet) for packet in codec.encode(frame)]
    return packets


class Microphone(MediaStreamTrack):
    """Gives a packet each 20 ms."""

    kind = "audio"

    def __init__(self, packets: list[bytes]) -> None:
        super().__init__()
        self._packets = packets
        self._sent = 0
        self._start_ns = 0

    async def recv(self) -> av.Packet[Any]:
        if self._sent == 0:
            self._start_ns = clock.now()
        await asyncio.sleep(max(0, self._start_ns + self._sent * 20 * MS - clock.now()) / 1e9)
        packet = av.Packet(self._packets[self._sent % len(self._packets)])
        packet.pts, packet.time_base = self._sent * 960, Fraction(1, 48_000)
        self._sent += 1
        return packet


async def gather(peer: RTCPeerConnection) -> None:
    """Find addresses; aiortc leaves the loopback out, which may be all there is."""
    gatherer = peer.getTransceivers()[0].receiver.transport.transport.iceGatherer
    await gatherer.gather()
    if not gatherer.getLocalCandidates():
        connection = gatherer._connection
        connection._local_candidates += await connection.get_component_candidates(1, ["127.0.0.1"])


async def speak(count: int) -> None:
    """Offers go out and answers come in, one line of JSON each; the end of the input ends all."""
    packets, peers = voice(), []
    loop = asyncio.get_running_loop()
    for _ in range(count):
        peer = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        peer.addTransceiver(Microphone(packets), direction="sendonly")
        await gather(peer)
        await peer.setLocalDescription(await peer.createOffer())
        print(json.dumps(peer.localDescription.sdp), flush=True)
        answer = json.loads(await loop.run_in_executor(None, sys.stdin.readline))
        await peer.setRemoteDescription(RTCSessionDescription(sdp=answer, type="answer"))
        peers.append(peer)
    await loop.run_in_executor(None, sys.stdin.readline)
    await asyncio.gather(*(peer.close() for peer in peers))


# --- ours


@dataclass
class Session:
    """One microphone as it was received."""

    arrived_ns: dict[int, int] = field(default_factory=dict)
    """By number of packet, also of those that are lost."""
    lost: set[int] = field(default_factory=set)
    out_ns: dict[int, int] = field(default_factory=dict)
    """When the sound of a packet was read, by number."""
    filled: set[int] = field(default_factory=set)
    """Numbers of those that are a guess, or redundancy."""


class Receiving:
    """N sessions by one path."""

    def __init__(self, path: str, *, reads: bool, seed: int) -> None:
        self.path = path
        self.sessions: list[Session] = []
        self._reads = reads
        self._chance = random.Random(seed)
        self._peers: list[RTCPeerConnection] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.loses = False
        """Whether the path is bad just now."""

    async def open(self, count: int) -> None:
        command = [sys.executable, __file__, "--speak", str(count)]
        self._talker = await asyncio.create_subprocess_exec(
            *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, limit=1 << 20
        )
        assert self._talker.stdin is not None
        assert self._talker.stdout is not None
        for _ in range(count):
            offer = json.loads(await self._talker.stdout.readline())
            peer = RTCPeerConnection(RTCConfiguration(iceServers=[]))
            transceiver = peer.addTransceiver("audio", direction="recvonly")
            session = Session()
            if self.path == "ours":
                uplink = Uplink(clock)
                UplinkReceiver.install(transceiver, uplink)
                if self._reads:
                    self._note_guesses(uplink, session)
                    self._tasks.append(asyncio.create_task(self._read_ours(uplink, session)))
            elif self._reads:
                peer.on("track", self._reader_of(session))
            self._make_lossy(transceiver.receiver, session)
            await peer.setRemoteDescription(RTCSessionDescription(sdp=offer, type="offer"))
            await gather(peer)
            await peer.setLocalDescription(await peer.createAnswer())
            self._talker.stdin.write(json.dumps(peer.localDescription.sdp).encode() + b"\n")
            self._peers.append(peer)
            self.sessions.append(session)
        async with asyncio.timeout(60):
            while not all(len(session.arrived_ns) > 25 for session in self.sessions):  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(peer.close() for peer in self._peers))
        self._talker.stdin.close()
        await self._talker.wait()

    def _make_lossy(self, receiver: Any, session: Session) -> None:
        first: int | None = None

        def is_lost(timestamp: int) -> bool:
            nonlocal first
            first = timestamp if first is None else first
            number = rtp.distance(first, timestamp) // 960
            session.arrived_ns[number] = clock.now()
            lost = self.loses and self._chance.random() < LOSS
            if lost:
                session.lost.add(number)
            return lost

        if self.path == "ours":
            take = receiver.take
            receiver.take = lambda packet: is_lost(packet.timestamp) or take(packet)
            return
        handle = receiver._handle_rtp_packet

        async def hand_on(packet: Any, arrival_time_ms: int) -> None:
            if not is_lost(packet.timestamp):
                await handle(packet, arrival_time_ms)

        receiver._handle_rtp_packet = hand_on

    @staticmethod
    def _note_guesses(uplink: Uplink, session: Session) -> None:
        cut = uplink._cut

        def noted(frame: Any) -> Any:
            if frame.source is not Source.PACKET:
                session.filled.update(range(frame.at // 960, (frame.at + frame.ticks) // 960))
            return cut(frame)

        uplink._cut = noted  # type: ignore[method-assign]

    def _reader_of(self, session: Session) -> Callable[[MediaStreamTrack], None]:
        return lambda track: self._tasks.append(asyncio.create_task(self._read_stock(track, session)))

    async def _read_ours(self, uplink: Uplink, session: Session) -> None:
        async for block in uplink.blocks():
            session.out_ns[block.at_samples // 320] = clock.now()

    async def _read_stock(self, track: MediaStreamTrack, session: Session) -> None:
        resampler = Resampler(48_000, 16_000, channels=2)
        while True:
            try:
                frame = await track.recv()
            except MediaStreamError:
                return
            resampler.push(frame.to_ndarray().reshape(-1))
            session.out_ns[frame.pts // 960] = clock.now()


@dataclass
class Result:
    """One path, once."""

    path: str
    cpu_ms_per_s: float
    """Processor time of the process for a second of one session, without loss."""
    delay_p50_ms: float
    """Without loss."""
    loss_delay_p95_ms: float
    after_delay_p50_ms: float
    """When there is no loss any more."""
    lost_pct: float
    filled_pct: float
    """Guessed, or from redundancy."""
    thrown_away_pct: float
    """Of the packets that arrived."""


async def measure(path: str, count: int, seconds: float, seed: int) -> Result:
    receiving = Receiving(path, reads=True, seed=seed)
    await receiving.open(count)
    sessions = receiving.sessions

    def arrived() -> list[int]:
        return [max(session.arrived_ns) + 1 for session in sessions]

    await asyncio.sleep(1.0)
    peace, cpu, began_ns = arrived(), os.times(), clock.now()
    await asyncio.sleep(seconds)
    bad, cpu_after, ended_ns = arrived(), os.times(), clock.now()
    receiving.loses = True
    await asyncio.sleep(seconds)
    receiving.loses = False
    after = arrived()
    await asyncio.sleep(2.0)
    end = arrived()
    await receiving.close()

    def delays_ms(starts: list[int], ends: list[int]) -> list[float]:
        return [
            (session.out_ns[k] - session.arrived_ns[k]) / MS
            for session, a, b in zip(sessions, starts, ends, strict=True)
            for k in range(a, b)
            if k in session.out_ns and k in session.arrived_ns and k not in session.lost
        ]

    spans = [(session, range(a, b)) for session, a, b in zip(sessions, bad, after, strict=True)]
    expected = sum(k in session.arrived_ns for session, span in spans for k in span)
    lost = sum(k in session.lost for session, span in spans for k in span)
    filled = sum(k in session.filled for session, span in spans for k in span)
    gone = sum(
        k in session.arrived_ns and k not in session.lost and (k not in session.out_ns or k in session.filled)
        for session, span in spans
        for k in span
    )
    cpu_s = cpu_after.user + cpu_after.system - cpu.user - cpu.system
    return Result(
        path=path,
        cpu_ms_per_s=cpu_s * 1e12 / (ended_ns - began_ns) / count,
        delay_p50_ms=statistics.median(delays_ms(peace, bad)),
        loss_delay_p95_ms=float(np.percentile(delays_ms(bad, after), 95)),
        after_delay_p50_ms=statistics.median(delays_ms([k + 25 for k in after], end)),
        lost_pct=100 * lost / expected,
        filled_pct=100 * filled / expected,
        thrown_away_pct=100 * gone / (expected - lost),
    )


def rss_kb() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


async def growth_kb(path: str, seconds: float, seed: int) -> float:
    """How much a microphone that nobody reads takes in that time."""
    receiving = Receiving(path, reads=False, seed=seed)
    await receiving.open(4)
    await asyncio.sleep(1.0)
    gc.collect()
    before = rss_kb()
    await asyncio.sleep(seconds)
    grown = (rss_kb() - before) / 4
    await receiving.close()
    return grown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sessions", type=int, default=20)
    parser.add_argument("--speak", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.speak:
        uvloop.run(speak(arguments.speak))
        return
    seconds, rounds = (3.0, 1) if arguments.quick else (10.0, 3)
    results: list[Result] = []
    for _ in range(rounds):
        for path in PATHS:
            results.append(uvloop.run(measure(path, arguments.sessions, seconds, arguments.seed)))
            print(results[-1])
    grown = {path: uvloop.run(growth_kb(path, seconds, arguments.seed)) / seconds for path in reversed(PATHS)}
    if arguments.json:
        report = origin("aiortc", "av", "uvloop") | {
            "results": [asdict(result) for result in results],
            "unread_kb_per_s": grown,
        }
        arguments.json.write_text(json.dumps(report, indent=1))

    def middle(path: str, name: str) -> float:
        return statistics.median(getattr(result, name) for result in results if result.path == path)

    parts = [f"sessions={arguments.sessions}", f"filled_pct={middle('ours', 'filled_pct'):.1f}"]
    for path in PATHS:
        parts += [
            f"{path}_cpu_ms_per_s={middle(path, 'cpu_ms_per_s'):.1f}",
            f"{path}_delay_p50_ms={middle(path, 'delay_p50_ms'):.1f}",
            f"{path}_loss_delay_p95_ms={middle(path, 'loss_delay_p95_ms'):.0f}",
            f"{path}_after_delay_p50_ms={middle(path, 'after_delay_p50_ms'):.1f}",
            f"{path}_thrown_away_pct={middle(path, 'thrown_away_pct'):.1f}",
            f"{path}_unread_kb_per_s={grown[path]:.0f}",
        ]
    print("RESULT", *parts)


if __name__ == "__main__":
    main()
