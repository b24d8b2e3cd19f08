from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breeze_rtc.clock import MS, MonotonicClock
from breeze_rtc.errors import PeerError
from breeze_rtc.media.opus import SILENCE_PACKET
from breeze_rtc.playback import PlaybackReport, SpeechPacket
from breeze_rtc.transport.audio_socket import AudioSocketLine, Inbox, Message, message
from breeze_rtc.transport.pacer import Pacer


class Wire:
    """What an `AudioSocketLine` writes to, without a socket."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.waiting = 0

    def write(self, data: bytes) -> None:
        self.pieces.append(data)

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def is_closing(self) -> bool:
        return False

    @property
    def data(self) -> bytes:
        return b"".join(self.pieces)

    @property
    def messages(self) -> list[Message]:
        return Inbox().feed(self.data)


class Hand(Pacer):
    """A pacer that a test turns."""

    def join(self, tick, *, start_ns=None):  # type: ignore[no-untyped-def]
        self.tick = tick
        return self._clock.now()

    def leave(self, tick) -> None:  # type: ignore[no-untyped-def]
        self.tick = lambda: None


class Watch(MonotonicClock):
    at = 0

    def now(self) -> int:
        return self.at


def line() -> tuple[AudioSocketLine, Wire, Watch, list[PlaybackReport]]:
    clock, wire = Watch(), Wire()
    pacer = Hand(clock)
    reports: list[PlaybackReport] = []
    made = AudioSocketLine(wire, clock=clock, pacer=pacer, on_report=reports.append)  # type: ignore[arg-type]
    return made, wire, clock, reports


def turn(made: AudioSocketLine, clock: Watch, ms: int) -> None:
    for _ in range(ms // 20):
        clock.at += 20 * MS
        made._pacer.tick()  # type: ignore[attr-defined]


@given(st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=300)), max_size=20), st.data())
def test_messages_come_out_whole_however_they_are_cut(items: list[tuple[int, bytes]], data: st.DataObject) -> None:
    raw = b"".join(message(kind, payload) for kind, payload in items)
    inbox, out, at = Inbox(), [], 0
    while at < len(raw):
        size = data.draw(st.integers(1, 400))
        out += inbox.feed(raw[at : at + size])
        at += size
    assert out == [Message(kind, payload) for kind, payload in items]


def test_silence_leaves_from_the_first_moment_each_twenty_milliseconds() -> None:
    """Reproduction 51 (asterisk#2089): a peer that sends nothing at first starves the call, or loses it."""
    made, wire, clock, _ = line()
    turn(made, clock, 2_000)
    assert 100 <= len(wire.messages) <= 101
    assert set(wire.messages) == {Message(0x10, bytes(320))}
    assert struct.unpack(">BH", wire.data[:3]) == (0x10, 320)


def test_ten_minutes_of_late_ticks_do_not_drift() -> None:
    """Reproduction 20 (openclaw#119070): timers of 20 ms that drift.  Each tick comes 0.7 ms late: what was sent is
    what has passed, to one frame."""
    made, wire, clock, _ = line()
    for number in range(1, 30_001):
        clock.at = number * 20 * MS + 700_000
        made._pacer.tick()  # type: ignore[attr-defined]
    assert abs(len(wire.pieces) - 30_000) <= 1


def test_speech_is_heard_a_line_later_and_a_clear_ends_it_at_once() -> None:
    made, _, clock, reports = line()
    made.sink.write(1, tuple(SpeechPacket(480 * k, SILENCE_PACKET) for k in range(100)))
    turn(made, clock, 1_000)
    position = made.position(1)
    assert not position.is_measured
    assert abs(position.heard_samples - (1_000 - made.path_delay_ns // MS) * 24) <= 40 * 24
    assert position.dry_at_ns is not None
    assert reports
    unheard = made.sink.clear(1)
    assert unheard == 100 * 480 - position.heard_samples
    sent = made.sink.sent_ticks
    turn(made, clock, 1_000)
    assert made.position(1).heard_samples <= sent // 2
    assert made.sink.is_sent(1)


def test_a_pause_is_silent_at_once_and_goes_on_with_the_next_packet() -> None:
    """What has left will be heard, for nothing can call it back; nothing is said twice."""
    made, _, clock, _ = line()
    made.sink.write(1, tuple(SpeechPacket(480 * k, SILENCE_PACKET) for k in range(100)))
    turn(made, clock, 1_000)
    made.pause()
    queued = made.sink.queued_packets
    left = (100 - queued) * 480
    turn(made, clock, 500)
    assert not made.position(1).is_playing
    assert made.position(1).heard_samples == left
    made.resume()
    assert made.sink.queued_packets == queued
    turn(made, clock, 500)
    assert made.position(1).heard_samples > left


def test_keys_the_calls_name_and_its_end_are_understood() -> None:
    clock, wire = Watch(), Wire()
    keys: list[str] = []
    made = AudioSocketLine(
        wire,  # type: ignore[arg-type]
        clock=clock,
        pacer=Hand(clock),
        on_report=lambda report: None,
    )
    made.on_digit = keys.append
    made.receive(message(0x01, bytes(range(16))) + message(0x03, b"7") + message(0x03, b"\xf0") + message(0x42))
    assert made.call == "00010203-0405-0607-0809-0a0b0c0d0e0f"
    assert keys == ["7"]
    assert made.unknown == 2
    made.receive(message(0x00))
    assert made.closed.is_set()


def test_an_error_of_asterisk_is_raised() -> None:
    made, *_ = line()
    with pytest.raises(PeerError, match="02"):
        made.receive(message(0xFF, b"\x02"))


def test_a_peer_that_takes_nothing_is_given_up() -> None:
    made, wire, clock, _ = line()
    wire.waiting = 20_000
    turn(made, clock, 40)
    assert made.closed.is_set()


def test_sound_at_another_rate_is_read_by_what_its_type_says() -> None:
    """One second at 16 kHz is 31 blocks of 32 ms, at 8 kHz too."""
    for kind, size in ((0x12, 640), (0x10, 320)):
        made, *_ = line()
        for _ in range(50):
            made.receive(message(kind, bytes(size)))
        assert 30 <= len(made.caller._blocks) <= 31
