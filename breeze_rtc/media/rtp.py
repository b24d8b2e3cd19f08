"""RTP timestamps: 32 bits that wrap (RFC 3550 section 5.1), and the steps from there to positions and samples.

Inside this package a place in the sound of a call is an int of *ticks*: 48 kHz samples since the first slot, never
wrapped.  Timestamps exist only on the wire and in what a listener says.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

RTP_RATE = 48_000
"""Opus has a 48 kHz clock whatever rate went into the encoder (RFC 7587 section 4.1)."""

WRAP = 1 << 32

_HEADER = struct.Struct("!BBHLL")


class Packet(NamedTuple):
    """What the wire says of one packet of sound."""

    ssrc: int
    sequence_number: int
    timestamp: int
    payload: bytes


def parse(data: bytes) -> tuple[int, Packet] | None:
    """A packet's payload type, and the packet (RFC 3550 section 5.1); header extensions are skipped.

    None where it is none.
    """
    if len(data) < _HEADER.size:
        return None
    first, second, sequence_number, timestamp, ssrc = _HEADER.unpack_from(data)
    start, end = _HEADER.size + 4 * (first & 15), len(data)
    if first & 0x10:
        start += 4 + 4 * int.from_bytes(data[start + 2 : start + 4])
    if first & 0x20:
        end -= data[-1]
    if first >> 6 != 2 or start > end:
        return None
    return second & 0x7F, Packet(ssrc, sequence_number, timestamp, data[start:end])


def add(timestamp: int, ticks: int) -> int:
    """The timestamp `ticks` (of either sign) after `timestamp`."""
    return (timestamp + ticks) % WRAP


def distance(earlier: int, later: int) -> int:
    """Signed ticks from `earlier` to `later`, taking the shorter way round: in [-2**31, 2**31)."""
    return (later - earlier + WRAP // 2) % WRAP - WRAP // 2


def unwrap(timestamp: int, near_ticks: int, origin: int) -> int:
    """The ticks since `origin` that `timestamp` stands for, chosen nearest to `near_ticks`.

    Right for 12 hours either side of `near_ticks`; the result is negative for a timestamp from before the origin.
    """
    return near_ticks + distance(add(origin, near_ticks), timestamp)


def unwrap_sequence(sequence: int, near: int) -> int:
    """The count of packets that the 16-bit `sequence` stands for, chosen nearest to `near`."""
    return near + (sequence - near + 32_768) % 65_536 - 32_768


def ticks_of(samples: int, sample_rate: int) -> int:
    """RTP ticks of `samples` at `sample_rate`, a divisor of 48 kHz."""
    assert RTP_RATE % sample_rate == 0, f"{sample_rate} Hz does not divide 48 kHz"
    return samples * (RTP_RATE // sample_rate)


def samples_of(ticks: int, sample_rate: int) -> int:
    """Whole samples at `sample_rate`, a divisor of 48 kHz, that lie before `ticks`."""
    assert RTP_RATE % sample_rate == 0, f"{sample_rate} Hz does not divide 48 kHz"
    return ticks // (RTP_RATE // sample_rate)
