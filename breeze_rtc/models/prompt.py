"""Breeze TTS 2's prompts: templates, the unguided row, segments, and what user text must not contain.

A prompt is a row of parts: text, each part encoded by itself, and reference audio.  Which template applies follows from
what the voice has:

| instruction | reference | guided row                                        | unguided row                  |
| ----------- | --------- | ------------------------------------------------- | ----------------------------- |
| no          | no        | speaker text                                      | none                          |
| yes         | no        | speaker <ins_bos> instruction <ins_eos> text      | speaker text                  |
| no          | yes       | speaker reference, audio, speaker text            | none                          |
| yes         | yes       | speaker reference, audio, speaker <ins...> text   | speaker reference, audio, speaker text |

Nothing stands between the pieces, and every text part begins with the tokenizer's own first token.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from breeze_rtc.errors import BadText
from breeze_rtc.models.speech_model import TextSegment

AUDIO = "<|AUDIO|>"
AUDIO_END = "<|audio_eos|>"
_RESERVED = re.compile(
    "|".join(map(re.escape, (AUDIO, AUDIO_END, "<ins_bos>", "<ins_eos>", "<bos>", "<eos>", "<pad>")))
)

Codes = tuple[tuple[int, ...], ...]
Part = str | Codes
"""Text, or frames of reference audio."""


class Tokenizer(Protocol):
    """What we use of `tokenizers.Tokenizer`."""

    def encode(self, sequence: str, *, add_special_tokens: bool = True) -> Any: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True, slots=True)
class Voice:
    """How a stream shall sound.  Raises BadText for reference audio without its words, or words without audio."""

    instruction: str = ""
    """In words: who speaks, and how."""
    reference_text: str = ""
    reference: Codes = ()
    """Codec frames of somebody saying `reference_text`."""
    speaker: str = "[S0]"

    def __post_init__(self) -> None:
        if bool(self.reference) != bool(self.reference_text.strip()):
            raise BadText("a reference needs both its audio and its words")


def sanitise(text: str, reserved: re.Pattern[str] = _RESERVED) -> tuple[str, list[int]]:
    """Text without the strings that the tokenizer would read as control tokens, and where its characters came from.

    Returns the text and, per character, how many characters of the original have been read with it.
    """
    origin = list(range(1, len(text) + 1))
    # Taking one out may join two halves of another.
    while match := reserved.search(text):
        start, end = match.span()
        text = text[:start] + text[end:]
        del origin[start:end]
    return text, origin


def template(text: str, voice: Voice) -> tuple[list[Part], list[Part] | None]:
    """The guided row and the unguided one, if the voice has one; all texts must be sanitised."""
    plain = voice.speaker + text
    before: list[Part] = [voice.speaker + sanitise(voice.reference_text)[0], voice.reference] if voice.reference else []
    instruction = sanitise(voice.instruction)[0]
    if not instruction:
        return [*before, plain], None
    return [*before, f"{voice.speaker}<ins_bos>{instruction}<ins_eos>{text}"], [*before, plain]


def tokenise(parts: list[Part], tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of each part, found the way the model was trained: each text part makes a round trip through the
    tokenizer, then the whole row is encoded at once and cut where the parts by themselves would end.

    Raises BadText if the two disagree; that text cannot be spoken.
    """
    strings = []
    for part in parts:
        if isinstance(part, str):
            strings.append(tokenizer.decode(tokenizer.encode(part).ids, skip_special_tokens=False))
        else:
            strings.append(AUDIO * len(part) + AUDIO_END)
    ids = list(tokenizer.encode("".join(strings), add_special_tokens=False).ids)
    lengths = [len(tokenizer.encode(string, add_special_tokens=False).ids) for string in strings]
    if sum(lengths) != len(ids):
        raise BadText("the tokenizer joins this text with its surroundings; change its first or last character")
    cuts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    return [ids[start:end] for start, end in pairwise(cuts)]


class PromptFrontend:
    """The text front end of a prefix model: it waits for the whole text, then makes the rows of the prompt."""

    def __init__(self, tokenizer: Tokenizer, voice: Voice) -> None:
        self._tokenizer = tokenizer
        self._voice = voice
        self._text = ""

    def push(self, text: str) -> list[TextSegment]:
        self._text += text
        return []

    def end(self) -> list[TextSegment]:
        """The prompt's segments, the unguided row first so that it is encoded along with the guided one."""
        if not self._text.strip():
            return []
        text, origin = sanitise(self._text)
        guided, unguided = template(text, self._voice)
        segments = [] if unguided is None else self._segments(unguided, row=1)
        segments += self._segments(guided, row=0)
        last = segments[-1]
        ends = self._ends(last.tokens, origin)
        segments[-1] = TextSegment(last.tokens, ends)
        return segments

    def _segments(self, parts: list[Part], row: int) -> list[TextSegment]:
        return [
            TextSegment(tuple(ids), (0,) * len(ids), row, () if isinstance(part, str) else part)
            for part, ids in zip(parts, tokenise(parts, self._tokenizer), strict=True)
        ]

    def _ends(self, tokens: tuple[int, ...], origin: list[int]) -> tuple[int, ...]:
        """Characters of the user's text behind each token: counted from the end, where nothing else stands."""
        ends = []
        for index in range(1, len(tokens) + 1):
            rest = len(self._tokenizer.decode(tokens[index:], skip_special_tokens=False))
            read = max(0, len(origin) - rest)
            ends.append(origin[read - 1] if read else 0)
        ends[-1] = len(self._text)
        return tuple(ends)
