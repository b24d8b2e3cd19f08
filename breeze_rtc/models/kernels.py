"""What a step of few rows is made of, in Triton: products, attention over one frame's positions, and the draw.

A product of few rows takes as long as its weights take to be read, so each kernel reads them once and does on the way
what stands before and behind: the norm, the other half of a gated pair, the residual.  Weights are as they are stored,
or narrow (int8, e4m3) with a scale per output.

A row's sums run over the inputs in one order whatever rows come with it, so a stream says the same alone and in any
batch.  Triton's interpreter checks all of this on a CPU (TRITON_INTERPRET=1) and its compiler makes code for a card on
any machine; the speed, and the tile sizes, have not been seen on a GPU.
"""

from __future__ import annotations

# Triton reads the annotations of a kernel, and knows none of typing's.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from breeze_rtc.models.sampling import RowSampling

BLOCK_M = 16
"""Rows that tensor cores multiply at least."""


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is shared out."""

    outputs: int
    """Of one program."""
    inputs: int
    """Of one round of its loop."""
    splits: int = 1
    """Programs that share out the inputs of the same outputs; over 1, their sums are added up by a kernel of their own,
    in one order."""
    warps: int = 4
    stages: int = 4
    """Rounds whose weights are on their way."""


PLAIN = Tile(16, 256)
GATED = Tile(32, 128)
"""Two such tiles of weights: the gate's and its twin's."""
LONG = Tile(32, 128, splits=4, stages=5)
"""Of many inputs: there are too few outputs to give every multiprocessor some, and each reads all of its rows."""
LONG_INPUTS = 4_096
HEAD = Tile(32, 64)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _product(  # noqa: PLR0917 (a kernel's arguments)
    x,
    weight,
    scale,
    gain,
    beside,
    out,
    rows,
    outputs,
    inputs,
    output_stride,
    input_stride,
    eps,
    NORMED: tl.constexpr,
    GATED: tl.constexpr,
    ADDED: tl.constexpr,
    SCALED: tl.constexpr,
    SPLITS: tl.constexpr,
    PRODUCT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out = beside + scale * (norm(x) @ weight.T), or silu(its first outputs) * its others.

    PRODUCT: the type in which is multiplied.  Rows lie behind one another, and programs of the same weights as well.
    """
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_output = m < rows, n < outputs
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    other = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    square = tl.zeros((BLOCK_M,), tl.float32)
    part = tl.cdiv(inputs, SPLITS * BLOCK_K) * BLOCK_K
    first = tl.program_id(2) * part
    for start in range(first, tl.minimum(first + part, inputs), BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        is_input = k < inputs
        a = tl.load(x + m[:, None] * inputs + k[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0)
        if NORMED:
            # The sums are divided at the end: the mean square is known only then.
            wide = a.to(tl.float32)
            square += tl.sum(wide * wide, 1)
            a = wide * tl.load(gain + k, mask=is_input, other=0.0).to(tl.float32)[None, :]
        at = weight + n[None, :] * output_stride + k[:, None] * input_stride
        is_there = is_output[None, :] & is_input[:, None]
        # Every int8 and every e4m3 is a bfloat16: nothing is rounded here.
        b = tl.load(at, mask=is_there, other=0.0).to(PRODUCT)
        total += tl.dot(a.to(PRODUCT), b, input_precision="ieee")
        if GATED:
            b = tl.load(at + outputs * output_stride, mask=is_there, other=0.0).to(PRODUCT)
            other += tl.dot(a.to(PRODUCT), b, input_precision="ieee")
    if NORMED:
        total *= tl.rsqrt(square / inputs + eps)[:, None]
        other *= tl.rsqrt(square / inputs + eps)[:, None]
    if SCALED:
        total *= tl.load(scale + n, mask=is_output, other=0.0).to(tl.float32)[None, :]
        if GATED:
            other *= tl.load(scale + outputs + n, mask=is_output, other=0.0).to(tl.float32)[None, :]
    if GATED:
        total = total * _sigmoid(total) * other
    at = m[:, None] * outputs + n[None, :]
    is_there = is_row[:, None] & is_output[None, :]
    if ADDED:
        total += tl.load(beside + at, mask=is_there, other=0.0).to(tl.float32)
    tl.store(out + tl.program_id(2) * rows * outputs + at, total.to(out.dtype.element_ty), mask=is_there)


@triton.jit
def _add_up(  # noqa: PLR0917 (a kernel's arguments)
    parts, beside, out, count, ADDED: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr
):
    """out = beside + the sum of the parts, which lie `count` apart."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_there = at < count
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts + split * count + at, mask=is_there, other=0.0)
    if ADDED:
        total += tl.load(beside + at, mask=is_there, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=is_there)


@triton.jit
def _rotated(low, high, cos, sin):
    return low * cos - high * sin, high * cos + low * sin


@triton.jit
def _normed(  # noqa: PLR0917 (a kernel's arguments)
    low, high, gain, d, is_dim, eps, HALF: tl.constexpr
):
    """RMSNorm of each head; its halves, (..., HALF)."""
    square = tl.sum(low * low, 1) + tl.sum(high * high, 1)
    by = tl.rsqrt(square / (2 * HALF) + eps)[:, None]
    low_gain = tl.load(gain + d, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    high_gain = tl.load(gain + HALF + d, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    return low * by * low_gain, high * by * high_gain


@triton.jit(do_not_specialize=["start"])
def _attend(  # noqa: PLR0917 (a kernel's arguments)
    qkv,
    cos,
    sin,
    q_gain,
    k_gain,
    keys,
    values,
    out,
    start,
    eps,
    ROOM: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HALF: tl.constexpr,
    NEW: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One row's `NEW` newest positions, from `start` on, for the heads that share a key: norm, rotation, the cache, and
    attention over all positions so far.  ROOM: positions of the cache."""
    row, group = tl.program_id(0), tl.program_id(1)
    rows = tl.num_programs(0)
    p, d, h = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_H)
    is_dim = d < HALF
    at = ((row * KV_HEADS + group) * ROOM + p[:, None]) * 2 * HALF + d[None, :]
    is_past = (p < start)[:, None] & is_dim[None, :]
    k_low = tl.load(keys + at, mask=is_past, other=0.0).to(tl.float32)
    k_high = tl.load(keys + at + HALF, mask=is_past, other=0.0).to(tl.float32)
    v_low = tl.load(values + at, mask=is_past, other=0.0).to(tl.float32)
    v_high = tl.load(values + at + HALF, mask=is_past, other=0.0).to(tl.float32)
    one = tl.arange(0, 1)[:, None]
    for new in tl.static_range(NEW):
        place = start + new
        here = qkv + (new * rows + row) * (GROUPS + 2) * KV_HEADS * 2 * HALF
        cosine = tl.load(cos + place * 2 * HALF + d, mask=is_dim, other=0.0).to(tl.float32)[None, :]
        # The first half of the signed sine is the second with the other sign.
        sine = tl.load(sin + place * 2 * HALF + HALF + d, mask=is_dim, other=0.0).to(tl.float32)[None, :]
        key = here + (GROUPS * KV_HEADS + group + one) * 2 * HALF + d[None, :]
        low = tl.load(key, mask=is_dim[None, :], other=0.0).to(tl.float32)
        high = tl.load(key + HALF, mask=is_dim[None, :], other=0.0).to(tl.float32)
        if HAS_NORM:
            low, high = _normed(low, high, k_gain, d, is_dim, eps, HALF)
        low, high = _rotated(low, high, cosine, sine)
        kept = ((row * KV_HEADS + group) * ROOM + place + one) * 2 * HALF + d[None, :]
        kind = keys.dtype.element_ty
        tl.store(keys + kept, low.to(kind), mask=is_dim[None, :])
        tl.store(keys + kept + HALF, high.to(kind), mask=is_dim[None, :])
        # What was stored is not read again here: another thread may not have come so far.
        is_here = (p == place)[:, None]
        k_low = tl.where(is_here, low.to(kind).to(tl.float32), k_low)
        k_high = tl.where(is_here, high.to(kind).to(tl.float32), k_high)
        value = key + KV_HEADS * 2 * HALF
        low = tl.load(value, mask=is_dim[None, :], other=0.0)
        high = tl.load(value + HALF, mask=is_dim[None, :], other=0.0)
        tl.store(values + kept, low, mask=is_dim[None, :])
        tl.store(values + kept + HALF, high, mask=is_dim[None, :])
        v_low = tl.where(is_here, low.to(tl.float32), v_low)
        v_high = tl.where(is_here, high.to(tl.float32), v_high)

        is_query = (h < GROUPS)[:, None] & is_dim[None, :]
        query = (group * GROUPS + h[:, None]) * 2 * HALF + d[None, :]
        low = tl.load(here + query, mask=is_query, other=0.0).to(tl.float32)
        high = tl.load(here + query + HALF, mask=is_query, other=0.0).to(tl.float32)
        if HAS_NORM:
            low, high = _normed(low, high, q_gain, d, is_dim, eps, HALF)
        low, high = _rotated(low, high, cosine, sine)
        scores = tl.sum(low[:, None, :] * k_low[None, :, :], 2) + tl.sum(high[:, None, :] * k_high[None, :, :], 2)
        scores = tl.where((p <= place)[None, :], scores * tl.rsqrt(2.0 * HALF), float("-inf"))
        weights = tl.exp(scores - tl.max(scores, 1)[:, None])
        weights /= tl.sum(weights, 1)[:, None]
        to = out + (new * rows + row) * GROUPS * KV_HEADS * 2 * HALF + query
        seen = tl.sum(weights[:, :, None] * v_low[None, :, :], 1)
        tl.store(to, seen.to(out.dtype.element_ty), mask=is_query)
        seen = tl.sum(weights[:, :, None] * v_high[None, :, :], 1)
        tl.store(to + HALF, seen.to(out.dtype.element_ty), mask=is_query)


@triton.jit
def _choose(  # noqa: PLR0917 (a kernel's arguments)
    logits,
    noise,
    noise_stride,
    temperature,
    noise_scale,
    top_k,
    scale,
    other_scale,
    largest,
    codes,
    columns,
    silent,
    end,
    last_silent,
    GUIDES: tl.constexpr,
    DRAWS: tl.constexpr,
    LIMITED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row's code, from the logits of its one to three rows; see `choose`."""
    row, rows = tl.program_id(0), tl.num_programs(0)
    c = tl.arange(0, BLOCK)
    is_column = c < columns
    x = tl.load(logits + row * columns + c, mask=is_column, other=float("-inf"))
    if GUIDES:
        first, mine = x, tl.load(scale + row)
        away = tl.load(logits + (rows + row) * columns + c, mask=is_column, other=0.0)
        x = away + mine * (first - away)
        is_alone = mine == 1.0
        if GUIDES == 2:
            theirs = tl.load(other_scale + row)
            beside = tl.load(logits + (2 * rows + row) * columns + c, mask=is_column, other=0.0)
            x += theirs * (beside - away)
            is_alone = is_alone & (theirs == 0.0)
        x = tl.where(is_column & (is_alone == 0), x, first)
    is_odd = tl.max(((x != x) & is_column).to(tl.int32), 0)  # noqa: PLR0124 (it is no number)
    most = tl.where(is_odd != 0, float("nan"), tl.max(x, 0))
    tl.store(largest + row, tl.load(largest + row) + most)
    x = tl.where((c >= silent) & (c <= last_silent) & (c != end), float("-inf"), x)
    if DRAWS:
        x = tl.math.div_rn(x, tl.load(temperature + row))
        if LIMITED:
            # Ordered as their bits are, once those of negative numbers are turned: the k-th is found bit by bit.
            bits = x.to(tl.uint32, bitcast=True)
            bits = tl.where(bits >> 31 != 0, ~bits, bits | 0x80000000)
            k = tl.load(top_k + row)
            kth = tl.zeros((1,), tl.uint32)
            bit = tl.full((1,), 0x80000000, tl.uint32)
            for _ in range(32):
                tried = kth | bit
                bit = bit >> 1
                count = tl.sum(((bits >= tried) & is_column).to(tl.int32), 0)
                kth = tl.where(count >= k, tried, kth)
            x = tl.where(bits >= kth, x, float("-inf"))
        drawn = tl.load(noise + row * noise_stride + c, mask=is_column, other=0.0)
        x += drawn * tl.load(noise_scale + row)
    x = tl.where(is_column, x, float("-inf"))
    # A row without a number, which `largest` tells of, has some code all the same.
    code = tl.minimum(tl.argmax(x, 0), columns - 1)
    tl.store(codes + row, code.to(tl.int64))


def _product_type(x: Tensor, weight: Tensor) -> Any:
    if triton.knobs.runtime.interpret or weight.dtype == torch.float32:
        # The interpreter has of a bfloat16 only the bits; its products are the same in float32.
        return tl.float32
    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[x.dtype]


def linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    *,
    out: Tensor | None = None,
    gain: Tensor | None = None,
    eps: float = 0.0,
    beside: Tensor | None = None,
    is_gated: bool = False,
    is_transposed: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """x (..., inputs), weight (outputs, inputs) -> (..., outputs): beside + scale * (x @ weight.T).

    scale: (outputs,), of narrow weights.  gain: x goes through an RMSNorm with it first.  beside: added; it may be
    `out`.  is_gated: half as many outputs, silu(first half) * second.  is_transposed: weight is (inputs, outputs).
    out: where to; by default new, in the type of x.
    """
    inputs = x.shape[-1]
    x = x.contiguous()
    rows = x.numel() // inputs
    outputs = weight.shape[1 if is_transposed else 0] // (2 if is_gated else 1)
    strides = (weight.stride(1), weight.stride(0)) if is_transposed else weight.stride()
    if out is None:
        out = x.new_empty(*x.shape[:-1], outputs)
    if tile is None:
        tile = LONG if inputs >= LONG_INPUTS and gain is None and not is_gated else PLAIN
    assert tile.splits == 1 or (gain is None and not is_gated), "these need all inputs"
    parts = out if tile.splits == 1 else x.new_empty(tile.splits, rows, outputs, dtype=torch.float32)
    grid = (triton.cdiv(rows, BLOCK_M), triton.cdiv(outputs, tile.outputs), tile.splits)
    _product[grid](
        x,
        weight,
        weight if scale is None else scale,
        weight if gain is None else gain,
        x if beside is None else beside,
        parts,
        rows,
        outputs,
        inputs,
        *strides,
        eps,
        NORMED=gain is not None,
        GATED=is_gated,
        ADDED=beside is not None and tile.splits == 1,
        SCALED=scale is not None,
        SPLITS=tile.splits,
        PRODUCT=_product_type(x, weight),
        BLOCK_M=BLOCK_M,
        BLOCK_N=tile.outputs,
        BLOCK_K=tile.inputs,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if tile.splits > 1:
        count = rows * outputs
        _add_up[(triton.cdiv(count, 256),)](
            parts, out if beside is None else beside, out, count, beside is not None, tile.splits, 256
        )
    return out


def attend(
    qkv: Tensor,
    rope: tuple[Tensor, Tensor],
    *,
    gains: tuple[Tensor, Tensor] | None,
    eps: float,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    start: int,
) -> None:
    """Attention of a layer's newest positions, which go into its cache.

    qkv: (T, R, (heads + 2 kv_heads) * D), not rotated yet; rope: cos and signed sine of all positions, (K, D) each;
    gains: of the norm of each query and key, if there is one; keys, values: (R, kv_heads, K, D), which hold the `start`
    positions before; out: (T, R, heads * D).
    """
    new = qkv.shape[0]
    rows, kv_heads, room, head_dim = keys.shape
    groups = out.shape[-1] // (kv_heads * head_dim)
    assert start + new <= room, "more positions than there is room for"
    q_gain, k_gain = gains or (keys, keys)
    _attend[rows, kv_heads](
        qkv,
        *rope,
        q_gain,
        k_gain,
        keys,
        values,
        out,
        start,
        eps,
        ROOM=room,
        KV_HEADS=kv_heads,
        GROUPS=groups,
        HALF=head_dim // 2,
        NEW=new,
        HAS_NORM=gains is not None,
        BLOCK_P=triton.next_power_of_2(room),
        BLOCK_H=triton.next_power_of_2(groups),
        BLOCK_D=triton.next_power_of_2(head_dim // 2),
    )


def choose(
    logits: Tensor,
    noise: Tensor | None,
    rows: RowSampling,
    *,
    guides: int,
    scale: Tensor,
    other_scale: Tensor,
    largest: Tensor,
    silent: tuple[int, int, int] = (0, -1, -1),
) -> Tensor:
    """`sampling.choose`, with guidance before it, as one kernel: (R,) int64, the code of each row.

    logits: ((1 + guides) * R, V) float32, all first rows, then all second ones.  noise: (R, V), or None where all are
    greedy.  rows: without a limit of top-p.  scale, other_scale: (R, 1), of guidance.  largest: (R,), to which the
    largest logit of each row is added, so that it shows whether all were finite.  silent: first and last id that is
    never chosen, and one between them that may be.
    """
    assert not rows.uses_top_p, "these rows need their probabilities in order"
    count, columns = rows.temperature.shape[0], logits.shape[-1]
    codes = torch.empty(count, dtype=torch.int64, device=logits.device)
    first, last, end = silent
    _choose[(count,)](
        logits,
        logits if noise is None else noise,
        0 if noise is None else noise.stride(0),
        rows.temperature,
        rows.noise_scale,
        rows.top_k,
        scale,
        other_scale,
        largest,
        codes,
        columns,
        first,
        end,
        last,
        GUIDES=guides,
        DRAWS=not rows.is_greedy,
        LIMITED=rows.max_top_k > 0,
        BLOCK=triton.next_power_of_2(columns),
    )
    return codes
