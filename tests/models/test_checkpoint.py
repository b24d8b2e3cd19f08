"""Checkpoints: what is wrong with a file is said with the tensor's name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from breeze_rtc.errors import CheckpointError
from breeze_rtc.models import checkpoint, presets
from breeze_rtc.models.checkpoint import seeded
from breeze_rtc.models.speech_model import SpeechModel
from breeze_rtc.models.weights import Weights


def _folder(path: Path, **tensors: torch.Tensor) -> Path:
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    return path


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    """A tensor that is not there is named, with the shape it should have."""
    weights = Weights(_folder(tmp_path, a=torch.zeros(2)))
    with pytest.raises(CheckpointError, match=r"tensor b is missing.*\[3, 4\]"):
        weights.tensor("b", (3, 4))


def test_wrong_shape_is_named(tmp_path: Path) -> None:
    """A tensor of another shape is named, with both shapes."""
    weights = Weights(_folder(tmp_path, a=torch.zeros(2, 5)))
    with pytest.raises(CheckpointError, match=r"tensor a has shape \[2, 5\]; expected \[2, 4\]"):
        weights.tensor("a", (2, 4))


@pytest.mark.parametrize("keep", [0, 4, 60, -1])
def test_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    """A file cut anywhere is refused by name before a tensor is used."""
    path = _folder(tmp_path, a=torch.arange(100.0)) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        Weights(tmp_path)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    """A shard that the index names and the folder lacks."""
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-00002.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"model-00002\.safetensors is missing"):
        Weights(tmp_path).tensor("a", (1,))


def test_empty_folder(tmp_path: Path) -> None:
    """Nothing to load is said at once."""
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        SpeechModel.load(str(tmp_path))
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        Weights(tmp_path)


@pytest.mark.parametrize("content", ["{", "[1]", '{"model_type": "llama"}', '{"model_type": "breeze"}', "{}"])
def test_foreign_config(tmp_path: Path, content: str) -> None:
    """A config that is no JSON, of another model, or lacks a part is a CheckpointError that names the file."""
    (tmp_path / "config.json").write_text(content)
    (tmp_path / "audio_tokenizer").mkdir()
    (tmp_path / "audio_tokenizer" / "config.json").write_text('{"decoder_config": {}}')
    with pytest.raises(CheckpointError, match=r"config\.json"):
        SpeechModel.load(str(tmp_path))


def test_breeze_that_was_never_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the published checkpoint in the cache the error says how to get it."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="hf download BreezeBlue/Breeze-TTS-2"):
        SpeechModel.load("breeze-tts-2")


def test_newest_snapshot_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache's snapshot folder is found under the repository's name."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--BreezeBlue--Breeze-TTS-2" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"abc/config\.json is of model type None"):
        SpeechModel.load("breeze-tts-2")


def test_seeded_models_are_the_same_everywhere() -> None:
    """One seed, one set of weights; another seed, another."""
    first, second = seeded(presets.tiny_pointer()), seeded(presets.tiny_pointer())
    other = seeded(presets.tiny_pointer(), seed=2)
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name])
    assert not torch.equal(first.depth.table.weight, other.depth.table.weight)


def test_a_folder_of_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What examples/nano_voice writes is read back, half precision widened; a tensor of other dimensions is named."""
    small = presets.tiny_pointer()
    monkeypatch.setattr(presets, "nano", lambda vocab: small)
    model = seeded(small)
    halves = {name: t.half() if t.is_floating_point() else t for name, t in model.state_dict().items()}
    save_file(halves, tmp_path / "model.safetensors")
    config = {"model_type": "breeze_rtc", "preset": "nano", "vocab": 256, "voices": ["a"], "sampling": {"top_k": 5}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(checkpoint, "_nano_frontend", lambda folder: lambda voice: model.frontend())
    loaded = SpeechModel.load(str(tmp_path))
    assert loaded.voices == ("a",)
    assert loaded.sampling.top_k == 5
    assert loaded.depth.table.weight.dtype == torch.float32
    assert torch.equal(loaded.depth.table.weight, model.depth.table.weight.half().float())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["pointer.advance.bias"] = torch.zeros(9)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"pointer\.advance\.bias has shape \[9\]; expected \[4\]"):
        SpeechModel.load(str(tmp_path))
