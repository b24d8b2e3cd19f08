"""The demo in a stock Firefox, which tells less about its player than Chromium does."""

from __future__ import annotations

import statistics

import pytest

from .remote import FIREFOX, RemoteVisitor, firefox

pytestmark = pytest.mark.skipif(
    FIREFOX is None, reason="Firefox is missing, so it is not tested. On Debian: sudo apt-get install firefox-esr"
)


def test_firefox_hears_the_greeting_and_types(server: str) -> None:
    """Without a microphone: words light up as Firefox plays them, a typed turn is answered, an interruption cuts.

    Reproduction 49 (pipecat#2586): it does not wait for a microphone that never comes.
    """
    with firefox() as tab:
        visitor = RemoteVisitor(tab, server)
        visitor.press("start")
        greeting = visitor.spoken()
        assert [m["microphone"] for m in visitor.sent if m["type"] == "offer"] == [False]
        (notice,) = visitor.notices()
        assert "No microphone was found" in notice
        assert visitor.ends(greeting)["chars"] == len(visitor.text(greeting))
        steps = [message["chars"] for message in visitor.got("heard", stream=greeting)]
        assert len(set(steps)) >= 8
        measured = [report for report in visitor.reports() if report["rtp"] is not None]
        assert len(measured) >= 10
        assert statistics.median(report["age_ms"] for report in measured) < 60
        assert all(report["jitter_buffer_ms"] > 0 for report in measured[2:])
        assert visitor.got("stats")[-1]["source"] in {"context", "none"}

        visitor.type("Tell me a story.")
        story = visitor.spoken(after=1)
        visitor.until(lambda: visitor.heard(story) > 20, "the story is being heard")
        visitor.press("interrupt")
        end = visitor.ends(story)
        assert end["interrupted"]
        assert 0 < end["chars"] < len(visitor.text(story))
        assert visitor.faults == []
        assert len(visitor.notices()) == 1
