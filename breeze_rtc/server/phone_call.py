"""A telephone call joined to an agent: over a carrier's WebSocket, or Asterisk's AudioSocket.

Whatever ends it (the carrier, the agent, a dead socket, the server's own end) sets one event; then the session is
silenced, the line hung up, and everything is free.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from breeze_rtc.agent.session import AgentSession, Callbacks, Ears
from breeze_rtc.agent.vad import Samples, VoiceActivity
from breeze_rtc.clock import SECOND, Clock
from breeze_rtc.errors import PeerError
from breeze_rtc.playback import AudioSink, PlaybackReport
from breeze_rtc.runtime.engine import Engine
from breeze_rtc.server.call import MeteredSink
from breeze_rtc.server.metrics import Metrics
from breeze_rtc.transport.audio_socket import HANG_UP, AudioSocketLine, message
from breeze_rtc.transport.caller import CallerVoice
from breeze_rtc.transport.carrier import Carrier, Out
from breeze_rtc.transport.pacer import Pacer
from breeze_rtc.transport.phone import PhoneLine

log = logging.getLogger(__name__)

START_S = 10.0
"""A carrier says what call it brings at once."""
SILENT_S = 20.0
"""Carriers send sound, marks or both all the time; one that says nothing for so long is gone, whatever its socket
thinks."""
SEND_S = 5.0
"""A socket that takes no message for so long is dead."""
MAX_MESSAGES_PER_S = 400
MAX_REFUSED = 50
MAX_FLUSH_S = 0.5
LAST_WORD_S = 0.2
"""Before hanging up, beyond the moment at which all was heard by our reckoning: a telephone throws away what it still
holds, and a softphone held 60 ms more than was reckoned with."""


@dataclass(frozen=True, slots=True)
class Desk:
    """What a server lends to each call."""

    engine: Engine
    callbacks: Callbacks
    metrics: Metrics
    activity: VoiceActivity
    ears: Ears | None
    clock: Clock


class Line(Protocol):
    """A telephone line, as a conversation sees it."""

    closed: asyncio.Event
    caller: CallerVoice

    @property
    def path_delay_ns(self) -> int: ...
    def position(self, stream: int) -> PlaybackReport: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def close(self) -> None: ...


class Conversation:
    """One call's session, joined to its line: to the session it is the `Call`."""

    def __init__(self, desk: Desk, line: Line, sink: AudioSink) -> None:
        self.closed = asyncio.Event()
        """Set once, when the call is to end."""
        self.reason = "the caller hung up"
        """Why it ended."""
        self._metrics = desk.metrics
        self._clock = desk.clock
        self._line = line
        self._sample_rate = desk.engine.sample_rate
        self._sink = MeteredSink(sink, desk.metrics, desk.engine.sample_rate, self._first_packet)
        self._session = AgentSession(
            desk.callbacks,
            call=self,
            voice=desk.engine,
            ears=desk.ears,
            activity=desk.activity,
            observe=desk.metrics.observe,
        )
        # When the agent got its turn, until its answer has left.
        self._turn_at: int | None = None

    # -- the session's Call

    @property
    def sink(self) -> MeteredSink:
        return self._sink

    def position(self, stream: int) -> PlaybackReport:
        return self._line.position(stream)

    async def flush(self) -> None:
        """What was on its way when the speech was cleared has been heard."""
        await asyncio.sleep(min(MAX_FLUSH_S, self._line.path_delay_ns / SECOND))
        self._line.resume()

    def pause(self) -> None:
        self._line.pause()

    def resume(self) -> None:
        self._line.resume()

    def send(self, message: dict[str, Any]) -> None:
        """What a page would show.  A telephone shows nothing: the figures are taken and the rest is left."""
        if message["type"] == "user":
            self._turn_at = self._clock.now()
        elif message["type"] == "speech_end":
            heard_samples = self._line.position(message["stream"]).heard_samples
            self._metrics.heard.inc(heard_samples / self._sample_rate)

    def microphone(self) -> AsyncIterator[Samples]:
        return self._line.caller.blocks()

    # -- its life

    async def hold(self, *work: Coroutine[Any, Any, None]) -> None:
        """Hold the call until it ends, with its line's `work` beside it; an error of either ends it too."""
        self._metrics.calls.inc()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(coroutine) for coroutine in work]
                await self.closed.wait()
                for task in tasks:
                    task.cancel()
        except* Exception as errors:
            log.error("a telephone call failed", exc_info=errors)
            self.reason = "the server failed; its log says how"
        finally:
            self.end(self.reason)
            self._metrics.calls.dec()
        self._metrics.calls_ended.labels(self.reason.split(":")[0]).inc()

    async def converse(self, metadata: Mapping[str, str]) -> None:
        """The agent's part, from when the call is there.  metadata: what the line knows of it."""
        self._turn_at = self._clock.now()
        self._session.metadata = metadata
        await self._session.run()
        await asyncio.sleep(LAST_WORD_S)
        self.end("the agent ended the call")

    def press(self, digit: str) -> None:
        """The caller pressed a key."""
        self._session.press(digit)

    def end(self, reason: str) -> None:
        """End the call; the first reason counts."""
        if not self.closed.is_set():
            self.reason = reason
            self.closed.set()
        self._line.close()

    def _first_packet(self, stream: int) -> None:
        if self._turn_at is not None:
            self._metrics.first_packet.observe((self._clock.now() - self._turn_at) / SECOND)
            self._turn_at = None


class CarrierCall:
    """One call over a carrier's accepted WebSocket: `await CarrierCall(...).hold()`."""

    def __init__(self, socket: WebSocket, carrier: Carrier, desk: Desk) -> None:
        self._socket = socket
        self._metrics = desk.metrics
        self._clock = desk.clock
        self._line = PhoneLine(
            carrier,
            clock=desk.clock,
            on_report=desk.engine.report,
            sample_rate=desk.engine.sample_rate,
        )
        self._call = Conversation(desk, self._line, self._line)
        self._line.on_digit = self._call.press
        self._last_word_at = desk.clock.now()
        self._refused = 0
        self._gaps = 0

    async def hold(self) -> str:
        """Hold the call until it ends; returns why, in a few words.  Everything it used is free then."""
        try:
            await self._call.hold(self._read(), self._write(), self._converse(), self._watch())
        finally:
            await self._hang_up()
        return self._call.reason

    def stop(self) -> None:
        """The server is stopping."""
        self._call.end("the server is stopping")

    async def _hang_up(self) -> None:
        message = self._line.hang_up()
        with suppress(TimeoutError, RuntimeError, WebSocketDisconnect, OSError):
            async with asyncio.timeout(SEND_S):
                if self._socket.client_state is WebSocketState.CONNECTED:
                    if message is not None:
                        await self._send(message)
                    await self._socket.close(1000, self._call.reason[:120])

    async def _converse(self) -> None:
        try:
            async with asyncio.timeout(START_S):
                started = await self._line.wait_started()
        except TimeoutError:
            self._call.end(f"the carrier did not start the call within {START_S:.0f} s")
            return
        except PeerError as error:
            self._call.end(str(error))
            return
        log.info("a telephone call: %s", started.call or "without a name")
        await self._call.converse(started.parameters)

    async def _write(self) -> None:
        with suppress(PeerError):  # It ended before it started, which `_converse` says.
            await self._line.run(self._send)

    async def _send(self, out: Out) -> None:
        try:
            async with asyncio.timeout(SEND_S):
                await (self._socket.send_text(out) if isinstance(out, str) else self._socket.send_bytes(out))
        except (TimeoutError, RuntimeError, WebSocketDisconnect, OSError):
            self._call.end("the carrier's socket is dead")

    async def _read(self) -> None:
        second = count = 0
        while True:
            try:
                message = await self._socket.receive()
            except RuntimeError:  # Starlette's word for a socket that is already closed.
                return self._call.end("the caller hung up")
            if message["type"] == "websocket.disconnect":
                return self._call.end("the caller hung up")
            now = self._last_word_at = self._clock.now()
            second, count = now // SECOND, count + 1 if now // SECOND == second else 1
            if count > MAX_MESSAGES_PER_S:
                return self._call.end(f"more than {MAX_MESSAGES_PER_S} messages in a second")
            raw = message.get("text")
            try:
                self._line.receive(raw if raw is not None else message.get("bytes") or b"")
            except PeerError as error:
                self._refuse(error)
            if self._line.closed.is_set():
                return self._call.end("the caller hung up")

    def _refuse(self, error: PeerError) -> None:
        self._refused += 1
        self._metrics.refused.labels(error.code).inc()
        log.warning("a carrier's message was refused: %s", error)
        if error.code == "codec_unknown" or self._refused > MAX_REFUSED:
            self._call.end(str(error))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            gaps, self._gaps = self._gaps, self._line.sink.gaps
            self._metrics.gaps.inc(self._gaps - gaps)
            for complaint in self._line.complaints:
                log.warning("the carrier complains: %s %s", complaint.code, complaint.detail)
            self._line.complaints.clear()
            if self._clock.now() - self._last_word_at > SILENT_S * SECOND:
                self._call.end("no word from the carrier for too long")


class AudioSocketCall:
    """One call over an AudioSocket connection: `await AudioSocketCall(...).hold()`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, desk: Desk, *, pacer: Pacer) -> None:
        self._reader = reader
        self._writer = writer
        self._metrics = desk.metrics
        self._line = AudioSocketLine(
            writer,
            clock=desk.clock,
            pacer=pacer,
            on_report=desk.engine.report,
            sample_rate=desk.engine.sample_rate,
        )
        self._call = Conversation(desk, self._line, self._line.sink)
        self._line.on_digit = self._call.press

    async def hold(self) -> str:
        """Hold the call until it ends; returns why, in a few words.  Everything it used is free then."""
        try:
            await self._call.hold(self._read(), self._converse(), self._watch())
        finally:
            self._metrics.gaps.inc(self._line.sink.gaps)
            with suppress(OSError):
                self._writer.write(message(HANG_UP))
                self._writer.close()
        return self._call.reason

    def stop(self) -> None:
        """The server is stopping."""
        self._call.end("the server is stopping")

    async def _read(self) -> None:
        while True:
            try:
                data = await self._reader.read(4_096)
            except OSError:
                data = b""
            if not data:
                return self._call.end("the caller hung up")
            try:
                self._line.receive(data)
            except PeerError as error:
                return self._call.end(str(error))

    async def _converse(self) -> None:
        # Asterisk names the call before anything else; one that does not is as good.
        await self._call.converse({"call": self._line.call})

    async def _watch(self) -> None:
        await self._line.closed.wait()
        self._call.end("the caller hung up")
