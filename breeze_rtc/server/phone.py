"""The telephone door: a carrier's webhook is answered with where to stream, its socket with an agent.

    wss://HOST/phone/KEY/twilio      the call's sound and marks; telnyx, plivo, vonage, asterisk alike
    https://HOST/phone/KEY/twilio    what the carrier fetches when a call comes in

KEY is a secret in the path: whoever knows it may call.  Twilio signs its requests as well; with its token at hand that
is checked (`pip install 'breeze_rtc[phone]'`).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, urlsplit
from xml.sax.saxutils import quoteattr

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from breeze_rtc.agent.session import AgentSession, Callbacks, Ears
from breeze_rtc.agent.vad import Samples, VoiceActivity
from breeze_rtc.clock import SECOND, Clock
from breeze_rtc.errors import MissingExtra, PeerError
from breeze_rtc.playback import PlaybackReport
from breeze_rtc.runtime.engine import Engine
from breeze_rtc.server.call import MeteredSink
from breeze_rtc.server.metrics import Metrics
from breeze_rtc.transport.carrier import CARRIERS, Carrier, Out
from breeze_rtc.transport.phone import PhoneLine

log = logging.getLogger(__name__)

START_S = 10.0
"""A carrier says what call it brings at once."""
SILENT_CARRIER_S = 20.0
"""Carriers send sound, marks or both all the time; one that says nothing for so long is gone, whatever its socket
thinks."""
SEND_S = 5.0
"""A socket that takes no message for so long is dead."""
MAX_MESSAGES_PER_S = 400
MAX_REFUSED = 50
MAX_FORM_BYTES = 64 * 1024
FLUSH_S = 0.5


@dataclass(frozen=True, slots=True)
class Phone:
    """Settings of the telephone door.

    public_url: how carriers reach this server, such as https://agent.example.org.  twilio_token: the account's auth
    token, to check signatures with.
    """

    public_url: str
    key: str = field(default_factory=lambda: secrets.token_urlsafe(12))
    twilio_token: str | None = None

    def path(self, carrier: str) -> str:
        return f"/phone/{self.key}/{carrier}"

    def socket_url(self, carrier: str) -> str:
        """Where the carrier's socket goes."""
        parts = urlsplit(self.public_url.rstrip("/"))
        scheme = "wss" if parts.scheme == "https" else "ws"
        return f"{scheme}://{parts.netloc}{parts.path}{self.path(carrier)}"

    def answer(self, carrier: str) -> tuple[str, str]:
        """The media type and body that tell a carrier to stream a call here; for Asterisk a line of its dialplan."""
        url = self.socket_url(carrier)
        match carrier:
            case "twilio":
                body = f"<Connect><Stream url={quoteattr(url)}/></Connect>"
            case "telnyx":
                body = f'<Connect><Stream url={quoteattr(url)} bidirectionalMode="rtp"/></Connect>'
            case "plivo":
                body = (
                    '<Stream bidirectional="true" keepCallAlive="true" contentType="audio/x-mulaw;rate=8000">'
                    f"{url}</Stream>"
                )
            case "vonage":
                endpoint = f'{{"type":"websocket","uri":"{url}","content-type":"audio/l16;rate=16000"}}'
                return "application/json", f'[{{"action":"connect","endpoint":[{endpoint}]}}]'
            case _:
                return "text/plain", f"Dial(WebSocket/breeze/c(ulaw))   ; [breeze] in websocket_client.conf: uri={url}"
        return "application/xml", f'<?xml version="1.0" encoding="UTF-8"?><Response>{body}</Response>'


class PhoneCall:
    """One call from its accepted socket to its end: `await PhoneCall(...).hold()`.

    To the agent's session it is the `Call`: a sink, the caller's position, and the caller's voice.
    """

    def __init__(
        self,
        socket: WebSocket,
        carrier: Carrier,
        *,
        engine: Engine,
        callbacks: Callbacks,
        metrics: Metrics,
        activity: VoiceActivity,
        ears: Ears | None,
        clock: Clock,
    ) -> None:
        self.closed = asyncio.Event()
        """Set once, when the call is to end."""
        self._socket = socket
        self._metrics = metrics
        self._clock = clock
        self._sample_rate = engine.sample_rate
        self._line = PhoneLine(carrier, clock=clock, on_report=engine.report, sample_rate=engine.sample_rate)
        self._sink = MeteredSink(self._line, metrics, engine.sample_rate, self._first_packet)
        self._session = AgentSession(callbacks, call=self, voice=engine, ears=ears, activity=activity)
        self._reason = "the carrier hung up"
        self._last_word_at = clock.now()
        self._refused = 0
        self._gaps = 0
        # When the agent got its turn, until its answer has left.
        self._turn_at: int | None = None

    # -- the session's Call

    @property
    def sink(self) -> MeteredSink:
        return self._sink

    def position(self, stream: int) -> PlaybackReport:
        return self._line.position(stream)

    async def flush(self) -> None:
        """The clear has gone out, and what was on its way has been heard."""
        path_delay_ns = self._line.sink.path_delay_ns
        await asyncio.sleep(min(FLUSH_S, path_delay_ns / SECOND))
        self._line.resume()

    def pause(self) -> None:
        self._line.pause()

    def resume(self) -> None:
        self._line.resume()

    def send(self, message: dict[str, Any]) -> None:
        """What a page would show: a telephone shows nothing, so the figures are taken and the rest is left."""
        if message["type"] == "user":
            self._turn_at = self._clock.now()
        elif message["type"] == "speech_end":
            heard_samples = self._line.position(message["stream"]).heard_samples
            self._metrics.heard.inc(heard_samples / self._sample_rate)

    async def microphone(self) -> AsyncIterator[Samples]:
        async for block in self._line.microphone():
            yield block

    # -- the call's life

    async def hold(self) -> str:
        """Hold the call until it ends; returns why, in a few words.  Everything it used is free then."""
        self._metrics.calls.inc()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._read()),
                    group.create_task(self._write()),
                    group.create_task(self._converse()),
                    group.create_task(self._watch()),
                ]
                await self.closed.wait()
                for task in tasks:
                    task.cancel()
        except* Exception as errors:
            log.error("a telephone call failed", exc_info=errors)
            self._reason = "the server failed; its log says how"
        finally:
            self.end(self._reason)
            await self._release()
        self._metrics.calls_ended.labels(self._reason.split(":")[0]).inc()
        return self._reason

    def end(self, reason: str) -> None:
        """End the call; the first reason counts."""
        if not self.closed.is_set():
            self._reason = reason
            self.closed.set()
        self._line.close()

    def stop(self) -> None:
        """The server is stopping."""
        self.end("the server is stopping")

    async def _release(self) -> None:
        self._metrics.calls.dec()
        hang_up = self._line.hang_up()
        with suppress(TimeoutError, RuntimeError, WebSocketDisconnect, OSError):
            async with asyncio.timeout(SEND_S):
                if self._socket.client_state is WebSocketState.CONNECTED:
                    if hang_up is not None:
                        await self._send(hang_up)
                    await self._socket.close(1000, self._reason[:120])

    async def _converse(self) -> None:
        """The agent's part, once the carrier has said what call it is."""
        try:
            async with asyncio.timeout(START_S):
                started = await self._line.wait_started()
        except TimeoutError:
            self.end(f"the carrier did not start the call within {START_S:.0f} s")
            return
        except PeerError as error:
            self.end(str(error))
            return
        log.info("a telephone call: %s", started.call or "without a name")
        self._turn_at = self._clock.now()
        await self._session.run()
        self.end("the agent ended the call")

    async def _write(self) -> None:
        with suppress(PeerError):  # It ended before it started, which `_converse` says.
            await self._line.run(self._send)

    async def _send(self, out: Out) -> None:
        try:
            async with asyncio.timeout(SEND_S):
                await (self._socket.send_text(out) if isinstance(out, str) else self._socket.send_bytes(out))
        except (TimeoutError, RuntimeError, WebSocketDisconnect, OSError):
            self.end("the carrier's socket is dead")

    async def _read(self) -> None:
        second = count = 0
        while True:
            try:
                message = await self._socket.receive()
            except RuntimeError:  # Starlette's word for a socket that is already closed.
                self.end("the carrier hung up")
                return
            if message["type"] == "websocket.disconnect":
                self.end("the carrier hung up")
                return
            now = self._last_word_at = self._clock.now()
            second, count = now // SECOND, count + 1 if now // SECOND == second else 1
            if count > MAX_MESSAGES_PER_S:
                self.end(f"more than {MAX_MESSAGES_PER_S} messages in a second")
                return
            raw = message.get("text")
            try:
                self._line.receive(raw if raw is not None else message.get("bytes") or b"")
            except PeerError as error:
                self._refuse(error)
            if self._line.closed.is_set():
                self.end("the carrier hung up")
                return

    def _refuse(self, error: PeerError) -> None:
        self._refused += 1
        self._metrics.refused.labels(error.code).inc()
        log.warning("a carrier's message was refused: %s", error)
        if error.code == "codec_unknown" or self._refused > MAX_REFUSED:
            self.end(str(error))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            gaps, self._gaps = self._gaps, self._line.sink.gaps
            self._metrics.gaps.inc(self._gaps - gaps)
            for complaint in self._line.complaints:
                log.warning("the carrier complains: %s %s", complaint.code, complaint.detail)
            self._line.complaints.clear()
            if self._clock.now() - self._last_word_at > SILENT_CARRIER_S * SECOND:
                self.end("no word from the carrier for too long")
                return

    def _first_packet(self, stream: int) -> None:
        if self._turn_at is not None:
            self._metrics.first_packet.observe((self._clock.now() - self._turn_at) / SECOND)
            self._turn_at = None


class PhoneDoor:
    """The routes of `Phone`'s settings."""

    def __init__(self, phone: Phone, hold: Callable[[WebSocket, Carrier], Awaitable[None]]) -> None:
        """hold: takes the call of a socket that has been accepted, for as long as it lasts."""
        self._phone = phone
        self._hold = hold
        self._validator = _validator(phone.twilio_token) if phone.twilio_token else None

    def routes(self) -> list[BaseRoute]:
        routes: list[BaseRoute] = []
        for name in CARRIERS:
            path = self._phone.path(name)
            routes += [
                Route(path, self._answering(name), methods=["GET", "POST"]),
                WebSocketRoute(path, self._calling(name)),
            ]
        return routes

    def _answering(self, name: str) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            if name == "twilio" and self._validator is not None:
                form = dict(parse_qsl((await request.body())[:MAX_FORM_BYTES].decode("utf-8", "replace")))
                url = self._phone.public_url.rstrip("/") + self._phone.path(name)
                if request.url.query:
                    url += f"?{request.url.query}"
                if not self._validator(url, form, request.headers.get("x-twilio-signature", "")):
                    return Response("the signature is not Twilio's", 403)
            media_type, body = self._phone.answer(name)
            return Response(body, media_type=media_type)

        return answer

    def _calling(self, name: str) -> Callable[[WebSocket], Awaitable[None]]:
        async def call(socket: WebSocket) -> None:
            if name == "twilio" and self._validator is not None:
                signature = socket.headers.get("x-twilio-signature", "")
                if not self._validator(self._phone.socket_url(name), {}, signature):
                    await socket.close(1008)  # Before accept: the handshake is refused with 403.
                    return
            await self._hold(socket, CARRIERS[name]())

        return call


def _validator(token: str) -> Callable[[str, dict[str, str], str], bool]:
    """Twilio's own check of its signatures."""
    try:
        from twilio.request_validator import RequestValidator
    except ImportError as error:
        raise MissingExtra("checking Twilio's signatures", "phone") from error
    validator = RequestValidator(token)
    return lambda url, form, signature: bool(validator.validate(url, form, signature))
