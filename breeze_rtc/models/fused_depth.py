"""The depth decoder's passes in the kernels of `kernels`: five a layer, one for norm and head, one for the draw.

Eagerly a layer is some thirty kernels.  A frame is fifteen passes through all layers, and what those take beyond the
reading of the weights is mostly what it takes to begin and end a kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from breeze_rtc.models import kernels
from breeze_rtc.models.attention import Block
from breeze_rtc.models.depth import DepthDecoder, Pick

CLOSE = 0.05
"""How far logits may be from those of the eager stack, in parts of their standard deviation: in bfloat16 they are 0.01
to 0.02 apart, for sums are rounded elsewhere."""


class FusedDepth:
    """What `DepthDecoder.generate` computes."""

    def __init__(self, depth: DepthDecoder) -> None:
        self._depth = depth
        self.choose = kernels.choose
        """For between its passes."""
        self._blocks: list[Block] = list(depth.layers)  # type: ignore[arg-type]

    @torch.no_grad()
    def generate(self, hidden: Tensor, c0: Tensor, pick: Pick) -> Tensor:
        """hidden (R, embedding), c0 (R,) int64 -> codes (R, K), each chosen by `pick` from its logits."""
        depth = self._depth
        c = depth.config
        K, R = c.codebooks, hidden.shape[0]
        cos, sin = depth.rope(torch.arange(K, device=hidden.device)[None], hidden.dtype)
        rope = (cos.reshape(K, -1), sin.reshape(K, -1))
        keys = hidden.new_empty(c.layers, R, c.block.kv_heads, K, c.block.head_dim)
        values = torch.empty_like(keys)
        codes = c0.new_empty(R, K)
        codes[:, 0] = c0
        x = depth.projection(torch.stack((hidden, depth.table(c0))))
        start = 0
        for codebook in range(1, K):
            for index, block in enumerate(self._blocks):
                self._layer(block, x, rope, keys=keys[index], values=values[index], start=start)
            start += len(x)
            logits = kernels.linear(
                x[-1],
                depth.heads[codebook - 1],
                out=hidden.new_empty(R, c.vocab, dtype=torch.float32),
                gain=depth.norm.weight,
                eps=c.block.eps,
                is_transposed=True,
                tile=kernels.HEAD,
            )
            code = pick(codebook, logits)
            codes[:, codebook] = code
            if start < K:
                x = depth.projection(depth.table(code + c.offset(codebook)))[None]
        return codes

    def _layer(
        self, block: Block, x: Tensor, rope: tuple[Tensor, Tensor], *, keys: Tensor, values: Tensor, start: int
    ) -> None:
        """x (T, R, hidden), the newest positions; changed in place."""
        attention, mlp = block.attention, block.mlp
        eps = block.attention_norm.eps
        qkv = kernels.linear(x, *_weights(attention.qkv), gain=block.attention_norm.weight, eps=eps)
        seen = x.new_empty(*x.shape[:-1], attention.config.heads * attention.config.head_dim)
        gains = (attention.q_norm, attention.k_norm) if attention.config.qk_norm else None
        kernels.attend(qkv, rope, gains=gains, eps=eps, keys=keys, values=values, out=seen, start=start)
        kernels.linear(seen, *_weights(attention.out), out=x, beside=x)
        wide = kernels.linear(
            x, *_weights(mlp.gate_up), gain=block.mlp_norm.weight, eps=eps, is_gated=True, tile=kernels.GATED
        )
        kernels.linear(wide, *_weights(mlp.down), out=x, beside=x)

    def check(self) -> None:
        """Raises ArithmeticError where it does not compute what the eager stack computes."""
        distance = self.distance()
        if not distance < CLOSE:
            raise ArithmeticError(f"its logits are {distance:.3f} deviations from the eager ones")

    @torch.no_grad()
    def distance(self) -> float:
        """How far its logits are from the eager stack's for the same past, at worst, in parts of their deviation."""
        c = self._depth.config
        rows = 3
        generator = torch.Generator().manual_seed(1)
        codes = torch.randint(0, c.vocab, (rows, c.codebooks), generator=generator)
        hidden = torch.randn(rows, c.embedding, generator=generator)
        like = self._depth.table.weight
        hidden, codes = hidden.to(like), codes.to(like.device)
        logits = []

        def pick(codebook: int, found: Tensor) -> Tensor:
            logits.append(found)
            return codes[:, codebook]

        self.generate(hidden, codes[:, 0], pick)
        fused, logits = torch.stack(logits), []
        self._depth.generate(hidden, codes[:, 0], pick)
        eager = torch.stack(logits)
        return float((fused - eager).abs().amax() / eager.std())


def _weights(layer: nn.Module) -> tuple[Tensor, Tensor | None]:
    """A layer's matrix, and its scale where it is narrow."""
    weight: Tensor = layer.weight  # type: ignore[assignment]
    scale: Tensor | None = getattr(layer, "scale", None)
    return weight, scale
