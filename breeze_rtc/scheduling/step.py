"""What the scheduler says and hears: stages, steps, results and events.  Plain values, no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum


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


@dataclass(slots=True)
class Row:
    """One stream's part of a step.

    Never changed once made; but not frozen, which would take four times as long, and a busy second makes thousands.
    """

    stream: int
    slot: int
    """State slot of the stream: codec state, sampler state, last codes."""
    start: int
    """First position this row computes: text token, prompt token or frame index."""
    count: int
    """How many: text tokens, prompt tokens, or frames (1 for BACKBONE and DEPTH)."""
    new_pages: tuple[int, ...] = ()
    """KV pages that become this stream's with this step, appended to those it has."""


class Why(Enum):
    """Why a step was chosen, as a clause of a sentence."""

    UNSAID = "nobody said why"
    """A step made by hand."""
    COMPLETES_FRAMES = "completes the frames in work"
    FIRST_SOUND_FITS = "a first sound that fits into everybody's slack"
    FIRST_SOUND_OVERDUE = "a first sound that has waited as long as it may"
    FIRST_SOUND_ALONE = "a first sound, and nobody else has anything due"
    FIRST_SOUND_ALWAYS = "a first sound goes before all others"
    PROMPT_PIECE = "as much of a long prompt as fits into everybody's slack"
    DANGER_CHUNK = "the frames in hand of a stream that a first sound would make late"
    DANGER_FRAME = "the smallest step that helps the streams that a first sound would make late"
    RESCUE_FRAME = "a smaller step, because the first row would be late in a full one"
    CHUNK_FULL = "a chunk is full"
    CHUNK_EARLY = "a chunk goes early: the next frame would come too late"
    CHUNK_LAST = "the last frames of a stream"
    TEXT = "text for streams that speak"
    LEAST_SLACK = "the next frame, least slack first"
    JOINS_CODEC = "one more frame, so that a full chunk shares its codec step"
    IN_TURN = "next in the order of this policy"


FIRST_SOUNDS = frozenset(
    {Why.FIRST_SOUND_FITS, Why.FIRST_SOUND_OVERDUE, Why.FIRST_SOUND_ALONE, Why.FIRST_SOUND_ALWAYS, Why.PROMPT_PIECE}
)


@dataclass(slots=True)
class Step:
    """One piece of work: a stage, the rows that run in it, and the bucket it is padded to.

    Replay gives the same steps with the same reasons, so a trace does not write them down.  Not frozen, for the reason
    that `Row` is not.
    """

    id: int
    stage: Stage
    rows: tuple[Row, ...]
    bucket: int
    why: Why = Why.UNSAID
    slack_ns: int | None = None
    """The least slack of all who had spoken, when the step was chosen; None where nobody looked."""
    first_sound_ns: int | None = None
    """The time predicted until the first sounds that wait would be made; None where none waited."""


@dataclass(slots=True)
class RowResult:
    """What a step did to one stream.  Not frozen, for the reason that `Row` is not."""

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
class StreamAdmitted:
    """A stream that had to wait for room has begun."""

    stream: int
    slot: int


@dataclass(frozen=True, slots=True)
class StreamRefused:
    """There is no room for the stream: it has waited as long as its class may, or its text has outgrown the memory."""

    stream: int
    detail: str
    retry_after_s: float


@dataclass(slots=True)
class AudioReady:
    """Samples [start, start + samples) of a stream have been made.  Not frozen, for the reason that `Row` is not."""

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


Event = StreamAdmitted | StreamRefused | AudioReady | StreamFinished | StreamFailed | DeadlineMissed
