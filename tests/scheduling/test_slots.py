from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from breeze_rtc.scheduling.slots import Pages, Slots, pages_for

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def test_the_last_slot_given_back_is_the_next_one_taken() -> None:
    """Its memory is warm."""
    slots = Slots(3)
    assert [slots.take(), slots.take()] == [0, 1]
    slots.give(0)
    assert slots.take() == 0
    assert slots.free == 1


def test_a_slot_is_given_back_once() -> None:
    """Two streams in one slot would speak with each other's voice."""
    slots = Slots(2)
    slots.take()
    slots.give(0)
    with pytest.raises(AssertionError):
        slots.give(0)


def test_a_reservation_that_does_not_fit_changes_nothing() -> None:
    """Refused is refused whole."""
    pages = Pages(10)
    assert pages.reserve(7)
    assert not pages.reserve(4)
    assert pages.unreserved == 3
    assert pages.free == 10


@pytest.mark.parametrize(("positions", "rows", "pages"), [(0, 1, 0), (1, 1, 1), (16, 1, 1), (17, 1, 2), (17, 2, 4)])
def test_pages_hold_whole_positions_of_every_row(positions: int, rows: int, pages: int) -> None:
    """A page of 16 positions belongs to one row."""
    assert pages_for(positions, 16, rows) == pages


@unhurried
@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8), st.booleans()), max_size=40))
def test_pages_are_conserved(streams: list[tuple[int, int, bool]]) -> None:
    """No page is held twice, and all come back."""
    pages = Pages(32)
    held: list[tuple[list[int], int]] = []
    for kept, wanted, ends in streams:
        if pages.reserve(kept):
            held.append((list(pages.take(min(kept, wanted))), kept))
        if ends and held:
            pages.give(*held.pop(0))
        owned = [page for taken, _ in held for page in taken]
        assert len(set(owned)) == len(owned)
        assert pages.free + len(owned) == 32
        assert pages.unreserved == 32 - sum(kept for _, kept in held)
    for taken, kept in held:
        pages.give(taken, kept)
    assert sorted(pages.take(32)) == list(range(32))
