"""Change of sample rate for sound that arrives in pieces."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

import av
import numpy as np
from numpy.typing import NDArray


class Resampler:
    """Interleaved int16 PCM at one rate -> mono float32 at another, state kept between pieces.

    Law: however the input is cut, the samples that come out are the same.  The filter (libswresample's windowed sinc)
    holds back what it cannot finish yet: 16 samples of the slower rate, 1 ms at 16 kHz.
    """

    def __init__(self, source_rate: int, target_rate: int, *, channels: int = 1) -> None:
        self._source_rate = source_rate
        self._channels = channels
        self._time_base = Fraction(1, source_rate)
        # Source samples taken so far: the resampler pads with silence where timestamps jump, so it is told the truth.
        self._taken = 0
        self._resampler = av.AudioResampler(format="flt", layout="mono", rate=target_rate)

    def push(self, pcm: NDArray[np.int16]) -> NDArray[np.float32]:
        """Take the next samples, (N, channels) or (N * channels,) int16; return what is ready, (M,), M >= 0.

        Full scale is 1; the filter may overshoot it by a little.
        """
        # Mixed here: the resampler's own stereo to mono adds 3 dB when it works in floats.
        mono = pcm.reshape(-1) * np.float32(2**-15)
        if self._channels > 1:
            mono = mono.reshape(-1, self._channels).mean(axis=1, dtype=np.float32)
        if mono.size == 0:
            return np.zeros(0, np.float32)
        frame = av.AudioFrame("flt", "mono", mono.size)  # `from_ndarray` takes twice as long.
        frame.planes[0].update(mono.tobytes())
        frame.sample_rate = self._source_rate
        frame.time_base = self._time_base
        frame.pts = self._taken
        self._taken += mono.size
        return _joined(self._resampler.resample(frame))

    def end(self) -> NDArray[np.float32]:
        """No more samples will come: return what the filter held back, (M,)."""
        return _joined(self._resampler.resample(None)) if self._taken else np.zeros(0, np.float32)


def _joined(frames: Iterable[av.AudioFrame]) -> NDArray[np.float32]:
    pieces = [frame.to_ndarray().reshape(-1) for frame in frames if frame.samples]
    return np.concatenate([np.zeros(0, np.float32), *pieces])
