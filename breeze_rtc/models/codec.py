"""The codec decoder: frames of codes -> samples, in any number of pieces.

The trunk (residual codebooks, causal convolution, sliding-window transformer, upsampling) is that of the 12.5 Hz codec
of Qwen3-TTS; what follows it is `snake` (that codec's transposed convolutions, Breeze TTS 2) or `source_filter`
(features for our own head, nano).  Everything is causal: T frames give T * frame_samples samples at once and nothing is
left to flush.

Arrays are channels last, (B, T, C), and a convolution is one matrix product over the taps laid side by side.  That
keeps a sample independent of how many frames and rows were computed with it: on CPU the result does not depend on the
chunking, bit for bit, where a library convolution picks its algorithm, and so its rounding, by shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from breeze_rtc.models.attention import Block, BlockConfig, RMSNorm, Rope, RopeConfig, band_mask
from breeze_rtc.models.source_filter import SourceFilterConfig, SourceFilterHead, SourceFilterState

SNAKE_KERNEL = 7
SNAKE_DILATIONS = (1, 3, 9)
CACHED_BYTES = 1 << 20
"""Of the taps that a convolution lays side by side, at a time on a CPU: they are read again from its cache."""
HEARD_FRAMES = 16
"""Of a recording, at a time: every frame has a window of keys of its own."""


@dataclass(frozen=True, slots=True)
class CodecConfig:
    codebooks: int
    codes: int
    """Entries per codebook."""
    code_dim: int
    """Width of a codebook entry."""
    mixed: int
    """Width after the two output projections of the quantiser."""
    latent: int
    """Width of the trunk outside its transformer."""
    block: BlockConfig
    layers: int
    rope: RopeConfig
    window: int
    """A frame sees itself and the `window - 1` frames before it."""
    upsample: tuple[int, ...]
    """Factors of the trunk's transposed convolutions, each followed by a ConvNeXt block."""
    expansion: int
    """ConvNeXt: width of its inner layer, times `latent`."""
    head: Literal["snake", "source_filter"]
    sample_rate: int
    frame_samples: int
    layer_scale: float = 0.01
    """What the residual branches' scales start at in training."""
    decoder: int = 0
    """snake: width of its first layer; each stage halves it."""
    rates: tuple[int, ...] = ()
    """snake: factors of its stages."""
    features: int = 0
    """source_filter: features per step of `frame_samples / prod(upsample)` samples."""

    def __post_init__(self) -> None:
        steps = math.prod(self.upsample + self.rates)
        assert self.head == "source_filter" or steps == self.frame_samples, "the factors must make a frame's samples"

    @property
    def steps(self) -> int:
        """Feature steps per frame, at the trunk's output."""
        return math.prod(self.upsample)


class Tape:
    """The state of the rows of one call: pieces of one flat tensor, handed out in the order the layers ask.

    A layer takes its history with `next`, computes, and gives its new history to `keep` before the next layer asks.
    """

    def __init__(self, flat: Tensor, frames: Tensor) -> None:
        """flat: (B, state size), zeros before the first frame.  frames: (B,) int64, decoded before this call."""
        self.flat = flat
        self.frames = frames
        self._offset = 0
        self._kept: list[Tensor] = []

    def next(self, *shape: int) -> Tensor:
        """The next piece as (B, *shape), a view."""
        size = math.prod(shape)
        view = self.flat[:, self._offset : self._offset + size].view(-1, *shape)
        self._offset += size
        return view

    def keep(self, history: Tensor) -> None:
        """What stands in the place of the piece taken last, (B, *shape), for the next call."""
        self._kept.append(history.flatten(1))

    def wind(self, flat: Tensor) -> None:
        """All of it at once: the state after the call is `flat`."""
        self._offset = self.flat.shape[1]
        self._kept = [flat]

    def wound(self) -> Tensor:
        """(B, state size) after the call."""
        assert self._offset == self.flat.shape[1], "every layer must take its history exactly once"
        return torch.cat(self._kept, 1)


class Streaming(nn.Module):
    """A layer that keeps inputs of earlier calls."""

    past_size: int
    """Numbers it keeps per stream."""


def causal(x: Tensor, past: int, tape: Tape | None) -> Tensor:
    """x (B, T, C) behind the `past` steps that came before it: (B, past + T, C).  Zeros stand before the start."""
    if not past:
        return x
    if tape is None:
        return F.pad(x, (0, 0, past, 0))
    x = torch.cat((tape.next(past, x.shape[2]), x), 1)
    tape.keep(x[:, -past:])
    return x


class CausalConv(Streaming):
    """Convolution that looks back only: output t reads inputs t - (kernel - 1) * dilation ... t."""

    def __init__(self, inputs: int, outputs: int, kernel: int, *, dilation: int = 1) -> None:
        super().__init__()
        self.kernel = kernel
        self.dilation = dilation
        self.past_size = (kernel - 1) * dilation * inputs
        self.weight = nn.Parameter(torch.empty(outputs, kernel * inputs))
        """(outputs, kernel * inputs), taps outermost, oldest first."""
        self.bias = nn.Parameter(torch.zeros(outputs))
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)

    def forward(self, x: Tensor, tape: Tape | None = None) -> Tensor:
        """(B, T, inputs) -> (B, T, outputs)."""
        B, T, _ = x.shape
        x = causal(x, (self.kernel - 1) * self.dilation, tape)
        if self.kernel == 1:
            return F.linear(x, self.weight, self.bias)
        pieces = 1
        if x.device.type == "cpu":
            pieces = min(T, -(-B * T * self.weight.shape[1] * x.element_size() // CACHED_BYTES))
        ends = [T * piece // pieces for piece in range(pieces + 1)]
        done = [self._convolved(x, start, end) for start, end in pairwise(ends)]
        return done[0] if pieces == 1 else torch.cat(done, 1)

    def _convolved(self, x: Tensor, start: int, end: int) -> Tensor:
        """Outputs `start` to `end` of what begins with its history."""
        begins = range(start, start + self.kernel * self.dilation, self.dilation)
        return F.linear(torch.cat([x[:, at : at + end - start] for at in begins], -1), self.weight, self.bias)


class CausalDepthwise(Streaming):
    """Each channel convolved by itself, looking back only."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.kernel = kernel
        self.past_size = (kernel - 1) * channels
        self.weight = nn.Parameter(torch.empty(kernel, channels).uniform_(-1, 1) * kernel**-0.5)
        """(kernel, channels), oldest tap first."""
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor, tape: Tape | None = None) -> Tensor:
        """(B, T, channels) -> the same shape."""
        T = x.shape[1]
        x = causal(x, self.kernel - 1, tape)
        out = self.bias.expand(x.shape[0], T, -1)
        for tap in range(self.kernel):
            out = torch.addcmul(out, x[:, tap : tap + T], self.weight[tap])
        return out


class CausalUpsample(Streaming):
    """Transposed convolution whose last kernel - stride outputs are dropped.

    kernel is stride or twice stride; in the second case an output step also reads the input step before its own.
    """

    def __init__(self, inputs: int, outputs: int, *, stride: int, overlap: bool) -> None:
        super().__init__()
        self.stride = stride
        self.outputs = outputs
        self.overlap = overlap
        self.past_size = inputs if overlap else 0
        taps = 2 if overlap else 1
        self.weight = nn.Parameter(torch.empty(stride * outputs, taps * inputs))
        """(stride * outputs, taps * inputs): rows by output phase, then channel; columns previous step, then
        current."""
        self.bias = nn.Parameter(torch.zeros(outputs))
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)

    def forward(self, x: Tensor, tape: Tape | None = None) -> Tensor:
        """(B, T, inputs) -> (B, T * stride, outputs)."""
        B, T, _ = x.shape
        if self.overlap:
            x = causal(x, 1, tape)
            x = torch.cat((x[:, :-1], x[:, 1:]), -1)
        return F.linear(x, self.weight).view(B, T * self.stride, self.outputs) + self.bias


class ConvNeXt(nn.Module):
    """Depthwise convolution, LayerNorm, two linears with GELU between, scaled and added to the input."""

    def __init__(self, channels: int, expansion: int, layer_scale: float) -> None:
        super().__init__()
        self.depthwise = CausalDepthwise(channels, 7)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.expand = nn.Linear(channels, channels * expansion)
        self.shrink = nn.Linear(channels * expansion, channels)
        self.scale = nn.Parameter(torch.full((channels,), layer_scale))

    def forward(self, x: Tensor, tape: Tape | None = None) -> Tensor:
        """(B, T, channels) -> the same shape."""
        branch = self.shrink(F.gelu(self.expand(self.norm(self.depthwise(x, tape)))))
        out: Tensor = torch.addcmul(x, branch, self.scale)
        return out


class Snake(nn.Module):
    """x + sin^2(x e^alpha) / (e^beta + 1e-9), per channel (SnakeBeta)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(channels))
        self.beta = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        """(..., channels) -> the same shape."""
        wave, height = (x * self.alpha.exp()).sin_(), (self.beta.exp() + 1e-9).reciprocal_()
        return torch.addcmul(x, wave.square_(), height)


class SnakeUnit(nn.Module):
    """x + conv1(snake(conv7(snake(x)))), the first convolution dilated."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.first_snake = Snake(channels)
        self.first = CausalConv(channels, channels, SNAKE_KERNEL, dilation=dilation)
        self.second_snake = Snake(channels)
        self.second = CausalConv(channels, channels, 1)

    def forward(self, x: Tensor, tape: Tape | None = None) -> Tensor:
        out: Tensor = x + self.second(self.second_snake(self.first(self.first_snake(x), tape)))
        return out


class SnakeStage(nn.Module):
    """Snake, transposed convolution, three residual units."""

    def __init__(self, inputs: int, outputs: int, rate: int) -> None:
        super().__init__()
        self.snake = Snake(inputs)
        self.upsample = CausalUpsample(inputs, outputs, stride=rate, overlap=True)
        self.units = nn.ModuleList(SnakeUnit(outputs, dilation) for dilation in SNAKE_DILATIONS)

    def forward(self, x: Tensor, tape: Tape | None = None) -> Tensor:
        x = self.upsample(self.snake(x), tape)
        for unit in self.units:
            x = unit(x, tape)
        return x


class SnakeHead(nn.Module):
    """Trunk output -> samples in [-1, 1]."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        self.first = CausalConv(config.latent, config.decoder, SNAKE_KERNEL)
        widths = [config.decoder >> stage for stage in range(len(config.rates) + 1)]
        self.stages = nn.ModuleList(
            SnakeStage(inputs, outputs, rate)
            for inputs, outputs, rate in zip(widths, widths[1:], config.rates, strict=False)
        )
        self.snake = Snake(widths[-1])
        self.last = CausalConv(widths[-1], 1, SNAKE_KERNEL)

    def forward(self, x: Tensor, tape: Tape | None = None) -> Tensor:
        """(B, T, latent) -> (B, T * prod(rates))."""
        x = self.first(x, tape)
        for stage in self.stages:
            x = stage(x, tape)
        samples: Tensor = self.last(self.snake(x), tape)
        return samples.squeeze(-1).clamp(-1, 1)


@dataclass(frozen=True, slots=True)
class Heard:
    """The state of one stream after a recording's frames: see `CodecDecoder.hear`."""

    flat: Tensor
    """(size,): a row of `CodecState.flat`."""
    frames: int


@dataclass(slots=True)
class CodecState:
    """What the decoder remembers of each stream, one slot each; zeros before the first frame."""

    flat: Tensor
    """(slots + 1, size): every history of the trunk and the snake head; the last slot is the dummy of padded rows."""
    frames: Tensor
    """(slots + 1,) int64 frames decoded so far."""
    head: SourceFilterState | None
    """State of the source-filter head, which makes and reads it itself."""

    def open(self, slot: int, heard: Heard | None = None) -> None:
        """Set a slot back to before the first frame, or to behind what it shall have heard."""
        if heard is None:
            self.flat[slot].zero_()
            self.frames[slot].zero_()
        else:
            self.flat[slot] = heard.flat
            self.frames[slot] = heard.frames
        if self.head is not None:
            self.head.reset(slot)

    def tape(self, slots: Tensor) -> Tape:
        """The state of these rows, (B,) int64, for one call."""
        return Tape(self.flat.index_select(0, slots), self.frames.index_select(0, slots))

    def keep(self, slots: Tensor, tape: Tape, frames: int) -> None:
        """What a call of `frames` frames has left on their tape."""
        self.flat.index_copy_(0, slots, tape.wound())
        self.frames.index_copy_(0, slots, tape.frames + frames)


class WindowCache:
    """The last `window - 1` positions of each layer's keys and values, kept on the tape.

    Every query gets a window of its own, of fixed length, so that its sums run over the same columns in the same order
    however many come with it.  (A cache of `window` columns shared by T > 1 positions would be wrong: the first of
    them would miss the T - 1 oldest keys it may see.)
    """

    def __init__(self, block: BlockConfig, window: int, tape: Tape, positions: Tensor, like: Tensor) -> None:
        """positions: (B, T), those of the call."""
        self._block = block
        self._window = window
        self._tape = tape
        column = torch.arange(window, device=like.device)
        query = torch.arange(positions.shape[1], device=like.device)
        # Column j of query t is position `t + j - (window - 1)` of the call; those before the first were never filled.
        before_start = positions[:, :, None] + column < window - 1
        mask = torch.zeros(before_start.shape, dtype=like.dtype, device=like.device)
        self._mask = mask.masked_fill_(before_start, float("-inf"))[:, None, :, None]
        self._places = (query[:, None] + column).flatten()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        block, window = self._block, self._window
        past = self._tape.next(2, block.kv_heads, window - 1, block.head_dim)
        keys = torch.cat((past[:, 0], k), 2)
        values = torch.cat((past[:, 1], v), 2)
        self._tape.keep(torch.stack((keys[:, :, -(window - 1) :], values[:, :, -(window - 1) :]), 1))
        B, T, heads, D = q.shape
        q = q.view(B, T, block.kv_heads, heads // block.kv_heads, D).transpose(1, 2)
        # (B, kv_heads, T, window, D)
        keys = keys.index_select(2, self._places).view(B, -1, T, window, D)
        values = values.index_select(2, self._places).view(B, -1, T, window, D)
        scores = torch.add(self._mask, q @ keys.transpose(-1, -2), alpha=D**-0.5)
        seen = scores.softmax(-1) @ values
        return seen.transpose(1, 2).reshape(B, T, heads * D)


class StreamingDecoder(nn.Module):
    """What decoders of codes share: the codebooks, and the state of their streams."""

    def __init__(
        self, *, codebooks: tuple[int, int, int], mixed: int, block: BlockConfig, layers: int, window: int
    ) -> None:
        """codebooks: their number, the entries of one, the size of an entry.  mixed: the size of what a frame's entries
        become.  block, layers, window: of the transformer inside."""
        super().__init__()
        code_dim = codebooks[-1]
        self.codebooks = nn.Parameter(torch.randn(codebooks) * code_dim**-0.5)
        self.mix_first = nn.Linear(code_dim, mixed, bias=False)
        self.mix_rest = nn.Linear(code_dim, mixed, bias=False)
        self._kept = layers * 2 * block.kv_heads * (window - 1) * block.head_dim

    @property
    def state_size(self) -> int:
        """Numbers that one stream's tape holds."""
        return self._kept + sum(part.past_size for part in self.modules() if isinstance(part, Streaming))

    def new_state(self, slots: int) -> CodecState:
        """State for `slots` streams and the dummy slot, all before their first frame, where the weights are."""
        like = self.codebooks
        return CodecState(
            flat=like.new_zeros(slots + 1, self.state_size),
            frames=torch.zeros(slots + 1, dtype=torch.int64, device=like.device),
            head=None,
        )

    def dequantize(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """codes (B, K, T) int64 -> entries of codebook 0, and the sum over the others, each (B, T, code_dim)."""
        first, *others = (F.embedding(codes[:, k], self.codebooks[k]) for k in range(codes.shape[1]))
        rest = torch.zeros_like(first)
        for entries in others:
            rest = rest + entries
        return first, rest

    def mix(self, first: Tensor, rest: Tensor) -> Tensor:
        """What `dequantize` returns -> (B, T, mixed)."""
        out: Tensor = self.mix_first(first) + self.mix_rest(rest)
        return out

    def hear(self, codes: Tensor) -> Heard:
        """What a stream remembers that goes on where a recording ends: codes (T, K) int64, T >= 1."""
        state = self.new_state(1)
        assert state.head is None, "a source-filter head keeps its state apart"
        # It may live elsewhere than what made the codes.
        codes = codes.to(state.flat.device)
        slot = torch.zeros(1, dtype=torch.int64, device=codes.device)
        for piece in torch.split(codes, HEARD_FRAMES):
            self(piece.t()[None], state, slot)
        return Heard(state.flat[0].clone(), len(codes))


class CodecDecoder(StreamingDecoder):
    """Codes -> samples.  `features` is the part that nano's training needs: everything before the synthesis."""

    def __init__(self, config: CodecConfig) -> None:
        c = config
        super().__init__(
            codebooks=(c.codebooks, c.codes, c.code_dim), mixed=c.mixed, block=c.block, layers=c.layers, window=c.window
        )
        self.config = config
        self.before = CausalConv(c.mixed, c.latent, 3)
        self.enter = nn.Linear(c.latent, c.block.hidden)
        self.layers = nn.ModuleList(Block(c.block, layer_scale=c.layer_scale) for _ in range(c.layers))
        self.norm = RMSNorm(c.block.hidden, c.block.eps)
        self.to_features: nn.Linear | None = None
        self.leave = nn.Linear(c.block.hidden, c.latent)
        self.rope = Rope(c.block.head_dim, c.rope)
        self.upsamplers = nn.ModuleList(
            CausalUpsample(c.latent, c.latent, stride=factor, overlap=False) for factor in c.upsample
        )
        self.refiners = nn.ModuleList(ConvNeXt(c.latent, c.expansion, c.layer_scale) for _ in c.upsample)
        if c.head == "snake":
            self.snake_head = SnakeHead(c)
        else:
            self.to_features = nn.Linear(c.latent, c.features)
            self.synthesis = SourceFilterHead(
                SourceFilterConfig(sample_rate=c.sample_rate, hop=c.frame_samples // c.steps)
            )
            assert self.synthesis.cfg.features == c.features

    def new_state(self, slots: int) -> CodecState:
        state = super().new_state(slots)
        if self.to_features is not None:
            like = self.codebooks
            state.head = self.synthesis.new_state(slots, dtype=like.dtype, device=like.device)
        return state

    def trunk(self, mixed: Tensor, tape: Tape | None = None) -> Tensor:
        """(B, T, mixed) -> (B, T * steps, latent)."""
        x = self.before(mixed, tape)
        T = x.shape[1]
        positions = torch.arange(T, device=x.device)[None]
        h = self.enter(x)
        mask, cache = None, None
        if tape is None:
            mask = band_mask(T, self.config.window - 1, 0, h) if self.config.window < T else None
        else:
            positions = tape.frames[:, None] + positions
            cache = WindowCache(self.config.block, self.config.window, tape, positions, h)
        rope = self.rope(positions, h.dtype)
        for index, layer in enumerate(self.layers):
            h = layer(h, rope, mask, is_causal=mask is None, cache=cache, layer=index)
        x = self.leave(self.norm(h))
        for upsample, refine in zip(self.upsamplers, self.refiners, strict=True):
            x = refine(upsample(x), tape)
        out: Tensor = x
        return out

    def features(self, codes: Tensor) -> Tensor:
        """source_filter only: codes (B, K, T) -> (B, C, T * steps), a whole sequence from its start, no synthesis."""
        return self.features_of(self.mix(*self.dequantize(codes)))

    def features_of(self, mixed: Tensor, tape: Tape | None = None) -> Tensor:
        """As `features`, from the output of `mix`, so that gradients may pass the quantiser around."""
        assert self.to_features is not None, "only the source-filter head has features"
        out: Tensor = self.to_features(self.trunk(mixed, tape)).transpose(1, 2)
        return out

    def forward(
        self,
        codes: Tensor,
        state: CodecState | None = None,
        slots: Tensor | None = None,
        *,
        live: int | None = None,
        features: Callable[[Tensor, Tape], Tensor] | None = None,
    ) -> Tensor:
        """Decode codec frames.

        codes: (B, K, T) int64, T >= 1.
        state, slots: continue the streams in these slots, (B,) int64, distinct but for the dummy; updated in place.
        Without them the codes are whole sequences from their start.
        live: rows after the first `live` are pads; a head without matrix products leaves them out.
        features: computes what the source-filter head reads, (B, C, T * steps), from the codes, in place of our layers.
        Returns (B or live, T * frame_samples) in [-1, 1].
        """
        tape = None
        head_state = None
        if state is not None:
            assert slots is not None
            tape = state.tape(slots)
            head_state = state.head
        samples: Tensor
        if self.to_features is None:
            samples = self.snake_head(self.trunk(self.mix(*self.dequantize(codes)), tape), tape)
        else:
            if tape is not None and features is not None:
                spoken = features(codes, tape)
            else:
                spoken = self.features_of(self.mix(*self.dequantize(codes)), tape)
            # Half of nano's codec time is the synthesis: pads are there for the trunk's products and end here.
            samples = self.synthesis(spoken[:live], head_state, None if slots is None else slots[:live])
        if state is not None and tape is not None and slots is not None:
            state.keep(slots, tape, codes.shape[2])
        return samples
