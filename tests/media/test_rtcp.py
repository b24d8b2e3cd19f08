"""RTCP: what is written is read, what strangers send is read or not, and what is told is what happened."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breeze_rtc.clock import MS, SECOND
from breeze_rtc.media import rtcp, rtp

WALL = 1_700_000_000 * SECOND


def written(*blocks: rtcp.Block, is_bye: bool = False) -> bytes:
    now = rtcp.ntp(WALL)
    return rtcp.written(7, "name", ntp_time=now, timestamp=5, packets=9, octets=99, blocks=blocks, is_bye=is_bye)


def test_what_is_written_is_read() -> None:
    block = rtcp.Block(3, 0.25, 17, 70_000, 80, 0x12345678, 65_536)
    report = rtcp.parse(written(block, is_bye=True))
    assert report == rtcp.Report(rtcp.middle(rtcp.ntp(WALL)), (block,), None, True)
    assert rtcp.parse(written()) == rtcp.Report(rtcp.middle(rtcp.ntp(WALL)), (), None, False)


def test_the_words_are_where_the_rfc_has_them() -> None:
    """RFC 3550 section 6.4.1, field by field."""
    data = written(rtcp.Block(3, 0.5, -2, 70_000, 80, 1, 2))
    version, kind, words, ssrc, ntp, timestamp, packets, octets = struct.unpack_from("!BBHLQLLL", data)
    assert (version, kind, words, ssrc) == (0x81, 200, 12, 7)
    assert (ntp >> 32, timestamp, packets, octets) == (1_700_000_000 + 2_208_988_800, 5, 9, 99)
    assert struct.unpack_from("!LB3sLLLL", data, 28) == (3, 128, b"\xff\xff\xfe", 70_000, 80, 1, 2)
    assert data[52:] == b"\x81\xca\x00\x03\x00\x00\x00\x07\x01\x04name\x00\x00"


def test_a_telephone_that_tells_how_deep_its_buffer_is() -> None:
    """RFC 3611 section 4.7: VoIP metrics, behind a block of another kind."""
    metrics = bytearray(32)
    metrics[26:28] = (90).to_bytes(2)
    other = bytes((4, 0, 0, 2)) + bytes(8)
    body = (1).to_bytes(4) + other + bytes((7, 0, 0, 8)) + bytes(metrics)
    extended = bytes((0x80, 207)) + (len(body) // 4).to_bytes(2) + body
    report = rtcp.parse(written() + extended)
    assert report is not None
    assert report.buffer_ms == 90


@given(st.binary(max_size=80), st.integers(0, 80))
def test_what_strangers_send_is_read_or_is_none(noise: bytes, at: int) -> None:
    whole = written(rtcp.Block(3, 0.25, 17, 70_000, 80, 1, 2), is_bye=True)
    for data in (noise, whole[:at] + noise + whole[at:], whole[:at]):
        rtcp.parse(data)
    assert rtcp.parse(b"") is None


def test_what_came_is_told_as_it_came() -> None:
    """Every tenth packet of two hundred is lost, the others come 0 or 10 ms late: over the round of the numbers."""
    reception = rtcp.Reception(8_000)
    now = 0
    for number in range(200):
        if number % 10 == 9:
            continue
        now = number * 20 * MS + (10 * MS if number % 2 else 0)
        reception.add(rtp.Packet(5, (65_500 + number) % 65_536, rtp.add(2**32 - 1_000, 160 * number), b""), now)
    (block,) = reception.block(now)
    assert (block.ssrc, block.lost, block.highest) == (5, 19, 65_500 + 198)
    assert abs(block.fraction_lost - 0.1) < 0.01
    assert abs(block.jitter - 75) < 12  # 10 ms are 80 samples, between nine of ten.
    (again,) = reception.block(now)
    assert (again.fraction_lost, again.lost) == (0.0, 19)
    assert rtcp.Reception(8_000).block(0) == ()


def test_another_source_begins_anew() -> None:
    reception = rtcp.Reception(8_000)
    reception.add(rtp.Packet(5, 1, 0, b""), 0)
    reception.add(rtp.Packet(5, 100, 0, b""), 0)
    reception.add(rtp.Packet(6, 7, 0, b""), 0)
    assert reception.block(0)[0][:4] == (6, 0.0, 0, 7)


@pytest.mark.parametrize(("there_ms", "waits_ms", "back_ms"), [(20, 300, 25), (0, 0, 0), (900, 5_000, 900)])
def test_the_round_trip_is_what_is_left_of_the_time_when_the_other_ends_share_is_gone(
    there_ms: int, waits_ms: int, back_ms: int
) -> None:
    """Two ends, each with its own clock: what one says of the other's report."""
    ours = rtcp.parse(written())
    assert ours is not None
    far = rtcp.Reception(8_000)
    far.add(rtp.Packet(7, 1, 0, b""), 0)
    far.heard(ours, there_ms * MS)
    (block,) = far.block((there_ms + waits_ms) * MS)
    came = WALL + (there_ms + waits_ms + back_ms) * MS
    measured_ns = rtcp.round_trip_ns(block, rtcp.ntp(came))
    assert measured_ns is not None
    assert abs(measured_ns - (there_ms + back_ms) * MS) < MS


def test_a_round_trip_that_cannot_be_is_none() -> None:
    assert rtcp.round_trip_ns(rtcp.Block(1, 0, 0, 0, 0, 0, 0), rtcp.ntp(WALL)) is None
    now = rtcp.ntp(WALL)
    assert rtcp.round_trip_ns(rtcp.Block(1, 0, 0, 0, 0, rtcp.middle(now), 65_536), now) is None
    assert rtcp.round_trip_ns(rtcp.Block(1, 0, 0, 0, 0, rtcp.middle(now) - 11 * 65_536, 0), now) is None
