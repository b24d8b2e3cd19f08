"""What of a slow voice's sound is kept back, so that nothing breaks off in the middle of a sentence.

A voice that makes `pace` seconds of speech in a second, less than one, falls behind by `1 / pace - 1` seconds with each
second that it still has to make, and by its stalls.  A sentence whose shortfall is in hand when it begins is heard
without a hole.  So a speech begins once what all of it will lack has been made, and is heard without a pause; one that
turns out longer, or a voice slower, than was known pauses between its sentences, where a speaker may.  A voice that
keeps up is never kept back.

Pure: no clock.  `Mouth` tells it what is made and where the listener is, and hands on what it gives out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import takewhile

from breeze_rtc.agent.transcript import CHARS_PER_SECOND
from breeze_rtc.playback import SpeechPacket, TextMark
from breeze_rtc.sentences import sentence_ends

KEEPS_UP = 1.3
"""A voice of this pace makes good its stalls of its own accord."""
USUAL_STALL_S, USUAL_STALL_EVERY_S, KNOWN_S = 0.6, 2.5, 10.0
"""How a slow voice stalls that nothing is known of: so long, once in so much of its sound.  What it has made until now
shows, bit by bit until that is `KNOWN_S`, how often it does."""
CHUNK_S = 0.32
"""Sound comes in pieces as long as that."""
MOST_S = 15.0
"""Of what a whole speech will lack, no more than this is in hand before it begins; the rest is waited for at its
sentences."""
PACKET_S = 0.02
_LONG_TEXT_S = 8.0  # a sentence of which so much is to come may never end


class Reserve:
    """The sound of one speech from the voice until it goes to the sink.  Positions are samples from its start."""

    def __init__(self, sample_rate: int) -> None:
        self.made_samples = 0
        """How much sound there is."""
        self.out_samples = 0
        """How much of it was given out."""
        self._sample_rate = sample_rate
        self._packet_samples = round(PACKET_S * sample_rate)
        self._packets: deque[SpeechPacket] = deque()
        self._marks: deque[TextMark] = deque()
        # The text so far; whether it is all; the ends of its sentences that have no place in the sound yet.
        self._text = ""
        self._has_all_text = False
        self._cut_chars = 0
        self._ends: deque[int] = deque()
        # Where sentences begin in the sound, of what is still to be given out.
        self._breaks: deque[int] = deque()
        self._last_mark = TextMark(0, 0)

    @property
    def held_samples(self) -> int:
        """Sound that is kept back."""
        return self.made_samples - self.out_samples

    @property
    def is_kept_back(self) -> bool:
        return bool(self._packets)

    def know(self, text: str, *, is_all: bool = False) -> None:
        """The whole text so far."""
        self._text, self._has_all_text = text, is_all
        found = sentence_ends(text, self._cut_chars)
        if found:
            self._cut_chars = found[-1]
            self._ends.extend(found)

    def make(self, end_samples: int, packets: tuple[SpeechPacket, ...], marks: tuple[TextMark, ...]) -> None:
        """Sound up to `end_samples` was made."""
        self.made_samples = end_samples
        self._packets.extend(packets)
        self._marks.extend(marks)
        for mark in marks:
            self._last_mark = mark
            # A mark may leave out the full stop.
            while self._ends and mark.chars >= len(self._text[: self._ends[0]].rstrip(_STOPS)):
                self._ends.popleft()
                self._breaks.append(mark.samples)

    def take_all(self) -> tuple[tuple[SpeechPacket, ...], tuple[TextMark, ...]]:
        """All that there is goes to the sink: packets, and the marks of the sound up to their end."""
        packets = tuple(self._packets)
        self._packets.clear()
        self.out_samples = self.made_samples
        return packets, self._marks_out()

    def take(
        self, lead_s: float, *, pace: float, stumble_s: float, known_s: float, usual_chars: int
    ) -> tuple[tuple[SpeechPacket, ...], tuple[TextMark, ...]]:
        """What of a slow voice's sound goes to the sink now, as in `take_all`.

        lead_s: sound in the sink that has not left it.  pace: see above, with what its stalls have cost.  stumble_s:
        the longest of them.  known_s: how much sound that is learnt from.  usual_chars: how long speeches are, for one
        that has not all its text.
        """
        unknown = max(0.0, 1 - known_s / KNOWN_S)
        stall_s = CHUNK_S + max(stumble_s, USUAL_STALL_S * unknown)
        # Of one that is known, one stall more than usual in ten seconds.
        stalls_per_s = unknown * USUAL_STALL_S / USUAL_STALL_EVERY_S + stumble_s / 10

        def shortfall_s(seconds: float) -> float:
            return seconds * (1 / pace - 1 + stalls_per_s) + stall_s if seconds else 0.0

        taken: list[SpeechPacket] = []
        while self._packets and (not self._is_at_break() or self._may_begin(lead_s, shortfall_s, stall_s, usual_chars)):
            until = self._next_break()
            while self._packets and self._packets[0].start_samples < until:
                taken.append(self._packets.popleft())
                lead_s += PACKET_S
            self.out_samples = taken[-1].start_samples + self._packet_samples
        return tuple(taken), self._marks_out()

    def _marks_out(self) -> tuple[TextMark, ...]:
        marks = tuple(takewhile(lambda mark: mark.samples <= self.out_samples, self._marks))
        for _ in marks:
            self._marks.popleft()
        return marks

    def _is_at_break(self) -> bool:
        """Whether what is given out next begins a sentence."""
        while self._breaks and self._breaks[0] + self._packet_samples <= self.out_samples:
            self._breaks.popleft()
        return self.out_samples == 0 or (bool(self._breaks) and self._breaks[0] <= self.out_samples)

    def _next_break(self) -> float:
        return next((samples for samples in self._breaks if samples > self.out_samples), float("inf"))

    def _end_chars(self) -> int | None:
        """Where in the text the sentence ends that is begun next; None where that is not known yet."""
        if self._next_break() < float("inf"):
            return 0
        return self._ends[0] if self._ends else len(self._text) if self._has_all_text else None

    def _may_begin(
        self, lead_s: float, shortfall_s: Callable[[float], float], stall_s: float, usual_chars: int
    ) -> bool:
        """Whether the next sentence will be heard without a hole if it begins now."""
        in_hand_s = lead_s + self.held_samples / self._sample_rate
        end_chars = self._end_chars()
        chars = len(self._text) if self._has_all_text else max(len(self._text), usual_chars)
        all_s = self._seconds_to(chars)
        if end_chars is None:
            if self._seconds_to(len(self._text)) < _LONG_TEXT_S:
                return False
            end_chars = len(self._text)
        needed_s = shortfall_s(self._seconds_to(end_chars))
        if self.out_samples == 0:
            # Two stalls more than it is likely to have: it is begun at the best moment of an estimate that moves.
            of_all_s = shortfall_s(all_s) + 2 * stall_s
            # Without marks it is all one sentence.
            has_marks = self._last_mark.samples > 0
            needed_s = max(needed_s, min(of_all_s, MOST_S) if has_marks else of_all_s)
        return in_hand_s >= needed_s

    def _seconds_to(self, chars: int) -> float:
        """How long the sound is that is still to be made for the text up to `chars`."""
        mark, made_s = self._last_mark, self.made_samples / self._sample_rate
        # The first second of a usual rate, then its own.
        per_s = (CHARS_PER_SECOND + mark.chars) / (1 + mark.samples / self._sample_rate)
        since_mark_s = made_s - mark.samples / self._sample_rate
        return max(0.0, (chars - mark.chars) / per_s - since_mark_s)


_STOPS = " \n.!?\u3002\uff01\uff1f\u2026\"'\u201d\u2019)]\u300d"
