"""Recordings of a voice: what is read of a sound file, and what is refused."""

from __future__ import annotations

import io
import struct
import wave

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from breeze_rtc.errors import BadRecording
from breeze_rtc.media.recording_file import read_recording


def tone(seconds: float = 2.0, rate: int = 24_000, level: float = 0.3) -> NDArray[np.float32]:
    return (level * np.sin(2 * np.pi * 220 * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def wav(sound: NDArray[np.float32], rate: int = 24_000, channels: int = 1) -> bytes:
    """16-bit PCM."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(channels)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes(np.rint(sound * 32_768).clip(-32_768, 32_767).astype("<i2").tobytes())
    return file.getvalue()


def float_wav(sound: NDArray[np.float32], rate: int = 24_000) -> bytes:
    data = sound.astype("<f4").tobytes()
    head = struct.pack("<4sI4s4sIHHIIHH", b"RIFF", 36 + len(data), b"WAVE", b"fmt ", 16, 3, 1, rate, rate * 4, 4, 32)
    return head + struct.pack("<4sI", b"data", len(data)) + data


def test_samples_are_what_they_were() -> None:
    """A mono file at the encoder's own rate comes out sample for sample."""
    sound = np.rint(tone() * 32_768).astype(np.float32) / 32_768
    assert np.array_equal(read_recording(wav(sound), 24_000), sound)
    assert np.array_equal(read_recording(float_wav(sound * 1.5), 24_000), sound * 1.5)


def test_channels_are_averaged() -> None:
    """A voice on the left alone is half as loud in the middle."""
    sound = np.rint(tone() * 32_768).astype(np.float32) / 32_768
    stereo = np.stack((sound, np.zeros_like(sound)), 1)
    assert np.allclose(read_recording(wav(stereo, channels=2), 24_000), sound / 2)


@pytest.mark.parametrize("rate", [16_000, 44_100, 48_000])
def test_other_rates(rate: int) -> None:
    """The same tone for the same time at the rate that is asked for."""
    heard = read_recording(wav(tone(rate=rate), rate), 24_000)
    assert abs(len(heard) - 48_000) <= 2
    middle = slice(4_000, 40_000)
    assert np.abs(heard[middle] - tone()[middle]).max() < 2e-3


def test_flac_and_other_containers() -> None:
    """What libav reads is read."""
    file = io.BytesIO()
    with av.open(file, "w", format="flac") as out:
        stream = out.add_stream("flac", rate=24_000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.rint(tone() * 32_767).astype(np.int16)[None], "s16", "mono")
        frame.rate = 24_000
        for packet in [*stream.encode(frame), *stream.encode(None)]:
            out.mux(packet)
    assert np.abs(read_recording(file.getvalue(), 24_000) - tone()).max() < 1e-3


NAN = tone()
NAN[30_000] = np.nan
ENDLESS = tone()
ENDLESS[7] = np.inf


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (wav(tone(0.9)), r"lasts 0\.9 s; it must be 1 to 30"),
        (wav(tone(31)), "lasts more than 30"),
        (wav(tone(400)), "lasts more than 30"),
        (wav(tone(level=0)), "silent"),
        (wav(tone(level=5e-4)), "silent"),
        (wav(tone(rate=8_000), 8_000), "sample rate of 8000 Hz"),
        (float_wav(NAN), "not finite"),
        (float_wav(ENDLESS), "not finite"),
        (wav(tone())[:44], "lasts 0"),
        (b"", "cannot be read"),
        (b"RIFF, they said", "cannot be read"),
        (bytes(range(256)) * 40, "cannot be read|holds no sound|lasts"),
    ],
    ids=[
        "short",
        "long",
        "very long",
        "zero",
        "faint",
        "telephone",
        "nan",
        "inf",
        "empty wav",
        "empty",
        "text",
        "bytes",
    ],
)
def test_what_is_refused(data: bytes, says: str) -> None:
    """No voice can be made of it, and why."""
    with pytest.raises(BadRecording, match=says):
        read_recording(data, 24_000)
