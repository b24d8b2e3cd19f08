"""What the executor keeps of one open stream on the host, and its text."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from breeze_rtc.models.pointer import LOOK_AHEAD
from breeze_rtc.models.sampling import Sampling
from breeze_rtc.models.speech_model import TextSegment
from breeze_rtc.playback import TextMark
from breeze_rtc.runtime.frame_steps import BatchRow
from breeze_rtc.runtime.kv_cache import PageTable


class StreamState:
    """One utterance."""

    def __init__(self, slot: int, seed: int, sampling: Sampling, *, tables: list[PageTable], like: Tensor) -> None:
        self.slot = slot
        self.seed = seed
        self.sampling = sampling
        # One KV cache per backbone row; with guidance there are two, with dual guidance three.
        self.tables = tables
        # Positions that each row had before its first text: those of its voice.
        self.shared = [0 if table.prefix is None else table.prefix.positions for table in tables]
        # The last row that a recording stands in, if any does.
        self.recording_row = next((row for row, shared in enumerate(self.shared) if shared), -1)
        # Segments not encoded yet.
        self.waiting: list[TextSegment] = []
        # Characters spoken once token i of the text has been passed, for the tokens added so far (row 0 only).
        self.ends: list[int] = []
        self.is_text_ended = False
        # Encoded text of each row, (tokens + spare, width) with zeros behind the `encoded[row]` tokens that are there.
        self.vectors = [like.new_zeros(LOOK_AHEAD + 61, like.shape[-1]) for _ in tables]
        self.encoded = [0] * len(tables)
        # Frames that have a code 0; frames that have all codes; frames given to the codec; frames that are sound here.
        self.started = self.made = self.decoded = self.sounded = 0
        # per_frame: token the next frame speaks, and frames spent on it so far.
        self.pointer = 0
        self.elapsed = 0
        # Sound and marks not taken yet.
        self.pcm: list[NDArray[np.float32]] = []
        self.marks: list[TextMark] = []
        self.marked_chars = 0

    @property
    def has_spoken_all(self) -> bool:
        """per_frame: the pointer has left the last token of a text that has ended."""
        return self.is_text_ended and not self.waiting and self.pointer >= self.encoded[0]

    @property
    def lacks_text(self) -> bool:
        """per_frame: the next frame would look at tokens that are not encoded, and more may come."""
        is_complete = self.is_text_ended and not self.waiting
        return not is_complete and self.pointer + LOOK_AHEAD > self.encoded[0]

    def prompt(self, row: int) -> int:
        """prefix: positions of a row's prompt, as far as its text is encoded."""
        return self.shared[row] + self.encoded[row]

    def batch_row(self, frame: int) -> BatchRow:
        return BatchRow(self.slot, self.seed, frame, self.sampling, self.scales)

    @property
    def scales(self) -> tuple[float, float]:
        """What rows 0 and 2 weigh against row 1; row 0 has the instructions unless it is that of the recording."""
        scales = self.sampling.cfg_scale, self.sampling.reference_scale
        return scales[::-1] if len(self.tables) == 3 and self.recording_row == 0 else scales

    def add_vectors(self, row: int, vectors: Tensor) -> None:
        start = self.encoded[row]
        end = start + len(vectors)
        buffer = self.vectors[row]
        if end + LOOK_AHEAD > len(buffer):
            grown = buffer.new_zeros(2 * (end + LOOK_AHEAD), buffer.shape[-1])
            grown[:start] = buffer[:start]
            self.vectors[row] = buffer = grown
        buffer[start:end] = vectors
        self.encoded[row] = end

    def mark(self, frames: int, chars: int, frame_samples: int) -> None:
        """After `frames` frames, `chars` characters have been spoken."""
        if chars > self.marked_chars:
            self.marked_chars = chars
            self.marks.append(TextMark(frames * frame_samples, chars))
