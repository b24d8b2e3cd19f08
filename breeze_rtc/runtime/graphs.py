"""Steps recorded once and replayed: a CUDA graph per shape, and on a CPU an emulation that finds what would break one.

A graph is launched with one call in place of some hundreds (backbone) or thousands (depth) and always reads and writes
the same memory.  So each has input buffers, allocated once and filled before each replay, and outputs that the next
replay overwrites.  The shapes are known when the engine starts.  They are captured then, once each and in one memory
pool, by a thread of their own while steps run eagerly, and taken into use a stage at a time; never in a step, for that
stops everybody for a third of a second.  A step without a graph runs eagerly, and is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Outputs = tuple[Tensor, ...]
Function = Callable[..., Outputs]


class Recorder(Protocol):
    """How a function of tensors is recorded."""

    def record(self, function: Function, buffers: tuple[Tensor, ...]) -> Callable[[], Outputs]:
        """Run `function(*buffers)` and return what repeats it on whatever the buffers hold then."""

    def pool_bytes(self) -> int:
        """Memory that everything recorded so far works in."""

    @property
    def compiles(self) -> bool:
        """What torch.compile makes can be recorded."""


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

    def pool_bytes(self) -> int:
        if self._pool is None:
            return 0
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) == tuple(self._pool))

    @property
    def compiles(self) -> bool:
        return True


class EmulatedRecorder:
    """Traces the operations once, and runs that list again: what Python decided at recording stays decided.

    Outputs are scribbled over when the next replay of any graph begins: all work in one pool.  It finds values baked in
    at capture, waits for the device and shapes made of values (both raise `NotCapturable`), and outputs that are read
    too late; it cannot find what only a GPU does.
    """

    def __init__(self) -> None:
        # What the last replay returned.
        self._given: list[Tensor] = []

    def record(self, function: Function, buffers: tuple[Tensor, ...]) -> Callable[[], Outputs]:
        from torch.fx.experimental.proxy_tensor import make_fx

        with Guard():
            function(*buffers)
        recorded = make_fx(function, tracing_mode="real")(*buffers)

        def replay() -> Outputs:
            for output in self._given:
                output.fill_(-77)
            self._given = [output.clone() for output in recorded(*buffers)]
            return tuple(self._given)

        return replay

    def pool_bytes(self) -> int:
        return 0

    @property
    def compiles(self) -> bool:
        return False


class MetaRecorder:
    """Runs a function on tensors of the device `meta`, which have shapes and no memory, so that a machine without a GPU
    finds at any size what an emulation on a CPU does not see: copies between host and device, and tensors left on the
    wrong one.  Nothing can be replayed.

    (Fake tensors of a CUDA device, which torch has for this, cannot be indexed by a torch built without CUDA.)
    """

    def record(self, function: Function, buffers: tuple[Tensor, ...]) -> Callable[[], Outputs]:
        try:
            with Guard():
                outputs = function(*buffers)
        except (RuntimeError, NotImplementedError) as error:
            raise NotCapturable(f"a value was asked for: {error}") from error
        if not all(output.is_meta for output in outputs):
            raise NotCapturable("an output is not on the device")

        def replay() -> Outputs:
            raise NotCapturable("there is nothing that could be replayed")

        return replay

    def pool_bytes(self) -> int:
        return 0

    @property
    def compiles(self) -> bool:
        return False


class NotCapturable(Exception):
    """A step does what a graph cannot: it waits for the device, or makes a shape of values."""


class Guard(TorchDispatchMode):
    """Refuses such operations."""

    _waits = frozenset(("_local_scalar_dense", "nonzero", "masked_select", "unique2", "equal", "is_nonzero"))

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        picks = args[1] if name in ("index", "index_put", "index_put_") else ()
        if name in self._waits or any(isinstance(i, Tensor) and i.dtype is torch.bool for i in picks):
            raise NotCapturable(f"{func} waits for the device")
        devices = {arg.device for arg in args if isinstance(arg, Tensor) and arg.dim()}
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            devices |= {out.device} if out.dim() else set()
        if len(devices) > 1:
            raise NotCapturable(f"{func} has tensors on {' and '.join(sorted(map(str, devices)))}")
        return out


class StepGraph:
    """One recorded shape."""

    def __init__(self, recorder: Recorder, function: Function, inputs: tuple[Tensor, ...]) -> None:
        """inputs: of the shapes and types that come later; their values only serve to run it."""
        self._buffers = tuple(tensor.clone() for tensor in inputs)
        before = recorder.pool_bytes()
        self._replay = recorder.record(function, self._buffers)
        self.bytes = recorder.pool_bytes() - before + sum(buffer.nbytes for buffer in self._buffers)
        """Memory that this shape added."""

    def run(self, *inputs: Tensor) -> Outputs:
        """Replay on these inputs; the outputs hold until the next replay of any graph."""
        for buffer, tensor in zip(self._buffers, inputs, strict=True):
            assert buffer.shape == tensor.shape, f"a graph of {tuple(buffer.shape)} was given {tuple(tensor.shape)}"
            # From pageable memory the copy might wait for what the stream is at.
            is_upload = buffer.is_cuda and not tensor.is_cuda
            buffer.copy_(tensor.pin_memory() if is_upload else tensor, non_blocking=True)
        return self._replay()


Key = tuple[str, int, *tuple[int, ...]]
"""Stage, bucket (rows, or tokens over all rows), and what else makes a shape of it."""


@dataclass(slots=True)
class GraphTable:
    """Graphs by shape, and how often they served.  One thread records; another may replay what is published."""

    graphs: dict[Key, StepGraph] = field(default_factory=dict)
    replays: Counter[tuple[str, int]] = field(default_factory=Counter)
    """By stage and bucket."""
    misses: Counter[str] = field(default_factory=Counter)
    """Steps that had no graph, though their stage has some, and ran eagerly; by stage."""
    live: Counter[str] = field(default_factory=Counter)
    padded: Counter[str] = field(default_factory=Counter)
    """Rows replayed, or tokens of text and prompts: those of streams, and those that were pads; by stage."""
    bytes: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Memory taken, by stage and bucket."""

    def publish(self, recorded: dict[Key, StepGraph]) -> None:
        """Graphs that may be used from now on: all that a stage will have."""
        assert not recorded.keys() & self.graphs.keys()
        for key, graph in recorded.items():
            self.bytes[key[:2]] += graph.bytes
        # At once: who looks sees the table before or after.
        self.graphs = self.graphs | recorded

    def has(self, stage: str) -> bool:
        return any(key[0] == stage for key in self.graphs)

    def get(self, key: Key | None, stage: str, live: int) -> StepGraph | None:
        """The graph of a shape, which `live` of the rows or tokens of its bucket will use; None where there is none."""
        graph = None if key is None else self.graphs.get(key)
        if graph is None or key is None:
            if self.has(stage):
                self.misses[stage] += 1
            return None
        self.replays[key[:2]] += 1
        self.live[stage] += live
        self.padded[stage] += key[1] - live
        return graph

    def counts(self) -> dict[str, dict[str, Any]]:
        """All counters as plain values: by stage, and by stage and bucket."""
        by_bucket: dict[str, dict[str, dict[str, int]]] = {"replays": {}, "bytes": {}}
        for name, counter in (("replays", self.replays), ("bytes", self.bytes)):
            for (stage, bucket), count in sorted(counter.items()):
                by_bucket[name].setdefault(stage, {})[str(bucket)] = count
        return {**by_bucket, "misses": dict(self.misses), "live": dict(self.live), "padded": dict(self.padded)}
