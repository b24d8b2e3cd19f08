"""Mimi's decoder (Kyutai; Sesame CSM speaks with it): frames of codes -> samples, in any number of pieces.

Residual codebooks, a transposed convolution of each channel by itself that makes two positions of a frame, a
sliding-window transformer, and a SEANet stack of transposed convolutions and residual units.  What `codec` says of
itself holds here: everything is causal, arrays are channels last, T frames give T * frame_samples samples at once, and
the state of a stream is one flat row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from breeze_rtc.models.attention import BlockConfig, Rope, RopeConfig, band_mask
from breeze_rtc.models.codec import (
    CausalConv,
    CausalUpsample,
    CodecState,
    Streaming,
    StreamingDecoder,
    Tape,
    WindowCache,
    causal,
)
from breeze_rtc.models.reference_encoder import Layer

STEPS = 2
"""Positions of the transformer per frame."""


@dataclass(frozen=True, slots=True)
class MimiConfig:
    codebooks: int
    codes: int
    """Entries per codebook."""
    code_dim: int
    """Width of a codebook entry."""
    block: BlockConfig
    """`eps` is that of the LayerNorms."""
    layers: int
    rope: RopeConfig
    window: int
    """A position sees itself and the `window - 1` positions before it."""
    filters: int
    """Channels before the last convolution; each stage has half as many as the one before it."""
    rates: tuple[int, ...]
    """Factors of the stages."""
    kernels: tuple[int, int, int]
    """Of the first convolution, the residual units and the last one."""
    compress: int
    """A residual unit's inner channels are the outer ones over this."""
    sample_rate: int

    @property
    def frame_samples(self) -> int:
        return STEPS * math.prod(self.rates)


class ChannelUpsample(Streaming):
    """Each channel's own transposed convolution, kernel twice the stride, the last half of whose output is dropped."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.past_size = channels
        self.weight = nn.Parameter(torch.empty(2, STEPS, channels).uniform_(-1, 1))
        """What the step before adds to each phase of the output, and what the current one does."""

    def forward(self, x: Tensor, tape: Tape | None = None) -> Tensor:
        """(B, T, channels) -> (B, STEPS * T, channels)."""
        B, T, C = x.shape
        x = causal(x, 1, tape)[:, :, None]
        before, now = self.weight
        return torch.addcmul(x[:, 1:] * now, x[:, :-1], before).view(B, STEPS * T, C)


class MimiStage(nn.Module):
    """A transposed convolution to half the channels, and a residual unit."""

    def __init__(self, channels: int, rate: int, kernel: int, compress: int) -> None:
        super().__init__()
        half = channels // 2
        self.upsample = CausalUpsample(channels, half, stride=rate, overlap=True)
        self.first = CausalConv(half, half // compress, kernel)
        self.second = CausalConv(half // compress, half, 1)

    def forward(self, x: Tensor, tape: Tape | None = None) -> Tensor:
        """(B, T, channels) -> (B, T * rate, channels / 2)."""
        x = self.upsample(F.elu(x), tape)
        out: Tensor = x + self.second(F.elu(self.first(F.elu(x), tape)))
        return out


class MimiDecoder(StreamingDecoder):
    """Codes -> samples."""

    def __init__(self, config: MimiConfig) -> None:
        c = config
        hidden, (first, inner, last) = c.block.hidden, c.kernels
        super().__init__(
            codebooks=(c.codebooks, c.codes, c.code_dim), mixed=hidden, block=c.block, layers=c.layers, window=c.window
        )
        self.config = config
        self.upsample = ChannelUpsample(hidden)
        self.layers = nn.ModuleList(Layer(c.block) for _ in range(c.layers))
        self.rope = Rope(c.block.head_dim, c.rope)
        widths = [c.filters << stage for stage in range(len(c.rates), 0, -1)]
        self.first = CausalConv(hidden, widths[0], first)
        self.stages = nn.ModuleList(
            MimiStage(width, rate, inner, c.compress) for width, rate in zip(widths, c.rates, strict=True)
        )
        self.last = CausalConv(c.filters, 1, last)

    def transform(self, x: Tensor, tape: Tape | None) -> Tensor:
        """The transformer over positions: (B, T, hidden) -> the same shape."""
        window = self.config.window
        positions = torch.arange(x.shape[1], device=x.device)[None]
        mask, cache = None, None
        if tape is None:
            mask = band_mask(x.shape[1], window - 1, 0, x) if window < x.shape[1] else None
        else:
            positions = STEPS * tape.frames[:, None] + positions
            cache = WindowCache(self.config.block, window, tape, positions, x)
        rope = self.rope(positions, x.dtype)
        for index, layer in enumerate(self.layers):
            x = layer(x, rope, mask, cache=cache, layer=index)
        return x

    def forward(
        self,
        codes: Tensor,
        state: CodecState | None = None,
        slots: Tensor | None = None,
        *,
        live: int | None = None,
        features: Callable[[Tensor, Tape], Tensor] | None = None,
    ) -> Tensor:
        """Decode codec frames; see `CodecDecoder.forward`.  There is nothing here that pads are left out of, nor that
        `features` could stand for."""
        assert features is None
        tape = None
        if state is not None:
            assert slots is not None
            tape = state.tape(slots)
        x = self.transform(self.upsample(self.mix(*self.dequantize(codes)), tape), tape)
        x = self.first(x, tape)
        for stage in self.stages:
            x = stage(x, tape)
        samples: Tensor = self.last(F.elu(x), tape).squeeze(-1).clamp(-1, 1)
        if state is not None and tape is not None and slots is not None:
            state.keep(slots, tape, codes.shape[2])
        return samples
