"""Reports in, position at the ear out, on a virtual clock."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from breeze_rtc.clock import MS, SECOND
from breeze_rtc.media import rtp
from breeze_rtc.transport.playhead import DEVICE_DELAY_NS, LOOK_AHEAD_NS, Playhead, ReceiverReport
from breeze_rtc.transport.playout import SLOT_NS, SLOT_TICKS, SlotClock
from breeze_rtc.transport.signaling import Flushed, Report

T0 = 50 * SECOND
ORIGIN = rtp.WRAP - 5_000  # Wraps after 0.1 s of every test.
EPOCH_MS = 1_796_000_000_000.0


class Listener:
    """A player with fixed delays: it pulls packet k `network_ms` after slot k left."""

    def __init__(self, *, network_ms: float = 50, device_ms: float = 34, source: str = "playout") -> None:
        self.network_ms, self.device_ms, self.source = network_ms, device_ms, source
        self.seq = 0

    def report(self, now: int, **changes: Any) -> Report:
        """What it says at `now`, `changes` made."""
        slot = (now - T0 - round(self.network_ms * MS)) // SLOT_NS
        pulled_ns = T0 + slot * SLOT_NS + round(self.network_ms * MS)
        self.seq += 1
        report = Report(
            seq=self.seq,
            t_ms=now / MS + EPOCH_MS,
            rtp=rtp.add(ORIGIN, slot * SLOT_TICKS) if slot >= 0 else None,
            rtp_t_ms=pulled_ns / MS + EPOCH_MS if slot >= 0 else None,
            device_delay_ms=self.device_ms,
            device_delay_source=self.source,
            age_ms=(now - pulled_ns) / MS if slot >= 0 else 0.0,
            offset_ms=-EPOCH_MS,
        )
        return dataclasses.replace(report, **changes)


def sent_at(now: int) -> int:
    """The end of the last slot that left before `now`."""
    return ((now - T0) // SLOT_NS + 1) * SLOT_TICKS


def truth(now: int, delay_ms: float) -> int:
    """Ticks at the ear `delay_ms` after they left, the look-ahead off."""
    return (now - T0 - round(delay_ms * MS)) * 48 // MS - 312


def near(ticks: int, other: int, ms: float = 0.1) -> bool:
    return abs(ticks - other) <= ms * 48


def playhead() -> Playhead:
    return Playhead(SlotClock(T0), ORIGIN)


def test_the_formula() -> None:
    """R, T and D give the place in the sound, between reports too, across the timestamp's wrap."""
    head, listener = playhead(), Listener(network_ms=50, device_ms=34)
    for step in range(1, 9):
        at = T0 + step * 250 * MS
        assert head.report(listener.report(at), sent_at(at), at)
        later = at + 200 * MS
        position = head.position(later, sent_at(later))
        assert near(position.ticks, truth(later, 84))
        assert position.is_measured
        assert position.source == "playout"
        assert abs(position.path_delay_ns - (84 * MS + LOOK_AHEAD_NS)) < MS
        assert position.error_ns < 20 * MS


def test_before_any_word_half_a_round_trip_and_eighty_milliseconds() -> None:
    """An estimate, and it says so."""
    head = playhead()
    head.rtt_ns = 60 * MS
    at = T0 + SECOND
    position = head.position(at, sent_at(at))
    assert near(position.ticks, truth(at, 110))
    assert (position.is_measured, position.source, position.is_playing) == (False, "estimate", True)
    assert position.error_ns >= 100 * MS


def test_a_report_without_a_timestamp_is_no_position() -> None:
    """The page is there, nothing has been played."""
    head, listener = playhead(), Listener()
    assert not head.report(listener.report(T0 + 10 * MS), sent_at(T0 + 10 * MS), T0 + 10 * MS)
    assert not head.has_played
    assert (head.accepted, head.old, head.impossible) == (0, 0, 0)


@pytest.mark.parametrize(
    ("source", "device_ms", "used_ms", "told"),
    [
        ("playout", 120.0, 120.0, "playout"),
        ("context", 43.0, 43.0, "context"),
        ("none", 0.0, DEVICE_DELAY_NS / MS, "none"),
        ("playout", -5.0, DEVICE_DELAY_NS / MS, "none"),
        ("playout", 60_000.0, DEVICE_DELAY_NS / MS, "none"),
    ],
)
def test_the_device_delay_has_fallbacks(source: str, device_ms: float, used_ms: float, told: str) -> None:
    """Measured, said by the audio context, or a common sound card's; impossible ones count as not known."""
    head, listener = playhead(), Listener(device_ms=device_ms, source=source)
    at = T0 + SECOND
    head.report(listener.report(at), sent_at(at), at)
    position = head.position(at, sent_at(at))
    assert near(position.ticks, truth(at, 50 + used_ms))
    assert position.source == told


def test_less_known_devices_have_larger_errors() -> None:
    """Playout, context, none: in that order."""
    errors = []
    for source in ("playout", "context", "none"):
        head, at = playhead(), T0 + SECOND
        head.report(Listener(source=source).report(at), sent_at(at), at)
        errors.append(head.position(at, sent_at(at)).error_ns)
    assert errors == sorted(set(errors))


def test_a_report_older_than_the_newest_is_ignored() -> None:
    """The network may turn two reports round."""
    head, listener = playhead(), Listener()
    first, second = listener.report(T0 + SECOND), listener.report(T0 + SECOND + 250 * MS, muted=True)
    at = T0 + SECOND + 260 * MS
    assert head.report(second, sent_at(at), at)
    assert not head.report(first, sent_at(at), at)
    assert head.old == 1
    assert not head.is_playing(at)


def test_a_timestamp_that_was_not_sent_is_impossible() -> None:
    """Nobody plays the future; the position stands where it stood."""
    head, listener = playhead(), Listener()
    at = T0 + SECOND
    head.report(listener.report(at), sent_at(at), at)
    before = head.position(at, sent_at(at)).ticks
    bad = listener.report(at, rtp=rtp.add(ORIGIN, sent_at(at) + 9_600))
    assert not head.report(bad, sent_at(at), at)
    assert head.impossible == 1
    assert head.position(at, sent_at(at)).ticks == before


@pytest.mark.parametrize(
    "changes",
    [
        {"rtp_t_ms": EPOCH_MS * 2},
        {"rtp_t_ms": 0.0},
        {"t_ms": -1e15, "rtp_t_ms": 1e15},
        {"rtp": rtp.add(ORIGIN, -48_000)},
        {"rtp": rtp.add(ORIGIN, 1 << 31)},
    ],
)
def test_impossible_values_are_counted_and_change_nothing(changes: dict[str, Any]) -> None:
    """Times from other ages, timestamps from before the call."""
    head, listener = playhead(), Listener()
    at = T0 + SECOND
    assert not head.report(listener.report(at, **changes), sent_at(at), at)
    assert head.impossible == 1
    assert not head.has_played


def test_a_page_whose_clock_is_not_joined_is_placed_by_arrival() -> None:
    """Before the first ping the offset is nonsense; the age of the packet still says where the ear is, less surely."""
    head, listener = playhead(), Listener()
    at = T0 + SECOND
    joined = playhead()
    joined.report(listener.report(at), sent_at(at), at)
    assert head.report(listener.report(at, offset_ms=0.0), sent_at(at), at)
    position = head.position(at, sent_at(at))
    assert near(position.ticks, truth(at, 84))
    assert position.error_ns > joined.position(at, sent_at(at)).error_ns


def test_the_position_never_passes_what_was_sent() -> None:
    """When our own sending stalls, the ear cannot be ahead of it."""
    head, listener = playhead(), Listener(network_ms=20, device_ms=0)
    at = T0 + SECOND
    head.report(listener.report(at), sent_at(at), at)
    assert head.position(at + SECOND // 2, sent_at(at)).ticks == sent_at(at)


def test_the_position_does_not_go_back_until_a_flush() -> None:
    """A later report with a longer path holds it still; a flush lets go."""
    head, listener = playhead(), Listener()
    at = T0 + SECOND
    head.report(listener.report(at), sent_at(at), at)
    before = head.position(at, sent_at(at)).ticks
    listener.device_ms = 150
    at += 20 * MS
    head.report(listener.report(at), sent_at(at), at)
    assert head.position(at, sent_at(at)).ticks == before
    head.flush(sent_at(at))
    assert near(head.position(at, sent_at(at)).ticks, truth(at, 200))


def test_a_player_that_pulls_no_packets_does_not_advance() -> None:
    """With a packet older than 60 ms the ear stops at that packet's end; the path delay stays as it was measured."""
    head, listener = playhead(), Listener()
    at = T0 + SECOND
    head.report(listener.report(at), sent_at(at), at)
    last = listener.report(at)
    at += 400 * MS
    stuck = listener.report(at, rtp=last.rtp, rtp_t_ms=last.rtp_t_ms, age_ms=400.0 + last.age_ms)
    head.report(stuck, sent_at(at), at)
    position = head.position(at + 100 * MS, sent_at(at + 100 * MS))
    packet_end = rtp.unwrap(last.rtp or 0, 48_000, ORIGIN) + SLOT_TICKS - 312
    # It had been told further on while the page was believed to go on; it stands still from there.
    assert position.ticks == max(packet_end, head._floor_ticks)
    assert abs(position.path_delay_ns - (84 * MS + LOOK_AHEAD_NS)) < MS


def test_without_reports_the_last_delay_is_held() -> None:
    """After a second it is an estimate, and after more it is a worse one, but the same place."""
    head, listener = playhead(), Listener(network_ms=120)
    at = T0 + SECOND
    head.report(listener.report(at), sent_at(at), at)
    fresh = head.position(at + 900 * MS, sent_at(at + 900 * MS))
    held = head.position(at + 1_100 * MS, sent_at(at + 1_100 * MS))
    later = head.position(at + 4 * SECOND, sent_at(at + 4 * SECOND))
    assert near(held.ticks, truth(at + 1_100 * MS, 154))
    assert near(later.ticks, truth(at + 4 * SECOND, 154))
    assert (fresh.source, held.source, held.is_measured) == ("playout", "held", False)
    assert fresh.error_ns < held.error_ns < later.error_ns


def test_a_late_report_is_worth_what_its_own_age_makes_it() -> None:
    """Held up for two seconds on its way, it tells the delay of two seconds ago: not a moment of now, and no fault."""
    head, listener = playhead(), Listener()
    said_at, at = T0 + SECOND, T0 + 3 * SECOND
    assert head.report(listener.report(said_at), sent_at(at), at)
    position = head.position(at, sent_at(at))
    assert near(position.ticks, truth(at, 84))
    assert (position.source, position.is_measured) == ("held", False)
    assert head.impossible == 0
    assert head.is_playing(at + 4 * SECOND)


def test_the_held_delay_is_as_sure_as_the_path_was_steady() -> None:
    """Where the delay jumped by 200 ms lately it may do so again unseen; half a minute later that is forgotten."""
    errors = {}
    for jump_ms in (0, 200):
        head, listener = playhead(), Listener()
        at = T0 + SECOND
        head.report(listener.report(at), sent_at(at), at)
        listener.network_ms += jump_ms
        for step in range(1, 161):
            at = T0 + SECOND + step * 250 * MS
            head.report(listener.report(at), sent_at(at), at)
            if step in {1, 160}:
                errors[jump_ms, step] = head.position(at + 1_100 * MS, sent_at(at + 1_100 * MS)).error_ns
    assert errors[0, 1] < 40 * MS
    assert errors[200, 1] > 200 * MS
    assert errors[200, 160] == errors[0, 160]


def arrived(at: int, *, rtt_ms: int = 60, jitter_ms: int = 0) -> ReceiverReport:
    """What the listener's RTP stack says when all that was sent a tenth of a second ago has arrived."""
    return ReceiverReport(sent_at(at - 100 * MS), jitter_ms * MS, rtt_ms * MS)


def test_with_rtcp_alone_half_a_round_trip_jitter_and_eighty_milliseconds() -> None:
    """A listener that never reports: a guess, better founded than without RTCP, and it says so."""
    head = playhead()
    at = T0 + SECOND
    unknown = playhead().position(at, sent_at(at))
    head.receiver_report(arrived(at, rtt_ms=60, jitter_ms=13), at)
    position = head.position(at, sent_at(at))
    assert near(position.ticks, truth(at, 30 + 80 + 13), ms=1)
    assert (position.source, position.is_measured, position.is_playing) == ("rtcp", False, True)
    assert position.error_ns < unknown.error_ns
    assert not head.has_played


def test_reports_that_stop_while_packets_arrive_are_a_stuck_channel() -> None:
    """The listener's RTP stack goes on telling of arrivals every few seconds: it hears, and the last delay is held."""
    head, listener = playhead(), Listener()
    at = T0 + SECOND
    head.report(listener.report(at), sent_at(at), at)
    for second in range(1, 30):
        now = at + second * SECOND
        if second % 4 == 3:
            head.receiver_report(arrived(now), now)
        position = head.position(now, sent_at(now))
        assert position.is_playing
        assert near(position.ticks, truth(now, 84))
        assert position.source == ("held" if second > 1 else "playout")


def test_reports_that_stop_with_everything_else_are_a_listener_asleep() -> None:
    """A receiver report from the time of the last word proves nothing, nor do those that tell of no new packet."""
    head, listener = playhead(), Listener()
    at = T0 + SECOND
    head.report(listener.report(at), sent_at(at), at)
    head.receiver_report(arrived(at), at + 100 * MS)
    head.receiver_report(arrived(at), at + 3 * SECOND)
    assert head.is_playing(at + 4 * SECOND)
    assert not head.is_playing(at + 6 * SECOND)


def test_an_arrival_wakes_a_listener_who_was_believed_asleep() -> None:
    """The position stood still meanwhile, and goes on from where the ear is now."""
    head, listener = playhead(), Listener()
    at = T0 + SECOND
    head.report(listener.report(at), sent_at(at), at)
    asleep = head.position(at + 7 * SECOND, sent_at(at + 7 * SECOND))
    now = at + 8 * SECOND
    head.receiver_report(arrived(now), now)
    awake = head.position(now, sent_at(now))
    assert (asleep.is_playing, awake.is_playing) == (False, True)
    assert near(asleep.ticks, truth(at + 5 * SECOND, 84))
    assert near(awake.ticks, truth(now, 84))


@pytest.mark.parametrize("ppm", [-400, 0, 400])
def test_the_drift_of_the_listeners_loudspeaker(ppm: int) -> None:
    """Known after half a minute in which the player left the sound as it is; the other seconds do not count."""
    head, listener = playhead(), Listener()
    inserted = 0
    for step in range(1, 400):
        at = T0 + step * 250 * MS
        listener.network_ms = 60 - ppm * 1e-6 * step * 250 + inserted / 48
        if step % 80 == 0:
            inserted += 480
        head.report(listener.report(at, inserted=inserted), sent_at(at), at)
        if step < 4 * 30:
            assert head.drift_ppm is None
    assert head.drift_ppm is not None
    assert abs(head.drift_ppm - ppm) < 40


def test_a_new_connection_begins_anew_on_the_same_clock() -> None:
    """What a report says of packets of the old one counts nothing; the first of the new one is a first measurement."""
    head, listener = playhead(), Listener()
    at = T0 + SECOND
    head.report(listener.report(at), sent_at(at), at)
    told = head.position(at, sent_at(at)).ticks
    head.reconnect(sent_at(at))
    assert not head.has_played
    assert head.position(at, sent_at(at)).source == "estimate"
    newcomer = Listener(network_ms=300)
    later = at + 200 * MS
    assert not head.report(newcomer.report(later), sent_at(later), later)
    assert (head.has_played, head.impossible) == (False, 0)
    later = at + SECOND
    assert head.report(newcomer.report(later), sent_at(later), later)
    position = head.position(later, sent_at(later))
    assert position.source == "playout"
    assert near(position.ticks, truth(later, 334))
    assert position.ticks > told


def test_while_the_player_stretches_the_error_grows_faster() -> None:
    """Between two reports with moving counters the speed is not one."""
    errors = []
    for inserted in (0, 480):
        head, listener = playhead(), Listener()
        at = T0 + SECOND
        head.report(listener.report(at), sent_at(at), at)
        at += 250 * MS
        head.report(listener.report(at, inserted=inserted), sent_at(at), at)
        errors.append(head.position(at + 200 * MS, sent_at(at + 200 * MS)).error_ns)
    assert errors[1] > errors[0] + 10 * MS


@pytest.mark.parametrize("changes", [{"muted": True}, {"paused": True}, {"volume": 0.0}, {"age_ms": 1_500.0}])
def test_a_listener_who_hears_nothing_is_not_playing_and_stands_still(changes: dict[str, Any]) -> None:
    """Muted, paused, turned down, or suspended: packets pass, nobody hears them; afterwards it goes on."""
    head, listener = playhead(), Listener()
    at = T0 + SECOND
    head.report(listener.report(at), sent_at(at), at)
    at += 250 * MS
    head.report(listener.report(at, **changes), sent_at(at), at)
    stopped = head.position(at, sent_at(at))
    at += 600 * MS
    head.report(listener.report(at, **changes), sent_at(at), at)
    still = head.position(at + 100 * MS, sent_at(at + 100 * MS))
    assert not stopped.is_playing
    assert still.ticks == stopped.ticks
    assert near(stopped.ticks, truth(T0 + SECOND + 250 * MS, 84))
    at += 250 * MS
    head.report(listener.report(at), sent_at(at), at)
    again = head.position(at, sent_at(at))
    assert again.is_playing
    assert near(again.ticks, truth(at, 84))


def test_a_page_in_the_background_still_sounds() -> None:
    """Hidden is not silent; but one that then stops reporting sleeps."""
    head, listener = playhead(), Listener()
    at = T0 + SECOND
    head.report(listener.report(at, visible=False), sent_at(at), at)
    assert head.is_playing(at + 2 * SECOND)
    assert not head.is_playing(at + 3 * SECOND)


def test_a_page_that_stops_reporting_falls_asleep_later() -> None:
    """Five seconds without a word: held, and heard no further than those five seconds."""
    head, listener = playhead(), Listener()
    at = T0 + SECOND
    head.report(listener.report(at), sent_at(at), at)
    assert head.is_playing(at + 4 * SECOND)
    asleep = head.position(at + 20 * SECOND, sent_at(at + 20 * SECOND))
    assert not asleep.is_playing
    assert near(asleep.ticks, truth(at + 5 * SECOND, 84))


def test_the_mute_of_our_own_flush_is_not_the_users() -> None:
    """A page mutes until the resume timestamp; only one that stays muted for long after has been muted by hand."""
    head, listener = playhead(), Listener()
    at = T0 + SECOND
    head.report(listener.report(at), sent_at(at), at)
    head.flush(sent_at(at) + SLOT_TICKS)
    at += 50 * MS
    head.report(listener.report(at, muted=True), sent_at(at), at)
    assert head.is_playing(at)
    at += SECOND
    head.report(listener.report(at, muted=True), sent_at(at), at)
    assert not head.is_playing(at)


def test_what_the_page_says_of_its_silence_is_checked() -> None:
    """Its timestamp less the look-ahead; nothing from the future, nothing from before the call."""
    head = playhead()
    assert head.flushed(Flushed(rtp.add(ORIGIN, 30_000), 0.0), 48_000) == 30_000 - 312
    assert head.flushed(Flushed(rtp.add(ORIGIN, 90_000), 0.0), 48_000) is None
    assert head.flushed(Flushed(rtp.add(ORIGIN, -9_000), 0.0), 48_000) is None
    assert head.impossible == 2


def test_arrives_at_tells_when_a_tick_is_heard() -> None:
    """The slot's time and the path."""
    head, listener = playhead(), Listener()
    at = T0 + SECOND
    head.report(listener.report(at), sent_at(at), at)
    assert abs(head.arrives_at(96_000, at) - (T0 + 2 * SECOND + 84 * MS + LOOK_AHEAD_NS)) < MS


numbers = st.one_of(st.floats(-1e15, 1e15), st.sampled_from([0.0, EPOCH_MS, -EPOCH_MS, 1e15, -1e15]))
wild = st.fixed_dictionaries(
    {},
    optional={
        "seq": st.integers(0, 50),
        "t_ms": numbers,
        "rtp": st.one_of(st.none(), st.integers(0, rtp.WRAP - 1)),
        "rtp_t_ms": st.one_of(st.none(), numbers),
        "device_delay_ms": numbers,
        "device_delay_source": st.sampled_from(["playout", "context", "none"]),
        "age_ms": numbers,
        "inserted": st.integers(0, 1 << 53),
        "muted": st.booleans(),
        "paused": st.booleans(),
        "volume": numbers,
        "visible": st.booleans(),
        "offset_ms": numbers,
    },
)


wild_rtcp = st.builds(
    ReceiverReport,
    arrived_ticks=st.integers(-(1 << 40), 1 << 40),
    jitter_ns=st.integers(0, (1 << 32) * SECOND // 48_000),
    rtt_ns=st.one_of(st.none(), st.integers(-(1 << 62), 1 << 62)),
)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3 * SECOND), wild, st.booleans(), st.sampled_from(["", "", "flush", "reconnect"])),
        max_size=25,
    ),
    st.lists(wild_rtcp, max_size=25),
)
def test_no_sequence_of_reports_raises_or_breaks_the_laws(
    script: list[tuple[int, dict[str, Any], bool, str]], rtcp: list[ReceiverReport]
) -> None:
    """Whatever is said: no exception, never past what was sent, never back but after a flush, a new connection
    or an estimate."""
    head, listener = playhead(), Listener()
    at, last = T0 + 100 * MS, 0
    for step, (wait, changes, is_honest, move) in enumerate(script):
        at += wait
        had_played = head.has_played
        if step < len(rtcp):
            head.receiver_report(rtcp[step], at)
        head.report(listener.report(at, **({} if is_honest else changes)), sent_at(at), at)
        if head.has_played and not had_played:
            last = 0
        if move:
            head.flush(sent_at(at)) if move == "flush" else head.reconnect(sent_at(at))
            last = 0
        for now in (at, at + 7 * MS):
            position = head.position(now, sent_at(now))
            assert last <= position.ticks <= sent_at(now)
            assert position.path_delay_ns >= 0
            assert position.error_ns > 0
            last = position.ticks
        at += 7 * MS
