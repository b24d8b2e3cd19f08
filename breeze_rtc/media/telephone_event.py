"""Keys of a telephone in RTP (RFC 4733): each is told again and again while it is held, under its first timestamp."""

from __future__ import annotations

import struct
from collections import deque
from typing import NamedTuple

KEYS = "0123456789*#ABCD"
HELD_SLOTS = 5
"""100 ms: what the shortest key of ITU-T Q.24 is heard by, twice over."""
END_SLOTS = 3
"""The end is told three times (section 2.5.1.4)."""
PAUSE_SLOTS = 3
VOLUME = 10
"""-10 dBm0."""

_PAYLOAD = struct.Struct("!BBH")


class Told(NamedTuple):
    """One packet about a key."""

    key: str
    is_end: bool
    duration: int
    """So far, in samples."""


def read(payload: bytes) -> Told | None:
    """None for what is no key: there are events for modems and faxes too."""
    if len(payload) < _PAYLOAD.size:
        return None
    event, flags, duration = _PAYLOAD.unpack_from(payload)
    return Told(KEYS[event], bool(flags & 0x80), duration) if event < len(KEYS) else None


def written(told: Told) -> bytes:
    return _PAYLOAD.pack(KEYS.index(told.key), (0x80 if told.is_end else 0) | VOLUME, told.duration)


class Keypad:
    """Keys to send, a packet each 20 ms."""

    def __init__(self, slot_samples: int) -> None:
        self._slot_samples = slot_samples
        self._waiting: deque[str] = deque()
        # Slots since the key at the front began.
        self._slot = 0

    def press(self, keys: str) -> None:
        self._waiting.extend(keys)

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting)

    def next(self) -> tuple[bool, Told] | None:
        """Whether a key begins in this slot, and what to tell of it; None in a pause."""
        if not self._waiting:
            return None
        slot, self._slot = self._slot, self._slot + 1
        told = Told(self._waiting[0], slot >= HELD_SLOTS, min(slot + 1, HELD_SLOTS) * self._slot_samples)
        if self._slot == HELD_SLOTS + END_SLOTS + PAUSE_SLOTS:
            self._waiting.popleft()
            self._slot = 0
        return (slot == 0, told) if slot < HELD_SLOTS + END_SLOTS else None
