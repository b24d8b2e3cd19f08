from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from breeze_rtc.clock import MS, SECOND
from breeze_rtc.playback import PlaybackReport
from breeze_rtc.scheduling.predictor import CUSHION_NS, MAX_PATH_NS, STALE_GUARD_NS, Predictor

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


RATE = 24_000
TENTH = RATE // 10


def report(
    heard: int, at_ms: int, *, path_ms: int = 0, dry_at_ms: int | None = None, is_playing: bool = True
) -> PlaybackReport:
    return PlaybackReport(
        stream=1,
        heard_samples=heard,
        at_ns=at_ms * MS,
        path_delay_ns=path_ms * MS,
        dry_at_ns=None if dry_at_ms is None else dry_at_ms * MS,
        is_playing=is_playing,
    )


def delivered(*chunks: tuple[int, int]) -> Predictor:
    """A listener who was sent (samples, time in ms)."""
    predictor = Predictor(RATE)
    for samples, at_ms in chunks:
        predictor.deliver(samples, at_ms * MS)
    return predictor


def test_without_reports_the_deadline_is_first_output_plus_duration() -> None:
    """The published method."""
    predictor = delivered((TENTH, 50), (2 * TENTH, 90))
    assert predictor.dry_at(100 * MS) == 350 * MS


def test_a_gap_moves_the_estimate() -> None:
    """Once the sound has broken, it goes on from the chunk that came too late."""
    predictor = delivered((TENTH, 0), (TENTH, 150))
    assert predictor.dry_at(150 * MS) == 250 * MS


def test_a_report_replaces_the_estimate() -> None:
    """A player with a buffer of 80 ms runs dry 80 ms later than the estimate said; all but a cushion is ours to use."""
    predictor = delivered((10 * TENTH, 0))
    predictor.report(report(TENTH, 180), 190 * MS)
    assert predictor.dry_at(200 * MS) == 1_080 * MS - CUSHION_NS


@pytest.mark.parametrize(("buffer_ms", "later_ms"), [(0, 0), (20, 0), (60, 0), (61, 1), (500, 440)])
def test_a_cushion_is_left_to_the_listener(buffer_ms: int, later_ms: int) -> None:
    """A report never makes the deadline earlier for it, and a chunk is late only when the buffer is empty as well."""
    predictor = delivered((10 * TENTH, 0))
    predictor.report(report(TENTH, 100 + buffer_ms), (100 + buffer_ms) * MS)
    dry_ms = 1_000 + buffer_ms
    assert predictor.dry_at(800 * MS) <= dry_ms * MS
    predictor.report(report(TENTH * 7, 700 + buffer_ms), (700 + buffer_ms) * MS)
    assert predictor.dry_at(dry_ms * MS) == (1_000 + later_ms) * MS
    assert predictor.late_ns(dry_ms * MS) == 0
    assert predictor.late_ns((dry_ms + 1) * MS) == 1 * MS


def test_a_paced_queue_needs_no_cushion() -> None:
    """Its deadline is a slot of our own clock: no jitter lies between."""
    predictor = delivered((10 * TENTH, 0))
    predictor.report(report(TENTH, 180, dry_at_ms=1_080), 190 * MS)
    assert predictor.dry_at(200 * MS) == 1_080 * MS


def test_the_path_brings_the_deadline_forward() -> None:
    """What is sent `path` before the ear runs dry arrives just in time."""
    predictor = delivered((10 * TENTH, 0))
    predictor.report(report(TENTH, 280, path_ms=60), 290 * MS)
    assert predictor.dry_at(300 * MS) == 1_120 * MS - CUSHION_NS


def test_deliveries_after_a_report_are_added_to_it() -> None:
    """A report that arrives late still knows nothing of what was sent after it was made."""
    predictor = delivered((10 * TENTH, 0), (10 * TENTH, 200))
    predictor.report(report(TENTH, 190), 230 * MS)
    assert predictor.dry_at(230 * MS) == 2_090 * MS - CUSHION_NS
    predictor.deliver(TENTH, 240 * MS)
    assert predictor.dry_at(240 * MS) == 2_190 * MS - CUSHION_NS


def test_the_slot_time_of_a_paced_sink_is_the_deadline() -> None:
    """A sink that says when its queue runs dry is taken at its word."""
    predictor = delivered((10 * TENTH, 0))
    predictor.report(report(TENTH, 200, path_ms=80, dry_at_ms=1_040), 200 * MS)
    assert predictor.dry_at(210 * MS) == 1_040 * MS
    predictor.deliver(TENTH, 300 * MS)
    assert predictor.dry_at(300 * MS) == 1_140 * MS


def test_a_chunk_that_the_sink_had_not_seen_when_it_reported_is_not_lost() -> None:
    """An empty queue reported just before the first packet came in does not make the stream late."""
    predictor = delivered((TENTH, 100))
    predictor.report(report(0, 101, dry_at_ms=101), 102 * MS)
    assert predictor.dry_at(102 * MS) == 200 * MS


def test_late_report_does_not_move_the_deadline_back() -> None:
    """A report older than the last one is ignored."""
    predictor = delivered((10 * TENTH, 0))
    predictor.report(report(2 * TENTH, 200), 210 * MS)
    predictor.report(report(TENTH, 190), 220 * MS)
    assert predictor.dry_at(220 * MS) == 1_000 * MS
    assert predictor.heard(220 * MS) == 2 * TENTH + TENTH // 5


def test_the_heard_position_never_goes_back() -> None:
    """A later report with an earlier position counts as standing still."""
    predictor = delivered((10 * TENTH, 0))
    predictor.report(report(2 * TENTH, 200), 200 * MS)
    predictor.report(report(TENTH, 300), 300 * MS)
    assert predictor.heard(300 * MS) == 2 * TENTH


def test_nobody_hears_more_than_was_delivered_or_faster_than_it_lasts() -> None:
    """A listener who claims to be always empty gains nothing."""
    predictor = delivered((10 * TENTH, 0))
    predictor.report(report(10**9, 300), 300 * MS)
    # Beyond 300 ms, what a fast clock explains: 0.1 %.
    assert predictor.heard(300 * MS) == 3 * TENTH * 1_001 // 1_000
    assert predictor.dry_at(300 * MS) == pytest.approx(1_000 * MS, abs=3 * MS // 10 + 41_667)


def test_a_report_from_the_future_is_taken_as_of_now() -> None:
    """A wrong clock at the far end cannot silence later reports."""
    predictor = delivered((10 * TENTH, 0))
    predictor.report(report(TENTH, 10**7), 200 * MS)
    assert predictor.dry_at(200 * MS) == 1_100 * MS - CUSHION_NS
    predictor.report(report(2 * TENTH, 300), 300 * MS)
    assert predictor.dry_at(300 * MS) == 1_100 * MS - CUSHION_NS


def test_a_dry_time_beyond_what_was_delivered_is_cut_to_it() -> None:
    """A sink that claims a full queue cannot starve its stream."""
    predictor = delivered((TENTH, 0))
    predictor.report(report(0, 20, dry_at_ms=10**9), 20 * MS)
    assert predictor.dry_at(20 * MS) == 120 * MS


def test_a_path_out_of_range_is_cut() -> None:
    """A negative path is none, an endless one is two seconds."""
    predictor = delivered((10 * TENTH, 0))
    predictor.report(report(0, 0, path_ms=-50), 0)
    assert predictor.dry_at(0) == SECOND
    predictor.report(report(0, 0, path_ms=10**9), 0)
    assert predictor.dry_at(0) == SECOND - MAX_PATH_NS


def test_an_old_report_gives_way_to_the_estimate_minus_a_guard_bit_by_bit() -> None:
    """What a report granted beyond the estimate is taken back in four steps, from 0.4 s to 1 s of silence."""
    predictor = delivered((20 * TENTH, 0))
    predictor.report(report(0, 500), 500 * MS)
    fresh = 2_500 - CUSHION_NS // MS
    granted = fresh - (2_000 - STALE_GUARD_NS // MS)
    for age_ms, taken in ((0, 0), (399, 0), (400, 1), (599, 1), (600, 2), (800, 3), (999, 3), (1_000, 4), (9_000, 4)):
        assert predictor.dry_at((500 + age_ms) * MS) == (fresh - granted * taken // 4) * MS
    predictor.report(report(0, 1_600), 1_600 * MS)
    assert predictor.dry_at(1_600 * MS) == 3_600 * MS - CUSHION_NS


def test_a_silent_listener_is_fed_on() -> None:
    """One report and never again: the deadline stays a time, a little earlier than without any report."""
    predictor, silent = delivered((TENTH, 0)), delivered((TENTH, 0))
    silent.report(report(0, 50, path_ms=40), 50 * MS)
    for at_ms in range(100, 20_000, 100):
        for listener in (predictor, silent):
            listener.deliver(TENTH, (at_ms - 60) * MS)
        behind_ns = predictor.dry_at(at_ms * MS) - silent.dry_at(at_ms * MS)
        assert behind_ns <= STALE_GUARD_NS
        assert not silent.is_held


def test_a_report_says_how_wrong_the_prediction_was() -> None:
    """By how much the deadline moved: above 0 there was more time than believed; None for what nobody predicted."""
    predictor = Predictor(RATE)
    assert predictor.report(report(0, 0), 0) is None
    predictor = delivered((10 * TENTH, 0))
    assert predictor.report(report(TENTH, 240), 250 * MS) == 140 * MS - CUSHION_NS
    assert predictor.report(report(2 * TENTH, 360), 370 * MS) == 20 * MS
    assert predictor.report(report(3 * TENTH, 460, path_ms=30), 470 * MS) == -30 * MS
    assert predictor.report(report(3 * TENTH, 450), 480 * MS) is None, "an older report is not believed"
    assert predictor.report(report(4 * TENTH, 560, is_playing=False), 560 * MS) is None
    assert predictor.report(report(4 * TENTH, 900), 900 * MS) is None
    assert predictor.report(report(5 * TENTH, 1_000), 1_000 * MS) == 0


def test_a_path_longer_than_the_sound_has_been_on_its_way_is_cut() -> None:
    """Who has heard what was sent 150 ms ago has a path of at most that, and is not served as if it were 900 ms."""
    predictor = delivered((TENTH, 0), (TENTH, 100), (TENTH, 200))
    predictor.report(report(TENTH + 1, 250, path_ms=900), 250 * MS)
    assert predictor.dry_at(250 * MS) == pytest.approx((250 + 200 - 150) * MS, abs=1 * MS)


@pytest.mark.parametrize("drift_ppm", [-500, 200, 900])
def test_drift_is_made_good_by_each_report(drift_ppm: int) -> None:
    """A listener whose clock is off for five minutes, reporting every 250 ms: the deadline is never wrong by more than
    that clock moves between two reports.
    """
    predictor = Predictor(RATE)
    per_second = RATE * (1_000_000 + drift_ppm) // 1_000_000
    worst_ns = 0
    for quarter in range(1_200):
        at_ms = 250 * quarter
        while predictor.delivered < quarter * per_second // 4 + RATE:
            predictor.deliver(4 * TENTH // 5, at_ms * MS)
        heard = max(0, quarter - 1) * per_second // 4
        moved = predictor.report(report(heard, at_ms, path_ms=20), at_ms * MS)
        if quarter > 4 and moved is not None:
            worst_ns = max(worst_ns, abs(moved))
        assert predictor.heard(at_ms * MS) == max(0, quarter - 1) * per_second // 4
    assert worst_ns <= 250 * MS * abs(drift_ppm) // 1_000_000 + MS // 10


def test_silence_never_makes_a_deadline_later() -> None:
    """Falling back only brings the deadline forward."""
    predictor = delivered((20 * TENTH, 0))
    predictor.report(report(5 * TENTH, 500, path_ms=400), 500 * MS)
    assert predictor.dry_at(510 * MS) == 1_600 * MS
    assert predictor.dry_at(1_600 * MS) == 1_600 * MS


def test_a_paused_listener_is_held_until_it_plays_again() -> None:
    """Silence does not end a pause: a frozen page cannot speak."""
    predictor = delivered((10 * TENTH, 0))
    predictor.report(report(TENTH, 150, is_playing=False), 150 * MS)
    assert predictor.is_held
    assert predictor.heard(9_000 * MS) == TENTH
    predictor.report(report(TENTH, 9_000), 9_000 * MS)
    assert not predictor.is_held
    assert predictor.dry_at(9_000 * MS) == 9_900 * MS


def test_a_pause_is_not_held_against_the_listener() -> None:
    """What it had in hand when it paused, it has still when it plays again, even if it then falls silent."""
    predictor = delivered((10 * TENTH, 0))
    predictor.report(report(TENTH, 150, is_playing=False), 150 * MS)
    predictor.report(report(TENTH, 9_000), 9_000 * MS)
    assert predictor.late_ns(9_000 * MS) < 0
    predictor.deliver(10 * TENTH, 9_100 * MS)
    assert predictor.dry_at(10_100 * MS) == 10_900 * MS - STALE_GUARD_NS


def test_the_guard_of_a_stale_report_does_not_make_a_chunk_late() -> None:
    """It only makes the next one urgent."""
    predictor = delivered((20 * TENTH, 0))
    predictor.report(report(0, 500), 500 * MS)
    assert predictor.dry_at(1_950 * MS) < 1_950 * MS
    assert predictor.late_ns(1_950 * MS) == -50 * MS
    assert predictor.late_ns(2_010 * MS) == 10 * MS


times = st.integers(0, 4 * SECOND)
numbers = st.integers(-(2**40), 2**40)
inputs = st.lists(
    st.one_of(
        st.tuples(times, st.integers(1, 4 * TENTH)),
        st.tuples(times, numbers, numbers, numbers, st.none() | numbers, st.booleans()),
    ),
    max_size=30,
)


@unhurried
@given(inputs)
def test_no_report_raises_or_takes_the_listener_out_of_bounds(moves: list[tuple[int, ...]]) -> None:
    """Whatever comes: 0 <= reported <= heard <= delivered, and the deadline stays within what physics allows."""
    predictor = Predictor(RATE)
    estimate_ns = now = reported = 0
    for move in sorted(moves, key=lambda move: move[0]):
        now = move[0]
        if len(move) == 2:
            predictor.deliver(move[1], now)
            estimate_ns = max(estimate_ns, now) + -(-move[1] * SECOND // RATE)
        else:
            _, heard, at_ns, path_ns, dry_at_ns, is_playing = move
            predictor.report(PlaybackReport(1, heard, at_ns, path_ns, dry_at_ns, bool(is_playing)), now)
        assert 0 <= predictor.heard(now) <= predictor.delivered
        if predictor.is_held:
            assert predictor.heard(now) >= reported
            reported = predictor.heard(now)
        if predictor.delivered:
            # Rounding: one sample and one nanosecond per delivery.  Drift: 0.1 % of 4 s.
            assert predictor.dry_at(now) >= estimate_ns - MAX_PATH_NS - STALE_GUARD_NS - 31 * 41_667 - 4 * MS
            assert predictor.dry_at(now) <= now + predictor.delivered * SECOND // RATE + 31
