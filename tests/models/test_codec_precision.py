"""How far the codec's sound moves when its products are computed with fewer bits, as a GPU's tensor cores do.

TF32 rounds both factors of a product to 10 bits of mantissa and adds up in float32; so rounding the factors on a CPU
gives what it gives, but for the order of the sums.  An error 60 dB below the sound cannot be heard: speech masks it,
and in pauses it is below a quiet room.  With random weights of the published structure, the only ones there are here,
neither TF32 nor bfloat16 comes near that, so on every device the codec is computed in float32, as the published code
does.  `bench/gpu.py --model` says what TF32 does to the real weights.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from breeze_rtc.models.checkpoint import seeded
from breeze_rtc.models.codec import CodecDecoder
from breeze_rtc.models.presets import tiny
from breeze_rtc.models.speech_model import SpeechModel
from breeze_rtc.runtime import executor
from breeze_rtc.runtime.executor import Executor

FRAMES = 24
INAUDIBLE_DB = 60


def tf32(x: Tensor) -> Tensor:
    """float32 rounded to nearest with 10 bits of mantissa, ties to even."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


class Tf32Products(TorchFunctionMode):
    """Every matrix product takes its factors in TF32."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in {F.linear, torch.matmul, torch.bmm, Tensor.__matmul__, Tensor.matmul}:
            self.products += 1
            args = (tf32(args[0]), tf32(args[1]), *args[2:])
        return func(*args, **(kwargs or {}))


def codec() -> CodecDecoder:
    """Of random weights, as loud as speech and never clipped: a clipped sample would hide its error."""
    made = seeded(tiny()).codec.eval()
    with torch.no_grad():
        for stage in made.snake_head.stages:
            for name, parameter in stage.named_parameters():
                if name.endswith(("alpha", "beta")):
                    parameter.uniform_(-0.5, 0.5, generator=torch.Generator().manual_seed(len(name)))
        loudest: list[float] = []
        hook = made.snake_head.last.register_forward_hook(lambda _m, _i, out: loudest.append(float(out.abs().max())))
        made(CODES)
        hook.remove()
        made.snake_head.last.weight.mul_(0.5 / loudest[0])
    return made


CODES = torch.randint(0, 32, (2, 4, FRAMES), generator=torch.Generator().manual_seed(6))


def decibels_below(sound: Tensor, other: Tensor) -> float:
    """How far the difference is below the sound."""
    error = (sound.double() - other.double()).square().mean()
    return float(10 * torch.log10(sound.double().square().mean() / error))


def pieces(made: CodecDecoder, dtype: torch.dtype) -> Tensor:
    """The sound in pieces of 1, 2, 4, 8 ... frames, so that the state is kept in the same type too."""
    state, slots = made.new_state(2), torch.tensor([0, 1])
    assert state.flat.dtype == dtype
    out, start = [], 0
    for count in (1, 2, 4, 8, 1, 8):
        out.append(made(CODES[:, :, start : start + count], state, slots))
        start += count
    assert start == FRAMES
    return torch.cat(out, 1).float()


@torch.no_grad()
def test_fewer_bits_are_not_proved_inaudible() -> None:
    """TF32 is better than bfloat16, and both are above the bound: who computes the codec in them has to show more."""
    exact = pieces(codec(), torch.float32)
    with Tf32Products() as products:
        tf32_db = decibels_below(exact, pieces(codec(), torch.float32))
    assert products.products > 100
    bfloat16_db = decibels_below(exact, pieces(codec().bfloat16(), torch.bfloat16))
    print(f"below the sound: TF32 {tf32_db:.1f} dB, bfloat16 {bfloat16_db:.1f} dB")
    assert bfloat16_db + 6 < tf32_db < INAUDIBLE_DB


@torch.no_grad()
def test_float32_is_what_products_are_computed_in() -> None:
    """Making an executor allows no shortcut, on any device."""
    Executor(SpeechModel.load("tiny"), max_streams=1, kv_pages=8)
    assert torch.get_float32_matmul_precision() == "highest"
    source = (Path(executor.__file__).parent / "executor.py").read_text()
    assert "matmul_precision" not in source
    assert "allow_tf32" not in source
