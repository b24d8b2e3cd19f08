"""The slot clock and the queue of one call: any pace in, one packet each 20 ms out.

Slot k leaves at `start + 20k ms` and stands for the ticks [960k, 960(k + 1)) of the call, always.  Speech goes into the
slots that come; where there is none, silence does.  Three rules, each bought with measurements at a browser:

* Nothing leaves late.  A receiver answers one 300 ms stall with 300 ms of latency for nine seconds, so a slot that was
  missed is gone: its ticks pass as silence, and the speech that was meant for it leaves with the next slot.  Only
  speech that is under way may leave up to `GRACE_NS` after its slot: that much a receiver's buffer takes in its stride.
* Nothing leaves ahead.  A receiver does not store a lead, it plays faster to be rid of it.  The lead stays in this
  queue, where a barge-in costs nothing.
* The clock never stops and never goes back.  Pauses are silence, so that ticks and time stay one line.

No I/O and no clock in here: `now` comes in, slots come out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from breeze_rtc.clock import MS, SECOND, samples_to_ns
from breeze_rtc.media import rtp
from breeze_rtc.media.opus import SILENCE_PACKET
from breeze_rtc.playback import SpeechPacket

SLOT_NS = 20 * MS
SLOT_TICKS = 960

GRACE_NS = 40 * MS
"""How long after its slot has passed a packet in mid-speech may still leave.  With every tenth slot served 20 to 36 ms
late, as on a busy laptop, Chromium 156 made up 99 ms of sound in each second when such slots were skipped, and none
with this grace, for 11 ms more latency.  Stalls of 60 to 120 ms are no better for it, so it is no longer."""

GUARD_SLOTS = 4
"""Slots after a flush that carry no speech.  The page un-mutes when it sees the resume timestamp being played; it looks
every 20 ms and acts a little later, and what is spoken in between would be lost."""

MEMORY_TICKS = 2 * rtp.RTP_RATE
"""How long after it was heard the place of a packet is remembered: a page's word about a flush arrives later."""

MAX_REPEATED_PACKETS = 500
"""How much of a stream can be sent again: what lies between the ear and the last slot, ten seconds at the most."""

REMEMBERED_STREAMS = 256
"""How many finished streams are known by name, so that what still comes for them is dropped."""


@dataclass(frozen=True, slots=True)
class SlotClock:
    """The line that joins time and ticks: tick 960k leaves at `start_ns + 20k ms`."""

    start_ns: int

    def leaves_at(self, slot: int) -> int:
        return self.start_ns + slot * SLOT_NS

    def slot_at(self, now: int) -> int:
        """The slot whose 20 ms `now` lies in; negative before the start."""
        return (now - self.start_ns) // SLOT_NS

    def ticks_at(self, now: int) -> int:
        """The tick that leaves at `now`, between slots too."""
        return (now - self.start_ns) * rtp.RTP_RATE // SECOND

    def time_of(self, ticks: int) -> int:
        """When `ticks` leave, rounded up so that the tick has left by then."""
        return self.start_ns + samples_to_ns(ticks, rtp.RTP_RATE)


@dataclass(frozen=True, slots=True)
class Slot:
    """What leaves in one slot."""

    index: int
    payload: bytes
    stream: int | None
    """Whose speech this is; None for silence."""

    @property
    def ticks(self) -> int:
        return self.index * SLOT_TICKS


@dataclass(frozen=True, slots=True)
class Place:
    """A place in the speech of a call."""

    stream: int
    samples: int


@dataclass(slots=True)
class _Run:
    """Packets of one stream in slots that follow one another: one line of the media map."""

    first_ticks: int
    start_samples: int
    samples: int


@dataclass(slots=True)
class _Stream:
    """One stream from its first packet until its last was heard."""

    packets: deque[SpeechPacket] = field(default_factory=deque)
    # Where its packets went, oldest first; lines heard long ago are dropped.
    runs: list[_Run] = field(default_factory=list)
    # The last packets sent, with the ticks they left at: those whose lines are kept, and no more than a listener on a
    # new connection may have to hear again.
    sent: deque[tuple[int, SpeechPacket]] = field(default_factory=lambda: deque(maxlen=MAX_REPEATED_PACKETS))
    # Media position up to which all dropped lines were heard.
    forgotten_samples: int = 0
    # Media position heard on connections that are gone.
    heard_samples: int = 0
    # Slot at which its first packet left.
    first_slot: int | None = None
    is_ended: bool = False
    is_cleared: bool = False
    # The slot, and how many, that passed without a packet in mid-stream since its last packet left.
    dry_slot: int | None = None
    dry_slots: int = 0
    # Media position before which silence is a pause, not a gap.
    rest_samples: int | None = None
    # Times that it then went on, and the slots that passed.
    gaps: int = 0
    gap_slots: int = 0

    @property
    def is_sent(self) -> bool:
        return self.is_ended and not self.packets

    @property
    def sent_samples(self) -> int:
        """Media position after the last packet sent."""
        return self.runs[-1].start_samples + self.runs[-1].samples if self.runs else self.forgotten_samples


class Playout:
    """The sink of one call.  Streams are spoken one after another, in the order of their first `write`.

    A stream blocks those behind it until it is ended or cleared, so whoever opens a stream must do one of the two.
    """

    def __init__(
        self,
        *,
        sample_rate: int = 24_000,
        max_packets: int = 6_000,
        grace_ns: int = GRACE_NS,
        ear: Callable[[], int] = lambda: 0,
    ) -> None:
        """`ear` tells the ticks that have reached the listener's ear; `clear` counts from there.

        `max_packets` bounds the queue (6000 are two minutes): what is written beyond it is dropped and counted.
        """
        self._sample_rate = sample_rate
        self._packet_samples = rtp.samples_of(SLOT_TICKS, sample_rate)
        self._max_packets = max_packets
        self._grace_ns = grace_ns
        self._ear = ear
        # None until start().
        self.clock: SlotClock | None = None
        # The last slot that left.
        self._last_slot = -1
        # True once the listener plays: speech waits for that.
        self.is_open = False
        # While the listener hears nothing (muted, paused): the ticks at which that began.
        self._held_ticks: int | None = None
        # Speech keeps out of the slots before this one.
        self._speech_from_slot = 0
        # While speech is paused: the ticks at which the ear fell silent.
        self._paused_ticks: int | None = None
        # Streams by id, in speaking order; one leaves when it was heard in full and that was a while ago.
        self._streams: dict[int, _Stream] = {}
        # Streams that left -> media position heard; the oldest are forgotten.
        self._past: dict[int, int] = {}
        # Times that silence stood inside a stream which then went on, and for how many slots.
        self.gaps = 0
        self.gap_slots = 0
        # Slots that nobody came for in time.
        self.missed_slots = 0
        # Packets beyond the bound, and packets of streams that were over.
        self.dropped_packets = 0
        self.late_packets = 0

    # --- AudioSink

    def write(self, stream: int, packets: tuple[SpeechPacket, ...]) -> None:
        """Queue the next packets of `stream`, in order.  Packets of a cleared or finished stream are dropped."""
        entry = self._streams.get(stream)
        if stream in self._past or (entry is not None and entry.is_ended):
            self.late_packets += len(packets)
            return
        if entry is None:
            entry = self._streams[stream] = _Stream()
        room = max(0, self._max_packets - self.queued_packets)
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
        """Silence `stream` at once and for good; return the samples queued or sent, but not heard."""
        entry = self._streams.get(stream)
        if entry is None:
            if stream not in self._past:
                self._leave(stream, 0)
            return 0
        if entry.is_cleared:
            return 0
        unheard = (
            len(entry.packets) * self._packet_samples + entry.sent_samples - self.heard_samples(stream, self._ear())
        )
        entry.packets.clear()
        entry.sent.clear()
        entry.is_ended = entry.is_cleared = True
        return unheard

    # --- the slot clock

    def start(self, now: int) -> None:
        """Slot 0 leaves at `now`."""
        assert self.clock is None, "the slot clock starts once"
        self.clock = SlotClock(now)

    def open(self) -> None:
        """The listener plays: speech may go."""
        self.is_open = True

    def next_at(self) -> int:
        """When the next slot leaves."""
        assert self.clock is not None, "not started"
        return self.clock.leaves_at(self._last_slot + 1)

    def next_slot(self, now: int) -> Slot:
        """The slot to send at `now`: call once `next_at()` has come.

        It is the slot that `now` lies in, and those before it are missed; except that speech under way catches up, a
        slot at a call, as long as it is not later than the grace.
        """
        assert self.clock is not None, "not started"
        due = self._last_slot + 1
        index = self.clock.slot_at(now)
        assert index >= due, "a slot leaves once, and never ahead of its time"
        may_speak = self.is_open and not (self.is_held or self.is_paused) and index >= self._speech_from_slot
        head = self._head()
        if self._is_in_speech(head) and may_speak and now < self.clock.leaves_at(due + 1) + self._grace_ns:
            index = due
        missed = index - due
        if missed:
            self.missed_slots += missed
            if head is not None and may_speak:
                self._silence_inside(head[1], due, missed)
        self._last_slot = index
        if head is None or not may_speak:
            return Slot(index, SILENCE_PACKET, None)
        stream, entry = head
        if not entry.packets:
            self._silence_inside(entry, index, 1)
            return Slot(index, SILENCE_PACKET, None)
        packet = entry.packets.popleft()
        self._record(entry, packet, index)
        return Slot(index, packet.payload, stream)

    def flush(self, now: int) -> int:
        """Clear every stream, and return the ticks at which a listener who muted may un-mute.

        Of what was spoken before, nothing is left in the packets from there on; new speech comes `GUARD_SLOTS` later at
        the earliest.
        """
        for stream in self.streams:
            self.clear(stream)
        self.resume()
        return self._quiet_from(now)

    def pause(self, now: int) -> int:
        """Say nothing until `resume`, and keep all there is to say; returns what `flush` does.

        The ear's place counts as where it fell silent, until `silenced_at` knows better.
        """
        if self._paused_ticks is None:
            self._paused_ticks = self._ear()
        return self._quiet_from(now)

    def resume(self) -> None:
        """Speak on from the packet that holds the first sample that was not heard; up to 20 ms are heard twice."""
        if self._paused_ticks is not None:
            ticks, self._paused_ticks = self._paused_ticks, None
            if self._held_ticks is None:  # Else it is done once somebody listens.
                self._requeue(ticks)
            else:
                self._held_ticks = min(ticks, self._held_ticks)

    @property
    def is_paused(self) -> bool:
        return self._paused_ticks is not None

    def rewind(self, ticks: int) -> None:
        """The connection is gone, and `ticks` is as far as the ear came: queue again what was sent after that.

        Speech goes on with the packet that holds `ticks`, so up to 20 ms are heard twice, once the next listener plays
        (`open`).  The slot clock runs on meanwhile, and its slots are nobody's gap.
        """
        # Who knows that the connection is gone knows better than `hold` did how far the ear came.
        self.is_open, self._held_ticks = False, None
        self._requeue(self._at_most(ticks))

    @property
    def is_held(self) -> bool:
        """The listener hears nothing, so speech waits, and that is no gap."""
        return self._held_ticks is not None

    def hold(self, *, is_playing: bool) -> None:
        """The listener plays, or hears nothing.  What left when nobody heard it leaves again, once somebody does."""
        if not is_playing and self._held_ticks is None:
            self._held_ticks = self._ear()
        elif is_playing and self._held_ticks is not None:
            ticks, self._held_ticks = self._held_ticks, None
            if self._paused_ticks is None:  # Else `resume` does it, from a place that is no later.
                self._requeue(ticks)
            else:
                self._paused_ticks = min(ticks, self._paused_ticks)

    def _at_most(self, ticks: int) -> int:
        """How far an ear at `ticks` can have heard: it stands still while speech is paused, or not listened to."""
        return min(at for at in (ticks, self._paused_ticks, self._held_ticks) if at is not None)

    def _quiet_from(self, now: int) -> int:
        if self.clock is None:
            return 0
        upcoming = max(self._last_slot + 1, self.clock.slot_at(now))
        self._speech_from_slot = upcoming + GUARD_SLOTS
        # One slot on: the decoder still gives out its look-ahead, 6.5 ms, after the last packet of speech.
        return (upcoming + 1) * SLOT_TICKS

    def _requeue(self, ticks: int) -> None:
        for stream, entry in self._streams.items():
            entry.heard_samples = self.heard_samples(stream, ticks)
            while entry.sent and entry.sent[-1][0] + SLOT_TICKS > ticks:
                entry.packets.appendleft(entry.sent.pop()[1])
            while entry.runs and entry.runs[-1].first_ticks + SLOT_TICKS > ticks:
                entry.runs.pop()
            if entry.runs:
                last = entry.runs[-1]
                whole_packets = max(0, ticks - last.first_ticks) // SLOT_TICKS
                last.samples = min(last.samples, whole_packets * self._packet_samples)
            elif not entry.heard_samples:
                entry.first_slot = None
            entry.dry_slot, entry.dry_slots = None, 0

    # --- what the clock and the queue say

    @property
    def sent_ticks(self) -> int:
        """The end of the last slot that left; nothing after it can have been heard."""
        return (self._last_slot + 1) * SLOT_TICKS

    @property
    def queued_packets(self) -> int:
        return sum(len(entry.packets) for entry in self._streams.values())

    @property
    def streams(self) -> tuple[int, ...]:
        """Streams that are queued, being sent, or not heard in full for long, in speaking order."""
        return tuple(self._streams)

    def dry_at(self, stream: int, now: int) -> int | None:
        """When the queue of `stream` runs empty: the slot that its next packet must not miss.

        In the past when it has run dry in mid-stream.  While speech waits for the listener or is paused, the time moves
        along with `now`.  None where nothing more is due: ended, cleared, unknown.
        """
        entry = self._streams.get(stream)
        if entry is None or entry.is_ended:
            return None
        if self.clock is None or self.is_paused:
            return now + self._packets_until(stream) * SLOT_NS
        if entry.dry_slot is not None and not entry.packets:
            return self.clock.leaves_at(entry.dry_slot)
        upcoming = max(self._last_slot + 1, self.clock.slot_at(now), self._speech_from_slot)
        return self.clock.leaves_at(upcoming + self._packets_until(stream))

    def is_sent(self, stream: int) -> bool:
        """Whether all of `stream` has left, or was cleared."""
        entry = self._streams.get(stream)
        return entry.is_sent if entry is not None else stream in self._past

    def is_heard(self, stream: int, ticks: int) -> bool:
        """Whether an ear at `ticks` has heard all of `stream` that it will ever hear."""
        entry = self._streams.get(stream)
        if entry is None:
            return stream in self._past
        return entry.is_sent and self.heard_samples(stream, ticks) >= entry.sent_samples

    # --- the media map

    def heard_samples(self, stream: int, ticks: int) -> int:
        """How much of `stream` an ear at `ticks` has heard: a media position that never falls as `ticks` grow."""
        entry = self._streams.get(stream)
        if entry is None:
            return self._past.get(stream, 0)
        ticks = self._at_most(ticks)
        for run in reversed(entry.runs):
            if ticks >= run.first_ticks:
                samples = min(run.samples, rtp.samples_of(ticks - run.first_ticks, self._sample_rate))
                return max(run.start_samples + samples, entry.heard_samples)
        return max(entry.forgotten_samples, entry.heard_samples)

    def gaps_in(self, stream: int) -> tuple[int, int]:
        """How often silence stood inside of `stream`, and for how long in ns; nothing once it was heard long ago."""
        entry = self._streams.get(stream)
        return (entry.gaps, entry.gap_slots * SLOT_NS) if entry is not None else (0, 0)

    def place(self, ticks: int) -> Place | None:
        """What is spoken at `ticks`; None for silence, and for what is not sent yet or heard long ago."""
        for stream, entry in self._streams.items():
            for run in reversed(entry.runs):
                samples = rtp.samples_of(ticks - run.first_ticks, self._sample_rate)
                if 0 <= samples < run.samples:
                    return Place(stream, run.start_samples + samples)
        return None

    def ticks_of(self, stream: int, samples: int) -> int | None:
        """The ticks of sample `samples` of `stream`, the end of what was sent included; None off the map."""
        entry = self._streams.get(stream)
        for run in reversed(entry.runs) if entry is not None else ():
            if run.start_samples <= samples <= run.start_samples + run.samples:
                return run.first_ticks + rtp.ticks_of(samples - run.start_samples, self._sample_rate)
        return None

    def first_ticks(self, stream: int) -> int | None:
        """The ticks at which `stream` began; None before that, and long after its end."""
        entry = self._streams.get(stream)
        return entry.first_slot * SLOT_TICKS if entry is not None and entry.first_slot is not None else None

    def end_ticks(self, stream: int) -> int | None:
        """The ticks after the last packet of `stream` that left; None where there is none on the map."""
        entry = self._streams.get(stream)
        return self._end_ticks(entry.runs[-1]) if entry is not None and entry.runs else None

    def silenced_at(self, ticks: int) -> None:
        """The listener fell silent at `ticks`: of cleared streams, and of what is paused, nothing after was heard."""
        if self._paused_ticks is not None:
            self._paused_ticks = ticks
        for entry in self._streams.values():
            if not entry.is_cleared:
                continue
            while entry.runs and entry.runs[-1].first_ticks >= ticks:
                entry.runs.pop()
            if entry.runs:
                last = entry.runs[-1]
                last.samples = min(last.samples, rtp.samples_of(ticks - last.first_ticks, self._sample_rate))

    def forget(self, ticks: int) -> None:
        """The ear is at `ticks`: drop what it heard some time ago."""
        ticks = self._at_most(ticks)
        past_ticks = ticks - MEMORY_TICKS
        for stream, entry in list(self._streams.items()):
            while entry.sent and entry.sent[0][0] + SLOT_TICKS <= past_ticks:
                entry.sent.popleft()
            while entry.runs and self._end_ticks(entry.runs[0]) <= past_ticks:
                # The line that is still being written stays; a new packet belongs to it.
                if len(entry.runs) == 1 and not entry.is_sent:
                    break
                run = entry.runs.pop(0)
                entry.forgotten_samples = run.start_samples + run.samples
            if entry.is_sent and not entry.runs:
                del self._streams[stream]
                self._leave(stream, max(entry.forgotten_samples, entry.heard_samples))

    # ---

    def _head(self) -> tuple[int, _Stream] | None:
        """The stream whose turn it is."""
        return next(((stream, entry) for stream, entry in self._streams.items() if not entry.is_sent), None)

    @staticmethod
    def _is_in_speech(head: tuple[int, _Stream] | None) -> bool:
        """Whether a slot without its packet would be heard: a stream has begun and has more to say."""
        return head is not None and head[1].first_slot is not None and bool(head[1].packets)

    def _packets_until(self, stream: int) -> int:
        """Packets that leave before `stream` has none left."""
        packets = 0
        for other, entry in self._streams.items():
            packets += len(entry.packets)
            if other == stream:
                break
        return packets

    def _silence_inside(self, entry: _Stream, slot: int, count: int) -> None:
        """Slots pass in which `entry` should have spoken.  Whether that was a gap shows when it goes on."""
        if entry.first_slot is not None:
            entry.dry_slot = slot if entry.dry_slot is None else entry.dry_slot
            entry.dry_slots += count

    def _record(self, entry: _Stream, packet: SpeechPacket, slot: int) -> None:
        ticks = slot * SLOT_TICKS
        if entry.first_slot is None:
            entry.first_slot = slot
        if entry.dry_slots:
            if packet.start_samples != entry.rest_samples:
                entry.gaps += 1
                entry.gap_slots += entry.dry_slots
                self.gaps += 1
                self.gap_slots += entry.dry_slots
            entry.dry_slot, entry.dry_slots = None, 0
        entry.sent.append((ticks, packet))
        last = entry.runs[-1] if entry.runs else None
        if (
            last is not None
            and self._end_ticks(last) == ticks
            and last.start_samples + last.samples == packet.start_samples
        ):
            last.samples += self._packet_samples
        else:
            entry.runs.append(_Run(ticks, packet.start_samples, self._packet_samples))

    def _end_ticks(self, run: _Run) -> int:
        return run.first_ticks + rtp.ticks_of(run.samples, self._sample_rate)

    def _leave(self, stream: int, heard_samples: int) -> None:
        self._past[stream] = heard_samples
        while len(self._past) > REMEMBERED_STREAMS:
            del self._past[next(iter(self._past))]
