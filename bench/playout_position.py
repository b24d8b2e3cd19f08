"""How well does a call know where its listener is?

A call speaks to a Python listener over real UDP, with pacing, Opus, SRTP and reports as to a page.  The listener writes
down what really leaves its loudspeaker; thirty times a second the call's position is compared with that, and so is the
guess of a server that hears nothing back (half a round trip and 80 ms).  The way to the listener is bent in five ways.

The listener knows its own loudspeaker exactly, so this shows what protocol, extrapolation and network add.  A browser's
own error comes on top: 3 to 7 ms in the middle, 8 to 14 ms at the 95th percentile, measured at a sound card's monitor.

    python bench/playout_position.py [--quick] [--seed N] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import statistics
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "transport"))
from python_listener import PythonListener, clock

from breeze_rtc.clock import MS
from breeze_rtc.media.opus import SpeechEncoder
from breeze_rtc.transport.playhead import ESTIMATE_NS, LOOK_AHEAD_NS
from breeze_rtc.transport.webrtc import WebRtcCall

SAMPLE_EVERY_S = 0.033


@dataclass(frozen=True)
class Way:
    """What happens to a packet between us and the listener."""

    name: str
    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    loss: float = 0.0
    stall_every_s: float = 0.0
    """Each so often nothing arrives for `stall_ms`, then all of it."""
    stall_ms: float = 300.0
    device_ms: float = 35.0


PATHS = [
    Way("clean"),
    Way("delay", delay_ms=40),
    Way("jitter", delay_ms=40, jitter_ms=40),
    Way("loss", loss=0.02),
    Way("stall", stall_every_s=4),
    Way("bluetooth", device_ms=220),
]


class Bent:
    """Delays and drops what a listener's socket has received, before aiortc sees it; the order stays."""

    def __init__(self, path: Way, chance: random.Random, handle: Callable[[Any, int], Awaitable[None]]) -> None:
        self._path = path
        self._chance = chance
        self._handle = handle
        self._start_s = asyncio.get_running_loop().time()
        self._free_s = 0.0

    async def __call__(self, packet: Any, arrival_time_ms: int) -> None:
        path, loop = self._path, asyncio.get_running_loop()
        if self._chance.random() < path.loss:
            return
        at_s = loop.time() + (path.delay_ms + path.jitter_ms * self._chance.random()) / 1000
        if path.stall_every_s:
            phase_s = (at_s - self._start_s) % path.stall_every_s
            if phase_s < path.stall_ms / 1000 and at_s - self._start_s > path.stall_every_s:
                at_s += path.stall_ms / 1000 - phase_s
        self._free_s = max(self._free_s, at_s)
        loop.call_at(self._free_s, lambda: asyncio.ensure_future(self._handle(packet, arrival_time_ms)))


@dataclass
class Outcome:
    """One path's errors, in ms, position minus truth."""

    path: str
    reported: list[float]
    guessed: list[float]
    bound_held: float
    missed_slots: int
    late_ms: float


async def measure(path: Way, seconds: float, seed: int) -> Outcome:
    """Speak for `seconds` and compare."""
    call, listener = WebRtcCall(), PythonListener(device_ms=path.device_ms)
    await listener.accept(await call.answer(await listener.offer()))
    receiver = listener.peer.getReceivers()[0]
    receiver._handle_rtp_packet = Bent(path, random.Random(seed), receiver._handle_rtp_packet)
    # Reports take the way back, too.
    loop = asyncio.get_running_loop()
    listener.start_reports(lambda report: loop.call_later(path.delay_ms / 1000, call.report, report))
    await listener.played.wait()
    pcm = np.random.default_rng(seed).normal(0, 3_000, round(seconds * 24_000)).astype(np.int16)
    encoder = SpeechEncoder()
    call.sink.write(1, encoder.encode(pcm))
    call.sink.end(1)
    outcome = Outcome(path.name, [], [], 0.0, 0, 0.0)
    held = 0
    while not call.sink.is_sent(1):
        await asyncio.sleep(SAMPLE_EVERY_S)
        now = clock.now()
        position, playhead, slots = call._where(now), call._playhead, call.sink.clock
        # The first two reports are the start, not the state.
        if position is None or playhead is None or slots is None or playhead.accepted < 2:
            continue
        real = listener.ticks_at(now, playhead.origin_rtp)
        assert real is not None
        guess_ns = round(path.delay_ms * MS) + ESTIMATE_NS + LOOK_AHEAD_NS
        outcome.reported.append((position.ticks - real) / 48)
        outcome.guessed.append((slots.ticks_at(now - guess_ns) - real) / 48)
        held += abs(outcome.reported[-1]) <= position.error_ns / MS
        outcome.late_ms = max(outcome.late_ms, call.stats().late_ns / MS)
    outcome.bound_held = held / max(1, len(outcome.reported))
    outcome.missed_slots = call.sink.missed_slots
    await call.close()
    await listener.close()
    return outcome


def percentiles(errors: list[float]) -> tuple[float, float]:
    size = np.abs(errors)
    return float(np.percentile(size, 50)), float(np.percentile(size, 95))


def git_commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="5 s a path instead of 30")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    seconds = 5.0 if args.quick else 30.0
    outcomes = []
    print(f"{'path':10} {'position p50':>13} {'p95':>7} {'guess p50':>11} {'p95':>7} {'within bound':>13}")
    for path in PATHS:
        outcome = await measure(path, seconds, args.seed)
        outcomes.append(outcome)
        reported, guessed = percentiles(outcome.reported), percentiles(outcome.guessed)
        print(
            f"{path.name:10} {reported[0]:10.1f} ms {reported[1]:7.1f} {guessed[0]:8.1f} ms {guessed[1]:7.1f}"
            f" {outcome.bound_held:12.0%}   (late at most {outcome.late_ms:.1f} ms, missed {outcome.missed_slots})"
        )
    if args.json:
        args.json.write_text(
            json.dumps(
                {
                    "machine": platform.processor() or platform.machine(),
                    "python": platform.python_version(),
                    "versions": {name: version(name) for name in ("aiortc", "aioice", "av", "breeze_rtc")},
                    "commit": git_commit(),
                    "arguments": {"quick": args.quick, "seed": args.seed},
                    "outcomes": [asdict(outcome) for outcome in outcomes],
                }
            )
        )
    reported = {outcome.path: percentiles(outcome.reported)[1] for outcome in outcomes}
    guessed = [percentiles(outcome.guessed)[1] for outcome in outcomes]
    print(
        "RESULT "
        + " ".join(f"{name}_p95_ms={p95:.1f}" for name, p95 in reported.items())
        + f" without_reports_median_p95_ms={statistics.median(guessed):.1f}"
    )


if __name__ == "__main__":
    asyncio.run(main())
