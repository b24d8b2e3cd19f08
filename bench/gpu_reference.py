"""The published model's public classes at any size with random weights: what one request takes, run as published.

Not a benchmark itself; `gpu.py` calls it.  transformers has the text encoder, the backbone and the depth decoder (its
CSM); they are joined as the published eager code joins them: one request, a cache that grows, a depth loop of forward
calls, a sampled code read back before the next.  The codec is not in transformers and not counted.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch

from breeze_rtc.clock import MS, MonotonicClock
from breeze_rtc.models.presets import ModelConfig

PROMPT = 24
WARM_UP = 2


def reference_times(config: ModelConfig, device: torch.device, frames: int) -> dict[str, Any]:
    """first_ms: prompt to codes of the first frame.  frame_ms: mean of the next frames.  said: the sentence about it;
    nothing else where transformers is not installed."""
    try:
        import transformers
        from transformers import (
            CsmDepthDecoderConfig,
            CsmDepthDecoderForCausalLM,
            DynamicCache,
            Qwen3Config,
            Qwen3Model,
        )
    except ImportError as error:
        return {"said": f"not measured: {error}; pip install transformers"}
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    b, d = config.backbone, config.depth
    with torch.device(device):
        backbone = Qwen3Model(
            Qwen3Config(
                vocab_size=8,
                hidden_size=b.block.hidden,
                intermediate_size=b.block.ffn,
                num_hidden_layers=b.layers,
                num_attention_heads=b.block.heads,
                num_key_value_heads=b.block.kv_heads,
                head_dim=b.block.head_dim,
            )
        ).to(dtype)
        depth = CsmDepthDecoderForCausalLM(
            CsmDepthDecoderConfig(
                num_codebooks=d.codebooks,
                vocab_size=d.vocab,
                backbone_hidden_size=b.block.hidden,
                hidden_size=d.block.hidden,
                intermediate_size=d.block.ffn,
                num_hidden_layers=d.layers,
                num_attention_heads=d.block.heads,
                num_key_value_heads=d.block.kv_heads,
                head_dim=d.block.head_dim,
            )
        ).to(dtype)
        head = torch.nn.Linear(b.block.hidden, b.classes, bias=False)
        encoder = _text_encoder(config)
        projection = torch.nn.Linear(config.text.block.hidden, b.block.hidden, bias=False).to(dtype)
    if encoder is not None:
        encoder = encoder.to(device, dtype)
    # What transformers 5 calls `cache` was `past_key_values`, and positions were said twice.
    keyword = "cache" if "cache" in signature(depth.forward).parameters else "past_key_values"
    says_places = "cache_position" in signature(depth.forward).parameters
    offsets = torch.arange(d.codebooks, device=device) * d.vocab
    table = depth.model.embed_tokens
    clock = MonotonicClock()

    def frame(hidden: torch.Tensor) -> torch.Tensor:
        """Codes of a frame from the backbone's hidden state (1, hidden)."""
        codes = [int(_drawn(head(hidden.float()))[0])]
        past = DynamicCache()
        ids = torch.tensor([[0, codes[0]]], device=device)
        for position in range(1, d.codebooks):
            more: dict[str, Any] = {"backbone_last_hidden_state": hidden} if position == 1 else {}
            if says_places:
                more["cache_position"] = torch.arange(position + 1, device=device)[-ids.shape[1] :]
            out = depth(input_ids=ids, use_cache=True, logits_to_keep=1, **{keyword: past}, **more)
            codes.append(int(_drawn(out.logits[:, -1])[0]))
            ids = torch.tensor([[codes[-1]]], device=device)
        return torch.tensor(codes, device=device)

    def request(count: int) -> list[int]:
        """Nanoseconds to the end of each frame."""
        ends = []
        began_ns = clock.now()
        ids = torch.arange(PROMPT, device=device)[None]
        if encoder is not None:
            text = encoder(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
        else:
            text = torch.randn(1, PROMPT, config.text.block.hidden, device=device, dtype=dtype)
        past = DynamicCache()
        x = projection(text)
        for _ in range(count):
            hidden = backbone(inputs_embeds=x, use_cache=True, **{keyword: past}).last_hidden_state[:, -1]
            codes = frame(hidden)
            ends.append(clock.now() - began_ns)
            x = table(codes + offsets).sum(0)[None, None]
        return ends

    with torch.inference_mode():
        request(WARM_UP)
        ends = request(frames + 1)
    first_ms, frame_ms = ends[0] / MS, (ends[-1] - ends[0]) / frames / MS
    without = "" if encoder is not None else ", text encoder left out (transformers 5 has it)"
    factor = frame_ms * config.codec.sample_rate / config.codec.frame_samples / 1000
    said = (
        f"transformers {transformers.__version__}: first frame's codes after {first_ms:.1f} ms, a frame "
        f"{frame_ms:.1f} ms (real-time factor {factor:.2f}), without the codec{without}"
    )
    return {"first_ms": first_ms, "frame_ms": frame_ms, "version": transformers.__version__, "said": said}


def _drawn(logits: torch.Tensor) -> torch.Tensor:
    """As published: temperature, top-k, one multinomial; (1, V) -> (1,)."""
    scores = logits.float() / 0.9
    least = scores.topk(min(50, scores.shape[-1])).values[..., -1:]
    return torch.multinomial(scores.masked_fill(scores < least, float("-inf")).softmax(-1), 1)[:, 0]


def _text_encoder(config: ModelConfig) -> Any:
    """None where transformers is older than the encoder."""
    try:
        from transformers.models.t5gemma2.configuration_t5gemma2 import T5Gemma2TextConfig
        from transformers.models.t5gemma2.modeling_t5gemma2 import T5Gemma2TextEncoder
    except ImportError:
        return None
    block = config.text.block
    made = T5Gemma2TextConfig(
        vocab_size=config.text.vocab,
        hidden_size=block.hidden,
        intermediate_size=block.ffn,
        num_hidden_layers=len(config.text.full_attention),
        num_attention_heads=block.heads,
        num_key_value_heads=block.kv_heads,
        head_dim=block.head_dim,
        query_pre_attn_scalar=block.head_dim,
        sliding_window=config.text.window,
        layer_types=["full_attention" if full else "sliding_attention" for full in config.text.full_attention],
        dropout_rate=0.0,
        attention_dropout=0.0,
    )
    return T5Gemma2TextEncoder(made, eoi_token_index=config.text.own_vector_id or config.text.vocab - 1)
