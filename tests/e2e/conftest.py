"""A real Chromium, and the server it calls."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import threading
import wave
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray
from playwright.sync_api import Browser, Playwright, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
START_LIMIT_S = 120

Held = TypeVar("Held")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """These tests go last: Playwright keeps an event loop running, beside which no other test could run its own."""
    here = Path(__file__).parent
    items.sort(key=lambda item: here in item.path.parents)
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def playwright() -> Iterator[Playwright]:
    if CHROMIUM is None:
        pytest.skip("Chromium is missing, so the page is not tested. On Debian: sudo apt-get install chromium")
    with sync_playwright() as running:
        yield running


def network_flags() -> list[str]:
    """Chromium finds no path on a machine that has the loopback interface only, unless it is told to use it."""
    if any(name != "lo" for _, name in socket.if_nameindex()):
        return []
    return ["--allow-loopback-in-peer-connection", "--disable-features=WebRtcHideLocalIpsWithMdns"]


@contextmanager
def chromium(playwright: Playwright, *flags: str) -> Iterator[Browser]:
    """A headless browser.  It has no sound card; its stand-in pulls sound at the right pace, which is all we need."""
    browser = playwright.chromium.launch(
        executable_path=CHROMIUM,
        args=["--autoplay-policy=no-user-gesture-required", *network_flags(), *flags],
    )
    try:
        yield browser
    finally:
        browser.close()


def microphone_flags(wav: Path | None) -> tuple[str, ...]:
    """A microphone that says what is in `wav`, once, from the moment it is opened; None: permission is denied."""
    if wav is None:
        return ("--use-fake-device-for-media-stream", "--deny-permission-prompts")
    return (
        "--use-fake-device-for-media-stream",
        "--use-fake-ui-for-media-stream",
        f"--use-file-for-fake-audio-capture={wav}%noloop",
    )


def write_wav(path: Path, samples: NDArray[np.float32], rate: int) -> Path:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())
    return path


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """A running loop beside the one that Playwright keeps."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@contextmanager
def held(loop: asyncio.AbstractEventLoop, context: AbstractAsyncContextManager[Held]) -> Iterator[Held]:
    """What an async context gives, while a task of another loop holds it."""
    over = asyncio.Event()
    given: Future[Held] = Future()

    async def hold() -> None:
        async with context as held:
            given.set_result(held)
            await over.wait()

    task = asyncio.run_coroutine_threadsafe(hold(), loop)
    wait((given, task), 20, FIRST_COMPLETED)
    if task.done():
        task.result()
    try:
        yield given.result(0)
    finally:
        loop.call_soon_threadsafe(over.set)
        task.result(30)


@pytest.fixture(scope="session")
def quiet_browser(playwright: Playwright, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser whose user has a microphone and says nothing."""
    silence = write_wav(tmp_path_factory.mktemp("mic") / "silence.wav", np.zeros(48_000, np.float32), 48_000)
    with chromium(playwright, *microphone_flags(silence)) as browser:
        yield browser


@pytest.fixture(scope="session")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server writes down what its scheduler was told."""
    return tmp_path_factory.mktemp("trace") / "calls.jsonl"


@pytest.fixture(scope="session")
def server(playwright: Playwright, trace: Path) -> Iterator[str]:
    """The address of a running server, as a user starts it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "breeze_rtc.cli", "serve", "--port", "0", "--trace", str(trace)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    lines: list[str] = []
    timer = threading.Timer(START_LIMIT_S, process.kill)
    timer.start()
    try:
        for line in process.stdout:
            lines.append(line)
            address = next((word for word in line.split() if word.startswith("http://")), None)
            if address:
                break
        else:
            pytest.fail("the server ended before it could answer:\n" + "".join(lines))
        timer.cancel()
        # Read on, or a full pipe would stop the server.
        threading.Thread(target=lambda: lines.extend(process.stdout or []), daemon=True).start()
        yield address.rstrip("/")
    finally:
        timer.cancel()
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
