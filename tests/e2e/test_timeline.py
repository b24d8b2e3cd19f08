"""The page of a recorded run, in a browser: it draws, moves, and says why each step was chosen."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from breeze_rtc.clock import MS
from breeze_rtc.scheduling.chunking import LADDER
from breeze_rtc.scheduling.machines import H100_GRAPH_COSTS, H100_SPECS, warmed_up
from breeze_rtc.scheduling.scheduler import Scheduler
from breeze_rtc.scheduling.simulator import LazyCapture, SimulatedListener, Utterance, simulate
from breeze_rtc.scheduling.timeline import Timeline
from breeze_rtc.scheduling.trace import TraceWriter
from breeze_rtc.timeline_page import page as html_of

LISTENER = SimulatedListener(network_ns=30 * MS, buffer_ns=80 * MS, report_every_ns=200 * MS)
IMPATIENT = SimulatedListener(network_ns=30 * MS, report_every_ns=200 * MS, barge_in_samples=24_000)


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    """Forty streams, eight at a time, on a simulated machine that stalls now and then."""
    lines: list[str] = []
    source = random.Random(5)
    scheduler = Scheduler(
        specs=H100_SPECS,
        sample_rate=24_000,
        frame_samples=1_920,
        slots=16,
        kv_pages=1_000,
        page_tokens=16,
        costs=warmed_up(H100_GRAPH_COSTS, H100_SPECS, LADDER),
        trace=TraceWriter(lines.append),
    )
    simulate(
        scheduler,
        [Utterance(frames=source.randint(12, 60), listener=LISTENER if k % 5 else IMPATIENT) for k in range(40)],
        costs=H100_GRAPH_COSTS,
        sample_rate=24_000,
        frame_samples=1_920,
        concurrency=8,
        uniform=source.random,
        captures=LazyCapture(every_steps=200, stall_ns=900 * MS),
    )
    return Timeline(lines)


@pytest.fixture(scope="module")
def page(quiet_browser: Browser, timeline: Timeline, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    path: Path = tmp_path_factory.mktemp("timeline") / "page.html"
    path.write_text(html_of(timeline, "<i>calls</i>.jsonl"))
    page = quiet_browser.new_page(viewport={"width": 1400, "height": 860})
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("request", lambda request: faults.append(request.url) if not request.url.startswith("file:") else None)
    page.goto(path.as_uri())
    yield page
    page.close()
    assert faults == []


def colours(page: Page, canvas: str) -> int:
    """How many different colours are on a canvas once it has been drawn."""
    count: int = page.evaluate(
        """async (id) => {
            await new Promise((drawn) => requestAnimationFrame(() => setTimeout(drawn)));
            const canvas = document.getElementById(id);
            const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            return new Set(new Uint32Array(data.buffer)).size;
        }""",
        canvas,
    )
    return count


def picture(page: Page) -> Any:
    """What is on the main canvas now."""
    return page.evaluate(
        """async () => {
            await new Promise((drawn) => requestAnimationFrame(() => setTimeout(drawn)));
            return document.getElementById("plot").toDataURL();
        }"""
    )


def test_the_head_says_the_figures_of_the_run(page: Page, timeline: Timeline) -> None:
    """Those of the summary; a name is text, whatever is in it."""
    summary = timeline.summary()
    head = page.inner_text("header")
    assert "<i>calls</i>.jsonl" in head
    assert f"Steps\n{summary.steps:,}" in head
    assert f"Missed deadlines\n{summary.missed} in {summary.missed_streams} streams" in head
    assert f"{round(100 * summary.busy)} %" in head
    assert all(stage in head for stage in ("text", "prefill", "backbone", "depth", "codec"))


def test_both_canvases_are_drawn(page: Page) -> None:
    """An empty one has a single colour."""
    assert colours(page, "plot") > 10
    assert colours(page, "overview") > 5


def test_a_click_on_the_machine_says_why_the_step_was_chosen(page: Page, timeline: Timeline) -> None:
    """The reason, the time and its prediction; the keys walk to the next step and its reason."""
    page.click("#plot", position={"x": 500, "y": 70})
    first = int(page.inner_text("#panel h2").split()[1].rstrip(":"))
    for number, key in ((first, "."), (first + 1, ","), (first, None)):
        line = timeline.steps[number]
        panel = page.inner_text("#panel")
        assert f"Step {number}:" in panel
        assert line.step.why.value in panel.lower()
        assert f"Bucket\n{line.step.bucket}" in panel
        assert page.locator("#panel tr.in").count() == len(line.step.rows)
        if key:
            page.keyboard.press(key)


def test_wheel_keys_and_buttons_move_the_picture(page: Page) -> None:
    """Each of them shows something else, and the whole run comes back as it was."""
    page.keyboard.press("Escape")
    page.click("#fit")
    page.mouse.move(0, 0)
    whole = picture(page)
    seen = {whole}
    page.mouse.move(600, 500)
    page.mouse.wheel(0, -600)
    seen.add(picture(page))
    for key in ("ArrowRight", "+", "ArrowDown", "v", "r"):
        page.keyboard.press(key)
        seen.add(picture(page))
    assert len(seen) == 7
    for key in ("v", "r", "0"):
        page.keyboard.press(key)
    page.mouse.move(0, 0)
    assert picture(page) == whole


def test_the_next_missed_deadline_is_one_key_away(page: Page, timeline: Timeline) -> None:
    """The stream it belongs to is shown, with how many of its chunks were late."""
    page.keyboard.press("m")
    late = min(
        (line for line in timeline.streams if line.missed),
        key=lambda line: next(sound.at_ns for sound in line.sounds if sound.late_ns),
    )
    panel = page.inner_text("#panel")
    assert f"Stream #{late.stream}" in panel
    assert f"{late.missed} chunk" in panel


def repeated(data: dict[str, Any], times: int) -> dict[str, Any]:
    """A run that is this one over and over; see `Timeline.data` for what is summed up and what is not."""
    steps, rows, one = data["steps"], data["rows"], data["streams"]
    long = data | {"span": times * data["span"], "streams": []}
    long["steps"] = {name: column * times for name, column in steps.items()}
    long["steps"]["begin"] = steps["begin"] + (times - 1) * [
        steps["begin"][0] + data["span"] - sum(steps["begin"]),
        *steps["begin"][1:],
    ]
    long["rows"] = {name: column * times for name, column in rows.items()}
    long["rows"]["stream"] = [stream + k * len(one) for k in range(times) for stream in rows["stream"]]
    for shift in (k * data["span"] for k in range(times)):
        for stream in one:
            positions = stream["positions"]
            moved = {
                "opened": stream["opened"] + shift,
                "ended": stream["ended"] + shift,
                "texts": [[at + shift, tokens] for at, tokens in stream["texts"]],
                "sounds": [[at + shift, *rest] for at, *rest in stream["sounds"]],
                "frames": [stream["frames"][0] + shift, *stream["frames"][1:]],
                "positions": positions
                | {name: [positions[name][0] + shift, *positions[name][1:]] for name in ("at", "dry")},
            }
            long["streams"].append(stream | moved)
    return long


def test_a_long_run_does_not_freeze_the_browser(
    quiet_browser: Browser, timeline: Timeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 40,000 steps, which are 100,000 lines of a trace, every picture takes a fraction of a second."""
    data = repeated(timeline.data(), -(-40_000 // len(timeline.steps)))
    monkeypatch.setattr(timeline, "data", lambda: data)
    path = tmp_path / "long.html"
    path.write_text(html_of(timeline, "long"))
    page = quiet_browser.new_page(viewport={"width": 1400, "height": 860})
    page.goto(path.as_uri())
    assert colours(page, "plot") > 10
    took_ms = page.evaluate(
        """async () => {
            const plot = document.getElementById("plot");
            const took = [];
            for (let i = 0; i < 12; i++) {
                const began = performance.now();
                plot.dispatchEvent(new WheelEvent("wheel", { deltaY: -150, clientX: 500, clientY: 400 }));
                await new Promise((drawn) => requestAnimationFrame(() => setTimeout(drawn)));
                took.push(performance.now() - began);
            }
            return took.sort((a, b) => a - b);
        }"""
    )
    page.close()
    assert took_ms[len(took_ms) // 2] < 300, took_ms
