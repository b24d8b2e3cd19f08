"""The steps of a small model as ONNX graphs.

At batch 1 a step of a small model in eager torch is mostly dispatch: one frame of nano is a thousand operations on a
few hundred numbers each.  ONNX Runtime runs the same operations fused, from one call, in a third of the time, and its
products come out the same, row by row, whatever the number of rows.

A graph holds no weights.  They stay where the checkpoint has them and are given by name when the graph is loaded
(`runtime/step_sessions`), so a graph is some ten kilobytes and serves every voice of the same structure.  Graphs are
written once, when a voice is exported, which needs the `onnx` package; to run them does not.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from breeze_rtc.models.codec import CodecConfig, CodecDecoder, Tape
from breeze_rtc.models.pointer import LOOK_AHEAD
from breeze_rtc.models.presets import ModelConfig
from breeze_rtc.models.speech_model import ByteFrontend, SpeechModel

OPSET = 17
WEIGHTS = "model."
"""A graph's name for a weight is this and its name in the checkpoint."""


class _Columns:
    """The `KVCache` of one new position a row: past columns come in, the new column of each layer goes out."""

    def __init__(self, past: Tensor, mask: Tensor) -> None:
        self.past = past
        self.mask = mask
        self.new: list[Tensor] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # The new column is scored by itself: laying it beside the past ones would copy those.
        k, v = k.transpose(0, 1), v.transpose(0, 1)
        self.new += [k, v]
        B, _, heads, D = q.shape
        kv_heads, columns = self.past.shape[2], self.past.shape[4]
        q = q.view(B, kv_heads, heads // kv_heads, D).transpose(0, 1)
        scores = torch.cat((q @ self.past[layer, 0].transpose(-1, -2), (q * k).sum(-1, keepdim=True)), -1)
        weights = (scores * D**-0.5 + self.mask[:, 0]).softmax(-1)
        seen = weights[..., :columns] @ self.past[layer, 1] + weights[..., columns:] * v
        out: Tensor = seen.transpose(0, 1).reshape(B, 1, heads * D)
        return out


class BackboneStep(nn.Module):
    """One frame of the backbone for models that are fed text per frame.

    before (B, K) int64, codes of the frame before; is_first (B,) bool; window (B, LOOK_AHEAD, text); elapsed and
    position (B,) int64; past (layers, 2, kv_heads, B, P, D); mask (B, 1, 1, P + 1).
    Returns hidden (B, hidden), logits of code 0 (B, classes), advance (B, advances), and the new columns
    (layers, 2, kv_heads, B, 1, D).
    """

    def __init__(self, model: SpeechModel) -> None:
        super().__init__()
        self.model = model

    def forward(  # noqa: PLR0917 (a graph's inputs)
        self,
        before: Tensor,
        is_first: Tensor,
        window: Tensor,
        elapsed: Tensor,
        position: Tensor,
        past: Tensor,
        mask: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        model = self.model
        assert model.pointer is not None
        x = torch.where(is_first[:, None], model.pointer.start, model.depth.embed_frame(before))
        x = x + model.pointer.item(window, elapsed)
        cache = _Columns(past, mask)
        hidden = model.backbone(x[:, None], position[:, None], cache)[:, 0]
        layers = model.config.backbone.layers
        new = torch.stack(cache.new).view(layers, 2, *cache.new[0].shape)
        return hidden, model.backbone.head(hidden), model.pointer.advance_logits(hidden), new


class DepthStep(nn.Module):
    """All the other codes of one frame, each the likeliest.

    hidden (B, embedding), first (B,) int64 -> codes (B, K) int64 and, to see that all were finite, the sum over
    codebooks of the largest logit (B,).
    """

    def __init__(self, model: SpeechModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, hidden: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        depth = self.model.depth
        c = depth.config
        cos, sin = depth.rope(torch.arange(c.codebooks)[None], hidden.dtype)
        codes = [first]
        largest = torch.zeros_like(hidden[:, 0])
        cache: list[list[Tensor]] = [[] for _ in range(2 * c.layers)]
        x = hidden
        for position in range(c.codebooks):
            x = depth.projection(x)[:, None]
            rope = (cos[:, position : position + 1], sin[:, position : position + 1])
            for index, layer in enumerate(depth.layers):
                x = layer(x, rope, cache=_Appending(cache[2 * index], cache[2 * index + 1]))
            if position:
                logits = depth.norm(x[:, 0]) @ depth.heads[position - 1]
                largest = largest + logits.amax(-1)
                codes.append(self.model.silence_reserved(logits).argmax(-1))
            x = depth.table(codes[-1] + c.offset(position))
        return torch.stack(codes, 1), largest


class _Appending:
    """The `KVCache` of a frame's positions, one at a time, in lists."""

    def __init__(self, keys: list[Tensor], values: list[Tensor]) -> None:
        self._keys = keys
        self._values = values

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._keys.append(k)
        self._values.append(v)
        keys, values = torch.cat(self._keys, 2), torch.cat(self._values, 2)
        B, _, heads, D = q.shape
        kv_heads = k.shape[1]
        scores = q.view(B, kv_heads, heads // kv_heads, D) @ keys.transpose(-1, -2) * D**-0.5
        seen: Tensor = scores.softmax(-1) @ values
        return seen.view(B, 1, heads * D)


class FeatureStep(nn.Module):
    """The codec up to its source-filter head.

    codes (B, K, T) int64, flat (B, state size), frames (B,) int64 -> features (B, C, T * steps), flat after the call.
    """

    def __init__(self, model: SpeechModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, codes: Tensor, flat: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
        codec = self.model.codec
        assert isinstance(codec, CodecDecoder)
        tape = Tape(flat, frames)
        features = codec.features_of(codec.mix(*codec.dequantize(codes)), tape)
        return features, tape.wound()


STEPS: dict[str, type[BackboneStep | DepthStep | FeatureStep]] = {
    "backbone": BackboneStep,
    "depth": DepthStep,
    "features": FeatureStep,
}
"""The steps that have graphs, by name."""

_OUTPUTS = {
    "backbone": ["hidden", "logits", "advance", "new"],
    "depth": ["all_codes", "largest"],
    "features": ["features", "flat_out"],
}
_AXES = {
    "past": {3: "rows", 4: "columns"},
    "mask": {0: "rows", 3: "columns_and_new"},
    "codes": {0: "rows", 2: "frames"},
}
"""Axes of inputs that vary, where it is not the first alone."""


def example_inputs(model: SpeechModel, step: str, rows: int, *, frames: int) -> dict[str, Tensor]:
    """Inputs of a step by name, in order; their values mean nothing.  frames: of the codec's step."""
    c = model.config
    block, window = c.backbone.block, c.backbone.window
    assert window is not None
    assert c.pointer is not None
    past = window - 1
    if step == "backbone":
        return {
            "before": torch.zeros(rows, c.depth.codebooks, dtype=torch.int64),
            "is_first": torch.zeros(rows, dtype=torch.bool),
            "window": torch.rand(rows, LOOK_AHEAD, c.pointer.text),
            "elapsed": torch.zeros(rows, dtype=torch.int64),
            "position": torch.zeros(rows, dtype=torch.int64),
            "past": torch.rand(c.backbone.layers, 2, block.kv_heads, rows, past, block.head_dim),
            "mask": torch.zeros(rows, 1, 1, past + 1),
        }
    if step == "depth":
        return {"hidden": torch.rand(rows, c.depth.embedding), "first": torch.zeros(rows, dtype=torch.int64)}
    return {
        "codes": torch.zeros(rows, c.depth.codebooks, frames, dtype=torch.int64),
        "flat": torch.rand(rows, model.codec.state_size),
        "frames": torch.zeros(rows, dtype=torch.int64),
    }


def export(config: ModelConfig) -> dict[str, bytes]:
    """The graphs of models of this structure, by the name of their step.

    Raises ImportError without the `onnx` package, and ValueError for a model whose steps have no graphs: those fed by a
    prefix, and those whose codec ends in transposed convolutions.
    """
    if config.feed != "per_frame" or not isinstance(config.codec, CodecConfig) or config.codec.head != "source_filter":
        raise ValueError(f"the steps of {config.name} are not among those that have graphs")
    model = SpeechModel(config, frontend=lambda _voice: ByteFrontend(whole=False))
    with torch.no_grad():
        for parameter in model.parameters():
            # The exporter would make one of two weights that are equal, as fresh norms are.
            parameter.normal_()
    return {name: _graph(name, model) for name in STEPS}


def _graph(name: str, model: SpeechModel) -> bytes:
    import onnx

    step = STEPS[name](model).eval()
    inputs = example_inputs(model, name, 2, frames=3)
    with TemporaryDirectory() as folder, _norms_as_one_node(), warnings.catch_warnings():
        file = f"{folder}/step.onnx"
        warnings.simplefilter("ignore")
        torch.onnx.export(
            step,
            tuple(inputs.values()),
            file,
            dynamo=False,
            opset_version=OPSET,
            do_constant_folding=False,
            input_names=list(inputs),
            output_names=_OUTPUTS[name],
            dynamic_axes={key: _AXES.get(key, {0: "rows"}) for key in inputs},
        )
        graph = onnx.load(file)
    names = {WEIGHTS + weight for weight in model.state_dict()}
    for tensor in graph.graph.initializer:
        if tensor.name in names:
            tensor.ClearField("raw_data")
            tensor.data_location = onnx.TensorProto.EXTERNAL
            tensor.external_data.add(key="location", value="checkpoint")
    for node in graph.graph.node:
        node.ClearField("doc_string")
    content: bytes = graph.SerializeToString()
    return content


@contextmanager
def _norms_as_one_node() -> Iterator[None]:
    """ONNX has no RMSNorm before opset 23; ONNX Runtime has had one under this name for longer."""

    from torch.onnx import symbolic_helper, utils

    @symbolic_helper.parse_args("v", "is", "v", "f")
    def rms_norm(graph: Any, x: Any, shape: list[int], weight: Any, eps: float) -> Any:
        if weight.node().mustBeNone():
            weight = graph.op("Constant", value_t=torch.ones(shape))
        return graph.op("SimplifiedLayerNormalization", x, weight, axis_i=-1, epsilon_f=eps, stash_type_i=1)

    utils.register_custom_op_symbolic("aten::rms_norm", rms_norm, OPSET)
    try:
        yield
    finally:
        utils.unregister_custom_op_symbolic("aten::rms_norm", OPSET)
