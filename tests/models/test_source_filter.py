"""Synthesis: exact in any pieces, rows that do not know each other, and the pitch and level that were asked for."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from breeze_rtc.models.source_filter import SourceFilterConfig, SourceFilterHead

CONFIG = SourceFilterConfig()
FRAMES = 64


def speech_like(seed: int, frames: int = FRAMES) -> Tensor:
    """(1, C, T) features that wander as speech does, with voiced and unvoiced parts."""
    generator = torch.Generator().manual_seed(seed)
    time = torch.arange(frames) / 10
    features = torch.randn(CONFIG.features, 1, generator=generator, dtype=torch.float64) - 6
    features = features + torch.sin(time * (1 + torch.rand(CONFIG.features, 1, generator=generator)))
    features[0] = math.log(200) + 0.3 * torch.sin(time)
    features[1] = (torch.sin(time * 1.3) > -0.3).double()
    return features[None].double()


@pytest.fixture(scope="module")
def head() -> SourceFilterHead:
    return SourceFilterHead()


@pytest.mark.parametrize("codec_frames", [1, 2, 4, 8, 16])
def test_any_chunking_gives_the_same_samples(head: SourceFilterHead, codec_frames: int) -> None:
    """Fed in chunks of 1 to 16 codec frames the head says what it says at once, to 1e-6 in float64."""
    features = speech_like(1)
    whole = head(features)
    state = head.new_state(3, dtype=torch.float64)
    slots = torch.tensor([2])
    pieces = [head(piece, state, slots) for piece in features.split(codec_frames * 4, dim=2)]
    assert whole.shape == (1, FRAMES * CONFIG.hop)
    assert (torch.cat(pieces, 1) - whole).abs().max() <= 1e-6
    assert whole.abs().max() > 0.01


def test_a_row_does_not_hear_its_neighbours(head: SourceFilterHead) -> None:
    """A stream in a batch, at its own position in its own slot, makes the samples it makes alone."""
    first, second = speech_like(1).float(), speech_like(2).float()
    state = head.new_state(4)
    head(second[:, :, :8], state, torch.tensor([3]))
    together = head(torch.cat([first[:, :, :16], second[:, :, 8:24]]), state, torch.tensor([1, 3]))
    assert torch.equal(together[0], head(first[:, :, :16])[0])
    assert torch.equal(together[1], head(second[:, :, :24])[0, 8 * CONFIG.hop :])


def test_a_slot_opened_again_remembers_nothing(head: SourceFilterHead) -> None:
    """After reset a slot is as new."""
    features = speech_like(3).float()
    state = head.new_state(1)
    slots = torch.tensor([0])
    first = head(features, state, slots)
    state.reset(0)
    assert torch.equal(head(features, state, slots), first)


def test_the_pitch_is_the_one_asked_for(head: SourceFilterHead) -> None:
    """A voiced sound of 150 Hz repeats every 160 samples, and its harmonics have the amplitude of their band."""
    features = torch.full((1, CONFIG.features, 50), -9.5, dtype=torch.float64)
    features[:, 0], features[:, 1] = math.log(150.0), 1.0
    features[:, 2:82] = math.log(0.01)
    sound = head(features)[0, 2_400:]
    assert (sound[160:8_160] - sound[:8_000]).abs().max() < 0.02 * sound.abs().max()
    spectrum = torch.fft.rfft(sound[: 160 * 50]).abs() / (80 * 50)
    assert spectrum[50] == pytest.approx(0.01, rel=0.05)
    assert spectrum[50 * 20] == pytest.approx(0.01, rel=0.05)
    assert spectrum[75] < 0.001


def test_noise_has_the_level_asked_for(head: SourceFilterHead) -> None:
    """Unvoiced, the sound is noise whose deviation is the noise bands' amplitude, and no second of it repeats."""
    features = torch.full((1, CONFIG.features, 200), -9.5, dtype=torch.float64)
    features[:, 0], features[:, 1] = math.log(150.0), 0.0
    features[:, 82:] = math.log(0.05)
    sound = head(features)[0, 2_400:]
    assert sound.std().item() == pytest.approx(0.05, rel=0.05)
    assert abs(sound.mean().item()) < 0.002
    assert abs((sound[:20_000] * sound[24_000 - 2_400 : 44_000 - 2_400]).mean().item()) < 0.05 * 0.05**2 * 2


def test_absurd_features_stay_in_range(head: SourceFilterHead) -> None:
    """Whatever a network says, samples are finite and within [-1, 1]."""
    wild = torch.randn(1, CONFIG.features, 40, generator=torch.Generator().manual_seed(5)) * 100
    sound = head(wild)
    assert sound.isfinite().all()
    assert sound.abs().max() <= 1
