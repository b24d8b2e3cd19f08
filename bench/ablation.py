"""SIMULATED: what each improvement, and each rule of the scheduler, is worth; the published ablation in shape.

First the published ladder, closed loop at 16 streams, 300 requests a run: fixed chunks of 16 frames, new streams
first, progressive chunks, the depth decoder compiled, graphs everywhere, the Predictor; and what this product adds,
the lead cap.  Then the product at 16 and 48 streams with guards of 0 to 20 ms between a predicted end and a deadline;
and with one of its eight rules switched off at a time: at 16 and at 48 streams in a closed loop, at 14 and 20
requests per second at random, and with 16 arriving at once while 24 are spoken to.

The scheduler is the one that serves; the machine is a table of step times, printed with the figures, fitted to what
others published of one H100.  Several tables would reach the published numbers, so this shows that their shape can be
reached, not how.  Clients are 6 to 8 ms away each way, play at once and report nothing, as those of a load test; the
first packet is counted at the client, from sending the request.  The first round of a closed loop is warm-up.

    python bench/ablation.py [--quick] [--seed N] [--seeds N] [--json FILE] [--plot FILE] [--trace FILE]
                             [--texts FILE]
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from simulated import (
    at,
    deliveries,
    gap_requests,
    lengths,
    mean,
    parser,
    poisson,
    prebuffers_ms,
    pyplot,
    record,
    run,
    speech,
    table_text,
    write_json,
)

from breeze_rtc.clock import MS, SECOND
from breeze_rtc.scheduling.machines import MACHINES, SimulatedCosts
from breeze_rtc.scheduling.metrics import first_packet_ns
from breeze_rtc.scheduling.policy import FirstSound, Order, Policy
from breeze_rtc.scheduling.simulator import LazyCapture, Utterance

H100 = MACHINES["H100"]

BEFORE = Policy(
    order=Order.ROUND_ROBIN,
    first_sound=FirstSound.ALWAYS,
    lead_cap_ns=None,
    chunk_by_slack=False,
    flushes_early=False,
    waits_for_rows=False,
    rescues=False,
    admits_by_load=False,
    uses_reports=False,
    predicts=False,
)
"""The published runtime before its Predictor: stages batched, new requests first, nobody's slack known."""
PUBLISHED = Policy(lead_cap_ns=None, uses_reports=False)
"""With it: the same rules as ours, from the estimate, and generated as far ahead as there is time."""


@dataclass(frozen=True)
class Rung:
    """One step of the published ladder."""

    name: str
    costs: SimulatedCosts
    policy: Policy
    published_ms: str = ""
    published_gaps: str = ""
    captures: LazyCapture | None = None


RUNGS = (
    Rung(
        "fixed chunks of 16, in turn",
        H100["own_loop"],
        replace(BEFORE, ladder=(16,), first_sound=FirstSound.IN_ORDER),
        "1626",
    ),
    Rung("new streams first", H100["own_loop"], replace(BEFORE, ladder=(16,))),
    Rung("progressive chunks", H100["own_loop"], BEFORE, "136"),
    Rung("compiled depth", H100["compiled_depth"], BEFORE, "85"),
    Rung("graphs", H100["graphs"], BEFORE, "38", "14"),
    Rung("  and 1 capture in 1,000", H100["graphs"], BEFORE, "", "14", LazyCapture(1_000)),
    Rung("Predictor", H100["graphs"], PUBLISHED, "38 / 52", "0"),
    Rung("lead cap: the product", H100["graphs"], Policy(uses_reports=False)),
)

KEYS = ("fixed", "new_first", "progressive", "compiled", "graphs", "captures", "predictor", "product")

PRODUCT = Policy()
RULES: Mapping[str, Policy] = {
    "the product": PRODUCT,
    "1 first sound: always first": replace(PRODUCT, first_sound=FirstSound.ALWAYS),
    "1 first sound: in its turn": replace(PRODUCT, first_sound=FirstSound.IN_ORDER),
    "2 deferral without a bound": replace(PRODUCT, deferral_is_bounded=False),
    "3 no lead cap": replace(PRODUCT, lead_cap_ns=None),
    "3 the same lead at any load": replace(PRODUCT, lead_by_load=False),
    "4 chunks by the ladder alone": replace(PRODUCT, chunk_by_slack=False),
    "4 no early flush": replace(PRODUCT, flushes_early=False),
    "5 one prompt at a time": replace(PRODUCT, prefills_together=False),
    "6 no waiting for rows": replace(PRODUCT, waits_for_rows=False),
    "6 no small steps in danger": replace(PRODUCT, rescues=False),
    "7 everybody is let in": replace(PRODUCT, admits_by_load=False),
    "8 captures while serving": PRODUCT,
    "least slack: round robin": replace(PRODUCT, order=Order.ROUND_ROBIN),
    "no Predictor at all": replace(PRODUCT, predicts=False),
}
CAPTURES = {"8 captures while serving": LazyCapture(1_000)}


@dataclass(frozen=True)
class Scene:
    """A load."""

    name: str
    streams: int | None = None
    per_s: float = 0.0
    burst: int = 0

    def utterances(self, count: int, source: random.Random, chars: Sequence[int]) -> list[Utterance]:
        if self.burst:
            # Those who are being spoken to came one by one in the last four seconds.
            calls = speech(count, source, chars)
            speaking = count - self.burst
            return [
                replace(call, arrival_ns=1 + int(source.random() * 4 * SECOND))
                if number < speaking
                else replace(call, arrival_ns=5 * SECOND)
                for number, call in enumerate(calls)
            ]
        if self.streams is None:
            return poisson(speech(count, source, chars), self.per_s, source)
        return speech(count + self.streams, source, chars)


SCENES = (
    Scene("16 streams", streams=16),
    Scene("48 streams", streams=48),
    Scene("14 requests/s", per_s=14),
    Scene("20 requests/s", per_s=20),
    Scene("16 at once", burst=16),
)


def measure(
    scene: Scene,
    policy: Policy,
    chars: Sequence[int],
    *,
    costs: SimulatedCosts = H100["graphs"],
    captures: LazyCapture | None = None,
    seeds: Sequence[int],
    count: int,
) -> dict[str, Any]:
    """Figures of each seed."""
    if scene.burst:
        count = 40
    figures: dict[str, Any] = {"first_p50_ms": [], "first_p95_ms": [], "gap_requests": [], "prebuffer_ms": []}
    figures |= {"refused": [], "requests": count}
    for seed in seeds:
        source = random.Random(seed)
        result = run(
            scene.utterances(count, source, chars),
            source,
            costs=costs,
            policy=policy,
            streams=scene.streams,
            captures=captures,
        )
        got = deliveries(result)[-count:]
        firsts = [ns / MS for delivery in got if (ns := first_packet_ns(delivery)) is not None]
        timed = firsts[-scene.burst :] if scene.burst else firsts
        figures["first_p50_ms"].append(round(at(timed, 0.5), 2))
        figures["first_p95_ms"].append(round(at(timed, 0.95), 2))
        heard = [delivery for delivery in got if delivery.chunks]
        figures["gap_requests"].append(gap_requests(heard))
        figures["prebuffer_ms"].append(round(max(prebuffers_ms(heard), default=0.0), 2))
        figures["refused"].append(len(got) - len(heard))
    return figures


def line(name: str, figures: Mapping[str, Any], published: str = "") -> str:
    gaps, requests = figures["gap_requests"], figures["requests"]
    refused = f", refused {mean(figures['refused']):.1f}" if sum(figures["refused"]) else ""
    return (
        f"  {name:28} first packet p50 {mean(figures['first_p50_ms']):7.1f}  p95 {mean(figures['first_p95_ms']):7.1f}"
        f" ms, potential gaps {mean(gaps):6.1f} of {requests}, needed prebuffer {max(figures['prebuffer_ms']):5.0f} ms"
        f"{refused}{published}"
    )


def plot(path: Path, ladder: Mapping[str, Any], rules: Mapping[str, Mapping[str, Any]]) -> None:
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(15, 6.2), width_ratios=(1, 1.5), layout="constrained")
    figure.suptitle(
        "SIMULATED on a table of H100 step times that others published; the scheduler is the one that serves"
    )

    names = [rung.name.strip() for rung in RUNGS]
    rows = range(len(names))
    p50 = [mean(ladder[rung.name]["first_p50_ms"]) for rung in RUNGS]
    p95 = [mean(ladder[rung.name]["first_p95_ms"]) for rung in RUNGS]
    left.barh(rows, p95, color="#c9d7e8", height=0.62, label="p95")
    left.barh(rows, p50, color="#2f6db3", height=0.62, label="p50")
    claims = [(row, float(rung.published_ms.split()[0])) for row, rung in enumerate(RUNGS) if rung.published_ms]
    left.scatter(
        [ms for _, ms in claims],
        [row for row, _ in claims],
        marker="D",
        color="#d1495b",
        zorder=3,
        label="published p50",
    )
    for row, rung in enumerate(RUNGS):
        gaps = mean(ladder[rung.name]["gap_requests"])
        said = f"  (published {rung.published_gaps})" if rung.published_gaps else ""
        published_ms = float((rung.published_ms or "0").split()[0])
        left.text(
            max(p95[row], 1.1 * published_ms, 45) * 1.15,
            row,
            f"{p50[row]:.0f} ms · {gaps:.0f} gaps{said}",
            va="center",
            fontsize=9,
        )
    left.set_yticks(rows, names)
    left.invert_yaxis()
    left.set_xscale("log")
    left.set_xlim(10, 20_000)
    left.set_xlabel("first packet, ms")
    left.set_title("16 streams, 300 requests: each row adds one thing", loc="left", fontsize=11)
    left.legend(loc="lower right", frameon=False)

    scenes = [scene.name for scene in SCENES]
    right.set_xlim(-0.5, len(scenes) - 0.5)
    right.set_ylim(len(rules) - 0.5, -0.5)
    for row, by_scene in enumerate(rules.values()):
        for column, scene in enumerate(scenes):
            figures = by_scene.get(scene)
            if figures is None:
                continue
            base = rules["the product"][scene]
            gaps = mean(figures["gap_requests"]) * 300 / figures["requests"]
            lost = gaps + mean(figures["refused"])
            slow = mean(figures["first_p95_ms"]) / mean(base["first_p95_ms"])
            base_lost = mean(base["gap_requests"]) * 300 / base["requests"] + mean(base["refused"])
            worse = lost > base_lost + 1
            colour = "#f2b5b5" if worse else "#f8e3b0" if slow > 1.15 else "#dcefdc"
            right.add_patch(plt.Rectangle((column - 0.48, row - 0.45), 0.96, 0.9, color=colour, linewidth=0))
            gone = f" · {mean(figures['refused']):.0f} refused" if sum(figures["refused"]) else ""
            text = f"{mean(figures['first_p95_ms']):.0f} ms · {gaps:.1f}{gone}"
            right.text(column, row, text, ha="center", va="center", fontsize=9)
    right.set_xticks(range(len(scenes)), scenes)
    right.xaxis.tick_top()
    right.set_yticks(range(len(rules)), list(rules))
    right.tick_params(length=0)
    for spine in right.spines.values():
        spine.set_visible(False)
    right.set_xlabel("first packet p95 · requests with a potential gap, of 300.  Red: gaps; yellow: slower by 15 %")
    right.set_title("One rule switched off at a time", loc="left", fontsize=11, pad=24)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    options_of = parser(__doc__)
    options_of.add_argument("--seeds", type=int, default=5, help="how many")
    options = options_of.parse_args()
    chars = lengths(options.texts)
    seeds = range(options.seed, options.seed + (1 if options.quick else options.seeds))
    count = 100 if options.quick else 300
    loop = SCENES[0]

    print(
        f"SIMULATED.  {len(seeds)} seeds of {count} requests; texts:",
        options.texts.name if chars else "fitted lengths",
    )
    print("Step times in ms (b rows, n frames), host included:")
    for name in ("own_loop", "compiled_depth", "graphs"):
        print(f"  H100 {name:15} {table_text(H100[name])}")
    print("\nThe published ladder, closed loop of 16 streams:")
    ladder = {}
    for rung in RUNGS:
        ladder[rung.name] = measure(
            loop, rung.policy, chars, costs=rung.costs, captures=rung.captures, seeds=seeds, count=count
        )
        said = [f"{rung.published_ms} ms"] if rung.published_ms else []
        said += [f"{rung.published_gaps} gaps"] if rung.published_gaps else []
        print(line(rung.name, ladder[rung.name], "   published: " + ", ".join(said) if said else ""), flush=True)
    guards: dict[str, dict[int, Any]] = {}
    for scene in SCENES[:1] if options.quick else SCENES[:2]:
        print(f"\n{scene.name}, the product with other guards:")
        guards[scene.name] = {}
        for guard_ms in (0, 20) if options.quick else (0, 4, 8, 12, 20):
            policy = replace(PRODUCT, guard_ns=guard_ms * MS)
            guards[scene.name][guard_ms] = measure(scene, policy, chars, seeds=seeds, count=count)
            print(line(f"guard {guard_ms} ms", guards[scene.name][guard_ms]), flush=True)
    rules: dict[str, dict[str, Any]] = {rule: {} for rule in RULES}
    scenes = SCENES[1:3] if options.quick else SCENES
    for scene in scenes:
        print(f"\n{scene.name}, one rule switched off, {len(seeds[:2])} seeds:")
        for rule, policy in RULES.items():
            rules[rule][scene.name] = measure(
                scene, policy, chars, captures=CAPTURES.get(rule), seeds=seeds[:2], count=count
            )
            print(line(rule, rules[rule][scene.name]), flush=True)

    if options.trace:
        source = random.Random(options.seed)
        record(options.trace, loop.utterances(count, source, chars), source, streams=loop.streams)
    if options.json:
        tables = {name: table_text(H100[name]) for name in ("own_loop", "compiled_depth", "graphs")}
        write_json(options.json, options, step_times_ms=tables, ladder=ladder, guards=guards, rules=rules)
    if options.plot:
        plot(options.plot, ladder, rules)
    figures = ["simulated=1"]
    for key, name in zip(KEYS, ladder, strict=True):
        figures.append(f"{key}_p50_ms={mean(ladder[name]['first_p50_ms']):.1f}")
        figures.append(f"{key}_gaps={mean(ladder[name]['gap_requests']):.1f}")
    figures.append(f"product_p95_ms={mean(ladder[RUNGS[-1].name]['first_p95_ms']):.1f}")
    for scene, by_guard in guards.items():
        gaps = sum(sum(measured["gap_requests"]) for measured in by_guard.values())
        figures.append(f"gaps_at_all_guards_c{scene.split()[0]}={gaps}")
    print("RESULT", *figures)


if __name__ == "__main__":
    main()
