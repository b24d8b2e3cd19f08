"""The sizes a model comes in.

`breeze-tts-2` is read from a checkpoint's own config (`checkpoint`); here stand those that are ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from breeze_rtc.models.attention import BlockConfig, RopeConfig
from breeze_rtc.models.backbone import BackboneConfig
from breeze_rtc.models.codec import CodecConfig
from breeze_rtc.models.depth import DepthConfig
from breeze_rtc.models.pointer import PointerConfig
from breeze_rtc.models.text_encoder import TextEncoderConfig


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The five parts, and how text reaches the backbone."""

    name: str
    feed: Literal["prefix", "per_frame"]
    text: TextEncoderConfig
    backbone: BackboneConfig
    depth: DepthConfig
    codec: CodecConfig
    pointer: PointerConfig | None = None
    """per_frame only."""
    end_class: int | None = None
    """Class of the codebook-0 head that ends speech; None where the pointer ends it."""
    reserved: tuple[int, ...] = ()
    """Ids of every codebook that are never spoken."""


PLAIN = RopeConfig(theta=1e4)


def nano(*, vocab: int = 256) -> ModelConfig:
    """Our own voice: 25 frames/s, 8 codebooks of 512, text fed by a pointer; about 9 M parameters.

    vocab: symbols of the text front end.
    """
    return ModelConfig(
        name="nano",
        feed="per_frame",
        text=TextEncoderConfig(
            vocab=vocab,
            block=BlockConfig(hidden=192, heads=4, kv_heads=4, head_dim=48, ffn=512, qk_norm=True),
            full_attention=(False, False, True, True),
            window=9,
            window_rope=PLAIN,
            full_rope=PLAIN,
            output=192,
        ),
        backbone=BackboneConfig(
            block=BlockConfig(hidden=256, heads=4, kv_heads=2, head_dim=64, ffn=640, qk_norm=True),
            layers=4,
            rope=PLAIN,
            classes=512,
            window=96,
        ),
        depth=DepthConfig(
            codebooks=8,
            vocab=512,
            embedding=256,
            block=BlockConfig(hidden=128, heads=4, kv_heads=2, head_dim=32, ffn=384),
            layers=2,
            rope=PLAIN,
        ),
        codec=CodecConfig(
            codebooks=8,
            codes=512,
            code_dim=64,
            mixed=192,
            latent=192,
            block=BlockConfig(hidden=192, heads=4, kv_heads=4, head_dim=48, ffn=512),
            layers=3,
            rope=PLAIN,
            window=32,
            upsample=(2, 2),
            expansion=3,
            head="source_filter",
            sample_rate=24_000,
            frame_samples=960,
            layer_scale=0.1,
            features=122,
        ),
        pointer=PointerConfig(text=192, hidden=256),
    )
