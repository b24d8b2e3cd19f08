"""A telephone line of our own: G.711 over RTP, both ways, with what RTCP says of it.

Where the ear is, RTCP tells as far as it can: the round trip, and how unevenly packets arrive (RFC 3550 section 6.4); a
telephone that sends extended reports says how deep its own buffer is (RFC 3611 section 4.7), for the others that is an
assumption.

The sockets belong to somebody else.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from breeze_rtc.clock import MS, SECOND, Clock, wall_offset_ns
from breeze_rtc.media import rtcp, rtp, telephone_event
from breeze_rtc.media.line_codec import LineCodec
from breeze_rtc.playback import PlaybackReport
from breeze_rtc.transport.caller import SILENT_NS
from breeze_rtc.transport.far_buffer import EAR_DELAY_NS
from breeze_rtc.transport.jitter_buffer import JitterBuffer, Source
from breeze_rtc.transport.paced_line import RATE, SLOT_SAMPLES, PacedLine
from breeze_rtc.transport.pacer import Pacer
from breeze_rtc.transport.playhead import Playhead, ReceiverReport
from breeze_rtc.transport.playout import SLOT_TICKS, Slot

CODECS = {0: LineCodec("PCMU"), 8: LineCodec("PCMA")}
SILENCE = {number: codec.silence(SLOT_SAMPLES) for number, codec in CODECS.items()}
FIRST_RTCP_SLOTS, RTCP_SLOTS = 50, 250
"""After a second, then every five (RFC 3550 section 6.2)."""
DEVICE_NS = 40 * MS
"""From a telephone's jitter buffer to the ear."""
MAX_PAYLOAD_BYTES = RATE // 5

Address = tuple[str, int]

_HEADER = struct.Struct("!BBHLL")
_TICKS = rtp.RTP_RATE // RATE


class Quality(NamedTuple):
    """What RTCP says of the way to the telephone."""

    round_trip_ns: int | None
    """None before it is known."""
    jitter_ns: int
    lost: int
    """Packets, since the beginning."""
    sent: int


class RtpLine(PacedLine):
    """One call's sound, both ways."""

    def __init__(
        self,
        *,
        clock: Clock,
        pacer: Pacer,
        on_report: Callable[[PlaybackReport], None],
        send: Callable[[bytes, Address], None],
        send_rtcp: Callable[[bytes, Address], None],
        sample_rate: int = 24_000,
        ear_delay_ns: int = EAR_DELAY_NS,
    ) -> None:
        """Nothing leaves before `connect`.  send, send_rtcp: put a packet on the wire.  ear_delay_ns: what a telephone
        holds that does not tell."""
        super().__init__(clock=clock, pacer=pacer, on_report=on_report, sample_rate=sample_rate)
        self.last_word_at = clock.now()
        """When anything came from the other end."""
        self.quality = Quality(None, 0, 0, 0)
        self.buffer = JitterBuffer(ticks=_ticks_of, carries_copy=lambda payload: False)
        self._ear_delay_ns = ear_delay_ns
        self._send = send
        self._send_rtcp = send_rtcp
        # Where sound goes: what was agreed, and then where sound comes from (symmetric RTP, RFC 4961).
        self._address: Address | None = None
        self._rtcp_address: Address | None = None
        self._agreed: Address | None = None
        self._is_where_agreed = False
        self._codec = CODECS[0]
        self._payload_type = 0
        self._keys_type: int | None = None
        self._ssrc = secrets.randbits(32)
        self._sequence = secrets.randbits(15)
        self._origin = secrets.randbits(32)
        self._packets = self._octets = 0
        self._is_first = True
        self._name = secrets.token_hex(6)
        self._key_began = 0
        self._keypad = telephone_event.Keypad(SLOT_SAMPLES)
        # Timestamp of the key that is being told to us: each is told several times.
        self._key_at: int | None = None
        self._playhead: Playhead | None = None
        self._reception = rtcp.Reception(RATE)
        # The newest timestamp that came, not wrapped; the last sound, for what is lost after it; when it came.
        self._came = 0
        self._last_sound = np.zeros(SLOT_SAMPLES, np.int16)
        self._heard_at: int | None = None
        self._wall_offset_ns = wall_offset_ns()

    # --- what was agreed

    def connect(self, address: Address, rtcp_address: Address, payload_type: int, keys_type: int | None) -> None:
        """Send there, from now on, in that codec (0 or 8: mu-law, A-law).  May be called again with others."""
        if address != self._agreed:
            self._agreed = self._address = address
            self._rtcp_address = rtcp_address
            self._is_where_agreed = False
        self._payload_type, self._codec = payload_type, CODECS[payload_type]
        self._keys_type = keys_type
        if self.sink.clock is None:
            self.sink.start(self._pacer.join(self._tick))
            assert self.sink.clock is not None
            self._playhead = Playhead(self.sink.clock, 0, estimate_ns=self._ear_delay_ns)

    def expect_round_trip(self, round_trip_ns: int) -> None:
        """How far the other end is by other messages than ours, until its reports tell."""
        if self._playhead is not None and self.quality.round_trip_ns is None:
            self._playhead.rtt_ns = round_trip_ns

    def open(self) -> None:
        """The other end listens: speech may go."""
        self.sink.open()

    def hold(self, *, is_playing: bool) -> None:
        """The other end puts us on hold, and wants no sound; or takes us back."""
        self.sink.hold(is_playing=is_playing)

    # --- the wire

    def receive(self, data: bytes, address: Address) -> None:
        """A packet of sound, or a key, has come."""
        parsed = rtp.parse(data)
        if parsed is None or self._agreed is None:
            return
        payload_type, packet = parsed
        if payload_type not in CODECS and payload_type != self._keys_type:
            return
        if not self._is_theirs(address):
            return
        now = self.last_word_at = self._clock.now()
        self._reception.add(packet, now)
        if payload_type == self._keys_type:
            told = telephone_event.read(packet.payload)
            if told is not None and packet.timestamp != self._key_at:
                self._key_at = packet.timestamp
                self.on_digit(told.key)
            return
        self._came += rtp.distance(self._came % rtp.WRAP, packet.timestamp)
        # The codec is told by each packet; it goes with the sound.
        payload = bytes((payload_type,)) + packet.payload
        self.buffer.push(rtp.Packet(packet.ssrc, packet.sequence_number, self._came * _TICKS % rtp.WRAP, payload), now)
        self._hear(now)

    def receive_rtcp(self, data: bytes, address: Address) -> None:
        """A report has come."""
        report = rtcp.parse(data)
        if report is None or self._playhead is None or self._agreed is None or self._address is None:
            return
        if address[0] not in (self._agreed[0], self._address[0]):
            return
        # Back to where it comes from, as with sound: a telephone names an address that may not be reached.
        self._rtcp_address = address
        now = self.last_word_at = self._clock.now()
        self._reception.heard(report, now)
        if report.buffer_ms is not None and report.buffer_ms < 2_000:
            self._playhead.estimate_ns = report.buffer_ms * MS + DEVICE_NS
        for block in report.blocks:
            if block.ssrc != self._ssrc:
                continue
            round_trip_ns = rtcp.round_trip_ns(block, self._ntp(now))
            missing = (self._sequence - 1 - block.highest) & 0xFFFF
            said = ReceiverReport(
                arrived_ticks=max(0, self.sink.sent_ticks - missing * SLOT_TICKS),
                jitter_ns=min(block.jitter, RATE) * SECOND // RATE,
                rtt_ns=round_trip_ns,
            )
            self._playhead.receiver_report(said, now)
            known = round_trip_ns if round_trip_ns is not None else self.quality.round_trip_ns
            self.quality = Quality(known, said.jitter_ns, block.lost, self._packets)

    def press(self, keys: str) -> None:
        """Send keys (RFC 4733): 0 to 9, *, #, A to D.  Without effect where the other end takes none."""
        if self._keys_type is not None:
            self._keypad.press(keys)

    @property
    def has_keys(self) -> bool:
        """Whether the other end takes keys."""
        return self._keys_type is not None

    @property
    def path_delay_ns(self) -> int:
        if self._playhead is None:
            return self._ear_delay_ns
        return self._playhead.position(self._clock.now(), self.sink.sent_ticks).path_delay_ns

    def close(self) -> None:
        if not self.closed.is_set():
            self._report(self._clock.now(), is_bye=True)
        super().close()

    # ---

    def _tick(self) -> None:
        super()._tick()
        self._hear(self._clock.now())

    def _is_theirs(self, address: Address) -> bool:
        """Whether a packet is from the other end: from where it said, or, while nothing comes from there, from wherever
        the first came; telephones behind a router do not know its address."""
        if address == self._agreed:
            self._is_where_agreed = True
        elif self._is_where_agreed or self._address not in (self._agreed, address):
            return False
        if address != self._address:
            # The port beside it, until a report comes from another (RFC 3550 section 11).
            self._address, self._rtcp_address = address, (address[0], address[1] + 1)
        return True

    def _put(self, slot: Slot) -> None:
        timestamp = rtp.add(self._origin, slot.index * SLOT_SAMPLES)
        key = self._keypad.next() if self._keypad.is_busy else None
        if key is not None and self._keys_type is not None:
            is_new, told = key
            if is_new:
                self._key_began = timestamp
            # The same for all that is said of a key: slots may be missed, and another would be another key.
            self._packet(self._keys_type, self._key_began, telephone_event.written(told), is_marked=is_new)
        samples = self._sound(slot)
        if samples is not None:
            self._packet(self._payload_type, timestamp, self._codec.write(samples), is_marked=self._is_first)
        elif key is None:
            self._packet(self._payload_type, timestamp, SILENCE[self._payload_type], is_marked=self._is_first)
        self._is_first = False
        if slot.index % RTCP_SLOTS == FIRST_RTCP_SLOTS:
            self._report(self._clock.now())

    def _packet(self, payload_type: int, timestamp: int, payload: bytes, *, is_marked: bool) -> None:
        assert self._address is not None
        if self.sink.is_held:
            return
        kind = payload_type | (0x80 if is_marked else 0)
        self._send(_HEADER.pack(0x80, kind, self._sequence, timestamp, self._ssrc) + payload, self._address)
        self._sequence = (self._sequence + 1) & 0xFFFF
        self._packets += 1
        self._octets += len(payload)

    def _report(self, now: int, *, is_bye: bool = False) -> None:
        if self._rtcp_address is None or self.sink.clock is None or self.sink.is_held:
            return
        self._wall_offset_ns = wall_offset_ns()
        data = rtcp.written(
            self._ssrc,
            self._name,
            ntp_time=self._ntp(now),
            timestamp=rtp.add(self._origin, self.sink.clock.ticks_at(now) // _TICKS),
            packets=self._packets,
            octets=self._octets,
            blocks=self._reception.block(now),
            is_bye=is_bye,
        )
        self._send_rtcp(data, self._rtcp_address)

    def _ntp(self, now: int) -> int:
        return rtcp.ntp(now + self._wall_offset_ns)

    def _hear(self, now: int) -> None:
        """Hand on what is in order."""
        for frame in self.buffer.take(now):
            samples = frame.ticks // _TICKS
            match frame.source:
                case Source.PACKET:
                    pcm = self._last_sound = CODECS[frame.payload[0]].decode(frame.payload[1:])
                    self._heard_at = now
                case Source.SILENCE:
                    if self._heard_at is None or now - self._heard_at > SILENT_NS:
                        continue  # Which the caller's voice makes up by itself.
                    pcm = np.zeros(samples, np.int16)
                case _:
                    # What came last, once more and softer: a hole would be a click.
                    again = np.resize(self._last_sound, samples).astype(np.float32)
                    pcm = (again * np.linspace(0.7, 0.0, samples)).astype(np.int16)
            self.caller.hear(pcm, RATE)

    def _ear_ticks(self) -> int:
        if self._playhead is None:
            return 0
        return self._playhead.position(self._clock.now(), self.sink.sent_ticks).ticks


def _ticks_of(payload: bytes) -> int | None:
    """A byte that names the codec, then a byte for each sample."""
    return (len(payload) - 1) * _TICKS if 1 < len(payload) <= MAX_PAYLOAD_BYTES + 1 else None
