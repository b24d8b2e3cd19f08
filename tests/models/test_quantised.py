"""The large layers in 8 bits: what they compute, what they weigh, what they change."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from breeze_rtc.models.quantised import TYPES, NarrowLinear, is_large, narrow, narrowed, quantise
from breeze_rtc.models.speech_model import SpeechModel


def weight(outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_is_off_by_half_a_step_of_its_channel(dtype: torch.dtype) -> None:
    """The largest of each channel is one of the ends."""
    w = weight(24, 64, dtype)
    w[3] = 0
    q, scale = quantise(w)
    error = (q.float() * scale.float()[:, None] - w.float()).abs()
    slack = 1e-6 if dtype == torch.float32 else 0.5
    assert (error <= scale.float()[:, None] * (0.5 + slack)).all()
    assert q.abs().amax(1).tolist()[0] in {126, 127}
    assert not q[3].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_float_of_8_bits_is_off_by_a_sixteenth_of_itself(dtype: torch.dtype) -> None:
    """Half of its last bit, or of the smallest step there is; the largest of each channel is the largest there is, and
    none is too large to be a number."""
    w = weight(24, 64, dtype)
    w[3] = 0
    q, scale = quantise(w, "fp8")
    wide, step = w.float().abs(), scale.float()[:, None] * 2.0**-9
    error = (q.float() * scale.float()[:, None] - w.float()).abs()
    assert (error <= torch.maximum(wide / 16, step / 2) * 1.01).all()
    assert q.float().isfinite().all()
    assert (q.float().abs().amax(1)[torch.arange(24) != 3] == 448).all()
    assert not q[3].float().any()


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 64), (3, 2, 64), (3, 24)])
def test_a_layer_multiplies_with_what_it_keeps(kind: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    layer = NarrowLinear(*quantise(weight(48, shape[-1], dtype), kind))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = F.linear(x.double(), layer.weight.double() * layer.scale.double()[:, None])
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5 if dtype == torch.float32 else 2e-2, atol=2e-2)
    assert layer(x).dtype == dtype


@pytest.mark.parametrize("kind", TYPES)
def test_a_row_is_the_same_alone_and_among_others(kind: str) -> None:
    """So a stream says the same alone and in a batch, as with the layers as they are stored."""
    layer = NarrowLinear(*quantise(weight(96, 64), kind))
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(2))
    together = layer(x)
    for rows in (1, 2, 5):
        assert torch.equal(layer(x[:rows]), together[:rows])


@pytest.mark.parametrize("kind", TYPES)
def test_what_is_kept_small_is_most_of_the_model_and_nothing_delicate(kind: str) -> None:
    """All products of backbone and depth; no norm, table, head, text encoder or codec."""
    wide = SpeechModel.load("mid")
    before = {name: tensor.nbytes for name, tensor in wide.state_dict().items()}
    large = {name for name in before if is_large(name)}
    assert all(name.startswith(("backbone.layers", "depth.layers")) for name in large)
    linears = [
        name
        for name, part in wide.named_modules()
        if isinstance(part, nn.Linear) and name.startswith(("backbone.layers", "depth.layers"))
    ]
    assert {f"{name}.weight" for name in linears} == large
    narrow(wide, kind)
    after = wide.state_dict()
    assert sum(t.nbytes for n, t in after.items() if n in large) == sum(before[n] for n in large) / 4
    assert {n: t.nbytes for n, t in after.items() if n in before and n not in large} == {
        n: size for n, size in before.items() if n not in large
    }


@pytest.mark.parametrize("kind", TYPES)
def test_the_state_of_a_narrow_model_is_made_of_the_wide_ones(kind: str) -> None:
    """Tensor by tensor, as a checkpoint is read."""
    wide = SpeechModel.load("tiny")
    state: dict[str, torch.Tensor] = {}
    for name, tensor in wide.state_dict().items():
        state |= narrowed(name, tensor, kind)
    small = SpeechModel.load("tiny", weights=kind)
    expected = small.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name].double(), expected[name].double()) for name in state)
    with torch.device("meta"):
        shapes = SpeechModel(wide.config, frontend=wide.frontend)
        narrow(shapes, kind)
    shapes.load_state_dict(state, assign=True)
