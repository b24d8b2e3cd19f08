"""The scheduler at work in virtual time.  All figures here are simulated."""

from __future__ import annotations

import random

import pytest

from breeze_rtc.clock import MS, SECOND
from breeze_rtc.scheduling import metrics
from breeze_rtc.scheduling.admission import Admission
from breeze_rtc.scheduling.chunking import LADDER
from breeze_rtc.scheduling.costs import CostKey, size_of
from breeze_rtc.scheduling.machines import (
    H100_GRAPH_COSTS,
    H100_SPECS,
    MACHINES,
    LinearCost,
    SimulatedCosts,
    cost_ns,
    measured_times,
    warmed_up,
)
from breeze_rtc.scheduling.metrics import Ending
from breeze_rtc.scheduling.policy import Policy
from breeze_rtc.scheduling.scheduler import Scheduler
from breeze_rtc.scheduling.simulator import LazyCapture, Outcome, SimulatedListener, Takeover, Utterance, simulate
from breeze_rtc.scheduling.step import Stage, StageSpec, Step, StepResult
from breeze_rtc.scheduling.stream import Feed, Priority
from breeze_rtc.scheduling.trace import TraceWriter, replay

RATE, FRAME = 24_000, 1_920
FRAME_NS = 80 * MS
SILENT = SimulatedListener()
REPORTING = SimulatedListener(network_ns=30 * MS, buffer_ns=80 * MS, report_every_ns=200 * MS)


def run(
    utterances: list[Utterance],
    *,
    costs: SimulatedCosts = H100_GRAPH_COSTS,
    concurrency: int | None = None,
    seed: int | None = None,
    slots: int = 64,
    until_heard: bool = False,
    captures: LazyCapture | None = None,
    trace: TraceWriter | None = None,
) -> list[Outcome]:
    scheduler = Scheduler(
        specs=H100_SPECS,
        sample_rate=RATE,
        frame_samples=FRAME,
        slots=slots,
        kv_pages=60 * slots,
        page_tokens=16,
        costs=warmed_up(costs, H100_SPECS, LADDER),
        trace=trace,
    )
    return simulate(
        scheduler,
        utterances,
        costs=costs,
        sample_rate=RATE,
        frame_samples=FRAME,
        concurrency=concurrency,
        until_heard=until_heard,
        uniform=None if seed is None else random.Random(seed).random,
        captures=captures,
    ).outcomes


def speech(count: int, *, seed: int = 1, listener: SimulatedListener = SILENT) -> list[Utterance]:
    """Sentences of 1.6 to 7 s."""
    source = random.Random(seed)
    return [
        Utterance(frames=source.randint(20, 88), pieces=((0, source.randint(8, 24)),), listener=listener)
        for _ in range(count)
    ]


def prebuffer_ns(outcome: Outcome) -> int:
    needed_ns = metrics.required_prebuffer_ns(outcome.delivery(RATE, FRAME))
    assert needed_ns is not None, "these utterances have several chunks"
    return needed_ns


def wasted_ns(outcome: Outcome) -> int | None:
    return metrics.wasted_ns(outcome.delivery(RATE, FRAME))


def p95_ms(outcomes: list[Outcome]) -> float:
    times = sorted(outcome.first_packet_ns for outcome in outcomes if outcome.first_packet_ns is not None)
    return times[int(0.95 * len(times))] / MS


SLOW_COSTS: SimulatedCosts = {
    Stage.TEXT: LinearCost(10 * MS),
    Stage.PREFILL: LinearCost(20 * MS),
    Stage.BACKBONE: LinearCost(20 * MS),
    Stage.DEPTH: LinearCost(34 * MS),
    Stage.CODEC: LinearCost(30 * MS, unit_ns=2 * MS),
}
"""A machine that makes 80 ms of sound in 86 ms, one frame at a time, and in 64 ms by fours."""


def test_a_machine_too_slow_for_single_frames_pauses_a_few_times_not_after_each() -> None:
    """Once the listener has run dry, chunks that the machine sustains build up sound in hand again."""
    (outcome,) = run([Utterance(frames=88, listener=SILENT)], costs=SLOW_COSTS)
    assert outcome.ending is Ending.COMPLETE
    assert outcome.true_gaps <= 2
    assert outcome.missed_deadlines <= 2


def test_one_stream_alone_speaks_after_its_four_steps() -> None:
    """Text, prefill, depth and codec of the table, and nothing between them."""
    (outcome,) = run([Utterance(frames=30, pieces=((0, 16),))])
    expected = sum(
        cost_ns(H100_GRAPH_COSTS, stage, 1, units)
        for stage, units in ((Stage.TEXT, 16), (Stage.PREFILL, 16), (Stage.DEPTH, 1), (Stage.CODEC, 1))
    )
    assert outcome.first_packet_ns == expected
    assert outcome.ending is Ending.COMPLETE
    assert outcome.samples == 30 * FRAME
    assert sum(outcome.chunks) == 30


def test_the_same_seed_gives_the_same_outcomes() -> None:
    """And another seed others: the noise is there, and it is all there is."""
    calls = speech(10, listener=REPORTING)
    first = run(calls, concurrency=4, seed=3)
    assert run(calls, concurrency=4, seed=3) == first
    assert run(calls, concurrency=4, seed=4) != first


def test_sixteen_streams_speak_soon_and_without_gaps() -> None:
    """Closed loop on the simulated H100: first packets within 40 ms, and nobody needs a buffer."""
    outcomes = run(speech(100), concurrency=16, seed=1)
    assert {outcome.ending for outcome in outcomes} == {Ending.COMPLETE}
    assert p95_ms(outcomes) < 40
    assert [prebuffer_ns(outcome) for outcome in outcomes] == [0] * 100


def test_no_running_stream_starves_under_a_burst() -> None:
    """Sixteen speak, sixteen more come at once: they speak soon, and those who were speaking go on without a gap."""
    running = [Utterance(frames=80, arrival_ns=1 + 37 * MS * number) for number in range(16)]
    burst = [Utterance(frames=40, arrival_ns=1_500 * MS) for _ in range(16)]
    outcomes = run([*running, *burst], seed=1)
    assert max(prebuffer_ns(outcome) for outcome in outcomes[:16]) == 0
    assert {outcome.ending for outcome in outcomes} == {Ending.COMPLETE}
    assert p95_ms(outcomes[16:]) < 80


def test_a_burst_does_not_starve_listeners_who_are_short() -> None:
    """Even when the sixteen have just begun, and have one frame in hand each, nobody waits for more than a frame."""
    running = [Utterance(frames=80, arrival_ns=1) for _ in range(16)]
    burst = [Utterance(frames=40, arrival_ns=60 * MS) for _ in range(16)]
    outcomes = run([*running, *burst], seed=1)
    assert max(prebuffer_ns(outcome) for outcome in outcomes) < FRAME_NS
    assert p95_ms(outcomes) < 130


def test_nobody_is_generated_past_the_lead_cap() -> None:
    """1.2 s for a listener without a buffer; a batch has no cap."""
    outcomes = run([*speech(80), Utterance(frames=100, interactive=False, priority=Priority.BATCH)], concurrency=48)
    assert 900 * MS < max(outcome.most_ahead_ns for outcome in outcomes[:-1]) <= 1_200 * MS
    assert outcomes[-1].most_ahead_ns > 2_000 * MS


def test_a_barge_in_wastes_no_more_than_the_lead() -> None:
    """Heard 2 s of 8: at most the cap, and what the way to us took, was made in vain."""
    listener = SimulatedListener(network_ns=30 * MS, report_every_ns=200 * MS, barge_in_samples=2 * RATE)
    (outcome,) = run([Utterance(frames=100, listener=listener)])
    assert outcome.ending is Ending.INTERRUPTED
    assert 0 < (wasted_ns(outcome) or 0) <= (1_200 + 60) * MS


def test_the_way_sound_is_stopped_frees_the_next_caller() -> None:
    """One slot, three callers who all interrupt: each is served."""
    listener = SimulatedListener(barge_in_samples=RATE)
    outcomes = run([Utterance(frames=100, listener=listener)] * 3, concurrency=1, slots=1)
    assert [outcome.ending for outcome in outcomes] == [Ending.INTERRUPTED] * 3
    assert all((wasted_ns(outcome) or 0) > 0 for outcome in outcomes)


def test_a_paused_listener_is_not_fed_and_hears_all_in_the_end() -> None:
    """Five seconds of pause make no gap and no backlog."""
    listener = SimulatedListener(network_ns=10 * MS, report_every_ns=100 * MS, pause=(1_000 * MS, 5_000 * MS))
    (outcome,) = run([Utterance(frames=60, listener=listener)])
    assert outcome.ending is Ending.COMPLETE
    assert outcome.true_gaps == 0
    assert outcome.samples == 60 * FRAME


def test_a_stall_of_the_network_is_a_true_gap() -> None:
    """A second without packets is more than one chunk in hand; the player says so, the scheduler goes on."""
    listener = SimulatedListener(network_ns=10 * MS, report_every_ns=100 * MS, stalls=((100 * MS, 1_000 * MS),))
    (outcome,) = run([Utterance(frames=60, listener=listener)])
    assert outcome.true_gaps >= 1
    assert outcome.true_gap_ns > 500 * MS
    assert outcome.ending is Ending.COMPLETE


def test_a_buffer_at_the_listener_covers_what_would_be_a_gap_without() -> None:
    """Potential gaps are counted for a player that has none."""
    spiky = SimulatedListener(network_ns=10 * MS, buffer_ns=300 * MS, stalls=((20 * MS, 250 * MS),))
    (outcome,) = run([Utterance(frames=60, listener=spiky)])
    assert prebuffer_ns(outcome) > 0
    assert outcome.true_gaps == 0


def test_text_that_arrives_in_pieces_is_spoken_as_it_comes() -> None:
    """The first sound does not wait for the second piece."""
    pieces = ((0, 10), (1_000 * MS, 10), (2_000 * MS, 10))
    (outcome,) = run([Utterance(frames=60, pieces=pieces, feed=Feed.PER_FRAME)])
    assert outcome.ending is Ending.COMPLETE
    assert outcome.first_packet_ns is not None
    assert outcome.first_packet_ns < 50 * MS


def test_more_listeners_than_the_machine_can_serve_are_refused() -> None:
    """At five times the cost the first sound of one is a gap for the others, but those who are let in are served."""
    slow = {
        stage: LinearCost(5 * cost.base_ns, 5 * cost.row_ns, 5 * cost.unit_ns)
        for stage, cost in H100_GRAPH_COSTS.items()
    }
    outcomes = run([Utterance(frames=40, arrival_ns=1 + 400 * MS * number) for number in range(24)], costs=slow)
    refused = sum(outcome.ending is Ending.REFUSED for outcome in outcomes)
    assert 0 < refused < 24
    heard = [outcome for outcome in outcomes if outcome.ending is not Ending.REFUSED]
    assert {outcome.ending for outcome in heard} == {Ending.COMPLETE}
    assert max(prebuffer_ns(outcome) for outcome in heard) < 1_000 * MS
    # Half a second of it may be a wait for room.
    assert p95_ms(heard) < 900


@pytest.mark.parametrize("counts_beginnings", [True, False])
def test_requests_that_keep_beginning_leave_room_for_those_who_speak(
    monkeypatch: pytest.MonkeyPatch, counts_beginnings: bool
) -> None:
    """Of thirty short sentences a second the machine can make the frames, but not also the texts, the prompts and the
    first sounds, which hardly share a step.  Without counting those everybody is let in, and a third are torn.
    """
    if not counts_beginnings:
        monkeypatch.setattr(Admission, "beginnings_percent", lambda self, now: 0)
    source, at_ms, sentences = random.Random(1), 0.0, []
    for _ in range(300):
        at_ms += source.expovariate(0.030)
        sentences.append(
            Utterance(frames=source.randint(25, 55), pieces=((0, source.randint(8, 24)),), arrival_ns=int(at_ms * MS))
        )
    outcomes = run(sentences, slots=256)
    heard = [outcome for outcome in outcomes if outcome.ending is not Ending.REFUSED]
    torn = sum(bool(metrics.has_potential_gap(outcome.delivery(RATE, FRAME), 0)) for outcome in heard)
    if counts_beginnings:
        assert len(heard) > 270
        assert torn == 0
    else:
        assert torn > 50


@pytest.mark.parametrize("spread_seed", [1, 2, 3])
def test_reports_do_not_make_true_gaps(spread_seed: int) -> None:
    """With the listener's own buffer in the reckoning, it is spent, and never more than it is."""
    outcomes = run(speech(60, listener=REPORTING), concurrency=16, seed=spread_seed)
    assert sum(outcome.true_gaps for outcome in outcomes) == 0


@pytest.mark.parametrize(("drift_ppm", "heard_ms"), [(0, 8_000), (20_000, 7_843), (-20_000, 8_163)])
def test_a_caller_who_listens_to_the_end_comes_back_after_it(drift_ppm: int, heard_ms: int) -> None:
    """100 frames last 8 s on our clock, and less on a loudspeaker whose clock is faster."""
    listener = SimulatedListener(network_ns=10 * MS, buffer_ns=100 * MS, drift_ppm=drift_ppm)
    first, second = run([Utterance(frames=100, listener=listener)] * 2, concurrency=1, until_heard=True)
    assert first.first_packet_ns is not None
    heard_ns = second.arrival_ns - first.arrival_ns - first.first_packet_ns - (10 + 100 + 2 * 10) * MS
    assert heard_ns == pytest.approx(heard_ms * MS, abs=2 * MS)


def test_a_capture_while_serving_stalls_the_step_that_met_the_shape() -> None:
    """With every step a new shape, each of the four before the first sound takes 350 ms more."""
    (calm,) = run([Utterance(frames=10)], seed=1)
    (stalled,) = run([Utterance(frames=10)], seed=1, captures=LazyCapture(every_steps=1))
    assert calm.first_packet_ns is not None
    assert stalled.first_packet_ns is not None
    assert stalled.first_packet_ns - calm.first_packet_ns == pytest.approx(4 * 350 * MS, abs=5 * MS)


@pytest.mark.parametrize("is_told", [False, True])
def test_the_first_step_of_each_kind_after_a_takeover_is_predicted(is_told: bool) -> None:
    """Sixteen at once without graphs, then graphs, one after the other for five minutes, and sixteen at once again.

    Nobody tells the scheduler: it takes the large steps for what they took without graphs, or small ones, three times
    too long.  Told what was measured: every kind within a fifth from its first step on, and the trace replays.
    """
    eager = MACHINES["H100"]["own_loop"]
    after_steps = 900
    alone = [Utterance(frames=100, arrival_ns=(30 + 8 * number) * SECOND) for number in range(40)]
    together = [Utterance(frames=60, arrival_ns=at_ns) for at_ns in (0, 360 * SECOND) for _ in range(16)]
    costs = warmed_up(eager, H100_SPECS, LADDER)
    first: dict[CostKey, float] = {}
    steps: list[Step] = []

    class Watched(Scheduler):
        def step_done(self, step: Step, result: StepResult, now: int) -> None:
            units = sum(row.count for row in step.rows) if step.stage <= Stage.PREFILL else step.rows[0].count
            kind = (step.stage, step.bucket, size_of(step.stage, units))
            if step.id >= after_steps:
                predicted_ns = costs.predict_ns(step.stage, step.bucket, units)
                first.setdefault(kind, predicted_ns / result.duration_ns)
            steps.append(step)
            super().step_done(step, result, now)

    lines: list[str] = []
    simulate(
        Watched(
            specs=H100_SPECS,
            sample_rate=RATE,
            frame_samples=FRAME,
            slots=64,
            kv_pages=60 * 64,
            page_tokens=16,
            costs=costs,
            trace=TraceWriter(lines.append),
        ),
        [*alone, *together],
        costs=eager,
        sample_rate=RATE,
        frame_samples=FRAME,
        takeover=Takeover(
            after_steps, H100_GRAPH_COSTS, measured_times(H100_GRAPH_COSTS, H100_SPECS, LADDER) if is_told else {}
        ),
    )
    assert replay(lines) == steps
    assert {stage for stage, *_ in first} == set(Stage)
    assert {(Stage.BACKBONE, 16, 1), (Stage.DEPTH, 16, 1)} < first.keys()
    if is_told:
        assert all(1.0 <= ratio < 1.2 for ratio in first.values()), first
    else:
        assert first[Stage.DEPTH, 16, 1] > 2.5
        assert first[Stage.BACKBONE, 16, 1] > 3


def test_a_simulated_run_leaves_a_trace_that_replays() -> None:
    """Reports, pauses, stalls, refusals and barge-ins included: the trace gives the steps it was made by."""
    listeners = [
        REPORTING,
        SimulatedListener(network_ns=20 * MS, report_every_ns=100 * MS, pause=(500 * MS, 700 * MS)),
        SimulatedListener(network_ns=20 * MS, report_every_ns=100 * MS, stalls=((300 * MS, 400 * MS),), drift_ppm=200),
        SimulatedListener(network_ns=20 * MS, report_every_ns=100 * MS, barge_in_samples=RATE),
    ]
    lines: list[str] = []
    calls = [Utterance(frames=50, arrival_ns=30 * MS * number, listener=listeners[number % 4]) for number in range(20)]
    outcomes = run(calls, seed=1, slots=16, trace=TraceWriter(lines.append))
    assert {outcome.ending for outcome in outcomes} == {Ending.COMPLETE, Ending.INTERRUPTED, Ending.REFUSED}
    done = sum(line.startswith('["done"') for line in lines)
    assert len(replay(lines)) == done > 100


@pytest.mark.parametrize("seed", [1, 3])
def test_where_the_codec_is_slow_no_step_of_it_is_longer_than_the_others_can_wait(seed: int) -> None:
    """On a CPU a codec step of sixteen long chunks takes twice what a new stream's first chunk lasts.

    Seen in a recorded run: when the older streams decoded together, a stream that had just begun ran dry.
    """

    def cost(base_ms: float, row_ms: float = 0.0, unit_ms: float = 0.0) -> LinearCost:
        return LinearCost(round(base_ms * MS), round(row_ms * MS), round(unit_ms * MS))

    costs = {
        Stage.TEXT: cost(3.0, unit_ms=0.02),
        Stage.PREFILL: cost(1.8, 0.15),
        Stage.BACKBONE: cost(2.2, 0.16),
        Stage.DEPTH: cost(1.7, 0.065),
        Stage.CODEC: cost(1.8, unit_ms=0.6),
    }
    buckets = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    specs = {
        Stage.TEXT: StageSpec(8, (1, 2, 3, 4, 6, 8), max_tokens=1024),
        Stage.PREFILL: StageSpec(32, buckets, max_tokens=32),
        Stage.BACKBONE: StageSpec(32, buckets),
        Stage.DEPTH: StageSpec(32, buckets),
        Stage.CODEC: StageSpec(16, buckets[:8]),
    }
    source = random.Random(seed)
    utterances = [
        Utterance(
            frames=source.randint(25, 130),
            pieces=((0, source.randint(20, 70)),),
            feed=Feed.PER_FRAME,
            arrival_ns=index * 115 * MS,
        )
        for index in range(300)
    ]
    scheduler = Scheduler(
        specs=specs,
        sample_rate=RATE,
        frame_samples=960,
        slots=96,
        kv_pages=960,
        page_tokens=16,
        costs=warmed_up(costs, specs, LADDER),
        policy=Policy(admits_by_load=False),
    )
    run = simulate(scheduler, utterances, costs=costs, sample_rate=RATE, frame_samples=960, uniform=source.random)
    assert sum(one.missed_deadlines for one in run.outcomes) == 0
