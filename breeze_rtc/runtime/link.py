"""The engine's other end: the process or thread that computes, started, and the connection to it."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import cast

from breeze_rtc.errors import BadRequest, BreezeError, CheckpointError, EngineClosed, PeerError
from breeze_rtc.runtime.messages import Message, MessageReader, Ready, Start, StartFailed, encode

log = logging.getLogger(__name__)

STOP_S = 5.0
"""How long a closed engine may take to go before it is killed."""
_PACKAGE_ROOT = Path(__file__).parents[2]


async def launch(start: Start, heard: Callable[[Message], None], *, own_process: bool) -> tuple[Link, Peer, Ready]:
    """Start an engine and wait until it is ready.  heard: called with what it says from then on, and before of its
    loading.  own_process: in a process of its own, not in a thread of this one.

    Raises CheckpointError and BadRequest as the engine did, and EngineClosed when it ends before it is ready; nothing
    of it is left then.
    """
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    link = Link(heard)

    def spawn() -> Peer:
        return EngineProcess(theirs, start.threads) if own_process else EngineThread(theirs)

    try:
        peer = await asyncio.to_thread(spawn)
        await loop.create_unix_connection(lambda: link, sock=ours)
    except BaseException:
        ours.close()
        raise
    try:
        link.send(start)
        return link, peer, await link.ready
    except BaseException as error:
        link.close()
        how = await asyncio.to_thread(peer.wait)
        if isinstance(error, _Ended):
            raise EngineClosed(f"the engine {how} while it was starting") from None
        raise


class _Ended(Exception):
    """The connection to an engine is gone before it has said anything: how it ended says why."""


class Link(asyncio.Protocol):
    """The connection to one engine process or thread, from its start to its end."""

    def __init__(self, heard: Callable[[Message], None]) -> None:
        loop = asyncio.get_running_loop()
        self._heard = heard
        self._reader = MessageReader()
        self._transport: asyncio.WriteTransport | None = None
        # Done when the engine says that it is ready; fails with the reason why it never will be.
        self.ready: asyncio.Future[Ready] = loop.create_future()
        # Done when the connection is gone, with the peer's fault if there was one.
        self.lost: asyncio.Future[PeerError | None] = loop.create_future()
        self._fault: PeerError | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Said, not checked: uvloop's transports have the methods and not the base class.
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            messages = self._reader.feed(data)
        except PeerError as error:
            self._fault = error
            self.close()
            return
        for message in messages:
            if isinstance(message, Ready):
                self.ready.set_result(message)
            elif isinstance(message, StartFailed):
                self.ready.set_exception(_start_error(message))
            else:
                self._heard(message)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ready.done():
            self.ready.set_exception(EngineClosed(str(self._fault)) if self._fault else _Ended())
        if not self.lost.done():
            self.lost.set_result(self._fault)

    def send(self, message: Message) -> None:
        assert self._transport is not None
        self._transport.write(encode(message))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class EngineProcess:
    """The engine in an interpreter of its own."""

    def __init__(self, theirs: socket.socket, threads: int) -> None:
        # -P and the path: the child imports this very package, whatever lies in the working directory.  A process group
        # of its own: Ctrl-C in a terminal reaches the media process, which closes the socket when it is done.
        path = os.pathsep.join(filter(None, (str(_PACKAGE_ROOT), os.environ.get("PYTHONPATH"))))
        with theirs:
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-m", "breeze_rtc.runtime.process", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)},
                process_group=0,
            )
        self.pid: int | None = self._child.pid

    def wait(self) -> str:
        """How it ended, as the rest of a sentence.  Blocks; one that does not go by itself is killed."""
        try:
            code = self._child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
            return f"did not stop within {STOP_S:g} s and was killed"
        return f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"


class EngineThread:
    """The engine in a thread of this process: for tests and small tools.  It takes the GIL from whoever sends sound."""

    def __init__(self, theirs: socket.socket) -> None:
        self.pid: int | None = None
        self._how = "thread ended"
        self._thread = threading.Thread(target=self._run, args=(theirs,), name="breeze-engine", daemon=True)
        self._thread.start()

    def _run(self, theirs: socket.socket) -> None:
        # Whatever fails, the other side must see this end closed: it waits for nothing else.
        with theirs:
            try:
                from breeze_rtc.runtime.process import serve

                serve(theirs)
            except BaseException as error:
                self._how = f"thread failed: {type(error).__name__}: {error}"
                log.exception("the engine thread failed")

    def wait(self) -> str:
        """See `EngineProcess.wait`; a thread cannot be killed."""
        self._thread.join(STOP_S)
        return "did not stop" if self._thread.is_alive() else self._how


Peer = EngineProcess | EngineThread


def _start_error(message: StartFailed) -> BreezeError:
    known: dict[str, type[BreezeError]] = {"CheckpointError": CheckpointError, "BadRequest": BadRequest}
    return known.get(message.error, EngineClosed)(message.detail)
