"""SIP calls of a server: the program that answers them, for as long as the server runs.  See `breeze_rtc.sip`."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from breeze_rtc.errors import BadRequest, MissingExtra

log = logging.getLogger(__name__)

START_S = 15.0
STOP_S = 5.0


@dataclass(frozen=True, slots=True)
class Sip:
    """Where SIP calls are answered: a local HOST:PORT, and an account to register, sip:NAME@HOST, if there is one."""

    listen: str
    account: str | None = None
    password: str = field(default="", repr=False)

    def instructions(self) -> str:
        """How to call."""
        registered = f"; what {self.account} is called by comes here too" if self.account else ""
        return f"call sip:agent@{self.listen} from any telephone{registered}"


@asynccontextmanager
async def answering(sip: Sip, door: str) -> AsyncIterator[None]:
    """Answer calls, and bring them to the WebSocket `door`.  Raises `MissingExtra`, or `BadRequest` where it cannot."""
    if importlib.util.find_spec("pjsua2") is None:
        raise MissingExtra("answering SIP calls", "sip")
    account = ["--account", sip.account] if sip.account else []
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "breeze_rtc.sip", "--listen", sip.listen, "--door", door, *account),
        env={**os.environ, "SIP_PASSWORD": sip.password},
        stdout=asyncio.subprocess.PIPE,
    )
    watching: asyncio.Task[None] | None = None
    try:
        async with asyncio.timeout(START_S):
            if not await _is_answering(program):
                raise BadRequest(f"SIP calls cannot be answered at {sip.listen}; the line above says why")
        watching = asyncio.create_task(_watch(program))
        yield
    finally:
        if watching is not None:
            watching.cancel()
        if program.returncode is None:
            program.terminate()
            try:
                async with asyncio.timeout(STOP_S):
                    await program.wait()
            except TimeoutError:
                program.kill()


async def _is_answering(program: asyncio.subprocess.Process) -> bool:
    assert program.stdout is not None
    async for line in program.stdout:
        if line.startswith(b"Calls are answered"):
            return True
    return False


async def _watch(program: asyncio.subprocess.Process) -> None:
    assert program.stdout is not None
    async for line in program.stdout:
        log.info("%s", line.decode(errors="replace").rstrip())
    log.error("the program that answers SIP calls has ended; no more calls come in")
