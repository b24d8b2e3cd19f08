"""A recorded run as lines to draw: the machine's steps, and each stream's sound against its listener.

Nothing is guessed: the recorded inputs go through the real scheduler again, and what it chose, predicted and knew at
each moment is written down.  `breeze-rtc trace show` puts the result into its page.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from breeze_rtc.clock import US
from breeze_rtc.errors import Overloaded
from breeze_rtc.scheduling.predictor import Predictor
from breeze_rtc.scheduling.step import (
    AudioReady,
    DeadlineMissed,
    Stage,
    Step,
    StreamAdmitted,
    StreamFailed,
    StreamFinished,
    StreamRefused,
)
from breeze_rtc.scheduling.stream import NEVER, Priority
from breeze_rtc.scheduling.trace import Played, Replay


@dataclass(slots=True)
class StepLine:
    """One step, from the choice to its result."""

    step: Step
    streams: tuple[int, ...]
    """The place of each row's stream in `Timeline.streams`."""
    begin_ns: int
    """When it was chosen."""
    predicted_ns: int
    """Time the cost table gave it at that moment."""
    idle_ns: int
    """For how long before it nothing was due."""
    woken_by: str
    """After such a time: the last input before it ("open", "text", "report" ...), or "time" if there was none."""
    overslept_ns: int
    """By how much it came later than the scheduler had asked to be woken: the process was not given a processor."""
    duration_ns: int = 0
    """Time it ran; 0 while it is out."""
    end_ns: int = 0
    """When the scheduler had its result; 0 while it is out.  The rest of the time is the driver's own."""


@dataclass(frozen=True, slots=True)
class Sound:
    """A chunk handed to the sink."""

    at_ns: int
    samples: int
    late_ns: int
    """Time since the listener had run dry; 0 when there was sound left."""


@dataclass(frozen=True, slots=True)
class Position:
    """What was known of a listener from here to the next position; in between, the sound is heard as it lasts."""

    at_ns: int
    delivered: int
    """Samples handed to the sink."""
    heard: int
    """Of these, samples heard, extrapolated from the last report.  Never more than were delivered."""
    dry_ns: int
    """When the next chunk must be there."""
    is_held: bool
    """The listener said that it is not playing."""
    is_reported: bool
    """This position is the listener's own word, just in."""


@dataclass(slots=True)
class StreamLine:
    """One utterance, from its opening to its last sample."""

    stream: int
    priority: Priority
    rows: int
    interactive: bool
    opened_ns: int
    admitted_ns: int | None = None
    """When there was room for it, if it had to wait."""
    refused: str = ""
    """Why there was no room for it; nothing else happened to it then."""
    texts: list[tuple[int, int]] = field(default_factory=list)
    """(time, tokens) of each piece of text."""
    text_ended_ns: int | None = None
    frames: list[int] = field(default_factory=list)
    """When each frame had all its codes."""
    sounds: list[Sound] = field(default_factory=list)
    positions: list[Position] = field(default_factory=list)
    ended_ns: int | None = None
    """When the scheduler was done with it; None: it was open when the trace ended."""
    ending: str = "open"
    """"finished", "cancelled", "failed", "refused" or "open"."""
    error: str = ""

    @property
    def first_sound_ns(self) -> int | None:
        """From its first text to its first chunk."""
        return self.sounds[0].at_ns - self.texts[0][0] if self.sounds and self.texts else None

    @property
    def missed(self) -> int:
        return sum(sound.late_ns > 0 for sound in self.sounds)


@dataclass(frozen=True, slots=True)
class StageSummary:
    """What one stage did in the whole run.  Only steps that were done count."""

    stage: Stage
    steps: int
    rows: int
    """Over all steps; with the steps, the mean batch."""
    ran_ns: int
    over: int
    """Steps that took longer than predicted: one in ten, when the predictions are right."""


@dataclass(frozen=True, slots=True)
class Summary:
    """The run in figures."""

    streams: int
    """Those that were let in."""
    refused: int
    steps: int
    first_sound_p50_ns: int | None
    """From a stream's first text to its first chunk, over the streams that somebody listens to (all, if nobody does to
    any); None when nobody spoke."""
    first_sound_p95_ns: int | None
    missed: int
    """Chunks that came after the listener had run dry."""
    missed_streams: int
    busy: float
    """Share of the time with a stream open in which a step ran, 0 to 1."""
    stages: tuple[StageSummary, ...]


class Timeline:
    """All of a recorded run.  Raises as `Replay` does."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._run = Replay(lines)
        self.lead_cap_ns = self._run.policy.lead_cap_ns
        self.sample_rate = self._run.sample_rate
        self.frame_samples = self._run.frame_samples
        # The first and the last input.
        self._has_begun = False
        self.begin_ns = 0
        self.end_ns = 0
        # In the order they were chosen, and in the order they opened.
        self.steps: list[StepLine] = []
        self.streams: list[StreamLine] = []

        # Open streams: their place in `streams`, and their listeners.
        self._open: dict[int, tuple[int, Predictor]] = {}
        # What will be known of each listener as its last report grows old, if no other comes.
        self._ageing: dict[int, list[Position]] = {}
        # Since when there has been nothing to do, and what was the last that came in since.
        self._idle_since: int | None = None
        self._woken_by = "time"
        self._wake_at: int | None = None
        # Time with at least one stream open.
        self._open_ns = 0

        for played in self._run:
            if not self._has_begun:
                self.begin_ns = self.end_ns = played.now
                self._has_begun = True
            if self._open:
                self._open_ns += played.now - self.end_ns
            self.end_ns = played.now
            self._take(played)
        for stream in list(self._open):
            self._age(stream, self.end_ns)

    # ---- one input after the other -----------------------------------------------------------------------------------

    def _take(self, played: Played) -> None:
        now, values = played.now, played.values
        if played.kind == "next":
            # Who waited for room may have begun by it, or been refused.
            self._take_events(now)
            if isinstance(played.answer, Step):
                self._begin_step(played.answer, now)
            else:
                if self._idle_since is None:
                    self._idle_since = now
                self._woken_by = "time"
                self._wake_at = self._run.scheduler.wake_at()
            return
        self._woken_by = played.kind
        reported = None
        match played.kind:
            case "open":
                self._begin_stream(played)
            case "text":
                if values[0] in self._open:
                    self._line(values[0]).texts.append((now, values[1]))
            case "end":
                if values[0] in self._open:
                    self._line(values[0]).text_ended_ns = now
            case "done":
                self._end_step(now, *values)
            case "report":
                reported = values[0]
        self._take_events(now)
        if played.kind == "cancel":
            self._end_stream(values[0], now, "cancelled")
        if reported in self._open:
            self._know(reported, now, is_reported=True)

    def _begin_step(self, step: Step, now: int) -> None:
        streams = tuple(self._open[row.stream][0] for row in step.rows)
        units = sum(
            row.count * (self.streams[stream].rows if step.stage is Stage.PREFILL else 1)
            for row, stream in zip(step.rows, streams, strict=True)
        )
        if step.stage is Stage.CODEC:
            units = step.rows[0].count
        idle_ns = now - self._idle_since if self._idle_since is not None else 0
        predicted_ns = self._run.costs.predict_ns(step.stage, step.bucket, units)
        overslept_ns = max(0, now - self._wake_at) if self._wake_at is not None else 0
        woken_by = self._woken_by if idle_ns else ""
        self.steps.append(StepLine(step, streams, now, predicted_ns, idle_ns, woken_by, overslept_ns))
        self._idle_since = self._wake_at = None

    def _end_step(self, now: int, step_id: int, duration_ns: int, results: list[Any]) -> None:
        line = self.steps[step_id]
        line.duration_ns, line.end_ns = duration_ns, now
        failed = {result[0] for result in results if result[-1]}
        if line.step.stage is Stage.DEPTH:
            for row in line.step.rows:
                if row.stream in self._open and row.stream not in failed:
                    self._line(row.stream).frames.append(now)

    def _begin_stream(self, played: Played) -> None:
        stream, _, _, priority, rows, interactive = played.values
        place = len(self.streams)
        line = StreamLine(stream, Priority(priority), rows, interactive, played.now)
        self.streams.append(line)
        if isinstance(played.answer, Overloaded):
            line.refused = played.answer.detail
            line.ended_ns, line.ending = played.now, "refused"
            return
        listener = self._run.scheduler.listener(stream)
        assert listener is not None, "it has just been opened"
        self._open[stream] = (place, listener)

    def _take_events(self, now: int) -> None:
        late: dict[int, int] = {}
        for event in self._run.scheduler.events():
            match event:
                case DeadlineMissed(stream, late_ns):
                    late[stream] = late_ns
                case AudioReady(stream, _, samples):
                    self._line(stream).sounds.append(Sound(now, samples, late.pop(stream, 0)))
                    self._know(stream, now)
                case StreamFinished(stream):
                    self._end_stream(stream, now, "finished")
                case StreamFailed(stream, _, error):
                    self._line(stream).error = error
                    self._end_stream(stream, now, "failed")
                case StreamAdmitted(stream):
                    self._line(stream).admitted_ns = now
                case StreamRefused(stream, detail):
                    self._line(stream).refused = detail
                    self._end_stream(stream, now, "refused")

    def _end_stream(self, stream: int, now: int, ending: str) -> None:
        if stream in self._open:
            self._age(stream, now)
            line = self._line(stream)
            del self._open[stream]
            self._ageing.pop(stream, None)
            line.ended_ns, line.ending = now, ending

    def _know(self, stream: int, now: int, *, is_reported: bool = False) -> None:
        """Write down what is known of a listener now."""
        self._age(stream, now)
        _, listener = self._open[stream]
        if not listener.delivered:
            return

        def position(at_ns: int, is_reported: bool) -> Position:
            heard, dry_ns = listener.heard(at_ns), listener.dry_at(at_ns)
            return Position(at_ns, listener.delivered, heard, dry_ns, listener.is_held, is_reported)

        self._line(stream).positions.append(position(now, is_reported))
        ageing = self._ageing[stream] = []
        then = listener.changes_at(now)
        while then < NEVER:
            ageing.append(position(then, False))
            then = listener.changes_at(then)

    def _age(self, stream: int, now: int) -> None:
        """If a listener's last report has grown old by now, say so from when it did."""
        ageing = self._ageing.pop(stream, [])
        self._line(stream).positions += [position for position in ageing if position.at_ns < now]

    def _line(self, stream: int) -> StreamLine:
        return self.streams[self._open[stream][0]]

    # ---- what comes of it --------------------------------------------------------------------------------------------

    def summary(self) -> Summary:
        spoke = [line for line in self.streams if line.first_sound_ns is not None]
        heard = [line for line in spoke if line.priority is not Priority.BATCH] or spoke
        firsts = sorted(line.first_sound_ns for line in heard if line.first_sound_ns is not None)
        stages = []
        for stage in Stage:
            done = [line for line in self.steps if line.step.stage is stage and line.end_ns]
            stages.append(
                StageSummary(
                    stage,
                    steps=len(done),
                    rows=sum(len(line.step.rows) for line in done),
                    ran_ns=sum(line.duration_ns for line in done),
                    over=sum(line.duration_ns > line.predicted_ns for line in done),
                )
            )
        ran_ns = sum(stage.ran_ns for stage in stages)
        return Summary(
            streams=sum(not line.refused for line in self.streams),
            refused=sum(bool(line.refused) for line in self.streams),
            steps=len(self.steps),
            first_sound_p50_ns=_quantile(firsts, 50),
            first_sound_p95_ns=_quantile(firsts, 95),
            missed=sum(line.missed for line in self.streams),
            missed_streams=sum(line.missed > 0 for line in self.streams),
            busy=min(1.0, ran_ns / self._open_ns) if self._open_ns else 0.0,
            stages=tuple(stages),
        )

    def data(self) -> dict[str, Any]:
        """All of it as plain values for the page: times in us since the first input, in columns, those that
        climb as differences.
        """
        whys: dict[str, int] = {}
        steps = self.steps
        return {
            "span": self._us(self.end_ns),
            "sample_rate": self.sample_rate,
            "frame_samples": self.frame_samples,
            "lead_cap": _us_or_none(self.lead_cap_ns),
            "stages": [stage.name.lower() for stage in Stage],
            "steps": {
                "begin": _deltas(self._us(line.begin_ns) for line in steps),
                "took": [line.duration_ns // US for line in steps],
                "total": [(line.end_ns - line.begin_ns) // US if line.end_ns else 0 for line in steps],
                "predicted": [line.predicted_ns // US for line in steps],
                "idle": [line.idle_ns // US for line in steps],
                "overslept": [line.overslept_ns // US for line in steps],
                "woken_by": [line.woken_by for line in steps],
                "stage": [int(line.step.stage) for line in steps],
                "bucket": [line.step.bucket for line in steps],
                "why": [whys.setdefault(line.step.why.value, len(whys)) for line in steps],
                "slack": [_us_or_none(line.step.slack_ns) for line in steps],
                "first_sound": [_us_or_none(line.step.first_sound_ns) for line in steps],
                "rows": [len(line.step.rows) for line in steps],
            },
            # Of all steps' rows, one after the other.
            "rows": {
                "stream": [stream for line in steps for stream in line.streams],
                "start": [row.start for line in steps for row in line.step.rows],
                "count": [row.count for line in steps for row in line.step.rows],
            },
            "whys": list(whys),
            "streams": [self._stream_data(line) for line in self.streams],
            "summary": asdict(self.summary()),
        }

    def _stream_data(self, line: StreamLine) -> dict[str, Any]:
        return {
            "id": line.stream,
            "class": line.priority.name.lower(),
            "interactive": line.interactive,
            "rows": line.rows,
            "opened": self._us(line.opened_ns),
            "admitted": None if line.admitted_ns is None else self._us(line.admitted_ns),
            "refused": line.refused,
            "ended": None if line.ended_ns is None else self._us(line.ended_ns),
            "ending": line.ending,
            "error": line.error,
            "texts": [[self._us(at_ns), tokens] for at_ns, tokens in line.texts],
            "text_ended": None if line.text_ended_ns is None else self._us(line.text_ended_ns),
            "frames": _deltas(self._us(at_ns) for at_ns in line.frames),
            "sounds": [[self._us(sound.at_ns), sound.samples, sound.late_ns // US] for sound in line.sounds],
            "positions": {
                "at": _deltas(self._us(position.at_ns) for position in line.positions),
                "delivered": _deltas(position.delivered for position in line.positions),
                "heard": _deltas(position.heard for position in line.positions),
                "dry": _deltas(self._us(position.dry_ns) for position in line.positions),
                "is_held": [int(position.is_held) for position in line.positions],
                "is_reported": [int(position.is_reported) for position in line.positions],
            },
        }

    def _us(self, at_ns: int) -> int:
        return (at_ns - self.begin_ns) // US


def _us_or_none(time_ns: int | None) -> int | None:
    return None if time_ns is None else time_ns // US


def _deltas(values: Iterable[int]) -> list[int]:
    deltas, last = [], 0
    for value in values:
        deltas.append(value - last)
        last = value
    return deltas


def _quantile(ordered: list[int], percent: int) -> int | None:
    """The smallest value that `percent` of a hundred do not exceed."""
    return ordered[max(0, -(-percent * len(ordered) // 100) - 1)] if ordered else None
