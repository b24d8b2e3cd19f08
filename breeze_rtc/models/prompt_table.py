"""What the backbone reads of a prompt where that is no encoder's work: rows of a table (CSM), through a small network
(Qwen3-TTS).

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
    tags: int = 0
    has_network: bool = True
    """False: what the backbone reads are the rows themselves, and `hidden` is its width."""

    def token(self, text: int, tag: int | None = None) -> int:
        """The one number that says what a position has."""
        return text if tag is None else text + self.vocab * (tag + 1)


class PromptTable(nn.Module):
    """down(silu(up(text))) + tag, as much of it as there is."""

    def __init__(self, config: PromptTableConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        assert config.has_network or config.hidden == config.output
        if config.has_network:
            self.up = nn.Linear(config.hidden, config.hidden)
            self.down = nn.Linear(config.hidden, config.output)
        self.tags = nn.Embedding(config.tags + 1, config.output) if config.tags else None
        """Row 0 is no tag: zeros."""

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """tokens (...) int64 as `PromptTableConfig.token` makes them -> (..., output).  No position sees another, so
        `lengths`, which a text encoder needs, says nothing here."""
        out: Tensor = self.embedding(tokens % self.config.vocab)
        if self.config.has_network:
            out = self.down(F.silu(self.up(out)))
        return out if self.tags is None else out + self.tags(tokens // self.config.vocab)

    def packed(self, tokens: Tensor, lengths: Tensor, ragged: Ragged) -> Tensor:
        """The same for segments that stand one behind another; see `TextEncoder.packed`."""
        out: Tensor = self(tokens, lengths)
        return out
