"""One call: the page's socket, the WebRTC peer, the agent's session and the engine's voice, joined.

A page that says goodbye, or closes its socket as pages do, ends the call.  One whose network died comes back, with a
new peer connection or a new socket or both, and finds the call where it left it.  Whatever ends a call (the page, the
agent, silence on the socket, the server's own end) sets one event; then the session is silenced, the peer closed, and
the page told why, in this order.

A peer that called over HTTP has no socket at all: nobody tells it anything, and its connection's end is the call's.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from breeze_rtc.agent.session import AgentSession, Callbacks, Ears
from breeze_rtc.agent.vad import Samples, VoiceActivity
from breeze_rtc.clock import MS, SECOND, Clock, MonotonicClock
from breeze_rtc.errors import PeerError
from breeze_rtc.media.rtp import RTP_RATE
from breeze_rtc.playback import AudioSink, PlaybackReport, SpeechPacket
from breeze_rtc.runtime.engine import Engine
from breeze_rtc.server.metrics import Metrics
from breeze_rtc.transport import signaling
from breeze_rtc.transport.jitter_buffer import Tally
from breeze_rtc.transport.pacer import Pacer
from breeze_rtc.transport.recording import CallRecording
from breeze_rtc.transport.webrtc import WebRtcCall

log = logging.getLogger(__name__)

SILENT_PAGE_S = 20.0
"""A page says something several times a second; one that says nothing for so long is gone, whatever its socket thinks.
"""
RETURN_S = 10.0
"""How long a call without a socket waits for its page to come back."""
NO_OFFER_S = 120.0
"""The same before its offer: its user may be looking for the microphone's permission."""
FLUSH_CONFIRM_S = 0.3
"""How long an interruption waits for the page's word on where it fell silent."""
MAX_UNSENT = 500
"""Messages the page may leave unread before it is given up; so many are kept for one that lost its socket."""
MAX_REFUSED = 50
"""Messages against the rules before the call is closed."""
MAX_MESSAGES_PER_S = 200
OFFER_PAUSE_S = 0.3
"""Between two offers of a page; each costs several milliseconds."""
FIRST_REPORT_S = 3.0
QUIET_PEER_S = 0.5
"""How long speech waits for the first word of a page's player, and how long for a player that will say nothing."""
NETWORK_CODES = frozenset({1001, 1005, 1006, 1011, 1015})
"""Codes of RFC 6455 section 7.4 with which a socket closes that nobody meant to close (uvicorn says 1005 where the
connection broke).  1001 is what Chromium says for a page that it had frozen; one that is left says goodbye first."""
TAKEN_OVER = 4000
"""The code with which a socket is closed when its page has come back on another."""
_STATS_S = 0.2
_CLOSE_S = 5.0
_REFUSE_S = 0.5

_SAY: dict[str, Callable[[dict[str, Any]], str]] = {
    "speech": lambda m: signaling.speech(m["stream"], m["text"]),
    "heard": lambda m: signaling.heard(m["stream"], m["chars"]),
    "speech_end": lambda m: signaling.speech_end(m["stream"], interrupted=m["interrupted"], chars=m["chars"]),
    "user": lambda m: signaling.user(m["text"], final=m["final"]),
    "state": lambda m: signaling.state(m["state"]),
    "error": lambda m: signaling.error(m["code"], m["message"], m["fix"]),
}


class PageCall:
    """One page's call, from its socket to its end: `await PageCall(...).hold(socket)`.

    To the agent's session it is the `Call`: a sink, the listener's position, a microphone, and messages to the page.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        callbacks: Callbacks,
        metrics: Metrics,
        activity: VoiceActivity | None,
        ears: Ears | None,
        listen_fix: str = "",
        recording: Path | None = None,
        ice_servers: Callable[[], Sequence[signaling.IceServer]] = tuple,
        ice_renewal_s: float | None = None,
        relay_only: bool = False,
        has_page: bool = True,
        pacer: Pacer | None = None,
        silent_page_s: float = SILENT_PAGE_S,
        return_s: float = RETURN_S,
        clock: Clock | None = None,
    ) -> None:
        """ice_servers: asked for each connection; every `ice_renewal_s` the page is told them anew, for credentials
        expire.  has_page: False for a peer that called over HTTP."""
        self.token = secrets.token_urlsafe(16)
        """With which the page comes back; nobody else knows it."""
        self.address = ""
        """Where the call came from."""
        self.closed = asyncio.Event()
        """Set once, when the call is to end."""
        self._released = asyncio.Event()
        # None while there is none.
        self._socket: WebSocket | None = None
        self._gone_at: int | None = None
        self._has_page = has_page
        self._engine = engine
        self._callbacks = callbacks
        self._metrics = metrics
        self._activity = activity
        self._ears = ears
        self._listen_fix = listen_fix
        self._recording = CallRecording(recording) if recording is not None else None
        self.ice_servers = ice_servers
        self._ice_renewal_s = ice_renewal_s
        self._silent_page_s = silent_page_s
        self._return_s = return_s
        self._clock = clock or MonotonicClock()
        self._webrtc = WebRtcCall(
            ice_servers=ice_servers,
            relay_only=relay_only,
            can_return=has_page,
            first_report_timeout_s=FIRST_REPORT_S if has_page else QUIET_PEER_S,
            on_report=engine.report,
            on_path=self._on_path,
            on_candidate=lambda line, offer: self._put(signaling.candidate(line, offer)),
            pacer=pacer,
            sample_rate=engine.sample_rate,
            clock=self._clock,
        )
        if self._recording is not None:
            self._webrtc.on_slot = self._recording.agent
        self._sink = MeteredSink(self._webrtc.sink, metrics, engine.sample_rate, self._first_packet)
        self._session = AgentSession(
            callbacks, call=self, voice=engine, ears=ears, activity=activity, observe=metrics.observe
        )
        self._inbox = signaling.Inbox()
        # The last messages to the page; how many there were, and how many of these its socket has taken.
        self._said: deque[str] = deque(maxlen=MAX_UNSENT)
        self._said_count = self._written_count = 0
        self._has_said = asyncio.Event()
        # What reads and writes the socket.
        self._parts: list[asyncio.Task[Any]] = []
        # Messages of the page that were read.
        self._read_count = 0
        self._flushed = asyncio.Event()
        self._end_code = 1000
        self._end_reason = "the page left"
        self._has_offer = False
        self._offered_at: int | None = None
        self._last_word_at = self._ice_told_at = self._clock.now()
        self._group: asyncio.TaskGroup | None = None
        self._is_held = asyncio.Event()
        self._answering: set[asyncio.Task[None]] = set()
        # For the figures: when the agent got its turn, and which streams answer it.
        self._turn_at: int | None = None
        self._answer_stream: int | None = None
        self._stream: int | None = None
        self._first_sound_ms: float | None = None
        self._stop_ns: int | None = None
        self._gaps = self._gap_slots = 0
        self._uplink = Tally()

    # -- the session's Call

    @property
    def sink(self) -> MeteredSink:
        return self._sink

    def position(self, stream: int) -> PlaybackReport:
        return self._webrtc.position(stream)

    async def flush(self) -> None:
        if not self._webrtc.is_paused:
            self.pause()
        with suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_CONFIRM_S):
                await self._flushed.wait()
        self._webrtc.resume()

    def pause(self) -> None:
        resume_rtp = self._webrtc.pause()
        if resume_rtp is None or self._socket is None:
            self._flushed.set()
        else:
            self._flushed.clear()
            self._put(signaling.flush(resume_rtp))

    def resume(self) -> None:
        self._webrtc.resume()

    def send(self, message: dict[str, Any]) -> None:
        if message["type"] == "user":
            self._turn_at, self._answer_stream = self._clock.now(), None
        elif message["type"] == "speech_end":
            heard_samples = self._webrtc.position(message["stream"]).heard_samples
            self._metrics.heard.inc(heard_samples / self._engine.sample_rate)
        elif message["type"] == "speech":
            self._stream = message["stream"]
            if self._turn_at is not None and self._answer_stream is None:
                self._answer_stream = self._stream
        self._put(_SAY[message["type"]](message))

    async def microphone(self) -> AsyncIterator[Samples]:
        async for block in self._webrtc.uplink():
            if self._recording is not None:
                assert self._webrtc.uplink_clock_ns is not None, "a block has come"
                self._recording.caller(block, self._webrtc.uplink_clock_ns)
            yield block.samples

    # -- the call's life

    async def hold(self, socket: WebSocket | None = None) -> str:
        """Hold the call until it ends; returns why, in a few words.  Everything it used is free then."""
        self._metrics.calls.inc()
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                self._is_held.set()
                tasks = [group.create_task(self._watch_peer()), group.create_task(self._measure())]
                if socket is not None:
                    tasks.append(group.create_task(self.serve(socket)))
                await self.closed.wait()
                # The conversation sees the end by itself and cleans up behind it.  An offer that is being refused ends
                # the call, and its reason must still be told.
                if self._answering:
                    await asyncio.wait(self._answering, timeout=_REFUSE_S)
                for task in [*tasks, *self._answering]:
                    task.cancel()
        except* Exception as errors:
            log.error("a call failed", exc_info=errors)
            self._end_code, self._end_reason = 1011, "the server failed; its log says how"
        finally:
            self.closed.set()
            await self._release()
            self._released.set()
        self._metrics.calls_ended.labels(self._end_reason.split(":")[0]).inc()
        return self._end_reason

    async def serve(self, socket: WebSocket, *, received: int = 0) -> None:
        """Accept `socket`, and speak with the page until it closes, another takes its place, or the call ends.

        `received` says how many messages the page has had before; those after that are sent again, then hello.
        """
        try:
            await socket.accept()
        except (RuntimeError, WebSocketDisconnect, OSError):
            if self._socket is None and self._gone_at is None:  # It never had one.
                self.end(1000, "the page left")
            return
        if self._said_count:
            self._metrics.reconnections.labels("socket").inc()
        before, self._socket, self._gone_at = self._socket, socket, None
        # Two that write would each leave messages out.
        for part in self._parts:
            part.cancel()
        await asyncio.gather(*self._parts, return_exceptions=True)
        self._last_word_at = self._clock.now()
        self._written_count = min(max(received, self._said_count - len(self._said)), self._said_count)
        self._put(
            signaling.hello(
                listens=self._ears is not None,
                listen_fix=self._listen_fix,
                model=self._engine.model_name,
                voice=self._callbacks.voice or self._engine.voices[0],
                ice_servers=self.ice_servers(),
                sample_rate=self._engine.sample_rate,
                resume=self.token,
                received=self._read_count,
            )
        )
        parts = [asyncio.create_task(part) for part in (self._write(socket), self._read(socket), self.closed.wait())]
        self._parts = parts
        try:
            if before is not None:
                await _hang_up(before, TAKEN_OVER, "the page has come back on another socket")
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            for part in done:
                if not part.cancelled() and (error := part.exception()) is not None:
                    log.error("a call failed", exc_info=error)
                    self.end(1011, "the server failed; its log says how")
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)
        if self.closed.is_set() and socket is self._socket:
            await self._released.wait()  # The page is still to be told why.

    def end(self, code: int, reason: str) -> None:
        """End the call; the first reason counts."""
        if not self.closed.is_set():
            self._end_code, self._end_reason = code, reason
            self.closed.set()

    def stop(self) -> None:
        """The server is stopping."""
        self.end(1001, "the server is stopping")

    async def _release(self) -> None:
        self._metrics.calls.dec()
        self._count_losses()
        if self._has_offer and not self._webrtc.connected.is_set():
            self._metrics.refused.labels("no_path").inc()
            log.warning(
                "no packet got through between %s and this server, which offered %s: UDP is blocked between them. Open "
                "it, or name a TURN server with --ice-server; docs/deploy.md has the ways.",
                self.address or "a caller",
                ", ".join(self._webrtc.addresses) or "no address",
            )
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._webrtc.close(self._end_reason)
                if (socket := self._socket) is not None and _is_open(socket):
                    while self._written_count < self._said_count:
                        await self._write_next(socket)
                    await socket.close(self._end_code, self._end_reason)
        except (TimeoutError, RuntimeError, WebSocketDisconnect, OSError):
            log.debug("the page was gone before it could be told why the call ended")
        finally:
            if self._recording is not None:
                self._recording.close()

    async def _watch_peer(self) -> None:
        await self._webrtc.closed.wait()
        self.end(1000, self._webrtc.close_reason)

    async def _converse(self) -> None:
        """The agent's part, from the offer on."""
        await self._session.run()
        self.end(1000, "the agent ended the call")

    def _on_path(self, is_up: bool, offer: int) -> None:
        if is_up:
            self._metrics.reconnections.labels("path").inc()
        else:
            if self._ice_renewal_s is not None:
                self._put(signaling.ice(self.ice_servers()))
            self._put(signaling.reconnect(offer))

    # -- the socket

    def _put(self, text: str) -> None:
        if not self._has_page:
            return
        if self._said_count - self._written_count >= MAX_UNSENT:
            self.end(1008, "the page does not read its messages")
            return
        self._said.append(text)
        self._said_count += 1
        self._has_said.set()

    async def _write(self, socket: WebSocket) -> None:
        while True:
            self._has_said.clear()
            try:
                while self._written_count < self._said_count:
                    await self._write_next(socket)
            except (RuntimeError, WebSocketDisconnect, OSError):
                self._on_socket_gone(socket, 1006)
                return
            await self._has_said.wait()

    async def _write_next(self, socket: WebSocket) -> None:
        await socket.send_text(self._said[self._written_count - self._said_count])
        self._written_count += 1

    async def _read(self, socket: WebSocket) -> None:
        second, count = 0, 0
        while True:
            try:
                message = await socket.receive()
            except RuntimeError:  # Starlette's word for a socket that is already closed.
                self._on_socket_gone(socket, 1006)
                return
            if message["type"] == "websocket.disconnect":
                self._on_socket_gone(socket, message.get("code", 1006))
                return
            self._read_count += 1
            self._last_word_at = self._clock.now()
            now_second = self._last_word_at // SECOND
            second, count = now_second, count + 1 if now_second == second else 1
            if count > MAX_MESSAGES_PER_S:
                self.end(1008, f"more than {MAX_MESSAGES_PER_S} messages in a second")
                return
            raw = message.get("text")
            self._hear(raw if raw is not None else message.get("bytes") or b"")

    def _on_socket_gone(self, socket: WebSocket, code: int) -> None:
        if socket is not self._socket:
            return  # Another has taken its place.
        if self._has_offer and code in NETWORK_CODES:
            self._socket, self._gone_at = None, self._clock.now()
        else:
            self.end(1000, "the page left")

    def _hear(self, raw: str | bytes) -> None:
        """One message of the page."""
        try:
            self._act(self._inbox.read(raw))
        except PeerError as error:
            self._refuse(error)

    def _act(self, message: signaling.Message | None) -> None:
        match message:
            case signaling.Offer():
                now = self._clock.now()
                if self._offered_at is not None and now - self._offered_at < OFFER_PAUSE_S * SECOND:
                    raise PeerError("offer_too_soon", "an offer came right after another", "Wait for its answer.")
                self._offered_at = now
                self._spawn(self._answer(message))
            case signaling.Candidate():
                self._spawn(self._add_candidate(message))
            case signaling.Text():
                if not self._has_offer:
                    raise PeerError("no_offer", "a turn came before the offer", "Send the offer first.")
                self._session.type(message.text)
            case signaling.Report():
                self._webrtc.report(message)
            case signaling.Ping():
                self._put(signaling.pong(message, self._clock.now()))
            case signaling.Flushed():
                self._webrtc.flushed(message)
                self._flushed.set()
            case signaling.Interrupt():
                self._session.interrupt()
            case signaling.Bye():
                self.end(1000, "the page said goodbye")

    def _refuse(self, error: PeerError) -> None:
        self._metrics.refused.labels(error.code).inc()
        self._put(signaling.error(error.code, error.detail, error.fix))
        if self._inbox.refused > MAX_REFUSED:
            self.end(1008, f"more than {MAX_REFUSED} messages against the rules")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        assert self._group is not None, "the call is held"
        task = self._group.create_task(work)
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer(self, offer: signaling.Offer) -> None:
        try:
            self._put(signaling.answer(await self.answer(offer), offer.id))
        except PeerError as error:
            self._refuse(error)

    async def answer(self, offer: signaling.Offer) -> str:
        """Answer an offer; with the first one the conversation begins.  Raises `PeerError`."""
        await self._is_held.wait()
        sdp = await self._webrtc.answer(offer)
        if not self._has_offer:
            self._has_offer = True
            self._turn_at = self._clock.now()
            assert self._group is not None, "the call is held"
            self._group.create_task(self._converse())
        return sdp

    async def add_candidate(self, candidate: signaling.Candidate) -> None:
        """Raises `PeerError`."""
        await self._webrtc.add_candidate(candidate)

    async def _add_candidate(self, candidate: signaling.Candidate) -> None:
        try:
            await self.add_candidate(candidate)
        except PeerError as error:
            self._refuse(error)

    # -- figures

    def _first_packet(self, stream: int) -> None:
        if stream == self._answer_stream and self._turn_at is not None:
            self._metrics.first_packet.observe((self._clock.now() - self._turn_at) / SECOND)

    async def _measure(self) -> None:
        while True:
            await asyncio.sleep(_STATS_S)
            now = self._clock.now()
            if self._gone_at is not None and now - self._gone_at > self._return_s * SECOND:
                self.end(1001, "the page did not come back")
                return
            silent_s = (self._silent_page_s if self._has_offer else NO_OFFER_S) if self._has_page else float("inf")
            if now - self._last_word_at > silent_s * SECOND:
                self.end(1001, "no word from the page for too long")
                return
            if self._ice_renewal_s is not None and now - self._ice_told_at > self._ice_renewal_s * SECOND:
                self._ice_told_at = now
                self._put(signaling.ice(self.ice_servers()))
            stats = self._webrtc.stats()
            if stats.path_delay_ns is not None:
                self._metrics.position.labels(stats.source).inc(_STATS_S)
            self._count_losses()
            self._follow_first_sound(now)
            if stats.stop_ns is not None and stats.stop_ns != self._stop_ns:
                self._metrics.stop.observe(stats.stop_ns / SECOND)
            self._stop_ns = stats.stop_ns
            stream = self._engine.stats.get("streams", {}).get(str(self._stream), {})
            slack_ns = stream.get("slack_ns")
            if slack_ns is not None:
                self._metrics.slack.observe(slack_ns / SECOND)
            if self._socket is None:
                continue
            self._put(
                signaling.stats(
                    t_ms=now / MS,
                    lead_ms=_ms(stream.get("lead_ns")),
                    slack_ms=_ms(slack_ns),
                    jitter_ms=stats.jitter_buffer_ms,
                    gaps=stats.gaps,
                    first_sound_ms=self._first_sound_ms,
                    stop_ms=_ms(stats.stop_ns),
                    path_ms=_ms(stats.path_delay_ns),
                    source=stats.source,
                    error_ms=_ms(stats.error_ns),
                )
            )

    def _follow_first_sound(self, now: int) -> None:
        """From the turn's end to the first sample at the ear, once that has happened."""
        if self._turn_at is None or self._answer_stream is None:
            return
        heard_at = self._webrtc.heard_at(self._answer_stream)
        if heard_at is not None and heard_at <= now:
            first_sound_ns = max(0, heard_at - self._turn_at)
            self._first_sound_ms = first_sound_ns / MS
            self._metrics.first_sound.observe(first_sound_ns / SECOND)
            self._turn_at = None

    def _count_losses(self) -> None:
        stats = self._webrtc.stats()
        self._metrics.gaps.inc(stats.gaps - self._gaps)
        self._metrics.gap_seconds.inc((stats.gap_slots - self._gap_slots) * 0.02)
        self._gaps, self._gap_slots = stats.gaps, stats.gap_slots
        uplink, before, self._uplink = stats.uplink, self._uplink, stats.uplink
        for by in ("recovered", "concealed", "silent"):
            ticks = getattr(uplink, f"{by}_ticks") - getattr(before, f"{by}_ticks")
            self._metrics.microphone_lost.labels(by).inc(ticks / RTP_RATE)
        for why in ("late", "duplicate", "strange", "malformed"):
            self._metrics.microphone_dropped.labels(why).inc(getattr(uplink, why) - getattr(before, why))


class MeteredSink:
    """A sink, with the two figures only a sink can tell: first packets, and what a cut threw away."""

    def __init__(
        self, sink: AudioSink, metrics: Metrics, sample_rate: int, on_first_packet: Callable[[int], None]
    ) -> None:
        self._sink = sink
        self._metrics = metrics
        self._sample_rate = sample_rate
        self._on_first_packet = on_first_packet
        self._latest: int | None = None

    def write(self, stream: int, packets: tuple[SpeechPacket, ...]) -> None:
        if packets and stream != self._latest:
            self._latest = stream
            self._on_first_packet(stream)
        self._sink.write(stream, packets)

    def rest(self, stream: int, samples: int) -> None:
        self._sink.rest(stream, samples)

    def end(self, stream: int) -> None:
        self._sink.end(stream)

    def clear(self, stream: int) -> int:
        unheard = self._sink.clear(stream)
        self._metrics.wasted.inc(max(0, unheard) / self._sample_rate)
        return unheard


def _ms(ns: int | None) -> float | None:
    return None if ns is None else ns / MS


def _is_open(socket: WebSocket) -> bool:
    return socket.application_state is WebSocketState.CONNECTED and socket.client_state is WebSocketState.CONNECTED


async def _hang_up(socket: WebSocket, code: int, reason: str) -> None:
    with suppress(RuntimeError, WebSocketDisconnect, OSError, TimeoutError):
        async with asyncio.timeout(_REFUSE_S):  # A network that died takes no word.
            await socket.close(code, reason)


async def refuse(socket: WebSocket, code: str, message: str, fix: str) -> None:
    """Tell a page that its call cannot be held, in the protocol's own words, and hang up."""
    with suppress(RuntimeError, WebSocketDisconnect, OSError):
        await socket.accept()
        await socket.send_text(signaling.error(code, message, fix))
        await socket.close(1013, message[:120])
