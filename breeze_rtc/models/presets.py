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
from breeze_rtc.models.mimi import MimiConfig
from breeze_rtc.models.pointer import PointerConfig
from breeze_rtc.models.prompt_table import PromptTableConfig
from breeze_rtc.models.reference_encoder import ReferenceEncoderConfig
from breeze_rtc.models.text_encoder import TextEncoderConfig


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The five parts, and how text reaches the backbone."""

    name: str
    feed: Literal["prefix", "per_frame"]
    text: TextEncoderConfig | PromptTableConfig
    backbone: BackboneConfig
    depth: DepthConfig
    codec: CodecConfig | MimiConfig
    pointer: PointerConfig | None = None
    """per_frame only."""
    end_class: int | None = None
    """Class of the codebook-0 head that ends speech; None where there is none."""
    ends_with_zeros: bool = False
    """Speech ends with a frame whose codes are all zero, which is not heard.  Its last code may be any: the loop that
    transformers has for CSM does not look at it."""
    reserved: tuple[int, int] | None = None
    """First and last of the ids that no codebook ever speaks; the end class may be one of them."""
    min_frames: int = 0
    """Speech does not end before it has so many frames."""
    max_positions: int | None = None
    """Positions of the backbone, prompt included, after which speech stops; None: no limit."""
    frames_per_token: float = 2.0
    """prefix only: about how many frames a text token takes; places text marks before the speech has ended."""


PLAIN = RopeConfig(theta=1e4)
_CSM_ROPE = RopeConfig(theta=5e5, factor=32, low=0.001953125, high=0.0078125, original_length=16)


def nano(*, vocab: int = 256) -> ModelConfig:
    """Our own voice: 25 frames/s, 8 codebooks of 512, text fed by a pointer; 7.5 M parameters.

    vocab: symbols of the text front end.
    """
    return ModelConfig(
        name="nano",
        feed="per_frame",
        text=TextEncoderConfig(
            vocab=vocab,
            block=BlockConfig(hidden=160, heads=4, kv_heads=4, head_dim=40, ffn=448, qk_norm=True),
            full_attention=(False, False, True, True),
            window=9,
            window_rope=PLAIN,
            full_rope=PLAIN,
            output=160,
        ),
        backbone=BackboneConfig(
            block=BlockConfig(hidden=256, heads=4, kv_heads=2, head_dim=64, ffn=576, qk_norm=True),
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
            mixed=160,
            latent=160,
            block=BlockConfig(hidden=160, heads=4, kv_heads=4, head_dim=40, ffn=384),
            layers=2,
            rope=PLAIN,
            window=32,
            upsample=(2, 2),
            expansion=3,
            head="source_filter",
            sample_rate=24_000,
            frame_samples=960,
            layer_scale=0.1,
            features=162,
        ),
        pointer=PointerConfig(text=160, hidden=256),
    )


def breeze_tts_2() -> ModelConfig:
    """The published sizes, as `checkpoint.breeze_config` reads them from the published config: 2.9 B parameters."""
    return ModelConfig(
        name="breeze-tts-2",
        feed="prefix",
        text=TextEncoderConfig(
            vocab=262_158,
            block=BlockConfig(hidden=1152, heads=4, kv_heads=1, head_dim=256, ffn=6912, qk_norm=True),
            full_attention=tuple((layer + 1) % 6 == 0 for layer in range(26)),
            window=512,
            window_rope=PLAIN,
            full_rope=RopeConfig(theta=1e6, factor=8),
            output=2048,
            own_vector_id=256_000,
        ),
        backbone=BackboneConfig(
            block=BlockConfig(hidden=2048, heads=16, kv_heads=8, head_dim=128, ffn=6144, qk_norm=True),
            layers=28,
            rope=RopeConfig(theta=1e6),
            classes=2052,
        ),
        depth=DepthConfig(
            codebooks=16,
            vocab=2051,
            embedding=2048,
            block=BlockConfig(hidden=1024, heads=8, kv_heads=2, head_dim=128, ffn=8192, eps=1e-5),
            layers=12,
            rope=_CSM_ROPE,
        ),
        codec=CodecConfig(
            codebooks=16,
            codes=2048,
            code_dim=256,
            mixed=512,
            latent=1024,
            block=BlockConfig(hidden=512, heads=16, kv_heads=16, head_dim=64, ffn=1024, eps=1e-5),
            layers=8,
            rope=PLAIN,
            window=72,
            upsample=(2, 2),
            expansion=4,
            head="snake",
            sample_rate=24_000,
            frame_samples=1920,
            decoder=1536,
            rates=(8, 5, 4, 3),
        ),
        end_class=2051,
        reserved=(2048, 2050),
        max_positions=2048,
    )


def mid() -> ModelConfig:
    """Breeze's structure at a size that a CPU can measure: every ratio of work roughly kept, 83 M parameters."""
    return ModelConfig(
        name="mid",
        feed="prefix",
        text=TextEncoderConfig(
            vocab=4096,
            block=BlockConfig(hidden=256, heads=4, kv_heads=1, head_dim=64, ffn=1024, qk_norm=True),
            full_attention=tuple((layer + 1) % 6 == 0 for layer in range(6)),
            window=512,
            window_rope=PLAIN,
            full_rope=RopeConfig(theta=1e6, factor=8),
            output=768,
        ),
        backbone=BackboneConfig(
            block=BlockConfig(hidden=768, heads=8, kv_heads=4, head_dim=96, ffn=2048, qk_norm=True),
            layers=8,
            rope=RopeConfig(theta=1e6),
            classes=516,
        ),
        depth=DepthConfig(
            codebooks=8,
            vocab=515,
            embedding=768,
            block=BlockConfig(hidden=384, heads=4, kv_heads=2, head_dim=96, ffn=2048, eps=1e-5),
            layers=4,
            rope=_CSM_ROPE,
        ),
        codec=CodecConfig(
            codebooks=8,
            codes=512,
            code_dim=64,
            mixed=128,
            latent=256,
            block=BlockConfig(hidden=128, heads=4, kv_heads=4, head_dim=32, ffn=256, eps=1e-5),
            layers=4,
            rope=PLAIN,
            window=72,
            upsample=(2, 2),
            expansion=4,
            head="snake",
            sample_rate=24_000,
            frame_samples=1920,
            decoder=256,
            rates=(8, 5, 4, 3),
        ),
        end_class=515,
        reserved=(512, 514),
        max_positions=2048,
    )


def tiny() -> ModelConfig:
    """Breeze's structure at a size for tests: prefix feeding, an end class, reserved ids, the snake head."""
    block = BlockConfig(hidden=32, heads=4, kv_heads=2, head_dim=16, ffn=64)
    return ModelConfig(
        name="tiny",
        feed="prefix",
        text=TextEncoderConfig(
            vocab=256,
            block=BlockConfig(hidden=32, heads=2, kv_heads=1, head_dim=16, ffn=64, qk_norm=True),
            full_attention=(False, True),
            window=8,
            window_rope=PLAIN,
            full_rope=RopeConfig(theta=1e6, factor=8),
            output=32,
        ),
        backbone=BackboneConfig(
            block=BlockConfig(hidden=32, heads=4, kv_heads=2, head_dim=16, ffn=64, qk_norm=True),
            layers=2,
            rope=RopeConfig(theta=1e6),
            classes=36,
        ),
        depth=DepthConfig(
            codebooks=4,
            vocab=35,
            embedding=32,
            block=block,
            layers=2,
            rope=_CSM_ROPE,
        ),
        codec=CodecConfig(
            codebooks=4,
            codes=32,
            code_dim=16,
            mixed=32,
            latent=32,
            block=BlockConfig(hidden=32, heads=2, kv_heads=2, head_dim=16, ffn=64, eps=1e-5),
            layers=2,
            rope=PLAIN,
            window=6,
            upsample=(2, 2),
            expansion=4,
            head="snake",
            sample_rate=24_000,
            frame_samples=1920,
            layer_scale=0.5,
            decoder=256,
            rates=(8, 5, 4, 3),
        ),
        end_class=35,
        reserved=(32, 34),
        max_positions=2048,
    )


def tiny_encoder(config: ModelConfig) -> ReferenceEncoderConfig:
    """What makes codec frames of a recording for a model as `tiny` is."""
    return ReferenceEncoderConfig(
        codebooks=config.codec.codebooks,
        codes=config.codec.codes,
        code_dim=8,
        filters=4,
        strides=(4, 5, 6, 8),
        kernels=(7, 3, 3),
        compress=2,
        block=BlockConfig(hidden=32, heads=2, kv_heads=2, head_dim=16, ffn=64, eps=1e-5),
        layers=1,
        rope=PLAIN,
        sample_rate=config.codec.sample_rate,
    )


def tiny_pointer() -> ModelConfig:
    """Nano's structure at a size for tests: per-frame feeding, a window in the backbone, the source-filter head."""
    base = tiny()
    return ModelConfig(
        name="tiny-pointer",
        feed="per_frame",
        text=base.text,
        backbone=BackboneConfig(block=base.backbone.block, layers=2, rope=PLAIN, classes=32, window=16),
        depth=DepthConfig(codebooks=4, vocab=32, embedding=32, block=base.depth.block, layers=1, rope=PLAIN),
        codec=CodecConfig(
            codebooks=4,
            codes=32,
            code_dim=16,
            mixed=32,
            latent=32,
            block=base.codec.block,
            layers=1,
            rope=PLAIN,
            window=6,
            upsample=(2, 2),
            expansion=2,
            head="source_filter",
            sample_rate=24_000,
            frame_samples=960,
            features=162,
            layer_scale=0.5,
        ),
        pointer=PointerConfig(text=32, hidden=32),
    )
