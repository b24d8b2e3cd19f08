from __future__ import annotations

import json
import random

import pytest

from breeze_rtc.clock import MS
from breeze_rtc.playback import PlaybackReport
from breeze_rtc.scheduling.chunking import LADDER
from breeze_rtc.scheduling.costs import CostTable
from breeze_rtc.scheduling.machines import H100_GRAPH_COSTS, H100_SPECS, warmed_up
from breeze_rtc.scheduling.policy import Order, Policy
from breeze_rtc.scheduling.scheduler import Scheduler
from breeze_rtc.scheduling.simulator import SimulatedListener, Utterance, simulate
from breeze_rtc.scheduling.step import RowResult, Stage, StageSpec, Step, StepResult
from breeze_rtc.scheduling.stream import Feed, Priority
from breeze_rtc.scheduling.trace import Replay, TraceWriter, replay

SPECS = {stage: StageSpec(max_rows=2, buckets=(1, 2), max_tokens=32) for stage in Stage}


def recorded() -> tuple[list[str], list[Step]]:
    """A short run with every kind of input in it, and the steps it gave."""
    lines: list[str] = []
    scheduler = Scheduler(
        specs=SPECS,
        sample_rate=24_000,
        frame_samples=960,
        slots=2,
        kv_pages=60,
        page_tokens=16,
        costs=CostTable({(Stage.DEPTH, 2, 1): 5 * MS}),
        policy=Policy(lead_cap_ns=500 * MS, ladder=(1, 2, 4), order=Order.ROUND_ROBIN),
        trace=TraceWriter(lines.append),
    )
    steps: list[Step] = []
    now = 0
    scheduler.open(1, now, feed=Feed.PER_FRAME, max_frames=100)
    scheduler.open(2, now, feed=Feed.PREFIX, max_frames=20, priority=Priority.STREAM, interactive=False)
    assert scheduler.open(3, now, feed=Feed.PREFIX, max_frames=20) is None, "it waits, and is refused in the end"
    scheduler.push_text(1, 10, now)
    scheduler.push_text(2, 40, now)
    scheduler.end_text(2, now)
    for number in range(60):
        now += 3 * MS
        if number == 20:
            scheduler.measured(Stage.DEPTH, {(1, 1): 5 * MS, (2, 1): 6 * MS}, now)
        if number == 30:
            scheduler.report(PlaybackReport(1, 960, now, 20 * MS, is_playing=False), now)
        if number == 45:
            scheduler.report(PlaybackReport(1, 960, now, 20 * MS, dry_at_ns=now + 40 * MS), now)
            scheduler.cancel(2, now)
        step = scheduler.next_step(now)
        if step is None:
            continue
        steps.append(step)
        now += 5 * MS
        rows = tuple(
            RowResult(row.stream, samples=row.count * 960 if step.stage is Stage.CODEC else 0) for row in step.rows
        )
        scheduler.step_done(step, StepResult(rows, 5 * MS), now)
    return lines, steps


def test_replay_gives_identical_steps() -> None:
    """What ran in production runs again, step for step."""
    lines, steps = recorded()
    assert len(steps) > 20
    assert replay(lines) == steps


@pytest.mark.parametrize("kind", ["text", "report", "cancel"])
def test_a_trace_that_lacks_an_input_does_not_fit_its_steps(kind: str) -> None:
    """Results of steps that were never chosen are an error, not a crash somewhere else."""
    lines, _ = recorded()
    with pytest.raises(ValueError, match="not what these inputs give"):
        replay([line for line in lines if not line.startswith(f'["{kind}"')])


def test_a_last_line_cut_off_is_left_out() -> None:
    """The process may have died while it wrote it."""
    lines, steps = recorded()
    assert replay([*lines, '["next",12']) == steps
    assert replay([*lines[:-1], lines[-1][: len(lines[-1]) // 2]]) in (steps, steps[:-1])


def test_a_broken_line_in_the_middle_is_an_error() -> None:
    """Leaving it out would replay something that never happened."""
    lines, _ = recorded()
    with pytest.raises(ValueError):
        replay([*lines[:5], lines[5][:4], *lines[6:]])


@pytest.mark.parametrize("head", ['{"version": 1}', "[1]", '"text"'])
def test_a_trace_of_another_version_is_refused(head: str) -> None:
    """It would be read wrongly."""
    with pytest.raises(ValueError, match="version"):
        replay([head])


def test_an_empty_trace_is_refused() -> None:
    """There is nothing to make a scheduler from; nor in a first line that was cut off."""
    with pytest.raises(ValueError, match="empty"):
        replay([])
    with pytest.raises(ValueError, match="empty"):
        replay(['{"version": 2, "spe'])


def test_an_unknown_input_is_an_error() -> None:
    """A trace says only what this version can do again."""
    lines, _ = recorded()
    with pytest.raises(ValueError, match="sing"):
        replay([*lines, '["sing",99999999999]', '["next",99999999999]'])


def test_every_line_is_one_json_value() -> None:
    """So that other tools can read it."""
    lines, _ = recorded()
    assert all(line.endswith("\n") and line.count("\n") == 1 for line in lines)
    kinds = {json.loads(line)[0] for line in lines[1:]}
    assert kinds == {"open", "text", "end", "report", "cancel", "next", "done", "measured"}


def test_times_that_were_measured_while_serving_are_in_the_trace() -> None:
    """Who replays it predicts from there on what was predicted then."""
    lines, _ = recorded()
    taken_over = next(number for number, line in enumerate(lines) if line.startswith('["measured"'))
    predicted = []
    for end in (taken_over, taken_over + 1):
        run = Replay([*lines[:end], "cut off"])
        for _ in run:
            pass
        predicted.append(run.costs.predict_ns(Stage.DEPTH, 2))
    assert predicted[0] != predicted[1] == 6 * MS


@pytest.mark.parametrize("seed", range(4))
def test_who_looks_at_the_figures_changes_nothing(seed: int) -> None:
    """A trace does not say when `stats` was asked, so what is decided must not depend on it."""
    source = random.Random(seed)
    lines: list[str] = []
    steps: list[Step] = []

    class Watched(Scheduler):
        def next_step(self, now: int) -> Step | None:
            if source.random() < 0.5:
                self.stats(now)
            step = super().next_step(now)
            if step is not None:
                steps.append(step)
            return step

    listener = SimulatedListener(network_ns=30 * MS, jitter_ns=20 * MS, buffer_ns=80 * MS, report_every_ns=200 * MS)
    scheduler = Watched(
        specs=H100_SPECS,
        sample_rate=24_000,
        frame_samples=1_920,
        slots=64,
        kv_pages=20_000,
        page_tokens=16,
        costs=warmed_up(H100_GRAPH_COSTS, H100_SPECS, LADDER),
        trace=TraceWriter(lines.append),
    )
    simulate(
        scheduler,
        [Utterance(frames=source.randint(10, 90), listener=listener) for _ in range(60)],
        costs=H100_GRAPH_COSTS,
        sample_rate=24_000,
        frame_samples=1_920,
        concurrency=16,
        uniform=source.random,
    )
    assert replay(lines) == steps
