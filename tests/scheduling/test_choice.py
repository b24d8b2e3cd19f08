from __future__ import annotations

import pytest
from desk import BUCKETS, COSTS_MS, SPECS, Desk, stages, streams_of

from breeze_rtc.clock import MS
from breeze_rtc.scheduling.choice import Chooser
from breeze_rtc.scheduling.costs import CostTable
from breeze_rtc.scheduling.forecast import Forecast
from breeze_rtc.scheduling.policy import Policy
from breeze_rtc.scheduling.step import DeadlineMissed, Stage, StageSpec, Step, Why
from breeze_rtc.scheduling.stream import Feed, Priority, Stream
from breeze_rtc.scheduling.survey import Survey, Work

PROMPT_SPECS = {**SPECS, Stage.PREFILL: StageSpec(max_rows=4, buckets=(1, 2, 4), max_tokens=256)}
PROMPT_TABLE = CostTable(
    {
        **{(Stage.PREFILL, 4, tokens): (4 + tokens // 4) * MS for tokens in (16, 32, 64, 128, 256)},
        **{
            (stage, SPECS[stage].buckets[-1], 16 if stage is Stage.CODEC else SPECS[stage].max_tokens or 1): ms * MS
            for stage, ms in COSTS_MS.items()
            if stage is not Stage.PREFILL
        },
    }
)
"""Steps as long as the desk makes them, except that a prefill takes 0.25 ms per token."""


class PromptDesk(Desk):
    """A desk whose prefills take what its table says."""

    def takes_ms(self, step: Step) -> int:
        if step.stage is Stage.PREFILL:
            return 4 + sum(row.count for row in step.rows) // 4
        return super().takes_ms(step)


def desk_with_a_long_prompt() -> PromptDesk:
    """One stream speaks; then a prompt of 1,500 tokens comes, 375 ms of prefill, more than anybody's slack."""
    desk = PromptDesk(table=PROMPT_TABLE, specs=PROMPT_SPECS, policy=Policy(lead_cap_ns=200 * MS, ladder=(1, 2)))
    desk.open(1)
    desk.until(1_000)
    desk.open(2, tokens=0, feed=Feed.PREFIX)
    for _ in range(25):
        desk.scheduler.push_text(2, 60, desk.now)
    desk.scheduler.end_text(2, desk.now)
    desk.steps.clear()
    return desk


def test_a_long_prompt_rides_between_the_steps_of_those_who_speak() -> None:
    """In pieces as large as slack allows, and nobody is late."""
    desk = desk_with_a_long_prompt()
    desk.until_spoken(2)
    pieces = [(number, step) for number, step in enumerate(desk.steps) if step.stage is Stage.PREFILL]
    assert len(pieces) > 4
    assert sum(step.rows[0].count for _, step in pieces) == 1_500
    between = {desk.steps[number + 1].stage for number, _ in pieces[:-1]}
    assert Stage.BACKBONE in between
    assert not [event for event in desk.happened if isinstance(event, DeadlineMissed)]


def test_a_piece_of_a_prompt_fits_into_the_least_slack() -> None:
    """What it takes is not more than anybody had; with the guard, the next larger one would have been."""
    desk = desk_with_a_long_prompt()
    desk.until_spoken(2)
    pieces = [step for step in desk.steps if step.why is Why.PROMPT_PIECE]
    assert pieces
    for step in pieces:
        (row,) = step.rows
        assert streams_of(step) == [2]
        assert step.slack_ns is not None
        assert (4 + row.count // 4) * MS <= step.slack_ns
        assert row.count == 256 or (4 + 2 * row.count // 4) * MS + Policy().guard_ns > step.slack_ns


def test_a_prompt_that_fits_is_not_cut() -> None:
    """Ten tokens run whole, with their first sound behind them."""
    desk = PromptDesk(table=PROMPT_TABLE, specs=PROMPT_SPECS)
    desk.open(1)
    desk.until(1_000)
    desk.open(2, tokens=10, feed=Feed.PREFIX)
    desk.steps.clear()
    desk.until_spoken(2)
    assert [step.rows[0].count for step in desk.steps if step.stage is Stage.PREFILL] == [10]


def test_a_full_chunk_waits_for_those_the_next_frame_fills() -> None:
    """Two streams a frame apart: the first chunk waits for the second, once, and they share a codec step."""
    desk = Desk(policy=Policy(lead_cap_ns=None, ladder=(4,)))
    desk.open(1)
    desk.until_spoken(1)
    desk.step()
    desk.step()
    desk.open(2)
    desk.until_spoken(2)
    desk.until(400)
    waits = [number for number, step in enumerate(desk.steps) if step.why is Why.JOINS_CODEC]
    assert waits
    for number in waits:
        backbone, depth, codec = desk.steps[number : number + 3]
        assert stages([backbone, depth, codec]) == [Stage.BACKBONE, Stage.DEPTH, Stage.CODEC]
        assert len(codec.rows) == 2


def test_a_chunk_waits_only_once() -> None:
    """Four streams, each a frame behind the other: nobody is passed on from one to the next."""
    desk = Desk(policy=Policy(lead_cap_ns=None, ladder=(4,)))
    for stream in range(4):
        desk.open(stream)
        desk.until_spoken(stream)
        desk.step()
        desk.step()
    desk.until(900)
    longest = 0
    waited = 0
    for step in desk.steps:
        waited = waited + 1 if step.why is Why.JOINS_CODEC else waited
        if step.stage is Stage.CODEC:
            longest, waited = max(longest, waited), 0
    assert longest == 1


def test_resting_streams_begin_their_chunks_together() -> None:
    """Three that may begin at different times run in steps of three; the machine is free in between."""
    desk = Desk()
    for stream in (1, 2, 3):
        desk.open(stream)
        desk.until(desk.now // MS + 150)
    desk.until(3_000)
    desk.steps.clear()
    desk.until(6_000)
    backbone = [len(step.rows) for step in desk.steps if step.stage is Stage.BACKBONE]
    assert sum(backbone) > 100
    assert sum(backbone) / len(backbone) > 2.5


@pytest.mark.parametrize(("later_ms", "stage"), [(10, Stage.CODEC), (40, Stage.BACKBONE)])
def test_a_codec_step_too_long_for_a_stream_without_a_frame_comes_second(later_ms: int, stage: Stage) -> None:
    """A chunk of four takes 40 ms in the codec.  With 56 ms to spare the other stream can wait for it, with 26 not."""
    table = CostTable(
        {
            **{(step, rows, 1): 5 * MS for step in (Stage.BACKBONE, Stage.DEPTH) for rows in BUCKETS},
            **{(Stage.CODEC, 8, frames): ms * MS for frames, ms in ((1, 4), (2, 10), (4, 40))},
            (Stage.TEXT, 4, 64): 2 * MS,
            (Stage.PREFILL, 4, 32): 5 * MS,
        }
    )
    desk = Desk(table=table)
    desk.open(1, interactive=False)
    while desk.chunks(1) != [1, 2] or desk.stage(1) != "codec":
        desk.step()
    desk.open(2)
    desk.until_spoken(2)
    assert desk.chunks(1) == [1, 2]
    desk.now += later_ms * MS
    assert desk.step().stage is stage


@pytest.mark.parametrize(("depth_ms", "least_ms", "most_ms"), [(7, 590, 610), (40, 700, 720)])
def test_a_resting_stream_keeps_half_the_cap_or_four_times_what_its_chunk_takes(
    depth_ms: int, least_ms: int, most_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With frames of 10 ms it waits until 600 ms are left; with 43 ms, and 176 for a chunk, until 704."""
    monkeypatch.setitem(COSTS_MS, Stage.DEPTH, depth_ms)
    batches = {
        **{(Stage.BACKBONE, rows, 1): 3 * MS for rows in BUCKETS},
        **{(Stage.DEPTH, rows, 1): depth_ms * MS for rows in BUCKETS},
        (Stage.CODEC, 8, 16): 4 * MS,
        (Stage.TEXT, 4, 64): 2 * MS,
        (Stage.PREFILL, 4, 32): 5 * MS,
    }
    desk = Desk(table=CostTable(batches))
    desk.open(1)
    desk.until(3_000)
    while (step := desk.scheduler.next_step(desk.now)) is not None:
        desk.done(step)
    wake_at = desk.scheduler.wake_at()
    assert wake_at is not None
    left_ms = desk.lead_ms(1) - (wake_at - desk.now) // MS
    assert least_ms <= left_ms <= most_ms


@pytest.mark.parametrize(("row_ms", "rows"), [(5, 6), (25, 2)])
def test_riders_do_not_lengthen_a_codec_step_that_was_cut_to_be_in_time(row_ms: int, rows: int) -> None:
    """Three full chunks with 100 ms until their deadline; three streams have as many frames in hand and would ride
    along.  Where three rows take 100 ms, two go, and nobody rides."""
    costs = CostTable({(Stage.CODEC, bucket, 2): bucket * row_ms * MS for bucket in BUCKETS})
    forecast = Forecast(SPECS, costs)
    survey = Survey(Policy(waits_for_rows=False), forecast, frame_ns=80 * MS)
    survey.frame_cost_ns = 60 * MS  # So the riders' chunks would be due after one more frame.
    chooser = Chooser(SPECS, Policy(waits_for_rows=False), forecast, survey, frame_ns=80 * MS)
    work = Work()
    full = [stream_in_hand(number, target=2) for number in range(3)]
    riders = [stream_in_hand(number, target=4) for number in range(3, 6)]
    work.codec, work.sizes, work.fills = full, {2: full}, riders
    choice = chooser.choose(work, 0)
    assert choice is not None
    assert choice.stage is Stage.CODEC
    assert len(choice.streams) == rows


def stream_in_hand(number: int, *, target: int) -> Stream:
    """One that has spoken, has two frames in hand and 100 ms to spare."""
    s = Stream(
        number,
        feed=Feed.PER_FRAME,
        priority=Priority.LIVE,
        rows=1,
        max_frames=100,
        interactive=True,
        sample_rate=24_000,
        first_chunk=1,
        longest_chunk=16,
        pages_kept=1,
        opened=number,
        served=0,
    )
    s.started = s.made = 5
    s.delivered = 3
    s.target = target
    s.slack_ns = 100 * MS
    return s
