"""RTP timestamp arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breeze_rtc.media import rtp

timestamps = st.integers(0, rtp.WRAP - 1)


@pytest.mark.parametrize(
    ("earlier", "later", "ticks"),
    [
        (0, 960, 960),
        (960, 0, -960),
        (rtp.WRAP - 960, 0, 960),
        (0, rtp.WRAP - 960, -960),
        (rtp.WRAP - 1, 959, 960),
        (0, rtp.WRAP // 2, -rtp.WRAP // 2),
    ],
)
def test_distance_takes_the_shorter_way_round(earlier: int, later: int, ticks: int) -> None:
    """Half the circle either way, the wrap included."""
    assert rtp.distance(earlier, later) == ticks


@given(timestamps, st.integers(-(rtp.WRAP // 2), rtp.WRAP // 2 - 1))
def test_distance_undoes_add(timestamp: int, ticks: int) -> None:
    """A step of up to half the circle is found again from its two ends."""
    moved = rtp.add(timestamp, ticks)
    assert 0 <= moved < rtp.WRAP
    assert rtp.distance(timestamp, moved) == ticks


@given(timestamps, st.integers(0, 1 << 40), st.integers(-(1 << 20), 1 << 20))
def test_unwrap_finds_the_ticks_again(origin: int, ticks: int, off: int) -> None:
    """However often the timestamp has wrapped, a guess within hours is enough."""
    assert rtp.unwrap(rtp.add(origin, ticks), ticks + off, origin) == ticks


@given(st.integers(0, 1 << 40), st.sampled_from([8_000, 16_000, 24_000, 48_000]))
def test_samples_survive_the_way_to_ticks_and_back(samples: int, sample_rate: int) -> None:
    """Rates that divide 48 kHz lose nothing."""
    assert rtp.samples_of(rtp.ticks_of(samples, sample_rate), sample_rate) == samples


def test_a_started_sample_does_not_count() -> None:
    """Ticks in the middle of a sample round down."""
    assert rtp.samples_of(959, 24_000) == 479


def test_a_rate_that_does_not_divide_the_clock_is_refused() -> None:
    """44.1 kHz has no whole number of ticks."""
    with pytest.raises(AssertionError):
        rtp.ticks_of(1, 44_100)
