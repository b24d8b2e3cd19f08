"""Weights from files: names and shapes are checked before anything is computed, and every error names its tensor.

Two kinds of folder are read.  Our own hold `model.safetensors` under the names of our modules.  The published Breeze
TTS 2 holds sharded files under other names; `_breeze` lists, for each of our tensors, where its pieces are.  What the
checkpoint carries besides (an unused text embedding, the codec of an older release) is never read.
"""

from __future__ import annotations

import logging
import lzma
import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from breeze_rtc.errors import CheckpointError
from breeze_rtc.models import hub, presets
from breeze_rtc.models.attention import BlockConfig, RopeConfig
from breeze_rtc.models.backbone import BackboneConfig
from breeze_rtc.models.codec import SNAKE_KERNEL, CodecConfig
from breeze_rtc.models.depth import DepthConfig
from breeze_rtc.models.mimi import MimiConfig
from breeze_rtc.models.presets import ModelConfig
from breeze_rtc.models.prompt import BreezePrompts, Voice
from breeze_rtc.models.quantised import check_kind, narrow, narrowed
from breeze_rtc.models.reference_encoder import ReferenceEncoder, ReferenceEncoderConfig
from breeze_rtc.models.sampling import Sampling
from breeze_rtc.models.speech_model import ByteFrontend, ByteTokenizer, SpeechModel, TextFrontend, Tokenizer
from breeze_rtc.models.text_encoder import TextEncoderConfig
from breeze_rtc.models.weights import Source, Weights, read, read_json

log = logging.getLogger(__name__)

SEED = 20_260_101
GRAPH_SUFFIX = ".onnx.xz"
BREEZE_REPOSITORY = "BreezeBlue/Breeze-TTS-2"
WIDENED = ("backbone.output.weight", "depth.heads")
"""Logits are computed in float32."""
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
    preset = _get(config, "preset", path)
    if preset != "nano":
        raise CheckpointError(f"{path} names the preset {preset!r}; only 'nano' is read from a folder")
    model = SpeechModel(
        presets.nano(vocab=int(_get(config, "vocab", path))),
        frontend=_nano_frontend(folder),
        voices=tuple(_get(config, "voices", path)),
        sampling=Sampling(**_get(config, "sampling", path)),
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
    prompts = BreezePrompts(_tokenizer(folder / "tokenizer.json"))
    with torch.device("meta"):
        model = SpeechModel(
            model_config,
            frontend=lambda _voice: prompts.frontend(Voice()),
            prompts=prompts,
            encoder=lambda: load_reference_encoder(codec_folder, codec_config, model_config.codec.codebooks),
            licence_note=BREEZE_LICENCE,
            sampling=Sampling(),
        )
    if weights:
        narrow(model, weights)
    main, codec = Weights(folder), Weights(codec_folder)
    parts = [(main, list(_breeze(model_config))), (codec, list(_breeze_codec(model_config.codec)))]
    kept = partial(narrowed, kind=weights) if weights else None
    state = read(parts, torch.device(device), widened=WIDENED, kept=kept, told=told)
    stored = len(main.names()) + len(codec.names())
    used = sum(len(source.pieces) for _, sources in parts for source in sources)
    log.info("%s: %d of %d tensors are used; %s", folder, used, stored, "the others belong to older parts")
    model.load_state_dict(state, assign=True)
    return model


def _tokenizer(path: Path) -> Callable[[], Tokenizer]:
    """Reads it when the first stream opens: tests of the numbers have none.  Raises CheckpointError."""

    @cache
    def read() -> Tokenizer:
        from tokenizers import Tokenizer as Library

        if not path.exists():
            raise CheckpointError(f"{path} is missing; download the checkpoint again")
        tokenizer: Tokenizer = Library.from_file(str(path))
        return tokenizer

    return read


def breeze_config(config: dict[str, Any], codec: dict[str, Any], folder: Path) -> ModelConfig:
    """Our config from the published ones.  Raises CheckpointError for a missing key.

    The rope, norm and length keys of the top level belong to the model the published code grew from: they are not read.
    """
    path = folder / "config.json"
    text = _get(config, "text_encoder_config", path)
    backbone = _get(config, "backbone_config", path)
    depth = _get(config, "depth_decoder_config", path)
    decoder = _get(codec, "decoder_config", folder / "audio_tokenizer" / "config.json")
    vocab = _get(config, "vocab_size", path)
    codes = _get(decoder, "codebook_size", path)
    codebooks = _get(config, "num_codebooks", path)
    kinds = text.get("layer_types") or [
        "full_attention" if (i + 1) % text.get("sliding_window_pattern", 6) == 0 else "sliding_attention"
        for i in range(_get(text, "num_hidden_layers", path))
    ]
    block = _block(text, path, qk_norm=True)
    if text.get("query_pre_attn_scalar", block.head_dim) != block.head_dim:
        raise CheckpointError(f"{path}: query_pre_attn_scalar differs from head_dim, which this runtime does not know")
    return ModelConfig(
        name="breeze-tts-2",
        feed="prefix",
        text=TextEncoderConfig(
            vocab=_get(text, "vocab_size", path),
            block=block,
            full_attention=tuple(kind == "full_attention" for kind in kinds),
            window=_get(text, "sliding_window", path),
            window_rope=_rope(text, path, "sliding_attention"),
            full_rope=_rope(text, path, "full_attention"),
            output=_get(config, "hidden_size", path),
            own_vector_id=text.get("eoi_token_index", 256_000),
        ),
        backbone=BackboneConfig(
            block=_block(backbone, path, qk_norm=True),
            layers=_get(backbone, "num_hidden_layers", path),
            rope=_rope(backbone, path),
            classes=vocab + 1,
        ),
        depth=DepthConfig(
            codebooks=codebooks,
            vocab=vocab,
            embedding=_get(config, "audio_embed_size", path),
            block=_block(depth, path),
            layers=_get(depth, "num_hidden_layers", path),
            rope=_rope(depth, path),
        ),
        codec=published_codec(codec, codebooks, folder / "audio_tokenizer"),
        end_class=vocab,
        reserved=(codes, vocab - 1) if codes < vocab else None,
        max_positions=2048,
    )


def published_codec(codec: dict[str, Any], codebooks: int, folder: Path) -> CodecConfig:
    """The codec that Breeze TTS 2 and Qwen3-TTS share, from its own config.  Raises CheckpointError."""
    path = folder / "config.json"
    decoder = _get(codec, "decoder_config", path)
    upsample = tuple(_get(decoder, "upsampling_ratios", path))
    rates = tuple(_get(decoder, "upsample_rates", path))
    return CodecConfig(
        codebooks=codebooks,
        codes=_get(decoder, "codebook_size", path),
        code_dim=_get(decoder, "codebook_dim", path) // 2,
        mixed=_get(decoder, "codebook_dim", path),
        latent=_get(decoder, "latent_dim", path),
        block=_block(decoder, path),
        layers=_get(decoder, "num_hidden_layers", path),
        rope=_rope(decoder, path),
        window=_get(decoder, "sliding_window", path),
        upsample=upsample,
        expansion=4,
        head="snake",
        sample_rate=codec.get("output_sample_rate", 24_000),
        frame_samples=math.prod(upsample + rates),
        decoder=_get(decoder, "decoder_dim", path),
        rates=rates,
    )


def _block(config: dict[str, Any], path: Path, *, qk_norm: bool = False) -> BlockConfig:
    hidden = _get(config, "hidden_size", path)
    heads = _get(config, "num_attention_heads", path)
    return BlockConfig(
        hidden=hidden,
        heads=heads,
        kv_heads=_get(config, "num_key_value_heads", path),
        head_dim=config.get("head_dim") or hidden // heads,
        ffn=_get(config, "intermediate_size", path),
        eps=_get(config, "rms_norm_eps", path),
        qk_norm=qk_norm,
    )


def _rope(config: dict[str, Any], path: Path, layer_type: str = "") -> RopeConfig:
    """The rope of one part, as transformers 5 writes it (`rope_parameters`) or as 4 did."""
    values = config.get("rope_parameters")
    if values and layer_type:
        values = _get(values, layer_type, path)
    if not values:
        theta_key = "rope_local_base_freq" if layer_type == "sliding_attention" else "rope_theta"
        scaling = {} if layer_type == "sliding_attention" else config.get("rope_scaling") or {}
        values = {**scaling, "rope_theta": _get(config, theta_key, path)}
    kind = values.get("rope_type") or values.get("type") or "default"
    theta = float(_get(values, "rope_theta", path))
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, factor=float(_get(values, "factor", path)))
    if kind == "llama3":
        return RopeConfig(
            theta,
            factor=float(_get(values, "factor", path)),
            low=float(_get(values, "low_freq_factor", path)),
            high=float(_get(values, "high_freq_factor", path)),
            original_length=int(_get(values, "original_max_position_embeddings", path)),
        )
    raise CheckpointError(f"{path}: rope type {kind!r} is not known")


def _concat(pieces: list[Tensor]) -> Tensor:
    return torch.cat(pieces)


def _means(pieces: list[Tensor]) -> Tensor:
    """Codebooks from the sums of the vectors that fell into each entry, and their numbers, by turns."""
    pairs = zip(pieces[::2], pieces[1::2], strict=True)
    return torch.stack([total / usage.clamp(min=1e-5)[:, None] for total, usage in pairs])


def _attention(ours: str, theirs: str, c: BlockConfig) -> Iterator[Source]:
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    shapes = {"q_proj": (q, c.hidden), "k_proj": (kv, c.hidden), "v_proj": (kv, c.hidden)}
    pieces = tuple((f"{theirs}.self_attn.{name}.weight", shape) for name, shape in shapes.items())
    yield Source(f"{ours}.attention.qkv.weight", pieces, _concat)
    yield Source(f"{ours}.attention.out.weight", ((f"{theirs}.self_attn.o_proj.weight", (c.hidden, q)),))
    if c.qk_norm:
        yield Source(f"{ours}.attention.q_norm", ((f"{theirs}.self_attn.q_norm.weight", (c.head_dim,)),))
        yield Source(f"{ours}.attention.k_norm", ((f"{theirs}.self_attn.k_norm.weight", (c.head_dim,)),))
    gate_up = tuple((f"{theirs}.mlp.{name}.weight", (c.ffn, c.hidden)) for name in ("gate_proj", "up_proj"))
    yield Source(f"{ours}.mlp.gate_up.weight", gate_up, _concat)
    yield Source(f"{ours}.mlp.down.weight", ((f"{theirs}.mlp.down_proj.weight", (c.hidden, c.ffn)),))


def _blocks(ours: str, theirs: str, c: BlockConfig, layers: int) -> Iterator[Source]:
    """Pre-norm layers and the norm after them."""
    for n in range(layers):
        yield from _attention(f"{ours}.layers.{n}", f"{theirs}.layers.{n}", c)
        for norm, name in (("attention_norm", "input_layernorm"), ("mlp_norm", "post_attention_layernorm")):
            yield Source(f"{ours}.layers.{n}.{norm}.weight", ((f"{theirs}.layers.{n}.{name}.weight", (c.hidden,)),))
    yield Source(f"{ours}.norm.weight", ((f"{theirs}.norm.weight", (c.hidden,)),))


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
        yield from _attention(f"text.layers.{n}", f"text_encoder.layers.{n}", text.block)
        for ours, theirs in norms.items():
            yield Source(f"text.layers.{n}.{ours}.weight", ((f"text_encoder.layers.{n}.{theirs}.weight", (hidden,)),))
    yield Source("text.norm.weight", (("text_encoder.norm.weight", (hidden,)),))
    yield Source("text.projection.weight", (("text_encoder_proj.weight", (text.output, hidden)),))
    yield from _blocks("backbone", "backbone_model", backbone.block, backbone.layers)
    yield Source("backbone.output.weight", (("lm_head.weight", (backbone.classes, backbone.block.hidden)),))
    width = depth.block.hidden
    table = (depth.codebooks * depth.vocab, depth.embedding)
    heads = (depth.codebooks - 1, width, depth.vocab)
    yield Source("depth.table.weight", (("depth_decoder.model.embed_tokens.weight", table),))
    projection = ("depth_decoder.model.inputs_embeds_projector.weight", (width, depth.embedding))
    yield Source("depth.projection.weight", (projection,))
    yield from _blocks("depth", "depth_decoder.model", depth.block, depth.layers)
    yield Source("depth.heads", (("depth_decoder.codebooks_head.weight", heads),))


def _conv(ours: str, theirs: str, inputs: int, outputs: int, kernel: int) -> Iterator[Source]:
    """A published convolution (outputs, inputs, kernel) as a matrix over taps."""
    yield Source(
        f"{ours}.weight",
        ((f"{theirs}.weight", (outputs, inputs, kernel)),),
        lambda pieces: pieces[0].permute(0, 2, 1).reshape(outputs, kernel * inputs),
    )
    yield Source(f"{ours}.bias", ((f"{theirs}.bias", (outputs,)),))


def _upsample(ours: str, theirs: str, inputs: int, outputs: int, stride: int, *, overlap: bool) -> Iterator[Source]:
    """A published transposed convolution (inputs, outputs, kernel): tap j of the current step makes phase j, tap
    stride + j is what the previous step adds to it."""
    kernel = 2 * stride if overlap else stride

    def join(pieces: list[Tensor]) -> Tensor:
        taps = pieces[0].permute(2, 1, 0)
        both = torch.cat((taps[stride:], taps[:stride]), -1) if overlap else taps
        return both.reshape(stride * outputs, -1)

    yield Source(f"{ours}.weight", ((f"{theirs}.weight", (inputs, outputs, kernel)),), join)
    yield Source(f"{ours}.bias", ((f"{theirs}.bias", (outputs,)),))


def _linear(ours: str, theirs: str, inputs: int, outputs: int) -> Iterator[Source]:
    yield Source(f"{ours}.weight", ((f"{theirs}.weight", (outputs, inputs)),))
    yield Source(f"{ours}.bias", ((f"{theirs}.bias", (outputs,)),))


def _snake(ours: str, theirs: str, channels: int) -> Iterator[Source]:
    for name in ("alpha", "beta"):
        yield Source(f"{ours}.{name}", ((f"{theirs}.{name}", (channels,)),))


def _breeze_codec(c: CodecConfig | MimiConfig) -> Iterator[Source]:
    """The decoder of the codec's own checkpoint, as `published_codec` describes it."""
    assert isinstance(c, CodecConfig)
    books = [("rvq_first", 0)] + [("rvq_rest", n) for n in range(c.codebooks - 1)]
    stored: list[tuple[str, tuple[int, ...]]] = []
    for group, n in books:
        book = f"decoder.quantizer.{group}.vq.layers.{n}._codebook"
        stored += [(f"{book}.embedding_sum", (c.codes, c.code_dim)), (f"{book}.cluster_usage", (c.codes,))]

    yield Source("codec.codebooks", tuple(stored), _means)
    for ours, group in (("mix_first", "rvq_first"), ("mix_rest", "rvq_rest")):
        name = f"decoder.quantizer.{group}.output_proj.weight"
        yield Source(f"codec.{ours}.weight", ((name, (c.mixed, c.code_dim, 1)),), lambda pieces: pieces[0].squeeze(-1))
    yield from _conv("codec.before", "decoder.pre_conv.conv", c.mixed, c.latent, 3)
    hidden = c.block.hidden
    yield from _linear("codec.enter", "decoder.pre_transformer.input_proj", c.latent, hidden)
    yield from _linear("codec.leave", "decoder.pre_transformer.output_proj", hidden, c.latent)
    yield from _blocks("codec", "decoder.pre_transformer", c.block, c.layers)
    for n in range(c.layers):
        for ours, theirs in (("attention_scale", "self_attn_layer_scale"), ("mlp_scale", "mlp_layer_scale")):
            name = f"decoder.pre_transformer.layers.{n}.{theirs}.scale"
            yield Source(f"codec.layers.{n}.{ours}", ((name, (hidden,)),))
    for n, factor in enumerate(c.upsample):
        theirs = f"decoder.upsample.{n}"
        yield from _upsample(f"codec.upsamplers.{n}", f"{theirs}.0.conv", c.latent, c.latent, factor, overlap=False)
        ours = f"codec.refiners.{n}"
        yield Source(
            f"{ours}.depthwise.weight",
            ((f"{theirs}.1.dwconv.conv.weight", (c.latent, 1, 7)),),
            lambda pieces: pieces[0].squeeze(1).t().contiguous(),
        )
        yield Source(f"{ours}.depthwise.bias", ((f"{theirs}.1.dwconv.conv.bias", (c.latent,)),))
        yield Source(f"{ours}.norm.weight", ((f"{theirs}.1.norm.weight", (c.latent,)),))
        yield Source(f"{ours}.norm.bias", ((f"{theirs}.1.norm.bias", (c.latent,)),))
        yield from _linear(f"{ours}.expand", f"{theirs}.1.pwconv1", c.latent, c.latent * c.expansion)
        yield from _linear(f"{ours}.shrink", f"{theirs}.1.pwconv2", c.latent * c.expansion, c.latent)
        yield Source(f"{ours}.scale", ((f"{theirs}.1.gamma", (c.latent,)),))
    yield from _conv("codec.snake_head.first", "decoder.decoder.0.conv", c.latent, c.decoder, SNAKE_KERNEL)
    width = c.decoder
    for n, rate in enumerate(c.rates):
        ours, theirs = f"codec.snake_head.stages.{n}", f"decoder.decoder.{n + 1}.block"
        yield from _snake(f"{ours}.snake", f"{theirs}.0", width)
        yield from _upsample(f"{ours}.upsample", f"{theirs}.1.conv", width, width // 2, rate, overlap=True)
        width //= 2
        for unit in range(3):
            yield from _snake(f"{ours}.units.{unit}.first_snake", f"{theirs}.{unit + 2}.act1", width)
            yield from _snake(f"{ours}.units.{unit}.second_snake", f"{theirs}.{unit + 2}.act2", width)
            yield from _conv(
                f"{ours}.units.{unit}.first", f"{theirs}.{unit + 2}.conv1.conv", width, width, SNAKE_KERNEL
            )
            yield from _conv(f"{ours}.units.{unit}.second", f"{theirs}.{unit + 2}.conv2.conv", width, width, 1)
    last = len(c.rates) + 1
    yield from _snake("codec.snake_head.snake", f"decoder.decoder.{last}", width)
    yield from _conv("codec.snake_head.last", f"decoder.decoder.{last + 1}.conv", width, 1, SNAKE_KERNEL)


def load_reference_encoder(folder: Path, config: dict[str, Any], codebooks: int) -> ReferenceEncoder:
    """The encoder of a published codec, of which `codebooks` are read.  Raises CheckpointError.

    config: the content of the codec folder's config.json.
    """
    ours = reference_encoder_config(config, folder, codebooks)
    return read_encoder(ours, Weights(folder), list(_encoder(ours, "encoder.encoder", "encoder.")))


def read_encoder(config: ReferenceEncoderConfig, weights: Weights, sources: list[Source]) -> ReferenceEncoder:
    """In float32, on the CPU.  Raises CheckpointError."""
    with torch.device("meta"):
        encoder = ReferenceEncoder(config)
    state = read([(weights, sources)], torch.device("cpu"), widened=[source.ours for source in sources])
    encoder.load_state_dict(state, assign=True)
    return encoder.eval()


def reference_encoder_config(config: dict[str, Any], folder: Path, codebooks: int) -> ReferenceEncoderConfig:
    """From the codec's config.  Raises CheckpointError for a missing key and for a structure this encoder has not."""
    path = folder / "config.json"
    encoder = _get(config, "encoder_config", path)
    fixed = {"num_residual_layers": 1, "use_causal_conv": True, "use_conv_shortcut": False, "audio_channels": 1}
    for key, value in fixed.items():
        if encoder.get(key, value) != value:
            raise CheckpointError(f"{path}: {key} is {encoder[key]!r}; only {value!r} is known to this runtime")
    hidden, heads = _get(encoder, "hidden_size", path), _get(encoder, "num_attention_heads", path)
    block = BlockConfig(
        hidden=hidden,
        heads=heads,
        kv_heads=encoder.get("num_key_value_heads") or heads,
        head_dim=encoder.get("head_dim") or hidden // heads,
        ffn=_get(encoder, "intermediate_size", path),
        eps=encoder.get("norm_eps", 1e-5),
    )
    return ReferenceEncoderConfig(
        codebooks=codebooks,
        codes=_get(encoder, "codebook_size", path),
        code_dim=_get(encoder, "codebook_dim", path),
        filters=_get(encoder, "num_filters", path),
        strides=tuple(reversed(_get(encoder, "upsampling_ratios", path))),
        kernels=tuple(_get(encoder, f"{name}kernel_size", path) for name in ("", "residual_", "last_")),
        compress=_get(encoder, "compress", path),
        block=block,
        layers=_get(encoder, "num_hidden_layers", path),
        rope=RopeConfig(float((encoder.get("rope_parameters") or encoder).get("rope_theta", 1e4))),
        sample_rate=config.get("input_sample_rate", 24_000),
    )


def _encoder(c: ReferenceEncoderConfig, seanet: str, prefix: str) -> Iterator[Source]:
    """The reference encoder: the names of its SEANet stack, and what stands before those of all other parts."""

    def conv(ours: str, theirs: str, inputs: int, outputs: int, kernel: int) -> Iterator[Source]:
        yield Source(f"{ours}.weight", ((f"{theirs}.conv.weight", (outputs, inputs, kernel)),))
        yield Source(f"{ours}.bias", ((f"{theirs}.conv.bias", (outputs,)),))

    # Places of the published list: a convolution; per stage a unit, an activation and a convolution; then two more.
    seanet, (first, inner, last) = f"{seanet}.layers", c.kernels
    yield from conv("first", f"{seanet}.0", 1, c.filters, first)
    width = c.filters
    for n, stride in enumerate(c.strides):
        unit = f"{seanet}.{3 * n + 1}.block"
        yield from conv(f"stages.{n}.first", f"{unit}.1", width, width // c.compress, inner)
        yield from conv(f"stages.{n}.second", f"{unit}.3", width // c.compress, width, 1)
        yield from conv(f"stages.{n}.down", f"{seanet}.{3 * n + 3}", width, 2 * width, 2 * stride)
        width *= 2
    hidden = c.block.hidden
    yield from conv("last", f"{seanet}.{3 * len(c.strides) + 2}", width, hidden, last)
    for n in range(c.layers):
        yield from _mimi_layer(f"layers.{n}", f"{prefix}encoder_transformer.layers.{n}", c.block)
    yield Source("halve.weight", ((f"{prefix}downsample.conv.weight", (hidden, hidden, 4)),))
    stored: list[tuple[str, tuple[int, ...]]] = []
    for kind, books in (("semantic", 1), ("acoustic", c.codebooks - 1)):
        quantizer = f"{prefix}quantizer.{kind}_residual_vector_quantizer"
        name = f"{quantizer}.input_proj.weight"
        yield Source(f"to_{kind}.weight", ((name, (c.code_dim, hidden, 1)),), lambda pieces: pieces[0].squeeze(-1))
        for n in range(books):
            book = f"{quantizer}.layers.{n}.codebook"
            stored += [(f"{book}.embed_sum", (c.codes, c.code_dim)), (f"{book}.cluster_usage", (c.codes,))]
    yield Source("codebooks", tuple(stored), _means)


def _mimi_layer(ours: str, theirs: str, c: BlockConfig) -> Iterator[Source]:
    """One of Mimi's transformer layers: LayerNorms, and an MLP without a gate."""
    hidden, inside, kv = c.hidden, c.heads * c.head_dim, c.kv_heads * c.head_dim
    shapes = {"q_proj": (inside, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden)}
    pieces = tuple((f"{theirs}.self_attn.{name}.weight", shape) for name, shape in shapes.items())
    yield Source(f"{ours}.attention.qkv.weight", pieces, _concat)
    yield Source(f"{ours}.attention.out.weight", ((f"{theirs}.self_attn.o_proj.weight", (hidden, inside)),))
    yield Source(f"{ours}.up.weight", ((f"{theirs}.mlp.fc1.weight", (c.ffn, hidden)),))
    yield Source(f"{ours}.down.weight", ((f"{theirs}.mlp.fc2.weight", (hidden, c.ffn)),))
    for norm, name in (("attention_norm", "input_layernorm"), ("mlp_norm", "post_attention_layernorm")):
        for part in ("weight", "bias"):
            yield Source(f"{ours}.{norm}.{part}", ((f"{theirs}.{name}.{part}", (hidden,)),))
    for scale, name in (("attention_scale", "self_attn_layer_scale"), ("mlp_scale", "mlp_layer_scale")):
        yield Source(f"{ours}.{scale}", ((f"{theirs}.{name}.scale", (hidden,)),))


def _load_qwen3_tts(folder: Path, config: dict[str, Any], **how: Any) -> SpeechModel:
    # That module uses this one, so it is met late.
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


# ---- files ---------------------------------------------------------------------------------------------------------


def _get(config: dict[str, Any], key: str, path: Path) -> Any:
    if key not in config:
        raise CheckpointError(f"{path} lacks {key}")
    return config[key]
