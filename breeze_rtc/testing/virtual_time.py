"""An asyncio loop whose time jumps: what would be waited for happens at once, in the same order.

Instead of waiting for its next timer the loop sets its clock to it.  A call of a minute takes as long as its callbacks
compute.  Two things of the world are kept out, for a clock that jumps would leave them behind:

- work for a thread (`asyncio.to_thread`, `run_in_executor`) is done on the spot and takes no virtual time;
- while a socket or a pipe is open on the loop, time passes as it really does: whoever talks to a real server in a
  test waits for it.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from breeze_rtc.clock import SECOND, MonotonicClock

T = TypeVar("T")


class LoopClock:
    """The time of the running loop, virtual or not, in ns."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def now(self) -> int:
        return round(self._loop.time() * SECOND)


class _Jump:
    """Stands in for a loop's selector: instead of waiting, it moves the clock."""

    def __init__(self, selector: Any, time_s: float) -> None:
        self.time_s = time_s
        self._selector = selector
        # Descriptors that were there from the start wait for nothing: the loop's own pipe.
        self._own = len(selector.get_map())
        self._clock = MonotonicClock()

    def select(self, timeout: float | None = None) -> Any:
        if len(self._selector.get_map()) > self._own:
            began = self._clock.now()
            ready = self._selector.select(timeout)
            self.time_s += (self._clock.now() - began) / SECOND
            return ready
        ready = self._selector.select(0)
        if not ready and timeout != 0:
            if timeout is None:
                raise RuntimeError("nothing will ever happen again: every task waits for another")
            self.time_s += timeout
        return ready

    def __getattr__(self, name: str) -> Any:
        return getattr(self._selector, name)


@contextmanager
def virtual_time(start_s: float | None = None) -> Iterator[None]:
    """Let the running loop's time jump until the block ends; it goes on from where it is, or from `start_s`.

    The loop must be asyncio's own (`asyncio.run`, pytest-asyncio and unittest have it); uvloop's time cannot be moved.
    Raises RuntimeError otherwise.  Inside another such block it changes nothing.
    """
    running = asyncio.get_running_loop()
    if not isinstance(running, asyncio.SelectorEventLoop):
        raise RuntimeError(f"virtual time needs asyncio's own event loop, not {type(running).__module__}'s")
    loop: Any = running
    selector = loop._selector
    if isinstance(selector, _Jump):
        yield
        return
    jump = _Jump(selector, loop.time() if start_s is None else start_s)
    loop._selector, loop.time, loop.run_in_executor = jump, lambda: jump.time_s, _at_once
    try:
        yield
    finally:
        loop._selector = selector
        del loop.time, loop.run_in_executor


def _at_once(executor: Any, work: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
    future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    try:
        future.set_result(work(*arguments))
    except Exception as error:
        future.set_exception(error)
    return future


def run(work: Coroutine[Any, Any, T], within_s: float = 300.0) -> T:
    """`asyncio.run` in virtual time, from 0 s on; TimeoutError after `within_s` virtual seconds."""

    async def limited() -> T:
        with virtual_time(0.0):
            async with asyncio.timeout(within_s):
                return await work

    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.DefaultSelector())) as runner:
        return runner.run(limited())
