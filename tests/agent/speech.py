"""Spoken test sentences, from espeak-ng."""

from __future__ import annotations

import io
import shutil
import subprocess
import wave

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
