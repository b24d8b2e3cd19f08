"""Drives an `Executor` the way a scheduler would, in whatever order and pieces a test likes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from breeze_rtc.models.speech_model import SpeechModel, TextSegment
from breeze_rtc.playback import TextMark
from breeze_rtc.runtime.executor import Executor
from breeze_rtc.runtime.graphs import EmulatedRecorder, Function, Guard
from breeze_rtc.scheduling.step import Row, RowResult, Stage, Step

PAGE_TOKENS = 16


@dataclass
class Utterance:
    """One stream as its driver sees it."""

    slot: int
    rows: int
    segments: list[int]
    prompt: int
    positions: int = 0
    pages: list[int] = field(default_factory=list)
    started: int = 0
    made: int = 0
    decoded: int = 0
    has_ended: bool = False
    error: str = ""
    wants_text: bool = False
    pcm: list[NDArray[np.float32]] = field(default_factory=list)
    marks: list[TextMark] = field(default_factory=list)

    @property
    def sound(self) -> NDArray[np.float32]:
        return np.concatenate(self.pcm) if self.pcm else np.empty(0, np.float32)


class ExecutorDriver:
    """Streams, pages and steps around one executor."""

    def __init__(
        self,
        model: SpeechModel,
        *,
        streams: int = 8,
        pages: int = 256,
        prefix_pages: int = 0,
        device: str = "cpu",
        codec_apart: bool = False,
    ) -> None:
        self.model = model
        self.executor = Executor(
            model,
            max_streams=streams,
            kv_pages=pages,
            page_tokens=PAGE_TOKENS,
            prefix_pages=prefix_pages,
            device=device,
            codec_apart=codec_apart,
        )
        self.free_pages = list(range(pages))
        self.streams: dict[int, Utterance] = {}
        self._steps = 0

    def open(
        self, stream: int, slot: int, text: str | list[TextSegment], *, end: bool = True, **options: object
    ) -> None:
        """Open a stream with its whole text, or with ready segments; `options` go to `Executor.open`."""
        self.executor.open(stream, slot, **options)  # type: ignore[arg-type]
        if isinstance(text, str):
            frontend = self.model.frontend()
            text = frontend.push(text) + frontend.end()
        self.streams[stream] = Utterance(slot, len(self.executor._streams[stream].tables), [], 0)
        self.add_text(stream, text)
        if end:
            self.executor.end_text(stream)

    def add_text(self, stream: int, segments: list[TextSegment]) -> None:
        """Add and encode segments, all in TEXT steps of one row."""
        u = self.streams[stream]
        for segment in segments:
            count = self.executor.add_text(stream, segment)
            if count:
                self.run(Stage.TEXT, {stream: (u.prompt, count)}, 1)
                u.prompt += count
        if self.executor.feed == "per_frame":
            u.prompt = 1

    def run(self, stage: Stage, spans: dict[int, tuple[int, int]], bucket: int) -> dict[int, RowResult]:
        """One step; spans: stream -> (start, count)."""
        rows = []
        for stream, (start, count) in spans.items():
            u = self.streams[stream]
            new: tuple[int, ...] = ()
            if stage in {Stage.PREFILL, Stage.BACKBONE}:
                u.positions += count
                positions = min(u.positions, self.executor.kv_positions or u.positions)
                needed = -(-positions // PAGE_TOKENS) * u.rows - len(u.pages)
                new = tuple(self.free_pages.pop() for _ in range(needed))
                u.pages.extend(new)
            rows.append(Row(stream, u.slot, start, count, new))
        self._steps += 1
        result = self.executor.run(Step(self._steps, stage, tuple(rows), bucket))
        for row in result.rows:
            if row.error:
                self.streams[row.stream].error = row.error
        return {row.stream: row for row in result.rows}

    def bucket(self, rows: int) -> int:
        return next(bucket for bucket in (4, 8, 16, 32) if bucket >= rows)

    def prefill(self, streams: list[int], chunk: int = 1 << 30) -> None:
        """Run the prompts of these streams, `chunk` positions a step, and start their first frames."""
        while streams:
            spans = {}
            for stream in streams:
                u = self.streams[stream]
                spans[stream] = (u.positions, min(chunk, u.prompt - u.positions))
            results = self.run(Stage.PREFILL, spans, self.bucket(sum(self.streams[s].rows for s in streams)))
            done = [s for s in streams if self.streams[s].positions == self.streams[s].prompt]
            self._started({stream: results[stream] for stream in done})
            streams = [stream for stream in streams if stream not in done]

    def backbone(self, streams: list[int]) -> None:
        """Start the next frame of each of these streams."""
        if streams:
            spans = {stream: (self.streams[stream].started, 1) for stream in streams}
            bucket = self.bucket(sum(self.streams[stream].rows for stream in streams))
            self._started(self.run(Stage.BACKBONE, spans, bucket))

    def _started(self, results: dict[int, RowResult]) -> None:
        for stream, result in results.items():
            u = self.streams[stream]
            u.has_ended = result.ended or bool(result.error)
            u.wants_text = result.wants_text
            u.started += not u.has_ended

    def depth(self, streams: list[int]) -> None:
        """Finish the frames that are started."""
        streams = [s for s in streams if self.streams[s].made < self.streams[s].started]
        if streams:
            spans = {stream: (self.streams[stream].made, 1) for stream in streams}
            for stream, result in self.run(Stage.DEPTH, spans, self.bucket(len(streams))).items():
                self.streams[stream].made += not result.error

    def codec(self, spans: dict[int, int]) -> None:
        """Decode so many frames of each stream, and take the sound."""
        if spans:
            steps = {stream: (self.streams[stream].decoded, count) for stream, count in spans.items()}
            for stream, result in self.run(Stage.CODEC, steps, self.bucket(len(spans))).items():
                u = self.streams[stream]
                if result.error:
                    continue
                pcm, marks = self.executor.take(stream)
                assert len(pcm) == result.samples
                u.decoded += spans[stream]
                u.pcm.append(pcm)
                u.marks.extend(marks)

    def close(self, stream: int) -> None:
        self.executor.close(stream)
        self.free_pages.extend(self.streams.pop(stream).pages)

    def goes_on(self, stream: int, frames: int) -> bool:
        u = self.streams[stream]
        return not u.has_ended and not u.error and u.started < frames

    def speak(self, stream: int, frames: int, chunks: tuple[int, ...] = (1,)) -> NDArray[np.float32]:
        """One stream by itself, its sound decoded in chunks of these sizes, over and over."""
        self.prefill([stream])
        self.depth([stream])
        while self.goes_on(stream, frames):
            self.backbone([stream])
            self.depth([stream])
        return self.decode_all(stream, chunks)

    def decode_all(self, stream: int, chunks: tuple[int, ...]) -> NDArray[np.float32]:
        u = self.streams[stream]
        turn = 0
        while u.decoded < u.made and not u.error:
            self.codec({stream: min(chunks[turn % len(chunks)], u.made - u.decoded)})
            turn += 1
        return u.sound

    def speak_together(self, streams: list[int], frames: int, seed: int) -> dict[int, NDArray[np.float32]]:
        """All streams at once: they join at random times, and every step takes a random part of them in random
        order."""
        rng = random.Random(seed)
        waiting, joined = list(streams), []
        while waiting or any(self.goes_on(stream, frames) for stream in joined):
            if waiting and rng.random() < 0.4:
                new = [waiting.pop(rng.randrange(len(waiting))) for _ in range(rng.randint(1, len(waiting)))]
                self.prefill(new)
                self.depth(new)
                joined += new
            going = [stream for stream in joined if self.goes_on(stream, frames)]
            if going:
                part = rng.sample(going, rng.randint(1, len(going)))
                self.backbone(part)
                self.depth(part)
            ready = [stream for stream in joined if self.streams[stream].made > self.streams[stream].decoded]
            if ready and rng.random() < 0.3:
                spans = {}
                for stream in rng.sample(ready, rng.randint(1, len(ready))):
                    u = self.streams[stream]
                    spans[stream] = rng.randint(1, min(4, u.made - u.decoded))
                self.codec(spans)
        return {stream: self.decode_all(stream, (3, 1)) for stream in joined}


class Direct(EmulatedRecorder):
    """The same without the tracing, which takes a second a shape: guarded, on static buffers, outputs overwritten."""

    def record(self, function: Function, buffers: tuple[Tensor, ...]) -> Callable[[], tuple[Tensor, ...]]:
        with Guard():
            function(*buffers)

        def replay() -> tuple[Tensor, ...]:
            for output in self._given:
                output.fill_(-77)
            self._given = [output.clone() for output in function(*buffers)]
            return tuple(self._given)

        return replay
