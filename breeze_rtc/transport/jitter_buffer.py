"""RTP packets of one microphone, as they come, into its sound in order: pure, no I/O, every input takes `now`.

A buffer before a loudspeaker must wait, for the loudspeaker cannot.  Nothing plays what a microphone sends here: it is
listened to by voice activity, a recogniser and a recording.  So a packet that is next in order leaves at once, however
late it comes, and only what follows a gap waits for the gap to be filled: for `patience_ns`, which grows to 100 ms with
the disorder it sees and goes back to 20.  The delay after a loss is gone with the loss.

    buffer.push(packet, now)            # what arrived
    for frame in buffer.take(now): ...  # sound that is ready, without a gap or an overlap
    buffer.wake_at()                    # when there will be more, if nothing arrives

Places are ticks of the *uplink clock*: 48 kHz, 0 where the first packet began, counted by the sender's own timestamps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from breeze_rtc.clock import MS, SECOND, ns_to_samples, samples_to_ns
from breeze_rtc.media import rtp
from breeze_rtc.media.opus import has_fec, packet_ticks
from breeze_rtc.media.rtp import Packet

PATIENCE_NS = (20 * MS, 40 * MS, 100 * MS)
"""At least, at first, at most."""
STALL_NS = SECOND
"""Sound that is later than this is given up, and silence takes its place.  A network that stops for less loses no word;
a sender that stops for good without a word is silent a second later."""
PAUSE_LAG_NS = 100 * MS
"""The same for a sender that said it would pause (DTX): silence needs no proof then."""
MAX_WAITING = 100
"""Packets behind a gap.  There are five of 20 ms within the longest patience."""
CONCEAL_TICKS = 4_800
"""A loss is concealed for 100 ms; the rest of it is silence."""

_LEAD_NS = SECOND
_MAX_DISORDER = 512
_MAX_DROPOUT = 3_000  # RFC 3550 appendix A.1
_BUCKET_NS = 5 * SECOND
_STEP = 960
_GRAIN = 120


class Source(Enum):
    """Where the sound of a frame comes from."""

    PACKET = "its packet"
    FEC = "the copy that the next packet carries"
    CONCEALED = "a guess from the sound before"
    SILENCE = "nothing: the sender paused, or too much is lost"


class Frame(NamedTuple):
    """`ticks` of sound from `at` on."""

    at: int
    ticks: int
    source: Source
    payload: bytes
    """What to decode: the packet, or for FEC the packet after it."""


@dataclass(slots=True)
class Tally:
    """Packets by what became of them, and ticks of sound by where it came from."""

    used: int = 0
    reordered: int = 0
    """Of those used: came after a later one, and filled its gap in time."""
    duplicate: int = 0
    late: int = 0
    """Came after its place had been filled."""
    strange: int = 0
    """Belongs to no stream we know: another SSRC, or far from where this one is.  (Where some of these, or of the
    late, turn out to begin a stream, they are used all the same.)"""
    malformed: int = 0
    restarts: int = 0
    recovered_ticks: int = 0
    concealed_ticks: int = 0
    silent_ticks: int = 0


class _Waiting(NamedTuple):
    at: int
    ticks: int
    payload: bytes
    arrived_ns: int


class JitterBuffer:
    """The sound of one uplink.  Laws: frames follow each other without a gap or an overlap; what waits is bounded; a
    packet that is next in order is never kept."""

    def __init__(
        self,
        *,
        ticks: Callable[[bytes], int | None] = packet_ticks,
        carries_copy: Callable[[bytes], bool] = has_fec,
    ) -> None:
        """ticks: how long a payload sounds, None for one that is none.  carries_copy: whether it brings what is in the
        packet before it once more.  Both are Opus's, if nothing else is said."""
        self._ticks_of = ticks
        self._carries_copy = carries_copy
        self.tally = Tally()
        self.patience_ns = PATIENCE_NS[1]
        """How long a gap holds up what follows."""
        self.ssrc: int | None = None
        """None before the first packet."""
        # Sound up to here has been given out; the packet with `_next_sequence` (not wrapped) comes next.
        self._next = 0
        self._next_sequence = 0
        # The timestamp of tick 0.
        self._origin = 0
        # Packets that came ahead of a gap, by sequence.
        self._waiting: dict[int, _Waiting] = {}
        self._ready: list[Frame] = []
        # Of the newest packet: its sequence.  Bit k of `_seen`: the packet k before it has come.
        self._newest = 0
        self._seen = 0
        # Arrival minus place of the fastest packet, in this bucket of five seconds and the one before: what the network
        # takes when it is quick, and which way the two clocks drift.
        self._fastest_ns = self._fastest_before_ns = 0
        self._bucket_end_ns = 0
        # When the last packet that fits came.
        self._arrived_ns = 0
        # The sender has said that it pauses.
        self._is_paused = False
        # The last packets, when none of them fits: they may be the beginning of another stream.
        self._strays: list[tuple[Packet, int, int]] = []

    def push(self, packet: Packet, now: int) -> None:
        """Take a packet that has just arrived."""
        ticks = self._ticks_of(packet.payload)
        if ticks is None:
            self.tally.malformed += 1
            return
        if self.ssrc is None:
            self._begin(packet, 0, now)
        sequence, at = self._place(packet)
        if (
            packet.ssrc != self.ssrc
            or not -_MAX_DISORDER < sequence - self._newest < _MAX_DROPOUT
            or self._transit_ns(at, now) < self._fastest_before_ns - _LEAD_NS
        ):
            self.tally.strange += 1
            self._stray(packet, ticks, now, enough=3)
        elif self._is_seen(sequence):
            self.tally.duplicate += 1
        elif at < self._next or sequence < self._next_sequence:
            self.tally.late += 1
            if sequence < self._next_sequence:
                self.patience_ns = min(2 * self.patience_ns, PATIENCE_NS[2])
            self._stray(packet, ticks, now, enough=25)
        else:
            self._accept(sequence, at, ticks, packet.payload, now)

    def take(self, now: int) -> list[Frame]:
        """The sound that is ready, in order."""
        while self._waiting:
            sequence = min(self._waiting)
            if sequence != self._next_sequence and now < self._gives_up_at() and len(self._waiting) <= MAX_WAITING:
                break
            waiting = self._waiting.pop(sequence)
            if waiting.at < self._next:  # A packet with this place has come already, under another number.
                self.tally.late += 1
                continue
            self._fill(waiting, lost=sequence - self._next_sequence)
            self._emit(sequence, waiting)
        if self.ssrc is not None and not self._waiting and now >= self._silent_at():
            self._silence(_ticks(now - self._given_up_after() - self._next_ns()) // _STEP * _STEP)
        frames, self._ready = self._ready, []
        return frames

    def wake_at(self) -> int | None:
        """When `take` will have something even if nothing arrives; None before the first packet."""
        if self.ssrc is None:
            return None
        return self._gives_up_at() if self._waiting else self._silent_at()

    # ---

    def _begin(self, packet: Packet, at: int, now: int) -> None:
        """A stream begins with `packet`, placed at `at`."""
        self.ssrc, self._origin = packet.ssrc, rtp.add(packet.timestamp, -at)
        self._newest = self._next_sequence = packet.sequence_number
        self._seen = 0
        self._fastest_ns = self._fastest_before_ns = self._transit_ns(at, now)
        self._bucket_end_ns = now + _BUCKET_NS
        self._is_paused = False

    def _place(self, packet: Packet) -> tuple[int, int]:
        """Sequence and tick, not wrapped."""
        sequence = rtp.unwrap_sequence(packet.sequence_number, self._newest)
        return sequence, rtp.unwrap(packet.timestamp, self._next, self._origin)

    def _accept(self, sequence: int, at: int, ticks: int, payload: bytes, now: int) -> None:
        self._strays.clear()
        self.tally.used += 1
        self._mark(sequence)
        self._arrived_ns = now
        self._follow_clock(self._transit_ns(at, now), now)
        waiting = _Waiting(at, ticks, payload, now)
        if sequence == self._next_sequence and at == self._next and not self._waiting:
            self.patience_ns -= (self.patience_ns - PATIENCE_NS[0]) >> 9  # back to the least in some 10 s
            self._emit(sequence, waiting)
            return
        if self._waiting and sequence < max(self._waiting):
            self.tally.reordered += 1
            waited_ns = now - min(waiting.arrived_ns for waiting in self._waiting.values())
            self.patience_ns = min(max(self.patience_ns, waited_ns * 5 // 4), PATIENCE_NS[2])
        self._waiting[sequence] = waiting

    def _emit(self, sequence: int, waiting: _Waiting) -> None:
        self._ready.append(Frame(waiting.at, waiting.ticks, Source.PACKET, waiting.payload))
        self._next, self._next_sequence = waiting.at + waiting.ticks, sequence + 1
        # An encoder that pauses says so with a packet of two bytes at the most (RFC 6716 section 2.1.9).
        self._is_paused = len(waiting.payload) <= 2

    def _fill(self, waiting: _Waiting, *, lost: int) -> None:
        """Sound for the gap before a packet; of the packets between, `lost` are missing (0: the sender paused)."""
        gap = waiting.at - self._next
        if lost == 0 or gap < _GRAIN:
            self._silence(gap)
            return
        recovered = waiting.ticks if gap >= waiting.ticks and self._carries_copy(waiting.payload) else 0
        concealed = min(gap - recovered, CONCEAL_TICKS) // _GRAIN * _GRAIN
        if concealed:
            self._ready.append(Frame(self._next, concealed, Source.CONCEALED, b""))
            self.tally.concealed_ticks += concealed
            self._next += concealed
        self._silence(gap - recovered - concealed)
        if recovered:
            self._ready.append(Frame(self._next, recovered, Source.FEC, waiting.payload))
            self.tally.recovered_ticks += recovered
            self._next += recovered

    def _silence(self, ticks: int) -> None:
        if ticks > 0:
            self._ready.append(Frame(self._next, ticks, Source.SILENCE, b""))
            self.tally.silent_ticks += ticks
            self._next += ticks

    def _stray(self, packet: Packet, ticks: int, now: int, *, enough: int) -> None:
        """A packet that does not fit.  So many in a row that belong together, and come no faster than their own clock
        runs, are a sender that began anew, or whose clock stood still for a while; a burst after a stall is neither."""
        strays = self._strays
        if strays and not _follows(strays[-1][0], packet):
            strays.clear()
        strays.append((packet, ticks, now))
        del strays[:-enough]
        span_ns = _ns(rtp.distance(strays[0][0].timestamp, packet.timestamp))
        if len(strays) < enough or now - strays[0][2] < span_ns * 3 // 4:
            return
        run, self._strays = strays, []
        self.tally.restarts += 1
        # What waits behind a gap of the old stream goes first; then the new one where its arrival says.
        for sequence in sorted(self._waiting):
            waiting = self._waiting.pop(sequence)
            if waiting.at >= self._next:
                self._fill(waiting, lost=sequence - self._next_sequence)
                self._emit(sequence, waiting)
        first, _, arrived_ns = run[0]
        self._begin(first, max(self._next, _ticks(arrived_ns - self._base_ns())), arrived_ns)
        for member, member_ticks, arrived_ns in run:
            sequence, at = self._place(member)
            self._accept(sequence, at, member_ticks, member.payload, arrived_ns)

    # --- what has come

    def _is_seen(self, sequence: int) -> bool:
        return sequence <= self._newest and bool(self._seen >> (self._newest - sequence) & 1)

    def _mark(self, sequence: int) -> None:
        if sequence > self._newest:
            self._seen = self._seen << min(sequence - self._newest, _MAX_DISORDER) & ((1 << _MAX_DISORDER) - 1)
            self._newest = sequence
        self._seen |= 1 << (self._newest - sequence)

    # --- clocks

    def _transit_ns(self, at: int, now: int) -> int:
        return now - _ns(at)

    def _follow_clock(self, transit_ns: int, now: int) -> None:
        if now >= self._bucket_end_ns:
            self._fastest_before_ns, self._fastest_ns = self._fastest_ns, transit_ns
            self._bucket_end_ns = now + _BUCKET_NS
        elif transit_ns < self._fastest_ns:
            self._fastest_ns = transit_ns

    def _base_ns(self) -> int:
        """When tick 0 came, had it been as quick as the quickest packet of late."""
        return min(self._fastest_ns, self._fastest_before_ns)

    def _next_ns(self) -> int:
        """When the next tick is to come."""
        return self._base_ns() + _ns(self._next)

    def _given_up_after(self) -> int:
        """How late sound may be for which nothing has come."""
        return PAUSE_LAG_NS if self._is_paused else STALL_NS

    def _silent_at(self) -> int:
        """When the next step of silence is due.  Not while packets come, however late: the rest is behind them."""
        return max(self._next_ns() + _ns(_STEP), self._arrived_ns) + self._given_up_after()

    def _gives_up_at(self) -> int:
        """When the gap before what waits will have been known for long enough."""
        return min(waiting.arrived_ns for waiting in self._waiting.values()) + self.patience_ns


def _follows(one: Packet, other: Packet) -> bool:
    """Whether `other` is the packet after `one`."""
    is_next = (one.ssrc, (one.sequence_number + 1) % 65_536) == (other.ssrc, other.sequence_number)
    return is_next and 0 < rtp.distance(one.timestamp, other.timestamp) < rtp.RTP_RATE


def _ns(ticks: int) -> int:
    return samples_to_ns(ticks, rtp.RTP_RATE)


def _ticks(ns: int) -> int:
    return ns_to_samples(ns, rtp.RTP_RATE)
