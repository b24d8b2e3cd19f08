"""Sesame CSM: the checkpoint in the layout of transformers as our stages, and its prompts.

Its backbone and depth decoder are of the Llama kind (that depth decoder is the one Breeze TTS 2 has, too), its codec is
Mimi.  In place of a text encoder it has a table.  Speech ends with a frame of zeros.

A prompt is one row, its whole text first.  Whose turn it is stands in brackets before the text; a recording stands
before it as a turn that has been spoken:

| voice       | row                                                                               |
| ----------- | --------------------------------------------------------------------------------- |
| a number    | begin [number]text end                                                            |
| a recording | begin [0]words end, the recording's frames, the frame of zeros, begin [0]text end |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from breeze_rtc.errors import BadRequest, CheckpointError
from breeze_rtc.models.backbone import BackboneConfig
from breeze_rtc.models.depth import DepthConfig
from breeze_rtc.models.mimi import STEPS, MimiConfig
from breeze_rtc.models.presets import ModelConfig
from breeze_rtc.models.prompt import Voice, added_tokens, sanitise
from breeze_rtc.models.prompt_table import PromptTableConfig
from breeze_rtc.models.published import (
    block_config,
    block_sources,
    codebook_means,
    conv_sources,
    encoder_sources,
    expect,
    fill,
    mimi_layer_sources,
    read_encoder,
    reference_encoder_config,
    required,
    rope_config,
    sampling_config,
    tokenizer_at,
    upsample_sources,
)
from breeze_rtc.models.reference_encoder import ReferenceEncoder, ReferenceEncoderConfig
from breeze_rtc.models.speech_model import SpeechModel, TextFrontend, TextSegment
from breeze_rtc.models.weights import Source, Weights

VOICES = tuple(map(str, range(10)))
"""Speakers of a conversation.  What each sounds like is not fixed by the number: without a recording, the model makes
somebody up."""
BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"


# ---- prompts -------------------------------------------------------------------------------------------------------


class CsmPrompts:
    """The turns of a conversation as the model reads them; see `Prompts`."""

    is_guided = False
    goes_on = False

    def __init__(self, tokenizer: Callable[[], Any], *, audio: int, audio_end: int) -> None:
        """tokenizer: reads it, when the first prompt is made.  audio, audio_end: the tokens that stand for a frame of a
        recording, and for the frame of zeros behind it."""
        self._tokenizer = tokenizer
        self._audio = audio
        self._audio_end = audio_end

    def frontend(self, voice: Voice, *, has_prefix: bool = False, is_dual: bool = False) -> CsmFrontend:
        if voice.instruction:
            raise BadRequest("the csm model follows no instructions: leave them out")
        if voice.language:
            raise BadRequest("the csm model is not told a language: leave it out")
        assert not is_dual, "what weighs a recording against instructions has instructions"
        return CsmFrontend(self, VOICES[0], [] if has_prefix else self.reference(voice))

    def reference(self, voice: Voice) -> list[TextSegment]:
        if not voice.reference:
            return []
        words, _ = self.sanitised(voice.reference_text)
        tokens, _ = self.turn(VOICES[0], words)
        heard = (*[self._audio] * len(voice.reference), self._audio_end)
        nothing = (0,) * len(heard)
        return [TextSegment(tokens, (0,) * len(tokens)), TextSegment(heard, nothing, codes=voice.reference)]

    def sanitised(self, text: str) -> tuple[str, list[int]]:
        """Without what the tokenizer reads as tokens of its own; see `sanitise`."""
        return sanitise(text, added_tokens(self._tokenizer()))

    def turn(self, speaker: str, text: str) -> tuple[tuple[int, ...], list[int]]:
        """Tokens of a turn, and how many characters of its text have been read with each."""
        tokenizer = self._tokenizer()
        before = f"[{speaker}]"
        found = tokenizer.encode(before + text, add_special_tokens=False)
        edges = [tokenizer.token_to_id(name) for name in (BEGIN, END)]
        if None in edges:
            raise CheckpointError(f"the tokenizer lacks {BEGIN} or {END}; is it that of CSM?")
        ends = [0]
        for _, end in found.offsets:
            # White space may have no extent.
            ends.append(max(ends[-1], end - len(before)))
        return (edges[0], *found.ids, edges[1]), [*ends, len(text)]


class CsmFrontend:
    """The text front end: it waits for the whole text, then makes the prompt."""

    def __init__(self, prompts: CsmPrompts, speaker: str, before: list[TextSegment]) -> None:
        """before: what stands before the turn."""
        self._prompts = prompts
        self._speaker = speaker
        self._before = before
        self._text = ""

    def push(self, text: str) -> list[TextSegment]:
        self._text += text
        return []

    def end(self) -> list[TextSegment]:
        text, origin = self._prompts.sanitised(self._text)
        if not text.strip():
            return []
        tokens, ends = self._prompts.turn(self._speaker, text)
        marks = [origin[end - 1] if end else 0 for end in ends]
        marks[-1] = len(self._text)
        return [*self._before, TextSegment(tokens, tuple(marks))]


# ---- the checkpoint ------------------------------------------------------------------------------------------------


def load_csm(
    folder: Path,
    config: dict[str, Any],
    *,
    device: torch.device | str = "cpu",
    weights: str = "",
    told: Callable[[float], None] = lambda share: None,
) -> SpeechModel:
    """A checkpoint in the layout of transformers, read straight to `device`.  Raises CheckpointError.

    Weights keep the type they are stored in, but for the heads, which are widened once because logits are computed in
    float32.  The published folder holds a second file in the layout of the authors' own code, which is not read.
    """
    path = folder / "config.json"
    ours = csm_config(config, folder)
    prompts = CsmPrompts(
        tokenizer_at(folder / "tokenizer.json"),
        audio=required(config, "audio_token_id", path),
        audio_end=required(config, "audio_eos_token_id", path),
    )

    def frontend(voice: str) -> TextFrontend:
        return CsmFrontend(prompts, voice, [])

    def encoder() -> ReferenceEncoder:
        it = csm_encoder_config(config, folder)
        return read_encoder(
            it, _weights(folder, config), list(encoder_sources(it, "codec_model.encoder", "codec_model."))
        )

    with torch.device("meta"):
        model = SpeechModel(
            ours,
            frontend=frontend,
            prompts=prompts,
            encoder=encoder,
            voices=VOICES,
            sampling=sampling_config(
                folder / "generation_config.json",
                depth_draws="depth_decoder_do_sample",
                depth_temperature="depth_decoder_temperature",
                repetition_penalty=1.0,
            ),
        )
    stored = _weights(folder, config)
    assert isinstance(ours.codec, MimiConfig)
    parts = [(stored, [*_language(ours, stored), *_codec(ours.codec)])]
    fill(model, parts, device=device, weights=weights, told=told)
    return model


def _weights(folder: Path, config: dict[str, Any]) -> Weights:
    """The published folder says that its weights have a name of their own: `model.safetensors` beside them is in the
    layout of other code."""
    name = str(config.get("transformers_weights", "model.safetensors"))
    return Weights(folder, Path(name).name.removesuffix(".index.json"))


def csm_config(config: dict[str, Any], folder: Path) -> ModelConfig:
    """Our config from the published one.  Raises CheckpointError for a missing key and for a structure we have not."""
    path = folder / "config.json"
    depth, codec = required(config, "depth_decoder_config", path), mimi_config(config, folder)
    for part in (config, depth):
        fixed = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"}
        expect(part, fixed, path)
    expect(config, {"tie_codebooks_embeddings": True, "codebook_eos_token_id": 0}, path)
    vocab, hidden = required(config, "vocab_size", path), required(config, "hidden_size", path)
    return ModelConfig(
        name="csm",
        feed="prefix",
        text=PromptTableConfig(
            vocab=required(config, "text_vocab_size", path), hidden=hidden, output=hidden, has_network=False
        ),
        backbone=BackboneConfig(
            block=block_config(config, path),
            layers=required(config, "num_hidden_layers", path),
            rope=rope_config(config, path),
            classes=vocab,
        ),
        depth=DepthConfig(
            codebooks=codec.codebooks,
            vocab=vocab,
            embedding=hidden,
            block=block_config(depth, path),
            layers=required(depth, "num_hidden_layers", path),
            rope=rope_config(depth, path),
        ),
        codec=codec,
        ends_with_zeros=True,
        reserved=(codec.codes, vocab - 1) if codec.codes < vocab else None,
        max_positions=required(config, "max_position_embeddings", path),
    )


def csm_encoder_config(config: dict[str, Any], folder: Path) -> ReferenceEncoderConfig:
    """Of what makes codec frames of a recording.  Raises CheckpointError."""
    path = folder / "config.json"
    codec = required(config, "codec_config", path)
    ours = reference_encoder_config({"encoder_config": codec}, folder, required(config, "num_codebooks", path))
    return replace(
        ours, window=required(codec, "sliding_window", path), sample_rate=required(codec, "sampling_rate", path)
    )


def mimi_config(config: dict[str, Any], folder: Path) -> MimiConfig:
    """Of the codec's decoder, which mirrors its encoder.  Raises CheckpointError."""
    path = folder / "config.json"
    codec = required(config, "codec_config", path)
    like = csm_encoder_config(config, folder)
    hidden = like.block.hidden
    fixed = {
        "model_type": "mimi",
        "num_semantic_quantizers": 1,
        "trim_right_ratio": 1.0,
        "pad_mode": "constant",
        "hidden_act": "gelu",
        "attention_bias": False,
        "upsample_groups": hidden,
    }
    expect(codec, fixed, path)
    if required(codec, "vector_quantization_hidden_dimension", path) == hidden:
        raise CheckpointError(f"{path}: a codec whose quantiser has no projections is not known to this runtime")
    assert like.window is not None
    return MimiConfig(
        codebooks=like.codebooks,
        codes=like.codes,
        code_dim=like.code_dim,
        block=like.block,
        layers=like.layers,
        rope=like.rope,
        window=like.window,
        filters=like.filters,
        rates=tuple(reversed(like.strides)),
        kernels=like.kernels,
        compress=like.compress,
        sample_rate=like.sample_rate,
    )


def _language(config: ModelConfig, stored: Weights) -> Iterator[Source]:
    """Everything but the codec."""
    text, backbone, depth = config.text, config.backbone, config.depth
    assert isinstance(text, PromptTableConfig)
    hidden, inner = backbone.block.hidden, depth.block.hidden
    yield Source("text.embedding.weight", (("embed_text_tokens.weight", (text.vocab, hidden)),))
    yield from block_sources("backbone", "backbone_model", backbone.block, backbone.layers)
    yield Source("backbone.output.weight", (("lm_head.weight", (backbone.classes, hidden)),))
    # One table under two names, of which a file may have one or both.
    names = ("depth_decoder.model.embed_tokens.weight", "backbone_model.embed_tokens.embed_audio_tokens.weight")
    name = next((name for name in names if name in stored.names()), names[0])
    yield Source("depth.table.weight", ((name, (depth.codebooks * depth.vocab, hidden)),))
    projection = ("depth_decoder.model.inputs_embeds_projector.weight", (inner, hidden))
    yield Source("depth.projection.weight", (projection,))
    yield from block_sources("depth", "depth_decoder.model", depth.block, depth.layers)
    heads = ("depth_decoder.codebooks_head.weight", (depth.codebooks - 1, inner, depth.vocab))
    yield Source("depth.heads", (heads,))


def _codec(c: MimiConfig) -> Iterator[Source]:
    """Mimi's decoder."""
    hidden = c.block.hidden
    stored: list[tuple[str, tuple[int, ...]]] = []
    for ours, kind, books in (("mix_first", "semantic", 1), ("mix_rest", "acoustic", c.codebooks - 1)):
        quantizer = f"codec_model.quantizer.{kind}_residual_vector_quantizer"
        name = f"{quantizer}.output_proj.weight"
        yield Source(f"codec.{ours}.weight", ((name, (hidden, c.code_dim, 1)),), lambda pieces: pieces[0].squeeze(-1))
        for n in range(books):
            book = f"{quantizer}.layers.{n}.codebook"
            stored += [(f"{book}.embed_sum", (c.codes, c.code_dim)), (f"{book}.cluster_usage", (c.codes,))]
    yield Source("codec.codebooks", tuple(stored), codebook_means)

    def phases(pieces: list[Tensor]) -> Tensor:
        # Tap j of a step makes phase j of its own output; tap STEPS + j is added to the output of the step behind it.
        taps = pieces[0].squeeze(1).t()
        return torch.stack((taps[STEPS:], taps[:STEPS]))

    yield Source("codec.upsample.weight", (("codec_model.upsample.conv.weight", (hidden, 1, 2 * STEPS)),), phases)
    for n in range(c.layers):
        yield from mimi_layer_sources(f"codec.layers.{n}", f"codec_model.decoder_transformer.layers.{n}", c.block)
    # Places of the published list: a convolution; per stage an activation, a convolution and a unit; then two more.
    seanet, (first, inner, last) = "codec_model.decoder.layers", c.kernels
    width = c.filters << len(c.rates)
    yield from conv_sources("codec.first", f"{seanet}.0.conv", hidden, width, first)
    for n, rate in enumerate(c.rates):
        ours, half = f"codec.stages.{n}", width // 2
        yield from upsample_sources(f"{ours}.upsample", f"{seanet}.{3 * n + 2}.conv", width, half, rate, overlap=True)
        unit = f"{seanet}.{3 * n + 3}.block"
        yield from conv_sources(f"{ours}.first", f"{unit}.1.conv", half, half // c.compress, inner)
        yield from conv_sources(f"{ours}.second", f"{unit}.3.conv", half // c.compress, half, 1)
        width = half
    yield from conv_sources("codec.last", f"{seanet}.{3 * len(c.rates) + 2}.conv", width, 1, last)
