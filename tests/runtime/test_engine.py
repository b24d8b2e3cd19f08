"""The asyncio face in front of a tone, in a thread; `test_process` has a real model, in a process."""

from __future__ import annotations

import asyncio
import gc
import math
import sys
from collections.abc import AsyncIterator, Callable

import pytest
from tone_executor import Frontend, ToneExecutor, expected_pcm

from breeze_rtc.clock import MonotonicClock
from breeze_rtc.errors import (
    BadRequest,
    BadSampling,
    BadText,
    CheckpointError,
    EngineClosed,
    Overloaded,
    StepFailed,
    UnknownVoice,
)
from breeze_rtc.playback import PlaybackReport
from breeze_rtc.runtime import engine as engine_module
from breeze_rtc.runtime import process
from breeze_rtc.runtime.driver import Driver, Speaker
from breeze_rtc.runtime.engine import MAX_TEXT_CHARS, SAMPLING_RANGES, Engine, Speech, checked_sampling
from breeze_rtc.runtime.messages import Ready
from breeze_rtc.scheduling.costs import CostTable
from breeze_rtc.scheduling.scheduler import Scheduler
from breeze_rtc.scheduling.step import Stage
from breeze_rtc.scheduling.stream import Priority


class Tones:
    """Engines that make a tone; the executors they were made with, oldest first."""

    def __init__(self) -> None:
        self.executors: list[ToneExecutor] = []
        # Raised where the model would be loaded.
        self.load_raises: Exception | None = None

    def build(self, start, line, resources) -> tuple[Driver, Ready]:
        if self.load_raises is not None:
            raise self.load_raises
        executor = ToneExecutor(max_streams=start.max_streams)
        self.executors.append(executor)
        scheduler = Scheduler(
            specs=executor.specs,
            sample_rate=24_000,
            frame_samples=960,
            slots=start.max_streams,
            kv_pages=400 * start.max_streams,
            page_tokens=16,
            costs=CostTable(),
        )
        driver = Driver(
            line=line,
            clock=MonotonicClock(),
            scheduler=scheduler,
            executor=executor,
            speaker=lambda _open: Speaker(Frontend()),
            max_frames=6_000,
        )
        return driver, Ready("tone", 24_000, 960, ("sine", "square"))


@pytest.fixture
def tones(monkeypatch: pytest.MonkeyPatch) -> Tones:
    made = Tones()
    monkeypatch.setattr(process, "build", made.build)
    return made


@pytest.fixture
async def engine(tones: Tones) -> AsyncIterator[Engine]:
    async with Engine("tone", process=False, max_streams=4) as running:
        yield running


def say(engine: Engine, text: str, **options) -> Speech:
    speech = engine.speak(interactive=False, **options)
    speech.push(text)
    speech.end()
    return speech


async def pcm_of(speech: Speech) -> bytes:
    return await pcm_from(speech, 0)


async def pcm_from(speech: Speech, at: int) -> bytes:
    """What is left of a stream from sample `at` on."""
    pcm = b""
    async for chunk in speech:
        assert chunk.start_samples == at
        assert len(chunk.pcm) == 2 * chunk.samples
        at += chunk.samples
        pcm += chunk.pcm
    return pcm


async def until(is_so: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Wait for something that another thread or process brings about."""
    async with asyncio.timeout(timeout_s):
        while not is_so():  # noqa: ASYNC110 - nobody there could set an event
            await asyncio.sleep(0.005)


async def test_speech_is_what_was_asked_for(engine: Engine) -> None:
    """Facts of the model, then text in, chunks and packets out, and the iterator ends."""
    assert (engine.sample_rate, engine.frame_samples, engine.voices) == (24_000, 960, ("sine", "square"))
    chunks = [chunk async for chunk in say(engine, "hello", seed=7)]
    assert b"".join(chunk.pcm for chunk in chunks) == expected_pcm("hello", 7)
    packets = [packet for chunk in chunks for packet in chunk.packets]
    assert [packet.start_samples for packet in packets] == [480 * k for k in range(21)]
    assert [mark.chars for chunk in chunks for mark in chunk.marks] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("text", ["", " \n"])
async def test_nothing_to_say_ends_at_once(engine: Engine, text: str) -> None:
    """Empty text is a stream without chunks."""
    assert [chunk async for chunk in say(engine, text)] == []


async def test_text_may_be_pushed_while_it_is_spoken(engine: Engine) -> None:
    """The reader sees sound of the first words before the last ones exist."""
    speech = engine.speak(seed=1)
    speech.push("first ")
    first = await anext(speech)
    assert first.samples > 0
    speech.push("second")
    speech.end()
    speech.end()
    assert first.pcm + b"".join([chunk.pcm async for chunk in speech]) == expected_pcm("first second", 1)


async def test_bad_requests_are_refused_where_they_are_made(engine: Engine) -> None:
    """Voice, seed, sampling and text are checked before anything is sent, and other streams hear nothing of it."""
    neighbour = say(engine, "neighbour", seed=3)
    with pytest.raises(UnknownVoice, match="no voice is called 'triangle'"):
        engine.speak(voice="triangle")
    for seed in (-1, 1 << 63, 1.5, True):
        with pytest.raises(BadSampling):
            engine.speak(seed=seed)
    with pytest.raises(BadSampling):
        engine.speak(sampling={"temperature": math.nan})
    speech = engine.speak(seed=2)
    for wrong in ("x" * (MAX_TEXT_CHARS + 1), "x" * 100_000, b"bytes", None, "half \ud83d"):
        with pytest.raises(BadText):
            speech.push(wrong)
    speech.push("y" * 3)
    with pytest.raises(BadText):
        speech.push("x" * (MAX_TEXT_CHARS - 2))
    speech.end()
    with pytest.raises(BadText, match="has ended"):
        speech.push("more")
    assert await pcm_of(speech) == expected_pcm("yyy", 2)
    assert await pcm_of(neighbour) == expected_pcm("neighbour", 3)


@pytest.mark.parametrize("name", SAMPLING_RANGES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -1, 1e12, "0.5", None, True])
def test_sampling_outside_its_range_is_refused(name: str, value: object) -> None:
    """Each value by itself, whatever it is."""
    with pytest.raises(BadSampling, match=name):
        checked_sampling({name: value})


def test_sampling_inside_its_range_is_taken() -> None:
    """The ends of each range are inside; names nobody knows and broken counts are not."""
    for name, ends in SAMPLING_RANGES.items():
        for value in ends:
            assert checked_sampling({name: value}) == {name: value}
    with pytest.raises(BadSampling, match="sampling knows temperature"):
        checked_sampling({"temprature": 1.0})
    with pytest.raises(BadSampling, match="whole number"):
        checked_sampling({"top_k": 2.5})


async def test_odd_characters_are_text(engine: Engine) -> None:
    """Emoji, NUL and every plane of Unicode reach the front end as they are."""
    text = "a🌬️\0\U0010ffff"
    assert len(await pcm_of(say(engine, text))) == 2 * len([c for c in text if not c.isspace()]) * 2 * 960


async def test_cancel_ends_the_iterator_and_frees_the_stream(engine: Engine, tones: Tones) -> None:
    """What is unread is dropped, late chunks too; text pushed later goes nowhere; cancel may be called again."""
    speech = engine.speak()
    speech.push("a text that goes on and on")
    await anext(speech)
    speech.cancel()
    speech.cancel()
    speech.push("more")
    speech.end()
    assert [chunk async for chunk in speech] == []
    await until(lambda: not tones.executors[0].voices)
    await until(lambda: engine.stats.get("free_slots") == 4)


async def test_a_cancelled_reader_cancels_its_stream(engine: Engine, tones: Tones) -> None:
    """Nobody else would: the task that read is gone."""
    speech = engine.speak()
    speech.push("wait")

    has_begun = asyncio.Event()

    async def read() -> None:
        async for _ in speech:
            has_begun.set()

    reader = asyncio.create_task(read())
    await has_begun.wait()
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    await until(lambda: not tones.executors[0].voices)


async def test_a_dropped_speech_is_cancelled(engine: Engine, tones: Tones) -> None:
    """A Speech that nobody holds any more frees its stream."""
    speech = engine.speak()
    speech.push("never read")
    await until(lambda: len(tones.executors[0].voices) == 1)
    del speech
    gc.collect()
    await until(lambda: not tones.executors[0].voices)


async def test_a_stage_that_fails_raises_in_its_reader_only(engine: Engine, tones: Tones) -> None:
    """Chunks made before the failure come first, then StepFailed; the neighbour says everything."""
    tones.executors[0].broken.add((Stage.DEPTH, "x"))
    bad, good = say(engine, "abx"), say(engine, "neighbour", seed=5)
    assert (await anext(bad)).samples > 0
    with pytest.raises(StepFailed, match="the depth stage failed: no x today"):
        await pcm_from(bad, 960)
    assert await pcm_of(good) == expected_pcm("neighbour", 5)


async def test_one_stream_too_many_is_overloaded(engine: Engine) -> None:
    """The reader of the fifth of four learns when to try again."""
    # One slot in four is kept from classes below a live call, so these are live.
    speeches = [engine.speak(priority=Priority.LIVE) for _ in range(5)]
    with pytest.raises(Overloaded, match="try again in"):
        await anext(speeches[4])
    for speech in speeches:
        speech.cancel()


async def test_a_report_reaches_the_scheduler(engine: Engine) -> None:
    """What the listener heard shows in the stats; a report of a stream that is over goes nowhere."""
    speech = engine.speak()
    speech.push("reported " * 20)
    chunk = await anext(speech)
    now = MonotonicClock().now()
    engine.report(PlaybackReport(speech.stream, 0, now, 0, is_playing=False))
    await until(lambda: any(s["stage"] == "held" for s in engine.stats.get("streams", {}).values()))
    assert chunk.samples > 0
    speech.cancel()
    engine.report(PlaybackReport(speech.stream, 0, now, 0))
    engine.report(PlaybackReport(12_345, 0, now, 0))


async def test_close_ends_open_speech_and_may_come_twice(tones: Tones) -> None:
    """Readers get EngineClosed with a sentence; afterwards nothing can be asked of the engine."""
    engine = Engine("tone", process=False)
    with pytest.raises(EngineClosed, match="has not been started"):
        engine.speak()
    with pytest.raises(EngineClosed):
        _ = engine.sample_rate
    await engine.start()
    speech = engine.speak()
    speech.push("cut off")
    reader = asyncio.create_task(pcm_of(speech))
    await asyncio.sleep(0)
    await engine.close()
    await engine.close()
    with pytest.raises(EngineClosed, match="the engine is closed"):
        await reader
    with pytest.raises(EngineClosed, match="the engine is closed"):
        engine.speak()
    speech.push("later")
    speech.cancel()


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (CheckpointError("no file"), CheckpointError),
        (BadRequest("no trace"), BadRequest),
        (MemoryError("too large"), EngineClosed),
    ],
)
async def test_an_engine_that_cannot_start_says_why(tones: Tones, raised: Exception, expected: type[Exception]) -> None:
    """The reason arises in the engine and is raised in the caller, in its own class."""
    tones.load_raises = raised
    with pytest.raises(expected, match=str(raised)):
        await Engine("tone", process=False).start()


async def test_an_engine_that_dies_is_started_again(tones: Tones, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers hear of it, speak() says so meanwhile, and a new engine speaks; `on_restart` is told."""
    monkeypatch.setattr(engine_module, "RESTART_PAUSES_S", (0.05,) * 3)
    told: list[str] = []
    async with Engine("tone", process=False, on_restart=told.append) as engine:
        speech = engine.speak()
        speech.push("x" * 200)
        await anext(speech)
        # A fault in the driver itself ends the engine, as a crash of the process would.
        tones.executors[0].close = lambda _stream: (_ for _ in ()).throw(SystemError("driver fault"))
        engine.speak().cancel()
        with pytest.raises(EngineClosed, match="died and is starting again"):
            await pcm_from(speech, 960)
        with pytest.raises(EngineClosed, match="died and is starting again"):
            engine.speak()
        await until(lambda: bool(told))
        assert engine.restarts == 1
        assert await pcm_of(say(engine, "again", seed=1)) == expected_pcm("again", 1)


async def test_an_engine_that_keeps_dying_stays_down(tones: Tones, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the last pause speak() says that it could not be started again; close() is still clean."""
    monkeypatch.setattr(engine_module, "RESTART_PAUSES_S", (0.01, 0.01))
    async with Engine("tone", process=False) as engine:
        tones.load_raises = CheckpointError("the file is gone")
        tones.executors[0].close = lambda _stream: (_ for _ in ()).throw(SystemError("driver fault"))
        engine.speak().cancel()
        await until(lambda: "could not be started again" in engine._why_down)
        with pytest.raises(EngineClosed, match=r"the file is gone.*could not be started again"):
            engine.speak()
    assert engine.restarts == 2


async def test_a_thread_that_fails_before_it_can_speak_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where not even the engine's module can be imported, start() raises why, and waits for nobody."""
    monkeypatch.setitem(sys.modules, "breeze_rtc.runtime.process", None)
    with pytest.raises(EngineClosed, match=r"thread failed: .*breeze_rtc\.runtime\.process.* while it was starting"):
        async with asyncio.timeout(10):
            await Engine("tone", process=False).start()


async def test_a_speech_ends_where_it_was_asked_to(engine: Engine) -> None:
    """`max_s` is rounded up to a codec frame, and is an end like any other."""
    assert await pcm_of(say(engine, "hello", seed=1, max_s=0.05)) == expected_pcm("hello", 1)[: 2 * 2 * 960]
    for wrong in (0, -1.0, math.nan, math.inf):
        with pytest.raises(BadSampling, match="max_s"):
            engine.speak(max_s=wrong)
