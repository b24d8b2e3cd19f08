"""The large layers in 8 bits: half the memory, and on a GPU half the weight traffic that the time of a step goes by.

Weights only: each output channel has a scale, w = q * scale, and x is multiplied as it is.  q is an integer in
[-127, 127] (`int8`) or a float of three bits behind the point (`fp8`, e4m3: OCP 8-bit Floating Point Specification),
whose largest is 448.  The layers of the backbone and of the depth decoder are 60 % of the model's bytes and 97 % of
what one frame reads; norms, tables, heads, the text encoder and the codec stay as they are.
"""

from __future__ import annotations

import importlib.util
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from breeze_rtc.errors import BadRequest

TYPES = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}
"""Kinds of narrow weights: the type, and its largest number."""
SCALE = ".scale"
"""What the scale's name in a state adds to its layer's."""
ROWS_AT_ONCE = 256
_PARTS = ("backbone.layers.", "depth.layers.")


class NarrowLinear(nn.Module):
    """x @ (weight * scale).T without a bias."""

    weight: Tensor
    scale: Tensor

    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        """weight: (outputs, inputs) of one of `TYPES`.  scale: (outputs,), in the type that is computed in."""
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) -> (..., outputs)."""
        if x.is_cuda and _has_kernel(self.weight.dtype):
            from breeze_rtc.models.kernels import linear

            return linear(x, self.weight, self.scale)
        if x.device.type == "cpu" and self.weight.dtype == torch.int8 and x.shape[-1] % 32 == 0:
            # With other widths torch 2.13 reads in bfloat16 what is not its own.
            rows = x.reshape(-1, x.shape[-1])
            out = torch._weight_int8pack_mm(rows, self.weight, self.scale)
            return out.view(*x.shape[:-1], -1)
        return F.linear(x, self.weight.type_as(x)) * self.scale


def quantise(weight: Tensor, kind: str = "int8") -> tuple[Tensor, Tensor]:
    """(outputs, inputs) -> the nearest narrow values and the scale of each output, in the weight's type."""
    dtype, most = TYPES[kind]
    q = torch.empty_like(weight, dtype=dtype)
    scale = weight.new_empty(weight.shape[0])
    # Piece by piece: a whole matrix in float32 would be more than what is saved.
    for start in range(0, len(weight), ROWS_AT_ONCE):
        here = slice(start, start + ROWS_AT_ONCE)
        wide = weight[here].float()
        scale[here] = wide.abs().amax(1).clamp(min=1e-8) / most
        # By the scale as it will be multiplied with, not by the one before rounding.
        wide = wide / scale[here].float()[:, None]
        q[here] = (wide if dtype.is_floating_point else wide.round()).clamp(-most, most).to(dtype)
    return q, scale


def is_large(name: str) -> bool:
    """The weight of this name in a model's state is kept narrow."""
    return name.startswith(_PARTS) and name.endswith(("qkv.weight", "out.weight", "gate_up.weight", "down.weight"))


def narrowed(name: str, tensor: Tensor, kind: str = "int8") -> dict[str, Tensor]:
    """What stands in a narrow model's state for a tensor of the wide one's."""
    if not is_large(name):
        return {name: tensor}
    q, scale = quantise(tensor, kind)
    return {name: q, name.removesuffix(".weight") + SCALE: scale}


def narrow(model: nn.Module, kind: str = "int8") -> None:
    """Put narrow layers in the place of the large ones; on the meta device, where there are no values, their shapes."""
    for name, parameter in list(model.named_parameters()):
        if is_large(name):
            layer = name.removesuffix(".weight")
            parent, _, own = layer.rpartition(".")
            setattr(model.get_submodule(parent), own, NarrowLinear(*quantise(parameter.detach(), kind)))


def check_kind(weights: str) -> None:
    """Raises BadRequest for a kind of weights that there is not."""
    if weights and weights not in TYPES:
        known = " and ".join(TYPES)
        raise BadRequest(
            f"--weights {weights!r}: only {known} are known, and nothing for the weights as they are stored"
        )


@cache
def _has_kernel(dtype: torch.dtype) -> bool:
    # Cards before Ada and Hopper have no e4m3.
    has_type = dtype == torch.int8 or torch.cuda.get_device_capability() >= (8, 9)
    return has_type and importlib.util.find_spec("triton") is not None
