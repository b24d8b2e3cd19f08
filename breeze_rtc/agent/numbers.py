"""Numbers, dates, times and amounts as words, for voices that do not read them.

By WeTextProcessing's grammars for English, Chinese and Japanese (Apache-2.0; `pip install 'breeze_rtc[numbers]'`), a
word at a time: text is spoken as it comes, and what was said must be found in what was written.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from functools import cache
from typing import Any

log = logging.getLogger(__name__)

_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_LEFT_ALONE = re.compile(
    r"\W*(?:\d{4}s|\d+(?:[.:]\d+){2,}|(?:\d{1,3}-)*\d{3}-\d{4}|.*[^\W\d_]\d.*[^\W\d_]\d.*|v\d.*)\W*\Z", re.IGNORECASE
)
"""What the grammars read wrongly: decades, versions and addresses, telephone numbers, codes."""


def is_installed() -> bool:
    return importlib.util.find_spec("wetext") is not None


def read(word: str, language: str) -> str:
    """`word`, which holds a digit, as it is said in `language`: "en", "zh" or "ja".  Where that is not known, as it is.

    The first word of a language loads its grammar, which takes a third of a second for English; `warm` does it before.
    """
    if _LEFT_ALONE.match(word):
        return word
    try:
        said = str(_normaliser(language).normalize(_THOUSANDS.sub("", word)))
    except Exception as error:  # A grammar that has no path for a word fails in an assertion of its own.
        log.debug("%r is left as it is: %r", word, error)
        return word
    return said if said.strip() else word


def warm() -> None:
    """Load the grammar of English.  Raises ImportError where it is not installed."""
    _normaliser("en").normalize("1")


@cache
def _normaliser(language: str) -> Any:
    from wetext import Normalizer

    return Normalizer(lang=language, operator="tn")
