"""The slot clock and the queue, on a virtual clock."""

from __future__ import annotations

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from breeze_rtc.clock import MS, SECOND
from breeze_rtc.media.opus import SILENCE_PACKET, SpeechEncoder
from breeze_rtc.playback import AudioSink, SpeechPacket
from breeze_rtc.transport.playout import GRACE_NS, GUARD_SLOTS, SLOT_NS, SLOT_TICKS, Place, Playout, Slot

T0 = 7 * SECOND


def packets(count: int, *, first: int = 0, name: bytes = b"p") -> tuple[SpeechPacket, ...]:
    return tuple(SpeechPacket(480 * k, name + str(k).encode()) for k in range(first, first + count))


def started(*, is_open: bool = True, max_packets: int = 6_000) -> Playout:
    playout = Playout(max_packets=max_packets)
    playout.start(T0)
    if is_open:
        playout.open()
    return playout


def run(playout: Playout, slots: int) -> list[Slot]:
    """Take the next slots, each at its time."""
    return [playout.next_slot(playout.next_at()) for _ in range(slots)]


def speakers(slots: list[Slot]) -> list[int | None]:
    return [slot.stream for slot in slots]


def test_it_is_an_audio_sink() -> None:
    """The runtime and the agent know it as the seam's sink."""
    sink: AudioSink = Playout()
    sink.write(1, packets(1))
    sink.end(1)
    assert sink.clear(1) == 480


def test_a_slot_leaves_each_20_ms_speech_or_not() -> None:
    """Silence before, between and after; the ticks step by 960 all the way."""
    playout = started()
    slots = run(playout, 2)
    playout.write(1, packets(2))
    playout.end(1)
    slots += run(playout, 3)
    assert [slot.payload for slot in slots] == [SILENCE_PACKET, SILENCE_PACKET, b"p0", b"p1", SILENCE_PACKET]
    assert [slot.ticks for slot in slots] == [0, 960, 1920, 2880, 3840]
    assert playout.next_at() == T0 + 5 * SLOT_NS
    assert playout.gaps == 0


def test_speech_waits_for_the_listener() -> None:
    """Until the page has played its first packet nothing is spoken, and that is no gap."""
    playout = started(is_open=False)
    playout.write(1, packets(1))
    assert speakers(run(playout, 3)) == [None, None, None]
    playout.open()
    assert speakers(run(playout, 2)) == [1, None]
    assert playout.gaps == 0


def test_speech_is_held_while_nobody_listens_and_goes_on_where_it_was() -> None:
    """A listener who mutes misses nothing, not even what was under way then, and the pause is no gap."""
    ear = [0]
    playout = Playout(ear=lambda: ear[0])
    playout.start(T0)
    playout.open()
    playout.write(1, packets(6))
    run(playout, 5)
    ear[0] = 2 * SLOT_TICKS + 100
    playout.hold(is_playing=False)
    assert speakers(run(playout, 5)) == [None] * 5
    assert playout.heard_samples(1, 10 * SLOT_TICKS) == 2 * 480 + 50
    playout.hold(is_playing=False)
    playout.hold(is_playing=True)
    assert [slot.payload for slot in run(playout, 4)] == [b"p2", b"p3", b"p4", b"p5"]
    assert playout.gaps == 0


@pytest.mark.parametrize("listens_first", [True, False])
def test_speech_that_is_paused_and_not_listened_to_goes_on_when_both_are_over(listens_first: bool) -> None:
    """From where the ear fell silent first, whichever ends first."""
    ear = [SLOT_TICKS]
    playout = Playout(ear=lambda: ear[0])
    playout.start(T0)
    playout.open()
    playout.write(1, packets(6))
    run(playout, 5)
    playout.pause(T0 + 5 * SLOT_NS - 1)
    ear[0] = 4 * SLOT_TICKS
    playout.hold(is_playing=False)
    steps = [lambda: playout.hold(is_playing=True), playout.resume]
    for step in steps if listens_first else reversed(steps):
        assert speakers(run(playout, GUARD_SLOTS)) == [None] * GUARD_SLOTS
        step()
    assert [slot.payload for slot in run(playout, 3)] == [b"p1", b"p2", b"p3"]
    assert playout.gaps == 0


def test_a_missed_slot_is_skipped_and_its_speech_leaves_later() -> None:
    """After a stall of 100 ms the timestamp is where the time is, no packet is lost, none is sent in a burst."""
    playout = started()
    playout.write(1, packets(3))
    first = playout.next_slot(T0)
    late = playout.next_slot(T0 + 6 * SLOT_NS + 3 * MS)
    after = playout.next_slot(T0 + 7 * SLOT_NS)
    assert [(slot.index, slot.payload) for slot in (first, late, after)] == [(0, b"p0"), (6, b"p1"), (7, b"p2")]
    assert playout.missed_slots == 5
    assert (playout.gaps, playout.gap_slots) == (1, 5)


def test_speech_under_way_catches_up_after_a_hiccup() -> None:
    """A wake-up 27 ms late: the listener's buffer takes it, a hole of 20 ms it would have to fill."""
    playout = started()
    playout.write(1, packets(4))
    playout.next_slot(T0)
    late = T0 + 2 * SLOT_NS + 7 * MS
    slots = [playout.next_slot(late), playout.next_slot(late)]
    assert [(slot.index, slot.payload) for slot in slots] == [(1, b"p1"), (2, b"p2")]
    assert playout.next_at() == T0 + 3 * SLOT_NS
    assert (playout.gaps, playout.missed_slots) == (0, 0)


def test_speech_later_than_the_grace_is_not_sent_after_its_time() -> None:
    """A slot is late when its own 20 ms and the grace have passed; then all missed slots are given up."""
    for late, index in ((SLOT_NS + GRACE_NS - 1, 1), (SLOT_NS + GRACE_NS, 4)):
        playout = started()
        playout.write(1, packets(4))
        playout.next_slot(T0)
        assert playout.next_slot(T0 + SLOT_NS + late).index == index


@pytest.mark.parametrize("count", [0, 1])
def test_silence_never_leaves_late(count: int) -> None:
    """Nobody misses it, and late packets make the listener's buffer grow; so it is with a stream's first packet."""
    playout = started()
    playout.next_slot(T0)
    playout.write(1, packets(count))
    assert playout.next_slot(T0 + 2 * SLOT_NS + 7 * MS).index == 2


def test_a_slot_never_leaves_ahead_or_twice() -> None:
    """Asking early is our own mistake."""
    playout = started()
    playout.next_slot(T0)
    with pytest.raises(AssertionError):
        playout.next_slot(T0 + SLOT_NS - 1)


def test_running_dry_in_mid_stream_is_one_gap() -> None:
    """It counts when the speech goes on, once, with its length."""
    playout = started()
    playout.write(1, packets(1))
    run(playout, 4)
    assert playout.gaps == 0
    playout.write(1, packets(2, first=1))
    run(playout, 2)
    assert (playout.gaps, playout.gap_slots) == (1, 3)


def test_running_dry_where_the_speaker_rests_is_no_gap() -> None:
    """Silence before the packet that was named is a pause; before the next one it is a gap."""
    playout = started()
    playout.write(1, packets(2))
    playout.rest(1, 2 * 480)
    run(playout, 5)
    playout.write(1, packets(1, first=2))
    run(playout, 1)
    assert (playout.gaps, playout.gaps_in(1)) == (0, (0, 0))
    run(playout, 2)
    playout.write(1, packets(1, first=3))
    run(playout, 1)
    assert playout.gaps_in(1) == (1, 2 * SLOT_NS)


def test_an_end_that_comes_late_is_no_gap() -> None:
    """Silence after the last packet is not inside the speech."""
    playout = started()
    playout.write(1, packets(1))
    run(playout, 4)
    playout.end(1)
    run(playout, 4)
    assert playout.gaps == 0
    assert playout.is_sent(1)


def test_streams_are_spoken_one_after_another() -> None:
    """The second waits for the end of the first, then follows without a pause."""
    playout = started()
    playout.write(1, packets(2))
    playout.write(2, packets(1))
    assert speakers(run(playout, 3)) == [1, 1, None]
    playout.end(1)
    assert speakers(run(playout, 2)) == [2, None]


def test_a_cleared_stream_stays_silent_and_its_late_packets_are_dropped() -> None:
    """A step that was running at the barge-in still delivers; nobody hears it."""
    playout = started()
    playout.write(1, packets(5))
    run(playout, 2)
    assert playout.clear(1) == 5 * 480
    playout.write(1, packets(3, first=5))
    playout.end(1)
    assert speakers(run(playout, 4)) == [None] * 4
    assert playout.late_packets == 3
    assert playout.clear(1) == 0


def test_a_stream_can_be_cleared_before_its_first_packet() -> None:
    """Its packets are dropped when they come."""
    playout = started()
    assert playout.clear(9) == 0
    playout.write(9, packets(1))
    assert speakers(run(playout, 1)) == [None]


def test_clear_counts_what_the_ear_has_not_heard() -> None:
    """Queued and under way, less what has left the loudspeaker."""
    ear = [0]
    playout = Playout(ear=lambda: ear[0])
    playout.start(T0)
    playout.open()
    playout.write(1, packets(10))
    run(playout, 6)
    ear[0] = 2 * SLOT_TICKS + 100
    assert playout.clear(1) == 10 * 480 - (2 * 480 + 50)


def test_an_empty_stream_is_over_at_once() -> None:
    """A stream of no samples does not block the next one."""
    playout = started()
    playout.end(1)
    playout.write(2, packets(1))
    assert speakers(run(playout, 1)) == [2]
    assert playout.is_sent(1)
    assert playout.is_heard(1, 0)


def test_dry_at_is_the_slot_the_next_packet_must_not_miss() -> None:
    """Two packets queued at slot 3: the third is due at slot 5."""
    playout = started()
    run(playout, 3)
    playout.write(1, packets(2))
    assert playout.dry_at(1, T0 + 3 * SLOT_NS - 1) == T0 + 5 * SLOT_NS
    run(playout, 2)
    assert playout.dry_at(1, T0 + 5 * SLOT_NS - 1) == T0 + 5 * SLOT_NS


def test_dry_at_counts_the_streams_that_speak_first() -> None:
    """A stream behind another has all that time more."""
    playout = started()
    playout.write(1, packets(4))
    playout.write(2, packets(2))
    assert playout.dry_at(1, T0) == T0 + 4 * SLOT_NS
    assert playout.dry_at(2, T0) == T0 + 6 * SLOT_NS


def test_dry_at_of_a_stream_that_ran_dry_is_in_the_past() -> None:
    """The deadline stays where it was missed."""
    playout = started()
    playout.write(1, packets(1))
    run(playout, 5)
    assert playout.dry_at(1, T0 + 5 * SLOT_NS) == T0 + SLOT_NS


def test_dry_at_moves_with_the_time_while_speech_waits() -> None:
    """Before the listener plays no deadline comes nearer."""
    playout = started(is_open=False)
    playout.write(1, packets(2))
    run(playout, 10)
    assert playout.dry_at(1, T0 + 10 * SLOT_NS) == T0 + 12 * SLOT_NS


@pytest.mark.parametrize("finish", [Playout.end, Playout.clear])
def test_nothing_is_due_once_a_stream_is_over(finish) -> None:  # type: ignore[no-untyped-def]
    """Ended or cleared: no deadline."""
    playout = started()
    playout.write(1, packets(3))
    finish(playout, 1)
    assert playout.dry_at(1, T0) is None
    assert playout.dry_at(77, T0) is None


def test_the_queue_is_bounded_and_says_so() -> None:
    """What does not fit is dropped and counted; what was there is kept."""
    playout = started(max_packets=3)
    playout.write(1, packets(5))
    assert playout.queued_packets == 3
    assert playout.dropped_packets == 2
    assert [slot.payload for slot in run(playout, 3)] == [b"p0", b"p1", b"p2"]


def test_flush_silences_all_and_says_from_where_on_is_new_sound() -> None:
    """No old speech at or after the resume timestamp; no new speech until the page had time to un-mute."""
    playout = started()
    playout.write(1, packets(10))
    playout.write(2, packets(10))
    old = run(playout, 3)
    resume = playout.flush(T0 + 3 * SLOT_NS - 1)
    playout.write(3, packets(3))
    playout.end(3)
    slots = run(playout, GUARD_SLOTS + 3)
    assert speakers(old) == [1, 1, 1]
    assert speakers(slots) == [None] * GUARD_SLOTS + [3, 3, 3]
    assert resume == 4 * SLOT_TICKS
    assert playout.gaps == 0


def test_what_was_sent_but_muted_is_not_heard() -> None:
    """The page's word about its silence cuts what counts as heard."""
    playout = started()
    playout.write(1, packets(10))
    run(playout, 6)
    playout.flush(T0 + 6 * SLOT_NS - 1)
    playout.silenced_at(2 * SLOT_TICKS + 480)
    assert playout.heard_samples(1, 1_000_000) == 2 * 480 + 240
    assert playout.is_heard(1, 2 * SLOT_TICKS + 480)


def test_a_pause_keeps_what_was_not_heard_and_speech_goes_on_there() -> None:
    """Six packets left, two and a half were heard: the third leaves again, whatever time the pause took, and the rest
    follows; what is written meanwhile waits behind it, and the pause is no gap."""
    playout = started()
    playout.write(1, packets(8))
    run(playout, 6)
    resume = playout.pause(T0 + 6 * SLOT_NS - 1)
    playout.silenced_at(2 * SLOT_TICKS + 480)
    playout.write(1, packets(1, first=8))
    playout.end(1)
    quiet = run(playout, 200)
    playout.forget(playout.sent_ticks)
    assert resume == 7 * SLOT_TICKS
    assert speakers(quiet) == [None] * 200
    assert playout.heard_samples(1, playout.sent_ticks) == 2 * 480 + 240
    assert not playout.is_heard(1, playout.sent_ticks)
    playout.resume()
    assert [slot.payload for slot in run(playout, 8)] == [*(b"p%d" % k for k in range(2, 9)), SILENCE_PACKET]
    assert playout.heard_samples(1, 206 * SLOT_TICKS + 480) == 2 * 480 + 240
    assert playout.is_heard(1, playout.sent_ticks)
    assert playout.gaps == 0


def test_a_pause_that_ends_soon_waits_for_the_page_to_un_mute() -> None:
    """Without a word from the page the ear's estimated place counts; no speech before the guard is over."""
    playout = Playout(ear=lambda: 3 * SLOT_TICKS)
    playout.start(T0)
    playout.open()
    playout.write(1, packets(8))
    run(playout, 5)
    playout.pause(playout.next_at())
    playout.resume()
    slots = run(playout, GUARD_SLOTS + 2)
    assert [slot.payload for slot in slots] == [SILENCE_PACKET] * GUARD_SLOTS + [b"p3", b"p4"]


def test_what_is_cleared_in_a_pause_was_heard_up_to_its_beginning() -> None:
    """The interruption was real: nothing of it comes again, and new speech goes at once."""
    playout = Playout(ear=lambda: playout.sent_ticks)
    playout.start(T0)
    playout.open()
    playout.write(1, packets(8))
    run(playout, 6)
    playout.pause(playout.next_at())
    playout.silenced_at(2 * SLOT_TICKS + 480)
    run(playout, 20)
    assert playout.clear(1) == 8 * 480 - (2 * 480 + 240)
    playout.resume()
    playout.write(2, packets(1, name=b"new"))
    assert [slot.payload for slot in run(playout, 1)] == [b"new0"]
    assert playout.heard_samples(1, 1_000_000) == 2 * 480 + 240


def test_the_map_knows_a_gap() -> None:
    """The ear stands still in the speech while silence passes."""
    playout = started()
    playout.write(1, packets(1))
    run(playout, 3)
    playout.write(1, packets(1, first=1))
    run(playout, 1)
    assert playout.place(SLOT_TICKS - 2) == Place(1, 479)
    assert playout.place(SLOT_TICKS) is None
    assert playout.place(3 * SLOT_TICKS + 2) == Place(1, 481)
    assert playout.heard_samples(1, 2 * SLOT_TICKS) == 480
    assert playout.ticks_of(1, 480) == 3 * SLOT_TICKS
    assert playout.first_ticks(1) == 0
    assert playout.end_ticks(1) == 4 * SLOT_TICKS


def test_the_map_forgets_what_was_heard_and_keeps_the_sum() -> None:
    """A day-long call holds a few lines; what was heard stays known."""
    playout = started()
    for k in range(200):
        playout.write(1, packets(1, first=k))
        run(playout, 2)
        playout.forget(playout.sent_ticks)
        assert len(playout._streams[1].runs) <= 52
    playout.end(1)
    playout.forget(playout.sent_ticks + 3 * 48_000)
    assert playout.streams == ()
    assert playout.heard_samples(1, 0) == 200 * 480
    assert playout.gaps == 199


def test_after_a_reconnection_speech_goes_on_where_the_ear_was() -> None:
    """Ten packets left and seven and a half were heard: the eighth leaves again, and no sample is missing or counted
    twice; the time without a connection is no gap."""
    playout = started()
    playout.write(1, packets(12))
    run(playout, 10)
    ear = 7 * SLOT_TICKS + 480
    playout.rewind(ear)
    assert playout.heard_samples(1, ear) == 7 * 480 + 240
    assert playout.dry_at(1, T0 + 500 * SLOT_NS) == T0 + 505 * SLOT_NS
    # The next listener's first packets are silence until it plays; the slot clock has run on.
    silence = playout.next_slot(T0 + 500 * SLOT_NS)
    playout.open()
    slots = run(playout, 3)
    playout.end(1)
    slots += run(playout, 3)
    assert (silence.index, silence.stream) == (500, None)
    assert [slot.payload for slot in slots] == [b"p7", b"p8", b"p9", b"p10", b"p11", SILENCE_PACKET]
    assert [slot.index for slot in slots] == list(range(501, 507))
    assert playout.gaps == 0
    # What was heard before counts until the ear is past it again.
    assert playout.heard_samples(1, 501 * SLOT_TICKS + 100) == 7 * 480 + 240
    assert playout.heard_samples(1, 501 * SLOT_TICKS + 580) == 7 * 480 + 290
    assert playout.place(501 * SLOT_TICKS) == Place(1, 7 * 480)
    assert not playout.is_heard(1, 505 * SLOT_TICKS + 958)
    assert playout.is_heard(1, 506 * SLOT_TICKS)


def test_a_new_connection_knows_best_how_far_the_ear_came() -> None:
    """Held since the path was lost, at a place that was guessed; the page then says that it heard more."""
    ear = [2 * SLOT_TICKS]
    playout = Playout(ear=lambda: ear[0])
    playout.start(T0)
    playout.open()
    playout.write(1, packets(8))
    run(playout, 6)
    playout.hold(is_playing=False)
    playout.rewind(4 * SLOT_TICKS)
    playout.open()
    assert [slot.payload for slot in run(playout, 2)] == [b"p4", b"p5"]


def test_a_stream_that_was_sent_in_full_and_not_heard_leaves_again() -> None:
    """In its place before the next one; of a cleared stream nothing does."""
    playout = started()
    for stream, name in ((1, b"a"), (2, b"b"), (3, b"c")):
        playout.write(stream, packets(2, name=name))
        playout.end(stream)
    run(playout, 5)
    playout.clear(1)
    playout.rewind(0)
    assert [playout.heard_samples(stream, 10 * SLOT_TICKS) for stream in (1, 2, 3)] == [0, 0, 0]
    assert playout.first_ticks(2) is None
    assert playout.clear(2) == 2 * 480
    playout.open()
    assert [slot.payload for slot in run(playout, 3)] == [b"c0", b"c1", SILENCE_PACKET]


def test_what_was_heard_long_ago_cannot_be_sent_again() -> None:
    """The packets kept for it are few, however long the stream is."""
    playout = started()
    for k in range(1_000):
        playout.write(1, packets(1, first=k))
        run(playout, 1)
        playout.forget(playout.sent_ticks - 5 * SLOT_TICKS)
        assert len(playout._streams[1].sent) <= 106
    playout.rewind(playout.sent_ticks - 5 * SLOT_TICKS)
    assert playout.queued_packets == 5
    assert playout.heard_samples(1, playout.sent_ticks) == 995 * 480


def test_finished_streams_are_remembered_in_bounded_number() -> None:
    """A thousand short streams leave a few hundred names."""
    playout = started()
    for stream in range(1_000):
        playout.write(stream, packets(1))
        playout.end(stream)
        run(playout, 1)
        playout.forget(playout.sent_ticks + 10 * 48_000)
    assert playout.streams == ()
    assert len(playout._past) <= 256


steps = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(1, 4), st.integers(0, 6)),
        st.tuples(st.just("end"), st.integers(1, 4), st.just(0)),
        st.tuples(st.just("clear"), st.integers(1, 4), st.just(0)),
        st.tuples(st.just("flush"), st.just(0), st.just(0)),
        st.tuples(st.just("hold"), st.integers(0, 1), st.just(0)),
        st.tuples(st.just("pause"), st.integers(0, 12), st.integers(0, 959)),
        st.tuples(st.just("resume"), st.just(0), st.just(0)),
        st.tuples(st.just("reconnect"), st.integers(0, 12), st.integers(0, 959)),
        st.tuples(st.just("stall"), st.integers(0, 9), st.integers(0, SLOT_NS - 1)),
        st.tuples(st.just("forget"), st.integers(0, 400_000), st.just(0)),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(steps)
def test_laws(script: list[tuple[str, int, int]]) -> None:
    """Whatever is done: ticks follow time, nothing is early, packets stay in order and none is missing, cleared streams
    are silent, every sent sample has one place, and the ear's position in a stream never falls."""
    ear = -1
    held_ear: int | None = None
    playout = Playout(max_packets=40, ear=lambda: max(ear, 0))
    playout.start(T0)
    playout.open()

    written: dict[int, int] = {}
    queued: dict[int, list[int]] = {}
    sent: dict[int, list[tuple[int, int]]] = {}
    over: set[int] = set()
    cleared: set[int] = set()
    indices: list[int] = []
    paused_at: int | None = None
    now = T0

    def again_from(ticks: int) -> None:
        for stream in set(sent) - cleared:
            again = [number for at, number in sent[stream] if at + 960 > ticks]
            queued[stream] = again + queued[stream]
            del sent[stream][len(sent[stream]) - len(again) :]

    for verb, a, b in script:
        if verb == "write":
            k = written.get(a, 0)
            written[a] = k + b
            room = max(0, 40 - playout.queued_packets)
            if a not in over:
                queued.setdefault(a, []).extend(range(k, k + b)[:room])
            playout.write(a, tuple(SpeechPacket(480 * i, f"{a}:{i}".encode()) for i in range(k, k + b)))
        elif verb == "end":
            playout.end(a)
            over.add(a)
        elif verb == "clear":
            assert 0 <= playout.clear(a) <= 480 * written.get(a, 0)
            cleared.add(a)
            over.add(a)
        elif verb == "flush":
            cleared.update(playout.streams)
            over.update(playout.streams)
            resume = playout.flush(now)
            assert resume >= playout.sent_ticks
            paused_at = None
        elif verb == "hold":
            playout.hold(is_playing=not a)
            if a and held_ear is None:
                held_ear = max(ear, 0)
            elif not a and held_ear is not None:
                if paused_at is None:
                    again_from(held_ear)
                else:
                    paused_at = min(paused_at, held_ear)
                held_ear = None
        elif verb == "pause" and paused_at is None:
            if held_ear is None:
                ear = max(ear, min(playout.sent_ticks, playout.sent_ticks - a * 960 + b))
            paused_at = ear
            playout.pause(now)
            playout.silenced_at(ear)
        elif verb == "resume" and paused_at is not None:
            before = [playout.heard_samples(stream, ear) for stream in written]
            playout.resume()
            assert [playout.heard_samples(stream, ear) for stream in written] == before
            if held_ear is None:
                again_from(paused_at)
            else:
                held_ear = min(held_ear, paused_at)
            paused_at = None
        elif verb == "forget":
            ear = ear if held_ear is not None or paused_at is not None else max(ear, min(a, playout.sent_ticks))
            playout.forget(ear)
        elif verb == "reconnect":
            if held_ear is None and paused_at is None:
                ear = max(ear, min(playout.sent_ticks, playout.sent_ticks - a * 960 + b))
            before = [playout.heard_samples(stream, ear) for stream in written]
            playout.rewind(ear)
            playout.open()
            assert [playout.heard_samples(stream, ear) for stream in written] == before
            again_from(ear if paused_at is None else min(ear, paused_at))
            held_ear = None
        now = max(now, playout.next_at())
        if verb == "stall":
            now += a * SLOT_NS + b
        indices.append(playout.sent_ticks // 960)
        slot = playout.next_slot(now)
        assert slot.ticks == slot.index * 960
        grace_ns = GRACE_NS if slot.stream is not None else 0
        assert T0 + slot.index * SLOT_NS <= now < T0 + (slot.index + 1) * SLOT_NS + grace_ns
        assert playout.queued_packets <= 40 + 60
        if slot.stream is None:
            assert slot.payload == SILENCE_PACKET
            continue
        assert slot.stream not in cleared
        assert paused_at is None
        number = int(slot.payload.split(b":")[1])
        assert number == queued[slot.stream].pop(0)
        sent.setdefault(slot.stream, []).append((slot.ticks, number))
        for inside in (0, 2, 958):
            place = playout.place(slot.ticks + inside)
            assert place == Place(slot.stream, number * 480 + inside // 2)
            assert playout.ticks_of(place.stream, place.samples) == slot.ticks + inside
        assert playout.place(playout.sent_ticks) is None
    assert indices == sorted(set(indices))
    for stream, count in written.items():
        heard = [playout.heard_samples(stream, ticks) for ticks in range(0, playout.sent_ticks + 960, 480)]
        assert heard == sorted(heard)
        assert heard[-1] <= 480 * count
        assert playout.heard_samples(stream, 0) <= heard[-1]


def test_the_cut_into_silence_does_not_click() -> None:
    """In the middle of a vowel the ready-made silence packet fades: no step is larger than the voice's own.

    Reproduction 17 (livekit#1395, pipecat#3985).
    """
    t = np.arange(24_000) / 24_000
    vowel = sum(np.sin(2 * np.pi * 140 * k * t) / k for k in range(1, 12)) * 6_000
    spoken = SpeechEncoder().encode(vowel.astype(np.int16))[:30]
    decoder = av.CodecContext.create("libopus", "r")
    decoder.sample_rate, decoder.layout = 48_000, "mono"
    payloads = [packet.payload for packet in spoken] + [SILENCE_PACKET] * 5
    sound = np.concatenate(
        [frame.to_ndarray().reshape(-1) for data in payloads for frame in decoder.decode(av.Packet(data))]
    ).astype(np.float64)
    if np.abs(sound).max() <= 2:  # Decoders give floats in [-1, 1] or 16-bit integers.
        sound *= 32_768
    cut = 30 * 960
    own = np.abs(np.diff(sound[cut - 4_800 : cut - 960])).max()
    assert own > 100
    assert np.abs(np.diff(sound[cut - 960 : cut + 960])).max() <= 1.1 * own
    assert np.abs(sound[cut + 960 :]).max() < 40
