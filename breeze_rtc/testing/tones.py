"""A language of tones: a recording of it, from anywhere, is read back into words exactly.

Word number n of a call sounds as one of 12 low tones and one of 12 high tones together, for as long as a voice would
take to say it.  144 words in a row are told apart, neighbours always differ in both, and neither an Opus codec nor a
player that stretches time turns one into another.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

LOW_HZ = tuple(range(420, 420 + 12 * 60, 60))
HIGH_HZ = tuple(range(1_400, 1_400 + 12 * 110, 110))
SYMBOLS = len(LOW_HZ) * len(HIGH_HZ)
PAUSE_S = 0.02
"""Silence at the end of each word, inside its duration."""
_FADE_S = 0.005
_AMPLITUDE = 0.25
_NOISE = 0.02
_FAINTEST = 0.05
_WINDOW_S, _HOP_S = 0.03, 0.005
_SHORTEST_S = 0.045
"""A codec turns a piece of a word into another now and then (their sum is a tone as well), but for 40 ms at most."""
_HOLE_S = 0.02


@dataclass(frozen=True, slots=True)
class Tone:
    """One word's sound in a recording, without a break inside."""

    symbol: int
    start_s: float
    end_s: float


def pair(symbol: int) -> tuple[int, int]:
    """The two frequencies of a symbol, in Hz."""
    low = symbol % len(LOW_HZ)
    # The high tone moves too from word to word, by five places, which is prime to twelve.
    return LOW_HZ[low], HIGH_HZ[(symbol // len(LOW_HZ) + 5 * low) % len(HIGH_HZ)]


_SYMBOL = {pair(symbol): symbol for symbol in range(SYMBOLS)}


def sound(symbol: int, samples: int, rate: int) -> NDArray[np.float32]:
    """A word of `samples` at `rate`: (samples,) float32, its pause included."""
    t = np.arange(samples) / rate
    low, high = pair(symbol % SYMBOLS)
    tones = _AMPLITUDE * (np.sin(2 * np.pi * low * t) + np.sin(2 * np.pi * high * t))
    # Pure tones are what a speech codec is worst at when it must begin anew after a hole.
    tones += _NOISE * np.random.default_rng(symbol).standard_normal(samples)
    voiced_s = max(samples / rate - PAUSE_S, samples / rate / 2)
    return (tones * np.clip(np.minimum(t, voiced_s - t) / _FADE_S, 0, 1)).astype(np.float32)


def read(pcm: NDArray[np.int16] | NDArray[np.float32], rate: int) -> list[Tone]:
    """The words in a recording (N,), in order; a word with a break inside comes as several tones of one symbol.

    Times are right within about 10 ms.
    """
    samples = pcm.astype(np.float32) / (32_768 if pcm.dtype == np.int16 else 1)
    window, hop = round(_WINDOW_S * rate), round(_HOP_S * rate)
    if len(samples) < window:
        return []
    shape = np.hanning(window).astype(np.float32)
    frequencies = np.array([*LOW_HZ, *HIGH_HZ])
    waves = np.exp(-2j * np.pi * frequencies[:, None] * np.arange(window) / rate) * shape
    basis = np.concatenate([waves.real, waves.imag]).astype(np.float32).T * (2 / shape.sum())
    frames = sliding_window_view(samples, window)[::hop]
    both = frames @ basis
    levels = np.hypot(both[:, : len(frequencies)], both[:, len(frequencies) :])
    low, high = levels[:, : len(LOW_HZ)], levels[:, len(LOW_HZ) :]
    at_low, at_high = low.argmax(axis=1), high.argmax(axis=1)
    # One tone of each kind stands out: the window lies for its greater part in this word.
    is_word = _stands_out(low) & _stands_out(high)
    symbols = [
        _SYMBOL[LOW_HZ[a], HIGH_HZ[b]] if word else -1 for a, b, word in zip(at_low, at_high, is_word, strict=True)
    ]
    return _runs(symbols)


def _stands_out(levels: NDArray[np.float32]) -> NDArray[np.bool_]:
    best, second = np.partition(levels, -2, axis=1)[:, [-1, -2]].T
    stands_out: NDArray[np.bool_] = (best > _FAINTEST) & (best > 1.6 * second)
    return stands_out


def _runs(symbols: list[int]) -> list[Tone]:
    found: list[tuple[int, int, int]] = []
    for at, symbol in enumerate(symbols):
        if symbol < 0:
            continue
        if found and found[-1][0] == symbol and (at - found[-1][2]) * _HOP_S <= _HOLE_S:
            found[-1] = (symbol, found[-1][1], at + 1)
        else:
            found.append((symbol, at, at + 1))
    # A frame stands for the middle of its window.
    middle_s = (_WINDOW_S - _HOP_S) / 2
    tones = (Tone(s, first * _HOP_S + middle_s, last * _HOP_S + middle_s) for s, first, last in found)
    return [tone for tone in tones if tone.end_s - tone.start_s >= _SHORTEST_S]
