"""A machine that was measured, as the simulator reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from breeze_rtc.clock import MS, US
from breeze_rtc.scheduling.costs import CostTable
from breeze_rtc.scheduling.machines import (
    H100_GRAPH_COSTS,
    H100_SPECS,
    LinearCost,
    cost_ns,
    fitted,
    read_costs,
    warmed_up,
    write_costs,
)
from breeze_rtc.scheduling.step import Stage


def test_a_formula_is_found_again_in_the_times_it_makes() -> None:
    """Of every kind of step, to a thousandth."""
    found = fitted(warmed_up(H100_GRAPH_COSTS, H100_SPECS, (1, 2, 4, 8, 16)))
    for stage, spec in H100_SPECS.items():
        for bucket in spec.buckets:
            for units in (16, 256) if stage <= Stage.PREFILL else (1, 8) if stage is Stage.CODEC else (1,):
                expected = cost_ns(H100_GRAPH_COSTS, stage, bucket, units)
                assert cost_ns(found, stage, bucket, units) == pytest.approx(expected, rel=1e-3)


def test_no_term_is_below_zero() -> None:
    """Steps that got faster with more rows were measured so by chance; one kind alone is its own formula."""
    table = {(stage, 1, 16 if stage <= Stage.PREFILL else 1): 3 * MS for stage in Stage}
    table[Stage.DEPTH, 8, 1] = 2 * MS
    found = fitted(CostTable(table))
    assert all(min(cost.base_ns, cost.row_ns, cost.unit_ns) >= 0 for cost in found.values())
    assert 2 * MS < cost_ns(found, Stage.DEPTH, 4, 1) < 3 * MS
    assert cost_ns(found, Stage.TEXT, 1, 16) == pytest.approx(3 * MS, rel=1e-6)


def test_a_file_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    write_costs(path, warmed_up(H100_GRAPH_COSTS, H100_SPECS, (1, 2, 4)), H100_SPECS, "a machine")
    costs, specs, made_on = read_costs(path)
    assert specs == H100_SPECS
    assert made_on == "a machine"
    assert isinstance(costs[Stage.DEPTH], LinearCost)
    assert abs(costs[Stage.DEPTH].row_ns - H100_GRAPH_COSTS[Stage.DEPTH].row_ns) < 2 * US
