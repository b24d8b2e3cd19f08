"""Reports in, position at the ear out, on a virtual clock."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from breeze_rtc.clock import MS, SECOND
from breeze_rtc.media import rtp
from breeze_rtc.transport.playhead import DEVICE_DELAY_NS, LOOK_AHEAD_NS, Playhead
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


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3 * SECOND), wild, st.booleans(), st.booleans()), max_size=25))
def test_no_sequence_of_reports_raises_or_breaks_the_laws(
    script: list[tuple[int, dict[str, Any], bool, bool]],
) -> None:
    """Whatever the page says: no exception, never past what was sent, never back but after a flush or an estimate."""
    head, listener = playhead(), Listener()
    at, last = T0 + 100 * MS, 0
    for wait, changes, is_honest, is_flush in script:
        at += wait
        had_played = head.has_played
        head.report(listener.report(at, **({} if is_honest else changes)), sent_at(at), at)
        if head.has_played and not had_played:
            last = 0
        if is_flush:
            head.flush(sent_at(at))
            last = 0
        for now in (at, at + 7 * MS):
            position = head.position(now, sent_at(now))
            assert last <= position.ticks <= sent_at(now)
            assert position.path_delay_ns >= 0
            assert position.error_ns > 0
            last = position.ticks
        at += 7 * MS
