"""The closed loop with real listeners: who does not listen is not spoken to, and nothing is made for them."""

from __future__ import annotations

import sys
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
from playwright.sync_api import Browser

sys.path += [str(Path(__file__).parent.parent / name) for name in ("server", "testing", "transport")]
from barge_ins import STORY, STORYTELLER
from page import serving

from breeze_rtc.testing import Recording, ToneVoice

from .conftest import held
from .test_demo import TAP_RATE, Visitor, visit

LEAD_S = 1.2
"""How far an interactive stream is made ahead (`Policy`), and the longest chunk on top of it."""
CHUNK_S = 0.64

PAUSE = "() => { document.getElementById('audio').pause(); return performance.timeOrigin + performance.now(); }"
PLAY = """async () => {
  await document.getElementById('audio').play();
  return performance.timeOrigin + performance.now();
}"""


def metric(address: str, name: str) -> float:
    """The sum of a counter's values."""
    text = urllib.request.urlopen(f"{address}/metrics").read().decode()
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{name}_total"))


def test_a_paused_tab_pauses_generation_and_a_resumed_one_hears_the_rest(server: str, quiet_browser: Browser) -> None:
    """Once the lead is there, no step runs for a listener who has paused; then the story goes on to its last word
    without a gap of ours."""
    with visit(quiet_browser, server) as visitor:
        visitor.page.click("#start")
        visitor.ends(visitor.spoken())
        visitor.type("Tell me a story.")
        story = visitor.spoken(after=1)
        visitor.until(lambda: visitor.heard(story) > 20, "the story is under way")
        visitor.page.evaluate(PAUSE)
        visitor.until(lambda: visitor.reports()[-1]["paused"], "the page says that it is paused")
        visitor.page.wait_for_timeout(1_500)  # Until the lead is made, and the figures have come.
        steps, heard = metric(server, "breeze_stage_steps"), visitor.heard(story)
        visitor.page.wait_for_timeout(2_500)
        assert metric(server, "breeze_stage_steps") == steps
        assert visitor.heard(story) == heard
        before = visitor.got("stats")[-1]["gaps"]
        visitor.page.evaluate(PLAY)
        # The lead is there, so that even a machine with much else to do has no gap now.
        visitor.until(lambda: visitor.heard(story) > heard, "it goes on")
        assert visitor.got("stats")[-1]["gaps"] == before
        end = visitor.ends(story)
        assert (end["interrupted"], end["chars"]) == (False, len(visitor.text(story)))
        assert metric(server, "breeze_stage_steps") > steps


def test_after_a_pause_no_word_is_missing_and_none_is_heard_twice(quiet_browser: Browser, loop: Any) -> None:
    """Paused in the middle of words, three times: at the ear they follow each other as in the text."""
    voice = ToneVoice(words_per_minute=170)
    with held(loop, serving(STORYTELLER, engine=voice)) as hall, visit(quiet_browser, hall.http) as visitor:
        visitor.page.click("#start")
        visitor.until(visitor.reports, "the page reports")
        visitor.type("go")
        stream = visitor.spoken()
        pauses = []
        for chars in (25, 60, 95):
            visitor.until(lambda chars=chars: visitor.heard(stream) > chars, "the words are heard")
            paused_ms = visitor.page.evaluate(PAUSE)
            visitor.page.wait_for_timeout(1_200)
            pauses.append((paused_ms, visitor.page.evaluate(PLAY)))
        visitor.until(lambda: visitor.heard(stream) > 140, "more is heard")
        visitor.page.click("#interrupt")
        visitor.ends(stream)
        ear = at_the_ear(visitor, voice, pauses)
    words = [heard.word.text.strip() for heard in ear.words if heard.word.stream == stream]
    assert words == STORY.split()[: len(words)]
    assert len(words) > 15


def at_the_ear(visitor: Visitor, voice: ToneVoice, pauses: list[tuple[float, float]]) -> Recording:
    """What the page's element played: its track runs on while it is paused, unheard."""
    taken = visitor.recording()
    keep = np.ones(taken.samples.size, bool)
    for pause in pauses:
        first, last = np.searchsorted(taken.block_ms, pause)
        keep[first * 128 : last * 128] = False
    return Recording(taken.samples[keep], TAP_RATE, voice.words, 0.0)


def test_a_barge_in_throws_away_no_more_than_the_lead(server: str, quiet_browser: Browser) -> None:
    """What was made and never heard: the bound on what is made ahead, a chunk, and what was on its way."""
    with visit(quiet_browser, server) as visitor:
        visitor.page.click("#start")
        visitor.ends(visitor.spoken())
        for turn in range(3):
            visitor.type("Tell me a story.")
            story = visitor.spoken(after=1 + turn)
            visitor.until(lambda story=story: visitor.heard(story) > 60, "the story is under way")
            path_s = visitor.got("stats")[-1]["path_ms"] / 1_000
            before = metric(server, "breeze_wasted_audio_seconds")
            visitor.page.click("#interrupt")
            visitor.ends(story)
            wasted_s = metric(server, "breeze_wasted_audio_seconds") - before
            assert wasted_s < LEAD_S + CHUNK_S + path_s + 0.1
