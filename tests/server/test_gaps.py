"""Several calls at once, with the real engine and its nano voice on the same processor."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack

import pytest
from page import Page, serving, until

from breeze_rtc.agent.session import AgentSession, Callbacks
from breeze_rtc.runtime.engine import Engine

CALLS = 4
SECONDS = 8


async def tell(session: AgentSession) -> AsyncGenerator[str, None]:
    while True:
        yield "The boat sailed on through the night, and nobody on it knew how far it was to the land. "


async def test_parallel_calls_have_no_gaps_while_the_voice_speaks_to_all_of_them() -> None:
    """Four callers, a story without an end for each: not one slot of silence in mid-sentence in eight seconds.

    Reproduction 23 (pipecat#3092, #3378).
    """
    stood_still_s = 0.0

    async def watch() -> None:
        nonlocal stood_still_s
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.005)
            stood_still_s = max(stood_still_s, time.monotonic() - began - 0.005)

    engine = Engine("nano")
    async with serving(Callbacks(on_enter=tell), engine=engine) as hall, AsyncExitStack() as stack:
        pages: list[Page] = []
        for _ in range(CALLS):
            pages.append(page := await stack.enter_async_context(hall.page()))
            await page.call()
        for page in pages:
            await page.one("heard")
        sinks = [call._webrtc.sink for call in hall.server._calls]  # type: ignore[union-attr]
        before = [(sink.gap_slots, sink.sent_ticks) for sink in sinks]
        watching = asyncio.create_task(watch())
        await asyncio.sleep(SECONDS)
        watching.cancel()
        silent = [sink.gap_slots - slots for sink, (slots, _) in zip(sinks, before, strict=True)]
        sent = [sink.sent_ticks - ticks for sink, (_, ticks) in zip(sinks, before, strict=True)]
        assert min(sent) > 48_000 * (SECONDS - 1)
        assert len({speech for sink in sinks for speech in sink.streams}) == CALLS
        for page in pages:
            await page.close()
    await until(lambda: not hall.server._calls)
    if any(silent) and (stood_still_s > 0.04 or os.getloadavg()[0] > 1.5 * (os.cpu_count() or 1)):
        pytest.skip(f"this machine has too much else to do: {silent} slots without speech")
    assert silent == [0] * CALLS
