"""Shared attention parts: rope scaling by its rule, norms in both forms, one query like many."""

from __future__ import annotations

import pytest
import torch

from breeze_rtc.models.attention import (
    Attention,
    BlockConfig,
    RMSNorm,
    Rope,
    RopeConfig,
    band_mask,
    inverse_frequencies,
)


def test_llama3_scaling_at_the_published_values() -> None:
    """Of 64 frequencies those up to 28 stay, those from 35 are divided by 32, and the others lie between."""
    plain = inverse_frequencies(128, RopeConfig(5e5))
    scaled = inverse_frequencies(128, RopeConfig(5e5, factor=32, low=0.001953125, high=0.0078125, original_length=16))
    ratio = plain / scaled
    torch.testing.assert_close(ratio[:29], torch.ones(29, dtype=torch.float64))
    torch.testing.assert_close(ratio[35:], torch.full((29,), 32.0, dtype=torch.float64))
    assert ((ratio[29:35] > 1) & (ratio[29:35] < 32)).all()


def test_rotation_depends_on_the_distance_alone() -> None:
    """Scores of rotated vectors are the same for equal distances, also far from the start."""
    rope = Rope(16, RopeConfig(1e4))
    from breeze_rtc.models.attention import rotate

    q, k = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 16)

    def score(at: int) -> torch.Tensor:
        positions = torch.tensor([[at, at + 5]])
        both = rotate(torch.cat((q, k), 1), rope(positions, torch.float32))
        return (both[0, 0] * both[0, 1]).sum()

    torch.testing.assert_close(score(0), score(5_000), atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(score(0), score(40), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("unit_offset", [False, True])
def test_norm_with_and_without_gradients(unit_offset: bool) -> None:
    """The two ways of computing one norm agree with its formula."""
    norm = RMSNorm(24, 1e-5, unit_offset=unit_offset)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(3, 2, 24)
    weight = norm.weight + 1 if unit_offset else norm.weight
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(norm(x), expected)
    with torch.no_grad():
        torch.testing.assert_close(norm(x), expected)


def test_norm_rounds_before_it_multiplies() -> None:
    """In bfloat16 the normalised value is rounded, then multiplied by the weight, as Llama and Qwen do."""
    norm = RMSNorm(16, 1e-6).bfloat16()
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(5, 16).bfloat16()
    wide = x.float()
    rounded = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).bfloat16()
    assert torch.equal(norm(x), rounded * norm.weight)


def test_band_mask() -> None:
    """A query sees `left` positions before it, itself, and `right` after it."""
    open_ = band_mask(5, 1, 2, torch.zeros(1)) == 0
    expected = [[k - q in {-1, 0, 1, 2} for k in range(5)] for q in range(5)]
    assert open_.tolist() == expected


@torch.no_grad()
def test_grouped_heads_share_keys() -> None:
    """Grouped-query attention equals full attention with each key head repeated for its group."""
    config = BlockConfig(hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=8, qk_norm=True)
    attention = Attention(config)
    rope = Rope(8, RopeConfig(1e4))(torch.arange(6)[None], torch.float32)
    x = torch.randn(2, 6, 32)
    q, k, v = attention.project(x, rope)
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    scores = (q.transpose(1, 2) @ k.transpose(-1, -2)) * 8**-0.5 + band_mask(6, None, 0, x)
    expected = attention.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(2, 6, 32))
    torch.testing.assert_close(attention(x, rope, is_causal=True), expected)
