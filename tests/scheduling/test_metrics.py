"""The definitions against a player that is simulated event by event, in fractions, and against the formulas."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breeze_rtc.clock import MS, SECOND
from breeze_rtc.scheduling import metrics
from breeze_rtc.scheduling.metrics import Delivery, Ending

FRAME = 80 * MS


def delivery(
    *chunks_ms: tuple[int, int],
    sent_ms: int = 0,
    ending: Ending = Ending.COMPLETE,
    gap_ms: int | None = None,
    made_ms: int | None = None,
    heard_ms: int | None = None,
) -> Delivery:
    return Delivery(
        sent_ns=sent_ms * MS,
        chunks=tuple((arrival * MS, duration * MS) for arrival, duration in chunks_ms),
        ending=ending,
        gap_ns=None if gap_ms is None else gap_ms * MS,
        made_ns=None if made_ms is None else made_ms * MS,
        heard_ns=None if heard_ms is None else heard_ms * MS,
    )


def any_delivery() -> st.SearchStrategy[Delivery]:
    """Chunks in order, some at the same time, some long before they are needed and some long after."""

    def build(sent: int, steps: list[tuple[int, int]], ended: Ending, gap: int | None, heard: int | None) -> Delivery:
        at, chunks = sent, []
        for wait, duration in steps:
            at += wait
            chunks.append((at, duration))
        made = sum(duration for _, duration in chunks)
        return Delivery(sent, tuple(chunks), ended, gap, made, None if heard is None else min(heard, made))

    return st.builds(
        build,
        st.integers(0, 10**12),
        st.lists(st.tuples(st.integers(0, 3 * 10**8), st.integers(1, 13 * 10**8)), max_size=8),
        st.sampled_from(Ending),
        st.none() | st.integers(0, 10**9),
        st.none() | st.integers(0, 10**10),
    )


class Player:
    """A player, one event after another: a chunk arrives, the start comes, the buffer runs empty."""

    def __init__(self, chunks: tuple[tuple[int, int], ...], prebuffer: Fraction) -> None:
        self.gaps: list[tuple[Fraction, Fraction]] = []
        clock = Fraction(chunks[0][0])
        starts = clock + prebuffer
        buffered = Fraction(0)
        for arrival, duration in chunks:
            # What is played between the last event and this one.
            begin, end = max(clock, starts), max(Fraction(arrival), starts)
            played = end - begin
            if played > buffered:
                self.gaps.append((begin + buffered, end))
                buffered = Fraction(0)
            else:
                buffered -= played
            buffered += duration
            clock = Fraction(arrival)

    @property
    def stood(self) -> Fraction:
        return sum((end - begin for begin, end in self.gaps), Fraction(0))


# ---- the reference ---------------------------------------------------------------------------------------------------


def reference_underruns(d: Delivery) -> list[Fraction]:
    """u_i straight from the formula."""
    a = [Fraction(arrival) for arrival, _ in d.chunks]
    length = [Fraction(duration) for _, duration in d.chunks]
    return [max(Fraction(0), (a[i] - a[0]) - sum(length[:i], Fraction(0))) for i in range(len(a))]


def reference_came(d: Delivery) -> bool:
    return len(d.chunks) > 0 and d.ending in {Ending.COMPLETE, Ending.INTERRUPTED}


@given(any_delivery())
def test_an_ideal_player_stands_as_long_as_the_required_prebuffer(d: Delivery) -> None:
    """And with that prebuffer it does not stand at all; with one nanosecond less it does."""
    needed = metrics.required_prebuffer_ns(d)
    if len(d.chunks) < 2:
        assert needed is None
        return
    assert needed == Player(d.chunks, Fraction(0)).stood == max(reference_underruns(d))
    assert not Player(d.chunks, Fraction(needed)).gaps
    assert needed == 0 or Player(d.chunks, Fraction(needed - 1)).gaps


@given(any_delivery(), st.sampled_from([0, 1, 50 * MS, 100 * MS, 200 * MS]))
def test_a_potential_gap_is_a_gap_of_a_player_with_that_buffer(d: Delivery, epsilon: int) -> None:
    """Epsilon is the buffer of the player that is asked."""
    expected = None if len(d.chunks) < 2 else bool(Player(d.chunks, Fraction(epsilon)).gaps)
    assert metrics.has_potential_gap(d, epsilon) is expected


@given(any_delivery())
def test_one_request_by_the_formulas(d: Delivery) -> None:
    """First packet, first playable, underruns, factors and intervals, in fractions."""
    a = [Fraction(arrival) for arrival, _ in d.chunks]
    length = [Fraction(duration) for _, duration in d.chunks]
    assert metrics.underruns_ns(d) == reference_underruns(d)
    assert metrics.first_packet_ns(d) == (a[0] - d.sent_ns if a else None)
    playable = [a[i] - d.sent_ns for i in range(len(a)) if sum(length[: i + 1]) >= FRAME]
    assert metrics.first_playable_ns(d, FRAME) == (playable[0] if playable else None)
    assert metrics.intervals(d) == [float((a[i] - a[i - 1]) / length[i - 1]) for i in range(1, len(a))]
    for from_first, begin in ((False, d.sent_ns), (True, a[0] if a else 0)):
        factor = metrics.real_time_factor(d, from_first_packet=from_first)
        assert factor == (float((a[-1] - begin) / sum(length)) if a else None)
    if d.ending is not Ending.INTERRUPTED:
        assert metrics.wasted_ns(d) == 0
    else:
        assert metrics.wasted_ns(d) == (None if d.heard_ns is None else sum(length) - d.heard_ns)


@given(st.lists(any_delivery(), max_size=6), st.sampled_from([0, 100 * MS]))
def test_continuity_both_ways_by_the_formulas(ds: list[Delivery], epsilon: int) -> None:
    """By chunks over all that arrived; by requests over those that were to arrive in more than one."""
    later = [u for d in ds for u in reference_underruns(d)[1:]]
    assert metrics.continuity_of_chunks(ds) == (
        float(Fraction(sum(u == 0 for u in later), len(later))) if later else None
    )
    asked = [d for d in ds if not (reference_came(d) and len(d.chunks) == 1)]
    good = [d for d in asked if reference_came(d) and not Player(d.chunks, Fraction(epsilon)).gaps]
    assert metrics.continuity_of_requests(ds, epsilon) == (float(Fraction(len(good), len(asked))) if asked else None)


@given(st.lists(any_delivery(), max_size=6), st.integers(1, 10**9), st.integers(1, 10**11))
def test_goodput_audio_rate_and_waste_by_the_formulas(ds: list[Delivery], within: int, over: int) -> None:
    """Good is complete, soon and without a gap; nothing else is."""
    good = 0
    for d in ds:
        soon = len(d.chunks) > 0 and d.chunks[0][0] - d.sent_ns <= within
        torn = d.gap_ns > 0 if d.gap_ns is not None else bool(d.chunks and Player(d.chunks, Fraction(0)).gaps)
        good += d.ending is Ending.COMPLETE and soon and not torn
    assert metrics.goodput(ds, within_ns=within, over_ns=over) == float(Fraction(good * SECOND, over))
    sound = sum(duration for d in ds for _, duration in d.chunks)
    assert metrics.audio_rate(ds, over_ns=over) == float(Fraction(sound, over))
    interrupted = [d for d in ds if d.ending is Ending.INTERRUPTED]
    if any(d.heard_ns is None for d in interrupted):
        assert metrics.wasted_share(ds) is None
    else:
        lost = sum((d.made_ns or 0) - (d.heard_ns or 0) for d in interrupted)
        assert metrics.wasted_share(ds) == (float(Fraction(lost, sound)) if sound else None)


@given(st.lists(st.integers(-100, 100), min_size=1), st.integers(0, 100))
def test_a_quantile_is_the_smallest_value_that_so_many_do_not_exceed(values: list[int], percent: int) -> None:
    """Nearest rank, no interpolation: every figure is one that was seen."""
    found = metrics.quantile(values, percent / 100)
    reached = [value for value in values if 100 * sum(v <= value for v in values) >= percent * len(values)]
    assert found == min(reached)


# ---- by hand ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("chunks", "stood"), [((200, 1000, 1800, 2600), 0), ((200, 2300, 2400, 2600), 1100)])
def test_the_same_factor_with_and_without_a_gap(chunks: tuple[int, ...], stood: int) -> None:
    """The counter-example of llama.cpp-omni#123, with chunks of 1 s: the real-time factor does not see the gap."""
    d = delivery(*((arrival, 1_000) for arrival in chunks))
    assert metrics.real_time_factor(d) == 0.65
    assert metrics.required_prebuffer_ns(d) == stood * MS


def test_a_player_can_start_with_a_whole_frame_in_however_many_pieces() -> None:
    """80 ms are a frame; and a first packet is soon enough when it comes at the last moment that is."""
    pieces = delivery((30, 40), (50, 40), (60, 80))
    assert metrics.first_packet_ns(pieces) == 30 * MS
    assert metrics.first_playable_ns(pieces, FRAME) == 50 * MS
    assert metrics.is_good(pieces, within_ns=30 * MS)
    assert not metrics.is_good(pieces, within_ns=30 * MS - 1)


def test_a_reply_of_one_chunk_is_neither_continuous_nor_torn() -> None:
    """It is left out of the share; alone, it leaves no share to tell."""
    one, torn = delivery((40, 80)), delivery((40, 80), (240, 80))
    assert metrics.has_potential_gap(one) is None
    assert metrics.continuity_of_requests([one]) is None
    assert metrics.continuity_of_requests([one, torn]) == 0
    assert metrics.is_good(one, within_ns=50 * MS)


@pytest.mark.parametrize("ending", [Ending.REFUSED, Ending.FAILED, Ending.UNKNOWN])
def test_what_did_not_come_is_failed(ending: Ending) -> None:
    """Even if what came of it was perfect: nobody knows that it was all."""
    perfect = delivery((40, 80), (60, 160))
    broken = delivery((40, 80), (60, 160), ending=ending)
    nothing = delivery(ending=ending)
    assert metrics.continuity_of_requests([perfect, broken, nothing]) == 1 / 3
    assert metrics.goodput([perfect, broken, nothing], within_ns=SECOND, over_ns=SECOND) == 1


def test_missing_data_is_never_good() -> None:
    """A complete reply without a chunk, and an interruption whose position nobody knows."""
    empty = delivery()
    assert metrics.first_packet_ns(empty) is None
    assert not metrics.is_good(empty, within_ns=SECOND)
    assert metrics.continuity_of_requests([empty]) == 0
    unknown = delivery((40, 80), ending=Ending.INTERRUPTED, made_ms=80)
    assert metrics.wasted_share([unknown]) is None
    assert metrics.quantile([], 0.5) is None


def test_the_players_word_outranks_the_ideal_player() -> None:
    """A listener with a buffer did not hear the potential gap; another's player broke where the ideal one would not."""
    late = delivery((40, 80), (140, 80), gap_ms=0)
    lossy = delivery((40, 80), (60, 80), gap_ms=20)
    assert metrics.has_potential_gap(late)
    assert metrics.is_good(late, within_ns=SECOND)
    assert not metrics.is_good(lossy, within_ns=SECOND)
