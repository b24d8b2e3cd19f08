"""Which stage, which streams, which bucket, now.

The driver's loop:

    scheduler.push_text(stream, tokens, now)       # inputs: plain values, and the time
    for event in scheduler.events(): ...           # what happened
    step = scheduler.next_step(now)                # what to run, or None
    if step is None: sleep until scheduler.wake_at(), or the next input

Here are the inputs, what each changes, and the steps that go out and come back.  `survey` finds who can run what and
how much time each has to spare, `choice` says who goes first, `forecast` how long things will take.

A stream with a listener is generated in chunks: one is begun when it will still end below the lead cap, and once begun
is completed.  So what a barge-in throws away is bounded, and no stream is stopped at the cap with frames in hand that
fill no chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from breeze_rtc.clock import samples_to_ns
from breeze_rtc.errors import Overloaded
from breeze_rtc.playback import PlaybackReport
from breeze_rtc.scheduling.admission import Admission, bucket_of
from breeze_rtc.scheduling.choice import Choice, Chooser
from breeze_rtc.scheduling.chunking import largest_rung, next_chunk, next_rung, recovery_chunk
from breeze_rtc.scheduling.costs import CostTable
from breeze_rtc.scheduling.forecast import Forecast
from breeze_rtc.scheduling.histogram import Histogram
from breeze_rtc.scheduling.policy import Policy
from breeze_rtc.scheduling.predictor import MOVE_BOUNDS, Predictor
from breeze_rtc.scheduling.slots import Pages, Slots, pages_for
from breeze_rtc.scheduling.step import (
    FIRST_SOUNDS,
    AudioReady,
    DeadlineMissed,
    Event,
    Row,
    RowResult,
    Stage,
    StageSpec,
    Step,
    StepResult,
    StreamAdmitted,
    StreamFailed,
    StreamFinished,
    StreamRefused,
    Why,
)
from breeze_rtc.scheduling.stream import NEVER, Feed, Priority, Stream
from breeze_rtc.scheduling.survey import Survey, Work, can_start

if TYPE_CHECKING:
    from breeze_rtc.scheduling.trace import TraceWriter

PROMPT_TOKENS = 256
"""Prompt positions reserved when a stream of Feed.PREFIX opens; a longer text asks for more when it comes."""


@dataclass(frozen=True, slots=True)
class StreamStats:
    """Where one stream stands."""

    stream: int
    priority: Priority
    stage: str
    """What it will run next, or "out", "waiting" (for text), "resting" (far enough ahead), "held" (listener paused)."""
    lead_ns: int
    """Sound made and not yet due, frames not decoded included; 0 before the first sound."""
    slack_ns: int | None
    """Time to spare; None before the first sound and where none is owed."""
    heard_samples: int
    delivered_samples: int
    target_frames: int
    """Size of the chunk being filled."""


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A snapshot for plots and metrics."""

    streams: tuple[StreamStats, ...]
    waiting_ns: tuple[int, int, int]
    """Per class, how long the first sound that has waited longest has waited."""
    free_slots: int
    free_pages: int
    queued: tuple[int, ...]
    """Per class, streams that wait to begin."""
    refused: tuple[int, ...]
    """Per class, streams refused since the start."""
    is_strained: bool
    """Listeners get larger chunks and less lead than usual, so that one more could begin."""
    step_ratios: Mapping[Stage, Histogram]
    """Duration over prediction of all steps so far, in parts of `costs.ONE`."""
    margins: Mapping[Stage, int]
    """What a typical time is multiplied with for a prediction, in the same unit."""
    frame_alone_ns: int
    """What a frame of a stream that is alone takes on average now; 0 when nothing is known."""
    stumble_ns: int
    """By how much a step took longer than predicted, at worst and of late."""
    moves: tuple[Histogram, Histogram]
    """By how much reports moved deadlines, in ns: the first of each stream, which replaced the estimate; the others."""


class Scheduler:
    """The pure core: told what happened and when, it says what to run next.  Never reads a clock, never holds a sample.

    `now` is in ns and never goes back.  The same inputs give the same steps.
    """

    def __init__(
        self,
        *,
        specs: Mapping[Stage, StageSpec],
        sample_rate: int,
        frame_samples: int,
        slots: int,
        kv_pages: int,
        page_tokens: int,
        costs: CostTable,
        kv_positions: int | None = None,
        policy: Policy | None = None,
        trace: TraceWriter | None = None,
    ) -> None:
        """`specs` names all five stages.  kv_positions: of a stream of Feed.PER_FRAME at most so many keep their pages,
        because the model looks back no further; None: all.  No policy: the product's.  `trace`, if given, writes down
        every input.
        """
        self._specs = dict(specs)
        self._frame_ns = samples_to_ns(frame_samples, sample_rate)
        self._sample_rate = sample_rate
        self._frame_samples = frame_samples
        self._page_tokens = page_tokens
        self._kv_positions = NEVER if kv_positions is None else kv_positions
        policy = policy or Policy()
        self._policy = rules = policy.as_it_runs()
        self._ladder = rules.ladder
        # Rows of one stream must fit one step.
        self._widest = min(specs[stage].max_rows for stage in (Stage.PREFILL, Stage.BACKBONE, Stage.DEPTH))
        self._costs = costs
        self._slots = Slots(slots)
        self._pages = Pages(kv_pages)
        # By how much reports moved deadlines: the first of a stream, and all others.
        self._moves = (Histogram(MOVE_BOUNDS), Histogram(MOVE_BOUNDS))

        self._now = 0
        # Open streams in the order they opened; those cancelled while a step carries them stay until it is done.
        self._streams: dict[int, Stream] = {}
        # Those with a frame that lacks its other codes, no step being out for it.
        self._half_made: list[Stream] = []
        # Steps that are out.
        self._out: dict[int, Step] = {}
        self._next_id = 0
        self._events: list[Event] = []
        self._opened = 0
        self._forecast = Forecast(specs, costs, is_on=rules.predicts)
        self._survey = Survey(rules, self._forecast, frame_ns=self._frame_ns)
        self._chooser = Chooser(specs, rules, self._forecast, self._survey, frame_ns=self._frame_ns)

        self._admission = Admission(
            slots=self._slots,
            pages=self._pages,
            forecast=self._forecast,
            frame_ns=self._frame_ns,
            goes_by_load=rules.admits_by_load,
        )

        self._trace = trace
        if trace is not None:
            trace.begin(
                specs=self._specs,
                sample_rate=sample_rate,
                frame_samples=frame_samples,
                slots=slots,
                kv_pages=kv_pages,
                page_tokens=page_tokens,
                kv_positions=kv_positions,
                costs=costs,
                policy=policy,
            )

    # ---- inputs ------------------------------------------------------------------------------------------------------

    def open(
        self,
        stream: int,
        now: int,
        *,
        feed: Feed,
        max_frames: int,
        priority: Priority = Priority.LIVE,
        rows: int = 1,
        interactive: bool = True,
    ) -> int | None:
        """Begin a stream under an id that is not in use, and return its slot; None when it has to wait for room.

        A stream that waits takes text already; `StreamAdmitted` or `StreamRefused` says how its wait ended.
        rows: backbone rows it takes (2 with classifier-free guidance).  max_frames: generation stops there, whatever
        the model says.  Raises `Overloaded`, with nothing changed, when too many wait already.
        """
        self._advance(now)
        if self._trace is not None:
            self._trace.open(
                stream, now, feed=feed, max_frames=max_frames, priority=priority, rows=rows, interactive=interactive
            )
        assert stream not in self._streams, f"stream {stream} is open"
        assert stream not in self._admission.waiting, f"stream {stream} waits"
        assert max_frames >= 1
        assert 1 <= rows <= self._widest, f"a stream takes 1 to {self._widest} rows"
        positions = max_frames + PROMPT_TOKENS if feed is Feed.PREFIX else min(max_frames + 1, self._kv_positions)
        s = Stream(
            stream,
            feed=feed,
            priority=priority,
            rows=rows,
            max_frames=max_frames,
            interactive=interactive,
            sample_rate=self._sample_rate,
            first_chunk=self._ladder[0],
            longest_chunk=self._survey.longest_interactive if interactive else self._ladder[-1],
            pages_kept=pages_for(positions, self._page_tokens, rows),
            opened=self._opened,
            served=self._next_id,
        )
        self._opened += 1
        s.ready_ns = now
        lack = self._admission.lack(s, self._streams.values(), now)
        if not lack:
            return self._start(s)
        if not self._admission.enqueue(s):
            raise Overloaded(lack, self._admission.retry_after_s(s))
        return None

    def push_text(self, stream: int, tokens: int, now: int) -> None:
        """A piece of text; it is encoded whole, in one row.  Ignored when the stream is no longer open."""
        self._advance(now)
        if self._trace is not None:
            self._trace.push_text(stream, tokens, now)
        s = self._open_stream(stream)
        if s is None or tokens == 0:
            return
        assert tokens > 0
        assert not s.is_text_ended, f"text for stream {stream} after its end"
        self._wait_begins(s, now)
        s.tokens += tokens
        s.segments.append(tokens)
        self._touch(s)
        if s.feed is Feed.PREFIX:
            more = pages_for(s.tokens + s.max_frames, self._page_tokens, s.rows) - s.pages_kept
            if more > 0 and not s.is_waiting and not self._pages.reserve(more):
                # Waiting for pages while holding some is how two streams wait for each other, so it is dropped instead.
                lack = f"the memory for a text of {s.tokens} tokens is not free"
                self._events.append(StreamRefused(s.id, lack, self._admission.retry_after_s(s)))
                self._drop(s)
                return
            s.pages_kept += max(0, more)

    def end_text(self, stream: int, now: int) -> None:
        """No more text will come.  Ignored when the stream is no longer open."""
        self._advance(now)
        if self._trace is not None:
            self._trace.end_text(stream, now)
        s = self._open_stream(stream)
        if s is None:
            return
        self._wait_begins(s, now)
        s.is_text_ended = True
        self._touch(s)
        self._feed(s)
        if s.is_finished and s.out is None:
            self._finish(s)

    def report(self, report: PlaybackReport, now: int) -> None:
        """Where a listener is.  Reports of unknown streams are ignored; no report raises."""
        self._advance(now)
        if self._trace is not None:
            self._trace.report(report, now)
        s = self._open_stream(report.stream)
        if s is not None and self._policy.uses_reports:
            moves = self._moves[s.listener.has_report]
            moved_ns = s.listener.report(report, now)
            if moved_ns is not None:
                moves.add(moved_ns)
            if not s.is_waiting:
                self._survey.heard_from(s)

    def cancel(self, stream: int, now: int) -> None:
        """The stream is not wanted any more: nothing is said of it from now on.

        What it holds is free at once, or when the step that carries it is done.
        """
        self._advance(now)
        if self._trace is not None:
            self._trace.cancel(stream, now)
        s = self._open_stream(stream)
        if s is None:
            return
        self._events = [event for event in self._events if event.stream != stream]
        self._drop(s)

    def step_done(self, step: Step, result: StepResult, now: int) -> None:
        """A step that was out has run.  The result names every row, in the order of the step."""
        self._advance(now)
        if self._trace is not None:
            self._trace.step_done(step, result, now)
        assert self._out.pop(step.id, None) is step, f"step {step.id} is not out"
        stage, streams = step.stage, self._streams
        self._costs.observe(stage, step.bucket, _units(step, streams), result.duration_ns)
        self._forecast.forget(stage)
        if stage is Stage.CODEC:
            self._survey.look_up_costs()
        if stage <= Stage.PREFILL or step.why in FIRST_SOUNDS:
            self._admission.beginning(result.duration_ns, now)
        if self._admission.waiting:
            self._admission.stepped()
        is_backbone, is_depth = stage is Stage.BACKBONE, stage is Stage.DEPTH
        for row, row_result in zip(step.rows, result.rows, strict=True):
            s = streams[row.stream]
            assert s.out is stage
            assert row_result.stream == row.stream, "a result names the rows in the order of the step"
            s.out = None
            if s.is_cancelled:
                self._free(s)
            elif row_result.error:
                self._fail(s, stage, row_result.error)
            elif is_depth:
                s.made += 1
                if s.made >= s.max_frames or s.made == s.delivered + 1:
                    self._survey.touch(s)
            elif is_backbone and not row_result.ended and not row_result.wants_text:
                # As `_apply` has it, without the call: most rows of most steps come here.
                s.started += 1
                self._half_made.append(s)
            else:
                self._apply(s, stage, row, row_result, now)

    def measured(self, stage: Stage, times: Mapping[tuple[int, int], int], now: int) -> None:
        """The stage runs in another way from now on, and its steps take these times, ns by (bucket, size): see
        `CostTable.take_over`."""
        self._advance(now)
        if self._trace is not None:
            self._trace.measured(stage, times, now)
        self._costs.take_over(stage, times)
        self._forecast.forget(stage)

    # ---- outputs -----------------------------------------------------------------------------------------------------

    def events(self) -> list[Event]:
        """What happened since the last call."""
        events, self._events = self._events, []
        return events

    def wake_at(self) -> int | None:
        """When there will be a step, or an event, without any further input; None if never.  Not after the time means:
        now.
        """
        at_ns = self._survey.wake_at()
        if self._admission.waiting:
            at_ns = min(at_ns, self._admission.wake_at(self._now) or NEVER)
        return None if at_ns == NEVER else max(at_ns, self._now)

    def next_step(self, now: int) -> Step | None:
        """What to run now; None when there is nothing, see `wake_at`.  Streams that wait may begin by it: see `events`.

        The step is out until `step_done`; until then its streams take part in no other.
        """
        self._advance(now)
        if self._trace is not None:
            self._trace.next_step(now)
        if self._admission.waiting and self._admission.is_due(now):
            self._admit(now)
        if self._half_made:
            # A frame half made is of use to nobody.
            half_made = self._half_made
            depth = self._issue(Choice(Stage.DEPTH, half_made, Why.COMPLETES_FRAMES))
            self._half_made = [s for s in half_made if s.out is None] if len(depth.rows) < len(half_made) else []
            return depth
        work = self._survey.look(now)
        choice = self._chooser.choose(work, now)
        return None if choice is None else self._issue(choice, work)

    def stats(self, now: int) -> SchedulerStats:
        """A snapshot for plots and metrics; changes nothing."""
        self._survey.look_up_costs()
        waiting_ns = [0, 0, 0]
        streams = []
        for s in self._streams.values():
            if s.is_cancelled:
                continue
            is_due = self._survey.is_due(s, now)
            if not s.has_spoken and (is_due or s.out is not None):
                waiting_ns[s.priority] = max(waiting_ns[s.priority], now - s.ready_ns)
            slack_ns = self._survey.slack(s, now)
            lead_ns = 0
            if s.has_spoken:
                lead_ns = max(0, s.listener.dry_at(now) - now) + s.pending * self._frame_ns
            streams.append(
                StreamStats(
                    stream=s.id,
                    priority=s.priority,
                    stage=_stage_name(s, is_due),
                    lead_ns=lead_ns,
                    slack_ns=None if slack_ns == NEVER else slack_ns,
                    heard_samples=s.listener.heard(now),
                    delivered_samples=s.samples,
                    target_frames=s.target,
                )
            )
        return SchedulerStats(
            streams=tuple(streams),
            waiting_ns=(waiting_ns[0], waiting_ns[1], waiting_ns[2]),
            free_slots=self._slots.free,
            free_pages=self._pages.free,
            queued=self._admission.queued(),
            refused=tuple(self._admission.refused),
            is_strained=self._admission.is_strained,
            step_ratios=self._costs.ratios,
            margins={stage: self._costs.margin(stage) for stage in Stage},
            frame_alone_ns=self._forecast.mean_alone_ns(),
            stumble_ns=self._forecast.stumble_ns,
            moves=self._moves,
        )

    def listener(self, stream: int) -> Predictor | None:
        """What is known of an open stream's listener: to be asked, not to be told."""
        s = self._open_stream(stream)
        return None if s is None else s.listener

    # ---- who begins --------------------------------------------------------------------------------------------------

    def _admit(self, now: int) -> None:
        """Of those who wait: begin whom there is room for, refuse who has waited long enough."""
        admission, streams = self._admission, self._streams
        while admission.waiting:
            s = admission.first()
            if admission.lack(s, streams.values(), now):
                break
            del admission.waiting[s.id]
            # Its wait for other first sounds counts from here.
            s.ready_ns = now
            self._events.append(StreamAdmitted(s.id, self._start(s)))
        for s in admission.overdue(now):
            refusal = StreamRefused(s.id, admission.lack(s, streams.values(), now), admission.retry_after_s(s))
            admission.refuse(s)
            self._events.append(refusal)

    def _start(self, s: Stream) -> int:
        """Give a stream what admission has found free."""
        kept = self._pages.reserve(s.pages_kept)
        assert kept, "admission has just found them free"
        s.slot = self._slots.take()
        s.began_ns = self._now
        self._streams[s.id] = s
        self._survey.strain(is_strained=self._admission.is_strained)
        self._survey.touch(s)
        return s.slot

    # ---- steps out and back ------------------------------------------------------------------------------------------

    def _issue(self, choice: Choice, work: Work | None = None) -> Step:
        """Make the step of as many streams, in order, as the stage's limits hold; at least the first goes in."""
        stage = choice.stage
        if stage <= Stage.PREFILL:
            rows, used = self._rows_of_tokens(choice)
        else:
            rows, used = self._rows_of_frames(choice)
        slack_ns = first_sound_ns = None
        if work is not None:
            slack_ns = None if work.tightest_ns == NEVER else work.tightest_ns
            first_sound_ns = work.first_sound_ns
        bucket = bucket_of(self._specs[stage], used)
        step = Step(self._next_id, stage, tuple(rows), bucket, choice.why, slack_ns, first_sound_ns)
        self._next_id += 1
        self._out[step.id] = step
        return step

    def _rows_of_tokens(self, choice: Choice) -> tuple[list[Row], int]:
        """Rows that share the tokens of one TEXT or PREFILL step, and how much of the bucket they take."""
        stage, spec = choice.stage, self._specs[choice.stage]
        most_tokens = min(choice.tokens, spec.max_tokens) if choice.tokens else spec.max_tokens
        rows: list[Row] = []
        used = tokens = 0
        for s in choice.streams:
            width = s.rows
            if stage is Stage.TEXT:
                # The text of its unguided row is encoded along with it: as many tokens, in the same row.
                taken, start, count = 1, s.encoded, s.segments[0]
            else:
                taken, start, count = width, s.positions, s.prompt - s.positions
                if most_tokens:
                    count = min(count, max(1, (most_tokens - tokens) // width))
            if rows and (used + taken > spec.max_rows or (most_tokens and tokens + count * width > most_tokens)):
                continue
            new_pages: tuple[int, ...] = ()
            if stage is Stage.PREFILL:
                s.positions += count
                new_pages = self._take_pages(s)
            s.out, s.served = stage, self._next_id
            rows.append(Row(s.id, s.slot, start, count, new_pages))
            used += taken
            tokens += count * width
        return rows, used

    def _rows_of_frames(self, choice: Choice) -> tuple[list[Row], int]:
        """Rows of one BACKBONE, DEPTH or CODEC step, all with the same number of frames, and how many there are."""
        stage, frames, step_id = choice.stage, choice.frames, self._next_id
        max_rows = self._specs[stage].max_rows
        is_backbone, is_codec = stage is Stage.BACKBONE, stage is Stage.CODEC
        rows: list[Row] = []
        used = 0
        for s in choice.streams:
            # Sound has one row per stream.
            width = 1 if is_codec else s.rows
            if used + width > max_rows:
                continue
            new_pages: tuple[int, ...] = ()
            if is_backbone:
                s.positions += 1
                if s.positions > s.page_room:
                    new_pages = self._take_pages(s)
                if s.rests_until:
                    self._survey.touch(s)
            s.out = stage
            s.served = step_id
            # A frame that DEPTH completes has been started: its number is that of the frames made.
            rows.append(Row(s.id, s.slot, s.delivered if is_codec else s.made, frames, new_pages))
            used += width
        return rows, used

    def _take_pages(self, s: Stream) -> tuple[int, ...]:
        """The pages that the positions of a stream take and that it does not have yet."""
        pages = min(pages_for(s.positions, self._page_tokens, s.rows), s.pages_kept)
        new_pages = self._pages.take(pages - len(s.pages))
        s.pages.extend(new_pages)
        # With all that were promised it has enough for ever: new positions take the places of old ones.
        is_complete = s.feed is Feed.PER_FRAME and pages == s.pages_kept
        s.page_room = NEVER if is_complete else pages // s.rows * self._page_tokens
        return new_pages

    def _apply(self, s: Stream, stage: Stage, row: Row, result: RowResult, now: int) -> None:
        """Move the stream on by what a row of it did."""
        if stage is Stage.CODEC:
            self._deliver(s, row.count, result.samples, now)
            self._survey.touch(s)
            if s.delivered < s.started:
                return
        elif stage is Stage.TEXT:
            s.segments.popleft()
            s.encoded += row.count
            self._feed(s)
        elif stage is Stage.PREFILL and s.positions < s.prompt:
            return
        elif result.ended:
            s.speech_ended = True
            self._survey.touch(s)
        else:
            s.started += 1
            self._half_made.append(s)
            # Nobody waits for what will never come.
            if result.wants_text and not s.is_text_complete:
                s.starved_at = s.encoded
                self._survey.touch(s)
            return
        if s.is_finished:
            self._finish(s)

    def _wait_begins(self, s: Stream, now: int) -> None:
        """Text has come: a first sound that waited for nothing else counts its wait for others from here."""
        if not s.is_waiting and not s.has_spoken and s.out is None and s.made == s.started and not can_start(s):
            s.ready_ns = now

    def _feed(self, s: Stream) -> None:
        """More text is there, or it is known that none will come: a stream that waits for either goes on."""
        if s.starved_at is not None and (s.encoded > s.starved_at or s.is_text_complete):
            s.starved_at = None

    def _deliver(self, s: Stream, frames: int, samples: int, now: int) -> None:
        late_ns = s.listener.late_ns(now)
        if late_ns > 0:
            self._events.append(DeadlineMissed(s.id, late_ns))
        self._events.append(AudioReady(s.id, s.samples, samples))
        s.samples += samples
        s.delivered += frames
        s.listener.deliver(samples, now)
        self._set_target(s, frames, late_ns, s.listener.dry_at(now) - now)

    def _set_target(self, s: Stream, last: int, late_ns: int, lead_ns: int) -> None:
        """Choose the size of the next chunk, after one of `last` frames."""
        policy, ladder = self._policy, self._ladder
        longest = self._survey.longest_chunk_now(s)
        lead_cap_ns = self._survey.lead_cap_ns
        if s.interactive and s.pending and lead_cap_ns is not None:
            # The next chunk has begun already, and must end below the cap as well.
            longest = min(longest, max(s.pending, (lead_cap_ns - lead_ns) // self._frame_ns))
        if not policy.chunk_by_slack:
            s.target = next_rung(ladder, last=last, longest=longest)
            return
        frame_cost_ns, codec_cost_ns = self._survey.frame_cost_ns, self._survey.chunk_cost_ns
        s.recovers = late_ns > 0 and not s.recovers
        if s.recovers:
            s.target = recovery_chunk(
                ladder,
                longest=max(ladder[0], largest_rung(ladder, longest)),
                frame_ns=self._frame_ns,
                frame_cost_ns=frame_cost_ns,
                codec_cost_ns=codec_cost_ns,
            )
        else:
            s.target = next_chunk(
                ladder,
                # Larger chunks take less time per frame: then they need not be reached rung by rung.
                last=longest if self._admission.is_strained else last,
                longest=longest,
                room_ns=lead_ns - policy.guard_ns,
                frame_cost_ns=frame_cost_ns,
                codec_cost_ns=codec_cost_ns,
            )

    def _finish(self, s: Stream) -> None:
        self._events.append(StreamFinished(s.id, s.samples))
        self._free(s)

    def _fail(self, s: Stream, stage: Stage, error: str) -> None:
        self._events.append(StreamFailed(s.id, stage, error))
        self._drop(s)

    def _drop(self, s: Stream) -> None:
        """The stream is not wanted any more: free it at once, or when the step that carries it is done."""
        s.is_cancelled = True
        self._survey.forget(s)
        if s.out is None:
            self._free(s)

    def _free(self, s: Stream) -> None:
        if s.is_waiting:
            self._admission.forget(s)
            return
        del self._streams[s.id]
        self._survey.forget(s)
        if s in self._half_made:
            self._half_made.remove(s)
        self._slots.give(s.slot)
        self._pages.give(s.pages, s.pages_kept)
        self._admission.left(s, self._streams.values(), self._now)
        self._survey.strain(is_strained=self._admission.is_strained)

    # ---- small questions ---------------------------------------------------------------------------------------------

    def _advance(self, now: int) -> None:
        assert now >= self._now, "time does not go back"
        self._now = now

    def _touch(self, s: Stream) -> None:
        if not s.is_waiting:
            self._survey.touch(s)

    def _open_stream(self, stream: int) -> Stream | None:
        """The stream, if it is open or waits to be."""
        s = self._streams.get(stream) or self._admission.waiting.get(stream)
        return None if s is None or s.is_cancelled else s


def _units(step: Step, streams: Mapping[int, Stream]) -> int:
    """What the time of a step depends on besides its bucket; see `costs.size_of`."""
    if step.stage <= Stage.PREFILL:
        return sum(row.count * streams[row.stream].rows for row in step.rows)
    return step.rows[0].count


def _stage_name(s: Stream, is_due: bool) -> str:
    if s.out is not None:
        return "out"
    if s.can_encode:
        return "text"
    if s.made < s.started:
        return "depth"
    if s.can_prefill:
        return "prefill"
    if s.has_spoken and s.listener.is_held:
        return "held"
    if s.starved_at is not None or s.started == 0:
        return "waiting"
    if not is_due:
        return "resting"
    return "codec" if s.is_generated or s.pending >= s.target else "backbone"
