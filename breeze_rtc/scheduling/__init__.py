"""What to run next, and by when: pure, driven by plain values and the time it is told."""

from __future__ import annotations

from breeze_rtc.scheduling.costs import CostTable
from breeze_rtc.scheduling.policy import FirstSound, Order, Policy
from breeze_rtc.scheduling.scheduler import Scheduler, SchedulerStats, StreamStats
from breeze_rtc.scheduling.step import (
    AudioReady,
    DeadlineMissed,
    Event,
    Row,
    RowResult,
    Stage,
    StageSpec,
    Step,
    StepResult,
    StreamAdmitted,
    StreamFailed,
    StreamFinished,
    StreamRefused,
    Why,
)
from breeze_rtc.scheduling.stream import Feed, Priority
from breeze_rtc.scheduling.trace import TraceWriter, replay

__all__ = [
    "AudioReady",
    "CostTable",
    "DeadlineMissed",
    "Event",
    "Feed",
    "FirstSound",
    "Order",
    "Policy",
    "Priority",
    "Row",
    "RowResult",
    "Scheduler",
    "SchedulerStats",
    "Stage",
    "StageSpec",
    "Step",
    "StepResult",
    "StreamAdmitted",
    "StreamFailed",
    "StreamFinished",
    "StreamRefused",
    "StreamStats",
    "TraceWriter",
    "Why",
    "replay",
]
