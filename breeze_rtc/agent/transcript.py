"""What was said and, cut at the playhead, what was heard.

A speech grows at three places at once: text is pushed, sound is delivered with marks that say how far the text has been
spoken, and the listener's position follows behind.  A `Transcript` keeps the three in step.  Its law: at any moment
`heard + unheard` is the whole text, character for character.

Cuts fall on whole words.  Where the marks are far apart, or there are none, the place between them is read off the
clock in proportion, so that a cut never keeps a whole turn of which a second was heard, and never loses one of which
most was heard.
"""

from __future__ import annotations

import bisect
import math
import unicodedata
from dataclasses import dataclass
from typing import Literal

from breeze_rtc.playback import TextMark

CHARS_PER_SECOND = 14.0
"""A usual speaking rate of English, used only for text no mark has covered yet."""

_JOINERS = ("\u200d", "\ufe0e", "\ufe0f")
# Scripts written without spaces: Thai, Lao, Tibetan, Myanmar, Khmer.
_UNSPACED = ((0x0E00, 0x0FFF), (0x1000, 0x109F), (0x1780, 0x17FF))


@dataclass(frozen=True, slots=True)
class Message:
    """One entry of a call's history: what the user said, or what the user heard."""

    role: Literal["user", "assistant"]
    text: str
    interrupted: bool = False
    """The assistant was cut off after `text`."""


def word_floor(text: str, chars: int) -> int:
    """The largest place <= `chars` where `text` may be cut without splitting a word or a combined character."""
    cut = max(0, min(chars, len(text)))
    while 0 < cut < len(text) and not _may_cut(text, cut):
        cut -= 1
    return cut


def _may_cut(text: str, cut: int) -> bool:
    before, after = text[cut - 1], text[cut]
    if unicodedata.combining(after) or after in _JOINERS or before == "\u200d":
        return False
    if before.isspace():
        return False  # the space goes with what comes next
    return after.isspace() or _is_unspaced(before) or _is_unspaced(after)


def _is_unspaced(char: str) -> bool:
    """Each character may stand alone: CJK, and the scripts of South-East Asia that put no spaces between words."""
    if unicodedata.east_asian_width(char) in ("W", "F"):
        return True
    return any(first <= ord(char) <= last for first, last in _UNSPACED) and not unicodedata.combining(char)


class Transcript:
    """The text of one speech and how much of it has been heard.

    Positions are samples at `sample_rate` from the start of the stream.
    """

    def __init__(self, sample_rate: int) -> None:
        self.text = ""
        """All text pushed so far."""
        self.delivered_samples = 0
        """Samples handed to the sink."""
        self.heard_samples = 0
        """The listener's position; never goes back, never passes `delivered_samples`."""
        self.silent_chars = 0
        """Characters after the last mark that make no sound: markup."""
        self.is_complete = False
        """No more text or sound will come."""
        self._sample_rate = sample_rate
        self._mark_samples = [0]
        self._mark_chars = [0]

    def push(self, text: str) -> None:
        """Text was handed to the voice."""
        self.text += text

    def deliver(self, end_samples: int, marks: tuple[TextMark, ...]) -> None:
        """Sound up to `end_samples` was handed to the sink; marks that lie out of order are pulled in."""
        self.delivered_samples = max(self.delivered_samples, end_samples)
        for mark in marks:
            samples = max(mark.samples, self._mark_samples[-1])
            chars = min(max(mark.chars, self._mark_chars[-1]), len(self.text))
            self._mark_samples.append(samples)
            self._mark_chars.append(chars)

    def complete(self) -> None:
        """All sound was delivered: its end is the end of the text, whatever the marks say."""
        self.is_complete = True

    def hear(self, samples: int) -> None:
        """The listener reported a position; a late or impossible report changes nothing."""
        self.heard_samples = max(self.heard_samples, min(samples, self.delivered_samples))

    @property
    def heard_chars(self) -> int:
        """How many characters have been heard, in whole words."""
        heard = self.heard_samples
        if self.is_complete and heard >= self.delivered_samples:
            return len(self.text)
        if heard == 0:
            return 0
        return word_floor(self.text, self._chars_at(heard))

    @property
    def heard_text(self) -> str:
        return self.text[: self.heard_chars]

    @property
    def unheard_text(self) -> str:
        return self.text[self.heard_chars :]

    def words_within(self, samples: int) -> int:
        """How many words are counted otherwise if the position is off by so many samples, either way."""
        first, last = max(0, self.heard_samples - samples), min(self.heard_samples + samples, self.delivered_samples)
        ends = [word_floor(self.text, self._chars_at(at)) for at in (first, last)]
        return len(self.text[ends[0] : ends[1]].split())

    @property
    def next_mark_s(self) -> float:
        """Until a listener who goes on listening is at the next mark; infinite where none is known."""
        at = bisect.bisect_right(self._mark_samples, self.heard_samples)
        if at == len(self._mark_samples):
            return math.inf
        return (self._mark_samples[at] - self.heard_samples) / self._sample_rate

    @property
    def unheard_s(self) -> float:
        """Seconds of speech between the listener and the last text pushed; text without sound counts by its length."""
        unspoken_chars = 0 if self.is_complete else len(self.text) - self._mark_chars[-1] - self.silent_chars
        sound_s = (self.delivered_samples - self.heard_samples) / self._sample_rate
        since_mark_s = (self.delivered_samples - self._mark_samples[-1]) / self._sample_rate
        return sound_s + max(0.0, unspoken_chars / CHARS_PER_SECOND - max(0.0, since_mark_s))

    def _chars_at(self, heard: int) -> int:
        at = bisect.bisect_right(self._mark_samples, heard) - 1
        samples, chars = self._mark_samples[at], self._mark_chars[at]
        if at + 1 < len(self._mark_samples):
            to_samples, to_chars = self._mark_samples[at + 1], self._mark_chars[at + 1]
        elif self.is_complete:
            to_samples, to_chars = self.delivered_samples, len(self.text)
        else:
            # The next mark is not known yet: go on at a usual rate, but leave the last word open.
            seconds = (heard - samples) / self._sample_rate
            return min(chars + int(seconds * CHARS_PER_SECOND), max(chars, len(self.text) - 1))
        if to_samples <= samples:
            return to_chars
        return chars + (to_chars - chars) * (heard - samples) // (to_samples - samples)
