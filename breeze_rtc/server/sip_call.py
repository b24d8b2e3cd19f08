"""The SIP door: telephones and PBXs call the agent, and it calls them, with no carrier between.

Signalling is `breeze_rtc.sip`'s, which knows no sockets; sound is an `RtpLine` for each call.  This is what joins them
to the network and to an agent.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, suppress
from ipaddress import ip_address, ip_network

from breeze_rtc.clock import MS, SECOND, Clock
from breeze_rtc.errors import BadRequest, LineCannot, NoAnswer, PeerError
from breeze_rtc.server.phone_call import THROUGH, Conversation, Desk, check_keys, check_number
from breeze_rtc.server.sip import Sip
from breeze_rtc.sip import sdp
from breeze_rtc.sip.call import (
    Account,
    Answered,
    Call,
    Ended,
    Event,
    Invited,
    Pressed,
    Registered,
    Reoffered,
    Ringing,
    State,
    Transferred,
)
from breeze_rtc.sip.message import Inbox, host_of
from breeze_rtc.sip.transactions import Hop
from breeze_rtc.sip.user_agent import UserAgent
from breeze_rtc.transport.pacer import Pacer
from breeze_rtc.transport.rtp_line import RtpLine

log = logging.getLogger(__name__)

RING_S = 60.0
TRANSFER_S = 30.0
SILENT_S = 20.0
"""A line that has brought nothing for so long, no report either, is asked whether it is still there."""
STOP_S = 1.0
MAX_CONNECTIONS = 1_000
RECEIVE_BYTES = 4 * 1024 * 1024
"""What may wait for us: a hundred calls may come at once, and what is lost comes again only after half a second."""


class SipDoor:
    """One address that answers SIP.  `open`, then it lives until `close`."""

    def __init__(
        self,
        sip: Sip,
        *,
        desk: Callable[[], Desk | None],
        holds_line: Callable[[SipCall], AbstractContextManager[None]],
        pacer: Pacer,
        clock: Clock,
    ) -> None:
        """desk: what one more call needs; None when there is no room.  holds_line: the call counts inside of it."""
        host, port = host_of(sip.listen)
        if not host or port is None:
            host, _, zero = sip.listen.rpartition(":")
            if zero != "0":
                raise BadRequest(f"{sip.listen!r} is no HOST:PORT")
        self.host, self.port = host, port or 0
        self.pacer, self.clock = pacer, clock
        self.agent = UserAgent(self._local, account=Account(sip.account, sip.password) if sip.account else None)
        self.registered: int | None = None
        """What the registrar said last: 200 when the account is registered; None before it has said anything."""
        self._sip = sip
        try:
            self._allowed = [ip_network(network) for network in sip.allow]
        except ValueError as error:
            raise BadRequest(f"no network that may call: {error}") from None
        self._desk = desk
        self._holds_line = holds_line
        self._calls: dict[Call, SipCall] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._udp: asyncio.DatagramTransport | None = None
        self._tcp: asyncio.Server | None = None
        self._connections: dict[tuple[str, int], asyncio.Transport] = {}
        # Names that were looked up; our address towards each host.
        self._addresses: dict[str, str] = {}
        self._ours: dict[str, str] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def open(self) -> None:
        """Raises `BadRequest` where the address is taken, or the account's server has none."""
        loop = asyncio.get_running_loop()
        try:
            self._udp, _ = await loop.create_datagram_endpoint(
                lambda: _Datagrams(lambda data, source: self._receive(data, Hop("udp", *source))),
                local_addr=(self.host, self.port),
            )
            self._udp.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
            self.port = self._udp.get_extra_info("sockname")[1]
            self._tcp = await loop.create_server(lambda: _Connection(self), self.host, self.port)
        except OSError as error:
            await self.close()
            raise BadRequest(f"cannot answer SIP at {self.host}:{self.port}: {error.strerror or error}") from error
        if self.agent.account is not None:
            try:
                await self._look_up(self.agent.hop_to(self.agent.account.registrar).host)
            except (PeerError, BadRequest) as error:
                await self.close()
                raise BadRequest(f"--sip-account: {error}") from error
            self.agent.register(self.clock.now())
            self.flush()

    async def close(self) -> None:
        """Hang up, and let go."""
        for call in tuple(self._calls.values()):
            call.stop()
        if self.agent.account is not None:
            self.agent.unregister(self.clock.now())
        self.flush()
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                while self.agent.is_asking:  # noqa: ASYNC110 - it is for a moment, at the end
                    await asyncio.sleep(0.01)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._timer is not None:
            self._timer.cancel()
        for connection in list(self._connections.values()):
            connection.close()
        if self._tcp is not None:
            self._tcp.close()
        if self._udp is not None:
            self._udp.close()

    async def call(self, to: str) -> str:
        """Call a SIP address, or with an account a number, and hold the call until it ends; returns why it did.

        Raises `BadRequest` for what cannot be called, and `NoAnswer`, whose state says what SIP does.
        """
        uri = self.uri(to)
        try:
            await self._look_up(self.agent.hop_to(uri).host)
        except PeerError as error:
            raise BadRequest(str(error)) from error
        desk = self._desk()
        if desk is None:
            raise BadRequest("there is no line free, or the engine does not run")
        line = SipCall(self, desk)
        with self._holds_line(line):
            try:
                here = self._local(self.agent.hop_to(uri))
                port = await line.open_media(self.host, self._sip.rtp_ports)
                line.call = self.agent.call(uri, line.offer(here[0], port), self.clock.now())
                self._calls[line.call] = line
                self.flush()
                await line.answered(to)
                return await self._converse(line)
            finally:
                line.let_go()

    # --- for calls

    def flush(self) -> None:
        """Send what there is to send, and act on what happened."""
        while True:
            sends, events = self.agent.sends(), self.agent.events()
            for data, hop in sends:
                self._send(data, hop)
            for event in events:
                self._on(event)
            if not sends and not events:
                break
        wake_at = self.agent.wake_at()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if wake_at is not None:
            wait_ms = max(1, -(-(wake_at - self.clock.now()) // MS))
            self._timer = asyncio.get_running_loop().call_later(wait_ms / 1_000, self._tick)

    def uri(self, to: str) -> str:
        """The SIP address of `to`, an address or with an account a number.  Raises `BadRequest`."""
        if to.lower().startswith(("sip:", "sips:")):
            return to
        number = to.removeprefix("tel:").replace(" ", "").replace("-", "")
        if self.agent.account is None:
            raise BadRequest(f"{to!r} is no SIP address (sip:NAME@HOST), and numbers need an account")
        return f"sip:{number}@{self.agent.account.registrar.removeprefix('sip:')}"

    def forget(self, call: SipCall) -> None:
        if call.call is not None:
            self._calls.pop(call.call, None)

    # ---

    def _tick(self) -> None:
        self.agent.tick(self.clock.now())
        self.flush()

    def _receive(self, data: bytes, hop: Hop) -> None:
        if self._allowed and not data.startswith(b"SIP/2.0 "):  # Answers are known by what was asked.
            source = ip_address(hop.host)
            if not any(source in network for network in self._allowed):
                return
        self.agent.receive(data, hop, self.clock.now())
        self.flush()

    def _on(self, event: Event) -> None:
        if isinstance(event, Registered):
            self.registered = event.status
            if event.status >= 300:
                log.warning("%s is not registered: %d %s", self._sip.account, event.status, event.reason)
            return
        if isinstance(event, Invited):
            self._spawn(self._answer(event.call, event.body))
        elif (call := self._calls.get(event.call)) is not None:
            call.on(event)

    async def _answer(self, call: Call, body: bytes) -> None:
        desk = self._desk()
        if desk is None:
            self._refuse(call, 486)
            return
        try:
            said = sdp.read(body) if body else None
        except PeerError as error:
            log.warning("a SIP call is refused: %s", error)
            self._refuse(call, 488)
            return
        line = self._calls[call] = SipCall(self, desk, call)
        with self._holds_line(line):
            try:
                port = await line.open_media(self.host, self._sip.rtp_ports)
                if call.state is State.OVER:  # The caller has given up meanwhile.
                    return
                line.accept(said, port)
                await self._converse(line)
            except BadRequest as error:
                log.warning("a SIP call is refused: %s", error)
            finally:
                line.let_go()

    async def _converse(self, line: SipCall) -> str:
        reason = await line.hold()
        log.info("a telephone call ended: %s", reason)
        return reason

    def _refuse(self, call: Call, status: int) -> None:
        self.agent.refuse(call, status, self.clock.now())
        self.flush()

    def _local(self, hop: Hop) -> tuple[str, int]:
        """Our address as a hop sees it."""
        if self._sip.public_host is not None:
            return self._sip.public_host, self.port
        if self.host not in ("0.0.0.0", "::"):
            return self.host, self.port
        host = self._addresses.get(hop.host, hop.host)
        if host not in self._ours:
            self._ours[host] = _route_to(host) if _is_literal(host) else "127.0.0.1"
        return self._ours[host], self.port

    async def _look_up(self, host: str) -> str:
        """The address of a host.  Raises `BadRequest` where it has none."""
        if _is_literal(host):
            return host
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_DGRAM)
        except OSError as error:
            raise BadRequest(f"{host} has no address: {error.strerror or error}") from error
        self._addresses[host] = str(found[0][4][0])
        return self._addresses[host]

    def _send(self, data: bytes, hop: Hop) -> None:
        host = self._addresses.get(hop.host, hop.host)
        if hop.transport == "tcp":
            connection = self._connections.get((host, hop.port))
            if connection is not None:
                connection.write(data)
            else:
                self._spawn(self._send_by_new_connection(data, hop))
        elif not _is_literal(host):
            self._spawn(self._send_once_known(data, hop))
        elif self._udp is not None:
            self._udp.sendto(data, (host, hop.port))

    async def _send_once_known(self, data: bytes, hop: Hop) -> None:
        with suppress(BadRequest):  # Whoever waits for the answer finds out in time.
            await self._look_up(hop.host)
            self._send(data, hop)

    async def _send_by_new_connection(self, data: bytes, hop: Hop) -> None:
        try:
            host = await self._look_up(hop.host)
            if (host, hop.port) not in self._connections:
                await asyncio.get_running_loop().create_connection(lambda: _Connection(self), host, hop.port)
            self._connections[host, hop.port].write(data)
        except (OSError, KeyError, BadRequest) as error:
            log.warning("no SIP connection to %s:%d: %s", hop.host, hop.port, error)

    def connected(self, transport: asyncio.Transport) -> bool:
        """For a connection: whether it may stay."""
        peer = transport.get_extra_info("peername")
        if peer is None or len(self._connections) >= MAX_CONNECTIONS:
            return False
        self._connections[peer[:2]] = transport
        return True

    def disconnected(self, transport: asyncio.Transport) -> None:
        for peer in [peer for peer, other in self._connections.items() if other is transport]:
            del self._connections[peer]

    def received(self, transport: asyncio.Transport, data: bytes) -> None:
        peer = transport.get_extra_info("peername")
        if self._connections.get(peer[:2]) is transport:
            self._receive(data, Hop("tcp", *peer[:2]))

    def _spawn(self, coroutine: Awaitable[None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class SipCall:
    """One call: its SIP, its sound, its agent.  `hold` it once it is answered."""

    def __init__(self, door: SipDoor, desk: Desk, call: Call | None = None) -> None:
        """call: None for one of ours, which is set later."""
        self.call = call
        self._door = door
        self._metrics = desk.metrics
        self.line = RtpLine(
            clock=desk.clock,
            pacer=door.pacer,
            on_report=desk.engine.report,
            send=lambda data, to: self._put(0, data, to),
            send_rtcp=lambda data, to: self._put(1, data, to),
            sample_rate=desk.engine.sample_rate,
            ear_delay_ns=desk.phone.ear_delay_ms * MS,
        )
        self._conversation = Conversation(desk, self.line, self.line.sink, self)
        self.line.on_digit = self._conversation.press
        if self._conversation.recording is not None:
            self.line.on_slot = self._conversation.recording.agent
        self._sockets: list[asyncio.DatagramTransport] = []
        self._port = 0
        self._session = secrets.randbits(31)
        self._version = 1
        # "" once our call is taken; what was said when it is not.
        self._taken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._transferred: asyncio.Future[Transferred] | None = None

    async def open_media(self, host: str, ports: tuple[int, int]) -> int:
        """Take a port for RTP, which is even, and the next one for RTCP.  Raises `BadRequest` when none is free."""
        loop = asyncio.get_running_loop()
        first, last = ports[0] + ports[0] % 2, ports[1] - 1
        for _ in range(100):
            port = first + 2 * secrets.randbelow(max(1, (last - first) // 2 + 1))
            try:
                for number, receive in enumerate((self._receive, self.line.receive_rtcp)):
                    made, _ = await loop.create_datagram_endpoint(
                        lambda receive=receive: _Datagrams(receive),  # type: ignore[misc]
                        local_addr=(host, port + number),
                    )
                    self._sockets.append(made)
            except OSError:
                self._close_sockets()
                continue
            self._port = port
            return port
        raise BadRequest(f"no port between {ports[0]} and {ports[1]} is free for the sound of a call")

    def offer(self, host: str, port: int) -> bytes:
        return sdp.offer(host, port, session=self._session)

    def accept(self, said: sdp.Description | None, port: int) -> None:
        """Take a call that came in; said: what it offers, None where it wants to be offered something."""
        assert self.call is not None
        host = self.call.here[0]
        body = sdp.answer(said, host, port, session=self._session) if said is not None else self.offer(host, port)
        if said is not None:
            self._connect(said)
        self._door.agent.accept(self.call, body, self._door.clock.now())
        self._door.flush()

    @property
    def reason(self) -> str:
        """Why it ended."""
        return self._conversation.reason

    async def answered(self, to: str) -> None:
        """Wait until the other side, `to`, takes our call.  Raises `NoAnswer` when it does not."""
        try:
            async with asyncio.timeout(RING_S):
                state = await self._taken
        except TimeoutError:
            state = f"it rang for {RING_S:.0f} s"
        if state:
            raise NoAnswer(to, state)

    async def hold(self) -> str:
        """Hold the call until it ends; returns why, in a few words.  Then `let_go`."""
        assert self.call is not None
        await self._conversation.hold(self._conversation.converse(self._metadata()), self._watch())
        return self._conversation.reason

    def stop(self) -> None:
        """The server is stopping."""
        self._conversation.end("the server is stopping")
        self._hang_up()

    def let_go(self) -> None:
        """Hang up, and free what the call used; a caller who was not answered is refused."""
        self._metrics.gaps.inc(self.line.sink.gaps)
        self._conversation.let_go()
        self._hang_up()
        self._close_sockets()
        self._door.forget(self)

    # --- while it lasts

    async def send_dtmf(self, keys: str) -> None:
        check_keys(keys)
        if self.line.has_keys:
            self.line.press(keys)
        else:
            self._conversation.sound_keys(keys)

    async def transfer(self, to: str) -> None:
        check_number(to)
        assert self.call is not None
        self._transferred = asyncio.get_running_loop().create_future()
        self._door.agent.transfer(self.call, self._door.uri(to), self._door.clock.now())
        self._door.flush()
        try:
            async with asyncio.timeout(TRANSFER_S):
                said = await self._transferred
        except TimeoutError:
            raise LineCannot(THROUGH, f"the other side said nothing for {TRANSFER_S:.0f} s") from None
        if said.status >= 300:
            raise LineCannot(THROUGH, f"the other side said {said.status} {said.reason}")
        self._conversation.end("the caller was put through")

    def on(self, event: Event) -> None:
        """What the user agent says of this call."""
        match event:
            case Answered():
                self._on_answer(event.body)
            case Reoffered():
                self._on_offer(event.body)
            case Pressed():
                self._conversation.press(event.digit)
            case Transferred() if self._transferred is not None and not self._transferred.done():
                self._transferred.set_result(event)
            case Ended():
                self._conversation.end("the caller hung up" if not event.status else event.reason)
                if not self._taken.done():
                    self._taken.set_result(f"{event.status} {event.reason}")
            case Ringing():
                log.info("%s rings", event.call.target)

    # ---

    def _on_answer(self, body: bytes) -> None:
        if body:
            try:
                self._connect(sdp.read(body))
            except PeerError as error:
                self._conversation.end(str(error))
                self._hang_up()
                if not self._taken.done():
                    self._taken.set_result(str(error))
                return
        assert self.call is not None
        if self.call.round_trip_ns is not None:
            self.line.expect_round_trip(self.call.round_trip_ns)
        self.line.open()
        if not self._taken.done():
            self._taken.set_result("")

    def _on_offer(self, body: bytes) -> None:
        assert self.call is not None
        host, now = self.call.here[0], self._door.clock.now()
        try:
            said = sdp.read(body) if body else None
        except PeerError:
            self._door.agent.refuse(self.call, 488, now)
            return
        self._version += 1
        if said is None:
            answer = sdp.offer(host, self._port, session=self._session, version=self._version)
        else:
            self._connect(said)
            answer = sdp.answer(said, host, self._port, session=self._session, version=self._version)
        self._door.agent.accept(self.call, answer, now)

    def _connect(self, said: sdp.Description) -> None:
        self.line.connect((said.host, said.port), (said.host, said.rtcp_port), said.codecs[0], said.keys)
        self.line.hold(is_playing=said.hears)

    def _receive(self, data: bytes, source: tuple[str, int]) -> None:
        if not self.line.sink.is_open:
            self.line.open()  # An acknowledgement may be lost; who speaks listens.
        self.line.receive(data, source)

    def _put(self, number: int, data: bytes, to: tuple[str, int]) -> None:
        if self._sockets:
            self._sockets[number].sendto(data, to)

    def _metadata(self) -> Mapping[str, str]:
        assert self.call is not None
        said = {"call": self.call.name, "carrier": "sip", "from": self.call.remote[1:-1], "to": self.call.local[1:-1]}
        if self.call.is_ours:
            said["from"], said["to"] = said["to"], said["from"]
        return said | {name: value for name, value in self.call.headers if name.startswith("x-")}

    async def _watch(self) -> None:
        assert self.call is not None
        while True:
            await asyncio.sleep(SILENT_S / 4)
            if self._door.clock.now() - self.line.last_word_at > SILENT_S * SECOND:
                self._door.agent.probe(self.call, self._door.clock.now())
                self._door.flush()
                await asyncio.sleep(SILENT_S)

    def _hang_up(self) -> None:
        if self.call is not None and self.call.state is not State.OVER:
            self._door.agent.hang_up(self.call, self._door.clock.now(), 503)
            self._door.flush()

    def _close_sockets(self) -> None:
        for made in self._sockets:
            made.close()
        self._sockets.clear()


class _Datagrams(asyncio.DatagramProtocol):
    """A socket whose datagrams go to `receive`; what cannot be sent is lost, as on the network."""

    def __init__(self, receive: Callable[[bytes, tuple[str, int]], None]) -> None:
        self._receive = receive

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self._receive(data, addr[:2])

    def error_received(self, exc: Exception) -> None:
        pass


class _Connection(asyncio.Protocol):
    """SIP over TCP, from either side."""

    def __init__(self, door: SipDoor) -> None:
        self._door = door
        self._inbox = Inbox()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        if not self._door.connected(transport):
            transport.close()

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._inbox.feed(data):
                self._door.received(self._transport, message)
        except PeerError:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._door.disconnected(self._transport)


def _is_literal(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _route_to(host: str) -> str:
    """The address of ours that packets to `host` leave from."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return "::1" if ":" in host else "127.0.0.1"
        return str(probe.getsockname()[0])
