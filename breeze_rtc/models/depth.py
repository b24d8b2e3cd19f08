"""The depth decoder: the hidden state of a frame and its code 0 -> the codes of the other codebooks, one by one.

A small Llama-type decoder of the CSM kind that starts anew for every frame: position 0 reads the backbone's hidden
state, position p >= 1 reads the code of codebook p - 1, and the output at position p gives codebook p through a head of
its own.  Its embedding table is also the backbone's: `embed_frame`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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


Pick = Callable[[int, Tensor], Tensor]
"""(codebook, logits (R, vocab) float32) -> codes (R,) int64."""


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


class DepthDecoder(nn.Module):
    """Shared audio table, projection, stack and one head per codebook from 1 on."""

    offsets: Tensor

    def __init__(self, config: DepthConfig) -> None:
        super().__init__()
        self.config = config
        c = config
        self.table = nn.Embedding(c.codebooks * c.vocab, c.embedding)
        self.projection = nn.Linear(c.embedding, c.block.hidden, bias=False)
        self.layers = nn.ModuleList(Block(c.block) for _ in range(c.layers))
        self.norm = RMSNorm(c.block.hidden, c.block.eps)
        self.heads = nn.Parameter(
            torch.empty(c.codebooks - 1, c.block.hidden, c.vocab).normal_(std=c.block.hidden**-0.5)
        )
        self.rope = Rope(c.block.head_dim, c.rope)
        self.register_buffer("offsets", torch.arange(c.codebooks, device="cpu") * c.vocab, persistent=False)

    def embed_frame(self, codes: Tensor) -> Tensor:
        """codes (..., K) int64 -> (..., embedding): the sum of the codebooks' rows of the shared table."""
        out: Tensor = self.table(codes + self.offsets).sum(-2)
        return out

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
                x = self.projection(self.table(code + codebook * c.vocab))[:, None]
        return codes
