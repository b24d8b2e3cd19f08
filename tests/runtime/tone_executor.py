"""A small real executor: it does what `Executor` promises, with a tone in place of a model.

A token is one character; it lasts two frames, whose pitch depends on the seed and the character.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from breeze_rtc.clock import MS, VirtualClock
from breeze_rtc.playback import TextMark
from breeze_rtc.scheduling.step import Row, RowResult, Stage, StageSpec, Step, StepResult

FRAMES_PER_TOKEN = 2
COST_NS = {Stage.TEXT: 1 * MS, Stage.PREFILL: 2 * MS, Stage.BACKBONE: 2 * MS, Stage.DEPTH: 2 * MS, Stage.CODEC: 3 * MS}


@dataclass(frozen=True)
class Segment:
    tokens: tuple[int, ...]
    ends: tuple[int, ...]


class Frontend:
    """Characters are tokens; white space is none; a segment ends with each push.  A `#` cannot be read."""

    def __init__(self) -> None:
        self._chars = 0

    def push(self, text: str) -> list[Segment]:
        if "#" in text:
            raise ValueError("no way to say #")
        spoken = [(ord(char), self._chars + k + 1) for k, char in enumerate(text) if not char.isspace()]
        self._chars += len(text)
        return [Segment(*map(tuple, zip(*spoken, strict=True)))] if spoken else []

    def end(self) -> list[Segment]:
        return []


@dataclass
class Voice:
    """State of one stream."""

    slot: int
    seed: int
    tokens: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    encoded: int = 0
    has_all_text: bool = False
    decoded: int = 0
    sound: list[np.ndarray] = field(default_factory=list)
    marks: list[TextMark] = field(default_factory=list)


class ToneExecutor:
    """See the module.  `broken` names (stage, character) pairs on which a row fails."""

    sample_rate = 24_000
    frame_samples = 960
    feed = "per_frame"
    overlaps = False

    def __init__(self, clock: VirtualClock | None = None, *, max_streams: int = 4) -> None:
        self._clock = clock or VirtualClock()
        row = StageSpec(max_rows=max_streams, buckets=(1, 2, max_streams))
        self.specs = dict.fromkeys(Stage, row) | {
            stage: StageSpec(max_rows=max_streams, buckets=row.buckets, max_tokens=1024)
            for stage in (Stage.TEXT, Stage.PREFILL)
        }
        self.voices: dict[int, Voice] = {}
        self.broken: set[tuple[Stage, str]] = set()
        # The next step raises as a whole, or the next open does.
        self.raises: Exception | None = None
        self.open_raises: Exception | None = None
        self.steps: list[Step] = []

    def open(
        self, stream: int, slot: int, *, seed: int, sampling: object, voice: object, prefixes: object, heard: object
    ) -> None:
        if self.open_raises is not None:
            raise self.open_raises
        assert slot not in [state.slot for state in self.voices.values()], "two streams in one slot"
        self.voices[stream] = Voice(slot, seed)

    def add_text(self, stream: int, segment: Segment) -> int:
        self.voices[stream].tokens += segment.tokens
        self.voices[stream].ends += segment.ends
        return len(segment.tokens)

    def end_text(self, stream: int) -> None:
        self.voices[stream].has_all_text = True

    def run(self, step: Step) -> StepResult:
        self.steps.append(step)
        self._clock.advance(COST_NS[step.stage])
        if self.raises is not None:
            error, self.raises = self.raises, None
            raise error
        return StepResult(tuple(self._row(step.stage, row) for row in step.rows), COST_NS[step.stage])

    def take(self, stream: int) -> tuple[np.ndarray, tuple[TextMark, ...]]:
        state = self.voices[stream]
        sound, marks = state.sound, state.marks
        state.sound, state.marks = [], []
        return np.concatenate(sound), tuple(marks)

    def close(self, stream: int) -> None:
        self.voices.pop(stream, None)

    def graph_counts(self) -> dict[str, object]:
        return {}

    def _row(self, stage: Stage, row: Row) -> RowResult:
        state = self.voices[row.stream]
        assert row.slot == state.slot
        token = (row.start if stage is not Stage.TEXT else 0) // FRAMES_PER_TOKEN
        if token < len(state.tokens) and (stage, chr(state.tokens[token])) in self.broken:
            return RowResult(row.stream, error=f"no {chr(state.tokens[token])} today")
        match stage:
            case Stage.TEXT:
                state.encoded += row.count
            case Stage.PREFILL | Stage.BACKBONE:
                if state.has_all_text and token >= len(state.tokens):
                    return RowResult(row.stream, ended=True)
                needed = (row.start + 1) // FRAMES_PER_TOKEN
                return RowResult(
                    row.stream,
                    wants_text=needed >= state.encoded and stage is Stage.BACKBONE and not state.has_all_text,
                )
            case Stage.CODEC:
                for frame in range(row.start, row.start + row.count):
                    k, at = frame // FRAMES_PER_TOKEN, frame * self.frame_samples
                    state.sound.append(tone(state.tokens[k], state.seed, at, self.frame_samples))
                    if frame % FRAMES_PER_TOKEN == FRAMES_PER_TOKEN - 1:
                        state.marks.append(TextMark(at + self.frame_samples, state.ends[k]))
                return RowResult(row.stream, samples=row.count * self.frame_samples)
        return RowResult(row.stream)


def tone(token: int, seed: int, at: int, samples: int) -> np.ndarray:
    t = np.arange(at, at + samples) / 24_000
    return (0.3 * np.sin(2 * np.pi * (100 + token + seed % 50) * t)).astype(np.float32)


def expected_pcm(text: str, seed: int) -> bytes:
    """What the stream says, whatever it shares its steps with."""
    tokens = [ord(char) for char in text if not char.isspace()]
    sound = [
        tone(token, seed, (2 * k + half) * 960, 960)
        for k, token in enumerate(tokens)
        for half in range(FRAMES_PER_TOKEN)
    ]
    pcm = np.rint(np.concatenate([np.zeros(0, np.float32), *sound]) * 32_767)
    return pcm.astype("<i2").tobytes()
