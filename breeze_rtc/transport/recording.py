"""A call as a stereo WAV: the caller left, the agent right, each sample in its place on one clock.

Places come from RTP: the caller's from the uplink clock, the agent's from the slot clock; both clocks stand on ours.
So a call of so many seconds makes a file of so many, whatever stalled, came in bursts or was lost.  The agent's side is
what was sent: what an interruption kept from being heard is in it up to where the sending stopped.  A telephone's
carrier has the sound before it is played; then it is what the carrier will have played.
"""

from __future__ import annotations

import contextlib
import logging
import wave
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from breeze_rtc.clock import SECOND, ns_to_samples
from breeze_rtc.media.libopus import Decoder
from breeze_rtc.transport.far_buffer import Clear, Sound
from breeze_rtc.transport.playout import SLOT_NS, Slot
from breeze_rtc.transport.uplink import BLOCK, RATE, Block

logger = logging.getLogger(__name__)

_CALLER, _AGENT = 0, 1
_LAG = RATE
"""A side that is a second behind the other has nothing to say: its silence is written."""
_PIECE = RATE // 2


class CallRecording:
    """Takes both sides as they come.  A disk that takes no more ends the recording, not the call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._wave: wave.Wave_write | None = None
        self._has_failed = False
        self._decoder = Decoder(RATE)
        self._was_speech = False
        # Time of the file's first sample, where the first clock began; None before there is one.
        self._zero_ns: int | None = None
        # Where each side's own clock begins in the file, in samples.
        self._offsets: list[int | None] = [None, None]
        # Time of the first sound that went to a far player.
        self._far_zero_ns: int | None = None
        # What is not written yet: samples from `_written` on, and how far each side has come.
        self._window = np.zeros((0, 2), np.int16)
        self._written = 0
        self._ends = [0, 0]

    def caller(self, block: Block, clock_ns: int) -> None:
        """20 ms of the caller, whose clock's zero was at `clock_ns`."""
        self._put(_CALLER, clock_ns, block.at_samples, block.samples)

    def agent(self, slot: Slot, clock_ns: int) -> None:
        """What left in a slot; slot 0 left at `clock_ns`."""
        # The packet after speech is decoded too: the decoder fades.
        is_speech = slot.stream is not None
        sound = self._decoder.decode(slot.payload) if is_speech or self._was_speech else None
        self._was_speech = is_speech
        if sound is None or len(sound) != BLOCK:
            sound = np.zeros(BLOCK, np.float32)
        self._put(_AGENT, clock_ns, slot.index * ns_to_samples(SLOT_NS, RATE), sound)

    def sending(self, sending: Sound | Clear) -> None:
        """What goes to a far player is where it will be played; after a `Clear` the rest of it is not."""
        if isinstance(sending, Clear):
            self._take_back(sending)
        else:
            self._send(sending)

    def _send(self, sound: Sound) -> None:
        if self._far_zero_ns is None:
            self._far_zero_ns = sound.begins_ns
        at = (sound.begins_ns - self._far_zero_ns) * RATE // SECOND
        for number, packet in enumerate(sound.packets):
            pcm = self._decoder.decode(packet.payload)
            if pcm is not None and len(pcm) == BLOCK:
                self._put(_AGENT, self._far_zero_ns, at + number * BLOCK, pcm)

    def _take_back(self, clear: Clear) -> None:
        if self._zero_ns is not None:
            first = (clear.from_ns - self._zero_ns) * RATE // SECOND
            self._window[max(0, first - self._written) :, _AGENT] = 0
            self._ends[_AGENT] = min(self._ends[_AGENT], max(first, self._written))

    def close(self) -> None:
        """Write the rest; may be called twice."""
        self._write(max(self._ends))
        for part in (self._wave, self._file):
            if part is not None:
                with contextlib.suppress(OSError):
                    part.close()
        self._has_failed = True

    def _put(self, side: int, clock_ns: int, at: int, sound: NDArray[np.float32]) -> None:
        offset = self._offsets[side]
        if offset is None:
            self._zero_ns = clock_ns if self._zero_ns is None else self._zero_ns
            offset = self._offsets[side] = (clock_ns - self._zero_ns) * RATE // SECOND
        first = offset + at - self._written
        if first + len(sound) > len(self._window):
            more = first + len(sound) - len(self._window) + _PIECE
            self._window = np.concatenate((self._window, np.zeros((more, 2), np.int16)))
        skipped = max(0, -first)  # what is written already
        if skipped < len(sound):
            pcm = (np.clip(sound[skipped:], -1.0, 1.0) * 32_767).astype(np.int16)
            self._window[first + skipped : first + len(sound), side] = pcm
        self._ends[side] = max(self._ends[side], offset + at + len(sound))
        upto = max(min(self._ends), max(self._ends) - _LAG)
        if upto - self._written >= _PIECE:
            self._write(upto)

    def _write(self, upto: int) -> None:
        count = upto - self._written
        if self._has_failed or count <= 0:
            return
        try:
            if self._wave is None:
                self._open()
            assert self._wave is not None
            # Brings the length in the head up to date, so that the file is whole also where the process is killed.
            self._wave.writeframes(self._window[:count].astype("<i2").tobytes())
        except OSError as error:
            self._has_failed = True
            logger.error("the recording %s ends here: %s", self._path, error)
        self._window = self._window[count:]
        self._written = upto

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("wb")
        self._wave = wave.Wave_write(self._file)
        self._wave.setnchannels(2)
        self._wave.setsampwidth(2)
        self._wave.setframerate(RATE)
