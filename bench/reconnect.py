"""How long is a caller without sound when the network dies in mid-speech, and what is lost or heard twice?

A real Chromium on our page, through relays for UDP and TCP that go dead: first the path of the sound alone, then the
WebSocket with it, in turns.  The speech is a scale of tones, so the recording of the loudspeaker's track says what was
heard.  Times are the page's, from the cut on, and include the 20 ms at which this looks.

offer        the page has noticed, and offers another connection
word         the next word is heard (by the server's word)
repeated, missing   tones of the scale that were heard a second time for 0.1 s, or never

    python bench/reconnect.py [--quick] [--cuts N] [--seed N] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import itertools
import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from origin import origin
from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from e2e import test_reconnect as scale
from e2e.conftest import chromium, microphone_flags, write_wav

PAUSE_S = 3.0  # of undisturbed speech between two cuts


def measure(cuts: int) -> tuple[list[dict[str, float]], list[int]]:
    """For each cut what it took; and the tones that were heard, in order."""
    scale.WORDS = round(cuts * (PAUSE_S + 1.5) / 0.4)
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    taken = []
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        silence = write_wav(Path(folder) / "silence.wav", np.zeros(48_000, np.float32), 48_000)
        with (
            chromium(playwright, *microphone_flags(silence)) as browser,
            scale.calling(browser, loop) as (visitor, network, _),
        ):
            stream = visitor.spoken()
            visitor.until(lambda: visitor.heard(stream) > 3, "the scale is heard")
            for number in range(cuts):
                visitor.page.wait_for_timeout(PAUSE_S * 1000)
                if visitor.got("speech_end"):
                    break
                offers, began = len([m for m in visitor.sent if m["type"] == "offer"]), time.monotonic()
                network.cut()
                if number % 2:
                    network.tcp.cut()
                offer_ms = word_ms = heard = 0.0
                while not word_ms and time.monotonic() - began < 20:
                    visitor.page.wait_for_timeout(20)
                    now_ms = (time.monotonic() - began) * 1000
                    if not offer_ms and len([m for m in visitor.sent if m["type"] == "offer"]) > offers:
                        offer_ms, heard = now_ms, visitor.heard(stream)
                    if offer_ms and visitor.heard(stream) > heard:
                        word_ms = now_ms
                taken.append({"socket_too": float(number % 2), "offer_ms": offer_ms, "word_ms": word_ms})
            visitor.ends(stream)
            sound = np.frombuffer(base64.b64decode(visitor.page.evaluate(scale.TAKE)), "<i2")
    loop.call_soon_threadsafe(loop.stop)
    return taken, scale.tones_of(sound)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true", help="four cuts")
    parser.add_argument("--cuts", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1, help="nothing here is random; taken for the convention's sake")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    taken, tones = measure(4 if arguments.quick else arguments.cuts)
    # Where the browser stretches time, a tone may look like its neighbour for a moment.
    runs = [(tone, len(list(run))) for tone, run in itertools.groupby(tones)]
    order = [tone for tone, _ in itertools.groupby(tone for tone, windows in runs if windows >= 10)]
    figures: dict[str, float] = {"cuts": len(taken)}
    for kind, socket_too in (("path", 0.0), ("both", 1.0)):
        for name in ("offer_ms", "word_ms"):
            values = [cut[name] for cut in taken if cut["socket_too"] == socket_too]
            if values:
                figures[f"{kind}_{name[:-3]}_p50_ms"] = round(statistics.median(values))
                figures[f"{kind}_{name[:-3]}_worst_ms"] = round(max(values))
    figures["repeated"] = len(order) - len(set(order))
    figures["missing"] = len(set(range(max(order) + 1)) - set(order))  # the scale is longer than the cuts take
    if arguments.json:
        arguments.json.write_text(
            json.dumps(origin("aiortc", "aioice", "playwright") | figures | {"values": taken, "tones": tones}, indent=1)
        )
    print("RESULT " + " ".join(f"{name}={value:g}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
