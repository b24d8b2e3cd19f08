"""A recording -> the vector that says whose voice it is: the ECAPA-TDNN of the Qwen3-TTS Base checkpoints.

Log mel spectrum, then blocks of dilated convolutions whose channels are weighed by their means, then mean and deviation
over time, weighed by an attention of their own (Desplanques et al. 2020, arXiv 2005.07143).  The modules have the names
that the checkpoint has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class SpeakerEncoderConfig:
    """Sizes of the encoder; where the checkpoint says none, they are these."""

    output: int
    """Width of the vector, the backbone's."""
    mels: int = 128
    channels: tuple[int, ...] = (512, 512, 512, 512, 1536)
    """Of the first convolution, of each block, and of the layer that joins the blocks."""
    kernels: tuple[int, ...] = (5, 3, 3, 3, 1)
    dilations: tuple[int, ...] = (1, 2, 3, 4, 1)
    attention: int = 128
    parts: int = 8
    """Into which a block's channels are split."""
    squeeze: int = 128


SAMPLE_RATE = 24_000
TOP_HZ = 12_000
WINDOW, HOP = 1_024, 256


def mel_filters(mels: int) -> Tensor:
    """(mels, WINDOW / 2 + 1) triangles of equal area up to TOP_HZ, on Slaney's scale: linear below 1 kHz, logarithmic
    above (Auditory Toolbox, 1998)."""
    # 15 mels to 1 kHz, and from there 27 for a factor of 6.4.
    step = math.log(6.4) / 27
    mel = torch.linspace(0, 15 + math.log(TOP_HZ / 1_000) / step, mels + 2, dtype=torch.float64)
    edges = torch.where(mel < 15, mel * (1_000 / 15), 1_000 * torch.exp((mel - 15) * step))
    bins = torch.linspace(0, SAMPLE_RATE / 2, WINDOW // 2 + 1, dtype=torch.float64)
    low, middle, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    triangles = torch.minimum((bins - low) / (middle - low), (high - bins) / (high - middle)).clamp(min=0)
    return (triangles * 2 / (high - low)).float()


def log_mel(sound: Tensor, mels: int) -> Tensor:
    """sound (B, samples) in [-1, 1] at SAMPLE_RATE, at least a window long -> (B, mels, frames)."""
    padding = (WINDOW - HOP) // 2
    padded = F.pad(sound[:, None], (padding, padding), mode="reflect")[:, 0]
    window = torch.hann_window(WINDOW, device=sound.device)
    spectrum = torch.stft(padded, WINDOW, HOP, window=window, center=False, return_complex=True)
    magnitude = (spectrum.real.square() + spectrum.imag.square() + 1e-9).sqrt()
    return (mel_filters(mels).to(sound) @ magnitude).clamp(min=1e-5).log()


def _conv(inputs: int, outputs: int, kernel: int = 1, dilation: int = 1) -> nn.Conv1d:
    return nn.Conv1d(inputs, outputs, kernel, dilation=dilation, padding="same", padding_mode="reflect")


class _Layer(nn.Module):
    """A convolution, and of that what is above zero."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 1, dilation: int = 1) -> None:
        super().__init__()
        self.conv = _conv(inputs, outputs, kernel, dilation)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x).relu()
        return out


class _Parts(nn.Module):
    """Each part of the channels but the first is convolved together with what came of the part before it."""

    def __init__(self, channels: int, parts: int, kernel: int, dilation: int) -> None:
        super().__init__()
        width = channels // parts
        self.blocks = nn.ModuleList(_Layer(width, width, kernel, dilation) for _ in range(parts - 1))

    def forward(self, x: Tensor) -> Tensor:
        first, *rest = x.chunk(len(self.blocks) + 1, 1)
        out = [first]
        for index, (block, part) in enumerate(zip(self.blocks, rest, strict=True)):
            out.append(block(part + out[-1] if index else part))
        return torch.cat(out, 1)


class _Squeeze(nn.Module):
    """Weighs each channel by what the means of all say."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.conv1 = _conv(channels, squeezed)
        self.conv2 = _conv(squeezed, channels)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x * self.conv2(self.conv1(x.mean(2, keepdim=True)).relu()).sigmoid()
        return out


class _Block(nn.Module):
    def __init__(self, channels: int, config: SpeakerEncoderConfig, kernel: int, dilation: int) -> None:
        super().__init__()
        self.tdnn1 = _Layer(channels, channels)
        self.res2net_block = _Parts(channels, config.parts, kernel, dilation)
        self.tdnn2 = _Layer(channels, channels)
        self.se_block = _Squeeze(channels, config.squeeze)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.se_block(self.tdnn2(self.res2net_block(self.tdnn1(x)))) + x
        return out


class _Pool(nn.Module):
    """Mean and deviation over time, weighed by an attention that knows those of the whole."""

    def __init__(self, channels: int, attention: int) -> None:
        super().__init__()
        self.tdnn = _Layer(3 * channels, attention)
        self.conv = _conv(attention, channels)

    def forward(self, x: Tensor) -> Tensor:
        even = torch.full_like(x[:1, :1], 1 / x.shape[2])
        whole = torch.cat([part[:, :, None].expand_as(x) for part in _moments(x, even)], 1)
        weights = self.conv(self.tdnn(torch.cat((x, whole), 1)).tanh()).softmax(2)
        return torch.cat(_moments(x, weights), 1)[:, :, None]


def _moments(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    mean = (weights * x).sum(2)
    return mean, (weights * (x - mean[:, :, None]).square()).sum(2).clamp(min=1e-12).sqrt()


class SpeakerEncoder(nn.Module):
    """Mel spectra -> vectors; `vector` goes all the way from a recording."""

    def __init__(self, config: SpeakerEncoderConfig) -> None:
        super().__init__()
        self.config = config
        widths, kernels, dilations = config.channels, config.kernels, config.dilations
        self.blocks = nn.ModuleList([_Layer(config.mels, widths[0], kernels[0], dilations[0])])
        for width, kernel, dilation in zip(widths[1:-1], kernels[1:-1], dilations[1:-1], strict=True):
            self.blocks.append(_Block(width, config, kernel, dilation))
        self.mfa = _Layer(widths[-1], widths[-1], kernels[-1], dilations[-1])
        self.asp = _Pool(widths[-1], config.attention)
        self.fc = _conv(2 * widths[-1], config.output)

    def forward(self, mel: Tensor) -> Tensor:
        """What `log_mel` returns -> (B, output)."""
        seen = []
        x = mel
        for block in self.blocks:
            x = block(x)
            seen.append(x)
        joined = self.mfa(torch.cat(seen[1:], 1))
        out: Tensor = self.fc(self.asp(joined))[:, :, 0]
        return out

    @torch.no_grad()
    def vector(self, sound: Tensor) -> Tensor:
        """sound (samples,) float32 at SAMPLE_RATE -> (output,)."""
        out: Tensor = self(log_mel(sound[None], self.config.mels))[0]
        return out
