"""hibari's sound in pieces, and our text in its phonemes.  Needs the `hibari` extra."""

from __future__ import annotations

import random

import numpy as np
import pytest

from breeze_rtc.models.pronunciation import VOCABULARY
from breeze_rtc.models.speech_model import SpeechModel, TextSegment

pytest.importorskip("hibari", reason="hibari-tts is missing: pip install 'breeze-rtc[hibari]'")
from hibari import Hibari as Original
from hibari import dsp

from breeze_rtc.models.hibari import Hibari, Sentence


@pytest.fixture(scope="module")
def hibari() -> Hibari:
    return Hibari()


@pytest.fixture(scope="module")
def nano() -> SpeechModel:
    return SpeechModel.load("nano")


def segments(hibari: Hibari, nano: SpeechModel, text: str) -> list[TextSegment]:
    frontend = hibari.frontend(nano.frontend())
    return frontend.push(text) + frontend.end()


def read(hibari: Hibari, nano: SpeechModel, text: str) -> Sentence:
    (segment,) = segments(hibari, nano, text)
    return hibari.read(segment.tokens, 7)


class Frames:
    """Noise in hibari's order, all frames at once, of a generator that makes it frame by frame."""

    def standard_normal(self, shape: tuple[int, int], dtype: type) -> np.ndarray:
        bins, doubled = shape
        by_frame = np.random.default_rng(7).standard_normal((doubled // 2, 2 * bins), dtype=dtype)
        return np.ascontiguousarray(by_frame.view(np.complex64).T).view(np.float32)


def test_pieces_are_what_hibari_says_whole(hibari: Hibari, nano: SpeechModel) -> None:
    """From the first sound on, with the same noise, whatever the pieces: equal to rounding."""
    text = "The train to the coast leaves at nine from platform four."
    (segment,) = segments(hibari, nano, text)
    original = Original()
    feeds = {"ids": np.asarray([[0, *segment.tokens, 0]], np.int64), "speed": np.ones(1, np.float32)}
    *branches, pitch = (output[0] for output in original.sess.run(None, feeds))
    sentence = read(hibari, nano, text)
    first = len(pitch) - sentence.samples // dsp.HOP
    assert 0 < first * dsp.HOP < 0.4 * dsp.SR
    expected = dsp.synth(*(branch[:, first:] for branch in branches), pitch[first:], Frames())
    pick, pieces = random.Random(3), []
    while sum(map(len, pieces)) < sentence.samples:
        pieces.append(sentence.sound(pick.choice([1, 300, 960, 5_000])))
    sound = np.concatenate(pieces)
    assert np.abs(expected).max() > 0.1
    assert np.abs(sound[: len(expected)] - expected).max() < 1e-5
    assert not sound[len(expected) :].any()


def test_pieces_do_not_matter(hibari: Hibari, nano: SpeechModel) -> None:
    """Bit for bit."""
    whole = read(hibari, nano, "Good morning.").sound(40_000)
    sentence = read(hibari, nano, "Good morning.")
    assert np.array_equal(np.concatenate([sentence.sound(1_000) for _ in range(40)]), whole)


def test_the_silence_before_a_sentence_is_short(hibari: Hibari, nano: SpeechModel) -> None:
    """Whoever waits for an answer hears it 80 ms in at the latest; nothing of it is cut."""
    for text in ("Hello there.", "Six?", "Fine, thanks.", "Perhaps."):
        sound = np.abs(read(hibari, nano, text).sound(12_000))
        assert sound[:480].max() < 0.005
        assert sound[:1_920].max() > 0.005


def test_every_token_has_phonemes_that_hibari_knows(hibari: Hibari) -> None:
    """Each of ours alone gives something to say; letters together are read as a word."""
    for token in range(1, VOCABULARY):
        translated = hibari.translated(TextSegment((token,), (3,)))
        assert translated.tokens
        assert translated.ends[-1] == 3
    word = TextSegment((8, 9, 2, 1, 18, 9), (0, 0, 0, 0, 0, 6))  # "hibari"
    assert len(hibari.translated(word).tokens) >= 5


def test_phonemes_end_in_order_and_words_where_they_sound(hibari: Hibari, nano: SpeechModel) -> None:
    """A word before a comma has ended when its sound has, not when the pause is over."""
    text = "Yes, please."
    (segment,) = segments(hibari, nano, text)
    sentence = read(hibari, nano, text)
    assert list(segment.ends) == sorted(segment.ends)
    assert sentence.ends == sorted(sentence.ends)
    assert len(sentence.ends) == len(segment.tokens)
    assert sentence.ends[-1] <= sentence.samples
    yes = sentence.ends[max(place for place, chars in enumerate(segment.ends) if chars == 3)]
    sound = sentence.sound(sentence.samples)
    assert np.abs(sound[yes - 1_200 : yes]).max() > 0.01
    assert np.abs(sound[yes + 300 : yes + 1_200]).max() < 0.01


@pytest.mark.parametrize(
    "text", ["$3.50 at 5 p.m.", "Zyxxqa Brumbleworth", "...", "NASA, e.g. https://a.io/b", "é 🙂 ok"]
)
def test_all_of_a_text_is_accounted_for(hibari: Hibari, nano: SpeechModel, text: str) -> None:
    """The last phoneme ends with the text, and what has words has many phonemes."""
    found = segments(hibari, nano, text)
    assert not found or found[-1].ends[-1] == len(text)
    phonemes = sum(len(segment.tokens) for segment in found)
    assert phonemes >= sum(char.isascii() and char.isalpha() for char in text) // 3
