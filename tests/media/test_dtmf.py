from __future__ import annotations

import numpy as np
import pytest

from breeze_rtc.media import dtmf


@pytest.mark.parametrize("rate", [8_000, 24_000])
@pytest.mark.parametrize("key", dtmf.KEYS)
def test_each_key_is_its_own_pair_of_tones(key: str, rate: int) -> None:
    """ITU-T Q.23 table 1, as loud as each other, and nothing else above -30 dB beside them."""
    pairs = {"1": (697, 1_209), "5": (770, 1_336), "9": (852, 1_477), "0": (941, 1_336), "D": (941, 1_633)}
    sound = dtmf.tones(key, rate).astype(np.float64)
    spectrum = np.abs(np.fft.rfft(sound, rate))  # One bin for each Hz.
    peaks = sorted(int(hz) for hz in np.argsort(spectrum)[::-1][:2] if spectrum[hz] > spectrum.max() / 2)
    row, column = divmod(dtmf.KEYS.index(key), 4)
    low, high = dtmf.ROWS_HZ[row], dtmf.COLUMNS_HZ[column]
    assert pairs.get(key, (low, high)) == (low, high)
    assert 0.9 < spectrum[low] / spectrum[high] < 1.1
    assert min(spectrum[low], spectrum[high]) > 0.95 * max(spectrum[peaks])


def test_keys_follow_one_another_with_a_pause_between() -> None:
    """Two of one key are two."""
    sound = np.abs(dtmf.tones("11", 8_000)).reshape(-1, 80).max(axis=1) > 100
    assert np.count_nonzero(np.diff(sound.astype(int)) == 1) == 2
    assert len(dtmf.tones("11", 8_000)) == 8_000 * (2 * dtmf.TONE_S + 3 * dtmf.PAUSE_S)
