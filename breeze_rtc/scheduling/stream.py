"""Where one utterance stands in each stage.  Counts and times only, never a tensor.

A frame is *started* when its first code exists (PREFILL for frame 0, BACKBONE for the others), *made* when DEPTH has
filled the other codes, *delivered* when CODEC has turned it into sound: delivered <= made <= started <= made + 1.
"""

from __future__ import annotations

from collections import deque
from enum import Enum, IntEnum

from breeze_rtc.clock import SECOND
from breeze_rtc.scheduling.predictor import Predictor
from breeze_rtc.scheduling.step import Stage

NEVER = 1 << 62
"""Later than any time a monotonic clock will say (146 years in ns)."""


class Feed(Enum):
    """How text reaches the backbone."""

    PREFIX = "prefix"
    """The whole text is the prompt: PREFILL waits for its end."""
    PER_FRAME = "per_frame"
    """The prompt is one position and every frame brings its own text: PREFILL waits for the first piece."""


class Priority(IntEnum):
    """Whom lateness hurts.  The lower value is served first, but no class starves another: see `Stream.ease_ns`."""

    LIVE = 0
    """A call: somebody is listening and may answer."""
    STREAM = 1
    """Somebody is listening."""
    BATCH = 2
    """Nobody listens yet: dubbing, files."""


EASE_NS = {Priority.LIVE: 0, Priority.STREAM: SECOND // 20, Priority.BATCH: SECOND}
"""How much later than its real deadline a stream of each class is treated as due: a weight that ages, not a level."""


class Stream:
    """One utterance, from its first text to its last sample."""

    __slots__ = (
        "began_ns",
        "delivered",
        "ease_ns",
        "encoded",
        "feed",
        "id",
        "interactive",
        "is_cancelled",
        "is_text_ended",
        "listener",
        "longest_chunk",
        "made",
        "max_frames",
        "may_begin_at",
        "opened",
        "out",
        "page_room",
        "pages",
        "pages_kept",
        "positions",
        "priority",
        "ready_ns",
        "recovers",
        "rests_until",
        "rows",
        "runs_dry_at",
        "samples",
        "segments",
        "served",
        "slack_ns",
        "slot",
        "speech_ended",
        "started",
        "starved_at",
        "target",
        "tokens",
        "waited_at",
    )

    def __init__(
        self,
        stream: int,
        *,
        feed: Feed,
        priority: Priority,
        rows: int,
        max_frames: int,
        interactive: bool,
        sample_rate: int,
        first_chunk: int,
        longest_chunk: int,
        pages_kept: int,
        opened: int,
        served: int,
    ) -> None:
        self.id = stream
        # Its state slot, and since when; -1 while it waits for room.
        self.slot = -1
        self.began_ns = 0
        self.feed = feed
        self.priority = priority
        self.ease_ns = EASE_NS[priority]
        # Backbone rows of this stream: 2 with classifier-free guidance.
        self.rows = rows
        self.max_frames = max_frames
        # Somebody may interrupt, so the stream is not generated past the lead cap.
        self.interactive = interactive
        # Streams opened before this one; the last step that carried it, or the last of all before it opened.
        self.opened = opened
        self.served = served
        # Since when it has had something to run without a break; its wait for a first sound counts from here.  While it
        # waits for room: since when it has.
        self.ready_ns = 0

        # Text tokens pushed and encoded; the lengths of pushed pieces not encoded yet.
        self.tokens = 0
        self.encoded = 0
        self.segments: deque[int] = deque()
        self.is_text_ended = False
        # Encoded tokens at the moment the model asked for more; None while it has enough.
        self.starved_at: int | None = None

        # Positions in the KV cache, and the pages that hold them.
        self.positions = 0
        self.pages: list[int] = []
        # Positions that those pages hold.
        self.page_room = 0
        # Pages reserved for this stream, those it holds included.
        self.pages_kept = pages_kept

        # Frames; see the module's docstring.
        self.started = 0
        self.made = 0
        self.delivered = 0
        # The model said that the speech is over.
        self.speech_ended = False

        # Samples delivered, and the listener who hears them.
        self.samples = 0
        self.listener = Predictor(sample_rate)

        # Frames of the chunk being filled, and of the largest it may ever have.
        self.target = first_chunk
        self.longest_chunk = longest_chunk
        # The listener ran dry and this chunk is to end that: it is not sent before it is full.
        self.recovers = False

        # Frames delivered when a full chunk of it was last left waiting for others; a chunk waits once.
        self.waited_at = 0

        # The stage of the step that is out with this stream in it.
        self.out: Stage | None = None
        self.is_cancelled = False
        # For the survey: it need not be looked at before `rests_until`, 0 while it is looked at at every decision; and
        # while it rests, from when on it may begin its next chunk, and when its listener counts as dry, if ever.
        self.rests_until = 0
        self.may_begin_at = NEVER
        self.runs_dry_at = NEVER
        # Time to spare before the next sound must start to be made, as of the last look.  NEVER where none is owed.
        self.slack_ns = NEVER

    @property
    def is_waiting(self) -> bool:
        """There has been no room for it yet."""
        return self.slot < 0

    @property
    def pending(self) -> int:
        """Frames made and not yet delivered."""
        return self.made - self.delivered

    @property
    def has_spoken(self) -> bool:
        return self.delivered > 0

    @property
    def is_text_complete(self) -> bool:
        """No more text will come, and all of it is encoded."""
        return self.is_text_ended and not self.segments

    @property
    def can_encode(self) -> bool:
        """A piece of text waits for the encoder, and there is still something to say."""
        return bool(self.segments) and not self.is_generated

    @property
    def prompt(self) -> int:
        """Positions of the prompt; meaningful once `can_prefill` has been true."""
        return self.tokens if self.feed is Feed.PREFIX else 1

    @property
    def can_prefill(self) -> bool:
        """A part of the prompt is there and not in the KV cache."""
        if self.feed is Feed.PREFIX:
            return self.is_text_complete and self.positions < self.tokens
        return self.positions == 0 and self.encoded > 0

    @property
    def is_generated(self) -> bool:
        """No more frames will be started."""
        return self.speech_ended or self.started >= self.max_frames

    @property
    def can_generate(self) -> bool:
        """BACKBONE may start the next frame."""
        return (
            0 < self.started == self.made
            and not self.speech_ended
            and self.started < self.max_frames
            and self.starved_at is None
        )

    @property
    def is_finished(self) -> bool:
        """Every frame there will ever be has been delivered, or there was nothing to say."""
        if self.started > self.delivered:
            return False
        return self.is_generated or (self.tokens == 0 and self.is_text_complete)
