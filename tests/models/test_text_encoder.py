"""The text encoder, packed: segments of several requests in one call say what each says alone."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from breeze_rtc.models.attention import Ragged
from breeze_rtc.models.speech_model import SpeechModel
from breeze_rtc.models.text_encoder import TextEncoder, rounded
from breeze_rtc.runtime.frame_graphs import PACK_ROWS, PACK_TOKENS, packs


@pytest.fixture(scope="module", params=["tiny", "nano"])
def encoder(request: pytest.FixtureRequest) -> TextEncoder:
    return SpeechModel.load(request.param).text.eval()


def segments_of(lengths: list[int]) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(1, 60) for _ in range(length)] for length in lengths]


@torch.inference_mode()
def packed(encoder: TextEncoder, segments: list[list[int]]) -> list[Tensor]:
    """Shapes rounded up to sixteen, as the executor does it."""
    lengths = list(map(len, segments))
    total, longest = (-(-n // 16) * 16 for n in (sum(lengths), max(lengths)))
    tokens = torch.zeros(total, dtype=torch.int64)
    tokens[: sum(lengths)] = torch.tensor([token for segment in segments for token in segment])
    ragged = Ragged.of(lengths, total, len(lengths), longest)
    vectors = encoder.packed(tokens, torch.tensor(lengths), ragged)
    return list(vectors[: sum(lengths)].split(lengths))


@pytest.mark.parametrize("lengths", [[5, 40, 1, 17], [16, 16], [3] * 8, [90, 2]])
def test_packed_is_alone_bit_for_bit(encoder: TextEncoder, lengths: list[int]) -> None:
    """Whatever stands before and behind a segment, and however long the longest is, its vectors are the same."""
    segments = segments_of(lengths)
    for found, segment in zip(packed(encoder, segments), segments, strict=True):
        assert torch.equal(found, packed(encoder, [segment])[0])


@torch.inference_mode()
def test_packed_is_one_a_row(encoder: TextEncoder) -> None:
    """The packed form computes what the padded one does, which is compared with the public classes."""
    segments = segments_of([30, 4, 11])
    rows = torch.zeros(3, 30, dtype=torch.int64)
    for row, segment in zip(rows, segments, strict=True):
        row[: len(segment)] = torch.tensor(segment)
    padded = encoder(rows, torch.tensor([30, 4, 11]))
    for found, row in zip(packed(encoder, segments), padded, strict=True):
        torch.testing.assert_close(found, row[: len(found)], atol=1e-5, rtol=1e-4)


def test_no_segment_sees_another(encoder: TextEncoder) -> None:
    """A request whose text turns to NaN harms nobody else's; one token of it changes nothing elsewhere."""
    segments = segments_of([9, 20, 33])
    whole = packed(encoder, segments)
    segments[0][0] = 61
    changed = packed(encoder, segments)
    assert not torch.equal(changed[0], whole[0])
    assert torch.equal(changed[1], whole[1])
    assert torch.equal(changed[2], whole[2])
    weight = encoder.embedding.weight
    kept = weight[61].clone()
    with torch.no_grad():
        weight[61] = float("nan")
        try:
            poisoned = packed(encoder, segments)
        finally:
            weight[61] = kept
    assert poisoned[0].isnan().any()
    assert torch.equal(poisoned[1], whole[1])
    assert torch.equal(poisoned[2], whole[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_number_is_rounded_as_a_tensor_rounds_it(dtype: torch.dtype) -> None:
    """To nearest, ties to even."""
    for value in [size**0.5 for size in range(1, 3000, 7)] + [1 + 2**-8, 1 + 3 * 2**-8, 0.1]:
        assert rounded(value, dtype) == torch.tensor(value, dtype=dtype).item()


def test_packs_are_split_by_rows_and_by_tokens() -> None:
    """In order, no call has more than either limit, and a piece longer than the limit has one to itself."""
    assert packs([]) == []
    assert packs([10] * (PACK_ROWS + 1)) == [range(PACK_ROWS), range(PACK_ROWS, PACK_ROWS + 1)]
    assert packs([PACK_TOKENS - 5, 5, 1]) == [range(2), range(2, 3)]
    assert packs([3, PACK_TOKENS + 100, 3]) == [range(1), range(1, 2), range(2, 3)]
