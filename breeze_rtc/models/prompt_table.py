"""What the backbone reads of a prompt where that is no encoder's work: rows of a table, through a small network.

Each position has a text token, and may have a tag beside it: one of the ids of codebook 0 that are no sound (Qwen3-TTS
has one for each language, each speaker, and each place in a prompt).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from breeze_rtc.models.attention import Ragged


@dataclass(frozen=True, slots=True)
class PromptTableConfig:
    vocab: int
    """Text tokens."""
    hidden: int
    """Width of their table."""
    output: int
    """Width of the backbone."""
    tags: int

    def token(self, text: int, tag: int | None = None) -> int:
        """The one number that says what a position has."""
        return text if tag is None else text + self.vocab * (tag + 1)


class PromptTable(nn.Module):
    """down(silu(up(text))) + tag."""

    def __init__(self, config: PromptTableConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        self.up = nn.Linear(config.hidden, config.hidden)
        self.down = nn.Linear(config.hidden, config.output)
        self.tags = nn.Embedding(config.tags + 1, config.output)
        """Row 0 is no tag: zeros."""

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """tokens (...) int64 as `PromptTableConfig.token` makes them -> (..., output).  No position sees another, so
        `lengths`, which a text encoder needs, says nothing here."""
        text: Tensor = self.down(F.silu(self.up(self.embedding(tokens % self.config.vocab))))
        out: Tensor = text + self.tags(tokens // self.config.vocab)
        return out

    def packed(self, tokens: Tensor, lengths: Tensor, ragged: Ragged) -> Tensor:
        """The same for segments that stand one behind another; see `TextEncoder.packed`."""
        out: Tensor = self(tokens, lengths)
        return out
