"""What leaves for the listener, packet by packet, as an aiortc receiver sees it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiortc import RTCConfiguration, RTCPeerConnection, RTCSessionDescription
from aiortc.rtp import RtcpSrPacket, RtpPacket
from python_listener import PythonListener, clock

from breeze_rtc.clock import MS, SECOND, wall_offset_ns
from breeze_rtc.media import rtp
from breeze_rtc.media.opus import SILENCE_PACKET
from breeze_rtc.playback import SpeechPacket
from breeze_rtc.transport.pacer import Pacer
from breeze_rtc.transport.playhead import ReceiverReport
from breeze_rtc.transport.playout import SLOT_TICKS, Playout
from breeze_rtc.transport.sender import SlotSender
from breeze_rtc.transport.webrtc import WebRtcCall

NTP_EPOCH_S = 2_208_988_800


class Wire:
    """A call, its listener, and all packets and sender reports that came."""

    def __init__(self) -> None:
        self.call = WebRtcCall()
        self.listener = PythonListener()
        self.packets: list[RtpPacket] = []
        self.sender_reports: list[RtcpSrPacket] = []

    def listen(self) -> None:
        receiver: Any = self.listener._transceiver.receiver
        on_rtp, on_rtcp = receiver._handle_rtp_packet, receiver._handle_rtcp_packet

        async def rtp_packet(packet: RtpPacket, arrival_time_ms: int) -> None:
            self.packets.append(packet)
            await on_rtp(packet, arrival_time_ms)

        async def rtcp_packet(packet: Any) -> None:
            if isinstance(packet, RtcpSrPacket):
                self.sender_reports.append(packet)
            await on_rtcp(packet)

        receiver._handle_rtp_packet, receiver._handle_rtcp_packet = rtp_packet, rtcp_packet

    async def until(self, predicate: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not predicate():  # noqa: ASYNC110 - what it waits for is on the wire
                await asyncio.sleep(0.01)


@asynccontextmanager
async def connected() -> AsyncIterator[Wire]:
    wire = Wire()
    await wire.listener.accept(await wire.call.answer(await wire.listener.offer()))
    wire.listen()
    yield wire
    await wire.call.close()
    await wire.listener.close()


async def test_sequence_numbers_and_timestamps_step_evenly_and_each_packet_names_its_section() -> None:
    """One more each, 960 ticks more each, and the `mid` that the peer asked for."""
    async with connected() as wire:
        await wire.until(lambda: len(wire.packets) >= 20)
        for a, b in itertools.pairwise(wire.packets):
            assert (b.sequence_number - a.sequence_number) % 65_536 == 1
            assert rtp.distance(a.timestamp, b.timestamp) % 960 == 0
        assert {packet.extensions.mid for packet in wire.packets} == {"0"}
        assert {packet.ssrc for packet in wire.packets} == {wire.call._transceiver.sender._ssrc}
        # aiortc marks every packet; a talkspurt begins once.
        assert {packet.marker for packet in wire.packets[1:]} == {0}


async def test_after_a_pause_the_timestamp_has_moved_by_as_much_as_the_clock() -> None:
    """Steps of other than 960 make a browser make up sound; so does a pause that its timestamps do not know.  Speech,
    half a second of silence, speech: 960 each all the way, and the second speech as far from the first as in time.
    Reproduction 31 (KVS-WebRTC#1607).
    """
    async with connected() as wire:
        await wire.until(lambda: len(wire.packets) >= 5)
        wire.call.sink.open()
        for stream in (1, 2):
            wire.call.sink.write(stream, tuple(SpeechPacket(480 * k, SILENCE_PACKET + b"x") for k in range(10)))
            wire.call.sink.end(stream)
            sent = 10 * stream
            await wire.until(lambda sent=sent: sum(len(p.payload) > 3 for p in wire.packets) >= sent)  # type: ignore[misc]
            if stream == 1:
                await asyncio.sleep(0.5)
        slots = wire.call.sink.clock
        assert slots is not None
        ticks = [rtp.distance(wire.call._sender.origin_rtp, packet.timestamp) for packet in wire.packets]
        # The slots that a stalled test machine missed are in the steps as well: each is 20 ms of time.
        assert all(step > 0 and step % 960 == 0 for step in (b - a for a, b in itertools.pairwise(ticks)))
        first, second = wire.call.sink.first_ticks(1), wire.call.sink.first_ticks(2)
        assert first is not None
        assert second is not None
        assert slots.time_of(second) - slots.time_of(first) >= 700 * MS
        assert abs(ticks[-1] - slots.ticks_at(clock.now())) < 48_000


async def test_sequence_numbers_wrap() -> None:
    """The encryption's rollover counter goes with them."""
    async with connected() as wire:
        wire.call._sender._sequence = 65_530
        await wire.until(lambda: any(packet.sequence_number == 5 for packet in wire.packets))


async def test_sender_reports_lie_on_the_slot_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their pairs of wall time and timestamp are one line, without the jitter of sending; they count what was sent."""
    monkeypatch.setattr("aiortc.rtcrtpsender.random.random", lambda: -0.4)
    async with connected() as wire:
        await wire.until(lambda: len(wire.sender_reports) >= 5)
        slots = wire.call.sink.clock
        assert slots is not None
        offset = wall_offset_ns()
        infos = [report.sender_info for report in wire.sender_reports]
        for info in infos:
            ticks = rtp.distance(wire.call._sender.origin_rtp, info.rtp_timestamp)
            wall_ns = (info.ntp_timestamp * SECOND >> 32) - NTP_EPOCH_S * SECOND
            assert abs(wall_ns - offset - slots.time_of(ticks)) < MS
            # Slot 0 is packet 1, unless the test machine missed slots.
            assert info.packet_count <= ticks // 960 + 1
            assert info.octet_count == 3 * info.packet_count  # Silence.
        assert len({info.ntp_timestamp for info in infos}) == len(infos)


async def test_statistics_are_as_with_aiortcs_own_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packets sent, and the round trip from the listener's receiver reports."""
    monkeypatch.setattr("aiortc.rtcrtpsender.random.random", lambda: -0.4)
    monkeypatch.setattr("aiortc.rtcrtpreceiver.random.random", lambda: -0.4)
    async with connected() as wire:
        found: dict[str, Any] = {}
        async with asyncio.timeout(60):
            while getattr(found.get("remote-inbound-rtp"), "roundTripTime", None) is None:
                await asyncio.sleep(0.05)
                found = {stats.type: stats for stats in (await wire.call._transceiver.sender.getStats()).values()}
        assert 0 <= found["remote-inbound-rtp"].roundTripTime < 1
        assert found["outbound-rtp"].packetsSent > 5


async def test_what_the_listeners_rtcp_says_of_our_packets(monkeypatch: pytest.MonkeyPatch) -> None:
    """How far they arrived, how evenly, and the round trip: from each receiver report."""
    monkeypatch.setattr("aiortc.rtcrtpsender.random.random", lambda: -0.4)
    monkeypatch.setattr("aiortc.rtcrtpreceiver.random.random", lambda: -0.4)
    async with connected() as wire:
        said: list[tuple[int, ReceiverReport]] = []
        sender = wire.call._sender
        sender._on_receiver_report = lambda report: said.append((wire.call.sink.sent_ticks, report))
        await wire.until(lambda: any(report.rtt_ns is not None for _, report in said) and len(said) > 5)
        for sent_ticks, report in said:
            assert sent_ticks - 25 * SLOT_TICKS < report.arrived_ticks <= sent_ticks
            assert 0 <= report.jitter_ns < 500 * MS
            assert report.rtt_ns is None or 0 <= report.rtt_ns < SECOND
        assert said[-1][1].arrived_ticks > said[0][1].arrived_ticks


async def test_timestamps_go_on_through_a_renegotiation() -> None:
    """The peer offers again: same source, same clock, no packet lost."""
    async with connected() as wire:
        await wire.until(lambda: len(wire.packets) >= 10)
        before = len(wire.packets)
        await wire.listener.peer.setLocalDescription(await wire.listener.peer.createOffer())
        peer = wire.call._peer.connection
        await peer.setRemoteDescription(RTCSessionDescription(wire.listener.peer.localDescription.sdp, "offer"))
        await peer.setLocalDescription(await peer.createAnswer())
        await wire.listener.peer.setRemoteDescription(RTCSessionDescription(peer.localDescription.sdp, "answer"))
        await wire.until(lambda: len(wire.packets) >= before + 20)
        assert len({packet.ssrc for packet in wire.packets}) == 1
        for a, b in itertools.pairwise(wire.packets):
            assert (b.sequence_number - a.sequence_number) % 65_536 == 1
        slots = wire.call.sink.clock
        assert slots is not None
        assert (
            abs(rtp.distance(wire.call._sender.origin_rtp, wire.packets[-1].timestamp) - slots.ticks_at(clock.now()))
            < 48_000
        )


async def test_a_new_connection_goes_on_with_clock_timestamps_and_unheard_speech() -> None:
    """The first listener is gone after five packets of speech, of which it heard three; the second hears the rest, at
    the timestamps of one and the same slot clock."""
    playout, pacer = Playout(), Pacer()
    playout.write(1, tuple(SpeechPacket(480 * k, SILENCE_PACKET + bytes([k])) for k in range(12)))
    playout.end(1)
    origin: int | None = None
    heard: list[list[RtpPacket]] = []
    for _ in range(2):
        listener, server = PythonListener(), RTCPeerConnection(RTCConfiguration(iceServers=[]))
        sender = SlotSender(
            server.addTransceiver("audio", direction="sendonly").sender,
            playout,
            pacer,
            clock=clock,
            on_slot=lambda slot: None,
            on_end=lambda: None,
            origin_rtp=origin,
        )
        packets: list[RtpPacket] = []
        receiver: Any = listener._transceiver.receiver

        async def received(packet: RtpPacket, arrival_time_ms: int, packets: list[RtpPacket] = packets) -> None:
            packets.append(packet)

        await server.setRemoteDescription(RTCSessionDescription((await listener.offer()).sdp, "offer"))
        await server.setLocalDescription(await server.createAnswer())
        await listener.accept(server.localDescription.sdp)
        receiver._handle_rtp_packet = received
        async with asyncio.timeout(60):
            while len(packets) < 3:  # noqa: ASYNC110 - what it waits for is on the wire
                await asyncio.sleep(0.001)
            playout.open()
            while playout.queued_packets > (7 if origin is None else 0):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        if origin is None:
            first = playout.first_ticks(1)
            assert first is not None
            playout.rewind(first + 3 * SLOT_TICKS)
        await asyncio.sleep(0.1)
        await server.close()
        await listener.close()
        origin = sender.origin_rtp
        heard.append(packets)
    before, after = ([p for p in packets if len(p.payload) > 3] for packets in heard)
    sent = [p.payload[3] for p in before]
    assert sent == list(range(max(5, len(sent))))
    assert [p.payload[3] for p in after] == list(range(3, 12))
    assert before[0].ssrc != after[0].ssrc
    slots = playout.clock
    assert slots is not None
    every = [rtp.distance(origin, p.timestamp) for packets in heard for p in packets]
    assert all(b - a >= 960 and (b - a) % 960 == 0 for a, b in itertools.pairwise(every))
    assert abs(every[-1] - slots.ticks_at(clock.now())) < 48_000
    # The time between is no gap of ours, though a busy machine may make some.
    assert playout.gap_slots * 960 < rtp.distance(before[-1].timestamp, after[0].timestamp)


async def test_calls_share_a_ticker_and_leave_it() -> None:
    """One timer for both; none when they are closed."""
    pacer = Pacer()
    calls = [WebRtcCall(pacer=pacer) for _ in range(2)]
    listeners = [PythonListener() for _ in calls]
    for call, listener in zip(calls, listeners, strict=True):
        await listener.accept(await call.answer(await listener.offer()))
        await asyncio.wait_for(listener.played.wait(), 30)
    starts = [call.sink.clock.start_ns for call in calls if call.sink.clock is not None]
    assert len({start % (20 * MS) for start in starts}) == 1
    for call, listener in zip(calls, listeners, strict=True):
        await call.close()
        await listener.close()
    assert pacer._timer is None
    assert pacer._phases.next_at() is None
