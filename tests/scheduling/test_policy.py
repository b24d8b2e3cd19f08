"""Each switch of the policy, by what it changes; where that takes many streams, in the simulator."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest
from desk import BUCKETS, COSTS_MS, Desk, costs, stages, streams_of

from breeze_rtc.clock import MS
from breeze_rtc.scheduling.choice import DEFERRAL_NS
from breeze_rtc.scheduling.costs import CostTable
from breeze_rtc.scheduling.machines import H100_GRAPH_COSTS, H100_SPECS, LinearCost, SimulatedCosts, warmed_up
from breeze_rtc.scheduling.metrics import Ending, required_prebuffer_ns
from breeze_rtc.scheduling.policy import FirstSound, Order, Policy
from breeze_rtc.scheduling.scheduler import Scheduler
from breeze_rtc.scheduling.simulator import Outcome, SimulatedListener, Utterance, simulate
from breeze_rtc.scheduling.step import DeadlineMissed, Stage, StageSpec, Step, StepResult, Why
from breeze_rtc.scheduling.stream import Priority

RATE, FRAME = 24_000, 1_920
ONE_AT_A_TIME = {stage: StageSpec(max_rows=1, buckets=(1,), max_tokens=64) for stage in Stage}


def simulated(
    policy: Policy,
    utterances: list[Utterance],
    *,
    concurrency: int | None = None,
    machine: SimulatedCosts = H100_GRAPH_COSTS,
    seed: int | None = 1,
) -> tuple[list[Outcome], list[Step]]:
    """What became of the utterances on the simulated H100, and the steps that were run."""
    steps: list[Step] = []

    class Watched(Scheduler):
        def step_done(self, step: Step, result: StepResult, now: int) -> None:
            steps.append(step)
            super().step_done(step, result, now)

    scheduler = Watched(
        specs=H100_SPECS,
        sample_rate=RATE,
        frame_samples=FRAME,
        slots=64,
        kv_pages=60 * 64,
        page_tokens=16,
        costs=warmed_up(machine, H100_SPECS, policy.ladder),
        policy=policy,
    )
    run = simulate(
        scheduler,
        utterances,
        costs=machine,
        sample_rate=RATE,
        frame_samples=FRAME,
        concurrency=concurrency,
        uniform=None if seed is None else random.Random(seed).random,
    )
    return run.outcomes, steps


def speech(count: int, *, every_ms: int = 0) -> list[Utterance]:
    source = random.Random(7)
    return [
        Utterance(frames=source.randint(20, 88), pieces=((0, 16),), arrival_ns=number * every_ms * MS)
        for number in range(count)
    ]


def gaps(outcomes: list[Outcome]) -> int:
    """Utterances that a player without a buffer would have torn."""
    return sum((required_prebuffer_ns(outcome.delivery(RATE, FRAME)) or 0) > 0 for outcome in outcomes)


# ---- the dataclass ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    [
        Policy(),
        Policy(order=Order.QOE, first_sound=FirstSound.ALWAYS, lead_cap_ns=None, ladder=(4, 16), guard_ns=0),
        Policy(predicts=False, rescues=False),
    ],
)
def test_a_policy_is_the_same_after_it_was_written_down(policy: Policy) -> None:
    """A trace carries it as JSON."""
    assert Policy.from_state(json.loads(json.dumps(policy.state()))) == policy


def test_a_policy_that_names_an_unknown_rule_is_refused() -> None:
    """A trace of another version would be replayed wrongly."""
    with pytest.raises(TypeError):
        Policy.from_state({**Policy().state(), "sings": True})


@pytest.mark.parametrize(
    "changed",
    [
        *({"order": order} for order in Order if order is not Order.SLACK),
        {"first_sound": FirstSound.ALWAYS},
        {"first_sound": FirstSound.IN_ORDER},
        {"lead_cap_ns": None},
        {"lead_cap_ns": 600 * MS},
        {"lead_by_load": False},
        {"ladder": (1, 4)},
        {"chunk_by_slack": False},
        {"flushes_early": False},
        {"prefills_together": False},
        {"waits_for_rows": False},
        {"rescues": False},
        {"uses_reports": False},
        {"predicts": False},
        {"guard_ns": 20 * MS},
    ],
    ids=str,
)
def test_every_switch_is_read(changed: dict[str, Any]) -> None:
    """With the rule off, a machine that is nearly full does something else."""
    listener = SimulatedListener(network_ns=20 * MS, buffer_ns=100 * MS, report_every_ns=200 * MS)
    calls = [replace(call, listener=listener) for call in speech(90, every_ms=40)]
    machine = {
        stage: LinearCost(cost.base_ns, 2 * cost.row_ns, cost.unit_ns) for stage, cost in H100_GRAPH_COSTS.items()
    }
    assert simulated(Policy(**changed), calls, machine=machine)[1] != simulated(Policy(), calls, machine=machine)[1]


# ---- 1 and 2: first sounds -------------------------------------------------------------------------------------------


def tight_desk(policy: Policy) -> Desk:
    """One stream with 25 ms of sound left, which needs 14 for more, and a new one whose first sound needs 18."""
    desk = Desk(policy=policy)
    desk.open(1)
    desk.until_spoken(1)
    desk.now += 55 * MS
    desk.open(2)
    return desk


def test_a_feasible_first_sound_makes_nobody_late() -> None:
    """Otherwise the one in danger is helped first; and the steps say so."""
    desk = tight_desk(Policy())
    step = desk.step()
    assert (step.stage, streams_of(step), step.why) == (Stage.BACKBONE, [1], Why.LEAST_SLACK)
    assert step.slack_ns == 11 * MS
    assert step.first_sound_ns == 18 * MS
    desk.until_spoken(2)
    assert not [event for event in desk.happened if isinstance(event, DeadlineMissed)]


def test_first_sounds_that_always_go_first_make_others_late() -> None:
    """The naive rule, for comparison."""
    desk = tight_desk(Policy(first_sound=FirstSound.ALWAYS))
    step = desk.step()
    assert (step.stage, streams_of(step), step.why) == (Stage.TEXT, [2], Why.FIRST_SOUND_ALWAYS)
    desk.until_spoken(2)
    desk.until(200)
    assert [event.stream for event in desk.happened if isinstance(event, DeadlineMissed)] == [1]


def test_a_first_sound_in_order_waits_for_its_turn() -> None:
    """First come, first served, with no limit to how far ahead: the second speaks when the first has been made."""
    desk = Desk(policy=Policy(order=Order.FIRST_COME, first_sound=FirstSound.IN_ORDER, lead_cap_ns=None))
    desk.open(1, frames=30)
    desk.until_spoken(1)
    desk.open(2)
    desk.until_spoken(2)
    assert sum(desk.chunks(1)) == 30


@pytest.mark.parametrize("is_bounded", [True, False])
def test_deferral_has_a_bound(is_bounded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind streams that are always late, a first sound starts after 40 ms; without the bound, not in two seconds."""
    monkeypatch.setitem(COSTS_MS, Stage.DEPTH, 90)
    desk = Desk(table=CostTable(), policy=Policy(deferral_is_bounded=is_bounded, admits_by_load=False))
    for stream in range(1, 8):
        desk.open(stream)
    desk.until_spoken(*range(1, 8))
    desk.until(400)
    desk.open(8, interactive=False)
    opened_at = desk.now
    desk.steps.clear()
    desk.until(desk.now // MS + 2_000)
    served = [step for step in desk.steps if 8 in streams_of(step)]
    if is_bounded:
        assert served[0].why is Why.FIRST_SOUND_OVERDUE
        assert desk.of(8)
    else:
        assert not served
    assert desk.now - opened_at > DEFERRAL_NS[Priority.LIVE]


# ---- 3 and 4: lead and chunks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cap_ms", [400, 1_200, None])
def test_the_lead_cap_bounds_what_is_made_ahead(cap_ms: int | None) -> None:
    """None: as far as there is time."""
    policy = Policy(lead_cap_ns=cap_ms and cap_ms * MS, lead_by_load=False)
    (outcome,), _ = simulated(policy, [Utterance(frames=100)])
    if cap_ms is None:
        assert outcome.most_ahead_ns > 4_000 * MS
    else:
        assert cap_ms * MS // 2 < outcome.most_ahead_ns <= cap_ms * MS


def test_an_idle_machine_keeps_little_ahead_and_a_busy_one_as_much_as_ever() -> None:
    """One listener of an H100 has half a second in hand; among fifty as much as the cap allows.  Nobody has a gap."""
    ahead = []
    for streams in (1, 50):
        outcomes, _ = simulated(Policy(), speech(streams + 20), concurrency=streams)
        assert gaps(outcomes) == 0
        ahead.append(max(outcome.most_ahead_ns for outcome in outcomes) // MS)
    print(ahead)
    assert ahead[0] <= 560
    assert ahead[1] > 900


def test_a_machine_that_stumbles_keeps_more_ahead() -> None:
    """A step that takes 400 ms more than it should, once: from then on there is sound for as long."""
    desk = Desk(policy=Policy())
    desk.open(1, frames=200)
    leads = []
    for until_ms in (4_000, 8_000):
        least = 1 << 60
        while desk.now < until_ms * MS:
            desk.until(desk.now // MS + 20)
            if desk.now > (until_ms - 2_000) * MS:
                least = min(least, desk.lead_ms(1))
        leads.append(least)
        while (step := desk.scheduler.next_step(desk.now)) is None or step.stage is not Stage.BACKBONE:
            if step is not None:
                desk.done(step)
            desk.now += MS
        desk.done(step, extra_ms=400)
    print(leads)
    assert leads[0] < 300
    assert leads[1] >= 400


@pytest.mark.parametrize(("frame_ms", "most_ms"), [(20, 1_200), (70, 3_000)])
def test_a_machine_hardly_faster_than_speech_lives_on_the_lead_it_has(
    monkeypatch: pytest.MonkeyPatch, frame_ms: int, most_ms: int
) -> None:
    """A sink that has waited for three seconds of sound before it began: such a machine goes on making, one with time
    to spare lets the lead melt to its cap."""
    monkeypatch.setitem(COSTS_MS, Stage.BACKBONE, frame_ms - 11)
    desk = Desk(policy=Policy())
    desk.open(1, frames=200)
    desk.until_spoken(1)
    for _ in range(40):
        desk.report(1, dry_at=desk.now + 3_000 * MS, heard_ms=0)
        desk.until(desk.now // MS + 100)
    made_ms = desk.samples(1) * 1_000 // RATE
    print(made_ms)
    assert (made_ms > most_ms) == (frame_ms == 70)


def test_a_ladder_of_one_rung_is_a_fixed_chunk() -> None:
    """The first sound waits for all of it, and what is left at the end goes as it is."""
    (outcome,), _ = simulated(Policy(ladder=(16,), lead_cap_ns=None, flushes_early=False), [Utterance(frames=40)])
    assert outcome.chunks == [16, 16, 8]


@pytest.mark.parametrize("is_by_slack", [True, False])
def test_chunks_grow_by_slack_or_by_the_ladder(is_by_slack: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame takes 53 ms of its 80: two in a row would come too late for the second chunk."""
    monkeypatch.setitem(COSTS_MS, Stage.DEPTH, 50)
    policy = Policy(chunk_by_slack=is_by_slack, flushes_early=False, admits_by_load=False)
    desk = Desk(table=costs({**COSTS_MS, Stage.DEPTH: 50}), policy=policy)
    desk.open(1)
    desk.until(500)
    assert desk.chunks(1)[:3] == ([1, 1, 1] if is_by_slack else [1, 2, 4])
    assert bool([event for event in desk.happened if isinstance(event, DeadlineMissed)]) is not is_by_slack


@pytest.mark.parametrize(
    ("policy", "stage"),
    [
        (Policy(), Stage.CODEC),
        (Policy(flushes_early=False), Stage.BACKBONE),
        (Policy(guard_ns=0), Stage.BACKBONE),
        (Policy(guard_ns=0, flushes_early=False), Stage.BACKBONE),
    ],
)
def test_a_chunk_goes_early_unless_the_policy_says_otherwise(policy: Policy, stage: Stage) -> None:
    """18 ms are left; a second frame, both in the codec, and the guard take 18."""
    desk = Desk(policy=policy)
    desk.open(1)
    desk.until_spoken(1)
    desk.step()
    desk.step()
    desk.now += 52 * MS
    step = desk.step()
    assert step.stage is stage
    assert (step.why is Why.CHUNK_EARLY) is (stage is Stage.CODEC)


# ---- 5 and 6: batches ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "rows"), [(Policy(), 3), (Policy(prefills_together=False), 1)])
def test_prompts_run_together_unless_the_policy_says_otherwise(policy: Policy, rows: int) -> None:
    """Texts always do."""
    desk = Desk(policy=policy)
    for stream in (1, 2, 3):
        desk.open(stream)
    assert [(step.stage, len(step.rows)) for step in (desk.step(), desk.step())] == [
        (Stage.TEXT, 3),
        (Stage.PREFILL, rows),
    ]


def test_rows_that_wait_for_each_other_save_steps_and_make_nobody_late() -> None:
    """Twelve streams far ahead: a fifth of the machine's time is saved, and every wait left everybody slack."""
    calls = speech(60)
    far = Policy(lead_by_load=False)
    waiting, waiting_steps = simulated(far, calls, concurrency=12)
    hasty, hasty_steps = simulated(replace(far, waits_for_rows=False), calls, concurrency=12)
    assert gaps(waiting) == gaps(hasty) == 0
    assert len(waiting_steps) < 0.8 * len(hasty_steps)
    waits = [step for step in waiting_steps if step.why is Why.JOINS_CODEC]
    assert waits
    assert all(step.slack_ns is not None and step.slack_ns > 0 for step in waits)
    assert not any(step.why is Why.JOINS_CODEC for step in hasty_steps)


def test_waiting_saves_nothing_where_rows_cost_what_they_cost_alone() -> None:
    """The cost table decides: on such a machine no frame waits for another."""
    alone = {
        Stage.TEXT: LinearCost(1 * MS),
        Stage.PREFILL: LinearCost(2 * MS),
        Stage.BACKBONE: LinearCost(0, row_ns=1 * MS),
        Stage.DEPTH: LinearCost(0, row_ns=1 * MS),
        Stage.CODEC: LinearCost(0, unit_ns=1 * MS),
    }
    calls = speech(20)
    far = Policy(lead_by_load=False)
    _, steps = simulated(far, calls, concurrency=4, machine=alone, seed=None)
    _, hasty_steps = simulated(replace(far, waits_for_rows=False), calls, concurrency=4, machine=alone, seed=None)
    assert stages(steps) == stages(hasty_steps)


@pytest.mark.parametrize(
    ("policy", "streams", "why"),
    [(Policy(), [2], Why.RESCUE_FRAME), (Policy(rescues=False), [2, 1], Why.LEAST_SLACK)],
)
def test_a_stream_in_danger_is_rescued_by_a_smaller_step(policy: Policy, streams: list[int], why: Why) -> None:
    """Frames for both need 36 ms and the codec 4; stream 2 has 35 left, stream 1 more."""
    table = CostTable(
        {
            **{(Stage.BACKBONE, rows, 1): (2 + 8 * rows) * MS for rows in BUCKETS},
            **{(Stage.DEPTH, rows, 1): (2 + 8 * rows) * MS for rows in BUCKETS},
            **{(Stage.CODEC, 8, 16): 4 * MS, (Stage.TEXT, 4, 64): 2 * MS, (Stage.PREFILL, 4, 32): 5 * MS},
        }
    )
    desk = Desk(table=table, policy=policy)
    desk.open(1)
    desk.open(2)
    desk.until_spoken(1, 2)
    desk.now += 45 * MS
    desk.report(1, dry_at=desk.now + 80 * MS)
    step = desk.step()
    assert (step.stage, streams_of(step), step.why) == (Stage.BACKBONE, streams, why)


# ---- 7, and the loop -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_by_load", [True, False])
def test_admission_is_by_load_unless_the_policy_says_otherwise(is_by_load: bool) -> None:
    """On a machine five times slower than the H100, 24 listeners are too many."""
    slow = {
        stage: LinearCost(5 * cost.base_ns, 5 * cost.row_ns, 5 * cost.unit_ns)
        for stage, cost in H100_GRAPH_COSTS.items()
    }
    outcomes, _ = simulated(Policy(admits_by_load=is_by_load), speech(24, every_ms=200), machine=slow)
    assert any(outcome.ending is Ending.REFUSED for outcome in outcomes) is is_by_load


@pytest.mark.parametrize(("policy", "moves"), [(Policy(), True), (Policy(uses_reports=False), False)])
def test_reports_move_deadlines_unless_the_policy_says_otherwise(policy: Policy, moves: bool) -> None:
    """A listener 150 ms behind the estimate is fed that much later."""
    desk = Desk(policy=policy)
    desk.open(1)
    desk.until(2_000)
    before = desk.scheduler.wake_at()
    desk.report(1, heard_ms=(desk.now // MS) - 168 - 60)
    assert (desk.scheduler.wake_at() != before) is moves


def test_without_predictions_the_same_load_makes_gaps() -> None:
    """48 streams: nobody's slack is known, so whose turn it is goes."""
    calls = speech(100)
    assert gaps(simulated(Policy(), calls, concurrency=48)[0]) == 0
    blind, steps = simulated(Policy(predicts=False), calls, concurrency=48)
    assert gaps(blind) > 10
    assert {step.why for step in steps} == {Why.IN_TURN, Why.COMPLETES_FRAMES}


# ---- other orders ----------------------------------------------------------------------------------------------------


def turns(policy: Policy, steps: int = 6) -> list[int]:
    """Whom the backbone serves, one stream at a time, after both have spoken: 1 is a batch, 2 a call."""
    desk = Desk(policy=policy, specs=ONE_AT_A_TIME, table=costs())
    desk.open(1, priority=Priority.BATCH, interactive=False)
    desk.open(2)
    desk.until_spoken(1, 2)
    served: list[int] = []
    while len(served) < steps:
        step = desk.step()
        if step.stage is Stage.BACKBONE:
            served += streams_of(step)
    return served


def test_the_order_is_that_of_the_policy() -> None:
    """First come, by class, and by turns."""
    apart = Policy(lead_cap_ns=None, ladder=(1,), waits_for_rows=False)
    assert turns(replace(apart, order=Order.FIRST_COME)) == [1] * 6
    assert turns(replace(apart, order=Order.CLASS)) == [2] * 6
    assert turns(replace(apart, order=Order.ROUND_ROBIN)) in ([1, 2] * 3, [2, 1] * 3)


def test_least_slack_serves_the_shorter_buffer_and_quality_the_shorter_utterance() -> None:
    """Stream 1 has been heard for two seconds and has a little less in hand than stream 2, which has just spoken."""
    served = {}
    for order in (Order.SLACK, Order.QOE):
        policy = Policy(order=order, waits_for_rows=False, lead_by_load=False)
        desk = Desk(policy=policy, specs=ONE_AT_A_TIME)
        desk.open(1)
        desk.until(2_000)
        desk.now += (desk.lead_ms(1) - 90) * MS
        desk.open(2)
        desk.until_spoken(2)
        assert desk.lead_ms(1) < desk.lead_ms(2)
        while (step := desk.step()).stage is not Stage.BACKBONE:
            pass
        served[order] = streams_of(step)
    assert served == {Order.SLACK: [1], Order.QOE: [2]}


def test_a_critical_stream_goes_first_and_the_codec_waits_for_one() -> None:
    """With more than a second in hand nobody is critical: frames are made and not decoded."""
    desk = Desk(policy=Policy(order=Order.CRITICAL, lead_cap_ns=None, ladder=(4,)))
    desk.open(1)
    desk.until(400)
    assert desk.lead_ms(1) > 1_100
    desk.steps.clear()
    for _ in range(20):
        desk.step()
    assert Stage.CODEC not in stages(desk.steps)
    # A newcomer is critical: it is served first.
    desk.open(2)
    assert streams_of(desk.step()) == [2]
