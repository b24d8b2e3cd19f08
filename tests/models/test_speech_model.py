"""The model as a whole: loading by name, voices, and the front end of models that speak noise."""

from __future__ import annotations

import pytest

from breeze_rtc.errors import UnknownVoice
from breeze_rtc.models.speech_model import ByteFrontend, SpeechModel


@pytest.mark.parametrize(("name", "feed", "frame"), [("tiny", "prefix", 1920), ("tiny-pointer", "per_frame", 960)])
def test_load_by_name(name: str, feed: str, frame: int) -> None:
    """The two test models need no file and say how they are fed."""
    model = SpeechModel.load(name)
    assert (model.config.feed, model.frame_samples, model.sample_rate) == (feed, frame, 24_000)
    assert model.licence_note == ""


def test_unknown_voice_is_named() -> None:
    """A voice that the model lacks is refused, with those it has."""
    model = SpeechModel.load("tiny-pointer")
    model.frontend()
    with pytest.raises(UnknownVoice, match=r"'nobody'.*default"):
        model.frontend("nobody")


@pytest.mark.parametrize("text", ["", "a", "Hello, you. " * 9, "naïve — 東京, ok!", "\ud800"])
def test_ends_reach_the_end_of_the_text(text: str) -> None:
    """However the text is cut, `ends` never goes back and its last is the length of the text."""
    frontend = ByteFrontend(whole=False)
    segments = [segment for char in text for segment in frontend.push(char)] + frontend.end()
    ends = [end for segment in segments for end in segment.ends]
    assert ends == sorted(ends)
    assert (ends[-1] if ends else 0) == len(text)
    assert all(len(segment.tokens) >= 3 for segment in segments[:-1])
    at_once = ByteFrontend(whole=False)
    assert at_once.push(text) + at_once.end() == segments


def test_a_prefix_model_waits_for_the_whole_text() -> None:
    """Nothing is cut before the end."""
    frontend = ByteFrontend(whole=True)
    assert frontend.push("one. two. ") == []
    assert len(frontend.end()) == 1
