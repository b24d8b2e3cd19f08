from __future__ import annotations

import pytest

from breeze_rtc.clock import MS
from breeze_rtc.errors import Overloaded
from breeze_rtc.scheduling.admission import admit, bucket_of, load_percent, stage_ns
from breeze_rtc.scheduling.costs import CostTable
from breeze_rtc.scheduling.slots import Pages, Slots
from breeze_rtc.scheduling.step import Stage, StageSpec
from breeze_rtc.scheduling.stream import Priority

SPECS = {stage: StageSpec(max_rows=4, buckets=(1, 2, 4), max_tokens=64) for stage in Stage}


def load(costs: CostTable, streams: int) -> int:
    return load_percent(costs, SPECS, backbone_rows=streams, streams=streams, frame_ns=80 * MS)


def test_the_smallest_bucket_that_holds_the_rows() -> None:
    """Padding is wasted work."""
    assert [bucket_of(SPECS[Stage.DEPTH], rows) for rows in (1, 2, 3, 4)] == [1, 2, 4, 4]


def test_more_rows_than_a_step_holds_take_several_steps() -> None:
    """Nine rows are two full steps and one of one."""
    costs = CostTable({(Stage.DEPTH, 4, 1): 8 * MS, (Stage.DEPTH, 1, 1): 5 * MS})
    assert stage_ns(costs, SPECS, Stage.DEPTH, 9) == 21 * MS


def test_load_is_work_per_frame_over_its_duration() -> None:
    """4 + 16 ms, and a quarter of a codec step of 16 ms, every 80 ms."""
    costs = CostTable({(Stage.BACKBONE, 4, 1): 4 * MS, (Stage.DEPTH, 4, 1): 16 * MS, (Stage.CODEC, 4, 4): 16 * MS})
    assert load(costs, 4) == 30
    assert load(CostTable(), 4) == 0


def test_a_large_step_that_was_slow_once_is_not_held_against_newcomers() -> None:
    """A batch costs at most what its rows cost one by one, and those are learnt by whoever speaks alone."""
    costs = CostTable({(Stage.DEPTH, 1, 1): 10 * MS, (Stage.DEPTH, 2, 1): 900 * MS})
    assert load(costs, 2) == 25


@pytest.mark.parametrize("load_now", [91, 1_000])
def test_a_listener_more_than_the_machine_can_serve_is_refused(load_now: int) -> None:
    """And told how much would be needed."""
    with pytest.raises(Overloaded, match=str(load_now)):
        admit(slots=Slots(4), pages=Pages(100), pages_needed=10, priority=Priority.LIVE, load=load_now)


def test_the_last_slots_and_pages_are_kept_for_calls() -> None:
    """A quarter is out of reach for a batch, a sixteenth for a stream, nothing for a call."""
    slots, pages = Slots(16), Pages(160)
    reach = {Priority.LIVE: 16, Priority.STREAM: 15, Priority.BATCH: 12}
    admitted = dict.fromkeys(Priority, 0)
    for taken in range(16):
        for priority in Priority:
            try:
                admit(slots=slots, pages=pages, pages_needed=10, priority=priority, load=0)
            except Overloaded:
                continue
            admitted[priority] = taken + 1
        slots.take()
    assert admitted == reach
    slots = Slots(16)
    pages.reserve(115)
    admit(slots=slots, pages=pages, pages_needed=5, priority=Priority.BATCH, load=0)
    with pytest.raises(Overloaded):
        admit(slots=slots, pages=pages, pages_needed=6, priority=Priority.BATCH, load=0)
    admit(slots=slots, pages=pages, pages_needed=45, priority=Priority.LIVE, load=0)


def test_without_a_slot_nobody_is_admitted() -> None:
    """A call cannot be conjured a slot."""
    slots = Slots(1)
    slots.take()
    with pytest.raises(Overloaded):
        admit(slots=slots, pages=Pages(10), pages_needed=1, priority=Priority.LIVE, load=0)
