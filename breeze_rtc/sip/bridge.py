"""One SIP call, brought to the server's telephone door: PJSIP's clock plays what comes, and gives marks back.

The words are those of Asterisk's chan_websocket, with one more: `LINE`, the round trip to the telephone by RTCP.
"""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import suppress
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from breeze_rtc.sip.endpoint import SILENCE, Call
from breeze_rtc.sip.player import FRAME_BYTES, Player

log = logging.getLogger(__name__)

LINE_S = 1.0
MAX_WAITING_BYTES = 20 * 50 * FRAME_BYTES
"""20 s: more than that is not played, as in Asterisk."""
CONNECT_S = 5.0


async def bridge(call: Call, url: str) -> None:
    """Answer `call` once the server takes it, and hold it until either side ends it."""
    call.answer_with(180)
    try:
        async with connect(url, open_timeout=CONNECT_S, max_size=None, compression=None) as socket:
            await _Bridge(call, socket).hold()
    except (OSError, TimeoutError, InvalidHandshake) as error:
        log.warning("the server does not take a call: %s", error)
        call.hang_up(486)


class _Bridge:
    def __init__(self, call: Call, socket: ClientConnection) -> None:
        self._call = call
        self._socket = socket
        self._player = Player()
        self._loop = asyncio.get_running_loop()
        self._out: asyncio.Queue[bytes | str] = asyncio.Queue()
        call.take, call.give = self._take, self._give
        call.on_digit = lambda digit: self._tell("DTMF_END", digit=digit)

    async def hold(self) -> None:
        call = self._call
        call.answer_with(200)
        work = [asyncio.create_task(part()) for part in (self._read, self._write, self._watch, call.ended.wait)]
        try:
            await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
            call.hang_up()

    # --- on PJSIP's thread

    def _take(self) -> bytes:
        frame, marks = self._player.next()
        for name in marks:
            self._loop.call_soon_threadsafe(self._tell_mark, name)
        return frame + SILENCE[len(frame) :]

    def _give(self, pcm: bytes) -> None:
        self._loop.call_soon_threadsafe(self._out.put_nowait, pcm)

    # --- on the event loop

    def _tell(self, event: str, **fields: Any) -> None:
        self._out.put_nowait(json.dumps({"event": event, **fields}))

    def _tell_mark(self, name: str) -> None:
        self._tell("MEDIA_MARK_PROCESSED", correlation_id=name)

    async def _write(self) -> None:
        await self._call.has_media.wait()
        start = {"event": "MEDIA_START", "format": "slin", "ptime": 20, "optimal_frame_size": FRAME_BYTES}
        start |= {"channel_id": self._call.name, "from": self._call.caller, "to": self._call.called}
        with suppress(ConnectionClosed):
            await self._socket.send(json.dumps(start))
            while True:
                await self._socket.send(await self._out.get())

    async def _read(self) -> None:
        with suppress(ConnectionClosed):
            async for raw in self._socket:
                if isinstance(raw, bytes):
                    if self._player.waiting_bytes < MAX_WAITING_BYTES:
                        self._player.put(raw)
                    continue
                message = json.loads(raw)
                match message.get("command"):
                    case "MARK_MEDIA":
                        self._player.mark(message.get("correlation_id", ""))
                    case "FLUSH_MEDIA":
                        for name in self._player.clear():
                            self._tell_mark(name)
                    case "HANGUP":
                        return

    async def _watch(self) -> None:
        await self._call.has_media.wait()
        while True:
            await asyncio.sleep(LINE_S)
            quality = self._call.quality()
            if quality.round_trip_ms is not None:
                self._tell("LINE", round_trip_ms=round(quality.round_trip_ms))
