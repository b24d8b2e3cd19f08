"""The teacher's shards as one corpus: silence trimmed, phonemes with their times, tokens made anew for every epoch."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from breeze_rtc.models import pronunciation

LEAD = 5  # feature frames (10 ms) kept before the voice starts
TRAIL = 20  # and after it ends
LOUD = -7.0  # log amplitude of the loudest band from which on a frame counts as sound
STEPS = 4  # feature frames a codec frame


@dataclass(frozen=True)
class Utterance:
    start: int
    """First row in the feature array."""
    frames: int
    """Feature frames, a multiple of STEPS."""
    items: list[list[str]]
    """[written, phonemes] of words and punctuation."""
    ends: list[list[float]]
    """For every item the times, in feature frames, at which its phoneme characters end; a word's first is its space."""


class Corpus:
    """Features (N, 162) float16 and the utterances in them."""

    def __init__(
        self, features: NDArray[np.float16], utterances: list[Utterance], sound: NDArray[np.int16] | None = None
    ) -> None:
        self.features = features
        self.utterances = utterances
        self.sound = sound
        """240 samples for each row of features, where they were asked for."""

    @classmethod
    def load(cls, work: Path, *, limit: int | None = None, with_sound: bool = False) -> Corpus:
        """with_sound: only the shards of which the teacher's sound was kept."""
        parts: list[NDArray[np.float16]] = []
        sounds: list[NDArray[np.int16]] = []
        utterances: list[Utterance] = []
        total = 0
        for path in tqdm(sorted((work / "data").glob("*.npz"))[:limit], desc="corpus", unit="shard"):
            kept = path.with_suffix(".sound.npy")
            if with_sound and not kept.exists():
                continue
            shard = np.load(path)
            sound = np.load(kept) if with_sound else None
            features, offset = shard["features"], 0
            for record in json.loads(str(shard["records"])):
                rows, begin = features[offset : offset + record["frames"]], offset
                offset += record["frames"]
                trimmed = trim(rows, record)
                if trimmed is None:
                    continue
                rows, ends, first = trimmed
                if sound is not None:
                    sounds.append(sound[(begin + first) * 240 : (begin + first + len(rows)) * 240])
                utterances.append(Utterance(total, len(rows), record["items"], ends))
                parts.append(rows)
                total += len(rows)
        return cls(np.concatenate(parts), utterances, np.concatenate(sounds) if sounds else None)

    def rows(self, utterance: Utterance) -> NDArray[np.float16]:
        return self.features[utterance.start : utterance.start + utterance.frames]


def text_of(utterance: Utterance) -> str:
    """What was said, as one writes it."""
    return re.sub(r" ([.,;:!?…])", r"\1", " ".join(written for written, _ in utterance.items))


def loudness(rows: NDArray[np.float16]) -> NDArray[np.float32]:
    values = rows.astype(np.float32)
    harmonic = np.where(values[:, 1] > 0.5, values[:, 2:82].max(1), -10.0)
    return np.maximum(harmonic, values[:, 82:].max(1))


def trim(rows: NDArray[np.float16], record: dict) -> tuple[NDArray[np.float16], list[list[float]], int] | None:
    """Cut the silence at both ends and say when each phoneme of each item ends, in feature frames of what is left.

    The third result is how many frames were cut at the beginning.
    """
    is_loud = loudness(rows) > LOUD
    if not is_loud.any():
        return None
    onset, last = int(is_loud.argmax()), len(rows) - 1 - int(is_loud[::-1].argmax())
    first = max(0, onset - LEAD)
    count = (min(len(rows), last + 1 + TRAIL) - first) // STEPS * STEPS
    if count < 2 * STEPS:
        return None
    ends: list[list[float]] = []
    units = iter(record["units"][1:-1])
    time = record["units"][0] * 2.5
    for index, (_, phonemes) in enumerate(record["items"]):
        mine = []
        if index and phonemes[0] not in pronunciation.PUNCTUATION:
            time += next(units) * 2.5  # the space before the word
            mine.append(time)
        elif index:
            # The teacher counts much of a pause as the sound before it; the pause starts where the sound stops.
            previous = ends[-1]
            begin = previous[-2] if len(previous) > 1 else ends[-2][-1] if len(ends) > 1 else previous[-1]
            low, high = int(begin), min(int(previous[-1]), len(rows))
            loud_at = np.flatnonzero(is_loud[low:high])
            stop = low + (int(loud_at[-1]) + 2 if len(loud_at) else 1)
            previous[-1] = min(previous[-1], float(max(stop, begin + 1)))
        for _ in phonemes:
            time += next(units) * 2.5
            mine.append(time)
        ends.append(mine)
    shifted = [[max(0.0, min(float(count), end - first)) for end in item] for item in ends]
    return rows[first : first + count], shifted, first


def tokens(utterance: Utterance, *, letters: float, pick: random.Random) -> tuple[list[int], list[float]]:
    """Token ids and the time each ends; each word is spelled with probability `letters`.

    The words are tokenised by the very functions that serve.
    """
    ids: list[int] = []
    ends: list[float] = []
    time = 0.0
    for index, ((written, phonemes), item_ends) in enumerate(zip(utterance.items, utterance.ends, strict=True)):
        times = item_ends
        is_mark = phonemes[0] in pronunciation.PUNCTUATION
        if index and not is_mark:
            ids.append(pronunciation.SPACE)
            ends.append(times[0])
            time, times = times[0], times[1:]
        if is_mark:
            ids.append(pronunciation.PUNCTUATION[phonemes[0]])
            ends.append(times[-1])
        elif pick.random() < letters:
            spelled = pronunciation.letter_tokens(written)
            ids.extend(spelled)
            ends.extend(_spread(written, phonemes, time, times))
        else:
            for sound, count in pronunciation.phoneme_tokens(phonemes):
                ids.append(sound)
                ends.append(times[count - 1])
        time = times[-1]
    return ids, ends


_VOWEL_LETTERS = frozenset("aeiouy")


def _spread(written: str, phonemes: str, start: float, times: list[float]) -> list[float]:
    """When each letter of a word ends: vowels are matched with vowels, consonants with consonants, in order."""
    letters = [letter for letter in written.lower() if letter in pronunciation.LETTERS]
    sounds = list(pronunciation.phoneme_tokens(phonemes))
    spans = [times[count - 1] for _, count in sounds]
    is_vowel = [
        any(char in pronunciation.VOWELS for char in phonemes[previous:count])
        for previous, count in zip([0, *(count for _, count in sounds)], [count for _, count in sounds], strict=False)
    ]
    # Cheapest monotone path over (letter, sound), each letter on one sound; a letter of the other kind costs 1.
    L, S = len(letters), len(sounds)
    cost = np.full((L, S), np.inf)
    back = np.zeros((L, S), np.int64)
    for i, letter in enumerate(letters):
        for j in range(S):
            own = float((letter in _VOWEL_LETTERS) != is_vowel[j]) + 0.05 * abs(i / max(1, L - 1) - j / max(1, S - 1))
            if i == 0:
                cost[i, j] = own + 0.6 * j
                continue
            for step in range(3):
                if j - step >= 0:
                    total = cost[i - 1, j - step] + own + (0.3, 0.0, 0.6)[step]
                    if total < cost[i, j]:
                        cost[i, j], back[i, j] = total, j - step
    path = [S - 1]
    for i in range(L - 1, 0, -1):
        path.append(int(back[i, path[-1]]))
    path.reverse()
    begins = [start, *spans]
    result = []
    for i, j in enumerate(path):
        same = [k for k in range(L) if path[k] == j]
        place = (same.index(i) + 1) / len(same)
        result.append(begins[j] + (spans[j] - begins[j]) * place)
    result[-1] = times[-1]
    return result


def pointer_path(ends: list[float], frames: int, *, most: int = 3) -> NDArray[np.int64]:
    """(frames + 1,) the token spoken in each codec frame, and the token count at last; no step exceeds `most`."""
    centres = np.arange(frames) * STEPS + STEPS / 2
    path = np.searchsorted(np.asarray(ends), centres, side="right")
    path = np.append(np.minimum(path, len(ends) - 1), len(ends))
    path[0] = 0
    for index in range(1, len(path)):
        path[index] = min(path[index], path[index - 1] + most)
    # From the end: what could not be caught up going forward must not be left unsaid.
    path[-1] = len(ends)
    for index in range(len(path) - 2, -1, -1):
        path[index] = max(path[index], path[index + 1] - most)
    return path
