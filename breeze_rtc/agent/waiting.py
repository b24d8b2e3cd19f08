"""What the caller hears while the agent thinks: some words, or a sound, after a while."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from breeze_rtc.agent.call import Call
from breeze_rtc.media.opus import SpeechEncoder

if TYPE_CHECKING:
    from collections.abc import Iterator

_PIECE_S = 0.02
_LEAD_S = 0.1  # so much of it waits in the sink, and is heard after the answer is ready


@dataclass(frozen=True, slots=True)
class Waiting:
    """What fills a silence in which the agent thinks."""

    after_s: float = 1.0
    """How long a silence may be."""
    words: tuple[str, ...] = ()
    """Fillers such as "Let me see.", one a turn, in this order and round again.  One whose answer is ready before it
    has made a sound is not spoken; one that has begun is not cut."""
    sound: NDArray[np.int16] | None = None
    """Mono PCM at the voice's rate, repeated until the answer begins; faded in, and out within 20 ms."""


class WaitingSound:
    """Plays a sound round and round until it is cancelled, in streams of its own (below zero) on the call's sink."""

    def __init__(self, call: Call, sound: NDArray[np.int16], sample_rate: int) -> None:
        self._call = call
        self._sound = sound
        self._rate = sample_rate
        self._streams: Iterator[int] = count(-1, -1)

    async def play(self) -> None:
        """Cancel it to end the sound: what is under way fades."""
        stream = next(self._streams)
        encoder = SpeechEncoder(self._rate)
        size = round(_PIECE_S * self._rate)
        ramp = 0.5 - 0.5 * np.cos(np.pi * np.arange(size) / size)
        loop = asyncio.get_running_loop()
        began_s, pieces = loop.time(), 0
        try:
            while True:
                while pieces * _PIECE_S < loop.time() - began_s + _LEAD_S:
                    piece = self._piece(pieces * size, size)
                    faded = piece if pieces else (piece * ramp).astype(np.int16)
                    self._call.sink.write(stream, encoder.encode(faded))
                    pieces += 1
                await asyncio.sleep(_PIECE_S)
        finally:
            last = (self._piece(pieces * size, size) * ramp[::-1]).astype(np.int16)
            self._call.sink.write(stream, (*encoder.encode(last), *encoder.end()))
            self._call.sink.end(stream)

    def _piece(self, start: int, size: int) -> NDArray[np.int16]:
        return np.take(self._sound, range(start, start + size), mode="wrap")
