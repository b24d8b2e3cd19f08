"""The one thread of the engine: it takes what was said, runs the step that is due, and says what came of it.

    while the other side is there:
        feed a slice of text, run one step, send what it made
        wait for messages: not at all while there is work, else until the scheduler wants to be woken

The wait is in `Line.receive` and is the only one; there is no lock, because nothing here is shared.  Torch, the text
front end and the Opus encoder run nowhere else, so whoever sends the sound never waits for them.

On a device that can do two things at once a codec step is only issued: as far as the scheduler is told it is done, and
took as long as such steps took before.  The streams go on with their next frames, and the sound is encoded and sent
when it comes, in the middle of a step that waits for the device.  What the scheduler says of a stream meanwhile is kept
until the sound before it has been sent.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from breeze_rtc.clock import MS, SECOND, Clock
from breeze_rtc.errors import BadRequest, Overloaded
from breeze_rtc.media.opus import SpeechEncoder
from breeze_rtc.playback import PlaybackReport, SpeechPacket, TextMark
from breeze_rtc.runtime.messages import (
    AddVoice,
    Cancel,
    Chunk,
    EndText,
    Failed,
    Finished,
    Message,
    Open,
    Report,
    Stats,
    Taken,
    Text,
    VoiceAdded,
)
from breeze_rtc.scheduling.costs import ONE
from breeze_rtc.scheduling.step import (
    AudioReady,
    Event,
    RowResult,
    Stage,
    Step,
    StepResult,
    StreamAdmitted,
    StreamFailed,
    StreamFinished,
    StreamRefused,
)
from breeze_rtc.scheduling.stream import Feed, Priority

if TYPE_CHECKING:
    from breeze_rtc.models.codec import Heard
    from breeze_rtc.models.speech_model import TextFrontend
    from breeze_rtc.runtime.executor import Executor
    from breeze_rtc.runtime.frame_graphs import Times
    from breeze_rtc.runtime.kv_cache import Prefix
    from breeze_rtc.runtime.sentence_executor import Ensemble
    from breeze_rtc.runtime.sounding import Sounding
    from breeze_rtc.scheduling.scheduler import Scheduler

log = logging.getLogger(__name__)

STATS_EVERY_NS = 100 * MS
FRAMES_TO_TELL = 128
"""Frames that the average time of one goes by: ten seconds of speech."""
FRAMES_KNOWN = 16
"""What was measured before serving counts as so many; where nothing was, the first of a cold machine count for none."""
ADDING_EVERY_NS = 20 * MS
"""How often a driver with nothing else to do looks whether a new voice is ready."""
TEXT_SLICE_CHARS = 256
"""Text given to front ends between two steps: a book pushed at once delays nobody else's next step by more than
this."""
MAX_UNREAD_S = 30
"""A stream whose consumer is this far behind is held until half of it has been taken."""


class Hangup(Exception):
    """The other side is gone."""


class Line(Protocol):
    """The driver's end of the conversation."""

    def receive(self, timeout_ns: int | None) -> list[Message]:
        """What has been said; wait at most `timeout_ns` (None: for ever) when nothing has.  Raises Hangup."""

    def send(self, message: Message) -> None:
        """Say something; never waits for the other side to listen."""


@dataclass(frozen=True, slots=True)
class _Sound:
    """What a codec step made of one stream."""

    pcm: NDArray[np.int16]
    packets: tuple[SpeechPacket, ...]
    marks: tuple[TextMark, ...]


@dataclass(frozen=True, slots=True)
class Speaker:
    """What a stream needs of its voice."""

    frontend: TextFrontend
    prefixes: tuple[Prefix | None, ...] = ()
    """What each backbone row begins with that is computed already."""
    heard: Heard | None = None
    """What its sound goes on from."""
    voice: str | None = None
    """Of a voice that speaks beside the model (`Ensemble`), its name."""


class NewVoices(Protocol):
    """Makes voices of recordings."""

    @property
    def is_adding(self) -> bool:
        """`added` will have something to say."""

    def add(self, message: AddVoice) -> None:
        """Begin; never waits."""

    def added(self) -> list[VoiceAdded]:
        """What is done by now."""


class _Utterance:
    """One open stream, as the driver sees it."""

    def __init__(self, message: Open, encoder: SpeechEncoder) -> None:
        self.message = message
        self.encoder = encoder
        # None until there is room for the stream; its text waits here.
        self.frontend: TextFrontend | None = None
        # White space before the first word: what consists of nothing else is not spoken, whatever the front end thinks.
        self.blank = ""
        self.has_words = False
        # Text not yet given to the front end, in slices.
        self.text: deque[str] = deque()
        # The other side has said that no more text comes; the front end hears it after the last piece.
        self.has_all_text = False
        # Sound made and not sent yet.
        self.ready: _Sound | None = None
        # Codec steps whose sound is on its way, and what has been said of the stream since the first of them.
        self.soundings = 0
        self.later: deque[Event] = deque()
        # Samples sent, and samples the consumer has taken.
        self.sent = 0
        self.taken = 0
        # Held because too much is unread; and the last word of the listener, repeated when the hold ends.
        self.is_held = False
        self.report: PlaybackReport | None = None

    def add(self, text: str) -> None:
        """Take more text for the front end."""
        if not self.has_words:
            text = self.blank = self.blank + text
            self.has_words = bool(text.strip())
        if self.has_words:
            self.text.extend(text[at : at + TEXT_SLICE_CHARS] for at in range(0, len(text), TEXT_SLICE_CHARS))


class Driver:
    """Joins scheduler, executor, text front end and Opus encoder; see the module's docstring.

    A stream that fails, wherever, is closed everywhere and said to have failed; the others go on.
    """

    def __init__(
        self,
        *,
        line: Line,
        clock: Clock,
        scheduler: Scheduler,
        executor: Executor | Ensemble,
        speaker: Callable[[Open], Speaker],
        max_frames: int,
        rows: Callable[[Open], int] = lambda _message: 1,
        voices: NewVoices | None = None,
        taken_over: Callable[[], list[tuple[Stage, Times]]] = list,
    ) -> None:
        """`speaker` makes ready what a stream needs of its voice; `rows` says how many backbone rows it takes.  voices:
        takes recordings; None: nobody does.  taken_over: see `Executor.taken_over`."""
        self._line = line
        self._clock = clock
        self._scheduler = scheduler
        self._executor = executor
        self._speaker = speaker
        self._voices = voices
        self._max_frames = max_frames
        self._rows = rows
        self._taken_over = taken_over
        self._max_unread = MAX_UNREAD_S * executor.sample_rate
        # Open streams, in the order they were opened.
        self._utterances: dict[int, _Utterance] = {}
        # Streams with text for the front end, the next one first.
        self._with_text: deque[int] = deque()
        # Codec steps whose sound is on its way, and how long the last such step of each kind took.
        self._soundings: deque[Sounding] = deque()
        self._sound_ns: dict[tuple[int, int], int] = {}
        if executor.overlaps:
            cast("Executor", executor).meanwhile = self._collect
        # What happened so far, for `Stats`.
        self._counts: Counter[str] = Counter()
        self._stage_steps: Counter[str] = Counter()
        self._stage_ns: Counter[str] = Counter()
        # What a frame takes, with all that makes one, on average of the last `FRAMES_TO_TELL`; 0 while nobody knows.
        self._frame_ns = scheduler.stats(clock.now()).frame_alone_ns
        self._frame_work_ns = 0
        self._frames = FRAMES_KNOWN if self._frame_ns else 0
        # When the next snapshot is due; None when nothing happened since the last one.
        self._stats_at: int | None = None

    def run(self) -> None:
        """Work until the other side hangs up."""
        try:
            while True:
                timeout_ns = 0 if self.work() else self.idle_ns()
                for message in self._line.receive(timeout_ns):
                    self.hear(message)
        except Hangup:
            log.debug("the other side hung up; %d streams were open", len(self._utterances))

    def work(self) -> bool:
        """Feed a slice of text, run one step and send what came of it; False when there was nothing to do."""
        self._take_over()
        has_fed = self._feed()
        now = self._clock.now()
        step = self._scheduler.next_step(now)
        # Who waited for room may have begun by it, or been refused; one who begins has text to be fed.
        self._deliver()
        if step is not None:
            result = self._run(step)
            self._stage_steps[step.stage.name] += 1
            self._stage_ns[step.stage.name] += result.duration_ns
            self._count_frame(step.stage, result.duration_ns)
            now = self._clock.now()
            self._scheduler.step_done(step, result, now)
            self._deliver()
        if has_fed or step is not None:
            self._will_tell()
        self._collect()
        if step is None and not has_fed and self._soundings:
            self._collect_first()
        if self._stats_at is not None and now >= self._stats_at:
            self._snapshot(now)
        if self._voices is not None and self._voices.is_adding:
            for message in self._voices.added():
                self._line.send(message)
        return has_fed or step is not None or bool(self._with_text) or bool(self._soundings)

    def idle_ns(self) -> int | None:
        """How long there will be nothing to do unless somebody says something."""
        times = [at for at in (self._scheduler.wake_at(), self._stats_at) if at is not None]
        if self._voices is not None and self._voices.is_adding:
            # Another thread is at it, which cannot end a wait for messages.
            times.append(self._clock.now() + ADDING_EVERY_NS)
        return max(0, min(times) - self._clock.now()) if times else None

    def hear(self, message: Message) -> None:
        """Take one message of the other side."""
        if isinstance(message, Open):
            self._open(message)
            self._deliver()
            return
        if isinstance(message, AddVoice):
            assert self._voices is not None, "whoever asks has looked"
            self._voices.add(message)
            return
        stream = message.report.stream if isinstance(message, Report) else getattr(message, "stream", None)
        utterance = self._utterances.get(stream) if stream is not None else None
        # It may have finished, failed or been cancelled while the message was on its way.
        if stream is None or utterance is None:
            return
        match message:
            case Text(_, text):
                utterance.add(text)
                if utterance.text:
                    self._will_feed(stream)
            case EndText():
                utterance.has_all_text = True
                self._will_feed(stream)
            case Cancel():
                self._counts["cancelled"] += 1
                self._drop(stream)
            case Report(report):
                utterance.report = report
                self._scheduler.report(
                    replace(report, is_playing=False) if utterance.is_held else report, self._clock.now()
                )
            case Taken(_, samples):
                utterance.taken = samples
                self._hold_or_release(stream, utterance)
        self._deliver()

    def _take_over(self) -> None:
        """Tell the scheduler what steps take that another way of running them has taken over."""
        for stage, times in self._taken_over():
            if stage is Stage.CODEC:
                # How long the old way took is not to be said of a step again.
                while self._soundings:
                    self._collect_first()
                self._sound_ns = dict(times)
            now = self._clock.now()
            self._scheduler.measured(stage, times, now)
            if stage >= Stage.BACKBONE:
                self._frame_ns = self._scheduler.stats(now).frame_alone_ns
                self._frame_work_ns, self._frames = 0, FRAMES_KNOWN

    def _open(self, message: Open) -> None:
        # There may have been nothing to do for long.
        self._take_over()
        stream = message.stream
        try:
            slot = self._scheduler.open(
                stream,
                self._clock.now(),
                feed=Feed(self._executor.feed),
                priority=Priority(message.priority),
                rows=self._rows(message),
                max_frames=min(message.max_frames or self._max_frames, self._max_frames),
                interactive=message.interactive,
            )
        except Overloaded as error:
            self._refuse(stream, error)
            return
        except BadRequest as error:
            self._line.send(Failed(stream, type(error).__name__, str(error)))
            return
        self._utterances[stream] = _Utterance(message, SpeechEncoder(self._executor.sample_rate))
        if slot is not None:
            self._admit(stream, slot)
        else:
            self._will_tell()

    def _admit(self, stream: int, slot: int) -> None:
        """There is room for the stream: now its text can be fed."""
        utterance = self._utterances[stream]
        message = utterance.message
        try:
            speaker = self._speaker(message)
            self._executor.open(
                stream,
                slot,
                seed=message.seed,
                sampling=message.sampling,
                voice=speaker.voice,
                prefixes=speaker.prefixes,
                heard=speaker.heard,
            )
            utterance.frontend = speaker.frontend
        except Exception as error:
            self._fail(stream, Stage.TEXT, error)
            return
        if utterance.text or utterance.has_all_text:
            self._will_feed(stream)

    def _refuse(self, stream: int, refusal: Overloaded) -> None:
        self._will_tell()
        self._counts["refused"] += 1
        self._line.send(Failed(stream, "Overloaded", refusal.detail, retry_after_s=refusal.retry_after_s))

    def _will_feed(self, stream: int) -> None:
        if self._utterances[stream].frontend is not None and stream not in self._with_text:
            self._with_text.append(stream)

    def _feed(self) -> bool:
        """Give a slice's worth of text to front ends, of as many streams as that is; False when none has text waiting.

        So the short texts of several streams are encoded in one step, and one long text waits its turn.
        """
        has_fed = bool(self._with_text)
        chars = 0
        while self._with_text and chars < TEXT_SLICE_CHARS:
            stream = self._with_text.popleft()
            utterance = self._utterances.get(stream)
            if utterance is not None:
                chars += len(utterance.text[0]) if utterance.text else 0
                self._feed_slice(stream, utterance)
        return has_fed

    def _feed_slice(self, stream: int, utterance: _Utterance) -> None:
        assert utterance.frontend is not None, "text is fed once there is room"
        is_end = utterance.has_all_text and len(utterance.text) <= 1
        try:
            segments = utterance.frontend.push(utterance.text.popleft()) if utterance.text else []
            if is_end:
                segments += utterance.frontend.end()
            tokens = [self._executor.add_text(stream, segment) for segment in segments]
            if is_end:
                self._executor.end_text(stream)
        except Exception as error:
            self._fail(stream, Stage.TEXT, error)
            return
        now = self._clock.now()
        for count in tokens:
            if count:
                self._scheduler.push_text(stream, count, now)
        if is_end:
            self._scheduler.end_text(stream, now)
        elif utterance.text:
            self._with_text.append(stream)
        self._deliver()

    def _run(self, step: Step) -> StepResult:
        """The step's result.  Should the executor itself raise, nobody can say which row it was: all of them fail."""
        started = self._clock.now()
        try:
            if step.stage is Stage.CODEC and self._executor.overlaps:
                sounding = cast("Executor", self._executor).issue(step)
                kind = (step.bucket, step.rows[0].count)
                if kind in self._sound_ns and not sounding.is_there():
                    self._soundings.append(sounding)
                    for row in step.rows:
                        if row.stream in self._utterances:
                            self._utterances[row.stream].soundings += 1
                    return sounding.promise(self._sound_ns[kind])
                # Sound is sent in the order in which it was issued.
                while self._soundings:
                    self._collect_first()
                result = sounding.result()
                self._sound_ns[kind] = result.duration_ns
            else:
                result = self._executor.run(step)
        except Exception as error:
            log.exception("a %s step failed as a whole", step.stage.name)
            return StepResult(
                tuple(RowResult(row.stream, error=_sentence(error)) for row in step.rows),
                max(1, self._clock.now() - started),
            )
        if step.stage is not Stage.CODEC:
            return result
        # Sound is of use to a listener when it is packets, so their making counts as a part of the step, and the
        # scheduler learns what it takes.
        rows = tuple(row if row.error else self._encoded(row) for row in result.rows)
        return StepResult(rows, self._clock.now() - started)

    def _collect(self) -> bool:
        """Send the sound that has come; True while more is on its way."""
        while self._soundings and self._soundings[0].is_there():
            self._collect_first()
        return bool(self._soundings)

    def _collect_first(self) -> None:
        """Wait for the sound that was issued first, and send it."""
        sounding = self._soundings.popleft()
        result = sounding.result()
        step = sounding.step
        self._sound_ns[step.bucket, step.rows[0].count] = result.duration_ns
        for row in result.rows:
            utterance = self._utterances.get(row.stream)
            if utterance is None:
                continue
            utterance.soundings -= 1
            encoded = row if row.error else self._encoded(row)
            if encoded.error:
                # The scheduler believes that all went well.
                self._counts["failed"] += 1
                self._drop(row.stream)
                self._line.send(Failed(row.stream, "StepFailed", encoded.error, Stage.CODEC.name.lower()))
                continue
            # Of each step one chunk is said to be ready; what was said after the last is next.
            while utterance.later:
                event = utterance.later.popleft()
                self._tell(event)
                if isinstance(event, AudioReady) and utterance.soundings:
                    break

    def _encoded(self, row: RowResult) -> RowResult:
        """Make the packets of a row's sound and keep them until the scheduler says that the sound is ready."""
        utterance = self._utterances.get(row.stream)
        if utterance is None:
            return row
        try:
            sound, marks = self._executor.take(row.stream)
            pcm = _to_int16(sound)
            listener = self._scheduler.listener(row.stream)
            is_late = listener is not None and listener.late_ns(self._clock.now()) > 0
            utterance.ready = _Sound(pcm, utterance.encoder.encode(pcm, after_hole=is_late), marks)
        except Exception as error:
            log.error("stream %d failed in CODEC", row.stream, exc_info=error)
            return replace(row, error=_sentence(error))
        return row

    def _deliver(self) -> None:
        """Send what the scheduler says has happened."""
        # A stream that fails while its sound is sent may have a later event in this list; `_close` knows it only once.
        for event in self._scheduler.events():
            utterance = self._utterances.get(event.stream)
            if utterance is not None and utterance.soundings:
                utterance.later.append(event)
            else:
                self._tell(event)

    def _tell(self, event: Event) -> None:
        """Send what an event means for the other side."""
        match event:
            case StreamAdmitted(stream, slot):
                self._admit(stream, slot)
            case StreamRefused(stream, detail, retry_after_s):
                self._close(stream)
                self._refuse(stream, Overloaded(detail, retry_after_s))
            case AudioReady(stream, start_samples):
                if stream in self._utterances:
                    self._send_audio(stream, start_samples)
            case StreamFinished(stream, samples):
                utterance = self._close(stream)
                if utterance is not None:
                    self._counts["finished"] += 1
                    self._finish(stream, samples, utterance)
            case StreamFailed(stream, stage, error):
                if self._close(stream) is not None:
                    self._counts["failed"] += 1
                    self._line.send(Failed(stream, "StepFailed", error, stage.name.lower()))
            case _:
                self._counts["missed_deadlines"] += 1

    def _send_audio(self, stream: int, start_samples: int) -> None:
        utterance = self._utterances[stream]
        ready, utterance.ready = utterance.ready, None
        assert ready is not None, "a chunk is said to be ready once"
        utterance.sent = start_samples + ready.pcm.size
        pcm = ready.pcm.astype("<i2").tobytes()
        self._line.send(Chunk(stream, start_samples, pcm, ready.packets, ready.marks))
        self._hold_or_release(stream, utterance)

    def _finish(self, stream: int, samples: int, utterance: _Utterance) -> None:
        rest = utterance.encoder.end()
        if rest:
            self._line.send(Chunk(stream, samples, b"", rest))
        # Who asked for an earlier end got what was asked for.
        if (
            0 < utterance.message.max_frames <= self._max_frames
            or samples < self._max_frames * self._executor.frame_samples
        ):
            self._line.send(Finished(stream, samples))
        else:
            limit = f"the speech was cut off after {samples / self._executor.sample_rate:g} s, the longest there is"
            self._line.send(Failed(stream, "StepFailed", limit, Stage.BACKBONE.name.lower()))

    def _hold_or_release(self, stream: int, utterance: _Utterance) -> None:
        """Stop the generation of what nobody reads, the way a listener who has stopped playing stops it."""
        unread = utterance.sent - utterance.taken
        must_hold = unread > (self._max_unread // 2 if utterance.is_held else self._max_unread)
        if must_hold == utterance.is_held:
            return
        utterance.is_held = must_hold
        if must_hold:
            log.info("stream %d is held: its consumer has %d samples to read", stream, unread)
            self._counts["held"] += 1
        now = self._clock.now()
        last = utterance.report or PlaybackReport(stream, 0, now, 0, is_measured=False)
        self._scheduler.report(replace(last, at_ns=now, is_playing=last.is_playing and not must_hold), now)

    def _fail(self, stream: int, stage: Stage, error: Exception) -> None:
        self._counts["failed"] += 1
        self._drop(stream)
        if isinstance(error, BadRequest):
            self._line.send(Failed(stream, type(error).__name__, str(error)))
            return
        log.error("stream %d failed in %s", stream, stage.name, exc_info=error)
        self._line.send(Failed(stream, "StepFailed", _sentence(error), stage.name.lower()))

    def _drop(self, stream: int) -> None:
        """Close a stream that the scheduler still has."""
        self._scheduler.cancel(stream, self._clock.now())
        self._close(stream)

    def _close(self, stream: int) -> _Utterance | None:
        """Free what the driver and the executor hold of a stream; None when it was closed already."""
        utterance = self._utterances.pop(stream, None)
        self._executor.close(stream)
        if not self._utterances:
            # The last stream's end is a change to be seen, whatever else happens.
            self._stats_at = self._stats_at or self._clock.now()
        return utterance

    def _count_frame(self, stage: Stage, duration_ns: int) -> None:
        """Stalls count as what they are: who hears this has to wait for them, too."""
        if stage >= Stage.BACKBONE:
            self._frame_work_ns += duration_ns
        if stage is Stage.BACKBONE:
            work_ns, self._frame_work_ns = self._frame_work_ns, 0
            self._frames = min(self._frames + 1, FRAMES_TO_TELL)
            if self._frame_ns:
                self._frame_ns += (work_ns - self._frame_ns) // self._frames
            elif self._frames == FRAMES_KNOWN:
                self._frame_ns = self._scheduler.stats(self._clock.now()).frame_alone_ns

    def _will_tell(self) -> None:
        """Something has changed that the next snapshot shows."""
        if self._stats_at is None:
            self._stats_at = self._clock.now() + STATS_EVERY_NS

    def _snapshot(self, now: int) -> None:
        self._stats_at = None
        self._line.send(Stats(self._values(now)))

    def _values(self, now: int) -> dict[str, Any]:
        stats = self._scheduler.stats(now)
        return {
            "at_ns": now,
            "streams": {
                str(stream.stream): {
                    "stage": stream.stage,
                    "lead_ns": stream.lead_ns,
                    "slack_ns": stream.slack_ns,
                    "heard_samples": stream.heard_samples,
                    "made_samples": stream.delivered_samples,
                }
                for stream in stats.streams
            },
            "stages": {
                stage: {"steps": steps, "seconds": self._stage_ns[stage] / SECOND}
                for stage, steps in self._stage_steps.items()
            },
            # How good the predictions were; see `SchedulerStats`.
            "step_ratios": {
                stage.name: {**ratios.in_units_of(ONE), "margin": stats.margins[stage] / ONE}
                for stage, ratios in stats.step_ratios.items()
                if ratios.count
            },
            "moves": {
                source: moves.in_units_of(SECOND)
                for source, moves in zip(("estimate", "report"), stats.moves, strict=True)
            },
            "graphs": self._executor.graph_counts(),
            "free_slots": stats.free_slots,
            "free_pages": stats.free_pages,
            "waiting_ns": list(stats.waiting_ns),
            # By class; see `scheduling.admission`.
            "queued": {priority.name.lower(): stats.queued[priority] for priority in Priority},
            "refused": {priority.name.lower(): stats.refused[priority] for priority in Priority},
            "is_strained": stats.is_strained,
            "frame_ns": self._frame_ns,
            "stumble_ns": stats.stumble_ns,
            "counts": dict(self._counts),
        }


def _to_int16(sound: NDArray[np.float32]) -> NDArray[np.int16]:
    if not np.isfinite(sound).all():
        raise ArithmeticError("the sound holds values that are not finite")
    pcm: NDArray[np.int16] = np.rint(np.clip(sound, -1.0, 1.0) * 32_767.0).astype(np.int16)
    return pcm


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
