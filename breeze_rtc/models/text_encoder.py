"""Text tokens -> what the backbone reads of them: the bidirectional T5Gemma 2 encoder and a projection.

Each text segment is a row of its own and sees nothing of the others, so how segments are packed changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from breeze_rtc.models.attention import Attention, BlockConfig, GatedMLP, RMSNorm, Rope, RopeConfig


@dataclass(frozen=True, slots=True)
class TextEncoderConfig:
    vocab: int
    block: BlockConfig
    full_attention: tuple[bool, ...]
    """Per layer: sees the whole segment (True) or a window (False)."""
    window: int
    """Window layers: a query sees `(window - 1) // 2` tokens to its left and `window // 2` to its right."""
    window_rope: RopeConfig
    full_rope: RopeConfig
    output: int
    """Width of the backbone, or of the pointer's items."""
    own_vector_id: int | None = None
    """This token's embedding is a separate, unscaled vector (a leftover of Gemma's images)."""


class EncoderLayer(nn.Module):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))), with Gemma's norms."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden, config.eps, unit_offset=True)
        self.attention = Attention(config, unit_offset=True)
        self.attention_post_norm = RMSNorm(config.hidden, config.eps, unit_offset=True)
        self.mlp_norm = RMSNorm(config.hidden, config.eps, unit_offset=True)
        self.mlp = GatedMLP(config.hidden, config.ffn, gelu=True)
        self.mlp_post_norm = RMSNorm(config.hidden, config.eps, unit_offset=True)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        x = x + self.attention_post_norm(self.attention(self.attention_norm(x), rope, mask))
        out: Tensor = x + self.mlp_post_norm(self.mlp(self.mlp_norm(x)))
        return out


class TextEncoder(nn.Module):
    """The encoder stack, its final norm and the projection to the backbone's width."""

    def __init__(self, config: TextEncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.block.hidden)
        if config.own_vector_id is not None:
            self.own_vector = nn.Parameter(torch.zeros(config.block.hidden))
        self.layers = nn.ModuleList(EncoderLayer(config.block) for _ in config.full_attention)
        self.norm = RMSNorm(config.block.hidden, config.block.eps, unit_offset=True)
        self.projection = nn.Linear(config.block.hidden, config.output, bias=False)
        self.window_rope = Rope(config.block.head_dim, config.window_rope)
        self.full_rope = Rope(config.block.head_dim, config.full_rope)

    def embed(self, tokens: Tensor) -> Tensor:
        """(B, L) -> (B, L, hidden): the table's rows times sqrt(hidden), that factor rounded to the table's type."""
        x: Tensor = self.embedding(tokens)
        x = x * torch.tensor(self.config.block.hidden**0.5).to(x.dtype).item()
        if self.config.own_vector_id is not None:
            x = torch.where((tokens == self.config.own_vector_id)[..., None], self.own_vector.to(x.dtype), x)
        return x

    def encode(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """(B, L) int64 tokens, `lengths` (B,) of them valid -> (B, L, hidden) after the final norm."""
        x = self.embed(tokens)
        index = torch.arange(tokens.shape[1], device=tokens.device)
        # A pad sees itself, so that no row of the softmax is empty; nobody sees a pad.
        is_pad = index >= lengths[:, None]
        hidden_keys = is_pad[:, None, :] & (index[None, :, None] != index)
        full = torch.zeros(hidden_keys.shape, dtype=x.dtype, device=x.device).masked_fill_(hidden_keys, float("-inf"))
        offset = index[None] - index[:, None]
        w = self.config.window
        outside = (offset < -((w - 1) // 2)) | (offset > w // 2)
        window = full.masked_fill(outside, float("-inf"))
        positions = index[None]
        ropes = {True: self.full_rope(positions, x.dtype), False: self.window_rope(positions, x.dtype)}
        for layer, sees_all in zip(self.layers, self.config.full_attention, strict=True):
            x = layer(x, ropes[sees_all], full if sees_all else window)
        out: Tensor = self.norm(x)
        return out

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Encode text segments, one a row.

        tokens: (B, L) int64, right-padded; lengths: (B,) int64, valid tokens of each row.
        Returns (B, L, output); what stands at the pads means nothing.
        """
        out: Tensor = self.projection(self.encode(tokens, lengths))
        return out
