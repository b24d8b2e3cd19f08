"""A sound that is no speech, in a real Chromium: the agent holds its breath and goes on where the ear was."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from playwright.sync_api import Playwright

sys.path += [str(Path(__file__).parent.parent / name) for name in ("agent", "server", "testing", "transport")]
from barge_ins import STORY, STORYTELLER
from page import serving
from speech import spoken

from breeze_rtc.testing import ToneVoice

from .conftest import chromium, held, microphone_flags, write_wav
from .test_demo import visit
from .test_heard_words import recording

RATE = 48_000


def test_a_sound_without_words_costs_the_listener_none(playwright: Playwright, loop: Any, tmp_path: Path) -> None:
    """Somebody says "ah" over the story three times.  Each time it is silent at once; what is heard in the end is every
    word, in order and once, and nearly all of them exactly as long as they were said."""
    ah = spoken("ah", rate=RATE)
    loud = np.flatnonzero(np.abs(ah) > 0.1 * np.abs(ah).max())
    ah = ah[loud[0] :][: round(0.3 * RATE)] / np.abs(ah).max() * 0.5
    microphone = np.concatenate([np.zeros(5 * RATE, np.float32), *[ah, np.zeros(3 * RATE, np.float32)] * 3])
    voice = ToneVoice(words_per_minute=200)
    flags = microphone_flags(write_wav(tmp_path / "ah.wav", microphone, RATE))
    with held(loop, serving(STORYTELLER, engine=voice)) as hall:
        with chromium(playwright, *flags) as browser, visit(browser, hall.http) as visitor:
            visitor.page.click("#start")
            visitor.until(visitor.reports, "the page reports")
            visitor.type("go")
            stream = visitor.spoken()
            visitor.until(lambda: len([m for m in visitor.sent if m["type"] == "flushed"]) >= 3, "three holds")
            held_at = len(STORY[: visitor.heard(stream)].split())
            visitor.until(lambda: len(STORY[: visitor.heard(stream)].split()) > held_at + 3, "the agent goes on")
            visitor.page.click("#interrupt")
            end = visitor.ends(stream)
            visitor.pause(0.4)
            ear = recording(visitor, voice)
        words = [heard for heard in ear.words if heard.word.stream == stream]
        assert [heard.word.index for heard in words] == list(range(len(words)))
        assert abs(len(words) - len(STORY[: end["chars"]].split())) <= 1
        assert len(words) > 15
        errors_s = [heard.sounded_s - heard.word.voiced_s for heard in words[:-1]]
        print(len(words), np.round(errors_s, 3), ear.gaps_s)
        # A player stretches sound where the machine keeps it waiting, a word or two at a time.
        assert min(errors_s) > -0.1
        assert float(np.quantile(np.abs(errors_s), 0.8)) < 0.05
        assert len([gap for gap in ear.gaps_s if gap > 0.5]) >= 3
    assert hall.server.metrics.interruptions.labels("false")._value.get() == 3
