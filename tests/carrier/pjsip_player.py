"""What a line has been sent and has not played: sound, and marks in it."""

from __future__ import annotations

from collections import deque
from threading import Lock

FRAME_BYTES = 320
"""20 ms of 16 bits at 8 kHz."""


class Player:
    """Filled on one thread, and emptied 20 ms at a time on another, whose pace is the line's clock."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._sound = bytearray()
        # Bytes that have been put in and taken out, ever; a mark stands at a place on that line.
        self._put = self._taken = 0
        self._marks: deque[tuple[int, str]] = deque()

    @property
    def waiting_bytes(self) -> int:
        return self._put - self._taken

    def put(self, pcm: bytes) -> None:
        """Sound, 16 bits at 8 kHz."""
        with self._lock:
            self._sound += pcm
            self._put += len(pcm)

    def mark(self, name: str) -> None:
        """Comes out when all that was put in before it has been played."""
        with self._lock:
            self._marks.append((self._put, name))

    def clear(self) -> list[str]:
        """Forget the sound; returns the marks in it."""
        with self._lock:
            marks = [name for _, name in self._marks]
            self._marks.clear()
            self._sound.clear()
            self._taken = self._put
            return marks

    def next(self) -> tuple[bytes, list[str]]:
        """The next 20 ms (less at the end of the sound, none where there is none), and the marks that the last ones
        have brought to an end."""
        with self._lock:
            marks = []
            while self._marks and self._marks[0][0] <= self._taken:
                marks.append(self._marks.popleft()[1])
            frame = bytes(self._sound[:FRAME_BYTES])
            del self._sound[:FRAME_BYTES]
            self._taken += len(frame)
            return frame, marks
