"""The int8 kernel in Triton's interpreter, which runs it on a CPU; its code for a card is not verified without one.

The interpreter multiplies float32 and float16, and not bfloat16, of which it has only the bits.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton, which comes with CUDA builds of torch"
)

CHECK = """
import torch
from breeze_rtc.models.int8_kernel import linear
from breeze_rtc.models.quantised import quantise

generator = torch.Generator().manual_seed(1)
for rows, outputs, inputs, dtype in (
    (1, 24, 200, torch.float32), (17, 40, 130, torch.float32), (16, 16, 128, torch.float32), (3, 24, 200, torch.float16)
):
    q, scale = quantise(torch.randn(outputs, inputs, generator=generator).to(dtype))
    x = torch.randn(rows, 1, inputs, generator=generator).to(dtype)
    expected = x.double() @ (q.double() * scale.double()[:, None]).T
    out = linear(x, q, scale)
    assert out.shape == expected.shape and out.dtype == dtype
    error = float((out.double() - expected).abs().max() / expected.abs().max())
    assert error < (1e-5 if dtype == torch.float32 else 2e-3), (rows, outputs, inputs, dtype, error)
    assert torch.equal(linear(x[:1], q, scale), out[:1]), "a row is the same alone"
print("all the same")
"""


def test_the_kernel_multiplies_with_what_is_kept() -> None:
    """Sizes that fill its tiles and that do not, one row and more than a tile of rows; a row is the same alone."""
    answer = subprocess.run(
        [sys.executable, "-c", CHECK],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout == "all the same\n"
