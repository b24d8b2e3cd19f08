"""SIMULATED machines: how long a step takes, as a formula.  Not one number in here was measured on our code.

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

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ..clock import US
from .costs import CostTable, size_of
from .step import Stage, StageSpec


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
    return CostTable(measured)
