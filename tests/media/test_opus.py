"""Opus packets carry the samples their positions name."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from breeze_rtc.media.libopus import Decoder
from breeze_rtc.media.opus import LOOK_AHEAD_48K, SILENCE_PACKET, SpeechDecoder, SpeechEncoder
from breeze_rtc.playback import SpeechPacket

RATE = 24_000


def voice(samples: int) -> np.ndarray:
    """A hum with an envelope: enough like speech for the codec to work as it does on speech."""
    t = np.arange(samples) / RATE
    return (6000 * np.sin(2 * np.pi * 150 * t) * (1.2 + np.sin(2 * np.pi * 3 * t)) / 2).astype(np.int16)


def vowel(seconds: float) -> np.ndarray:
    """A voice that sings one vowel, up and down: its pitch and formants are what a speech codec looks for."""
    t = np.arange(round(seconds * RATE)) / RATE
    phase = 2 * np.pi * np.cumsum(140 + 30 * np.sin(2 * np.pi * 1.3 * t)) / RATE
    formants = ((700, 130), (1_220, 180), (2_600, 300))
    level = [sum(np.exp(-(((140 * k - at) / width) ** 2)) for at, width in formants) + 0.02 for k in range(1, 60)]
    sound = sum(level[k - 1] * np.sin(k * phase) for k in range(1, 60))
    return (9_000 * sound / np.abs(sound).max() * (1.2 + np.sin(2 * np.pi * 3 * t)) / 1.2).astype(np.int16)


def decoded(packets: tuple[SpeechPacket, ...]) -> np.ndarray:
    decoder = SpeechDecoder()
    return np.concatenate([decoder.decode(packet.payload) for packet in packets])


def whole(pcm: np.ndarray) -> tuple[SpeechPacket, ...]:
    encoder = SpeechEncoder(RATE)
    return encoder.encode(pcm) + encoder.end()


@pytest.mark.parametrize("at", [480 * 10, 480 * 10 + 137, 480 * 20 - 1])
def test_a_marker_comes_out_where_the_positions_say(at: int) -> None:
    """A burst at media sample `at` leaves the decoder at `at` plus the look-ahead, within a millisecond."""
    pcm = np.zeros(480 * 30, np.int16)
    burst = np.arange(120)
    pcm[at : at + 120] = (16_000 * np.sin(2 * np.pi * 1000 * burst / RATE) * np.hanning(120)).astype(np.int16)
    packets = whole(pcm)
    sound = decoded(packets).astype(np.float64)
    # Correlate with the burst at 48 kHz: its centre is found to the sample, whatever the codec did to its edges.
    fine = np.arange(240)
    template = np.sin(2 * np.pi * 1000 * fine / 48_000) * np.hanning(240)
    found = int(np.argmax(np.correlate(sound, template, "valid")))
    assert abs(found - LOOK_AHEAD_48K - 2 * at) <= 48


def test_every_20_ms_makes_one_packet_at_once() -> None:
    """No frame waits in the encoder: packet k is there as soon as its 480 samples are."""
    encoder = SpeechEncoder(RATE)
    pcm = voice(480 * 12)
    for k in range(12):
        (packet,) = encoder.encode(pcm[480 * k : 480 * (k + 1)])
        assert packet.start_samples == 480 * k


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 1500), min_size=1, max_size=12))
def test_any_chunking_makes_the_same_packets(cuts: list[int]) -> None:
    """How the samples are cut does not show in the packets."""
    pcm = voice(sum(cuts))
    encoder = SpeechEncoder(RATE)
    packets: list[SpeechPacket] = []
    at = 0
    for samples in cuts:
        packets += encoder.encode(pcm[at : at + samples])
        at += samples
    assert tuple(packets) + encoder.end() == whole(pcm)


@pytest.mark.parametrize(("samples", "packets"), [(0, 0), (1, 1), (324, 1), (325, 2), (480, 2), (804, 2), (960, 3)])
def test_the_end_is_filled_with_silence_until_the_last_sample_is_out(samples: int, packets: int) -> None:
    """The last packet is whole, and the decoder gives all samples of the stream although it delays them."""
    assert len(whole(voice(samples))) == packets


def test_the_last_milliseconds_of_a_stream_are_heard() -> None:
    """A stream that is loud to its last sample is loud there after decoding."""
    pcm = voice(4800)
    sound = decoded(whole(pcm)).astype(np.float64)
    last = sound[LOOK_AHEAD_48K + 2 * 4800 - 240 : LOOK_AHEAD_48K + 2 * 4800]
    assert np.abs(last).max() > 0.5 * np.abs(pcm[-120:]).max()


def test_the_silence_packet_is_silent() -> None:
    """Alone it decodes to 20 ms of zeros; after speech the sound is gone with the second one."""
    assert not SpeechDecoder().decode(SILENCE_PACKET).any()
    decoder = SpeechDecoder()
    for packet in whole(voice(4800)):
        decoder.decode(packet.payload)
    silence = [decoder.decode(SILENCE_PACKET) for _ in range(3)]
    assert [piece.size for piece in silence] == [960, 960, 960]
    assert not silence[1].any()
    assert not silence[2].any()


def test_a_cut_in_mid_speech_does_not_click() -> None:
    """The silence packet is CELT, speech is not: decoders fade from one to the other, and are silent 5 ms later."""
    packets = whole(vowel(1.0))
    for cut in range(10, 45):
        decoder = SpeechDecoder()
        speech = [decoder.decode(packet.payload) for packet in packets[:cut]]
        after = np.concatenate([decoder.decode(SILENCE_PACKET) for _ in range(2)])
        sound = np.concatenate([*speech, after]).astype(np.int64)
        own_step = np.abs(np.diff(sound[960 : -after.size])).max()
        assert np.abs(np.diff(sound[-after.size - 2 :])).max() <= own_step
        assert np.abs(after[240:]).max() <= 2


def test_speech_goes_on_after_a_hole_as_if_there_had_been_none() -> None:
    """Behind half a second of silence the first packet is nearly as loud as without, and the next one is right.  An
    encoder that is not told has the decoder find its way for two packets."""
    pcm = vowel(2.0)
    levels: dict[bool, list[float]] = {True: [], False: []}
    errors: dict[bool, list[float]] = {True: [], False: []}
    for after_hole in (True, False):
        for first in range(20, 80, 4):
            encoder = SpeechEncoder(RATE)
            before = encoder.encode(pcm[: 480 * first])
            after = encoder.encode(pcm[480 * first :][:960], after_hole=after_hole)
            smooth, torn = Decoder(48_000), Decoder(48_000)
            for packet in before:
                smooth.decode(packet.payload)
                torn.decode(packet.payload)
            for _ in range(25):
                torn.decode(SILENCE_PACKET)
            (expected, heard), (expected_next, heard_next) = [
                (smooth.decode(packet.payload), torn.decode(packet.payload)) for packet in after
            ]
            levels[after_hole].append(float(np.sqrt(np.square(heard).mean() / np.square(expected).mean())))
            difference = np.square(heard_next - expected_next).mean() / np.square(expected_next).mean()
            errors[after_hole].append(float(np.sqrt(difference)))
    print({told: (np.median(levels[told]), np.median(errors[told])) for told in levels})
    assert np.median(levels[True]) > 0.85 > np.median(levels[False])
    assert np.median(errors[True]) < 0.1 < np.median(errors[False])
