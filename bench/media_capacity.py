"""How many listeners can one core of a media process speak to, and how evenly?

One process sends to N listeners over real UDP, ICE, DTLS and SRTP; the listeners are in this process, and light: they
write down when each packet came and throw it away.  The same listeners hear four other ways of sending: aiortc with
packets that are made ahead (what this project did before), aiortc that encodes, and with `--peers` Pipecat's
SmallWebRTC and FastRTC, each in a virtual environment of its own.

Our sender gets packets that another process has encoded; aiortc, Pipecat and FastRTC encode in the process that sends.
So the CPU of a session is given twice for ours: sending alone, and with the encoder's time added.

`--duplex` gives each listener a microphone too, with a person reading aloud in it (wide-band Opus with redundancy, as
browsers send it to us), and the process that is measured decodes it all to 16 kHz.

Lateness is how long after its timestamp a packet came, counted from the session's earliest packet.  It contains the
listeners' own delay, so on a machine that does other work it says little; CPU time says much everywhere.

    python bench/media_capacity.py [--quick] [--duplex] [--sessions N ...] [--kinds KIND ...] [--peers [DIR]] [--burn]
                                   [--cycles N] [--json FILE]

`--peers` needs `python -m venv .peers/pipecat && .peers/pipecat/bin/pip install "pipecat-ai[webrtc]" uvloop`, and the
same for `fastrtc`.  `--burn` speaks to 20 listeners while a user's callback computes, in a thread or on the loop.
`--cycles` connects and closes N calls one after another and measures what stays behind.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib.util
import json
import os
import subprocess
import sys
import time
import wave
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from origin import origin

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "transport"))
from media_senders import BURNS, RATE, voice
from python_listener import PythonListener, clock

from breeze_rtc.errors import PeerError
from breeze_rtc.media import rtp
from breeze_rtc.media.opus import SpeechEncoder
from breeze_rtc.media.resample import Resampler
from breeze_rtc.playback import SpeechPacket
from breeze_rtc.transport.pacer import Pacer
from breeze_rtc.transport.playout import Playout
from breeze_rtc.transport.sender import SlotSender
from breeze_rtc.transport.webrtc import WebRtcCall

HERE = Path(__file__).parent
OWN = ("ours", "detecting", "packets", "frames")
PEERS = ("pipecat", "fastrtc")
NAMES = {
    "ours": "breeze_rtc",
    "detecting": "the same, voice activity too",
    "packets": "aiortc, packets made ahead",
    "frames": "aiortc, encoding",
    "pipecat": "Pipecat SmallWebRTC",
    "fastrtc": "FastRTC",
}
SESSIONS = {
    "ours": [100, 200],
    "detecting": [100],
    "packets": [50, 100],
    "frames": [20],
    "pipecat": [20],
    "fastrtc": [20],
}
DUPLEX_SESSIONS = {
    "ours": [100, 200],
    "detecting": [100],
    "packets": [50],
    "frames": [8],
    "pipecat": [8],
    "fastrtc": [8],
}
WARM_UP_S = 2.0


def microphone() -> list[SpeechPacket]:
    """A person who reads aloud, as a browser encodes it for us."""
    spec = importlib.util.find_spec("moonshine_voice")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("--duplex needs a voice for the microphones: pip install 'breeze_rtc[listen]'")
    with wave.open(str(Path(spec.submodule_search_locations[0]) / "assets" / "two_cities.wav")) as file:
        assert file.getnchannels() == 1
        pcm, rate = np.frombuffer(file.readframes(file.getnframes()), np.int16), file.getframerate()
    sound = Resampler(rate, 16_000).push(pcm)
    encoder = SpeechEncoder(16_000, bit_rate=32_000, complexity=9, expected_loss=5)
    return list(encoder.encode((np.clip(sound, -1, 1) * 32_767).astype(np.int16)))


class LightListener:
    """Connects as a page does, then writes down arrivals instead of playing; given `packets`, it speaks, too."""

    def __init__(
        self, packets: list[SpeechPacket] | None = None, pacer: Pacer | None = None, *, opens_channel: bool = False
    ) -> None:
        self._listener = PythonListener()
        if opens_channel:
            self._listener.peer.createDataChannel("text")
        if packets is not None and pacer is not None:
            transceiver = self._listener._transceiver
            transceiver.direction = "sendrecv"
            playout = Playout()
            playout.write(1, tuple(packets))
            playout.open()
            self._speaker = SlotSender(
                transceiver.sender, playout, pacer, clock=clock, on_slot=lambda slot: None, on_end=lambda: None
            )
        self.arrived_ns = array("q")
        self.timestamps = array("Q")
        self.sizes = array("q")

    async def offer(self) -> str:
        with suppress(PeerError):  # Which is what our own server says to a data channel.
            await self._listener.offer()
        return self._listener.peer.localDescription.sdp

    async def accept(self, answer: str) -> None:
        connection = self._listener._transceiver.receiver.transport.transport._connection
        pass_on = connection.data_received

        def data_received(data: bytes, component: int) -> None:
            # RTP and RTCP share the socket (RFC 5761 section 4), and the RTP header is not encrypted.
            if 127 < data[0] < 192 and not 192 <= data[1] <= 223:
                self.arrived_ns.append(clock.now())
                self.timestamps.append(int.from_bytes(data[4:8], "big"))
                self.sizes.append(len(data))
            else:
                pass_on(data, component)

        connection.data_received = data_received
        await self._listener.accept(answer)

    async def close(self) -> None:
        await self._listener.close()

    def late_ms(self, since_ns: int) -> np.ndarray:
        """How late each packet since `since_ns` was, by the earliest of them."""
        keep = np.frombuffer(self.arrived_ns, np.int64) >= since_ns
        arrived, timestamps = (
            np.frombuffer(self.arrived_ns, np.int64)[keep],
            np.frombuffer(self.timestamps, np.uint64)[keep],
        )
        if not arrived.size:
            return np.zeros(0)
        ticks = np.array([rtp.distance(int(timestamps[0]), int(timestamp)) for timestamp in timestamps])
        late = (arrived - arrived[0]) / 1e6 - ticks / 48
        return late - late.min()


@dataclass
class Outcome:
    kind: str
    sessions: int
    cpu_ms_per_session_s: float
    """CPU time of the sending process for one second of one session."""
    late_p50_ms: float
    late_p95_ms: float
    late_p99_ms: float
    packets_per_session_s: float
    kbps: float
    """On the wire, without UDP and IP: who is silent shows here."""
    peak_rss_mb: float
    version: str
    heard_share: float
    """Of the microphones' sound, what was decoded and read; 0 where they are not heard."""
    burn: str = ""


class Sender:
    """The process that is measured."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def ask(self, **message: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        line = await asyncio.wait_for(self._process.stdout.readline(), 60)
        if not line:
            raise RuntimeError("the sender ended")
        reply: dict[str, Any] = json.loads(line)
        return reply


@asynccontextmanager
async def sender(kind: str, seconds: float, peers: Path, *, hears: bool) -> AsyncIterator[Sender]:
    python = sys.executable if kind in OWN else str(peers / kind / "bin" / "python")
    process = await asyncio.create_subprocess_exec(
        python,
        str(HERE / "media_senders.py"),
        kind,
        str(seconds),
        *(("hears",) if hears else ()),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        limit=1 << 20,
    )
    try:
        yield Sender(process)
    finally:
        process.kill()
        await process.wait()


async def measure(
    kind: str, sessions: int, seconds: float, peers: Path, *, burn: str = "", spoken: list[SpeechPacket] | None = None
) -> Outcome:
    pacer = Pacer()
    # Enough to say for everybody until the end, however long connecting takes.
    span_s = seconds + WARM_UP_S + 0.1 * sessions + 5
    if spoken is not None:
        spoken = (spoken * round(1 + span_s * 50 / len(spoken)))[: round(span_s * 50)]
    # FastRTC does not listen to anyone who opens no data channel.  Nothing is sent through it.
    channel = kind == "fastrtc" and spoken is not None
    listeners = [LightListener(spoken, pacer, opens_channel=channel) for _ in range(sessions)]
    async with sender(kind, span_s, peers, hears=spoken is not None) as process:
        for listener in listeners:
            await listener.accept((await process.ask(offer=await listener.offer()))["answer"])
        async with asyncio.timeout(30):
            while not all(len(listener.arrived_ns) > 10 for listener in listeners):  # noqa: ASYNC110 - they only count
                await asyncio.sleep(0.1)
        if burn:
            await process.ask(burn=burn)
        await asyncio.sleep(WARM_UP_S)
        gc.collect()
        before, start_ns = await process.ask(usage=True), clock.now()
        await asyncio.sleep(seconds)
        after, end_ns = await process.ask(usage=True), clock.now()
        late = np.concatenate([listener.late_ms(start_ns) for listener in listeners])
        recent = [size for listener in listeners for size in listener.sizes[-50:]]
        for listener in listeners:
            await listener.close()
    span_s = (end_ns - start_ns) / 1e9
    return Outcome(
        kind,
        sessions,
        1000 * (after["cpu_s"] - before["cpu_s"]) / span_s / sessions,
        *(float(np.percentile(late, q)) for q in (50, 95, 99)),
        late.size / span_s / sessions,
        float(np.mean(recent)) * 8 / 20,
        after["peak_rss_kb"] / 1024,
        after["version"],
        (after["heard_s"] - before["heard_s"]) / span_s / sessions,
        burn,
    )


async def cycles(count: int) -> dict[str, float]:
    """Connect and close calls one after another; what does this process keep of each?"""
    packets = SpeechEncoder(RATE).encode(voice(0.2))
    pacer = Pacer()

    def rss_kb() -> float:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1024

    def sockets() -> int:
        return sum(path.is_socket() for path in Path("/proc/self/fd").iterdir())

    for number in range(count + 40):
        if number == 40:  # Before, allocators and caches still grow.
            start_kb, start_tasks, start_sockets = rss_kb(), len(asyncio.all_tasks()), sockets()
        await cycle(pacer, packets)
    await asyncio.sleep(0.5)
    return {
        "cycles": count,
        "kb_per_cycle": (rss_kb() - start_kb) / count,
        "tasks": len(asyncio.all_tasks()) - start_tasks,
        "sockets": sockets() - start_sockets,
        "paced": float(pacer._phases.next_at() is not None),
    }


async def cycle(pacer: Pacer, packets: tuple[SpeechPacket, ...]) -> None:
    """One call, from its offer to its end."""
    listener, call = LightListener(), WebRtcCall(pacer=pacer, first_report_timeout_s=0.0)
    call.sink.write(1, packets)
    async with asyncio.timeout(30):
        offer = await listener._listener.offer()
        await listener.accept(await call.answer(offer))
        while len(listener.arrived_ns) < 3:  # noqa: ASYNC110 - it only counts
            await asyncio.sleep(0.01)
        await call.close()
        await listener.close()


def encode_ms_per_s() -> float:
    """What a second of the same sound costs the engine process to encode."""
    sound = voice(10)
    began = time.process_time()
    SpeechEncoder(RATE).encode(sound)
    return 100 * (time.process_time() - began)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="6 s each instead of 20, own kinds with fewest sessions")
    parser.add_argument("--sessions", type=int, nargs="+", help="so many for every kind")
    parser.add_argument("--kinds", nargs="+", choices=OWN, default=OWN)
    parser.add_argument(
        "--peers", type=Path, nargs="?", const=HERE.parent / ".peers", help="folder of their environments"
    )
    parser.add_argument("--duplex", action="store_true", help="the listeners have microphones")
    parser.add_argument("--burn", action="store_true")
    parser.add_argument("--cycles", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1, help="nothing here is random; taken for the convention's sake")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    seconds = 6.0 if args.quick else 20.0
    kinds = [
        *(kind for kind in args.kinds if args.duplex or kind != "detecting"),
        *(kind for kind in PEERS if args.peers and (args.peers / kind).exists()),
    ]
    not_run = [kind for kind in PEERS if kind not in kinds]
    encode = encode_ms_per_s()
    spoken = microphone() if args.duplex else None
    outcomes = []
    print(
        f"{'':28} {'sessions':>8} {'CPU each':>9} {'+ encoding':>10}"
        "   late p50 / p95 / p99 ms  packets/s  kb/s  peak RSS" + ("  heard" if args.duplex else "")
    )
    for kind in kinds:
        counts = (DUPLEX_SESSIONS if args.duplex else SESSIONS)[kind]
        for sessions in args.sessions or counts[: 1 if args.quick else None]:
            outcome = await measure(kind, sessions, seconds, args.peers or HERE, spoken=spoken)
            outcomes.append(outcome)
            whole = outcome.cpu_ms_per_session_s + (encode if kind in {"ours", "detecting", "packets"} else 0)
            print(
                f"{NAMES[kind]:28} {sessions:8} {outcome.cpu_ms_per_session_s / 10:7.2f} % {whole / 10:8.2f} % "
                f"  {outcome.late_p50_ms:6.1f} {outcome.late_p95_ms:6.1f} {outcome.late_p99_ms:6.1f}"
                f"          {outcome.packets_per_session_s:7.1f} {outcome.kbps:6.1f} {outcome.peak_rss_mb:7.0f} MB"
                + (f" {outcome.heard_share:6.3f}" if args.duplex else ""),
                flush=True,
            )
    for burn in BURNS if args.burn else ():
        outcomes.append(outcome := await measure("ours", 20, seconds, HERE, burn=burn))
        print(
            f"{'with a busy ' + burn:28} {20:8} {'':9}   {'':10} {outcome.late_p50_ms:7.1f} {outcome.late_p95_ms:6.1f}"
            f" {outcome.late_p99_ms:6.1f}          {outcome.packets_per_session_s:7.1f}",
            flush=True,
        )
    left = await cycles(args.cycles) if args.cycles else None
    if not_run:
        print(f"not run: {', '.join(NAMES[kind] for kind in not_run)} (see --peers)")
    if left:
        print(f"after {args.cycles} calls: " + ", ".join(f"{name} {value:g}" for name, value in left.items()))
    if args.json:
        args.json.write_text(
            json.dumps(
                origin("aiortc", "aioice", "av", "uvloop", "breeze_rtc")
                | {
                    "encode_ms_per_s": encode,
                    "outcomes": [asdict(outcome) for outcome in outcomes],
                    "after_cycles": left,
                }
            )
        )
    best = {
        kind: min((o.cpu_ms_per_session_s for o in outcomes if o.kind == kind and not o.burn), default=None)
        for kind in kinds
    }
    print(
        "RESULT "
        + " ".join(f"{kind}_cpu_percent={cpu / 10:.2f}" for kind, cpu in best.items() if cpu is not None)
        + f" encode_cpu_percent={encode / 10:.2f}"
        + (f" before_to_ours={best['packets'] / best['ours']:.1f}" if {"ours", "packets"} <= best.keys() else "")
        + (f" kb_per_cycle={left['kb_per_cycle']:.0f}" if left else "")
    )


if __name__ == "__main__":
    import uvloop

    uvloop.run(main())
