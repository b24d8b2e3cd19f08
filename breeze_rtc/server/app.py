"""The HTTP door: the page, its call, the speech API, health and metrics.

`VoiceServer` owns what all calls share (engine, recogniser, voice activity) and is a set of Starlette routes with a
lifespan; `create_app` makes an app of it, `mount` adds it to an app that exists, `run` serves one.  Every error is
JSON: `{"error": {"code", "message", "fix"}}`.
"""

from __future__ import annotations

import asyncio
import errno
import importlib.resources
import logging
import mimetypes
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from dataclasses import replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket

from breeze_rtc.agent import numbers
from breeze_rtc.agent.listen import Listener, ListenFailed, Recogniser
from breeze_rtc.agent.session import Callbacks
from breeze_rtc.agent.vad import VoiceActivity
from breeze_rtc.clock import SECOND, Clock, MonotonicClock, wall_offset_ns
from breeze_rtc.errors import BadRequest, EngineClosed, MissingExtra, Overloaded, UnknownVoice
from breeze_rtc.runtime.engine import Engine
from breeze_rtc.runtime.process import freeze_heap
from breeze_rtc.server import metrics as metrics_module
from breeze_rtc.server.call import RETURN_S, SILENT_PAGE_S, PageCall, refuse
from breeze_rtc.server.http_error import HttpError, http_error
from breeze_rtc.server.metrics import Metrics
from breeze_rtc.server.phone import Phone
from breeze_rtc.server.phone_call import Desk
from breeze_rtc.server.sip_call import SipDoor
from breeze_rtc.server.speech_api import SpeechApi
from breeze_rtc.server.telephones import TelephoneCall, Telephones
from breeze_rtc.server.whep import WhepDoor
from breeze_rtc.transport.ice import IceServers
from breeze_rtc.transport.pacer import Pacer
from breeze_rtc.transport.signaling import MAX_MESSAGE_BYTES

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0005
"""How long a thread may keep the interpreter from the one that sends packets.  Python's own 5 ms, waited for each time
the loop wakes, cost 20 calls six of ten slots once a user's callback computes in a thread; with this, none."""
_CONTENT_TYPES = {".js": "text/javascript", ".mjs": "text/javascript", ".css": "text/css", ".html": "text/html"}


class VoiceServer:
    """What all calls share, and the routes that use it.

    engine: takes the place of one made from `model`, `device`, `threads`, `weights`, `codec_device`, `voices` and
    `trace`; it is started and closed here.  accepts_voices: whoever reaches this server may add and delete cloned
    voices.  listens: whether the microphone is turned into text; without the `listen` extra it is not, and the page
    says how to get it.
    recogniser: makes what does that (`agent.transcription` has some).  recordings: a folder for the calls, a stereo
    WAV file each.  allowed_origins: pages of other hosts that may call; the server's own always may.  phone: answer
    telephone calls too.  on_ready: called once all is loaded.
    """

    def __init__(
        self,
        callbacks: Callbacks,
        *,
        model: str = "nano",
        device: str = "cpu",
        threads: int = 1,
        weights: str = "",
        codec_device: str = "",
        voices: Path | None = None,
        accepts_voices: bool = False,
        trace: Path | None = None,
        engine: Engine | None = None,
        listens: bool = True,
        recogniser: Callable[[], Recogniser] = Listener,
        recordings: Path | None = None,
        max_calls: int = 8,
        max_calls_per_address: int | None = None,
        ice: IceServers | None = None,
        relay_only: bool = False,
        allowed_origins: Sequence[str] = (),
        phone: Phone | None = None,
        silent_page_s: float = SILENT_PAGE_S,
        return_s: float = RETURN_S,
        on_ready: Callable[[VoiceServer], None] = lambda server: None,
        clock: Clock | None = None,
    ) -> None:
        self.engine = engine or Engine(
            model,
            device=device,
            threads=threads,
            weights=weights,
            codec_device=codec_device,
            voices=voices,
            trace=trace,
        )
        self.metrics = Metrics(self.engine)
        self.listen_fix = ""
        """What to do so that the server understands speech; empty when it does."""
        self._callbacks = callbacks
        self._accepts_voices = accepts_voices
        self._listens = listens
        self._recogniser = recogniser
        self._recordings = recordings
        self._numbers = count(1)
        self._max_calls = max_calls
        self._max_calls_per_address = max_calls_per_address
        self._ice = ice or IceServers()
        self._relay_only = relay_only
        self._allowed_origins = frozenset(origin.rstrip("/") for origin in allowed_origins)
        self._silent_page_s = silent_page_s
        self._whep = WhepDoor(self._make_call, self._hold, self._is_own_page, self._allowed_origins)
        self._return_s = return_s
        self._on_ready = on_ready
        self._clock = clock or MonotonicClock()
        self._activity: VoiceActivity | None = None
        self._listener: Recogniser | None = None
        self._warming: asyncio.Task[None] | None = None
        # One ticker for the packets of all calls.
        self._pacer = Pacer(self._clock)
        self._calls: set[PageCall | TelephoneCall] = set()
        self._telephones: Telephones | None = None
        if phone is not None:
            self._telephones = Telephones(
                phone,
                desk=self._desk,
                began=self._calls.add,
                ended=self._calls.discard,
                pacer=self._pacer,
                clock=self._clock,
            )
        # How many come from where; the pages among them by token, with which one comes back.
        self._by_address: Counter[str] = Counter()
        self._pages: dict[str, PageCall] = {}
        self._speech = SpeechApi(
            self.engine,
            metrics=self.metrics,
            clock=self._clock,
            accepts_voices=accepts_voices,
            is_own_page=self._is_own_page,
        )

    # -- life

    @asynccontextmanager
    async def lifespan(self, app: object = None) -> AsyncIterator[None]:
        """Load and hold the parts; calls that are open at the end are told so."""
        async with self.engine:
            voice, known = self._callbacks.voice, self.engine.voices
            if voice is not None and voice not in known and not self._accepts_voices:
                raise UnknownVoice(voice, known)  # now, and not in the first call
            self._activity = VoiceActivity()
            switch_interval_s = sys.getswitchinterval()
            sys.setswitchinterval(min(switch_interval_s, SWITCH_INTERVAL_S))
            try:
                self._open_ears()
                if not self.engine.reads_numbers and numbers.is_installed():
                    await asyncio.to_thread(numbers.warm)
                if self._telephones is not None:
                    await self._telephones.open()
                self._on_ready(self)
                yield
            finally:
                sys.setswitchinterval(switch_interval_s)
                for call in tuple(self._calls):
                    call.stop()
                if self._telephones is not None:
                    await self._telephones.close()
                await self._whep.close()
                if self._warming is not None:
                    self._warming.cancel()
                if self._listener is not None:
                    await self._listener.close()
                self._activity.close()

    def _open_ears(self) -> None:
        if not self._listens:
            self.listen_fix = "This server was started without speech recognition."
            return
        try:
            self._listener = self._recogniser()
        except MissingExtra as error:
            self.listen_fix = str(error)
            log.warning("%s", error)
            return
        self._warming = asyncio.create_task(self._warm(self._listener))

    async def _warm(self, listener: Recogniser) -> None:
        try:
            await listener.warm()
        except ListenFailed as error:
            log.error("speech recognition does not start (%s); turns can still be typed", error)
        except Exception:
            log.exception("speech recognition does not start; turns can still be typed")

    def routes(self) -> list[BaseRoute]:
        """The page and its `/call`, `/whep`, `/v1/audio/speech`, `/v1/voices`, `/health`, `/metrics`, and the
        telephone's."""
        return [
            *(_file_route(path) for path in sorted(web_folder().iterdir()) if path.is_file()),
            WebSocketRoute("/call", self.call),
            *self._speech.routes(),
            Route("/health", self.health),
            Route("/metrics", self.read_metrics),
            *self._whep.routes(),
            *(self._telephones.routes() if self._telephones is not None else []),
        ]

    # -- calls

    def _next_recording(self) -> Path | None:
        """A file for the next call, named by the time (UTC) and a number."""
        if self._recordings is None:
            return None
        began = datetime.fromtimestamp((self._clock.now() + wall_offset_ns()) / SECOND, UTC)
        return self._recordings / f"{began:%Y%m%dT%H%M%S}-{next(self._numbers)}.wav"

    async def call(self, socket: WebSocket) -> None:
        """The page's call; see `signaling` for what is said in it."""
        if not self._is_own_page(socket):
            self.metrics.refused.labels("foreign_origin").inc()
            await socket.close(1008)  # before accept: the handshake is refused with 403
            return
        token = socket.query_params.get("resume")
        if token is not None:
            await self._resume(socket, token)
            return
        try:
            call = self._make_call(_address(socket), voice=socket.query_params.get("voice"))
        except HttpError as error:
            await refuse(socket, error.code, error.message, error.fix)
            return
        self._pages[call.token] = call
        try:
            await self._hold(call, socket)
        finally:
            del self._pages[call.token]

    async def _resume(self, socket: WebSocket, token: str) -> None:
        """A page that lost its socket is back."""
        call = self._pages.get(token)
        received = socket.query_params.get("received", "")
        if call is None or call.closed.is_set() or not received.isdecimal() or len(received) > 15:
            self.metrics.refused.labels("call_gone").inc()
            await refuse(socket, "call_gone", "this call has ended", "Start a new call.")
            return
        await call.serve(socket, received=int(received))

    def _page_voices(self) -> tuple[str, ...]:
        """What a page may choose from: nothing where the agent has its own voice."""
        return self.engine.voices if self._callbacks.voice is None and self.engine.is_running else ()

    def _make_call(self, address: str, *, has_page: bool = True, voice: str | None = None) -> PageCall:
        """voice: the page's choice.  Raises HttpError when there is no line, and for a voice that is not offered."""
        if self._activity is None:
            raise HttpError(503, "not_started", "the server is not ready", "Is its lifespan running?", 2.0)
        if len(self._calls) >= self._max_calls:
            self._no_line("every line is taken", "Wait for a call to end, or raise --max-calls.")
        callbacks = self._callbacks
        if voice is not None:
            offered = self._page_voices()
            if voice not in offered:
                fix = f"One of: {', '.join(offered)}." if offered else "Leave it out: the agent has its own."
                raise HttpError(400, "unknown_voice", "this voice is not offered", fix)
            callbacks = replace(callbacks, voice=voice)
        held = self._by_address[address]
        if self._max_calls_per_address is not None and held >= self._max_calls_per_address:
            self._no_line(
                f"{held} calls come from {address} already",
                "End one of them, or raise --max-calls-per-address.",
                code="too_many_calls_from_here",
            )
        try:
            call = PageCall(
                engine=self.engine,
                callbacks=callbacks,
                metrics=self.metrics,
                activity=self._activity,
                ears=self._listener,
                listen_fix=self.listen_fix,
                recording=self._next_recording(),
                ice_servers=self._ice.servers,
                ice_renewal_s=self._ice.renewal_s,
                relay_only=self._relay_only,
                has_page=has_page,
                pacer=self._pacer,
                silent_page_s=self._silent_page_s,
                return_s=self._return_s,
                clock=self._clock,
            )
        except EngineClosed as error:
            raise http_error(error) from error
        call.address = address
        self._calls.add(call)
        self._by_address[address] += 1
        return call

    def _no_line(self, message: str, fix: str, code: str = "too_many_calls") -> NoReturn:
        self.metrics.refused.labels(code).inc()
        raise http_error(Overloaded(message, 10), code=code, fix=fix)

    async def _hold(self, call: PageCall, socket: WebSocket | None = None) -> None:
        try:
            reason = await call.hold(socket)
            log.info("a call ended: %s", reason)
        finally:
            self._calls.discard(call)
            self._by_address -= Counter([call.address])  # which forgets those that have none left

    def _desk(self) -> Desk | None:
        """What one more telephone call needs; None when there is no room for it."""
        if len(self._calls) >= self._max_calls or self._activity is None or not self.engine.is_running:
            self.metrics.refused.labels("too_many_calls").inc()
            return None
        assert self._telephones is not None, "a telephone call comes in by one of its doors"
        return Desk(
            *(self.engine, self._callbacks, self.metrics, self._activity, self._listener, self._clock),
            *(self._telephones.phone, self._telephones.dialled, self._next_recording),
        )

    @property
    def sip(self) -> SipDoor | None:
        """The SIP door, while it is open."""
        return self._telephones.sip if self._telephones is not None else None

    async def dial(self, carrier: str, to: str, *, caller: str) -> str:
        """Call a telephone and hold the conversation until it ends; returns why it did.

        carrier: an account of `Phone.apis`, or `sip`.  to, caller: numbers such as +4930123456; `caller` is one of the
        account's.  By SIP `to` may be an address, and `caller` is the account, or nobody.  Raises `BadRequest`,
        `CarrierRefused`, or `NoAnswer`.
        """
        if self._telephones is None:
            raise BadRequest("to call a telephone, give the server a `Phone`")
        return await self._telephones.dial(carrier, to, caller=caller)

    def _is_own_page(self, request: HTTPConnection) -> bool:
        """A browser says which page asks; another site's page must not use this server in its user's name."""
        origin = request.headers.get("origin")
        if origin is None:
            return True  # not a browser
        host = request.headers.get("host", "")
        return origin.rstrip("/") in {f"http://{host}", f"https://{host}"} | self._allowed_origins

    # -- how it is doing

    async def health(self, request: Request) -> Response:
        """200 while calls can be held, 503 while the engine is down."""
        is_up = self.engine.is_running
        body = {
            "status": "ok" if is_up else "engine_down",
            "model": self.engine.model_name,
            "voices": list(self.engine.voices) if is_up else [],
            "page_voices": list(self._page_voices()),
            "listens": self._listener is not None,
            "calls": len(self._calls),
            "max_calls": self._max_calls,
        }
        return JSONResponse(body, 200 if is_up else 503)

    async def read_metrics(self, request: Request) -> Response:
        """Prometheus text."""
        return Response(self.metrics.text(), media_type=metrics_module.CONTENT_TYPE)


def _address(request: HTTPConnection) -> str:
    return request.client.host if request.client is not None else ""


async def _plain_error(request: Request, error: Exception) -> Response:
    """What Starlette itself refuses (404, 405), in the same shape."""
    assert isinstance(error, HTTPException)
    code = str(error.detail).lower().replace(" ", "_")
    return HttpError(error.status_code, code, f"{request.method} {request.url.path}: {error.detail}").response()


async def _our_fault(request: Request, error: Exception) -> Response:
    return HttpError(500, "internal", "the server failed", "Its log has the traceback.").response()


# -- the page's files


def web_folder() -> Path:
    """The page: inside the installed package, or beside it in a source tree."""
    packaged = Path(str(importlib.resources.files("breeze_rtc"))) / "web"
    return packaged if packaged.is_dir() else packaged.parent.parent / "web"


def _file_route(path: Path) -> Route:
    content_type = _CONTENT_TYPES.get(path.suffix) or mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    # Always asked for again: a page of another version would speak another protocol.
    headers = {"Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff"}

    async def answer(request: Request) -> Response:
        return FileResponse(path, media_type=content_type, headers=headers)

    return Route("/" if path.name == "index.html" else f"/{path.name}", answer)


# -- doors


def create_app(server: VoiceServer, *, has_lifespan: bool = True) -> Starlette:
    """An app of nothing but the server; without a lifespan where somebody else holds the server's."""
    return Starlette(
        routes=server.routes(),
        lifespan=server.lifespan if has_lifespan else None,
        exception_handlers={HTTPException: _plain_error, Exception: _our_fault},
    )


def mount(server: VoiceServer, app: Any) -> None:
    """Add the server's routes to a Starlette or FastAPI `app`, and its life to the app's."""
    own: Callable[[Any], AbstractAsyncContextManager[Any]] = app.router.lifespan_context

    @asynccontextmanager
    async def both(starting: Any) -> AsyncIterator[Any]:
        async with server.lifespan(), own(starting) as state:
            yield state

    app.router.lifespan_context = both
    app.router.routes.extend(server.routes())


def listen(host: str, port: int) -> socket.socket:
    """A listening address, taken before anything is loaded; raises BadRequest in words when it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with closing(socket.socket(family, socket.SOCK_STREAM)) as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind((host, port))
        except OverflowError as error:
            raise BadRequest(f"{port} is no port; use 1 to 65535") from error
        except OSError as error:
            raise BadRequest(_why_not(error, host, port)) from error
        taken.listen(128)
        return socket.socket(fileno=taken.detach())


def _why_not(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is in use by another program; choose another, such as {port + 1}"
    if error.errno == errno.EACCES:
        return f"port {port} needs more rights than this user has; choose one above 1023"
    return f"cannot listen on {host}:{port}: {error.strerror or error}"


def page_url(host: str, port: int) -> str:
    """Where a browser on this machine finds the page of a server that listens at `host`."""
    # A browser lends the microphone to localhost and to https only; "all addresses" is no address to visit.
    shown = {"0.0.0.0": "localhost", "::": "localhost"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}/"


def http_server(server: VoiceServer) -> uvicorn.Server:
    """uvicorn with our limits; the server's life is held outside, for uvicorn prints tracebacks of plain sentences."""
    return uvicorn.Server(
        uvicorn.Config(
            create_app(server, has_lifespan=False),
            lifespan="off",
            log_config=None,
            log_level="warning",  # it would write each socket's address, and with it the token of a page that came back
            ws_max_size=MAX_MESSAGE_BYTES,
            ws_ping_interval=10.0,
            ws_ping_timeout=10.0,
            timeout_graceful_shutdown=3,
        )
    )


async def serve(server: VoiceServer, address: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM.  Raises what keeps the engine from starting."""
    async with server.lifespan():
        freeze_heap()
        await http_server(server).serve(sockets=[address])


@asynccontextmanager
async def serving(server: VoiceServer, address: socket.socket) -> AsyncIterator[None]:
    """Serve meanwhile, and leave signals to whoever does something meanwhile."""
    http = http_server(server)
    async with server.lifespan():
        running = asyncio.create_task(http._serve(sockets=[address]))  # `serve` takes Ctrl-C for itself.
        try:
            yield
        finally:
            http.should_exit = True
            await running


def run(server: VoiceServer, address: socket.socket) -> None:
    """Serve until Ctrl-C, on uvloop where there is one.  address: from `listen`."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(serve(server, address))


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, where there is one: it paces packets with less of a core."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
