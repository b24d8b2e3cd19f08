"""What to run next, and by when: pure, driven by plain values and the time it is told."""

from __future__ import annotations

from .costs import CostTable
from .policy import FirstSound, Order, Policy
from .scheduler import Scheduler, SchedulerStats, StreamStats
from .step import (
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
from .stream import Feed, Priority
from .trace import TraceWriter, replay

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
