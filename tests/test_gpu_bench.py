"""The benchmark of a GPU, all of it, on a CPU with a tiny model: what must not fail on the day there is a GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from breeze_rtc.scheduling.machines import read_costs
from breeze_rtc.scheduling.step import Stage

BENCH = Path(__file__).parents[1] / "bench" / "gpu.py"


def run(*arguments: str, cache: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, str(BENCH), *arguments], capture_output=True, text=True, check=False, env=environment
    )


def test_all_parts_run_on_a_cpu(tmp_path: Path) -> None:
    """Graphs and eager steps agree to the code; every stage has times and a limit below them; the costs are read by the
    simulator; every request of every loop was served."""
    answer = run(
        *("--device", "cpu", "--size", "tiny", "--quick", "--streams", "1", "--requests", "2", "--budget", "1"),
        *("--json", str(tmp_path / "gpu.json"), "--costs", str(tmp_path / "costs.json")),
        cache=tmp_path,
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.splitlines()[-1].startswith("RESULT model=tiny device=cpu graphs=")
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["steps"]["graphs"] > 8
    for compared in found["steps"]["compared"]:
        assert compared["equal_codes"] == 1
        assert compared["sound_difference"] < 1e-6
    assert {stage for stage, *_ in found["steps"]["steps"]} == {stage.name for stage in Stage}
    assert all(ns > least_ns > 0 for *_, ns, least_ns in found["steps"]["steps"])
    loops = {key: got for key, got in found["served"].items() if key not in {"graphs", "first_steps"}}
    assert {stage.name for stage in Stage} == set(found["served"]["first_steps"])
    assert all(one["steps"] >= 1 and one["ratio"] > 0 for one in found["served"]["first_steps"].values())
    assert loops.keys() == {"c1", "poisson_0.5"}
    assert all(got["requests"] == 2 and got["not_served"] == 0 for got in loops.values())
    assert all(got["first_p50_ms"] > 0 for got in loops.values())
    if importlib.util.find_spec("transformers") is not None:
        assert found["reference"]["frame_ms"] > 0
    costs, specs, made_on = read_costs(tmp_path / "costs.json")
    assert set(costs) == set(specs) == set(Stage)
    assert "tiny on" in made_on


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_the_next_step_is_said(tmp_path: Path) -> None:
    answer = run(cache=tmp_path)
    assert answer.returncode == 1
    assert "no CUDA device" in answer.stderr
    assert "--device cpu --size tiny" in answer.stderr
    assert "Traceback" not in answer.stderr
