"""One call over WebRTC: it answers offers, sends ready-made packets and hears the microphone.

The page and this end speak through a socket that someone else owns (`signaling` has the messages); what the page says
goes in through `answer`, `report` and `flushed`, and the end of the conversation means `close()`.

A call outlives its connection.  When nobody is at the other end any more, speech stands still; a second offer brings
the listener back on a new connection, where speech goes on from the place it had heard, on the same RTP clock.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace

from aiortc.rtcrtptransceiver import RTCRtpTransceiver

from breeze_rtc.clock import MS, SECOND, Clock, MonotonicClock, samples_to_ns
from breeze_rtc.errors import PeerError
from breeze_rtc.media import rtp
from breeze_rtc.playback import PlaybackReport
from breeze_rtc.transport import signaling
from breeze_rtc.transport.jitter_buffer import Tally
from breeze_rtc.transport.pacer import Pacer
from breeze_rtc.transport.peer import Peer
from breeze_rtc.transport.playhead import ESTIMATE_NS, Playhead, Position, ReceiverReport
from breeze_rtc.transport.playout import Playout, Slot
from breeze_rtc.transport.sender import SlotSender
from breeze_rtc.transport.uplink import Block, Uplink

logger = logging.getLogger(__name__)

LOST_S = 10.0
"""How long a call whose path is gone waits for it to come back."""

_REPORT_S = 0.25
_FRESH_MS = 200.0


@dataclass(frozen=True, slots=True)
class CallStats:
    """How one call is doing."""

    is_connected: bool
    missed_slots: int
    gaps: int
    gap_slots: int
    path_delay_ns: int | None
    error_ns: int | None
    source: str
    is_playing: bool
    jitter_buffer_ms: float | None
    reports: int
    """Those that gave a position."""
    stop_ns: int | None
    """From the last flush to silence at the ear, by the page's word."""
    uplink: Tally
    """What became of the microphone's packets."""
    uplink_dropped_ticks: int
    """Sound of the microphone that nobody read in time."""


class WebRtcCall:
    """One participant.  Everything is released by `close()`, which may be called twice, from anywhere, at any time."""

    def __init__(
        self,
        *,
        ice_servers: Callable[[], Sequence[signaling.IceServer]] = tuple,
        relay_only: bool = False,
        can_return: bool = False,
        on_report: Callable[[PlaybackReport], None] = lambda report: None,
        on_path: Callable[[bool, int], None] = lambda is_up, offer: None,
        on_candidate: Callable[[str, int], None] = lambda candidate, offer: None,
        pacer: Pacer | None = None,
        sample_rate: int = 24_000,
        clock: Clock | None = None,
        first_report_timeout_s: float = 3.0,
        connect_timeout_s: float = 20.0,
        uplink_limit_s: float = 2.0,
    ) -> None:
        """Must be made inside a running event loop.

        ice_servers: asked anew for each connection, for credentials expire.
        relay_only: send and receive through the TURN server only.
        can_return: whether the listener can make another offer when its connection has ended: the call waits for it.
        on_path: told when nobody is at the other end any more, and when somebody is again; and the id of the offer
            that the connection began with.
        on_candidate: told an address of ours that was found after the answer, and the offer's id.
        on_report: called on the loop with the position of each stream that is not heard in full yet: whenever the page
            reports, and four times a second in between.
        pacer: the ticker of all calls of this loop; without one the call has its own.
        first_report_timeout_s: speech waits for the listener's first played packet, but no longer than this for one
            that does not report.
        uplink_limit_s: how much sound of the microphone may wait for its reader; the oldest goes.
        """
        self._clock = clock or MonotonicClock()
        self._on_report = on_report
        self._first_report_ns = round(first_report_timeout_s * SECOND)
        self._connect_timeout_s = connect_timeout_s
        # Where speech goes.  Ready from the start: what is written early waits for the listener.
        self.sink = Playout(sample_rate=sample_rate, ear=self._ear_ticks)
        # Set once media can flow; set once all is released.
        self.connected = asyncio.Event()
        self.closed = asyncio.Event()
        # Told of each slot after it has left, and when slot 0 left.
        self.on_slot: Callable[[Slot, int], None] = lambda slot, clock_ns: None
        # Why the call ended; empty while it runs.
        self.close_reason = ""
        # None until the first packet has left.
        self._playhead: Playhead | None = None
        # Streams whose last position has been told.
        self._told: set[int] = set()
        self._told_at = 0
        # When the last flush was asked for, and how long it took to the ear.
        self._flushed_at: int | None = None
        self._stop_ns: int | None = None
        self._uplink = Uplink(self._clock, limit_s=uplink_limit_s)
        self._ice_servers = ice_servers
        self._relay_only = relay_only
        self._can_return = can_return
        self._on_path = on_path
        self._on_candidate = on_candidate
        self._pacer = pacer or Pacer(self._clock)
        self._has_offer = False
        self._answering = asyncio.Lock()
        # Since when there is no path; None while there is one, and before the first.
        self._gone_at: int | None = None
        # How far the listener had heard when the path was lost, as far as we know.
        self._gone_ticks: int | None = None
        # When the current connection came up.
        self._connected_at = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing: asyncio.Task[None] | None = None
        self._peer = self._make_peer(None)

    # --- what the page says

    async def answer(self, offer: signaling.Offer) -> str:
        """Answer an offer; returns the SDP to send back.

        A second one replaces the connection, once it is found to be sound: what was sent on the old one after
        `offer.heard_rtp` is sent again.  Raises `PeerError` for an offer that cannot be answered; the call is closed
        then if it was the first, and goes on as it was otherwise.
        """
        if self._answering.locked():
            raise PeerError("offer_pending", "the offer before is still being answered", "Wait for its answer.")
        async with self._answering:
            if self._closing is not None:
                raise PeerError("call_closed", "the call has ended", "Call again.")
            if not self._has_offer:
                self._has_offer = True
                self._spawn(self._watch())
                try:
                    return await self._peer.answer(offer)
                except PeerError:
                    await self.close("offer refused")
                    raise
            peer = self._make_peer(self._peer.sender.origin_rtp)
            try:
                sdp = await peer.answer(offer)
            except BaseException:
                await peer.close()
                raise
            if self._closing is not None:
                await peer.close()
                raise PeerError("call_closed", "the call ended before it was answered", "Call again.")
            self._go_over_to(peer, offer.heard_rtp)
            return sdp

    async def add_candidate(self, candidate: signaling.Candidate) -> None:
        """An address of the page that was found after its last offer.  Raises `PeerError` if it cannot be read."""
        async with self._answering:  # It may have overtaken the answer to its offer.
            await self._peer.add_candidate(candidate)

    def report(self, report: signaling.Report) -> None:
        """Take what the page says about its player."""
        if self._playhead is None or self._closing is not None:
            return
        now = self._clock.now()
        if self._playhead.report(report, self.sink.sent_ticks, now) and report.age_ms < _FRESH_MS:
            self._peer.notice()
        self._follow(now)
        self._tell(now)

    def flushed(self, message: signaling.Flushed) -> None:
        """The page fell silent: what it had not played by then is not heard."""
        if self._playhead is None or self._flushed_at is None:
            return
        ticks = self._playhead.flushed(message, self.sink.sent_ticks)
        said_ns, last = self._playhead.server_ns(message.t_ms), self._playhead.last
        if ticks is None:
            return
        self.sink.silenced_at(ticks)
        if said_ns is not None and last is not None:
            self._stop_ns = max(0, said_ns - self._flushed_at) + max(0, round(last.device_delay_ms * MS))

    # --- what the agent wants to know

    def position(self, stream: int) -> PlaybackReport:
        """Where the listener is in `stream`, now."""
        return self._report_of(stream, self._where(self._clock.now()))

    def heard_at(self, stream: int) -> int | None:
        """When the first sample of `stream` reached the ear, or will; None while it waits in the queue."""
        ticks = self.sink.first_ticks(stream)
        if ticks is None or self._playhead is None:
            return None
        return self._playhead.arrives_at(ticks, self._clock.now())

    def flush(self) -> int | None:
        """Clear every stream.  Returns the RTP timestamp from which the page may sound again, to be sent to it at once;
        None when nothing has been sent, so that there is nothing to silence."""
        now = self._clock.now()
        return self._hush(self.sink.flush(now), now)

    def pause(self) -> int | None:
        """Fall silent until `resume` and keep every stream; what was sent and not heard is spoken again then.  Returns
        what `flush` does."""
        now = self._clock.now()
        return self._hush(self.sink.pause(now), now)

    def resume(self) -> None:
        """Speak on from the first sample that was not heard."""
        self.sink.resume()

    @property
    def is_paused(self) -> bool:
        return self.sink.is_paused

    def _hush(self, resume_ticks: int, now: int) -> int | None:
        if self._playhead is None:
            return None
        self._flushed_at = now
        self._playhead.flush(resume_ticks)
        return rtp.add(self._playhead.origin_rtp, resume_ticks)

    def uplink(self) -> AsyncIterator[Block]:
        """The microphone: blocks of 20 ms at 16 kHz, in order, until the call ends.  For one reader.

        Sound that never arrived is a guess or silence of the same length, so that blocks count time.  Cancelling loses
        nothing.
        """
        return self._uplink.blocks()

    @property
    def addresses(self) -> list[str]:
        """Where the listener was told to find us."""
        return self._peer.addresses

    @property
    def uplink_clock_ns(self) -> int | None:
        """When sample 0 of the microphone came; None before it has."""
        return self._uplink.received_ns

    def stats(self) -> CallStats:
        sink, playhead = self.sink, self._playhead
        where = self._where(self._clock.now())
        last = playhead.last if playhead is not None else None
        return CallStats(
            is_connected=self.connected.is_set() and self._gone_at is None and self._closing is None,
            missed_slots=sink.missed_slots,
            gaps=sink.gaps,
            gap_slots=sink.gap_slots,
            path_delay_ns=where.path_delay_ns if where is not None else None,
            error_ns=where.error_ns if where is not None else None,
            source=where.source if where is not None else "none",
            is_playing=where.is_playing if where is not None else False,
            jitter_buffer_ms=last.jitter_buffer_ms if last is not None else None,
            reports=playhead.accepted if playhead is not None else 0,
            stop_ns=self._stop_ns,
            uplink=replace(self._uplink.buffer.tally),
            uplink_dropped_ticks=self._uplink.dropped_ticks,
        )

    # --- the end

    async def close(self, reason: str = "closed") -> None:
        """End the call and release everything; returns when that is done.  `closed` is set then."""
        self._begin_close(reason)
        assert self._closing is not None
        # Whoever waits may be cancelled, the end is not.
        await asyncio.shield(self._closing)

    def _begin_close(self, reason: str) -> None:
        if self._closing is None:
            self.close_reason = reason
            self._uplink.close()
            self._closing = asyncio.create_task(self._close())

    async def _close(self) -> None:
        try:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._peer.close()
        finally:
            self.closed.set()

    # ---

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        """Run a task of this call; if it fails, the call ends."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a call ends because a task of it failed", exc_info=error)
            self._begin_close(f"failed: {error}")

    # --- the connection

    @property
    def _sender(self) -> SlotSender:
        return self._peer.sender

    @property
    def _transceiver(self) -> RTCRtpTransceiver:
        return self._peer.transceiver

    def _make_peer(self, origin_rtp: int | None) -> Peer:
        peer = Peer(
            self.sink,
            self._uplink,
            pacer=self._pacer,
            clock=self._clock,
            origin_rtp=origin_rtp,
            ice_servers=self._ice_servers(),
            relay_only=self._relay_only,
            on_slot=self._on_slot,
            on_receiver_report=lambda report: self._on_receiver_report(peer, report),
            on_connected=lambda: self._on_connected(peer),
            on_candidate=self._on_candidate,
            on_end=lambda reason: self._on_peer_ended(peer, reason),
        )
        return peer

    def _on_connected(self, peer: Peer) -> None:
        if peer is self._peer:
            self._connected_at = self._clock.now()
            self.connected.set()
            self._regain()

    def _on_peer_ended(self, peer: Peer, reason: str) -> None:
        if peer is not self._peer or self._closing is not None:
            return
        if self._can_return and self.connected.is_set() and reason != "sending failed":
            self._lose(self._clock.now())
        else:
            self._begin_close(reason)

    def _lose(self, heard_until: int, *, is_news: bool = True) -> None:
        """Nobody is at the other end any more; the last that can have been heard left at `heard_until`."""
        if self._gone_at is not None:
            return
        now = self._clock.now()
        where = self._where(now)
        if where is not None and self.sink.clock is not None:
            self._gone_ticks = min(where.ticks, self.sink.clock.ticks_at(heard_until))
        self._gone_at = now
        self._follow(now)
        self._tell(now)
        if is_news:
            self._on_path(False, self._peer.offer_id)

    def _regain(self) -> None:
        """Somebody is there (again)."""
        if self._gone_at is None:
            return
        if self._gone_ticks is not None:
            self.sink.rewind(self._gone_ticks)
        self._gone_at = self._gone_ticks = None
        self._follow(self._clock.now())
        self._on_path(True, self._peer.offer_id)

    def _go_over_to(self, peer: Peer, heard_rtp: int | None) -> None:
        """From now on `peer` is the call's connection; it will be up in a moment."""
        now = self._clock.now()
        self._lose(now, is_news=False)  # The page knows: it is its own doing.
        old, self._peer = self._peer, peer
        old.sender.stop()
        self._spawn(old.close())
        self._gone_at = now  # The page is at it: its time counts anew.
        if self._playhead is None:
            return
        if heard_rtp is not None:
            heard = self._playhead.flushed(signaling.Flushed(heard_rtp, 0.0), self.sink.sent_ticks)
            self._gone_ticks = heard if heard is not None else self._gone_ticks
        self._playhead.reconnect(self.sink.sent_ticks)

    def _on_slot(self, slot: Slot) -> None:
        assert self.sink.clock is not None
        self.on_slot(slot, self.sink.clock.start_ns)
        if self._playhead is None:
            self._playhead = Playhead(self.sink.clock, self._sender.origin_rtp)

    def _on_receiver_report(self, peer: Peer, report: ReceiverReport) -> None:
        if peer is self._peer and self._playhead is not None:
            self._playhead.receiver_report(report, self._clock.now())

    def _follow(self, now: int) -> None:
        """Let speech go, or hold it, as the listener plays or not."""
        playhead, slots = self._playhead, self.sink.clock
        if playhead is None or slots is None:
            return
        is_playing = playhead.is_playing(now) and self._gone_at is None
        self.sink.hold(is_playing=is_playing)
        if not self.sink.is_open and is_playing:
            if playhead.has_played:
                self.sink.open()
            elif now - self._connected_at >= self._first_report_ns:
                logger.info("no word of the listener's player; speaking all the same")
                self.sink.open()

    async def _watch(self) -> None:
        """The call's own clock: connect in time, tell positions, keep the books short."""
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await self.connected.wait()
        except TimeoutError:
            self._begin_close("not connected in time")
            return
        while True:
            now = self._clock.now()
            self._look_for_peer(now)
            self._follow(now)
            where = self._where(now)
            if where is not None:
                self.sink.forget(where.ticks)
            if now - self._told_at >= 0.9 * _REPORT_S * SECOND or self._is_over(where):
                self._tell(now)
            await asyncio.sleep(self._until_next(where))

    def _look_for_peer(self, now: int) -> None:
        peer = self._peer
        if peer.connected.is_set():
            if peer.is_lost(now):
                self._lose(peer.life_ns)
            elif not peer.has_ended:
                self._regain()
        if self._gone_at is not None and now - self._gone_at > LOST_S * SECOND:
            self._begin_close("connection lost")

    def _until_next(self, where: Position | None) -> float:
        """Seconds until the next look: a quarter, or less when a stream will have been heard in full by then."""
        wait_s = _REPORT_S
        if where is not None:
            for stream in self._untold():
                end = self.sink.end_ticks(stream) if self.sink.is_sent(stream) else None
                if end is not None and end > where.ticks:
                    wait_s = min(wait_s, (end - where.ticks) / rtp.RTP_RATE + 0.001)
        return wait_s

    def _where(self, now: int) -> Position | None:
        if self._playhead is None:
            return None
        where = self._playhead.position(now, self.sink.sent_ticks)
        if self._gone_at is None:
            return where
        ticks = where.ticks if self._gone_ticks is None else min(where.ticks, self._gone_ticks)
        return replace(where, ticks=ticks, is_playing=False)

    def _ear_ticks(self) -> int:
        where = self._where(self._clock.now())
        return where.ticks if where is not None else 0

    def _untold(self) -> list[int]:
        return [stream for stream in self.sink.streams if stream not in self._told]

    def _is_over(self, where: Position | None) -> bool:
        return where is not None and any(self.sink.is_heard(stream, where.ticks) for stream in self._untold())

    def _tell(self, now: int) -> None:
        self._told_at = now
        where = self._where(now)
        streams = self.sink.streams
        self._told.intersection_update(streams)
        for stream in streams:
            if stream not in self._told:
                if where is not None and self.sink.is_heard(stream, where.ticks):
                    self._told.add(stream)
                self._on_report(self._report_of(stream, where))

    def _report_of(self, stream: int, where: Position | None) -> PlaybackReport:
        now = where.at_ns if where is not None else self._clock.now()
        gaps, gap_ns = self.sink.gaps_in(stream)
        last = self._playhead.last if self._playhead is not None else None
        return PlaybackReport(
            stream=stream,
            heard_samples=self.sink.heard_samples(stream, where.ticks) if where is not None else 0,
            at_ns=now,
            path_delay_ns=where.path_delay_ns if where is not None else ESTIMATE_NS,
            dry_at_ns=self.sink.dry_at(stream, now),
            is_playing=not self.sink.is_paused and (where.is_playing if where is not None else True),
            is_measured=where.is_measured if where is not None else False,
            error_ns=where.error_ns if where is not None else None,
            gaps=gaps,
            gap_ns=gap_ns,
            concealed_ns=samples_to_ns(last.concealed, rtp.RTP_RATE) if last is not None else 0,
        )
