"""The sink of a call whose sound is buffered at the far end: by a carrier that plays it, and says how far it has come.

What is sent is bounded: never more than `lead_ns` beyond what the far player has played, so that a barge-in throws
little away and one message silences it all.  After each `MARK_PACKETS` a *mark* is sent, which the carrier gives back
when it has played what came before.  That is a playback report:

    carrier delay = echo of a mark - when its sound would have ended had the carrier had it at once

In between, and where no echo comes, the clock goes on: sound is played in real time, never past what was sent and never
past what a missing echo leaves open.  A clear gives the marks back too, though their sound is never heard, and an echo
may be on its way just then; so marks are named by generation, a clear begins the next one, and what the caller heard of
the old is settled by the clock there and then.  It is right to within a mark's interval, and never waits for anybody.

No I/O and no clock in here: `now` comes in, what to send comes out.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from breeze_rtc.clock import MS, SECOND, ns_to_samples, samples_to_ns
from breeze_rtc.media.opus import LOOK_AHEAD_48K, RTP_RATE
from breeze_rtc.playback import PlaybackReport, SpeechPacket

PACKET_NS = 20 * MS
LOOK_AHEAD_NS = samples_to_ns(LOOK_AHEAD_48K, RTP_RATE)
MARK_PACKETS = 5
"""A mark after so many packets at most: 100 ms of sound, what carriers' own examples do."""
LEAD_NS = 400 * MS
"""How much sound the carrier may hold: enough for the network's jitter, little enough to forget."""
UNMEASURED_DELAY_NS = 60 * MS
"""To the carrier's player, before the first echo."""
EAR_DELAY_NS = 210 * MS
"""From the carrier's player, or from our RTP, to the ear: a telephone's own buffers, which no message tells.  So much a
softphone held that was left as it comes (`bench/phone_cuts.py`); with its smallest buffer it held 127 ms."""
PATIENCE_NS = 200 * MS
"""So much later than expected an echo may come before its mark counts as not reached."""
HOLD_NS = SECOND
"""An echo that late means that the carrier does not play: a call on hold."""
GIVE_UP_NS = 5 * SECOND
"""After that long without one, echoes are believed lost rather than the sound."""
MEMORY_NS = 3 * SECOND
MAX_PACKETS = 6_000
REMEMBERED_STREAMS = 256


@dataclass(frozen=True, slots=True)
class Sound:
    """Packets to send, together."""

    stream: int
    packets: tuple[SpeechPacket, ...]
    begins_ns: int = field(default=0, compare=False)
    """When the first of it would be played if it were there at once."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A mark to send."""

    name: str


@dataclass(frozen=True, slots=True)
class Clear:
    """Tell the carrier to forget what it has not played."""

    from_ns: int = field(default=0, compare=False)
    """From here on, on the line of `Sound.begins_ns`, nothing of what was sent is played."""


Sending = Sound | Mark | Clear


@dataclass(slots=True)
class _Stream:
    packets: deque[SpeechPacket] = field(default_factory=deque)
    is_ended: bool = False
    is_cleared: bool = False
    # Media position after the last packet sent, and the furthest that was heard.
    sent_samples: int = 0
    heard_samples: int = 0
    first_sent_ns: int | None = None
    # Media position before which silence is a pause, not a gap.
    rest_samples: int | None = None
    # Times that the carrier ran dry in the middle of it, and for how long.
    gaps: int = 0
    gap_ns: int = 0


@dataclass(slots=True)
class _Sent:
    """Packets at the carrier, or played there: [start, start + packets) of a stream."""

    stream: int
    packets: tuple[SpeechPacket, ...]
    start_samples: int
    samples: int
    # When it would be played if it were there at once.
    begins_ns: int
    ends_ns: int


@dataclass(slots=True)
class _Pending:
    """A mark whose echo has not come."""

    name: str
    # When what was sent before it would have been played, and before the mark ahead of it.
    at_ns: int
    after_ns: int


class FarBuffer:
    """One call's sink, the carrier's player, and where the caller's ear is.  Speaks streams one after another."""

    def __init__(
        self,
        *,
        sample_rate: int = 24_000,
        lead_ns: int = LEAD_NS,
        ear_delay_ns: int = EAR_DELAY_NS,
    ) -> None:
        """lead_ns: sound the carrier may hold.  ear_delay_ns: from its player to the ear."""
        self._sample_rate = sample_rate
        self._packet_samples = ns_to_samples(PACKET_NS, sample_rate)
        self._lead_ns = lead_ns
        self.ear_delay_ns = ear_delay_ns
        """From the carrier's player to the ear; may be set when something tells it."""
        self._streams: dict[int, _Stream] = {}
        # Streams that are over -> media position heard; the oldest are forgotten.
        self._past: dict[int, int] = {}
        self._sent: deque[_Sent] = deque()
        self._pending: deque[_Pending] = deque()
        self._now = 0
        self._generation = 0
        self._count = 0
        # When the carrier will have played all it has, if it had it at once; and what was before the last mark.
        self._plays_until_ns = 0
        self._marked_until_ns = 0
        self._unmarked = 0
        # Echo less expectation: the newest, and the least, which is the round trip.
        self._delay_ns: int | None = None
        self._round_trip_ns: int | None = None
        self._must_clear = False
        self.is_paused = False
        """True from `pause` to `resume`: nothing is sent."""
        # The carrier runs dry because of a pause, which is no gap.
        self._was_paused = False
        self.has_room = True
        """False while the carrier says that its buffer is full."""
        # Times that the carrier ran dry in the middle of a stream.
        self.gaps = 0
        self.stale_echoes = 0
        """Echoes of marks that were cleared, or that nobody sent."""
        self.late_packets = 0
        self.dropped_packets = 0

    # --- AudioSink

    def write(self, stream: int, packets: tuple[SpeechPacket, ...]) -> None:
        """Queue the next packets of `stream`, in order.  Packets of a cleared or finished stream are dropped."""
        entry = self._streams.get(stream)
        if stream in self._past or (entry is not None and entry.is_ended):
            self.late_packets += len(packets)
            return
        if entry is None:
            entry = self._streams[stream] = _Stream()
        room = max(0, MAX_PACKETS - sum(len(other.packets) for other in self._streams.values()))
        entry.packets.extend(packets[:room])
        self.dropped_packets += len(packets[room:])

    def rest(self, stream: int, samples: int) -> None:
        """Silence before the packet that begins at media position `samples` is a pause, and no gap."""
        entry = self._streams.get(stream)
        if entry is not None:
            entry.rest_samples = samples

    def end(self, stream: int) -> None:
        """No more packets of `stream` will come."""
        entry = self._streams.get(stream)
        if entry is not None:
            entry.is_ended = True
        elif stream not in self._past:
            self._leave(stream, 0)

    def clear(self, stream: int) -> int:
        """Silence `stream`: `due` says a `Clear` next.

        Returns the samples queued or sent, and not heard by the last time that this was told the time.
        """
        entry = self._streams.get(stream)
        if entry is None or entry.is_cleared:
            if entry is None and stream not in self._past:
                self._leave(stream, 0)
            return 0
        unheard = len(entry.packets) * self._packet_samples
        entry.packets.clear()
        entry.is_ended = entry.is_cleared = True
        unheard_there = entry.sent_samples - self.heard_samples(stream, self._now)
        self._must_clear = self._must_clear or unheard_there > 0
        return unheard + unheard_there

    def pause(self) -> None:
        """Say nothing until `resume`, and keep all there is to say.

        `due` says a `Clear` next; what the carrier will not have played when it arrives is sent again later.
        """
        self._must_clear = self._must_clear or not self.is_paused
        self.is_paused = self._was_paused = True

    def resume(self) -> None:
        """Speak on from the packet that holds the first sample that was not heard."""
        self.is_paused = False

    # --- the wire

    def due(self, now: int) -> list[Sending]:
        """What to send now, in this order."""
        out: list[Sending] = []
        if self._must_clear:
            self._must_clear = False
            # Its buffer will be empty.  Not every Asterisk says so: a flush there leaves the count that XON waits for.
            self.has_room = True
            out.append(Clear(self._settle(now)))
        while self._may_send(now) and (head := self._head()) is not None:
            stream, entry = head
            room_ns = self._lead_ns - self._lead_at(now)
            most = max(1, min(MARK_PACKETS - self._unmarked, room_ns // PACKET_NS, len(entry.packets)))
            packets = tuple(entry.packets.popleft() for _ in range(most))
            out.append(Sound(stream, packets, self._record(stream, entry, packets, now)))
            is_pause = not entry.packets and (entry.is_ended or self._head() is None)
            if self._unmarked >= MARK_PACKETS or is_pause:
                out.append(self._mark())
        self._forget(now)
        return out

    def next_at(self, now: int) -> int | None:
        """When `due` may have something, if nothing else happens; None when only an input changes that."""
        self._now = now
        if self._must_clear:
            return now
        if self._head() is None or not self.has_room or self.is_paused:
            return None
        # A mark's worth at a time: few messages, and the lead stays near its bound.
        at_ns = self._carrier_until() - max(PACKET_NS, self._lead_ns - MARK_PACKETS * PACKET_NS)
        if self._is_blocked(now):
            at_ns = max(at_ns, self._pending[0].at_ns + self._expected_delay() + GIVE_UP_NS)
        return max(now, at_ns)

    def played(self, name: str, now: int) -> None:
        """The carrier gave a mark back."""
        names = [mark.name for mark in self._pending]
        if name not in names:
            self.stale_echoes += 1
            return
        # Those before it were played as well, whatever became of their echoes.
        for _ in range(names.index(name) + 1):
            mark = self._pending.popleft()
        delay_ns = max(0, now - mark.at_ns)
        self._delay_ns = delay_ns
        self._round_trip_ns = delay_ns if self._round_trip_ns is None else min(self._round_trip_ns, delay_ns)

    # --- the ear

    @property
    def path_delay_ns(self) -> int:
        """From the moment a packet could be played to the ear."""
        return self._carrier_delay() + self.ear_delay_ns + LOOK_AHEAD_NS

    @property
    def is_measured(self) -> bool:
        return self._delay_ns is not None

    def heard_samples(self, stream: int, now: int) -> int:
        """Media position of `stream` at the ear: never past what was sent, never back."""
        self._now = now
        entry = self._streams.get(stream)
        if entry is None:
            return self._past.get(stream, 0)
        ear_ns = self._ear_ns(now)
        for sent in reversed(self._sent):
            if sent.stream == stream and sent.begins_ns <= ear_ns:
                inside = min(sent.samples, ns_to_samples(ear_ns - sent.begins_ns, self._sample_rate))
                entry.heard_samples = max(entry.heard_samples, sent.start_samples + inside)
                break
        return entry.heard_samples

    def heard_at(self, stream: int) -> int | None:
        """When the first sample of `stream` reached the ear, or will; None while it waits here."""
        entry = self._streams.get(stream)
        if entry is None or entry.first_sent_ns is None:
            return None
        return entry.first_sent_ns + self.path_delay_ns

    def report(self, stream: int, now: int) -> PlaybackReport:
        """Where the caller is in `stream`."""
        entry = self._streams.get(stream)
        return PlaybackReport(
            stream=stream,
            heard_samples=self.heard_samples(stream, now),
            at_ns=now,
            path_delay_ns=self.path_delay_ns,
            is_playing=not (self.is_paused or self._is_blocked(now)),
            is_measured=self.is_measured,
            gaps=entry.gaps if entry is not None else 0,
            gap_ns=entry.gap_ns if entry is not None else 0,
        )

    @property
    def streams(self) -> tuple[int, ...]:
        """Streams that are queued, at the carrier, or not heard in full for long."""
        return tuple(self._streams)

    def is_heard(self, stream: int, now: int) -> bool:
        """Whether the ear has heard all of `stream` that it ever will."""
        entry = self._streams.get(stream)
        if entry is None:
            return stream in self._past
        if not entry.is_ended or entry.packets:
            return False
        last_ns = max((sent.ends_ns for sent in self._sent if sent.stream == stream), default=0)
        return self._ear_ns(now) >= last_ns

    # ---

    def _head(self) -> tuple[int, _Stream] | None:
        """The stream whose turn it is, if it has something to send; those behind it wait until it is ended."""
        for stream, entry in self._streams.items():
            if entry.packets:
                return stream, entry
            if not entry.is_ended:
                return None
        return None

    def _record(self, stream: int, entry: _Stream, packets: tuple[SpeechPacket, ...], now: int) -> int:
        if self._plays_until_ns < now:
            is_rest = self._was_paused or packets[0].start_samples == entry.rest_samples
            if entry.sent_samples > 0 and not is_rest:
                self.gaps += 1
                entry.gaps += 1
                entry.gap_ns += now - self._plays_until_ns
            self._plays_until_ns = now
        self._was_paused = False
        begins_ns = self._plays_until_ns
        samples = len(packets) * self._packet_samples
        self._plays_until_ns += samples_to_ns(samples, self._sample_rate)
        start_samples = packets[0].start_samples
        self._sent.append(_Sent(stream, packets, start_samples, samples, begins_ns, self._plays_until_ns))
        entry.sent_samples = start_samples + samples
        if entry.first_sent_ns is None:
            entry.first_sent_ns = begins_ns
        self._unmarked += len(packets)
        return begins_ns

    def _mark(self) -> Mark:
        self._count += 1
        self._unmarked = 0
        mark = _Pending(f"{self._generation}:{self._count}", self._plays_until_ns, self._marked_until_ns)
        self._marked_until_ns = self._plays_until_ns
        self._pending.append(mark)
        return Mark(mark.name)

    def _settle(self, now: int) -> int:
        """A clear leaves now.  What the carrier plays until it arrives, which is returned, will be heard, and nothing
        after it; of streams that go on, what comes after it is queued again."""
        arrives_ns = now + self._one_way() - self._carrier_delay()
        arrives_ns = min(arrives_ns, self._not_beyond(now))
        for sent in reversed(self._sent):
            if sent.ends_ns > arrives_ns and not (entry := self._streams[sent.stream]).is_cleared:
                played = ns_to_samples(max(0, arrives_ns - sent.begins_ns), self._sample_rate) // self._packet_samples
                entry.packets.extendleft(reversed(sent.packets[played:]))
        kept: deque[_Sent] = deque()
        for sent in self._sent:
            if sent.begins_ns >= arrives_ns:
                continue
            if sent.ends_ns > arrives_ns:
                sent.samples = ns_to_samples(arrives_ns - sent.begins_ns, self._sample_rate)
                sent.ends_ns = arrives_ns
            kept.append(sent)
        self._sent = kept
        for stream, entry in self._streams.items():
            last = max((sent.start_samples + sent.samples for sent in kept if sent.stream == stream), default=0)
            entry.sent_samples = max(entry.heard_samples, last)
        self._pending.clear()
        self._generation += 1
        self._unmarked = 0
        self._plays_until_ns = min(self._plays_until_ns, arrives_ns)
        self._marked_until_ns = self._plays_until_ns
        return arrives_ns

    def _may_send(self, now: int) -> bool:
        return (
            self.has_room
            and not self.is_paused
            and self._lead_at(now) + PACKET_NS <= self._lead_ns
            and not self._is_blocked(now)
        )

    def _lead_at(self, now: int) -> int:
        """Sound at the carrier that it has not played."""
        return max(0, self._carrier_until() - now)

    def _carrier_until(self) -> int:
        """When the carrier runs dry: later than it would have, by how much it has been held up."""
        return self._plays_until_ns + (self._delay_ns or 0) - (self._round_trip_ns or 0)

    def _one_way(self) -> int:
        return self._round_trip_ns // 2 if self._round_trip_ns is not None else UNMEASURED_DELAY_NS

    def _expected_delay(self) -> int:
        return self._delay_ns if self._delay_ns is not None else 2 * UNMEASURED_DELAY_NS

    def _carrier_delay(self) -> int:
        """From the moment a packet could be played to the carrier's player."""
        if self._delay_ns is None or self._round_trip_ns is None:
            return UNMEASURED_DELAY_NS
        return self._delay_ns - self._round_trip_ns // 2

    def _is_blocked(self, now: int) -> bool:
        """The carrier used to give marks back and has not given the next one for long: it does not play."""
        if not self._pending or self._delay_ns is None:
            return False
        late_ns = now - self._pending[0].at_ns - self._delay_ns
        return HOLD_NS <= late_ns < GIVE_UP_NS

    def _not_beyond(self, now: int) -> int:
        """What the next missing echo leaves open, on the line of `begins_ns`."""
        if not self._pending or self._delay_ns is None:
            return 1 << 62
        mark = self._pending[0]
        late_ns = now - mark.at_ns - self._delay_ns
        if PATIENCE_NS <= late_ns < GIVE_UP_NS:
            return mark.after_ns
        return mark.at_ns + self._one_way() + PATIENCE_NS

    def _ear_ns(self, now: int) -> int:
        """How far the ear is, on the line of `begins_ns`."""
        return min(now - self.path_delay_ns, self._not_beyond(now))

    def _forget(self, now: int) -> None:
        ear_ns = self._ear_ns(now)
        for stream in [stream for stream in self._streams if self.is_heard(stream, now)]:
            heard = self.heard_samples(stream, now)
            if all(sent.ends_ns < ear_ns - MEMORY_NS for sent in self._sent if sent.stream == stream):
                del self._streams[stream]
                self._leave(stream, heard)
        while self._sent and self._sent[0].ends_ns < ear_ns - MEMORY_NS:
            gone = self._sent.popleft()
            entry = self._streams.get(gone.stream)
            if entry is not None:
                entry.heard_samples = max(entry.heard_samples, gone.start_samples + gone.samples)

    def _leave(self, stream: int, heard: int) -> None:
        self._past[stream] = heard
        while len(self._past) > REMEMBERED_STREAMS:
            del self._past[next(iter(self._past))]
