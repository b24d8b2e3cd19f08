from __future__ import annotations

import pytest

from breeze_rtc.clock import MS, SECOND
from breeze_rtc.errors import Overloaded
from breeze_rtc.playback import PlaybackReport
from breeze_rtc.scheduling.admission import MOST_WAITING, TERMS, bucket_of, load_percent, stage_ns
from breeze_rtc.scheduling.costs import CostTable
from breeze_rtc.scheduling.policy import Policy
from breeze_rtc.scheduling.scheduler import Scheduler
from breeze_rtc.scheduling.step import (
    AudioReady,
    DeadlineMissed,
    Event,
    RowResult,
    Stage,
    StageSpec,
    StepResult,
    StreamAdmitted,
    StreamFinished,
    StreamRefused,
)
from breeze_rtc.scheduling.stream import Feed, Priority

SAME_LEAD = Policy(lead_by_load=False)
SPECS = {stage: StageSpec(max_rows=4, buckets=(1, 2, 4), max_tokens=64) for stage in Stage}
RATE, FRAME = 24_000, 1_920
FRAME_NS = 80 * MS


def load(costs: CostTable, streams: int, frames: int = 4) -> int:
    return load_percent(
        lambda stage, rows, units: stage_ns(costs.predict_ns, SPECS, stage, rows, units),
        rows=streams,
        chunks={frames: streams},
        frame_ns=FRAME_NS,
    )


def test_the_smallest_bucket_that_holds_the_rows() -> None:
    """Padding is wasted work."""
    assert [bucket_of(SPECS[Stage.DEPTH], rows) for rows in (1, 2, 3, 4)] == [1, 2, 4, 4]


def test_more_rows_than_a_step_holds_take_several_steps() -> None:
    """Nine rows are two full steps and one of one."""
    costs = CostTable({(Stage.DEPTH, 4, 1): 8 * MS, (Stage.DEPTH, 1, 1): 5 * MS})
    assert stage_ns(costs.predict_ns, SPECS, Stage.DEPTH, 9) == 21 * MS


def test_load_is_work_per_frame_over_its_duration() -> None:
    """4 + 16 ms, and a quarter of a codec step of 16 ms, every 80 ms; in chunks of 16, a sixteenth of one of 40 ms."""
    costs = CostTable(
        {
            (Stage.BACKBONE, 4, 1): 4 * MS,
            (Stage.DEPTH, 4, 1): 16 * MS,
            (Stage.CODEC, 4, 4): 16 * MS,
            (Stage.CODEC, 4, 16): 40 * MS,
        }
    )
    assert load(costs, 4) == 30
    assert load(costs, 4, 16) == 28
    assert load(CostTable(), 4) == 0


def test_a_large_step_that_was_slow_once_is_not_held_against_newcomers() -> None:
    """A batch costs at most what its rows cost one by one, and those are learnt by whoever speaks alone."""
    costs = CostTable({(Stage.DEPTH, 1, 1): 10 * MS, (Stage.DEPTH, 2, 1): 900 * MS})
    assert load(costs, 2) == 25


class House:
    """A scheduler and a machine that does exactly what its costs say, all rows of a stage one after another."""

    def __init__(
        self, row_ms: dict[Stage, float], *, slots: int = 32, kv_pages: int = 10_000, policy: Policy | None = None
    ) -> None:
        """row_ms: per row of a step; a codec row takes it once, whatever its frames."""
        rows = (1, 2, 4, 8, 16, 32)
        self.specs = {stage: StageSpec(max_rows=32, buckets=rows, max_tokens=1_024) for stage in Stage}
        self._row_ms = row_ms
        measured = {}
        for stage in Stage:
            for bucket in rows:
                for size in (16, 32, 64, 128, 256, 512) if stage <= Stage.PREFILL else (1, 2, 4, 8, 16):
                    measured[stage, bucket, size if stage is not Stage.DEPTH else 1] = self.time_ns(stage, bucket)
        self.scheduler = Scheduler(
            specs=self.specs,
            sample_rate=RATE,
            frame_samples=FRAME,
            slots=slots,
            kv_pages=kv_pages,
            page_tokens=16,
            costs=CostTable(measured),
            policy=policy or SAME_LEAD,
        )
        self.now = 0
        self.next_id = 1
        self.frames: dict[int, int] = {}
        # (time, event) of all that happened.
        self.happened: list[tuple[int, Event]] = []

    def time_ns(self, stage: Stage, bucket: int) -> int:
        return int(self._row_ms.get(stage, 0.1) * bucket * MS)

    def open(
        self,
        *,
        priority: Priority = Priority.LIVE,
        interactive: bool = True,
        frames: int = 500,
        text: int = 16,
        max_frames: int = 501,
    ) -> tuple[int, int | None]:
        stream, self.next_id = self.next_id, self.next_id + 1
        self.frames[stream] = frames
        slot = self.scheduler.open(
            stream,
            self.now,
            feed=Feed.PER_FRAME,
            max_frames=max_frames,
            priority=priority,
            interactive=interactive,
        )
        if text:
            self.scheduler.push_text(stream, text, self.now)
            self.scheduler.end_text(stream, self.now)
        return stream, slot

    def until(self, at_ms: float) -> None:
        """Run what is due until then; a step that has begun is finished."""
        while self.now < at_ms * MS:
            step = self.scheduler.next_step(self.now)
            self.hear()
            if step is None:
                wake_at = self.scheduler.wake_at()
                self.now = int(at_ms * MS) if wake_at is None else min(int(at_ms * MS), wake_at)
                continue
            duration_ns = self.time_ns(step.stage, step.bucket)
            self.now += duration_ns
            rows = tuple(
                RowResult(
                    row.stream,
                    ended=step.stage is Stage.BACKBONE and row.start >= self.frames[row.stream],
                    samples=row.count * FRAME if step.stage is Stage.CODEC else 0,
                )
                for row in step.rows
            )
            self.scheduler.step_done(step, StepResult(rows, duration_ns), self.now)
            self.hear()
        # Who waits is looked at whenever a step is asked for.
        assert self.now >= at_ms * MS

    def hear(self) -> None:
        self.happened += [(self.now, event) for event in self.scheduler.events()]

    def of(self, kind: type[Event], *streams: int) -> list[tuple[float, Event]]:
        """(time in ms, event) of one kind, of all streams or these."""
        return [
            (at_ns / MS, event)
            for at_ns, event in self.happened
            if isinstance(event, kind) and (not streams or event.stream in streams)
        ]

    def queued(self) -> tuple[int, ...]:
        return self.scheduler.stats(self.now).queued


TEN_LISTENERS = {Stage.BACKBONE: 2.0, Stage.DEPTH: 4.0, Stage.CODEC: 4.0}
"""A listener takes 6 ms per frame and 4 ms per chunk: 8.75 % of the machine in chunks of four frames, 8.1 % in chunks
of eight; ten take 87 % and eleven 96 %."""


@pytest.mark.parametrize("policy", [Policy(), SAME_LEAD])
def test_a_call_more_than_the_machine_can_serve_waits_and_is_refused(policy: Policy) -> None:
    """Half a second later, with what it lacks and when to come back; nobody who speaks was late."""
    house = House(TEN_LISTENERS, policy=policy)
    while True:
        stream, slot = house.open()
        if slot is None:
            break
        house.until(house.now / MS + 300)
    assert 10 <= stream - 1 <= 11
    assert house.queued() == (1, 0, 0)
    began_ms = house.now / MS
    house.until(began_ms + 2_000)
    ((at_ms, refused),) = house.of(StreamRefused)
    assert isinstance(refused, StreamRefused)
    assert at_ms == pytest.approx(began_ms + TERMS[Priority.LIVE].wait_ns / MS, abs=100)
    assert refused.stream == stream
    assert "% of this machine" in refused.detail
    assert refused.retry_after_s >= 1
    assert house.queued() == (0, 0, 0)
    assert house.scheduler.stats(house.now).refused == (1, 0, 0)
    assert not house.of(DeadlineMissed)


def test_without_the_rule_nobody_is_counted() -> None:
    """The policy without admission by load lets everybody begin, and they are late."""
    house = House(TEN_LISTENERS, policy=Policy(admits_by_load=False))
    for _ in range(16):
        assert house.open()[1] is not None
        house.until(house.now / MS + 100)
    house.until(house.now / MS + 5_000)
    assert house.of(DeadlineMissed)


def test_a_waiting_stream_begins_when_another_ends() -> None:
    """With the slot that has come free; its text was taken while it waited, and all of it is spoken."""
    house = House({}, slots=1)
    first, slot = house.open(frames=20)
    assert slot == 0
    second, slot = house.open(priority=Priority.STREAM, frames=30)
    assert slot is None
    house.until(60_000)
    ((at_ms, admitted),) = house.of(StreamAdmitted)
    assert admitted == StreamAdmitted(second, 0)
    assert at_ms == house.of(StreamFinished, first)[0][0]
    assert [event for _, event in house.of(StreamFinished)] == [
        StreamFinished(first, 20 * FRAME),
        StreamFinished(second, 30 * FRAME),
    ]


def test_the_classes_begin_in_order_and_within_a_class_who_came_first() -> None:
    """A call goes before a stream that has waited longer, that before a batch, and nobody overtakes in their class."""
    house = House({}, slots=1)
    house.open(frames=5)
    waiting = [house.open(priority=priority, frames=5)[0] for priority in (*Priority, *reversed(Priority))]
    live, stream, batch, batch_2, stream_2, live_2 = waiting
    assert house.queued() == (2, 2, 2)
    house.until(30_000)
    began = [event.stream for _, event in house.of(StreamAdmitted)]
    # One slot is none that a batch or a stream may take while it is the last: see `KEPT_SHARE`, a share of one is 0.
    assert began == [live, live_2, stream, stream_2, batch, batch_2]


def test_who_comes_later_does_not_take_what_others_wait_for() -> None:
    """A slot is free and a call waits for time: the next one queues behind it."""
    house = House(TEN_LISTENERS)
    slot: int | None = 0
    while slot is not None:
        _, slot = house.open()
        house.until(house.now / MS + 300)
    house.open()
    house.open(priority=Priority.STREAM)
    assert house.queued() == (2, 1, 0)


@pytest.mark.parametrize("priority", Priority)
def test_each_class_waits_as_long_as_it_may(priority: Priority) -> None:
    """To the millisecond, though nothing else happens."""
    house = House({}, slots=1)
    # It waits for text, which does not come.
    assert house.open(text=0)[1] is not None
    waiting, slot = house.open(priority=priority)
    assert slot is None
    house.until(70_000)
    ((at_ms, refused),) = house.of(StreamRefused)
    assert at_ms == TERMS[priority].wait_ns / MS
    assert refused.stream == waiting
    house.scheduler.push_text(waiting, 5, house.now)
    house.scheduler.report(PlaybackReport(waiting, 0, house.now, 0), house.now)
    house.scheduler.cancel(waiting, house.now)
    assert house.scheduler.next_step(house.now) is None


def test_a_cancelled_stream_leaves_the_queue() -> None:
    """Nothing is said of it, whoever waited behind it moves up, and the slot goes to that one."""
    house = House({}, slots=1)
    first, _ = house.open(text=0)
    gone, slot = house.open()
    behind, _ = house.open()
    assert slot is None
    house.scheduler.cancel(gone, house.now)
    assert house.queued() == (1, 0, 0)
    house.scheduler.cancel(first, house.now)
    house.until(10)
    assert [event for _, event in house.of(StreamAdmitted)] == [StreamAdmitted(behind, 0)]
    assert not [event for _, event in house.happened if event.stream == gone]


def test_when_many_wait_the_next_is_refused_at_once() -> None:
    """And told to come back when so many will have left as are before it, by how long streams last."""
    house = House({}, slots=1)
    house.open(frames=20)
    house.until(5_000)
    ((held_ms, _),) = house.of(StreamFinished)
    house.open(text=0)
    for _ in range(MOST_WAITING):
        assert house.open()[1] is None
    with pytest.raises(Overloaded) as full:
        house.open()
    assert full.value.retry_after_s == pytest.approx((MOST_WAITING + 1) * held_ms / 1_000, rel=0.01)
    assert 5 < full.value.retry_after_s < 60
    assert house.open(priority=Priority.BATCH)[1] is None, "another class has a queue of its own"


def test_a_call_makes_the_others_give_up_quality_before_it_waits() -> None:
    """A machine with room for ten in chunks of four and for more in larger ones takes an eleventh at once; the others
    keep less sound in hand, and as much as before when enough have left.
    """
    house = House({Stage.BACKBONE: 1.3, Stage.DEPTH: 2.8, Stage.CODEC: 10.0})
    # Of 80 ms: 4.1 + 10 / 4 = 6.6 ms each, or with chunks of 16 frames 4.1 + 10 / 16 = 4.7; and a first sound takes 14
    # of each 400.
    streams = []
    while not house.scheduler.stats(house.now).is_strained:
        stream, slot = house.open(priority=Priority.STREAM if not streams else Priority.LIVE, interactive=False)
        assert slot is not None
        streams.append(stream)
        house.until(house.now / MS + 400)
    assert len(streams) == 11
    for stream in streams[:2]:
        house.scheduler.cancel(stream, house.now)
    assert not house.scheduler.stats(house.now).is_strained


def test_less_lead_is_kept_while_there_is_little_room() -> None:
    """0.8 of 1.2 s: what a barge-in would throw away, and what keeps others from beginning."""
    leads = []
    for is_strained in (False, True):
        house = House({Stage.CODEC: 1.0})
        house.open()
        house.scheduler._admission.is_strained = is_strained
        house.scheduler._survey.strain(is_strained=is_strained)
        house.until(2_000)
        lead_ms = 0.0
        for at_ms in range(2_000, 4_000, 10):
            house.until(at_ms)
            lead_ms = max(lead_ms, house.scheduler.stats(house.now).streams[0].lead_ns / MS)
        leads.append(lead_ms)
    assert 1_000 < leads[0] <= 1_200
    assert 600 < leads[1] <= 804


def test_a_stream_waits_a_second_before_others_give_up_quality_for_it() -> None:
    """Nobody speaks with its listener; a batch never asks for it."""
    house = House({Stage.BACKBONE: 1.3, Stage.DEPTH: 2.8, Stage.CODEC: 10.0})
    for _ in range(10):
        assert house.open(interactive=False)[1] is not None
        house.until(house.now / MS + 400)
    assert not house.scheduler.stats(house.now).is_strained
    began_ms = house.now / MS
    stream, slot = house.open(priority=Priority.STREAM, interactive=False)
    assert slot is None
    house.until(began_ms + 1_500)
    ((at_ms, _),) = house.of(StreamAdmitted, stream)
    assert at_ms == pytest.approx(began_ms + 1_000, abs=100)


def test_first_sounds_that_cannot_all_come_in_time_begin_one_after_another() -> None:
    """Twenty calls at once on a machine that takes 60 ms for each first sound: those that fit into half a second begin,
    the others wait; of those who began, all spoke within what was promised.
    """
    house = House({Stage.PREFILL: 50.0, Stage.DEPTH: 0.1, Stage.CODEC: 5.0})
    # Somebody listens already: a lone first listener is never put off.
    house.open()
    house.until(500)
    slots = [house.open() for _ in range(20)]
    began = [stream for stream, slot in slots if slot is not None]
    assert 4 <= len(began) <= 9
    assert house.queued()[0] == 20 - len(began)
    house.until(1_600)
    spoke = {event.stream: at_ms for at_ms, event in reversed(house.of(AudioReady))}
    assert all(spoke[stream] <= 500 + 600 for stream in began)
    assert house.of(StreamAdmitted), "who waited begins when the first ones have spoken"


def test_the_last_slots_and_pages_are_kept_for_calls() -> None:
    """A quarter is out of reach for a batch, a sixteenth for a stream, nothing for a call."""
    for priority, reach in ((Priority.LIVE, 16), (Priority.STREAM, 15), (Priority.BATCH, 12)):
        house = House({}, slots=16)
        while house.open(priority=priority, text=0)[1] is not None:
            pass
        assert house.next_id - 2 == reach
        house = House({}, slots=32, kv_pages=160)
        while house.open(priority=priority, text=0, max_frames=16 * 5 - 1)[1] is not None:
            pass
        assert house.next_id - 2 == 2 * reach
    # Where one slot is all there is, nothing is kept, or nobody else could ever have it.
    assert House({}, slots=1, kv_pages=40).open(priority=Priority.BATCH)[1] == 0


def test_a_listener_who_claims_to_be_empty_gains_nothing() -> None:
    """Neither for others like it nor against them: the same streams begin, whatever is reported."""
    began = []
    for lies in (False, True):
        house = House(TEN_LISTENERS)
        while True:
            stream, slot = house.open()
            if slot is None:
                break
            for _ in range(6):
                house.until(house.now / MS + 50)
                if lies:
                    for other in range(1, stream + 1):
                        report = PlaybackReport(other, 1 << 40, house.now, SECOND)
                        house.scheduler.report(report, house.now)
        began.append(stream)
    assert began[0] == began[1]


def test_a_burst_on_a_machine_with_time_to_spare_is_no_load() -> None:
    """Beginnings count by what they take of four seconds, and are forgotten after as long again."""
    house = House({Stage.PREFILL: 50.0, **TEN_LISTENERS})
    admission = house.scheduler._admission
    for _ in range(4):
        assert house.open(frames=4)[1] is not None
    house.until(3_900)
    assert admission.beginnings_percent(house.now) == pytest.approx(100 * 4 * 60 / 4_000, abs=3)
    house.until(6_000)
    assert admission.beginnings_percent(house.now) == pytest.approx(50 * 4 * 60 / 4_000, abs=2)
    house.until(8_000)
    assert admission.beginnings_percent(house.now) == 0
