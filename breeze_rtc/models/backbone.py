"""The backbone: a Qwen3 decoder stack over prompt and frame embeddings, and the head of codebook 0."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from breeze_rtc.models.attention import Block, BlockConfig, KVCache, RMSNorm, Rope, RopeConfig, band_mask


@dataclass(frozen=True, slots=True)
class BackboneConfig:
    block: BlockConfig
    layers: int
    rope: RopeConfig
    classes: int
    """Outputs of the codebook-0 head: codes, reserved ids and, where the model has one, the class that ends speech."""
    window: int | None = None
    """A position sees itself and the `window - 1` positions before it; None: all before it."""


class Backbone(nn.Module):
    """Causal stack.  Trained and prefilled over whole sequences, stepped through a cache."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(Block(config.block) for _ in range(config.layers))
        self.norm = RMSNorm(config.block.hidden, config.block.eps)
        self.rope = Rope(config.block.head_dim, config.rope)
        self.output = nn.Linear(config.block.hidden, config.classes, bias=False)

    def forward(self, x: Tensor, positions: Tensor, cache: KVCache | None = None) -> Tensor:
        """Input embeddings -> hidden states after the final norm.

        x: (B, T, hidden); positions: (B, T) or (1, T) int64.  Without a cache x is the whole sequence from its start,
        and rows shorter than T are padded on the right: later positions never reach earlier ones.
        Returns (B, T, hidden).
        """
        rope = self.rope(positions, x.dtype)
        window = self.config.window
        mask = None
        if cache is None and window is not None and window < x.shape[1]:
            mask = band_mask(x.shape[1], window - 1, 0, x)
        for index, layer in enumerate(self.layers):
            x = layer(x, rope, mask, is_causal=mask is None, cache=cache, layer=index)
        out: Tensor = self.norm(x)
        return out

    def head(self, hidden: Tensor) -> Tensor:
        """(..., hidden) -> (..., classes) float32 logits; weights and input are widened, as the reference does."""
        return F.linear(hidden.float(), self.output.weight.float())
