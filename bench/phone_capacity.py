"""How many telephone calls does one core serve, and how evenly does their sound leave?

One process is the whole server: door, sessions, voice activity, Opus to the line's codec; its voice is made ahead.
Calls come from this process over real sockets, by a carrier's WebSocket (Twilio's words: mu-law, marks given back when
played), Asterisk's AudioSocket or SIP (SIPp places and ends the calls), each with inbound sound all the time, and begin
at random moments.  Where there are two cores the server has one to itself, with all its threads, and the callers
another.

*Late* is the server's own doing, measured in it: from the moment at which a piece of sound is to leave by its schedule
until the socket has taken it.  Over AudioSocket and RTP, where we are the clock, that is each 20 ms slot; over a
WebSocket each message of some 100 ms, due when the carrier's buffer has room for it.  What the callers see is beside
it: how unevenly slots arrived, which has their own delays in it, and how often a carrier ran dry.

    python bench/phone_capacity.py [--quick] [--calls N ...] [--kinds websocket audiosocket sip] [--json FILE]

`chrt -f 1` keeps other programs out of it; but where real-time threads want more than 95 % of a core, Linux takes it
from them for 50 ms of each second (`sched_rt_runtime_us`): 55 ms late at the 99th percentile is that, and a full core.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import heapq
import json
import os
import platform
import random
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), *(str(HERE.parent / "tests" / name) for name in ("server", "transport", "agent"))]

ARRIVE_S, WARM_UP_S, MEASURE_S = 2.0, 4.0, 12.0
SECONDS = WARM_UP_S + MEASURE_S + 2
KEY = "bench"
GOOD_MS = 5.0
CORES = sorted(os.sched_getaffinity(0))


# --- the server


async def serve(port: int) -> None:
    import tone_engine

    from breeze_rtc.agent.session import AgentSession, Callbacks
    from breeze_rtc.media.opus import SpeechEncoder
    from breeze_rtc.playback import SpeechPacket, TextMark
    from breeze_rtc.runtime.engine import SpeechChunk
    from breeze_rtc.server import app
    from breeze_rtc.server.phone import Phone
    from breeze_rtc.server.sip import Sip

    word = tone_engine.WORD
    made = [packet.payload for packet in SpeechEncoder(tone_engine.RATE).encode(tone_engine._SOUNDS[0])]

    def chunk(speech: Any, end_chars: int) -> SpeechChunk:
        start, speech.made, speech._spoken_chars = speech.made, speech.made + word, end_chars
        packets = tuple(SpeechPacket(start + 480 * at, payload) for at, payload in enumerate(made))
        return SpeechChunk(start, word, packets, b"", (TextMark(speech.made, end_chars),))

    tone_engine.ToneSpeech._chunk = chunk  # type: ignore[method-assign]

    async def greet(session: AgentSession) -> AsyncIterator[str]:
        yield "la " * int(SECONDS / 0.4 + 20)

    late_ns: list[int] = []
    note_lateness(late_ns)

    def tell() -> None:
        print(json.dumps(late_ns), flush=True)

    def begin() -> None:
        late_ns.clear()
        if os.sched_getscheduler(0) == os.SCHED_FIFO:
            # Under `chrt` the core would be left to other threads until they are done.  A fair scheduler gives it to
            # the one that wakes up.
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(2))

    def ready(server: Any) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, begin)
        loop.add_signal_handler(signal.SIGUSR2, tell)
        print("ready", flush=True)

    server = app.VoiceServer(
        Callbacks(on_enter=greet),
        engine=tone_engine.ToneEngine(),  # type: ignore[arg-type]
        listens=False,
        max_calls=1_000,
        phone=Phone(
            "http://localhost", key=KEY, audio_socket=("127.0.0.1", port + 1), sip=Sip(f"127.0.0.1:{port + 2}")
        ),
        on_ready=ready,
    )
    await app.serve(server, app.listen("127.0.0.1", port))


def note_lateness(late_ns: list[int]) -> None:
    """Keep by how much each piece is late once its socket has it."""
    from breeze_rtc.transport.audio_socket import AudioSocketLine
    from breeze_rtc.transport.far_buffer import FarBuffer
    from breeze_rtc.transport.phone import PhoneLine
    from breeze_rtc.transport.rtp_line import RtpLine

    now = time.monotonic_ns
    run, next_at = PhoneLine.run, FarBuffer.next_at

    def noting(put: Any) -> Any:
        def noting_put(line: Any, slot: Any) -> None:
            put(line, slot)
            late_ns.append(now() - line.sink.clock.leaves_at(slot.index))

        return noting_put

    def noting_next_at(sink: Any, at: int) -> int | None:
        sink.planned_ns = next_at(sink, at)
        return sink.planned_ns

    async def noting_run(line: Any, out: Any) -> None:
        async def noting_out(message: Any) -> None:
            await out(message)
            planned_ns = getattr(line.sink, "planned_ns", None)
            if planned_ns is not None and '"media"' in message[:20]:
                # What an echo let go before its time is not late.
                late_ns.append(max(0, now() - planned_ns))

        await run(line, noting_out)

    for kind in (AudioSocketLine, RtpLine):
        kind._put = noting(kind._put)  # type: ignore[method-assign]
    FarBuffer.next_at = noting_next_at  # type: ignore[method-assign]
    PhoneLine.run = noting_run  # type: ignore[method-assign]


# --- the callers: as light as they can be made


class Caller(asyncio.Protocol):
    """One call.  `arrivals`: (seconds of sound before a piece, when it came)."""

    def __init__(self) -> None:
        self.arrivals: list[tuple[float, float]] = []
        self.dry_s: list[float] = []
        self.has_begun = False
        self.sound_s = 0.0
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.begin()

    def data_received(self, data: bytes) -> None:
        self._rest = self.take(self._rest + data)

    def piece(self, seconds: float) -> None:
        self.arrivals.append((self.sound_s, time.perf_counter()))
        self.sound_s += seconds

    def begin(self) -> None: ...
    def take(self, data: bytes) -> bytes: ...
    def speak(self, number: int) -> None: ...


class AudioSocketCaller(Caller):
    SILENCE = struct.pack(">BH", 0x10, 320) + bytes(320)

    def begin(self) -> None:
        self.transport.write(struct.pack(">BH", 0x01, 16) + bytes(16))
        self.has_begun = True

    def take(self, data: bytes) -> bytes:
        while len(data) >= 3 and len(data) >= (size := 3 + int.from_bytes(data[1:3], "big")):
            if data[0] == 0x10:
                self.piece(0.02)
            data = data[size:]
        return data

    def speak(self, number: int) -> None:
        self.transport.write(self.SILENCE)


class TwilioCaller(Caller):
    SILENCE = base64.b64encode(b"\xff" * 160).decode()

    def begin(self) -> None:
        self.plays_until = 0.0
        lines = (
            f"GET /phone/{KEY}/twilio HTTP/1.1",
            *("Host: localhost", "Upgrade: websocket", "Connection: Upgrade"),
            *("Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==", "", ""),
        )
        self.transport.write("\r\n".join(lines).encode())

    def say(self, payload: bytes, opcode: int = 1) -> None:
        """A client's frame (RFC 6455 section 5.2); a mask of zeros is one."""
        if self.transport.is_closing():
            return  # An echo that comes after the end.
        size = bytes([0x80 | len(payload)]) if len(payload) < 126 else b"\xfe" + len(payload).to_bytes(2, "big")
        self.transport.write(bytes([0x80 | opcode]) + size + bytes(4) + payload)

    def take(self, data: bytes) -> bytes:
        if not self.has_begun:
            head, end, data = data.partition(b"\r\n\r\n")
            if not end:
                return head
            assert b" 101 " in head, head
            media_format = {"encoding": "audio/x-mulaw", "sampleRate": 8000}
            start = {"streamSid": "M", "callSid": "C", "mediaFormat": media_format}
            self.say(json.dumps({"event": "start", "streamSid": "M", "start": start}).encode())
            self.has_begun = True
        while len(data) >= 2:
            size, start = data[1] & 127, 2
            if size == 126:
                size, start = int.from_bytes(data[2:4], "big"), 4
            if len(data) < start + size:
                break
            payload, opcode = data[start : start + size], data[0] & 15
            data = data[start + size :]
            if opcode == 9:
                self.say(payload, opcode=10)
            elif opcode == 1:
                self.hear(json.loads(payload))
        return data

    def hear(self, message: Any) -> None:
        now = time.perf_counter()
        if message["event"] == "media":
            if 0 < self.plays_until < now:
                self.dry_s.append(now - self.plays_until)
            seconds = len(message["media"]["payload"]) * 3 / 4 // 160 * 0.02
            self.piece(seconds)
            self.plays_until = max(self.plays_until, now) + seconds
        elif message["event"] == "mark":
            echo = json.dumps({**message, "streamSid": "M"}).encode()
            asyncio.get_running_loop().call_later(max(0.0, self.plays_until - now), self.say, echo)

    def speak(self, number: int) -> None:
        if self.has_begun:
            media = (
                f'{{"track":"inbound","chunk":"{number + 1}","timestamp":"{20 * number}","payload":"{self.SILENCE}"}}'
            )
            self.say(f'{{"event":"media","streamSid":"M","media":{media}}}'.encode())


class SipCaller(Caller, asyncio.DatagramProtocol):
    """The sound of a call that SIPp places; it is answered where it comes from."""

    def datagram_received(self, data: bytes, address: tuple[str, int]) -> None:
        timestamp = int.from_bytes(data[4:8], "big")
        if not self.has_begun:
            self.has_begun, self.address, self.first = True, address, timestamp
        self.sound_s = (timestamp - self.first) % (1 << 32) / 8_000
        self.piece(0.02)

    def speak(self, number: int) -> None:
        if self.has_begun:
            header = struct.pack("!BBHLL", 0x80, 0, number % 65_536, 160 * number, id(self) & 0xFFFF_FFFF)
            self.transport.sendto(header + 160 * b"\xff", self.address)

    @staticmethod
    async def call(callers: list[Caller], port: int) -> None:
        """Have SIPp place the calls, and end them."""
        import sipp

        loop = asyncio.get_running_loop()
        for caller in callers:
            await loop.create_datagram_endpoint(lambda caller=caller: caller, local_addr=("127.0.0.1", 0))
        ports = [caller.transport.get_extra_info("sockname")[1] for caller in callers]
        with tempfile.TemporaryDirectory() as folder:
            code, said = await sipp.calls(
                Path(folder),
                port,
                len(callers),
                lasts_ms=int(1_000 * SECONDS),
                per_s=max(1, round(len(callers) / ARRIVE_S)),
                rtp_ports=ports,
            )
        assert code == 0, said


async def speaking(callers: list[Caller], starts: list[float], port: int) -> None:
    """All of them speak, 20 ms each 20 ms, from their starts on."""
    loop = asyncio.get_running_loop()
    turns = [(start, number, 0) for number, start in enumerate(starts)]
    heapq.heapify(turns)
    began = loop.time()
    while turns and turns[0][0] < SECONDS:
        at, number, piece = heapq.heappop(turns)
        wait_s = began + at - loop.time()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        caller = callers[number]
        if piece == 0 and not isinstance(caller, SipCaller):
            await loop.create_connection(lambda caller=caller: caller, "127.0.0.1", port)
        caller.speak(piece)
        heapq.heappush(turns, (at + 0.02, number, piece + 1))


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100


async def measure(kind: str, calls: int, port: int) -> dict[str, Any]:
    command = (sys.executable, __file__, "--serve", str(port), "--core", str(CORES[0]))
    server = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, limit=1 << 26)
    assert server.stdout is not None
    while b"ready" not in await server.stdout.readline():
        pass
    await asyncio.sleep(0.5)
    try:
        return await measured(kind, calls, port, server)
    finally:
        if server.returncode is None:
            server.kill()
            await server.wait()


async def measured(kind: str, calls: int, port: int, server: asyncio.subprocess.Process) -> dict[str, Any]:
    assert server.stdout is not None
    chance = random.Random(calls)
    made, offset = {"websocket": (TwilioCaller, 0), "audiosocket": (AudioSocketCaller, 1), "sip": (SipCaller, 2)}[kind]
    callers = [made() for _ in range(calls)]
    starts = [chance.uniform(0, ARRIVE_S) for _ in callers]
    began = time.perf_counter()
    sipp = asyncio.create_task(SipCaller.call(callers, port + 2)) if kind == "sip" else None
    talk = asyncio.create_task(speaking(callers, starts, port + offset))
    await asyncio.sleep(WARM_UP_S)
    for caller in callers:
        caller.dry_s.clear()
    server.send_signal(signal.SIGUSR1)
    used_s, since = cpu_s(server.pid), time.perf_counter()
    await asyncio.sleep(MEASURE_S)
    share = (cpu_s(server.pid) - used_s) / (time.perf_counter() - since)
    server.send_signal(signal.SIGUSR2)
    late_ms = np.array(json.loads(await server.stdout.readline())) / 1e6
    await talk
    if sipp is not None:
        await sipp
    dry_s = [seconds for caller in callers for seconds in caller.dry_s]
    for caller in callers:
        caller.transport.close()
    server.terminate()
    await server.wait()
    uneven_ms: list[float] = []
    for caller in callers:
        # The first pieces fill the carrier's buffer at once; schedules begin after that.
        window = [(sound, came) for sound, came in caller.arrivals if WARM_UP_S <= came - began < WARM_UP_S + MEASURE_S]
        offsets = np.array([came - sound for sound, came in window])
        uneven_ms += list((offsets - offsets.min()) * 1_000) if len(offsets) else [float("inf")]
    pieces = MEASURE_S * calls / (0.1 if kind == "websocket" else 0.02)
    row = {
        "kind": kind,
        "calls": calls,
        "core_percent": round(100 * share, 1),
        "core_percent_per_call": round(100 * share / calls, 2),
        "late_p50_ms": round(float(np.percentile(late_ms, 50)), 2),
        "late_p99_ms": round(float(np.percentile(late_ms, 99)), 2),
        "late_max_ms": round(float(late_ms.max()), 1),
        "sent": round(len(late_ms) / pieces, 3),
        "ran_dry": len(dry_s),
        "dry_s": round(sum(dry_s), 2),
    }
    if kind == "audiosocket":
        row["arrived_p50_ms"] = round(float(np.percentile(uneven_ms, 50)), 2)
        row["arrived_p99_ms"] = round(float(np.percentile(uneven_ms, 99)), 2)
    return row


async def main(options: argparse.Namespace) -> None:
    rows = []
    for number, (kind, calls) in enumerate((kind, calls) for kind in options.kinds for calls in options.calls):
        rows.append(await measure(kind, calls, 18_600 + 3 * number))
        print("  ".join(f"{name}={value}" for name, value in rows[-1].items()), flush=True)
    if options.json:
        values = {"python": platform.python_version(), "arguments": sys.argv[1:], "rows": rows}
        options.json.write_text(json.dumps(values, indent=1) + "\n")
    results = []
    for kind in options.kinds:
        good = [row for row in rows if row["kind"] == kind and row["late_p99_ms"] <= GOOD_MS and not row["ran_dry"]]
        best = max(good, key=lambda row: row["calls"], default={"calls": 0, "core_percent_per_call": float("nan")})
        results += [
            f"{kind}_calls_within_5_ms={best['calls']}",
            f"{kind}_core_percent_per_call={best['core_percent_per_call']}",
        ]
    print("RESULT", *results)


if __name__ == "__main__":
    import uvloop

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one number of calls")
    parser.add_argument("--calls", type=int, nargs="+", default=[10, 50, 75, 100])
    parser.add_argument("--kinds", nargs="+", default=["websocket", "audiosocket", "sip"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--core", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    os.sched_setaffinity(0, {CORES[-1] if given.core is None else given.core})
    if given.quick:
        given.calls = [20]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(given.serve) if given.serve else main(given))
