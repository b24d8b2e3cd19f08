"""The telephone door: a carrier's webhook is answered with where to stream, its socket with an agent.

    wss://HOST/phone/KEY/twilio              the call's sound and marks; telnyx, plivo, vonage, asterisk alike
    https://HOST/phone/KEY/twilio            what the carrier fetches when a call comes in, or is answered
    https://HOST/phone/KEY/plivo/transfer    what Plivo fetches to put a caller through

KEY is a secret in the path: whoever knows it may call.  Twilio signs its requests as well; with its token at hand that
is checked (`pip install 'breeze_rtc[phone]'`).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit
from xml.sax.saxutils import escape, quoteattr

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket

from breeze_rtc.clock import MS
from breeze_rtc.errors import MissingExtra
from breeze_rtc.server.carrier_api import CarrierApi
from breeze_rtc.server.sip import Sip
from breeze_rtc.transport.carrier import CARRIERS
from breeze_rtc.transport.far_buffer import EAR_DELAY_NS

MAX_FORM_BYTES = 64 * 1024
_TOLD = {"from": "from", "to": "to", "dial": "dial", "uuid": "uuid", "From": "from", "To": "to"}
"""What of a webhook's parameters comes back with the call's stream: its name there and here."""


@dataclass(frozen=True, slots=True)
class Phone:
    """Settings of the telephone door.

    public_url: how carriers reach this server, such as https://agent.example.org.  twilio_token: the account's auth
    token, to check signatures with.  audio_socket: (host, port) to answer Asterisk's AudioSocket at; whoever reaches
    it may call.  sip: answer SIP calls too.  apis: accounts at carriers, by which calls are
    placed and put through (`carrier_api.carrier_apis`).  ear_delay_ms: what telephones hold that nobody tells of, from
    the last clock that is known of (the carrier's player, our RTP) to the ear.
    """

    public_url: str
    key: str = field(default_factory=lambda: secrets.token_urlsafe(12))
    twilio_token: str | None = None
    audio_socket: tuple[str, int] | None = None
    sip: Sip | None = None
    apis: Mapping[str, CarrierApi] = field(default_factory=dict, repr=False)
    ear_delay_ms: int = EAR_DELAY_NS // MS

    def path(self, carrier: str) -> str:
        return f"/phone/{self.key}/{carrier}"

    def socket_url(self, carrier: str) -> str:
        """Where the carrier's socket goes."""
        parts = urlsplit(self.public_url.rstrip("/"))
        scheme = "wss" if parts.scheme == "https" else "ws"
        return f"{scheme}://{parts.netloc}{parts.path}{self.path(carrier)}"

    def webhook(self, carrier: str, **parameters: str) -> str:
        """Where the carrier asks what to do with a call."""
        url = self.public_url.rstrip("/") + self.path(carrier)
        return f"{url}?{urlencode(parameters)}" if parameters else url

    def transfer_webhook(self, carrier: str, to: str) -> str:
        """Where the carrier asks whom to put a caller through to."""
        return f"{self.webhook(carrier)}/transfer?{urlencode({'to': to})}"

    def answer(self, carrier: str, about: Mapping[str, str] | None = None) -> tuple[str, str]:
        """The media type and body that tell a carrier to stream a call here; for Asterisk, lines of its settings.

        about: what is to come back with the stream, as metadata of the call.
        """
        url = self.socket_url(carrier)
        about = about or {}
        if about and carrier != "twilio":  # Whose addresses keep nothing after a question mark.
            url += f"?{urlencode(about)}"
        match carrier:
            case "twilio":
                parameters = "".join(
                    f"<Parameter name={quoteattr(name)} value={quoteattr(value)}/>" for name, value in about.items()
                )
                body = f"<Connect><Stream url={quoteattr(url)}/></Connect>"
                if parameters:
                    body = f"<Connect><Stream url={quoteattr(url)}>{parameters}</Stream></Connect>"
            case "telnyx":
                body = f'<Connect><Stream url={quoteattr(url)} bidirectionalMode="rtp"/></Connect>'
            case "plivo":
                body = (
                    '<Stream bidirectional="true" keepCallAlive="true" contentType="audio/x-mulaw;rate=8000">'
                    f"{escape(url)}</Stream>"
                )
            case "vonage":
                endpoint = {"type": "websocket", "uri": url, "content-type": "audio/l16;rate=16000"}
                return "application/json", json.dumps([{"action": "connect", "endpoint": [endpoint]}])
            case _:
                tls = "yes" if url.startswith("wss") else "no"
                settings = ("type = websocket_client", "connection_type = per_call_config", "protocols = media")
                return "text/plain", "\n".join(("[breeze]", *settings, f"uri = {url}", f"tls_enabled = {tls}"))
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
            "  Asterisk  Dial(WebSocket/breeze/c(ulaw)) in the dialplan, and in websocket_client.conf:",
            f"            {self.answer('asterisk')[1]}".replace("\n", "\n            "),
        ]
        if self.audio_socket is not None:
            host, audio_socket_port = self.audio_socket
            lines.append(f"            or AudioSocket(UUID,{host}:{audio_socket_port}) in the dialplan, UUID being any")
        if self.sip is not None:
            lines.append(f"  SIP       {self.sip.instructions()}")
        if self.apis:
            lines.append(f"Calls are put through by the accounts of {', '.join(sorted(self.apis))}.")
        if not url.startswith("https://"):
            lines.append(
                f"Carriers come by https only: put a proxy before port {port}, and give its address with --phone-url."
            )
        return "\n".join(lines)


class PhoneDoor:
    """The routes of `Phone`'s settings."""

    def __init__(self, phone: Phone, hold: Callable[[WebSocket, str], Awaitable[None]]) -> None:
        """hold: takes the call of a carrier's socket, for as long as it lasts."""
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
        routes.append(Route(self._phone.path("plivo") + "/transfer", self._put_through, methods=["GET"]))
        return routes

    def _answering(self, name: str) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            body = (await request.body())[:MAX_FORM_BYTES]
            form = dict(parse_qsl(body.decode("utf-8", "replace")))
            if name == "twilio" and self._validator is not None:
                url = self._phone.webhook(name)
                if request.url.query:
                    url += f"?{request.url.query}"
                if not self._validator(url, form, request.headers.get("x-twilio-signature", "")):
                    return Response("the signature is not Twilio's", 403)
            told = {**dict(request.query_params), **(form or _json_object(body))}
            about = {_TOLD[key]: value for key, value in told.items() if key in _TOLD and isinstance(value, str)}
            media_type, text = self._phone.answer(name, about)
            return Response(text, media_type=media_type)

        return answer

    def _calling(self, name: str) -> Callable[[WebSocket], Awaitable[None]]:
        async def call(socket: WebSocket) -> None:
            if name == "twilio" and self._validator is not None:
                signature = socket.headers.get("x-twilio-signature", "")
                if not self._validator(self._phone.socket_url(name), {}, signature):
                    await socket.close(1008)  # Before accept: the handshake is refused with 403.
                    return
            await self._hold(socket, name)

        return call

    async def _put_through(self, request: Request) -> Response:
        to = escape(request.query_params.get("to", ""))
        number = f"<User>{to}</User>" if to.startswith("sip") else f"<Number>{to}</Number>"
        return Response(f"<Response><Dial>{number}</Dial></Response>", media_type="application/xml")


def _json_object(body: bytes) -> dict[str, Any]:
    """As Vonage posts; empty for what is none."""
    try:
        value = json.loads(body)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _validator(token: str) -> Callable[[str, dict[str, str], str], bool]:
    """Twilio's own check of its signatures."""
    try:
        from twilio.request_validator import RequestValidator
    except ImportError as error:
        raise MissingExtra("checking Twilio's signatures", "phone") from error
    validator = RequestValidator(token)
    return lambda url, form, signature: bool(validator.validate(url, form, signature))
