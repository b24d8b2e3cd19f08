"""Text tokens -> what the backbone reads of them: the bidirectional T5Gemma 2 encoder and a projection.

Each text segment sees nothing of the others, so how segments are packed changes nothing: `forward` takes one a row, and
`packed`, which serves, any number one behind another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from breeze_rtc.models.attention import Attention, BlockConfig, GatedMLP, KVCache, Ragged, RMSNorm, Rope, RopeConfig


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

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        mask: Tensor | None = None,
        *,
        cache: KVCache | None = None,
        layer: int = 0,
    ) -> Tensor:
        branch = self.attention(self.attention_norm(x), rope, mask, cache=cache, layer=layer)
        x = x + self.attention_post_norm(branch)
        out: Tensor = x + self.mlp_post_norm(self.mlp(self.mlp_norm(x)))
        return out


class _Segments:
    """What the attention layers of one packed call see: to them, a `KVCache` that keeps nothing."""

    def __init__(self, config: TextEncoderConfig, ragged: Ragged, full: Tensor, window: Tensor) -> None:
        """full, window: (R, T, T), what is added to the scores of each kind of layer."""
        self._masks = [full if sees_all else window for sees_all in config.full_attention]
        self._ragged = ragged

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = self._ragged.places
        return self._ragged.attend(q, k[0][:, places], v[0][:, places], self._masks[layer])


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
        x = x * rounded(rounded(self.config.block.hidden**0.5, torch.float32), x.dtype)
        if self.config.own_vector_id is not None:
            x = torch.where((tokens == self.config.own_vector_id)[..., None], self.own_vector.to(x.dtype), x)
        return x

    def encode(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """(B, L) int64 tokens, `lengths` (B,) of them valid -> (B, L, hidden) after the final norm."""
        x = self.embed(tokens)
        full, window = self._masks(lengths, tokens.shape[1], x)
        ropes = self._ropes(torch.arange(tokens.shape[1], device=tokens.device)[None], x)
        for layer, sees_all in zip(self.layers, self.config.full_attention, strict=True):
            x = layer(x, ropes[sees_all], full if sees_all else window)
        out: Tensor = self.norm(x)
        return out

    def _masks(self, lengths: Tensor, longest: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Of the layers that see all and of those that see a window: (B, longest, longest) to add to the scores."""
        index = torch.arange(longest, device=lengths.device)
        # A pad sees itself, so that no row of the softmax is empty; nobody sees a pad.
        is_pad = index >= lengths[:, None]
        hidden_keys = is_pad[:, None, :] & (index[None, :, None] != index)
        full = torch.zeros(hidden_keys.shape, dtype=like.dtype, device=like.device)
        full = full.masked_fill_(hidden_keys, float("-inf"))
        offset = index[None] - index[:, None]
        w = self.config.window
        outside = (offset < -((w - 1) // 2)) | (offset > w // 2)
        return full, full.masked_fill(outside, float("-inf"))

    def _ropes(self, positions: Tensor, like: Tensor) -> dict[bool, tuple[Tensor, Tensor]]:
        return {True: self.full_rope(positions, like.dtype), False: self.window_rope(positions, like.dtype)}

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Encode text segments, one a row.

        tokens: (B, L) int64, right-padded; lengths: (B,) int64, valid tokens of each row.
        Returns (B, L, output); what stands at the pads means nothing.
        """
        out: Tensor = self.projection(self.encode(tokens, lengths))
        return out

    def packed(self, tokens: Tensor, lengths: Tensor, ragged: Ragged) -> Tensor:
        """Encode segments that stand one behind another, of whichever requests.

        tokens: (N,) int64, pads last; lengths: (R,) int64, 0 where there is no segment; ragged: where each stands.
        Returns (N, output), a segment's vectors where its tokens stand; what stands at the pads means nothing.
        """
        x = self.embed(tokens[None])
        segments = _Segments(self.config, ragged, *self._masks(lengths, ragged.places.shape[1], x))
        ropes = self._ropes(ragged.offsets[None], x)
        for index, (layer, sees_all) in enumerate(zip(self.layers, self.config.full_attention, strict=True)):
            x = layer(x, ropes[sees_all], cache=segments, layer=index)
        out: Tensor = self.projection(self.norm(x))[0]
        return out


def rounded(value: float, dtype: torch.dtype) -> float:
    """A positive value as that type holds it; without a tensor, which a step could not read while it is recorded."""
    mantissa, exponent = math.frexp(value)
    steps = 2 / torch.finfo(dtype).eps
    return math.ldexp(round(mantissa * steps) / steps, exponent)
