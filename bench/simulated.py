"""What the simulated benchmarks share: sentences, listeners, runs, and how figures are written down.

Not a benchmark itself.  Everything that comes out of `run` is SIMULATED: the scheduler is the one that serves, the
machine is a table of step times (`breeze_rtc.scheduling.machines`), the listeners are made up.
"""

from __future__ import annotations

import json
import math
import platform
import random
import subprocess
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from breeze_rtc.clock import MS, SECOND
from breeze_rtc.scheduling import Scheduler, TraceWriter, replay
from breeze_rtc.scheduling.chunking import LADDER
from breeze_rtc.scheduling.machines import H100_SPECS, MACHINES, SimulatedCosts, warmed_up
from breeze_rtc.scheduling.metrics import Delivery, Ending, has_potential_gap, quantile, required_prebuffer_ns
from breeze_rtc.scheduling.policy import Policy
from breeze_rtc.scheduling.simulator import LazyCapture, Run, SimulatedListener, Utterance, simulate
from breeze_rtc.scheduling.step import Stage, StageSpec

SAMPLE_RATE, FRAME_SAMPLES = 24_000, 1_920
FRAME_S = FRAME_SAMPLES / SAMPLE_RATE
CHARS_PER_S, CHARS_PER_TOKEN = 14.5, 4

NEAR = SimulatedListener(network_ns=6 * MS, jitter_ns=2 * MS)
"""A client of a load test: 6 to 8 ms away, plays what comes as it comes, says nothing."""


def parser(description: str | None, **defaults: Any) -> ArgumentParser:
    """The options that all of these scripts have."""
    result = ArgumentParser(description=description, formatter_class=RawDescriptionHelpFormatter)
    result.add_argument("--quick", action="store_true", help="within 45 s: fewer requests and seeds")
    result.add_argument("--seed", type=int, default=1, help="the first seed; the others follow it")
    result.add_argument("--json", type=Path, metavar="FILE")
    result.add_argument("--plot", type=Path, metavar="FILE", help="a PNG; needs the extra [bench]")
    result.add_argument("--trace", type=Path, metavar="FILE", help="write down one of the runs, and replay it")
    result.add_argument(
        "--texts", type=Path, metavar="FILE", help="Seed-TTS test-en as JSON lines; else lengths fitted to it"
    )
    result.set_defaults(**defaults)
    return result


# ---- what is spoken --------------------------------------------------------------------------------------------------


def lengths(texts: Path | None) -> list[int]:
    """Characters of each sentence of Seed-TTS test-en; empty without the file."""
    if texts is None:
        return []
    return [len(" ".join(json.loads(line)["turns"])) for line in texts.read_text().splitlines() if line.strip()]


def speech(
    count: int,
    source: random.Random,
    chars: Sequence[int],
    listener: Callable[[random.Random, float], SimulatedListener] = lambda _source, _seconds: NEAR,
    **options: Any,
) -> list[Utterance]:
    """`count` sentences, in an order that `source` shuffles; without texts, of lengths fitted to theirs.

    listener(source, seconds) makes the one who hears so much speech.  options: more fields of `Utterance`.
    """
    order = [source.choice(chars) if chars else min(160, max(12, round(source.gauss(63.5, 17)))) for _ in range(count)]
    result = []
    for length in order:
        # The speed of speech varies from sentence to sentence.
        seconds = length / CHARS_PER_S * math.exp(source.gauss(0, 0.12))
        result.append(
            Utterance(
                frames=max(1, round(seconds / FRAME_S)),
                pieces=((0, max(1, length // CHARS_PER_TOKEN)),),
                listener=listener(source, seconds),
                **options,
            )
        )
    return result


def poisson(utterances: Iterable[Utterance], per_s: float, source: random.Random) -> list[Utterance]:
    """The same utterances, arriving at random at a mean rate."""
    at_s, result = 0.0, []
    for utterance in utterances:
        at_s += source.expovariate(per_s)
        result.append(replace(utterance, arrival_ns=1 + int(at_s * SECOND)))
    return result


# ---- a run -----------------------------------------------------------------------------------------------------------


def run(
    utterances: Sequence[Utterance],
    source: random.Random,
    *,
    costs: SimulatedCosts = MACHINES["H100"]["graphs"],
    policy: Policy | None = None,
    streams: int | None = None,
    slots: int | None = None,
    until_heard: bool = False,
    specs: Mapping[Stage, StageSpec] = H100_SPECS,
    captures: LazyCapture | None = None,
    trace: TraceWriter | None = None,
) -> Run:
    """One simulation; streams: a closed loop of so many, None: as the utterances arrive."""
    policy = policy or Policy()
    slots = slots or streams or 256
    scheduler = Scheduler(
        specs=specs,
        sample_rate=SAMPLE_RATE,
        frame_samples=FRAME_SAMPLES,
        slots=slots,
        kv_pages=64 * slots,
        page_tokens=16,
        costs=warmed_up(costs, specs, sorted({*LADDER, *policy.ladder})),
        policy=policy,
        trace=trace,
    )
    return simulate(
        scheduler,
        utterances,
        costs=costs,
        sample_rate=SAMPLE_RATE,
        frame_samples=FRAME_SAMPLES,
        concurrency=streams,
        until_heard=until_heard,
        uniform=source.random,
        captures=captures,
    )


def record(path: Path, utterances: Sequence[Utterance], source: random.Random, **options: Any) -> None:
    """Write the trace of a run, and have a scheduler take the same steps from it; raises ValueError if it does not."""
    with path.open("w") as file:
        result = run(utterances, source, trace=TraceWriter(file.write), **options)
    with path.open() as file:
        steps = len(replay(file))
    assert steps == sum(result.steps.values()), "a replay has as many steps"
    print(f"\n{path}: {steps} steps, the same when replayed")


def deliveries(result: Run) -> list[Delivery]:
    return [outcome.delivery(SAMPLE_RATE, FRAME_SAMPLES) for outcome in result.outcomes]


def gap_requests(all_of: Iterable[Delivery], epsilon_ns: int = 0) -> int:
    """Requests with a potential gap, and those that failed or were refused."""
    return sum(
        bool(has_potential_gap(delivery, epsilon_ns)) or delivery.ending not in {Ending.COMPLETE, Ending.INTERRUPTED}
        for delivery in all_of
    )


def true_gap_requests(all_of: Iterable[Delivery]) -> int:
    """Requests whose player ran dry; those of which no player said anything count too."""
    return sum(delivery.gap_ns is None or delivery.gap_ns > 0 for delivery in all_of)


def prebuffers_ms(all_of: Iterable[Delivery]) -> list[float]:
    needed = [required_prebuffer_ns(delivery) for delivery in all_of]
    return [ns / MS for ns in needed if ns is not None]


def at(values: Sequence[float], q: float) -> float:
    """The quantile; not a number where nothing was measured."""
    found = quantile(values, q)
    return math.nan if found is None else found


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


# ---- writing down ----------------------------------------------------------------------------------------------------


def table_text(costs: SimulatedCosts) -> str:
    """The table that a run was made with, in ms."""
    parts = []
    for stage, cost in costs.items():
        terms = [f"{cost.base_ns / MS:.3g}"]
        if cost.row_ns:
            terms.append(f"{cost.row_ns / MS:.3g} b")
        if cost.unit_ns:
            terms.append(f"{cost.unit_ns / MS:.3g} " + ("tokens" if stage <= Stage.PREFILL else "b n"))
        parts.append(f"{stage.name.lower()} {' + '.join(terms)}")
    return "; ".join(parts)


def write_json(path: Path, options: Namespace, **values: Any) -> None:
    """The conventions' header, and the values; made of few enough numbers to be committed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = options.texts.name if options.texts else "fitted lengths"
    head = {
        "simulated": True,
        "machine": f"{platform.machine()} {platform.processor()}".strip(),
        "python": sys.version,
        "commit": COMMIT,
        "arguments": {key: value.name if isinstance(value, Path) else value for key, value in vars(options).items()}
        | {"texts": texts},
    }
    path.write_text(json.dumps(head | values, indent=1) + "\n")


def pyplot() -> Any:
    """matplotlib, drawing into files."""
    try:
        import matplotlib as mpl
    except ImportError:
        sys.exit("--plot needs matplotlib: pip install 'breeze_rtc[bench]'")
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {
            "figure.dpi": 120,
            "font.size": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.axisbelow": True,
        }
    )
    return plt


def _commit() -> str:
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


COMMIT = _commit()
"""Asked before the run: the tree may move on meanwhile."""
