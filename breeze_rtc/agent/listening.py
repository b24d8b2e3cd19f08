"""The user's side of a call: frames of sound in, cues and words out.

What is said is read while it is said: a growing turn now and then, so that the page shows it and an interruption is
known for one; all of it at the first lull, so that the words are there when the silence has grown into the turn's end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import numpy as np

from breeze_rtc.agent.call import Ears
from breeze_rtc.agent.vad import SAMPLE_RATE as EAR_RATE
from breeze_rtc.agent.vad import Cue, Recording, Samples, SpeechGate
from breeze_rtc.errors import BreezeError

_PIECE_SECONDS, _MAX_PIECE_SECONDS, _MAX_TURN_SECONDS = 10.0, 25.0, 180.0
_PARTIAL_SECONDS = 0.8


class Reader(Protocol):
    """Who is told what was understood."""

    def understood(self, text: str, seconds: float, *, is_lull: bool) -> None:
        """So much of the turn's sound, `seconds`, holds these words; at a lull it is all of it."""

    def failed(self, error: Exception) -> None:
        """The recogniser raised."""


class Listening:
    """Hears one turn after another.  `spawn_read` makes a task of the call from a reading."""

    def __init__(
        self,
        ears: Ears | None,
        gate: SpeechGate,
        reader: Reader,
        *,
        spawn_read: Callable[[Coroutine[Any, Any, str]], asyncio.Task[str]],
    ) -> None:
        self.gate = gate
        self.recording = Recording()
        self._ears = ears
        self._reader = reader
        self._spawn_read = spawn_read
        self._audio: list[Samples] = []
        self._pieces: list[asyncio.Task[str]] = []
        self._ahead: asyncio.Task[str] | None = None
        self._partial: asyncio.Task[str] | None = None
        self._shown_s = 0.0
        # Readings of a turn that was forgotten say nothing.
        self._turn = 0

    def hear(self, frame: Samples, probability: float) -> Cue | None:
        """The microphone's next frame; the cue it completes."""
        self.recording.add(frame)
        cue = self.gate.feed(probability)
        if cue is Cue.ONSET:
            self.recording.begin(self.gate.onset_age_ms)
        elif cue is Cue.LULL and self.recording.is_open:
            self._read_ahead()
        if self.recording.seconds > _MAX_PIECE_SECONDS:
            self._next_piece()
        self._read_partly()
        return cue

    @property
    def seconds(self) -> float:
        """How long the turn is."""
        return self.recording.seconds + sum(map(len, self._audio)) / EAR_RATE

    async def words(self) -> tuple[str, Samples]:
        """The turn is over: its words, "" for none, and its sound."""
        audio = [*self._audio, self.recording.copy()]
        last = self._ahead or self._read(audio[-1])
        return _with_words([await piece for piece in [*self._pieces, last]]), np.concatenate(audio)

    def forget(self, *, goes_on: bool = False) -> None:
        """Drop the turn.  goes_on: its sound does, and what comes of it from now on is listened to as the next."""
        self._turn += 1
        if goes_on:
            self.recording.keep_last(0.0)
        else:
            self.recording.drop()
        self._audio, self._pieces, self._ahead = [], [], None
        self._shown_s = 0.0

    def keep_last(self, seconds: float) -> None:
        """What was heard so far held no words; only its end may be the beginning of some."""
        self._audio, self._pieces, self._ahead = [], [], None
        self.recording.keep_last(seconds)
        self._shown_s = self.recording.seconds

    def _read_ahead(self) -> None:
        if self.recording.seconds > _PIECE_SECONDS:
            self._next_piece()
        elif self._ears is not None:
            self._ahead = self._read(self.recording.copy())
        if self._ahead is not None:
            self._ahead.add_done_callback(self._tell(self.seconds, is_lull=True))

    def _read_partly(self) -> None:
        if self._ears is None or not self.recording.is_open or not self.gate.is_speech:
            return
        is_reading = self._partial is not None and not self._partial.done()
        if not is_reading and self.recording.seconds >= self._shown_s + _PARTIAL_SECONDS:
            self._shown_s = self.recording.seconds
            self._partial = self._read(self.recording.copy())
            self._partial.add_done_callback(self._tell(self.seconds, is_lull=False))

    def _tell(self, seconds: float, *, is_lull: bool) -> Callable[[asyncio.Task[str]], None]:
        turn = self._turn

        def tell(reading: asyncio.Task[str]) -> None:
            if reading.cancelled() or turn != self._turn:
                return
            before = [piece.result() for piece in self._pieces if piece.done() and not piece.cancelled()]
            text = _with_words([*before, reading.result()])
            self._reader.understood(text, seconds, is_lull=is_lull and self.gate.is_silent)

        return tell

    def _next_piece(self) -> None:
        """A long turn is read in pieces."""
        piece = self.recording.take_piece()
        self._ahead, self._shown_s = None, 0.0
        if sum(map(len, self._audio)) < _MAX_TURN_SECONDS * EAR_RATE:
            self._audio.append(piece)
            self._pieces.append(self._read(piece))

    def _read(self, samples: Samples) -> asyncio.Task[str]:
        return self._spawn_read(self._words_of(samples))

    async def _words_of(self, samples: Samples) -> str:
        if self._ears is None:
            return ""
        try:
            return await self._ears.transcribe(samples)
        except Exception as error:
            known = isinstance(error, BreezeError)
            self._reader.failed(error if known else BreezeError(f"reading the user's speech failed: {error}"))
            return ""


def _with_words(parts: list[str]) -> str:
    """The parts that hold a letter or a digit, as one text."""
    return " ".join(part for part in parts if any(char.isalnum() for char in part))
