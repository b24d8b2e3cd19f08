"""A recording of a voice, in whatever format it comes, as the samples a reference encoder reads."""

from __future__ import annotations

import io
from collections.abc import Iterator

import av
import numpy as np
from numpy.typing import NDArray

from breeze_rtc.errors import BadRecording

LEAST_S, MOST_S = 1.0, 30.0
LEAST_RATE, MOST_RATE = 16_000, 192_000
SILENCE = 1e-3
"""RMS below which nobody speaks: -60 dB of full scale."""


def read_recording(data: bytes, sample_rate: int) -> NDArray[np.float32]:
    """A sound file (WAV, FLAC, Ogg, MP3 ...) -> mono samples at `sample_rate`, full scale 1.

    Channels are averaged; nothing is trimmed and no level is changed, as the published models were trained.
    Raises BadRecording, with the reason, for what is no sound, too short or long, silent, of telephone quality, or
    holds values that are not finite.
    """
    try:
        with av.open(io.BytesIO(data), "r") as container:
            if not container.streams.audio:
                raise BadRecording("the file holds no sound")
            stream = container.streams.audio[0]
            rate = stream.rate
            if not LEAST_RATE <= rate <= MOST_RATE:
                raise BadRecording(
                    f"the recording has a sample rate of {rate} Hz; it must be {LEAST_RATE} to {MOST_RATE}, "
                    "and as it was recorded: raising the rate afterwards brings nothing back"
                )
            mono = np.concatenate([np.zeros(0, np.float32), *_mono(container.decode(stream), rate)])
    except av.FFmpegError as error:
        raise BadRecording(f"the file cannot be read as sound ({error.strerror}); send WAV or FLAC") from error
    if not np.isfinite(mono).all():
        raise BadRecording("the recording holds samples that are not finite")
    seconds = mono.size / rate
    if not LEAST_S <= seconds <= MOST_S:
        raise BadRecording(
            f"the recording lasts {'more than ' if seconds > MOST_S else ''}{min(seconds, MOST_S):.1f} s; "
            f"it must be {LEAST_S:g} to {MOST_S:g} s, and 5 to 15 are best"
        )
    if np.sqrt(np.mean(np.square(mono, dtype=np.float64))) < SILENCE:
        raise BadRecording("the recording is silent")
    if rate == sample_rate:
        return mono
    resampler = av.AudioResampler(format="flt", layout="mono", rate=sample_rate)
    frame = av.AudioFrame.from_ndarray(mono[None], format="flt", layout="mono")
    frame.sample_rate = rate
    pieces = [piece.to_ndarray()[0] for part in (frame, None) for piece in resampler.resample(part)]
    return np.concatenate(pieces)


def _mono(frames: Iterator[av.AudioFrame], rate: int) -> Iterator[NDArray[np.float32]]:
    """The mean of the channels, up to a little more than is allowed."""
    to_float: av.AudioResampler | None = None
    samples = 0
    for frame in frames:
        # Of floats the bits are kept; the resampler only changes their type here.
        to_float = to_float or av.AudioResampler(format="fltp", layout=frame.layout, rate=rate)
        for piece in to_float.resample(frame):
            samples += piece.samples
            yield piece.to_ndarray().mean(0, dtype=np.float32)
        if samples > MOST_S * rate + rate:
            return
