"""Takes the picture of docs/trace.md: a recorded run of the real engine, in a real browser.

    python -m tests.e2e.trace_picture docs/trace.png [trace.jsonl]

Ten listeners, each with a network and a buffer, report their real positions.  One interrupts, one pauses; and once the
engine's process is stopped for a second, as a machine does that is shared with others.  What the picture says is what
that machine did at that moment.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import sync_playwright

from breeze_rtc.clock import MS, SECOND, MonotonicClock, ns_to_samples, samples_to_ns
from breeze_rtc.errors import Overloaded
from breeze_rtc.playback import PlaybackReport
from breeze_rtc.runtime.engine import Engine, Speech
from breeze_rtc.scheduling.stream import Priority
from breeze_rtc.scheduling.timeline import Timeline
from breeze_rtc.timeline_page import page as html_of

from .conftest import chromium

clock = MonotonicClock()

NETWORK_NS = 40 * MS
BUFFER_NS = 80 * MS
REPORT_EVERY_NS = 200 * MS
STALL_AT_S, STALL_S = 4.4, 1.0


@dataclass(frozen=True)
class Listener:
    """Who comes when, what is said to them, and what they do about it."""

    at_s: float
    text: str
    interrupts_at_s: float | None = None
    pauses_s: tuple[float, float] | None = None
    is_file: bool = False
    """Nobody listens: a file is written."""


STORY = (
    "Once upon a time there was a lighthouse keeper who wrote down every ship that passed, and what it carried, "
    "and where it went, for forty years."
)
LISTENERS = (
    Listener(0.0, "Good morning. I can help you with your booking, your luggage, or anything else you need today."),
    Listener(0.4, STORY, interrupts_at_s=2.9),
    Listener(1.0, "The listener's real position tells the scheduler how much time there is."),
    Listener(
        1.5,
        "It will rain in the morning, and clear up in the afternoon. Take an umbrella if you leave before noon.",
        pauses_s=(1.2, 1.0),
    ),
    Listener(2.3, STORY, is_file=True),
    Listener(3.0, "Let me look that up for you."),
    Listener(3.3, "Your train leaves from platform nine at half past four, and it has a dining car."),
    Listener(4.25, "The listener's real position tells the scheduler how much time there is."),
    Listener(5.9, "Your train leaves from platform nine at half past four, and it has a dining car."),
    Listener(6.1, "Let me look that up for you."),
)


class Player:
    """A loudspeaker behind a network and a buffer, moved on every 10 ms."""

    def __init__(self, engine: Engine, speech: Speech, listener: Listener) -> None:
        self._engine = engine
        self._speech = speech
        self._listener = listener
        self._arrivals: list[tuple[int, int]] = []
        self.is_complete = False

    def send(self, samples: int) -> None:
        self._arrivals.append((clock.now() + NETWORK_NS, samples))

    async def play(self) -> None:
        """Until all has been heard, or the listener interrupts."""
        loop = asyncio.get_running_loop()
        listener, rate = self._listener, self._engine.sample_rate
        heard_ns = last = next_report = 0
        while True:
            await asyncio.sleep(0.01)
            if not self._arrivals:
                continue
            now = clock.now()
            started_at = self._arrivals[0][0] + BUFFER_NS
            there_ns = sum(samples_to_ns(samples, rate) for at, samples in self._arrivals if at <= now)
            since_s = (now - started_at) / SECOND
            begin_s, long_s = listener.pauses_s or (0.0, 0.0)
            is_playing = not begin_s <= since_s < begin_s + long_s
            if now > started_at and is_playing:
                heard_ns = min(there_ns, heard_ns + now - max(last, started_at))
            last = now
            if now >= max(next_report, started_at):
                next_report = now + REPORT_EVERY_NS
                heard = ns_to_samples(heard_ns, rate)
                report = PlaybackReport(self._speech.stream, heard, now, NETWORK_NS + BUFFER_NS, is_playing=is_playing)
                loop.call_later(NETWORK_NS / SECOND, self._engine.report, report)
            if listener.interrupts_at_s is not None and heard_ns >= listener.interrupts_at_s * SECOND:
                await asyncio.sleep(NETWORK_NS / SECOND)
                self._speech.cancel()
                return
            if self.is_complete and heard_ns >= sum(samples_to_ns(samples, rate) for _, samples in self._arrivals):
                return


async def listen(engine: Engine, seed: int, listener: Listener) -> None:
    await asyncio.sleep(listener.at_s)
    priority = Priority.BATCH if listener.is_file else Priority.LIVE
    speech = engine.speak(seed=seed, priority=priority, interactive=not listener.is_file)
    player = Player(engine, speech, listener)
    speech.push(listener.text)
    speech.end()
    try:
        async with asyncio.TaskGroup() as tasks:
            if not listener.is_file:
                tasks.create_task(player.play())
            async for chunk in speech:
                player.send(chunk.samples)
            player.is_complete = True
    except* Overloaded as refused:
        print(f"one listener was refused: {refused.exceptions[0]}")


async def stall(engine: Engine) -> None:
    await asyncio.sleep(STALL_AT_S)
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGSTOP)
    await asyncio.sleep(STALL_S)
    os.kill(engine.pid, signal.SIGCONT)


async def record(trace: Path) -> None:
    async with Engine("nano", trace=trace) as engine, asyncio.TaskGroup() as tasks:
        for seed, listener in enumerate(LISTENERS):
            tasks.create_task(listen(engine, seed, listener))
        tasks.create_task(stall(engine))


def main(picture: str, trace: str = "") -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(trace) if trace else Path(folder) / "calls.jsonl"
        if not path.exists():
            asyncio.run(record(path))
        page_path = Path(folder) / "page.html"
        with path.open(encoding="utf-8") as lines:
            page_path.write_text(html_of(Timeline(lines), "calls.jsonl"))
        with sync_playwright() as playwright, chromium(playwright) as browser:
            page = browser.new_page(viewport={"width": 1400, "height": 1010})
            page.goto(page_path.as_uri())
            page.wait_for_timeout(300)
            page.screenshot(path=picture)


if __name__ == "__main__":
    main(*sys.argv[1:])
