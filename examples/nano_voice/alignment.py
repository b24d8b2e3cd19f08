"""How the teacher says a text, when each of its words ends there, and the same moments in another reading of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from corpus import trim
from data import LEXICON, PIECE, Teacher, band_matrix, joined, read, unknown_reader
from hibari import Hibari
from numpy.typing import NDArray

from breeze_rtc.models.pronunciation import Lexicon

RATE = 24_000
HOP = 240
_FLOOR = -8.0  # log amplitude: what is below is silence


@dataclass(frozen=True)
class Reading:
    """One text as the teacher says it."""

    pcm: NDArray[np.float32]
    words: list[tuple[int, float]]
    """(characters of the text up to the end of the word, second at which it ends)."""


class Reader:
    def __init__(self, work: Path) -> None:
        self._teacher = Teacher(work)
        self._lexicon = Lexicon.load(LEXICON)
        self._unknown = unknown_reader()

    def read(self, text: str) -> Reading:
        """Sentence after sentence, as the teacher speaks long texts itself."""
        sounds: list[NDArray[np.float32]] = []
        words: list[tuple[int, float]] = []
        chars = samples = 0
        for sentence in Hibari.split_sentences(text):
            chars = text.index(sentence, chars)
            items = read(sentence, self._lexicon, self._unknown)
            phonemes = joined(items)
            features, units, sound = self._teacher.speak(phonemes)
            trimmed = trim(features, {"units": units, "items": items})
            assert trimmed is not None, "the teacher said nothing"
            _, ends, first = trimmed
            spans = [piece for piece in PIECE.finditer(sentence) if piece.group()[0].isalpha()]
            spoken = [end[-1] for (written, _), end in zip(items, ends, strict=True) if written[0].isalpha()]
            words += [
                (chars + span.end(), samples / RATE + (first + end) / 100)
                for span, end in zip(spans, spoken, strict=True)
            ]
            sounds.append(sound)
            chars += len(sentence)
            samples += len(sound)
        return Reading(np.concatenate(sounds), words)


def spectrum(pcm: NDArray[np.float32], bands: int = 40) -> NDArray[np.float32]:
    """Log amplitudes (T, bands) in mel bands; row t is centred on sample 240 t."""
    window = np.hanning(600).astype(np.float32)
    padded = np.pad(pcm, 300)
    frames = np.lib.stride_tricks.sliding_window_view(padded, 600)[::HOP] * window
    power = np.abs(np.fft.rfft(frames, 1024)) ** 2 / np.square(window).sum()
    out: NDArray[np.float32] = np.maximum(np.log(power @ band_matrix(bands, 513).T + 1e-9) / 2, _FLOOR)
    return out


def span(rows: NDArray[np.float32]) -> tuple[int, int]:
    """First row with sound and the row after the last."""
    loud = np.flatnonzero(rows.max(1) > -6.0)
    return (int(loud[0]), int(loud[-1]) + 1) if len(loud) else (0, 0)


def warp(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> NDArray[np.float64]:
    """For every row of `theirs` the row of `ours` it lies on, on the cheapest monotone path (dynamic time warping)."""
    squares = np.square(theirs).sum(1)[:, None] + np.square(ours).sum(1) - 2 * theirs @ ours.T
    cost = np.sqrt(np.maximum(squares, 0))
    rows, columns = cost.shape
    total = np.full((rows + 1, columns + 1), np.inf)
    total[0, 0] = 0
    for i in range(1, rows + 1):
        # line[j] = cost[j] + min(above[j], line[j - 1]), for all j at once.
        above = np.minimum(total[i - 1, :-1], total[i - 1, 1:])
        spent = np.cumsum(cost[i - 1])
        total[i, 1:] = np.minimum.accumulate(above - (spent - cost[i - 1])) + spent
    places: list[list[int]] = [[] for _ in range(rows)]
    i, j = rows, columns
    while i > 0 and j > 0:
        places[i - 1].append(j - 1)
        step = int(np.argmin((total[i - 1, j - 1], total[i - 1, j], total[i, j - 1])))
        i, j = (i - 1, j - 1) if step == 0 else (i - 1, j) if step == 1 else (i, j - 1)
    return np.array([np.mean(place) if place else 0.0 for place in places])
