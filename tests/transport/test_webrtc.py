"""A call and a listener in one process, over real UDP."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import re
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any, Self

import av
import numpy as np
import pytest
from numpy.typing import NDArray
from python_listener import Microphone, PythonListener, clock
from udp_relay import UdpRelay, through_a_relay

from breeze_rtc.clock import MS, SECOND
from breeze_rtc.errors import PeerError
from breeze_rtc.media import rtp
from breeze_rtc.media.opus import SpeechEncoder
from breeze_rtc.playback import PlaybackReport, SpeechPacket
from breeze_rtc.transport.pacer import Pacer
from breeze_rtc.transport.peer import Peer
from breeze_rtc.transport.playout import Slot
from breeze_rtc.transport.signaling import MAX_CANDIDATES, Candidate, IceServer, Offer
from breeze_rtc.transport.uplink import BLOCK, Block
from breeze_rtc.transport.webrtc import WebRtcCall


def speech(seconds: float, *, hz: float = 200.0) -> tuple[SpeechPacket, ...]:
    """A gliding tone, so that no two places sound alike."""
    t = np.arange(round(seconds * 24_000)) / 24_000
    encoder = SpeechEncoder()
    return encoder.encode((np.sin(2 * np.pi * (hz + 300 * t) * t) * 9_000).astype(np.int16)) + encoder.end()


class Conversation:
    """A call and a listener, connected; both are closed at the end."""

    def __init__(self, *, microphone: Microphone | None = None, reports: bool = True, **options: Any) -> None:
        self.reports: list[PlaybackReport] = []
        self._changed = asyncio.Event()
        self._reports = reports
        self.listener = PythonListener(microphone=microphone)
        self.listener.on_heard = self._changed.set
        self.call = WebRtcCall(on_report=self._on_report, **options)
        self.slots: list[Slot] = []
        on_slot = self.call._sender._on_slot
        self.call._sender._on_slot = lambda slot: (self.slots.append(slot), on_slot(slot))

    def _on_report(self, report: PlaybackReport) -> None:
        self.reports.append(report)
        self._changed.set()

    async def until(self, predicate: Callable[[], bool]) -> None:
        """Wait for it; looked at whenever a frame is heard or a report is told."""
        async with asyncio.timeout(60):
            while not predicate():
                self._changed.clear()
                await self._changed.wait()

    async def connect(self) -> None:
        await self.listener.accept(await self.call.answer(await self.listener.offer()))
        if self._reports:
            self.listener.start_reports(self.call.report)

    async def __aenter__(self) -> Self:
        await self.connect()
        await self.until(self.listener.played.is_set)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.call.close()
        await self.listener.close()

    @property
    def origin(self) -> int:
        assert self.call._playhead is not None
        return self.call._playhead.origin_rtp

    def say(self, stream: int, packets: tuple[SpeechPacket, ...]) -> None:
        self.call.sink.write(stream, packets)
        self.call.sink.end(stream)

    def is_heard(self, stream: int, samples: int) -> bool:
        return any(report.stream == stream and report.heard_samples >= samples for report in self.reports)

    def sound_of(self, stream: int) -> NDArray[np.int16]:
        """What the listener's speaker played from the first slot of a finished stream to a slot after its last."""
        first, end = self.call.sink.first_ticks(stream), self.call.sink.end_ticks(stream)
        assert first is not None
        assert end is not None
        return self.listener.pcm(rtp.add(self.origin, first), end + 960 - first)

    async def until_played(self, stream: int) -> None:
        """Wait until the listener's speaker is past the stream."""
        end = self.call.sink.end_ticks(stream)
        assert end is not None
        await self.until(lambda: rtp.distance(self.origin, self.listener.heard[-1].rtp) > end + 960)


@asynccontextmanager
async def stalls() -> AsyncIterator[list[int]]:
    """By how much this loop was late, in ns, each time that it was: other processes had the machine."""
    late: list[int] = []

    async def watch() -> None:
        while True:
            asked = clock.now()
            await asyncio.sleep(0.01)
            late.append(clock.now() - asked - 10 * MS)

    watching = asyncio.create_task(watch())
    try:
        yield late
    finally:
        watching.cancel()


async def test_sound_arrives_sample_by_sample_where_the_map_says() -> None:
    """Every sample of a stream is at the RTP position of its slot, as if the packets had never been sent anywhere."""
    async with Conversation() as talk:
        packets = speech(0.7)
        talk.say(1, packets)
        await talk.until(lambda: talk.is_heard(1, 480 * len(packets)))
        await talk.until_played(1)
        heard = talk.sound_of(1)
        first = talk.call.sink.first_ticks(1)
        assert first is not None
        # A decoder here, fed with the same packets, puts each frame where its slot is.
        expected = np.zeros(heard.size, np.int16)
        decoder = av.CodecContext.create("libopus", "r")
        decoder.format, decoder.layout, decoder.sample_rate = "s16", "stereo", 48_000  # type: ignore[assignment]
        for slot in talk.slots:
            (frame,) = decoder.decode(av.Packet(slot.payload))
            at = slot.ticks - first
            if 0 <= at < expected.size:
                expected[at : at + 960] = frame.to_ndarray().reshape(-1, 2)[:, 0]
        assert np.array_equal(heard, expected)
        assert np.abs(heard).max() > 4_000
        assert [slot.payload for slot in talk.slots if slot.stream == 1] == [packet.payload for packet in packets]


async def test_nothing_is_lost_at_the_first_and_last_sample_of_twenty_utterances() -> None:
    """The first is written before there is a connection: it waits until the listener plays.

    Reproduction 18 (livekit#5158).
    """
    t = np.arange(2_400) / 24_000
    ping = np.sin(2 * np.pi * 1_000 * t) * 9_000 * (t % 0.08 < 0.02)  # The first and the last 20 ms.
    encoder = SpeechEncoder()
    packets = encoder.encode(ping.astype(np.int16)) + encoder.end()
    talk = Conversation()
    for stream in range(20):
        talk.say(stream, packets)
    async with talk:
        await talk.until(lambda: talk.is_heard(19, 480 * len(packets)))
        await talk.until_played(19)
        for stream in range(20):
            # Each packet where it went: a busy machine may have put silence between two.
            ticks = [slot.ticks for slot in talk.slots if slot.stream == stream]
            assert len(ticks) == len(packets)
            first = talk.listener.pcm(rtp.add(talk.origin, ticks[0] + 312), 480)  # 312: look-ahead.
            last = talk.listener.pcm(rtp.add(talk.origin, ticks[4] + 480), 480)
            assert first.max() > 6_000
            assert last.max() > 6_000
            if ticks[5] == ticks[4] + 960:  # what the decoder gives out with the next packet
                assert talk.listener.pcm(rtp.add(talk.origin, ticks[5]), 312).max() > 6_000


async def test_the_position_is_the_listeners_own() -> None:
    """With four reports a second it is within 40 ms of what has really left the loudspeaker."""
    async with Conversation() as talk:
        packets = speech(1.5)
        talk.say(1, packets)
        errors: list[float] = []

        def compare() -> bool:
            at = clock.now()
            position, real = talk.call._where(at), talk.listener.ticks_at(at, talk.origin)
            last = talk.listener.last_pulled(at)
            # A player that starves stands still, and its next report says so.
            is_fed = last is not None and at - last.pulled_ns < 30 * MS
            if talk.call.stats().reports >= 2 and is_fed and position is not None and real is not None:
                errors.append((position.ticks - real) / 48)
            return talk.is_heard(1, 480 * len(packets))

        await talk.until(compare)
        assert len(errors) > 25
        # On an idle machine the 95th percentile is 4 ms; a busy one stalls both ends between two reports.
        assert np.percentile(np.abs(errors), 75) < 40
        assert abs(np.median(errors)) < 20
        last = talk.reports[-1]
        assert last.is_measured
        assert last.is_playing
        assert 80 * MS < last.path_delay_ns < SECOND


async def test_positions_are_told_until_all_is_heard_and_never_fall() -> None:
    """Four times a second and at once at the end; then no more."""
    async with Conversation() as talk:
        packets = speech(0.6)
        talk.say(5, packets)
        await talk.until(lambda: talk.is_heard(5, 480 * len(packets)))
        told = [report for report in talk.reports if report.stream == 5]
        heard = [report.heard_samples for report in told]
        assert heard == sorted(heard)
        assert max(b.at_ns - a.at_ns for a, b in itertools.pairwise(told)) < SECOND
        talk.call.report(talk.listener.report())
        assert [report for report in talk.reports if report.stream == 5] == told
        first_heard = talk.call.heard_at(5)
        assert first_heard is not None
        assert first_heard < told[-1].at_ns


async def test_a_stream_that_is_fed_late_says_when_it_runs_dry() -> None:
    """The report names the slot the next packet must not miss."""
    async with Conversation() as talk:
        packets = speech(0.6)
        await talk.until(lambda: talk.call.sink.is_open)
        talk.call.sink.write(1, packets[:25])
        report = talk.call.position(1)
        assert report.dry_at_ns is not None
        assert abs(report.dry_at_ns - report.at_ns - 500 * MS) <= 20 * MS


async def test_speech_waits_for_a_listener_who_plays() -> None:
    """Packets that come before the output is open would be squeezed into the first second."""
    async with Conversation(reports=False) as talk:
        talk.say(1, speech(0.2))
        heard = len(talk.listener.heard)
        await talk.until(lambda: len(talk.listener.heard) > heard + 10)
        assert talk.call.sink.queued_packets > 0
        assert all(not frame.pcm.any() for frame in talk.listener.heard)
        talk.call.report(talk.listener.report())
        await talk.until(lambda: talk.call.sink.queued_packets == 0)


async def test_a_listener_who_never_reports_is_spoken_to_all_the_same() -> None:
    """After a while, with positions that say they are estimates."""
    async with Conversation(reports=False, first_report_timeout_s=0.3) as talk:
        packets = speech(0.3)
        talk.say(1, packets)
        await talk.until(lambda: talk.is_heard(1, 480 * len(packets)))
        assert not talk.reports[-1].is_measured
        assert talk.call.stats().source in {"estimate", "rtcp"}


async def test_a_muted_listener_is_waited_for() -> None:
    """Speech stands still while nobody hears it, and goes on without a gap in the count."""
    async with Conversation() as talk:
        packets = speech(0.5)
        talk.say(1, packets)
        await talk.until(lambda: 0 < talk.call.sink.queued_packets < 20)
        talk.listener.muted = True
        talk.call.report(talk.listener.report())
        left = talk.call.sink.queued_packets
        heard = len(talk.listener.heard)
        await talk.until(lambda: len(talk.listener.heard) > heard + 10)
        assert talk.call.sink.queued_packets == left
        assert not talk.call.position(1).is_playing
        talk.listener.muted = False
        talk.call.report(talk.listener.report())
        await talk.until(lambda: talk.is_heard(1, 480 * len(packets)))
        stats = talk.call.stats()
        assert stats.gap_slots <= stats.missed_slots


async def test_after_a_flush_no_old_sound_follows_and_the_new_sound_is_whole() -> None:
    """Stop within a packet or two on the wire; silence up to and beyond the resume timestamp; then all of the reply."""
    async with Conversation() as talk:
        old, new = speech(2.0), speech(0.3, hz=900)
        talk.say(1, old)
        await talk.until(lambda: talk.is_heard(1, 24_000 // 4))
        sent = talk.call.sink.sent_ticks
        resume_rtp = talk.call.flush()
        assert resume_rtp is not None
        talk.call.flushed(talk.listener.mute())
        talk.say(2, new)
        assert rtp.distance(talk.origin, resume_rtp) - sent <= 3 * 960
        end = talk.call.sink.end_ticks(1)
        await talk.until(lambda: rtp.distance(resume_rtp, talk.listener.heard[-1].rtp) >= 0)
        talk.listener.muted = False
        await talk.until(lambda: talk.is_heard(2, 480 * len(new)))
        await talk.until_played(2)
        first = talk.call.sink.first_ticks(2)
        assert end is not None
        assert first >= rtp.distance(talk.origin, resume_rtp) + 2 * 960
        between = talk.listener.pcm(resume_rtp, first - rtp.distance(talk.origin, resume_rtp))
        assert np.abs(between).max() <= 2
        assert np.abs(talk.sound_of(2)).max() > 4_000
        stats = talk.call.stats()
        assert stats.stop_ns is not None
        assert stats.stop_ns < 500 * MS
        assert stats.gap_slots <= stats.missed_slots


async def test_after_a_pause_speech_goes_on_where_the_listener_fell_silent() -> None:
    """The packet that held the first unheard sample is the first of the rest, and the position ends where it should."""
    async with Conversation() as talk:
        packets = speech(1.5)
        talk.say(1, packets)
        await talk.until(lambda: talk.is_heard(1, 24_000 // 4))
        resume_rtp = talk.call.pause()
        assert resume_rtp is not None
        message = talk.listener.mute()
        talk.call.flushed(message)
        await talk.until(lambda: rtp.distance(resume_rtp, talk.listener.heard[-1].rtp) >= 25 * 960)
        held = talk.call.position(1)
        assert not held.is_playing
        assert held.heard_samples == talk.call.sink.heard_samples(1, rtp.distance(talk.origin, message.rtp) - 312)
        talk.listener.muted = False
        paused_until = talk.call.sink.sent_ticks
        talk.call.resume()
        await talk.until(lambda: talk.is_heard(1, 480 * len(packets)))
        spoken = [slot for slot in talk.slots if slot.stream == 1]
        again = [slot.payload for slot in spoken if slot.ticks >= paused_until]
        assert again == [packet.payload for packet in packets[held.heard_samples // 480 :]]
        assert talk.call.stats().gaps == 0


async def test_a_stuck_channel_costs_certainty_and_a_listener_asleep_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports stop while packets arrive: speech goes on by the last delay, and says so.  RTCP stops too: it waits.

    Reproduction 50 (WebAudio#790).
    """
    monkeypatch.setattr("breeze_rtc.transport.playhead.FROZEN_NS", 2 * SECOND)
    monkeypatch.setattr("breeze_rtc.transport.playhead.RTCP_ALIVE_NS", 2 * SECOND)
    async with Conversation(reports=False) as talk:
        reporting = True
        talk.listener.start_reports(lambda report: talk.call.report(report) if reporting else None)
        talk.say(1, speech(20))
        await talk.until(lambda: talk.is_heard(1, 24_000 // 2))
        assert talk.call.stats().source == "playout"
        reporting = False
        stopped_at = clock.now()
        await talk.until(lambda: clock.now() - stopped_at > 4 * SECOND)
        stats = talk.call.stats()
        assert (stats.source, stats.is_playing) == ("held", True)
        assert talk.call.position(1).heard_samples > 4 * 24_000
        receiver: Any = talk.listener._transceiver.receiver
        receiver._send_rtcp = lambda packet: asyncio.sleep(0)
        await talk.until(lambda: not talk.reports[-1].is_playing)
        held, sent = talk.reports[-1], len(talk.slots)
        assert held.heard_samples < 18 * 24_000
        await talk.until(lambda: len(talk.slots) > sent + 20)
        assert all(slot.stream is None for slot in talk.slots[sent + 1 :])


async def test_what_was_under_way_at_a_flush_counts_as_unheard() -> None:
    """The page muted before it left the loudspeaker; its own word says where."""
    async with Conversation() as talk:
        talk.say(1, speech(2.0))
        await talk.until(lambda: talk.is_heard(1, 24_000 // 4))
        told = talk.call.position(1).heard_samples
        talk.call.flush()
        message = talk.listener.mute()
        talk.call.flushed(message)
        muted_at = rtp.distance(talk.origin, message.rtp)
        heard = len(talk.listener.heard)
        await talk.until(lambda: len(talk.listener.heard) > heard + 20)
        final = talk.call.position(1).heard_samples
        assert told < final < 24_000
        assert final == talk.call.sink.heard_samples(1, muted_at - 312)


async def test_a_stalled_loop_skips_slots_and_sends_nothing_late() -> None:
    """Timestamps stay where the time is, so the listener's position stays right."""
    async with Conversation() as talk:
        packets = speech(0.8)
        talk.say(1, packets)
        await talk.until(lambda: talk.is_heard(1, 2_400))
        before = talk.call.stats()
        time.sleep(0.15)  # noqa: ASYNC251 - the stall is what is tested
        await talk.until(lambda: talk.is_heard(1, 480 * len(packets)))
        stats = talk.call.stats()
        assert stats.missed_slots - before.missed_slots >= 5
        assert stats.gap_slots >= 5
        position, real = talk.call._where(clock.now()), talk.listener.ticks_at(clock.now(), talk.origin)
        assert abs(position.ticks - real) < 60 * 48
        assert {rtp.distance(talk.origin, frame.rtp) % 960 for frame in talk.listener.heard} == {0}


def tone(seconds: float) -> NDArray[np.int16]:
    return (np.sin(2 * np.pi * 500 * np.arange(round(48_000 * seconds)) / 48_000) * 10_000).astype(np.int16)


async def test_the_microphone_arrives_as_even_blocks() -> None:
    """20 ms of 16 kHz mono each, at the right pitch and level."""
    async with Conversation(microphone=Microphone(tone(1.0))) as talk:
        blocks: list[NDArray[np.float32]] = []
        async with asyncio.timeout(60):
            async for block in talk.call.uplink():
                blocks.append(block.samples)
                if len(blocks) == 40:
                    break
        assert {(block.shape, block.dtype.name) for block in blocks} == {((BLOCK,), "float32")}
        sound = np.concatenate(blocks[10:])
        spectrum = np.abs(np.fft.rfft(sound * np.hanning(sound.size)))
        assert abs(np.argmax(spectrum) * 16_000 / sound.size - 500) < 5
        assert 0.2 < np.abs(sound).max() < 0.4


async def test_a_lost_microphone_packet_leaves_no_lasting_delay() -> None:
    """It becomes 20 ms of silence; the blocks go on counting time."""
    async with Conversation(microphone=Microphone(tone(1.0))) as talk:
        receiver: Any = talk.call._transceiver.receiver
        take, seen = receiver.take, 0

        def lossy(packet: rtp.Packet) -> None:
            nonlocal seen
            seen += 1
            if seen != 15:
                take(packet)

        receiver.take = lossy
        behind: list[int] = []
        async with asyncio.timeout(60):
            async for _ in talk.call.uplink():
                behind.append(seen)
                if len(behind) == 45:
                    break
        # Packets between arrival and the block they become: one before the loss, a few after it.
        assert behind[-1] - len(behind) - (behind[5] - 6) <= 4


async def test_an_unread_microphone_is_bounded() -> None:
    """The oldest goes, and it is counted."""
    async with Conversation(microphone=Microphone(tone(0.1)), uplink_limit_s=0.1) as talk:
        await talk.until(lambda: talk.call.stats().uplink_dropped_ticks > 3 * 960)
        assert sum(frame.ticks for frame in talk.call._uplink._frames) == 5 * 960


async def test_the_microphone_ends_with_the_call() -> None:
    """A reader that waits is let go."""
    async with Conversation() as talk:

        async def read() -> int:
            return len([block async for block in talk.call.uplink()])

        reader = asyncio.create_task(read())
        await asyncio.sleep(0)
        await talk.call.close()
        assert await asyncio.wait_for(reader, 5) == 0


async def test_a_listener_who_says_goodbye_ends_the_call() -> None:
    """Closing the page closes the call within moments, and says why."""
    async with Conversation() as talk:
        talk.say(1, speech(3.0))
        await talk.listener.close()
        await asyncio.wait_for(talk.call.closed.wait(), 30)
        assert talk.call.close_reason == "peer left"
        assert not talk.call.stats().is_connected


async def test_a_call_whose_peer_vanished_closes_cleanly() -> None:
    """Nobody answers any more; `close` does not wait for anyone."""
    async with Conversation() as talk:
        talk.say(1, speech(3.0))
        await talk.listener.vanish()
        await asyncio.wait_for(talk.call.close("socket closed"), 5)
        assert talk.call.close_reason == "socket closed"


async def test_a_listener_whose_network_is_gone_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No goodbye and no answer to our checks: the call ends by itself, though the socket may still be open."""
    monkeypatch.setattr("aioice.ice.CONSENT_INTERVAL", 0.05)
    async with Conversation() as talk:
        monkeypatch.setattr("aioice.stun.RETRY_RTO", 0.05)
        for protocol in talk.listener._transceiver.receiver.transport.transport._connection._protocols:
            protocol.transport.abort()
        await asyncio.wait_for(talk.call.closed.wait(), 30)
        assert talk.call.close_reason == "connection lost"


async def test_a_call_that_cannot_send_any_more_ends() -> None:
    """A fault of our own in the sender must not leave a silent call behind."""
    async with Conversation() as talk:

        def broken(now: int) -> Slot:
            raise RuntimeError("a fault of our own")

        talk.call.sink.next_slot = broken  # type: ignore[method-assign]
        await asyncio.wait_for(talk.call.closed.wait(), 30)
        assert talk.call.close_reason == "sending failed"


TONE_S = 0.2


def tones(count: int) -> tuple[SpeechPacket, ...]:
    """Tone k, from k x 0.2 s on, has 300 + 60 k Hz: whoever hears it knows where the speech is."""
    t = np.arange(round(24_000 * TONE_S)) / 24_000
    sound = np.concatenate([np.sin(2 * np.pi * (300 + 60 * k) * t) for k in range(count)])
    encoder = SpeechEncoder()
    return encoder.encode((sound * 9_000).astype(np.int16)) + encoder.end()


def tone_at(pcm: NDArray[np.int16]) -> int | None:
    """Which tone 40 ms of sound are; None where there is silence in it, or the edge of one."""
    if np.abs(pcm.reshape(4, -1).astype(int)).max(1).min() < 6_000:
        return None
    spectrum = np.abs(np.fft.rfft(pcm * np.hanning(pcm.size), 48_000))
    return round((int(spectrum.argmax()) - 300) / 60)


class Path:
    """A way between listeners and a call, which can be cut."""

    def __init__(self, talk: Conversation) -> None:
        self._talk = talk
        self.relays: list[UdpRelay] = []

    async def connect(self, listener: PythonListener, *, heard_rtp: int | None = None) -> None:
        offer = await listener.offer()
        # Without the listener's addresses, so that nothing goes around the relay.
        sdp = re.sub(r"a=(candidate:|end-of-candidates).*\r\n", "", offer.sdp)
        answer, relay = through_a_relay(await self._talk.call.answer(replace(offer, sdp=sdp, heard_rtp=heard_rtp)))
        self.relays.append(relay)
        await listener.accept(answer)

    def cut(self, is_cut: bool = True) -> None:
        for relay in self.relays:
            relay.is_cut = is_cut

    def close(self) -> None:
        for relay in self.relays:
            relay.close()


@asynccontextmanager
async def over_a_path(**options: Any) -> AsyncIterator[tuple[Conversation, Path, list[tuple[bool, int]]]]:
    """A conversation over a path, and when that was seen to go and to come."""
    seen: list[tuple[bool, int]] = []
    talk = Conversation(on_path=lambda is_up, offer: seen.append((is_up, clock.now())), **options)
    path = Path(talk)
    await path.connect(talk.listener)
    talk.listener.start_reports(talk.call.report)
    await talk.until(talk.listener.played.is_set)
    try:
        yield talk, path, seen
    finally:
        await talk.__aexit__()
        path.close()


@pytest.mark.parametrize("tells", [True, False])
async def test_after_a_reconnection_speech_goes_on_where_the_ear_was(tells: bool) -> None:
    """The path dies in mid-speech; within two seconds that is seen, and the speech stands still; on the next connection
    every tone follows the one before: nothing old is heard again, nothing is missing, and timestamps are those of one
    clock.  So also where the listener does not say what it heard last, to a few packets."""
    async with over_a_path(can_return=True) as (talk, path, seen):
        packets = tones(20)
        origin = talk.origin
        talk.say(1, packets)
        await talk.until(lambda: talk.is_heard(1, 30_000))
        path.cut()
        cut_at, left = clock.now(), len(talk.slots)
        async with stalls() as stalled:
            await talk.until(lambda: bool(seen))
        assert seen[0][0] is False
        assert seen[0][1] - cut_at < 2.4 * SECOND + sum(stalled)  # 1.8 s, and what a busy machine adds
        assert not talk.call.stats().is_connected
        assert not talk.call.position(1).is_playing
        queued = talk.call.sink.queued_packets
        later: list[Slot] = []
        talk.call.on_slot = lambda slot, _: later.append(slot)
        old, talk.listener = talk.listener, PythonListener()
        talk.listener.on_heard = old.on_heard
        muted = old.mute()
        heard_rtp = min(muted.rtp, rtp.add(old.heard[-1].rtp, 960), key=lambda ts: rtp.distance(origin, ts))
        await path.connect(talk.listener, heard_rtp=heard_rtp if tells else None)
        await old.close()
        talk.listener.start_reports(talk.call.report)
        await talk.until(lambda: talk.is_heard(1, 480 * len(packets)))
        assert queued <= len(packets)
        await talk.until_played(1)
        assert talk.origin == origin
        assert [is_up for is_up, _ in seen] == [False, True]
        heard_ticks = rtp.distance(origin, heard_rtp)
        before = old.pcm(origin, heard_ticks)
        first = next(slot.ticks for slot in talk.slots if slot.stream == 1 and slot.ticks >= heard_ticks)
        after = talk.listener.pcm(rtp.add(origin, first), talk.call.sink.end_ticks(1) - first)
        heard = [
            [tone_at(sound[at : at + 1_920]) for at in range(0, sound.size - 1_920, 480)] for sound in (before, after)
        ]
        last, begin = (list(filter(lambda tone: tone is not None, tones_heard)) for tones_heard in heard)
        # The first half second of the new connection is what came next, and nothing from before.
        assert begin[0] in {last[-1], last[-1] + 1}
        assert min(begin) >= last[-1] - (0 if tells else 1)
        assert list(dict.fromkeys(last + begin)) == list(range(20))
        # Of the media, what leaves again: by where the packets went, since silence of a busy machine may lie between.
        place = {packet.payload: 20 * at for at, packet in enumerate(packets)}
        again_ms = place[next(slot.payload for slot in later if slot.stream == 1)]
        if tells:
            until_ms = [
                place[slot.payload] + min(20, (heard_ticks - slot.ticks) / 48)
                for slot in talk.slots
                if slot.stream == 1 and slot.ticks < heard_ticks
            ][-1]
            assert 0 <= until_ms - again_ms <= 20
        else:
            # What had left by the listener's last sign of life, which may come a little after the last sound that it
            # got.  (aiortc's player keeps the last packets to itself when none follow them, so it has heard less.)
            until_ms = place[talk.slots[left - 1].payload] + 20
            assert abs(until_ms - again_ms) <= 160
        stats = talk.call.stats()
        # Slots that a busy machine was too late for are silence; nothing else is.
        assert stats.gaps <= 1 or stats.gap_slots <= stats.missed_slots, stats


async def test_a_path_that_comes_back_is_used_again() -> None:
    """Three seconds without a packet: speech waits, then goes on with what was not heard; no second offer is needed."""
    async with over_a_path() as (talk, path, seen):
        packets = tones(10)
        talk.say(1, packets)
        await talk.until(lambda: talk.is_heard(1, 12_000))
        path.cut()
        await talk.until(lambda: bool(seen))
        told = talk.call.position(1).heard_samples
        await asyncio.sleep(0.5)
        assert talk.call.position(1).heard_samples == told < 480 * len(packets) - 4_800
        path.cut(False)
        await talk.until(lambda: talk.is_heard(1, 480 * len(packets)))
        assert [is_up for is_up, _ in seen] == [False, True]
        left = [slot.payload for slot in talk.slots if slot.stream == 1 and slot.ticks >= talk.call.sink.first_ticks(1)]
        assert set(left) == {packet.payload for packet in packets}


async def test_a_path_that_stays_gone_ends_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for ever, whether or not the listener could come back."""
    monkeypatch.setattr("breeze_rtc.transport.webrtc.LOST_S", 0.3)
    for can_return in (True, False):
        async with over_a_path(can_return=can_return) as (talk, path, seen):
            path.cut()
            await asyncio.wait_for(talk.call.closed.wait(), 10)
            assert talk.call.close_reason == "connection lost"
            assert len(seen) == 1


async def test_a_listener_who_may_return_is_waited_for() -> None:
    """It closes its connection, as a page does that makes another; speech goes on in the next one."""
    async with Conversation(can_return=True) as talk:
        packets = tones(8)
        talk.say(1, packets)
        await talk.until(lambda: talk.is_heard(1, 9_600))
        old, talk.listener = talk.listener, PythonListener()
        talk.listener.on_heard = old.on_heard
        await old.close()
        async with asyncio.timeout(10):
            while talk.call.stats().is_connected:  # noqa: ASYNC110 - it watches from outside
                await asyncio.sleep(0.01)
        await talk.connect()
        await talk.until(lambda: talk.is_heard(1, 480 * len(packets)))
        assert not talk.call.closed.is_set()


async def test_the_microphone_goes_on_over_the_next_connection() -> None:
    """Its packets have another source, sequence and clock there; to the agent it is one microphone, and one time."""
    async with Conversation(can_return=True, microphone=Microphone(tone(1.0))) as talk:
        blocks: list[Block] = []

        async def read(count: int) -> None:
            async with asyncio.timeout(20):
                async for block in talk.call.uplink():
                    blocks.append(block)
                    if len(blocks) == count:
                        return

        await read(30)
        old, talk.listener = talk.listener, PythonListener(microphone=Microphone(tone(1.0)))
        talk.listener.on_heard = old.on_heard
        await talk.listener.accept(await talk.call.answer(await talk.listener.offer()))
        await old.close()
        await read(100)
        sound = np.concatenate([block.samples for block in blocks[-25:]])
        assert np.abs(sound).max() > 0.2
        assert all(a.at_samples < b.at_samples for a, b in itertools.pairwise(blocks))
        tally = talk.call.stats().uplink
        assert tally.restarts == 1
        assert tally.used > 60


async def test_a_bad_second_offer_leaves_the_call_as_it_is() -> None:
    """It is refused with its reason, and the first connection goes on; a good one then replaces it."""
    async with Conversation(can_return=True) as talk:
        other = PythonListener()
        offer = await other.offer()
        with pytest.raises(PeerError) as caught:
            await talk.call.answer(replace(offer, sdp=offer.sdp.replace("a=setup:actpass", "a=setup:nonsense")))
        assert caught.value.code == "offer_malformed"
        heard = len(talk.listener.heard)
        await talk.until(lambda: len(talk.listener.heard) > heard + 3)
        # Two at once: one of them is answered.
        answers = await asyncio.gather(talk.call.answer(offer), talk.call.answer(offer), return_exceptions=True)
        (refused,) = (answer for answer in answers if isinstance(answer, PeerError))
        assert refused.code == "offer_pending"
        (answer,) = (answer for answer in answers if isinstance(answer, str))
        other.on_heard = talk.listener.on_heard
        await other.accept(answer)
        await talk.until(lambda: len(other.heard) > 3)
        await other.close()


async def test_candidates_are_taken_as_they_come() -> None:
    """A listener whose offer has none tells its addresses afterwards; nonsense is a peer's error, or ignored."""
    listener, call = PythonListener(), WebRtcCall()
    offer = await listener.offer()
    bare = re.sub(r"a=(candidate:|end-of-candidates).*\r\n", "", offer.sdp)
    answering = asyncio.create_task(call.answer(replace(offer, sdp=bare, id=3)))
    await asyncio.sleep(0)
    ice = call._transceiver.receiver.transport.transport
    for line in re.findall(r"a=(candidate:.*)\r\n", offer.sdp):  # They may come before the answer has left.
        await call.add_candidate(Candidate(line, id=3))
    assert {candidate.port for candidate in ice.getRemoteCandidates()} <= {
        candidate.port
        for candidate in listener._transceiver.receiver.transport.transport.iceGatherer.getLocalCandidates()
    }
    await listener.accept(await answering)
    await asyncio.wait_for(call.connected.wait(), 10)
    for line in ("candidate:1 1 udp 1 192.0.2.9", "nonsense", "candidate:a b udp c 1.2.3.4 d typ host"):
        with pytest.raises(PeerError) as caught:
            await call.add_candidate(Candidate(line, id=3))
        assert caught.value.code == "candidate_malformed"
    tcp, no_address = "1 tcp 1 192.0.2.9 9 typ host tcptype active", "1 udp 1 not-an-address 9 typ host"
    for line in ("", f"candidate:1 {tcp}", f"candidate:1 {no_address}"):
        await call.add_candidate(Candidate(line, id=3))
    for port in range(1, 60):
        await call.add_candidate(Candidate(f"candidate:1 1 udp 1 192.0.2.9 {port} typ host", id=3))
        await call.add_candidate(Candidate(f"candidate:1 1 udp 1 192.0.2.8 {port} typ host", id=7))
    assert len(ice.getRemoteCandidates()) == MAX_CANDIDATES
    assert "192.0.2.8" not in {candidate.ip for candidate in ice.getRemoteCandidates()}
    await call.close()
    await listener.close()


async def test_closing_is_possible_at_any_time() -> None:
    """Before the offer, while it is answered, twice at once, after the end."""
    early = WebRtcCall()
    await early.close()
    assert early.closed.is_set()
    with pytest.raises(PeerError):
        await early.answer(Offer("v=0", False))

    listener, call = PythonListener(), WebRtcCall()
    answering = asyncio.create_task(call.answer(await listener.offer()))
    await asyncio.sleep(0)
    await asyncio.gather(call.close(), call.close())
    with suppress(PeerError):
        await answering
    await call.close()
    assert call.closed.is_set()
    await listener.close()


async def test_nobody_who_calls_and_never_comes_is_waited_for() -> None:
    """An offer without a peer behind it ends the call after the set time."""
    listener, call = PythonListener(), WebRtcCall(connect_timeout_s=0.1)
    await call.answer(await listener.offer())
    await listener.close()
    await asyncio.wait_for(call.closed.wait(), 30)
    assert call.close_reason == "not connected in time"


async def test_a_broken_offer_is_a_peer_error() -> None:
    """However an offer is damaged, it is answered or refused; nothing else is raised and nothing stays behind."""
    listener = PythonListener()
    sdp = (await listener.offer()).sdp
    chance = random.Random(4)
    tasks = len(asyncio.all_tasks())
    codes = set()
    for _ in range(60):
        lines = sdp.split("\r\n")
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(len(lines))
            match chance.randrange(4):
                case 0:
                    del lines[at]
                case 1:
                    lines[at] = lines[at][: chance.randrange(len(lines[at]) + 1)]
                case 2:
                    lines[at] += chance.choice([" 1", "/0", ":x", " \u00e9", "\x00"])
                case _:
                    lines[at] = lines[at].replace("1", "99999999999")
        call = WebRtcCall()
        try:
            await call.answer(Offer("\r\n".join(lines), False))
        except PeerError as error:
            codes.add(error.code)
        await call.close()
    await listener.close()
    assert codes == {"offer_malformed"}
    assert await settled(tasks) <= tasks


async def settled(tasks: int, *, limit_s: float = 2.0) -> int:
    """How many tasks there are once no more than `tasks` are left; the libraries' own need a moment to end."""
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            while len(asyncio.all_tasks()) > tasks:  # noqa: ASYNC110 - no event tells of it
                await asyncio.sleep(0.005)
    return len(asyncio.all_tasks())


def rss_kb() -> float:
    gc.collect()
    return int(FilePath("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1024


def sockets() -> int:
    return sum(path.is_socket() for path in FilePath("/proc/self/fd").iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_forty_calls_leave_nothing_behind() -> None:
    """No task, no thread, no socket, no place with the ticker, no call object, and no memory to speak of.

    Reproduction 34 (livekit#2166, python-sdks#449).
    """
    gc.collect()  # sockets of earlier tests
    tasks, threads, opened, pacer = len(asyncio.all_tasks()), threading.active_count(), sockets(), Pacer()
    for number in range(40):
        if number == 15:  # Until then allocators and caches grow.
            start_kb = rss_kb()
        talk = Conversation(microphone=Microphone(tone(0.1)) if number % 2 else None, pacer=pacer)
        await talk.connect()
        talk.say(1, speech(0.1))
        async with asyncio.timeout(30):
            await talk.call.connected.wait()
        if number % 3 == 0:
            await talk.listener.close()
            await asyncio.wait_for(talk.call.closed.wait(), 30)
        else:
            await talk.call.close()
            await talk.listener.close()
    del talk
    assert await settled(tasks) == tasks
    # Both ends are in this process; `bench/media_capacity.py --cycles 200` has the figure of many more.
    assert (rss_kb() - start_kb) / 25 < 100
    # The default executor of the loop keeps its threads: aiortc's encoder runs there, on the listener's side.
    assert threading.active_count() <= threads + 6
    assert sockets() == opened
    assert pacer._phases.next_at() is None
    assert not [thing for thing in gc.get_objects() if isinstance(thing, WebRtcCall)]


def configuration(call: WebRtcCall) -> Any:
    return call._peer.connection._RTCPeerConnection__configuration  # type: ignore[attr-defined]


async def reconnect_forty_times(pacer: Pacer) -> None:
    async with Conversation(can_return=True, pacer=pacer) as talk:
        tasks, opened = await settled(0, limit_s=0.1), sockets()
        packets = tones(40)
        talk.say(1, packets)
        for number in range(40):
            if number == 20:  # Until then allocators and caches grow.
                start_kb = rss_kb()
            old, talk.listener = talk.listener, PythonListener()
            talk.listener.on_heard = old.on_heard
            offer = replace(await talk.listener.offer(), heard_rtp=rtp.add(old.heard[-1].rtp, 480))
            await talk.listener.accept(await talk.call.answer(offer))
            await old.close()
            talk.listener.start_reports(talk.call.report)
            await talk.until(talk.listener.played.is_set)
        assert (rss_kb() - start_kb) / 20 < 100
        await talk.until(lambda: talk.is_heard(1, 480 * len(packets)))
        assert await settled(tasks) <= tasks
        assert sockets() == opened


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_forty_connections_of_one_call_leave_nothing_behind() -> None:
    """Each takes the place of the one before, in mid-speech; in the end no task, no socket, no place with the ticker
    and no memory to speak of is left, and the speech has gone on through all of them."""
    gc.collect()
    tasks, opened, pacer = len(asyncio.all_tasks()), sockets(), Pacer()
    await reconnect_forty_times(pacer)
    assert await settled(tasks) == tasks
    assert sockets() == opened
    assert pacer._phases.next_at() is None
    async with asyncio.timeout(5):
        while [thing for thing in gc.get_objects() if isinstance(thing, WebRtcCall | Peer)]:
            gc.collect()
            await asyncio.sleep(0.05)  # aiortc's own last callbacks hold on to what they are about


async def test_the_answer_is_quick_asks_no_stun_server_and_offers_opus_alone() -> None:
    """No public server is asked behind the operator's back, and no codec we cannot send is agreed on."""
    listener, call = PythonListener(), WebRtcCall()
    offer = await listener.offer()
    before = clock.now()
    sdp = await call.answer(offer)
    assert clock.now() - before < SECOND
    assert "srflx" not in sdp
    assert [line for line in sdp.split("\r\n") if line.startswith("a=rtpmap")] == ["a=rtpmap:96 opus/48000/2"]
    assert "a=fmtp:96 minptime=20;stereo=0;useinbandfec=1;maxplaybackrate=16000;maxaveragebitrate=32000" in sdp
    assert configuration(call).iceServers == []
    await call.close()
    await listener.close()
    other = WebRtcCall(ice_servers=lambda: [IceServer(("turn:192.0.2.1",), "user", "secret")])
    assert configuration(other).iceServers[0].username == "user"
    await other.close()


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare, to have a machine with other addresses")
@pytest.mark.parametrize(
    "addresses",
    ["true", "ip addr add fd00::1/128 dev lo nodad && ip addr del 127.0.0.1/8 dev lo"],
    ids=["loopback only", "IPv6 only"],
)
def test_a_machine_with_few_addresses_can_call_itself(addresses: str) -> None:
    """On a laptop without a network, in a container without one, the call is set up over 127.0.0.1; and where there is
    no IPv4 at all, over IPv6."""
    call = "import asyncio, test_webrtc as t; asyncio.run(t.test_speech_waits_for_a_listener_who_plays())"
    done = subprocess.run(
        [
            *("unshare", "--net", "--map-root-user", "sh", "-c"),
            f"ip link set lo up && {addresses} && exec {sys.executable} -c '{call}'",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=FilePath(__file__).parent,
        check=False,
    )
    if "unshare:" in done.stderr or "ip:" in done.stderr:
        pytest.skip("this machine gives no network namespaces")
    assert done.returncode == 0, done.stderr
