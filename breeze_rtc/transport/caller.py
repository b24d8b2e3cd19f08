"""The caller's voice on a telephone line, as a session wants it: 16 kHz, in blocks, in order, and counting time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

import numpy as np
from numpy.typing import NDArray

from breeze_rtc.clock import MS, SECOND, Clock
from breeze_rtc.media.resample import Resampler

RATE = 16_000
BLOCK = 320
"""20 ms."""
SILENT_NS = 200 * MS
"""A line that has brought nothing for so long is silent, not late: some send nothing while nobody speaks."""
MAX_WAITING_BLOCKS = 100
"""Two seconds wait for their reader; then the oldest go."""

Samples = NDArray[np.float32]


class CallerVoice:
    """What a line brings, for one reader.  On the event loop."""

    def __init__(self, clock: Clock) -> None:
        self.dropped_blocks = 0
        """Because nobody read them in time."""
        self._clock = clock
        self._is_closed = False
        self._resampler: tuple[int, Resampler] | None = None
        self._rest: Samples = np.zeros(0, np.float32)
        self._blocks: deque[Samples] = deque()
        self._changed = asyncio.Event()
        # Up to when what the caller said is known; None before the first sound or silence.
        self._until_ns: int | None = None

    def hear(self, pcm: NDArray[np.int16], sample_rate: int) -> None:
        """The next samples, (N,) int16."""
        now = self._clock.now()
        if self._until_ns is None:
            self._until_ns = now
        elif now - self._until_ns > SILENT_NS:
            self._fill(now)
        self._until_ns = max(self._until_ns, now - SECOND) + len(pcm) * SECOND // sample_rate
        if self._resampler is None or self._resampler[0] != sample_rate:
            self._resampler = (sample_rate, Resampler(sample_rate, RATE))
        self._push(self._resampler[1].push(pcm))

    async def blocks(self) -> AsyncIterator[Samples]:
        """(320,) float32 each, until the end.  A line that brings nothing brings silence."""
        if self._until_ns is None:
            self._until_ns = self._clock.now()
        while not self._is_closed:
            while self._blocks:
                yield self._blocks.popleft()
            self._changed.clear()
            try:
                async with asyncio.timeout(SILENT_NS / SECOND):
                    await self._changed.wait()
            except TimeoutError:
                self._fill(self._clock.now())

    def close(self) -> None:
        """The call is over."""
        self._is_closed = True
        self._changed.set()

    def _fill(self, now: int) -> None:
        """Nothing has come since: that was silence, up to now."""
        assert self._until_ns is not None
        count = max(0, (now - self._until_ns) // (20 * MS))
        self._until_ns += count * 20 * MS
        self._push(np.zeros(min(count, MAX_WAITING_BLOCKS) * BLOCK, np.float32))

    def _push(self, samples: Samples) -> None:
        self._rest = np.concatenate((self._rest, samples))
        while len(self._rest) >= BLOCK:
            self._blocks.append(self._rest[:BLOCK])
            self._rest = self._rest[BLOCK:]
        while len(self._blocks) > MAX_WAITING_BLOCKS:
            self._blocks.popleft()
            self.dropped_blocks += 1
        self._changed.set()
