"""How close is the position that a SIP call believes to what leaves the telephone, over paths that lose and delay?

A real telephone (baresip, its own jitter buffer, its sound card read here) calls the server through a relay that
bends RTP and RTCP, both ways.  The agent says words of 0.4 s, each a tone of its own, so that the recording tells when
each word began at the ear:

* position: what was believed at that moment, less the truth (later than the ear is positive), of all words;
* holes: silence of 40 ms and more inside the speech;
* cuts: the caller speaks over the agent; words in the history less words heard, and time from decision to silence.

    python bench/sip_line.py [--quick] [--cuts N] [--seed N] [--json FILE]

Needs baresip and espeak-ng (Debian).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import sys
import tempfile
from bisect import bisect
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent.parent
sys.path[:0] = [str(HERE), *(str(HERE / "tests" / name) for name in ("server", "transport", "agent", "carrier"))]

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
LISTEN_WORDS = 36
MS = 1_000_000


async def main(options: argparse.Namespace) -> None:
    from bent_path import Bend

    bends = [
        Bend(),
        Bend(loss=0.05),
        Bend(jitter_s=0.04),
        Bend(loss=0.05, jitter_s=0.04),
        Bend(delay_s=0.1, jitter_s=0.04, loss=0.05),
    ]
    rows = []
    for bend in bends[:1] + bends[3:4] if options.quick else bends:
        row: dict[str, Any] = {"path": str(bend), **await listened(bend, options.seed)}
        cuts = [await cut(bend, options.seed + number) for number in range(options.cuts)]
        row["cut_words_off"] = [round(words, 2) for words, _ in cuts]
        row["cut_to_silence_ms"] = [round(ms) for _, ms in cuts]
        rows.append(row)
        print("  ".join(f"{name}={value}" for name, value in row.items()), flush=True)
    if options.json:
        values = {"python": platform.python_version(), "arguments": sys.argv[1:], "rows": rows}
        options.json.write_text(json.dumps(values, indent=1) + "\n")
    off = max((abs(words) for row in rows for words in row["cut_words_off"]), default=0)
    print(f"RESULT words_off_at_most={off} position_p95_ms={max(row['position_p95_ms'] for row in rows)}")


async def listened(bend: Any, seed: int) -> dict[str, Any]:
    """One call that listens to the end."""
    from page import until
    from tone_engine import RATE, WORD
    from tone_words import begins, levels

    believed: list[tuple[int, int]] = []

    async def watch(hall: Any, phone: Any, cuts: list[Any]) -> None:
        (call,) = hall.server.sip._calls.values()
        await until(lambda: bool(call.line.sink.streams))
        (stream,) = call.line.sink.streams
        while len(believed) < 50 * LISTEN_WORDS and not call.line.sink.is_heard(stream, call.line._ear_ticks()):
            report = call.line.position(stream)
            believed.append((report.at_ns, report.heard_samples))
            await asyncio.sleep(0.01)
        await asyncio.sleep(1)
        quality.update(path_ms=round(call.line.path_delay_ns / MS), rtcp=call.line.quality)

    quality: dict[str, Any] = {}
    text = " ".join((WORDS * 9)[:LISTEN_WORDS])
    phone, path, _ = await called(bend, seed, text, watch)
    heard = phone.heard()
    times = [at for at, _ in believed]
    off_ms = []
    for number, sample in begins(heard):
        at = phone.at_ns(sample)
        place = bisect(times, at)
        if 0 < place < len(times):
            off_ms.append((believed[place - 1][1] - number * WORD) * 1_000 / RATE)
    is_sound = levels(heard).max(axis=1) > 0.02
    sounding = np.flatnonzero(is_sound)
    silent = np.diff(sounding) - 1
    return {
        "words": len(off_ms),
        "position_p50_ms": round(float(np.median(off_ms))),
        "position_p95_ms": round(float(np.percentile(np.abs(off_ms), 95))),
        "holes": int((silent >= 4).sum()),
        "holes_ms": int(10 * silent[silent >= 4].sum()),
        "lost_percent": round(100 * path.lost / max(1, path.carried), 1),
        "path_believed_ms": quality["path_ms"],
        "rtcp_round_trip_ms": quality["rtcp"].round_trip_ns and round(quality["rtcp"].round_trip_ns / MS, 1),
        "rtcp_jitter_ms": round(quality["rtcp"].jitter_ns / MS, 1),
        "rtcp_lost": quality["rtcp"].lost,
    }


async def cut(bend: Any, seed: int) -> tuple[float, float]:
    """One call in which the caller speaks over the agent: words too many in the history; from decision to silence."""
    from page import until
    from speech import spoken
    from tone_words import sounds, words

    from breeze_rtc.transport.rtp_line import RtpLine

    decided: list[int] = []
    originals: dict[str, Callable[..., Any]] = {"pause": RtpLine.pause}

    def paused(line: RtpLine) -> None:
        decided.append(line._clock.now())
        originals["pause"](line)

    async def interrupt(hall: Any, phone: Any, cuts: list[Any]) -> None:
        await until(lambda: phone.loud_s > 1.2 + 0.13 * (seed % 7))
        phone.say(spoken("stop it please, I want to ask you something", rate=8_000))
        await until(lambda: bool(cuts))
        await asyncio.sleep(1)

    RtpLine.pause = paused  # type: ignore[method-assign]
    try:
        phone, _, cuts = await called(bend, seed, " ".join(WORDS * 2), interrupt)
    finally:
        RtpLine.pause = originals["pause"]  # type: ignore[method-assign]
    heard = phone.heard()
    number, share = words(heard)
    last_ns = phone.at_ns(int(sounds(heard)[-1]) * 80 + 160)
    return len(cuts[0].heard_text.split()) - (number - 1 + share), (last_ns - decided[0]) / MS


async def called(
    bend: Any, seed: int, text: str, during: Callable[[Any, Any, list[Any]], Any]
) -> tuple[Any, Any, list[Any]]:
    from bent_path import BentPath
    from page import serving, until
    from softphone import Softphone
    from tone_engine import ToneEngine

    from breeze_rtc.agent.session import AgentSession, Callbacks, SpeechHandle
    from breeze_rtc.server.phone import Phone
    from breeze_rtc.server.sip import Sip

    async def greet(session: AgentSession) -> AsyncIterator[str]:
        yield text

    async def interrupted(session: AgentSession, speech: SpeechHandle) -> None:
        cuts.append(speech)

    cuts: list[Any] = []
    agent = Callbacks(on_enter=greet, on_interrupted=interrupted)
    options = {"phone": Phone("http://localhost", sip=Sip("127.0.0.1:0")), "engine": ToneEngine(tells_words_apart=True)}
    async with serving(agent, **options) as hall:
        with (
            tempfile.TemporaryDirectory() as folder,
            BentPath(hall.server.sip.port, bend, seed=seed) as path,
            Softphone(Path(folder) / "phone", path.uri) as phone,
        ):
            await until(lambda: phone.loud_s > 0.1)
            await during(hall, phone, cuts)
        await hall.is_free()
    return phone, path, cuts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two paths, one cut each")
    parser.add_argument("--cuts", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.quick:
        given.cuts = 1
    asyncio.run(main(given))
