"""Steps recorded once and replayed: a CUDA graph per shape, and on a CPU an emulation that finds what would break one.

A graph is launched with one call in place of some hundreds (backbone) or thousands (depth) and always reads and writes
the same memory.  So each has input buffers, allocated once and filled before each replay, and outputs that the next
replay overwrites.  All are captured before the engine says that it is ready, the largest first, in one memory pool;
nothing is captured while serving, for that stops everybody for a third of a second.  A step without a graph runs
eagerly, and is counted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

log = logging.getLogger(__name__)

Outputs = tuple[Tensor, ...]
Function = Callable[..., Outputs]


class Recorder(Protocol):
    """How a function of tensors is recorded."""

    def record(self, function: Function, buffers: tuple[Tensor, ...]) -> Callable[[], Outputs]:
        """Run `function(*buffers)` and return what repeats it on whatever the buffers hold then."""


class CudaRecorder:
    """Captures CUDA graphs (https://docs.pytorch.org/docs/stable/notes/cuda.html, "CUDA Graphs"), all in one pool: no
    two of them may run at the same time.  Not verified without a GPU: pools, streams, what capture refuses."""

    def __init__(self) -> None:
        self._pool: Any = None
        # A stream of its own: cuBLAS has a workspace for each stream, which is captured too, and which two graphs that
        # run at the same time must not share.
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def record(self, function: Function, buffers: tuple[Tensor, ...]) -> Callable[[], Outputs]:
        # Eagerly first: libraries allocate and choose kernels in the first calls, which capture forbids.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(2):
                function(*buffers)
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Only this thread's calls may disturb the capture: others may use CUDA meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            outputs = function(*buffers)
        if self._pool is None:
            self._pool = graph.pool()

        def replay() -> Outputs:
            graph.replay()
            return outputs

        return replay


class EmulatedRecorder:
    """Traces the operations once, and runs that list again: what Python decided at recording stays decided.

    Outputs are scribbled over when the next replay begins, as a graph's are.  It finds values baked in at capture,
    waits for the device and shapes made of values (both raise `NotCapturable`), and outputs that are read too late; it
    cannot find what only a GPU does.
    """

    def record(self, function: Function, buffers: tuple[Tensor, ...]) -> Callable[[], Outputs]:
        from torch.fx.experimental.proxy_tensor import make_fx

        with _Guard():  # type: ignore[no-untyped-call]
            function(*buffers)
        recorded = make_fx(function, tracing_mode="real")(*buffers)
        last: list[Tensor] = []

        def replay() -> Outputs:
            for output in last:
                output.fill_(-77)
            last[:] = [output.clone() for output in recorded(*buffers)]
            return tuple(last)

        return replay


class NotCapturable(Exception):
    """A step does what a graph cannot: it waits for the device, or makes a shape of values."""


class _Guard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses such operations."""

    _waits = frozenset(("_local_scalar_dense", "nonzero", "masked_select", "unique2", "equal", "is_nonzero"))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        picks = args[1] if name in ("index", "index_put", "index_put_") else ()
        if name in self._waits or any(isinstance(i, Tensor) and i.dtype is torch.bool for i in picks):
            raise NotCapturable(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


class StepGraph:
    """One recorded shape."""

    def __init__(self, recorder: Recorder, function: Function, inputs: tuple[Tensor, ...]) -> None:
        """inputs: of the shapes and types that come later; their values only serve to run it."""
        self._buffers = tuple(tensor.clone() for tensor in inputs)
        self._replay = recorder.record(function, self._buffers)

    def run(self, *inputs: Tensor) -> Outputs:
        """Replay on these inputs; the outputs hold until the next replay of any graph."""
        for buffer, tensor in zip(self._buffers, inputs, strict=True):
            assert buffer.shape == tensor.shape, f"a graph of {tuple(buffer.shape)} was given {tuple(tensor.shape)}"
            # From pageable memory the copy might wait for what the stream is at.
            is_upload = buffer.is_cuda and not tensor.is_cuda
            buffer.copy_(tensor.pin_memory() if is_upload else tensor, non_blocking=True)
        return self._replay()


@dataclass(slots=True)
class GraphTable:
    """The graphs of an executor by shape, and how often they served."""

    recorder: Recorder
    graphs: dict[Hashable, StepGraph] = field(default_factory=dict)
    replays: int = 0
    misses: int = 0
    """Steps that had no graph and ran eagerly."""
    padded_rows: int = 0
    live_rows: int = 0
    """Rows replayed: those that were pads, and those that were streams."""

    def record(self, key: Hashable, function: Function, *inputs: Tensor, recorder: Recorder | None = None) -> None:
        """Record one shape, by another recorder than the table's if one is given."""
        assert key not in self.graphs
        self.graphs[key] = StepGraph(recorder or self.recorder, function, inputs)

    def get(self, key: Hashable, live: int, rows: int) -> StepGraph | None:
        """The graph of a shape, which `live` of `rows` rows will use; None where there is none."""
        graph = self.graphs.get(key)
        if graph is None:
            self.misses += 1
        else:
            self.replays += 1
            self.live_rows += live
            self.padded_rows += rows - live
        return graph
