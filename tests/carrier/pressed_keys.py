"""Which keys a recording has the tones of (ITU-T Q.23)."""

from __future__ import annotations

import numpy as np

from breeze_rtc.media import dtmf


def keys_heard(pcm: bytes) -> str:
    """The keys whose tones are in a recording at 8 kHz, 40 ms at a time."""
    samples = np.frombuffer(pcm, "<i2").astype(np.float32) / 32_768
    pieces = samples[: len(samples) // 320 * 320].reshape(-1, 320) * np.hanning(320)
    hz = (*dtmf.ROWS_HZ, *dtmf.COLUMNS_HZ)
    waves = np.exp(-2j * np.pi * np.outer(np.arange(320), hz) / 8_000) / 80
    levels = np.abs(pieces @ waves)
    heard = ""
    before = ""
    for level in levels:
        row, column = int(level[:4].argmax()), int(level[4:].argmax())
        is_key = min(level[row], level[4 + column]) > 0.1 and np.partition(level, -3)[-3] < 0.05
        key = dtmf.KEYS[4 * row + column] if is_key else ""
        heard += key if key != before else ""
        before = key
    return heard
