from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from breeze_rtc.clock import MS
from breeze_rtc.scheduling.costs import ONE, CostTable, size_of
from breeze_rtc.scheduling.step import Stage

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def test_nothing_known_costs_nothing() -> None:
    """A cold table lets the first step run, so that something can be learnt."""
    assert CostTable().predict_ns(Stage.DEPTH, 4) == 0


def test_a_measured_time_is_the_prediction() -> None:
    """Warm-up times stand in for observations, and steps that take as long as that change nothing."""
    table = CostTable({(Stage.DEPTH, 4, 1): 8 * MS})
    for _ in range(50):
        assert table.predict_ns(Stage.DEPTH, 4) == 8 * MS
        table.observe(Stage.DEPTH, 4, 1, 8 * MS)


def run(table: CostTable, times_ms: Iterable[float], *, bucket: int = 4, stage: Stage = Stage.DEPTH) -> list[float]:
    """Let steps take these times; what each was predicted to take, in ms."""
    predicted = []
    for time_ms in times_ms:
        predicted.append(table.predict_ns(stage, bucket) / MS)
        table.observe(stage, bucket, 1, int(time_ms * MS))
    return predicted


def noisy(chance: random.Random, ms: float, spread: float, steps: int) -> list[float]:
    """Log-normal times around `ms`."""
    return [ms * math.exp(chance.gauss(0, spread)) for _ in range(steps)]


def misses(times_ms: list[float], predicted: list[float]) -> float:
    """Share of steps that took longer than predicted."""
    return sum(time > limit for time, limit in zip(times_ms, predicted, strict=True)) / len(times_ms)


@pytest.mark.parametrize("spread", [0.02, 0.05, 0.15, 0.4])
def test_one_step_in_ten_takes_longer_than_predicted(spread: float) -> None:
    """However much the times vary, and without wasting more than that needs: the margin finds the 90th percentile."""
    chance = random.Random(1)
    times = noisy(chance, 10, spread, 3_000)
    predicted = run(CostTable({(Stage.DEPTH, 4, 1): 10 * MS}), times)
    assert 0.08 < misses(times[300:], predicted[300:]) < 0.12
    percentile = 10 * math.exp(1.2816 * spread)
    assert statistics.mean(predicted[300:]) < percentile * (1 + spread / 2)


def test_the_margin_tightens_when_the_machine_becomes_calm() -> None:
    """A noisy hour is not held against a calm one."""
    chance = random.Random(2)
    table = CostTable({(Stage.DEPTH, 4, 1): 10 * MS})
    assert run(table, noisy(chance, 10, 0.4, 500))[-1] > 13
    calm = noisy(chance, 10, 0.02, 500)
    predicted = run(table, calm)
    assert statistics.mean(predicted[300:]) < 10.6
    assert misses(calm[300:], predicted[300:]) < 0.15


def test_one_stall_does_not_move_the_prediction() -> None:
    """A step that took forty times as long says nothing about the next; the margin widens by less than 3 %."""
    table = CostTable()
    run(table, [3] * 20)
    assert run(table, [120, 3, 3, 3])[1:] == pytest.approx([3 * 1.027, 3 * 1.024, 3 * 1.021], rel=0.001)


def test_hiccups_of_the_garbage_collector_are_left_out() -> None:
    """One step in forty takes 30 ms more: the others are predicted as if it did not."""
    chance = random.Random(3)
    times = noisy(chance, 8, 0.05, 2_000)
    times[::40] = [time + 30 for time in times[::40]]
    predicted = run(CostTable({(Stage.DEPTH, 4, 1): 8 * MS}), times)
    assert max(predicted[100:]) < 8 * 1.35
    assert 0.08 < misses(times[100:], predicted[100:]) < 0.12


def test_a_slower_machine_is_believed_at_the_second_slow_step() -> None:
    """Three times slower at once: two steps take longer than predicted, and none is predicted at nine times."""
    table = CostTable({(Stage.DEPTH, 4, 1): 5 * MS})
    run(table, [5] * 100)
    predicted = run(table, [15] * 100)
    assert predicted[1] < 15 <= predicted[2]
    assert max(predicted) < 15 * 1.1
    assert predicted[-1] < 15 * 1.03


def test_a_slower_machine_is_believed_for_steps_that_have_not_run_since() -> None:
    """What one kind of step says of the machine goes for all kinds of its stage, and not for other stages."""
    stages = (Stage.DEPTH, Stage.CODEC)
    table = CostTable({(stage, bucket, 1): 5 * bucket * MS for bucket in (4, 8) for stage in stages})
    run(table, [60] * 50, bucket=4)
    assert table.predict_ns(Stage.DEPTH, 8) == pytest.approx(120 * MS, rel=0.05)
    assert table.predict_ns(Stage.CODEC, 8) == 40 * MS
    run(table, [20] * 50, bucket=4)
    assert table.predict_ns(Stage.DEPTH, 8) == pytest.approx(40 * MS, rel=0.05)


def test_a_faster_machine_is_believed_after_eight_steps() -> None:
    """Slower to believe in good news than in bad; the stage's other kinds follow too."""
    table = CostTable({(Stage.DEPTH, bucket, 1): 5 * bucket * MS for bucket in (4, 8)})
    run(table, [20] * 100)
    predicted = run(table, [10] * 100)
    assert predicted[7] > 19
    assert max(predicted[8:]) < 10.5
    assert table.predict_ns(Stage.DEPTH, 8) == pytest.approx(20 * MS, rel=0.1)


def test_a_load_that_comes_and_goes_leaves_the_levels_as_they_were() -> None:
    """Ten minutes of a busy and an idle machine in turn: no kind's level runs away from the others'."""
    chance = random.Random(4)
    table = CostTable({(Stage.DEPTH, bucket, 1): 5 * bucket * MS for bucket in (1, 2, 4, 8)})
    for turn in range(60):
        slow = (1, 3, 1.5)[turn % 3]
        times, predicted = [], []
        for _ in range(120):
            bucket = chance.choice((1, 1, 1, 1, 2, 2, 4))
            times.append(5 * bucket * slow * math.exp(chance.gauss(0, 0.1)))
            predicted += run(table, times[-1:], bucket=bucket)
        assert misses(times[20:], predicted[20:]) < 0.25
        assert table.predict_ns(Stage.DEPTH, 8) == pytest.approx(40 * slow * MS * 1.13, rel=0.35)


def test_a_cold_table_learns_from_a_slow_first_step() -> None:
    """The first step of all loads libraries: five steps later nothing is left of it."""
    predicted = run(CostTable(), [400, 8, 8, 8, 8, 8, 8, 8])
    assert predicted[0] == 0
    assert predicted[2:] == pytest.approx([8] * 6, rel=0.1)


def test_a_load_that_swings_from_step_to_step_is_covered() -> None:
    """Whatever the durations do, in the long run about one step in ten takes longer than predicted: also if they
    alternate, climb and fall.
    """
    for times in (
        [6, 18] * 1_000,
        [6, 6, 6, 18] * 500,
        [5 + step % 200 / 20 for step in range(2_000)],
        [10 + 8 * math.sin(step / 9) for step in range(2_000)],
    ):
        predicted = run(CostTable({(Stage.DEPTH, 4, 1): 6 * MS}), times)
        assert misses(times[200:], predicted[200:]) < 0.13


@pytest.mark.parametrize("spread", [0.0, 0.05, 0.5])
def test_the_mean_is_what_many_steps_take_together(spread: float) -> None:
    """Neither their median nor what nine of ten stay below: those would let too many listeners in, or too few."""
    chance = random.Random(5)
    table = CostTable({(Stage.DEPTH, bucket, 1): 10 * MS for bucket in (4, 8)})
    times = noisy(chance, 10, spread, 2_000)
    means = []
    for time_ms in times:
        means.append(table.mean_ns(Stage.DEPTH, 4) / MS)
        run(table, [time_ms])
    assert statistics.mean(means[200:]) == pytest.approx(statistics.mean(times[200:]), rel=0.06)
    assert table.mean_ns(Stage.DEPTH, 8) == pytest.approx(table.mean_ns(Stage.DEPTH, 4), rel=0.2 + spread)
    assert table.mean_ns(Stage.DEPTH, 4) <= table.predict_ns(Stage.DEPTH, 4)


def test_a_stall_counts_for_little_in_a_mean() -> None:
    """A step that took a hundred times as long does not keep listeners out."""
    table = CostTable({(Stage.DEPTH, 4, 1): 10 * MS})
    run(table, [10] * 50 + [1_000])
    assert table.mean_ns(Stage.DEPTH, 4) < 11.2 * MS


def test_errors_are_counted_by_ratio() -> None:
    """Steps of which something was known: two within their prediction, one at 1.2 times, one at ten times it."""
    table = CostTable()
    table.observe(Stage.CODEC, 1, 1, 10 * MS)
    ratios = table.ratios[Stage.CODEC]
    assert ratios.count == 0
    for time_ms in (10, 5, 12, 102.5):
        table.observe(Stage.CODEC, 1, 1, int(time_ms * MS))
    assert (ratios.count, ratios.above(ONE)) == (4, 2)
    plain = ratios.in_units_of(ONE)
    assert [round(bound, 2) for bound, count in zip(plain["bounds"], plain["counts"], strict=False) if count] == [
        0.5,
        1.0,
        1.25,
    ]
    assert plain["counts"][-1] == 1
    assert plain["sum"] == pytest.approx(12.7, rel=0.01)
    assert table.margin(Stage.CODEC) > ONE


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


def test_a_broken_state_is_refused() -> None:
    """No table is made of what is none."""
    good = CostTable({(Stage.DEPTH, 4, 1): 8 * MS}).state()
    for broken in (
        {},
        {"kinds": []},
        good | {"kinds": [[9, 4, 1, [5]]]},
        good | {"kinds": [[3, 4, 1, [-5]]]},
        good | {"kinds": [[3, 4, 1, ["5"]]]},
        good | {"kinds": [[3, 4, [5]]]},
        good | {"stages": [[3, 1.5, 64_000, [1000]]]},
        good | {"stages": 7},
        good | {"stumble_ns": -1},
    ):
        with pytest.raises((ValueError, TypeError, KeyError)):
            CostTable.from_state(broken)


def test_a_stage_that_was_taken_over_is_predicted_by_what_was_measured() -> None:
    """From the next step on, whatever ran before and whatever has not run since: kinds that were not measured are
    guessed from those that were, and other stages are as they were."""
    rows = (1, 4, 16)
    table = CostTable(
        {(stage, count, 1): (40 + count) * MS for count in rows for stage in (Stage.DEPTH, Stage.BACKBONE)}
    )
    run(table, [90] * 40, bucket=16)
    run(table, [70] * 40, bucket=4)
    backbone_ns = table.predict_ns(Stage.BACKBONE, 16)
    version = table.version
    table.take_over(Stage.DEPTH, {(1, 1): 5 * MS, (16, 1): 7 * MS})
    assert table.version > version
    assert [table.predict_ns(Stage.DEPTH, count) for count in rows] == [5 * MS, 7 * MS, 7 * MS]
    assert table.mean_ns(Stage.DEPTH, 16) == 7 * MS
    assert table.predict_ns(Stage.BACKBONE, 16) == backbone_ns
    run(table, [5] * 2_000, bucket=1)
    assert table.predict_ns(Stage.DEPTH, 16) == 7 * MS
    again = CostTable.from_state(table.state())
    assert again.predict_ns(Stage.DEPTH, 4) == table.predict_ns(Stage.DEPTH, 4) == 7 * MS


def test_what_steps_took_before_a_takeover_is_what_the_next_start_begins_with() -> None:
    """It runs in the old way at first.  Taken over twice, it is still the first that counts; without a takeover there
    is no difference."""
    table = CostTable({(stage, 4, 1): 40 * MS for stage in (Stage.DEPTH, Stage.BACKBONE)})
    run(table, [50] * 40)
    assert table.state_at_start() == table.state()
    before = table.predict_ns(Stage.DEPTH, 4)
    for measured_ms in (5, 4):
        table.take_over(Stage.DEPTH, {(4, 1): measured_ms * MS})
        run(table, [measured_ms] * 40)
    for _ in range(40):
        table.observe(Stage.BACKBONE, 4, 1, 30 * MS)
    next_start = CostTable.from_state(table.state_at_start())
    assert next_start.predict_ns(Stage.DEPTH, 4) == before == pytest.approx(50 * MS, rel=0.02)
    assert next_start.predict_ns(Stage.BACKBONE, 4) == table.predict_ns(Stage.BACKBONE, 4) < 35 * MS
    assert CostTable.from_state(table.state()).predict_ns(Stage.DEPTH, 4) == 4 * MS
