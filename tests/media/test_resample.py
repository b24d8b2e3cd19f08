"""Resampling in pieces is resampling at once."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from breeze_rtc.media.resample import Resampler


def stereo(samples: int) -> np.ndarray:
    """(N, 2) int16 noise, the channels unlike each other."""
    return np.random.default_rng(7).integers(-12_000, 12_000, (samples, 2)).astype(np.int16)


def resampled(pcm: np.ndarray, cuts: list[int]) -> np.ndarray:
    resampler = Resampler(48_000, 16_000, channels=2)
    pieces = [resampler.push(piece) for piece in np.split(pcm, cuts)]
    return np.concatenate([*pieces, resampler.end()])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 9_600), max_size=10))
def test_any_chunking_gives_the_same_samples(cuts: list[int]) -> None:
    """Bit for bit, pieces of no samples included."""
    pcm = stereo(9_600)
    assert np.array_equal(resampled(pcm, sorted(cuts)), resampled(pcm, []))


def test_nothing_is_lost_and_little_is_held_back() -> None:
    """A second makes a second, and while it streams at most 2 ms wait in the filter."""
    resampler = Resampler(48_000, 16_000, channels=2)
    got = 0
    for k, piece in enumerate(np.split(stereo(48_000), 50)):
        got += resampler.push(piece).size
        assert got >= 320 * (k + 1) - 32
    assert got + resampler.end().size == 16_000


def test_a_tone_keeps_its_pitch_level_and_time() -> None:
    """A 440 Hz tone on both channels comes out as it was, without delay."""
    t = np.arange(48_000) / 48_000
    tone = (8_192 * np.sin(2 * np.pi * 440 * t)).astype(np.int16)
    out = resampled(np.stack((tone, tone), axis=1), [])
    expected = 0.25 * np.sin(2 * np.pi * 440 * np.arange(16_000) / 16_000)
    assert np.abs(out[100:-100] - expected[100:-100]).max() < 0.002


def test_what_the_lower_rate_cannot_carry_is_gone() -> None:
    """A 12 kHz tone does not fold back into the speech band."""
    t = np.arange(48_000) / 48_000
    tone = (8_192 * np.sin(2 * np.pi * 12_000 * t)).astype(np.int16)
    assert np.abs(resampled(np.stack((tone, tone), axis=1), [])[100:-100]).max() < 0.003


def test_no_input_gives_no_output() -> None:
    """A microphone that never spoke ends in nothing."""
    assert Resampler(48_000, 16_000).end().size == 0
