"""SIMULATED: how many listeners one machine holds, and what one second of speech costs.

Callers are 20 ms away, have 60 ms of buffer, report four times a second and hear one reply of one to four sentences
after another.  Their number goes up until somebody hears a gap or one first packet in twenty leaves us later than
200 ms; the last number before is the knee.  Then half as many again ask at once, and admission says how many it lets
in.

    python bench/capacity.py [--quick] [--seed N] [--seeds N] [--json FILE] [--plot FILE] [--trace FILE]
                             [--texts FILE] [--h100-per-hour X] [--h200-per-hour X] [--costs FILE]
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from closed_loop import replies
from simulated import (
    at,
    deliveries,
    lengths,
    mean,
    parser,
    pyplot,
    record,
    run,
    speech,
    table_text,
    true_gap_requests,
    write_json,
)

from breeze_rtc.clock import MS
from breeze_rtc.scheduling.machines import H100_SPECS, MACHINES, SimulatedCosts, read_costs
from breeze_rtc.scheduling.metrics import Ending
from breeze_rtc.scheduling.policy import Policy
from breeze_rtc.scheduling.simulator import SimulatedListener
from breeze_rtc.scheduling.step import Stage, StageSpec

CALLER = SimulatedListener(network_ns=20 * MS, jitter_ns=5 * MS, buffer_ns=60 * MS, report_every_ns=250 * MS)
P95_MS = 200
STEP = 8
BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
SPECS = {
    **H100_SPECS,
    Stage.BACKBONE: replace(H100_SPECS[Stage.BACKBONE], max_rows=256, buckets=BUCKETS),
    Stage.DEPTH: replace(H100_SPECS[Stage.DEPTH], max_rows=256, buckets=BUCKETS),
}
"""Enough graphs that the batch limit is not what ends the curve."""
FIRST = {"own_loop": 1, "compiled_depth": 1, "graphs": 80, "fused": 240}
"""Where to begin looking, to save time: far below the knee."""


def measure(
    callers: int,
    costs: SimulatedCosts,
    policy: Policy,
    chars: Sequence[int],
    seeds: Sequence[int],
    *,
    specs: Mapping[Stage, StageSpec] = SPECS,
) -> dict[str, Any]:
    """So many callers at once; figures of each seed without the first round."""
    figures: dict[str, Any] = {"gaps": [], "first_p95_ms": [], "refused": [], "audio_s_per_s": [], "busy": []}
    for seed in seeds:
        source = random.Random(seed)
        count = max(100, 3 * callers)
        calls = [replace(call, listener=CALLER) for call in replies(count + callers, source, chars)]
        result = run(
            calls, source, costs=costs, policy=policy, streams=callers, slots=2 * callers, specs=specs, until_heard=True
        )
        got, outcomes = deliveries(result)[callers:], result.outcomes[callers:]
        heard = [delivery for delivery in got if delivery.ending is not Ending.REFUSED]
        firsts = [outcome.first_packet_ns / MS for outcome in outcomes if outcome.first_packet_ns is not None]
        figures["gaps"].append(true_gap_requests(heard))
        figures["first_p95_ms"].append(round(at(firsts, 0.95), 2))
        figures["refused"].append(len(got) - len(heard))
        # The middle of the run, when all are there.
        begin, end = result.end_ns // 4, result.end_ns // 2
        sound_ns = sum(ns for delivery in got for at_ns, ns in delivery.chunks if begin <= at_ns < end)
        figures["audio_s_per_s"].append(round(sound_ns / (end - begin), 2))
        figures["busy"].append(round(sum(result.busy_ns.values()) / result.end_ns, 3))
    return figures


def holds(figures: Mapping[str, Any]) -> bool:
    return not sum(figures["gaps"]) and mean(figures["first_p95_ms"]) <= P95_MS


def cents_per_hour_of_speech(per_hour: float, listeners: int) -> float:
    """A listener hears an hour of speech in an hour."""
    return 100 * per_hour / listeners


def plot(path: Path, curves: Mapping[str, Mapping[int, Mapping[str, Any]]], knees: Mapping[str, int]) -> None:
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    colours = {"H100 graphs": "#2f6db3", "H200 graphs": "#74a9dd", "H100 fused": "#d1495b", "H200 fused": "#ef9aa4"}
    for name, by_callers in curves.items():
        if name not in colours:
            continue
        points = sorted(by_callers.items())
        axes.plot(
            [callers for callers, _ in points],
            [mean(figures["first_p95_ms"]) for _, figures in points],
            color=colours[name],
            linewidth=2,
            label=f"{name}: {knees[name]} listeners",
        )
        knee = by_callers.get(knees[name])
        if knee is not None:
            axes.plot(knees[name], mean(knee["first_p95_ms"]), "o", color=colours[name], markersize=9)
    axes.set_ylim(0, 100)
    axes.set_xlim(left=0)
    axes.set_xlabel("listeners at once")
    axes.set_ylabel("first packet p95, ms")
    axes.set_title("How many one GPU holds: the dot is the last size without a gap", loc="left", fontweight="bold")
    axes.legend(frameon=False, loc="upper center")
    figure.supxlabel(
        "SIMULATED on step times that others published; fused kernels are a target", fontsize=9, color="#555"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    options_of = parser(__doc__)
    options_of.add_argument("--seeds", type=int, default=2, help="how many")
    options_of.add_argument("--h100-per-hour", type=float, default=2.5, help="what an H100 costs; an assumption")
    options_of.add_argument("--h200-per-hour", type=float, default=3.5, help="what an H200 costs; an assumption")
    options_of.add_argument("--costs", type=Path, metavar="FILE", help="step times that gpu.py measured, and no others")
    options = options_of.parse_args()
    chars = lengths(options.texts)
    seeds = range(options.seed, options.seed + (1 if options.quick else options.seeds))
    prices = {"H100": options.h100_per_hour, "H200": options.h200_per_hour}
    ways = (
        [("H100", "graphs")]
        if options.quick
        else [
            ("H100", "own_loop"),
            ("H100", "compiled_depth"),
            ("H100", "graphs"),
            ("H200", "graphs"),
            ("H100", "fused"),
            ("H200", "fused"),
        ]
    )

    machines, specs = MACHINES, SPECS
    if options.costs:
        measured, specs, made_on = read_costs(options.costs)
        machines, ways = {"measured": {"here": measured}}, [("measured", "here")]
        prices["measured"] = options.h100_per_hour
        print(f"Step times of {made_on}, as a formula fitted to what was measured there")
    print(f"SIMULATED.  {len(seeds)} seeds; texts: {options.texts.name if chars else 'fitted lengths'}")
    curves: dict[str, dict[int, Any]] = {}
    knees: dict[str, int] = {}
    admitted: dict[str, Any] = {}
    for machine, way in ways:
        name, costs = f"{machine} {way}", machines[machine][way]
        print(f"\n{name}, step times in ms: {table_text(costs)}")
        open_door = Policy(admits_by_load=False)
        curve = curves[name] = {}
        first = FIRST.get(way, 1)
        callers, step = first, 1 if first == 1 else 3 * STEP if options.quick or way == "fused" else STEP
        knees[name] = 0
        while True:
            figures = curve[callers] = measure(callers, costs, open_door, chars, seeds, specs=specs)
            replies_heard = max(100, 3 * callers)
            print(
                f"  {callers:4} listeners: first packet p95 {mean(figures['first_p95_ms']):6.1f} ms,"
                f" with a gap {figures['gaps']} of {replies_heard}, {mean(figures['audio_s_per_s']):6.1f} s of sound"
                f" a second, busy {100 * mean(figures['busy']):3.0f} %",
                flush=True,
            )
            if not holds(figures):
                break
            knees[name] = callers
            callers += step
        if knees[name]:
            asked = knees[name] * 3 // 2
            figures = admitted[name] = measure(asked, costs, Policy(), chars, seeds[:1], specs=specs)
            cents = cents_per_hour_of_speech(prices[machine], knees[name])
            print(
                f"  holds {knees[name]}; of {asked} at once admission served {mean(figures['audio_s_per_s']):.0f},"
                f" with a gap {figures['gaps'][0]}; at {prices[machine]:.2f} $ an hour"
                f" one hour of speech costs {cents:.1f} cents, one second {cents / 3_600:.5f}"
            )
    calls = 1_000 if options.quick else 10_000
    source = random.Random(options.seed)
    began = time.process_time()
    run(speech(calls, source, chars, lambda _source, _seconds: CALLER), source, streams=16)
    cpu_s = time.process_time() - began
    print(f"\n{calls} calls of one sentence, 16 at once, were simulated in {cpu_s:.1f} s on one core")

    if options.trace:
        source = random.Random(options.seed)
        record(options.trace, speech(100, source, chars, lambda _source, _seconds: CALLER), source, streams=16)
    if options.json:
        write_json(options.json, options, listeners=curves, knees=knees, admission=admitted, cpu_s={calls: cpu_s})
    if options.plot:
        plot(options.plot, curves, knees)
    figures = ["simulated=1"]
    for name, knee in knees.items():
        key = name.lower().replace(" ", "_")
        figures.append(f"{key}_listeners={knee}")
    figures.append(f"cpu_s_of_{calls}_calls={cpu_s:.1f}")
    print("RESULT", *figures)


if __name__ == "__main__":
    main()
