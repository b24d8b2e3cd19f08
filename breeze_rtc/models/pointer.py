"""Text fed one item per frame: a pointer walks over the encoder's vectors while speech goes on.

At each frame the backbone sees the vectors at the pointer and the two after it, and how long the pointer has stood
there; after the frame a head says how many tokens the pointer moves on.  The pointer leaving the last token ends the
speech, and its path says which sample speaks which token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

LOOK_AHEAD = 3
"""Encoder vectors a frame sees: the pointer's and the next two."""


@dataclass(frozen=True, slots=True)
class PointerConfig:
    text: int
    """Width of the encoder's output."""
    hidden: int
    """Width of the backbone."""
    max_elapsed: int = 32
    """Frames on one token that are still told apart."""
    advances: int = 4
    """Classes of the advance head: the pointer moves 0 to advances - 1 tokens a frame."""


class TextPointer(nn.Module):
    """Items for the backbone's input, and the advance head."""

    def __init__(self, config: PointerConfig) -> None:
        super().__init__()
        self.config = config
        # One linear over the three vectors side by side is the sum of three linears.
        self.text = nn.Linear(LOOK_AHEAD * config.text, config.hidden, bias=False)
        self.elapsed = nn.Embedding(config.max_elapsed, config.hidden)
        self.start = nn.Parameter(torch.randn(config.hidden) * 0.02)
        """Stands for the previous frame's embedding at frame 0."""
        self.advance = nn.Linear(config.hidden, config.advances)

    def item(self, window: Tensor, elapsed: Tensor) -> Tensor:
        """What a frame reads of the text.

        window: (..., 3, text), encoder vectors at the pointer and after it, zeros past the end of the text.
        elapsed: (...) int64, frames the pointer has stood on this token before this frame.
        Returns (..., hidden).
        """
        out: Tensor = self.text(window.flatten(-2)) + self.elapsed(elapsed.clamp(max=self.config.max_elapsed - 1))
        return out

    def advance_logits(self, hidden: Tensor) -> Tensor:
        """hidden (..., hidden) of a frame -> (..., advances) float32."""
        out: Tensor = self.advance(hidden).float()
        return out
