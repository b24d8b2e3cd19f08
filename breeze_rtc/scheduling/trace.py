"""The core's inputs as JSON lines, and the same steps again from them.

The first line names the version and holds everything the scheduler was made from; each line after it is one input,
with its time.  Steps are not written: the same inputs give the same steps, so a trace recorded while serving is a
test case.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from breeze_rtc.errors import Overloaded
from breeze_rtc.playback import PlaybackReport
from breeze_rtc.scheduling.costs import CostTable
from breeze_rtc.scheduling.policy import Policy
from breeze_rtc.scheduling.scheduler import Scheduler
from breeze_rtc.scheduling.step import RowResult, Stage, StageSpec, Step, StepResult
from breeze_rtc.scheduling.stream import Feed, Priority

VERSION = 3


class TraceWriter:
    """Writes one line per input of a scheduler; given to it at its making."""

    def __init__(self, write: Callable[[str], object]) -> None:
        """write(line) takes one line with its newline, as the `write` of a text file does."""
        self._write = write

    def begin(
        self,
        *,
        specs: Mapping[Stage, StageSpec],
        sample_rate: int,
        frame_samples: int,
        slots: int,
        kv_pages: int,
        page_tokens: int,
        kv_positions: int | None,
        costs: CostTable,
        policy: Policy,
    ) -> None:
        """What the scheduler was made from."""
        self._put(
            {
                "version": VERSION,
                "specs": [[stage, spec.max_rows, spec.buckets, spec.max_tokens] for stage, spec in specs.items()],
                "sample_rate": sample_rate,
                "frame_samples": frame_samples,
                "slots": slots,
                "kv_pages": kv_pages,
                "page_tokens": page_tokens,
                "kv_positions": kv_positions,
                "costs": costs.state(),
                "policy": policy.state(),
            }
        )

    def open(
        self, stream: int, now: int, *, feed: Feed, max_frames: int, priority: Priority, rows: int, interactive: bool
    ) -> None:
        self._put(["open", now, stream, feed.value, max_frames, priority, rows, interactive])

    def push_text(self, stream: int, tokens: int, now: int) -> None:
        self._put(["text", now, stream, tokens])

    def end_text(self, stream: int, now: int) -> None:
        self._put(["end", now, stream])

    def report(self, report: PlaybackReport, now: int) -> None:
        self._put(
            [
                "report",
                now,
                report.stream,
                report.heard_samples,
                report.at_ns,
                report.path_delay_ns,
                report.dry_at_ns,
                report.is_playing,
                report.is_measured,
            ]
        )

    def cancel(self, stream: int, now: int) -> None:
        self._put(["cancel", now, stream])

    def next_step(self, now: int) -> None:
        self._put(["next", now])

    def step_done(self, step: Step, result: StepResult, now: int) -> None:
        rows = [[row.stream, row.ended, row.wants_text, row.samples, row.error] for row in result.rows]
        self._put(["done", now, step.id, result.duration_ns, rows])

    def measured(self, stage: Stage, times: Mapping[tuple[int, int], int], now: int) -> None:
        self._put(["measured", now, stage, [[bucket, size, ns] for (bucket, size), ns in times.items()]])

    def _put(self, value: object) -> None:
        self._write(json.dumps(value, separators=(",", ":")) + "\n")


@dataclass(frozen=True, slots=True)
class Played:
    """One input of a recorded run, given to the scheduler again."""

    kind: str
    """"open", "text", "end", "report", "cancel", "next", "done" or "measured", as `TraceWriter` names them."""
    now: int
    values: tuple[Any, ...]
    """What else its line says."""
    answer: Step | Overloaded | None
    """The step that was chosen ("next"), or why the stream was refused ("open")."""


class Replay:
    """A recorded run, again: each turn of the iteration gives one input to the scheduler.

    Between two turns the scheduler may be asked what it knows, and its events may be taken.

    A last line that was cut off is left out: the process that wrote it may have died.  Raises ValueError, with the
    number of the line, for a broken line elsewhere, for a trace of another version, and where a step was done that
    these inputs do not give.
    """

    def __init__(self, lines: Iterable[str]) -> None:
        """Read the first line and make the scheduler."""
        self._inputs = _parse(lines)
        try:
            _, head = next(self._inputs)
        except StopIteration:
            raise ValueError("the trace is empty, or cut off in its first line") from None
        version = head.get("version") if isinstance(head, dict) else None
        if version != VERSION:
            found = "this is not a scheduler trace" if version is None else f"this trace has version {version}"
            raise ValueError(f"{found}; version {VERSION} can be read")
        with _told_by(1):
            # What the scheduler predicts with; it learns as the run goes on.
            self.costs = CostTable.from_state(head["costs"])
            self.policy = Policy.from_state(head["policy"])
            self.sample_rate: int = head["sample_rate"]
            self.frame_samples: int = head["frame_samples"]
            self.scheduler = Scheduler(
                specs={
                    Stage(stage): StageSpec(max_rows=max_rows, buckets=tuple(buckets), max_tokens=max_tokens)
                    for stage, max_rows, buckets, max_tokens in head["specs"]
                },
                sample_rate=self.sample_rate,
                frame_samples=self.frame_samples,
                slots=head["slots"],
                kv_pages=head["kv_pages"],
                page_tokens=head["page_tokens"],
                kv_positions=head["kv_positions"],
                costs=self.costs,
                policy=self.policy,
            )
        # The steps so far, in order.
        self.steps: list[Step] = []

    def __iter__(self) -> Iterator[Played]:
        for number, line in self._inputs:
            with _told_by(number):
                kind, now, *values = line
                if type(now) is not int:
                    raise ValueError("its time is not a whole number")
                answer = self._apply(kind, now, values)
            yield Played(kind, now, tuple(values), answer)

    def _apply(self, kind: str, now: int, values: list[Any]) -> Step | Overloaded | None:
        scheduler, steps = self.scheduler, self.steps
        match kind, values:
            case "next", []:
                step = scheduler.next_step(now)
                if step is not None:
                    assert step.id == len(steps)
                    steps.append(step)
                return step
            case "done", [step_id, duration_ns, rows]:
                results = tuple(RowResult(*row) for row in rows)
                streams = sorted(row.stream for row in results)
                if step_id >= len(steps) or sorted(row.stream for row in steps[step_id].rows) != streams:
                    raise ValueError(
                        f"step {step_id} was done for streams {streams}, which is not what these inputs give: "
                        "a line is missing, or another version recorded it"
                    )
                scheduler.step_done(steps[step_id], StepResult(results, duration_ns), now)
            case "report", [*fields]:
                stream, heard_samples, at_ns, path_delay_ns, dry_at_ns, is_playing, is_measured = fields
                report = PlaybackReport(stream, heard_samples, at_ns, path_delay_ns, dry_at_ns, is_playing, is_measured)
                scheduler.report(report, now)
            case "measured", [stage, times]:
                scheduler.measured(Stage(stage), {(bucket, size): ns for bucket, size, ns in times}, now)
            case "text", [stream, tokens]:
                scheduler.push_text(stream, tokens, now)
            case "end", [stream]:
                scheduler.end_text(stream, now)
            case "cancel", [stream]:
                scheduler.cancel(stream, now)
            case "open", [int(stream), feed, max_frames, priority, rows, interactive]:
                try:
                    scheduler.open(
                        stream,
                        now,
                        feed=Feed(feed),
                        max_frames=max_frames,
                        priority=Priority(priority),
                        rows=rows,
                        interactive=interactive,
                    )
                except Overloaded as refusal:
                    # A stream that was refused is refused again.
                    return refusal
            case _:
                raise ValueError(f"a trace has no input {kind!r} with {len(values)} values")
        return None


def replay(lines: Iterable[str]) -> list[Step]:
    """The steps that a scheduler with these inputs gives, in order; raises as `Replay` does."""
    run = Replay(lines)
    for _ in run:
        pass
    return run.steps


@contextmanager
def _told_by(number: int) -> Iterator[None]:
    """What a line says can be anything: whatever it breaks is the line's fault, and is said with its number."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AssertionError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"line {number}: {str(error) or type(error).__name__}") from error


def _parse(lines: Iterable[str]) -> Iterator[tuple[int, Any]]:
    """Number and value of each line; the last is left out if it is cut off."""
    previous: str | None = None
    number = 0
    for line in lines:
        if previous is not None:
            try:
                value = json.loads(previous)
            except ValueError as error:
                raise ValueError(f"line {number} is not JSON") from error
            yield number, value
        previous = line
        number += 1
    if previous is not None:
        try:
            value = json.loads(previous)
        except ValueError:
            return
        yield number, value
