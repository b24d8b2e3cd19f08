"""Training rows of the language model: utterances laid end to end, text and sound, as an agent speaks them.

A row is always full, so nothing is padded.  It may see the next sentence's text before it gets there or not, its
sentences may come in clauses, and some of its words are spelled: all that happens when text streams in.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from corpus import STEPS, Corpus, Utterance, pointer_path, tokens
from torch import Tensor

from breeze_rtc.models.pointer import LOOK_AHEAD
from breeze_rtc.models.pronunciation import PUNCTUATION

CLAUSE_MARKS = frozenset(PUNCTUATION[mark] for mark in ",;:")


@dataclass(frozen=True)
class Batch:
    features: Tensor
    """(B, 4 L, 162) float32."""
    segments: list[list[int]]
    """Tokens of all text segments of all rows; the encoder sees each by itself."""
    window: Tensor
    """(B, L, 3) int64 places in the concatenated segments; their total stands for "nothing yet"."""
    elapsed: Tensor
    """(B, L) int64 frames the pointer has stood on its token."""
    advance: Tensor
    """(B, L) int64, 0 to 3."""


class Rows:
    def __init__(self, corpus: Corpus, utterances: list[Utterance], *, rows: int, frames: int, seed: int) -> None:
        self._corpus, self._utterances = corpus, utterances
        self._rows, self._frames = rows, frames
        self._pick = random.Random(seed)
        self._queue: list[int] = []

    def next(self) -> Batch:
        features, windows, elapsed, advances = [], [], [], []
        segments: list[list[int]] = []
        total = 0
        for _ in range(self._rows):
            sound, window, stood, moves, mine = self._row(total)
            total += sum(map(len, mine))
            segments += mine
            features.append(sound)
            windows.append(window)
            elapsed.append(stood)
            advances.append(moves)
        window = np.stack(windows)
        window[window < 0] = total
        return Batch(
            torch.from_numpy(np.stack(features).astype(np.float32)),
            segments,
            torch.from_numpy(window),
            torch.from_numpy(np.stack(elapsed)),
            torch.from_numpy(np.stack(advances)),
        )

    def _row(self, base: int):  # type: ignore[no-untyped-def]
        sounds, windows, stood, moves = [], [], [], []
        segments: list[list[int]] = []
        frames = 0
        while frames < self._frames:
            utterance = self._take()
            late = self._pick.randrange(STEPS)  # codes of another phase of the same sound
            rows = self._corpus.rows(utterance)
            count = (len(rows) - late) // STEPS
            letters = self._pick.choices([0.0, 0.15, 0.5, 1.0], [45, 35, 12, 8])[0]
            ids, ends = tokens(utterance, letters=letters, pick=self._pick)
            path = pointer_path([end - late for end in ends], count)
            cuts = self._cuts(ids)
            # limit[i]: the first token that is still unknown while the pointer stands on token i
            limit = np.repeat(cuts[1:], np.diff(cuts))
            places = path[:-1, None] + np.arange(LOOK_AHEAD)
            known = limit[path[:-1]]
            if self._pick.random() < 0.5:  # the next segments are there already
                known = np.full_like(known, len(ids))
            start = base + sum(map(len, segments))
            windows.append(np.where(places < known[:, None], places + start, -1))
            stand = np.zeros(count, np.int64)
            for index in range(1, count):
                stand[index] = stand[index - 1] + 1 if path[index] == path[index - 1] else 0
            stood.append(stand)
            moves.append(np.diff(path))
            sounds.append(rows[late : late + count * STEPS])
            segments += [ids[low:high] for low, high in pairwise(cuts)]
            frames += count
        if self._pick.random() < 0.5:
            self._look_into_next(windows, base, segments)
        end = self._frames
        return (
            np.concatenate(sounds)[: end * STEPS],
            np.concatenate(windows)[:end],
            np.concatenate(stood)[:end],
            np.concatenate(moves)[:end],
            segments,
        )

    @staticmethod
    def _look_into_next(windows: list[np.ndarray], base: int, segments: list[list[int]]) -> None:
        """Let the last tokens of each utterance see the first of the next, as when all text was there at once."""
        last = base + sum(map(len, segments))
        for window in windows[:-1]:
            whole = window[:, :1] + np.arange(LOOK_AHEAD)
            window[:] = np.where(whole < last, whole, -1)

    def _cuts(self, ids: list[int]) -> list[int]:
        cuts = [0]
        if self._pick.random() < 0.4:
            # The space after the mark still belongs to the clause before.
            cuts += [i + 2 for i, token in enumerate(ids[:-2]) if token in CLAUSE_MARKS]
        return [*cuts, len(ids)]

    def _take(self) -> Utterance:
        if not self._queue:
            self._queue = list(range(len(self._utterances)))
            self._pick.shuffle(self._queue)
        return self._utterances[self._queue.pop()]
