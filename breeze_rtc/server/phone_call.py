"""A telephone call joined to an agent: over a carrier's WebSocket, or Asterisk's AudioSocket.

Whatever ends it (the carrier, the agent, a dead socket, the server's own end) sets one event; then the session is
silenced, the line hung up, and everything is free.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from breeze_rtc.agent.call import Telephone
from breeze_rtc.agent.session import AgentSession, Callbacks, Ears
from breeze_rtc.agent.vad import Samples, VoiceActivity
from breeze_rtc.clock import MS, SECOND, Clock
from breeze_rtc.errors import BadRequest, LineCannot, PeerError
from breeze_rtc.media import dtmf
from breeze_rtc.media.opus import SpeechEncoder
from breeze_rtc.playback import AudioSink, PlaybackReport
from breeze_rtc.runtime.engine import Engine
from breeze_rtc.server.call import MeteredSink
from breeze_rtc.server.metrics import Metrics
from breeze_rtc.server.phone import Phone
from breeze_rtc.transport.audio_socket import HANG_UP, MAX_UNSENT_BYTES, AudioSocketLine, message
from breeze_rtc.transport.caller import BLOCK, RATE, CallerVoice
from breeze_rtc.transport.carrier import CARRIERS, Out
from breeze_rtc.transport.pacer import Pacer
from breeze_rtc.transport.phone import PhoneLine
from breeze_rtc.transport.recording import CallRecording
from breeze_rtc.transport.uplink import Block

log = logging.getLogger(__name__)

START_S = 10.0
"""A carrier says what call it brings at once."""
SENT_BYTES = 8_192
"""Half a second of AudioSocket's sound: more is not given to the system.  So a machine that is gone is known within
seconds.  An Asterisk that hangs while its machine lives is not: Linux takes for it more than five minutes of sound and
keeps the window open, and that it says nothing is no sign, for neither does a caller on hold."""
SILENT_S = 20.0
"""Carriers send sound, marks or both all the time; one that says nothing for so long is gone, whatever its socket
thinks."""
SEND_S = 5.0
"""A socket that takes no message for so long is dead."""
MAX_METADATA = 32
"""So much of what an address brings along is kept."""
MAX_MESSAGES_PER_S = 400
MAX_REFUSED = 50
MAX_FLUSH_S = 0.5
BURST_NS = 100 * MS
"""A line that stalled was taken for silent; when what it held back comes at once, the caller's voice is so far ahead of
the clock, or farther.  In a recording the next silence is as much shorter."""
QUIET = 0.01
"""-40 dB: nothing is lost when such sound is left out."""
LAST_WORD_S = 0.2
"""Before hanging up, beyond the moment at which all was heard by our reckoning: a telephone throws away what it still
holds, and a softphone held 60 ms more than was reckoned with."""


THROUGH = "putting through"
_NUMBER = re.compile(r"\+?[0-9]{2,15}|sips?:[\w.+:@=;-]{1,200}")


@dataclass(frozen=True, slots=True)
class Desk:
    """What a server lends to each call."""

    engine: Engine
    callbacks: Callbacks
    metrics: Metrics
    activity: VoiceActivity
    ears: Ears | None
    clock: Clock
    phone: Phone
    dialled: Mapping[str, asyncio.Future[CarrierCall]]
    """Calls that this server has placed and that have not begun, by the token that comes back with them."""
    next_recording: Callable[[], Path | None] = lambda: None
    """Where to write the next call down; None: nowhere."""


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

    def __init__(self, desk: Desk, line: Line, sink: AudioSink, telephone: Telephone | None = None) -> None:
        self.closed = asyncio.Event()
        """Set once, when the call is to end."""
        self.reason = "the caller hung up"
        """Why it ended."""
        self._metrics = desk.metrics
        self._clock = desk.clock
        self._line = line
        self._sample_rate = desk.engine.sample_rate
        self._bare_sink = sink
        self._sink = MeteredSink(sink, desk.metrics, desk.engine.sample_rate, self._first_packet)
        self._session = AgentSession(
            desk.callbacks,
            call=self,
            voice=desk.engine,
            ears=desk.ears,
            activity=desk.activity,
            observe=desk.metrics.observe,
        )
        self._session.telephone = telephone
        # Streams of keys, away from those of the voice and of the sound for waiting.
        self._key_streams = count(-1_000_000, -1)
        # When the agent got its turn, until its answer has left.
        self._turn_at: int | None = None
        path = desk.next_recording()
        self.recording = CallRecording(path) if path is not None else None
        """Both sides of the call; None where it is not written down."""

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
        return self._line.caller.blocks() if self.recording is None else self._recorded(self.recording)

    async def _recorded(self, recording: CallRecording) -> AsyncIterator[Samples]:
        """The caller's voice, written down where it was heard."""
        began_ns = self._clock.now()
        at = 0
        dropped = 0
        async for block in self._line.caller.blocks():
            # What nobody read in time has its place all the same.
            at += (self._line.caller.dropped_blocks - dropped) * BLOCK
            dropped = self._line.caller.dropped_blocks
            ahead_ns = (at + BLOCK) * SECOND // RATE - (self._clock.now() - began_ns)
            if ahead_ns < BURST_NS or float(np.abs(block).max()) > QUIET:
                recording.caller(Block(at, block), began_ns)
                at += BLOCK
            yield block

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
            self.let_go()
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

    def sound_keys(self, keys: str) -> None:
        """Press keys by their tones, after what is being said."""
        stream = next(self._key_streams)
        encoder = SpeechEncoder(self._sample_rate)
        packets = encoder.encode(dtmf.tones(keys, self._sample_rate))
        self._bare_sink.write(stream, (*packets, *encoder.end()))
        self._bare_sink.end(stream)

    def end(self, reason: str) -> None:
        """End the call; the first reason counts."""
        if not self.closed.is_set():
            self.reason = reason
            self.closed.set()
        self._line.close()

    def let_go(self) -> None:
        """End it, and free what it used; for a call that is never held, too."""
        self.end(self.reason)
        if self.recording is not None:
            self.recording.close()

    def _first_packet(self, stream: int) -> None:
        if self._turn_at is not None:
            self._metrics.first_packet.observe((self._clock.now() - self._turn_at) / SECOND)
            self._turn_at = None


class CarrierCall:
    """One call over a carrier's WebSocket, which is accepted here: `await CarrierCall(...).hold()`."""

    def __init__(self, socket: WebSocket, carrier: str, desk: Desk) -> None:
        """carrier: one of `CARRIERS`.  What the socket's address brings along becomes metadata of the call."""
        self._socket = socket
        self._carrier = carrier
        self._desk = desk
        self._api = desk.phone.apis.get(carrier)
        self._brought = dict(list(socket.query_params.items())[:MAX_METADATA])
        self._name = ""
        self.was_put_through = False
        """The caller is connected with somebody else."""
        self._metrics = desk.metrics
        self._clock = desk.clock
        self._line = PhoneLine(
            CARRIERS[carrier](),
            clock=desk.clock,
            on_report=desk.engine.report,
            sample_rate=desk.engine.sample_rate,
            ear_delay_ns=desk.phone.ear_delay_ms * MS,
        )
        self._call = Conversation(desk, self._line, self._line, self)
        self._line.on_digit = self._call.press
        if self._call.recording is not None:
            self._line.on_sending = self._call.recording.sending
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

    async def ended(self) -> str:
        """Wait for the end of the call; returns why."""
        await self._call.closed.wait()
        return self._call.reason

    # -- the session's Telephone

    async def send_dtmf(self, keys: str) -> None:
        check_keys(keys)
        message = self._line.keys(keys)
        if message is not None:
            await self._send(message)
        elif self._api is not None and self._api.presses_keys and self._name:
            await self._api.send_dtmf(self._name, keys)
        else:
            self._call.sound_keys(keys)

    async def transfer(self, to: str) -> None:
        check_number(to)
        if self._carrier == "asterisk":
            raise LineCannot(THROUGH, "chan_websocket has no word for it; end the call, and the dialplan goes on")
        if not self._name:
            raise LineCannot(THROUGH, "the carrier did not say which call this is")
        if self._api is None:
            raise LineCannot(THROUGH, "the carrier's account is not known here; docs/phone.md says what to set")
        await self._api.transfer(self._name, to, webhook=self._desk.phone.transfer_webhook(self._carrier, to))
        self.was_put_through = True
        self._call.end("the caller was put through")

    # --

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
        metadata = {**self._brought, **started.parameters, "carrier": self._carrier}
        self._name = started.call or metadata.get("uuid", "")
        placed = self._desk.dialled.get(metadata.get("dial", ""))
        if placed is not None and not placed.done():
            placed.set_result(self)
        await self._call.converse(metadata)

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
        # Asterisk asks for a protocol by the name in its settings, and wants to have it.
        offered = self._socket.scope.get("subprotocols") or [None]
        try:
            await self._socket.accept(offered[0])
        except (RuntimeError, WebSocketDisconnect, OSError):
            return self._call.end("the caller hung up")
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

    def __init__(self, transport: asyncio.WriteTransport, desk: Desk, *, pacer: Pacer) -> None:
        self._transport = transport
        self._metrics = desk.metrics
        self._line = AudioSocketLine(
            transport,
            clock=desk.clock,
            pacer=pacer,
            on_report=desk.engine.report,
            sample_rate=desk.engine.sample_rate,
            ear_delay_ns=desk.phone.ear_delay_ms * MS,
        )
        self._call = Conversation(desk, self._line, self._line.sink, self)
        self._line.on_digit = self._call.press
        if self._call.recording is not None:
            self._line.on_slot = self._call.recording.agent

    async def hold(self) -> str:
        """Hold the call until it ends; returns why, in a few words.  Everything it used is free then."""
        try:
            await self._call.hold(self._converse(), self._watch())
        finally:
            self._metrics.gaps.inc(self._line.sink.gaps)
            if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
                self._transport.abort()  # Nobody will ever take what is left.
            elif not self._transport.is_closing():
                self._transport.write(message(HANG_UP))
                self._transport.close()
        return self._call.reason

    def receive(self, data: bytes) -> None:
        """Some bytes have come."""
        try:
            self._line.receive(data)
        except PeerError as error:
            self._call.end(str(error))

    def lost(self) -> None:
        """The connection is gone."""
        self._call.end("the caller hung up")

    def stop(self) -> None:
        """The server is stopping."""
        self._call.end("the server is stopping")

    async def send_dtmf(self, keys: str) -> None:
        # Not by the protocol's own message: it is Asterisk's alone, who hangs up on whoever sends it one.
        check_keys(keys)
        self._call.sound_keys(keys)

    async def transfer(self, to: str) -> None:
        raise LineCannot(THROUGH, "AudioSocket has no word for it; end the call, and the dialplan goes on")

    async def _converse(self) -> None:
        # Asterisk names the call before anything else; one that does not is as good.
        await self._call.converse({"call": self._line.call, "carrier": "audiosocket"})

    async def _watch(self) -> None:
        await self._line.closed.wait()
        self._call.end("the caller hung up")


class AudioSocketConnection(asyncio.Protocol):
    """One connection.  What comes goes to its call at once: a task for each would wake fifty times a second."""

    def __init__(self, open_call: Callable[[asyncio.WriteTransport], AudioSocketCall | None]) -> None:
        """open_call: makes the call and holds it; None where there is no room."""
        self._open_call = open_call
        self._call: AudioSocketCall | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # What our own system held, too, would hide for as long that the other end is dead.
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SENT_BYTES)
        # uvloop's are none by name.
        self._call = self._open_call(cast(asyncio.WriteTransport, transport))
        if self._call is None:
            transport.close()

    def data_received(self, data: bytes) -> None:
        if self._call is not None:
            self._call.receive(data)

    def connection_lost(self, error: Exception | None) -> None:
        if self._call is not None:
            self._call.lost()


def check_keys(keys: str) -> None:
    """Raises BadRequest for what is no key."""
    if not keys or any(key not in dtmf.KEYS for key in keys):
        raise BadRequest(f"{keys!r} are no keys of a telephone: 0 to 9, *, #, A to D")


def check_number(number: str) -> None:
    """Raises BadRequest for what nobody can be put through to."""
    if not _NUMBER.fullmatch(number):
        raise BadRequest(f"{number!r} is no number to put through to; write it as +4930123456, or sip:NAME@HOST")
