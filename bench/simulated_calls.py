"""SIMULATED: first packets and gaps of the real scheduler, in virtual time, on a table of step times of one H100.

The scheduler is the one that serves; the machine is `H100_GRAPH_COSTS`, a table scaled from times that others have
published, and listeners are simulated.  So this shows what the decisions are worth, not how fast a machine is.
Closed loop: the next utterance starts when one has been made in full.  Text lengths follow the Seed-TTS test-en
sentences (63.5 +- 17 characters). A first packet is counted from the arrival of the text to the first chunk out of
the codec, without network.

    python bench/simulated_calls.py [--quick] [--seed N] [--streams N ...] [--uncapped] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from dataclasses import asdict
from pathlib import Path

from breeze_rtc.clock import MS
from breeze_rtc.scheduling import Scheduler
from breeze_rtc.scheduling.chunking import LADDER
from breeze_rtc.scheduling.simulator import (
    H100_GRAPH_COSTS,
    H100_SPECS,
    Outcome,
    SimulatedListener,
    Utterance,
    simulate,
    warmed_up,
)

SAMPLE_RATE, FRAME_SAMPLES, FRAME_S = 24_000, 1_920, 0.08
CHARS_PER_S, CHARS_PER_TOKEN = 14.5, 4


def utterances(count: int, source: random.Random, *, is_capped: bool) -> list[Utterance]:
    """Sentences with listeners 30 ms away, 80 ms of buffer, who report five times a second."""
    listener = SimulatedListener(network_ns=30 * MS, buffer_ns=80 * MS, report_every_ns=200 * MS)
    result = []
    for _ in range(count):
        chars = min(160, max(12, round(source.gauss(63.5, 17))))
        seconds = chars / CHARS_PER_S * math.exp(source.gauss(0, 0.12))
        result.append(
            Utterance(
                frames=max(1, round(seconds / FRAME_S)),
                pieces=((0, chars // CHARS_PER_TOKEN),),
                interactive=is_capped,
                listener=listener,
            )
        )
    return result


def run(streams: int, count: int, seed: int, *, is_capped: bool) -> list[Outcome]:
    source = random.Random(seed)
    scheduler = Scheduler(
        specs=H100_SPECS,
        sample_rate=SAMPLE_RATE,
        frame_samples=FRAME_SAMPLES,
        slots=streams,
        kv_pages=64 * streams,
        page_tokens=16,
        costs=warmed_up(H100_GRAPH_COSTS, H100_SPECS, LADDER),
    )
    return simulate(
        scheduler,
        utterances(count, source, is_capped=is_capped),
        costs=H100_GRAPH_COSTS,
        sample_rate=SAMPLE_RATE,
        frame_samples=FRAME_SAMPLES,
        concurrency=streams,
        uniform=source.random,
    )


def quantile_ms(outcomes: list[Outcome], q: float) -> float:
    times = sorted(outcome.first_packet_ns for outcome in outcomes if outcome.first_packet_ns is not None)
    return times[min(len(times) - 1, int(q * len(times)))] / MS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="100 utterances at 16 streams only")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16, 32, 48])
    parser.add_argument("--uncapped", action="store_true", help="generate as far ahead as there is time")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    counts, count = ([16], 100) if options.quick else (options.streams, 300)
    figures, raw = ["simulated=1"], {}
    for streams in counts:
        outcomes = run(streams, count, options.seed, is_capped=not options.uncapped)
        raw[str(streams)] = [asdict(outcome) for outcome in outcomes]
        p50, p95 = quantile_ms(outcomes, 0.5), quantile_ms(outcomes, 0.95)
        potential = sum(outcome.potential_gap_ns > 0 for outcome in outcomes)
        true = sum(outcome.true_gaps > 0 for outcome in outcomes)
        refused = sum(outcome.is_refused for outcome in outcomes)
        print(
            f"simulated, {streams:3} streams, {len(outcomes)} utterances: "
            f"first packet p50 {p50:5.1f} ms  p95 {p95:5.1f} ms, "
            f"with a potential gap {potential}, with a true gap {true}, refused {refused}"
        )
        figures += [
            f"first_packet_p50_ms_c{streams}={p50:.1f}",
            f"first_packet_p95_ms_c{streams}={p95:.1f}",
            f"potential_gaps_c{streams}={potential}",
            f"true_gaps_c{streams}={true}",
        ]
    if options.json:
        arguments = {key: str(value) for key, value in vars(options).items()}
        options.json.write_text(json.dumps({"python": sys.version, "arguments": arguments, "raw": raw}))
    print("RESULT", *figures)


if __name__ == "__main__":
    main()
