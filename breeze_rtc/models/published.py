"""How published checkpoints are written, where more than one model writes so: configs, tensors, tokenizer, sampling.

An adapter (`breeze` in `checkpoint`, `qwen3_tts`, `csm`) lists for each of our tensors where its pieces are: the
functions that end in `_sources` are pieces of such lists.  `fill` reads what is listed.  Every error is a
CheckpointError and names its file, and the key or the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from breeze_rtc.errors import CheckpointError
from breeze_rtc.models.attention import BlockConfig, RopeConfig
from breeze_rtc.models.codec import SNAKE_KERNEL, CodecConfig
from breeze_rtc.models.mimi import MimiConfig
from breeze_rtc.models.quantised import narrow, narrowed
from breeze_rtc.models.reference_encoder import ReferenceEncoder, ReferenceEncoderConfig
from breeze_rtc.models.sampling import Sampling
from breeze_rtc.models.speech_model import SpeechModel, Tokenizer
from breeze_rtc.models.weights import Source, Weights, read, read_json

WIDENED = ("backbone.output.weight", "depth.heads")
"""Logits are computed in float32."""


def fill(
    model: SpeechModel,
    parts: list[tuple[Weights, list[Source]]],
    *,
    device: torch.device | str,
    weights: str,
    told: Callable[[float], None],
) -> None:
    """Read `parts` into a model that is still on `meta`, straight to `device`.

    Weights keep the type they are stored in, but for the heads, which are widened once.  weights: a kind of
    `quantised`, or "".  told: is called with the share that has been read.
    """
    kept = None
    if weights:
        narrow(model, weights)
        kept = partial(narrowed, kind=weights)
    state = read(parts, torch.device(device), widened=WIDENED, kept=kept, told=told)
    model.load_state_dict(state, assign=True)


def tokenizer_at(path: Path) -> Callable[[], Tokenizer]:
    """Reads it when the first stream opens: tests of the numbers have none.  Raises CheckpointError."""

    @cache
    def read() -> Tokenizer:
        from tokenizers import Tokenizer as Library

        if not path.exists():
            raise CheckpointError(f"{path} is missing; download the checkpoint again")
        tokenizer: Tokenizer = Library.from_file(str(path))
        return tokenizer

    return read


def required(config: dict[str, Any], key: str, path: Path) -> Any:
    """A key of the config that `path` holds.  Raises CheckpointError where it is not there."""
    if key not in config:
        raise CheckpointError(f"{path} lacks {key}")
    return config[key]


def expect(config: dict[str, Any], values: dict[str, Any], path: Path) -> None:
    """Raises CheckpointError where a key is there and has another value."""
    for key, value in values.items():
        if config.get(key, value) != value:
            raise CheckpointError(f"{path}: {key} is {config[key]!r}; only {value!r} is known to this runtime")


def sampling_config(path: Path, *, depth_draws: str, depth_temperature: str, repetition_penalty: float) -> Sampling:
    """What a `generation_config.json` asks for; the authors' own values where it says nothing, or is not there.

    depth_draws, depth_temperature: what it calls those of the depth decoder.  repetition_penalty: the authors' own.
    """
    asked = read_json(path) if path.exists() else {}
    return Sampling(
        temperature=float(asked.get("temperature", 0.9)) if asked.get("do_sample", True) else 0.0,
        depth_temperature=float(asked.get(depth_temperature, 0.9)) if asked.get(depth_draws, True) else 0.0,
        top_k=int(asked.get("top_k", 50)),
        top_p=float(asked.get("top_p", 1.0)),
        repetition_penalty=float(asked.get("repetition_penalty", repetition_penalty)),
    )


def block_config(config: dict[str, Any], path: Path, *, qk_norm: bool = False) -> BlockConfig:
    """The layers of one part, of a kind that transformers writes alike for all models.  qk_norm: of each query and key,
    which no config says."""
    hidden = required(config, "hidden_size", path)
    heads = required(config, "num_attention_heads", path)
    return BlockConfig(
        hidden=hidden,
        heads=heads,
        kv_heads=required(config, "num_key_value_heads", path),
        head_dim=config.get("head_dim") or hidden // heads,
        ffn=required(config, "intermediate_size", path),
        eps=required(config, "rms_norm_eps", path),
        qk_norm=qk_norm,
    )


def rope_config(config: dict[str, Any], path: Path, layer_type: str = "") -> RopeConfig:
    """The rope of one part, as transformers 5 writes it (`rope_parameters`) or as 4 did.  layer_type: where there is
    one for each type of layer.  Raises CheckpointError for a kind that is not known."""
    values = config.get("rope_parameters")
    if values and layer_type:
        values = required(values, layer_type, path)
    if not values:
        theta_key = "rope_local_base_freq" if layer_type == "sliding_attention" else "rope_theta"
        scaling = {} if layer_type == "sliding_attention" else config.get("rope_scaling") or {}
        values = {**scaling, "rope_theta": required(config, theta_key, path)}
    kind = values.get("rope_type") or values.get("type") or "default"
    theta = float(required(values, "rope_theta", path))
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, factor=float(required(values, "factor", path)))
    if kind == "llama3":
        return RopeConfig(
            theta,
            factor=float(required(values, "factor", path)),
            low=float(required(values, "low_freq_factor", path)),
            high=float(required(values, "high_freq_factor", path)),
            original_length=int(required(values, "original_max_position_embeddings", path)),
        )
    raise CheckpointError(f"{path}: rope type {kind!r} is not known")


def published_codec(codec: dict[str, Any], codebooks: int, folder: Path) -> CodecConfig:
    """The codec that Breeze TTS 2 and Qwen3-TTS share, from its own config.  Raises CheckpointError."""
    path = folder / "config.json"
    decoder = required(codec, "decoder_config", path)
    upsample = tuple(required(decoder, "upsampling_ratios", path))
    rates = tuple(required(decoder, "upsample_rates", path))
    return CodecConfig(
        codebooks=codebooks,
        codes=required(decoder, "codebook_size", path),
        code_dim=required(decoder, "codebook_dim", path) // 2,
        mixed=required(decoder, "codebook_dim", path),
        latent=required(decoder, "latent_dim", path),
        block=block_config(decoder, path),
        layers=required(decoder, "num_hidden_layers", path),
        rope=rope_config(decoder, path),
        window=required(decoder, "sliding_window", path),
        upsample=upsample,
        expansion=4,
        head="snake",
        sample_rate=codec.get("output_sample_rate", 24_000),
        frame_samples=math.prod(upsample + rates),
        decoder=required(decoder, "decoder_dim", path),
        rates=rates,
    )


def reference_encoder_config(config: dict[str, Any], folder: Path, codebooks: int) -> ReferenceEncoderConfig:
    """From the codec's config.  Raises CheckpointError for a missing key and for a structure this encoder has not."""
    path = folder / "config.json"
    encoder = required(config, "encoder_config", path)
    fixed = {"num_residual_layers": 1, "use_causal_conv": True, "use_conv_shortcut": False, "audio_channels": 1}
    expect(encoder, fixed, path)
    hidden, heads = required(encoder, "hidden_size", path), required(encoder, "num_attention_heads", path)
    block = BlockConfig(
        hidden=hidden,
        heads=heads,
        kv_heads=encoder.get("num_key_value_heads") or heads,
        head_dim=encoder.get("head_dim") or hidden // heads,
        ffn=required(encoder, "intermediate_size", path),
        eps=encoder.get("norm_eps", 1e-5),
    )
    return ReferenceEncoderConfig(
        codebooks=codebooks,
        codes=required(encoder, "codebook_size", path),
        code_dim=required(encoder, "codebook_dim", path),
        filters=required(encoder, "num_filters", path),
        strides=tuple(reversed(required(encoder, "upsampling_ratios", path))),
        kernels=tuple(required(encoder, f"{name}kernel_size", path) for name in ("", "residual_", "last_")),
        compress=required(encoder, "compress", path),
        block=block,
        layers=required(encoder, "num_hidden_layers", path),
        rope=RopeConfig(float((encoder.get("rope_parameters") or encoder).get("rope_theta", 1e4))),
        sample_rate=config.get("input_sample_rate", 24_000),
    )


def concat(pieces: list[Tensor]) -> Tensor:
    """Matrices one below the other."""
    return torch.cat(pieces)


def codebook_means(pieces: list[Tensor]) -> Tensor:
    """Codebooks from the sums of the vectors that fell into each entry, and their numbers, by turns."""
    pairs = zip(pieces[::2], pieces[1::2], strict=True)
    return torch.stack([total / usage.clamp(min=1e-5)[:, None] for total, usage in pairs])


def linear_sources(ours: str, theirs: str, inputs: int, outputs: int) -> Iterator[Source]:
    """A matrix and its bias."""
    yield Source(f"{ours}.weight", ((f"{theirs}.weight", (outputs, inputs)),))
    yield Source(f"{ours}.bias", ((f"{theirs}.bias", (outputs,)),))


def conv_sources(ours: str, theirs: str, inputs: int, outputs: int, kernel: int) -> Iterator[Source]:
    """A published convolution (outputs, inputs, kernel) as a matrix over taps."""
    yield Source(
        f"{ours}.weight",
        ((f"{theirs}.weight", (outputs, inputs, kernel)),),
        lambda pieces: pieces[0].permute(0, 2, 1).reshape(outputs, kernel * inputs),
    )
    yield Source(f"{ours}.bias", ((f"{theirs}.bias", (outputs,)),))


def upsample_sources(
    ours: str, theirs: str, inputs: int, outputs: int, stride: int, *, overlap: bool
) -> Iterator[Source]:
    """A published transposed convolution (inputs, outputs, kernel): tap j of the current step makes phase j, tap
    stride + j is what the previous step adds to it."""
    kernel = 2 * stride if overlap else stride

    def join(pieces: list[Tensor]) -> Tensor:
        taps = pieces[0].permute(2, 1, 0)
        both = torch.cat((taps[stride:], taps[:stride]), -1) if overlap else taps
        return both.reshape(stride * outputs, -1)

    yield Source(f"{ours}.weight", ((f"{theirs}.weight", (inputs, outputs, kernel)),), join)
    yield Source(f"{ours}.bias", ((f"{theirs}.bias", (outputs,)),))


def _snake(ours: str, theirs: str, channels: int) -> Iterator[Source]:
    for name in ("alpha", "beta"):
        yield Source(f"{ours}.{name}", ((f"{theirs}.{name}", (channels,)),))


def gated_layer_sources(ours: str, theirs: str, c: BlockConfig) -> Iterator[Source]:
    """One layer's attention and gated MLP; its norms have other names in each model."""
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    shapes = {"q_proj": (q, c.hidden), "k_proj": (kv, c.hidden), "v_proj": (kv, c.hidden)}
    pieces = tuple((f"{theirs}.self_attn.{name}.weight", shape) for name, shape in shapes.items())
    yield Source(f"{ours}.attention.qkv.weight", pieces, concat)
    yield Source(f"{ours}.attention.out.weight", ((f"{theirs}.self_attn.o_proj.weight", (c.hidden, q)),))
    if c.qk_norm:
        yield Source(f"{ours}.attention.q_norm", ((f"{theirs}.self_attn.q_norm.weight", (c.head_dim,)),))
        yield Source(f"{ours}.attention.k_norm", ((f"{theirs}.self_attn.k_norm.weight", (c.head_dim,)),))
    gate_up = tuple((f"{theirs}.mlp.{name}.weight", (c.ffn, c.hidden)) for name in ("gate_proj", "up_proj"))
    yield Source(f"{ours}.mlp.gate_up.weight", gate_up, concat)
    yield Source(f"{ours}.mlp.down.weight", ((f"{theirs}.mlp.down_proj.weight", (c.hidden, c.ffn)),))


def block_sources(ours: str, theirs: str, c: BlockConfig, layers: int) -> Iterator[Source]:
    """Pre-norm layers and the norm after them."""
    for n in range(layers):
        yield from gated_layer_sources(f"{ours}.layers.{n}", f"{theirs}.layers.{n}", c)
        for norm, name in (("attention_norm", "input_layernorm"), ("mlp_norm", "post_attention_layernorm")):
            yield Source(f"{ours}.layers.{n}.{norm}.weight", ((f"{theirs}.layers.{n}.{name}.weight", (c.hidden,)),))
    yield Source(f"{ours}.norm.weight", ((f"{theirs}.norm.weight", (c.hidden,)),))


def mimi_layer_sources(ours: str, theirs: str, c: BlockConfig) -> Iterator[Source]:
    """One of Mimi's transformer layers: LayerNorms, and an MLP without a gate."""
    hidden, inside, kv = c.hidden, c.heads * c.head_dim, c.kv_heads * c.head_dim
    shapes = {"q_proj": (inside, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden)}
    pieces = tuple((f"{theirs}.self_attn.{name}.weight", shape) for name, shape in shapes.items())
    yield Source(f"{ours}.attention.qkv.weight", pieces, concat)
    yield Source(f"{ours}.attention.out.weight", ((f"{theirs}.self_attn.o_proj.weight", (hidden, inside)),))
    yield Source(f"{ours}.up.weight", ((f"{theirs}.mlp.fc1.weight", (c.ffn, hidden)),))
    yield Source(f"{ours}.down.weight", ((f"{theirs}.mlp.fc2.weight", (hidden, c.ffn)),))
    for norm, name in (("attention_norm", "input_layernorm"), ("mlp_norm", "post_attention_layernorm")):
        for part in ("weight", "bias"):
            yield Source(f"{ours}.{norm}.{part}", ((f"{theirs}.{name}.{part}", (hidden,)),))
    for scale, name in (("attention_scale", "self_attn_layer_scale"), ("mlp_scale", "mlp_layer_scale")):
        yield Source(f"{ours}.{scale}", ((f"{theirs}.{name}.scale", (hidden,)),))


def codec_sources(c: CodecConfig | MimiConfig) -> Iterator[Source]:
    """The decoder of the codec's own checkpoint, as `published_codec` describes it."""
    assert isinstance(c, CodecConfig)
    books = [("rvq_first", 0)] + [("rvq_rest", n) for n in range(c.codebooks - 1)]
    stored: list[tuple[str, tuple[int, ...]]] = []
    for group, n in books:
        book = f"decoder.quantizer.{group}.vq.layers.{n}._codebook"
        stored += [(f"{book}.embedding_sum", (c.codes, c.code_dim)), (f"{book}.cluster_usage", (c.codes,))]

    yield Source("codec.codebooks", tuple(stored), codebook_means)
    for ours, group in (("mix_first", "rvq_first"), ("mix_rest", "rvq_rest")):
        name = f"decoder.quantizer.{group}.output_proj.weight"
        yield Source(f"codec.{ours}.weight", ((name, (c.mixed, c.code_dim, 1)),), lambda pieces: pieces[0].squeeze(-1))
    yield from conv_sources("codec.before", "decoder.pre_conv.conv", c.mixed, c.latent, 3)
    hidden = c.block.hidden
    yield from linear_sources("codec.enter", "decoder.pre_transformer.input_proj", c.latent, hidden)
    yield from linear_sources("codec.leave", "decoder.pre_transformer.output_proj", hidden, c.latent)
    yield from block_sources("codec", "decoder.pre_transformer", c.block, c.layers)
    for n in range(c.layers):
        for ours, theirs in (("attention_scale", "self_attn_layer_scale"), ("mlp_scale", "mlp_layer_scale")):
            name = f"decoder.pre_transformer.layers.{n}.{theirs}.scale"
            yield Source(f"codec.layers.{n}.{ours}", ((name, (hidden,)),))
    for n, factor in enumerate(c.upsample):
        theirs = f"decoder.upsample.{n}"
        yield from upsample_sources(
            f"codec.upsamplers.{n}", f"{theirs}.0.conv", c.latent, c.latent, factor, overlap=False
        )
        ours = f"codec.refiners.{n}"
        yield Source(
            f"{ours}.depthwise.weight",
            ((f"{theirs}.1.dwconv.conv.weight", (c.latent, 1, 7)),),
            lambda pieces: pieces[0].squeeze(1).t().contiguous(),
        )
        yield Source(f"{ours}.depthwise.bias", ((f"{theirs}.1.dwconv.conv.bias", (c.latent,)),))
        yield Source(f"{ours}.norm.weight", ((f"{theirs}.1.norm.weight", (c.latent,)),))
        yield Source(f"{ours}.norm.bias", ((f"{theirs}.1.norm.bias", (c.latent,)),))
        yield from linear_sources(f"{ours}.expand", f"{theirs}.1.pwconv1", c.latent, c.latent * c.expansion)
        yield from linear_sources(f"{ours}.shrink", f"{theirs}.1.pwconv2", c.latent * c.expansion, c.latent)
        yield Source(f"{ours}.scale", ((f"{theirs}.1.gamma", (c.latent,)),))
    yield from conv_sources("codec.snake_head.first", "decoder.decoder.0.conv", c.latent, c.decoder, SNAKE_KERNEL)
    width = c.decoder
    for n, rate in enumerate(c.rates):
        ours, theirs = f"codec.snake_head.stages.{n}", f"decoder.decoder.{n + 1}.block"
        yield from _snake(f"{ours}.snake", f"{theirs}.0", width)
        yield from upsample_sources(f"{ours}.upsample", f"{theirs}.1.conv", width, width // 2, rate, overlap=True)
        width //= 2
        for unit in range(3):
            yield from _snake(f"{ours}.units.{unit}.first_snake", f"{theirs}.{unit + 2}.act1", width)
            yield from _snake(f"{ours}.units.{unit}.second_snake", f"{theirs}.{unit + 2}.act2", width)
            yield from conv_sources(
                f"{ours}.units.{unit}.first", f"{theirs}.{unit + 2}.conv1.conv", width, width, SNAKE_KERNEL
            )
            yield from conv_sources(f"{ours}.units.{unit}.second", f"{theirs}.{unit + 2}.conv2.conv", width, width, 1)
    last = len(c.rates) + 1
    yield from _snake("codec.snake_head.snake", f"decoder.decoder.{last}", width)
    yield from conv_sources("codec.snake_head.last", f"decoder.decoder.{last + 1}.conv", width, 1, SNAKE_KERNEL)


def encoder_sources(c: ReferenceEncoderConfig, seanet: str, prefix: str) -> Iterator[Source]:
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
        yield from mimi_layer_sources(f"layers.{n}", f"{prefix}encoder_transformer.layers.{n}", c.block)
    yield Source("halve.weight", ((f"{prefix}downsample.conv.weight", (hidden, hidden, 4)),))
    stored: list[tuple[str, tuple[int, ...]]] = []
    for kind, books in (("semantic", 1), ("acoustic", c.codebooks - 1)):
        quantizer = f"{prefix}quantizer.{kind}_residual_vector_quantizer"
        name = f"{quantizer}.input_proj.weight"
        yield Source(f"to_{kind}.weight", ((name, (c.code_dim, hidden, 1)),), lambda pieces: pieces[0].squeeze(-1))
        for n in range(books):
            book = f"{quantizer}.layers.{n}.codebook"
            stored += [(f"{book}.embed_sum", (c.codes, c.code_dim)), (f"{book}.cluster_usage", (c.codes,))]
    yield Source("codebooks", tuple(stored), codebook_means)


def load_reference_encoder(folder: Path, config: dict[str, Any], codebooks: int) -> ReferenceEncoder:
    """The encoder of a published codec, of which `codebooks` are read.  Raises CheckpointError.

    config: the content of the codec folder's config.json.
    """
    ours = reference_encoder_config(config, folder, codebooks)
    return read_encoder(ours, Weights(folder), list(encoder_sources(ours, "encoder.encoder", "encoder.")))


def read_encoder(config: ReferenceEncoderConfig, weights: Weights, sources: list[Source]) -> ReferenceEncoder:
    """In float32, on the CPU.  Raises CheckpointError."""
    with torch.device("meta"):
        encoder = ReferenceEncoder(config)
    state = read([(weights, sources)], torch.device("cpu"), widened=[source.ours for source in sources])
    encoder.load_state_dict(state, assign=True)
    return encoder.eval()
