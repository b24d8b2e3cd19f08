"""Work beside the main work of a device: the codec on a CUDA stream of its own, or on the CPU in a thread of its own;
where all is on the CPU, the same calls, at once.

What is given to a lane runs after all that was given to the main stream before it, and before what is given to the main
stream after `join`.  Nothing else is ordered: while the codec makes sound, the main stream goes on with the next frame.
That is safe because the two touch different memory:

    codec reads      frames of the ring that DEPTH wrote before it was issued; the next frames go elsewhere
    codec writes     the state of its slots, which nobody else touches before the slot is opened anew
    opening a slot   sets both back: the executor joins the lane first

A graph's memory is shared by all graphs that were recorded on the same stream, and by no others: see `CudaRecorder`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

import torch
from torch import Tensor


class OnItsWay(Protocol):
    """A tensor on its way to the host."""

    def is_there(self) -> bool: ...

    def wait(self) -> Tensor:
        """The tensor, on the host."""


class Lane(Protocol):
    """A device's second queue, and how values come from the device without anybody standing still."""

    def run(self, work: Callable[[], Tensor]) -> OnItsWay:
        """Begin `work`, whose result is wanted on the host; returns before it is done."""

    def join(self) -> None:
        """What the main stream is given from now on runs after all that the lane was given."""

    def send(self, values: Tensor) -> OnItsWay:
        """A result of the main stream sets out for the host; what the main stream is given from now on runs behind it
        and need not be waited for to read it."""

    def read(self, sent: OnItsWay, meanwhile: Callable[[], bool]) -> Tensor:
        """What was sent, on the host.  While it is computed `meanwhile` is called again and again, for as long as it
        says that something else is on its way."""


class There:
    """A tensor that is on the host."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def is_there(self) -> bool:
        return True

    def wait(self) -> Tensor:
        return self._tensor


class NullLane:
    """Of a device that does one thing after the other."""

    def run(self, work: Callable[[], Tensor]) -> OnItsWay:
        # A copy here too: what a graph gave is overwritten by the next.
        return There(work().clone())

    def join(self) -> None:
        pass

    def send(self, values: Tensor) -> OnItsWay:
        return There(values.clone())

    def read(self, sent: OnItsWay, meanwhile: Callable[[], bool]) -> Tensor:
        return sent.wait()


class _Copy:
    """A copy into pinned memory, and the event behind it."""

    def __init__(self, values: Tensor, stream: Any) -> None:
        # Pageable memory would make the copy wait for the device.  Pinned memory is taken from a pool.
        self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._host.copy_(values, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def is_there(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> Tensor:
        self._event.synchronize()
        return self._host


class CudaLane:
    """A stream of higher priority: its kernels are few and short, and a listener waits for them.  Not verified without
    a GPU; what is ordered, and how, is checked on a CPU by lanes that run their work as late as they may."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def run(self, work: Callable[[], Tensor]) -> OnItsWay:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        # What is allocated here belongs to this stream, and is given to nobody else before the stream is done with it.
        with torch.cuda.stream(self._stream):
            return _Copy(work(), self._stream)

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def send(self, values: Tensor) -> OnItsWay:
        return _Copy(values, torch.cuda.current_stream(self._device))

    def read(self, sent: OnItsWay, meanwhile: Callable[[], bool]) -> Tensor:
        while not sent.is_there():
            if not meanwhile():
                break
        return sent.wait()


class ThreadLane:
    """A thread of the CPU, for work that needs the main device no more once what it reads was sent from there."""

    def __init__(self, main: Lane) -> None:
        """main: how values come from the main device."""
        self.send, self.read = main.send, main.read
        self._thread = ThreadPoolExecutor(1, "codec")
        self._last: Future[Tensor] | None = None

    def run(self, work: Callable[[], Tensor]) -> OnItsWay:
        self._last = self._thread.submit(torch.inference_mode()(work))
        return _Promised(self._last)

    def join(self) -> None:
        if self._last is not None:
            wait([self._last])


class _Promised:
    def __init__(self, tensor: Future[Tensor]) -> None:
        self._tensor = tensor

    def is_there(self) -> bool:
        return self._tensor.done()

    def wait(self) -> Tensor:
        return self._tensor.result()


def lane_of(device: torch.device, *, codec_apart: bool = False) -> Lane:
    """codec_apart: the codec is on the CPU, whatever the main device is."""
    main: Lane = CudaLane(device) if device.type == "cuda" else NullLane()
    return ThreadLane(main) if codec_apart else main
