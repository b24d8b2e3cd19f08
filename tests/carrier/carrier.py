"""A carrier for tests: SIP and RTP to the telephone, its personality's WebSocket to the server.

    python tests/carrier/carrier.py twilio ws://127.0.0.1:8000/phone/KEY/twilio

answers SIP calls at the port it prints.  PJSIP's clock plays what the server sends, mu-law over real RTP; a mark comes
back when that clock has passed it, a clear empties what is queued.  Each event is one line of JSON on standard output,
with its time on the monotonic clock, in ns.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from contextlib import suppress
from typing import Any

from personalities import PERSONALITIES, Clear, HangUp, Mark, Sound
from pjsip import SILENCE, Call, Endpoint
from pjsip_player import Player
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed


def tell(event: str, at_ns: int | None = None, **fields: Any) -> None:
    print(json.dumps({"event": event, "at_ns": at_ns or time.monotonic_ns(), **fields}), flush=True)


class CarrierCall:
    def __init__(self, call: Call, personality: str, url: str) -> None:
        self.call = call
        self.speaks = PERSONALITIES[personality]()
        self.url = url
        self.player = Player()
        self.out: asyncio.Queue[str | bytes] = asyncio.Queue()
        self.loop = asyncio.get_running_loop()
        self.plays = False
        call.take, call.give = self.take, self.give
        call.on_digit = lambda digit: self.out.put_nowait(self.speaks.digit(digit))

    # On PJSIP's thread.

    def take(self) -> bytes:
        frame, marks = self.player.next()
        for name in marks:
            self.loop.call_soon_threadsafe(self.reach, name)
        if self.plays != bool(frame):
            self.plays = bool(frame)
            self.loop.call_soon_threadsafe(tell, "plays" if frame else "dry", time.monotonic_ns())
        return frame + SILENCE[len(frame) :]

    def give(self, pcm: bytes) -> None:
        self.loop.call_soon_threadsafe(self.hear, pcm)

    # On the event loop.

    def reach(self, name: str) -> None:
        tell("mark", name=name)
        self.out.put_nowait(self.speaks.reached(name))

    def hear(self, pcm: bytes) -> None:
        for message in self.speaks.voice(pcm):
            self.out.put_nowait(message)

    async def hold(self) -> None:
        self.call.answer_with(200)
        async with connect(self.url, max_size=None) as socket:
            tell("connected")
            await self.call.has_media.wait()
            for message in self.speaks.hello():
                await socket.send(message)
            work = [asyncio.create_task(part) for part in (self.read(socket), self.write(socket))]
            work.append(asyncio.create_task(self.call.ended.wait()))  # type: ignore[arg-type]
            await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
            tell("stopped", reason=socket.close_reason or "")
            with suppress(ConnectionClosed):
                for message in self.speaks.bye():
                    await socket.send(message)
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
        self.call.hang_up()

    async def write(self, socket: ClientConnection) -> None:
        with suppress(ConnectionClosed):
            while True:
                await socket.send(await self.out.get())

    async def read(self, socket: ClientConnection) -> None:
        async for raw in socket:
            try:
                said = self.speaks.read(raw)
            except (AssertionError, KeyError, ValueError) as error:
                tell("refused", why=repr(error), message=str(raw)[:200])
                continue
            match said:
                case Sound():
                    self.player.put(said.pcm)
                    tell("sound", ms=len(said.pcm) // 16, waiting_ms=self.player.waiting_bytes // 16)
                case Mark():
                    self.player.mark(said.name)
                case Clear():
                    held_ms = self.player.waiting_bytes // 16
                    names = self.player.clear()
                    tell("clear", held_ms=held_ms, marks=names)
                    for message in self.speaks.cleared(names):
                        await socket.send(message)
                case HangUp():
                    return


async def main(personality: str, url: str) -> None:
    endpoint = Endpoint("127.0.0.1", 0)
    calls: set[asyncio.Task[None]] = set()

    def take(call: Call) -> None:
        task = asyncio.create_task(CarrierCall(call, personality, url).hold())
        calls.add(task)
        task.add_done_callback(calls.discard)

    endpoint.on_call = take
    endpoint.start()
    print(f"Calls are answered at sip:agent@127.0.0.1:{endpoint.port}", flush=True)
    ends = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ends.set)
    await ends.wait()
    await endpoint.close()
    sys.stdout.flush()
    os._exit(0)  # Objects of PJSIP that Python deletes now, after their library, may take the process with them.


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
