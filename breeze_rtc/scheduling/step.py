"""What the scheduler says and hears: stages, steps, results and events.  Plain values, no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Stage(IntEnum):
    """The five stages of the model, in the order one stream passes them."""

    TEXT = 0
    PREFILL = 1
    BACKBONE = 2
    DEPTH = 3
    CODEC = 4


@dataclass(frozen=True, slots=True)
class StageSpec:
    """How much of one stage one step may carry."""

    max_rows: int
    """Rows (streams, times CFG rows) in one step."""
    buckets: tuple[int, ...]
    """Row counts a step is padded to, ascending; the last is >= max_rows."""
    max_tokens: int = 0
    """TEXT and PREFILL: tokens in one step over all rows; 0 where the stage has no token axis."""


@dataclass(frozen=True, slots=True)
class Row:
    """One stream's part of a step."""

    stream: int
    slot: int
    """State slot of the stream: codec state, sampler state, last codes."""
    start: int
    """First position this row computes: text token, prompt token or frame index."""
    count: int
    """How many: text tokens, prompt tokens, or frames (1 for BACKBONE and DEPTH)."""
    new_pages: tuple[int, ...] = ()
    """KV pages that become this stream's with this step, appended to those it has."""


@dataclass(frozen=True, slots=True)
class Step:
    """One piece of work: a stage, the rows that run in it, and the bucket it is padded to."""

    id: int
    stage: Stage
    rows: tuple[Row, ...]
    bucket: int


@dataclass(frozen=True, slots=True)
class RowResult:
    """What a step did to one stream."""

    stream: int
    ended: bool = False
    """PREFILL and BACKBONE: the model said that the speech is over; no frame comes of this position."""
    wants_text: bool = False
    """PREFILL and BACKBONE: the next frame needs text that has not been encoded yet."""
    samples: int = 0
    """CODEC: PCM samples this row made."""
    error: str = ""
    """Not empty: this stream failed and must be dropped; the other rows are good."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did, and how long it took."""

    rows: tuple[RowResult, ...]
    duration_ns: int


@dataclass(frozen=True, slots=True)
class AudioReady:
    """Samples [start, start + samples) of a stream have been made."""

    stream: int
    start_samples: int
    samples: int


@dataclass(frozen=True, slots=True)
class StreamFinished:
    """All of a stream has been made; what it held is free."""

    stream: int
    samples: int


@dataclass(frozen=True, slots=True)
class StreamFailed:
    """A stream was dropped because a stage failed on it; what it held is free."""

    stream: int
    stage: Stage
    error: str


@dataclass(frozen=True, slots=True)
class DeadlineMissed:
    """A chunk was delivered after the listener (or the sink's queue) had run dry."""

    stream: int
    late_ns: int


Event = AudioReady | StreamFinished | StreamFailed | DeadlineMissed
