"""Packets as networks bring them, against the sound that comes out."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from breeze_rtc.clock import MS, SECOND
from breeze_rtc.media.rtp import Packet
from breeze_rtc.transport.jitter_buffer import (
    MAX_WAITING,
    PATIENCE_NS,
    PAUSE_LAG_NS,
    STALL_NS,
    Frame,
    JitterBuffer,
    Source,
)

START = 1_000 * SECOND
SPEECH = bytes([0x48, 0x00, 0x55])
"""20 ms of SILK in wide band, no redundancy."""
SPEECH_FEC = bytes([0x48, 0x40, 0x55])
PAUSE = bytes([0x48])
P, F, C, S = Source.PACKET, Source.FEC, Source.CONCEALED, Source.SILENCE


def packet(
    k: int, payload: bytes = SPEECH, *, ssrc: int = 7, sequence: int = 65_530, timestamp: int = 2**32 - 3_000
) -> Packet:
    """The `k`-th of a stream of 20 ms packets whose numbers wrap soon after its start."""
    return Packet(ssrc, (sequence + k) % 65_536, (timestamp + 960 * k) % 2**32, payload)


def due(k: float) -> int:
    """When the `k`-th arrives on a path without delay."""
    return START + round(k * 20 * MS)


class Bench:
    """A buffer that is fed at given times, and looked at whenever it asked to be."""

    def __init__(self) -> None:
        self.buffer = JitterBuffer()
        self.frames: list[Frame] = []
        self.left_ns: dict[int, int] = {}
        """When the sound of a place came out."""

    def until(self, now: int) -> None:
        """Let time pass."""
        while (wake_at := self.buffer.wake_at()) is not None and wake_at <= now:
            before = len(self.frames)
            self._take(wake_at)
            assert len(self.frames) > before, "it asked to be woken for nothing"

    def feed(self, arrivals: Iterable[tuple[int, Packet]]) -> None:
        for now, arrived in arrivals:
            self.until(now - 1)
            self.buffer.push(arrived, now)
            self._take(now)

    def _take(self, now: int) -> None:
        for frame in self.buffer.take(now):
            self.frames.append(frame)
            self.left_ns[frame.at] = now

    @property
    def sources(self) -> list[tuple[Source, int]]:
        """What came out, in units of 20 ms."""
        return [(frame.source, frame.ticks // 960) for frame in self.frames]

    def check(self) -> None:
        assert all(one.at + one.ticks == two.at for one, two in pairwise(self.frames)), "a gap or an overlap"
        assert not self.frames or self.frames[0].at == 0


def stream(count: int, *lost: int, payload: bytes = SPEECH) -> list[tuple[int, Packet]]:
    return [(due(k), packet(k, payload)) for k in range(count) if k not in lost]


def test_packets_in_order_leave_at_once() -> None:
    """Through the wrap of sequence and timestamp, and with every kind of jitter that keeps the order."""
    bench, chance, now = Bench(), random.Random(1), START
    arrivals = []
    for k in range(100):
        now = max(now, due(k) + chance.randrange(300 * MS))
        arrivals.append((now, packet(k)))
    bench.feed(arrivals)
    assert bench.sources == [(P, 1)] * 100
    assert list(bench.left_ns.values()) == [now for now, _ in arrivals]


def test_a_lost_packet_is_concealed_and_leaves_no_delay() -> None:
    """What follows waits for it as long as the patience is; the packet after that leaves at once again."""
    bench = Bench()
    bench.feed(stream(20, 5))
    assert bench.sources == [(P, 1)] * 5 + [(C, 1)] + [(P, 1)] * 14
    assert bench.left_ns[6 * 960] - due(6) <= PATIENCE_NS[1]
    assert bench.left_ns[9 * 960] == due(9)


def test_redundancy_replaces_the_guess() -> None:
    """The last packet of a loss comes out of the next one; what was lost before it is concealed."""
    bench = Bench()
    bench.feed(stream(20, 5, 6, 7, payload=SPEECH_FEC))
    assert bench.sources[5:8] == [(C, 2), (F, 1), (P, 1)]
    assert bench.frames[6].payload == bench.frames[7].payload == SPEECH_FEC
    assert bench.buffer.tally.recovered_ticks == 960


def test_a_long_loss_is_silence_after_a_while() -> None:
    """Nobody guesses half a second of speech."""
    bench = Bench()
    bench.feed(stream(40, *range(5, 30), payload=SPEECH_FEC))
    assert bench.sources[5:9] == [(C, 5), (S, 19), (F, 1), (P, 1)]
    bench.check()


def test_disorder_is_put_right_and_teaches_patience() -> None:
    """A packet that is overtaken by up to four others is used; only the first may be given up."""
    bench, chance = Bench(), random.Random(2)
    arrivals = sorted((due(k) + chance.randrange(80 * MS), packet(k)) for k in range(1_000))
    bench.feed(arrivals)
    bench.check()
    tally = bench.buffer.tally
    assert tally.late <= 3
    assert tally.used + tally.late == 1_000
    assert tally.reordered > 200
    assert max(bench.left_ns[960 * k] - due(k) for k in range(1_000) if 960 * k in bench.left_ns) <= 180 * MS


def test_patience_goes_back_when_the_path_is_in_order_again() -> None:
    """Ten seconds later a loss delays little."""
    bench, chance = Bench(), random.Random(2)
    bench.feed(sorted((due(k) + chance.randrange(80 * MS), packet(k)) for k in range(100)))
    assert bench.buffer.patience_ns > 50 * MS
    bench.feed((due(k) + 80 * MS, packet(k)) for k in range(100, 1_600))
    assert bench.buffer.patience_ns < 25 * MS


def test_a_packet_twice_is_heard_once() -> None:
    """Whether it comes at once, behind a gap, or long after."""
    bench = Bench()
    arrivals = stream(30, 10)
    bench.feed(
        sorted(
            [*arrivals, *((at + 1, sent) for at, sent in arrivals), *((at + 90 * MS, sent) for at, sent in arrivals)]
        )
    )
    bench.check()
    assert bench.buffer.tally.duplicate == 58
    assert bench.buffer.tally.used == 29


def test_a_stall_of_less_than_a_second_loses_nothing() -> None:
    """The words arrive late, but all of them, and the delay ends with the stall."""
    bench = Bench()
    bench.feed((due(k) if k < 10 else max(due(k), due(55)), packet(k)) for k in range(100))
    assert bench.sources == [(P, 1)] * 100
    assert bench.left_ns[60 * 960] == due(60)


def test_a_long_stall_becomes_silence_of_its_own_length() -> None:
    """What is more than a second late is given up; a recording of the call stays as long as the call."""
    bench = Bench()
    bench.feed((due(k) if k < 10 else max(due(k), due(160)), packet(k)) for k in range(300))
    bench.check()
    assert bench.buffer.tally.restarts == 0
    assert bench.frames[-1].at == 299 * 960
    silent = STALL_NS // (20 * MS)
    assert bench.buffer.tally.silent_ticks == (160 - 10 - silent) * 960
    assert bench.left_ns[200 * 960] == due(200)


def test_a_sender_that_pauses_is_silent_on_the_clock() -> None:
    """With discontinuous transmission silence comes out while nothing comes in, and the next word is whole."""
    bench = Bench()
    bench.feed([*stream(10), (due(10), packet(10, PAUSE))])
    bench.until(due(11) + PAUSE_LAG_NS + 200 * MS)
    assert bench.sources[-1] == (S, 1)
    assert bench.frames[-1].at == 20 * 960
    resumed = Packet(7, (65_530 + 11) % 65_536, packet(40).timestamp, SPEECH)
    bench.feed([(due(40) + 60 * MS, resumed)])
    bench.check()
    assert bench.frames[-1] == Frame(40 * 960, 960, P, SPEECH)
    assert bench.buffer.tally.concealed_ticks == 0


def test_a_sender_that_stops_without_a_word_is_silent_after_a_second() -> None:
    """Else the end of the user's turn would never come."""
    bench = Bench()
    bench.feed(stream(10))
    bench.until(due(9) + STALL_NS)
    assert len(bench.frames) == 10
    bench.until(due(9) + STALL_NS + 700 * MS)
    assert sum(frame.ticks for frame in bench.frames[10:]) == 34 * 960


def test_a_new_stream_takes_its_place_on_the_old_clock() -> None:
    """Another SSRC, sequence and timestamp: not one packet is lost, and the pause between them is as long as it was."""
    bench = Bench()
    new = {"ssrc": 9, "sequence": 100, "timestamp": 123_456_789}
    bench.feed([*stream(10), *((due(k + 110), packet(k, **new)) for k in range(20))])
    bench.check()
    assert bench.buffer.ssrc == 9
    assert bench.buffer.tally.restarts == 1
    assert bench.frames[-20].at == 110 * 960
    assert [frame.source for frame in bench.frames[-20:]] == [P] * 20
    assert bench.left_ns[bench.frames[-1].at] == due(129)


def test_a_sender_whose_clock_stood_still_goes_on_in_real_time() -> None:
    """A microphone taken away for a minute, whose timestamps go on where they stopped."""
    bench = Bench()
    bench.feed([*stream(10), *((due(k + 3_000), packet(k)) for k in range(10, 40))])
    bench.check()
    assert [frame.source for frame in bench.frames[-30:]] == [P] * 30
    assert bench.frames[-1].at == 3_039 * 960


def test_wild_packets_are_counted_and_change_nothing() -> None:
    """Other streams, the far future, the far past, no Opus at all."""
    bench, chance = Bench(), random.Random(3)
    arrivals = stream(100)
    wild = [
        (at + 1, Packet(chance.choice([7, 8]), chance.randrange(2**16), chance.randrange(2**32), chance.randbytes(20)))
        for at, _ in arrivals
    ]
    bench.feed(sorted([*arrivals, *wild]))
    bench.check()
    tally = bench.buffer.tally
    assert [source for source, _ in bench.sources].count(P) >= 100
    assert tally.strange + tally.malformed + tally.late >= 98
    assert bench.buffer.ssrc == 7


def test_a_sender_cannot_run_ahead_of_the_clock() -> None:
    """An hour of sound in a second, or timestamps that leap: what comes out is bounded by the time that has passed."""
    for leap in (1, 40, 2_000):
        bench = Bench()
        bench.feed((START + k * MS, Packet(7, k % 65_536, 960 * leap * k % 2**32, SPEECH)) for k in range(10_000))
        bench.check()
        assert bench.frames[-1].at < (10 * 1.2 + 3) * 48_000, leap


moments = st.integers(0, 3 * SECOND)
wild = st.builds(
    Packet,
    st.sampled_from([7, 9]),
    st.integers(0, 65_535) | st.integers(65_500, 65_535) | st.integers(0, 100),
    st.integers(0, 2**32 - 1) | st.integers(0, 96_000),
    st.binary(max_size=4) | st.sampled_from([SPEECH, SPEECH_FEC, PAUSE]),
)


@given(st.lists(st.tuples(moments, wild), max_size=60), st.lists(moments, min_size=20, max_size=80))
def test_laws_hold_whatever_comes(strays: list[tuple[int, Packet]], delays: list[int]) -> None:
    """Sound is contiguous, what waits is bounded, and time never makes it hang."""
    buffer, frames = JitterBuffer(), []
    sent = [(20 * MS * k + delay, packet(k)) for k, delay in enumerate(delays)]
    for now, arrived in sorted([*strays, *sent]):
        while (wake_at := buffer.wake_at()) is not None and wake_at < now:
            frames += buffer.take(wake_at)
            assert buffer.wake_at() > wake_at, "no way forward"
        buffer.push(arrived, now)
        frames += buffer.take(now)
        assert len(buffer._waiting) <= MAX_WAITING
        assert PATIENCE_NS[0] <= buffer.patience_ns <= PATIENCE_NS[2]
    assert all(one.at + one.ticks == two.at for one, two in pairwise(frames))
    assert all(frame.ticks > 0 for frame in frames)
    tally = buffer.tally
    assert sum(frame.source is P for frame in frames) + len(buffer._waiting) <= tally.used
    assert sum(frame.ticks for frame in frames if frame.source is C) == tally.concealed_ticks


@given(st.sets(st.integers(1, 199)), st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1))
def test_what_is_lost_is_all_that_is_missing(lost: set[int], sequence: int, timestamp: int) -> None:
    """Every packet that arrived is used, in its place; every other place is filled, wherever the numbers wrap."""
    bench = Bench()
    bench.feed(
        (due(k), packet(k, sequence=sequence, timestamp=timestamp)) for k in range(201) if k not in lost or k == 200
    )
    bench.until(due(200) + PATIENCE_NS[2])
    bench.check()
    assert {frame.at // 960 for frame in bench.frames if frame.source is P} >= set(range(201)) - lost
    assert sum(frame.ticks for frame in bench.frames) == 201 * 960
