"""Calls by plain HTTP, for players that know WHEP or WHIP and nothing of our page's socket.

    POST   /whep        an SDP offer -> 201, the answer, and in `Location` the call's own address
    PATCH  that address  more addresses of the peer, as they are found (trickle ICE, RFC 8840)
    DELETE that address  the end

The shape is that of WHIP (RFC 9725) and of the draft for WHEP: an offer that only receives hears the agent, one that
also sends is a conversation.  Such a peer tells nothing of its player: where its listener is follows from its RTCP
receiver reports and the clock, and the position's source says so.  There is no ICE restart, hence no entity tag.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from breeze_rtc.server.call import PageCall
from breeze_rtc.server.http_error import HttpError, errors_as_json
from breeze_rtc.transport import signaling
from breeze_rtc.transport.signaling import IceServer, Offer

SDP = "application/sdp"
FRAGMENT = "application/trickle-ice-sdpfrag"
PATHS = ("/whep", "/whip")


@dataclass(frozen=True, slots=True)
class _Session:
    call: PageCall
    # The peer's name and password for ICE.
    credentials: tuple[str, ...]


class WhepDoor:
    """The routes, and the calls that came through them."""

    def __init__(
        self,
        make_call: Callable[..., PageCall],
        hold: Callable[[PageCall], Awaitable[None]],
        is_own: Callable[[HTTPConnection], bool],
        allowed_origins: Collection[str],
    ) -> None:
        """make_call: takes an address; raises HttpError when there is no line.  is_own: whether a request comes from a
        page that may call; pages of `allowed_origins` are told so in their browser's words (CORS)."""
        self._make_call = make_call
        self._hold = hold
        self._is_own = is_own
        self._allowed_origins = allowed_origins
        self._sessions: dict[str, _Session] = {}
        self._holding: set[asyncio.Task[None]] = set()

    def routes(self) -> list[BaseRoute]:
        routes: list[BaseRoute] = []
        for path in PATHS:
            routes += [
                Route(path, errors_as_json(self._call), methods=["POST"]),
                Route(path, self._options, methods=["OPTIONS"]),
                Route(f"{path}/{{token}}", errors_as_json(self._session), methods=["PATCH", "DELETE"]),
                Route(f"{path}/{{token}}", self._options, methods=["OPTIONS"]),
            ]
        return routes

    async def close(self) -> None:
        """Wait for the calls, which have been told to stop."""
        await asyncio.gather(*self._holding, return_exceptions=True)

    async def _call(self, request: Request) -> Response:
        sdp = await self._body(request, SDP, signaling.MAX_SDP_BYTES)
        offer = Offer(signaling.check_offer(sdp), microphone=False)
        call: PageCall = self._make_call(request.client.host if request.client is not None else "", has_page=False)
        session = _Session(call, _credentials(offer.sdp))
        self._sessions[call.token] = session
        holding = asyncio.create_task(self._until_over(session))
        self._holding.add(holding)
        holding.add_done_callback(self._holding.discard)
        answer = await call.answer(offer)
        headers = {
            "Location": f"{request.url.path}/{call.token}",
            "Accept-Patch": FRAGMENT,
            "Access-Control-Expose-Headers": "Location, Link, Accept-Patch",
            **self._cors(request),
        }
        response = Response(answer, 201, headers, SDP)
        for server in call.ice_servers():
            for url in server.urls:
                response.headers.append("Link", _link(url, server))
        return response

    async def _until_over(self, session: _Session) -> None:
        try:
            await self._hold(session.call)
        finally:
            del self._sessions[session.call.token]

    async def _session(self, request: Request) -> Response:
        session = self._sessions.get(request.path_params["token"])
        if session is None or session.call.closed.is_set():
            raise HttpError(404, "call_gone", "this call has ended, or never was", "POST an offer for a new one.")
        if request.method == "DELETE":
            session.call.end(1000, "the peer hung up")
            return Response(status_code=200, headers=self._cors(request))
        fragment = await self._body(request, FRAGMENT, signaling.MAX_SDP_BYTES)
        told = _credentials(fragment)
        if told and told != session.credentials:
            raise HttpError(422, "no_ice_restart", "ICE cannot be restarted here", "POST an offer for a new call.")
        for line in re.findall(r"^a=(candidate:.*?)\r?$", fragment, re.MULTILINE)[: signaling.MAX_CANDIDATES]:
            await session.call.add_candidate(signaling.read_candidate(line))
        return Response(status_code=204, headers=self._cors(request))

    async def _options(self, request: Request) -> Response:
        """What may be sent here (RFC 9725 section 4.2), and a browser's question before it sends."""
        headers = {
            "Accept-Post": SDP,
            "Access-Control-Allow-Methods": "POST, PATCH, DELETE",
            "Access-Control-Allow-Headers": "Content-Type, If-Match",
            **self._cors(request),
        }
        return Response(status_code=204, headers=headers)

    async def _body(self, request: Request, content_type: str, limit: int) -> str:
        if not self._is_own(request):
            raise HttpError(403, "foreign_origin", "pages of that site may not call", "See --allowed-origin.")
        if request.headers.get("content-type", "").split(";")[0].strip().lower() != content_type:
            raise HttpError(415, "wrong_content_type", f"the body is not {content_type}", "Say what it is.")
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > limit:
                raise HttpError(413, "body_too_large", f"the body is larger than {limit} bytes", "Send less.")
        try:
            return body.decode()
        except UnicodeDecodeError as error:
            raise HttpError(400, "offer_malformed", "the body is not UTF-8", "Send the SDP as it is.") from error

    def _cors(self, request: Request) -> dict[str, str]:
        origin = request.headers.get("origin", "").rstrip("/")
        return {"Access-Control-Allow-Origin": origin, "Vary": "Origin"} if origin in self._allowed_origins else {}


def _credentials(sdp: str) -> tuple[str, ...]:
    return tuple(sorted(set(re.findall(r"^a=(ice-(?:ufrag|pwd):\S+)", sdp, re.MULTILINE))))


def _link(url: str, server: IceServer) -> str:
    """An ICE server as WHIP tells it (RFC 9725 section 4.6)."""
    link = f'<{url}>; rel="ice-server"'
    if server.username is None:
        return link
    return f'{link}; username="{server.username}"; credential="{server.credential}"; credential-type="password"'
