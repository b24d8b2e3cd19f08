"""The telephone door: a carrier's webhook is answered with where to stream, its socket with an agent.

    wss://HOST/phone/KEY/twilio      the call's sound and marks; telnyx, plivo, vonage, asterisk alike
    https://HOST/phone/KEY/twilio    what the carrier fetches when a call comes in

KEY is a secret in the path: whoever knows it may call.  Twilio signs its requests as well; with its token at hand that
is checked (`pip install 'breeze_rtc[phone]'`).
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, urlsplit
from xml.sax.saxutils import quoteattr

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket

from breeze_rtc.errors import MissingExtra
from breeze_rtc.server.sip import Sip
from breeze_rtc.transport.carrier import CARRIERS, Carrier

MAX_FORM_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Phone:
    """Settings of the telephone door.

    public_url: how carriers reach this server, such as https://agent.example.org.  twilio_token: the account's auth
    token, to check signatures with.  audio_socket: (host, port) to answer Asterisk's AudioSocket at; whoever reaches
    it may call.  sip: answer SIP calls too, by a program of its own.
    """

    public_url: str
    key: str = field(default_factory=lambda: secrets.token_urlsafe(12))
    twilio_token: str | None = None
    audio_socket: tuple[str, int] | None = None
    sip: Sip | None = None

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

    def instructions(self, port: int) -> str:
        """What to paste where, for each kind of line.  port: where this server listens."""
        url = self.public_url.rstrip("/")
        lines = [
            "Telephone calls are answered. Paste one of these:",
            f'  Twilio    the number\'s "A call comes in": webhook {url}{self.path("twilio")}, or a TwiML Bin with',
            f"            {self.answer('twilio')[1].split('?>', 1)[1]}",
            f"  Telnyx    a TeXML application's voice URL: {url}{self.path('telnyx')}",
            f"  Plivo     an application's answer URL: {url}{self.path('plivo')}",
            f"  Vonage    an application's answer URL: {url}{self.path('vonage')}",
            f"  Asterisk  {self.answer('asterisk')[1]}",
        ]
        if self.audio_socket is not None:
            host, audio_socket_port = self.audio_socket
            lines.append(f"            or AudioSocket(UUID,{host}:{audio_socket_port}) in the dialplan, UUID being any")
        if self.sip is not None:
            lines.append(f"  SIP       {self.sip.instructions()}")
        if not url.startswith("https://"):
            lines.append(
                f"Carriers come by https only: put a proxy before port {port}, and give its address with --phone-url."
            )
        return "\n".join(lines)


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
