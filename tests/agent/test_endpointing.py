"""Whether the user has finished."""

from __future__ import annotations

import asyncio
import importlib.util

import numpy as np
import pytest
from speech import human

from breeze_rtc.agent.endpointing import SmartTurn, sounds_finished
from breeze_rtc.errors import MissingExtra


@pytest.mark.parametrize("text", ["I want to", "Well, um...", "Put it in the", "I would like a and", "so I'm"])
def test_a_last_word_that_asks_for_another_is_not_the_end(text: str) -> None:
    """Recognisers put a full stop behind anything, so punctuation says nothing."""
    assert not sounds_finished(text)


@pytest.mark.parametrize("text", ["", "Stop", "What is it for?", "I think so.", "Thank you", "你好", "Ja, und"])
def test_other_texts_sound_finished(text: str) -> None:
    assert sounds_finished(text)


@pytest.mark.skipif(importlib.util.find_spec("pipecat") is not None, reason="pipecat-ai is installed")
def test_without_the_wheel_the_error_says_what_to_install() -> None:
    """And asks for nothing of its 0.9 GB of dependencies."""
    with pytest.raises(MissingExtra, match=r"an optional part: pip install --no-deps pipecat-ai==1\.14\.0$"):
        SmartTurn()


@pytest.mark.skipif(importlib.util.find_spec("pipecat") is None, reason="pip install --no-deps pipecat-ai==1.14.0")
def test_smart_turn_hears_that_a_reader_has_not_finished() -> None:
    """Of a person's sentences, cut in the middle, at least three in four are not over; of the whole ones, most are."""
    judge, silence = SmartTurn(), np.zeros(3_200, np.float32)

    async def is_over(turn: np.ndarray) -> bool:
        return await judge.is_over(np.concatenate((turn, silence)))

    clips = [clip for clip, _ in human()]
    cuts = [clip[: int(share * len(clip))] for clip in clips for share in (0.35, 0.5, 0.65, 0.8)]
    assert sum(asyncio.run(is_over(cut)) for cut in cuts) <= len(cuts) // 4
    assert sum(asyncio.run(is_over(clip)) for clip in clips) > len(clips) // 2
