"""The words of a `ToneEngine` in a telephone's recording (8 kHz): each is 0.4 s of one of twelve tones."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from tone_engine import RATE, TONES_HZ, WORD

WORD_SAMPLES = WORD * 8_000 // RATE
HALF = 0.15
"""Of the strength of a tone."""


def levels(samples: NDArray[np.float32]) -> NDArray[np.float32]:
    """The strength of each tone in each 10 ms of a recording: (N, 12), by the 40 ms around it."""
    count = max(0, len(samples) // 80 - 3)
    if count == 0:
        return np.zeros((0, len(TONES_HZ)), np.float32)
    pieces = np.lib.stride_tricks.sliding_window_view(samples, 320)[: count * 80 : 80]
    waves = np.exp(-2j * np.pi * np.outer(np.arange(320), TONES_HZ) / 8_000) * np.hanning(320)[:, None] / 80
    return np.abs(pieces @ waves).astype(np.float32)


def words(samples: NDArray[np.float32]) -> tuple[int, float]:
    """How many words of a speech are in a recording, in order from its first, and the share of the last one.

    Its ends lie where the windows hold half of it, which is told to a few ms: a share never is more than 1.
    """
    strength = levels(samples)
    is_sound = strength.max(axis=1) > HALF
    tones = strength.argmax(axis=1)
    number, first, last = 0, -1, -1
    for at in np.flatnonzero(is_sound):
        if tones[at] == (number + 1) % len(TONES_HZ):
            number, first = number + 1, at
        if tones[at] == number % len(TONES_HZ):
            first, last = at if first < 0 else first, at
    if first < 0:
        return 1, 0.0
    own = strength[:, number % len(TONES_HZ)]
    begins = first - _crossing(own, first, -1)
    ends = last + _crossing(own, last, 1)
    return number + 1, float(min((ends - begins) * 80 / WORD_SAMPLES, 1.0))


def _crossing(level: NDArray[np.float32], at: int, step: int) -> float:
    """How many windows from `at`, towards `step`, the level falls to half: 0 to 1."""
    if not 0 <= at + step < len(level):
        return 0.0
    here, beyond = float(level[at]), float(level[at + step])
    return min(1.0, max(0.0, (here - HALF) / (here - beyond))) if here > beyond else 0.0


def sounds(samples: NDArray[np.float32]) -> NDArray[np.intp]:
    """The 10 ms of a recording in which a tone sounds; each stands for its middle, 20 ms on."""
    return np.flatnonzero(levels(samples).max(axis=1) > 0.02)


def begins(samples: NDArray[np.float32]) -> list[tuple[int, int]]:
    """Where each word of a speech begins in a recording: (word from 0, sample); words that cannot be told are left out.

    A word is told by three windows in a row that are of its tone; its beginning lies where the window that first has
    more of it than of the one before is centred.
    """
    strength = levels(samples)
    tones = np.where(strength.max(axis=1) > 0.02, strength.argmax(axis=1), -1)
    found: list[tuple[int, int]] = []
    number = -1
    for at in range(len(tones) - 2):
        if tones[at] >= 0 and tones[at] == tones[at + 1] == tones[at + 2]:
            step = (int(tones[at]) - number) % len(TONES_HZ)
            if 0 < step <= 3:
                number += step
                found.append((number, at * 80 + 160))
    return found
