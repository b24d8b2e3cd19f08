"""What does one step of the nano voice cost on this CPU: in eager torch, as an ONNX graph, by torch.compile and by
AOTInductor?

The three stages that every frame passes, at 1, 4, 8 and 16 rows, with the same inputs: backbone (one frame), depth (all
codebooks of a frame), and the codec up to its synthesis (one frame).  Times are processor time of one thread, the
median of many calls.  The graphs are the package's own.  `compiled` (torch.compile) and `aot` (AOTInductor) are of the
same modules, one for each number of rows, which favours them most; they need a C++ compiler and several minutes, so
they are only measured with `--compile FOLDER`, which keeps what AOTInductor made for the next time.

    python bench/step_loops.py [--quick] [--compile FOLDER] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch
from origin import origin
from torch import Tensor

from breeze_rtc.models.speech_model import SpeechModel
from breeze_rtc.models.step_graphs import STEPS, example_inputs
from breeze_rtc.runtime.step_sessions import StepSessions

ROWS = (1, 4, 8, 16)


def processor_ms(run: Callable[[], object], seconds: float) -> float:
    """Median processor time of a call, in ms."""
    for _ in range(3):
        run()
    times: list[int] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until or len(times) < 5:
        began = time.thread_time_ns()
        run()
        times.append(time.thread_time_ns() - began)
    return statistics.median(times) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a fifth of a second for each figure")
    parser.add_argument("--compile", type=Path, metavar="FOLDER", help="torch.compile and AOTInductor too")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    seconds = 0.2 if options.quick else 2.0
    torch.set_num_threads(1)
    model = SpeechModel.load("nano").eval()
    sessions = StepSessions(model, model.graphs)
    raw: dict[str, dict[str, dict[int, float]]] = {}
    print(f"{'stage':10}{'how':10}" + "".join(f"{f'{rows} rows':>10}" for rows in ROWS) + "   ms of one core")
    for name, step in STEPS.items():
        eager = step(model)
        ways: dict[str, Callable[[tuple[Tensor, ...]], Callable[[], object]]] = {
            "eager": lambda inputs, eager=eager: lambda: eager(*inputs),
            "graph": lambda inputs, session=sessions.sessions[name]: _session_call(session, inputs),
        }
        if options.compile:
            compiled = torch.compile(eager, dynamic=False)
            ways["compiled"] = lambda inputs, compiled=compiled: lambda: compiled(*inputs)
            ways["aot"] = lambda inputs, eager=eager, name=name: _packaged_call(eager, inputs, options.compile, name)
        for way, prepare in ways.items():
            found = raw.setdefault(name, {}).setdefault(way, {})
            with torch.inference_mode():
                for rows in ROWS:
                    inputs = tuple(example_inputs(model, name, rows, frames=1).values())
                    found[rows] = processor_ms(prepare(inputs), seconds)
            print(f"{name:10}{way:10}" + "".join(f"{found[rows]:10.2f}" for rows in ROWS))
    if options.json:
        document = origin("torch", "onnxruntime", "numpy") | {
            "raw": raw,
        }
        options.json.write_text(json.dumps(document, indent=1))
    figures = []
    for rows in ROWS:
        total = {way: sum(stage[way][rows] for stage in raw.values()) for way in raw["depth"]}
        figures += [f"{way}_over_graph_r{rows}={total[way] / total['graph']:.2f}" for way in total if way != "graph"]
    print("RESULT", *figures)


def _session_call(session: ort.InferenceSession, inputs: tuple[Tensor, ...]) -> Callable[[], object]:
    feed: dict[str, np.ndarray] = {
        node.name: value.numpy() for node, value in zip(session.get_inputs(), inputs, strict=True)
    }
    return lambda: session.run(None, feed)


def _packaged_call(step: torch.nn.Module, inputs: tuple[Tensor, ...], folder: Path, name: str) -> Callable[[], object]:
    """The step as a library of its own, of AOTInductor."""
    from torch._inductor import aoti_compile_and_package, aoti_load_package

    path = folder / f"{name}_{len(inputs[0])}.pt2"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        aoti_compile_and_package(torch.export.export(step, inputs), package_path=str(path))
    package = aoti_load_package(str(path))
    return lambda: package(*inputs)


if __name__ == "__main__":
    main()
