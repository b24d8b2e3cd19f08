"""One ticker for all calls of a process.

A timer per call wakes the event loop fifty times a second for each of them.  Here the 20 ms of a slot are cut into
`PHASES`, each call belongs to one, and the loop wakes once per phase that has calls: at most 250 times a second,
however many there are.  The phases keep many calls from leaving all at once: what waits behind the others of its phase
is late by their time, about 20 us each.

The schedule is absolute, so lateness does not add up.  What a stalled loop missed is the call's business: it is told
that a slot is due and looks at the clock itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from breeze_rtc.clock import MS, SECOND, Clock, MonotonicClock
from breeze_rtc.transport.playout import SLOT_NS

PHASES = 5
PHASE_NS = SLOT_NS // PHASES
TOGETHER = 8
"""So many calls share a phase before the next one is opened: a wake-up costs as much as two packets."""

STALL_NS = 300 * MS
"""More than a listener's browser bridges; a busy machine is seldom so late."""
COMPLAINT_NS = 10 * SECOND

log = logging.getLogger(__name__)

Tick = Callable[[], None]
"""Called when a slot of the call is due (and once too often after a stall); must not raise."""


class Phases:
    """Who is due when, without a clock.  Moments are `PHASE_NS` apart; moment m belongs to phase m modulo `PHASES`."""

    def __init__(self) -> None:
        # Dictionaries for their order: the same calls leave in the same order.
        self._members: list[dict[Tick, None]] = [{} for _ in range(PHASES)]
        # The last moment that was served.
        self._served = -1

    def join(self, tick: Tick, now: int, *, start_ns: int | None = None) -> int:
        """Call `tick` every 20 ms; returns the time of its first slot, which is after `now`.

        The phase is the emptiest once each has `TOGETHER` calls, or that of `start_ns`, a time given out here before.
        """
        if self.next_at() is None:
            self._served = now // PHASE_NS
        after = self._served + 1
        if start_ns is not None:
            phase = start_ns // PHASE_NS % PHASES
        else:
            phase = min(range(PHASES), key=lambda p: self._crowd(p, after))
        self._members[phase][tick] = None
        moment = max(after, now // PHASE_NS + 1)
        return (moment + (phase - moment) % PHASES) * PHASE_NS

    def _crowd(self, phase: int, after: int) -> tuple[bool, int, int]:
        """The less, the better for one more: few that go together first, then the fewest, then the soonest."""
        members = len(self._members[phase])
        return not 0 < members < TOGETHER, members, (phase - after) % PHASES

    def leave(self, tick: Tick) -> None:
        """Harmless for one that is not there."""
        for members in self._members:
            members.pop(tick, None)

    def next_at(self) -> int | None:
        """When somebody is due next; None while there is nobody."""
        for moment in range(self._served + 1, self._served + 1 + PHASES):
            if self._members[moment % PHASES]:
                return moment * PHASE_NS
        return None

    def run(self, now: int) -> None:
        """Call everybody whose moment came since the last time: each once, even where several of them were missed."""
        current = now // PHASE_NS
        first, self._served = max(self._served + 1, current - PHASES + 1), max(self._served, current)
        for moment in range(first, current + 1):
            members = self._members[moment % PHASES]
            for tick in tuple(members):
                if tick in members:  # An earlier one may have sent it away.
                    tick()


class Pacer:
    """`Phases` on the running event loop.  Holds a timer only while somebody has joined."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or MonotonicClock()
        self._phases = Phases()
        self._timer: asyncio.TimerHandle | None = None
        # When somebody is due next, while there is a timer; and when a stall was last complained of.
        self._due_at = 0
        self._complained_at: int | None = None

    def join(self, tick: Tick, *, start_ns: int | None = None) -> int:
        """Call `tick` on this loop every 20 ms, never early; see `Phases.join`."""
        first_at = self._phases.join(tick, self._clock.now(), start_ns=start_ns)
        self._arm()
        return first_at

    def leave(self, tick: Tick) -> None:
        self._phases.leave(tick)
        self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        next_at = self._phases.next_at()
        if next_at is not None:
            self._due_at = next_at
            # Whole milliseconds, rounded up: that is what the event loops wait in, and shorter waits would spin.
            wait_ms = max(0, -(-(next_at - self._clock.now()) // MS))
            self._timer = asyncio.get_running_loop().call_later(wait_ms / 1000, self._wake)

    def _wake(self) -> None:
        now = self._clock.now()
        if now - self._due_at > STALL_NS:
            self._complain(now)
        self._phases.run(now)
        self._arm()

    def _complain(self, now: int) -> None:
        if self._complained_at is not None and now - self._complained_at < COMPLAINT_NS:
            return
        self._complained_at = now
        log.warning(
            "no call got a packet for %d ms: the event loop stood still. In a callback, `await` what takes time, and "
            "give what cannot be awaited to a thread: await asyncio.to_thread(f)",
            (now - self._due_at) // MS,
        )
