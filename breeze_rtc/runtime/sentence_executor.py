"""Voices that are drawn a whole sentence at a time, run by the same steps as all others.

To scheduler and driver a `SentenceExecutor` is what `Executor` is: TEXT reads a sentence, and with that its frames are
known; BACKBONE and DEPTH, which have nothing left to compute, count them; CODEC makes their sound, chunk by chunk.  An
`Ensemble` puts such voices beside a model: a step may hold rows of both.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from breeze_rtc.clock import Clock, MonotonicClock
from breeze_rtc.models.speech_model import SpeechModel, TextFrontend, TextSegment
from breeze_rtc.playback import TextMark
from breeze_rtc.runtime.executor import Executor
from breeze_rtc.scheduling.step import Row, RowResult, Stage, Step, StepResult

log = logging.getLogger(__name__)


class Drawn(Protocol):
    """A sentence that has been read."""

    samples: int
    ends: list[int]
    """Of each token: the sample at which it has been spoken."""

    def sound(self, samples: int) -> NDArray[np.float32]:
        """The next samples; silence behind the last."""


class _Stream:
    """One utterance."""

    def __init__(self, slot: int, seed: int) -> None:
        self.slot = slot
        self.seed = seed
        # Segments not read yet; sentences whose sound is not all made, and the frame at which each ends.
        self.waiting: list[TextSegment] = []
        self.sentences: deque[tuple[Drawn, int]] = deque()
        self.is_text_ended = False
        # Sentences read and their frames; frames that have been counted off, and those that are sound.
        self.read = self.frames = 0
        self.started = self.made = self.decoded = 0
        # Sound and marks not taken yet.
        self.pcm: list[NDArray[np.float32]] = []
        self.marks: list[TextMark] = []
        self.marked_chars = 0

    @property
    def lacks_text(self) -> bool:
        """No frame is left, and more text may come."""
        return self.started == self.frames and not (self.is_text_ended and not self.waiting)


class SentenceExecutor:
    """The streams of one voice that reads whole sentences."""

    def __init__(
        self, read: Callable[[Sequence[int], int], Drawn], *, frame_samples: int, clock: Clock | None = None
    ) -> None:
        """read(tokens, seed) draws a sentence.  Sound is handed out in frames of `frame_samples`."""
        self.frame_samples = frame_samples
        self._read = read
        self._clock = clock or MonotonicClock()
        self._streams: dict[int, _Stream] = {}

    def open(self, stream: int, slot: int, *, seed: int = 0) -> None:
        """See `Executor.open`.  Nothing is sampled; the seed is that of the noise."""
        assert stream not in self._streams, f"stream {stream} is open"
        self._streams[stream] = _Stream(slot, seed)

    def add_text(self, stream: int, segment: TextSegment) -> int:
        """See `Executor.add_text`."""
        s = self._streams[stream]
        assert not s.is_text_ended, "text after the end of the text"
        s.waiting.append(segment)
        return len(segment.tokens)

    def end_text(self, stream: int) -> None:
        """See `Executor.end_text`."""
        self._streams[stream].is_text_ended = True

    def take(self, stream: int) -> tuple[NDArray[np.float32], tuple[TextMark, ...]]:
        """See `Executor.take`.  Marks are exact to the network's 25 ms."""
        s = self._streams[stream]
        pcm = np.concatenate(s.pcm) if s.pcm else np.empty(0, np.float32)
        s.pcm.clear()
        made = s.decoded * self.frame_samples
        ready = tuple(mark for mark in s.marks if mark.samples <= made)
        del s.marks[: len(ready)]
        return pcm, ready

    def close(self, stream: int) -> None:
        """See `Executor.close`."""
        self._streams.pop(stream, None)

    def run(self, step: Step) -> StepResult:
        """See `Executor.run`."""
        began_ns = self._clock.now()
        rows = tuple(self._row(step.stage, row) for row in step.rows)
        return StepResult(rows, self._clock.now() - began_ns)

    def _row(self, stage: Stage, row: Row) -> RowResult:
        s = self._streams.get(row.stream)
        if s is None or s.slot != row.slot:
            return RowResult(row.stream, error="the stream is not open in this slot")
        try:
            match stage:
                case Stage.TEXT:
                    self._text(s, row.count)
                case Stage.PREFILL | Stage.BACKBONE:
                    if s.started == s.frames:
                        return RowResult(row.stream, ended=True)
                    s.started += 1
                    return RowResult(row.stream, wants_text=s.lacks_text)
                case Stage.DEPTH:
                    s.made += 1
                case Stage.CODEC:
                    if row.start != s.decoded or row.start + row.count > s.made:
                        detail = f"frames {row.start} to {row.start + row.count} asked, {s.decoded} to {s.made} there"
                        return RowResult(row.stream, error=detail)
                    return RowResult(row.stream, samples=self._sound(s, row.count))
        except Exception as error:
            return RowResult(row.stream, error=f"{type(error).__name__}: {error}")
        return RowResult(row.stream)

    def _text(self, s: _Stream, count: int) -> None:
        """Read the next segments, as many as `count` tokens ask for."""
        tokens = 0
        while s.waiting and tokens < count:
            segment = s.waiting.pop(0)
            tokens += len(segment.tokens)
            sentence = self._read(segment.tokens, s.seed + s.read)
            s.read += 1
            began = s.frames * self.frame_samples
            s.frames += -(-sentence.samples // self.frame_samples)
            s.sentences.append((sentence, s.frames))
            for end, chars in zip(sentence.ends, segment.ends, strict=True):
                if chars > s.marked_chars:
                    s.marked_chars = chars
                    s.marks.append(TextMark(began + min(end, sentence.samples), chars))

    def _sound(self, s: _Stream, count: int) -> int:
        """Make `count` frames of sound; how many samples that is."""
        stop = s.decoded + count
        while s.decoded < stop:
            sentence, last = s.sentences[0]
            frames = min(stop, last) - s.decoded
            s.pcm.append(sentence.sound(frames * self.frame_samples))
            s.decoded += frames
            if s.decoded == last:
                s.sentences.popleft()
        return count * self.frame_samples


class Ensemble:
    """A model's executor and voices beside it: a stream runs where its voice is."""

    overlaps = False
    """See `Executor.overlaps`: a step that holds rows of both is done when it returns."""

    def __init__(self, first: Executor, others: Mapping[str, SentenceExecutor], *, clock: Clock | None = None) -> None:
        """others: by the name of the voice."""
        self.sample_rate = first.sample_rate
        self.frame_samples = first.frame_samples
        self.feed = first.feed
        self._first = first
        self._others = others
        self._clock = clock or MonotonicClock()
        # Streams that run beside the model.
        self._elsewhere: dict[int, SentenceExecutor] = {}

    def _of(self, stream: int) -> Executor | SentenceExecutor:
        return self._elsewhere.get(stream, self._first)

    def open(self, stream: int, slot: int, *, seed: int, voice: str | None, **options: Any) -> None:
        """See `Executor.open`; `options` are for the model."""
        other = self._others.get(voice or "")
        if other is None:
            self._first.open(stream, slot, seed=seed, voice=voice, **options)
        else:
            other.open(stream, slot, seed=seed)
            self._elsewhere[stream] = other

    def add_text(self, stream: int, segment: TextSegment) -> int:
        """See `Executor.add_text`."""
        return self._of(stream).add_text(stream, segment)

    def end_text(self, stream: int) -> None:
        """See `Executor.end_text`."""
        self._of(stream).end_text(stream)

    def take(self, stream: int) -> tuple[NDArray[np.float32], tuple[TextMark, ...]]:
        """See `Executor.take`."""
        return self._of(stream).take(stream)

    def close(self, stream: int) -> None:
        """See `Executor.close`."""
        self._of(stream).close(stream)
        self._elsewhere.pop(stream, None)

    def graph_counts(self) -> dict[str, Any]:
        """See `Executor.graph_counts`."""
        return self._first.graph_counts()

    def run(self, step: Step) -> StepResult:
        """See `Executor.run`: each executor runs the rows it has."""
        began_ns = self._clock.now()
        results: dict[int, RowResult] = {}
        executors: list[Executor | SentenceExecutor] = [self._first, *self._others.values()]
        for executor in executors:
            rows = tuple(row for row in step.rows if self._of(row.stream) is executor)
            if rows:
                part = executor.run(step if len(rows) == len(step.rows) else replace(step, rows=rows))
                results |= {row.stream: row for row in part.rows}
        return StepResult(tuple(results[row.stream] for row in step.rows), self._clock.now() - began_ns)


def sentence_voices(model: SpeechModel) -> dict[str, tuple[SentenceExecutor, Callable[[], TextFrontend]]]:
    """Voices that can speak beside this model, each with what makes a stream's text front end: hibari beside nano,
    where it is installed."""
    if model.config.name != "nano" or find_spec("hibari") is None:
        return {}
    try:
        from breeze_rtc.models.hibari import SAMPLE_RATE, Hibari

        hibari = Hibari()
    except Exception:
        log.warning("hibari-tts is installed and cannot be used", exc_info=True)
        return {}
    assert model.sample_rate == SAMPLE_RATE
    executor = SentenceExecutor(hibari.read, frame_samples=model.frame_samples)
    return {"hibari": (executor, lambda: hibari.frontend(model.frontend()))}
