"""How sound is written on telephone lines: mu-law, A-law and plain samples.

The law tables are those of FFmpeg's own G.711 codecs, asked once for every value; from there on a packet is a look-up.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

_LAWS = {"PCMU": "pcm_mulaw", "PCMA": "pcm_alaw"}


@dataclass(frozen=True, slots=True)
class LineCodec:
    """One way to write mono sound: `PCMU`, `PCMA` (ITU-T G.711) or `L16`, at a rate in Hz."""

    name: str
    sample_rate: int = 8_000
    is_big_endian: bool = False
    """L16 only: network order (RFC 3551 section 4.5.11), which some carriers write and others do not."""

    def encode(self, samples: NDArray[np.float32]) -> bytes:
        """(N,) in [-1, 1] -> bytes; what lies beyond is clipped."""
        return self.write(np.clip(np.rint(samples * 32_768.0), -32_768, 32_767).astype(np.int16))

    def write(self, samples: NDArray[np.int16]) -> bytes:
        """(N,) int16 -> bytes."""
        if self.name == "L16":
            return samples.astype(">i2" if self.is_big_endian else "<i2", copy=False).tobytes()
        return _written(self.name)[samples.view(np.uint16)].tobytes()

    def decode(self, payload: bytes) -> NDArray[np.int16]:
        """Bytes -> (N,) int16.  Half a sample at the end is left out."""
        if self.name == "L16":
            whole = payload[: len(payload) // 2 * 2]
            return np.frombuffer(whole, ">i2" if self.is_big_endian else "<i2").astype(np.int16)
        return _read(self.name)[np.frombuffer(payload, np.uint8)]

    def silence(self, samples: int) -> bytes:
        """So many samples of nothing: 0xFF in mu-law, 0xD5 in A-law."""
        return self.encode(np.zeros(samples, np.float32))


@cache
def _written(law: str) -> NDArray[np.uint8]:
    """The code of each int16, by its bits taken for an unsigned number."""
    every = np.arange(1 << 16, dtype=np.uint16).view(np.int16)
    codec: Any = av.CodecContext.create(_LAWS[law], "w")
    codec.sample_rate, codec.layout, codec.format = 8_000, "mono", "s16"
    codec.time_base = Fraction(1, 8_000)
    frame = av.AudioFrame.from_ndarray(every[None], format="s16", layout="mono")
    frame.sample_rate, frame.pts, frame.time_base = 8_000, 0, codec.time_base
    packets = [*codec.encode(frame), *codec.encode(None)]
    return np.frombuffer(b"".join(bytes(packet) for packet in packets), np.uint8)


@cache
def _read(law: str) -> NDArray[np.int16]:
    """The sample of each code."""
    codec: Any = av.CodecContext.create(_LAWS[law], "r")
    codec.sample_rate, codec.layout = 8_000, "mono"
    frames = [*codec.decode(av.Packet(bytes(range(256)))), *codec.decode(None)]
    table: NDArray[np.int16] = np.concatenate([frame.to_ndarray().reshape(-1) for frame in frames])
    return table
