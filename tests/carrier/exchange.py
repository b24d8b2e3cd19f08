"""Programs that answer SIP calls: the test carrier in each personality, and the server's own SIP door."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from machine import hurry
from page import Hall, until

HERE = Path(__file__).parent


class Exchange:
    """A program that answers SIP calls, and what it tells."""

    def __init__(self) -> None:
        self.uri = ""
        self.pid = 0
        self.told: list[dict[str, Any]] = []

    def all(self, event: str) -> list[dict[str, Any]]:
        return [item for item in self.told if item["event"] == event]


@asynccontextmanager
async def exchange(hall: Hall, kind: str) -> AsyncIterator[Exchange]:
    """kind: a carrier's personality, or `sip`: the server's own SIP door."""
    here = Exchange()
    if kind == "sip":
        assert hall.server.sip is not None
        here.uri = f"sip:agent@127.0.0.1:{hall.server.sip.port}"
        yield here
        return
    door = hall.http.replace("http", "ws") + f"/phone/secret/{kind}"
    command = [str(HERE / "carrier.py"), kind, door]
    running = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=asyncio.subprocess.PIPE)
    assert running.stdout is not None
    here.pid = running.pid
    hurry(here.pid)

    async def read() -> None:
        async for line in running.stdout or ():
            if line.startswith(b"{"):
                here.told.append(json.loads(line))
            elif b"sip:" in line:
                here.uri = line.decode().split()[-1]

    reading = asyncio.create_task(read())
    try:
        await until(lambda: bool(here.uri))
        yield here
    finally:
        running.terminate()
        code = await running.wait()
        assert code == 0, f"the carrier ended with {code}"
        await reading
