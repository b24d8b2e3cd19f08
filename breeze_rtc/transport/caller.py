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
BLOCK = 512
"""32 ms: what voice activity is judged by, so that whoever waits for blocks is woken no more often than it helps."""
BLOCK_NS = 32 * MS
LOOK_S = 0.05
"""How often a line is looked at for silence."""
SILENT_NS = 200 * MS
"""A line that has brought nothing for so long is silent, not late: some send nothing while nobody speaks."""
MAX_WAITING_BLOCKS = 62
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
        # What came and was not resampled yet: a block's worth at a time costs less than each piece.
        self._raw: list[NDArray[np.int16]] = []
        self._rest: Samples = np.zeros(0, np.float32)
        self._blocks: deque[Samples] = deque()
        self._changed = asyncio.Event()
        # Up to when what the caller said is known; None before the first sound or silence.
        self._until_ns: int | None = None
        self._timer: asyncio.TimerHandle | None = None

    def hear(self, pcm: NDArray[np.int16], sample_rate: int) -> None:
        """The next samples, (N,) int16."""
        now = self._clock.now()
        if self._until_ns is None:
            self._until_ns = now
        elif now - self._until_ns > SILENT_NS:
            self._fill(now)
        self._until_ns = max(self._until_ns, now - SECOND) + len(pcm) * SECOND // sample_rate
        if self._resampler is None or self._resampler[0] != sample_rate:
            self._take_in()
            self._resampler = (sample_rate, Resampler(sample_rate, RATE))
        self._raw.append(pcm)
        if len(self._rest) + sum(map(len, self._raw)) * RATE // sample_rate >= BLOCK:
            self._take_in()

    async def blocks(self) -> AsyncIterator[Samples]:
        """(512,) float32 each, until the end.  A line that brings nothing brings silence."""
        if self._until_ns is None:
            self._until_ns = self._clock.now()
        self._look()
        try:
            while not self._is_closed:
                while self._blocks:
                    yield self._blocks.popleft()
                self._changed.clear()
                await self._changed.wait()
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def close(self) -> None:
        """The call is over."""
        self._is_closed = True
        self._changed.set()

    def _look(self) -> None:
        """Again and again, which costs less than a timer for each block."""
        now = self._clock.now()
        assert self._until_ns is not None, "set before the first look"
        if now - self._until_ns > SILENT_NS:
            self._fill(now)
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _fill(self, now: int) -> None:
        """Nothing has come since: that was silence, up to now."""
        assert self._until_ns is not None
        self._take_in()
        count = max(0, (now - self._until_ns) // BLOCK_NS)
        self._until_ns += count * BLOCK_NS
        self._push(np.zeros(min(count, MAX_WAITING_BLOCKS) * BLOCK, np.float32))

    def _take_in(self) -> None:
        if self._resampler is not None and self._raw:
            self._push(self._resampler[1].push(np.concatenate(self._raw)))
            self._raw.clear()

    def _push(self, samples: Samples) -> None:
        self._rest = np.concatenate((self._rest, samples))
        while len(self._rest) >= BLOCK:
            self._blocks.append(self._rest[:BLOCK])
            self._rest = self._rest[BLOCK:]
        while len(self._blocks) > MAX_WAITING_BLOCKS:
            self._blocks.popleft()
            self.dropped_blocks += 1
        self._changed.set()
