"""Source-filter synthesis: pitch, voicing and two spectral envelopes in, PCM out.

A pulse train at the pitch carries the harmonic envelope and white noise carries the noise envelope.  Feature frame t
stands at the *end* of its block of `hop` samples: within the block, pitch and voicing run linearly from frame t-1 to
frame t.  The source is windowed by Hann windows of three hops around each frame, and each window passes through its
own frame's filter.  A block therefore needs the frame after it and comes out one hop (10 ms) late; the last hop of a
stream, which is silence, is never heard.  Filters have minimum phase, hence nothing before their input, so that is all
the delay there is, and nothing is left to flush.  (Windows of two hops need no look-ahead, and sound clearly rougher.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_SILENCE = -9.5  # log amplitude of a band that says nothing
_NOISE_SEED = 0x5EED
WINDOW_HOPS = 3
_TURN = 1 << 40  # parts of a turn that a phase counts in


@dataclass(frozen=True)
class SourceFilterConfig:
    sample_rate: int = 24_000
    hop: int = 240  # samples a feature frame
    harmonic_bands: int = 80
    noise_bands: int = 80
    fft: int = 1024  # filters ring for at most fft - hop samples
    highest_harmonic_hz: float = 11_000.0

    @property
    def features(self) -> int:
        """log f0 (Hz), voicing (0 to 1), harmonic and noise log amplitudes in mel bands."""
        return 2 + self.harmonic_bands + self.noise_bands


class SourceFilterState:
    """What one stream leaves for its next chunk, one row a slot; the last row is the dummy slot."""

    def __init__(self, cfg: SourceFilterConfig, slots: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        rows = slots + 1
        self.phase = torch.zeros(rows, dtype=torch.float64, device=device)
        """Cycles, 0 to 1, at the end of the last block."""
        self.position = torch.zeros(rows, dtype=torch.int64, device=device)
        """Samples made since the slot was opened; numbers the noise."""
        self.frames = torch.zeros(rows, WINDOW_HOPS, cfg.features, dtype=dtype, device=device)
        """The last feature frames; unused at position 0."""
        self.tail = torch.zeros(rows, cfg.fft - cfg.hop, dtype=dtype, device=device)
        """What the filters still ring into the next samples."""

    def reset(self, slot: int) -> None:
        for tensor in (self.phase, self.position, self.frames, self.tail):
            tensor[slot].zero_()


class SourceFilterHead(nn.Module):
    """Features to PCM, without weights; see the module's docstring."""

    _low: Tensor
    _weight: Tensor
    _ramp: Tensor
    _fades: Tensor
    _fold: Tensor

    def __init__(self, cfg: SourceFilterConfig | None = None) -> None:
        super().__init__()
        cfg = cfg or SourceFilterConfig()
        self.cfg = cfg
        harmonic_low, harmonic_weight = _band_positions(cfg, cfg.harmonic_bands)
        noise_low, noise_weight = _band_positions(cfg, cfg.noise_bands)
        # Both envelopes are read out of the feature frame with one look-up.
        low = torch.cat([harmonic_low, noise_low + cfg.harmonic_bands])
        self.register_buffer("_low", low, persistent=False)
        self.register_buffer("_weight", torch.cat([harmonic_weight, noise_weight]).float(), persistent=False)
        self.register_buffer("_ramp", torch.arange(1, cfg.hop + 1, dtype=torch.float64) / cfg.hop, persistent=False)
        # What the windows of the frames t-2, t-1, t and t+1 make of block t, which lies between frames t-1 and t.
        from_frame = torch.arange(2 * cfg.hop, -2 * cfg.hop, -1, dtype=torch.float64).flip(0) - 0.5
        window = (1 + torch.cos(2 * math.pi * from_frame / (WINDOW_HOPS * cfg.hop))) / WINDOW_HOPS
        window[from_frame.abs() > WINDOW_HOPS * cfg.hop / 2] = 0
        fades = window.view(WINDOW_HOPS + 1, 1, cfg.hop).flip(0)
        self.register_buffer("_fades", fades.float(), persistent=False)
        # Folding the cepstrum onto positive time makes the filter minimum phase (Oppenheim & Schafer, section 13.4).
        fold = torch.zeros(cfg.fft, dtype=torch.float64)
        fold[0] = fold[cfg.fft // 2] = 1
        fold[1 : cfg.fft // 2] = 2
        self.register_buffer("_fold", fold.float(), persistent=False)

    def new_state(
        self, slots: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> SourceFilterState:
        return SourceFilterState(self.cfg, slots, dtype=dtype, device=device)

    def forward(self, features: Tensor, state: SourceFilterState | None = None, slots: Tensor | None = None) -> Tensor:
        """Synthesise T feature frames.

        features: (B, C, T), the rows that SourceFilterConfig.features names.
        state, slots: the rows of `state` to continue, (B,) int64, updated in place; None starts from silence.
        Returns (B, T * hop) in the features' dtype, clipped to [-1, 1].
        """
        cfg = self.cfg
        batch, _, frames = features.shape
        if state is None or slots is None:
            state = SourceFilterState(cfg, batch, dtype=features.dtype, device=features.device)
            slots = torch.arange(batch, device=features.device)
        values = features.transpose(1, 2)
        position = state.position[slots]
        first = values[:, :1].repeat(1, WINDOW_HOPS, 1)
        first[:, :, 2:] = _SILENCE
        before = torch.where((position == 0)[:, None, None], first, state.frames[slots])
        values = torch.cat([before, values], 1)  # (B, T + 3, C); block i lies between frames i + 1 and i + 2

        pulses, phase = self._pulses(values[:, 1:-1], state.phase[slots])
        index = position[:, None] + torch.arange(frames * cfg.hop, device=features.device)
        noise = _white_noise(index).to(features.dtype).view(batch, frames, cfg.hop)
        source = torch.stack([pulses, noise], 1)  # (B, 2, T, hop)

        # (B, 2 sources, 4 fades, T, bins)
        spectrum = torch.fft.rfft(source[:, :, None] * self._fades.to(features.dtype), cfg.fft)
        filters = self._filters(values)  # (B, 2 sources, T + 3, bins)
        mixed = spectrum[:, :, 0] * filters[:, :, :frames]
        for fade in range(1, WINDOW_HOPS + 1):
            mixed = mixed + spectrum[:, :, fade] * filters[:, :, fade : fade + frames]
        mixed = mixed.sum(1)
        blocks = torch.fft.irfft(mixed, cfg.fft)  # (B, T, fft)

        pcm, tail = self._overlap_add(blocks, state.tail[slots])
        state.phase[slots] = phase
        state.position[slots] = position + frames * cfg.hop
        state.frames[slots] = values[:, -WINDOW_HOPS:]
        state.tail[slots] = tail
        return pcm.clamp(-1, 1)

    def _pulses(self, values: Tensor, phase: Tensor) -> tuple[Tensor, Tensor]:
        """Band-limited pulses, every harmonic a cosine of amplitude 1: (B, T, hop), and the phase after them."""
        cfg = self.cfg
        ramp, ramp_values = self._ramp.double(), self._ramp.to(values.dtype)
        f0 = values[..., 0].double().clamp(math.log(40.0), math.log(1000.0)).exp()
        steps = (f0[:, :-1, None] + (f0[:, 1:] - f0[:, :-1])[..., None] * ramp) / cfg.sample_rate
        batch, frames, hop = steps.shape
        # Whole parts of a turn add up the same in any grouping, so the phase does not depend on how speech was cut.
        parts = (steps * _TURN).long().view(batch, -1).cumsum(1).add_((phase * _TURN).long()[:, None]) & _TURN - 1
        turn = (parts.double() / _TURN).to(values.dtype).view(batch, frames, hop) * math.pi
        # sum_{h=1..H} cos(h x) = sin((H + 1/2) x) / (2 sin(x / 2)) - 1/2, with turn = x / 2 (Dirichlet's kernel).
        harmonics = (cfg.highest_harmonic_hz / cfg.sample_rate / steps).floor().to(values.dtype)
        slope = torch.sin(turn)
        at_peak = slope.abs() < 1e-4
        kernel = torch.sin((2 * harmonics + 1) * turn) / torch.where(at_peak, 1.0, 2 * slope) - 0.5
        kernel = torch.where(at_peak, harmonics, kernel)
        voicing = values[..., 1]
        voicing = voicing[:, :-1, None] + (voicing[:, 1:] - voicing[:, :-1])[..., None] * ramp_values
        return kernel * (2 * voicing - 0.5).clamp(0, 1), parts[:, -1].double() / _TURN

    def _filters(self, values: Tensor) -> Tensor:
        """Minimum-phase responses of both sources, frame by frame: (B, T, C) -> (B, 2, T, bins) complex."""
        cfg = self.cfg
        bands = values[..., 2:].clamp(_SILENCE, 7.0)
        logs = torch.lerp(bands[..., self._low], bands[..., self._low + 1], self._weight.to(values.dtype))
        logs = logs.view(*values.shape[:2], 2, -1).transpose(1, 2)
        cepstrum = torch.fft.irfft(logs, cfg.fft)
        response = torch.fft.rfft(cepstrum * self._fold.to(values), cfg.fft)
        # CPU kernels compute what is left over from whole vectors by other code, which rounds differently: leave none.
        bins = response.shape[-1]
        padded = nn.functional.pad(response, (0, -bins % 16))
        return torch.polar(padded.real.exp(), padded.imag)[..., :bins]  # a third of the time of a complex exp

    def _overlap_add(self, blocks: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
        hop = self.cfg.hop
        batch, frames, length = blocks.shape
        hops = -(-length // hop)
        pieces = nn.functional.pad(blocks, (0, hops * hop - length)).view(batch, frames, hops, hop)
        total = blocks.new_zeros(batch, frames + hops - 1, hop)
        total.view(batch, -1)[:, : tail.shape[1]] = tail
        for late in range(hops - 1, -1, -1):  # oldest block first, whatever the chunk, so that rounding agrees
            total[:, late : late + frames] += pieces[:, :, late]
        flat = total.view(batch, -1)
        return flat[:, : frames * hop], flat[:, frames * hop : frames * hop + tail.shape[1]]


def _band_positions(cfg: SourceFilterConfig, bands: int) -> tuple[Tensor, Tensor]:
    """For each FFT bin the band below it and how far it lies towards the next, on the mel scale."""
    frequencies = torch.linspace(0, cfg.sample_rate / 2, cfg.fft // 2 + 1, dtype=torch.float64)
    top = math.log10(1 + cfg.sample_rate / 2 / 700)
    centres = 700 * (10 ** (torch.linspace(0, top, bands, dtype=torch.float64)) - 1)
    low = (torch.searchsorted(centres, frequencies, right=True) - 1).clamp(0, bands - 2)
    return low, ((frequencies - centres[low]) / (centres[low + 1] - centres[low])).clamp(0, 1)


def _white_noise(index: Tensor) -> Tensor:
    """Uniform noise of unit variance that depends on the sample's number alone (the 64-bit SplitMix finaliser)."""
    value = index * -7046029254386353131 + _NOISE_SEED
    value = (value ^ (value >> 30 & 0x3FFFFFFFF)) * -4658895280553007687
    value = (value ^ (value >> 27 & 0x1FFFFFFFFF)) * -7723592293110705685
    uniform = (value >> 40 & 0xFFFFFF).double() / 2**24
    return (uniform - 0.5) * math.sqrt(12.0)
