from __future__ import annotations

from breeze_rtc.clock import MS
from breeze_rtc.scheduling.costs import CostTable
from breeze_rtc.scheduling.forecast import Forecast
from breeze_rtc.scheduling.step import Stage, StageSpec
from breeze_rtc.scheduling.stream import Feed, Priority, Stream

SPECS = {stage: StageSpec(max_rows=2, buckets=(1, 2), max_tokens=256) for stage in Stage}


def table(prefill_ms: dict[int, int] | None = None) -> CostTable:
    """Ten ms per step and row; a prefill takes a base of 4 ms and 0.25 ms a token."""
    prefill_ms = prefill_ms or {tokens: 4 + tokens // 4 for tokens in (16, 32, 64, 128, 256)}
    return CostTable(
        {
            **{(stage, rows, 1): 10 * rows * MS for stage in Stage if stage > Stage.PREFILL for rows in (1, 2)},
            **{(Stage.CODEC, rows, 4): 14 * rows * MS for rows in (1, 2)},
            **{(Stage.TEXT, 2, 16): 3 * MS},
            **{(Stage.PREFILL, rows, tokens): ms * MS for tokens, ms in prefill_ms.items() for rows in (1, 2)},
        }
    )


def stream(*, tokens: int, encoded: int, feed: Feed = Feed.PREFIX, chunk: int = 1) -> Stream:
    s = Stream(
        1,
        feed=feed,
        priority=Priority.LIVE,
        rows=1,
        max_frames=10,
        interactive=True,
        sample_rate=24_000,
        first_chunk=chunk,
        longest_chunk=16,
        pages_kept=4,
        opened=0,
        served=0,
    )
    s.tokens, s.encoded = tokens, encoded
    return s


def test_rows_beyond_a_stage_take_another_step() -> None:
    """Three rows where two fit: a full step and a small one."""
    forecast = Forecast(SPECS, table())
    assert forecast.stage_ns(Stage.BACKBONE, 3) == 30 * MS
    assert forecast.frame_ns(3) == 60 * MS


def test_a_forecast_changes_when_its_stage_has_run() -> None:
    """Not before it is told, and of the other stages it forgets nothing."""
    costs = table()
    forecast = Forecast(SPECS, costs)
    assert forecast.frame_ns(1) == 20 * MS
    for _ in range(40):
        costs.observe(Stage.DEPTH, 1, 1, 30 * MS)
    assert forecast.frame_ns(1) == 20 * MS
    forecast.forget(Stage.DEPTH)
    assert forecast.frame_ns(1) >= 40 * MS


def test_the_way_to_sound_is_all_that_is_left_of_it() -> None:
    """Text, prompt, depth and codec; then prompt, depth and codec; and with chunks of four, three frames more."""
    forecast = Forecast(SPECS, table())
    assert forecast.way_to_sound_ns([stream(tokens=16, encoded=0)]) == (3 + 8 + 10 + 10) * MS
    assert forecast.way_to_sound_ns([stream(tokens=16, encoded=16)]) == (8 + 10 + 10) * MS
    assert forecast.way_to_sound_ns([stream(tokens=16, encoded=16, chunk=4)]) == (8 + 10 + 3 * 20 + 14) * MS


def test_a_prompt_longer_than_a_step_takes_several() -> None:
    """600 tokens are three steps of at most 256."""
    forecast = Forecast(SPECS, table())
    assert forecast.way_to_sound_ns([stream(tokens=600, encoded=600)]) == (3 * 68 + 10 + 10) * MS


def test_a_piece_of_a_prompt_is_the_largest_that_fits() -> None:
    """64 tokens take 20 ms, 128 take 36."""
    forecast = Forecast(SPECS, table())
    assert [forecast.piece_of_prompt(1, ms * MS) for ms in (20, 35, 36, 500)] == [64, 64, 128, 256]


def test_a_piece_that_would_be_mostly_overhead_is_not_worth_a_step() -> None:
    """32 tokens take 12 ms, less than twice the 8 of the smallest step; where tokens cost nothing, no piece is."""
    forecast = Forecast(SPECS, table())
    assert forecast.piece_of_prompt(1, 19 * MS) == 0
    assert forecast.least_piece_of_prompt(1) == 64
    flat = Forecast(SPECS, table(dict.fromkeys((16, 32, 64, 128, 256), 5)))
    assert flat.piece_of_prompt(1, 500 * MS) == 0
    assert flat.least_piece_of_prompt(1) == 0


def test_a_forecast_that_is_off_says_nothing_takes_time() -> None:
    """A scheduler without predictions has no slack to reckon with."""
    forecast = Forecast(SPECS, table(), is_on=False)
    assert forecast.frame_ns(2) == forecast.way_to_sound_ns([stream(tokens=600, encoded=0)]) == 0
