"""SIMULATED machines: how long a step takes, as a formula.  Not one number in here was measured on our code; what
`bench/gpu.py` measures on a machine is written to a file with `write_costs`, and read with `read_costs`.

The times are for a model of 3B parameters (28 backbone layers, 12 depth layers and 15 depth steps a frame, 16 codes
of 80 ms), scaled from what others published for models of the same structure on one H100; T = host + launches or
bandwidth + so much per row.  Five ways to run the same model:

    hf_eager        the published PyTorch code, one kernel launch after another
    own_loop        our own loop without its overheads, still eager
    compiled_depth  the same with the depth decoder compiled: half its launches, which is our assumption
    graphs          every stage replayed from CUDA graphs, kernels not fused
    fused           a target: graphs of fused kernels
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from breeze_rtc.clock import US
from breeze_rtc.scheduling.costs import CostKey, CostTable, size_of
from breeze_rtc.scheduling.step import Stage, StageSpec


@dataclass(frozen=True, slots=True)
class LinearCost:
    """Time of a step: the base, plus so much per row of the bucket, plus so much per token, or per frame and row."""

    base_ns: int
    row_ns: int = 0
    unit_ns: int = 0


SimulatedCosts = Mapping[Stage, LinearCost]


def _table(
    *,
    host: float,
    prompt: tuple[float, float],
    backbone: tuple[float, float],
    depth: tuple[float, float],
    codec: tuple[float, float],
) -> SimulatedCosts:
    """All in ms.  host: per step.  prompt: text encoder and prefill together, and per token; the encoder is a third."""

    def cost(base: float, row: float = 0.0, unit: float = 0.0) -> LinearCost:
        return LinearCost(round((host + base) * 1_000) * US, round(row * 1_000) * US, round(unit * 1_000) * US)

    return {
        Stage.TEXT: cost(prompt[0] / 3, unit=prompt[1] / 2),
        Stage.PREFILL: cost(prompt[0] * 2 / 3, unit=prompt[1] / 2),
        Stage.BACKBONE: cost(*backbone),
        Stage.DEPTH: cost(*depth),
        Stage.CODEC: cost(codec[0], unit=codec[1]),
    }


_GRAPHS = _table(host=0.6, prompt=(6, 0.012), backbone=(2.2, 0.015), depth=(6.7, 0.26), codec=(3, 0.06))
_FUSED = _table(host=0.35, prompt=(4, 0.012), backbone=(1.5, 0.012), depth=(4.6, 0.05), codec=(1.2, 0.03))
_LAUNCH_BOUND = {
    "hf_eager": _table(host=1.0, prompt=(60, 0.02), backbone=(33, 3), depth=(140, 11), codec=(33.5, 0.06)),
    "own_loop": _table(host=1.0, prompt=(25, 0.012), backbone=(9, 0.05), depth=(26, 0.3), codec=(14, 0.06)),
    "compiled_depth": _table(host=1.0, prompt=(25, 0.012), backbone=(9, 0.05), depth=(13, 0.3), codec=(14, 0.06)),
}

WEIGHTS_NS = {
    Stage.TEXT: 430 * US,
    Stage.PREFILL: 870 * US,
    Stage.BACKBONE: 860 * US,
    Stage.DEPTH: 3_030 * US,
    Stage.CODEC: 70 * US,
}
"""Part of a step in which an H100 reads weights at 3.35 TB/s.  An H200 reads them at 4.3."""


def _on_h200(costs: SimulatedCosts) -> SimulatedCosts:
    """What reads weights takes 3.35 / 4.3 of the time; launches and arithmetic take as long as before."""
    return {
        stage: replace(cost, base_ns=cost.base_ns - WEIGHTS_NS[stage] * (430 - 335) // 430)
        for stage, cost in costs.items()
    }


MACHINES: Mapping[str, Mapping[str, SimulatedCosts]] = {
    "H100": {**_LAUNCH_BOUND, "graphs": _GRAPHS, "fused": _FUSED},
    "H200": {**_LAUNCH_BOUND, "graphs": _on_h200(_GRAPHS), "fused": _on_h200(_FUSED)},
}
"""SIMULATED.  Step times by machine and by the way the model is run."""

H100_GRAPH_COSTS = _GRAPHS
H100_SPECS = {
    Stage.TEXT: StageSpec(max_rows=16, buckets=(1, 2, 4, 8, 16), max_tokens=512),
    Stage.PREFILL: StageSpec(max_rows=16, buckets=(1, 2, 4, 8, 16), max_tokens=1024),
    Stage.BACKBONE: StageSpec(max_rows=64, buckets=(1, 2, 4, 8, 12, 16, 24, 32, 48, 64)),
    Stage.DEPTH: StageSpec(max_rows=64, buckets=(1, 2, 4, 8, 12, 16, 24, 32, 48, 64)),
    Stage.CODEC: StageSpec(max_rows=32, buckets=(1, 2, 4, 8, 16, 32)),
}


def cost_ns(costs: SimulatedCosts, stage: Stage, bucket: int, units: int) -> int:
    """Time of one step; units: tokens over all rows, or codec frames per row."""
    cost = costs[stage]
    return cost.base_ns + cost.row_ns * bucket + cost.unit_ns * (units if stage <= Stage.PREFILL else units * bucket)


def warmed_up(costs: SimulatedCosts, specs: Mapping[Stage, StageSpec], ladder: Iterable[int]) -> CostTable:
    """The table that a warm-up over all shapes would have measured."""
    return CostTable(measured_times(costs, specs, ladder))


def measured_times(
    costs: SimulatedCosts, specs: Mapping[Stage, StageSpec], ladder: Iterable[int]
) -> dict[CostKey, int]:
    """What a measurement of all shapes would find."""
    measured = {}
    for stage, spec in specs.items():
        sizes = [size_of(stage, 1)]
        if stage is Stage.CODEC:
            sizes = list(ladder)
        while stage <= Stage.PREFILL and sizes[-1] < spec.max_tokens:
            sizes.append(2 * sizes[-1])
        for bucket in spec.buckets:
            for size in sizes:
                measured[stage, bucket, size] = cost_ns(costs, stage, bucket, size)
    return measured


# ---- a machine that was measured -------------------------------------------------------------------------------------


def fitted(costs: CostTable) -> SimulatedCosts:
    """The formula closest to the measured times of each stage: least squares of the relative error, no term below zero.

    Raises KeyError for a stage of which nothing was measured.
    """
    kinds: dict[Stage, list[tuple[float, ...]]] = {}
    for stage, bucket, size, times in costs.state()["kinds"]:
        units = size if stage <= Stage.PREFILL else bucket * size
        ns = sorted(times)[(len(times) - 1) // 2]
        # BACKBONE and DEPTH have one unit a row, so that rows say all.
        terms = (1.0, bucket, 0.0) if stage in {Stage.BACKBONE, Stage.DEPTH} else (1.0, bucket, units)
        kinds.setdefault(Stage(stage), []).append((*terms, ns))
    out = {}
    for stage in Stage:
        base, row, unit = _least_squares([[term / kind[3] for term in kind[:3]] for kind in kinds[stage]])
        out[stage] = LinearCost(round(base), round(row), round(unit))
    return out


def _least_squares(rows: Sequence[Sequence[float]]) -> list[float]:
    """x >= 0 that brings each row's product with x closest to 1; a term that would go below zero is left out."""
    terms = [k for k in range(3) if any(row[k] for row in rows)]
    while True:
        normal = [[sum(row[i] * row[j] for row in rows) for j in terms] for i in terms]
        right = [sum(row[i] for row in rows) for i in terms]
        found = _solved(normal, right)
        worst = min(range(len(terms)), key=lambda k: found[k] * max(row[terms[k]] for row in rows))
        if found[worst] >= 0 or len(terms) == 1:
            x = [0.0, 0.0, 0.0]
            for k, value in zip(terms, found, strict=True):
                x[k] = max(0.0, value)
            return x
        del terms[worst]


def _solved(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gaussian elimination; a term that the rows do not tell from the others is 0."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for k in range(size):
        pivot = max(range(k, size), key=lambda i: abs(rows[i][k]))
        rows[k], rows[pivot] = rows[pivot], rows[k]
        if abs(rows[k][k]) <= 1e-12 * max(abs(value) for row in matrix for value in row):
            rows[k] = [float(i == k) for i in range(size)] + [0.0]
        for i in range(size):
            if i != k:
                factor = rows[i][k] / rows[k][k]
                rows[i] = [a - factor * b for a, b in zip(rows[i], rows[k], strict=True)]
    return [rows[k][size] / rows[k][k] for k in range(size)]


def write_costs(path: Path, costs: CostTable, specs: Mapping[Stage, StageSpec], made_on: str) -> None:
    """Keep measured step times, and the formula fitted to them, for the simulator."""
    document = {
        "made_on": made_on,
        "specs": {stage.name: asdict(spec) for stage, spec in specs.items()},
        "formula_ns": {stage.name: asdict(cost) for stage, cost in fitted(costs).items()},
        "table": costs.state(),
    }
    path.write_text(json.dumps(document) + "\n")


def read_costs(path: Path) -> tuple[SimulatedCosts, dict[Stage, StageSpec], str]:
    """The formula, the stages' limits, and what machine they are of.  Raises OSError, ValueError, KeyError."""
    document = json.loads(path.read_text())
    specs = {
        Stage[name]: StageSpec(spec["max_rows"], tuple(spec["buckets"]), spec["max_tokens"])
        for name, spec in document["specs"].items()
    }
    costs = {Stage[name]: LinearCost(**cost) for name, cost in document["formula_ns"].items()}
    return costs, specs, str(document["made_on"])
