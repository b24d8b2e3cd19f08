"""Sound that is made beside the next frame: whatever the device's order, the streams say what they say one by one.

A CUDA stream is free to run its work at any time that its events allow.  On a CPU two lanes stand for the extremes: one
runs what it is given at once, the other as late as it may (when its result is waited for, or at a join).  What
differs between the two would be a race on a GPU.  Real streams and events are not verified without one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import numpy as np
import pytest
import torch
from executor_driver import Direct, ExecutorDriver
from test_driver import Bench, ends_of, opened, pcm_of, spoken
from tone_executor import COST_NS, ToneExecutor, expected_pcm
from torch import Tensor

from breeze_rtc.clock import MS, VirtualClock
from breeze_rtc.errors import BadRequest
from breeze_rtc.models.sampling import Sampling
from breeze_rtc.models.speech_model import SpeechModel
from breeze_rtc.runtime import executor as executor_module
from breeze_rtc.runtime import frame_graphs
from breeze_rtc.runtime.engine import Engine
from breeze_rtc.runtime.lane import CudaLane, OnItsWay, There
from breeze_rtc.runtime.messages import Cancel, Chunk, EndText, Failed, Finished, Message, Text
from breeze_rtc.runtime.sounding import Sounding
from breeze_rtc.scheduling.costs import CostTable
from breeze_rtc.scheduling.step import RowResult, Stage, Step, StepResult

TEXTS = ("one, two. ", "a longer text. ", "three. ")
FRAMES = 9


@pytest.fixture(scope="module")
def model() -> SpeechModel:
    return SpeechModel.load("tiny")


class LateLane:
    """Runs its work as late as it may: in order, when a result is waited for or at a join."""

    def __init__(self) -> None:
        self._todo: deque[_Late] = deque()

    def run(self, work: Callable[[], Tensor]) -> OnItsWay:
        late = _Late(self, work)
        self._todo.append(late)
        return late

    def join(self) -> None:
        while self._todo:
            self._todo.popleft().run()

    def send(self, values: Tensor) -> OnItsWay:
        return There(values.clone())

    def read(self, sent: OnItsWay, meanwhile: Callable[[], bool]) -> Tensor:
        meanwhile()
        return sent.wait()


class _Late:
    def __init__(self, lane: LateLane, work: Callable[[], Tensor]) -> None:
        self._lane = lane
        self._work = work
        self._tensor: Tensor | None = None

    def run(self) -> None:
        with torch.inference_mode():
            # As the copy to the host that is queued behind the work.
            self._tensor = self._work().clone()

    def is_there(self) -> bool:
        return self._tensor is not None

    def wait(self) -> Tensor:
        while self._tensor is None:
            self._lane._todo.popleft().run()
        return self._tensor


def speak_ahead(driver: ExecutorDriver, stream: int, chunks: tuple[int, ...]) -> list[Sounding]:
    """Speak a stream, its chunks issued as soon as there are frames for them, and not one of them waited for."""
    executor, u = driver.executor, driver.streams[stream]
    soundings: list[Sounding] = []

    def issue() -> None:
        count = chunks[len(soundings) % len(chunks)]
        if u.made - u.decoded >= count or (u.made > u.decoded and not driver.goes_on(stream, FRAMES)):
            count = min(count, u.made - u.decoded)
            row = executor_module.Row(stream, u.slot, u.decoded, count)
            soundings.append(executor.issue(Step(10_000 + len(soundings), Stage.CODEC, (row,), 1)))
            u.decoded += count

    driver.prefill([stream])
    driver.depth([stream])
    issue()
    while driver.goes_on(stream, FRAMES):
        driver.backbone([stream])
        driver.depth([stream])
        issue()
    while u.decoded < u.made:
        issue()
    return soundings


def heard(driver: ExecutorDriver, stream: int, soundings: list[Sounding]) -> np.ndarray:
    for sounding in soundings:
        (row,) = sounding.result().rows
        assert not row.error
    return driver.executor.take(stream)[0]


@pytest.mark.parametrize("has_graphs", [False, True])
def test_sound_made_late_is_the_sound_made_at_once(
    model: SpeechModel, monkeypatch: pytest.MonkeyPatch, has_graphs: bool
) -> None:
    """Chunks of one, two and three frames, the next frames made before the first of them is decoded."""
    monkeypatch.setattr(frame_graphs, "GRAPH_COLUMNS", (64,))
    monkeypatch.setattr(frame_graphs, "GRAPH_FRAMES", (1, 2))
    at_once, late = ExecutorDriver(model, streams=2), ExecutorDriver(model, streams=2)
    late.executor._lane = LateLane()
    if has_graphs:
        late.executor.record_graphs(Direct())
    for driver in (at_once, late):
        driver.open(1, 0, TEXTS[0], seed=4, sampling=Sampling())
    expected = at_once.speak(1, FRAMES, (1, 2, 3))
    soundings = speak_ahead(late, 1, (1, 2, 3))
    assert len(soundings) >= 4
    assert not any(sounding.is_there() for sounding in soundings)
    assert np.array_equal(heard(late, 1, soundings), expected)


def _slot_given_on(model: SpeechModel, lane: LateLane) -> tuple[bool, bool]:
    """A stream ends, another gets its slot while the first one's sound is still to be made: whether each says what it
    says alone."""
    alone = ExecutorDriver(model, streams=1)
    sounds = []
    for stream, text in ((1, TEXTS[0]), (2, TEXTS[1])):
        alone.open(stream, 0, text, seed=stream)
        sounds.append(alone.speak(stream, FRAMES, (2,)))
        alone.close(stream)
    driver = ExecutorDriver(model, streams=1)
    driver.executor._lane = lane
    driver.open(1, 0, TEXTS[0], seed=1)
    first = speak_ahead(driver, 1, (2,))
    driver.open(2, 0, TEXTS[1], seed=2)
    second = speak_ahead(driver, 2, (2,))
    one = heard(driver, 1, first)
    return np.array_equal(one, sounds[0]), np.array_equal(heard(driver, 2, second), sounds[1])


def test_a_slot_may_be_given_on_while_its_sound_is_made(model: SpeechModel) -> None:
    assert _slot_given_on(model, LateLane()) == (True, True)


def test_without_the_join_that_is_a_race_and_is_found(model: SpeechModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: opening a slot does not wait for the codec."""
    monkeypatch.setattr(LateLane, "join", lambda self: None)
    assert _slot_given_on(model, LateLane()) != (True, True)


def test_the_ring_is_not_written_where_it_is_still_read(model: SpeechModel) -> None:
    """A stream whose sound is issued and not there yet holds on to those frames: the ring counts them as full."""
    driver = ExecutorDriver(model, streams=1)
    driver.executor._lane = LateLane()
    driver.open(1, 0, TEXTS[0], seed=1)
    driver.prefill([1])
    driver.depth([1])
    s = driver.executor._streams[1]
    driver.executor.issue(Step(9, Stage.CODEC, (executor_module.Row(1, 0, 0, 1),), 1))
    assert (s.decoded, s.sounded) == (1, 0)
    s.made = s.started = executor_module.RING_FRAMES
    driver.streams[1].made = driver.streams[1].started = executor_module.RING_FRAMES
    driver.streams[1].started += 1
    driver.depth([1])
    assert "wait for the codec" in driver.streams[1].error


# ---- a codec that lives on the CPU -----------------------------------------------------------------------------------


@pytest.mark.parametrize("has_graphs", [False, True])
def test_a_codec_on_the_cpu_says_the_same_beside_the_rest(
    model: SpeechModel, monkeypatch: pytest.MonkeyPatch, has_graphs: bool
) -> None:
    """In a thread of its own, which stands still until the last frame has been made; the main device is a CPU too here.
    A slot that is given on waits for the sound of the stream before."""
    monkeypatch.setattr(frame_graphs, "GRAPH_COLUMNS", (64,))
    at_once = ExecutorDriver(model, streams=1)
    apart = ExecutorDriver(model, streams=1, codec_apart=True)
    if has_graphs:
        apart.executor.record_graphs(Direct())
        assert apart.executor.graphs is not None
        assert not apart.executor.graphs.table.has("codec")
    assert apart.executor.overlaps
    gate = threading.Event()
    threads: set[str] = set()
    decode = model.codec.forward

    def gated(*args: object, **options: object) -> Tensor:
        if (name := threading.current_thread().name) != "MainThread":
            threads.add(name)
            assert gate.wait(20)
        return decode(*args, **options)

    monkeypatch.setattr(model.codec, "forward", gated)
    for stream, text in ((1, TEXTS[0]), (2, TEXTS[1])):
        at_once.open(stream, 0, text, seed=stream)
        expected = at_once.speak(stream, FRAMES, (1, 2))
        at_once.close(stream)
        apart.open(stream, 0, text, seed=stream)
        gate.clear()
        soundings = speak_ahead(apart, stream, (1, 2))
        assert len(soundings) >= 4
        assert not any(sounding.is_there() for sounding in soundings)
        gate.set()
        if stream == 1:
            # Not waited for: the next stream is opened while this one's sound is made.
            apart.executor._streams[1].pcm.clear()
            kept = soundings, expected, apart.executor._streams[1]
            apart.close(1)
        else:
            assert np.array_equal(heard(apart, stream, soundings), expected)
    first, expected, s = kept
    for sounding in first:
        sounding.result()
    assert np.array_equal(np.concatenate(s.pcm), expected)
    assert threads == {"codec_0"}


def test_a_fault_of_a_codec_in_its_thread_is_that_rows_error(
    model: SpeechModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = ExecutorDriver(model, streams=1, codec_apart=True)
    driver.open(1, 0, TEXTS[0], seed=1)
    driver.prefill([1])
    driver.depth([1])

    def broken(*_: object, **__: object) -> Tensor:
        raise MemoryError("no room")

    monkeypatch.setattr(model.codec, "forward", broken)
    driver.codec({1: 1})
    assert driver.streams[1].error == "MemoryError: no room"
    driver.close(1)
    driver.open(2, 0, TEXTS[1], seed=2)


async def test_an_engine_with_its_codec_on_the_cpu() -> None:
    """Asked for by name; the speech is that of an engine without."""
    said = []
    for codec_device in ("", "cpu"):
        async with Engine("tiny", process=False, measures=False, codec_device=codec_device) as engine:
            streams = [engine.speak(seed=seed) for seed in (1, 2)]
            for stream, text in zip(streams, TEXTS, strict=False):
                stream.push(text)
                stream.end()
            said.append([b"".join([chunk.pcm async for chunk in stream]) for stream in streams])
    assert said[0] == said[1]
    assert all(said[0])
    with pytest.raises(BadRequest, match="only cpu is known"):
        async with Engine("tiny", process=False, measures=False, codec_device="cuda"):
            pass


# ---- the driver ------------------------------------------------------------------------------------------------------


class BesideExecutor(ToneExecutor):
    """A tone whose codec works beside the other stages: a codec step takes no time to issue, and its sound is there
    `COST_NS` after the one before it."""

    overlaps = True

    def __init__(self, clock: VirtualClock, *, max_streams: int = 4) -> None:
        super().__init__(clock, max_streams=max_streams)
        self.meanwhile: Callable[[], bool] = lambda: False
        self.free_at = 0
        self.most_on_its_way = 0
        self.on_its_way = 0

    def issue(self, step: Step) -> Beside:
        return Beside(self, step)

    def run(self, step: Step) -> StepResult:
        assert step.stage is not Stage.CODEC, "sound is issued"
        result = super().run(step)
        self.meanwhile()
        return result


class Beside:
    def __init__(self, executor: BesideExecutor, step: Step) -> None:
        self.step = step
        self._executor = executor
        self._began_ns = executor._clock.now()
        executor.steps.append(step)
        executor.free_at = max(executor.free_at, self._began_ns) + COST_NS[Stage.CODEC]
        executor.on_its_way += 1
        executor.most_on_its_way = max(executor.most_on_its_way, executor.on_its_way)
        self._at = executor.free_at

    def is_there(self) -> bool:
        return self._executor._clock.now() >= self._at

    def promise(self, duration_ns: int) -> StepResult:
        rows = tuple(RowResult(row.stream, samples=row.count * 960) for row in self.step.rows)
        return StepResult(rows, duration_ns)

    def result(self) -> StepResult:
        clock = self._executor._clock
        clock.advance(max(0, self._at - clock.now()))
        self._executor.on_its_way -= 1
        rows = []
        for row in self.step.rows:
            is_open = row.stream in self._executor.voices
            rows.append(self._executor._row(Stage.CODEC, row) if is_open else RowResult(row.stream, error="closed"))
        return StepResult(tuple(rows), clock.now() - self._began_ns)


class BesideBench(Bench):
    def __init__(self, script: list[tuple[int, Message]], *, slots: int = 4) -> None:
        super().__init__(script, slots=slots)
        self.executor = BesideExecutor(self.clock, max_streams=slots)
        driver = self.driver
        driver._executor = self.executor
        self.executor.meanwhile = driver._collect


def test_streams_say_all_of_it_in_order_while_sound_is_on_its_way() -> None:
    """Chunks follow one another without a hole, and the end comes last, though the scheduler had ended each stream
    before its last sound was there."""
    script = [entry for k in range(4) for entry in spoken(k, f"stream {k}" * (k + 1), seed=k, at=k * 15 * MS)]
    bench = BesideBench(script)
    said = bench.run()
    for k in range(4):
        assert pcm_of(said, k) == expected_pcm(f"stream {k}" * (k + 1), k)
        assert len(ends_of(said, k)) == 1
        of_it = [message for message in said if getattr(message, "stream", None) == k]
        assert isinstance(of_it[-1], Finished)
    assert bench.executor.most_on_its_way > 0
    bench.assert_all_is_free()


def test_the_next_frames_are_made_while_sound_is_on_its_way() -> None:
    """The same speech takes less time than one thing after the other: the codec's steps cost nothing of it."""
    text = "abcdefgh" * 6
    one_by_one, beside = Bench(spoken(1, text, interactive=False)), BesideBench(spoken(1, text, interactive=False))
    assert pcm_of(one_by_one.run(), 1) == pcm_of(beside.run(), 1)
    codec = [step for step in beside.executor.steps if step.stage is Stage.CODEC]
    # But for the first of each kind, which is waited for to learn how long it takes.
    kinds = len({(step.bucket, step.rows[0].count) for step in codec})
    saved_ns = one_by_one.clock.now() - beside.clock.now()
    assert saved_ns >= (len(codec) - kinds - 1) * COST_NS[Stage.CODEC] > 0


def test_a_stream_that_is_cancelled_while_its_sound_is_made_stays_silent() -> None:
    """Nothing is said of it after that, and what it held is free."""
    bench = BesideBench([*spoken(1, "abcdefghijkl" * 4, interactive=False), *spoken(2, "other", interactive=False)])
    cancelled_at: list[int] = []

    def cancel(message: Message) -> None:
        if isinstance(message, Chunk) and message.stream == 1 and message.start_samples > 0 and not cancelled_at:
            cancelled_at.append(len(bench.line.heard))
            bench.line._replies.append(Cancel(1))

    bench.line.on_message = cancel
    said = bench.run()
    assert cancelled_at
    after = [m for m in said[cancelled_at[0] :] if isinstance(m, Chunk | Finished | Failed) and m.stream == 1]
    assert len(after) <= 2
    assert not any(isinstance(message, Finished | Failed) for message in after)
    assert pcm_of(said, 2) == expected_pcm("other", 0)
    bench.assert_all_is_free()


def test_a_fault_in_sound_that_was_promised_ends_its_stream_alone() -> None:
    """The scheduler had believed it; the listener is told, and hears nothing that comes after the fault."""
    script = [*spoken(1, "a" * 12 + "b" * 12, interactive=False), *spoken(2, "cccccccc", seed=3)]
    bench = BesideBench(script)
    bench.executor.broken.add((Stage.CODEC, "b"))
    said = bench.run()
    (end,) = ends_of(said, 1)
    assert isinstance(end, Failed)
    assert (end.error, end.stage) == ("StepFailed", "codec")
    assert expected_pcm("a" * 12 + "b" * 12, 0).startswith(pcm_of(said, 1))
    assert 0 < len(pcm_of(said, 1)) < len(expected_pcm("a" * 12 + "b" * 12, 0))
    assert pcm_of(said, 2) == expected_pcm("cccccccc", 3)
    bench.assert_all_is_free()


def test_text_that_comes_late_waits_for_no_sound() -> None:
    """An open stream that is silent leaves nothing undone: the driver waits for messages, not for sound."""
    bench = BesideBench([(0, opened(1)), (0, Text(1, "ab")), (400 * MS, Text(1, "cd")), (800 * MS, EndText(1))])
    assert pcm_of(bench.run(), 1) == expected_pcm("abcd", 0)
    bench.assert_all_is_free()


def test_costs_are_learnt_from_what_steps_took() -> None:
    """What the scheduler is promised is what the last step of the kind took, not the moment that issuing it took."""
    bench = BesideBench(spoken(1, "abcdefgh" * 6, interactive=False))
    bench.run()
    costs: CostTable = bench.scheduler._costs
    predicted = [
        costs.predict_ns(Stage(stage), bucket, size)
        for stage, bucket, size, _ in costs.state()["kinds"]
        if stage == Stage.CODEC
    ]
    assert predicted
    assert all(ns >= COST_NS[Stage.CODEC] for ns in predicted)


def test_sound_is_promised_in_the_time_that_was_measured_once_the_codec_is_taken_over() -> None:
    """Not in the time that the last step of the kind took before, and what was on its way then teaches nothing."""
    bench = BesideBench(spoken(1, "abcdefgh" * 12, interactive=False))
    measured = {(bucket, frames): MS for bucket in (1, 2, 4) for frames in (1, 2, 4, 8, 16)}
    told: list[int] = []

    def taken_over() -> list[tuple[Stage, dict[tuple[int, int], int]]]:
        if told or not bench.driver._soundings:
            return []
        told.append(len(bench.trace))
        return [(Stage.CODEC, measured)]

    bench.driver._taken_over = taken_over
    promised: list[int] = []
    step_done = bench.scheduler.step_done

    def watched(step: Step, result: StepResult, now: int) -> None:
        if told and step.stage is Stage.CODEC:
            promised.append(result.duration_ns)
        step_done(step, result, now)

    bench.scheduler.step_done = watched  # type: ignore[method-assign]
    said = bench.run()
    assert told
    assert promised[0] == MS
    assert pcm_of(said, 1) == expected_pcm("abcdefgh" * 12, 0)
    bench.assert_all_is_free()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: real streams are not verified here")
def test_a_cuda_lane_runs_beside_the_main_stream_and_gives_the_same_sound() -> None:
    sounds = []
    for overlaps in (False, True):
        driver = ExecutorDriver(SpeechModel.load("tiny"), streams=2, device="cuda")
        assert isinstance(driver.executor._lane, CudaLane)
        driver.open(1, 0, TEXTS[0], seed=4)
        if overlaps:
            sounds.append(heard(driver, 1, speak_ahead(driver, 1, (1, 2))))
        else:
            sounds.append(driver.speak(1, FRAMES, (1, 2)))
    assert np.allclose(*sounds, atol=1e-3)
