from __future__ import annotations

import json
import random
from itertools import accumulate, pairwise

import pytest

from breeze_rtc.clock import MS, samples_to_ns
from breeze_rtc.playback import PlaybackReport
from breeze_rtc.scheduling.chunking import LADDER
from breeze_rtc.scheduling.costs import CostTable
from breeze_rtc.scheduling.machines import H100_GRAPH_COSTS, H100_SPECS, warmed_up
from breeze_rtc.scheduling.scheduler import Scheduler
from breeze_rtc.scheduling.simulator import LazyCapture, Outcome, SimulatedListener, Utterance, simulate
from breeze_rtc.scheduling.step import RowResult, Stage, StageSpec, Step, StepResult, Why
from breeze_rtc.scheduling.stream import Feed, Priority
from breeze_rtc.scheduling.timeline import Timeline
from breeze_rtc.scheduling.trace import TraceWriter, replay

RATE, FRAME = 24_000, 1_920
LISTENER = SimulatedListener(network_ns=30 * MS, buffer_ns=80 * MS, report_every_ns=200 * MS)
IMPATIENT = SimulatedListener(network_ns=30 * MS, buffer_ns=80 * MS, report_every_ns=200 * MS, barge_in_samples=RATE)


@pytest.fixture(scope="module")
def simulated() -> tuple[list[str], list[Outcome], Timeline]:
    """The lines of a simulated run on a machine that stalls now and then, what became of it, and its timeline."""
    lines: list[str] = []
    scheduler = Scheduler(
        specs=H100_SPECS,
        sample_rate=RATE,
        frame_samples=FRAME,
        slots=16,
        kv_pages=1_000,
        page_tokens=16,
        costs=warmed_up(H100_GRAPH_COSTS, H100_SPECS, LADDER),
        trace=TraceWriter(lines.append),
    )
    source = random.Random(3)
    utterances = [
        Utterance(frames=source.randint(10, 60), listener=IMPATIENT if number % 4 == 3 else LISTENER)
        for number in range(24)
    ]
    outcomes = simulate(
        scheduler,
        utterances,
        costs=H100_GRAPH_COSTS,
        sample_rate=RATE,
        frame_samples=FRAME,
        concurrency=6,
        uniform=source.random,
        captures=LazyCapture(every_steps=150, stall_ns=900 * MS),
    ).outcomes
    return lines, outcomes, Timeline(lines)


def test_it_shows_the_steps_of_the_replay(simulated: tuple[list[str], list[Outcome], Timeline]) -> None:
    """Same steps, same reasons, in the order they were chosen; one after the other, each with what it took."""
    lines, _, timeline = simulated
    assert [line.step for line in timeline.steps] == replay(lines)
    done = {step: took for kind, _, step, took, _ in (json.loads(x) for x in lines if x.startswith('["done"'))}
    assert {line.step.id: line.duration_ns for line in timeline.steps} == done
    assert all(before.end_ns <= after.begin_ns for before, after in pairwise(timeline.steps))
    assert all(Why.UNSAID is not line.step.why for line in timeline.steps)
    for line in timeline.steps:
        assert [timeline.streams[place].stream for place in line.streams] == [row.stream for row in line.step.rows]


def test_predictions_are_those_of_the_moment(simulated: tuple[list[str], list[Outcome], Timeline]) -> None:
    """The first step's is the table's own; later ones follow what was learnt, and nine of ten steps keep within."""
    _, _, timeline = simulated
    first = timeline.steps[0]
    table = warmed_up(H100_GRAPH_COSTS, H100_SPECS, LADDER)
    assert first.predicted_ns == table.predict_ns(Stage.TEXT, first.step.bucket, sum(r.count for r in first.step.rows))
    assert len({line.predicted_ns for line in timeline.steps if line.step.stage is Stage.DEPTH}) > 5
    for stage in timeline.summary().stages:
        assert stage.over <= 0.2 * stage.steps + 2


def test_streams_tell_what_became_of_them(simulated: tuple[list[str], list[Outcome], Timeline]) -> None:
    """Chunks, first packets, missed deadlines and ends are those the simulator saw from its side."""
    _, outcomes, timeline = simulated
    assert len(timeline.streams) == len(outcomes)
    for line in timeline.streams:
        outcome = outcomes[line.stream]
        assert [sound.samples // FRAME for sound in line.sounds] == outcome.chunks
        assert line.first_sound_ns is not None
        assert outcome.first_packet_ns is not None
        # The simulator counts from the arrival; a step may be running then.
        assert 0 <= outcome.first_packet_ns - line.first_sound_ns <= 910 * MS
        assert line.missed == outcome.missed_deadlines
        assert len(line.frames) <= outcome.frames
    endings = [line.ending for line in timeline.streams]
    assert {"finished", "cancelled"} == set(endings)
    assert timeline.summary().missed == sum(outcome.missed_deadlines for outcome in outcomes) > 0
    assert timeline.summary().missed_streams == sum(outcome.missed_deadlines > 0 for outcome in outcomes)


def test_nobody_hears_what_was_not_delivered(simulated: tuple[list[str], list[Outcome], Timeline]) -> None:
    """Positions are in order; sound heard never exceeds sound delivered; a late chunk came after the deadline."""
    _, _, timeline = simulated
    for line in timeline.streams:
        assert line.positions[-1].delivered == sum(sound.samples for sound in line.sounds)
        for before, after in pairwise(line.positions):
            assert before.at_ns <= after.at_ns
            assert before.delivered <= after.delivered
        assert all(0 <= position.heard <= position.delivered for position in line.positions)
        for sound in line.sounds:
            known = [position for position in line.positions if position.at_ns < sound.at_ns]
            if sound.late_ns:
                assert sound.at_ns > known[-1].dry_ns
    reported = sum(position.is_reported for line in timeline.streams for position in line.positions)
    assert reported > len(timeline.streams)


def test_the_page_gets_plain_values(simulated: tuple[list[str], list[Outcome], Timeline]) -> None:
    """JSON; columns of one length; differences that add up to the times."""
    _, _, timeline = simulated
    data = json.loads(json.dumps(timeline.data(), allow_nan=False))
    steps = data["steps"]
    assert {len(column) for column in steps.values()} == {len(timeline.steps)}
    assert list(accumulate(steps["begin"])) == [(line.begin_ns - timeline.begin_ns) // 1_000 for line in timeline.steps]
    assert [data["whys"][why] for why in steps["why"]] == [line.step.why.value for line in timeline.steps]
    assert {len(column) for column in data["rows"].values()} == {sum(steps["rows"])}
    for line, stream in zip(timeline.streams, data["streams"], strict=True):
        assert {len(column) for column in stream["positions"].values()} == {len(line.positions)}
        assert list(accumulate(stream["positions"]["heard"])) == [position.heard for position in line.positions]
    assert data["summary"]["steps"] == len(timeline.steps)


class Desk:
    """A small machine driven by hand."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.now = 1_000 * MS
        self.scheduler = Scheduler(
            specs={stage: StageSpec(max_rows=2, buckets=(1, 2), max_tokens=64) for stage in Stage},
            sample_rate=RATE,
            frame_samples=FRAME,
            slots=2,
            kv_pages=200,
            page_tokens=16,
            costs=CostTable(dict.fromkeys(((stage, 2, 64) for stage in Stage), 5 * MS)),
            trace=TraceWriter(self.lines.append),
        )

    def open(self, stream: int, priority: Priority = Priority.LIVE) -> None:
        self.scheduler.open(stream, self.now, feed=Feed.PREFIX, max_frames=40, priority=priority)
        self.scheduler.push_text(stream, 20, self.now)
        self.scheduler.end_text(stream, self.now)

    def step(self) -> Step | None:
        """Choose one step; it is out."""
        return self.scheduler.next_step(self.now)

    def done(self, step: Step, *, error: str = "") -> None:
        self.now += 5 * MS
        rows = tuple(
            RowResult(row.stream, samples=row.count * FRAME if step.stage is Stage.CODEC else 0, error=error)
            for row in step.rows
        )
        self.scheduler.step_done(step, StepResult(rows, 5 * MS), self.now)

    def run_dry(self) -> None:
        """Steps until there is nothing to do."""
        while (step := self.step()) is not None:
            self.done(step)


def test_an_idle_machine_says_for_how_long_and_what_woke_it() -> None:
    """From the moment nothing was due to the next step; what came in last is what woke it, on time or not."""
    desk = Desk()
    desk.open(1)
    desk.run_dry()
    idle_since = desk.now
    desk.now += 7 * MS
    desk.open(2)
    desk.run_dry()
    wake_at = desk.scheduler.wake_at()
    assert wake_at is not None
    rested_since, desk.now = desk.now, wake_at + 30 * MS
    desk.run_dry()
    idle = [line for line in Timeline(desk.lines).steps if line.idle_ns]
    assert (idle[0].begin_ns - idle[0].idle_ns, idle[0].idle_ns, idle[0].woken_by) == (idle_since, 7 * MS, "end")
    assert idle[0].overslept_ns == 0
    assert (idle[1].begin_ns - idle[1].idle_ns, idle[1].woken_by) == (rested_since, "time")
    assert idle[1].overslept_ns == 30 * MS
    assert Timeline(desk.lines).begin_ns == 1_000 * MS


def test_streams_that_were_refused_or_failed_or_are_open_say_so() -> None:
    """Each with its reason; a step that never came back has no duration."""
    desk = Desk()
    desk.open(1)
    desk.open(2)
    desk.open(3)
    desk.run_dry()
    desk.now += 2_000 * MS
    step = desk.step()
    assert step is not None
    desk.done(step, error="ValueError: nan")
    failed = [row.stream for row in step.rows]
    desk.open(4)
    out = desk.step()
    timeline = Timeline(desk.lines)
    lines = {line.stream: line for line in timeline.streams}
    assert lines[3].refused
    assert all((lines[stream].ending, lines[stream].error) == ("failed", "ValueError: nan") for stream in failed)
    assert lines[4].ending == "open"
    assert timeline.steps[-1].step == out
    assert (timeline.steps[-1].duration_ns, timeline.steps[-1].end_ns) == (0, 0)
    summary = timeline.summary()
    assert (summary.streams, summary.refused) == (3, 1)
    assert sum(stage.steps for stage in summary.stages) == summary.steps - 1


def test_a_stream_that_waited_for_room_says_for_how_long() -> None:
    """From its opening until another made room for it."""
    desk = Desk()
    for stream in (1, 2, 3):
        desk.open(stream)
    opened_at = desk.now
    desk.run_dry()
    desk.scheduler.cancel(1, desk.now)
    desk.run_dry()
    lines = {line.stream: line for line in Timeline(desk.lines).streams}
    assert lines[1].admitted_ns is None
    assert lines[3].opened_ns == opened_at
    assert lines[3].admitted_ns == lines[1].ended_ns
    assert lines[3].sounds


def test_a_report_that_grows_old_shows() -> None:
    """With nobody's input between, the deadline comes nearer each time the report is trusted less."""
    desk = Desk()
    desk.open(1)
    desk.run_dry()
    desk.scheduler.report(PlaybackReport(1, 0, desk.now, 50 * MS), desk.now)
    reported_at = desk.now
    desk.now += 1_500 * MS
    desk.run_dry()
    (line,) = Timeline(desk.lines).streams
    (number,) = (number for number, position in enumerate(line.positions) if position.is_reported)
    until_ns = reported_at + 1_000 * MS
    positions = [position for position in line.positions[number:] if position.at_ns <= until_ns]
    assert positions[0].at_ns == reported_at
    assert len(positions) > 2
    assert all(before.dry_ns > after.dry_ns for before, after in pairwise(positions))
    assert {position.delivered for position in positions} == {positions[0].delivered}


def test_figures_of_the_whole_run() -> None:
    """Two streams by hand: nearest-rank percentiles, and a machine that is busy for the time its steps ran."""
    desk = Desk()
    desk.open(1)
    desk.run_dry()
    busy_ns = desk.now - 1_000 * MS
    desk.now += busy_ns
    desk.scheduler.cancel(1, desk.now)
    desk.now += 10_000 * MS
    desk.scheduler.next_step(desk.now)
    summary = Timeline(desk.lines).summary()
    assert summary.busy == pytest.approx(0.5)
    # Text, prefill, depth, codec.
    assert (summary.first_sound_p50_ns, summary.first_sound_p95_ns) == (20 * MS, 20 * MS)
    assert summary.missed == 0


def test_first_packets_are_those_that_somebody_waits_for() -> None:
    """A file that is written when there is time says nothing about how soon a caller is answered."""
    desk = Desk()
    desk.open(1, priority=Priority.BATCH)
    desk.now += 3 * MS
    desk.open(2)
    desk.run_dry()
    timeline = Timeline(desk.lines)
    file, call = timeline.streams
    summary = timeline.summary()
    assert call.first_sound_ns == summary.first_sound_p50_ns == summary.first_sound_p95_ns
    assert file.first_sound_ns not in {None, call.first_sound_ns}
    desk = Desk()
    desk.open(1, priority=Priority.BATCH)
    desk.run_dry()
    assert Timeline(desk.lines).summary().first_sound_p50_ns is not None


def test_a_run_in_which_nobody_spoke_has_no_first_packet() -> None:
    """None, and not zero."""
    desk = Desk()
    desk.scheduler.next_step(desk.now)
    summary = Timeline(desk.lines).summary()
    assert (summary.streams, summary.steps, summary.first_sound_p50_ns, summary.busy) == (0, 0, None, 0)


def test_what_was_heard_goes_on_as_the_sound_lasts() -> None:
    """Between a delivery and the next position the estimate falls by the time that passed."""
    desk = Desk()
    desk.open(1)
    desk.run_dry()
    (line,) = Timeline(desk.lines).streams
    for sound, position in zip(line.sounds, line.positions, strict=True):
        assert position.at_ns == sound.at_ns
        unheard_ns = samples_to_ns(position.delivered - position.heard, RATE)
        assert position.dry_ns == pytest.approx(position.at_ns + unheard_ns, abs=100_000)
