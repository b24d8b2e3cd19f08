"""A tiny Breeze checkpoint under the published names, and the public classes that compute the same: the oracle.

transformers has the text encoder, the backbone and the depth decoder; qwen-tts has the codec decoder.  They are joined
here by hand, as the published model joins them.  Importing transformers takes seconds, so it happens once, on first
use.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

CODEBOOKS, VOCAB, CODES = 4, 19, 16
HIDDEN = 32
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 0.001953125,
    "high_freq_factor": 0.0078125,
    "original_max_position_embeddings": 16,
    "rope_theta": 500_000.0,
}
TEXT = {
    "model_type": "t5gemma2_text",
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 8,
    "rms_norm_eps": 1e-6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
    },
    "eoi_token_index": 50,
}
BACKBONE = {
    "model_type": "qwen3",
    "vocab_size": 8,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "max_position_embeddings": 40_960,
}
DEPTH = {
    "num_codebooks": CODEBOOKS,
    "vocab_size": VOCAB,
    "backbone_hidden_size": HIDDEN,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 33,
    "rope_theta": 500_000.0,
    "rope_scaling": {key: value for key, value in LLAMA3.items() if key != "rope_theta"},
}
CODEC = {
    "latent_dim": 24,
    "codebook_dim": 16,
    "codebook_size": CODES,
    "decoder_dim": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "head_dim": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "num_quantizers": CODEBOOKS,
    "sliding_window": 6,
    "upsample_rates": [4, 3, 2],
    "upsampling_ratios": [2, 2],
    "rope_theta": 10_000.0,
    "rms_norm_eps": 1e-5,
    "layer_scale_initial_scale": 0.3,
}
ENCODER = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
    "num_filters": 4,
    "upsampling_ratios": [4, 4, 3],
    "kernel_size": 7,
    "last_kernel_size": 3,
    "residual_kernel_size": 3,
    "compress": 2,
    "num_residual_layers": 1,
    "codebook_dim": 8,
    "codebook_size": CODES,
    # More than are read.
    "num_quantizers": CODEBOOKS + 2,
    "vector_quantization_hidden_dimension": 8,
    "sliding_window": 1_000,
    "layer_scale_initial_scale": 0.3,
    "upsample_groups": 16,
}
CONFIG = {
    "model_type": "breeze",
    "vocab_size": VOCAB,
    "num_codebooks": CODEBOOKS,
    "audio_embed_size": HIDDEN,
    "hidden_size": HIDDEN,
    "text_encoder_config": TEXT,
    "backbone_config": BACKBONE,
    "depth_decoder_config": DEPTH,
    # Keys of the model the published code grew from.  Whoever reads them computes something else.
    "rope_theta": 7.0,
    "rope_scaling": {"rope_type": "linear", "factor": 3.0},
    "rms_norm_eps": 0.5,
    "max_position_embeddings": 11,
}


@contextmanager
def _without(*names: str) -> Iterator[None]:
    """These modules cannot be imported for a while: transformers looks for them, needs none of them here, and a build
    of torchaudio for another torch breaks it."""
    kept = {name: sys.modules.get(name) for name in names}
    sys.modules.update(dict.fromkeys(names))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name, module in kept.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


@cache
def transformers() -> Any:
    with _without("torchaudio", "torchvision", "librosa"):
        import transformers as library
        from transformers.models.t5gemma2 import modeling_t5gemma2

        for name in ("Qwen3Model", "CsmDepthDecoderForCausalLM", "MimiModel", "T5Gemma2TextConfig"):
            getattr(library, name)  # the package imports its parts when they are first named
        library.T5Gemma2TextEncoder = modeling_t5gemma2.T5Gemma2TextEncoder
    return library


@cache
def codec_module() -> Any:
    """The file of qwen-tts that has the codec, which was written for transformers 4, made to run with 5.

    Importing the package itself would need its audio libraries, so empty packages stand in for what surrounds the file.
    """
    transformers()
    from transformers import masking_utils, modeling_rope_utils
    from transformers.utils import generic

    root = importlib.util.find_spec("qwen_tts")
    assert root is not None
    assert root.submodule_search_locations is not None
    for name in ("qwen_tts", "qwen_tts.core", "qwen_tts.core.tokenizer_12hz"):
        package = types.ModuleType(name)
        package.__path__ = [str(Path(root.submodule_search_locations[0], *name.split(".")[1:]))]
        sys.modules[name] = package

    def default_rope(config: Any, device: Any = None, **_: Any) -> tuple[Tensor, float]:
        # Those of this version's own classes come here, too, once it is there.
        theta = getattr(config, "rope_theta", None) or config.rope_parameters["rope_theta"]
        return theta ** (-torch.arange(0, config.head_dim, 2, device=device).float() / config.head_dim), 1.0

    def renamed(function: Any) -> Any:
        def mask(*, config: Any, input_embeds: Tensor, attention_mask: Any, position_ids: Tensor, **_: Any) -> Any:
            return function(config, input_embeds, attention_mask, None, position_ids=position_ids)

        return mask

    modeling_rope_utils.ROPE_INIT_FUNCTIONS["default"] = default_rope
    kept = generic.check_model_inputs
    generic.check_model_inputs = lambda: lambda forward: forward  # type: ignore[assignment]
    try:
        module = importlib.import_module("qwen_tts.core.tokenizer_12hz.modeling_qwen3_tts_tokenizer_v2")
    finally:
        generic.check_model_inputs = kept
    module.create_causal_mask = renamed(masking_utils.create_causal_mask)  # type: ignore[attr-defined]
    module.create_sliding_window_causal_mask = renamed(masking_utils.create_sliding_window_causal_mask)  # type: ignore[attr-defined]
    return module


def _randomise(module: torch.nn.Module, generator: torch.Generator) -> None:
    """Weights that leave no term of a formula at zero or one."""
    with torch.no_grad():
        for parameter in module.parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3
            noise = torch.randn(parameter.shape, generator=generator) * scale
            parameter.copy_(noise if parameter.dim() > 1 else parameter + noise)


def random_codec(generator: torch.Generator) -> Any:
    """The public codec decoder with random weights; its codebooks are filled by `fill_codebooks`."""
    module = codec_module()
    codec = module.Qwen3TTSTokenizerV2Decoder(
        module.Qwen3TTSTokenizerV2DecoderConfig(**CODEC, attn_implementation="eager")
    ).eval()
    _randomise(codec, generator)
    return codec


def fill_codebooks(codec: Any, generator: torch.Generator) -> None:
    with torch.no_grad():
        for name, buffer in codec.named_buffers():
            if name.endswith("embedding_sum"):
                buffer.normal_(generator=generator)
                buffer[3] *= 1e-5
            elif name.endswith("cluster_usage"):
                # One entry was never used; its vector is divided by the floor.
                buffer.uniform_(0.5, 3.0, generator=generator)
                buffer[3] = 0.0
        # Quiet enough that no sample is clipped: a clipped one would equal any other.
        last = codec.decoder[-1]
        loudest: list[float] = []
        hook = last.register_forward_hook(lambda _part, _in, out: loudest.append(float(out.abs().max())))
        codec(torch.randint(0, CODES, (2, CODEBOOKS, 30), generator=generator))
        hook.remove()
        for parameter in last.parameters():
            parameter.mul_(0.4 / loudest[0])


@torch.no_grad()
def random_encoder(seed: int) -> Any:
    """The public codec encoder with random weights."""
    library = transformers()
    encoder = library.MimiModel(library.MimiConfig(**ENCODER, rope_theta=10_000.0, attn_implementation="eager")).eval()
    generator = torch.Generator().manual_seed(seed)
    _randomise(encoder, generator)
    # Codebooks lie where the vectors of sound lie: elsewhere one entry would be the nearest to all of them.
    latents = encoder.encoder(torch.randn(1, 1, 9_600, generator=generator) * 0.3).latents
    for kind in ("semantic", "acoustic"):
        quantizer = getattr(encoder.quantizer, f"{kind}_residual_vector_quantizer")
        found = quantizer.input_proj(latents)[0].T
        for n, layer in enumerate(quantizer.layers):
            book = layer.codebook
            book.cluster_usage.uniform_(0.5, 3.0, generator=generator)
            noise = torch.randn(book.embed_sum.shape, generator=generator) * found.std(0) * 0.7**n
            book.embed_sum.copy_((noise + (0 if n else found.mean(0))) * book.cluster_usage[:, None])
    return encoder


def save_codec(codec: Any, folder: Path, encoder: Any = None) -> None:
    """Write the codec's folder."""
    folder.mkdir(exist_ok=True)
    config = {"output_sample_rate": 24_000, "decoder_config": CODEC, "encoder_config": ENCODER}
    (folder / "config.json").write_text(json.dumps(config))
    if codec is None:
        return
    tensors = {f"decoder.{name}": tensor.clone() for name, tensor in codec.state_dict().items()}
    # The published names are those of transformers 4.
    for name, tensor in encoder.state_dict().items() if encoder is not None else ():
        if name.startswith("quantizer."):
            tensors[f"encoder.{name}"] = tensor.clone()
        elif name.startswith("encoder."):
            tensors[name.replace("encoder.encoder_seanet.", "encoder.encoder.")] = tensor.clone()
    save_file(tensors, folder / "model.safetensors")


class Reference:
    """The public classes with random weights."""

    def __init__(self, seed: int = 7, *, codec: bool = True) -> None:
        library = transformers()
        generator = torch.Generator().manual_seed(seed)
        # What biases begin with is not overwritten but added to.
        torch.manual_seed(seed)
        text = {key: value for key, value in TEXT.items() if key not in {"model_type", "eoi_token_index"}}
        self.text_config = library.T5Gemma2TextConfig(
            **text, dropout_rate=0.0, attention_dropout=0.0, attn_implementation="eager"
        )
        self.text = library.T5Gemma2TextEncoder(self.text_config, eoi_token_index=50)
        self.projection = torch.nn.Linear(32, HIDDEN, bias=False)
        backbone = {key: value for key, value in BACKBONE.items() if key != "model_type"}
        self.backbone = library.Qwen3Model(library.Qwen3Config(**backbone, attn_implementation="eager"))
        self.head = torch.nn.Linear(HIDDEN, VOCAB + 1, bias=False)
        depth = {**DEPTH, "rope_parameters": LLAMA3}
        del depth["rope_theta"], depth["rope_scaling"]
        self.depth = library.CsmDepthDecoderForCausalLM(
            library.CsmDepthDecoderConfig(**depth, attn_implementation="eager")
        )
        self.encoder = random_encoder(seed)
        parts = [self.text, self.projection, self.backbone, self.head, self.depth]
        for part in parts:
            _randomise(part, generator)
            part.eval()
        self.codec = random_codec(generator) if codec else None
        with torch.no_grad():
            self.text.embed_tokens.eoi_embedding.normal_(generator=generator)
            # Its logit is zero, which is never the largest: nobody's speech ends before it is compared.
            self.head.weight[-1].zero_()
        if self.codec is not None:
            fill_codebooks(self.codec, generator)

    @property
    def table(self) -> Tensor:
        table: Tensor = self.depth.model.embed_tokens.weight
        return table

    def state(self) -> dict[str, Tensor]:
        """The main file's tensors, with the dead ones that the published file has too."""
        state = {f"text_encoder.{name}": tensor for name, tensor in self.text.state_dict().items()}
        state["text_encoder_proj.weight"] = self.projection.weight
        state |= {
            f"backbone_model.{name}": tensor
            for name, tensor in self.backbone.state_dict().items()
            if not name.startswith("embed_tokens")
        }
        state["lm_head.weight"] = self.head.weight
        state |= {f"depth_decoder.{name}": tensor for name, tensor in self.depth.state_dict().items()}
        state["embed_text_tokens.weight"] = torch.zeros(3, 5)
        state["codec_model.decoder.layers.0.conv.weight"] = torch.zeros(2)
        return {name: tensor.detach().clone().contiguous() for name, tensor in state.items()}

    def save(self, folder: Path, *, shards: int = 2, dtype: torch.dtype = torch.float32) -> Path:
        """Write the checkpoint's folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        state = {name: tensor.to(dtype) for name, tensor in self.state().items()}
        if shards == 1:
            save_file(state, folder / "model.safetensors")
        else:
            where = {name: f"model-{n % shards + 1:05}-of-{shards:05}.safetensors" for n, name in enumerate(state)}
            for shard in sorted(set(where.values())):
                save_file({name: tensor for name, tensor in state.items() if where[name] == shard}, folder / shard)
            (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
        save_codec(self.codec, folder / "audio_tokenizer", self.encoder)
        return folder

    # ---- the published model, joined by hand -------------------------------------------------------------------------

    def encode(self, tokens: list[int]) -> Tensor:
        """One text segment -> (n, hidden)."""
        ids = torch.tensor([tokens])
        hidden = self.text(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
        projected: Tensor = self.projection(hidden)[0]
        return projected

    def embed(self, codes: Tensor) -> Tensor:
        """(..., K) -> (..., hidden)."""
        return self.table[codes + torch.arange(CODEBOOKS) * VOCAB].sum(-2)

    def hidden(self, row: Tensor) -> Tensor:
        """Input embeddings (T, hidden) -> hidden state of the last position."""
        out: Tensor = self.backbone(inputs_embeds=row[None]).last_hidden_state[0, -1]
        return out

    def depth_logits(self, hidden: Tensor, codes: list[int]) -> Tensor:
        """Logits of codebook len(codes), from the hidden state and the codes before it."""
        ids = torch.tensor([[0, *codes]])
        logits: Tensor = self.depth(input_ids=ids, backbone_last_hidden_state=hidden[None]).logits[0, -1]
        return logits

    def combined(self, logits: list[Tensor], scale: float, reference_scale: float) -> Tensor:
        """One row's logits out of those of one, two or three rows, reserved ids silenced."""
        out = logits[0].clone()
        if len(logits) == 2:
            out = logits[1] + scale * (logits[0] - logits[1])
        elif len(logits) == 3:
            by_reference = reference_scale * (logits[2] - logits[1])
            out = logits[1] + by_reference + scale * (logits[0] - logits[1])
        out[CODES:VOCAB] = float("-inf")
        return out

    def generate(
        self,
        rows: list[list[Tensor]],
        frames: int,
        scale: float = 1.0,
        penalty: float = 1.1,
        reference_scale: float = 0.0,
    ) -> list[list[int]]:
        """Greedy codes.  rows: the guided row's prompt pieces, and the unguided row's when `scale` is not 1; in dual
        guidance, of the row with the instruction, the plain one, and the row with the reference."""

        contexts = [torch.cat(row) for row in rows]
        made: list[list[int]] = []
        while len(made) < frames:
            hidden = [self.hidden(context) for context in contexts]
            logits = self.combined([self.head(h) for h in hidden], scale, reference_scale)
            for code in {frame[0] for frame in made}:
                logits[code] = logits[code] / penalty if logits[code] > 0 else logits[code] * penalty
            codes = [int(logits.argmax())]
            if codes[0] == VOCAB:
                break
            while len(codes) < CODEBOOKS:
                logits = self.combined([self.depth_logits(h, codes) for h in hidden], scale, reference_scale)
                codes.append(int(logits.argmax()))
            made.append(codes)
            contexts = [torch.cat((context, self.embed(torch.tensor([codes])))) for context in contexts]
        return made
