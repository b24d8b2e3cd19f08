"""Do calls hold while synthesis takes all it can get?

A server with the nano voice; callers in another process, each of whom hears an agent that never stops, while requests
for long files keep the engine busy besides.  aioice asks every connection for consent (RFC 7675) every five seconds and
gives up after six unanswered questions; here it asks every second and gives up after two, so two answers in a row that
are late by half a second end a call.

consent lost        connections that ended
reconnections       times the server thought a caller was gone
loop lag            how much later than asked for the server's event loop wakes
engine busy         share of the time in which a step ran

    python bench/full_load.py [--quick] [--seconds N] [--calls N] [--seed N] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import sys
from collections.abc import AsyncGenerator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aioice.ice
import httpx
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path += [str(Path(__file__).parent.parent / "tests" / name) for name in ("server", "transport")]
from origin import origin
from page import Page, serving
from python_listener import PythonListener, clock
from websockets.asyncio.client import connect

from breeze_rtc.agent.session import AgentSession, Callbacks
from breeze_rtc.clock import MS, SECOND
from breeze_rtc.runtime.engine import Engine
from breeze_rtc.server.app import SWITCH_INTERVAL_S, loop_factory

SENTENCE = "The road goes up through the trees, and at the top there is a view of the whole valley and the sea. "
FILES = 2  # requests for long files at the same time
WARM_S = 3.0


async def talk(session: AgentSession) -> AsyncGenerator[str, None]:
    while True:
        yield SENTENCE


async def ask_for_files(http: str) -> None:
    """Keep the engine busy with what has no deadline."""
    async with httpx.AsyncClient(base_url=http, timeout=None) as client:
        while True:
            await client.post("/v1/audio/speech", json={"input": SENTENCE * 10, "stream": False})


async def hear(ws: str, http: str, calls: int, seconds: float) -> dict[str, Any]:
    """The callers' process."""
    pages = [Page(await connect(ws, max_size=None), PythonListener()) for _ in range(calls)]
    for page in pages:
        await page.call()
    files = [asyncio.create_task(ask_for_files(http)) for _ in range(FILES)]
    await asyncio.sleep(seconds)
    told = {
        "up": sum(page.listener.peer.connectionState == "connected" and page.close_code is None for page in pages),
        "reconnections": sum(len(page.all("reconnect")) for page in pages),
        "gaps": sum(page.all("stats")[-1]["gaps"] for page in pages),
        "errors": sum(len(page.all("error")) for page in pages),
    }
    for task in files:
        task.cancel()
    await asyncio.gather(*files, return_exceptions=True)
    for page in pages:
        await page.close()
        await page.socket.close()
    return told


def callers(wire: Connection, ws: str, http: str, calls: int, seconds: float) -> None:
    wire.send(asyncio.run(hear(ws, http, calls, seconds)))


async def watch_loop(lag_ms: list[float]) -> None:
    """How much later than asked for the loop wakes; asked a hundred times a second."""
    while True:
        due = clock.now() + 10 * MS
        await asyncio.sleep(0.01)
        lag_ms.append((clock.now() - due) / MS)


async def measure(calls: int, seconds: float) -> dict[str, Any]:
    aioice.ice.CONSENT_INTERVAL, aioice.ice.CONSENT_FAILURES = 1.0, 2  # type: ignore[assignment]
    lag_ms: list[float] = []
    engine = Engine("nano")
    async with serving(Callbacks(on_enter=talk), engine=engine, max_calls=calls) as hall:
        assert sys.getswitchinterval() == SWITCH_INTERVAL_S
        here, there = multiprocessing.Pipe()
        spawn = multiprocessing.get_context("spawn")
        process = spawn.Process(target=callers, args=(there, hall.ws, hall.http, calls, seconds + WARM_S))
        process.start()
        while len(hall.server._calls) < calls:  # noqa: ASYNC110 - it watches from outside
            await asyncio.sleep(0.05)
        await asyncio.sleep(WARM_S)
        busy_s, began_at = busy(engine), clock.now()
        watching = asyncio.create_task(watch_loop(lag_ms))
        await asyncio.sleep(seconds - 0.5)
        watching.cancel()
        engine_busy = (busy(engine) - busy_s) / ((clock.now() - began_at) / SECOND)
        told: dict[str, Any] = await asyncio.to_thread(here.recv)
        await asyncio.to_thread(process.join)
    return told | {"lag_ms": lag_ms, "engine_busy": engine_busy}


def busy(engine: Engine) -> float:
    return sum(stage["seconds"] for stage in engine.stats["stages"].values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true", help="15 seconds")
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--calls", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1, help="nothing here is random; taken for the convention's sake")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    seconds = 15.0 if arguments.quick else arguments.seconds
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        told = runner.run(measure(arguments.calls, seconds))
    lag_ms = np.array(told.pop("lag_ms"))
    figures = {
        "seconds": seconds,
        "calls": arguments.calls,
        "consent_lost": arguments.calls - told["up"],
        "reconnections": told["reconnections"],
        "loop_lag_p50_ms": round(float(np.percentile(lag_ms, 50)), 2),
        "loop_lag_p99_ms": round(float(np.percentile(lag_ms, 99)), 2),
        "loop_lag_max_ms": round(float(lag_ms.max()), 1),
        "engine_busy": round(told["engine_busy"], 2),
        "gaps": told["gaps"],
        "errors": told["errors"],
    }
    if arguments.json:
        arguments.json.write_text(
            json.dumps(origin("aiortc", "aioice", "onnxruntime") | figures | {"lag_ms": lag_ms.tolist()})
        )
    print("RESULT " + " ".join(f"{name}={value:g}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
