from __future__ import annotations

import pytest

from breeze_rtc.clock import MS
from breeze_rtc.scheduling.chunking import LADDER, flush_at, largest_rung, longest_chunk, next_chunk, recovery_chunk

FRAME_NS = 80 * MS


def chunk(last: int, room_ms: int, *, longest: int = 16) -> int:
    """Next chunk where a frame costs 10 ms and the codec 4 ms plus 1 ms a frame."""
    return next_chunk(
        LADDER,
        last=last,
        longest=longest,
        room_ns=room_ms * MS,
        frame_cost_ns=10 * MS,
        codec_cost_ns=lambda frames: (4 + frames) * MS,
    )


def test_chunks_grow_one_rung_at_a_time() -> None:
    """Room for sixteen frames does not make the second chunk large."""
    assert [chunk(last, 10_000) for last in (1, 2, 4, 8, 16)] == [2, 4, 8, 16, 16]


def test_growth_is_bounded_by_the_room() -> None:
    """Four frames need 48 ms; with less, the chunk has two."""
    assert chunk(4, 48) == 4
    assert chunk(4, 47) == 2


def test_without_room_a_chunk_is_one_frame() -> None:
    """The listener is dry already: whatever exists goes."""
    assert chunk(8, -100) == 1


def test_growth_stops_at_the_longest() -> None:
    """The lead cap bounds a chunk however much room there is."""
    assert chunk(4, 10_000, longest=4) == 4


@pytest.mark.parametrize(("frames", "rung"), [(0, 0), (1, 1), (3, 2), (7, 4), (16, 16), (99, 16)])
def test_the_largest_rung(frames: int, rung: int) -> None:
    """What does not fill a rung is sent as smaller ones."""
    assert largest_rung(LADDER, frames) == rung


@pytest.mark.parametrize(
    ("frame_ms", "cap_ms", "frames"), [(80, 1_200, 4), (40, 1_200, 8), (80, 100, 1), (40, 4_000, 16)]
)
def test_a_chunk_lasts_at_most_half_the_lead_cap(frame_ms: int, cap_ms: int, frames: int) -> None:
    """And is at least one frame, whatever the cap."""
    assert longest_chunk(LADDER, frame_ms * MS, cap_ms * MS) == frames


def test_the_flush_leaves_time_for_the_frame_it_waited_for() -> None:
    """A chunk is sent early when one more frame and its codec step would end after the deadline."""
    assert flush_at(500 * MS, 12 * MS, 5 * MS, 4 * MS) == 479 * MS


@pytest.mark.parametrize(
    ("frame_cost_ms", "longest", "frames"), [(10, 8, 1), (25, 8, 2), (28, 8, 4), (31, 8, 8), (60, 8, 8), (28, 2, 2)]
)
def test_a_listener_who_ran_dry_gets_the_smallest_chunk_the_machine_sustains(
    frame_cost_ms: int, longest: int, frames: int
) -> None:
    """Frames of 40 ms and a codec step of 10 ms: the longer a frame takes, the more of them share one codec step."""
    chunk = recovery_chunk(
        LADDER,
        longest=longest,
        frame_ns=40 * MS,
        frame_cost_ns=frame_cost_ms * MS,
        codec_cost_ns=lambda rung: 10 * MS,
    )
    assert chunk == frames
