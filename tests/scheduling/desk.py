"""A scheduler with a driver that runs one step at a time, for tests that look at single decisions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from breeze_rtc.clock import MS
from breeze_rtc.playback import PlaybackReport
from breeze_rtc.scheduling.costs import CostTable
from breeze_rtc.scheduling.policy import Policy
from breeze_rtc.scheduling.scheduler import Scheduler
from breeze_rtc.scheduling.step import AudioReady, Event, RowResult, Stage, StageSpec, Step, StepResult
from breeze_rtc.scheduling.stream import Feed, Priority

RATE = 24_000
FRAME = 1_920
FRAME_MS = 80
BUCKETS = (1, 2, 4, 8)
SPECS = {
    Stage.TEXT: StageSpec(max_rows=4, buckets=(1, 2, 4), max_tokens=64),
    Stage.PREFILL: StageSpec(max_rows=4, buckets=(1, 2, 4), max_tokens=32),
    Stage.BACKBONE: StageSpec(max_rows=8, buckets=BUCKETS),
    Stage.DEPTH: StageSpec(max_rows=8, buckets=BUCKETS),
    Stage.CODEC: StageSpec(max_rows=8, buckets=BUCKETS),
}
SAME_LEAD = Policy(lead_by_load=False)
"""The product, but for the lead, which is the same whatever the machine has to do."""
COSTS_MS = {Stage.TEXT: 2, Stage.PREFILL: 5, Stage.BACKBONE: 3, Stage.DEPTH: 7, Stage.CODEC: 4}
"""Every step of a stage takes the same time, whatever its bucket."""


def costs(times_ms: dict[Stage, int] | None = None) -> CostTable:
    times_ms = times_ms or COSTS_MS
    return CostTable(
        {
            (stage, spec.buckets[-1], 16 if stage is Stage.CODEC else spec.max_tokens or 1): times_ms[stage] * MS
            for stage, spec in SPECS.items()
        }
    )


class Desk:
    """A scheduler with a driver that runs one step at a time, each as long as `COSTS_MS` says."""

    def __init__(
        self,
        *,
        slots: int = 8,
        kv_pages: int = 1_000,
        table: CostTable | None = None,
        policy: Policy | None = None,
        specs: Mapping[Stage, StageSpec] = SPECS,
    ) -> None:
        self.scheduler = Scheduler(
            specs=specs,
            sample_rate=RATE,
            frame_samples=FRAME,
            slots=slots,
            kv_pages=kv_pages,
            page_tokens=16,
            costs=table or costs(),
            policy=policy or SAME_LEAD,
        )
        self.now = 0
        self.frames: dict[int, int] = {}
        self.starving: set[int] = set()
        self.steps: list[Step] = []
        self.happened: list[Event] = []

    def open(
        self,
        stream: int,
        *,
        frames: int = 100,
        tokens: int = 8,
        feed: Feed = Feed.PER_FRAME,
        priority: Priority = Priority.LIVE,
        max_frames: int = 200,
        rows: int = 1,
        interactive: bool = True,
    ) -> int | None:
        """A stream whose whole text is there, and which the model will end after `frames`."""
        slot = self.scheduler.open(
            stream,
            self.now,
            feed=feed,
            max_frames=max_frames,
            priority=priority,
            rows=rows,
            interactive=interactive,
        )
        self.frames[stream] = frames
        if tokens:
            self.scheduler.push_text(stream, tokens, self.now)
            self.scheduler.end_text(stream, self.now)
        self.happened += self.scheduler.events()
        return slot

    def step(self) -> Step:
        """Choose a step and run it."""
        step = self.scheduler.next_step(self.now)
        assert step is not None
        self.done(step)
        return step

    def takes_ms(self, step: Step) -> int:
        return COSTS_MS[step.stage]

    def done(self, step: Step, *, error: str = "", extra_ms: int = 0) -> None:
        """extra_ms: so much longer than it should take."""
        self.steps.append(step)
        duration_ns = (self.takes_ms(step) + extra_ms) * MS
        self.now += duration_ns
        rows = tuple(
            RowResult(
                row.stream,
                ended=step.stage is Stage.BACKBONE and row.start >= self.frames[row.stream],
                wants_text=step.stage in {Stage.PREFILL, Stage.BACKBONE} and row.stream in self.starving,
                samples=row.count * FRAME if step.stage is Stage.CODEC else 0,
                error=error,
            )
            for row in step.rows
        )
        self.scheduler.step_done(step, StepResult(rows, duration_ns), self.now)
        self.happened += self.scheduler.events()

    def until(self, at_ms: int) -> None:
        """Run what is due until then."""
        while self.now < at_ms * MS:
            step = self.scheduler.next_step(self.now)
            if step is not None:
                self.done(step)
            else:
                wake_at = self.scheduler.wake_at()
                assert wake_at is None or wake_at > self.now
                self.now = at_ms * MS if wake_at is None else min(at_ms * MS, wake_at)

    def until_spoken(self, *streams: int) -> None:
        while not all(self.samples(stream) for stream in streams):
            self.step()

    def report(
        self, stream: int, *, heard_ms: int = 0, path_ms: int = 0, is_playing: bool = True, dry_at: int | None = None
    ) -> None:
        self.scheduler.report(
            PlaybackReport(stream, heard_ms * RATE // 1_000, self.now, path_ms * MS, dry_at, is_playing), self.now
        )

    def samples(self, stream: int) -> int:
        return sum(event.samples for event in self.of(stream) if isinstance(event, AudioReady))

    def of(self, stream: int) -> list[Event]:
        return [event for event in self.happened if event.stream == stream]

    def chunks(self, stream: int) -> list[int]:
        return [
            row.count for step in self.steps if step.stage is Stage.CODEC for row in step.rows if row.stream == stream
        ]

    def lead_ms(self, stream: int) -> int:
        return next(s.lead_ns for s in self.scheduler.stats(self.now).streams if s.stream == stream) // MS

    def stage(self, stream: int) -> str:
        return next(s.stage for s in self.scheduler.stats(self.now).streams if s.stream == stream)


def streams_of(step: Step) -> list[int]:
    return [row.stream for row in step.rows]


def stages(steps: Iterable[Step]) -> list[Stage]:
    return [step.stage for step in steps]
