"""Reading a checkpoint: what it needs, what it says, and what it refuses before it reads anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from breeze_rtc.errors import BadRequest, CheckpointError
from breeze_rtc.models import checkpoint, published, weights
from breeze_rtc.models.checkpoint import breeze_config, load_breeze
from breeze_rtc.models.presets import breeze_tts_2
from breeze_rtc.models.speech_model import SpeechModel
from breeze_rtc.models.weights import Source, Weights, read

CPU = torch.device("cpu")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32,
    "low_freq_factor": 0.001953125,
    "high_freq_factor": 0.0078125,
    "original_max_position_embeddings": 16,
}


def published_config(*, width: int = 2048, layers: int = 28, text_width: int = 1152) -> tuple[dict, dict]:
    """The two published configs, or smaller ones of the same form; decoys included."""
    text = {
        "model_type": "t5gemma2_text",
        "vocab_size": 262_158,
        "hidden_size": text_width,
        "intermediate_size": 6 * text_width,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        },
    }
    backbone = {
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 128,
        "num_key_value_heads": width // 256,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 40_960,
    }
    depth = {
        "hidden_size": width // 2,
        "intermediate_size": 4 * width,
        "num_hidden_layers": 12,
        "num_attention_heads": width // 256,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "rope_scaling": LLAMA3,
    }
    codec = {
        "latent_dim": 1024,
        "codebook_dim": 512,
        "codebook_size": 2048,
        "decoder_dim": 1536,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "head_dim": 64,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_hidden_layers": 8,
        "num_quantizers": 16,
        "sliding_window": 72,
        "upsample_rates": [8, 5, 4, 3],
        "upsampling_ratios": [2, 2],
        "rope_theta": 1e4,
        "rms_norm_eps": 1e-5,
    }
    main = {
        "model_type": "breeze",
        "vocab_size": 2051,
        "num_codebooks": 16,
        "audio_embed_size": width,
        "hidden_size": width,
        "text_encoder_config": text,
        "backbone_config": backbone,
        "depth_decoder_config": depth,
        "rope_theta": 5e5,
        "rope_scaling": LLAMA3,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "codec_model_name_or_path": "kyutai/mimi",
    }
    return main, {"output_sample_rate": 24_000, "decoder_config": codec}


def write(folder: Path, main: dict, codec: dict) -> Path:
    """A checkpoint of random bfloat16 weights under the published names, in two shards, dead tensors included."""
    (folder / "audio_tokenizer").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(main))
    (folder / "audio_tokenizer" / "config.json").write_text(json.dumps(codec))
    config = breeze_config(main, codec, folder)
    names = [piece for source in checkpoint._breeze(config) for piece in source.pieces]
    names.append(("embed_text_tokens.weight", (20_000, 1024)))
    shards: tuple[dict, dict] = ({}, {})
    for n, (name, shape) in enumerate(names):
        shards[n % 2][name] = torch.empty(shape, dtype=torch.bfloat16).uniform_(-0.1, 0.1)
    where = {}
    for n, shard in enumerate(shards):
        file = f"model-{n + 1:05}-of-00002.safetensors"
        save_file(shard, folder / file)
        where |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    pieces = [piece for source in published.codec_sources(config.codec) for piece in source.pieces]
    save_file(
        {name: torch.empty(shape).uniform_(-0.1, 0.1) for name, shape in pieces},
        folder / "audio_tokenizer" / "model.safetensors",
    )
    return folder


MEASURE = """
import sys
import torch
from breeze_rtc.models import weights
from breeze_rtc.models.checkpoint import load_breeze
from breeze_rtc.models.quantised import quantise
from pathlib import Path

def memory(kind):
    for line in open("/proc/self/status"):
        if line.startswith(kind):
            return int(line.split()[1]) * 1024

weights.HELD_BYTES = 16 << 20
folder = Path(sys.argv[1])
# The code that will run is no part of it.
quantise(torch.ones(512, 512))
before = memory("VmRSS")
model = load_breeze(folder, weights=sys.argv[2])
print(memory("VmHWM") - before, sum(t.nbytes for t in model.state_dict().values()))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    main, codec = published_config(width=512, layers=12, text_width=256)
    main["text_encoder_config"]["vocab_size"] = 30_000
    main["vocab_size"], codec["decoder_config"]["codebook_size"] = 515, 512
    codec["decoder_config"]["decoder_dim"] = 512
    codec["decoder_config"]["latent_dim"] = 256
    return write(tmp_path_factory.mktemp("checkpoint") / "breeze", main, codec)


@pytest.mark.parametrize("kind", ["", "int8"])
def test_a_load_needs_hardly_more_memory_than_the_model(folder: Path, kind: str) -> None:
    """The peak while a file of some 400 MB is read, in a process of its own: the model, and little else.  Pages that
    stay mapped, or a state beside the model, would come to twice as much; torch itself grows by some 80 MB."""
    # What the allocator keeps for later is no part of it either.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    answer = subprocess.run(
        [sys.executable, "-c", MEASURE, str(folder), kind], capture_output=True, text=True, check=True, env=environment
    )
    peak, model = map(int, answer.stdout.split())
    assert model > 80_000_000
    assert peak < 1.3 * model + 120_000_000


def test_progress_climbs_to_one(folder: Path) -> None:
    told: list[float] = []
    model = load_breeze(folder, told=told.append)
    assert told == sorted(told)
    assert (told[0], told[-1]) == (0.0, 1.0)
    assert len(told) > 20
    assert model.depth.table.weight.dtype == torch.bfloat16
    assert model.depth.heads.dtype == model.backbone.output.weight.dtype == torch.float32
    assert model.codec.codebooks.dtype == torch.float32
    # Nothing is mapped any more: the file may go.
    assert str(folder) not in Path("/proc/self/maps").read_text()


def test_all_is_looked_up_before_anything_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last tensor is wrong, and not one has been read."""
    stored = Weights(folder)
    monkeypatch.setattr(Weights, "tensor", lambda *args: pytest.fail("a tensor was read"))
    good = Source("a", (("text_encoder.norm.weight", (256,)),))
    bad = Source("b", (("lm_head.weight", (7, 512)),))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight has shape \[516, 512\]; expected \[7, 512\]"):
        read([(stored, [good, bad])], CPU)


def test_weights_that_somebody_has_quantised_are_refused(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="tensor a is stored as I8; expected one of F32, F16, BF16"):
        Weights(tmp_path).check("a", (3,))


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": [1]}', '{"weight_map": {"a": 5}}'])
def test_a_broken_index_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        Weights(tmp_path)


def test_a_shard_without_its_tensor_is_named(folder: Path, tmp_path: Path) -> None:
    """The index and a shard are of different downloads."""
    save_file({"b": torch.zeros(3)}, tmp_path / "model-1.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"tensor a cannot be read from .*model-1\.safetensors"):
        Weights(tmp_path).check("a", (3,))


def test_the_published_sizes_are_the_published_config() -> None:
    """What is made with random weights to measure a machine is what the published config describes; its decoys are not
    read."""
    main, codec = published_config()
    assert breeze_config(main, codec, Path()) == breeze_tts_2()
    with torch.device("meta"):
        model = SpeechModel(breeze_tts_2(), frontend=lambda voice: pytest.fail("no text here"))
    counts = {
        part: sum(p.numel() for name, p in model.named_parameters() if name.startswith(part))
        for part in ("text.", "backbone.layers", "depth.layers", "codec.")
    }
    assert counts["text."] == 999_903_232 + 2_359_296
    assert counts["backbone.layers"] + 2048 == 1_409_410_048
    assert counts["depth.layers"] + 1024 == 333_472_768
    assert sum(p.numel() for n, p in model.named_parameters() if not n.startswith("codec.")) == 2_850_155_520


def test_kinds_of_weights_that_there_are_not() -> None:
    with pytest.raises(BadRequest, match="only int8 and fp8 are known"):
        SpeechModel.load("tiny", weights="int3")


def test_random_weights_for_measuring_never_end_their_speech() -> None:
    model = SpeechModel.load("mid")
    assert model.config.end_class is not None
    assert not model.backbone.output.weight[model.config.end_class].any()
    assert model.backbone.output.weight.dtype == torch.float32
    assert weights.HELD_BYTES > 0
