"""One ticker for all calls, on a virtual clock."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from breeze_rtc.clock import MS, SECOND, US, MonotonicClock, VirtualClock
from breeze_rtc.transport.pacer import PHASE_NS, PHASES, TOGETHER, Pacer, Phases, Tick
from breeze_rtc.transport.playout import SLOT_NS, SLOT_TICKS, Playout

T0 = 7 * SECOND + 123


def test_each_call_is_told_once_a_slot_never_early() -> None:
    """Ten calls over five phases for a second: fifty times each, 20 ms apart."""
    phases, now = Phases(), T0
    told: dict[int, list[int]] = {call: [] for call in range(10)}
    first_at = {call: phases.join(lambda call=call: told[call].append(now), now) for call in told}
    while (next_at := phases.next_at()) is not None and next_at < T0 + SECOND:
        now = next_at
        phases.run(now)
    assert all(times == [first_at[call] + k * SLOT_NS for k in range(50)] for call, times in told.items())


def test_few_calls_go_together_and_many_spread_evenly() -> None:
    """Eight share a wake-up before there is a second one; with many, each phase has as many as the others."""
    phases = Phases()
    starts = [phases.join(lambda call=call: None, T0) for call in range(60)]
    assert 0 < starts[0] - T0 <= PHASE_NS
    assert len({start % SLOT_NS for start in starts[:TOGETHER]}) == 1
    assert len({start % SLOT_NS for start in starts[: TOGETHER + 1]}) == 2
    assert Counter(start % SLOT_NS for start in starts) == dict.fromkeys((p * PHASE_NS for p in range(PHASES)), 12)


def test_one_that_comes_back_keeps_its_phase() -> None:
    """Its slot clock goes on, so its packets must leave at the old times."""
    phases = Phases()
    first = phases.join(lambda: None, T0)
    back = phases.join(lambda: None, T0 + SECOND, start_ns=first)
    assert (back - first) % SLOT_NS == 0


def test_a_stall_is_one_call_to_each() -> None:
    """What was missed, the slot clock knows; the ticker does not make up for it."""
    phases = Phases()
    told: list[str] = []
    phases.join(lambda: told.append("a"), T0)
    phases.join(lambda: told.append("b"), T0)
    phases.run(T0 + SECOND)
    assert sorted(told) == ["a", "b"]
    next_at = phases.next_at()
    assert next_at is not None
    assert T0 + SECOND < next_at <= T0 + SECOND + SLOT_NS


def test_ten_minutes_do_not_drift() -> None:
    """A timer of 20 ms after each packet would lose the time that packets cost: here 0.7 ms each, for three calls.

    Reproduction 20 (openclaw#119070, vocode#269).
    """
    phases, clock = Phases(), VirtualClock(T0)
    calls = [Playout() for _ in range(3)]

    def tick(call: Playout) -> None:
        while call.next_at() <= clock.now():
            call.next_slot(clock.now())
            clock.advance(700 * US)

    for call in calls:
        call.start(phases.join(partial(tick, call), clock.now()))
    while clock.now() < T0 + 600 * SECOND:
        next_at = phases.next_at()
        assert next_at is not None
        phases.run(clock.advance_to(next_at))
    for call in calls:
        assert call.clock is not None
        assert call.missed_slots == 0
        assert 0 <= call.clock.ticks_at(clock.now()) - call.sent_ticks + SLOT_TICKS <= SLOT_TICKS


def test_one_who_left_is_not_told_any_more() -> None:
    """Not even in the round in which another sends it away; and without anybody there is nothing to wake for."""
    phases, now = Phases(), T0
    told: list[str] = []

    def last() -> None:
        told.append("last")

    def first() -> None:
        phases.leave(last)

    phases.join(first, now)
    phases.join(last, now, start_ns=phases.next_at())
    phases.run(now + SLOT_NS)
    phases.leave(first)
    phases.leave(first)
    assert told == []
    assert phases.next_at() is None


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["join", "leave", "run"]), st.integers(0, 60)), max_size=60))
def test_nobody_is_told_twice_and_somebody_is_always_next(script: list[tuple[str, int]]) -> None:
    """Whoever comes, goes or stalls, and whenever the ticker gets to run."""
    phases, now = Phases(), T0
    told: list[str] = []
    members: list[Tick] = []
    for number, (verb, ms) in enumerate(script):
        now += ms * MS
        if verb == "join":
            members.append(lambda name=str(number): told.append(name))
            assert now < phases.join(members[-1], now) <= now + SLOT_NS
        elif verb == "leave" and members:
            phases.leave(members.pop())
        else:
            told.clear()
            phases.run(now)
            assert len(set(told)) == len(told) <= len(members)
            next_at = phases.next_at()
            assert (next_at is None) == (not members)
            assert next_at is None or now < next_at <= now + SLOT_NS


async def test_it_runs_on_the_loop_and_holds_no_timer_without_calls() -> None:
    """Real time: never early, and quiet when the last call has left."""
    pacer, clock, done = Pacer(), MonotonicClock(), asyncio.Event()
    times: list[int] = []

    def tick() -> None:
        times.append(clock.now())
        if len(times) == 5:
            pacer.leave(tick)
            done.set()

    first_at = pacer.join(tick)
    await asyncio.wait_for(done.wait(), 10)
    assert times[0] >= first_at
    assert [time >= first_at + k * SLOT_NS for k, time in enumerate(times)] == [True] * 5
    assert pacer._timer is None


async def test_a_loop_that_stood_still_is_complained_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """In words for whoever wrote the callback that held it; not again within ten seconds."""
    clock, woken = VirtualClock(T0), asyncio.Event()
    pacer = Pacer(clock)
    pacer.join(woken.set)
    for stall_ms in (100, 400, 400):
        woken.clear()
        clock.advance(stall_ms * MS)  # before the timer can fire
        await woken.wait()
    pacer.leave(woken.set)
    (complaint,) = caplog.messages
    assert "asyncio.to_thread" in complaint
