from __future__ import annotations

import pytest
from desk import BUCKETS, COSTS_MS, FRAME, FRAME_MS, Desk, costs, stages, streams_of

from breeze_rtc.clock import MS
from breeze_rtc.playback import PlaybackReport
from breeze_rtc.scheduling.choice import DEFERRAL_NS
from breeze_rtc.scheduling.costs import CostTable
from breeze_rtc.scheduling.policy import Policy
from breeze_rtc.scheduling.step import (
    AudioReady,
    DeadlineMissed,
    RowResult,
    Stage,
    StepResult,
    StreamAdmitted,
    StreamFailed,
    StreamFinished,
    StreamRefused,
)
from breeze_rtc.scheduling.stream import Feed, Priority

ADMITS_ALL = Policy(admits_by_load=False)


# ---- one stream ------------------------------------------------------------------------------------------------------


def test_one_stream_passes_the_stages_in_order() -> None:
    """Text, prefill, depth, codec: the first frame is heard as soon as it exists."""
    desk = Desk()
    desk.open(1)
    for _ in range(4):
        desk.step()
    assert stages(desk.steps) == [Stage.TEXT, Stage.PREFILL, Stage.DEPTH, Stage.CODEC]
    assert desk.happened == [AudioReady(1, 0, FRAME)]


def test_chunks_grow_and_their_samples_are_contiguous() -> None:
    """1, 2, 4 frames: with frames of 80 ms a chunk of 8 would be longer than half the lead cap."""
    desk = Desk()
    desk.open(1, frames=40)
    desk.until(6_000)
    assert desk.chunks(1)[:4] == [1, 2, 4, 4]
    position = 0
    for event in desk.of(1)[:-1]:
        assert isinstance(event, AudioReady)
        assert event.start_samples == position
        position += event.samples
    assert desk.of(1)[-1] == StreamFinished(1, position)
    assert position == 40 * FRAME


def test_a_stage_that_is_taken_over_is_reckoned_with_at_once() -> None:
    """Also in what was worked out before, of steps that have not run since."""
    desk = Desk()
    desk.open(1)
    desk.until(500)
    desk.scheduler.stats(desk.now)
    assert desk.scheduler._survey.frame_cost_ns == (COSTS_MS[Stage.BACKBONE] + COSTS_MS[Stage.DEPTH]) * MS
    desk.scheduler.measured(Stage.DEPTH, {(8, 1): 2 * MS}, desk.now)
    desk.scheduler.stats(desk.now)
    assert desk.scheduler._survey.frame_cost_ns == (COSTS_MS[Stage.BACKBONE] + 2) * MS


def test_what_fills_no_chunk_at_the_end_is_sent_in_smaller_ones() -> None:
    """1 + 2 + 4 frames and 3 left over: 2, then 1."""
    desk = Desk()
    desk.open(1, frames=10)
    desk.until(3_000)
    assert desk.chunks(1) == [1, 2, 4, 2, 1]


def test_max_frames_is_a_hard_limit() -> None:
    """A model that never ends is cut off."""
    desk = Desk()
    desk.open(1, frames=10**6, max_frames=12)
    desk.until(5_000)
    assert desk.of(1)[-1] == StreamFinished(1, 12 * FRAME)


def test_a_stream_without_text_finishes_at_once() -> None:
    """There is nothing to run and nothing to hear."""
    desk = Desk()
    desk.open(1, tokens=0)
    desk.scheduler.end_text(1, 0)
    assert desk.scheduler.events() == [StreamFinished(1, 0)]
    assert desk.scheduler.next_step(0) is None
    assert desk.scheduler.wake_at() is None


def test_a_model_that_ends_before_the_first_frame_finishes_with_no_samples() -> None:
    """PREFILL may say that the speech is over."""
    desk = Desk()
    desk.open(1)
    desk.step()
    step = desk.scheduler.next_step(desk.now)
    assert step is not None
    desk.scheduler.step_done(step, StepResult((RowResult(1, ended=True),), 5 * MS), desk.now + 5 * MS)
    assert desk.scheduler.events() == [StreamFinished(1, 0)]


def test_a_prefix_is_prefilled_in_token_chunks_after_its_end() -> None:
    """80 tokens over 3 steps of at most 32; the first code comes with the last of them."""
    desk = Desk()
    desk.open(1, tokens=0, feed=Feed.PREFIX)
    desk.scheduler.push_text(1, 60, 0)
    desk.step()
    assert desk.scheduler.next_step(desk.now) is None
    desk.scheduler.push_text(1, 20, desk.now)
    desk.scheduler.end_text(1, desk.now)
    desk.until_spoken(1)
    prefills = [(step.rows[0].start, step.rows[0].count) for step in desk.steps if step.stage is Stage.PREFILL]
    assert prefills == [(0, 32), (32, 32), (64, 16)]
    assert stages(desk.steps) == [Stage.TEXT, Stage.TEXT, *[Stage.PREFILL] * 3, Stage.DEPTH, Stage.CODEC]


def test_text_is_encoded_in_whole_pieces() -> None:
    """A piece is one row however long; the encoder looks both ways and must see all of it."""
    desk = Desk()
    desk.open(1, tokens=0)
    for tokens in (30, 40, 100):
        desk.scheduler.push_text(1, tokens, 0)
    texts = []
    while len(texts) < 3:
        step = desk.step()
        if step.stage is Stage.TEXT:
            texts.append((step.rows[0].start, step.rows[0].count))
    assert texts == [(0, 30), (30, 40), (70, 100)]


def test_a_stream_that_wants_text_is_parked_until_text_is_encoded() -> None:
    """It is neither run in vain nor forgotten."""
    desk = Desk()
    desk.open(1, tokens=0)
    desk.scheduler.push_text(1, 8, 0)
    desk.starving.add(1)
    desk.until(1_000)
    assert desk.samples(1) == FRAME
    assert desk.stage(1) == "waiting"
    assert desk.scheduler.wake_at() is None
    desk.starving.clear()
    desk.scheduler.push_text(1, 8, desk.now)
    assert desk.step().stage is Stage.TEXT
    assert desk.step().stage is Stage.BACKBONE


def test_the_end_of_the_text_wakes_a_parked_stream() -> None:
    """It need not wait for what will not come."""
    desk = Desk()
    desk.open(1, tokens=0, frames=3)
    desk.scheduler.push_text(1, 8, 0)
    desk.starving.add(1)
    desk.until(1_000)
    desk.scheduler.end_text(1, desk.now)
    desk.until(3_000)
    assert desk.of(1)[-1] == StreamFinished(1, 3 * FRAME)


# ---- pages and slots -------------------------------------------------------------------------------------------------


def test_pages_come_as_positions_grow() -> None:
    """One page for 16 positions of each row; the second with the 17th."""
    desk = Desk()
    desk.open(1, rows=2)
    desk.until(4_000)
    pages = [(row.start, len(row.new_pages)) for step in desk.steps for row in step.rows if row.new_pages]
    assert pages == [(0, 2), (16, 2), (32, 2), (48, 2)]


def test_a_stream_waits_while_its_worst_case_does_not_fit() -> None:
    """201 positions are 13 pages; 25 hold one such stream."""
    desk = Desk(kv_pages=25)
    desk.open(1)
    assert desk.open(2) is None
    desk.scheduler.cancel(1, 0)
    step = desk.scheduler.next_step(0)
    assert step is not None
    assert streams_of(step) == [2]
    assert desk.scheduler.events() == [StreamAdmitted(2, 0)]


def test_a_prompt_that_outgrows_the_memory_is_refused_at_once() -> None:
    """It does not wait for pages that others hold: they might wait for its own."""
    desk = Desk(kv_pages=30)
    desk.open(1, tokens=0, feed=Feed.PREFIX)
    desk.scheduler.push_text(1, 250, 0)
    desk.scheduler.push_text(1, 250, 0)
    (event,) = desk.scheduler.events()
    assert isinstance(event, StreamRefused)
    assert "500 tokens" in event.detail
    assert event.retry_after_s >= 1
    assert desk.scheduler.stats(0).free_slots == 8
    desk.open(2)


# ---- cancel and failure ----------------------------------------------------------------------------------------------


def test_cancel_frees_at_once_when_no_step_is_out() -> None:
    """And nothing more is said of the stream."""
    desk = Desk()
    desk.open(1)
    desk.step()
    desk.scheduler.cancel(1, desk.now)
    assert desk.scheduler.stats(desk.now).free_slots == 8
    assert desk.scheduler.next_step(desk.now) is None
    assert desk.scheduler.events() == []


def test_cancel_waits_for_the_step_that_carries_the_stream() -> None:
    """Its memory is in use until then; its result is ignored."""
    desk = Desk()
    desk.open(1)
    while (step := desk.scheduler.next_step(desk.now)) is not None and step.stage is not Stage.CODEC:
        desk.done(step)
    assert step is not None
    desk.scheduler.cancel(1, desk.now)
    assert desk.scheduler.stats(desk.now).free_slots == 7
    desk.done(step)
    assert desk.happened == []
    stats = desk.scheduler.stats(desk.now)
    assert (stats.free_slots, stats.free_pages) == (8, 1_000)


def test_an_event_that_nobody_took_is_gone_after_cancel() -> None:
    """Nothing is said of a cancelled stream, not even what had been true."""
    desk = Desk()
    desk.open(1)
    while (step := desk.scheduler.next_step(desk.now)) is not None and step.stage is not Stage.CODEC:
        desk.done(step)
    assert step is not None
    desk.scheduler.step_done(step, StepResult((RowResult(1, samples=FRAME),), 4 * MS), desk.now + 4 * MS)
    desk.scheduler.cancel(1, desk.now + 4 * MS)
    assert desk.scheduler.events() == []


def test_a_row_that_fails_is_dropped_and_the_others_go_on() -> None:
    """One stream's fault is its own."""
    desk = Desk()
    desk.open(1)
    desk.open(2)
    step = desk.scheduler.next_step(0)
    assert step is not None
    assert streams_of(step) == [1, 2]
    rows = (RowResult(1), RowResult(2, error="bad token"))
    desk.scheduler.step_done(step, StepResult(rows, 2 * MS), 2 * MS)
    assert desk.scheduler.events() == [StreamFailed(2, Stage.TEXT, "bad token")]
    assert desk.scheduler.stats(2 * MS).free_slots == 7
    step = desk.scheduler.next_step(2 * MS)
    assert step is not None
    assert streams_of(step) == [1]


def test_words_for_a_stream_that_is_gone_are_ignored() -> None:
    """The caller cannot know yet that it failed."""
    desk = Desk()
    desk.scheduler.push_text(7, 5, 0)
    desk.scheduler.end_text(7, 0)
    desk.scheduler.cancel(7, 0)
    desk.scheduler.report(PlaybackReport(7, 0, 0, 0), 0)
    assert desk.scheduler.events() == []


# ---- batching --------------------------------------------------------------------------------------------------------


def test_streams_that_wait_for_the_same_stage_run_together() -> None:
    """Three texts, one step; three prefills, one step."""
    desk = Desk()
    for stream in (1, 2, 3):
        desk.open(stream)
    assert [(step.stage, streams_of(step), step.bucket) for step in (desk.step(), desk.step())] == [
        (Stage.TEXT, [1, 2, 3], 4),
        (Stage.PREFILL, [1, 2, 3], 4),
    ]


def test_a_new_stream_joins_the_next_step_of_a_running_one() -> None:
    """It takes part in the first frame step after its first sound, not after the other has ended."""
    desk = Desk()
    desk.open(1)
    desk.until_spoken(1)
    desk.step()
    desk.open(2)
    desk.until_spoken(2)
    while (step := desk.step()).stage is not Stage.BACKBONE:
        pass
    assert sorted(streams_of(step)) == [1, 2]


def test_depth_follows_at_once() -> None:
    """No step comes between a frame's first code and the others, whoever has arrived."""
    desk = Desk()
    desk.open(1)
    while desk.step().stage is not Stage.PREFILL:
        pass
    desk.open(2)
    assert desk.step().stage is Stage.DEPTH


def test_each_stage_has_its_own_batch_limit() -> None:
    """Five texts are two steps of the encoder and two prefills, then one frame step."""
    desk = Desk()
    for stream in range(1, 6):
        desk.open(stream)
    assert [len(desk.step().rows) for _ in range(4)] == [4, 1, 4, 4]
    desk.until(200)
    assert max(len(step.rows) for step in desk.steps if step.stage is Stage.BACKBONE) == 5


def test_every_row_of_a_codec_step_has_the_same_number_of_frames() -> None:
    """Padding would enter the codec's state; and no row has frames that are not made yet."""
    desk = Desk()
    for stream in range(6):
        desk.open(stream, max_frames=20 + stream, interactive=stream % 2 == 0)
        desk.until(90 * stream)
    desk.until(3_000)
    made = dict.fromkeys(range(6), 0)
    widest = 0
    for step in desk.steps:
        if step.stage is Stage.DEPTH:
            for row in step.rows:
                made[row.stream] += 1
        elif step.stage is Stage.CODEC:
            widest = max(widest, len(step.rows))
            assert len({row.count for row in step.rows}) == 1
            assert all(row.start + row.count <= made[row.stream] for row in step.rows)
    assert widest > 1
    assert made == {stream: 20 + stream for stream in range(6)}


# ---- who goes first --------------------------------------------------------------------------------------------------


def test_a_first_sound_goes_first_when_the_others_can_spare_the_time() -> None:
    """18 ms to the first sound, and the running stream has more."""
    desk = Desk()
    desk.open(1)
    desk.until(400)
    desk.open(2)
    began = desk.now
    desk.until_spoken(2)
    assert desk.now - began == 18 * MS


def test_a_first_sound_waits_for_a_stream_it_would_make_late() -> None:
    """The running stream gets its frame first, and nobody is late."""
    desk = Desk()
    desk.open(1)
    desk.until_spoken(1)
    # The sink has 25 ms left; one frame needs 14, a first sound 18.
    desk.now += 55 * MS
    desk.open(2)
    assert [(step.stage, streams_of(step)) for step in (desk.step(), desk.step(), desk.step())] == [
        (Stage.BACKBONE, [1]),
        (Stage.DEPTH, [1]),
        (Stage.CODEC, [1]),
    ]
    desk.until_spoken(2)
    assert not [event for event in desk.happened if isinstance(event, DeadlineMissed)]


def late_desk() -> Desk:
    """Seven streams that can never be on time: every frame step takes longer than its frame lasts."""
    desk = Desk(table=CostTable(), policy=ADMITS_ALL)
    for stream in range(1, 8):
        desk.open(stream)
    desk.until_spoken(*range(1, 8))
    desk.until(400)
    return desk


def test_no_first_sound_is_deferred_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind streams that are always late, it starts after 40 ms and gets at least every other step."""
    monkeypatch.setitem(COSTS_MS, Stage.DEPTH, 90)
    desk = late_desk()
    desk.open(8)
    opened_at = desk.now
    first = None
    desk.steps.clear()
    while not desk.samples(8):
        step = desk.step()
        if first is None and 8 in streams_of(step):
            first = desk.now - COSTS_MS[step.stage] * MS - opened_at
    assert first is not None
    # 40 ms, and the step that was out by then with its depth.
    assert first <= DEFERRAL_NS[Priority.LIVE] + 97 * MS
    # Text, prefill, depth, codec; before each of the first two and the last, at most one frame of the others.
    assert len(desk.steps) <= 4 + 3 * 3


def test_a_late_stream_gets_every_other_step_of_forced_first_sounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """First sounds that come without end do not silence who is speaking."""
    monkeypatch.setitem(COSTS_MS, Stage.DEPTH, 90)
    desk = Desk(table=costs({**COSTS_MS, Stage.DEPTH: 90}), slots=64, policy=ADMITS_ALL)
    desk.open(1)
    desk.until_spoken(1)
    spoken = desk.samples(1)
    for stream in range(2, 30):
        desk.open(stream, interactive=False)
        for _ in range(4):
            desk.step()
    assert desk.samples(1) >= spoken + 5 * FRAME


def test_first_sounds_are_served_by_class_then_by_arrival() -> None:
    """A call goes before a stream, a stream before a batch."""
    desk = Desk()
    for stream in range(1, 5):
        desk.open(stream, priority=Priority.BATCH, interactive=False)
    desk.open(5, priority=Priority.STREAM)
    desk.open(6)
    assert streams_of(desk.step()) == [6, 5, 1, 2]


def test_among_streams_that_have_spoken_the_least_slack_is_served() -> None:
    """The one whose listener has less in hand is in the small step that both cannot share."""
    table = CostTable(
        {
            **{(Stage.BACKBONE, rows, 1): (2 + 8 * rows) * MS for rows in BUCKETS},
            **{(Stage.DEPTH, rows, 1): (2 + 8 * rows) * MS for rows in BUCKETS},
            **{(Stage.CODEC, 8, 16): 4 * MS, (Stage.TEXT, 4, 64): 2 * MS, (Stage.PREFILL, 4, 32): 5 * MS},
        }
    )
    desk = Desk(table=table)
    desk.open(1)
    desk.open(2)
    desk.until_spoken(1, 2)
    # Frames for both need 36 ms and the codec 4; stream 2 has 35 left, stream 1 more.
    desk.now += 45 * MS
    desk.report(1, dry_at=desk.now + 80 * MS)
    step = desk.step()
    assert step.stage is Stage.BACKBONE
    assert streams_of(step) == [2]


def test_a_full_chunk_goes_to_the_codec_before_more_frames_are_started() -> None:
    """It is in hand, and more frames can wait."""
    desk = Desk()
    desk.open(1)
    desk.until_spoken(1)
    assert stages([desk.step() for _ in range(5)]) == [Stage.BACKBONE, Stage.DEPTH] * 2 + [Stage.CODEC]
    assert desk.chunks(1) == [1, 2]


def test_a_chunk_is_flushed_when_it_cannot_fill_in_time() -> None:
    """With 20 ms in hand a second frame would come too late, so the first goes alone."""
    desk = Desk()
    desk.open(1)
    desk.until_spoken(1)
    assert desk.step().stage is Stage.BACKBONE
    assert desk.step().stage is Stage.DEPTH
    desk.now += 52 * MS
    step = desk.step()
    assert (step.stage, step.rows[0].count) == (Stage.CODEC, 1)
    assert not [event for event in desk.happened if isinstance(event, DeadlineMissed)]


def test_a_chunk_that_comes_late_says_so() -> None:
    """By how much the listener ran dry."""
    desk = Desk()
    desk.open(1)
    desk.until_spoken(1)
    spoken_at = desk.now
    desk.now += 100 * MS
    while len(desk.chunks(1)) < 2:
        desk.step()
    assert [event for event in desk.happened if isinstance(event, DeadlineMissed)] == [
        DeadlineMissed(1, desk.now - spoken_at - FRAME_MS * MS)
    ]


def test_a_frame_in_hand_rides_along_in_a_codec_step_of_its_shape() -> None:
    """The bucket of three rows has a fourth for nothing."""
    desk = Desk()
    for stream in (1, 2, 3, 4):
        desk.open(stream, max_frames=2 if stream < 4 else 200)
    desk.until_spoken(1, 2, 3, 4)
    while (step := desk.step()).stage is not Stage.CODEC:
        pass
    assert (sorted(streams_of(step)), step.rows[0].count) == ([1, 2, 3, 4], 1)


def test_a_wait_for_text_is_not_a_wait_for_others() -> None:
    """A prompt that comes word by word is not overdue when it is complete."""
    desk = Desk()
    desk.open(1, tokens=0, feed=Feed.PREFIX)
    desk.scheduler.push_text(1, 8, 0)
    desk.step()
    desk.now = 5_000 * MS
    assert desk.scheduler.stats(desk.now).waiting_ns[Priority.LIVE] == 0
    desk.scheduler.end_text(1, desk.now)
    assert desk.scheduler.stats(desk.now + 3 * MS).waiting_ns[Priority.LIVE] == 3 * MS


def test_due_rows_of_others_ride_along_with_a_first_sound() -> None:
    """A stream whose last frame waits for the codec shares the step of the newcomer."""
    desk = Desk()
    desk.open(1, max_frames=2)
    desk.until_spoken(1)
    desk.step()
    assert desk.step().stage is Stage.DEPTH
    desk.open(2)
    assert stages([desk.step() for _ in range(3)]) == [Stage.TEXT, Stage.PREFILL, Stage.DEPTH]
    step = desk.step()
    assert (step.stage, streams_of(step)) == (Stage.CODEC, [2, 1])


# ---- the listener ----------------------------------------------------------------------------------------------------


def test_an_interactive_stream_stops_at_the_lead_cap_and_wakes_in_time() -> None:
    """Never more than 1.2 s ahead, nobody is late, and between chunks there is nothing to do."""
    desk = Desk()
    desk.open(1, frames=150)
    rested = 0
    while desk.now < 8_000 * MS:
        step = desk.scheduler.next_step(desk.now)
        if step is not None:
            desk.done(step)
            assert desk.lead_ms(1) <= 1_200
        else:
            wake_at = desk.scheduler.wake_at()
            assert wake_at is not None
            assert wake_at > desk.now
            assert desk.stage(1) == "resting"
            desk.now = wake_at
            assert desk.scheduler.stats(desk.now).streams[0].stage != "resting"
            rested += 1
    assert rested > 10
    assert not [event for event in desk.happened if isinstance(event, DeadlineMissed)]


def test_a_batch_stream_is_generated_without_a_stop() -> None:
    """Nobody interrupts a file."""
    desk = Desk()
    desk.open(1, frames=150, interactive=False, priority=Priority.BATCH)
    while not desk.of(1) or not isinstance(desk.of(1)[-1], StreamFinished):
        desk.step()
    assert desk.now < 2_000 * MS
    assert max(desk.chunks(1)) == 16


def test_a_paused_listener_is_held_and_goes_on_when_it_plays() -> None:
    """Neither frames nor chunks while nothing reaches the ear."""
    desk = Desk()
    desk.open(1)
    desk.until(300)
    desk.report(1, heard_ms=100, is_playing=False)
    desk.until(5_000)
    made = desk.samples(1)
    assert desk.scheduler.next_step(desk.now) is None
    assert desk.scheduler.wake_at() is None
    assert desk.stage(1) == "held"
    desk.report(1, heard_ms=100)
    desk.until(9_000)
    assert desk.samples(1) > made
    assert not [event for event in desk.happened if isinstance(event, DeadlineMissed)]


def test_a_listener_that_is_not_playing_yet_gets_its_first_chunk_ready() -> None:
    """So that sound is there when it begins to play."""
    desk = Desk()
    desk.open(1)
    desk.report(1, is_playing=False)
    desk.until(1_000)
    assert desk.chunks(1) == [1]


def test_a_listener_with_a_buffer_is_fed_later() -> None:
    """The true position is behind the estimate, so the stream rests longer and nobody is late."""
    desk = Desk()
    desk.open(1)
    desk.until(2_000)
    before = desk.scheduler.wake_at()
    assert before is not None
    desk.report(1, heard_ms=(desk.now // MS) - 168 - 60)
    after = desk.scheduler.wake_at()
    assert after is not None
    assert 100 * MS <= after - before <= 200 * MS


def test_silence_brings_a_resting_stream_back_as_its_report_grows_old() -> None:
    """wake_at foresees the moment at which too little is left of what the last report granted."""
    desk = Desk()
    desk.open(1)
    desk.until(2_000)
    desk.report(1, heard_ms=0)
    while desk.scheduler.next_step(desk.now) is not None:
        raise AssertionError("a listener two seconds behind needs nothing")
    assert desk.scheduler.wake_at() == desk.now + 800 * MS
    desk.now += 800 * MS
    assert desk.scheduler.next_step(desk.now) is not None


def test_stats_say_where_each_stream_stands() -> None:
    """A plain snapshot; looking changes nothing."""
    desk = Desk()
    desk.open(1)
    desk.until(500)
    desk.scheduler.open(2, desk.now, feed=Feed.PER_FRAME, max_frames=10, priority=Priority.STREAM)
    desk.scheduler.push_text(2, 4, desk.now)
    desk.now += 7 * MS
    stats = desk.scheduler.stats(desk.now)
    assert stats == desk.scheduler.stats(desk.now)
    assert stats.waiting_ns == (0, 7 * MS, 0)
    assert [(s.stream, s.priority) for s in stats.streams] == [(1, Priority.LIVE), (2, Priority.STREAM)]
    assert stats.streams[0].delivered_samples == desk.samples(1)
    assert stats.streams[0].slack_ns is not None
    assert stats.streams[1].stage == "text"
    assert stats.streams[1].slack_ns is None
    assert stats.free_slots == 6
