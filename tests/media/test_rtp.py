"""RTP timestamp arithmetic."""

from __future__ import annotations

import pytest
from aiortc.rtcrtpparameters import RTCRtpHeaderExtensionParameters, RTCRtpParameters
from aiortc.rtp import HeaderExtensionsMap, RtpPacket
from hypothesis import given
from hypothesis import strategies as st

from breeze_rtc.media import rtp

timestamps = st.integers(0, rtp.WRAP - 1)


@pytest.mark.parametrize(
    ("earlier", "later", "ticks"),
    [
        (0, 960, 960),
        (960, 0, -960),
        (rtp.WRAP - 960, 0, 960),
        (0, rtp.WRAP - 960, -960),
        (rtp.WRAP - 1, 959, 960),
        (0, rtp.WRAP // 2, -rtp.WRAP // 2),
    ],
)
def test_distance_takes_the_shorter_way_round(earlier: int, later: int, ticks: int) -> None:
    """Half the circle either way, the wrap included."""
    assert rtp.distance(earlier, later) == ticks


@given(timestamps, st.integers(-(rtp.WRAP // 2), rtp.WRAP // 2 - 1))
def test_distance_undoes_add(timestamp: int, ticks: int) -> None:
    """A step of up to half the circle is found again from its two ends."""
    moved = rtp.add(timestamp, ticks)
    assert 0 <= moved < rtp.WRAP
    assert rtp.distance(timestamp, moved) == ticks


@given(timestamps, st.integers(0, 1 << 40), st.integers(-(1 << 20), 1 << 20))
def test_unwrap_finds_the_ticks_again(origin: int, ticks: int, off: int) -> None:
    """However often the timestamp has wrapped, a guess within hours is enough."""
    assert rtp.unwrap(rtp.add(origin, ticks), ticks + off, origin) == ticks


@given(st.integers(0, 1 << 40), st.sampled_from([8_000, 16_000, 24_000, 48_000]))
def test_samples_survive_the_way_to_ticks_and_back(samples: int, sample_rate: int) -> None:
    """Rates that divide 48 kHz lose nothing."""
    assert rtp.samples_of(rtp.ticks_of(samples, sample_rate), sample_rate) == samples


def test_a_started_sample_does_not_count() -> None:
    """Ticks in the middle of a sample round down."""
    assert rtp.samples_of(959, 24_000) == 479


def test_a_rate_that_does_not_divide_the_clock_is_refused() -> None:
    """44.1 kHz has no whole number of ticks."""
    with pytest.raises(AssertionError):
        rtp.ticks_of(1, 44_100)


def test_a_packet_is_read_as_aiortc_writes_it() -> None:
    """With contributors, header extensions and padding."""
    packet = RtpPacket(payload_type=96, marker=1, sequence_number=65_535, timestamp=2**32 - 1, ssrc=7, payload=b"sound")
    assert rtp.parse(packet.serialize()) == (96, rtp.Packet(7, 65_535, 2**32 - 1, b"sound"))
    packet.csrc, packet.padding_size = [1, 2, 3], 4
    extended = HeaderExtensionsMap()
    mid = RTCRtpHeaderExtensionParameters(1, "urn:ietf:params:rtp-hdrext:sdes:mid")
    extended.configure(RTCRtpParameters(headerExtensions=[mid]))
    packet.extensions.mid = "audio"
    data = packet.serialize(extended)
    assert len(data) > 12 + 12 + 5 + 4
    assert rtp.parse(data) == (96, rtp.Packet(7, 65_535, 2**32 - 1, b"sound"))


@given(st.binary(max_size=64))
def test_no_bytes_make_the_parser_raise(data: bytes) -> None:
    """What it takes has a version and a payload that lies inside."""
    parsed = rtp.parse(data)
    if parsed is not None:
        assert data[0] >> 6 == 2
        assert parsed[1].payload in data


@given(st.integers(0, 10**9), st.integers(-32_768, 32_767))
def test_sequences_are_unwrapped_to_the_nearest(near: int, steps: int) -> None:
    """The nearest count that has these 16 bits."""
    assert rtp.unwrap_sequence((near + steps) % 65_536, near) == near + steps
