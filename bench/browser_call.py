"""What a visitor in a real Chromium gets: first sound at the ear, time to silence, gaps, bound of the position error.

A headless Chromium calls a running server and has the same short conversation again and again: type a question, listen,
cut in.  Every figure is the one the page shows, which rests on the browser's own playback position: the first sound is
counted from the turn to the ear, the stop from the decision to silence at the ear, and a gap is speech that ran dry in
mid-sentence.  Browser and server share this machine.

    breeze-rtc serve &
    python bench/browser_call.py [--quick] [--address URL] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from origin import origin
from playwright.sync_api import sync_playwright

from tests.e2e.conftest import chromium, microphone_flags
from tests.e2e.test_demo import Visitor

HEARD_CHARS = 80
"""How much of each answer is heard before the visitor cuts in: about five seconds."""


@dataclass(frozen=True)
class Turn:
    first_sound_ms: float
    stop_ms: float
    path_ms: float
    error_ms: float


def converse(visitor: Visitor, turns: int) -> tuple[list[Turn], int]:
    """The turns of one call, and its gaps.  The greeting is the warm-up."""
    visitor.page.click("#start-typing")
    visitor.ends(visitor.spoken())
    measured: list[Turn] = []
    gaps_before = visitor.got("stats")[-1]["gaps"]
    for turn in range(turns):
        visitor.type("Tell me a story.")
        story = visitor.spoken(after=1 + turn)
        visitor.until(lambda stream=story: visitor.heard(stream) > HEARD_CHARS, "the story is under way")
        speaking = visitor.got("stats")[-1]
        visitor.page.click("#interrupt")
        visitor.ends(story)
        told = len(visitor.got("stats"))
        visitor.until(lambda told=told: len(visitor.got("stats")) > told + 2, "the figures after the stop arrive")
        after = visitor.got("stats")[-1]
        measured.append(Turn(speaking["first_sound_ms"], after["stop_ms"], speaking["path_ms"], speaking["error_ms"]))
        print(f"turn {turn + 1}: {measured[-1]}", flush=True)
    return measured, visitor.got("stats")[-1]["gaps"] - gaps_before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--address", default="http://127.0.0.1:8000")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with sync_playwright() as playwright, chromium(playwright, *microphone_flags(None)) as browser:
        visitor = Visitor(browser.new_page())
        visitor.page.goto(arguments.address)
        turns, gaps = converse(visitor, 3 if arguments.quick else 10)
        chromium_version = browser.version
    columns = {name: [getattr(turn, name) for turn in turns] for name in Turn.__dataclass_fields__}
    figures = {
        f"{name.removesuffix('_ms')}_p50_ms": round(statistics.median(values)) for name, values in columns.items()
    }
    figures |= {"first_sound_worst_ms": round(max(columns["first_sound_ms"])), "gaps": gaps, "turns": len(turns)}
    if arguments.json:
        values = {"turns": [asdict(turn) for turn in turns], **figures}
        about = origin("aiortc", "torch", "av", chromium=chromium_version)
        arguments.json.write_text(json.dumps(about | values, indent=1))
    print("RESULT " + " ".join(f"{name}={value}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
