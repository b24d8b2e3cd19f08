"""In real time: how many listeners does this machine serve without a gap, and which part of the runtime is it due to?

Everything but the network is the real thing: the engine in its own process with the nano voice, its scheduler, and for
each listener the playout queue of a call with a slot each 20 ms, which reports its position as a call does, from a
receiver 80 ms behind.  A listener hears a sentence to its end and asks for the next at once.

First the capacity: seconds of speech made per second when there is always work.  Then each row runs for `--seconds`
with the listeners that need `--load` of it, or with as many as `--listeners` says, all with the model's own voice or in
turn with the `--voices` named.  A gap is a time in which a queue ran dry in mid-speech and the speech went
on later; first sound counts from the request to the first packet's slot.

    python bench/live_streams.py [--quick] [--seconds N] [--load 0.8 | --listeners N] [--voices NAME ...]
                                 [--rows NAME ...] [--trace FOLDER] [--seed N] [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import shutil
import statistics
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory

import uvloop

from breeze_rtc.clock import MS, SECOND, MonotonicClock
from breeze_rtc.errors import Overloaded
from breeze_rtc.playback import PlaybackReport
from breeze_rtc.runtime.engine import Engine
from breeze_rtc.scheduling.policy import Policy
from breeze_rtc.scheduling.stream import Priority
from breeze_rtc.scheduling.trace import replay
from breeze_rtc.transport.playout import SLOT_NS, Playout

SENTENCES = (
    "Good morning, this is the front desk, how can I help you today?",
    "Your table is booked for seven o'clock, and we look forward to seeing you then.",
    "I have found three trains that leave after nine, and the first of them is direct.",
    "No problem at all.",
    "The forecast for tomorrow says rain in the morning, with some sun later in the afternoon.",
    "Could you spell your last name for me, please?",
    "That will be twenty four pounds and fifty pence, including the delivery to your door.",
    "Let me check that for you, it will only take a moment.",
)
PATH_NS = 80 * MS
"""From a slot to the ear: network and jitter buffer of a receiver nearby."""
REPORT_EVERY_NS = 200 * MS
MAX_STREAMS = 96

FIXED = Policy(ladder=(16,), flushes_early=False, predicts=False, admits_by_load=False)
LADDER = Policy(predicts=False, admits_by_load=False)
OPEN_LOOP = Policy(uses_reports=False, admits_by_load=False)
FULL = Policy(admits_by_load=False)
"""Without admission, so that every row carries the same load."""


@dataclass(frozen=True)
class Configuration:
    """One row of the table."""

    title: str
    policy: Policy
    has_graphs: bool = True


ROWS = {
    "eager_fixed": Configuration("eager torch, fixed chunks of 16", FIXED, has_graphs=False),
    "eager_ladder": Configuration("eager torch, growing chunks", LADDER, has_graphs=False),
    "ladder": Configuration("step graphs, growing chunks", LADDER),
    "open_loop": Configuration("step graphs, Predictor, estimated playback", OPEN_LOOP),
    "full": Configuration("step graphs, Predictor, real playback", FULL),
}


@dataclass
class Listener:
    """One call: its queue, and what it got."""

    playout: Playout
    first_ms: list[float] = field(default_factory=list)
    speech_s: float = 0.0
    refused: int = 0


async def converse(engine: Engine, listener: Listener, source: random.Random, until_ns: int, voice: str | None) -> None:
    """Ask for sentence after sentence until the time is up, and hear each to its end."""
    clock = MonotonicClock()
    playout = listener.playout
    await asyncio.sleep(source.uniform(0, 2))
    while clock.now() < until_ns:
        asked_ns = clock.now()
        speech = engine.speak(seed=source.getrandbits(32), voice=voice)
        speech.push(source.choice(SENTENCES))
        speech.end()
        samples = 0
        reader = asyncio.ensure_future(report(engine, listener, speech.stream))
        try:
            async for chunk in speech:
                playout.write(speech.stream, chunk.packets)
                samples += chunk.samples
            playout.end(speech.stream)
            while not playout.is_sent(speech.stream):  # noqa: ASYNC110 - it waits for the time
                await asyncio.sleep(0.02)
        except Overloaded:
            listener.refused += 1
            playout.end(speech.stream)
        finally:
            reader.cancel()
        first_ticks = playout.first_ticks(speech.stream)
        if first_ticks is not None and playout.clock is not None:
            listener.first_ms.append((playout.clock.time_of(first_ticks) - asked_ns) / MS)
            listener.speech_s += samples / engine.sample_rate


async def report(engine: Engine, listener: Listener, stream: int) -> None:
    """Say where the ear is, as a call does."""
    clock = MonotonicClock()
    playout = listener.playout
    with suppress(asyncio.CancelledError):
        while True:
            await asyncio.sleep(REPORT_EVERY_NS / SECOND)
            if playout.clock is None or playout.first_ticks(stream) is None:
                continue
            now = clock.now()
            ear_ticks = playout.clock.ticks_at(now - PATH_NS)
            heard = playout.heard_samples(stream, ear_ticks)
            playout.forget(ear_ticks)
            engine.report(PlaybackReport(stream, heard, now, PATH_NS, dry_at_ns=playout.dry_at(stream, now)))


async def tick(playouts: list[Playout], late_ns: list[int]) -> None:
    """The slot clock of all calls; what leaves goes nowhere."""
    clock = MonotonicClock()
    start = clock.now()
    for playout in playouts:
        playout.start(start)
        playout.open()
    while True:
        await asyncio.sleep(max(0.0, (playouts[0].next_at() - clock.now()) / SECOND))
        now = clock.now()
        if now < playouts[0].next_at():
            continue
        late_ns.append(now - playouts[0].next_at())
        for playout in playouts:
            if now >= playout.next_at():
                playout.next_slot(now)


async def run_row(
    engine: Engine, streams: int, seconds: float, seed: int, voices: list[str | None]
) -> dict[str, float]:
    late_ns: list[int] = []
    async with engine:
        listeners = [Listener(Playout(sample_rate=engine.sample_rate)) for _ in range(streams)]
        ticker = asyncio.ensure_future(tick([one.playout for one in listeners], late_ns))
        until_ns = MonotonicClock().now() + round(seconds * SECOND)
        await asyncio.gather(
            *(
                converse(engine, listener, random.Random(seed * 1000 + index), until_ns, voices[index % len(voices)])
                for index, listener in enumerate(listeners)
            )
        )
        ticker.cancel()
    firsts = sorted(ms for one in listeners for ms in one.first_ms)
    return {
        "listeners": streams,
        "utterances": len(firsts),
        "speech_s": sum(one.speech_s for one in listeners),
        "refused": sum(one.refused for one in listeners),
        "gaps": sum(one.playout.gaps for one in listeners),
        "gap_ms": sum(one.playout.gap_slots for one in listeners) * SLOT_NS // MS,
        "missed_slots": sum(one.playout.missed_slots for one in listeners),
        "first_p50_ms": statistics.median(firsts),
        "first_p95_ms": firsts[max(0, -(-95 * len(firsts) // 100) - 1)],
        "ticker_late_p99_ms": sorted(late_ns)[99 * len(late_ns) // 100] / MS,
    }


async def capacity(model: str, streams: int, seed: int, seconds: float) -> float:
    """Seconds of speech per second with `streams` always in work and nobody listening."""
    made = 0
    async with Engine(model, max_streams=MAX_STREAMS) as engine:

        async def speak(index: int) -> None:
            nonlocal made
            source = random.Random(seed * 1000 + index)
            while True:
                speech = engine.speak(seed=source.getrandbits(32), interactive=False, priority=Priority.BATCH)
                speech.push(source.choice(SENTENCES))
                speech.end()
                async for chunk in speech:
                    made += chunk.samples

        tasks = [asyncio.ensure_future(speak(index)) for index in range(streams)]
        await asyncio.sleep(2)
        made, began = 0, time.perf_counter()
        await asyncio.sleep(seconds)
        took_s, samples = time.perf_counter() - began, made
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return samples / engine.sample_rate / took_s


async def run(options: argparse.Namespace) -> None:
    with TemporaryDirectory() as folder:
        eager = Path(folder) / "nano"
        shutil.copytree(str(files("breeze_rtc") / "voices" / "nano"), eager, ignore=shutil.ignore_patterns("*.onnx.xz"))
        made = await capacity("nano", 32, options.seed, 5 if options.quick else 20)
        streams = options.listeners or max(1, int(options.load * made))
        print(f"capacity {made:.1f} s of speech per second; {streams} listeners in every row")
        rows: dict[str, dict[str, float]] = {}
        for name in options.rows:
            trace = options.trace / f"live_{name}.jsonl" if options.trace else None
            if trace is not None:
                trace.parent.mkdir(parents=True, exist_ok=True)
            model = "nano" if ROWS[name].has_graphs else str(eager)
            engine = Engine(model, max_streams=MAX_STREAMS, policy=ROWS[name].policy, trace=trace)
            row = rows[name] = await run_row(engine, streams, options.seconds, options.seed, options.voices)
            if trace is not None:
                with trace.open() as lines:
                    row["replayed_steps"] = len(replay(lines))
            print(
                f"{ROWS[name].title:45}"
                f"  first sound p50 {row['first_p50_ms']:7.1f} ms, p95 {row['first_p95_ms']:7.1f} ms;"
                f"  {row['gaps']} gaps, {row['gap_ms']} ms, in {row['utterances']} utterances, {row['speech_s']:.0f} s"
                + (f";  {row['replayed_steps']} steps replayed" if "replayed_steps" in row else "")
            )
    if options.json:
        document = {
            "machine": f"{platform.machine()} {platform.processor()}".strip(),
            "cpus": os.cpu_count(),
            "python": sys.version,
            "versions": {name: version(name) for name in ("torch", "onnxruntime", "av", "numpy")},
            "arguments": {
                "quick": options.quick,
                "seconds": options.seconds,
                "load": options.load,
                "listeners": options.listeners,
                "voices": options.voices,
                "seed": options.seed,
            },
            "capacity": made,
            "rows": rows,
            "policies": {name: ROWS[name].policy.state() for name in rows},
        }
        options.json.write_text(json.dumps(document, indent=1))
    if options.plot:
        plot(rows, options.plot)
    figures = [f"capacity={made:.1f}", f"listeners={streams}"]
    for name, row in rows.items():
        figures += [f"{key}_{name}={row[key]:.1f}" for key in ("first_p50_ms", "first_p95_ms")]
        figures.append(f"gaps_{name}={row['gaps']}")
    print("RESULT", *figures)


def plot(rows: dict[str, dict[str, float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(rows)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6), sharey=True)
    places = range(len(names))
    titles = [ROWS[name].title for name in names]
    left.barh(places, [rows[name]["first_p95_ms"] for name in names], color="#c9d7ea", label="p95")
    left.barh(places, [rows[name]["first_p50_ms"] for name in names], color="#3b6fb5", label="p50", height=0.5)
    left.set(xlabel="first sound after the request, ms", xscale="log", yticks=list(places), yticklabels=titles)
    left.invert_yaxis()
    left.legend(frameon=False)
    per_minute = [60 * rows[name]["gaps"] / max(1.0, rows[name]["speech_s"]) for name in names]
    bars = right.barh(places, per_minute, color="#c0504d")
    right.bar_label(bars, [f" {rows[name]['gaps']} gaps" for name in names])
    right.set(xlabel="gaps per minute of speech")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{rows[names[0]]['listeners']} listeners at once, in real time, on this CPU")
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two rows of ten seconds")
    parser.add_argument("--seconds", type=float, default=None, help="of each row; 180, or 10 with --quick")
    parser.add_argument("--load", type=float, default=0.8, help="share of the capacity that the listeners need")
    parser.add_argument("--listeners", type=int, default=None, help="so many, whatever the capacity is")
    parser.add_argument("--voices", nargs="+", default=[None], help="of the listeners, in turn")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=None)
    parser.add_argument("--trace", type=Path, metavar="FOLDER", help="record each row and replay it")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    options = parser.parse_args()
    options.seconds = options.seconds or (10 if options.quick else 180)
    options.rows = options.rows or (["ladder", "full"] if options.quick else list(ROWS))
    uvloop.run(run(options))


if __name__ == "__main__":
    main()
