"""Qwen3-TTS (12 Hz, 0.6B and 1.7B; Base, CustomVoice and VoiceDesign): the published checkpoints as our stages.

Its talker is our backbone, its code predictor our depth decoder, its codec that of Breeze TTS 2.  In place of a text
encoder it has a table (`prompt_table`), whose vector of "no text" is added to each frame that it reads back.  The Base
checkpoints have a speaker encoder beside that of the codec.  What their prompts are is in `qwen3_prompts`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from breeze_rtc.errors import CheckpointError
from breeze_rtc.models.backbone import BackboneConfig
from breeze_rtc.models.depth import DepthConfig
from breeze_rtc.models.presets import ModelConfig
from breeze_rtc.models.prompt import Voice
from breeze_rtc.models.prompt_table import PromptTableConfig
from breeze_rtc.models.published import (
    block_config,
    block_sources,
    codec_sources,
    concat,
    fill,
    linear_sources,
    load_reference_encoder,
    published_codec,
    required,
    rope_config,
    sampling_config,
)
from breeze_rtc.models.qwen3_prompts import Ids, QwenPrompts, read_tokenizer
from breeze_rtc.models.reference_encoder import ReferenceEncoder
from breeze_rtc.models.speaker_encoder import SAMPLE_RATE, SpeakerEncoder, SpeakerEncoderConfig
from breeze_rtc.models.speech_model import SpeechModel
from breeze_rtc.models.weights import Source, Weights, read, read_json

NO_SOUND = 1_024
"""The last ids of codebook 0 are tags, and are never spoken but for the one that ends speech."""
MIN_FRAMES = 2
"""The published package lets no speech end sooner."""
MAX_POSITIONS = 32_768


def load_qwen3_tts(
    folder: Path,
    config: dict[str, Any],
    *,
    device: torch.device | str = "cpu",
    weights: str = "",
    told: Callable[[float], None] = lambda share: None,
) -> SpeechModel:
    """A published checkpoint, read straight to `device`.  Raises CheckpointError.

    Weights keep the type they are stored in, but for the heads, which are widened once because logits are computed in
    float32.
    """
    codec_folder = folder / "speech_tokenizer"
    codec_config = read_json(codec_folder / "config.json")
    ids = _ids(config, folder)
    ours = qwen3_tts_config(config, codec_config, folder)
    prompts = QwenPrompts(cache(lambda: read_tokenizer(folder)), ids, refuses=_refuses(config))

    def encoder() -> ReferenceEncoder:
        made = load_reference_encoder(codec_folder, codec_config, ours.codec.codebooks)
        made.speaker = load_speaker_encoder(folder, config, ours.backbone.block.hidden)
        return made

    with torch.device("meta"):
        model = SpeechModel(
            ours,
            frontend=lambda voice: prompts.frontend(Voice(name=voice)),
            prompts=prompts,
            encoder=encoder if config.get("tts_model_type") == "base" else None,
            voices=tuple(ids.speakers) or ("default",),
            sampling=sampling_config(
                folder / "generation_config.json",
                depth_draws="subtalker_dosample",
                depth_temperature="subtalker_temperature",
                repetition_penalty=1.05,
            ),
        )
    parts = [(Weights(folder), list(_talker(ours))), (Weights(codec_folder), list(codec_sources(ours.codec)))]
    fill(model, parts, device=device, weights=weights, told=told)
    assert model.depth.beside is not None
    with torch.no_grad():
        pad = torch.tensor([ids.text_pad], device=device)
        model.depth.beside.copy_(model.text(pad, torch.ones_like(pad))[0])
    return model


def load_speaker_encoder(folder: Path, config: dict[str, Any], width: int) -> SpeakerEncoder:
    """That of a Base checkpoint, in float32; its vectors are as wide as the backbone.  Raises CheckpointError."""
    path = folder / "config.json"
    theirs = required(config, "speaker_encoder_config", path)
    if (rate := theirs.get("sample_rate", SAMPLE_RATE)) != SAMPLE_RATE:
        raise CheckpointError(f"{path}: the speaker encoder hears {rate} Hz; only {SAMPLE_RATE} is known")
    keys = {
        "mels": "mel_dim",
        "channels": "enc_channels",
        "kernels": "enc_kernel_sizes",
        "dilations": "enc_dilations",
        "attention": "enc_attention_channels",
        "parts": "enc_res2net_scale",
        "squeeze": "enc_se_channels",
    }
    asked = {ours: theirs[key] for ours, key in keys.items() if key in theirs}
    with torch.device("meta"):
        encoder = SpeakerEncoder(SpeakerEncoderConfig(width, **asked))
    shapes = {name: tuple(tensor.shape) for name, tensor in encoder.state_dict().items()}
    sources = [Source(name, ((f"speaker_encoder.{name}", shape),)) for name, shape in shapes.items()]
    state = read([(Weights(folder), sources)], torch.device("cpu"), widened=list(shapes))
    encoder.load_state_dict(state, assign=True)
    return encoder.eval()


def _refuses(config: dict[str, Any]) -> str:
    """The name of a kind of checkpoint that was not taught to follow instructions; empty for the others."""
    kind, size = config.get("tts_model_type"), config.get("tts_model_size")
    if kind == "base":
        return "a Base checkpoint of Qwen3-TTS"
    # The published package leaves them out without a word.
    return "the CustomVoice checkpoint of 0.6B" if (kind, size) == ("custom_voice", "0b6") else ""


def qwen3_tts_config(config: dict[str, Any], codec: dict[str, Any], folder: Path) -> ModelConfig:
    """Our config from the published ones.  Raises CheckpointError for a missing key, and for the 25 Hz models, whose
    codec is another."""
    path = folder / "config.json"
    kind = config.get("tokenizer_type", "qwen3_tts_tokenizer_12hz")
    if kind != "qwen3_tts_tokenizer_12hz":
        raise CheckpointError(f"{path} names the codec {kind!r}; only 'qwen3_tts_tokenizer_12hz' is known")
    talker = required(config, "talker_config", path)
    predictor = required(talker, "code_predictor_config", path)
    for part in (talker, predictor):
        if part.get("attention_bias") or part.get("hidden_act", "silu") != "silu":
            raise CheckpointError(f"{path}: biases in attention and activations other than silu are not known")
    classes = required(talker, "vocab_size", path)
    hidden, inner = required(talker, "hidden_size", path), required(predictor, "hidden_size", path)
    codebooks = required(talker, "num_code_groups", path)
    return ModelConfig(
        name="qwen3-tts",
        feed="prefix",
        text=_table(talker, path),
        backbone=BackboneConfig(
            block=block_config(talker, path, qk_norm=True),
            layers=required(talker, "num_hidden_layers", path),
            # Its three axes of positions are always equal: plain rotary positions.
            rope=rope_config(talker, path),
            classes=classes,
        ),
        depth=DepthConfig(
            codebooks=codebooks,
            vocab=required(predictor, "vocab_size", path),
            embedding=hidden,
            block=block_config(predictor, path, qk_norm=True),
            layers=required(predictor, "num_hidden_layers", path),
            rope=rope_config(predictor, path),
            first_vocab=classes,
            projection="none" if hidden == inner else "biased",
            has_beside=True,
        ),
        codec=published_codec(codec, codebooks, folder / "speech_tokenizer"),
        end_class=required(talker, "codec_eos_token_id", path),
        reserved=(classes - NO_SOUND, classes - 1),
        min_frames=MIN_FRAMES,
        max_positions=talker.get("max_position_embeddings", MAX_POSITIONS),
    )


def _table(talker: dict[str, Any], path: Path) -> PromptTableConfig:
    return PromptTableConfig(
        vocab=required(talker, "text_vocab_size", path),
        hidden=required(talker, "text_hidden_size", path),
        output=required(talker, "hidden_size", path),
        tags=NO_SOUND,
    )


def _ids(config: dict[str, Any], folder: Path) -> Ids:
    path = folder / "config.json"
    talker = required(config, "talker_config", path)
    speakers = {name.lower(): number for name, number in (talker.get("spk_id") or {}).items()}
    dialects = {name.lower(): dialect for name, dialect in (talker.get("spk_is_dialect") or {}).items() if dialect}
    return Ids(
        table=_table(talker, path),
        first_tag=required(talker, "vocab_size", path) - NO_SOUND,
        text_pad=required(config, "tts_pad_token_id", path),
        text_bos=required(config, "tts_bos_token_id", path),
        text_eos=required(config, "tts_eos_token_id", path),
        pad=required(talker, "codec_pad_id", path),
        bos=required(talker, "codec_bos_id", path),
        think=required(talker, "codec_think_id", path),
        no_think=required(talker, "codec_nothink_id", path),
        think_bos=required(talker, "codec_think_bos_id", path),
        think_eos=required(talker, "codec_think_eos_id", path),
        speakers=speakers,
        languages=talker.get("codec_language_id") or {},
        dialects=dialects,
    )


def _talker(config: ModelConfig) -> Iterator[Source]:
    """Everything but the codec."""
    text, backbone, depth = config.text, config.backbone, config.depth
    assert isinstance(text, PromptTableConfig)
    hidden, inner, first = backbone.block.hidden, depth.block.hidden, backbone.classes
    yield Source("text.embedding.weight", (("talker.model.text_embedding.weight", (text.vocab, text.hidden)),))
    yield from linear_sources("text.up", "talker.text_projection.linear_fc1", text.hidden, text.hidden)
    yield from linear_sources("text.down", "talker.text_projection.linear_fc2", text.hidden, hidden)
    first_table = ("talker.model.codec_embedding.weight", (first, hidden))

    def tags(pieces: list[Tensor]) -> Tensor:
        return torch.cat((pieces[0].new_zeros(1, hidden), pieces[0][first - text.tags :]))

    yield Source("text.tags.weight", (first_table,), tags)
    yield from block_sources("backbone", "talker.model", backbone.block, backbone.layers)
    yield Source("backbone.output.weight", (("talker.codec_head.weight", (first, hidden)),))
    predictor = "talker.code_predictor"
    others = tuple(
        (f"{predictor}.model.codec_embedding.{n}.weight", (depth.vocab, hidden)) for n in range(depth.codebooks - 1)
    )
    yield Source("depth.table.weight", (first_table, *others), concat)
    if depth.projection != "none":
        yield from linear_sources("depth.projection", f"{predictor}.small_to_mtp_projection", hidden, inner)
    yield from block_sources("depth", f"{predictor}.model", depth.block, depth.layers)
    # Computed below, once the rest is there.
    beside = ("talker.model.norm.weight", (hidden,))
    yield Source("depth.beside", (beside,), lambda pieces: torch.zeros_like(pieces[0]))
    heads = tuple((f"{predictor}.lm_head.{n}.weight", (depth.vocab, inner)) for n in range(depth.codebooks - 1))
    yield Source("depth.heads", heads, lambda pieces: torch.stack([piece.t() for piece in pieces]))
