"""The keys of a telephone, and the tones they have always been: two at once, in the sound itself (ITU-T Q.23)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

KEYS = "123A456B789C*0#D"
"""Row by row."""
ROWS_HZ = (697, 770, 852, 941)
COLUMNS_HZ = (1_209, 1_336, 1_477, 1_633)
TONE_S = PAUSE_S = 0.1
"""Receivers take 40 ms of each (ITU-T Q.24); machines that listen by software like more."""
_RAMP_S = 0.005
_AMPLITUDE = 0.22
"""Of each of the two: -10 dBm0 together, about what a telephone sends."""


def tones(keys: str, sample_rate: int) -> NDArray[np.int16]:
    """What pressing `keys` one after another sounds like, (N,): a tone and a pause for each."""
    time = np.arange(round(TONE_S * sample_rate)) / sample_rate
    ramp = np.minimum(1, np.minimum(time, time[::-1]) / _RAMP_S)
    pieces = [np.zeros(round(PAUSE_S * sample_rate))]
    for key in keys:
        row, column = divmod(KEYS.index(key), 4)
        pair = np.sin(2 * np.pi * ROWS_HZ[row] * time) + np.sin(2 * np.pi * COLUMNS_HZ[column] * time)
        pieces += [_AMPLITUDE * ramp * pair, np.zeros(round(PAUSE_S * sample_rate))]
    return (32_767 * np.concatenate(pieces)).astype(np.int16)
