"""Weights from files: names and shapes are checked before anything is computed, and every error names its tensor.

Two kinds of folder are read.  Our own hold `model.safetensors` under the names of our modules.  The published Breeze
TTS 2 holds sharded files under other names; `_breeze` lists, for each of our tensors, where its pieces are.  What the
checkpoint carries besides (an unused text embedding, the codec of an older release) is never read.
"""

from __future__ import annotations

import logging
import lzma
from collections.abc import Callable, Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from breeze_rtc.errors import CheckpointError
from breeze_rtc.models import hub, presets
from breeze_rtc.models.backbone import BackboneConfig
from breeze_rtc.models.depth import DepthConfig
from breeze_rtc.models.presets import ModelConfig
from breeze_rtc.models.prompt import BreezePrompts, Voice
from breeze_rtc.models.published import (
    block_config,
    block_sources,
    codec_sources,
    fill,
    gated_layer_sources,
    load_reference_encoder,
    published_codec,
    required,
    rope_config,
    tokenizer_at,
)
from breeze_rtc.models.quantised import check_kind, narrow
from breeze_rtc.models.reference_encoder import ReferenceEncoder, ReferenceEncoderConfig
from breeze_rtc.models.sampling import Sampling
from breeze_rtc.models.speech_model import ByteFrontend, ByteTokenizer, SpeechModel, TextFrontend
from breeze_rtc.models.text_encoder import TextEncoderConfig
from breeze_rtc.models.weights import Source, Weights, read_json

log = logging.getLogger(__name__)

SEED = 20_260_101
GRAPH_SUFFIX = ".onnx.xz"
BREEZE_REPOSITORY = "BreezeBlue/Breeze-TTS-2"
BREEZE_LICENCE = (
    "The weights of Breeze TTS 2 (RESONIA INC.) are under the BreezeBlue Research and Non-Commercial Licence: no "
    "commercial use of the weights, of what is derived from them, or of sound made with them; serving them counts as "
    "commercial use."
)


SEEDED = {"tiny": presets.tiny, "tiny-pointer": presets.tiny_pointer}
"""Random weights for tests, the same on every machine."""
RANDOM = {"mid": presets.mid, "breeze-tts-2-random": presets.breeze_tts_2}
"""Random weights in sizes that take a machine's time, made on the device: to measure it without a download."""


def load(
    name_or_path: str,
    *,
    device: torch.device | str = "cpu",
    weights: str = "",
    told: Callable[[float], None] = lambda share: None,
) -> SpeechModel:
    """See `SpeechModel.load`."""
    device = torch.device(device)
    check_kind(weights)
    folder = _folder(name_or_path)
    if folder is None:
        model = seeded(SEEDED[name_or_path]()) if name_or_path in SEEDED else random_on(RANDOM[name_or_path](), device)
    else:
        config = read_json(folder / "config.json")
        kind = config.get("model_type")
        if kind not in LOADERS:
            raise CheckpointError(
                f"{folder / 'config.json'} is of model type {kind!r}; {' and '.join(map(repr, LOADERS))} can be loaded"
            )
        model = LOADERS[kind](folder, config, device=device, weights=weights, told=told)
    if weights and folder is None:
        narrow(model, weights)
    return model


def _folder(name_or_path: str) -> Path | None:
    """Where a checkpoint's files are; None for a model that has none."""
    if name_or_path in SEEDED or name_or_path in RANDOM:
        return None
    if name_or_path == "nano":
        return Path(str(files("breeze_rtc"))) / "voices" / "nano"
    if name_or_path == "breeze-tts-2":
        return hub.find(BREEZE_REPOSITORY)
    return hub.download(name_or_path, LOADERS) if hub.is_repository(name_or_path) else Path(name_or_path)


def random_on(config: ModelConfig, device: torch.device, seed: int = SEED) -> SpeechModel:
    """A model of random weights made on `device`, in the types that the published one has: bfloat16, with the codec and
    the heads in float32; all float32 on a CPU, whose bfloat16 is slow.  It never says that its speech has ended, so
    that every measurement speaks as long as it means to.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if device.type == "cpu" else torch.bfloat16)
    try:
        with torch.device(device):
            model = SpeechModel(
                config,
                frontend=lambda _voice: ByteFrontend(whole=True, bytes_per_token=4),
                prompts=BreezePrompts(ByteTokenizer),
                encoder=lambda: _seeded_encoder(presets.tiny_encoder(config), seed),
            )
    finally:
        torch.set_default_dtype(before)
    model.codec.float()
    for part in (model.backbone.output.weight, model.depth.heads):
        part.data = part.data.float()
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
            elif name.endswith("bias"):
                parameter.zero_()
        if config.end_class is not None:
            # Its logit is 0, which is never among the likeliest of two thousand.
            model.backbone.output.weight[config.end_class].zero_()
    return model


def seeded(config: ModelConfig, seed: int = SEED) -> SpeechModel:
    """A model of random weights, the same for the same seed on every machine."""
    is_prompted = config.feed == "prefix"
    model = SpeechModel(
        config,
        frontend=lambda _voice: ByteFrontend(whole=is_prompted),
        prompts=BreezePrompts(ByteTokenizer) if is_prompted else None,
        encoder=(lambda: _seeded_encoder(presets.tiny_encoder(config), seed)) if is_prompted else None,
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
            elif name.endswith("bias"):
                # Torch's own start values would differ from process to process.
                parameter.zero_()
        if model.pointer is not None:
            model.pointer.start.normal_(generator=generator)
    return model


def _seeded_encoder(config: ReferenceEncoderConfig, seed: int) -> ReferenceEncoder:
    encoder = ReferenceEncoder(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in encoder.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5, generator=generator)
            elif name.endswith("bias"):
                parameter.zero_()
    return encoder


# ---- our own folders -----------------------------------------------------------------------------------------------


def _load_own(
    folder: Path,
    config: dict[str, Any],
    *,
    device: torch.device | str = "cpu",
    weights: str = "",
    told: Callable[[float], None] = lambda share: None,
) -> SpeechModel:
    """A folder as examples/nano_voice writes it; small, so whoever computes with it moves it to the device.

    config.json: {"model_type": "breeze_rtc", "preset": "nano", "vocab": symbols, "voices": [names], "sampling": {...}}.
    """
    path = folder / "config.json"
    preset = required(config, "preset", path)
    if preset != "nano":
        raise CheckpointError(f"{path} names the preset {preset!r}; only 'nano' is read from a folder")
    model = SpeechModel(
        presets.nano(vocab=int(required(config, "vocab", path))),
        frontend=_nano_frontend(folder),
        voices=tuple(required(config, "voices", path)),
        sampling=Sampling(**required(config, "sampling", path)),
        graphs=read_graphs(folder),
    )
    stored = Weights(folder)
    state = {name: stored.tensor(name, tuple(like.shape)) for name, like in model.state_dict().items()}
    # Half precision on disk halves the wheel; a CPU computes in float32.
    model.load_state_dict({name: t.float() if t.is_floating_point() else t for name, t in state.items()})
    if weights:
        # The graphs hold the weights as they were.
        model.graphs = {}
        narrow(model, weights)
    return model


def write_graphs(folder: Path, graphs: Mapping[str, bytes]) -> None:
    """Write what `step_graphs.export` made into a folder of ours."""
    for name, graph in graphs.items():
        (folder / f"{name}{GRAPH_SUFFIX}").write_bytes(lzma.compress(graph, preset=9))


def read_graphs(folder: Path) -> dict[str, bytes]:
    """The step graphs of a folder of ours; there may be none.  Raises CheckpointError for a damaged one."""
    graphs = {}
    for path in sorted(folder.glob(f"*{GRAPH_SUFFIX}")):
        try:
            graphs[path.name.removesuffix(GRAPH_SUFFIX)] = lzma.decompress(path.read_bytes())
        except (OSError, lzma.LZMAError) as error:
            raise CheckpointError(f"{path} is not readable ({error}); install the package again") from error
    return graphs


def _nano_frontend(folder: Path) -> Callable[[str], TextFrontend]:
    # The front end's word lists are only needed, and only there, with these weights.
    from breeze_rtc.models.pronunciation import Pronunciation

    pronunciation = Pronunciation.load(folder)
    return lambda _voice: pronunciation.frontend()


# ---- Breeze TTS 2 --------------------------------------------------------------------------------------------------


def load_breeze(
    folder: Path,
    config: dict[str, Any] | None = None,
    *,
    device: torch.device | str = "cpu",
    weights: str = "",
    told: Callable[[float], None] = lambda share: None,
) -> SpeechModel:
    """The published checkpoint, read straight to `device`.  Raises CheckpointError.

    Weights keep the type they are stored in (bfloat16; the codec float32), but for the heads, which are widened once
    because logits are computed in float32.  The table that the backbone and the depth decoder share is there once.
    """
    config = config or read_json(folder / "config.json")
    codec_folder = folder / "audio_tokenizer"
    codec_config = read_json(codec_folder / "config.json")
    model_config = breeze_config(config, codec_config, folder)
    prompts = BreezePrompts(tokenizer_at(folder / "tokenizer.json"))
    with torch.device("meta"):
        model = SpeechModel(
            model_config,
            frontend=lambda _voice: prompts.frontend(Voice()),
            prompts=prompts,
            encoder=lambda: load_reference_encoder(codec_folder, codec_config, model_config.codec.codebooks),
            licence_note=BREEZE_LICENCE,
            sampling=Sampling(),
        )
    main, codec = Weights(folder), Weights(codec_folder)
    parts = [(main, list(_breeze(model_config))), (codec, list(codec_sources(model_config.codec)))]
    fill(model, parts, device=device, weights=weights, told=told)
    stored = len(main.names()) + len(codec.names())
    used = sum(len(source.pieces) for _, sources in parts for source in sources)
    log.info("%s: %d of %d tensors are used; %s", folder, used, stored, "the others belong to older parts")
    return model


def breeze_config(config: dict[str, Any], codec: dict[str, Any], folder: Path) -> ModelConfig:
    """Our config from the published ones.  Raises CheckpointError for a missing key.

    The rope, norm and length keys of the top level belong to the model the published code grew from: they are not read.
    """
    path = folder / "config.json"
    text = required(config, "text_encoder_config", path)
    backbone = required(config, "backbone_config", path)
    depth = required(config, "depth_decoder_config", path)
    decoder = required(codec, "decoder_config", folder / "audio_tokenizer" / "config.json")
    vocab = required(config, "vocab_size", path)
    codes = required(decoder, "codebook_size", path)
    codebooks = required(config, "num_codebooks", path)
    kinds = text.get("layer_types") or [
        "full_attention" if (i + 1) % text.get("sliding_window_pattern", 6) == 0 else "sliding_attention"
        for i in range(required(text, "num_hidden_layers", path))
    ]
    block = block_config(text, path, qk_norm=True)
    if text.get("query_pre_attn_scalar", block.head_dim) != block.head_dim:
        raise CheckpointError(f"{path}: query_pre_attn_scalar differs from head_dim, which this runtime does not know")
    return ModelConfig(
        name="breeze-tts-2",
        feed="prefix",
        text=TextEncoderConfig(
            vocab=required(text, "vocab_size", path),
            block=block,
            full_attention=tuple(kind == "full_attention" for kind in kinds),
            window=required(text, "sliding_window", path),
            window_rope=rope_config(text, path, "sliding_attention"),
            full_rope=rope_config(text, path, "full_attention"),
            output=required(config, "hidden_size", path),
            own_vector_id=text.get("eoi_token_index", 256_000),
        ),
        backbone=BackboneConfig(
            block=block_config(backbone, path, qk_norm=True),
            layers=required(backbone, "num_hidden_layers", path),
            rope=rope_config(backbone, path),
            classes=vocab + 1,
        ),
        depth=DepthConfig(
            codebooks=codebooks,
            vocab=vocab,
            embedding=required(config, "audio_embed_size", path),
            block=block_config(depth, path),
            layers=required(depth, "num_hidden_layers", path),
            rope=rope_config(depth, path),
        ),
        codec=published_codec(codec, codebooks, folder / "audio_tokenizer"),
        end_class=vocab,
        reserved=(codes, vocab - 1) if codes < vocab else None,
        max_positions=2048,
    )


def _breeze(config: ModelConfig) -> Iterator[Source]:
    """Everything but the codec."""
    text, backbone, depth = config.text, config.backbone, config.depth
    assert isinstance(text, TextEncoderConfig)
    hidden = text.block.hidden
    yield Source("text.embedding.weight", (("text_encoder.embed_tokens.weight", (text.vocab, hidden)),))
    yield Source("text.own_vector", (("text_encoder.embed_tokens.eoi_embedding", (hidden,)),))
    norms = {
        "attention_norm": "pre_self_attn_layernorm",
        "attention_post_norm": "post_self_attn_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    }
    for n in range(len(text.full_attention)):
        yield from gated_layer_sources(f"text.layers.{n}", f"text_encoder.layers.{n}", text.block)
        for ours, theirs in norms.items():
            yield Source(f"text.layers.{n}.{ours}.weight", ((f"text_encoder.layers.{n}.{theirs}.weight", (hidden,)),))
    yield Source("text.norm.weight", (("text_encoder.norm.weight", (hidden,)),))
    yield Source("text.projection.weight", (("text_encoder_proj.weight", (text.output, hidden)),))
    yield from block_sources("backbone", "backbone_model", backbone.block, backbone.layers)
    yield Source("backbone.output.weight", (("lm_head.weight", (backbone.classes, backbone.block.hidden)),))
    width = depth.block.hidden
    table = (depth.codebooks * depth.vocab, depth.embedding)
    heads = (depth.codebooks - 1, width, depth.vocab)
    yield Source("depth.table.weight", (("depth_decoder.model.embed_tokens.weight", table),))
    projection = ("depth_decoder.model.inputs_embeds_projector.weight", (width, depth.embedding))
    yield Source("depth.projection.weight", (projection,))
    yield from block_sources("depth", "depth_decoder.model", depth.block, depth.layers)
    yield Source("depth.heads", (("depth_decoder.codebooks_head.weight", heads),))


def _load_qwen3_tts(folder: Path, config: dict[str, Any], **how: Any) -> SpeechModel:
    # Its tokenizer's library takes a while to import, and no other model needs it.
    from breeze_rtc.models.qwen3_tts import load_qwen3_tts

    return load_qwen3_tts(folder, config, **how)


def _load_csm(folder: Path, config: dict[str, Any], **how: Any) -> SpeechModel:
    from breeze_rtc.models.csm import load_csm

    return load_csm(folder, config, **how)


LOADERS: dict[str, Callable[..., SpeechModel]] = {
    "breeze": load_breeze,
    "breeze_rtc": _load_own,
    "qwen3_tts": _load_qwen3_tts,
    "csm": _load_csm,
}
"""Model types that can be loaded: (folder, config, device=, weights=, told=) -> the model."""
