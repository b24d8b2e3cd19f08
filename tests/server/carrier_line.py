"""A carrier in real time: it opens our socket as Twilio does, plays what it gets at 8 kHz, and gives marks back."""

from __future__ import annotations

import asyncio
import base64
import json
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from breeze_rtc.clock import SECOND, MonotonicClock
from breeze_rtc.media.line_codec import LineCodec

MULAW = LineCodec("PCMU")
PIECE = 160
"""20 ms at 8 kHz."""
START: dict[str, Any] = {
    "event": "start",
    "sequenceNumber": "1",
    "streamSid": "MZ1",
    "start": {
        "streamSid": "MZ1",
        "callSid": "CA1",
        "accountSid": "AC1",
        "tracks": ["inbound"],
        "mediaFormat": {"encoding": "audio/x-mulaw", "sampleRate": 8000, "channels": 1},
        "customParameters": {},
    },
}


class CarrierLine:
    """One call.  `heard` is the truth: what came out of the telephone, 20 ms by 20 ms, silence included."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.heard: list[bytes] = []
        self.heard_is_speech: list[bool] = []
        self.clears: list[int] = []
        """Pieces heard when each clear came."""
        self.most_held = 0
        self.close_reason = ""
        self.says: deque[bytes] = deque()
        """What the caller is going to say."""
        self._queue: deque[bytes | str] = deque()
        self._tasks: list[asyncio.Task[None]] = []
        self._stalled_pieces = 0
        self._late: list[str] = []

    async def start(self, start: dict[str, Any] = START) -> None:
        await self.socket.send(json.dumps({"event": "connected", "protocol": "Call", "version": "1.0.0"}))
        await self.socket.send(json.dumps(start))
        self._tasks = [asyncio.create_task(self._play()), asyncio.create_task(self._take())]

    def say(self, samples: NDArray[np.float32]) -> None:
        """The caller says this, 8 kHz, from now on."""
        written = MULAW.encode(samples)
        self.says.extend(written[at : at + PIECE] for at in range(0, len(written) - PIECE, PIECE))

    def stall(self, seconds: float) -> None:
        """The line brings nothing of the caller for so long, and then all of it at once."""
        self._stalled_pieces = round(seconds / 0.02)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.socket.close()

    @property
    def speech_s(self) -> float:
        return sum(self.heard_is_speech) * 0.02

    def samples(self) -> NDArray[np.float32]:
        """What was heard, as one piece."""
        return MULAW.decode(b"".join(self.heard)).astype(np.float32) / 32_768

    async def _take(self) -> None:
        try:
            async for raw in self.socket:
                message = json.loads(raw)
                match message["event"]:
                    case "media":
                        payload = base64.b64decode(message["media"]["payload"])
                        self._queue.extend(payload[at : at + PIECE] for at in range(0, len(payload), PIECE))
                        self.most_held = max(self.most_held, sum(isinstance(item, bytes) for item in self._queue))
                    case "mark":
                        self._queue.append(message["mark"]["name"])
                    case "clear":
                        self.clears.append(len(self.heard))
                        marks = [item for item in self._queue if isinstance(item, str)]
                        self._queue.clear()
                        for name in marks:
                            await self._echo(name)
        except ConnectionClosed:
            pass
        self.close_reason = self.socket.close_reason or ""

    async def _play(self) -> None:
        clock = MonotonicClock()
        began, number = clock.now(), 0
        try:
            while True:
                while self._queue and isinstance(self._queue[0], str):
                    await self._echo(str(self._queue.popleft()))
                piece = self._queue.popleft() if self._queue else None
                assert not isinstance(piece, str)
                self.heard.append(piece or MULAW.silence(PIECE))
                self.heard_is_speech.append(piece is not None)
                said = self.says.popleft() if self.says else MULAW.silence(PIECE)
                number += 1
                media = {"track": "inbound", "chunk": str(number), "timestamp": str(20 * number)}
                media["payload"] = base64.b64encode(said).decode()
                self._late.append(json.dumps({"event": "media", "streamSid": "MZ1", "media": media}))
                self._stalled_pieces -= 1
                while self._late and self._stalled_pieces < 0:
                    await self.socket.send(self._late.pop(0))
                await asyncio.sleep(max(0.0, (began - clock.now()) / SECOND + 0.02 * number))
        except ConnectionClosed:
            pass

    async def _echo(self, name: str) -> None:
        await self.socket.send(json.dumps({"event": "mark", "streamSid": "MZ1", "mark": {"name": name}}))
