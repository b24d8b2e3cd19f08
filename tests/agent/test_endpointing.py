"""Whether the user has finished."""

from __future__ import annotations

import pytest

from breeze_rtc.agent.endpointing import sounds_finished


@pytest.mark.parametrize("text", ["I want to", "Well, um...", "Put it in the", "I would like a and", "so I'm"])
def test_a_last_word_that_asks_for_another_is_not_the_end(text: str) -> None:
    """Recognisers put a full stop behind anything, so punctuation says nothing."""
    assert not sounds_finished(text)


@pytest.mark.parametrize("text", ["", "Stop", "What is it for?", "I think so.", "Thank you", "你好", "Ja, und"])
def test_other_texts_sound_finished(text: str) -> None:
    assert sounds_finished(text)
