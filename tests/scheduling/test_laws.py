"""What always holds of the scheduler, whatever comes: Hypothesis plays driver, model and listeners."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from breeze_rtc.clock import MS
from breeze_rtc.errors import Overloaded
from breeze_rtc.playback import PlaybackReport
from breeze_rtc.scheduling.chunking import LADDER
from breeze_rtc.scheduling.costs import CostTable
from breeze_rtc.scheduling.policy import FirstSound, Order, Policy
from breeze_rtc.scheduling.scheduler import Scheduler
from breeze_rtc.scheduling.step import (
    AudioReady,
    DeadlineMissed,
    RowResult,
    Stage,
    StageSpec,
    Step,
    StepResult,
    StreamAdmitted,
    StreamFailed,
    StreamFinished,
    StreamRefused,
)
from breeze_rtc.scheduling.stream import Feed, Priority
from breeze_rtc.scheduling.trace import TraceWriter, replay

FRAME = 960
RATE = 24_000
FRAME_NS = 40 * MS
LEAD_CAP_NS = 400 * MS
SLOTS = 5
PAGES = 60
PAGE_TOKENS = 4
SPECS = {
    Stage.TEXT: StageSpec(max_rows=2, buckets=(1, 2), max_tokens=20),
    Stage.PREFILL: StageSpec(max_rows=3, buckets=(1, 2, 3), max_tokens=12),
    Stage.BACKBONE: StageSpec(max_rows=4, buckets=(1, 2, 4)),
    Stage.DEPTH: StageSpec(max_rows=3, buckets=(1, 2, 4)),
    Stage.CODEC: StageSpec(max_rows=2, buckets=(1, 2)),
}
ROWS_COUNT_TWICE = {Stage.PREFILL, Stage.BACKBONE, Stage.DEPTH}
wild = st.integers(-(2**62), 2**62)
policies = st.just(Policy(lead_cap_ns=LEAD_CAP_NS)) | st.builds(
    Policy,
    order=st.sampled_from(Order),
    first_sound=st.sampled_from(FirstSound),
    deferral_is_bounded=st.booleans(),
    lead_cap_ns=st.sampled_from([None, 1, LEAD_CAP_NS, 1_200 * MS]),
    lead_by_load=st.booleans(),
    ladder=st.sampled_from([LADDER, (1,), (1, 4), (3,), (2, 3, 16)]),
    chunk_by_slack=st.booleans(),
    flushes_early=st.booleans(),
    prefills_together=st.booleans(),
    waits_for_rows=st.booleans(),
    rescues=st.booleans(),
    admits_by_load=st.booleans(),
    uses_reports=st.booleans(),
    predicts=st.booleans(),
    guard_ns=st.sampled_from([0, 4 * MS, 20 * MS]),
)
"""The product's, or any combination of switches: what a scheduler may never do does not depend on them."""


class Book:
    """What an outside observer knows of one stream."""

    def __init__(self, rows: int, max_frames: int, kept: int) -> None:
        # None while it waits for room.
        self.slot: int | None = None
        # Positions whose pages it keeps at most.
        self.kept = kept
        self.rows = rows
        self.max_frames = max_frames
        self.samples = 0
        self.frames = 0
        self.pages: set[int] = set()
        self.is_text_ended = False
        self.is_gone = False
        self.position = 0


class Laws(RuleBasedStateMachine):
    """Several steps may be out at once; results, texts, reports and cancellations come in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.steps: list[Step] = []
        self.now = 0
        self.out: list[Step] = []
        self.books: dict[int, Book] = {}
        self.reports: list[PlaybackReport] = []
        # Streams that may hold something: open, or gone while a step carries them.
        self.next_stream = 1

    @initialize(known=st.booleans(), policy=policies, kv_positions=st.sampled_from([None, 2 * PAGE_TOKENS]))
    def make(self, known: bool, policy: Policy, kv_positions: int | None) -> None:
        self.policy = policy
        self.kv_positions = kv_positions
        costs = CostTable({(stage, 1, 16 if stage <= Stage.PREFILL else 1): 3 * MS for stage in Stage} if known else {})
        self.scheduler = Scheduler(
            specs=SPECS,
            sample_rate=RATE,
            frame_samples=FRAME,
            slots=SLOTS,
            kv_pages=PAGES,
            page_tokens=PAGE_TOKENS,
            kv_positions=kv_positions,
            costs=costs,
            policy=policy,
            trace=TraceWriter(self.lines.append),
        )

    def live(self) -> list[int]:
        return [stream for stream, book in self.books.items() if not book.is_gone]

    def waiting(self) -> list[int]:
        return [stream for stream in self.live() if self.books[stream].slot is None]

    def is_carried(self, stream: int) -> bool:
        return any(row.stream == stream for step in self.out for row in step.rows)

    # ---- what may come -----------------------------------------------------------------------------------------------

    @rule(
        feed=st.sampled_from(Feed),
        priority=st.sampled_from(Priority),
        rows=st.integers(1, 2),
        max_frames=st.integers(1, 30),
        interactive=st.booleans(),
    )
    def open(self, feed: Feed, priority: Priority, rows: int, max_frames: int, interactive: bool) -> None:
        try:
            slot = self.scheduler.open(
                self.next_stream,
                self.now,
                feed=feed,
                priority=priority,
                rows=rows,
                max_frames=max_frames,
                interactive=interactive,
            )
        except Overloaded:
            return
        kept = self.kv_positions if feed is Feed.PER_FRAME and self.kv_positions else 1_000
        self.books[self.next_stream] = Book(rows, max_frames, kept)
        if slot is not None:
            self.begin(self.next_stream, slot)
        self.next_stream += 1

    def begin(self, stream: int, slot: int) -> None:
        held = {book.slot for other, book in self.books.items() if not book.is_gone or self.is_carried(other)}
        assert slot not in held
        assert self.books[stream].slot is None
        self.books[stream].slot = slot

    @precondition(lambda self: self.live())
    @rule(data=st.data(), tokens=st.integers(0, 25), ends=st.booleans())
    def text(self, data: Any, tokens: int, ends: bool) -> None:
        stream = data.draw(st.sampled_from(self.live()))
        book = self.books[stream]
        if not book.is_text_ended:
            self.scheduler.push_text(stream, tokens, self.now)
            if ends:
                self.scheduler.end_text(stream, self.now)
                book.is_text_ended = True
        self.hear()

    @rule(data=st.data(), heard=wild, times=st.tuples(wild, wild, st.none() | wild), is_playing=st.booleans())
    def any_report(self, data: Any, heard: int, times: tuple[int, int, int | None], is_playing: bool) -> None:
        stream = data.draw(st.sampled_from([*self.books, 999]))
        at_ns, path_ns, dry_at_ns = times
        self.tell(PlaybackReport(stream, heard, at_ns, path_ns, dry_at_ns, is_playing))

    @precondition(lambda self: self.live())
    @rule(data=st.data(), share=st.floats(0, 1), path_ms=st.integers(0, 300), is_paced=st.booleans())
    def sound_report(self, data: Any, share: float, path_ms: int, is_paced: bool) -> None:
        stream = data.draw(st.sampled_from(self.live()))
        heard = int(self.books[stream].samples * share)
        dry_at_ns = self.now + path_ms * MS if is_paced else None
        self.tell(PlaybackReport(stream, heard, self.now, path_ms * MS, dry_at_ns))

    @precondition(lambda self: self.reports)
    @rule(data=st.data(), times=st.integers(1, 3))
    def an_old_report_comes_again(self, data: Any, times: int) -> None:
        """Repeated, and behind younger ones."""
        report = data.draw(st.sampled_from(self.reports))
        for _ in range(times):
            self.tell(report)

    def tell(self, report: PlaybackReport) -> None:
        self.reports.append(report)
        self.scheduler.report(report, self.now)
        self.hear()

    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        stream = data.draw(st.sampled_from([*self.books, 999]))
        self.scheduler.cancel(stream, self.now)
        if stream in self.books:
            self.books[stream].is_gone = True
        self.hear()

    @rule(stage=st.sampled_from(Stage), us=st.integers(1, 60_000))
    def a_stage_is_taken_over(self, stage: Stage, us: int) -> None:
        """By graphs, or by anything else: much faster or much slower than it was."""
        times = {(1, 16 if stage <= Stage.PREFILL else 1): us * 1_000}
        self.scheduler.measured(stage, times, self.now)

    @rule(ms=st.integers(0, 1_500))
    def wait(self, ms: int) -> None:
        self.now += ms * MS

    @rule(ahead_ns=st.integers(0, 3))
    def wait_until_woken(self, ahead_ns: int) -> None:
        wake_at = self.scheduler.wake_at()
        if wake_at is not None:
            self.now = max(self.now, wake_at) + ahead_ns
            # To look again at those who wait is reason enough.
            waiting = self.waiting()
            assert self.take_step() is not None or waiting, "woken for nothing"
            assert self.scheduler.wake_at() is None or self.scheduler.wake_at() > self.now or self.out, "woken for ever"

    @rule()
    def choose(self) -> None:
        self.take_step()

    @precondition(lambda self: self.out)
    @rule(data=st.data(), ms=st.integers(0, 30), fault=st.sampled_from(["", "", "", "", "", "broken"]))
    def finish(self, data: Any, ms: int, fault: str) -> None:
        step = self.out.pop(data.draw(st.integers(0, len(self.out) - 1)))
        self.run(
            step, ms, ends=data.draw(st.sampled_from([False] * 5 + [True])), wants=data.draw(st.booleans()), fault=fault
        )

    @rule(steps=st.integers(1, 40), ms=st.integers(1, 20))
    def drive(self, steps: int, ms: int) -> None:
        """The driver's loop, one step at a time, for a while: otherwise no example gets far."""
        for _ in range(steps):
            step = self.take_step()
            if step is None:
                wake_at = self.scheduler.wake_at()
                if wake_at is None:
                    return
                assert wake_at > self.now
                self.now = wake_at
                continue
            self.out.remove(step)
            self.run(step, ms, ends=False, wants=False, fault="")

    # ---- what must hold ----------------------------------------------------------------------------------------------

    def take_step(self) -> Step | None:
        busy = {row.stream for step in self.out for row in step.rows}
        stats = {s.stream: s for s in self.scheduler.stats(self.now).streams}
        wake_at = self.scheduler.wake_at()
        waiting = self.waiting()
        step = self.scheduler.next_step(self.now)
        for event in self.scheduler.events():
            assert isinstance(event, StreamAdmitted | StreamRefused)
            assert event.stream in waiting
            if isinstance(event, StreamAdmitted):
                self.begin(event.stream, event.slot)
            else:
                self.books[event.stream].is_gone = True
        if wake_at is not None and self.now >= wake_at:
            assert step is not None or waiting, "a stream is due and nothing runs"
        if step is None:
            return None
        self.steps.append(step)
        self.out.append(step)
        spec = SPECS[step.stage]
        streams = [row.stream for row in step.rows]
        assert len(set(streams)) == len(streams) > 0
        assert not busy & set(streams), "two steps are out for one row"
        wide = step.stage in ROWS_COUNT_TWICE
        used = sum(self.books[stream].rows if wide else 1 for stream in streams)
        assert used <= step.bucket
        assert step.bucket in spec.buckets
        assert used <= spec.max_rows
        if len(streams) > 1 and spec.max_tokens:
            assert sum(row.count * (self.books[row.stream].rows if wide else 1) for row in step.rows) <= spec.max_tokens
        for row in step.rows:
            book = self.books[row.stream]
            assert not book.is_gone
            assert row.slot == book.slot
            if step.stage is Stage.CODEC:
                assert row.start * FRAME == book.samples
                assert row.start + row.count <= book.frames, "a frame was decoded before it was made"
                assert row.count == step.rows[0].count
            if step.stage is Stage.BACKBONE:
                assert row.start < book.max_frames
                seen = stats[row.stream]
                if seen.delivered_samples and seen.stage == "resting":
                    # It rides along: even then the chunk that begins ends below the cap.
                    # (One that is longer than the cap begins when nothing is left.)
                    assert self.policy.lead_cap_ns is not None
                    chunk_ns = seen.target_frames * FRAME_NS
                    assert seen.lead_ns + chunk_ns <= max(self.policy.lead_cap_ns, chunk_ns)
            self.take_pages(step.stage, row.stream, row.count, row.new_pages)
        return step

    def take_pages(self, stage: Stage, stream: int, count: int, new_pages: tuple[int, ...]) -> None:
        book = self.books[stream]
        if stage is Stage.PREFILL or stage is Stage.BACKBONE:
            book.position += count
        owned = [page for other, b in self.books.items() if not b.is_gone or self.is_carried(other) for page in b.pages]
        assert not set(owned) & set(new_pages)
        assert all(0 <= page < PAGES for page in new_pages)
        book.pages |= set(new_pages)
        assert len(book.pages) == -(-min(book.position, book.kept) // PAGE_TOKENS) * book.rows

    def run(self, step: Step, ms: int, *, ends: bool, wants: bool, fault: str) -> None:
        self.now += ms * MS
        last = len(step.rows) - 1
        if step.stage is Stage.DEPTH:
            for row in step.rows:
                self.books[row.stream].frames += 1
        rows = tuple(
            RowResult(
                row.stream,
                ended=ends and step.stage in {Stage.PREFILL, Stage.BACKBONE},
                wants_text=wants and step.stage in {Stage.PREFILL, Stage.BACKBONE},
                samples=row.count * FRAME if step.stage is Stage.CODEC else 0,
                error=fault if number == last else "",
            )
            for number, row in enumerate(step.rows)
        )
        self.scheduler.step_done(step, StepResult(rows, ms * MS), self.now)
        self.hear()

    def hear(self) -> None:
        for event in self.scheduler.events():
            book = self.books[event.stream]
            assert not book.is_gone, "something was said of a stream that is gone"
            if isinstance(event, AudioReady):
                assert event.start_samples == book.samples
                book.samples += event.samples
                assert book.samples <= book.max_frames * FRAME
            elif isinstance(event, StreamFinished):
                assert event.samples == book.samples
                book.is_gone = True
            elif isinstance(event, StreamFailed | StreamRefused):
                book.is_gone = True
            else:
                assert isinstance(event, DeadlineMissed)
                assert event.late_ns > 0
                assert book.samples > 0

    @invariant()
    def slots_and_pages_are_conserved(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        holding = [
            book
            for stream, book in self.books.items()
            if book.slot is not None and (not book.is_gone or self.is_carried(stream))
        ]
        stats = self.scheduler.stats(self.now)
        assert stats.free_slots == SLOTS - len(holding)
        assert stats.free_pages == PAGES - sum(len(book.pages) for book in holding)
        assert sorted([s.stream for s in stats.streams] + self.waiting()) == self.live()
        assert sum(stats.queued) == len(self.waiting())

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        assert replay(self.lines) == self.steps, "the same inputs gave other steps"
        for stream in self.live():
            self.cancel_now(stream)
        for step in list(self.out):
            self.out.remove(step)
            self.run(step, 1, ends=False, wants=False, fault="")
        stats = self.scheduler.stats(self.now)
        assert (stats.free_slots, stats.free_pages) == (SLOTS, PAGES), "something was not given back"
        assert self.scheduler.wake_at() is None
        assert self.scheduler.next_step(self.now) is None

    def cancel_now(self, stream: int) -> None:
        self.scheduler.cancel(stream, self.now)
        self.books[stream].is_gone = True


Laws.TestCase.settings = settings(
    # 2,000 under the default profile.
    max_examples=20 * settings().max_examples,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestLaws = Laws.TestCase
