"""A page in Python: the WebSocket, the listener, and what a browser would answer."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from typing import Any

from python_listener import PythonListener
from tone_engine import ToneEngine
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from breeze_rtc.agent.session import Callbacks
from breeze_rtc.server.app import VoiceServer, http_server, listen

LIMIT_S = 20.0  # for what should take a moment: the tests share their machine


class Hall:
    """A running server and its address."""

    def __init__(self, server: VoiceServer, engine: Any, port: int) -> None:
        self.server = server
        self.engine = engine
        self.http = f"http://127.0.0.1:{port}"
        self.ws = f"ws://127.0.0.1:{port}/call"

    @asynccontextmanager
    async def page(self, **options: Any) -> AsyncIterator[Page]:
        socket = await connect(self.ws, max_size=None)
        page = Page(socket, PythonListener(**options))
        try:
            yield page
        finally:
            await page.close()
            await page.socket.close()

    async def is_free(self) -> None:
        """Wait until no call is left, and hold that nothing of any is."""
        await until(lambda: not self.server._calls and not self.engine.open)


@asynccontextmanager
async def serving(
    callbacks: Callbacks, *, engine: Any = None, address: socket.socket | None = None, **options: Any
) -> AsyncIterator[Hall]:
    """A server on a real socket, in this loop."""
    engine = engine or ToneEngine()
    server = VoiceServer(callbacks, engine=engine, **{"listens": False, **options})
    address = address or listen("127.0.0.1", 0)
    async with server.lifespan():
        http = http_server(server)
        running = asyncio.create_task(http.serve(sockets=[address]))
        try:
            yield Hall(server, engine, address.getsockname()[1])
        finally:
            http.should_exit = True
            await running
            address.close()


class Page:
    """Receives everything into `messages`; `confirms` and `reports` say whether it behaves like a page."""

    def __init__(self, socket: ClientConnection, listener: PythonListener) -> None:
        self.socket = socket
        self.listener = listener
        self.messages: list[dict[str, Any]] = []
        self.close_reason: str | None = None
        self.close_code: int | None = None
        self.silences: list[tuple[int, int]] = []
        """Timestamps between which a flush kept it silent."""
        self._news = asyncio.Event()
        self._reader = asyncio.create_task(self._read())

    async def call(self, *, id: int = 0, heard_rtp: int | None = None) -> None:
        """Offer, connect, and report from the first sample on."""
        await self.one("hello")
        offer = await self.listener.offer()
        await self.send(type="offer", sdp=offer.sdp, microphone=offer.microphone, id=id, heard_rtp=heard_rtp)
        answer = await self.one("answer", lambda message: message["id"] == id)
        await self.listener.accept(answer["sdp"])
        self.listener.start_reports(lambda report: self._later({"type": "report", **asdict(report)}), interval_s=0.1)

    async def lose_connection(self) -> int:
        """The peer connection is gone without a word, and another listener is ready; returns what was heard last."""
        old, self.listener = self.listener, PythonListener()
        heard_rtp = old.mute().rtp
        await old.vanish()
        return heard_rtp

    async def lose_socket(self) -> None:
        """The network dies under it: no goodbye."""
        self.socket.transport.abort()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def come_back(self, url: str) -> dict[str, Any]:
        """Open another socket for the same call; returns its hello."""
        token = self.all("hello")[0]["resume"]
        self.socket = await connect(f"{url}?resume={token}&received={len(self.messages)}", max_size=None)
        hellos = len(self.all("hello"))
        self._reader = asyncio.create_task(self._read())
        await until(lambda: len(self.all("hello")) > hellos)
        return self.all("hello")[-1]

    async def send(self, **message: Any) -> None:
        await self.socket.send(json.dumps(message))

    async def type(self, text: str) -> None:
        await self.send(type="text", text=text)

    def all(self, kind: str) -> list[dict[str, Any]]:
        return [message for message in self.messages if message["type"] == kind]

    async def one(self, kind: str, check: Callable[[dict[str, Any]], bool] = lambda message: True) -> dict[str, Any]:
        """The first message of a kind that passes `check`, now or soon."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                for message in self.messages:
                    if message["type"] == kind and check(message):
                        return message
                self._news.clear()
                await self._news.wait()

    async def ended(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            await asyncio.shield(self._reader)

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self.listener.close()

    def _later(self, message: dict[str, Any]) -> None:
        async def send() -> None:
            with suppress(ConnectionClosed):
                await self.socket.send(json.dumps(message))

        asyncio.get_running_loop().create_task(send())

    async def _read(self) -> None:
        socket = self.socket
        try:
            async for raw in socket:
                message = json.loads(raw)
                self.messages.append(message)
                if message["type"] == "flush":
                    flushed = self.listener.mute()
                    self.listener.muted = False
                    self.silences.append((flushed.rtp, message["resume_rtp"]))
                    self._later({"type": "flushed", **asdict(flushed)})
                self._news.set()
        except ConnectionClosed:
            pass
        self.close_code, self.close_reason = socket.close_code, socket.close_reason
        self._news.set()


async def until(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not check():  # noqa: ASYNC110 - it watches from outside
            await asyncio.sleep(0.01)
