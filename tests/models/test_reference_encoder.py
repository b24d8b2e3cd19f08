"""The reference encoder against the public class, over a tiny checkpoint under the published names."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from breeze_reference import CODEBOOKS, Reference

from breeze_rtc.errors import BadRequest, CheckpointError
from breeze_rtc.models.reference_encoder import ReferenceEncoder
from breeze_rtc.models.speech_model import SpeechModel

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("transformers", "qwen_tts")),
    reason="needs transformers and, without its dependencies, qwen-tts (the Makefile installs both)",
)

FRAME = 96


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(seed=11)


@pytest.fixture(scope="module")
def folder(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reference.save(tmp_path_factory.mktemp("breeze"))


@pytest.fixture(scope="module")
def encoder(folder: Path) -> ReferenceEncoder:
    return SpeechModel.load(str(folder)).reference_encoder()


def sound(samples: int, seed: int = 3) -> torch.Tensor:
    """Noise whose level moves, (1, samples)."""
    generator = torch.Generator().manual_seed(seed)
    swell = torch.linspace(0, 9, samples).sin().abs() + 0.05
    return torch.randn(1, samples, generator=generator) * 0.3 * swell


@torch.no_grad()
@pytest.mark.parametrize("samples", [1, FRAME - 1, FRAME, FRAME + 1, 10 * FRAME + 47, 40 * FRAME])
def test_codes(reference: Reference, encoder: ReferenceEncoder, samples: int) -> None:
    """The codes are the public class's first ones, for whole frames and for a last one that is begun only; and the
    vectors they name agree."""
    heard = sound(samples)
    theirs = reference.encoder.encode(heard[:, None]).audio_codes[:, :CODEBOOKS].transpose(1, 2)
    latents = reference.encoder.encoder(heard[:, None]).latents.transpose(1, 2)
    torch.testing.assert_close(encoder.latents(heard), latents, atol=1e-5, rtol=1e-5)
    ours = encoder(heard)
    assert ours.shape == (1, -(-samples // FRAME), CODEBOOKS)
    assert torch.equal(ours, theirs)
    if samples > 5 * FRAME:
        assert all(len(ours[0, :, book].unique()) > 2 for book in range(CODEBOOKS))


@torch.no_grad()
def test_later_sound_changes_no_earlier_frame(encoder: ReferenceEncoder) -> None:
    """All is causal: a longer recording begins with the frames of the shorter one."""
    heard = sound(30 * FRAME)
    assert torch.equal(encoder(heard[:, : 12 * FRAME])[0], encoder(heard)[0, :12])


@torch.no_grad()
def test_recordings_together(encoder: ReferenceEncoder) -> None:
    """Two recordings of equal length give together what each gives by itself."""
    both = torch.cat((sound(700), sound(700, seed=4)))
    codes = encoder(both)
    assert torch.equal(codes[:1], encoder(both[:1]))
    assert torch.equal(codes[1:], encoder(both[1:]))


def test_a_model_without_an_encoder() -> None:
    """It says that it cannot clone."""
    model = SpeechModel.load("tiny-pointer")
    assert not model.clones
    with pytest.raises(BadRequest, match="cannot clone"):
        model.reference_encoder()


@pytest.mark.parametrize(
    ("change", "says"),
    [({"num_residual_layers": 2}, "num_residual_layers is 2"), ({"kernel_size": None}, "lacks kernel_size")],
)
def test_a_codec_of_another_structure(folder: Path, tmp_path: Path, change: dict[str, object], says: str) -> None:
    """Is refused by the name of the key."""
    from breeze_rtc.models.published import load_reference_encoder

    config = json.loads((folder / "audio_tokenizer" / "config.json").read_text())
    for key, value in change.items():
        if value is None:
            del config["encoder_config"][key]
        else:
            config["encoder_config"][key] = value
    with pytest.raises(CheckpointError, match=says):
        load_reference_encoder(folder / "audio_tokenizer", config, CODEBOOKS)


def test_the_published_size() -> None:
    """At the published dimensions the encoder has the parameters that were counted in the public one, less the output
    projections of its quantiser, which only a decoder reads; codebooks are counted as buffers there."""
    from breeze_rtc.models.attention import BlockConfig, RopeConfig
    from breeze_rtc.models.reference_encoder import ReferenceEncoderConfig

    block = BlockConfig(hidden=512, heads=8, kv_heads=8, head_dim=64, ffn=2048, eps=1e-5)
    config = ReferenceEncoderConfig(
        codebooks=16, codes=2048, code_dim=256, filters=64, strides=(4, 5, 6, 8), kernels=(7, 3, 3), compress=2,
        block=block, layers=8, rope=RopeConfig(1e4), sample_rate=24_000,
    )  # fmt: skip
    with torch.device("meta"):
        encoder = ReferenceEncoder(config)
    numbers = sum(p.numel() for name, p in encoder.named_parameters() if name != "codebooks")
    assert numbers == 39_391_520 - 2 * 512 * 256
    assert config.frame_samples == 1920
