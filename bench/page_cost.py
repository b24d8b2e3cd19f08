"""What does it cost a listener's machine that the page tells what is heard?

A headless Chromium plays a tone from a peer connection in the same page; nothing else is on that page.  In turn it is
only played, played with the page's own `Playback` while nobody speaks, and while the agent speaks.  The difference of
the processor time that the page's threads used, by the kernel's counters, is what the telling costs; the time spent
in JavaScript is Chromium's own count (`ScriptDuration`, which includes the waits for other threads).

    python bench/page_cost.py [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from origin import origin
from playwright.sync_api import Browser, CDPSession, Page, sync_playwright

from tests.e2e.conftest import chromium
from tests.e2e.test_page import PLAY, WEB, Files

WARM_UP_MS = 5_000
THREADS = {"DedicatedWorker", "WebRTC_Signalin"}
"""Beside the page's main thread, as Chromium and the kernel name them.  Those that carry and play sound are left out:
they do the same in every state, and vary by more than what is measured."""


def page_process(browser: Browser) -> list[int]:
    """The renderers, of which all but one do nothing."""
    answer = browser.new_browser_cdp_session().send("SystemInfo.getProcessInfo")
    return [process["id"] for process in answer["processInfo"] if process["type"] == "renderer"]


def cpu_ms(processes: list[int]) -> float:
    """Processor time, in ms so far, of the threads that the telling runs on."""
    threads = [thread for pid in processes for thread in Path(f"/proc/{pid}/task").iterdir()]
    return sum(
        int((thread / "schedstat").read_text().split()[0]) / 1e6
        for thread in threads
        if thread.name == thread.parent.parent.name or (thread / "comm").read_text().strip() in THREADS
    )


def script_ms(devtools: CDPSession) -> float:
    metrics = devtools.send("Performance.getMetrics")["metrics"]
    return 1000 * next(float(metric["value"]) for metric in metrics if metric["name"] == "ScriptDuration")


def measure(page: Page, devtools: CDPSession, processes: list[int], seconds: float) -> tuple[float, float]:
    """Processor time and time in JavaScript, in ms per second."""
    page.wait_for_timeout(1_500)
    start, cpu, script = time.monotonic(), cpu_ms(processes), script_ms(devtools)
    page.wait_for_timeout(1_000 * seconds)
    took = time.monotonic() - start
    return (cpu_ms(processes) - cpu) / took, (script_ms(devtools) - script) / took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    seconds, rounds = (4, 2) if arguments.quick else (10, 4)
    rows: list[dict[str, tuple[float, float]]] = []
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), partial(Files, directory=WEB)) as files,
        sync_playwright() as playwright,
        chromium(playwright) as browser,
    ):
        threading.Thread(target=files.serve_forever, daemon=True).start()
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{files.server_port}")
        page.evaluate("document.body.replaceChildren(document.getElementById('audio'))")
        connect, make = PLAY.split("  window.playback = ")
        page.evaluate(f"async () => {{ {connect} window.make = () => {{ window.playback = {make} }}; }}")
        devtools = page.context.new_cdp_session(page)
        devtools.send("Performance.enable")
        processes = page_process(browser)
        version = browser.version
        page.evaluate("make(); playback.speechBegins(1)")  # compiles what the first round would pay for
        page.wait_for_timeout(WARM_UP_MS)
        for number in range(rounds):
            page.evaluate("ending.abort()")
            row = {"plain": measure(page, devtools, processes, seconds)}
            page.evaluate("window.ending = new AbortController(); make()")
            row["idle"] = measure(page, devtools, processes, seconds)
            page.evaluate("playback.speechBegins(1)")
            row["speaking"] = measure(page, devtools, processes, seconds)
            rows.append(row)
            print(f"round {number + 1}: " + ", ".join(f"{k} {c:.1f} ms/s" for k, (c, _) in row.items()), flush=True)
        files.shutdown()
    figures = {
        f"{state}_percent": round(statistics.median(row[state][0] - row["plain"][0] for row in rows) / 10, 2)
        for state in ("idle", "speaking")
    }
    figures["speaking_script_percent"] = round(statistics.median(row["speaking"][1] for row in rows) / 10, 2)
    if arguments.json:
        arguments.json.write_text(json.dumps(origin(chromium=version) | {"rounds": rows, **figures}, indent=1))
    print("RESULT " + " ".join(f"{name}={value}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
