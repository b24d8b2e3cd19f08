"""The engine as a process of its own, with a real (if tiny) model in it."""

from __future__ import annotations

import asyncio
import os
import random
import select
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from breeze_rtc.errors import BadRequest, CheckpointError, EngineClosed, PeerError, StepFailed
from breeze_rtc.models.attention import Ragged
from breeze_rtc.models.speech_model import SpeechModel
from breeze_rtc.runtime import engine as engine_module
from breeze_rtc.runtime.driver import Hangup
from breeze_rtc.runtime.engine import Engine, Speech
from breeze_rtc.runtime.messages import VERSION, Cancel, Stats, encode
from breeze_rtc.runtime.process import SocketLine, TraceFile
from breeze_rtc.scheduling.step import Stage
from breeze_rtc.scheduling.stream import Priority
from breeze_rtc.scheduling.trace import replay

MODEL = "tiny-pointer"
SAMPLES = 8 * 960
"""Enough of a stream to tell it from another; random weights may go on for minutes."""

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def until(is_so: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait for something that another process brings about."""
    async with asyncio.timeout(timeout_s):
        while not is_so():  # noqa: ASYNC110 - nobody there could set an event
            await asyncio.sleep(0.01)


async def start_of(speech: Speech) -> bytes:
    """The first SAMPLES of a stream, or all of a shorter one."""
    pcm = b""
    async for chunk in speech:
        pcm += chunk.pcm
        if len(pcm) >= 2 * SAMPLES:
            speech.cancel()
    return pcm[: 2 * SAMPLES]


def say(engine: Engine, number: int) -> Speech:
    # Nobody listens: a busy test machine must not refuse the eighth stream as one listener too many.
    speech = engine.speak(seed=number, interactive=False, priority=Priority.BATCH)
    speech.push(f"Stream {number} says" + " something" * (number % 3) + ".")
    speech.end()
    return speech


def is_free(engine: Engine) -> bool:
    """Nothing is spoken, and every slot and page is where it was."""
    stats = engine.stats
    # The window of the model's backbone, 16 positions, is one page of each stream.
    return bool(stats) and not stats["streams"] and stats["free_slots"] == 16 and stats["free_pages"] == 16


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trace") / "steps.jsonl"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(trace: Path) -> AsyncIterator[Engine]:
    async with Engine(MODEL, trace=trace) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def alone(engine: Engine) -> list[bytes]:
    """What each of eight streams says when no other is there."""
    return [await start_of(say(engine, number)) for number in range(8)]


async def test_eight_streams_at_once_say_what_each_says_alone(engine: Engine, alone: list[bytes]) -> None:
    """Sample for sample, whatever they share their steps with."""
    assert len(set(alone)) == 8
    assert await asyncio.gather(*(start_of(say(engine, number)) for number in range(8))) == alone
    await until(lambda: is_free(engine))


async def test_a_thread_says_what_a_process_says(alone: list[bytes]) -> None:
    """Where the engine runs does not show in the sound, alone or together."""
    async with Engine(MODEL, process=False) as threaded:
        assert await start_of(say(threaded, 3)) == alone[3]
        assert await asyncio.gather(*(start_of(say(threaded, number)) for number in range(8))) == alone


async def test_cancels_at_any_time_free_slots_and_pages(engine: Engine, alone: list[bytes]) -> None:
    """Thirty streams cancelled at random moments leave nothing behind, and one beside them is undisturbed."""
    chance = random.Random(5)
    neighbour = asyncio.create_task(start_of(say(engine, 2)))
    for number in range(30):
        speech = say(engine, number)
        await asyncio.sleep(chance.choice([0, 0, 0.001, 0.01, 0.05]))
        speech.cancel()
        assert [chunk async for chunk in speech] == []
    assert await neighbour == alone[2]
    await until(lambda: is_free(engine))


@pytest.mark.parametrize("text", ["", " \t\n", "🌬️", "\0", "a\0b", "é" * 40, "\U0010ffff"])
async def test_odd_texts_have_an_outcome_and_disturb_nobody(engine: Engine, alone: list[bytes], text: str) -> None:
    """Empty text is no sound; anything else is some; a stream beside it says what it always says."""
    neighbour = asyncio.create_task(start_of(say(engine, 4)))
    speech = engine.speak(seed=1)
    speech.push(text)
    speech.end()
    pcm = await start_of(speech)
    assert bool(pcm) == bool(text.strip())
    assert await neighbour == alone[4]


async def test_the_recorded_run_replays_to_the_same_steps(engine: Engine, alone: list[bytes], trace: Path) -> None:
    """The trace of this very process, with all that happened so far, gives steps with all its streams in them."""
    await until(lambda: is_free(engine))
    steps = replay(trace.read_text().splitlines(keepends=True))  # noqa: ASYNC240 - a small file
    expected = {stage.name: sum(step.stage is stage for step in steps) for stage in Stage}
    # The counts come about ten times a second.
    await until(lambda: {name: counts["steps"] for name, counts in engine.stats["stages"].items()} == expected)


async def test_an_engine_that_is_killed_is_said_and_started_again(engine: Engine, alone: list[bytes]) -> None:
    """SIGKILL: readers hear of it, speak() is refused meanwhile, the new engine speaks as the old one did."""
    told: list[str] = []
    engine.on_restart = told.append
    speech = engine.speak()
    speech.push("This will be cut off, in the middle of the sentence, and nobody will know how it ends.")
    await anext(speech)
    killed = engine.pid
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    with pytest.raises(EngineClosed, match="died and is starting again"):
        async for _ in speech:
            pass
    with pytest.raises(EngineClosed, match="died and is starting again"):
        engine.speak()
    assert not engine.is_running
    await until(lambda: bool(told))
    assert told == ["the engine was killed by signal 9"]
    assert engine.pid != killed
    assert await start_of(say(engine, 6)) == alone[6]


async def test_nothing_is_left_when_an_engine_is_closed() -> None:
    """The process is gone when close() returns."""
    engine = Engine(MODEL)
    await engine.start()
    pid = engine.pid
    assert pid is not None
    engine.speak().push("unfinished")
    await engine.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_missing_checkpoint_is_the_callers_error(tmp_path: Path) -> None:
    """It is found in the engine's process and raised where the engine was asked for."""
    with pytest.raises(CheckpointError):
        await Engine(str(tmp_path / "nothing")).start()


async def test_a_trace_that_cannot_be_written_is_said_at_the_start(tmp_path: Path) -> None:
    """Not after an hour of speech that nobody recorded."""
    with pytest.raises(BadRequest, match="cannot be written: No such file or directory"):
        await Engine(MODEL, process=False, trace=tmp_path / "missing" / "trace.jsonl").start()


async def test_an_engine_does_not_outlive_its_parent(tmp_path: Path) -> None:
    """A media process that is killed takes its engine along, on uvloop as well."""
    script = """
        import asyncio, sys
        import uvloop
        from breeze_rtc.runtime.engine import Engine

        async def main():
            async with Engine("tiny-pointer") as engine:
                speech = engine.speak()
                speech.push("hello there, ")
                await anext(speech)
                print(engine.pid, flush=True)
                await asyncio.sleep(600)

        uvloop.run(main())
    """
    parent = subprocess.Popen(  # noqa: ASYNC220 - a few milliseconds
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(engine_module.__file__).parents[2])},
    )
    assert parent.stdout is not None
    line = await asyncio.to_thread(parent.stdout.readline)
    pid = int(line)
    parent.kill()
    await asyncio.to_thread(parent.wait)
    parent.stdout.close()

    def is_gone() -> bool:
        # Nobody may be there to reap an orphan: a zombie is gone too.
        status = Path(f"/proc/{pid}/stat")
        try:
            return status.read_text().rsplit(")", 1)[1].split()[0] == "Z"
        except FileNotFoundError:
            return True

    await until(is_gone)


@pytest.mark.parametrize("stage", ["text", "backbone", "depth", "codec"])
async def test_a_model_that_fails_in_the_middle_fails_one_stream(monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    """A stage that raises once, a few calls in: that stream fails with the stage's name, the next one speaks."""
    load = SpeechModel.load
    calls = 0

    def poisoned(name: str, **_options: object) -> SpeechModel:
        model = load(name)
        part = getattr(model, stage)
        method = {"text": "packed", "depth": "generate"}.get(stage, "forward")
        whole = getattr(part, method)

        def fails_once(*args: object, **options: object) -> object:
            nonlocal calls
            calls += 1
            if calls == (1 if stage == "text" else 3):
                raise RuntimeError("poison")
            return whole(*args, **options)

        setattr(part, method, fails_once)
        return model

    monkeypatch.setattr(SpeechModel, "load", staticmethod(poisoned))
    async with Engine(MODEL, process=False, measures=False) as engine:
        first = say(engine, 1)
        with pytest.raises(StepFailed, match=f"the {stage} stage failed: RuntimeError: poison"):
            await start_of(first)
        assert await start_of(say(engine, 2))
        await until(lambda: is_free(engine))


async def test_a_stream_of_poisoned_numbers_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of NaN in a shared step ends its own stream; the streams in the same step say what they say alone."""
    load = SpeechModel.load
    poison = torch.zeros(1, dtype=torch.bool)

    def poisoned(name: str, **_options: object) -> SpeechModel:
        model = load(name)
        encode_text = model.text.packed

        def packed(tokens: torch.Tensor, lengths: torch.Tensor, ragged: Ragged) -> torch.Tensor:
            vectors = encode_text(tokens, lengths, ragged)
            segments = ragged.back // ragged.places.shape[1]
            marked = torch.zeros(len(lengths), dtype=torch.bool)
            marked[segments[tokens == ord("~")]] = True
            poison.logical_or_(marked.any())
            return torch.where(marked[segments, None], torch.nan, vectors)

        model.text.packed = packed  # type: ignore[method-assign]
        return model

    monkeypatch.setattr(SpeechModel, "load", staticmethod(poisoned))
    async with Engine(MODEL, process=False) as engine:
        expected = await start_of(say(engine, 1))
        beside = asyncio.create_task(start_of(say(engine, 1)))
        bad = engine.speak()
        bad.push("~~~~ poison.")
        bad.end()
        with pytest.raises(StepFailed, match="not finite"):
            await start_of(bad)
        assert poison
        assert await beside == expected


async def test_a_reader_that_stops_does_not_block_the_line() -> None:
    """What the other side does not read waits in the line, whole and in order, and `receive` says what was said."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        line = SocketLine(theirs)
        for number in range(2_000):
            line.send(Stats({"number": number, "padding": "x" * 1_000}))
        ours.sendall(encode(Cancel(5)))
        assert line.receive(0) == [Cancel(5)]
        assert line.receive(1_000_000) == []
        reader = SocketLine(ours)
        heard: list[Stats] = []
        while len(heard) < 2_000:
            heard += reader.receive(1_000_000_000)
            assert line.receive(0) == []
        assert [stats.values["number"] for stats in heard] == list(range(2_000))


async def test_a_hangup_ends_the_line() -> None:
    """Reading and writing both say so."""
    ours, theirs = socket.socketpair()
    ours.close()
    with theirs:
        with pytest.raises(Hangup):
            SocketLine(theirs).receive(None)
        with pytest.raises(Hangup):
            SocketLine(theirs).send(Cancel(1))


async def test_an_engine_of_another_version_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides name the two versions; nothing hangs."""
    monkeypatch.setattr("breeze_rtc.runtime.messages.VERSION", VERSION + 1)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        wire = encode(Cancel(1))
        monkeypatch.undo()
        ours.sendall(wire)
        assert select.select([theirs], [], [], 5)[0]
        with pytest.raises(PeerError, match=f"speaks version {VERSION + 1}"):
            SocketLine(theirs).receive(0)


async def test_a_full_disk_ends_the_trace_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    """One line in the log; later lines go nowhere."""
    trace = TraceFile(Path("/dev/full"))
    for _ in range(3):
        trace.write("a line\n")
    trace.close()
    assert len([record for record in caplog.records if "ends here" in record.message]) == 1
