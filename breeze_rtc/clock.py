"""The only module that reads the machine's clock.

Clock times are integer nanoseconds on the monotonic clock, which all processes of one machine share; media positions
are integer samples.  Integers need no epsilon: a scheduler that asks to be woken at `t` finds, at `t`, that it is `t`.
"""

from __future__ import annotations

import time
from typing import Protocol

US = 1_000
MS = 1_000_000
SECOND = 1_000_000_000


class Clock(Protocol):
    """Something that tells the time in nanoseconds and never goes back."""

    def now(self) -> int: ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now(self) -> int:
        return time.monotonic_ns()


def wall_offset_ns() -> int:
    """What to add to the monotonic clock for nanoseconds since 1970, as the machine sees it now."""
    return time.time_ns() - time.monotonic_ns()


class VirtualClock:
    """A clock that moves only when told to; simulations and tests run on it."""

    def __init__(self, now_ns: int = 0) -> None:
        self._now_ns = now_ns

    def now(self) -> int:
        return self._now_ns

    def advance(self, ns: int) -> int:
        """Move forward by `ns` (>= 0) and return the new time."""
        assert ns >= 0, "time does not go back"
        self._now_ns += ns
        return self._now_ns

    def advance_to(self, at_ns: int) -> int:
        """Move forward to `at_ns`, or stay where it is when that has passed."""
        self._now_ns = max(self._now_ns, at_ns)
        return self._now_ns


def samples_to_ns(samples: int, sample_rate: int) -> int:
    """Duration of `samples` at `sample_rate`, rounded up so that the time it names is never early."""
    return -(-samples * SECOND // sample_rate)


def ns_to_samples(ns: int, sample_rate: int) -> int:
    """How many whole samples fit into `ns`."""
    return ns * sample_rate // SECOND
