"""Weights from files, with errors that name the tensor."""

from __future__ import annotations

import torch

from breeze_rtc.models import presets
from breeze_rtc.models.sampling import Sampling
from breeze_rtc.models.speech_model import ByteFrontend, SpeechModel

SEED = 20_260_101


def load(name_or_path: str) -> SpeechModel:
    """See `SpeechModel.load`."""
    if name_or_path in {"tiny", "tiny-pointer"}:
        return seeded(presets.tiny() if name_or_path == "tiny" else presets.tiny_pointer())
    raise NotImplementedError


def seeded(config: presets.ModelConfig, seed: int = SEED) -> SpeechModel:
    """A model of random weights, the same for the same seed on every machine."""
    model = SpeechModel(
        config,
        frontend=lambda _voice: ByteFrontend(whole=config.feed == "prefix"),
        sampling=Sampling(temperature=0.9, depth_temperature=0.9, top_k=50, repetition_penalty=1.1),
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
    return model
