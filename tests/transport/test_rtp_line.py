"""A telephone line over RTP, in virtual time: what leaves, what is heard, and where the ear is believed to be."""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from breeze_rtc.clock import MS, SECOND, VirtualClock
from breeze_rtc.media import rtcp, rtp, telephone_event
from breeze_rtc.media.line_codec import LineCodec
from breeze_rtc.media.opus import SpeechEncoder
from breeze_rtc.playback import PlaybackReport, SpeechPacket
from breeze_rtc.transport.far_buffer import EAR_DELAY_NS
from breeze_rtc.transport.rtp_line import DEVICE_NS, RtpLine

PHONE, PHONE_RTCP = ("192.0.2.1", 6_000), ("192.0.2.1", 6_001)
MULAW = LineCodec("PCMU")


class Ticker:
    """A pacer whose moments are called by hand."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.tick: Callable[[], None] = lambda: None

    def join(self, tick: Callable[[], None]) -> int:
        self.tick = tick
        return self._clock.now()

    def leave(self, tick: Callable[[], None]) -> None:
        self.tick = lambda: None


class Wire:
    """A line, its wire, and the telephone at the other end."""

    def __init__(self, *, payload_type: int = 0, keys: int | None = 101) -> None:
        self.clock = VirtualClock(SECOND)
        self.ticker = Ticker(self.clock)
        self.sent: list[tuple[int, rtp.Packet, tuple[str, int]]] = []
        self.reports: list[rtcp.Report] = []
        self.rtcp_to: list[tuple[str, int]] = []
        self.told: list[PlaybackReport] = []
        self.pressed: list[str] = []
        self.line = RtpLine(
            clock=self.clock,
            pacer=self.ticker,  # type: ignore[arg-type]
            on_report=self.told.append,
            send=self._send,
            send_rtcp=self._send_rtcp,
        )
        self.line.on_digit = self.pressed.append
        self.line.connect(PHONE, PHONE_RTCP, payload_type, keys)

    def _send(self, data: bytes, to: tuple[str, int]) -> None:
        parsed = rtp.parse(data)
        assert parsed is not None
        self.sent.append((*parsed, to))

    def _send_rtcp(self, data: bytes, to: tuple[str, int]) -> None:
        report = rtcp.parse(data)
        assert report is not None
        self.reports.append(report)
        self.rtcp_to.append(to)

    def run(self, ms: int) -> None:
        for _ in range(ms // 20):
            self.ticker.tick()
            self.clock.advance(20 * MS)

    def hears(
        self, number: int, payload: bytes, *, kind: int = 0, at: Any = PHONE, timestamp: int | None = None
    ) -> None:
        timestamp = rtp.add(2**32 - 1_000, 160 * number) if timestamp is None else timestamp
        header = struct.pack("!BBHLL", 0x80, kind, (65_530 + number) % 65_536, timestamp, 9)
        self.line.receive(header + payload, at)

    def reported(self, **fields: Any) -> None:
        """The telephone's report on our sound."""
        last = self.sent[-1][1]
        block = rtcp.Block(last.ssrc, 0.0, fields.get("lost", 0), last.sequence_number, fields.get("jitter", 0), 0, 0)
        if "delay_ns" in fields:
            ours = self.reports[-1].sent_ntp
            assert ours is not None
            block = block._replace(last_report=ours, delay=fields["delay_ns"] * 65_536 // SECOND)
        data = rtcp.written(9, "x", ntp_time=1 << 40, timestamp=0, packets=0, octets=0, blocks=(block,))
        self.line.receive_rtcp(data, fields.get("at", PHONE_RTCP))

    def heard(self) -> np.ndarray:
        return np.concatenate([np.zeros(0, np.float32), *self.line.caller._blocks])


def speech(packets: int) -> tuple[SpeechPacket, ...]:
    tone = (0.3 * 32_767 * np.sin(2 * np.pi * 500 * np.arange(480 * packets) / 24_000)).astype(np.int16)
    return tuple(SpeechEncoder(24_000).encode(tone))


def test_one_packet_leaves_each_20_ms_and_timestamps_never_skip() -> None:
    """Silence too, in the line's own code; a stall is a gap in the timestamps, not in the numbers.

    Reproduction 31 (KVS-WebRTC#1607), on a telephone line.
    """
    wire = Wire(payload_type=8, keys=None)
    wire.run(100)
    wire.clock.advance(200 * MS)
    wire.run(100)
    kinds, packets, to = zip(*wire.sent, strict=True)
    assert set(kinds) == {8}
    assert set(to) == {PHONE}
    assert {packet.payload for packet in packets} == {160 * b"\xd5"}
    numbers = [rtp.unwrap_sequence(packet.sequence_number, packets[0].sequence_number) for packet in packets]
    assert numbers == list(range(numbers[0], numbers[0] + 10))
    steps = [rtp.distance(one.timestamp, other.timestamp) for one, other in pairwise(packets)]
    assert steps == [160] * 4 + [11 * 160] + [160] * 4


def test_speech_leaves_in_its_slots_and_is_the_sound_that_was_written() -> None:
    wire = Wire()
    wire.line.open()
    wire.line.sink.write(1, speech(50))
    wire.line.sink.end(1)
    wire.run(1_200)
    sound = np.concatenate([MULAW.decode(packet.payload) for _, packet, _ in wire.sent[:50]]).astype(float)
    spectrum = np.abs(np.fft.rfft(sound))
    assert abs(np.argmax(spectrum) * 8_000 / len(sound) - 500) < 2
    assert {packet.payload for _, packet, _ in wire.sent[50:]} == {160 * b"\xff"}


def test_nothing_is_said_before_the_other_end_listens() -> None:
    wire = Wire()
    wire.line.sink.write(1, speech(5))
    wire.run(100)
    assert {packet.payload for _, packet, _ in wire.sent} == {160 * b"\xff"}
    wire.line.open()
    wire.run(40)
    assert wire.sent[-1][1].payload != 160 * b"\xff"


def test_what_was_sent_is_heard_after_the_path_and_a_pause_holds_the_rest() -> None:
    """A barge-in: what has left is heard, what has not is still here."""
    wire = Wire()
    wire.line.open()
    wire.line.sink.write(1, speech(100))
    wire.run(1_000)
    delay_ns = wire.line.path_delay_ns
    assert abs(delay_ns - EAR_DELAY_NS) < 10 * MS
    assert abs(wire.line.position(1).heard_samples - 24 * (1_000 - delay_ns // MS)) <= 480
    wire.line.pause()
    wire.run(400)
    assert wire.line.position(1).heard_samples == 24_000
    assert not wire.line.position(1).is_playing
    assert wire.sent[-1][1].payload == 160 * b"\xff"
    assert wire.line.sink.clear(1) == 50 * 480
    assert all(not report.is_measured for report in wire.told)


def test_reports_of_the_telephone_move_the_ear() -> None:
    """The round trip counts half, the unevenness of arrival whole."""
    wire = Wire()
    wire.run(1_100)
    assert wire.reports[0].sent_ntp is not None
    before_ns = wire.line.path_delay_ns
    wire.clock.advance(200 * MS)
    wire.reported(delay_ns=100 * MS, jitter=80, lost=3)
    # 100 ms since the report and 200 more, of which the telephone kept it for 100.
    assert abs(wire.line.path_delay_ns - before_ns - (200 * MS // 2 + 10 * MS)) < 2 * MS
    assert wire.line.quality.round_trip_ns is not None
    assert abs(wire.line.quality.round_trip_ns - 200 * MS) < MS
    assert (wire.line.quality.lost, wire.line.quality.sent) == (3, 55)


def test_the_way_is_believed_as_long_as_signalling_took_until_a_report_tells() -> None:
    wire = Wire()
    wire.run(1_100)
    before_ns = wire.line.path_delay_ns
    wire.line.expect_round_trip(300 * MS)
    assert wire.line.path_delay_ns - before_ns == 150 * MS
    wire.clock.advance(100 * MS)
    wire.reported(delay_ns=160 * MS)
    wire.line.expect_round_trip(300 * MS)
    assert abs(wire.line.path_delay_ns - before_ns - 20 * MS) < 2 * MS


def test_reports_go_back_to_where_the_telephone_s_come_from() -> None:
    """Its session description may name an address that cannot be reached; sound finds its way, and so do reports, or
    there never is a round trip.  A stranger's port leads nowhere."""
    wire = Wire()
    wire.run(1_100)
    assert wire.rtcp_to == [PHONE_RTCP]
    wire.hears(0, 160 * b"\xff", at=("198.51.100.7", 40_000))
    wire.run(5_000)
    assert wire.rtcp_to[1:] == [("198.51.100.7", 40_001)], "the port beside that of sound, until it is told"
    wire.reported(delay_ns=0, at=("198.51.100.7", 40_007))
    wire.reported(delay_ns=0, at=("203.0.113.9", 40_001))
    wire.run(5_000)
    assert wire.rtcp_to[2:] == [("198.51.100.7", 40_007)]


def test_a_telephone_that_tells_its_buffer_is_believed() -> None:
    wire = Wire()
    wire.run(100)
    before_ns = wire.line.path_delay_ns
    metrics = bytearray(32)
    metrics[26:28] = (200).to_bytes(2)
    body = (9).to_bytes(4) + bytes((7, 0, 0, 8)) + bytes(metrics)
    wire.line.receive_rtcp(bytes((0x80, 207)) + (len(body) // 4).to_bytes(2) + body, PHONE_RTCP)
    assert wire.line.path_delay_ns - before_ns == 200 * MS + DEVICE_NS - EAR_DELAY_NS


def test_strangers_move_nothing() -> None:
    """Neither sound nor reports from another address, once the telephone was heard from where it said it is."""
    wire = Wire()
    wire.run(100)
    wire.hears(0, 160 * b"\x80")
    wire.hears(1, 160 * b"\x80", at=("192.0.2.66", 6_000))
    wire.run(20)
    assert wire.sent[-1][2] == PHONE
    assert len(wire.heard()) <= 512
    before_ns = wire.line.path_delay_ns
    wire.reported(jitter=4_000, at=("192.0.2.66", 6_001))
    assert wire.line.path_delay_ns == before_ns


def test_a_telephone_behind_a_router_is_sent_sound_where_its_own_comes_from() -> None:
    wire = Wire()
    wire.run(40)
    router, other = ("198.51.100.7", 41_000), ("192.0.2.66", 6_000)
    wire.hears(0, 160 * b"\x80", at=router)
    wire.hears(1, 160 * b"\x80", at=other)
    wire.run(40)
    assert wire.sent[-1][2] == router
    wire.hears(2, 160 * b"\x80")  # From where it said, after all.
    wire.run(40)
    assert wire.sent[-1][2] == PHONE


def test_the_callers_voice_is_in_order_and_counts_time() -> None:
    """Packets swapped, twice, lost: as long as it was said, the tone keeps its pitch, and a hole is no click."""
    wire = Wire()
    tone = (0.3 * np.sin(2 * np.pi * 400 * np.arange(160 * 100) / 8_000)).astype(np.float32)
    order = [*range(10), 11, 10, *range(12, 30), 29, *range(31, 100)]
    for place, number in enumerate(order):
        wire.hears(number, MULAW.encode(tone[160 * number : 160 * number + 160]))
        if place % 2:
            wire.run(20)
            wire.run(20)
    wire.run(200)
    heard = wire.heard()[: 320 * 95]
    assert len(heard) == 320 * 95
    assert abs(np.argmax(np.abs(np.fft.rfft(heard))) * 16_000 / len(heard) - 400) < 3
    assert np.abs(np.diff(heard)).max() < 0.3
    assert wire.line.buffer.tally.concealed_ticks == 960


def test_an_a_law_packet_in_a_mu_law_call_is_read_as_what_it_says() -> None:
    wire = Wire()
    tone = (0.3 * np.sin(2 * np.pi * 400 * np.arange(160 * 20) / 8_000)).astype(np.float32)
    alaw = LineCodec("PCMA")
    for number in range(20):
        wire.hears(number, alaw.encode(tone[160 * number : 160 * number + 160]), kind=8)
        wire.run(20)
    heard = wire.heard()[1_000:5_000]
    assert abs(np.abs(heard).max() - 0.3) < 0.03


def test_each_key_is_told_once_however_often_it_comes() -> None:
    wire = Wire()
    number = 0
    for key, timestamp in (("5", 1_000), ("5", 3_000), ("#", 2**32 - 5)):
        for duration in (160, 320, 480, 480, 480):
            told = telephone_event.Told(key, duration == 480, duration)
            wire.hears(number, telephone_event.written(told), kind=101, timestamp=timestamp)
            number += 1
    wire.hears(number, bytes((32, 0, 0, 160)), kind=101, timestamp=9_000)
    assert wire.pressed == ["5", "5", "#"]


def test_keys_leave_beside_speech_and_in_the_place_of_silence() -> None:
    wire = Wire()
    wire.line.open()
    wire.line.sink.write(1, speech(4))
    wire.line.sink.end(1)
    wire.line.press("7")
    wire.run(40)
    wire.clock.advance(100 * MS)  # A stall in the middle of the key.
    wire.run(360)
    keys = [packet for kind, packet, _ in wire.sent if kind == 101]
    told = [telephone_event.read(packet.payload) for packet in keys]
    assert [item and item.duration for item in told] == [160, 320, 480, 640, 800, 800, 800, 800]
    assert [item and item.is_end for item in told] == [False] * 5 + [True] * 3
    assert len({packet.timestamp for packet in keys}) == 1
    sound = [packet for kind, packet, _ in wire.sent if kind == 0]
    assert len(sound) == 20 - 4  # Four slots of the key were silent.
    assert {packet.payload for packet in sound[4:]} == {160 * b"\xff"}
    numbers = [packet.sequence_number for _, packet, _ in wire.sent]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def test_a_line_on_hold_gets_no_sound_and_its_speech_waits() -> None:
    wire = Wire()
    wire.line.open()
    wire.line.sink.write(1, speech(100))
    wire.run(400)
    wire.line.hold(is_playing=False)
    count = len(wire.sent)
    wire.run(1_000)
    assert len(wire.sent) == count
    assert not wire.line.position(1).is_playing
    held = wire.line.position(1).heard_samples
    assert held <= 24 * 400
    wire.line.hold(is_playing=True)
    wire.run(3_000)
    assert wire.line.position(1).heard_samples == 48_000


def test_the_last_report_is_a_goodbye() -> None:
    wire = Wire()
    wire.run(100)
    wire.line.close()
    wire.line.close()
    assert [report.is_bye for report in wire.reports] == [True]
    assert wire.rtcp_to == [PHONE_RTCP]
    count = len(wire.sent)
    wire.run(100)
    assert len(wire.sent) == count


@pytest.mark.parametrize(
    "data", [b"", b"\x80", b"\x80\x00" + bytes(6), bytes(12), b"\x80\x00" + bytes(10), b"\x80\x60" + bytes(200)]
)
def test_noise_on_the_wire_is_nothing(data: bytes) -> None:
    wire = Wire()
    wire.line.receive(data, PHONE)
    wire.line.receive_rtcp(data, PHONE_RTCP)
    wire.run(40)
    assert len(wire.heard()) == 0
