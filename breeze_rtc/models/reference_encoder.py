"""Reference audio -> codec frames: the encoder of the codec whose decoder is `codec`, of the Mimi type.

A SEANet stack of causal convolutions takes 24 kHz sound to 25 vectors a second, a causal transformer looks over them, a
last convolution halves their rate, and a split residual quantiser names each by the entries nearest to it: one semantic
codebook, and beside it the acoustic ones, each coding what those before it left over.

It runs once per voice, over the whole recording, so nothing here streams.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from breeze_rtc.models.attention import Attention, BlockConfig, KVCache, Rope, RopeConfig, band_mask
from breeze_rtc.models.speaker_encoder import SpeakerEncoder


@dataclass(frozen=True, slots=True)
class ReferenceEncoderConfig:
    codebooks: int
    """How many are read; a checkpoint may hold more."""
    codes: int
    """Entries per codebook."""
    code_dim: int
    """Width of a codebook entry."""
    filters: int
    """Channels of the first convolution; each stage doubles them."""
    strides: tuple[int, ...]
    """Of the stages, in the order the sound passes them."""
    kernels: tuple[int, int, int]
    """Of the first convolution, the residual units and the last one."""
    compress: int
    """A residual unit's inner channels are the outer ones over this."""
    block: BlockConfig
    """`eps` is that of the LayerNorms."""
    layers: int
    rope: RopeConfig
    sample_rate: int
    window: int | None = None
    """A position of the transformer, of which a frame has two, sees itself and the `window - 1` before it; None: all.

    Mimi itself has one of 250 (10 s).  The published configs of Breeze TTS 2 and Qwen3-TTS name it, too, but their
    runtimes apply it with flash attention only and were read without: they see all of the past, and so do we."""

    @property
    def frame_samples(self) -> int:
        return 2 * math.prod(self.strides)


class Conv(nn.Module):
    """Causal convolution over (B, C, T) that makes one output for each `stride` inputs, the last of them possibly
    begun and not complete."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int, *, stride: int = 1, bias: bool = True, repeats_edges: bool = False
    ) -> None:
        """repeats_edges: what lies before and behind the sound is like its first and last value, not zero."""
        super().__init__()
        self.stride = stride
        self.mode = "replicate" if repeats_edges else "constant"
        self.weight = nn.Parameter(torch.empty(outputs, inputs, kernel))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, T) -> (B, outputs, ceil(T / stride))."""
        before = self.weight.shape[2] - self.stride
        x = F.pad(x, (before, -x.shape[2] % self.stride), self.mode)
        return F.conv1d(x, self.weight, self.bias, self.stride)


class Stage(nn.Module):
    """A residual unit, then a convolution that divides the rate by `stride` and doubles the channels."""

    def __init__(self, channels: int, stride: int, kernel: int, compress: int) -> None:
        super().__init__()
        self.first = Conv(channels, channels // compress, kernel)
        self.second = Conv(channels // compress, channels, 1)
        self.down = Conv(channels, 2 * channels, 2 * stride, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        """(B, channels, T) -> (B, 2 * channels, ceil(T / stride))."""
        x = x + self.second(F.elu(self.first(F.elu(x))))
        out: Tensor = self.down(F.elu(x))
        return out


class Layer(nn.Module):
    """x + scale * attention(norm(x)), then x + scale * mlp(norm(x)): LayerNorms with biases, nothing else has one."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden, eps=config.eps)
        self.attention = Attention(config)
        self.attention_scale = nn.Parameter(torch.full((config.hidden,), 0.01))
        self.mlp_norm = nn.LayerNorm(config.hidden, eps=config.eps)
        self.up = nn.Linear(config.hidden, config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, config.hidden, bias=False)
        self.mlp_scale = nn.Parameter(torch.full((config.hidden,), 0.01))

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        mask: Tensor | None = None,
        *,
        cache: KVCache | None = None,
        layer: int = 0,
    ) -> Tensor:
        """(B, T, hidden) -> the same shape.  Without a mask and a cache it sees all of the past."""
        attend = self.attention
        seen = attend(self.attention_norm(x), rope, mask, is_causal=mask is None, cache=cache, layer=layer)
        x = x + self.attention_scale * seen
        out: Tensor = x + self.mlp_scale * self.down(F.gelu(self.up(self.mlp_norm(x))))
        return out


class ReferenceEncoder(nn.Module):
    """Sound -> codes."""

    def __init__(self, config: ReferenceEncoderConfig) -> None:
        super().__init__()
        self.config = config
        c = config
        widths = [c.filters << stage for stage in range(len(c.strides) + 1)]
        first, inner, last = c.kernels
        self.first = Conv(1, c.filters, first)
        self.stages = nn.ModuleList(
            Stage(width, stride, inner, c.compress) for width, stride in zip(widths, c.strides, strict=False)
        )
        self.last = Conv(widths[-1], c.block.hidden, last)
        self.layers = nn.ModuleList(Layer(c.block) for _ in range(c.layers))
        self.rope = Rope(c.block.head_dim, c.rope)
        self.halve = Conv(c.block.hidden, c.block.hidden, 4, stride=2, bias=False, repeats_edges=True)
        self.to_semantic = nn.Linear(c.block.hidden, c.code_dim, bias=False)
        self.to_acoustic = nn.Linear(c.block.hidden, c.code_dim, bias=False)
        self.codebooks = nn.Parameter(torch.randn(c.codebooks, c.codes, c.code_dim) * c.code_dim**-0.5)
        self.speaker: SpeakerEncoder | None = None
        """Of models that are also told whose voice it is."""

    def latents(self, sound: Tensor) -> Tensor:
        """(B, samples) -> (B, T, hidden), T = ceil(samples / frame_samples)."""
        x = self.first(sound[:, None])
        for stage in self.stages:
            x = stage(x)
        x = self.last(F.elu(x)).transpose(1, 2)
        rope = self.rope(torch.arange(x.shape[1], device=x.device)[None], x.dtype)
        window = self.config.window
        mask = band_mask(x.shape[1], window - 1, 0, x) if window is not None and window < x.shape[1] else None
        for layer in self.layers:
            x = layer(x, rope, mask)
        out: Tensor = self.halve(x.transpose(1, 2)).transpose(1, 2)
        return out

    @torch.inference_mode()
    def forward(self, sound: Tensor) -> Tensor:
        """Name the frames of recordings of equal length.

        sound: (B, samples) float32 in [-1, 1] at `sample_rate`, samples >= 1.
        Returns (B, T, codebooks) int64; the last frame may be filled up with silence.
        """
        latents = self.latents(sound)
        rest = self.to_acoustic(latents)
        codes = [_nearest(self.to_semantic(latents), self.codebooks[0])]
        for book in self.codebooks[1:]:
            codes.append(_nearest(rest, book))
            rest = rest - F.embedding(codes[-1], book)
        return torch.stack(codes, -1)


def _nearest(x: Tensor, book: Tensor) -> Tensor:
    """The entry of `book` (codes, D) nearest to each vector of x (B, T, D): (B, T) int64."""
    return torch.cdist(x, book[None]).argmin(-1)
