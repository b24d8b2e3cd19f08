"""PJSIP as an asyncio program: an endpoint that answers calls, and 20 ms of sound each way on PJSIP's own clock.

SIP is handled on the event loop, which asks PJSIP for news; RTP and the clock have PJSIP's own threads.  What is called
from those says so.  Sound is 16 bits at 8 kHz, mono, 20 ms at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import pjsua2 as pj
from pjsip_player import FRAME_BYTES

from breeze_rtc.errors import BadRequest

RATE = 8_000
POLL_S = 0.01
CODECS = ("PCMU/8000", "PCMA/8000")
MAX_CALLS = 4
"""What the wheel of PJSIP is built for; those beyond are busy."""
SILENCE = bytes(FRAME_BYTES)


@dataclass(frozen=True, slots=True)
class Registration:
    """An account at a SIP server: calls to it come here.  uri: sip:NAME@HOST."""

    uri: str
    password: str

    @property
    def user(self) -> str:
        return self.uri.removeprefix("sip:").split("@", 1)[0]

    @property
    def registrar(self) -> str:
        return "sip:" + self.uri.split("@", 1)[-1]


@dataclass(frozen=True, slots=True)
class Quality:
    """What RTCP says of the way to the telephone.  round_trip_ms is None before its first report."""

    round_trip_ms: float | None
    lost: int
    sent: int


class Endpoint:
    """`start`, then `on_call` gets each call that comes in; `close` ends all.  One of a process, on one event loop."""

    def __init__(self, host: str, port: int, *, registration: Registration | None = None) -> None:
        """host: a local address, also of the RTP; 0.0.0.0 for all.  port: of SIP over UDP and TCP; 0 for any."""
        self.on_call: Callable[[Call], None] = lambda call: call.hang_up(503)
        self.port = port
        self.calls: set[Call] = set()
        self._known: WeakSet[Call] = WeakSet()
        self._host = host
        self._registration = registration
        self._ports: list[_Port] = []
        self._polling: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Raises `BadRequest` where the address is taken."""
        self._endpoint = pj.Endpoint()
        self._endpoint.libCreate()
        self._endpoint.libInit(_settings())
        transport = pj.TransportConfig()
        transport.port = self.port
        if self._host != "0.0.0.0":
            transport.boundAddress = self._host
        try:
            number = self._endpoint.transportCreate(pj.PJSIP_TRANSPORT_UDP, transport)
            name = self._endpoint.transportGetInfo(number).localName
            self.port = transport.port = int(name.rsplit(":", 1)[1])
            self._endpoint.transportCreate(pj.PJSIP_TRANSPORT_TCP, transport)
        except pj.Error as error:
            self._endpoint.libDestroy()
            raise BadRequest(f"cannot answer SIP at {self._host}:{self.port}: {error.reason}") from None
        self._endpoint.libStart()
        self._endpoint.audDevManager().setNullDev()
        for codec in self._endpoint.codecEnum2():
            priority = 255 - CODECS.index(codec.codecId[:9]) if codec.codecId[:9] in CODECS else 0
            self._endpoint.codecSetPriority(codec.codecId, priority)
        self._account = _Account(self)
        self._account.create(self._account_settings())
        self._polling = asyncio.get_running_loop().create_task(self._poll())

    async def close(self) -> None:
        """Hang up and let go."""
        for call in list(self.calls):
            call.hang_up()
        async with asyncio.timeout(1):
            while self.calls:  # noqa: ASYNC110 - it is PJSIP that tells, when asked
                await asyncio.sleep(POLL_S)
        if self._polling is not None:
            self._polling.cancel()
        self._account.shutdown()
        self._ports.clear()
        for call in self._known:
            call.this.disown()  # A call that is deleted after its library takes the process with it.
        self._endpoint.libDestroy()

    # --- for calls

    def lend_port(self) -> _Port:
        """A place at PJSIP's mixer.  They are used again: one that is taken away while its clock asks it is trouble."""
        if not self._ports:
            port = _Port()
            wanted = pj.MediaFormatAudio()
            wanted.init(pj.PJMEDIA_FORMAT_PCM, RATE, 1, 20_000, 16)
            port.createPort("line", wanted)
            return port
        return self._ports.pop()

    def return_port(self, port: _Port) -> None:
        port.take, port.give = _no_sound, _no_ear
        self._ports.append(port)

    def welcome(self, call: Call) -> None:
        self.calls.add(call)
        self._known.add(call)
        self.on_call(call)

    def forget(self, call: Call) -> None:
        call.take, call.give, call.on_digit = _no_sound, _no_ear, _no_key
        self.calls.discard(call)

    # ---

    def _account_settings(self) -> Any:
        settings = pj.AccountConfig()
        settings.idUri = f"sip:breeze@{self._host}:{self.port}"
        if self._host != "0.0.0.0":
            settings.mediaConfig.transportConfig.boundAddress = self._host
        if (registration := self._registration) is not None:
            settings.idUri = registration.uri
            settings.regConfig.registrarUri = registration.registrar
            secret = pj.AuthCredInfo("digest", "*", registration.user, 0, registration.password)
            settings.sipConfig.authCreds.append(secret)
        return settings

    async def _poll(self) -> None:
        while True:
            while self._endpoint.libHandleEvents(0) > 0:
                pass
            await asyncio.sleep(POLL_S)


def _settings() -> Any:
    settings = pj.EpConfig()
    settings.logConfig.level = settings.logConfig.consoleLevel = 1
    settings.uaConfig.threadCnt = 0
    settings.uaConfig.mainThreadOnly = True
    settings.uaConfig.maxCalls = MAX_CALLS
    settings.uaConfig.userAgent = "breeze_rtc"
    settings.medConfig.clockRate = settings.medConfig.sndClockRate = RATE
    settings.medConfig.audioFramePtime = settings.medConfig.ptime = 20
    settings.medConfig.noVad = True
    settings.medConfig.ecTailLen = 0
    return settings


def _no_sound() -> bytes:
    return SILENCE


def _no_ear(pcm: bytes) -> None:
    pass


def _no_key(digit: str) -> None:
    pass


class _Port(pj.AudioMediaPort):  # type: ignore[misc]
    """Called by PJSIP's clock, on its thread."""

    def __init__(self) -> None:
        super().__init__()
        self.take: Callable[[], bytes] = _no_sound
        self.give: Callable[[bytes], None] = _no_ear

    def onFrameRequested(self, frame: Any) -> None:  # noqa: N802
        frame.type = pj.PJMEDIA_FRAME_TYPE_AUDIO
        frame.buf = pj.ByteVector(self.take())
        frame.size = FRAME_BYTES

    def onFrameReceived(self, frame: Any) -> None:  # noqa: N802
        if frame.size == FRAME_BYTES:
            self.give(bytes(frame.buf))


class _Account(pj.Account):  # type: ignore[misc]
    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__()
        self._endpoint = endpoint

    def onIncomingCall(self, told: Any) -> None:  # noqa: N802
        call = Call(self._endpoint, self, told.callId)
        self._endpoint.welcome(call)


class Call(pj.Call):  # type: ignore[misc]
    """One call.  Set `take` and `give` before it is answered; the rest is called on the event loop."""

    def __init__(self, endpoint: Endpoint, account: _Account, number: int) -> None:
        super().__init__(account, number)
        self.take: Callable[[], bytes] = _no_sound
        """Asked for 20 ms each 20 ms, on PJSIP's thread."""
        self.give: Callable[[bytes], None] = _no_ear
        """Given the caller's 20 ms each 20 ms, on PJSIP's thread."""
        self.on_digit: Callable[[str], None] = _no_key
        """Called with each key (RFC 4733)."""
        self.has_media = asyncio.Event()
        """Sound flows: the clock asks."""
        self.ended = asyncio.Event()
        described = self.getInfo()
        self.name: str = described.callIdString
        self.caller: str = described.remoteUri
        self.called: str = described.localUri
        self._endpoint = endpoint
        self._port: _Port | None = None

    def answer_with(self, status: int) -> None:
        """180 rings, 200 takes the call."""
        self._reply(self.answer, status)

    def hang_up(self, status: int = 0) -> None:
        """End the call; before it was answered, refuse it with a status."""
        if not self.ended.is_set():
            self._reply(self.hangup, status)

    def quality(self) -> Quality:
        """What RTCP says now; only while sound flows."""
        rtcp = self.getStreamStat(0).rtcp
        round_trip = rtcp.rttUsec
        return Quality(round_trip.last / 1_000 if round_trip.n else None, rtcp.txStat.loss, rtcp.txStat.pkt)

    # --- PJSIP's callbacks, on the event loop

    def onCallMediaState(self, told: Any) -> None:  # noqa: N802
        described = self.getInfo()
        for index, media in enumerate(described.media):
            if media.type == pj.PJMEDIA_TYPE_AUDIO and media.status == pj.PJSUA_CALL_MEDIA_ACTIVE:
                if self._port is None:
                    self._port = self._endpoint.lend_port()
                    self._port.take, self._port.give = self.take, self.give
                sound = self.getAudioMedia(index)
                self._port.startTransmit(sound)
                sound.startTransmit(self._port)
                self.has_media.set()

    def onDtmfDigit(self, told: Any) -> None:  # noqa: N802
        self.on_digit(told.digit)

    def onCallState(self, told: Any) -> None:  # noqa: N802
        described = self.getInfo()
        if described.state == pj.PJSIP_INV_STATE_DISCONNECTED:
            self.ended.set()
            if self._port is not None:
                self._endpoint.return_port(self._port)
                self._port = None
            # Not from within its own callback.
            asyncio.get_running_loop().call_soon(self._endpoint.forget, self)

    def _reply(self, say: Callable[[Any], None], status: int) -> None:
        options = pj.CallOpParam(True)
        if status:
            options.statusCode = status
        try:
            say(options)
        except pj.Error:
            self.ended.set()  # It has just ended.
            asyncio.get_running_loop().call_soon(self._endpoint.forget, self)
