"""The tone alphabet is read back exactly."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from breeze_rtc.media.opus import SpeechDecoder, SpeechEncoder
from breeze_rtc.testing import tones

RATE = 24_000


def test_every_symbol_survives_opus() -> None:
    """All 144, of 120 to 500 ms, with their places to 15 ms."""
    lengths = np.random.default_rng(1).uniform(0.12, 0.5, tones.SYMBOLS)
    pcm = np.concatenate([tones.sound(n, round(s * RATE), RATE) for n, s in enumerate(lengths)])
    encoder, decoder = SpeechEncoder(RATE), SpeechDecoder()
    packets = encoder.encode((pcm * 32_767).astype(np.int16)) + encoder.end()
    found = tones.read(np.concatenate([decoder.decode(packet.payload) for packet in packets]), 48_000)
    assert [tone.symbol for tone in found] == list(range(tones.SYMBOLS))
    ends = itertools.accumulate(lengths)
    assert [tone.end_s for tone in found] == pytest.approx([end - tones.PAUSE_S for end in ends], abs=0.03)


def test_silence_and_noise_hold_no_words() -> None:
    """Nothing is read into what is not tones."""
    noise = np.random.default_rng(1).standard_normal(48_000 * 3).astype(np.float32) * 0.2
    assert tones.read(np.zeros(48_000, np.float32), 48_000) == []
    assert tones.read(noise, 48_000) == []
