"""The step graphs of a small model (`models/step_graphs`) in ONNX Runtime, over the weights that torch holds.

What CUDA graphs are on a GPU, these are on a CPU: the whole of a step in one call.  A row's results do not depend on
how many rows a call has, so nothing is padded.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnxruntime as ort
import torch
from torch import Tensor

from breeze_rtc.errors import CheckpointError
from breeze_rtc.models.codec import Tape
from breeze_rtc.models.speech_model import SpeechModel
from breeze_rtc.models.step_graphs import STEPS, WEIGHTS
from breeze_rtc.runtime.kv_cache import StepCache


class StepSessions:
    """One session per step.  They hold their own copy of the weights, laid out for their products."""

    def __init__(self, model: SpeechModel, graphs: Mapping[str, bytes]) -> None:
        """graphs: what `step_graphs.export` made of a model of the same structure.  Uses as many threads as torch.

        Raises CheckpointError when the graphs do not fit the model.
        """
        weights = {WEIGHTS + name: tensor.detach() for name, tensor in model.state_dict().items()}

        def session(name: str) -> ort.InferenceSession:
            graph = graphs[name]
            options = ort.SessionOptions()
            options.intra_op_num_threads = torch.get_num_threads()
            options.inter_op_num_threads = 1
            options.log_severity_level = 3
            used = {weight: tensor for weight, tensor in weights.items() if weight.encode() in graph}
            values = [ort.OrtValue.ortvalue_from_numpy(tensor.numpy()) for tensor in used.values()]
            options.add_external_initializers(list(used), values)
            return ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])

        again = "export the voice again"
        try:
            self.sessions = {name: session(name) for name in STEPS}
        except KeyError as error:
            raise CheckpointError(f"the step graph {error} is missing; {again}") from error
        except Exception as error:  # ONNX Runtime's own errors share no class
            raise CheckpointError(f"the step graphs do not fit the weights ({error}); {again}") from error

    def backbone(  # noqa: PLR0917 (a graph's inputs)
        self, before: Tensor, is_first: Tensor, window: Tensor, elapsed: Tensor, position: Tensor, cache: StepCache
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `BackboneStep`; the new columns are committed to the cache.  Returns hidden, logits, advance."""
        hidden, logits, advance, new = self.sessions["backbone"].run(
            None,
            {
                "before": before.numpy(),
                "is_first": is_first.numpy(),
                "window": window.numpy(),
                "elapsed": elapsed.numpy(),
                "position": position.numpy(),
                "past": cache.past.numpy(),
                "mask": cache.mask.numpy(),
            },
        )
        cache.commit(torch.from_numpy(new))
        return torch.from_numpy(hidden), torch.from_numpy(logits), torch.from_numpy(advance)

    def depth(self, hidden: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        """See `DepthStep`."""
        codes, largest = self.sessions["depth"].run(None, {"hidden": hidden.numpy(), "first": first.numpy()})
        return torch.from_numpy(codes), torch.from_numpy(largest)

    def features(self, codes: Tensor, tape: Tape) -> Tensor:
        """See `FeatureStep`; the tape is wound on."""
        features, flat = self.sessions["features"].run(
            None, {"codes": codes.numpy(), "flat": tape.flat.numpy(), "frames": tape.frames.numpy()}
        )
        tape.wind(torch.from_numpy(flat))
        return torch.from_numpy(features)
