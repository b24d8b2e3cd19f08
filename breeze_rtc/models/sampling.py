"""From logits to codes, with randomness that depends on nothing but (seed, frame, codebook, column).

A sampled code is the argmax of logits plus Gumbel noise, and the noise is a hash: the same request gives the same codes
alone, in any batch and slot, replayed or resumed, on CPU and GPU.  There is no generator whose state could be shared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from breeze_rtc.errors import BadSampling


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one stream's codes are chosen.  Raises BadSampling."""

    temperature: float = 0.9
    """Codebook 0; 0 takes the likeliest code."""
    depth_temperature: float = 0.9
    """The other codebooks."""
    top_k: int = 50
    """Only the k likeliest codes (and their equals) may be drawn; 0: all."""
    top_p: float = 1.0
    """Only the likeliest codes whose probabilities reach p together may be drawn."""
    repetition_penalty: float = 1.1
    """Codebook 0: codes this stream has used before become less likely; 1: no."""
    cfg_scale: float = 1.0
    """Classifier-free guidance: how strongly instructions are followed; 1: no stronger than the model does by itself.
    Other values need a prompt that has an unguided form."""
    reference_scale: float = 0.0
    """Not 0: dual guidance, for a cloned voice with instructions.  How strongly the recording is followed, beside
    `cfg_scale` for the instructions, both against speech that knows neither."""

    def __post_init__(self) -> None:
        for name in ("temperature", "depth_temperature"):
            value = getattr(self, name)
            if not (math.isfinite(value) and 0 <= value <= 10):
                raise BadSampling(name, value, "between 0 and 10")
        if not 0 <= self.top_k <= 1 << 20:
            raise BadSampling("top_k", self.top_k, "0 (no limit) or a positive integer")
        if not 0 < self.top_p <= 1:
            raise BadSampling("top_p", self.top_p, "over 0 and at most 1")
        if not (math.isfinite(self.repetition_penalty) and 1 <= self.repetition_penalty <= 10):
            raise BadSampling("repetition_penalty", self.repetition_penalty, "between 1 and 10")
        if not (math.isfinite(self.cfg_scale) and 0 < self.cfg_scale <= 100):
            raise BadSampling("cfg_scale", self.cfg_scale, "over 0 and at most 100")
        if not (math.isfinite(self.reference_scale) and 0 <= self.reference_scale <= 100):
            raise BadSampling("reference_scale", self.reference_scale, "between 0 (single guidance) and 100")

    @property
    def rows(self) -> int:
        """Backbone rows that a stream takes: one, an unguided one beside it, and a third in dual guidance."""
        return 3 if self.reference_scale else 1 if self.cfg_scale == 1 else 2


# Multipliers of the 64-bit SplitMix finaliser (Steele et al. 2014) and the golden ratio, as signed 64-bit integers.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser.  torch shifts int64 arithmetically, so the sign's copies are masked off."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _FIRST
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _SECOND
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def gumbel(seeds: Tensor, frames: Tensor, codebooks: Tensor, columns: int) -> Tensor:
    """Standard Gumbel noise.  seeds, frames (R,) int64, codebooks (C,) int64 -> (R, C, columns) float32."""
    key = _mix(_mix(seeds * _GOLDEN) ^ frames)
    key = _mix(key[:, None] ^ (codebooks + 1) * _GOLDEN)
    column = torch.arange(columns, device=seeds.device) * _GOLDEN
    bits = _mix(key[..., None] + column) >> 41 & 0x7FFFFF
    # 23 bits and a half: neither 0 nor 1 in float32, so that both logarithms are finite.
    uniform = (bits.float() + 0.5) * 2.0**-23
    return uniform.log_().neg_().log_().neg_()


@dataclass(frozen=True, slots=True)
class RowSampling:
    """The sampling values of a step's rows.  The plain fields are known on the host, so no step waits for a tensor."""

    temperature: Tensor
    """(R, 1) float32, 1 where the row is greedy."""
    noise_scale: Tensor
    """(R, 1) float32: 1, or 0 where the row is greedy."""
    top_k: Tensor
    """(R, 1) int64, at least 1, at most `max_top_k`."""
    top_p: Tensor
    """(R, 1) float32."""
    is_greedy: bool
    """All rows are greedy: no noise is needed."""
    max_top_k: int
    """0: no row has a limit that matters."""
    uses_top_p: bool


def penalise(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Repetition penalty.  logits (R, V); seen (R, V) bool, codes used before; penalty (R, 1) >= 1."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def combine(conditional: Tensor, unconditional: Tensor, scale: Tensor) -> Tensor:
    """Classifier-free guidance: u + s (c - u), logits (R, V), scale (R, 1)."""
    return torch.addcmul(unconditional, scale, conditional - unconditional)


def choose(logits: Tensor, noise: Tensor | None, rows: RowSampling) -> Tensor:
    """Draw one code a row: (R,) int64.

    logits: (R, V) float32, reserved ids at -inf.  noise: (R, V) of `gumbel`; not needed when all rows are greedy.
    Temperature, then top-k (ties with the k-th stay), then top-p (the first always stays), then one draw.  All codes
    are sorted only for a top-p without a top-k; else the k best are.
    """
    if rows.is_greedy:
        return logits.argmax(-1)
    assert noise is not None
    x = logits / rows.temperature
    best: Tensor | None = None
    if rows.max_top_k:
        best = x.topk(rows.max_top_k, -1).values
        kth = best.gather(1, rows.top_k - 1)
        best = best.masked_fill(best < kth, float("-inf"))
        x = x.masked_fill(x < kth, float("-inf"))
    if rows.uses_top_p:
        best = x.sort(-1, descending=True).values if best is None else best
        likely = (best - x.logsumexp(-1, keepdim=True)).exp()
        # A row without this limit loses nothing to rounding, as it would not by itself.
        is_out = (likely.cumsum(-1) - likely >= rows.top_p) & (rows.top_p < 1)
        least = best.masked_fill(is_out, float("inf")).amin(-1, keepdim=True)
        x = x.masked_fill(x < least, float("-inf"))
    return torch.addcmul(x, noise, rows.noise_scale).argmax(-1)
