"""A call's packets onto the wire: a slot, an RTP header, SRTP, one datagram.

aiortc sends a packet through a task per track, an object per packet and a history for retransmissions that audio never
asks for.  This does the same in half of the time (`bench/media_capacity.py`) and leaves aiortc everything else: ICE,
DTLS, negotiation, RTCP reports, statistics and the end.  (Only its DTLS transport's own count of packets misses these.)

All that is used of the private parts of aiortc 1.16 (and aioice 0.13) for sending is in this module:

`RTCRtpSender._run_rtp`
    what it starts when the connection is up; ours takes its place.
`.__rtp_started`, `.__rtp_exited`
    what its `stop()` waits for.
`._ssrc`, `.__mid`, `.__rtp_header_extensions_map`, `._enabled`
    what was negotiated.
`.__ntp_timestamp`, `.__rtp_timestamp`, `.__packet_count`, `.__octet_count`
    what its sender reports and statistics say.
`._handle_rtcp_packet`, `.__lsr`, `.__lsr_time`
    what comes back, and when the last sender report left: of a receiver report aiortc keeps only what statistics show.
`RTCDtlsTransport._state`, `._tx_srtp`
    whether, and with what keys, it is encrypted.
`RTCIceTransport._connection._nominated`
    the pair of addresses that ICE chose: socket and destination.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import struct
from collections.abc import Callable
from typing import Any, cast

from aiortc.rtcdtlstransport import State
from aiortc.rtcrtpparameters import RTCRtpCodecParameters
from aiortc.rtcrtpsender import RTCRtpSender
from aiortc.rtp import AnyRtcpPacket, HeaderExtensions, RtcpReceiverInfo, RtcpRrPacket, RtcpSrPacket

from breeze_rtc.clock import SECOND, Clock, MonotonicClock, wall_offset_ns
from breeze_rtc.media import rtp
from breeze_rtc.transport.pacer import Pacer
from breeze_rtc.transport.playhead import ReceiverReport
from breeze_rtc.transport.playout import SLOT_TICKS, Playout, Slot

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("!BBHLL")
_EXTENSION = struct.Struct("!HH")
_VERSION = 0x80
_HAS_EXTENSION = 0x10
_MARKER = 0x80
_NTP_EPOCH_NS = 2_208_988_800 * SECOND
"""From 1900 to 1970."""


class SlotSender:
    """Takes the place of an aiortc sender's sending task; everything ends with that sender's `stop()`."""

    def __init__(
        self,
        sender: RTCRtpSender,
        playout: Playout,
        pacer: Pacer,
        *,
        clock: Clock,
        on_slot: Callable[[Slot], None],
        on_end: Callable[[], None],
        on_receiver_report: Callable[[ReceiverReport], None] = lambda report: None,
        origin_rtp: int | None = None,
    ) -> None:
        """`on_slot(slot)` is called for each slot after it has left, `on_end()` once when no more will, and
        `on_receiver_report(report)` when the listener's RTP stack tells of our packets.

        origin_rtp: that of the sender before, for a call that goes on over a new connection: with the playout's clock,
            which has started then, timestamps and slots go on as if nothing had been.
        """
        self.origin_rtp = secrets.randbits(32) if origin_rtp is None else origin_rtp
        """Timestamp of tick 0."""
        self._sender = cast(Any, sender)
        self._playout = playout
        self._pacer = pacer
        self._clock = clock
        self._on_slot = on_slot
        self._on_end = on_end
        self._on_receiver_report = on_receiver_report
        # In the lower half at first: a receiver that misses packets at a wrap-around loses track of the encryption.
        self._sequence = secrets.randbits(15)
        # Between the monotonic clock and the wall's, looked at once a second.
        self._wall_offset_ns = wall_offset_ns()
        self._first_byte = _VERSION
        self._payload_type = 0
        self._extension = b""
        self._is_first = True
        self._is_stopped = False
        # Done, or failed, when nothing more can be sent; made by `_run`.
        self._over: asyncio.Future[None] | None = None
        self._sender._run_rtp = self._run
        self._handle_rtcp = self._sender._handle_rtcp_packet
        self._sender._handle_rtcp_packet = self._on_rtcp

    def stop(self) -> None:
        """Send nothing more, before aiortc says so: another sender may be about to take the playout over."""
        self._is_stopped = True
        self._pacer.leave(self._tick)
        if self._over is not None and not self._over.done():
            self._over.set_result(None)

    async def _run(self, codec: RTCRtpCodecParameters) -> None:
        """aiortc starts this as a task once the connection is up, and cancels it to stop."""
        self._sender._RTCRtpSender__rtp_started.set()
        self._over = asyncio.get_running_loop().create_future()
        try:
            assert codec.payloadType is not None, "a negotiated codec has one"
            self._payload_type = codec.payloadType
            self._extension = self._negotiated_extension()
            self._first_byte = _VERSION | (_HAS_EXTENSION if self._extension else 0)
            if self._is_stopped:
                return
            slots = self._playout.clock
            first_at = self._pacer.join(self._tick, start_ns=slots.start_ns if slots is not None else None)
            if slots is None:
                self._playout.start(first_at)
            await self._over
        except (asyncio.CancelledError, ConnectionError):
            pass  # What waits for this waits for `__rtp_exited`, as with aiortc's own.
        except Exception:
            logger.exception("a call cannot be sent any more")
        finally:
            self._pacer.leave(self._tick)
            self._sender._RTCRtpSender__rtp_exited.set()
            self._on_end()

    async def _on_rtcp(self, packet: AnyRtcpPacket) -> None:
        """What aiortc's router has for the sender: its own part first, then ours."""
        await self._handle_rtcp(packet)
        if isinstance(packet, RtcpRrPacket | RtcpSrPacket):
            for block in packet.reports:
                if block.ssrc == self._sender._ssrc:
                    self._on_receiver_report(self._receiver_report(block))

    def _receiver_report(self, block: RtcpReceiverInfo) -> ReceiverReport:
        # The last packet sent is one before the next; packets that were skipped have no number.
        missing = (self._sequence - 1 - block.highest_sequence) & 0xFFFF
        rtt_ns = None
        # Only for the newest of our reports is it known when it left, which is later than the slot that it tells of.
        if block.dlsr and block.lsr == self._sender._RTCRtpSender__lsr:
            wall_ns = MonotonicClock().now() + wall_offset_ns()
            left_ns = round(self._sender._RTCRtpSender__lsr_time * SECOND)
            rtt_ns = max(0, wall_ns - left_ns - block.dlsr * SECOND // 65_536)
        return ReceiverReport(
            arrived_ticks=max(0, self._playout.sent_ticks - missing * SLOT_TICKS),
            jitter_ns=block.jitter * SECOND // rtp.RTP_RATE,
            rtt_ns=rtt_ns,
        )

    def _negotiated_extension(self) -> bytes:
        """The header extension of every packet: the section's name, where the peer wants it (RFC 9143 section 15)."""
        values = HeaderExtensions(mid=self._sender._RTCRtpSender__mid)
        profile, extension = self._sender._RTCRtpSender__rtp_header_extensions_map.set(values)
        return _EXTENSION.pack(profile, len(extension) // 4) + extension if extension else b""

    def _tick(self) -> None:
        """Send what is due: one slot, or more where speech under way catches up."""
        assert self._over is not None
        try:
            while self._playout.next_at() <= (now := self._clock.now()):
                slot = self._playout.next_slot(now)
                if self._sender._enabled:
                    self._send(slot)
                self._on_slot(slot)
        except Exception as error:
            self._pacer.leave(self._tick)
            if not self._over.done():
                self._over.set_exception(error)

    def _send(self, slot: Slot) -> None:
        sender = self._sender
        dtls = sender.transport
        pair = dtls.transport._connection._nominated.get(1)
        if pair is None or dtls._state is not State.CONNECTED:
            raise ConnectionError("not connected")
        timestamp = rtp.add(self.origin_rtp, slot.ticks)
        # Silence between utterances is sent too: one talkspurt (RFC 3551 section 4.1), as long as the connection.
        marker = _MARKER if self._is_first else 0
        header = _HEADER.pack(self._first_byte, marker | self._payload_type, self._sequence, timestamp, sender._ssrc)
        pair.protocol.transport.sendto(dtls._tx_srtp.protect(header + self._extension + slot.payload), pair.remote_addr)
        self._is_first = False
        self._sequence = (self._sequence + 1) & 0xFFFF
        # For the sender reports: the slot's place on the slot clock, not the moment it happened to leave, so that the
        # line through them has no jitter.
        if slot.index % 50 == 0:
            self._wall_offset_ns = wall_offset_ns()
        assert self._playout.clock is not None
        leaves_at = self._playout.clock.leaves_at(slot.index)
        sender._RTCRtpSender__ntp_timestamp = ((leaves_at + self._wall_offset_ns + _NTP_EPOCH_NS) << 32) // SECOND
        sender._RTCRtpSender__rtp_timestamp = timestamp
        sender._RTCRtpSender__packet_count += 1
        sender._RTCRtpSender__octet_count += len(slot.payload)
