"""Carriers whose REST interfaces are asked to place calls, written from their documentation and from nothing of ours.

A real HTTP server that checks who asks and what for, and answers as each carrier does.  A call that is answered is a
call: the webhook is fetched, what it says is done, the stream is opened and played in real time.
"""

from __future__ import annotations

import asyncio
import base64
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl
from xml.etree import ElementTree

import httpx
import jwt
import uvicorn
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from personalities import PERSONALITIES, Clear, HangUp, Keys, Mark, Sound
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from twilio.request_validator import RequestValidator
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from breeze_rtc.server.app import listen

FRAME_BYTES = 320
"""20 ms of 16 bits at 8 kHz."""
ACCOUNT, TOKEN = "AC00", "twilio's token"
API_KEY, CONNECTION = "KEY0", "1293384261075731499"
AUTH_ID, AUTH_TOKEN = "MAXXXXXXXXXXXXXXXXXX", "plivo's token"
APPLICATION = "aaaaaaaa-bbbb-4ccc-8ddd-0123456789ab"
NUMBER = "+15550100"
"""The one that each account has."""
NAMES = {"twilio": "CA00", "telnyx": "v3:call", "plivo": "c0", "vonage": "u0"}
"""Of the one call, as the stream has it too."""


@dataclass
class Line:
    """The call that was placed."""

    state: str = "ringing"
    to: str = ""
    heard: bytes = b""
    """16 bits, 8 kHz: what came out of the telephone, without the silence."""
    keys: str = ""
    put_through: str = ""
    was_answered: bool = False
    close_reason: str = ""
    asked: list[tuple[str, str]] = field(default_factory=list)
    """Method and path of each request."""


class Office:
    """All four.  `answers`: whether the telephone that is called is picked up; else it is busy."""

    def __init__(self, *, answers: bool = True) -> None:
        key = rsa.generate_private_key(public_exponent=65_537, key_size=2_048)
        self.private_key = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ).decode()
        self.line = Line()
        self._public_key = key.public_key()
        self._answers = answers
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Office:
        calls, call = f"/2010-04-01/Accounts/{ACCOUNT}/Calls", "/2010-04-01/Accounts/AC00/Calls/{name}.json"
        plivo = f"/v1/Account/{AUTH_ID}"
        routes = [
            Route(f"{calls}.json", self.twilio_calls, methods=["POST"]),
            Route(call, self.twilio_call, methods=["GET", "POST"]),
            Route("/v2/calls", self.telnyx_calls, methods=["POST"]),
            Route("/v2/calls/{name}", self.telnyx_call, methods=["GET"]),
            Route("/v2/calls/{name}/actions/{action}", self.telnyx_action, methods=["POST"]),
            Route(f"{plivo}/Call/", self.plivo_calls, methods=["POST"]),
            Route(f"{plivo}/Call/{{name}}/", self.plivo_call, methods=["POST", "DELETE"]),
            Route(f"{plivo}/Call/{{name}}/DTMF/", self.plivo_keys, methods=["POST"]),
            Route(f"{plivo}/Request/{{name}}/", self.plivo_call, methods=["DELETE"]),
            Route("/v1/calls", self.vonage_calls, methods=["POST"]),
            Route("/v1/calls/{name}", self.vonage_call, methods=["GET", "PUT"]),
            Route("/v1/calls/{name}/dtmf", self.vonage_keys, methods=["PUT"]),
        ]
        self._address = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._address.getsockname()[1]}"
        self._server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), log_config=None, lifespan="off"))
        self._serving = asyncio.create_task(self._server._serve(sockets=[self._address]))
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._server.should_exit = True
        await self._serving

    def environment(self) -> dict[str, str]:
        """What whoever has these accounts sets."""
        return {
            **{"TWILIO_ACCOUNT_SID": ACCOUNT, "TWILIO_AUTH_TOKEN": TOKEN},
            **{"TELNYX_API_KEY": API_KEY, "TELNYX_CONNECTION_ID": CONNECTION},
            **{"PLIVO_AUTH_ID": AUTH_ID, "PLIVO_AUTH_TOKEN": AUTH_TOKEN},
            **{"VONAGE_APPLICATION_ID": APPLICATION, "VONAGE_PRIVATE_KEY": self.private_key},
        }

    def base_url(self, kind: str) -> str:
        return self.url + ("/v2" if kind == "telnyx" else "")

    # --- https://www.twilio.com/docs/voice/api/call-resource

    def _twilio_error(self, status: int, code: int, message: str) -> JSONResponse:
        more = f"https://www.twilio.com/docs/errors/{code}"
        return JSONResponse({"code": code, "message": message, "more_info": more, "status": status}, status)

    async def twilio_calls(self, request: Request) -> Response:
        self._note(request)
        if not _is_basic(request, ACCOUNT, TOKEN):
            return self._twilio_error(401, 20003, "Authenticate")
        form = dict(parse_qsl((await request.body()).decode()))
        if not form.get("To"):
            return self._twilio_error(400, 21201, "No 'To' number is specified")
        if not form["To"].startswith("+"):
            return self._twilio_error(
                400, 21211, f"The phone number you are attempting to call, {form['To']}, is invalid"
            )
        if form.get("From") != NUMBER:
            return self._twilio_error(400, 21210, f"The source phone number, {form.get('From')}, is not yet verified")
        if not form.get("Url") and not form.get("Twiml"):
            return self._twilio_error(400, 21205, "Url parameter is required")
        self._place(form["To"], self._twilio(form))
        return JSONResponse({"sid": NAMES["twilio"], "account_sid": ACCOUNT, "status": "queued"}, 201)

    async def _twilio(self, form: dict[str, str]) -> None:
        about = {"CallSid": "CA00", "From": form["From"], "To": form["To"], "CallStatus": "in-progress"}
        signature = RequestValidator(TOKEN).compute_signature(form["Url"], about)
        async with httpx.AsyncClient() as client:
            answer = await client.post(form["Url"], data=about, headers={"X-Twilio-Signature": signature})
        stream = ElementTree.fromstring(answer.raise_for_status().text).find("./Connect/Stream")
        assert stream is not None
        url = stream.attrib["url"]
        assert "?" not in url, "Twilio's <Stream> takes no query"
        who = PERSONALITIES["twilio"]()
        who.parameters = {item.attrib["name"]: item.attrib["value"] for item in stream.findall("Parameter")}
        await self._stream(who, url, {"X-Twilio-Signature": RequestValidator(TOKEN).compute_signature(url, {})})

    async def twilio_call(self, request: Request) -> Response:
        self._note(request)
        if not _is_basic(request, ACCOUNT, TOKEN):
            return self._twilio_error(401, 20003, "Authenticate")
        if request.path_params["name"] != NAMES["twilio"]:
            return self._twilio_error(404, 20404, f"The requested resource {request.url.path} was not found")
        if request.method == "POST":
            if self.line.state not in ("ringing", "in-progress"):
                return self._twilio_error(400, 21220, "Call is not in-progress. Cannot redirect.")
            form = dict(parse_qsl((await request.body()).decode()))
            if form.get("Status") == "completed":
                self._end()
            elif form.get("Twiml"):
                dial = ElementTree.fromstring(form["Twiml"]).find("./Dial")
                assert dial is not None
                self._put_through(str(dial.text))
            else:
                return self._twilio_error(400, 21218, "Invalid parameters")
        return JSONResponse({"sid": NAMES["twilio"], "account_sid": ACCOUNT, "status": self.line.state})

    # --- https://developers.telnyx.com/api-reference/call-commands/dial

    def _telnyx_error(self, status: int, code: str, title: str, detail: str) -> JSONResponse:
        return JSONResponse({"errors": [{"code": code, "title": title, "detail": detail}]}, status)

    async def telnyx_calls(self, request: Request) -> Response:
        self._note(request)
        if request.headers.get("authorization") != f"Bearer {API_KEY}":
            return self._telnyx_error(401, "10009", "Authentication failed", "Could not understand the credentials.")
        wanted = await request.json()
        if wanted.get("connection_id") != CONNECTION:
            return self._telnyx_error(422, "10015", "Invalid value for connection_id (Call Control App ID)", "")
        if wanted.get("from") != NUMBER or not str(wanted.get("to", "")).startswith("+"):
            return self._telnyx_error(422, "10016", "Phone number must be in +E164 format", "")
        assert wanted["stream_bidirectional_mode"] == "rtp", "else nothing that is sent is heard"
        assert wanted["stream_bidirectional_codec"] == "PCMU"
        who = PERSONALITIES["telnyx"]()
        who.caller, who.called = wanted["from"], wanted["to"]
        self._place(wanted["to"], self._stream(who, wanted["stream_url"]))
        data = {"call_control_id": NAMES["telnyx"], "call_leg_id": "l", "call_session_id": "s", "is_alive": False}
        return JSONResponse({"data": {**data, "record_type": "call"}})

    async def telnyx_call(self, request: Request) -> Response:
        self._note(request)
        is_alive = self.line.state in ("ringing", "in-progress")
        data = {"call_control_id": NAMES["telnyx"], "call_leg_id": "l", "call_session_id": "s", "is_alive": is_alive}
        return JSONResponse({"data": {**data, "record_type": "call"}})

    async def telnyx_action(self, request: Request) -> Response:
        self._note(request)
        if self.line.state not in ("ringing", "in-progress"):
            return self._telnyx_error(422, "90018", "Call has already ended", "This call is no longer active")
        wanted = await request.json()
        match request.path_params["action"]:
            case "hangup":
                self._end()
            case "transfer":
                self._put_through(wanted["to"])
            case "send_dtmf":
                self.line.keys += wanted["digits"]
            case action:
                raise ValueError(action)
        return JSONResponse({"data": {"result": "ok"}})

    # --- https://www.plivo.com/docs/voice/api/call

    async def plivo_calls(self, request: Request) -> Response:
        self._note(request)
        if not _is_basic(request, AUTH_ID, AUTH_TOKEN):
            return Response("Could not verify your access level for that URL.", 401)
        wanted = await request.json()
        if not all(wanted.get(name) for name in ("from", "to", "answer_url")):
            return JSONResponse({"api_id": "a", "error": "mandatory parameter missing"}, 400)
        self._place(wanted["to"], self._plivo(wanted))
        return JSONResponse({"message": "call fired", "request_uuid": "r0", "api_id": "a"}, 201)

    async def _plivo(self, wanted: dict[str, Any]) -> None:
        about = {"CallUUID": "c0", "RequestUUID": "r0", "From": wanted["from"], "To": wanted["to"], "Event": "StartApp"}
        assert wanted["answer_method"] == "POST"
        async with httpx.AsyncClient() as client:
            answer = await client.post(wanted["answer_url"], data=about)
        stream = ElementTree.fromstring(answer.raise_for_status().text).find("./Stream")
        assert stream is not None
        assert (stream.attrib["bidirectional"], stream.attrib["keepCallAlive"]) == ("true", "true")
        await self._stream(PERSONALITIES["plivo"](), str(stream.text))

    async def plivo_call(self, request: Request) -> Response:
        self._note(request)
        if not _is_basic(request, AUTH_ID, AUTH_TOKEN):
            return Response("Could not verify your access level for that URL.", 401)
        is_live = "/Call/" in request.url.path and self.line.state == "in-progress"
        is_ringing = "/Request/" in request.url.path and self.line.state == "ringing"
        if not is_live and not is_ringing:
            return JSONResponse({"api_id": "a", "error": "not found"}, 404)
        if request.method == "DELETE":
            self._end()
            return Response(status_code=204)
        wanted = await request.json()
        assert (wanted["legs"], wanted["aleg_method"]) == ("aleg", "GET")
        async with httpx.AsyncClient() as client:
            answer = await client.get(wanted["aleg_url"])
        number = ElementTree.fromstring(answer.raise_for_status().text).find("./Dial/Number")
        assert number is not None
        self._put_through(str(number.text))
        return JSONResponse({"message": "call transferred", "call_uuids": ["c0"], "api_id": "a"}, 202)

    async def plivo_keys(self, request: Request) -> Response:
        self._note(request)
        self.line.keys += (await request.json())["digits"]
        return JSONResponse({"message": "digits sent", "api_id": "a"}, 202)

    # --- https://developer.vonage.com/en/api/voice

    def _is_vonage(self, request: Request) -> bool:
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        try:
            claims = jwt.decode(bearer, self._public_key, algorithms=["RS256"])
        except jwt.PyJWTError:
            return False
        return bool(claims["application_id"] == APPLICATION)

    async def vonage_calls(self, request: Request) -> Response:
        self._note(request)
        if not self._is_vonage(request):
            return JSONResponse({"type": "UNAUTHORIZED", "error_title": "Unauthorized"}, 401)
        wanted = await request.json()
        (to,) = wanted["to"]
        if to["type"] != "phone" or not to["number"].isdecimal() or wanted["from"]["number"] != NUMBER.lstrip("+"):
            return JSONResponse({"type": "BAD_REQUEST", "error_title": "Bad Request", "invalid_parameters": {}}, 400)
        self._place("+" + to["number"], self._vonage(wanted))
        told = {"uuid": NAMES["vonage"], "status": "started", "direction": "outbound", "conversation_uuid": "CON-0"}
        return JSONResponse(told, 201)

    async def _vonage(self, wanted: dict[str, Any]) -> None:
        about = {"from": wanted["from"]["number"], "to": wanted["to"][0]["number"], "uuid": "u0"}
        async with httpx.AsyncClient() as client:
            answer = await client.get(httpx.URL(wanted["answer_url"][0]).copy_merge_params(about))
        (action,) = answer.raise_for_status().json()
        (endpoint,) = action["endpoint"]
        assert (action["action"], endpoint["type"]) == ("connect", "websocket")
        assert endpoint["content-type"] in ("audio/l16;rate=8000", "audio/l16;rate=16000")
        await self._stream(PERSONALITIES["vonage"](), endpoint["uri"])

    async def vonage_call(self, request: Request) -> Response:
        self._note(request)
        if not self._is_vonage(request):
            return JSONResponse({"type": "UNAUTHORIZED", "error_title": "Unauthorized"}, 401)
        if request.method == "PUT":
            if self.line.state not in ("ringing", "in-progress"):
                return JSONResponse({"type": "NOT_FOUND", "error_title": "Not Found"}, 404)
            wanted = await request.json()
            if wanted["action"] == "hangup":
                self._end()
            else:
                (action,) = wanted["destination"]["ncco"]
                assert action.get("from") or action.get("randomFromNumber"), "Vonage asks for one of them"
                self._put_through("+" + action["endpoint"][0]["number"])
            return Response(status_code=204)
        state = {"in-progress": "answered"}.get(self.line.state, self.line.state)
        told = {"uuid": "u0", "conversation_uuid": "CON-0", "status": state, "direction": "outbound"}
        phones = {"to": {"type": "phone", "number": "4930123456"}, "from": {"type": "phone", "number": "15550100"}}
        return JSONResponse({**told, **phones, "network": "", "_links": {"self": {"href": "/v1/calls/u0"}}})

    async def vonage_keys(self, request: Request) -> Response:
        self._note(request)
        self.line.keys += (await request.json())["digits"]
        return JSONResponse({"message": "DTMF sent", "uuid": "u0"})

    # --- the call

    def _note(self, request: Request) -> None:
        self.line.asked.append((request.method, request.url.path))

    def _place(self, to: str, conversation: Any) -> None:
        self.line.to = to
        self._task = asyncio.create_task(self._ring(conversation))

    async def _ring(self, conversation: Any) -> None:
        try:
            await asyncio.sleep(0.2)
            if not self._answers:
                self.line.state = "busy"
                return
            self.line.state, self.line.was_answered = "in-progress", True
            await conversation
        finally:
            conversation.close()

    def _end(self) -> None:
        self.line.state = "completed"
        if self._task is not None:
            self._task.cancel()

    def _put_through(self, number: str) -> None:
        self.line.put_through = number

    async def _stream(self, who: Any, url: str, headers: dict[str, str] | None = None) -> None:
        """Play what comes at 8 kHz, one piece each 20 ms, until the socket ends."""
        # Sound that waits to be played, 20 ms each, and marks in it.
        waiting: deque[bytes | str] = deque()
        async with connect(url, additional_headers=headers or {}, compression=None) as socket:
            for message in who.hello():
                await socket.send(message)

            async def play() -> None:
                loop = asyncio.get_running_loop()
                began, number = loop.time(), 0
                with suppress(ConnectionClosed):
                    while True:
                        while waiting and isinstance(waiting[0], str):
                            await socket.send(who.reached(waiting.popleft()))
                        self.line.heard += waiting.popleft() if waiting else b""  # type: ignore[operator]
                        for message in who.voice(bytes(FRAME_BYTES)):
                            await socket.send(message)
                        number += 1
                        await asyncio.sleep(max(0, began + 0.02 * number - loop.time()))

            playing = asyncio.create_task(play())
            with suppress(ConnectionClosed):
                async for raw in socket:
                    match who.read(raw):
                        case Sound(pcm):
                            waiting.extend(pcm[at : at + FRAME_BYTES] for at in range(0, len(pcm), FRAME_BYTES))
                        case Mark(name):
                            waiting.append(name)
                        case Keys(keys):
                            self.line.keys += keys
                        case Clear():
                            marks = [item for item in waiting if isinstance(item, str)]
                            waiting.clear()
                            for message in who.cleared(marks):
                                await socket.send(message)
                        case HangUp():
                            break
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)
            self.line.close_reason = socket.close_reason or ""
        if not self.line.put_through and type(who).__name__ != "Telnyx":
            # Nothing comes after the stream, so the call is over; of Telnyx's, where no document says what comes, not.
            self.line.state = "completed"


def _is_basic(request: Request, name: str, password: str) -> bool:
    wanted = base64.b64encode(f"{name}:{password}".encode()).decode()
    return request.headers.get("authorization") == f"Basic {wanted}"
