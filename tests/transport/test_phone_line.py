"""A telephone line without a network: what is written to it, and what a session hears from it."""

from __future__ import annotations

import asyncio
import base64
import json

import numpy as np
import pytest

from breeze_rtc.clock import MS, SECOND, MonotonicClock
from breeze_rtc.media.line_codec import LineCodec
from breeze_rtc.media.opus import SpeechEncoder
from breeze_rtc.playback import SpeechPacket
from breeze_rtc.transport.caller import BLOCK, RATE, CallerVoice
from breeze_rtc.transport.carrier import Asterisk, Out, Telnyx
from breeze_rtc.transport.far_buffer import Clear, FarBuffer, Sound
from breeze_rtc.transport.phone import PhoneLine


class Hand:
    """A clock that is set."""

    def __init__(self) -> None:
        self.at = 0

    def now(self) -> int:
        return self.at


@pytest.mark.parametrize(("law", "silence"), [("ulaw", b"\xff"), ("alaw", b"\xd5"), ("slin", b"\0\0")])
async def test_what_cannot_be_decoded_is_twenty_milliseconds_of_the_lines_own_silence(law: str, silence: bytes) -> None:
    """Trap: an odd last chunk.  A broken packet, and a tail shorter than a piece: carriers play what they get, and 0x00
    is a bang in mu-law.

    Reproduction 29 (bolna#968): tails that one carrier refused for being shorter than 20 ms.
    """
    line = PhoneLine(Asterisk(), clock=MonotonicClock(), on_report=lambda report: None)
    line.receive(json.dumps({"event": "MEDIA_START", "format": law}))
    sent: list[Out] = []

    async def send(out: Out) -> None:
        sent.append(out)

    running = asyncio.create_task(line.run(send))
    line.write(1, (SpeechPacket(0, b"\xff\xff\xff"),))
    line.end(1)
    await asyncio.sleep(0.1)
    running.cancel()
    assert [out for out in sent if isinstance(out, bytes)] == [160 * silence]


@pytest.mark.parametrize("law", ["ulaw", "alaw"])
async def test_a_tail_of_seven_milliseconds_is_sent_as_twenty(law: str) -> None:
    """Reproduction 29 (bolna#968): what is sent is whole pieces, and after the sound they hold silence in the line's
    own code."""
    line = PhoneLine(Asterisk(), clock=MonotonicClock(), on_report=lambda report: None)
    line.receive(json.dumps({"event": "MEDIA_START", "format": law}))
    encoder = SpeechEncoder(24_000)
    tone = (8_000 * np.sin(2 * np.pi * 440 * np.arange(24 * 107) / 24_000)).astype(np.int16)
    line.write(1, (*encoder.encode(tone), *encoder.end()))
    line.end(1)
    codec = LineCodec({"ulaw": "PCMU", "alaw": "PCMA"}[law])
    sound = [packet for out in line.sink.due(0) if isinstance(out, Sound) for packet in out.packets]
    frames = [line._written(1, packet, codec) for packet in sound]
    assert {len(frame) for frame in frames} == {160}
    heard = codec.decode(b"".join(frames)).astype(int)
    assert np.abs(heard[8 * 95 : 8 * 107]).max() > 5_000
    assert np.abs(heard[8 * 117 :]).max() < 500
    assert len(heard) >= 8 * 120


async def blocks_of(voice: CallerVoice) -> np.ndarray:
    voice.close()
    return np.concatenate([np.zeros(0, np.float32), *voice._blocks])


async def test_the_session_gets_sixteen_kilohertz_of_a_line_of_eight() -> None:
    """Trap: 8 kHz for voice activity.  A tone keeps its pitch, and what comes out is as long as what went in.

    Reproduction 30 (pipecat#3857): a turn model that was fed 8 kHz as if it were 16, and was silently wrong.
    """
    voice = CallerVoice(Hand())
    tone = (8_000 * np.sin(2 * np.pi * 1_000 * np.arange(8_000) / 8_000)).astype(np.int16)
    for at in range(0, len(tone), 160):
        voice.hear(tone[at : at + 160], 8_000)
    heard = await blocks_of(voice)
    assert len(heard) % BLOCK == 0
    assert RATE - 2 * BLOCK <= len(heard) <= RATE
    spectrum = np.abs(np.fft.rfft(heard))
    assert abs(np.argmax(spectrum) * RATE / len(heard) - 1_000) < 3


@pytest.mark.parametrize("piece", [80, 160, 172, 480])
async def test_a_callers_tone_has_no_hiss_however_it_is_cut(piece: int) -> None:
    """Reproduction 27 (pipecat#2070): resampling piece by piece hisses and ticks.  Beside the tone all is 60 dB below
    it, and pieces of any size give the same samples."""
    tone = (8_000 * np.sin(2 * np.pi * 1_000 * np.arange(16_000) / 8_000)).astype(np.int16)
    cut, whole = CallerVoice(Hand()), CallerVoice(Hand())
    whole.hear(tone, 8_000)
    for at in range(0, len(tone), piece):
        cut.hear(tone[at : at + piece], 8_000)
    heard, expected = await blocks_of(cut), await blocks_of(whole)
    assert np.array_equal(heard, expected)
    steady = heard[8_000:24_000] * np.blackman(16_000)
    spectrum = np.abs(np.fft.rfft(steady))
    spurs = np.delete(spectrum, range(995, 1_006))
    assert 20 * np.log10(spurs.max() / spectrum.max()) < -60


async def test_speech_that_stalls_on_its_way_out_loses_nothing_of_a_word() -> None:
    """Reproduction 26 (pipecat#5769), outwards: a stall of 250 ms in a word, 24 to 8 kHz.  The line gets a third of the
    samples, to the last, and the same ones as without the stall."""
    word = (8_000 * np.sin(2 * np.pi * 300 * np.arange(24_000) / 24_000)).astype(np.int16)
    encoder = SpeechEncoder(24_000)
    packets = (*encoder.encode(word), *encoder.end())

    async def written(stall_s: float) -> bytes:
        line = PhoneLine(Asterisk(), clock=MonotonicClock(), on_report=lambda report: None)
        line.sink = FarBuffer(lead_ns=10 * SECOND)
        line.receive(json.dumps({"event": "MEDIA_START", "format": "slin"}))
        sent: list[Out] = []

        async def send(out: Out) -> None:
            sent.append(out)

        running = asyncio.create_task(line.run(send))
        line.write(1, packets[:20])
        await asyncio.sleep(stall_s)
        line.write(1, packets[20:])
        line.end(1)
        async with asyncio.timeout(5):
            while sum(len(out) for out in sent if isinstance(out, bytes)) < 320 * len(packets):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        running.cancel()
        return b"".join(out for out in sent if isinstance(out, bytes))

    smooth, stalled = await written(0), await written(0.25)
    assert len(stalled) == 2 * len(packets) * 480 // 3
    assert stalled == smooth


def test_an_asterisk_with_three_faults_is_understood() -> None:
    """Reproduction 22 (asterisk#1304, #2006, #1712), by a script: sound before MEDIA_START, a flush after which no
    MEDIA_XON comes, an odd last frame.

    The early sound is heard, speech goes on after the flush, and what is sent is a whole number of frames.
    """
    clock = Hand()
    line = PhoneLine(Asterisk(), clock=clock, on_report=lambda report: None)
    line.receive(b"\xff" * 160)
    line.receive(json.dumps({"event": "MEDIA_START", "format": "ulaw"}))
    assert line.caller._until_ns == 20 * MS
    line.write(1, tuple(SpeechPacket(480 * at, b"\xff\xff\xff") for at in range(100)))
    line.receive(json.dumps({"event": "MEDIA_XOFF"}))
    assert not line.sink.due(clock.now())
    line.receive(json.dumps({"event": "MEDIA_XON"}))
    assert line.sink.due(clock.now())
    line.receive(json.dumps({"event": "MEDIA_XOFF"}))
    line.clear(1)
    line.write(2, (SpeechPacket(0, b"\xff\xff\xff"), SpeechPacket(480, b"")))
    line.end(2)
    clear, sound, *_ = line.sink.due(clock.now())
    assert (type(clear), type(sound)) == (Clear, Sound)
    assert isinstance(sound, Sound)
    frames = [line._written(2, packet, LineCodec("PCMU")) for packet in sound.packets]
    assert [len(frame) for frame in frames] == [160, 160]


async def test_a_line_that_stalls_within_a_word_loses_nothing_of_it() -> None:
    """250 ms without a packet, then all of them at once: every sample comes out once, and the tone has no break.

    Reproduction 26 (pipecat#5769): a resampler that forgot its state after 200 ms, and 50 to 100 ms of the word with
    it.
    """
    clock = Hand()
    voice, smooth = CallerVoice(clock), CallerVoice(Hand())
    tone = (8_000 * np.sin(2 * np.pi * 700 * np.arange(8_000) / 8_000)).astype(np.int16)
    for at in range(0, len(tone), 160):
        number = at // 160
        # Pieces 10 to 21 come together with piece 22.
        clock.at = (22 if 10 <= number < 22 else number) * 20 * MS
        voice.hear(tone[at : at + 160], 8_000)
        smooth.hear(tone[at : at + 160], 8_000)
    heard, expected = await blocks_of(voice), await blocks_of(smooth)
    # The stall is filled with silence, since nobody knew it for one; besides, the samples are the same.
    began = np.flatnonzero(heard[: len(expected)] != expected)[0]
    filled = (np.flatnonzero(heard[began:])[0] + 1) // BLOCK * BLOCK
    assert 200 <= filled * 1_000 / RATE <= 300
    joined = np.concatenate([heard[:began], heard[began + filled :]])
    assert len(joined) >= len(expected) - BLOCK
    assert np.array_equal(joined, expected[: len(joined)])
    assert voice.dropped_blocks == 0


@pytest.mark.parametrize(("encoding", "other"), [("PCMA", "PCMU"), ("PCMU", "PCMA")])
async def test_the_caller_is_read_by_the_law_that_the_start_names(encoding: str, other: str) -> None:
    """Trap: A-law.  Read as mu-law it is noise; reproduction 28 (dograh#256): a European line that was taken for an
    American one."""
    tone = (0.3 * np.sin(2 * np.pi * 440 * np.arange(8_000) / 8_000)).astype(np.float32)

    async def heard(said: str, written: str) -> np.ndarray:
        line = PhoneLine(Telnyx(), clock=Hand(), on_report=lambda report: None)
        start = {"media_format": {"encoding": said, "sample_rate": 8_000, "channels": 1}}
        line.receive(json.dumps({"event": "start", "stream_id": "T0", "start": start}))
        for number, at in enumerate(range(0, len(tone), 160)):
            payload = base64.b64encode(LineCodec(written).encode(tone[at : at + 160])).decode()
            media = {"track": "inbound", "chunk": str(number + 1), "payload": payload}
            line.receive(json.dumps({"event": "media", "stream_id": "T0", "media": media}))
        return (await blocks_of(line.caller))[2_000:14_000]

    def noise_share(samples: np.ndarray) -> float:
        spectrum = np.abs(np.fft.rfft(samples * np.blackman(len(samples)))) ** 2
        at = 440 * len(samples) // RATE
        return float(1 - spectrum[at - 5 : at + 6].sum() / spectrum.sum())

    assert noise_share(await heard(encoding, encoding)) < 1e-3
    assert noise_share(await heard(encoding, other)) > 0.1
