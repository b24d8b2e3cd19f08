"""Whether the user has finished, or only draws breath."""

from __future__ import annotations

import re

_OPEN_WORDS = frozenset(
    (
        *(
            "a",
            "an",
            "the",
            "my",
            "your",
            "our",
            "their",
            "and",
            "or",
            "but",
            "because",
            "if",
            "than",
            "of",
            "to",
            "um",
            "uh",
        ),
        *("i'm", "i'll", "i'd", "i've", "you're", "we're", "they're", "it's", "let's", "what's", "that's"),
    )
)
"""English words that ask for another one: with one of these last, hardly anybody has finished."""


def sounds_finished(text: str) -> bool:
    """Whether `text` may be all that was to be said.  Text that is not English, and none at all, may."""
    words = re.findall(r"[a-z']+", text.lower())
    return not words or words[-1] not in _OPEN_WORDS
