"""A voice store over a folder, an executor that speaks in its voices, and a recording to clone."""

from __future__ import annotations

import io
import time
import wave
from pathlib import Path

import numpy as np
from executor_driver import ExecutorDriver
from numpy.typing import NDArray

from breeze_rtc.models.speech_model import SpeechModel
from breeze_rtc.runtime.messages import AddVoice, Open
from breeze_rtc.runtime.voice_store import VoiceStore

WORDS = "What was said here."
TEXT = "And this is said now."


def recording(seed: int = 1, seconds: float = 1.3) -> bytes:
    """A WAV file of noise whose level moves."""
    rng = np.random.default_rng(seed)
    samples = round(seconds * 24_000)
    sound = rng.normal(0, 0.1, samples) * np.abs(np.sin(np.arange(samples) / 3_000))
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(24_000)
        out.writeframes((sound * 32_767).astype("<i2").tobytes())
    return file.getvalue()


class Studio:
    """An executor with a store over a folder."""

    def __init__(self, model: SpeechModel, folder: Path, *, prefix_pages: int = 64) -> None:
        self.driver = ExecutorDriver(model, prefix_pages=prefix_pages)
        self.store = VoiceStore(model, self.driver.executor, folder)
        self._streams = 0

    def add(self, name: str, data: bytes, transcript: str = WORDS) -> str:
        """Make a voice; the error's name, or nothing."""
        self.store.add(AddVoice(1, name, transcript, data))
        while not (done := self.store.added()):
            time.sleep(0.002)
        return done[0].error

    def open(self, slot: int, message: Open, text: str) -> None:
        """Open a stream with its whole text."""
        rows = self.store.rows(message)
        speaker = self.store.speaker(message)
        segments = speaker.frontend.push(text) + speaker.frontend.end()
        voice = {"prefixes": speaker.prefixes, "heard": speaker.heard}
        self.driver.open(message.stream, slot, segments, seed=message.seed, sampling=message.sampling, **voice)
        assert self.driver.streams[message.stream].rows == rows

    def say(
        self,
        voice: str,
        text: str = TEXT,
        frames: int = 6,
        *,
        instruction: str = "",
        language: str = "",
        **sampling: float,
    ) -> tuple[NDArray[np.float32], int]:
        """The sound of one stream, and how many tokens it had to have encoded."""
        self._streams += 1
        stream = self._streams
        self.open(3, Open(stream, voice, 7, sampling, 0, False, instruction, language=language), text)
        tokens = self.driver.streams[stream].prompt
        sound = self.driver.speak(stream, frames)
        assert self.driver.streams[stream].error == ""
        self.driver.close(stream)
        return sound, tokens
