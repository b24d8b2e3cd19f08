"""The wheel holds all it needs: installed into an empty folder, it serves the page and speaks."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parent.parent
MAX_VOICE_BYTES = 16_000_000


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    subprocess.run([*pip, "--wheel-dir", str(folder), str(ROOT)], check=True)
    (built,) = folder.glob("breeze_rtc-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A folder that holds nothing but the wheel, and the environment in which Python finds the package there first."""
    site = tmp_path_factory.mktemp("site")
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site))
    subprocess.run([*pip, str(wheel)], check=True)
    return site, os.environ | {"PYTHONPATH": str(site)}


@pytest.fixture(scope="module")
def served(installed: tuple[Path, dict[str, str]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of `breeze-rtc serve`, started from an empty folder; it prints the address once it can answer."""
    site, environment = installed
    empty = tmp_path_factory.mktemp("empty")
    server = subprocess.Popen(
        [str(site / "bin" / "breeze-rtc"), "serve", "--port", "0"],
        cwd=empty,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    try:
        for line in server.stdout:
            address = next((word for word in line.split() if word.startswith("http://")), None)
            if address:
                yield address.rstrip("/")
                break
        else:
            pytest.fail(f"the server ended with {server.wait()} before it printed its address")
    finally:
        server.terminate()
        server.wait(timeout=20)


def test_the_wheel_holds_the_page_and_the_voice_and_stays_small(wheel: Path) -> None:
    """The page's files and the nano voice are inside; the voice is within its 16 MB."""
    with zipfile.ZipFile(wheel) as archive:
        sizes = {entry.filename: entry.file_size for entry in archive.infolist()}
    assert {
        "breeze_rtc/web/index.html",
        "breeze_rtc/web/main.js",
        "breeze_rtc/py.typed",
        "breeze_rtc/timeline_page/drawing.js",
    } <= set(sizes)
    voice = sum(size for name, size in sizes.items() if name.startswith("breeze_rtc/voices/"))
    assert 0 < voice <= MAX_VOICE_BYTES


def test_the_package_is_imported_from_the_wheel(installed: tuple[Path, dict[str, str]]) -> None:
    """The tests below look at the wheel, not at the source tree."""
    site, environment = installed
    where = subprocess.run(
        [sys.executable, "-c", "import breeze_rtc; print(breeze_rtc.__file__)"],
        env=environment,
        cwd=site,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    assert Path(where).is_relative_to(site)


def test_the_served_page_and_its_modules_are_there(served: str) -> None:
    """`/` is the page, and every module it names is served."""
    page = httpx.get(f"{served}/")
    assert page.status_code == 200
    assert "breeze" in page.text.lower()
    assert httpx.get(f"{served}/main.js").status_code == 200


def test_the_wheel_speaks(served: str) -> None:
    """The voice inside the wheel makes sound: half a second or more for a short sentence."""
    body = {"input": "Hello from the wheel.", "response_format": "pcm"}
    speech = httpx.post(f"{served}/v1/audio/speech", json=body, timeout=60)
    assert speech.status_code == 200
    assert len(speech.content) > 24_000
    assert any(speech.content)
