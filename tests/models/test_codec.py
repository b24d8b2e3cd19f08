"""The codec decoder with nano's head: chunks, slots and pads."""

from __future__ import annotations

import pytest
import torch

from breeze_rtc.models.codec import CodecDecoder
from breeze_rtc.models.presets import tiny_pointer


@pytest.fixture(scope="module")
def codec() -> CodecDecoder:
    torch.manual_seed(5)
    return CodecDecoder(tiny_pointer().codec).eval()


def codes(rows: int, frames: int) -> torch.Tensor:
    return torch.randint(0, 32, (rows, 4, frames), generator=torch.Generator().manual_seed(6))


@torch.no_grad()
@pytest.mark.parametrize("chunk", [4, 5, 8, 20])
def test_chunks_leave_no_trace(codec: CodecDecoder, chunk: int) -> None:
    """Chunks of four frames and more give the same samples, bit for bit, by themselves and in a batch."""
    heard = codes(2, 40)
    state = codec.new_state(4)
    slots = torch.tensor([3, 0])
    pieces = [codec(heard[:, :, start : start + chunk], state, slots) for start in range(0, 40, chunk)]
    alone = codec(heard[1:], codec.new_state(1), torch.tensor([0]))
    assert torch.equal(torch.cat(pieces, 1)[1], alone[0])
    assert torch.equal(state.frames, torch.tensor([40, 0, 0, 40, 0]))


@torch.no_grad()
def test_pads_are_not_synthesised(codec: CodecDecoder) -> None:
    """Rows after the live ones keep the trunk's products in shape and give no sound."""
    heard = codes(4, 1)
    slots = torch.tensor([1, 4, 4, 4])
    assert codec(heard, codec.new_state(4), slots, live=1).shape == (1, 960)


@torch.no_grad()
def test_an_opened_slot_is_new(codec: CodecDecoder) -> None:
    """Opening a slot forgets the stream before, and only that slot's."""
    heard = codes(2, 12)
    state = codec.new_state(2)
    slots = torch.tensor([0, 1])
    first = codec(heard[:, :, :6], state, slots)
    state.open(0)
    again = codec(heard[:, :, :6], state, slots)
    assert torch.equal(again[0], first[0])
    assert not torch.equal(again[1], first[1])


def test_training_reaches_every_weight(codec: CodecDecoder) -> None:
    """Features of whole sequences have gradients in all parameters, the codebooks' included."""
    trained = CodecDecoder(tiny_pointer().codec)
    features = trained.features(codes(2, 10))
    assert features.shape == (2, 162, 40)
    features.square().sum().backward()
    assert [name for name, p in trained.named_parameters() if p.grad is None] == []
