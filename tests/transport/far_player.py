"""A carrier in virtual time: a network each way, a buffer played at one rate, marks given back, clears obeyed."""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from breeze_rtc.clock import MS
from breeze_rtc.transport.far_buffer import EAR_DELAY_NS, PACKET_NS, Clear, FarBuffer, Mark, Sound


@dataclass
class FarPlayer:
    """Plays what a `FarBuffer` sends, and knows the truth.

    delay_ns: one way.  line_ns: from the player to the ear.  rate_ppm: how much slower than ours its clock is.
    """

    sink: FarBuffer
    delay_ns: int = 25 * MS
    line_ns: int = EAR_DELAY_NS
    rate_ppm: int = 0
    gives_marks: bool = True
    is_on_hold: bool = False
    now: int = 0
    queue: list[Any] = field(default_factory=list)
    # (stream, media position after it, when it had been played), in order.
    played: list[tuple[int, int, int]] = field(default_factory=list)
    sent: list[Any] = field(default_factory=list)
    _busy_until: int = 0
    _wires: list[tuple[int, int, str, Any]] = field(default_factory=list)
    _count: int = 0

    def run(self, until: int) -> None:
        """Go on in steps of a millisecond."""
        while self.now < until:
            self.now += MS
            at = self.sink.next_at(self.now)
            if at is not None and at <= self.now:
                self.take()
            while self._wires and self._wires[0][0] <= self.now:
                _, _, where, what = heappop(self._wires)
                if where == "here":
                    self.sink.played(what, self.now)
                else:
                    self._arrive(what)
            self._play()

    def take(self) -> None:
        """Put what is due on the wire."""
        for out in self.sink.due(self.now):
            self.sent.append((self.now, out))
            self._wire("there", out)

    def _wire(self, where: str, what: Any) -> None:
        self._count += 1
        heappush(self._wires, (self.now + self.delay_ns, self._count, where, what))

    def _arrive(self, out: Any) -> None:
        match out:
            case Sound():
                self.queue += [(out.stream, packet) for packet in out.packets]
            case Mark() if not self.queue and self._busy_until <= self.now:
                self._echo(out)
            case Mark():
                self.queue.append(out)
            case Clear():
                marks = [item for item in self.queue if isinstance(item, Mark)]
                self.queue.clear()
                for mark in marks:
                    self._echo(mark)

    def _play(self) -> None:
        while self.queue and self._busy_until <= self.now and not self.is_on_hold:
            item = self.queue.pop(0)
            if isinstance(item, Mark):
                self._echo(item)
                continue
            stream, packet = item
            begins = max(self._busy_until, self.now - MS)
            self._busy_until = begins + PACKET_NS + PACKET_NS * self.rate_ppm // 1_000_000
            self.played.append((stream, packet.start_samples + 480, self._busy_until))

    def _echo(self, mark: Mark) -> None:
        if self.gives_marks:
            self._wire("here", mark.name)

    def heard(self, stream: int, at: int | None = None) -> int:
        """The truth: media samples of `stream` that have come out of the telephone."""
        at = (self.now if at is None else at) - self.line_ns - 6_500_000
        samples = 0
        for played, end_samples, ends in self.played:
            if played == stream and ends - PACKET_NS <= at:
                inside = min(480, (at - (ends - PACKET_NS)) * 24_000 // 1_000_000_000)
                samples = max(samples, end_samples - 480 + inside)
        return samples
