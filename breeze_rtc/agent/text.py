"""What a language model writes, as it should be said: without markup, emoji and the tails of links.

A filter stands between a callback and its voice.  Text goes through as it comes, and every place in what is spoken is
known in what was written, so that a cut falls on the written text, byte for byte:

    spoken = filter.push("See **the** [guide](https://example.org/a/b).")   # "See the guide."
    filter.written_chars(7)                                                 # 9: "See **the"

Numbers, dates and amounts are left to the voice, which reads them in its own language (the nano voice does); for one
that does not, `read` takes a function, such as `numbers.read`.

Parsers of Markdown want the whole document, and a token's last character may be the first of the next one's markup: so
this is a small machine of its own, which holds back a word that is not over and nothing else.
"""

from __future__ import annotations

import bisect
import re
import unicodedata
from collections.abc import Callable
from typing import Protocol

_HEADING = re.compile(r"#{1,6}\Z")
_BULLET = re.compile(r"[-*+\u2022]\Z")
_NUMBERED = re.compile(r"\d{1,3}[.)]\Z")
_RULE = re.compile(r"(?:[-*_=]{3,}|\|?:?-{3,}:?\|.*)\Z")
_URL = re.compile(r"(?:https?://|www\.)([^\s/?#:<>\"']+)[^\s<>\"'()\]]*?(?=[.,;:!?)\]*_]*\Z|[)\]<>\"'])", re.IGNORECASE)
_LINK_END = re.compile(r"\]\([^)\s]*(?:\s+\"[^\"]*\")?\)")
_WRAPPERS = re.compile(r"\*\*+|(?<!\w)\*|\*(?!\w)|~~|`+|(?<![^\W_])_+|_+(?![^\W_])|!?\[|\]|</?[a-zA-Z][^<>\s]*/?>")
_EMOJI = re.compile(
    "[\U0001f000-\U0001faff\u2600-\u27bf\u2b00-\u2bff\u2190-\u21ff\ufe0f\u20e3\U000e0020-\U000e007f]"
    "(?:\u200d(?=[\U0001f000-\U0001faff\u2600-\u27bf]))?"
)
_DIGIT = re.compile(r"\d")
_KANA = re.compile("[\u3041-\u30ff]")
_HAN = re.compile("[\u3400-\u9fff\uf900-\ufaff]")
_LETTER = re.compile(r"[^\W\d_]")
_WIDE = "\u1100-\u11ff\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\uff00-\uff60"
_PIECE = re.compile(rf"\[[^\[\]\n]*\]\([^)\n]*\)[^\s{_WIDE}]*|[{_WIDE}]+|[^\s{_WIDE}]+|[^\S\n]+|\n")
_STOPS = ".!?:;,\u2026\u3002\uff01\uff1f\uff1a\uff1b\uff0c\u3001"
_MAX_HELD_CHARS = 400
"""A word longer than that is passed on in pieces."""


class TextFilter(Protocol):
    """Written text in, spoken text out, as it comes; one for each speech."""

    def push(self, text: str) -> str:
        """More written text -> what can be spoken of it now."""

    def end(self) -> str:
        """No more will come -> the rest."""

    def written_chars(self, spoken_chars: int) -> int:
        """How much of the written text has been said once `spoken_chars` of the spoken have."""


class SpokenText:
    """Reads Markdown, emoji and links the way a person reads them out; see the module.

    read(word, language): what a word that holds digits is said as, punctuation included, among words of "en", "zh" or
    "ja": for a voice that cannot read numbers.
    """

    def __init__(self, *, read: Callable[[str, str], str] | None = None) -> None:
        self._read = read
        # By the letters that came last; of a text that begins with a number, by those behind it.
        self._language = ""
        # What is written right behind the piece: in Chinese a number is read by its unit.
        self._unit = ""
        self._held = ""
        # Places that belong together: after so many characters of the one, so many of the other.
        self._spoken = [0]
        self._written = [0]
        self._is_line_start = True
        self._is_titled = False  # a heading or an item of a list: its end is a pause
        self._is_code = False
        self._ends_open = False  # the last thing said was no punctuation
        self._after_blank = True

    def push(self, text: str) -> str:
        """More written text -> what can be spoken of it now: all but a word that may go on."""
        self._held += text
        at = next((k + 1 for k in range(len(self._held) - 1, -1, -1) if _is_end(self._held[k])), 0)
        target = self._held.rfind("](", 0, at)
        if target >= 0 and ")" not in self._held[target:at]:
            at = max(0, self._held.rfind(" ", 0, target))  # an address that is not complete may hold a blank
        if not at and len(self._held) > _MAX_HELD_CHARS:
            at = len(self._held)
        now, self._held = self._held[:at], self._held[at:]
        return self._say(now)

    def end(self) -> str:
        """No more will come -> the rest."""
        now, self._held = self._held, ""
        return self._say(now)

    def written_chars(self, spoken_chars: int) -> int:
        """See `TextFilter`.  What is not said belongs to the word before it."""
        at = bisect.bisect_right(self._spoken, spoken_chars) - 1
        into = spoken_chars - self._spoken[at]
        if at + 1 == len(self._spoken):
            return self._written[at]
        spoken, written = self._spoken[at + 1] - self._spoken[at], self._written[at + 1] - self._written[at]
        # Inside of a piece that is said otherwise, nothing of it has been said.
        return self._written[at] + (into if spoken == written else 0)

    # ---

    def _say(self, text: str) -> str:
        said = ""
        pieces = _PIECE.findall(text)
        for at, piece in enumerate(pieces):
            if self._read is not None:
                self._language = _language_of(piece) or self._language or _language_of("".join(pieces[at : at + 2]))
            self._unit = pieces[at + 1][0] if at + 1 < len(pieces) else ""
            spoken = self._piece(piece)
            self._note(piece, spoken)
            said += spoken
        return said

    def _note(self, written: str, spoken: str) -> None:
        """Keep the pieces' places; where one was only shortened at its ends, those of its middle too."""
        middle = written.find(spoken) if spoken else -1
        if middle > 0:
            self._spoken.append(self._spoken[-1])
            self._written.append(self._written[-1] + middle)
            written = written[middle:]
        if middle >= 0:
            self._spoken.append(self._spoken[-1] + len(spoken))
            self._written.append(self._written[-1] + len(spoken))
            written, spoken = written[len(spoken) :], ""
        if written or spoken:
            self._spoken.append(self._spoken[-1] + len(spoken))
            self._written.append(self._written[-1] + len(written))

    def _piece(self, piece: str) -> str:
        if piece == "\n":
            return self._line_end()
        if piece.isspace():
            self._after_blank = True
            return "" if self._is_code else piece
        after_blank, self._after_blank = self._after_blank, False
        if piece.startswith("```"):
            self._is_code = not self._is_code and piece.count("```") == 1
            return ""
        if self._is_code:
            if piece.endswith("```"):
                self._is_code = False
            return ""
        if self._is_line_start:
            if _RULE.match(piece):
                return ""
            if _HEADING.match(piece) or _BULLET.match(piece):
                self._is_titled = True
                return ""
            if set(piece) == {">"}:
                return ""
            self._is_titled = self._is_titled or bool(_NUMBERED.match(piece))
        self._is_line_start = False
        if piece == "|":
            return ""
        if piece == "*" and after_blank:
            return piece  # a product
        spoken = self._word(piece)
        if spoken.strip():
            self._ends_open = spoken[-1] not in _STOPS
        return spoken

    def _line_end(self) -> str:
        self._after_blank = True
        pause = "." if self._is_titled and self._ends_open and not self._is_code else ""
        self._is_line_start, self._is_titled, self._ends_open = True, False, False
        return pause + "\n"

    def _word(self, word: str) -> str:
        word = _LINK_END.sub("", word)
        links: list[str] = []

        def host(match: re.Match[str]) -> str:
            links.append(re.sub(r"\Awww\.", "", match[1], flags=re.IGNORECASE))
            return "\0"

        word = _URL.sub(host, word)
        word = _EMOJI.sub("", _WRAPPERS.sub("", word))
        for link in links:
            word = word.replace("\0", link, 1)
        if self._read is not None and not links and _DIGIT.search(word):
            word = self._number(word)
        return word

    def _number(self, word: str) -> str:
        assert self._read is not None
        unit = self._unit if self._unit and _HAN.match(self._unit) else ""
        said = self._read(word + unit, self._language or "en")
        return said.removesuffix(unit) if said.endswith(unit) else self._read(word, self._language or "en")


def _language_of(text: str) -> str:
    """By its letters: kana are Japanese, other wide letters Chinese; "" where there is none."""
    if _KANA.search(text):
        return "ja"
    if _HAN.search(text):
        return "zh"
    return "en" if _LETTER.search(text) else ""


def _is_end(char: str) -> bool:
    """No word and no markup goes on after it: a blank, and what is written without blanks."""
    return char.isspace() or unicodedata.east_asian_width(char) == "W"
