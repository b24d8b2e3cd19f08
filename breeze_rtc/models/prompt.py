"""Breeze TTS 2's prompts: templates, the unguided row, segments, and what user text must not contain.

A prompt is a row of parts: text, each part encoded by itself, and reference audio.  Which template applies follows from
what the voice has:

| instruction | reference | guided row                                        | unguided row                  |
| ----------- | --------- | ------------------------------------------------- | ----------------------------- |
| no          | no        | speaker text                                      | none                          |
| yes         | no        | speaker <ins_bos> instruction <ins_eos> text      | speaker text                  |
| no          | yes       | speaker reference, audio, speaker text            | none                          |
| yes         | yes       | speaker reference, audio, speaker <ins...> text   | speaker reference, audio, speaker text |

With both there is a second form, *dual* guidance, which weighs the two apart: the row of the reference alone and the
row of the instruction alone are each compared with the plain row, which has neither.

A row that begins with a reference begins with the same positions whatever is said, so they need be computed only once
per voice: `BreezePrompts.reference` are those, and a front end that `has_prefix` leaves them out.

Nothing stands between the pieces, and every text part begins with the tokenizer's own first token.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

from breeze_rtc.errors import BadRequest, BadText
from breeze_rtc.models.speech_model import TextSegment, Tokenizer

AUDIO = "<|AUDIO|>"
AUDIO_END = "<|audio_eos|>"
_RESERVED = re.compile(
    "|".join(map(re.escape, (AUDIO, AUDIO_END, "<ins_bos>", "<ins_eos>", "<bos>", "<eos>", "<pad>")))
)

Codes = tuple[tuple[int, ...], ...]
Part = str | Codes
"""Text, or frames of reference audio."""


@dataclass(frozen=True, slots=True)
class Voice:
    """How a stream shall sound.  Its texts lose what the tokenizer would read as control tokens.

    Raises BadText for reference audio without its words, or words without audio.
    """

    instruction: str = ""
    """In words: who speaks, and how."""
    reference_text: str = ""
    reference: Codes = ()
    """Codec frames of somebody saying `reference_text`."""
    vector: tuple[float, ...] = ()
    """Of a recording, for models that have a speaker encoder."""
    name: str = ""
    """Of a voice of the model's own."""
    language: str = ""
    """By its English name, in lower case; empty: left to the model."""
    speaker: str = "[S0]"

    def __post_init__(self) -> None:
        for name in ("instruction", "reference_text"):
            object.__setattr__(self, name, sanitise(getattr(self, name))[0].strip())
        if bool(self.reference) != bool(self.reference_text):
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


@cache
def added_tokens(tokenizer: Any) -> re.Pattern[str]:
    """For `sanitise`: what a `tokenizers.Tokenizer` reads as tokens of its own."""
    added = tokenizer.get_added_tokens_decoder().values()
    return re.compile("|".join(re.escape(token.content) for token in added))


def template(text: str, voice: Voice) -> tuple[list[Part], list[Part] | None]:
    """The guided row and the unguided one, if the voice has one; the text must be sanitised."""
    plain = voice.speaker + text
    before: list[Part] = [voice.speaker + voice.reference_text, voice.reference] if voice.reference else []
    if not voice.instruction:
        return [*before, plain], None
    return [*before, f"{voice.speaker}<ins_bos>{voice.instruction}<ins_eos>{text}"], [*before, plain]


def dual_template(text: str, voice: Voice) -> tuple[list[Part], list[Part], list[Part]]:
    """The rows of dual guidance: that of the reference, that of the instruction, and the plain one."""
    by_reference, _ = template(text, replace(voice, instruction=""))
    by_instruction, plain = template(text, replace(voice, reference=(), reference_text=""))
    assert plain is not None, "dual guidance needs an instruction"
    return by_reference, by_instruction, plain


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


def segments_of(parts: list[Part], tokenizer: Tokenizer, row: int = 0) -> list[TextSegment]:
    """A row of the prompt, part by part.  Raises BadText."""
    return [
        TextSegment(tuple(ids), (0,) * len(ids), row, () if isinstance(part, str) else part)
        for part, ids in zip(parts, tokenise(parts, tokenizer), strict=True)
    ]


class BreezePrompts:
    """Breeze's templates with its tokenizer, which is read when the first prompt is made."""

    is_guided = True
    goes_on = False

    def __init__(self, tokenizer: Callable[[], Tokenizer]) -> None:
        self._tokenizer = tokenizer

    def frontend(self, voice: Voice, *, has_prefix: bool = False, is_dual: bool = False) -> PromptFrontend:
        """See `Prompts`."""
        if voice.language:
            raise BadRequest("Breeze TTS 2 is not told a language: leave it out")
        return PromptFrontend(self._tokenizer(), voice, has_prefix=has_prefix, is_dual=is_dual)

    def reference(self, voice: Voice) -> list[TextSegment]:
        """Its words and its audio; see `Prompts`."""
        return segments_of(template("", voice)[0][:2], self._tokenizer()) if voice.reference else []


class PromptFrontend:
    """The text front end of a prefix model: it waits for the whole text, then makes the rows of the prompt.

    Row 0 is the longest, because the prompt is counted by it; row 1 the one guidance leads away from.  Dual guidance
    has the rows of the reference and of the instruction in places 0 and 2, the longer first.
    """

    def __init__(self, tokenizer: Tokenizer, voice: Voice, *, has_prefix: bool = False, is_dual: bool = False) -> None:
        """has_prefix: the reference is computed already, wherever a row begins with it; in dual guidance that is row 2.
        is_dual: make the rows of dual guidance, for which the voice needs both reference and instruction."""
        assert not is_dual or (voice.reference and voice.instruction)
        self._tokenizer = tokenizer
        self._voice = voice
        self._has_prefix = has_prefix
        self._is_dual = is_dual
        self._text = ""

    def push(self, text: str) -> list[TextSegment]:
        self._text += text
        return []

    def end(self) -> list[TextSegment]:
        """The prompt's segments, row 0 last so that the others are encoded along with it."""
        if not self._text.strip():
            return []
        text, origin = sanitise(self._text)
        if self._is_dual:
            segments = self._dual(text)
        else:
            guided, unguided = template(text, self._voice)
            segments = [] if unguided is None else self._segments(unguided, row=1)
            segments += self._segments(guided, row=0)
        last = segments[-1]
        ends = self._ends(last.tokens, origin)
        segments[-1] = replace(last, ends=ends)
        return segments

    def _dual(self, text: str) -> list[TextSegment]:
        by_reference, by_instruction, plain = dual_template(text, self._voice)
        rows = [self._segments(by_instruction, 0), self._segments(by_reference, 2)]
        lengths = [sum(len(segment.tokens) for segment in row) for row in rows]
        if lengths[1] > lengths[0] and not self._has_prefix:
            rows = [self._segments(by_reference, 0), self._segments(by_instruction, 2)]
        return [*self._segments(plain, 1), *rows[1], *rows[0]]

    def _segments(self, parts: list[Part], row: int) -> list[TextSegment]:
        if self._has_prefix and len(parts) > 1:
            parts = parts[2:]
        return segments_of(parts, self._tokenizer, row)

    def _ends(self, tokens: tuple[int, ...], origin: list[int]) -> tuple[int, ...]:
        """Characters of the user's text behind each token: counted from the end, where nothing else stands."""
        ends = []
        for index in range(1, len(tokens) + 1):
            rest = len(self._tokenizer.decode(tokens[index:], skip_special_tokens=False))
            read = max(0, len(origin) - rest)
            ends.append(origin[read - 1] if read else 0)
        ends[-1] = len(self._text)
        return tuple(ends)
