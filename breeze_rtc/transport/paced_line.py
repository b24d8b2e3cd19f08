"""A telephone line whose clock we are: 20 ms leave each 20 ms on an absolute schedule, silence too.

Nothing lies at a carrier, so a barge-in needs no message: what is not to be heard does not leave, and what has left is
heard.  How a slot is put on the wire, and where the ear is, the kind of line says.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from breeze_rtc.clock import Clock
from breeze_rtc.media.libopus import Decoder
from breeze_rtc.playback import PlaybackReport
from breeze_rtc.transport.caller import CallerVoice
from breeze_rtc.transport.pacer import Pacer
from breeze_rtc.transport.playout import Playout, Slot

RATE = 8_000
SLOT_SAMPLES = 160
TELL_SLOTS = 5
"""Positions are told ten times a second."""


class PacedLine(ABC):
    """To an agent's session it is the sink, the listener's position and the microphone of one call."""

    def __init__(
        self, *, clock: Clock, pacer: Pacer, on_report: Callable[[PlaybackReport], None], sample_rate: int
    ) -> None:
        """on_report: where the caller is, ten times a second.  sample_rate: what media positions count in."""
        self.sink = Playout(sample_rate=sample_rate, ear=self._ear_ticks)
        self.closed = asyncio.Event()
        self.caller = CallerVoice(clock)
        self.on_digit: Callable[[str], None] = lambda digit: None
        """Called with each key that is pressed."""
        self.on_slot: Callable[[Slot, int], None] = lambda slot, start_ns: None
        """Called with each slot after it has left, and when slot 0 left."""
        self._clock = clock
        self._pacer = pacer
        self._on_report = on_report
        self._decoder: tuple[int, Decoder] | None = None
        self._told: set[int] = set()

    def position(self, stream: int) -> PlaybackReport:
        """Where the caller is in `stream`, now: by the clock, for no message tells it."""
        now = self._clock.now()
        gaps, gap_ns = self.sink.gaps_in(stream)
        return PlaybackReport(
            stream=stream,
            heard_samples=self.sink.heard_samples(stream, self._ear_ticks()),
            at_ns=now,
            path_delay_ns=self.path_delay_ns,
            dry_at_ns=self.sink.dry_at(stream, now),
            is_playing=not (self.sink.is_paused or self.sink.is_held),
            is_measured=False,
            gaps=gaps,
            gap_ns=gap_ns,
        )

    def pause(self) -> None:
        """Fall silent and keep what is to be said.  What has left is heard."""
        self.sink.pause(self._clock.now())
        self.sink.silenced_at(self.sink.sent_ticks)

    def resume(self) -> None:
        """Speak on from the first sample that has not left."""
        self.sink.resume()

    def close(self) -> None:
        """The call is over: no more sound leaves."""
        self._pacer.leave(self._tick)
        self.closed.set()
        self.caller.close()

    # --- what kind of line it is

    @property
    @abstractmethod
    def path_delay_ns(self) -> int:
        """From a slot's time to the ear."""

    @abstractmethod
    def _ear_ticks(self) -> int:
        """Where the ear is, in ticks of the call's sound."""

    @abstractmethod
    def _put(self, slot: Slot) -> None:
        """Put 20 ms on the wire."""

    # ---

    def _tick(self) -> None:
        assert self.sink.clock is not None
        while self.sink.next_at() <= (now := self._clock.now()):
            slot = self.sink.next_slot(now)
            self._put(slot)
            if self.closed.is_set():
                return
            self.on_slot(slot, self.sink.clock.start_ns)
            if slot.index % TELL_SLOTS == 0:
                self._tell()
                self.sink.forget(self._ear_ticks())

    def _sound(self, slot: Slot) -> NDArray[np.int16] | None:
        """The sound of a slot, 20 ms at 8 kHz; None for silence."""
        if slot.stream is None:
            return None
        if self._decoder is None or self._decoder[0] != slot.stream:
            self._decoder = (slot.stream, Decoder(RATE))
        samples = self._decoder[1].decode_int16(slot.payload)
        return samples if samples is not None and len(samples) == SLOT_SAMPLES else None

    def _tell(self) -> None:
        streams = self.sink.streams
        self._told.intersection_update(streams)
        for stream in streams:
            if stream not in self._told:
                if self.sink.is_heard(stream, self._ear_ticks()):
                    self._told.add(stream)
                self._on_report(self.position(stream))
