"""A voice whose words can be read back from any recording: the engine as it is, with tones in place of a model.

Scheduler, driver, Opus encoder and the engine's own face are the real ones; what is made up is how long a step takes
and the sound that it makes.  It runs on the loop it is used on, in virtual time and in real time alike, so it serves a
test's call and a real server (`VoiceServer(callbacks, engine=ToneVoice())`).
"""

from __future__ import annotations

import asyncio
import bisect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from breeze_rtc.agent.transcript import word_floor
from breeze_rtc.clock import MS, SECOND
from breeze_rtc.playback import TextMark
from breeze_rtc.runtime.driver import Driver, Speaker
from breeze_rtc.runtime.engine import Engine
from breeze_rtc.runtime.messages import Message, Ready
from breeze_rtc.scheduling.costs import CostTable
from breeze_rtc.scheduling.scheduler import Scheduler
from breeze_rtc.scheduling.step import Row, RowResult, Stage, StageSpec, Step, StepResult
from breeze_rtc.testing import tones
from breeze_rtc.testing.virtual_time import LoopClock

RATE = 24_000
FRAME_SAMPLES = 1_920
_SLOTS, _PAGE_TOKENS, _PAGES = 16, 16, 16 * 400
_BUCKETS = (1, 2, 4, 8, 16)
_COSTS = {Stage.TEXT: 1 * MS, Stage.PREFILL: 2 * MS, Stage.BACKBONE: 2 * MS, Stage.DEPTH: 2 * MS, Stage.CODEC: 4 * MS}
"""Of one step, CODEC of one frame in it: about what the nano voice takes on a laptop, a tenth of real time."""
_LETTERS = 4.7  # of an English word


@dataclass(frozen=True, slots=True)
class Word:
    """One word that was given to the voice; its tones have the symbol `number % tones.SYMBOLS`."""

    number: int
    stream: int
    index: int
    """Its place in the stream, from 0."""
    text: str
    """From the end of the word before to its own end: the texts of a stream's words together are its text, but for what
    follows the last."""
    end_chars: int
    start_samples: int
    samples: int
    """Its pause included."""

    @property
    def seconds(self) -> float:
        return self.samples / RATE

    @property
    def voiced_s(self) -> float:
        return self.seconds - tones.PAUSE_S


@dataclass(slots=True)
class _Stream:
    """State of one stream."""

    words: list[Word] = field(default_factory=list)
    encoded: int = 0
    has_all_text: bool = False
    begun: int = 0
    sound: list[NDArray[np.float32]] = field(default_factory=list)
    marks: list[TextMark] = field(default_factory=list)

    @property
    def samples(self) -> int:
        return self.words[-1].start_samples + self.words[-1].samples if self.words else 0


class ToneVoice(Engine):
    """An engine that speaks the tone alphabet.

    words_per_minute: of English text; a long word takes longer than a short one.
    stalls: the engine stands still for so many seconds before it makes the word of that number in a stream, counted
        from 0.  What is heard of it is a hole as long as that, less what had been made ahead.
    slowness: 1 makes speech ten times faster than it is heard, 10 just in time, more is slower than speech.  The engine
        has measured it when the first call begins.
    has_marks: without them nothing says where the words are, as with a model that was never aligned.
    reads_whole_text: it cannot begin before it has all of a stream's text, as models that take text as a prompt.
    errors: streams that fail, by the number of the word before which they do.
    """

    def __init__(
        self,
        *,
        words_per_minute: float = 170.0,
        stalls: Mapping[int, float] | None = None,
        slowness: float = 1.0,
        has_marks: bool = True,
        reads_whole_text: bool = False,
        errors: Sequence[int] = (),
    ) -> None:
        super().__init__("tones", process=False)
        self.words_per_minute = words_per_minute
        self.stalls = dict(stalls or {})
        self.slowness = slowness
        self.has_marks = has_marks
        self.reads_whole_text = reads_whole_text
        self.errors = set(errors)
        self.words: list[Word] = []
        """All words so far, in the order in which their text came."""
        self.made_samples: dict[int, int] = {}
        """Per stream, how much sound was made."""
        self._driving: asyncio.Task[None] | None = None

    @property
    def made_s(self) -> float:
        """Seconds of speech made so far."""
        return sum(self.made_samples.values()) / RATE

    @property
    def last_stream(self) -> int:
        """The newest stream; 0 before the first."""
        return self._last_stream

    def seconds(self, word: str) -> float:
        """How long a word takes, its pause included."""
        usual_s = 60 / self.words_per_minute
        letters = sum(char.isalnum() for char in word)
        return max(0.1, usual_s * (0.5 + 0.5 * letters / _LETTERS))

    async def _launch(self) -> None:
        clock = _EngineClock()
        line = _InLoop(self._hear)
        executor = _ToneExecutor(self, clock)
        scheduler = Scheduler(
            specs=executor.specs,
            sample_rate=RATE,
            frame_samples=FRAME_SAMPLES,
            slots=_SLOTS,
            kv_pages=_PAGES,
            page_tokens=_PAGE_TOKENS,
            costs=CostTable(
                {
                    # As long for many rows as for one.
                    (stage, bucket, frames): executor.step_ns(stage, frames)
                    for stage in Stage
                    for frames in (_BUCKETS if stage is Stage.CODEC else (1,))
                    for bucket in _BUCKETS
                }
            ),
            policy=self._policy,
        )
        driver = Driver(
            line=line,
            clock=clock,
            scheduler=scheduler,
            executor=executor,  # type: ignore[arg-type]
            speaker=lambda _open: Speaker(_Frontend(waits=self.reads_whole_text)),  # type: ignore[arg-type]
            max_frames=60 * 60 * RATE // FRAME_SAMPLES,
        )
        self._facts = Ready(
            self.model_name,
            RATE,
            FRAME_SAMPLES,
            ("tones", "other tones"),
            feed=executor.feed,
            frame_ns=scheduler.stats(clock.now()).frame_alone_ns,
        )
        self._link, self._peer = line.face, line  # type: ignore[assignment]
        self._driving = asyncio.create_task(_drive(driver, line, clock))

    async def close(self) -> None:
        await super().close()
        if self._driving is not None:
            self._driving.cancel()
            with suppress(asyncio.CancelledError):
                await self._driving


class _EngineClock:
    """The loop's time, or a little later: the engine is busy until then."""

    def __init__(self) -> None:
        self._clock = LoopClock()
        self._busy_until = 0

    def now(self) -> int:
        return max(self._clock.now(), self._busy_until)

    def spend(self, ns: int) -> None:
        self._busy_until = self.now() + ns

    def ahead_s(self) -> float:
        return max(0, self._busy_until - self._clock.now()) / SECOND


class _InLoop:
    """The line between the engine's face and its driver, and the peer that would hold it: all in one loop."""

    def __init__(self, heard: Callable[[Message], None]) -> None:
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.pid = None
        self.face = _Face(self)
        self.has_news = asyncio.Event()
        self._to_driver: list[Message] = []
        self._to_face: list[Message] = []
        self._heard = heard

    def wait(self) -> str:
        return "task ended"

    # The driver's end.

    def send(self, message: Message) -> None:
        self._to_face.append(message)

    def receive(self, timeout_ns: int | None) -> list[Message]:
        said, self._to_driver = self._to_driver, []
        self.has_news.clear()
        return said

    def deliver(self) -> None:
        """Tell the face what the driver has said."""
        said, self._to_face = self._to_face, []
        for message in said:
            self._heard(message)

    def say(self, message: Message) -> None:
        self._to_driver.append(message)
        self.has_news.set()


class _Face:
    """What the engine's face writes to."""

    def __init__(self, line: _InLoop) -> None:
        self.lost = line.lost
        self.send = line.say

    def close(self) -> None:
        """The driver's task is cancelled by whoever started it."""


async def _drive(driver: Driver, line: _InLoop, clock: _EngineClock) -> None:
    """What `Driver.run` does, on a loop: a step's time passes before what it made is sent."""
    while True:
        has_worked = driver.work()
        await asyncio.sleep(clock.ahead_s())
        line.deliver()
        if not has_worked and not line.has_news.is_set():
            idle_ns = driver.idle_ns()
            with suppress(TimeoutError):
                async with asyncio.timeout(None if idle_ns is None else idle_ns / SECOND):
                    await line.has_news.wait()
        for message in line.receive(0):
            driver.hear(message)
        line.deliver()


@dataclass(frozen=True, slots=True)
class _Spelt:
    """A word as the front end finds it."""

    text: str
    end_chars: int


class _Frontend:
    """Cuts text into words where the transcript may cut it, once it is known that they are over."""

    def __init__(self, *, waits: bool) -> None:
        self._text = ""
        self._spelt = 0
        self._waits = waits

    def push(self, text: str) -> list[list[_Spelt]]:
        self._text += text
        if self._waits:
            return []
        return self._words(len(self._text) - 1)

    def end(self) -> list[list[_Spelt]]:
        return self._words(len(self._text))

    def _words(self, known: int) -> list[list[_Spelt]]:
        found = []
        for cut in range(self._spelt + 1, known + 1):
            word = self._text[self._spelt : cut]
            if word_floor(self._text, cut) == cut and any(map(str.isalnum, word)):
                found.append(_Spelt(word, cut))
                self._spelt = cut
        return [found] if found else []


class _ToneExecutor:
    """Does what `Executor` promises.  A token is a word."""

    sample_rate = RATE
    frame_samples = FRAME_SAMPLES
    overlaps = False

    def __init__(self, voice: ToneVoice, clock: _EngineClock) -> None:
        self.feed = "prefix" if voice.reads_whole_text else "per_frame"
        self._voice = voice
        self._clock = clock
        row = StageSpec(max_rows=_BUCKETS[-1], buckets=_BUCKETS)
        tokens = StageSpec(max_rows=_BUCKETS[-1], buckets=_BUCKETS, max_tokens=1_024)
        self.specs = dict.fromkeys(Stage, row) | dict.fromkeys((Stage.TEXT, Stage.PREFILL), tokens)
        self._streams: dict[int, _Stream] = {}

    def graph_counts(self) -> dict[str, object]:
        return {}

    def open(
        self, stream: int, slot: int, *, seed: int, sampling: object, voice: object, prefixes: object, heard: object
    ) -> None:
        self._streams[stream] = _Stream()

    def add_text(self, stream: int, words: list[_Spelt]) -> int:
        state = self._streams[stream]
        for spelt in words:
            samples = round(self._voice.seconds(spelt.text) * RATE)
            word = Word(
                len(self._voice.words), stream, len(state.words), spelt.text, spelt.end_chars, state.samples, samples
            )
            self._voice.words.append(word)
            state.words.append(word)
        return len(words)

    def end_text(self, stream: int) -> None:
        self._streams[stream].has_all_text = True

    def step_ns(self, stage: Stage, frames: int) -> int:
        """How long a step takes, without stalls; frames: per row, of CODEC."""
        return round(_COSTS[stage] * frames * self._voice.slowness)

    def run(self, step: Step) -> StepResult:
        began = self._clock.now()
        self._clock.spend(self.step_ns(step.stage, step.rows[0].count if step.stage is Stage.CODEC else 1))
        rows = tuple(self._row(step.stage, row) for row in step.rows)
        return StepResult(rows, self._clock.now() - began)

    def take(self, stream: int) -> tuple[NDArray[np.float32], tuple[TextMark, ...]]:
        state = self._streams[stream]
        sound, marks = state.sound, state.marks
        state.sound, state.marks = [], []
        return np.concatenate(sound), tuple(marks) if self._voice.has_marks else ()

    def close(self, stream: int) -> None:
        self._streams.pop(stream, None)

    def _row(self, stage: Stage, row: Row) -> RowResult:
        state = self._streams[row.stream]
        match stage:
            case Stage.TEXT:
                state.encoded += row.count
            case Stage.PREFILL | Stage.BACKBONE:
                return self._frame(state, row.stream, row.start if stage is Stage.BACKBONE else 0)
            case Stage.CODEC:
                start, end = row.start * FRAME_SAMPLES, (row.start + row.count) * FRAME_SAMPLES
                self._sing(state, start, end)
                self._voice.made_samples[row.stream] = end
                return RowResult(row.stream, samples=end - start)
        return RowResult(row.stream)

    def _frame(self, state: _Stream, stream: int, frame: int) -> RowResult:
        if state.has_all_text and frame * FRAME_SAMPLES >= state.samples:
            return RowResult(stream, ended=True)
        at = bisect.bisect_right(state.words, frame * FRAME_SAMPLES, key=lambda word: word.start_samples) - 1
        if at in self._voice.errors:
            return RowResult(stream, error="the tones have gone")
        for word in range(state.begun, at + 1):
            self._clock.spend(round(self._voice.stalls.get(word, 0) * SECOND))
        state.begun = max(state.begun, at + 1)
        encoded = state.words[state.encoded - 1] if state.encoded else None
        known = encoded.start_samples + encoded.samples if encoded is not None else 0
        has_all = state.has_all_text and state.encoded == len(state.words)
        return RowResult(stream, wants_text=not has_all and known < (frame + 2) * FRAME_SAMPLES)

    def _sing(self, state: _Stream, start: int, end: int) -> None:
        """Make the samples [start, end) and the marks in them."""
        sound = np.zeros(end - start, np.float32)
        first = max(0, bisect.bisect_right(state.words, start, key=lambda word: word.start_samples) - 1)
        for word in state.words[first:]:
            if word.start_samples >= end:
                break
            tone = tones.sound(word.number, word.samples, RATE)
            a, b = max(start, word.start_samples), min(end, word.start_samples + word.samples)
            if a < b:
                sound[a - start : b - start] = tone[a - word.start_samples : b - word.start_samples]
            said = word.start_samples + round(word.voiced_s * RATE)
            if start < said <= end:
                state.marks.append(TextMark(said, word.end_chars))
        state.sound.append(sound)
