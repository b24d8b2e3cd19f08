"""Text front end of the nano voice: written English in, phoneme and letter tokens out."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path

VOWELS = frozenset("AIOQWYaiuæɑɒɔəɛɜɪʊʌᵻɐᵊ")
_STRESS = "ˈˌ"
_VOICELESS = frozenset("ptkfθ")
_SIBILANT = frozenset("szʃʒʧʤ")
_FLAPPING = frozenset("AIOWYiuæɑəɛɪɹʊʌ")

# Words that change with what follows: (before a vowel, before a consonant, before a pause).
_CONTEXT = {
    "a": ("ɐ", "ɐ", "ˈA"),
    "an": ("ɐn", "ɐn", "ɐn"),
    "am": ("ɐm", "ɐm", "æm"),
    "i": ("ˌI", "ˌI", "ˌI"),
    "in": ("ɪn", "ɪn", "ˈɪn"),
    "the": ("ði", "ðə", "ðə"),
    "to": ("tʊ", "tə", "tu"),
}


class Lexicon:
    """How words are said: a word list, regular endings, and what a neighbour changes."""

    def __init__(self, forms: dict[str, tuple[str, str]]) -> None:
        self._forms = forms

    @classmethod
    def load(cls, path: Path) -> Lexicon:
        forms: dict[str, tuple[str, str]] = {}
        for line in gzip.decompress(path.read_bytes()).decode().splitlines():
            word, _, rest = line.partition("\t")
            usual, _, final = rest.partition("\t")
            forms[word] = (usual, final or usual)
        return cls(forms)

    def __contains__(self, word: str) -> bool:
        return self.look_up(word) is not None

    def look_up(self, word: str) -> tuple[str, str] | None:
        """(usual, before a pause) phonemes of one word, or None: it has to be read letter by letter."""
        return self._forms.get(word) or self._forms.get(word.lower()) or self._regular(word.lower())

    def say(self, words: Sequence[str]) -> list[str | None]:
        """Phonemes of the words of one breath group (a pause follows the last), None where a word is unknown."""
        said: list[str | None] = []
        following = None  # True: a vowel follows, False: a consonant, None: a pause
        for index in range(len(words) - 1, -1, -1):
            word = words[index].lower()
            if word in _CONTEXT:
                before_vowel, before_consonant, before_pause = _CONTEXT[word]
                phonemes = before_pause if following is None else before_vowel if following else before_consonant
            elif word == "used" and index + 1 < len(words) and words[index + 1].lower() == "to":
                phonemes = "jˈust"
            elif (forms := self.look_up(words[index])) is not None:
                phonemes = forms[1] if following is None else forms[0]
            else:
                said.append(None)
                following = word[0] in "aeiou"
                continue
            said.append(phonemes)
            first = next((sound for sound in phonemes if sound not in _STRESS), "")
            following = first in VOWELS
        said.reverse()
        return said

    def _regular(self, word: str) -> tuple[str, str] | None:
        """Plural and possessive -s, past -ed and -ing of a known word."""
        stem = None
        if word.endswith("s'"):
            return self._forms.get(word[:-1]) or self._regular(word[:-1])
        if len(word) > 2 and word.endswith("s") and not word.endswith("ss"):
            stem = self._stem(word[:-1]) or (self._stem(word[:-2]) if word.endswith(("'s", "es")) else None)
            if stem is None and word.endswith("ies"):
                stem = self._stem(word[:-3] + "y")
            if stem:
                end = "ᵻz" if stem[-1] in _SIBILANT else "s" if stem[-1] in _VOICELESS else "z"
                return stem + end, stem + end
        if len(word) > 3 and word.endswith("ed"):
            stem = self._stem(word[:-1]) or self._stem(word[:-2]) or self._undoubled(word[:-2])
            if stem:
                if stem[-1] in "td":
                    said = (stem[:-1] + "T" if stem[-1] == "t" and stem[-2:-1] in _FLAPPING else stem) + "ᵻd"
                else:
                    said = stem + ("t" if stem[-1] in "pkfθʃsʧ" else "d")
                return said, said
        if len(word) > 4 and word.endswith("ing"):
            stem = self._stem(word[:-3]) or self._stem(word[:-3] + "e") or self._undoubled(word[:-3])
            if stem:
                said = (stem[:-1] + "T" if stem[-1] == "t" and stem[-2:-1] in _FLAPPING else stem) + "ɪŋ"
                return said, said
        return None

    def _stem(self, word: str) -> str | None:
        forms = self._forms.get(word) if len(word) > 1 else None
        return forms[0] if forms else None

    def _undoubled(self, word: str) -> str | None:
        return self._stem(word[:-1]) if len(word) > 3 and word[-1] == word[-2] else None
