"""A codec step between its issue and its sound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from breeze_rtc.clock import Clock
from breeze_rtc.runtime.lane import OnItsWay
from breeze_rtc.scheduling.step import Row, RowResult, Step, StepResult


class Heard(Protocol):
    """What of a stream is told when its sound is there."""

    pcm: list[NDArray[np.float32]]
    sounded: int


class Sounding:
    """The rows of a step whose sound is on its way, and those that failed before it began."""

    def __init__(
        self,
        step: Step,
        parts: Sequence[tuple[Sequence[Row], Sequence[Heard], OnItsWay]],
        failed: dict[int, RowResult],
        *,
        frame_samples: int,
        began_ns: int,
        clock: Clock,
    ) -> None:
        """parts: rows of equal count, their streams, and (rows or more, samples) of sound."""
        self.step = step
        self.began_ns = began_ns
        self._parts = parts
        self._results = failed
        self._frame_samples = frame_samples
        self._clock = clock

    def is_there(self) -> bool:
        return all(sound.is_there() for _, _, sound in self._parts)

    def promise(self, duration_ns: int) -> StepResult:
        """The result it will have unless a row fails yet: for a scheduler that need not wait for it."""
        rows = tuple(
            self._results.get(row.stream) or RowResult(row.stream, samples=row.count * self._frame_samples)
            for row in self.step.rows
        )
        return StepResult(rows, duration_ns)

    def result(self) -> StepResult:
        """Wait for the sound and give each stream its own; once."""
        results = self._results
        for rows, streams, sound in self._parts:
            try:
                pcm = sound.wait().numpy()
            except Exception as error:
                for row in rows:
                    results[row.stream] = RowResult(row.stream, error=f"{type(error).__name__}: {error}")
                continue
            for row, s, samples in zip(rows, streams, pcm, strict=False):
                if not np.isfinite(samples).all():
                    results[row.stream] = RowResult(row.stream, error="the codec's samples are not finite")
                    continue
                s.pcm.append(samples)
                s.sounded += row.count
                results[row.stream] = RowResult(row.stream, samples=len(samples))
        rows_of_all = tuple(results[row.stream] for row in self.step.rows)
        return StepResult(rows_of_all, self._clock.now() - self.began_ns)
