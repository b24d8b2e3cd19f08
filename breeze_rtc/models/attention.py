"""What the transformers of all stages share: norms, rotary positions, grouped-query attention, the gated MLP.

Projections that read the same input are one matrix (`qkv`, `gate_up`): at batch 1 a step costs what its kernel launches
cost.  `checkpoint` joins the published matrices when it loads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """One transformer layer."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    eps: float = 1e-6
    qk_norm: bool = False
    """RMSNorm over each head of q and k, before the rotation."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary positions: base, and how the inverse frequencies are stretched."""

    theta: float
    factor: float = 1.0
    """All inverse frequencies are divided by it, unless the three fields below are set."""
    low: float = 0.0
    high: float = 0.0
    original_length: int = 0
    """Not 0: the Llama 3 rule.  Wavelengths over `original_length / low` are stretched by `factor`, those under
    `original_length / high` stay, and those between are blended."""


_WIDE = frozenset((torch.float32, torch.float64))


class KVCache(Protocol):
    """Where attention layers leave keys and values for later positions, and look at those of earlier ones."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store this step's keys and values, then attend over all that each query may see.

        q (B, T, heads, D); k, v (B, kv_heads, T, D), all rotated.  Returns (B, T, heads * D).
        """


@dataclass(frozen=True, slots=True)
class Ragged:
    """Pieces of unequal length that stand one behind another along an axis of N tokens, so that products have no pads
    between them; attention, where no piece may see another, asks for them as rows."""

    places: Tensor
    """(R, T) int64: where token t of piece r stands; behind its end, where its first token does."""
    back: Tensor
    """(N,) int64: r * T + t of each token; 0 behind the last piece."""

    @classmethod
    def of(cls, lengths: Sequence[int], tokens: int, rows: int, longest: int) -> Ragged:
        """On the host.  tokens, rows, longest: N, R and T, at least what the pieces take."""
        places = torch.zeros(rows, longest, dtype=torch.int64)
        back = torch.zeros(tokens, dtype=torch.int64)
        start = 0
        for row, length in enumerate(lengths):
            places[row] = start
            places[row, :length] = torch.arange(start, start + length)
            back[start : start + length] = torch.arange(row * longest, row * longest + length)
            start += length
        return cls(places, back)

    @property
    def offsets(self) -> Tensor:
        """(N,): how far each token is behind the beginning of its piece."""
        return self.back % self.places.shape[1]

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Each piece over columns of its own: a column that a query may not see adds an exact zero.

        q (1, N, heads, D); keys, values (kv_heads, R, C, D); mask (R, T, C), added to the scores.
        Returns (1, N, heads * D).
        """
        _, _, heads, D = q.shape
        kv_heads = keys.shape[0]
        groups = heads // kv_heads
        R, T = self.places.shape
        # The queries that share a key head are the rows of one product.
        q = q[0, self.places].view(R, T, kv_heads, groups, D).permute(2, 0, 3, 1, 4).reshape(kv_heads, R, groups * T, D)
        scores = (q @ keys.transpose(-1, -2)).view(kv_heads, R, groups, T, -1)
        scores = torch.add(mask[:, None], scores, alpha=D**-0.5)
        weights = scores.softmax(-1, dtype=torch.float32).type_as(q).view(kv_heads, R, groups * T, -1)
        seen = (weights @ values).view(kv_heads, R, groups, T, D)
        return seen.permute(1, 3, 0, 2, 4).reshape(R * T, heads * D)[self.back][None]


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis; the statistics are float32 whatever the type of x.

    unit_offset: the weight is stored minus one and applied in float32, as Gemma does.
    """

    def __init__(self, size: int, eps: float, *, unit_offset: bool = False) -> None:
        super().__init__()
        self.shape = (size,)
        self.eps = eps
        self.unit_offset = unit_offset
        self.weight = nn.Parameter(torch.zeros(size) if unit_offset else torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        if self.unit_offset:
            return F.rms_norm(x.float(), self.shape, 1.0 + self.weight.float(), self.eps).type_as(x)
        if x.dtype in _WIDE:
            if not torch.is_grad_enabled():
                # The mean square as a product of each row with itself: half the time of rms_norm for the few rows of a
                # step on CPU, and the same sum for a row whatever stands beside it.
                rows = x.reshape(-1, 1, self.shape[0])
                square = torch.bmm(rows, rows.transpose(1, 2)).mul_(1 / self.shape[0]).add_(self.eps)
                return x * square.rsqrt_().view(*x.shape[:-1], 1) * self.weight
            return F.rms_norm(x, self.shape, self.weight, self.eps)
        # Llama and Qwen cast back before they multiply; doing it after gives other bfloat16 roundings.
        return F.rms_norm(x.float(), self.shape, None, self.eps).type_as(x) * self.weight


def inverse_frequencies(head_dim: int, rope: RopeConfig) -> Tensor:
    """(head_dim / 2,) float64 radians per position."""
    frequencies = rope.theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim)
    if not rope.original_length:
        return frequencies / rope.factor
    turns = rope.original_length * frequencies / (2 * torch.pi)
    blend = ((turns - rope.low) / (rope.high - rope.low)).clamp(0, 1)
    return blend * frequencies + (1 - blend) * frequencies / rope.factor


class Rope(nn.Module):
    """Turns positions into the pair of tensors that `rotate` multiplies with."""

    frequencies: Tensor

    def __init__(self, head_dim: int, config: RopeConfig) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.config = config
        self.register_buffer("frequencies", inverse_frequencies(head_dim, config).float(), persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions (B, T) int64 -> cos and signed sin, each (B, T, 1, head_dim), computed in float32."""
        # The buffer may have been cast with the model; angles of a bfloat16 frequency would be noise.
        angle = positions[..., None, None] * self.frequencies.float()
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the pairs (i, i + D/2) of the last axis of x (B, T, heads, D)."""
    cos, signed_sin = rope
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), signed_sin)


def band_mask(length: int, left: int | None, right: int | None, like: Tensor) -> Tensor:
    """(length, length) to add to scores: 0 where q - left <= k <= q + right (None: no bound), -inf elsewhere."""
    offset = torch.arange(length, device=like.device)
    offset = offset[None] - offset[:, None]
    blocked = torch.zeros_like(offset, dtype=torch.bool)
    if left is not None:
        blocked |= offset < -left
    if right is not None:
        blocked |= offset > right
    return torch.zeros_like(offset, dtype=like.dtype).masked_fill_(blocked, float("-inf"))


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, is_causal: bool = False) -> Tensor:
    """Softmax attention, scores scaled by D^-0.5.

    q (B, T, heads, D); k, v (B, kv_heads, L, D); mask broadcastable to (B, T, L), added to the scores.
    Returns (B, T, heads * D).
    """
    B, T, heads, D = q.shape
    groups = heads // k.shape[1]
    if T == 1 and mask is None:
        # One query that sees every column, as in the depth decoder.  The heads of a group are the rows of one small
        # product, and no key is copied for them.
        scores = q.view(B, k.shape[1], groups, D) @ k.transpose(-1, -2)
        weights = (scores * D**-0.5).softmax(-1, dtype=torch.float32)
        seen: Tensor = weights.type_as(v) @ v
        return seen.view(B, 1, heads * D)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.repeat_interleave(groups, 1) if groups > 1 else k,
        v.repeat_interleave(groups, 1) if groups > 1 else v,
        attn_mask=None if mask is None else (mask[:, None] if mask.dim() == 3 else mask),
        is_causal=is_causal,
    )
    return out.transpose(1, 2).reshape(B, T, heads * D)


class Attention(nn.Module):
    """Grouped-query attention without biases."""

    def __init__(self, config: BlockConfig, *, unit_offset: bool = False) -> None:
        super().__init__()
        self.config = config
        self.unit_offset = unit_offset
        c = config
        self.qkv = nn.Linear(c.hidden, (c.heads + 2 * c.kv_heads) * c.head_dim, bias=False)
        self.out = nn.Linear(c.heads * c.head_dim, c.hidden, bias=False)
        if c.qk_norm:
            fill = torch.zeros if unit_offset else torch.ones
            self.q_norm = nn.Parameter(fill(c.head_dim))
            self.k_norm = nn.Parameter(fill(c.head_dim))

    def project(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """x (B, T, hidden) -> rotated q (B, T, heads, D), rotated k and v (B, kv_heads, T, D)."""
        c = self.config
        B, T, _ = x.shape
        qkv = self.qkv(x).view(B, T, c.heads + 2 * c.kv_heads, c.head_dim)
        qk, v = qkv[:, :, : c.heads + c.kv_heads], qkv[:, :, c.heads + c.kv_heads :]
        if c.qk_norm:
            qk = self._normalise(qk)
        qk = rotate(qk, rope)
        return qk[:, :, : c.heads], qk[:, :, c.heads :].transpose(1, 2), v.transpose(1, 2)

    def _normalise(self, qk: Tensor) -> Tensor:
        # q and k share one norm call; only the weights differ by head.
        c = self.config
        weight = torch.cat((self.q_norm.expand(c.heads, -1), self.k_norm.expand(c.kv_heads, -1)))
        if self.unit_offset:
            return (F.rms_norm(qk.float(), (c.head_dim,), None, c.eps) * (1.0 + weight.float())).type_as(qk)
        if qk.dtype in _WIDE:
            return F.rms_norm(qk, (c.head_dim,), None, c.eps) * weight
        return F.rms_norm(qk.float(), (c.head_dim,), None, c.eps).type_as(qk) * weight

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        mask: Tensor | None = None,
        *,
        is_causal: bool = False,
        cache: KVCache | None = None,
        layer: int = 0,
    ) -> Tensor:
        """x (B, T, hidden) -> (B, T, hidden).  A cache knows its own mask."""
        q, k, v = self.project(x, rope)
        seen = attend(q, k, v, mask, is_causal=is_causal) if cache is None else cache.attend(layer, q, k, v)
        out: Tensor = self.out(seen)
        return out


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), act = SiLU or, for Gemma, the tanh form of GELU."""

    def __init__(self, hidden: int, ffn: int, *, gelu: bool = False) -> None:
        super().__init__()
        self.gelu = gelu
        self.gate_up = nn.Linear(hidden, 2 * ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        gate = F.gelu(gate, approximate="tanh") if self.gelu else F.silu(gate)
        out: Tensor = self.down(gate * up)
        return out


class Block(nn.Module):
    """Pre-norm layer: x + attention(norm(x)), then x + mlp(norm(x)), each branch scaled per channel if asked."""

    def __init__(self, config: BlockConfig, *, layer_scale: float | None = None) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden, config.eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.hidden, config.eps)
        self.mlp = GatedMLP(config.hidden, config.ffn)
        self.has_scale = layer_scale is not None
        if layer_scale is not None:
            self.attention_scale = nn.Parameter(torch.full((config.hidden,), layer_scale))
            self.mlp_scale = nn.Parameter(torch.full((config.hidden,), layer_scale))

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        mask: Tensor | None = None,
        *,
        is_causal: bool = False,
        cache: KVCache | None = None,
        layer: int = 0,
    ) -> Tensor:
        """x (B, T, hidden) -> (B, T, hidden)."""
        branch = self.attention(self.attention_norm(x), rope, mask, is_causal=is_causal, cache=cache, layer=layer)
        x = torch.addcmul(x, branch, self.attention_scale) if self.has_scale else x + branch
        branch = self.mlp(self.mlp_norm(x))
        return torch.addcmul(x, branch, self.mlp_scale) if self.has_scale else x + branch
