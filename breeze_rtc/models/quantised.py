"""The large layers in int8: half the memory, and on a GPU half the weight traffic that the time of a step goes by.

Weights only: each output channel has a scale, w = q * scale with q in [-127, 127], and x is multiplied as it is.  The
layers of the backbone and of the depth decoder are 60 % of the model's bytes and 97 % of what one frame reads; norms,
tables, heads, the text encoder and the codec stay as they are.
"""

from __future__ import annotations

import importlib.util
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from breeze_rtc.errors import BadRequest

KINDS = ("", "int8")
SCALE = ".scale"
"""What the scale's name in a state adds to its layer's."""
ROWS_AT_ONCE = 256
_PARTS = ("backbone.layers.", "depth.layers.")


class Int8Linear(nn.Module):
    """x @ (weight * scale).T without a bias."""

    weight: Tensor
    scale: Tensor

    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        """weight: (outputs, inputs) int8.  scale: (outputs,), in the type that is computed in."""
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) -> (..., outputs)."""
        if x.is_cuda and _has_triton():
            from breeze_rtc.models.int8_kernel import linear

            return linear(x, self.weight, self.scale)
        if x.device.type == "cpu":
            rows = x.reshape(-1, x.shape[-1])
            out = torch._weight_int8pack_mm(rows, self.weight, self.scale)
            return out.view(*x.shape[:-1], -1)
        return F.linear(x, self.weight.type_as(x)) * self.scale


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(outputs, inputs) -> the nearest int8 values and the scale of each output, in the weight's type."""
    q = torch.empty_like(weight, dtype=torch.int8)
    scale = weight.new_empty(weight.shape[0])
    # Piece by piece: a whole matrix in float32 would be more than what is saved.
    for start in range(0, len(weight), ROWS_AT_ONCE):
        here = slice(start, start + ROWS_AT_ONCE)
        wide = weight[here].float()
        scale[here] = wide.abs().amax(1).clamp(min=1e-8) / 127
        # By the scale as it will be multiplied with, not by the one before rounding.
        q[here] = (wide / scale[here].float()[:, None]).round().clamp(-127, 127)
    return q, scale


def is_large(name: str) -> bool:
    """The weight of this name in a model's state is kept in int8."""
    return name.startswith(_PARTS) and name.endswith(("qkv.weight", "out.weight", "gate_up.weight", "down.weight"))


def narrowed(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """What stands in a narrow model's state for a tensor of the wide one's."""
    if not is_large(name):
        return {name: tensor}
    q, scale = quantise(tensor)
    return {name: q, name.removesuffix(".weight") + SCALE: scale}


def narrow(model: nn.Module) -> None:
    """Put int8 layers in the place of the large ones; on the meta device, where there are no values, their shapes."""
    for name, parameter in list(model.named_parameters()):
        if is_large(name):
            layer = name.removesuffix(".weight")
            parent, _, own = layer.rpartition(".")
            setattr(model.get_submodule(parent), own, Int8Linear(*quantise(parameter.detach())))


def check_kind(weights: str) -> None:
    """Raises BadRequest for a kind of weights that there is not."""
    if weights not in KINDS:
        raise BadRequest(f"--weights {weights!r}: only int8 is known, and nothing for the weights as they are stored")


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
