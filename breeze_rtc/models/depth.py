"""The depth decoder: the hidden state of a frame and its code 0 -> the codes of the other codebooks, one by one.

A small Llama-type decoder of the CSM kind that starts anew for every frame: position 0 reads the backbone's hidden
state, position p >= 1 reads the code of codebook p - 1, and the output at position p gives codebook p through a head of
its own.  Its embedding table is also the backbone's: `embed_frame`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from breeze_rtc.models.attention import Block, BlockConfig, RMSNorm, Rope, RopeConfig, attend


@dataclass(frozen=True, slots=True)
class DepthConfig:
    codebooks: int
    vocab: int
    """Ids per codebook, reserved ones included."""
    embedding: int
    """Width of the shared table, which is the backbone's."""
    block: BlockConfig
    layers: int
    rope: RopeConfig
    first_vocab: int = 0
    """Ids of codebook 0 in the table, where it has others than the rest; 0: as many as they."""
    projection: Literal["plain", "biased", "none"] = "plain"
    """How embeddings come to the stack's width."""
    has_beside: bool = False
    """A vector of its own is added to every frame that the backbone reads back."""

    def offset(self, codebook: int) -> int:
        """First row of a codebook in the table; of the one behind the last, the rows of the table."""
        return (self.first_vocab or self.vocab) + (codebook - 1) * self.vocab if codebook else 0


Pick = Callable[[int, Tensor], Tensor]
"""(codebook, logits (R, vocab) float32) -> codes (R,) int64."""
Generate = Callable[[Tensor, Tensor, Pick], Tensor]
"""`DepthDecoder.generate`, or what computes the same."""
Step = Callable[..., Tensor]
"""`DepthDecoder.step`, or what a compiler made of it."""


@dataclass(frozen=True, slots=True)
class DepthWay:
    """One of the ways to run a frame's passes."""

    generate: Generate
    choose: Callable[..., Tensor] | None = None
    """What takes the place of guidance and draw, if anything: see `kernels.choose`."""


class FrameCache:
    """Keys and values of one frame's positions; room for all of them is taken at once."""

    def __init__(self, config: DepthConfig, like: Tensor) -> None:
        block = config.block
        shape = (config.layers, like.shape[0], block.kv_heads, config.codebooks, block.head_dim)
        self._keys = like.new_empty(shape)
        self._values = like.new_empty(shape)
        self._start = self._end = 0

    def advance(self, positions: int) -> tuple[int, int]:
        """Make the next `positions` positions the current ones; return their range."""
        self._start, self._end = self._end, self._end + positions
        return self._start, self._end

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self._keys[layer], self._values[layer]
        keys[:, :, self._start : self._end] = k
        values[:, :, self._start : self._end] = v
        # The first pass has two positions, of which the first must not see the second; later passes have one.
        return attend(q, keys[:, :, : self._end], values[:, :, : self._end], None, is_causal=self._start == 0)


class PlacedCache:
    """The same with all positions always there and the unused ones masked, so that every pass has one shape."""

    def __init__(self, keys: Tensor, values: Tensor, places: Tensor, mask: Tensor) -> None:
        """keys, values: (layers, R, kv_heads, K, D); places: (T,) int64, the pass's positions; mask: (T, K)."""
        self._keys = keys
        self._values = values
        self._places = places
        self._mask = mask

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys = self._keys[layer].index_copy_(2, self._places, k)
        values = self._values[layer].index_copy_(2, self._places, v)
        B, T, heads, D = q.shape
        kv_heads = keys.shape[1]
        q = q.view(B, T, kv_heads, heads // kv_heads, D).permute(0, 2, 3, 1, 4).reshape(B, kv_heads, -1, D)
        scores = (q @ keys.transpose(-1, -2)).view(B, kv_heads, -1, T, keys.shape[2]) * D**-0.5 + self._mask
        weights = scores.softmax(-1, dtype=torch.float32).type_as(v).view(B, kv_heads, -1, keys.shape[2])
        seen: Tensor = (weights @ values).view(B, kv_heads, -1, T, D)
        return seen.permute(0, 3, 1, 2, 4).reshape(B, T, heads * D)


class DepthDecoder(nn.Module):
    """Shared audio table, projection, stack and one head per codebook from 1 on."""

    offsets: Tensor

    def __init__(self, config: DepthConfig) -> None:
        super().__init__()
        self.config = config
        c = config
        self.table = nn.Embedding(c.offset(c.codebooks), c.embedding)
        self.beside = nn.Parameter(torch.zeros(c.embedding)) if c.has_beside else None
        self.projection = (
            nn.Identity()
            if c.projection == "none"
            else nn.Linear(c.embedding, c.block.hidden, bias=c.projection == "biased")
        )
        self.layers = nn.ModuleList(Block(c.block) for _ in range(c.layers))
        self.norm = RMSNorm(c.block.hidden, c.block.eps)
        self.heads = nn.Parameter(
            torch.empty(c.codebooks - 1, c.block.hidden, c.vocab).normal_(std=c.block.hidden**-0.5)
        )
        self.rope = Rope(c.block.head_dim, c.rope)
        offsets = torch.tensor([c.offset(codebook) for codebook in range(c.codebooks)], device="cpu")
        self.register_buffer("offsets", offsets, persistent=False)

    def embed_frame(self, codes: Tensor) -> Tensor:
        """codes (..., K) int64 -> (..., embedding): the sum of the codebooks' rows of the shared table, and what stands
        beside every frame."""
        out: Tensor = self.table(codes + self.offsets).sum(-2)
        return out if self.beside is None else out + self.beside

    def forward(self, hidden: Tensor, codes: Tensor) -> Tensor:
        """Teacher forcing.  hidden (N, embedding), codes (N, K) -> logits (N, K - 1, vocab) of codebooks 1 to K - 1."""
        previous = self.table(codes[:, :-1] + self.offsets[:-1])
        x = self.projection(torch.cat((hidden[:, None], previous), 1))
        positions = torch.arange(x.shape[1], device=x.device)[None]
        rope = self.rope(positions, x.dtype)
        for layer in self.layers:
            x = layer(x, rope, is_causal=True)
        x = self.norm(x)[:, 1:]
        return torch.einsum("nph,phv->npv", x.float(), self.heads.float())

    def step(  # noqa: PLR0917 (compiled functions take tensors)
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        keys: Tensor,
        values: Tensor,
        places: Tensor,
        mask: Tensor,
        head: Tensor,
    ) -> Tensor:
        """One pass: x (R, T, embedding), what T positions read -> logits (R, vocab) float32 behind the last of them.

        cos, sin: of these positions; keys ... mask: see `PlacedCache`; head: (hidden, vocab).
        """
        cache = PlacedCache(keys, values, places, mask)
        x = self.projection(x)
        for index, layer in enumerate(self.layers):
            x = layer(x, (cos, sin), cache=cache, layer=index)
        logits: Tensor = self.norm(x[:, -1]).float() @ head.float()
        return logits

    def way(self, name: str) -> DepthWay:
        """A frame's passes `eager`, `compiled` by torch, or `fused` in kernels of our own.

        Raises what stands against it: no Triton, no compiler, or numbers that differ from the eager ones.
        """
        if name == "compiled":
            return DepthWay(partial(self.generate_by, self.compiled_step()))
        if name == "fused":
            from breeze_rtc.models.fused_depth import FusedDepth

            fused = FusedDepth(self)
            fused.check()
            return DepthWay(fused.generate, fused.choose)
        return DepthWay(self.generate)

    def compiled_step(self, **options: Any) -> Step:
        """`step` as kernels made for it, stack and head in one graph of torch.compile, for any number of rows.

        options: torch.compile's.
        """
        compiled: Step = torch.compile(self.step, fullgraph=True, dynamic=True, **options)
        return compiled

    @torch.no_grad()
    def generate_by(self, step: Step, hidden: Tensor, c0: Tensor, pick: Pick) -> Tensor:
        """`generate` through `step`, compiled or not: the same codes but for sums rounded in another order."""
        c = self.config
        K, R = c.codebooks, hidden.shape[0]
        index = torch.arange(K, device=hidden.device)
        cos, sin = self.rope(index[None], hidden.dtype)
        mask = torch.where(index > index[:, None], float("-inf"), 0.0).to(hidden.dtype)
        keys = hidden.new_zeros(c.layers, R, c.block.kv_heads, K, c.block.head_dim)
        values = torch.zeros_like(keys)
        codes = c0.new_empty(R, K)
        codes[:, 0] = c0
        x = torch.stack((hidden, self.table(c0)), 1)
        start = 0
        for codebook in range(1, K):
            at = slice(start, codebook + 1)
            head = self.heads[codebook - 1]
            logits = step(x, cos[:, at], sin[:, at], keys, values, index[at], mask[at], head)
            code = pick(codebook, logits)
            codes[:, codebook] = code
            start = codebook + 1
            if start < K:
                x = self.table(code + c.offset(codebook))[:, None]
        return codes

    @torch.no_grad()
    def generate(self, hidden: Tensor, c0: Tensor, pick: Pick) -> Tensor:
        """hidden (R, embedding), c0 (R,) int64 -> codes (R, K), each chosen by `pick` from its logits."""
        c = self.config
        R = hidden.shape[0]
        cos, sin = self.rope(torch.arange(c.codebooks, device=hidden.device)[None], hidden.dtype)
        cache = FrameCache(c, hidden)
        codes = c0.new_empty(R, c.codebooks)
        codes[:, 0] = c0
        x = self.projection(torch.stack((hidden, self.table(c0)), 1))
        for codebook in range(1, c.codebooks):
            start, end = cache.advance(x.shape[1])
            rope = (cos[:, start:end], sin[:, start:end])
            for index, layer in enumerate(self.layers):
                x = layer(x, rope, cache=cache, layer=index)
            logits = self.norm(x[:, -1]).float() @ self.heads[codebook - 1].float()
            code = pick(codebook, logits)
            codes[:, codebook] = code
            if codebook + 1 < c.codebooks:
                x = self.projection(self.table(code + c.offset(codebook)))[:, None]
        return codes
