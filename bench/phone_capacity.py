"""How many telephone calls does one core serve, and how evenly does their sound leave?

One process is the whole server: door, sessions, voice activity, Opus to the line's codec; its voice is made ahead.
Calls come from this process, over a carrier's WebSocket (Twilio's words: mu-law, marks given back when played) or
Asterisk's AudioSocket, each with inbound sound all the time.

Over AudioSocket we are the clock: a piece is late by how long after its schedule it came, the schedule being that of
the call's earliest piece.  Over a WebSocket the carrier holds up to 0.4 s, so what counts there is whether it ran dry.
Both contain the delay of the process that listens.

    python bench/phone_capacity.py [--quick] [--calls N ...] [--kinds websocket audiosocket] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import platform
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), *(str(HERE.parent / "tests" / name) for name in ("server", "transport", "agent"))]

WARM_UP_S, MEASURE_S = 4.0, 12.0
SECONDS = WARM_UP_S + MEASURE_S + 2
KEY = "bench"


async def serve(port: int, audio_socket: int) -> None:
    import tone_engine

    from breeze_rtc.agent.session import AgentSession, Callbacks
    from breeze_rtc.media.opus import SpeechEncoder
    from breeze_rtc.playback import SpeechPacket, TextMark
    from breeze_rtc.runtime.engine import SpeechChunk
    from breeze_rtc.server import app
    from breeze_rtc.server.phone import Phone

    word = tone_engine.WORD
    made = [packet.payload for packet in SpeechEncoder(tone_engine.RATE).encode(tone_engine._SOUNDS[0])]

    def chunk(speech: Any, end_chars: int) -> SpeechChunk:
        start, speech.made, speech._spoken_chars = speech.made, speech.made + word, end_chars
        packets = tuple(SpeechPacket(start + 480 * at, payload) for at, payload in enumerate(made))
        return SpeechChunk(start, word, packets, b"", (TextMark(speech.made, end_chars),))

    tone_engine.ToneSpeech._chunk = chunk  # type: ignore[method-assign]

    async def greet(session: AgentSession) -> AsyncIterator[str]:
        yield "la " * int(SECONDS / 0.4 + 20)

    server = app.VoiceServer(
        Callbacks(on_enter=greet),
        engine=tone_engine.ToneEngine(),  # type: ignore[arg-type]
        listens=False,
        max_calls=1_000,
        phone=Phone("http://localhost", key=KEY, audio_socket=("127.0.0.1", audio_socket)),
        on_ready=lambda server: print("ready", flush=True),
    )
    await app.serve(server, app.listen("127.0.0.1", port))


DRY: list[float] = []
"""Seconds for which a carrier had run dry."""


async def websocket(port: int, arrivals: list[tuple[float, float]]) -> None:
    """One call; arrivals: (seconds of sound before a piece, when it came)."""
    from websockets.asyncio.client import connect

    start = {"streamSid": "M", "callSid": "C", "mediaFormat": {"encoding": "audio/x-mulaw", "sampleRate": 8000}}
    silence = base64.b64encode(b"\xff" * 160).decode()
    async with connect(f"ws://127.0.0.1:{port}/phone/{KEY}/twilio", compression=None) as socket:
        await socket.send(json.dumps({"event": "start", "streamSid": "M", "start": start}))
        plays_until = 0.0

        async def speak() -> None:
            began = time.perf_counter()
            for number in range(int(SECONDS * 50)):
                media = {
                    "track": "inbound",
                    "chunk": str(number + 1),
                    "timestamp": str(20 * number),
                    "payload": silence,
                }
                await socket.send(json.dumps({"event": "media", "streamSid": "M", "media": media}))
                await asyncio.sleep(max(0, began + (number + 1) * 0.02 - time.perf_counter()))

        async def echo(message: str, at: float) -> None:
            await asyncio.sleep(max(0, at - time.perf_counter()))
            with suppress(Exception):
                await socket.send(message)

        speaking = asyncio.create_task(speak())
        echoes = set()
        sound_s = 0.0
        with suppress(TimeoutError):
            async with asyncio.timeout(SECONDS):
                async for raw in socket:
                    message = json.loads(raw)
                    now = time.perf_counter()
                    if message["event"] == "media":
                        arrivals.append((sound_s, now))
                        if 0 < plays_until < now:
                            DRY.append(now - plays_until)
                        piece_s = len(message["media"]["payload"]) * 3 / 4 // 160 * 0.02
                        sound_s += piece_s
                        plays_until = max(plays_until, now) + piece_s
                    elif message["event"] == "mark":
                        echoes.add(asyncio.create_task(echo(json.dumps({**message, "streamSid": "M"}), plays_until)))
        speaking.cancel()


async def audiosocket(port: int, arrivals: list[tuple[float, float]]) -> None:
    from breeze_rtc.transport.audio_socket import Inbox, message

    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(message(0x01, bytes(16)))

    async def speak() -> None:
        began = time.perf_counter()
        for number in range(int(SECONDS * 50)):
            writer.write(message(0x10, bytes(320)))
            await asyncio.sleep(max(0, began + (number + 1) * 0.02 - time.perf_counter()))

    speaking = asyncio.create_task(speak())
    inbox, pieces = Inbox(), 0
    with suppress(TimeoutError):
        async with asyncio.timeout(SECONDS):
            while data := await reader.read(65_536):
                for _ in inbox.feed(data):
                    arrivals.append((pieces * 0.02, time.perf_counter()))
                    pieces += 1
    speaking.cancel()
    writer.close()


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100


async def measure(kind: str, calls: int, port: int) -> dict[str, Any]:
    command = (sys.executable, __file__, "--serve", str(port))
    server = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert server.stdout is not None
    while b"ready" not in await server.stdout.readline():
        pass
    await asyncio.sleep(0.5)
    DRY.clear()
    each: list[list[tuple[float, float]]] = [[] for _ in range(calls)]
    began = time.perf_counter()
    make = websocket if kind == "websocket" else audiosocket

    async def later(at: int) -> None:
        await asyncio.sleep(at * 2.0 / calls)  # Calls do not come all at once.
        await make(port if kind == "websocket" else port + 1, each[at])

    holding = asyncio.gather(*(later(at) for at in range(calls)))
    await asyncio.sleep(WARM_UP_S)
    used_s, since = cpu_s(server.pid), time.perf_counter()
    await asyncio.sleep(MEASURE_S)
    share = (cpu_s(server.pid) - used_s) / (time.perf_counter() - since)
    await holding
    server.terminate()
    await server.wait()
    late_ms: list[float] = []
    for arrivals in each:
        # The first pieces fill the carrier's buffer at once; schedules begin after that.
        offsets = np.array([came - sound for sound, came in arrivals if WARM_UP_S <= came - began < SECONDS - 2])
        late_ms += list((offsets - offsets.min()) * 1_000) if len(offsets) else [float("inf")]
    return {
        "kind": kind,
        "calls": calls,
        "core_percent": round(100 * share, 1),
        "core_percent_per_call": round(100 * share / calls, 2),
        "ran_dry": len(DRY),
        "dry_s": round(sum(DRY), 2),
        "late_p50_ms": round(float(np.percentile(late_ms, 50)), 2),
        "late_p99_ms": round(float(np.percentile(late_ms, 99)), 2),
    }


async def main(options: argparse.Namespace) -> None:
    rows = []
    for number, (kind, calls) in enumerate((kind, calls) for kind in options.kinds for calls in options.calls):
        rows.append(await measure(kind, calls, 18_600 + 2 * number))
        print("  ".join(f"{name}={value}" for name, value in rows[-1].items()), flush=True)
    if options.json:
        values = {"python": platform.python_version(), "arguments": sys.argv[1:], "rows": rows}
        options.json.write_text(json.dumps(values, indent=1) + "\n")
    even = max([row["calls"] for row in rows if row["kind"] == "audiosocket" and row["late_p99_ms"] <= 5], default=0)
    whole = max([row["calls"] for row in rows if row["kind"] == "websocket" and not row["ran_dry"]], default=0)
    print(f"RESULT audiosocket_calls_within_5_ms={even} websocket_calls_never_dry={whole}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one number of calls")
    parser.add_argument("--calls", type=int, nargs="+", default=[10, 50, 100])
    parser.add_argument("--kinds", nargs="+", default=["websocket", "audiosocket"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.quick:
        given.calls = [20]
    asyncio.run(serve(given.serve, given.serve + 1) if given.serve else main(given))
