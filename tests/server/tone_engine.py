"""An engine that hums: every word is 0.4 s of a tone, made at once, with real Opus packets and exact marks.

The tone is the same for all words, or one of twelve by the word's place, so that a recording tells the words apart.

Texts with BOOM in them fail in the depth stage after one word.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any, Self

import numpy as np

from breeze_rtc.errors import BadText, EngineClosed, StepFailed, UnknownVoice
from breeze_rtc.media.opus import SpeechEncoder
from breeze_rtc.playback import PlaybackReport, TextMark
from breeze_rtc.runtime.engine import MAX_TEXT_CHARS, SpeechChunk, checked_sampling

RATE = 24_000
WORD = 9_600
LEAD = 12 * RATE // 10
TONES_HZ = tuple(440 + 120 * place for place in range(12))
_SOUNDS = [(0.3 * 32_767 * np.sin(2 * np.pi * hz * np.arange(WORD) / RATE)).astype(np.int16) for hz in TONES_HZ]


class ToneSpeech:
    def __init__(self, engine: ToneEngine, stream: int, *, interactive: bool) -> None:
        self.stream = stream
        self.made = 0
        self.heard = 0
        self.text = ""
        self.is_cancelled = False
        self._engine = engine
        self._interactive = interactive
        self._spoken_chars = 0
        self._has_ended = False
        self._change = asyncio.Event()
        self._encoder = SpeechEncoder(RATE)

    def push(self, text: str) -> None:
        if len(self.text) + len(text) > MAX_TEXT_CHARS:
            raise BadText("too much text")
        self.text += text
        self._change.set()

    def end(self) -> None:
        self._has_ended = True
        self._change.set()

    def nudge(self) -> bool:
        return False

    def cancel(self) -> None:
        self.is_cancelled = True
        self._engine.open.pop(self.stream, None)
        self._change.set()

    def report(self, report: PlaybackReport) -> None:
        self.heard = report.heard_samples
        self._change.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SpeechChunk:
        while not self.is_cancelled:
            word = re.compile(r"\s*\S+(?=\s)" if not self._has_ended else r"\s*\S+").match(
                self.text, self._spoken_chars
            )
            if word and (not self._interactive or self.made - self.heard < LEAD):
                await asyncio.sleep(0.005)
                if "BOOM" in self.text and self.made:
                    self.cancel()
                    raise StepFailed("depth", "boom")
                return self._chunk(word.end())
            if self._has_ended and not word:
                break
            self._change.clear()
            await self._change.wait()
        self._engine.open.pop(self.stream, None)
        raise StopAsyncIteration

    def _chunk(self, end_chars: int) -> SpeechChunk:
        start, self.made, self._spoken_chars = self.made, self.made + WORD, end_chars
        sound = _SOUNDS[start // WORD % len(_SOUNDS) if self._engine.tells_words_apart else 0]
        packets = self._encoder.encode(sound)
        return SpeechChunk(start, WORD, tuple(packets), sound.tobytes(), (TextMark(self.made, end_chars),))


class ToneEngine:
    """Stands in for `Engine`."""

    def __init__(self, *, tells_words_apart: bool = False) -> None:
        self.tells_words_apart = tells_words_apart
        self.model_name = "tones"
        self.sample_rate = RATE
        self.frame_samples = 960
        self.reads_numbers = True
        self.pace: float | None = None
        self.stumble_s = 0.0
        self.voices = ("high", "low")
        self.licence_note = ""
        self.restarts = 0
        self.is_running = False
        self.reports = 0
        self.open: dict[int, ToneSpeech] = {}
        self.speeches: list[ToneSpeech] = []

    async def __aenter__(self) -> Self:
        self.is_running = True
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.is_running = False

    @property
    def stats(self) -> dict[str, Any]:
        streams = {
            str(stream): {"lead_ns": (speech.made - speech.heard) * 1_000_000_000 // RATE, "slack_ns": 100_000_000}
            for stream, speech in self.open.items()
        }
        return {"streams": streams, "stages": {"CODEC": {"steps": 3, "seconds": 0.5}}}

    def speak(
        self,
        *,
        voice: str | None = None,
        instruction: str = "",
        language: str = "",
        seed: int | None = None,
        sampling: dict[str, float] | None = None,
        interactive: bool = True,
        priority: int = 0,
    ) -> ToneSpeech:
        if not self.is_running:
            raise EngineClosed("the engine is down")
        if voice is not None and voice not in self.voices:
            raise UnknownVoice(voice, self.voices)
        checked_sampling(sampling or {})
        speech = ToneSpeech(self, len(self.speeches) + 1, interactive=interactive)
        self.speeches.append(speech)
        self.open[speech.stream] = speech
        return speech

    def report(self, report: PlaybackReport) -> None:
        self.reports += 1
        if report.stream in self.open:
            self.open[report.stream].report(report)
