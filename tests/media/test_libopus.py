"""The decoder, against PyAV's own encoder and decoder."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from breeze_rtc.media.libopus import Decoder
from breeze_rtc.media.opus import SILENCE_PACKET, SpeechEncoder, has_fec, packet_ticks


def voice(seconds: float) -> NDArray[np.int16]:
    """Something that libopus takes for speech: a buzz whose pitch and loudness move, 16 kHz."""
    t = np.arange(round(16_000 * seconds)) / 16_000
    phase = 2 * np.pi * np.cumsum(120 + 30 * np.sin(2 * np.pi * 1.3 * t)) / 16_000
    buzz = sum(np.sin(k * phase) / k for k in range(1, 12)) * (0.55 + 0.45 * np.sin(2 * np.pi * 2.1 * t))
    return (buzz * 6_000).astype(np.int16)


def encoded(pcm: NDArray[np.int16], *, fec: bool) -> list[bytes]:
    """As a browser does it for our answer: wide band, 32 kb/s, 20 ms."""
    codec = av.CodecContext.create("libopus", "w")
    codec.sample_rate, codec.layout, codec.format, codec.bit_rate = 16_000, "mono", "s16", 32_000
    codec.time_base = Fraction(1, 16_000)
    codec.options = {"application": "voip", "frame_duration": "20", "fec": str(int(fec)), "packet_loss": "15"}
    codec.open()
    packets: list[bytes] = []
    for start in range(0, len(pcm) - 319, 320):
        frame = av.AudioFrame.from_ndarray(pcm[None, start : start + 320], format="s16", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = 16_000, start, Fraction(1, 16_000)
        packets += [bytes(packet) for packet in codec.encode(frame)]
    return packets


def error(one: NDArray[np.float32], two: NDArray[np.float32]) -> float:
    """Difference against loudness."""
    return float(np.sqrt(np.mean((one - two) ** 2) / np.mean(two**2)))


def test_sound_comes_out_at_16_khz_as_it_went_in() -> None:
    """Level and shape survive, a few milliseconds later."""
    pcm = voice(1.0).astype(np.float32) / 32_768
    decoder = Decoder(16_000)
    sound = np.concatenate([decoder.decode(packet) for packet in encoded(voice(1.0), fec=False)])
    assert (sound.dtype, sound.size) == (np.dtype(np.float32), 16_000)
    alike = [float(np.corrcoef(sound[k : k + 12_000], pcm[:12_000])[0, 1]) for k in range(320)]
    assert max(alike) > 0.7  # its high-pass filter turns the phase of the lowest tones
    assert abs(np.linalg.norm(sound) / np.linalg.norm(pcm) - 1) < 0.1


def test_redundancy_is_closer_to_what_was_lost_than_a_guess() -> None:
    """One packet in seven is lost; both fill the same length, and what follows is as if nothing had happened."""
    *packets, last = encoded(voice(4.0), fec=True)
    whole, guess, copy = Decoder(16_000), Decoder(16_000), Decoder(16_000)
    errors: dict[str, list[float]] = {"guess": [], "copy": []}
    for k, (payload, following) in enumerate(pairwise([*packets, last])):
        truth = whole.decode(payload)
        if k % 7 != 3 or not has_fec(following):
            guess.decode(payload)
            copy.decode(payload)
            continue
        guessed, copied = guess.conceal(320), copy.recover(following, 320)
        assert truth.shape == guessed.shape == copied.shape == (320,)
        errors["guess"].append(error(guessed, truth))
        errors["copy"].append(error(copied, truth))
    assert len(errors["copy"]) > 15
    assert np.median(errors["copy"]) < 0.5 * np.median(errors["guess"])


def test_a_guess_fades_away() -> None:
    """A hundred milliseconds after the last packet there is next to nothing."""
    decoder = Decoder(16_000)
    for payload in encoded(voice(1.0), fec=False):
        last = decoder.decode(payload)
    fading = [float(np.abs(decoder.conceal(320)).max()) for _ in range(8)]
    assert fading[-1] < 0.2 * float(np.abs(last).max())


@pytest.mark.parametrize("payload", [b"", b"\x03", b"\xff\xff", bytes([0x4B, 0x07])])
def test_what_is_no_opus_is_refused(payload: bytes) -> None:
    """By the length of its sound and by the decoder alike."""
    assert packet_ticks(payload) is None
    assert payload == b"" or Decoder(16_000).decode(payload) is None


def test_the_length_of_a_packet_is_in_its_first_bytes() -> None:
    """The same that the decoder finds."""
    decoder = Decoder(48_000)
    packets = [
        *encoded(voice(0.2), fec=True),
        *(p.payload for p in SpeechEncoder().end()),
        SILENCE_PACKET,
        b"\x48",
        b"\x08\x00",
    ]
    packets += [bytes([config << 3]) + b"\x55" * 30 for config in range(32)]
    packets += [bytes([config << 3 | 3, 2]) + b"\x55" * 30 for config in range(32)]
    for payload in packets:
        sound, ticks = decoder.decode(payload), packet_ticks(payload)
        assert (None if sound is None else sound.size) == ticks, payload[:2].hex()


def test_whether_redundancy_is_there_is_in_the_second_byte() -> None:
    """libopus's own word for it is `opus_packet_has_lbrr`."""
    from breeze_rtc.media.libopus import _libopus

    packets = encoded(voice(2.0), fec=True) + encoded(voice(0.5), fec=False)
    told = [bool(_libopus().opus_packet_has_lbrr(payload, len(payload))) for payload in packets]
    assert [has_fec(payload) for payload in packets] == told
    assert any(told)
    assert not all(told)


def test_sixteen_bits_are_the_same_sound() -> None:
    """To half a step of 16 bits, at a line's 8 kHz; what is no packet is none."""
    packets = SpeechEncoder(16_000).encode(voice(1.0))
    one, two = Decoder(8_000), Decoder(8_000)
    for packet in packets:
        floats, shorts = one.decode(packet.payload), two.decode_int16(packet.payload)
        assert floats is not None
        assert shorts is not None
        assert np.abs(shorts - floats * 32_768).max() <= 0.51
    assert two.decode_int16(b"\xff\xff\xff") is None
