"""A call for the session alone, with faults that no real part has: known words, a listener of known delay."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from breeze_rtc.clock import SECOND
from breeze_rtc.playback import PlaybackReport, SpeechPacket, TextMark
from breeze_rtc.testing import run

__all__ = ["RATE", "WORD_SAMPLES", "FakeCall", "FakeVoice", "LoudnessActivity", "ScriptedEars", "now", "run"]

RATE = 24_000
PACKET = 480
WORD_SAMPLES = 9_600  # every word takes 0.4 s


def now() -> float:
    return asyncio.get_running_loop().time()


@dataclass(frozen=True)
class Chunk:
    start_samples: int
    samples: int
    packets: tuple[SpeechPacket, ...]
    marks: tuple[TextMark, ...]
    pcm: bytes = b""


class FakeReply:
    """Speaks each word once a space follows it, or the text has ended."""

    def __init__(self, stream: int, voice: FakeVoice) -> None:
        self.stream = stream
        self.text = ""
        self.is_cancelled = False
        self._voice = voice
        self._more = asyncio.Event()
        self._cancelled = asyncio.Event()
        self._ended = False

    def push(self, text: str) -> None:
        self.text += text
        self._more.set()

    def end(self) -> None:
        self._ended = True
        self._more.set()

    def nudge(self) -> bool:
        return False

    def cancel(self) -> None:
        self.is_cancelled = True
        self._cancelled.set()
        self._more.set()

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        spoken_chars = samples = 0
        while True:
            end = self._next_word_end(spoken_chars)
            if end is None:
                if (self._ended or self.is_cancelled) and not self._voice.delivers_late:
                    return
                if self.is_cancelled:
                    end = len(self.text)  # a step that was running still delivers, once
                    self._ended = True
                else:
                    self._more.clear()
                    await self._more.wait()
                    continue
            with suppress(TimeoutError):
                async with asyncio.timeout(self._voice.word_s):
                    await self._cancelled.wait()  # a cancelled stream ends at once
            if self.is_cancelled and not self._voice.delivers_late:
                return
            if self._voice.error is not None and samples >= self._voice.fails_after_words * WORD_SAMPLES:
                raise self._voice.error
            packets = tuple(SpeechPacket(samples + at, b"%d" % self.stream) for at in range(0, WORD_SAMPLES, PACKET))
            marks = (TextMark(samples + WORD_SAMPLES, end),) if self._voice.has_marks else ()
            yield Chunk(samples, WORD_SAMPLES, packets, marks)
            if self.is_cancelled:
                return
            spoken_chars, samples = end, samples + WORD_SAMPLES

    def _next_word_end(self, start: int) -> int | None:
        at = start
        while at < len(self.text) and self.text[at].isspace():
            at += 1
        if at == len(self.text):
            return None
        while at < len(self.text) and not self.text[at].isspace():
            at += 1
        return at if at < len(self.text) or self._ended else None


class FakeVoice:
    def __init__(
        self,
        *,
        word_s: float = 0.05,
        has_marks: bool = True,
        error: Exception | None = None,
        fails_after_words: int = 0,
        delivers_late: bool = False,
    ) -> None:
        self.sample_rate = RATE
        self.reads_numbers = True
        self.pace: float | None = None
        self.stumble_s = 0.0
        self.word_s = word_s
        self.has_marks = has_marks
        self.error = error
        self.fails_after_words = fails_after_words
        self.delivers_late = delivers_late
        self.replies: list[FakeReply] = []

    def speak(self, *, voice: str | None = None) -> FakeReply:
        reply = FakeReply(len(self.replies) + 1, self)
        self.replies.append(reply)
        return reply


class FakeSink:
    """Plays the streams one after another in virtual time, and remembers what was heard when."""

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s
        self.cleared: set[int] = set()
        self.ended: set[int] = set()
        self.late_packets = 0
        self.rests: list[tuple[int, int]] = []
        self.is_playing = True
        self.is_paused = False
        self._runs: dict[int, list[tuple[float, int, int]]] = {}  # stream -> (leaves at, start, samples)
        self._free_at = 0.0

    def write(self, stream: int, packets: tuple[SpeechPacket, ...]) -> None:
        if stream in self.cleared:
            self.late_packets += len(packets)
            return
        for packet in packets:
            self._queue(stream, packet.start_samples)

    def _queue(self, stream: int, start: int) -> None:
        at = float("inf") if self.is_paused else max(self._free_at, now())
        self._runs.setdefault(stream, []).append((at, start, PACKET))
        self._free_at = max(self._free_at, at + PACKET / RATE)

    def rest(self, stream: int, samples: int) -> None:
        self.rests.append((stream, samples))

    def end(self, stream: int) -> None:
        self.ended.add(stream)

    def clear(self, stream: int) -> int:
        if stream not in self.cleared:
            self.cleared.add(stream)
            self._runs[stream] = [run for run in self._runs.get(stream, []) if run[0] <= now()]
            self._free_at = now()
        return 0

    def pause(self, ear_s: float) -> None:
        """The ear falls silent having heard what left by `ear_s`; what it had of a packet then is heard again."""
        self.is_paused = True
        self._paused_at = ear_s

    def resume(self) -> None:
        self.is_paused = False
        self._free_at = now()
        for stream, runs in self._runs.items():
            heard = [run for run in runs if run[0] + run[2] / RATE <= self._paused_at]
            again = [] if stream in self.cleared else runs[len(heard) :]
            self._runs[stream] = heard
            for _, start, _ in again:
                self._queue(stream, start)

    def heard(self, stream: int, at_s: float) -> int:
        """The media position that the ear has reached; what it hears must be whole and in order."""
        if not self.is_playing:
            return 0
        ear_s = at_s - self.delay_s
        if self.is_paused:
            ear_s = min(ear_s, self._paused_at)
        position = end = 0
        for at, start, samples in self._runs.get(stream, []):
            if at > ear_s:
                break
            assert start == end, "sound is missing, or comes twice"
            end = start + samples
            position = start + min(samples, int((ear_s - at) * RATE))
        return position

    def spoken(self, stream: int) -> list[tuple[float, float]]:
        """The times at the ear between which the stream sounded without a hole."""
        spans: list[tuple[float, float]] = []
        for at, _, samples in self._runs.get(stream, []):
            begins, ends = at + self.delay_s, at + self.delay_s + samples / RATE
            if spans and begins - spans[-1][1] < 1e-6:
                spans[-1] = (spans[-1][0], ends)
            else:
                spans.append((begins, ends))
        return spans


class FakeCall:
    """The other end.  `delay_s` is the path from the sink to the ear, `flush_s` how long the page takes to confirm."""

    def __init__(self, *, delay_s: float = 0.1, flush_s: float = 0.03) -> None:
        self.sink = FakeSink(delay_s)
        self.closed = asyncio.Event()
        self.sent: list[dict[str, Any]] = []
        self.flushes: list[float] = []
        """When the ear was silenced, by a pause or for good."""
        self.resumes: list[float] = []
        self._flush_s = flush_s
        self._muted_at: float | None = None
        self._mic: asyncio.Queue[np.ndarray | None] = asyncio.Queue()

    def position(self, stream: int) -> PlaybackReport:
        at = now()
        if self._muted_at is not None and stream in self.sink.cleared:
            at = min(at, self._muted_at)
        heard = self.sink.heard(stream, at)
        is_playing = not self.sink.is_paused
        return PlaybackReport(stream, heard, int(at * SECOND), int(self.sink.delay_s * SECOND), is_playing=is_playing)

    def pause(self) -> None:
        self.flushes.append(now())
        self._muted_at = now() + self._flush_s / 2
        self.sink.pause(self._muted_at - self.sink.delay_s)

    def resume(self) -> None:
        if self.sink.is_paused:
            self.resumes.append(now())
            self.sink.resume()

    async def flush(self) -> None:
        if not self.sink.is_paused:
            self.pause()
        await asyncio.sleep(self._flush_s)
        self.sink.resume()

    def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    async def microphone(self) -> AsyncIterator[np.ndarray]:
        while (block := await self._mic.get()) is not None:
            yield block

    def speak(self, *, voiced_s: float, silent_s: float = 0.0) -> Coroutine[Any, Any, None]:
        """The user makes a sound of `voiced_s`, then is silent, in real (virtual) time."""

        async def speak() -> None:
            for value, seconds in ((1.0, voiced_s), (0.0, silent_s)):
                for _ in range(round(seconds / 0.032)):
                    await asyncio.sleep(0.032)
                    self._mic.put_nowait(np.full(512, value, dtype=np.float32))

        return speak()

    def messages(self, kind: str) -> list[dict[str, Any]]:
        return [message for message in self.sent if message["type"] == kind]


class LoudnessActivity:
    """Stands in for the voice activity model: ones are voice, zeros are not."""

    def open(self) -> LoudnessActivity:
        return self

    async def feed(self, block: np.ndarray) -> list[tuple[np.ndarray, float]]:
        return [(block, float(block[0]))] if len(block) else []


class ScriptedEars:
    """Hears what it was told to hear, one entry a reading."""

    def __init__(self, *texts: str, takes_s: float = 0.1) -> None:
        self.texts = list(texts)
        self.audio: list[np.ndarray] = []
        self._takes_s = takes_s

    async def transcribe(self, samples: np.ndarray) -> str:
        self.audio.append(samples)
        await asyncio.sleep(self._takes_s)
        return self.texts[min(len(self.audio), len(self.texts)) - 1] if self.texts else ""
