"""A microphone on the other side of a bad network, over real UDP, SRTP and RTCP."""

from __future__ import annotations

import asyncio
import random
import threading
import time
import wave
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop
from numpy.typing import NDArray
from python_listener import Microphone, PythonListener, clock

from breeze_rtc.clock import MS, VirtualClock
from breeze_rtc.media.opus import SpeechEncoder
from breeze_rtc.media.rtp import Packet
from breeze_rtc.transport.recording import CallRecording
from breeze_rtc.transport.uplink import BLOCK, Block, Uplink
from breeze_rtc.transport.webrtc import WebRtcCall

NOTE_S = 0.2
NOTES = [400 + 100 * k for k in range(15)]


async def recorded(blocks: AsyncIterator[Block], path: Path) -> AsyncGenerator[Block, None]:
    """The same blocks, written on the way."""
    recording = CallRecording(path)
    try:
        async for block in blocks:
            recording.caller(block, 0)
            yield block
    finally:
        recording.close()


def melody(seconds: float) -> NDArray[np.int16]:
    """A new note each 200 ms, so that every moment is known by its sound."""
    t = np.arange(round(48_000 * seconds)) / 48_000
    note = np.array(NOTES)[(t / NOTE_S).astype(int) % len(NOTES)]
    return (np.sin(2 * np.pi * note * t) * 10_000).astype(np.int16)


def note_of(sound: NDArray[Any]) -> int:
    spectrum = np.abs(np.fft.rfft(sound * np.hanning(sound.size)))
    return round(int(np.argmax(spectrum)) * 16_000 / sound.size / 100) * 100


class BadNetwork:
    """Stands between the transport and the receiver of a call: packet `k` is dropped, or held until a later one."""

    def __init__(self, call: WebRtcCall, *, lost: Callable[[int], bool], stall: range = range(0)) -> None:
        self.arrived_ns: list[int] = []
        """When each packet came, also those that it drops."""
        self.dropped = 0
        self._held: list[Packet] = []
        self._lost = lost
        self._stall = stall
        receiver: Any = call._transceiver.receiver
        self._take = receiver.take
        receiver.take = self._pass

    def _pass(self, packet: Packet) -> None:
        k = len(self.arrived_ns)
        self.arrived_ns.append(clock.now())
        if self._lost(k):
            self.dropped += 1
            return
        self._held.append(packet)
        if k not in self._stall:
            for held in self._held:
                self._take(held)
            self._held.clear()


@asynccontextmanager
async def connected(pcm: NDArray[np.int16]) -> AsyncIterator[tuple[WebRtcCall, PythonListener]]:
    call, listener = WebRtcCall(), PythonListener(microphone=Microphone(pcm))
    try:
        yield call, listener
    finally:
        await call.close()
        await listener.close()


async def meet(call: WebRtcCall, listener: PythonListener) -> None:
    await listener.accept(await call.answer(await listener.offer()))


async def test_five_percent_loss_costs_five_percent_and_no_delay(tmp_path: Path) -> None:
    """And 300 ms of standstill cost nothing.  Every packet that arrived is heard in its place, and the recording is as
    long as the call.  Reproduction 32 (aiortc#543, #775).
    """
    chance = random.Random(5)
    lost = {k for k in range(300) if 10 <= k < 200 and chance.random() < 0.05}
    async with connected(melody(6.0)) as (call, listener):
        network = BadNetwork(call, lost=lost.__contains__, stall=range(100, 115))
        await meet(call, listener)
        read_ns: list[int] = []
        path = tmp_path / "uplink.wav"
        async with asyncio.timeout(60), aclosing(recorded(call.uplink(), path)) as blocks:
            async for block in blocks:
                assert block.at_samples == len(read_ns) * BLOCK
                read_ns.append(clock.now())
                if len(read_ns) == 230:
                    break
        tally = call.stats().uplink
        assert network.dropped == len(lost) > 5
        assert tally.concealed_ticks + tally.recovered_ticks == 960 * len(lost)
        assert tally.late == tally.duplicate == tally.strange == tally.silent_ticks == 0
        assert tally.used >= 230 - len(lost)
        # From arrival to the reader.  In the middle nothing waits, and after the last loss and the standstill it is as
        # it was before; a busy machine adds what it likes to single blocks.
        delay_ms = (np.array(read_ns) - np.array(network.arrived_ns[: len(read_ns)])) / MS
        assert np.median(delay_ms[:90]) < 10
        assert np.median(delay_ms[200:]) < 10
        with wave.open(str(path)) as file:
            assert (file.getframerate(), file.getnchannels()) == (16_000, 2)
            sound = np.frombuffer(file.readframes(file.getnframes()), "<i2")[::2]
        assert sound.size == 230 * BLOCK
        notes = [note_of(sound[start + 800 : start + 2_400]) for start in range(0, sound.size - 3_200, 3_200)]
        # A guess may hit a note's edge; all the others are where they were played.
        wrong = sum(note != NOTES[k % len(NOTES)] for k, note in enumerate(notes))
        assert wrong <= 1


def test_the_same_under_uvloop(tmp_path: Path) -> None:
    """Which is what the server runs on; its timers are not asyncio's."""
    faults: list[dict[str, Any]] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: faults.append(context))
        await test_five_percent_loss_costs_five_percent_and_no_delay(tmp_path)

    uvloop.run(run())
    assert faults == []


async def test_the_sender_is_told_of_the_loss() -> None:
    """A browser adds redundancy by what the receiver reports say."""
    async with connected(melody(1.0)) as (call, listener):
        BadNetwork(call, lost=lambda k: k % 5 == 3)
        await meet(call, listener)
        async with asyncio.timeout(60):
            while True:
                stats = (await listener._transceiver.sender.getStats()).values()
                told = [s for s in stats if s.type == "remote-inbound-rtp" and s.packetsLost > 0]
                if told:
                    break
                await asyncio.sleep(0.1)
        assert told[0].fractionLost > 0


async def test_a_call_has_no_thread_of_its_own() -> None:
    """The one decoder there is belongs to the listener, which is aiortc as it comes."""
    async with connected(melody(1.0)) as (call, listener):
        await meet(call, listener)
        async with asyncio.timeout(60):
            await anext(aiter(call.uplink()))
            await listener.played.wait()
        assert [thread.name for thread in threading.enumerate()].count("audio-decoder") == 1


async def test_a_peer_that_invents_streams_makes_nothing_grow() -> None:
    """A thousand SSRCs: one is reported, one is routed."""
    async with connected(melody(1.0)) as (call, listener):
        await meet(call, listener)
        async with asyncio.timeout(60):
            await anext(aiter(call.uplink()))
        receiver: Any = call._transceiver.receiver
        for ssrc in range(1, 1_001):
            receiver.take(Packet(ssrc, ssrc, ssrc, b"\x48\0"))
        assert call.stats().uplink.strange == 1_000
        assert len(receiver.transport._rtp_router.ssrc_table) == 1
        assert len(receiver._RTCRtpReceiver__remote_streams) == 1


async def test_datagrams_of_strangers_change_nothing() -> None:
    """What our peer did not encrypt, or sent before, is nobody's packet; the call goes on."""
    async with connected(melody(2.0)) as (call, listener):
        await meet(call, listener)
        blocks = aiter(call.uplink())
        async with asyncio.timeout(60):
            await anext(blocks)
            protocols = call._transceiver.receiver.transport.transport._connection._protocols
            chance, stranger = random.Random(6), ("192.0.2.1", 9)
            for _ in range(500):
                for protocol in protocols:
                    protocol.datagram_received(bytes([chance.randrange(128, 192)]) + chance.randbytes(80), stranger)
                    protocol.datagram_received(chance.randbytes(chance.randrange(1, 4)), stranger)
            for _ in range(20):
                await anext(blocks)
        tally = call.stats().uplink
        assert tally.strange == tally.malformed == tally.late == 0
        assert not call.closed.is_set()


# --- without a network


class Feed:
    """An uplink whose packets come by hand."""

    def __init__(self, **options: Any) -> None:
        self.clock = VirtualClock()
        self.uplink = Uplink(self.clock, **options)
        self._payload = SpeechEncoder().encode(np.full(480, 3_000, np.int16))[0].payload
        self._sent = 0

    def packets(self, count: int, *, payload: bytes | None = None) -> None:
        for _ in range(count):
            payload = payload or self._payload
            self.uplink.receive(Packet(1, self._sent % 65_536, 960 * self._sent % 2**32, payload))
            self._sent += 1
            self.clock.advance(20 * MS)

    def skip(self, count: int) -> None:
        self._sent += count
        self.clock.advance(20 * count * MS)

    async def read(self) -> list[Block]:
        self.uplink.close()
        return [block async for block in self.uplink.blocks()]


async def test_an_unread_microphone_of_ten_minutes_takes_two_seconds_of_packets() -> None:
    """The oldest goes; what is read then says where it belongs.  Reproduction 33 (aiortc#554, #680)."""
    feed = Feed()
    feed.packets(30_000)
    blocks = await feed.read()
    assert len(blocks) == 100
    assert feed.uplink.dropped_ticks == 29_900 * 960
    assert blocks[0].at_samples == 29_900 * BLOCK


async def test_a_reader_that_comes_late_misses_nothing() -> None:
    """Whatever has to be loaded first, up to two seconds: the first packet is the first that is heard."""
    feed = Feed()
    feed.packets(80)
    assert [block.at_samples for block in await feed.read()] == [BLOCK * k for k in range(80)]


async def test_a_loop_that_stood_still_reads_before_it_gives_up() -> None:
    """A callback that computes for more than a second leaves packets in the socket; they are sound, not silence."""
    uplink = Uplink(clock)
    payload = SpeechEncoder().encode(np.full(480, 3_000, np.int16))[0].payload

    def arrive(numbers: range) -> None:
        for k in numbers:
            uplink.receive(Packet(1, k, 960 * k, payload))

    arrive(range(5))
    time.sleep(1.3)  # noqa: ASYNC251 - the stall is what is tested
    await asyncio.sleep(0.01)
    arrive(range(5, 70))
    await asyncio.sleep(0.1)
    assert (uplink.buffer.tally.used, uplink.buffer.tally.silent_ticks) == (70, 0)
    uplink.close()


async def test_a_recording_fills_what_was_not_read(tmp_path: Path) -> None:
    """Silence stands where a slow reader lost sound, so that what follows is in its place."""
    feed = Feed(limit_s=0.1)
    feed.packets(20)
    path = tmp_path / "slow.wav"
    feed.uplink.close()
    assert len([block async for block in recorded(feed.uplink.blocks(), path)]) == 5
    with wave.open(str(path)) as file:
        sound = np.frombuffer(file.readframes(file.getnframes()), "<i2")[::2]
    assert sound.size == 20 * BLOCK
    assert not sound[: 15 * BLOCK].any()
    assert sound[16 * BLOCK :].any()


async def test_a_recording_that_cannot_be_written_lets_the_sound_pass(tmp_path: Path) -> None:
    """The call is worth more."""
    feed = Feed()
    feed.packets(5)
    feed.uplink.close()
    assert len([block async for block in recorded(feed.uplink.blocks(), tmp_path / "missing" / "a.wav")]) == 5


async def test_packets_of_other_lengths_make_the_same_blocks() -> None:
    """10 and 60 ms: blocks are 20 ms all the same, and count on."""
    feed = Feed()
    ten_ms, sixty_ms = b"\x40\x55", bytes([0x58]) + b"\x55" * 40
    for k in range(7):
        feed.uplink.receive(Packet(1, k, 480 * k, ten_ms))
    for k in range(3):
        feed.uplink.receive(Packet(1, 7 + k, 480 * 7 + 2_880 * k, sixty_ms))
    blocks = await feed.read()
    assert [block.at_samples for block in blocks] == [BLOCK * k for k in range((7 * 10 + 3 * 60) // 20)]


async def test_a_new_stream_anywhere_keeps_the_blocks_in_step() -> None:
    """It begins where its arrival says, which is between two samples as likely as not."""
    feed = Feed()
    feed.packets(5)
    feed.clock.advance(700 * MS + 12_345)
    for k in range(5):
        feed.uplink.receive(Packet(2, 100 + k, 77_777 + 960 * k, b"\x48\x55"))
        feed.clock.advance(20 * MS)
    blocks = await feed.read()
    assert [block.at_samples for block in blocks] == [BLOCK * k for k in range(len(blocks))]
    assert len(blocks) == 5 + 35 + 5


async def test_a_corrupt_packet_is_a_guess() -> None:
    """It is counted; time goes on."""
    feed = Feed()
    feed.packets(5)
    feed.packets(1, payload=b"\x48" + bytes(1_276))  # a frame has 1275 bytes at the most
    feed.packets(5)
    assert len(await feed.read()) == 11
    assert feed.uplink.corrupt == 1


@pytest.mark.parametrize("close_first", [True, False])
async def test_the_reader_ends_with_the_call(close_first: bool) -> None:
    """Whether it waits already or comes later; what was there is still read."""
    feed = Feed()
    feed.packets(3)
    if close_first:
        feed.uplink.close()
        feed.packets(3)
    reading = asyncio.create_task(all_blocks(feed.uplink))
    await asyncio.sleep(0)
    feed.uplink.close()
    assert len(await asyncio.wait_for(reading, 5)) == 3


async def all_blocks(uplink: Uplink) -> list[Block]:
    return [block async for block in uplink.blocks()]
