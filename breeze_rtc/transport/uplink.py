"""One call's microphone: RTP from aiortc, taken below its jitter buffer, into blocks of 16 kHz sound.

aiortc's own receive path holds 280 ms back for good after one lost packet, throws away what came with it, keeps what
nobody reads without a bound, and takes a thread for each track.  `UplinkReceiver` hands packets to an `Uplink` instead,
which orders and decodes them on the event loop: decoding a packet takes less than the way to another thread and back.

All that is used of the private parts of aiortc 1.16 for receiving is in this module:

`RTCRtpTransceiver.__receiver`
    its receiver; ours takes its place before anything is negotiated.
`RTCRtpSender._ssrc`, `RTCRtpReceiver._set_rtcp_ssrc`
    who the receiver reports are from.
`RTCRtpReceiver._handle_rtp_packet`, `._enabled`
    where its transport brings a packet; whether the direction is open.
`.__remote_streams`, `._run_rtcp`
    what the receiver reports tell, and the task that sends them.
`.__started`, `.__rtcp_task`, `RTCDtlsTransport._register_rtp_receiver`
    what its `stop()` undoes.
`RTCDtlsTransport._rx_srtp`, `._rtp_router.ssrc_table`
    what decrypts a packet; where sender reports of an SSRC go.
`RTCIceTransport._connection._protocols`, `StunProtocol.datagram_received`
    its sockets, and what they call.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple, cast

import numpy as np
import pylibsrtp
from aiortc.rtcdtlstransport import RTCDtlsTransport
from aiortc.rtcrtpparameters import RTCRtpReceiveParameters
from aiortc.rtcrtpreceiver import RTCRtpReceiver, StreamStatistics
from aiortc.rtcrtptransceiver import RTCRtpTransceiver
from aiortc.rtp import RtpPacket
from numpy.typing import NDArray

from breeze_rtc.clock import MS, Clock
from breeze_rtc.media import rtp
from breeze_rtc.media.libopus import Decoder
from breeze_rtc.transport.jitter_buffer import Frame, JitterBuffer, Source

logger = logging.getLogger(__name__)

RATE = 16_000
"""What voice activity and recognisers want, and what Opus decodes to as it is."""
BLOCK = 320
"""20 ms."""

_TICKS = rtp.RTP_RATE // RATE
_LAG_NS = 50 * MS


class Block(NamedTuple):
    """20 ms of sound."""

    at_samples: int
    """Where it begins on the uplink clock, in samples of 16 kHz; 0 is the first sample that came."""
    samples: NDArray[np.float32]
    """(320,), in [-1, 1] and a little beyond."""


class Uplink:
    """What a microphone sends, for one reader.

    Blocks count time: sound that never arrived is there as a guess or as silence.  Where the reader was so slow that
    sound had to go, `at_samples` jumps.
    """

    def __init__(self, clock: Clock, *, limit_s: float = 2.0) -> None:
        """limit_s: how much sound may wait for the reader; the oldest goes.  It waits as packets, so that a microphone
        nobody listens to costs no decoding."""
        self.buffer = JitterBuffer()
        self.received_ns: int | None = None
        """When the first packet came: where the uplink clock stands on ours."""
        self.dropped_ticks = 0
        """Sound that went unread."""
        self.corrupt = 0
        """Packets that libopus refused."""
        self._clock = clock
        self._limit_ticks = round(limit_s * rtp.RTP_RATE)
        self._frames: deque[Frame] = deque()
        self._waiting_ticks = 0
        self._changed = asyncio.Event()
        self._is_closed = False
        self._timer: asyncio.TimerHandle | None = None
        # When it is to ring; and whether it has just rung much too late.
        self._wake_at = 0
        self._stood_still = False
        self._decoder = Decoder(RATE)
        # Decoded sound short of a block, and where it begins.
        self._rest = np.zeros(0, np.float32)
        self._rest_at = 0

    def receive(self, packet: rtp.Packet) -> None:
        """A packet has arrived.  On the event loop."""
        if self._is_closed:
            return
        now = self._clock.now()
        if self.received_ns is None:
            self.received_ns = now
        self.buffer.push(packet, now)
        self._take(now)

    async def blocks(self) -> AsyncIterator[Block]:
        """The sound in order, until the end.  Cancelling loses nothing."""
        while True:
            while self._frames:
                frame = self._frames.popleft()
                self._waiting_ticks -= frame.ticks
                for block in self._cut(frame):
                    yield block
            if self._is_closed:
                return
            self._changed.clear()
            await self._changed.wait()

    def close(self) -> None:
        """Nothing comes any more; the reader ends behind what is there.  May be called twice."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._changed.set()

    # ---

    def _take(self, now: int) -> None:
        for frame in self.buffer.take(now):
            self._frames.append(frame)
            self._waiting_ticks += frame.ticks
        while self._waiting_ticks > self._limit_ticks:
            lost = self._frames.popleft()
            self._waiting_ticks -= lost.ticks
            self.dropped_ticks += lost.ticks
        if self._frames:
            self._changed.set()
        wake_at = self.buffer.wake_at()
        # A packet moves the time of waking on; a timer that rings too early looks again, which is cheaper than a new
        # one for each packet.
        if wake_at is not None and (self._timer is None or wake_at < self._wake_at):
            if self._timer is not None:
                self._timer.cancel()
            self._set_timer(max(wake_at, now + MS), now)

    def _set_timer(self, wake_at: int, now: int) -> None:
        # Whole milliseconds, rounded up: the loops wait in these, and what is less than one would spin.
        self._wake_at = wake_at
        self._timer = asyncio.get_running_loop().call_later(-(-(wake_at - now) // MS) / 1000, self._wake)

    def _wake(self) -> None:
        self._timer = None
        now = self._clock.now()
        if now - self._wake_at > _LAG_NS and not self._stood_still:
            # What came while the loop stood still waits in the socket, and timers are served first.
            self._stood_still = True
            self._set_timer(now + _LAG_NS, now)
        else:
            self._stood_still = False
            self._take(now)

    def _cut(self, frame: Frame) -> list[Block]:
        """The blocks that a frame completes."""
        at = frame.at // _TICKS
        if self._rest_at + self._rest.size != at:  # What lay between was dropped.
            self._rest, self._rest_at = self._rest[:0], at
        sound = self._decode(frame)
        if self._rest.size:
            sound = np.concatenate((self._rest, sound))
        whole = sound.size // BLOCK * BLOCK
        blocks = [Block(self._rest_at + start, sound[start : start + BLOCK]) for start in range(0, whole, BLOCK)]
        self._rest, self._rest_at = sound[whole:], self._rest_at + whole
        return blocks

    def _decode(self, frame: Frame) -> NDArray[np.float32]:
        # By both ends, for silence may begin or end between two samples.
        size = (frame.at + frame.ticks) // _TICKS - frame.at // _TICKS
        match frame.source:
            case Source.PACKET:
                sound = self._decoder.decode(frame.payload)
            case Source.FEC:
                sound = self._decoder.recover(frame.payload, size)
            case Source.CONCEALED:
                sound = self._decoder.conceal(size)
            case Source.SILENCE:
                sound = np.zeros(size, np.float32)
        if sound is None or sound.size != size:
            self.corrupt += 1
            return self._decoder.conceal(size)
        return sound


class UplinkReceiver(RTCRtpReceiver):
    """aiortc's receiver without its jitter buffer, decoder and thread: packets go to an `Uplink`.

    Once the connection is up they come straight from the socket; the way through aioice and aiortc (a search for STUN,
    a queue, a task, an object for each packet) costs more than all that is done here.  Receiver reports stay aiortc's,
    for a browser sends redundancy by the loss that they tell of.
    """

    def __init__(self, transport: RTCDtlsTransport, uplink: Uplink) -> None:
        super().__init__("audio", transport)
        self._uplink = uplink
        self._payload_types: frozenset[int | None] = frozenset()

    @classmethod
    def install(cls, transceiver: RTCRtpTransceiver, uplink: Uplink) -> UplinkReceiver:
        """Put one in the place of the receiver of a transceiver that has not been negotiated yet."""
        receiver = cls(transceiver.receiver.transport, uplink)
        receiver._set_rtcp_ssrc(transceiver.sender._ssrc)
        assert hasattr(transceiver, "_RTCRtpTransceiver__receiver"), "aiortc's transceivers are not what they were"
        transceiver._RTCRtpTransceiver__receiver = receiver
        return receiver

    async def receive(self, parameters: RTCRtpReceiveParameters) -> None:
        """What aiortc's does, without its decoder's thread, whose end all calls would have to wait for."""
        if self._payload_types:
            return
        self._payload_types = frozenset(codec.payloadType for codec in parameters.codecs)
        self.transport._register_rtp_receiver(self, parameters)
        self._RTCRtpReceiver__rtcp_task = asyncio.ensure_future(self._run_rtcp())
        self._RTCRtpReceiver__started = True
        for protocol in cast(list[Any], self.transport.transport._connection._protocols):
            protocol.datagram_received = self._before(protocol.datagram_received)

    def _before(self, datagram_received: Callable[[bytes, Any], None]) -> Callable[[bytes, Any], None]:
        """Take a socket's RTP, and leave STUN, DTLS and RTCP to whom they went (RFC 7983, RFC 5761 section 4)."""

        def received(data: bytes, address: Any) -> None:
            if len(data) < 2 or not 128 <= data[0] < 192 or 192 <= data[1] < 224:
                datagram_received(data, address)
                return
            srtp: pylibsrtp.Session = self.transport._rx_srtp
            try:
                parsed = rtp.parse(srtp.unprotect(data))
            except pylibsrtp.Error:
                return  # Not from our peer, or a second time.
            if parsed is not None and parsed[0] in self._payload_types:
                self.take(parsed[1])

        return received

    async def _handle_rtp_packet(self, packet: RtpPacket, arrival_time_ms: int) -> None:
        # Only what was under way when the connection came up.
        self.take(rtp.Packet(packet.ssrc, packet.sequence_number, packet.timestamp, packet.payload))

    def take(self, packet: rtp.Packet) -> None:
        """A packet has arrived."""
        if not self._enabled:
            return
        self._uplink.receive(packet)
        # One stream at a time: a peer that invents SSRCs makes no list grow, and no report overflow.
        streams: dict[int, StreamStatistics] = self._RTCRtpReceiver__remote_streams  # type: ignore[attr-defined]
        if packet.ssrc == self._uplink.buffer.ssrc:
            if packet.ssrc not in streams:
                routes = self.transport._rtp_router.ssrc_table
                for ssrc in streams:
                    routes.pop(ssrc, None)
                routes[packet.ssrc] = self
                streams.clear()
                streams[packet.ssrc] = StreamStatistics(rtp.RTP_RATE)
            streams[packet.ssrc].add(cast(RtpPacket, packet))  # of which it reads two numbers, named as ours are
