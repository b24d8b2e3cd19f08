"""The position a call believes, against a recording of the loudspeaker."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from .conftest import CHROMIUM

BENCH = Path(__file__).parents[2] / "bench" / "playout_truth.py"


def test_the_position_is_what_leaves_the_loudspeaker(tmp_path: Path) -> None:
    """A few seconds of the benchmark, with room for a busy machine: within 20 ms in the middle, silent after a cut."""
    if CHROMIUM is None or shutil.which("pulseaudio") is None or shutil.which("parec") is None:
        pytest.skip("No loudspeaker to listen to. On Debian: sudo apt-get install chromium pulseaudio pulseaudio-utils")
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(BENCH), "--ways", "loss", "--seconds", "7", "--cuts", "3", "--json", str(figures)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(figures.read_text())
    way = said["ways"]["loss"]
    assert len(way["live"]) > 100
    assert np.median(np.abs(way["live"])) < 20
    assert np.mean(np.abs(way["live"]) <= np.array(way["bounds"])) > 0.7
    assert 0 < np.median(said["stop_ms"]) < 200
