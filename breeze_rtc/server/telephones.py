"""The telephone lines of a server: what `Phone`'s settings open, the calls that come in there, and those it places."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from urllib.parse import urlencode

from starlette.routing import BaseRoute
from starlette.websockets import WebSocket

from breeze_rtc.clock import SECOND, Clock
from breeze_rtc.errors import BadRequest, CarrierRefused, NoAnswer
from breeze_rtc.server.carrier_api import OVER, RING_S, CarrierApi
from breeze_rtc.server.phone import Phone, PhoneDoor
from breeze_rtc.server.phone_call import START_S, AudioSocketCall, AudioSocketConnection, CarrierCall, Desk
from breeze_rtc.server.sip_call import SipCall, SipDoor
from breeze_rtc.transport.pacer import Pacer

log = logging.getLogger(__name__)

STATE_S = 1.0
"""How often a carrier is asked whether a telephone still rings."""

TelephoneCall = CarrierCall | AudioSocketCall | SipCall


class Telephones:
    """`open`, then calls come until `close`; those by carriers' sockets come by `routes`."""

    def __init__(
        self,
        phone: Phone,
        *,
        desk: Callable[[], Desk | None],
        began: Callable[[TelephoneCall], None],
        ended: Callable[[TelephoneCall], None],
        pacer: Pacer,
        clock: Clock,
    ) -> None:
        """desk: what one more call needs; None when there is no room.  began, ended: called with each call."""
        self.phone = phone
        self.dialled: dict[str, asyncio.Future[CarrierCall]] = {}
        """Calls that have been placed and not begun, by token."""
        self.sip: SipDoor | None = None
        """The SIP door, while it is open."""
        self._desk = desk
        self._began, self._ended = began, ended
        self._pacer, self._clock = pacer, clock
        self._audio_socket: asyncio.Server | None = None
        # What holds the calls that came by AudioSocket.
        self._holding: set[asyncio.Task[None]] = set()

    def routes(self) -> list[BaseRoute]:
        """Where carriers ask and stream."""
        return PhoneDoor(self.phone, self._carrier_call).routes()

    async def open(self) -> None:
        """Raises `BadRequest` where an address is taken."""
        if self.phone.audio_socket is not None:
            host, port = self.phone.audio_socket
            try:
                self._audio_socket = await asyncio.get_running_loop().create_server(
                    lambda: AudioSocketConnection(self._audio_socket_call), host, port
                )
            except OSError as error:
                raise BadRequest(f"cannot answer AudioSocket at {host}:{port}: {error.strerror}") from error
        if self.phone.sip is not None:
            door = SipDoor(
                self.phone.sip, desk=self._desk, holds_line=self._holds_line, pacer=self._pacer, clock=self._clock
            )
            try:
                await door.open()
            except BadRequest:
                await self.close()
                raise
            self.sip = door

    async def close(self) -> None:
        """No more calls come in, those by SIP are hung up, and those by AudioSocket, which have been told to stop, have
        ended.  Carriers' sockets are their server's."""
        if self._audio_socket is not None:
            self._audio_socket.close()
        await asyncio.gather(*self._holding, return_exceptions=True)
        if self.sip is not None:
            await self.sip.close()

    async def dial(self, carrier: str, to: str, *, caller: str) -> str:
        """Call a telephone and hold the conversation until it ends; returns why it did.

        carrier: an account of `Phone.apis`, or `sip`.  Raises `BadRequest`, `CarrierRefused`, or `NoAnswer`.
        """
        if carrier == "sip":
            if self.sip is None:
                raise BadRequest("to call by SIP, give `Phone` a `sip`")
            return await self.sip.call(to)
        if carrier not in self.phone.apis:
            raise BadRequest(f"there is no account at {carrier!r} to call by; give `Phone` one in `apis`")
        api = self.phone.apis[carrier]
        token = secrets.token_urlsafe(12)
        begun = self.dialled[token] = asyncio.get_running_loop().create_future()
        socket_url = f"{self.phone.socket_url(carrier)}?{urlencode({'dial': token, 'from': caller, 'to': to})}"
        asked = asyncio.create_task(
            api.dial(to, caller, webhook=self.phone.webhook(carrier, dial=token), socket=socket_url)
        )
        is_ours = True
        try:
            conversation = await self._answered(begun, api, await asyncio.shield(asked), to)
            reason = await conversation.ended()
            is_ours = not conversation.was_put_through
            return reason
        finally:
            del self.dialled[token]
            if is_ours:
                # While it rings, also for somebody who has stopped to wait for the carrier's answer; and where the
                # stream's end does not end it.  One that is over cannot be ended.
                with suppress(CarrierRefused):
                    await api.hang_up(await asked)

    # ---

    async def _answered(self, begun: asyncio.Future[CarrierCall], api: CarrierApi, call: str, to: str) -> CarrierCall:
        ends_at = self._clock.now() + (RING_S + START_S) * SECOND
        while self._clock.now() < ends_at:
            await asyncio.wait((begun,), timeout=STATE_S)
            if begun.done():
                return begun.result()
            with suppress(CarrierRefused):
                state = await api.state(call)
                if state in OVER:
                    raise NoAnswer(to, state)
        raise NoAnswer(to, "no-answer")

    async def _carrier_call(self, socket: WebSocket, carrier: str) -> None:
        """A carrier's call; see `phone`."""
        desk = self._desk()
        if desk is None:
            await socket.close(1013)  # Before accept: the carrier is refused, and can try another server.
            return
        call = CarrierCall(socket, carrier, desk)
        with self._holds_line(call):
            log.info("a telephone call ended: %s", await call.hold())

    def _audio_socket_call(self, transport: asyncio.WriteTransport) -> AudioSocketCall | None:
        """A call that Asterisk brings over TCP."""
        desk = self._desk()
        if desk is None:
            return None
        call = AudioSocketCall(transport, desk, pacer=self._pacer)
        line = ExitStack()
        line.enter_context(self._holds_line(call))
        holding = asyncio.create_task(self._hold(call, line))
        self._holding.add(holding)
        holding.add_done_callback(self._holding.discard)
        return call

    async def _hold(self, call: AudioSocketCall, line: ExitStack) -> None:
        with line:
            log.info("a telephone call ended: %s", await call.hold())

    @contextmanager
    def _holds_line(self, call: TelephoneCall) -> Iterator[None]:
        """Enter it where `desk` has just said that there is room, with nothing awaited in between: others call, too."""
        self._began(call)
        try:
            yield
        finally:
            self._ended(call)
