"""What keeps a listener from hearing, and whether the server knows."""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from .conftest import CHROMIUM
from .remote import ChromiumWindow, RemoteVisitor, chromium_window
from .test_demo import visit


def plays(trace: Path, stream: int) -> bool:
    """Whether the scheduler was last told that the listener of `stream` plays."""
    lines = [line for line in trace.read_text().splitlines() if line.startswith('["report"')]
    told = [fields for line in lines[-40:] if (fields := json.loads(line))[2] == stream]
    return bool(told[-1][-2])


def test_sound_that_nobody_hears_is_known(server: str, quiet_browser: Browser, trace: Path) -> None:
    """Muted, at volume nought, paused, or with its track off: the scheduler learns it at once, and that it is over."""
    with visit(quiet_browser, server) as visitor:
        visitor.page.click("#start-typing")
        visitor.until(lambda: visitor.heard(visitor.spoken()) > 0, "the greeting is heard")
        visitor.type("Tell me a story.")
        story = visitor.spoken(after=1)
        visitor.until(lambda: visitor.heard(story) > 0, "the story is heard")
        for off, on in (
            ("sound.click()", "sound.click()"),
            ("audio.volume = 0", "audio.volume = 1"),
            ("audio.pause()", "audio.play()"),
            (
                "audio.srcObject.getTracks()[0].enabled = false",
                "audio.srcObject.getTracks()[0].enabled = true",
            ),
        ):
            visitor.page.evaluate(f"void ({off})")
            visitor.until(lambda: not plays(trace, story), f"the server knows of {off}", limit_s=1.5)
            before = visitor.heard(story)
            visitor.pause(0.3)
            assert visitor.heard(story) <= before + 6, off  # one word
            assert ("The sound is paused" in " ".join(visitor.notices())) == ("pause" in off)
            visitor.page.evaluate(f"void ({on})")
            visitor.until(lambda: plays(trace, story), f"the server knows of {on}", limit_s=1.5)
            assert visitor.notices() == []


@pytest.fixture
def window() -> Iterator[ChromiumWindow]:
    if CHROMIUM is None:
        pytest.skip("Chromium is missing, so the page is not tested. On Debian: sudo apt-get install chromium")
    with chromium_window() as window:
        yield window


def test_a_hidden_tab_keeps_its_pace(server: str, window: ChromiumWindow) -> None:
    """A browser slows the timers of a hidden, silent tab to one a second; what the page tells is not slowed."""
    tab = window.tab()
    visitor = RemoteVisitor(tab, server)
    window.tab()
    tab.evaluate("(() => { window.ticks = 0; setInterval(() => { ticks += 1; }, 50); })()")
    visitor.pause(2.5)
    assert tab.evaluate("[document.visibilityState, ticks < 5]") == ["hidden", True]
    visitor.press("start-typing")
    greeting = visitor.spoken()
    visitor.until(lambda: visitor.heard(greeting) > 0, "the greeting is heard behind another tab")
    pings = [message["t_ms"] for message in visitor.sent if message["type"] == "ping"][:5]
    assert max(b - a for a, b in itertools.pairwise(pings)) < 500
    assert visitor.ends(greeting)["chars"] == len(visitor.text(greeting))
    told = [report for report in visitor.reports() if report["rtp"] is not None]
    assert not any(report["visible"] for report in told)
    between = [b["t_ms"] - a["t_ms"] for a, b in itertools.pairwise(told)]
    assert statistics.median(between[: -len(between) // 4]) < 350
    assert visitor.faults == []


def test_a_frozen_page_has_said_so(server: str, window: ChromiumWindow, trace: Path) -> None:
    """The last thing it says before its scripts stop is that nothing is heard; awake again, it hears the rest.

    Reproduction 50 (WebAudio#790, metronome#25).
    """
    tab = window.tab()
    visitor = RemoteVisitor(tab, server)
    visitor.press("start-typing")
    visitor.until(lambda: visitor.heard(visitor.spoken()) > 0, "the greeting is heard")
    visitor.type("Tell me a story.")
    story = visitor.spoken(after=1)
    visitor.until(lambda: visitor.heard(story) > 0, "the story is heard")
    tab.call("Page.setWebLifecycleState", state="frozen")
    time.sleep(0.5)
    assert not plays(trace, story)
    # A browser closes the sockets of a frozen page, so the call comes back on another.
    tab.call("Page.setWebLifecycleState", state="active")
    visitor.listen()
    heard = visitor.heard(story)
    visitor.until(lambda: visitor.heard(story) > heard + 20, "the story goes on")
    steps = [message["chars"] for message in visitor.got("heard", stream=story)]
    assert steps == sorted(steps)
    assert (visitor.faults, visitor.notices()) == ([], [])
