"""Which stage, which streams, which bucket, now.

The driver's loop:

    scheduler.push_text(stream, tokens, now)       # inputs: plain values, and the time
    for event in scheduler.events(): ...           # what happened
    step = scheduler.next_step(now)                # what to run, or None
    if step is None: sleep until scheduler.wake_at(), or the next input

The order of service, each rule under the one before:

1. DEPTH follows BACKBONE and PREFILL at once: a frame half made is of use to nobody.
2. A stream that has not spoken goes first, if what is left of its way to sound fits into the smallest slack of those
   who have; otherwise the streams in danger run, in as small a step as helps them, and the question is asked again.
3. No first sound is put off like that for longer than its class allows (40 ms for a call), except that a stream
   already late gets every other step.
4. Among those who have spoken, finished chunks go to the codec when the rest can spare the time; otherwise the least
   slack decides, and ready rows of the same shape ride along.

Slack is the time until the listener runs dry, less the work the next sound still needs.  A stream with a listener is
generated in chunks: one is begun when it will still end below the lead cap, and once begun is completed.  So what a
barge-in throws away is bounded, and no stream is stopped at the cap with frames in hand that fill no chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..clock import MS, samples_to_ns
from ..errors import Overloaded
from ..playback import PlaybackReport
from .admission import admit, bucket_of, load_percent, stage_ns
from .chunking import flush_at, largest_rung, longest_chunk, next_chunk, next_rung, recovery_chunk
from .costs import CostTable
from .policy import Policy
from .predictor import Predictor
from .slots import Pages, Slots, pages_for
from .step import (
    AudioReady,
    DeadlineMissed,
    Event,
    Row,
    RowResult,
    Stage,
    StageSpec,
    Step,
    StepResult,
    StreamFailed,
    StreamFinished,
    Why,
)
from .stream import NEVER, Feed, Priority, Stream

if TYPE_CHECKING:
    from .trace import TraceWriter

DEFERRAL_NS = {Priority.LIVE: 40 * MS, Priority.STREAM: 160 * MS, Priority.BATCH: 1_000 * MS}
"""How long a first sound may wait for others."""
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
    refused: int
    """Streams refused since the start."""


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
        policy: Policy | None = None,
        trace: TraceWriter | None = None,
    ) -> None:
        """`specs` names all five stages.  No policy: the product's.  `trace`, if given, writes down every input."""
        self._specs = dict(specs)
        self._frame_ns = samples_to_ns(frame_samples, sample_rate)
        self._sample_rate = sample_rate
        self._frame_samples = frame_samples
        self._page_tokens = page_tokens
        self._policy = policy = policy or Policy()
        self._ladder = policy.ladder
        self._longest_interactive = longest_chunk(policy.ladder, self._frame_ns, policy.lead_cap_ns)
        # Rows of one stream must fit one step.
        self._widest = min(specs[stage].max_rows for stage in (Stage.PREFILL, Stage.BACKBONE, Stage.DEPTH))
        self._costs = costs
        self._slots = Slots(slots)
        self._pages = Pages(kv_pages)
        self._refused = 0

        self._now = 0
        # Open streams in the order they opened; those cancelled while a step carries them stay until it is done.
        self._streams: dict[int, Stream] = {}
        # Those with a frame that lacks its other codes, no step being out for it.
        self._half_made: list[Stream] = []
        # Steps that are out.
        self._out: dict[int, Step] = {}
        self._next_id = 0
        self._events: list[Event] = []
        # Predicted time of one frame, and of a one-frame codec step, with all open streams in it; and what for.
        self._frame_cost_ns = 0
        self._codec_cost_ns = 0
        self._costs_are_for = (0, -1)
        # The last step was a first sound that rule 3 forced past a stream in danger.
        self._was_forced = False

        self._trace = trace
        if trace is not None:
            trace.begin(
                specs=self._specs,
                sample_rate=sample_rate,
                frame_samples=frame_samples,
                slots=slots,
                kv_pages=kv_pages,
                page_tokens=page_tokens,
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
    ) -> int:
        """Begin a stream under an id that is not in use, and return its slot.

        rows: backbone rows it takes (2 with classifier-free guidance).  max_frames: generation stops there, whatever
        the model says.  Raises `Overloaded`, with nothing changed, when there is no room.
        """
        self._advance(now)
        if self._trace is not None:
            self._trace.open(
                stream, now, feed=feed, max_frames=max_frames, priority=priority, rows=rows, interactive=interactive
            )
        assert stream not in self._streams, f"stream {stream} is open"
        assert max_frames >= 1
        assert 1 <= rows <= self._widest, f"a stream takes 1 to {self._widest} rows"
        positions = max_frames + (PROMPT_TOKENS if feed is Feed.PREFIX else 1)
        pages_kept = pages_for(positions, self._page_tokens, rows)
        try:
            admit(
                slots=self._slots,
                pages=self._pages,
                pages_needed=pages_kept,
                priority=priority,
                load=self._load_with(rows) if interactive and self._policy.admits_by_load else 0,
            )
        except Overloaded:
            self._refused += 1
            raise
        kept = self._pages.reserve(pages_kept)
        assert kept, "admission has just found them free"
        slot = self._slots.take()
        self._streams[stream] = Stream(
            stream,
            slot,
            feed=feed,
            priority=priority,
            rows=rows,
            max_frames=max_frames,
            interactive=interactive,
            sample_rate=self._sample_rate,
            first_chunk=self._ladder[0],
            pages_kept=pages_kept,
        )
        return slot

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
        if s.feed is Feed.PREFIX:
            more = pages_for(s.tokens + s.max_frames, self._page_tokens, s.rows) - s.pages_kept
            if more > 0 and not self._pages.reserve(more):
                # Waiting for pages while holding some is how two streams wait for each other, so it is dropped instead.
                self._fail(s, Stage.TEXT, f"no memory is free for a text of {s.tokens} tokens")
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
            s.listener.report(report, now)

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
        s.is_cancelled = True
        if s.out is None:
            self._free(s)

    def step_done(self, step: Step, result: StepResult, now: int) -> None:
        """A step that was out has run.  The result names every row, in any order."""
        self._advance(now)
        if self._trace is not None:
            self._trace.step_done(step, result, now)
        assert self._out.pop(step.id, None) is step, f"step {step.id} is not out"
        assert len(result.rows) == len(step.rows), "a result names every row once"
        self._costs.observe(step.stage, step.bucket, _units(step, self._streams), result.duration_ns)
        row_results = {row.stream: row for row in result.rows}
        for row in step.rows:
            s = self._streams[row.stream]
            assert s.out is step.stage
            s.out = None
            row_result = row_results[row.stream]
            if s.is_cancelled:
                self._free(s)
            elif row_result.error:
                self._fail(s, step.stage, row_result.error)
            else:
                self._apply(s, step.stage, row, row_result, now)
                if s.is_finished:
                    self._finish(s)

    # ---- outputs -----------------------------------------------------------------------------------------------------

    def events(self) -> list[Event]:
        """What happened since the last call."""
        events, self._events = self._events, []
        return events

    def wake_at(self) -> int | None:
        """When there will be a step without any further input; None if never.  Not after the time means: now."""
        self._look_up_costs()
        at_ns = NEVER
        for s in self._streams.values():
            if s.out is None and not s.is_cancelled:
                at_ns = min(at_ns, self._due_at(s))
        return None if at_ns == NEVER else max(at_ns, self._now)

    def next_step(self, now: int) -> Step | None:
        """What to run now; None when there is nothing, see `wake_at`.

        The step is out until `step_done`; until then its streams take part in no other.
        """
        self._advance(now)
        if self._trace is not None:
            self._trace.next_step(now)
        if self._half_made:
            depth = self._issue(Stage.DEPTH, _by_slack(self._half_made), Why.COMPLETES_FRAMES)
            self._half_made = [s for s in self._half_made if s.out is None]
            return depth
        work = self._survey(now)
        if not work.new:
            return self._go_on(work)
        step = self._first_sound(work, now) or self._go_on(work)
        # Nobody in danger can be helped now (a step is out for them): then waiting for them would help nobody.
        return step or self._first_step_of(_in_order(work.new), work, Why.FIRST_SOUND_ALONE)

    def stats(self, now: int) -> SchedulerStats:
        """A snapshot for plots and metrics; changes nothing."""
        self._survey(now)
        waiting_ns = [0, 0, 0]
        streams = []
        for s in self._streams.values():
            if s.is_cancelled:
                continue
            is_due = self._due_at(s) <= now
            if not s.has_spoken and (is_due or s.out is not None):
                waiting_ns[s.priority] = max(waiting_ns[s.priority], now - s.ready_ns)
            lead_ns = 0
            if s.has_spoken:
                lead_ns = max(0, s.listener.dry_at(now) - now) + s.pending * self._frame_ns
            streams.append(
                StreamStats(
                    stream=s.id,
                    priority=s.priority,
                    stage=_stage_name(s, is_due),
                    lead_ns=lead_ns,
                    slack_ns=None if s.slack_ns == NEVER else s.slack_ns,
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
            refused=self._refused,
        )

    def listener(self, stream: int) -> Predictor | None:
        """What is known of an open stream's listener: to be asked, not to be told."""
        s = self._open_stream(stream)
        return None if s is None else s.listener

    # ---- when each stream is due -------------------------------------------------------------------------------------

    def _look_up_costs(self) -> None:
        """Predict, once per decision, what the times below are reckoned with."""
        streams = max(1, len(self._streams))
        if self._costs_are_for == (streams, self._costs.version):
            return
        self._costs_are_for = (streams, self._costs.version)
        self._frame_cost_ns = self._frame_ns_for(streams)
        self._codec_cost_ns = self._cost(Stage.CODEC, min(streams, self._specs[Stage.CODEC].max_rows), 1)

    def _due_at(self, s: Stream) -> int:
        """The first time at which the stream by itself makes a step necessary, if nothing else happens.

        The deadline changes once without any input: when the last report goes stale.  It can only move forward then,
        and no time below is later for an earlier deadline; so a time found before that moment stays right after it.
        """
        if s.can_encode or s.made < s.started or s.can_prefill:
            return 0
        if not s.has_spoken:
            return 0 if self._is_ready(s) else NEVER
        listener = s.listener
        decode_at, generate_at, _ = self._sound_due_at(s, listener.fresh_ns)
        fresh_ns = min(decode_at, generate_at)
        if fresh_ns < listener.stale_ns:
            return fresh_ns
        decode_at, generate_at, _ = self._sound_due_at(s, listener.fallback_ns)
        return max(listener.stale_ns, min(decode_at, generate_at))

    def _is_ready(self, s: Stream) -> bool:
        """A stream that has not spoken and has its prompt behind it has work for BACKBONE or CODEC.

        A listener who is not playing yet is prepared for: the first chunk is made, and nothing after it.
        """
        if s.made < s.target and not s.is_generated:
            return s.can_generate or (s.made > 0 and s.starved_at is not None)
        return s.made > 0

    def _sound_due_at(self, s: Stream, deadline_ns: int) -> tuple[int, int, int]:
        """For a stream that has spoken: when its frames should go to CODEC; when BACKBONE should start its next
        frame; when it may, riding in a step that runs anyway.

        A chunk is begun when it will end below the lead cap; of its own accord half a chunk later than that, so that
        resting streams come back together rather than each waking the machine for itself.  Once begun it is completed.
        """
        pending = s.made - s.delivered
        if s.speech_ended or s.started >= s.max_frames:
            # Even if the listener is paused: then the stream ends, and what it holds is free.
            return 0 if pending else NEVER, NEVER, NEVER
        if s.listener.is_held:
            return NEVER, NEVER, NEVER
        if not pending or (s.recovers and pending < s.target and s.starved_at is None):
            decode_at = NEVER
        elif pending >= s.target:
            decode_at = 0
        elif not self._policy.flushes_early and s.starved_at is None:
            decode_at = NEVER
        else:
            decode_at = flush_at(deadline_ns, self._frame_cost_ns, self._codec_cost_ns, self._policy.guard_ns)
        if s.starved_at is not None:
            return decode_at, NEVER, NEVER
        lead_cap_ns = self._policy.lead_cap_ns
        if not s.interactive or lead_cap_ns is None or 0 < pending < s.target:
            return decode_at, 0, 0
        chunk_ns = s.target * self._frame_ns
        may_at = deadline_ns + pending * self._frame_ns + chunk_ns - lead_cap_ns
        return decode_at, may_at + chunk_ns // 2, may_at

    # ---- the choice --------------------------------------------------------------------------------------------------

    def _survey(self, now: int) -> _Work:
        """Sort the streams by what they can do now, and find their slack.  Every stream that is due is in a list."""
        self._look_up_costs()
        work = _Work()
        codec_cost_ns = self._codec_cost_ns
        frameless: list[Stream] = []
        soon_ns = 2 * self._frame_cost_ns
        rows_soon = 0
        for s in self._streams.values():
            s.slack_ns = NEVER
            if s.is_cancelled:
                continue
            if not s.has_spoken:
                if s.out is None and s.made == s.started and (s.can_encode or s.can_prefill or self._is_ready(s)):
                    work.new.append(s)
                continue
            listener = s.listener
            deadline_ns = listener.fresh_ns if now < listener.stale_ns else listener.fallback_ns
            if not listener.is_held:
                spare_ns = deadline_ns + s.ease_ns - now - codec_cost_ns
                if s.made > s.delivered:
                    s.slack_ns = spare_ns
                    work.tightest_ns = min(work.tightest_ns, spare_ns)
                elif s.starved_at is None or s.segments:
                    s.slack_ns = spare_ns
                    frameless.append(s)
                    if spare_ns < soon_ns:
                        rows_soon += s.rows
            if s.out is not None or s.made < s.started:
                continue
            if s.segments and s.can_encode:
                work.text.append(s)
            decode_at, generate_at, may_generate_at = self._sound_due_at(s, deadline_ns)
            if decode_at <= now:
                work.codec.append(s)
            if may_generate_at <= now:
                work.backbone.append(s)
                if generate_at <= now:
                    work.is_backbone_due = True
        if frameless:
            # The step that would save them carries those who need it soon, not everybody.
            work.rescue_ns = self._frame_ns_for(max(1, rows_soon))
            for s in frameless:
                s.slack_ns -= work.rescue_ns
                work.tightest_ns = min(work.tightest_ns, s.slack_ns)
        return work

    def _first_sound(self, work: _Work, now: int) -> Step | None:
        """Rules 2 and 3: a step for streams that have not spoken, or None when those who have come first."""
        waiting = _in_order(work.new)
        bounded = self._policy.deferral_is_bounded
        spare_ns = work.tightest_ns - self._policy.guard_ns
        many = len(waiting)
        work.first_sound_ns = self._way_to_sound(waiting)
        while many and self._way_to_sound(waiting[:many]) > spare_ns:
            many //= 2
        if many:
            self._was_forced = False
            return self._first_step_of(waiting[:many], work, Why.FIRST_SOUND_FITS)
        overdue = [s for s in waiting if now - s.ready_ns >= DEFERRAL_NS[s.priority]] if bounded else []
        if overdue and not (self._was_forced and work.tightest_ns < 0):
            self._was_forced = True
            return self._first_step_of(overdue, work, Why.FIRST_SOUND_OVERDUE)
        self._was_forced = False
        work.in_danger_below_ns = danger_ns = self._way_to_sound(waiting[:1]) + self._policy.guard_ns
        # Nothing helps a stream in danger more quickly than the frames it has in hand.
        already = {s.id for s in work.codec}
        for s in self._streams.values():
            if s.recovers or s.slack_ns >= danger_ns or not s.pending or s.out is not None:
                continue
            if s.id not in already and s.made == s.started:
                work.codec.append(s)
        return None

    def _way_to_sound(self, streams: list[Stream]) -> int:
        """Predicted time until all of these have spoken, if they run together from here."""
        rows = tokens = prompt = 0
        for s in streams:
            rows += s.rows
            tokens += sum(s.segments)
            if not s.started:
                prompt += max(1, s.prompt - s.positions) * s.rows
        time_ns = self._stage_ns(Stage.CODEC, len(streams))
        if prompt:
            spec = self._specs[Stage.PREFILL]
            carried = min(prompt, spec.max_tokens or prompt)
            time_ns += self._stage_ns(Stage.PREFILL, rows, carried) * -(-prompt // carried)
            time_ns += self._stage_ns(Stage.DEPTH, rows)
        if tokens:
            time_ns += self._stage_ns(Stage.TEXT, len(streams), tokens)
        return time_ns

    def _first_step_of(self, waiting: list[Stream], work: _Work, why: Why) -> Step:
        """The next step for these streams, none of which has spoken: what is closest to sound, except that text goes
        before prefill, because what is encoded now joins that prefill.  Others who need the same stage come along.
        """
        decodable = [s for s in waiting if s.made and (s.made >= s.target or not s.can_generate)]
        if decodable:
            return self._decode(decodable + _by_slack(work.codec), work, why)
        texts = [s for s in waiting if s.can_encode]
        if texts:
            return self._issue(Stage.TEXT, texts + work.text, why, work)
        prompts = [s for s in waiting if s.can_prefill]
        if prompts:
            return self._issue(Stage.PREFILL, prompts if self._policy.prefills_together else prompts[:1], why, work)
        return self._issue(Stage.BACKBONE, waiting, why, work)

    def _go_on(self, work: _Work) -> Step | None:
        """Rule 4: a step for streams that have spoken; None when none of them is due."""
        codec, text = _by_slack(work.codec), _by_slack(work.text)
        # Frames are urgent for those who have none in hand: what the others need next is the codec.
        backbone = sorted(work.backbone, key=lambda s: (s.made > s.delivered, s.slack_ns, s.id))
        frame_ns = NEVER
        if not work.is_backbone_due:
            backbone = []
        elif not backbone[0].pending:
            frame_ns = backbone[0].slack_ns
        # Text is urgent for those who have nothing to speak without it.
        text_ns = min((s.slack_ns for s in text if s.starved_at is not None), default=NEVER)
        if codec:
            # How late the later of the two would be, either way round.
            other_ns = min(text_ns, frame_ns)
            codec_first_ns = max(0, -codec[0].slack_ns, self._codec_cost_ns - other_ns)
            codec_last_ns = max(0, -other_ns, work.rescue_ns - codec[0].slack_ns)
            if other_ns == NEVER or codec_first_ns <= codec_last_ns:
                return self._decode(codec, work, self._why_decode(codec[0], work))
        if text and (text_ns <= frame_ns or self._text_cost(text) <= frame_ns):
            return self._issue(Stage.TEXT, text, Why.TEXT, work)
        if backbone:
            helped = self._helpful(backbone, work)
            why = Why.LEAST_SLACK
            if len(helped) < len(backbone):
                why = Why.DANGER_FRAME if work.in_danger_below_ns > -NEVER else Why.RESCUE_FRAME
            return self._issue(Stage.BACKBONE, helped, why, work)
        return None

    def _helpful(self, backbone: list[Stream], work: _Work) -> list[Stream]:
        """The streams, most urgent first, that one frame step should carry: usually all that may.

        While a first sound waits for some of them: those, and whoever comes along for a quarter more time.  Else, if
        the first would be late in a full step but not in a smaller one: as many as the smaller one holds, provided
        that those left out can wait for it.  A small step takes nearly as long as a full one, so it is for emergencies.
        """
        spec = self._specs[Stage.BACKBONE]
        rows = min(sum(s.rows for s in backbone), spec.max_rows)
        first = backbone[0]
        in_danger = sum(s.rows for s in backbone if not s.pending and s.slack_ns < work.in_danger_below_ns)
        if in_danger:
            least = min(in_danger, rows)
            limit_ns = self._frame_ns_for(least) * 5 // 4
        elif not first.pending:
            least = first.rows
            limit_ns = work.rescue_ns + first.slack_ns
        else:
            return backbone
        if self._frame_ns_for(rows) <= limit_ns:
            return backbone
        fitting = [
            bucket for bucket in spec.buckets if least <= bucket < rows and self._frame_ns_for(bucket) <= limit_ns
        ]
        if not fitting:
            # The first is late anyway, and the others are best served by a full step.
            return backbone
        chosen: list[Stream] = []
        used = 0
        for s in backbone:
            if used + s.rows <= fitting[-1]:
                chosen.append(s)
                used += s.rows
            elif not in_danger and s.slack_ns < limit_ns:
                return backbone
        return chosen

    def _why_decode(self, first: Stream, work: _Work) -> Why:
        if first.is_generated:
            return Why.CHUNK_LAST
        if first.pending >= first.target:
            return Why.CHUNK_FULL
        return Why.CHUNK_EARLY if work.in_danger_below_ns == -NEVER else Why.DANGER_CHUNK

    def _decode(self, due: list[Stream], work: _Work, why: Why) -> Step:
        """A codec step for the first of `due`, with all rows of its shape and the riders that have just as many frames.

        Every row of a codec step has the same number of frames, because padding would enter the codec's state.  A
        rider's chunk is not full yet.  It comes along if one more frame step would make it due, since it saves a step
        of its own then, or if the bucket has room for it anyway.
        """
        frames = self._ready_rung(due[0])
        spec = self._specs[Stage.CODEC]
        rows = [s for s in due if self._ready_rung(s) == frames][: spec.max_rows]
        taken = {s.id for s in rows}
        ready = [s for s in work.backbone if s.id not in taken and largest_rung(self._ladder, s.pending) == frames]
        soon_ns = 2 * (self._frame_cost_ns + self._codec_cost_ns + self._policy.guard_ns)
        rows += [s for s in ready if s.slack_ns < soon_ns][: spec.max_rows - len(rows)]
        room = min(bucket_of(spec, len(rows)), spec.max_rows) - len(rows)
        rows += [s for s in ready if s.slack_ns >= soon_ns][:room]
        return self._issue(Stage.CODEC, rows, why, work, frames)

    def _ready_rung(self, s: Stream) -> int:
        """Frames of the chunk to decode now."""
        return largest_rung(self._ladder, min(s.pending, self._longest_chunk(s)))

    def _longest_chunk(self, s: Stream) -> int:
        return self._longest_interactive if s.interactive else self._ladder[-1]

    # ---- steps out and back ------------------------------------------------------------------------------------------

    def _issue(self, stage: Stage, streams: list[Stream], why: Why, work: _Work | None = None, frames: int = 1) -> Step:
        """Make the step of as many of `streams`, in order, as the stage's limits hold; at least the first goes in."""
        spec = self._specs[stage]
        rows: list[Row] = []
        used = tokens = 0
        for s in streams:
            width = 1 if stage in {Stage.TEXT, Stage.CODEC} else s.rows
            if rows and used + width > spec.max_rows:
                continue
            start, count = self._extent(s, stage, frames)
            if stage is Stage.PREFILL:
                count = min(count, max(1, (spec.max_tokens - tokens) // width)) if spec.max_tokens else count
            if rows and spec.max_tokens and tokens + count * width > spec.max_tokens:
                continue
            new_pages: tuple[int, ...] = ()
            if stage is Stage.PREFILL or stage is Stage.BACKBONE:
                s.positions += count
                needed = pages_for(s.positions, self._page_tokens, s.rows) - len(s.pages)
                if needed:
                    new_pages = self._pages.take(needed)
                    s.pages.extend(new_pages)
            s.out = stage
            rows.append(Row(s.id, s.slot, start, count, new_pages))
            used += width
            tokens += count * width
        slack_ns = None if work is None or work.tightest_ns == NEVER else work.tightest_ns
        first_sound_ns = None if work is None else work.first_sound_ns
        step = Step(self._next_id, stage, tuple(rows), bucket_of(spec, used), why, slack_ns, first_sound_ns)
        self._next_id += 1
        self._out[step.id] = step
        return step

    def _extent(self, s: Stream, stage: Stage, frames: int) -> tuple[int, int]:
        """(start, count) of the stream's next row in a stage."""
        if stage is Stage.TEXT:
            return s.encoded, s.segments[0]
        if stage is Stage.PREFILL:
            return s.positions, s.prompt - s.positions
        if stage is Stage.BACKBONE:
            return s.started, 1
        if stage is Stage.DEPTH:
            return s.made, 1
        return s.delivered, frames

    def _apply(self, s: Stream, stage: Stage, row: Row, result: RowResult, now: int) -> None:
        """Move the stream on by what a row of it did."""
        if stage is Stage.TEXT:
            s.segments.popleft()
            s.encoded += row.count
            self._feed(s)
        elif stage is Stage.DEPTH:
            s.made += 1
        elif stage is Stage.CODEC:
            self._deliver(s, row.count, result.samples, now)
        elif stage is Stage.BACKBONE or s.positions == s.prompt:
            if result.ended:
                s.speech_ended = True
                return
            s.started += 1
            self._half_made.append(s)
            # Nobody waits for what will never come.
            if result.wants_text and not s.is_text_complete:
                s.starved_at = s.encoded

    def _wait_begins(self, s: Stream, now: int) -> None:
        """Text has come: a first sound that waited for nothing else counts its wait for others from here."""
        if not s.has_spoken and s.out is None and self._due_at(s) == NEVER:
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
        self._look_up_costs()
        codec_rows = min(len(self._streams), self._specs[Stage.CODEC].max_rows)
        lead_ns = s.listener.dry_at(now) - now
        longest = self._longest_chunk(s)
        lead_cap_ns = self._policy.lead_cap_ns
        if s.interactive and s.pending and lead_cap_ns is not None:
            # The next chunk has begun already, and must end below the cap as well.
            longest = min(longest, max(s.pending, (lead_cap_ns - lead_ns) // self._frame_ns))

        def codec_cost_ns(rung: int) -> int:
            return self._cost(Stage.CODEC, codec_rows, rung)

        if not self._policy.chunk_by_slack:
            s.target = next_rung(self._ladder, last=frames, longest=longest)
            return
        s.recovers = late_ns > 0 and not s.recovers
        if s.recovers:
            s.target = recovery_chunk(
                self._ladder,
                longest=largest_rung(self._ladder, max(1, longest)),
                frame_ns=self._frame_ns,
                frame_cost_ns=self._frame_cost_ns,
                codec_cost_ns=codec_cost_ns,
            )
        else:
            s.target = next_chunk(
                self._ladder,
                last=frames,
                longest=longest,
                room_ns=lead_ns - self._policy.guard_ns,
                frame_cost_ns=self._frame_cost_ns,
                codec_cost_ns=codec_cost_ns,
            )

    def _finish(self, s: Stream) -> None:
        self._events.append(StreamFinished(s.id, s.samples))
        self._free(s)

    def _fail(self, s: Stream, stage: Stage, error: str) -> None:
        self._events.append(StreamFailed(s.id, stage, error))
        if s.out is None:
            self._free(s)
        else:
            s.is_cancelled = True

    def _free(self, s: Stream) -> None:
        del self._streams[s.id]
        if s in self._half_made:
            self._half_made.remove(s)
        self._slots.give(s.slot)
        self._pages.give(s.pages, s.pages_kept)

    # ---- small questions ---------------------------------------------------------------------------------------------

    def _advance(self, now: int) -> None:
        assert now >= self._now, "time does not go back"
        self._now = now

    def _open_stream(self, stream: int) -> Stream | None:
        s = self._streams.get(stream)
        return None if s is None or s.is_cancelled else s

    def _cost(self, stage: Stage, rows: int, units: int = 1) -> int:
        return self._costs.predict_ns(stage, bucket_of(self._specs[stage], rows), units)

    def _stage_ns(self, stage: Stage, rows: int, units: int = 1) -> int:
        return stage_ns(self._costs, self._specs, stage, rows, units)

    def _frame_ns_for(self, rows: int) -> int:
        """Predicted time of one frame for `rows`."""
        return self._stage_ns(Stage.BACKBONE, rows) + self._stage_ns(Stage.DEPTH, rows)

    def _text_cost(self, streams: list[Stream]) -> int:
        spec = self._specs[Stage.TEXT]
        rows = min(len(streams), spec.max_rows)
        return self._cost(Stage.TEXT, rows, sum(s.segments[0] for s in streams[:rows]))

    def _load_with(self, rows: int) -> int:
        """Percent of this machine that all listeners need with one more; 0 when that one is the first."""
        heard = [s for s in self._streams.values() if s.interactive and not s.is_cancelled]
        if not heard:
            return 0
        return load_percent(
            self._costs,
            self._specs,
            backbone_rows=rows + sum(s.rows for s in heard),
            streams=1 + len(heard),
            frame_ns=self._frame_ns,
        )


class _Work:
    """What one look at the streams found."""

    __slots__ = (
        "backbone",
        "codec",
        "first_sound_ns",
        "in_danger_below_ns",
        "is_backbone_due",
        "new",
        "rescue_ns",
        "text",
        "tightest_ns",
    )

    def __init__(self) -> None:
        # Predicted time of a frame step that carries those who need it soon.
        self.rescue_ns = 0
        # The least slack of all who have spoken, those whose step is out included.
        self.tightest_ns = NEVER
        # Predicted time until all first sounds that wait would be made; None when none waits.
        self.first_sound_ns: int | None = None
        # Streams with less slack than this keep a first sound waiting.
        self.in_danger_below_ns = -NEVER
        # Not spoken yet, and something to run.
        self.new: list[Stream] = []
        # Spoken: text to encode, frames to decode, frames to start (some only if a step runs anyway).
        self.text: list[Stream] = []
        self.codec: list[Stream] = []
        self.backbone: list[Stream] = []
        self.is_backbone_due = False


def _by_slack(streams: Iterable[Stream]) -> list[Stream]:
    return sorted(streams, key=lambda s: (s.slack_ns, s.id))


def _in_order(streams: Iterable[Stream]) -> list[Stream]:
    """The order in which first sounds are served."""
    return sorted(streams, key=lambda s: (s.priority, s.ready_ns, s.id))


def _units(step: Step, streams: Mapping[int, Stream]) -> int:
    """What the time of a step depends on besides its bucket; see `costs.size_of`."""
    if step.stage is Stage.CODEC:
        return step.rows[0].count
    if step.stage is Stage.PREFILL:
        return sum(row.count * streams[row.stream].rows for row in step.rows)
    return sum(row.count for row in step.rows)


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
