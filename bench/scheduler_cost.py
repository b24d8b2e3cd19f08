"""What one decision of the scheduler costs: the time of `next_step` and `step_done` at 1, 16 and 64 streams.

The scheduler runs in virtual time against the simulated cost table, with listeners that report five times a second;
only its own calls are measured, in processor time, so a busy machine matters little.  The first tenth is warm-up and
left out.

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
from pathlib import Path
from typing import Any

from breeze_rtc.clock import MS
from breeze_rtc.scheduling import Scheduler
from breeze_rtc.scheduling.chunking import LADDER
from breeze_rtc.scheduling.machines import H100_GRAPH_COSTS, H100_SPECS, warmed_up
from breeze_rtc.scheduling.simulator import SimulatedListener, Utterance, simulate
from breeze_rtc.scheduling.step import Step, StepResult

SAMPLE_RATE, FRAME_SAMPLES = 24_000, 1_920


class Timed(Scheduler):
    """The scheduler, with a stop-watch round the two calls of every step."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.next_us: list[float] = []
        self.done_us: list[float] = []

    def next_step(self, now: int) -> Step | None:
        began = time.thread_time_ns()
        step = super().next_step(now)
        took = time.thread_time_ns() - began
        if step is not None:
            self.next_us.append(took / 1_000)
        return step

    def step_done(self, step: Step, result: StepResult, now: int) -> None:
        began = time.thread_time_ns()
        super().step_done(step, result, now)
        self.done_us.append((time.thread_time_ns() - began) / 1_000)


def measure(streams: int, utterances: int, seed: int) -> tuple[list[float], list[float]]:
    """Times in us of `next_step` (where it gave a step) and of `step_done`, closed loop at `streams`."""
    source = random.Random(seed)
    speech = [
        Utterance(
            frames=source.randint(20, 90),
            pieces=((0, source.randint(8, 24)),),
            listener=SimulatedListener(network_ns=30 * MS, buffer_ns=60 * MS, report_every_ns=200 * MS),
        )
        for _ in range(utterances)
    ]
    scheduler = Timed(
        specs=H100_SPECS,
        sample_rate=SAMPLE_RATE,
        frame_samples=FRAME_SAMPLES,
        slots=streams,
        kv_pages=64 * streams,
        page_tokens=16,
        costs=warmed_up(H100_GRAPH_COSTS, H100_SPECS, LADDER),
    )
    simulate(
        scheduler,
        speech,
        costs=H100_GRAPH_COSTS,
        sample_rate=SAMPLE_RATE,
        frame_samples=FRAME_SAMPLES,
        concurrency=streams,
        uniform=source.random,
    )
    skip = len(scheduler.done_us) // 10
    return scheduler.next_us[skip:], scheduler.done_us[skip:]


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
        next_us, done_us = measure(streams, utterances, options.seed)
        raw[str(streams)] = {"next_step_us": next_us, "step_done_us": done_us}
        print(f"{streams:3} streams, {len(next_us):6} steps  ", end="")
        for name, values in (("next_step", next_us), ("step_done", done_us)):
            p50, p99 = quantile(values, 0.5), quantile(values, 0.99)
            print(f"  {name} p50 {p50:6.1f} us  p99 {p99:6.1f} us", end="")
            figures[f"{name}_p50_us_c{streams}"] = f"{p50:.1f}"
        print()
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
