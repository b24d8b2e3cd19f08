from __future__ import annotations

import pytest
from far_player import FarPlayer
from hypothesis import given, settings
from hypothesis import strategies as st

from breeze_rtc.clock import MS, SECOND
from breeze_rtc.playback import SpeechPacket
from breeze_rtc.transport.far_buffer import LEAD_NS, MARK_PACKETS, PACKET_NS, Clear, FarBuffer, Mark, Sound

MS_SAMPLES = 24
"""Samples of a millisecond."""


def packets(first: int, count: int) -> tuple[SpeechPacket, ...]:
    return tuple(SpeechPacket(480 * number, b"\xf8\xff\xfe") for number in range(first, first + count))


def in_call(stream: int = 1, count: int = 500, **player: object) -> FarPlayer:
    """A carrier, and a speech of `count` packets written at once."""
    sink = FarBuffer()
    sink.write(stream, packets(0, count))
    sink.end(stream)
    return FarPlayer(sink, **player)  # type: ignore[arg-type]


def sounds(far: FarPlayer) -> list[Sound]:
    return [out for _, out in far.sent if isinstance(out, Sound)]


def error_ms(far: FarPlayer, stream: int = 1) -> float:
    return (far.sink.heard_samples(stream, far.now) - far.heard(stream)) / MS_SAMPLES


@pytest.mark.parametrize("burst_s", [2, 12])
def test_a_burst_stays_here_and_the_carrier_holds_no_more_than_the_lead(burst_s: int) -> None:
    """Trap: one burst of 12 s; reproductions 13 and 21 (pipecat#4151, asterisk#2115): sound at the far end that plays
    on for seconds, a burst that becomes latency for good.  At no moment does the carrier hold more than 400 ms, and all
    of it is played in time."""
    far = in_call(count=50 * burst_s)
    while far.now < (burst_s + 1) * SECOND:
        far.run(far.now + 10 * MS)
        held = sum(1 for item in far.queue if isinstance(item, tuple))
        assert held * PACKET_NS <= LEAD_NS
    assert len(far.played) == 50 * burst_s
    assert far.played[-1][2] <= burst_s * SECOND + far.delay_ns + 2 * PACKET_NS
    assert far.sink.gaps == far.sink.dropped_packets == 0


@pytest.mark.parametrize("moment_ms", [1_000, 6_500])
def test_a_carrier_that_holds_it_all_has_let_hear_only_what_it_played(moment_ms: int) -> None:
    """Reproductions 10 and 11 (twilio-agent-connect#118, agents-js#1173): 12 s sent at once and held by the carrier; at
    1 s, and at 6.5 s, the caller speaks.

    What is queued there does not count as heard, the clear goes out though all had been sent, the marks that it gives
    back are not believed, and what comes late of the old speech is dropped.
    """
    sink = FarBuffer(lead_ns=12 * SECOND)
    far = FarPlayer(sink)
    sink.write(1, packets(0, 600))
    far.run(moment_ms * MS)
    assert sum(len(out.packets) for out in sounds(far)) == 600, "all has been sent"
    assert abs(error_ms(far)) <= 30
    unheard = sink.clear(1)
    assert unheard == 600 * 480 - sink.heard_samples(1, far.now)
    sink.write(1, packets(600, 50))
    far.run(far.now + 15 * SECOND)
    assert isinstance(far.sent[-1][1], Clear)
    assert sink.late_packets == 50
    assert sink.stale_echoes >= (12_000 - moment_ms) // 100 - 2, "the clear gave the marks of all the rest back"
    assert abs(error_ms(far)) <= 30
    assert sink.heard_samples(1, far.now) <= (moment_ms + 50) * MS_SAMPLES


@pytest.mark.parametrize("phase_ms", range(0, 100, 10))
def test_an_echo_that_races_our_clear_is_settled_within_a_marks_interval(phase_ms: int) -> None:
    """Trap: whenever between two marks the clear leaves, some echo is under way just then, of a mark that was reached
    or of one that the clear gave back; nobody can tell which, and nobody needs to."""
    far = in_call(delay_ns=40 * MS)
    far.run(3 * SECOND + phase_ms * MS)
    in_flight = sum(where == "here" for _, _, where, _ in far._wires)
    far.sink.clear(1)
    far.run(far.now + 2 * SECOND)
    assert in_flight + far.sink.stale_echoes > 0
    assert abs(error_ms(far)) <= MARK_PACKETS * 20
    assert abs(error_ms(far)) <= 30, "the clock does better than the bound"


def test_a_mark_with_nothing_queued_comes_back_at_once_and_moves_nothing() -> None:
    """Trap: Telnyx answers a mark at once where nothing is queued.  An echo that comes before its sound can have been
    played lets nothing count as heard that was not, and makes the line no faster than it is."""
    sink = FarBuffer()
    sink.write(1, packets(0, 1))
    sink.end(1)
    (_, mark) = sink.due(0)
    assert isinstance(mark, Mark)
    sink.played(mark.name, 4 * MS)
    assert sink.heard_samples(1, 4 * MS) == 0
    assert sink.path_delay_ns >= 150 * MS
    assert sink.heard_samples(1, SECOND) == 480
    far = in_call(stream=2, count=100)
    far.sink.played("0:999", 0)
    assert far.sink.stale_echoes == 1
    far.run(2 * SECOND)
    assert abs(error_ms(far, 2)) <= 30


def test_sound_goes_out_at_once_and_marks_follow_each_hundred_milliseconds() -> None:
    far = in_call()
    far.run(MS)
    sent = [out for _, out in far.sent]
    assert sum(len(out.packets) for out in sent if isinstance(out, Sound)) == LEAD_NS // PACKET_NS
    assert [type(out) for out in sent[:4]] == [Sound, Mark, Sound, Mark]
    assert all(len(out.packets) <= MARK_PACKETS for out in sounds(far))


@pytest.mark.parametrize("delay_ms", [2, 25, 120])
def test_the_ear_is_known_within_thirty_milliseconds(delay_ms: int) -> None:
    far = in_call(delay_ns=delay_ms * MS)
    far.run(SECOND)
    errors = []
    while far.now < 5 * SECOND:
        far.run(far.now + 7 * MS)
        errors.append(abs(error_ms(far)))
    assert max(errors) <= 30


def test_ten_minutes_of_a_clock_that_is_slow_by_200_ppm() -> None:
    """Trap: ten minutes of drift.  Speech with pauses, as it is: the echoes carry the drift, so the position does not
    wander."""
    sink = FarBuffer()
    far = FarPlayer(sink, rate_ppm=200)
    worst = 0.0
    for stream in range(40):
        sink.write(stream, packets(0, 600))
        sink.end(stream)
        far.run(far.now + 6 * SECOND)
        worst = max(worst, abs(error_ms(far, stream)))
        far.run(far.now + 9 * SECOND)
        far.played.clear()
    assert worst <= 40


def test_without_a_single_echo_the_clock_goes_on() -> None:
    """A carrier that gives no marks back: sound never stalls, and the position is the clock's."""
    far = in_call(gives_marks=False)
    far.run(4 * SECOND)
    assert not far.sink.report(1, far.now).is_measured
    assert far.sink.report(1, far.now).is_playing
    assert abs(error_ms(far)) <= 60
    assert len(far.played) * PACKET_NS > 3_800 * MS


def test_a_clear_leaves_nothing_stale_and_counts_what_was_heard() -> None:
    """Trap: a clear with marks pending.  All of a speech of ten seconds is written; at 3 s the user speaks."""
    far = in_call()
    far.run(3 * SECOND)
    before = far.sink.heard_samples(1, far.now)
    unheard = far.sink.clear(1)
    assert unheard == 500 * 480 - before
    far.run(4 * SECOND)
    assert isinstance(far.sent[-1][1], Clear)
    assert len(far.queue) == 0
    assert far.played[-1][2] <= 3 * SECOND + far.delay_ns + PACKET_NS
    assert abs(error_ms(far)) <= 30
    assert far.sink.is_heard(1, far.now)


def test_echoes_that_the_clear_gave_back_are_not_heard() -> None:
    """All pending marks come back after a clear, though their sound was never played."""
    far = in_call()
    far.run(3 * SECOND)
    far.sink.clear(1)
    settled = None
    far.run(3 * SECOND + 500 * MS)
    settled = far.sink.heard_samples(1, far.now)
    assert far.sink.stale_echoes >= 2
    assert settled <= far.heard(1) + 30 * MS_SAMPLES
    far.run(5 * SECOND)
    assert far.sink.heard_samples(1, far.now) == settled


def test_a_clear_whose_echoes_never_come_settles_by_the_clock() -> None:
    """Reproduction 16 (bolna#842): a clear that wiped the table of marks, and a call that waited for them to its end.
    The next speech is not held up by it."""
    far = in_call()
    far.run(3 * SECOND)
    far.gives_marks = False
    far.sink.clear(1)
    far.sink.write(2, packets(0, 50))
    far.sink.end(2)
    far.run(5 * SECOND)
    assert abs(error_ms(far, 1)) <= 30
    assert far.heard(2) == 50 * 480
    assert far.sink.is_heard(1, far.now)


def test_a_clear_with_nothing_at_the_carrier_sends_nothing() -> None:
    """Trap: a clear with nothing queued."""
    far = in_call(count=10)
    far.run(3 * SECOND)
    count = len(far.sent)
    assert far.sink.clear(1) == 0
    far.run(4 * SECOND)
    assert len(far.sent) == count


def test_late_packets_of_a_cleared_speech_are_dropped() -> None:
    far = in_call()
    far.run(SECOND)
    far.sink.clear(1)
    far.sink.write(1, packets(500, 20))
    far.run(3 * SECOND)
    assert far.sink.late_packets == 20
    assert far.played[-1][2] < 1_100 * MS


def test_speech_after_a_clear_is_heard_from_its_first_packet() -> None:
    far = in_call()
    far.run(2 * SECOND)
    far.sink.clear(1)
    far.run(far.now + 300 * MS)
    far.sink.write(2, packets(0, 100))
    far.sink.end(2)
    far.run(far.now + SECOND)
    assert [stream for stream, _, _ in far.played[-40:]] == [2] * 40
    assert abs(error_ms(far, 2)) <= 30


@pytest.mark.parametrize("pause_ms", [30, 1_500])
def test_after_a_pause_speech_goes_on_at_the_first_unheard_packet(pause_ms: int) -> None:
    """The caller hears every packet; at the seam at most what one estimate is off by is missing or comes twice."""
    far = in_call(count=150)
    far.run(1_010 * MS)
    far.sink.pause()
    far.run(1_200 * MS)
    quiet = len(far.played)
    far.run(1_200 * MS + pause_ms * MS)
    assert len(far.played) == quiet
    far.sink.resume()
    far.run(5 * SECOND)
    positions = [samples for _, samples, _ in far.played]
    seam = positions[quiet] - positions[quiet - 1]
    assert abs(seam - 480) <= 60 * MS_SAMPLES
    assert positions[-1] == 150 * 480
    assert far.sink.is_heard(1, far.now)
    assert far.sink.heard_samples(1, far.now) == 150 * 480


def test_a_call_on_hold_is_noticed_and_nothing_more_is_sent() -> None:
    """The carrier stops playing: after a second the listener counts as not playing; it never hears beyond."""
    far = in_call()
    far.run(2 * SECOND)
    far.is_on_hold = True
    far.run(4 * SECOND)
    report = far.sink.report(1, far.now)
    assert not report.is_playing
    assert report.heard_samples - far.heard(1) <= (MARK_PACKETS * 20 + 30) * MS_SAMPLES
    held = len(far.queue)
    far.run(5 * SECOND)
    assert len(far.queue) == held
    far.is_on_hold = False
    far.run(8 * SECOND)
    assert far.sink.report(1, far.now).is_playing
    assert abs(error_ms(far)) <= 40


def test_a_slow_voice_makes_a_gap_and_the_position_stands_still_in_it() -> None:
    sink = FarBuffer()
    sink.write(1, packets(0, 25))
    far = FarPlayer(sink)
    far.run(2 * SECOND)
    assert sink.heard_samples(1, far.now) == 25 * 480
    assert not sink.is_heard(1, far.now)
    sink.write(1, packets(25, 25))
    sink.end(1)
    far.run(3 * SECOND)
    assert sink.gaps == 1
    assert abs(error_ms(far)) <= 30
    far.run(4 * SECOND)
    assert sink.is_heard(1, far.now)


@pytest.mark.parametrize(("rest", "gaps"), [(25 * 480, 0), (24 * 480, 1)])
def test_running_dry_where_the_speaker_rests_is_no_gap(rest: int, gaps: int) -> None:
    """Silence before the packet that was named is a pause; before another one it is a gap."""
    sink = FarBuffer()
    sink.write(1, packets(0, 25))
    sink.rest(1, rest)
    far = FarPlayer(sink)
    far.run(2 * SECOND)
    sink.write(1, packets(25, 25))
    sink.end(1)
    far.run(4 * SECOND)
    assert sink.gaps == sink.report(1, far.now).gaps == gaps


def test_xoff_holds_the_sound_back() -> None:
    far = in_call()
    far.sink.has_room = False
    far.run(SECOND)
    assert far.sent == []
    assert far.sink.next_at(far.now) is None
    far.sink.has_room = True
    far.run(2 * SECOND)
    assert far.heard(1) > 0


def test_a_clear_makes_room_where_no_word_of_it_comes() -> None:
    """Reproduction 22 (asterisk#1304, #2006, #1712): Asterisk's flush leaves its counter as it was, so that no
    MEDIA_XON follows the MEDIA_XOFF."""
    far = in_call()
    far.run(SECOND)
    far.sink.has_room = False
    far.sink.clear(1)
    far.sink.write(2, packets(0, 50))
    far.sink.end(2)
    far.run(3 * SECOND)
    assert far.heard(2) == 50 * 480


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["write", "clear", "echo", "junk", "end", "wait", "hold"]),
            st.integers(0, 3),
            st.integers(1, 60),
        ),
        max_size=60,
    )
)
def test_whatever_happens_nothing_beyond_what_was_sent_is_heard_and_nothing_goes_back(
    moves: list[tuple[str, int, int]],
) -> None:
    """Reproduction 9 (twilio-samples#22), a position beyond the end of what was said.  Marks missing, stale, invented
    and reordered; clears at any time; a carrier that stops and goes on."""
    sink = FarBuffer()
    far = FarPlayer(sink)
    written: dict[int, int] = {}
    heard: dict[int, int] = {}
    for move, stream, amount in moves:
        match move:
            case "write":
                sink.write(stream, packets(written.get(stream, 0), amount))
                written[stream] = written.get(stream, 0) + amount
            case "clear":
                assert sink.clear(stream) >= 0
            case "end":
                sink.end(stream)
            case "echo":
                marks = [out.name for _, out in far.sent if isinstance(out, Mark)]
                if marks:
                    sink.played(marks[amount % len(marks)], far.now)
            case "junk":
                sink.played(f"{stream}:{amount}", far.now)
            case "hold":
                far.is_on_hold = not far.is_on_hold
            case "wait":
                far.run(far.now + amount * 17 * MS)
        far.take()
        sent: dict[int, int] = {}
        for out in sounds(far):
            sent[out.stream] = max(sent.get(out.stream, 0), out.packets[-1].start_samples + 480)
        for known in written:
            position = sink.heard_samples(known, far.now)
            assert heard.get(known, 0) <= position <= sent.get(known, 0)
            heard[known] = position
