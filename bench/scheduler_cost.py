"""What the scheduler costs per step at 1, 16 and 64 streams: `next_step`, `step_done`, and what it is told meanwhile.

The scheduler runs in virtual time against the simulated cost table, with listeners that report five times a second;
only its own calls are measured, in processor time, so a busy machine matters little.  The first tenth is warm-up and
left out.  Then, how long 10,000 simulated calls take, simulator and all.

    python bench/scheduler_cost.py [--quick] [--seed N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from breeze_rtc.clock import MS
from breeze_rtc.scheduling import Scheduler
from breeze_rtc.scheduling.chunking import LADDER
from breeze_rtc.scheduling.machines import H100_GRAPH_COSTS, H100_SPECS, warmed_up
from breeze_rtc.scheduling.simulator import SimulatedListener, Utterance, simulate
from breeze_rtc.scheduling.step import Step, StepResult

SAMPLE_RATE, FRAME_SAMPLES = 24_000, 1_920


def watch_ns() -> int:
    """What the stop-watch itself adds to a time."""
    times = []
    for _ in range(10_000):
        began = time.thread_time_ns()
        times.append(time.thread_time_ns() - began)
    return sorted(times)[len(times) // 2]


WATCH_NS = watch_ns()


class Timed(Scheduler):
    """The scheduler, with a stop-watch round every call a driver makes; what comes before a step counts as its own."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.next_us: list[float] = []
        self.done_us: list[float] = []
        self.all_us: list[float] = []
        self._since_ns = 0

    def next_step(self, now: int) -> Step | None:
        began = time.thread_time_ns()
        step = super().next_step(now)
        took = time.thread_time_ns() - began - WATCH_NS
        self._since_ns += took
        if step is not None:
            self.next_us.append(took / 1_000)
        return step

    def step_done(self, step: Step, result: StepResult, now: int) -> None:
        began = time.thread_time_ns()
        super().step_done(step, result, now)
        took = time.thread_time_ns() - began - WATCH_NS
        self.done_us.append(took / 1_000)
        self.all_us.append((self._since_ns + took) / 1_000)
        self._since_ns = 0


def _timed(name: str) -> Callable[..., Any]:
    call = getattr(Scheduler, name)

    @wraps(call)
    def timed(self: Timed, *arguments: Any, **keywords: Any) -> Any:
        began = time.thread_time_ns()
        try:
            return call(self, *arguments, **keywords)
        finally:
            self._since_ns += time.thread_time_ns() - began - WATCH_NS

    return timed


for _name in ("open", "push_text", "end_text", "report", "cancel", "events", "wake_at"):
    setattr(Timed, _name, _timed(_name))


def measure(streams: int, utterances: int, seed: int) -> Timed:
    """The stop-watches after a closed loop at `streams`."""
    source = random.Random(seed)
    scheduler = Timed(**machine(streams))
    run(scheduler, speech(utterances, source), streams, source)
    skip = len(scheduler.done_us) // 10
    for times in (scheduler.next_us, scheduler.done_us, scheduler.all_us):
        del times[:skip]
    return scheduler


def machine(streams: int) -> dict[str, Any]:
    return {
        "specs": H100_SPECS,
        "sample_rate": SAMPLE_RATE,
        "frame_samples": FRAME_SAMPLES,
        "slots": streams,
        "kv_pages": 64 * streams,
        "page_tokens": 16,
        "costs": warmed_up(H100_GRAPH_COSTS, H100_SPECS, LADDER),
    }


def speech(utterances: int, source: random.Random) -> list[Utterance]:
    listener = SimulatedListener(network_ns=30 * MS, buffer_ns=60 * MS, report_every_ns=200 * MS)
    return [
        Utterance(frames=source.randint(20, 90), pieces=((0, source.randint(8, 24)),), listener=listener)
        for _ in range(utterances)
    ]


def run(scheduler: Scheduler, calls: list[Utterance], streams: int, source: random.Random) -> None:
    simulate(
        scheduler,
        calls,
        costs=H100_GRAPH_COSTS,
        sample_rate=SAMPLE_RATE,
        frame_samples=FRAME_SAMPLES,
        concurrency=streams,
        uniform=source.random,
    )


def seconds_for(calls: int, seed: int) -> float:
    """Processor time of so many simulated calls, 16 at a time, simulator and all."""
    source = random.Random(seed)
    began = time.process_time()
    run(Scheduler(**machine(16)), speech(calls, source), 16, source)
    return time.process_time() - began


def quantile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def commit() -> str:
    try:
        return subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the utterances")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    figures: dict[str, str] = {}
    raw: dict[str, dict[str, list[float]]] = {}
    for streams in (1, 16, 64):
        utterances = max(20, 4 * streams) if options.quick else 40 * max(5, streams)
        timed = measure(streams, utterances, options.seed)
        times = {"step": timed.all_us, "next_step": timed.next_us, "step_done": timed.done_us}
        raw[str(streams)] = {f"{name}_us": values for name, values in times.items()}
        mean = sum(timed.all_us) / len(timed.all_us)
        print(f"{streams:3} streams, {len(timed.all_us):6} steps  all inputs of a step: mean {mean:6.1f} us", end="")
        figures[f"step_mean_us_c{streams}"] = f"{mean:.1f}"
        for name, values in times.items():
            p50, p99 = quantile(values, 0.5), quantile(values, 0.99)
            print(f"  {name} p50 {p50:6.1f} us  p99 {p99:6.1f} us", end="")
            figures[f"{name}_p50_us_c{streams}"] = f"{p50:.1f}"
        print()
    calls = 1_000 if options.quick else 10_000
    took = seconds_for(calls, options.seed)
    print(f"{calls} simulated calls, 16 at a time: {took:.1f} s")
    figures["seconds_per_10000_calls"] = f"{took * 10_000 / calls:.1f}"
    if options.json:
        options.json.write_text(
            json.dumps(
                {
                    "machine": f"{platform.machine()} {platform.processor()}".strip(),
                    "python": sys.version,
                    "commit": commit(),
                    "arguments": {"quick": options.quick, "seed": options.seed},
                    "raw": raw,
                }
            )
        )
    print("RESULT", *(f"{key}={value}" for key, value in figures.items()))


if __name__ == "__main__":
    main()
