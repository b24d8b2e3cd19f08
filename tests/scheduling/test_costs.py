from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from breeze_rtc.clock import MS
from breeze_rtc.scheduling.costs import WINDOW, CostTable, size_of
from breeze_rtc.scheduling.step import Stage

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def test_nothing_known_costs_nothing() -> None:
    """A cold table lets the first step run, so that something can be learnt."""
    assert CostTable().predict_ns(Stage.DEPTH, 4) == 0


def test_a_measured_time_is_the_prediction_until_something_slower_is_seen() -> None:
    """Warm-up times stand in for observations."""
    table = CostTable({(Stage.DEPTH, 4, 1): 8 * MS})
    assert table.predict_ns(Stage.DEPTH, 4) == 8 * MS
    table.observe(Stage.DEPTH, 4, 1, 9 * MS)
    assert table.predict_ns(Stage.DEPTH, 4) == 9 * MS


def test_one_stall_in_ten_does_not_move_the_prediction() -> None:
    """The 90th percentile leaves the slowest tenth out."""
    table = CostTable()
    for _ in range(9):
        table.observe(Stage.CODEC, 1, 2, 3 * MS)
    table.observe(Stage.CODEC, 1, 2, 350 * MS)
    assert table.predict_ns(Stage.CODEC, 1, 2) == 3 * MS


def test_a_slower_machine_is_believed_within_four_steps() -> None:
    """More than a tenth of the window is not a stall any more."""
    table = CostTable()
    for _ in range(WINDOW):
        table.observe(Stage.BACKBONE, 8, 1, 2 * MS)
    for _ in range(4):
        table.observe(Stage.BACKBONE, 8, 1, 5 * MS)
    assert table.predict_ns(Stage.BACKBONE, 8) == 5 * MS


def test_old_times_are_forgotten() -> None:
    """Only the last window counts."""
    table = CostTable()
    for duration_ns in [50 * MS] * WINDOW + [5 * MS] * WINDOW:
        table.observe(Stage.BACKBONE, 8, 1, duration_ns)
    assert table.predict_ns(Stage.BACKBONE, 8) == 5 * MS


def test_an_unknown_shape_takes_the_time_of_the_next_larger_one() -> None:
    """A step is not slower than one with more rows and more frames."""
    table = CostTable({(Stage.CODEC, 8, 4): 6 * MS, (Stage.CODEC, 16, 4): 9 * MS})
    assert table.predict_ns(Stage.CODEC, 4, 2) == 6 * MS


def test_an_unknown_shape_above_all_known_is_scaled_by_its_work() -> None:
    """Twice the rows are taken to need twice the time until they have been seen."""
    table = CostTable({(Stage.DEPTH, 4, 1): 8 * MS})
    assert table.predict_ns(Stage.DEPTH, 8) == 16 * MS
    table.observe(Stage.DEPTH, 8, 1, 9 * MS)
    assert table.predict_ns(Stage.DEPTH, 8) == 9 * MS


def test_token_counts_share_a_size_up_to_a_power_of_two() -> None:
    """Texts of similar length learn from each other."""
    assert [size_of(Stage.TEXT, tokens) for tokens in (1, 16, 17, 32, 33)] == [16, 16, 32, 32, 64]
    assert size_of(Stage.CODEC, 4) == 4
    assert size_of(Stage.DEPTH, 1) == 1


observations = st.lists(
    st.tuples(st.sampled_from(list(Stage)), st.sampled_from([1, 2, 4]), st.integers(1, 64), st.integers(0, 10**9)),
    max_size=100,
)


@unhurried
@given(observations)
def test_a_table_made_from_its_state_predicts_the_same(seen: list[tuple[Stage, int, int, int]]) -> None:
    """What a trace writes down is everything the predictions depend on."""
    table = CostTable()
    for stage, bucket, units, duration_ns in seen:
        table.observe(stage, bucket, units, duration_ns)
    again = CostTable.from_state(table.state())
    for stage, bucket, units, _ in seen:
        for rows in (bucket, 8):
            assert again.predict_ns(stage, rows, units) == table.predict_ns(stage, rows, units)


@unhurried
@given(observations)
def test_a_prediction_is_a_time_that_was_seen_for_a_known_shape(seen: list[tuple[Stage, int, int, int]]) -> None:
    """No prediction is invented where there is something to go by."""
    table = CostTable()
    times: dict[tuple[Stage, int, int], list[int]] = {}
    for stage, bucket, units, duration_ns in seen:
        table.observe(stage, bucket, units, duration_ns)
        times.setdefault((stage, bucket, size_of(stage, units)), []).append(duration_ns)
    for (stage, bucket, size), durations in times.items():
        assert table.predict_ns(stage, bucket, size) in durations[-WINDOW:]
