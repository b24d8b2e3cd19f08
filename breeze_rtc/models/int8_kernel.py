"""x @ (q * scale).T for few rows, in Triton: what takes the time is reading q, once.

Each program makes `BLOCK_N` outputs of `BLOCK_M` rows.  A row's sums run over the inputs in the same order whatever
rows come with it, so a stream says the same alone and in any batch.  Triton's interpreter checks the kernel on a CPU
(TRITON_INTERPRET=1); its speed, and the tile sizes, have not been seen on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_M, BLOCK_N, BLOCK_K = 16, 16, 128
"""16 rows are the least that tensor cores multiply; 16 outputs make 64 programs of the smallest layer there is."""


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(  # noqa: PLR0917 (a kernel's arguments)
    x: Any,
    q: Any,
    scale: Any,
    out: Any,
    rows: Any,
    outputs: Any,
    inputs: Any,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row, is_output = m < rows, n < outputs
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, inputs, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        is_input = k < inputs
        a = tl.load(x + m[:, None] * inputs + k[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0)
        b = tl.load(q + n[None, :] * inputs + k[:, None], mask=is_output[None, :] & is_input[:, None], other=0)
        # Every int8 is a bfloat16, so nothing is rounded here.
        total += tl.dot(a, b.to(a.dtype), input_precision="ieee")
    total *= tl.load(scale + n, mask=is_output, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + m[:, None] * outputs + n[None, :],
        total.to(out.dtype.element_ty),
        mask=is_row[:, None] & is_output[None, :],
    )


def linear(x: Tensor, q: Tensor, scale: Tensor) -> Tensor:
    """x (..., inputs), q (outputs, inputs) int8, scale (outputs,) -> (..., outputs) in the type of x."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    outputs = q.shape[0]
    out = torch.empty(len(rows), outputs, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(outputs, BLOCK_N), triton.cdiv(len(rows), BLOCK_M))
    _kernel[grid](rows, q, scale, out, len(rows), outputs, x.shape[-1], BLOCK_M, BLOCK_N, BLOCK_K)
    return out.view(*x.shape[:-1], outputs)
