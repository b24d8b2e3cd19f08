"""Time that jumps, on loops that exist."""

from __future__ import annotations

import asyncio
import threading

import pytest

from breeze_rtc.clock import SECOND, MonotonicClock
from breeze_rtc.testing import run, virtual_time


def test_an_hour_passes_at_once_and_in_order() -> None:
    """Timers fire in their order at their time."""
    fired: list[tuple[str, float]] = []

    async def work() -> None:
        loop = asyncio.get_running_loop()
        for at_s, name in ((3_600, "last"), (1, "first"), (60, "second")):
            loop.call_at(at_s, lambda name=name: fired.append((name, loop.time())))
        await asyncio.sleep(3_600.5)

    began = MonotonicClock().now()
    run(work(), within_s=4_000)
    assert MonotonicClock().now() - began < 2 * SECOND
    assert fired == [("first", 1), ("second", 60), ("last", 3_600)]


def test_a_wait_for_nothing_is_an_error() -> None:
    """A test whose tasks all wait for each other ends."""

    async def work() -> None:
        await asyncio.Event().wait()

    with pytest.raises((TimeoutError, RuntimeError)):
        run(work())


async def test_threads_work_is_done_on_the_spot() -> None:
    """It takes no virtual time, and what it raises arrives."""

    def fail() -> None:
        raise ValueError("in the thread")

    with virtual_time():
        before = asyncio.get_running_loop().time()
        assert await asyncio.to_thread(threading.get_ident) == threading.get_ident()
        with pytest.raises(ValueError, match="in the thread"):
            await asyncio.to_thread(fail)
        assert asyncio.get_running_loop().time() == before


async def test_a_connection_makes_time_real() -> None:
    """Whoever talks to a real server in a test gets its answer before the timeout fires."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        await asyncio.sleep(0.05)
        writer.write(b"!")
        writer.close()

    with virtual_time():
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.write(b"?")
            async with asyncio.timeout(10):
                assert await reader.read() == b"!"
            writer.close()
