"""RTCP: what both ends of a stream tell each other about it (RFC 3550 section 6.4), and how deep a telephone's own
buffer is (RFC 3611 section 4.7)."""

from __future__ import annotations

import struct
from typing import NamedTuple

from breeze_rtc.clock import MS, SECOND
from breeze_rtc.media import rtp

SENDER, RECEIVER, SOURCE, BYE, EXTENDED = 200, 201, 202, 203, 207

_HEADER = struct.Struct("!BBH")
_BLOCK = struct.Struct("!L4s4L")
_SENDER_INFO = struct.Struct("!QLLL")
_NTP_EPOCH_NS = 2_208_988_800 * SECOND
"""From 1900 to 1970."""


class Block(NamedTuple):
    """What a receiver says of one source."""

    ssrc: int
    fraction_lost: float
    """Since its report before, 0 to 1."""
    lost: int
    """Since the beginning; negative where more came than were expected."""
    highest: int
    """The newest sequence number, with the count of its rounds above it."""
    jitter: int
    """In the stream's own clock."""
    last_report: int
    """The middle of the NTP time of the newest sender report; 0: none has come."""
    delay: int
    """Since that came, in 1/65536 s."""


class Report(NamedTuple):
    """One compound packet."""

    sent_ntp: int | None
    """The middle of the NTP time that it was sent at; None where its sender sends no sound."""
    blocks: tuple[Block, ...]
    buffer_ms: int | None
    """How deep the jitter buffer is, where the other end tells (extended reports)."""
    is_bye: bool


def ntp(wall_ns: int) -> int:
    """Nanoseconds since 1970 as NTP writes time: seconds since 1900, 32.32."""
    return ((wall_ns + _NTP_EPOCH_NS) << 32) // SECOND


def middle(ntp_time: int) -> int:
    return ntp_time >> 16 & 0xFFFF_FFFF


def parse(data: bytes) -> Report | None:
    """None for what is no RTCP."""
    sent_ntp: int | None = None
    blocks: list[Block] = []
    buffer_ms: int | None = None
    is_bye = False
    at = 0
    while at + _HEADER.size <= len(data):
        first, kind, words = _HEADER.unpack_from(data, at)
        body = data[at + 4 : at + 4 * (words + 1)]
        if first >> 6 != 2 or len(body) != 4 * words:
            return None
        if kind in (SENDER, RECEIVER) and len(body) >= 4:
            start = 4
            if kind == SENDER:
                if len(body) < 24:
                    return None
                sent_ntp = middle(_SENDER_INFO.unpack_from(body, 4)[0])
                start = 24
            for number in range(first & 31):
                if start + 24 * (number + 1) > len(body):
                    return None
                ssrc, loss, highest, jitter, last, delay = _BLOCK.unpack_from(body, start + 24 * number)
                lost = int.from_bytes(loss[1:], signed=True)
                blocks.append(Block(ssrc, loss[0] / 256, lost, highest, jitter, last, delay))
        elif kind == EXTENDED:
            buffer_ms = _buffer_ms(body[4:])
        elif kind == BYE:
            is_bye = True
        at += 4 * (words + 1)
    return Report(sent_ntp, tuple(blocks), buffer_ms, is_bye) if at and at == len(data) else None


def _buffer_ms(blocks: bytes) -> int | None:
    at = 0
    while at + 4 <= len(blocks):
        kind, _, words = _HEADER.unpack_from(blocks, at)
        if kind == 7 and words == 8 and at + 36 <= len(blocks):
            return int.from_bytes(blocks[at + 30 : at + 32])
        at += 4 * (words + 1)
    return None


def written(
    ssrc: int,
    name: str,
    *,
    ntp_time: int,
    timestamp: int,
    packets: int,
    octets: int,
    blocks: tuple[Block, ...] = (),
    is_bye: bool = False,
) -> bytes:
    """A sender report with `blocks`, our name, and a goodbye where it is the last.  timestamp: that of `ntp_time`."""
    said = _SENDER_INFO.pack(ntp_time, timestamp, packets & 0xFFFF_FFFF, octets & 0xFFFF_FFFF)
    for block in blocks:
        lost = max(-(1 << 23), min(block.lost, (1 << 23) - 1)).to_bytes(3, signed=True)
        loss = bytes((min(255, round(256 * block.fraction_lost)),)) + lost
        said += _BLOCK.pack(block.ssrc, loss, block.highest, block.jitter, block.last_report, block.delay)
    report = _packet(SENDER, len(blocks), ssrc, said)
    item = b"\x01" + bytes((len(name),)) + name.encode("ascii")
    source = _packet(SOURCE, 1, ssrc, item + bytes(4 - len(item) % 4))
    return report + source + (_packet(BYE, 1, ssrc, b"") if is_bye else b"")


def _packet(kind: int, count: int, ssrc: int, body: bytes) -> bytes:
    return _HEADER.pack(0x80 | count, kind, 1 + len(body) // 4) + ssrc.to_bytes(4) + body


class Reception:
    """What has come of one stream, for our reports of it (RFC 3550 appendices A.1, A.3 and A.8)."""

    def __init__(self, sample_rate: int) -> None:
        self._rate = sample_rate
        self._ssrc: int | None = None
        self._first = self._highest = 0
        self._came = self._came_before = self._expected_before = 0
        # Arrival less timestamp of the last packet, and how much that varies, in samples; times 16.
        self._transit: int | None = None
        self._jitter = 0
        # The sender's last report, and when it came.
        self._last_report = 0
        self._last_report_at = 0

    def add(self, packet: rtp.Packet, now: int) -> None:
        """A packet has come."""
        if packet.ssrc != self._ssrc:
            self.__init__(self._rate)  # type: ignore[misc]
            self._ssrc = packet.ssrc
            self._first = self._highest = packet.sequence_number
        self._highest = max(self._highest, rtp.unwrap_sequence(packet.sequence_number, self._highest))
        self._came += 1
        transit = now * self._rate // SECOND - packet.timestamp
        if self._transit is not None:
            change = abs(rtp.distance(self._transit % rtp.WRAP, transit % rtp.WRAP))
            self._jitter += change - (self._jitter + 8 >> 4)
        self._transit = transit

    def heard(self, report: Report, now: int) -> None:
        """The sender's report has come."""
        if report.sent_ntp is not None:
            self._last_report, self._last_report_at = report.sent_ntp, now

    def block(self, now: int) -> tuple[Block, ...]:
        """What to say of it; nothing before the first packet."""
        if self._ssrc is None:
            return ()
        expected = self._highest - self._first + 1
        since, came = expected - self._expected_before, self._came - self._came_before
        self._expected_before, self._came_before = expected, self._came
        fraction = max(0.0, (since - came) / since) if since > 0 else 0.0
        delay = (now - self._last_report_at) * 65_536 // SECOND if self._last_report else 0
        highest = self._highest & 0xFFFF_FFFF
        lost = expected - self._came
        return (Block(self._ssrc, fraction, lost, highest, self._jitter >> 4, self._last_report, delay),)


def round_trip_ns(block: Block, ntp_now: int) -> int | None:
    """To the other end and back, by its word on our last report; None where it has none, or cannot be."""
    if not block.last_report:
        return None
    ticks = (middle(ntp_now) - block.last_report - block.delay) & 0xFFFF_FFFF
    if ticks >= 1 << 31:  # Less than nothing: clocks are read in 1/65536 s.
        return 0 if (1 << 32) - ticks < 65_536 * MS // SECOND * 2 else None
    return ticks * SECOND // 65_536 if ticks < 10 * 65_536 else None
