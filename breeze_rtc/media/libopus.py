"""An Opus decoder that knows what was lost, and an encoder that can begin anew: libopus itself, through ctypes.

PyAV decodes Opus at 48 kHz only, and neither conceals a lost packet nor uses the copy of it that the next one may carry
(in-band FEC); nor can it tell an encoder which packets must be understood without the one before.  libopus does all
that, and PyAV's wheel brings it along (BSD licence), so nothing is added to install.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from functools import cache
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

_MAX_MS = 120
"""The longest Opus packet (RFC 6716 section 3.2.5)."""
_MAX_FRAME_BYTES = 1_275
"""Of one frame (RFC 6716 section 3.4)."""
# opus_defines.h
_VOIP = 2_048
_SET_BITRATE, _SET_COMPLEXITY, _SET_INBAND_FEC, _SET_PACKET_LOSS_PERC = 4_002, 4_010, 4_012, 4_014
_SET_PREDICTION_DISABLED = 4_042


class Decoder:
    """One stream's packets -> mono float32 at `sample_rate` (8, 12, 16, 24 or 48 kHz), in [-1, 1] and a little beyond.

    Decode in order, and tell of each loss where it happened: the decoder remembers.  Opus works at any of these rates
    inside, so 16 kHz costs less than 48 kHz and no resampler has to follow.
    """

    def __init__(self, sample_rate: int) -> None:
        self._lib = _libopus()
        self._sample_rate = sample_rate
        error = ctypes.c_int()
        self._state: int | None = self._lib.opus_decoder_create(sample_rate, 1, ctypes.byref(error))
        assert self._state, f"libopus makes no decoder for {sample_rate} Hz (error {error.value})"
        self._pcm = np.zeros(sample_rate * _MAX_MS // 1000, np.float32)
        self._pcm_address = self._pcm.ctypes.data

    def decode(self, payload: bytes) -> NDArray[np.float32] | None:
        """A packet that arrived -> (N,); None where it is no Opus packet."""
        return self._run(payload, len(self._pcm), fec=False)

    def decode_int16(self, payload: bytes) -> NDArray[np.int16] | None:
        """The same in 16 bits, as lines write it: what is beyond full scale is bent back softly."""
        pcm = np.empty(len(self._pcm), np.int16)
        count = self._lib.opus_decode(self._state, payload, len(payload), pcm.ctypes.data, len(pcm), 0)
        return pcm[:count] if count >= 0 else None

    def recover(self, next_payload: bytes, samples: int) -> NDArray[np.float32] | None:
        """The `samples` before the packet `next_payload`, from what it carries of them; concealed where it carries
        nothing.  That packet is decoded next.  None where it is no Opus packet."""
        return self._run(next_payload, samples, fec=True)

    def conceal(self, samples: int) -> NDArray[np.float32]:
        """The `samples` (a multiple of 2.5 ms, at most 120 ms) of a packet that is lost, guessed from what came before
        and fading away."""
        pcm = self._run(None, samples, fec=False)
        assert pcm is not None, f"libopus cannot conceal {samples} samples"
        return pcm

    def _run(self, payload: bytes | None, samples: int, *, fec: bool) -> NDArray[np.float32] | None:
        size = len(payload) if payload is not None else 0
        count = self._lib.opus_decode_float(self._state, payload, size, self._pcm_address, samples, fec)
        return self._pcm[:count].copy() if count >= 0 else None

    def __del__(self) -> None:
        if getattr(self, "_state", None):
            self._lib.opus_decoder_destroy(self._state)
            self._state = None


class Encoder:
    """One stream's frames, int16 mono at `sample_rate` (8, 12, 16, 24 or 48 kHz) -> packets, tuned for speech.

    bit_rate: per second, varied from packet to packet.  complexity: 0 to 10.  expected_loss: percent of the packets
    that will not arrive; above 2 or so each carries a coarse copy of the one before it, where it has room.
    """

    def __init__(self, sample_rate: int, *, bit_rate: int, complexity: int, expected_loss: int) -> None:
        self._lib = _libopus()
        error = ctypes.c_int()
        self._state: int | None = self._lib.opus_encoder_create(sample_rate, 1, _VOIP, ctypes.byref(error))
        assert self._state, f"libopus makes no encoder for {sample_rate} Hz (error {error.value})"
        self._is_alone = False
        self._packet = ctypes.create_string_buffer(_MAX_FRAME_BYTES)
        for request, value in (
            (_SET_BITRATE, bit_rate),
            (_SET_COMPLEXITY, complexity),
            (_SET_INBAND_FEC, int(expected_loss > 0)),
            (_SET_PACKET_LOSS_PERC, expected_loss),
        ):
            self._set(request, value)

    def encode(self, frame: NDArray[np.int16], *, stands_alone: bool = False) -> bytes:
        """One frame (N,) of 2.5, 5, 10, 20, 40 or 60 ms.

        stands_alone: it is understood almost as well by a decoder that has not heard the one before.
        """
        if stands_alone is not self._is_alone:
            self._is_alone = stands_alone
            self._set(_SET_PREDICTION_DISABLED, int(stands_alone))
        pcm = np.ascontiguousarray(frame, np.int16)
        size = self._lib.opus_encode(self._state, pcm.ctypes.data, len(pcm), self._packet, _MAX_FRAME_BYTES)
        assert size > 0, f"libopus does not encode {len(pcm)} samples (error {size})"
        return self._packet.raw[:size]

    def _set(self, request: int, value: int) -> None:
        error = self._lib.opus_encoder_ctl(self._state, request, ctypes.c_int(value))
        assert not error, f"libopus refuses request {request} with {value} (error {error})"

    def __del__(self) -> None:
        if getattr(self, "_state", None):
            self._lib.opus_encoder_destroy(self._state)
            self._state = None


@cache
def _libopus() -> Any:
    """The library in PyAV's wheel; the system's where PyAV was built from source."""
    folder = Path(av.__file__).parent
    inside = [*folder.parent.glob("av.libs/libopus*"), *folder.glob(".dylibs/libopus*")]
    path = str(inside[0]) if inside else ctypes.util.find_library("opus")
    if path is None:
        raise ImportError("libopus was not found, neither in PyAV's wheel nor on the system; install libopus0 or opus")
    # PyDLL keeps the interpreter's lock for the 30 us that a packet takes.  To give it up and get it back costs up to
    # 5 ms when another thread computes in Python.
    lib = ctypes.PyDLL(path)
    lib.opus_decoder_create.argtypes = [ctypes.c_int32, ctypes.c_int, ctypes.POINTER(ctypes.c_int)]
    lib.opus_decoder_create.restype = ctypes.c_void_p
    lib.opus_decoder_destroy.argtypes = [ctypes.c_void_p]
    lib.opus_decoder_destroy.restype = None
    lib.opus_decode.argtypes = lib.opus_decode_float.argtypes = [
        *(ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32),
        *(ctypes.c_void_p, ctypes.c_int, ctypes.c_int),
    ]
    lib.opus_encoder_create.argtypes = [ctypes.c_int32, ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_int)]
    lib.opus_encoder_create.restype = ctypes.c_void_p
    lib.opus_encoder_destroy.argtypes = [ctypes.c_void_p]
    lib.opus_encoder_destroy.restype = None
    # What follows is variadic.
    lib.opus_encoder_ctl.argtypes = [ctypes.c_void_p, ctypes.c_int]
    lib.opus_encode.argtypes = [
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int),
        *(ctypes.c_char_p, ctypes.c_int32),
    ]
    return lib
