"""What is it worth to do work once: texts of several requests in one call, prompts in one call, a voice's prefix, and
the depth decoder compiled?

A model of random weights (`mid`: Breeze's structure, prompts and all) on this CPU, one thread.  Each pair computes the
same thing in the same run, by turns: eight requests together against one after another; a cloned voice whose positions
are kept against one that brings them in its prompt; the depth decoder's passes compiled by torch against eager ones
(needs a C++ compiler; some minutes with `mid`).  Medians of wall time; run it with nothing else on the machine.

    python bench/shared_work.py [--quick] [--no-compile] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from origin import origin
from torch import Tensor

from breeze_rtc.models.sampling import Sampling
from breeze_rtc.models.speech_model import SpeechModel, TextSegment
from breeze_rtc.runtime.executor import Executor
from breeze_rtc.scheduling.slots import pages_for
from breeze_rtc.scheduling.step import Row, Stage, Step

REQUESTS = 8
TEXT_TOKENS = 24
"""A sentence."""
REFERENCE_FRAMES = 100
"""Eight seconds of somebody's voice, at 12.5 frames a second."""
REFERENCE_TOKENS = 40
PAGE_TOKENS = 16


def by_turns(runs: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Median wall time of each, in ms, one after the other until the time is over."""
    times: dict[str, list[int]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    until = time.monotonic() + seconds
    while time.monotonic() < until or len(times[next(iter(runs))]) < 5:
        for name, run in runs.items():
            began = time.perf_counter_ns()
            run()
            times[name].append(time.perf_counter_ns() - began)
    return {name: statistics.median(found) / 1e6 for name, found in times.items()}


class Requests:
    """An executor, and requests whose TEXT and PREFILL steps are run together or one by one."""

    def __init__(self, model: SpeechModel) -> None:
        self.model = model
        pages = pages_for(1_000, PAGE_TOKENS, REQUESTS)
        self.executor = Executor(model, max_streams=REQUESTS, kv_pages=pages, page_tokens=PAGE_TOKENS, prefix_pages=64)
        codes = tuple((n % 7,) * model.config.depth.codebooks for n in range(REFERENCE_FRAMES))
        self.voice = [
            TextSegment(tuple(range(10, 10 + REFERENCE_TOKENS)), (0,) * REFERENCE_TOKENS),
            TextSegment((1,) * REFERENCE_FRAMES + (2,), (0,) * (REFERENCE_FRAMES + 1), codes=codes),
        ]
        prefix = self.executor.add_prefix(torch.cat(self.executor.encode(self.voice)))
        assert prefix is not None
        self.prefix = prefix

    def prepare(self, *, together: bool, cloned: str = "") -> dict[str, float]:
        """From text to code 0 of every request's first frame: ms of the TEXT and the PREFILL steps."""
        spans = {Stage.TEXT: 0.0, Stage.PREFILL: 0.0}
        groups = [list(range(REQUESTS))] if together else [[n] for n in range(REQUESTS)]
        pages = iter(range(10_000))
        for streams in groups:
            counts: dict[int, list[int]] = {}
            for stream in streams:
                prefixes = (self.prefix,) if cloned == "kept" else ()
                self.executor.open(stream, stream, seed=stream, sampling=Sampling(), prefixes=prefixes)
                words = tuple((stream + n) % 97 for n in range(TEXT_TOKENS))
                segments = [*(self.voice if cloned == "brought" else []), TextSegment(words, tuple(range(1, 25)))]
                counts[stream] = [self.executor.add_text(stream, segment) for segment in segments]
                self.executor.end_text(stream)
            while any(counts[stream] for stream in streams):
                rows = tuple(Row(stream, stream, 0, counts[stream].pop(0)) for stream in streams if counts[stream])
                spans[Stage.TEXT] += self._step(Stage.TEXT, rows)
            rows = []
            for stream in streams:
                count = self.executor._streams[stream].encoded[0]
                new = tuple(next(pages) for _ in range(pages_for(count, PAGE_TOKENS, 1)))
                rows.append(Row(stream, stream, 0, count, new))
            spans[Stage.PREFILL] += self._step(Stage.PREFILL, tuple(rows))
        for stream in range(REQUESTS):
            self.executor.close(stream)
        return {"text": spans[Stage.TEXT], "prefill": spans[Stage.PREFILL]}

    def _step(self, stage: Stage, rows: tuple[Row, ...]) -> float:
        began = time.perf_counter_ns()
        result = self.executor.run(Step(0, stage, rows, len(rows)))
        assert not any(row.error for row in result.rows), result.rows
        return (time.perf_counter_ns() - began) / 1e6


def depth_ms(model: SpeechModel, rows: tuple[int, ...], seconds: float) -> dict[str, dict[int, float]]:
    """A frame of the depth decoder, eager and compiled."""
    depth = model.depth
    step = depth.compiled_step()
    found: dict[str, dict[int, float]] = {"eager": {}, "compiled": {}}

    def pick(_codebook: int, logits: Tensor) -> Tensor:
        return logits.argmax(-1)

    for count in rows:
        hidden = torch.randn(count, depth.config.embedding, generator=torch.Generator().manual_seed(1))
        first = torch.zeros(count, dtype=torch.int64)
        with torch.inference_mode():
            times = by_turns(
                {
                    "eager": lambda hidden=hidden, first=first: depth.generate(hidden, first, pick),
                    "compiled": lambda hidden=hidden, first=first: depth.generate_by(step, hidden, first, pick),
                },
                seconds,
            )
        for name, ms in times.items():
            found[name][count] = ms
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the smallest model, a second for each figure")
    parser.add_argument("--no-compile", action="store_true", help="leave the compiled depth decoder out")
    parser.add_argument("--model", default=None, help="another model that is fed a prefix (default mid)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    seconds = 1.0 if options.quick else 4.0
    torch.set_num_threads(1)
    name = options.model or ("tiny" if options.quick else "mid")
    model = SpeechModel.load(name).eval()
    requests = Requests(model)
    raw: dict[str, object] = {}
    figures = []

    spans: dict[str, dict[str, list[float]]] = {}
    kinds = {
        "together": {"together": True},
        "one_by_one": {"together": False},
        "cloned_kept": {"together": True, "cloned": "kept"},
        "cloned_brought": {"together": True, "cloned": "brought"},
    }
    until = time.monotonic() + 4 * seconds
    while time.monotonic() < until or len(next(iter(spans.values()))["text"]) < 4:
        for kind, how in kinds.items():
            for stage, ms in requests.prepare(**how).items():  # type: ignore[arg-type]
                spans.setdefault(kind, {}).setdefault(stage, []).append(ms)
    medians = {
        kind: {stage: statistics.median(times[1:]) for stage, times in stages.items()} for kind, stages in spans.items()
    }
    raw["prepare_ms"] = spans
    for kind, stages in medians.items():
        print(f"{kind:16}text {stages['text']:8.1f} ms   prompts {stages['prefill']:8.1f} ms   ({REQUESTS} requests)")
    for stage in ("text", "prefill"):
        ratio = medians["one_by_one"][stage] / medians["together"][stage]
        figures.append(f"{stage}_one_by_one_over_together={ratio:.2f}")
    warm, cold = (sum(medians[kind].values()) for kind in ("cloned_kept", "cloned_brought"))
    plain = sum(medians["together"].values())
    figures += [f"clone_brought_over_kept={cold / warm:.2f}", f"clone_kept_over_plain={warm / plain:.2f}"]

    if not options.no_compile:
        rows = (1, 4, 8, 16)
        times = depth_ms(model, rows, seconds / 2)
        raw["depth_ms"] = times
        for way, found in times.items():
            print(f"depth {way:10}" + "".join(f"{found[count]:9.2f}" for count in rows) + f"   ms a frame, rows {rows}")
        figures += [f"depth_eager_over_compiled_r{n}={times['eager'][n] / times['compiled'][n]:.2f}" for n in rows]

    if options.json:
        document = origin("torch", "numpy") | {"model": name, "raw": raw}
        options.json.write_text(json.dumps(document, indent=1))
    print("RESULT", f"model={name}", *figures)


if __name__ == "__main__":
    main()
