"""What the history says was heard is what was heard, in a real Chromium."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser

sys.path += [str(Path(__file__).parent.parent / name) for name in ("server", "testing", "transport")]
from barge_ins import STORY, STORYTELLER, moments, words_off
from page import serving

from breeze_rtc.testing import Recording, ToneVoice

from .conftest import held
from .test_demo import TAP_RATE, Visitor, visit

CUTS = 3


def recording(visitor: Visitor, voice: ToneVoice) -> Recording:
    """What the page's element played: silent where it was muted."""
    taken = visitor.recording()
    pcm = taken.samples.copy()
    muted_at = None
    for change in [*taken.mutes, {"ms": float("inf"), "muted": False}]:
        if change["muted"] and muted_at is None:
            muted_at = change["ms"]
        elif not change["muted"] and muted_at is not None:
            first, last = np.searchsorted(taken.block_ms, [muted_at, change["ms"]])
            pcm[first * 128 : last * 128] = 0
            muted_at = None
    return Recording(pcm, TAP_RATE, voice.words, 0.0)


@pytest.mark.parametrize(("words_per_minute", "has_underrun"), [(120, False), (170, True), (250, False)])
def test_words_at_random_cuts_are_within_one_in_chromium(
    quiet_browser: Browser, loop: Any, words_per_minute: int, has_underrun: bool
) -> None:
    """Cut by the page's button at three moments, with and without a hole of 1.5 s in what is heard.

    Reproduction 6 (livekit#2201), in a browser.
    """
    voice = ToneVoice(words_per_minute=words_per_minute, stalls={4: 2.0} if has_underrun else {})
    with held(loop, serving(STORYTELLER, engine=voice)) as hall, visit(quiet_browser, hall.http) as visitor:
        visitor.page.click("#start")
        visitor.until(visitor.reports, "the page reports")
        off: list[int] = []
        for cut, moment_s in enumerate(moments(seed=words_per_minute, count=CUTS, longest_s=4.5)):
            visitor.type("go")
            stream = visitor.spoken(after=cut)
            visitor.until(lambda stream=stream: visitor.heard(stream), "the first word is heard")
            visitor.page.wait_for_timeout(1_000 * moment_s)
            visitor.page.click("#interrupt")
            visitor.ends(stream)
            visitor.page.wait_for_timeout(400)
        ear = recording(visitor, voice)
        for end in visitor.got("speech_end"):
            words = [heard for heard in ear.words if heard.word.stream == end["stream"]]
            off.append(words_off(STORY[: end["chars"]], words))
            assert len(words) >= 1
        assert len(off) == CUTS
        assert max(off) <= 1, off
