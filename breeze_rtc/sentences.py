"""Where growing text may be cut so that each piece can be spoken by itself.

Models that read their whole text before they speak get it in pieces.  A piece ends where a sentence does, in scripts
with spaces and without; the first may end with a clause, so that speech begins before the first sentence is over.  A
voice that is slower than speech pauses where a sentence ends.
"""

from __future__ import annotations

import re

FIRST_CHARS, FIRST_WIDE_CHARS = 24, 8
"""The least a first piece holds before a clause may end it; a wide character is a syllable or a word."""
MAX_CHARS = 300
"""A piece is cut at the last blank before this when nothing else has cut it."""

_CLOSERS = "\"'\u201d\u2019)\\]\u00bb\u300d\u300f\uff09\u3011"
_WIDE_STOPS = "\u3002\uff01\uff1f\u2026\u0964\u06d4"  # of CJK, and full stops of Devanagari and Urdu
_SENTENCE = re.compile(rf"[{_WIDE_STOPS}][{_CLOSERS}]*|[.!?][.!?{_CLOSERS}]*(?=\s)|\n\s*\n")
_CLAUSE = re.compile(
    rf"[\uff0c\uff1b\uff1a\u3001][{_CLOSERS}]*|[,;:\u2014][{_CLOSERS}]*(?=\s)|\s[\u2013\u2014-](?=\s)|\n"
)
_WIDE = re.compile("[\u1100-\u11ff\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff]")
_ABBREVIATION = re.compile(
    r"(?:^|[\s(\"'])(?:[A-Za-z]|Mr|Mrs|Ms|Dr|Prof|St|Sr|Jr|vs|approx|No|Nr|Fig|Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sept?|Oct|Nov|Dec|"
    r"e\.g|i\.e|[A-Z](?:\.[A-Z])+|\d+)\.\Z"
)


def sentence_ends(text: str, start: int) -> list[int]:
    """The ends of the sentences that are over for certain, from `start`, where one begins."""
    ends = (match.end() for match in _SENTENCE.finditer(text, start))
    return [end for end in ends if _ends_sentence(text, end) and text[start:end].strip()]


def piece_end(text: str, start: int, *, is_first: bool, is_all: bool) -> int:
    """The end of the piece of `text` from `start` that can be spoken now, `start` itself when there is none yet.

    is_first: nothing was spoken before.  is_all: no more text will come, so that all of the rest is a piece.
    A piece is as many sentences as are complete, for they sound better together.
    """
    if is_all:
        return len(text) if text[start:].strip() else start
    end = start
    for match in _SENTENCE.finditer(text, start):
        if is_first and end > start:
            break  # who waits for a first sound waits for one sentence
        if _ends_sentence(text, match.end()):
            end = match.end()
    if is_first:
        limit = end if end > start else len(text)
        for match in _CLAUSE.finditer(text, start, limit):
            piece = text[start : match.end()]
            if len(piece) >= FIRST_CHARS or len(_WIDE.findall(piece)) >= FIRST_WIDE_CHARS:
                end = match.end()
                break
    if end == start and len(text) - start > MAX_CHARS:
        blank = text.rfind(" ", start + 1, start + MAX_CHARS)
        end = blank if blank > start else start + MAX_CHARS
    return end if text[start:end].strip() else start


def _ends_sentence(text: str, end: int) -> bool:
    after = text[end:].lstrip()
    if not after and text[end - 1] in "\"'\u201d\u2019)]":
        return False  # `"Stop!" he said` goes on, which the next word will tell
    goes_on = bool(after) and after[0].islower()
    return not goes_on and _ABBREVIATION.search(text[:end]) is None
