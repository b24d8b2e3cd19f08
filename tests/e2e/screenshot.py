"""Takes the README's picture of the page: a real call, a real barge-in.

    python -m tests.e2e.screenshot http://127.0.0.1:8000 web/screenshot.png [dark]

The server must be running.  What the picture's numbers say is what that machine did at that moment.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
from playwright.sync_api import sync_playwright

from .conftest import chromium, microphone_flags, write_wav
from .test_demo import Visitor, human_speech


def main(address: str, picture: str, scheme: str = "light") -> None:
    speech, rate = human_speech()
    pause = np.zeros(4 * rate, np.float32)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        microphone = write_wav(Path(folder) / "visitor.wav", np.concatenate([pause, speech[: 4 * rate], pause]), rate)
        with chromium(playwright, *microphone_flags(microphone)) as browser:
            look = {"color_scheme": scheme, "device_scale_factor": 1.5, "viewport": {"width": 1280, "height": 800}}
            visitor = Visitor(browser.new_page(**look))  # type: ignore[arg-type]
            visitor.page.goto(address)
            visitor.page.click("#start")
            assert visitor.ends(visitor.spoken())["interrupted"], "the greeting was over before the visitor spoke"
            visitor.ends(visitor.spoken(after=1))
            visitor.type("Tell me a story.")
            story = visitor.spoken(after=2)
            visitor.until(lambda: visitor.heard(story) > 90, "the story is under way")
            visitor.page.screenshot(path=picture)
            print(visitor.got("stats")[-1])


if __name__ == "__main__":
    main(*sys.argv[1:])
