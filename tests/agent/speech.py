"""Spoken test sentences: of espeak-ng, and of a human reader."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import wave
from pathlib import Path

import av
import numpy as np
import pytest


def spoken(text: str, voice: str = "en-us", *, rate: int = 16_000) -> np.ndarray:
    """`text` as mono float32 at `rate`; the test is skipped where espeak-ng is not installed."""
    if shutil.which("espeak-ng") is None:
        pytest.skip("espeak-ng is not installed")
    made = subprocess.run(["espeak-ng", "-v", voice, "--stdout", text], check=True, capture_output=True).stdout
    with wave.open(io.BytesIO(made)) as file:
        # espeak-ng writes its header before it knows the length, so what was read counts.
        samples = np.frombuffer(file.readframes(10_000_000), dtype=np.int16)
        source_rate = file.getframerate()
    resampler = av.AudioResampler(format="flt", layout="mono", rate=rate)
    frame = av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
    frame.sample_rate = source_rate
    frames = [*resampler.resample(frame), *resampler.resample(None)]
    return np.concatenate([frame.to_ndarray().reshape(-1) for frame in frames]).astype(np.float32)


LIBRIVOX = Path("/usr/share/pocketsphinx/test/data/librivox")


def human() -> list[tuple[np.ndarray, str]]:
    """Clips of a LibriVox reader, mono float32 at 16 kHz, and what she reads; skipped where Debian's are missing."""
    if not LIBRIVOX.exists():
        pytest.skip("human speech is not installed. On Debian: sudo apt-get install pocketsphinx-testdata")
    clips = []
    for line in (LIBRIVOX / "transcription").read_text().splitlines():
        found = re.fullmatch(r"(?:<s> )?(.*?)(?: </s>)? \((\S+)\)", line.strip())
        assert found is not None, line
        with wave.open(str(LIBRIVOX / f"{found[2]}.wav")) as file:
            assert file.getframerate() == 16_000
            samples = np.frombuffer(file.readframes(file.getnframes()), dtype=np.int16)
        clips.append((samples.astype(np.float32) / 32_768, found[1]))
    return clips
