"""SIMULATED: what it is worth to know where each listener is, and whom to serve first.

Callers listen to one reply of one to four sentences after another.  They are 10 to 60 ms away with up to 15 ms of
jitter, have jitter buffers of 40 to 200 ms, clocks that are off by about 100 ppm, and report four times a second; one
in ten starts half a second to three seconds late, one in ten pauses (a hidden tab, a phone on hold) for two to ten
seconds, and three in ten interrupt somewhere between 15 and 85 % of the reply.  The machine is an H100 with graphs.

    closed loop        deadlines from the reports
    lead always 1.2 s  the same with as much made ahead on an idle machine as on a full one
    estimate           the same scheduler, reports ignored: first output plus sound sent, the published method
    estimate, no cap   and generated as far ahead as there is time
    other orders       whom others serve first, from the estimate, new streams before all others; with the lead cap or
                       without, whichever serves 64 listeners better

A gap is one at the ear: the simulated player ran dry.  A reply is good if its first packet left us within 100 ms, it
was played without a gap, and it was not refused.  Everybody is let in, so that the end of each curve can be seen.
Then each habit of the listeners alone; what a barge-in throws away by lead cap, with single Seed-TTS sentences; and
how many requests per second, arriving at random, are served without a gap in any of ten seeds.

    python bench/closed_loop.py [--quick] [--seed N] [--seeds N] [--json FILE] [--plot FILE] [--trace FILE]
                                [--texts FILE]
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from simulated import (
    CHARS_PER_S,
    CHARS_PER_TOKEN,
    FRAME_S,
    NEAR,
    SAMPLE_RATE,
    at,
    deliveries,
    gap_requests,
    lengths,
    mean,
    parser,
    poisson,
    pyplot,
    record,
    run,
    speech,
    table_text,
    true_gap_requests,
    write_json,
)

from breeze_rtc.clock import MS, SECOND
from breeze_rtc.scheduling.machines import MACHINES
from breeze_rtc.scheduling.metrics import Ending, wasted_ns, wasted_share
from breeze_rtc.scheduling.policy import FirstSound, Order, Policy
from breeze_rtc.scheduling.simulator import Run, SimulatedListener, Utterance
from breeze_rtc.scheduling.stream import Priority

OPEN_DOOR = Policy(admits_by_load=False)
LOOPS: Mapping[str, Policy] = {
    "closed loop": OPEN_DOOR,
    "lead always 1.2 s": replace(OPEN_DOOR, lead_by_load=False),
    "estimate": replace(OPEN_DOOR, uses_reports=False),
    "estimate, no cap": replace(OPEN_DOOR, uses_reports=False, lead_cap_ns=None),
}
OTHERS = replace(LOOPS["estimate"], first_sound=FirstSound.ALWAYS, lead_by_load=False)
ORDERS = {
    "first come, first served": replace(OTHERS, order=Order.FIRST_COME),
    "fixed priority": replace(OTHERS, order=Order.CLASS),
    "round robin": replace(OTHERS, order=Order.ROUND_ROBIN, lead_cap_ns=None),
    "critical first (VoxServe)": replace(OTHERS, order=Order.CRITICAL),
    "quality of experience (Andes, TokenFlow)": replace(OTHERS, order=Order.QOE),
}
"""Of new streams first or in their turn, with and without the lead cap, what served 64 listeners best."""
GOOD_WITHIN_NS = 100 * MS
HABITS = ("buffers", "late starts", "drift", "pauses", "spikes", "barge-ins")
ALL_HABITS = frozenset(HABITS) - {"spikes"}
"""A spike of the network longer than the sound in hand is a gap whoever schedules; spikes are shown alone."""


def caller(source: random.Random, seconds: float, habits: frozenset[str] = ALL_HABITS) -> SimulatedListener:
    """Somebody who hears a reply of so many seconds."""
    chance = source.random
    # All numbers are drawn whatever the habits, so that the callers stay who they are.
    buffer_ms, late_ms = source.uniform(40, 200), source.uniform(500, 3_000) if chance() < 0.1 else 0.0
    pause = (source.uniform(0.1, 0.9) * seconds, source.uniform(2, 10)) if chance() < 0.1 else None
    spike = (source.uniform(0, 1) * seconds, source.uniform(0.15, 0.4)) if chance() < 0.1 else None
    heard = source.uniform(0.15, 0.85) * seconds if chance() < 0.3 else None
    drift_ppm = round(source.gauss(0, 100))
    return SimulatedListener(
        network_ns=int(source.uniform(10, 60) * MS),
        jitter_ns=int(source.uniform(2, 15) * MS),
        # Without a buffer, jitter alone would break the sound.
        buffer_ns=int(((buffer_ms if "buffers" in habits else 20) + (late_ms if "late starts" in habits else 0)) * MS),
        drift_ppm=drift_ppm if "drift" in habits else 0,
        report_every_ns=250 * MS,
        stalls=((int(spike[0] * SECOND), int(spike[1] * SECOND)),) if spike and "spikes" in habits else (),
        pause=(int(pause[0] * SECOND), int(pause[1] * SECOND)) if pause and "pauses" in habits else None,
        barge_in_samples=int(heard * SAMPLE_RATE) if heard and "barge-ins" in habits else None,
    )


def replies(
    count: int, source: random.Random, chars: Sequence[int], habits: frozenset[str] = ALL_HABITS
) -> list[Utterance]:
    """Replies of one to four sentences; one in three is a stream, the others are calls."""
    sentences = chars or [63]
    result = []
    for _ in range(count):
        length = sum(source.choice(sentences) for _ in range(source.choice((1, 1, 2, 3, 4))))
        frames = max(1, round(length / CHARS_PER_S * math.exp(source.gauss(0, 0.12)) / FRAME_S))
        result.append(
            Utterance(
                frames=frames,
                pieces=((0, max(1, length // CHARS_PER_TOKEN)),),
                priority=source.choice((Priority.LIVE, Priority.LIVE, Priority.STREAM)),
                listener=caller(source, frames * FRAME_S, habits),
            )
        )
    return result


def crowd(
    callers: int,
    policy: Policy,
    chars: Sequence[int],
    seeds: Sequence[int],
    *,
    habits: frozenset[str] = ALL_HABITS,
    at_least: int = 300,
) -> dict[str, Any]:
    """So many callers at once, one reply after another; figures of each seed, without the first round."""
    count = max(at_least, 3 * callers)
    figures: dict[str, Any] = {
        "replies": count,
        "gaps": [],
        "gap_s": [],
        "good": [],
        "first_p50_ms": [],
        "first_p95_ms": [],
    }
    figures |= {"wasted_share": [], "wasted_per_barge_in_s": [], "potential_gaps": []}
    for seed in seeds:
        source = random.Random(seed)
        result = run(
            replies(count + callers, source, chars, habits),
            source,
            policy=policy,
            streams=callers,
            slots=2 * callers,
            until_heard=True,
        )
        got, outcomes = deliveries(result)[callers:], result.outcomes[callers:]
        firsts = [outcome.first_packet_ns / MS for outcome in outcomes if outcome.first_packet_ns is not None]
        figures["gaps"].append(true_gap_requests(got))
        figures["gap_s"].append(round(sum(delivery.gap_ns or 0 for delivery in got) / SECOND, 3))
        figures["good"].append(
            sum(
                outcome.first_packet_ns is not None
                and outcome.first_packet_ns <= GOOD_WITHIN_NS
                and outcome.true_gap_ns == 0
                and outcome.ending in {Ending.COMPLETE, Ending.INTERRUPTED}
                for outcome in outcomes
            )
            / len(outcomes)
        )
        figures["potential_gaps"].append(gap_requests(got))
        figures["first_p50_ms"].append(round(at(firsts, 0.5), 2))
        figures["first_p95_ms"].append(round(at(firsts, 0.95), 2))
        lost = [wasted_ns(delivery) for delivery in got if delivery.ending is Ending.INTERRUPTED]
        figures["wasted_share"].append(wasted_share(got))
        figures["wasted_per_barge_in_s"].append(mean([ns / SECOND for ns in lost if ns is not None]) if lost else None)
    return figures


def line(name: str, figures: Mapping[str, Any]) -> str:
    wasted = [share for share in figures["wasted_share"] if share is not None]
    lost = [seconds for seconds in figures["wasted_per_barge_in_s"] if seconds is not None]
    return (
        f"  {name:42} good {100 * mean(figures['good']):5.1f} %, with a gap at the ear {mean(figures['gaps']):6.1f}"
        f" of {figures['replies']}, first packet p50 {mean(figures['first_p50_ms']):6.1f}"
        f"  p95 {mean(figures['first_p95_ms']):6.1f} ms, never heard {100 * mean(wasted):4.1f} % of all"
        + (f", {mean(lost):.2f} s a barge-in" if lost else "")
    )


def sustained(by_callers: Mapping[int, Mapping[str, Any]]) -> int:
    """The most callers up to which no seed had a gap."""
    most = 0
    for callers, figures in sorted(by_callers.items()):
        if sum(figures["gaps"]):
            break
        most = callers
    return most


# ---- single sentences ------------------------------------------------------------------------------------------------


def interrupter(source: random.Random, seconds: float) -> SimulatedListener:
    heard = source.uniform(0.15, 0.85) * seconds
    is_cut = source.random() < 0.3
    return replace(NEAR, report_every_ns=250 * MS, barge_in_samples=int(heard * SAMPLE_RATE) if is_cut else None)


def waste(
    streams: int, cap_ms: int | None, chars: Sequence[int], seeds: Sequence[int], count: int, *, by_load: bool = False
) -> list[float | None]:
    """Share of all sound made that nobody heard, of each seed: sentences one after another, 30 % interrupted."""
    policy = Policy(lead_cap_ns=None if cap_ms is None else cap_ms * MS, lead_by_load=by_load)
    shares = []
    for seed in seeds:
        source = random.Random(seed)
        result = run(speech(count + streams, source, chars, interrupter), source, policy=policy, streams=streams)
        shares.append(wasted_share(deliveries(result)[streams:]))
    return shares


def load(per_s: float, chars: Sequence[int], seeds: Sequence[int], count: int) -> dict[str, Any]:
    """Requests arriving at random, to clients that play at once and report nothing."""
    figures: dict[str, Any] = {"gap_requests": [], "refused": [], "first_p50_ms": [], "first_p95_ms": []}
    for seed in seeds:
        source = random.Random(seed)
        result: Run = run(poisson(speech(count, source, chars), per_s, source), source)
        heard = [delivery for delivery in deliveries(result) if delivery.chunks]
        firsts = [(delivery.chunks[0][0] - delivery.sent_ns) / MS for delivery in heard]
        figures["gap_requests"].append(gap_requests(heard))
        figures["refused"].append(count - len(heard))
        figures["first_p50_ms"].append(round(at(firsts, 0.5), 2))
        figures["first_p95_ms"].append(round(at(firsts, 0.95), 2))
    return figures


# ---- the figure ------------------------------------------------------------------------------------------------------

COLOURS = {
    "closed loop": "#1b6ca8",
    "estimate": "#e07a1f",
    "round robin": "#7a7a7a",
    "quality of experience (Andes, TokenFlow)": "#8a5aa8",
    "critical first (VoxServe)": "#3f8f5f",
    "fixed priority": "#a0522d",
    "first come, first served": "#c0392b",
}
LABELS = {
    "closed loop": "least slack, real position (ours)",
    "estimate": "least slack, position estimated",
    "quality of experience (Andes, TokenFlow)": "QoE (Andes, TokenFlow)",
}


def plot(
    path: Path, curves: Mapping[str, Mapping[int, Mapping[str, Any]]], loops: Mapping[str, Any], held: Mapping[str, int]
) -> None:
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(15, 5.6), width_ratios=(2.1, 1), layout="constrained")
    for row, (name, colour) in enumerate(COLOURS.items()):
        points = sorted((callers, 100 * mean(figures["good"])) for callers, figures in curves[name].items())
        is_ours = name == "closed loop"
        # Within the lead cap all are critical, so that the two lines at the bottom lie on each other.
        left.plot(
            *zip(*points, strict=True),
            color=colour,
            linewidth=4 if is_ours else 1.8,
            zorder=5 if is_ours else 2,
            linestyle="--" if name == "first come, first served" else "-",
        )
        most = f"no gap up to {held[name]} listeners" if held[name] else "gaps from the start"
        left.text(
            1.02,
            0.98 - 0.14 * row,
            f"{LABELS.get(name, name)}\n{most}",
            transform=left.transAxes,
            color=colour,
            va="top",
            fontweight="bold" if is_ours else "normal",
        )
    left.set_ylim(0, 104)
    left.set_xlim(left=0, right=max(curves["closed loop"]))
    left.set_xlabel("listeners at once on one machine")
    left.set_ylabel("replies that start within 100 ms and have no gap, %")
    left.set_title("Who is served first decides how many can listen", loc="left", fontweight="bold")
    left.grid(axis="y", color="#e8e8e8")

    names = ["estimate, no cap", "estimate", "closed loop"]
    seconds = [mean([s for s in loops[name]["wasted_per_barge_in_s"] if s is not None]) for name in names]
    shown = ["made as far\nahead as it goes", "1.2 s ahead,\nestimated", "as the load asks,\nreal position"]
    bars = right.bar(range(3), seconds, color=["#b8b8b8", COLOURS["estimate"], COLOURS["closed loop"]], width=0.62)
    right.bar_label(bars, [f"{value:.1f} s" for value in seconds], padding=3, fontweight="bold")
    right.set_xticks(range(3), shown, fontsize=9)
    right.set_yticks([])
    right.spines["left"].set_visible(False)
    right.set_title("Speech thrown away\nper interruption", loc="left", fontweight="bold")
    figure.supxlabel(
        "SIMULATED: our scheduler in virtual time, on step times others published for an H100, with made-up listeners",
        fontsize=9,
        color="#555555",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    options_of = parser(__doc__)
    options_of.add_argument("--seeds", type=int, default=2, help="how many")
    options = options_of.parse_args()
    chars = lengths(options.texts)
    is_quick = options.quick
    seeds = range(options.seed, options.seed + (1 if is_quick else options.seeds))
    sizes = (32, 112) if is_quick else (16, 32, 48, 64, 80, 96, 104, 112, 116, 120, 124)
    at_least = 100 if is_quick else 300

    print(f"SIMULATED.  H100 with graphs, step times in ms: {table_text(MACHINES['H100']['graphs'])}")
    print(f"{len(seeds)} seeds; texts: {options.texts.name if chars else 'fitted lengths'}\n")
    curves: dict[str, dict[int, Any]] = {name: {} for name in (*LOOPS, *ORDERS)}
    for callers in sizes:
        print(f"{callers} listeners at once:")
        for name, policy in LOOPS.items():
            if policy.lead_cap_ns is None and callers > 64:
                continue
            curves[name][callers] = crowd(callers, policy, chars, seeds, at_least=at_least)
            print(line(name, curves[name][callers]), flush=True)
        for name, policy in ORDERS.items() if callers == sizes[0] or not is_quick else ():
            # Past the point where an order has failed there is nothing more to see.
            before = list(curves[name].values())[-1:]
            if not (before and mean(before[0]["good"]) < 0.02):
                curves[name][callers] = crowd(callers, policy, chars, seeds[:1], at_least=at_least)
                print(line(name, curves[name][callers]), flush=True)
    held = {name: sustained(by_callers) for name, by_callers in curves.items()}
    print(
        "\nMost listeners with no gap in any seed, of the sizes above:", ", ".join(f"{n} {c}" for n, c in held.items())
    )

    habits: dict[str, dict[str, Any]] = {}
    size = sizes[-1] if is_quick else 112
    print(f"\nOne habit of the listeners at a time, {size} at once:")
    for habit in HABITS[:1] if is_quick else HABITS:
        only = frozenset({habit, "buffers"})
        habits[habit] = {
            name: crowd(size, LOOPS[name], chars, seeds[:1], habits=only, at_least=at_least)
            for name in ("closed loop", "estimate")
        }
        for name, figures in habits[habit].items():
            print(line(f"{habit + ('' if habit == 'buffers' else ' and buffers'):22} {name}", figures), flush=True)

    print("\nNever heard of all sound made, sentences of Seed-TTS, 30 % interrupted:")
    wasted = {}
    for streams in (16,) if is_quick else (16, 40):
        for cap_ms in (None, 1_200) if is_quick else (None, 2_000, 1_200, 800, 400):
            shares = waste(streams, cap_ms, chars, seeds, at_least)
            wasted[f"{streams} streams, cap {cap_ms}"] = shares
            cap = "no cap" if cap_ms is None else f"cap {cap_ms / 1_000} s"
            print(f"  {streams} streams, {cap:9} {100 * mean([share or 0.0 for share in shares]):5.1f} %", flush=True)
        shares = wasted[f"{streams} streams, by load"] = waste(streams, 1_200, chars, seeds, at_least, by_load=True)
        print(f"  {streams} streams, by load   {100 * mean([share or 0.0 for share in shares]):5.1f} %", flush=True)

    print("\nRequests arriving at random:")
    loads = {}
    many = range(options.seed, options.seed + (2 if is_quick else 10))
    for per_s in (14,) if is_quick else (14, 16, 18, 19, 20, 21, 22, 24):
        figures = loads[per_s] = load(per_s, chars, many, at_least)
        print(
            f"  {per_s} per second: first packet p50 {mean(figures['first_p50_ms']):5.1f}"
            f"  p95 {mean(figures['first_p95_ms']):6.1f} ms (worst seed {max(figures['first_p95_ms']):.0f}),"
            f" with a potential gap {figures['gap_requests']} of {at_least}, refused {mean(figures['refused']):.1f}",
            flush=True,
        )
    calm = 0
    for per_s, figures in loads.items():
        if sum(figures["gap_requests"]):
            break
        calm = per_s

    if options.trace:
        source = random.Random(options.seed)
        record(options.trace, replies(132, source, chars), source, streams=32, slots=64, until_heard=True)
    shown = loops_at = {name: curves[name][sizes[0] if is_quick else 64] for name in LOOPS}
    if options.json:
        write_json(
            options.json,
            options,
            step_times_ms=table_text(MACHINES["H100"]["graphs"]),
            listeners=curves,
            most_listeners_without_a_gap=held,
            habits=habits,
            never_heard_share=wasted,
            requests_per_s=loads,
        )
    if options.plot:
        plot(options.plot, curves, shown, held)
    capped, uncapped = (mean([s or 0.0 for s in wasted[f"16 streams, {cap}"]]) for cap in ("by load", "cap None"))
    figures = ["simulated=1"]
    figures += [
        f"{key}_listeners_without_a_gap={held[name]}"
        for key, name in (("closed", "closed loop"), ("estimate", "estimate"))
    ]
    for key, name in (("closed", "closed loop"), ("estimate", "estimate"), ("uncapped", "estimate, no cap")):
        lost = [s for s in loops_at[name]["wasted_per_barge_in_s"] if s is not None]
        figures.append(f"{key}_wasted_per_barge_in_s={mean(lost):.2f}")
    figures.append(f"waste_capped_over_uncapped_c16={capped / uncapped:.2f}")
    figures.append(f"requests_per_s_without_a_gap={calm}")
    figures.append(f"worst_seed_p95_ms_at_14_per_s={max(loads[14]['first_p95_ms']):.1f}")
    print("RESULT", *figures)


if __name__ == "__main__":
    main()
