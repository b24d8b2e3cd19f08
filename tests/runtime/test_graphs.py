"""Graphs, on a CPU by emulation: recorded once, replayed on other inputs, they say what eager steps say.

What only a GPU can show (pools, streams, what capture refuses, time) is marked `gpu` and not verified without one.
"""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from executor_driver import Direct, ExecutorDriver
from torch import Tensor

from breeze_rtc.clock import MS, VirtualClock
from breeze_rtc.models.presets import breeze_tts_2, tiny
from breeze_rtc.models.sampling import Sampling
from breeze_rtc.models.speech_model import ByteFrontend, SpeechModel, TextSegment
from breeze_rtc.runtime import executor as executor_module
from breeze_rtc.runtime import frame_graphs
from breeze_rtc.runtime import graphs as graphs_module
from breeze_rtc.runtime.executor import Executor
from breeze_rtc.runtime.graphs import (
    CudaRecorder,
    EmulatedRecorder,
    Function,
    GraphTable,
    MetaRecorder,
    NotCapturable,
    StepGraph,
)
from breeze_rtc.scheduling.step import Stage

TEXTS = ("one, two. ", "a somewhat longer text, in two parts.")
FRAMES = 14
GUIDED = [
    TextSegment(tuple(range(70, 82)), (0,) * 12, row=1),
    TextSegment(tuple(range(65, 95)), tuple(range(1, 31))),
]


@pytest.fixture(scope="module", autouse=True)
def _small() -> Iterator[None]:
    """Fewer shapes than a server has."""
    patch = pytest.MonkeyPatch()
    patch.setattr(frame_graphs, "GRAPH_COLUMNS", (64,))
    patch.setattr(frame_graphs, "GRAPH_FRAMES", (1, 2, 4))
    patch.setattr(frame_graphs, "GRAPH_TOKENS", (32, 64))
    patch.setattr(frame_graphs, "PROMPT_COLUMNS", 80)
    yield
    patch.undo()


@pytest.fixture(scope="module")
def model() -> SpeechModel:
    return SpeechModel.load("tiny")


@pytest.fixture(scope="module")
def recorded(model: SpeechModel) -> ExecutorDriver:
    driver = ExecutorDriver(model, streams=2)
    driver.executor.record_graphs(Direct())
    return driver


@pytest.fixture(scope="module")
def traced(model: SpeechModel) -> ExecutorDriver:
    """One stream, and graphs that are traced: a second for each shape."""
    driver = ExecutorDriver(model, streams=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frame_graphs, "GRAPH_FRAMES", (1,))
        driver.executor.record_graphs(EmulatedRecorder())
    return driver


@pytest.fixture
def driver(recorded: ExecutorDriver) -> Iterator[ExecutorDriver]:
    """The same graphs for every test, its streams closed."""
    table = graphs(recorded)
    for counter in (table.replays, table.misses, table.live, table.padded):
        counter.clear()
    yield recorded
    for stream in tuple(recorded.streams):
        recorded.close(stream)


def graphs(driver: ExecutorDriver) -> GraphTable:
    assert driver.executor.graphs is not None
    return driver.executor.graphs.table


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0, depth_temperature=0, repetition_penalty=1.0),
        Sampling(temperature=0.7, depth_temperature=0, top_k=3),
        Sampling(repetition_penalty=1.8, top_k=0),
    ],
)
def test_a_replayed_stream_says_what_an_eager_one_says(
    model: SpeechModel, traced: ExecutorDriver, sampling: Sampling
) -> None:
    """Sample for sample, drawn or greedy; every step of every stage was a replay."""
    table = graphs(traced)
    table.replays.clear()
    eager = ExecutorDriver(model, streams=2)
    for each in (eager, traced):
        each.open(1, 0, TEXTS[0], seed=7, sampling=sampling)
    expected, sound = eager.speak(1, FRAMES, (1,)), traced.speak(1, FRAMES, (1,))
    traced.close(1)
    assert np.array_equal(sound, expected)
    assert len(sound) > 0
    assert {stage for stage, _ in table.replays} == set(frame_graphs.STAGES)
    assert not table.misses


def test_a_replayed_stream_with_guidance(model: SpeechModel, traced: ExecutorDriver) -> None:
    """Two rows of unequal length."""
    sounds = []
    for each in (ExecutorDriver(model, streams=2), traced):
        each.open(1, 0, GUIDED, seed=9, sampling=Sampling(cfg_scale=3.0))
        sounds.append(each.speak(1, FRAMES))
        each.close(1)
    assert np.array_equal(*sounds)
    assert not graphs(traced).misses


def test_a_replayed_stream_with_dual_guidance(model: SpeechModel, traced: ExecutorDriver) -> None:
    """Three rows of unequal length; and more such streams than there are graphs for run eagerly."""
    third = TextSegment(tuple(range(66, 84)), (0,) * 18, row=2)
    sounds = []
    for each in (ExecutorDriver(model, streams=2), traced):
        each.open(1, 0, [third, *GUIDED], seed=9, sampling=Sampling(cfg_scale=3.0, reference_scale=1.5))
        sounds.append(each.speak(1, FRAMES))
        each.close(1)
    assert np.array_equal(*sounds)
    assert not graphs(traced).misses
    assert [key[1] for key in graphs(traced).graphs if key[0] == "depth" and key[2] == 2] == [1]


def test_a_seed_counts_under_graphs(driver: ExecutorDriver) -> None:
    """Reproduction 10 (vllm-omni 2914, 6309, 5253, 4923: a captured generator ignored the request's seed)."""
    sounds = []
    for seed in (7, 7, 8):
        driver.open(1, 0, TEXTS[0], seed=seed)
        sounds.append(driver.speak(1, FRAMES))
        driver.close(1)
    assert np.array_equal(sounds[0], sounds[1])
    assert not np.array_equal(sounds[0], sounds[2])
    assert not graphs(driver).misses


def test_sound_is_taken_before_the_next_replay(model: SpeechModel, driver: ExecutorDriver) -> None:
    """Reproduction 8 (sglang-omni 177: the next replay wrote over sound that was still wanted).  Two replays in one
    step, the sound of both asked for afterwards."""
    eager = ExecutorDriver(model, streams=2)
    for each in (eager, driver):
        for stream in (1, 2):
            each.open(stream, stream - 1, TEXTS[0], seed=6 + stream)
        each.prefill([1, 2])
        each.depth([1, 2])
        each.backbone([1, 2])
        each.depth([1, 2])
        assert all(each.streams[stream].made == 2 for stream in (1, 2))
        each.codec({1: 2, 2: 1})
        each.codec({2: 1})
    for stream in (1, 2):
        assert np.array_equal(driver.streams[stream].sound, eager.streams[stream].sound)


def test_streams_together_with_guidance_and_without(model: SpeechModel, driver: ExecutorDriver) -> None:
    """Two rows of one stream, one of the other: replayed together as eagerly alone."""
    eager = ExecutorDriver(model, streams=2)
    eager.open(1, 1, GUIDED, seed=9, sampling=Sampling(cfg_scale=3.0))
    expected = eager.speak(1, FRAMES)
    eager.open(2, 0, TEXTS[1], seed=8)
    plain = eager.speak(2, FRAMES)
    driver.open(1, 1, GUIDED, seed=9, sampling=Sampling(cfg_scale=3.0))
    driver.open(2, 0, TEXTS[1], seed=8)
    together = driver.speak_together([1, 2], FRAMES, 3)
    assert np.array_equal(together[1], expected)
    assert np.array_equal(together[2], plain)
    assert {stage for stage, _ in graphs(driver).replays} == set(frame_graphs.STAGES)


def test_nothing_is_recorded_while_serving(driver: ExecutorDriver) -> None:
    """The graphs after a hundred steps are those from before."""
    before = dict(graphs(driver).graphs)
    driver.open(1, 0, TEXTS[0], seed=7)
    driver.speak(1, FRAMES)
    assert graphs(driver).graphs == before


def test_what_no_graph_fits_runs_eagerly_and_is_counted(model: SpeechModel, driver: ExecutorDriver) -> None:
    """A nucleus limit, a prompt and a history longer than any graph's: each is counted, and nothing is raised."""
    eager = ExecutorDriver(model, streams=2)
    text = "no. " * 20
    for each in (eager, driver):
        each.open(1, 0, text, seed=1, sampling=Sampling(top_p=0.8))
    assert np.array_equal(driver.speak(1, FRAMES), eager.speak(1, FRAMES))
    assert driver.executor._streams[1].encoded[0] > 64
    missed = graphs(driver).misses
    assert missed["text"] == missed["prefill"] == 1
    assert missed["backbone"] == missed["depth"] - 1 == driver.streams[1].made - 1 > 1
    assert not missed["codec"]


def test_an_odd_chunk_is_several_even_ones(model: SpeechModel, driver: ExecutorDriver) -> None:
    """Three frames are two and one; a chunk beyond any sum of recorded ones is a miss."""
    eager = ExecutorDriver(model, streams=2)
    for each in (eager, driver):
        each.open(1, 0, TEXTS[0], seed=7)
    assert np.array_equal(driver.speak(1, FRAMES, (3, 2, 1, 8)), eager.speak(1, FRAMES, (3, 2, 1, 8)))
    assert driver.streams[1].made == FRAMES
    assert graphs(driver).misses == {"codec": 1}


def test_ordinary_speech_misses_no_graph(driver: ExecutorDriver) -> None:
    """sglang-omni issues 886 and 1912, reproduction 16: shapes that had no graph were 61 % and 72 % of the steps.

    Sentences of lengths that vary, two at a time, joining and ending at random, in chunks of any size a stream can end
    with: all of their steps are replays.
    """
    rng = np.random.default_rng(1)
    for turn in range(3):
        for stream in (1, 2):
            driver.open(stream, stream - 1, "a" * int(rng.integers(18, 30)), seed=turn)
        driver.speak_together([1, 2], 5, seed=turn)
        for stream in (1, 2):
            driver.close(stream)
    assert sum(graphs(driver).replays.values()) > 50
    assert not graphs(driver).misses


def test_streams_of_one_voice_in_graphs(model: SpeechModel) -> None:
    """What a voice begins with is read from its own pages by replayed steps too."""
    sounds = []
    for records in (False, True):
        driver = ExecutorDriver(model, streams=2, prefix_pages=4)
        if records:
            driver.executor.record_graphs(Direct())
        vectors = torch.cat(driver.executor.encode([TextSegment(tuple(range(40, 57)), (0,) * 17)]))
        voice = driver.executor.add_prefix(vectors)
        driver.open(1, 1, GUIDED, seed=9, sampling=Sampling(cfg_scale=3.0), prefixes=(voice, voice))
        sounds.append(driver.speak(1, 4))
    assert len(sounds[0]) > 0
    assert np.array_equal(*sounds)


def test_steps_run_eagerly_while_graphs_are_recorded(model: SpeechModel) -> None:
    """sglang-omni issues 825, 826, 1735 and 1947, reproductions 14 and 15: captures beside running steps, and captures
    in them.

    A thread records.  What is said before it has begun, meanwhile and afterwards is the same, a stage is used when it
    is whole, and a step never waits for a recording.
    """
    gate = threading.Semaphore(0)

    calls: list[Function] = []

    class Gated(Direct):
        def record(self, function, buffers):  # type: ignore[no-untyped-def]
            assert threading.current_thread() is recording, "a step recorded a graph"
            gate.acquire()
            calls.append(function)
            return super().record(function, buffers)

    eager = ExecutorDriver(model, streams=2)
    eager.open(1, 0, TEXTS[0], seed=7)
    expected = eager.speak(1, FRAMES, (1, 2))
    driver = ExecutorDriver(model, streams=2)
    recording = threading.Thread(target=driver.executor.record_graphs, args=(Gated(),))
    recording.start()
    sounds = []
    for stage in ("before", "meanwhile", "afterwards"):
        if stage == "meanwhile":
            gate.release(1000)
        if stage == "afterwards":
            recording.join()
        driver.open(1, 0, TEXTS[0], seed=7)
        sounds.append(driver.speak(1, FRAMES, (1, 2)))
        driver.close(1)
        if stage == "before":
            assert not graphs(driver).replays
            assert not graphs(driver).misses
    assert all(np.array_equal(sound, expected) for sound in sounds)
    assert {stage for stage, _ in graphs(driver).replays} == set(frame_graphs.STAGES)
    assert len(calls) == len(graphs(driver).graphs)


def test_what_a_graph_takes_is_measured_before_it_is_used(model: SpeechModel) -> None:
    """Of every kind of step that a stage's graphs are for, the least of some replays, told once."""
    clock = VirtualClock()
    sizes = {"text": 5 * MS, "prefill": 6 * MS, "backbone": 2 * MS, "depth": 7 * MS, "codec": 3 * MS}
    published = set(sizes)

    class Slow(Direct):
        def record(self, function, buffers):  # type: ignore[no-untyped-def]
            replay = super().record(function, buffers)
            assert executor.graphs is not None
            stage = next(stage for stage in frame_graphs.STAGES if not executor.graphs.table.has(stage))
            extra = [0, 1 * MS, 9 * MS]

            def slow():  # type: ignore[no-untyped-def]
                assert executor.graphs is not None
                assert not executor.graphs.table.has(stage)
                published.discard(stage)
                extra.append(extra.pop(0))
                clock.advance(sizes[stage] + extra[0])
                return replay()

            return slow

    executor = Executor(model, max_streams=2, kv_pages=64, clock=clock)
    assert executor.taken_over() == []
    executor.record_graphs(Slow())
    assert not published
    told = dict(executor.taken_over())
    assert executor.taken_over() == []
    assert set(told) == set(Stage)
    for stage, times in told.items():
        assert set(times.values()) == {sizes[stage.name.lower()]}
    rows = executor.specs[Stage.DEPTH].buckets
    assert set(told[Stage.DEPTH]) == set(told[Stage.BACKBONE]) == {(count, 1) for count in rows}
    assert set(told[Stage.CODEC]) == {(n, frames) for n in executor.specs[Stage.CODEC].buckets for frames in (1, 2, 4)}
    assert set(told[Stage.TEXT]) == set(told[Stage.PREFILL]) == {(4, 32), (8, 64)}


def test_a_replay_that_is_measured_takes_its_turn_with_steps(model: SpeechModel) -> None:
    """All graphs work in one memory: what a step's replay gave is not overwritten before it is read."""
    driver = ExecutorDriver(model, streams=1)
    executor = driver.executor

    def is_taken() -> bool:
        """For any other thread."""
        free: list[bool] = []

        def look() -> None:
            free.append(executor._turn.acquire(blocking=False))
            if free[0]:
                executor._turn.release()

        other = threading.Thread(target=look)
        other.start()
        other.join()
        return not free[0]

    taken: list[bool] = []

    class Watched(Direct):
        def record(self, function, buffers):  # type: ignore[no-untyped-def]
            replay = super().record(function, buffers)

            def watched():  # type: ignore[no-untyped-def]
                taken.append(is_taken())
                return replay()

            return watched

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frame_graphs, "STAGES", ("depth", "backbone", "prefill", "text"))
        executor.record_graphs(Watched())
    measured = len(taken)
    assert measured >= 4 * frame_graphs.REPLAYS_TIMED
    # Until the results are on their way to the host.
    send = executor._lane.send
    executor._lane.send = lambda values: (taken.append(is_taken()), send(values))[1]  # type: ignore[method-assign]
    driver.open(1, 0, TEXTS[0], seed=7)
    driver.speak(1, FRAMES)
    assert len(taken) > measured + FRAMES
    # Beside steps too: of a voice that many streams begin with.
    executor.encode([TextSegment((65, 66), (1, 2))])
    assert all(taken)
    assert not is_taken()


def test_nothing_is_said_of_a_takeover_while_a_depth_is_ahead(model: SpeechModel) -> None:
    """It may have been launched before the graphs were there, and takes what it took then."""
    driver = ExecutorDriver(model, streams=1)
    executor = driver.executor
    executor.goes_ahead = True
    driver.open(1, 0, TEXTS[0], seed=7)
    driver.prefill([1])
    driver.depth([1])
    driver.backbone([1])
    executor.record_graphs(Direct())
    assert executor.taken_over() == []
    driver.depth([1])
    assert len(executor.taken_over()) == len(frame_graphs.STAGES)


def test_only_the_threads_own_calls_disturb_a_capture() -> None:
    """sglang-omni issue 826, reproduction 14: with any other mode, an allocation elsewhere breaks the capture."""
    source = Path(graphs_module.__file__).read_text()
    captures = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.cuda.graph"
    ]
    assert len(captures) == 1
    modes = [ast.unparse(word.value) for word in captures[0].keywords if word.arg == "capture_error_mode"]
    assert modes == ["'thread_local'"]


@pytest.mark.parametrize("records", [False, True])
def test_depth_goes_ahead_of_the_choice(model: SpeechModel, records: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The depth decoder is launched before code 0 is read; what is said is the same, ends and cancelled rows included,
    and its step launches nothing more."""
    eager = ExecutorDriver(model, streams=2)
    eager.open(1, 1, TEXTS[0], seed=7)
    eager.open(2, 0, TEXTS[1], seed=8)
    expected = [eager.speak(1, FRAMES), eager.speak(2, FRAMES)]
    driver = ExecutorDriver(model, streams=2)
    if records:
        driver.executor.record_graphs(Direct())
    driver.executor.goes_ahead = True
    log: list[str] = []
    depth_of, read = driver.executor._depth_of, driver.executor._read
    monkeypatch.setattr(driver.executor, "_depth_of", lambda *a: log.append("depth") or depth_of(*a))
    monkeypatch.setattr(driver.executor, "_read", lambda sent: log.append("read") or read(sent))
    for turn in range(2):
        driver.open(1, 1, TEXTS[0], seed=7)
        driver.open(2, 0, TEXTS[1], seed=8)
        log.clear()
        driver.prefill([1, 2])
        assert log == ["depth", "read"]
        driver.depth([1, 2])
        assert log == ["depth", "read", "read"]
        if turn == 0:
            # Both are gone while a frame is on its way; the next two have their slots.
            driver.backbone([1, 2])
        else:
            while driver.goes_on(1, FRAMES) or driver.goes_on(2, FRAMES):
                going = [stream for stream in (1, 2) if driver.goes_on(stream, FRAMES)]
                driver.backbone(going)
                driver.depth(going)
            sounds = {stream: driver.decode_all(stream, (2, 1)) for stream in (1, 2)}
            assert np.array_equal(sounds[1], expected[0])
            assert np.array_equal(sounds[2], expected[1])
        for stream in (1, 2):
            driver.close(stream)


def test_poison_in_what_pads_own_reaches_nobody(model: SpeechModel, driver: ExecutorDriver) -> None:
    """The dummy slot and the token that pads write hold NaN and the last code; streams say what they say anyway."""
    eager = ExecutorDriver(model, streams=2)
    eager.open(1, 1, GUIDED, seed=9, sampling=Sampling(cfg_scale=3.0))
    expected = eager.speak(1, FRAMES, (1, 2))
    executor = driver.executor
    state, dummy = executor.state, 2
    driver.open(1, 1, GUIDED, seed=9, sampling=Sampling(cfg_scale=3.0))
    for _ in range(FRAMES):
        with torch.inference_mode():
            state.hidden[dummy] = state.codec.flat[dummy] = float("nan")
            state.codes[dummy] = state.ring[dummy] = model.config.codec.codes - 1
            executor._kv.pool[:, :, :, executor._kv.trash] = float("nan")
        if not driver.streams[1].started:
            driver.prefill([1])
        elif driver.goes_on(1, FRAMES):
            driver.backbone([1])
        driver.depth([1])
    assert np.array_equal(driver.decode_all(1, (1, 2)), expected)
    assert not graphs(driver).misses
    with torch.inference_mode():
        state.hidden[dummy] = state.codec.flat[dummy] = 0


@pytest.mark.parametrize(
    ("function", "leaks"),
    [(lambda x: (x * 2,), False), (lambda x: (x - x.mean(0),), True), (lambda x: (x + 0 * x.sum(),), True)],
)
def test_a_step_in_which_pads_reach_others_is_found(function: Function, leaks: bool) -> None:
    """The planted faults: statistics over all rows, and a term of all rows that should be nothing."""
    graph = StepGraph(EmulatedRecorder(), function, (torch.zeros(4, 3),))
    x = torch.arange(12.0).view(4, 3)
    x[2:] = float("nan")
    (found,) = graph.run(x)
    assert torch.equal(found[:2], function(x[:2])[0]) is not leaks


def test_pads_touch_no_slot_and_no_page_but_their_own(driver: ExecutorDriver) -> None:
    """One stream in a graph of more rows: every other slot stays as it was, to the bit."""
    state, kv = driver.executor.state, driver.executor._kv
    driver.open(1, 0, TEXTS[0], seed=7)
    others = [1]
    with torch.inference_mode():
        state.codec.flat[others] = 3.0
        state.hidden[others] = 3.0
    before = [
        tensor[others].clone() for tensor in (state.codes, state.hidden, state.ring, state.seen, state.codec.flat)
    ]
    driver.speak(1, FRAMES)
    after = [tensor[others] for tensor in (state.codes, state.hidden, state.ring, state.seen, state.codec.flat)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    own = [place for page in driver.streams[1].pages for place in range(16 * page, 16 * page + 16)]
    rest = sorted(set(range(kv.zero)) - set(own))
    free = [place for place in rest if not kv.pool[:, :, :, place].any()]
    assert len(free) >= len(rest) - 16 * len(own)
    assert not kv.pool[:, :, :, kv.zero].any()


def test_counters_say_what_was_replayed_and_how_much_of_it_was_padding(driver: ExecutorDriver) -> None:
    """By stage and bucket; what a text or prompt is short of its bucket are tokens."""
    driver.open(1, 0, TEXTS[0], seed=7)
    driver.speak(1, 5)
    counts = driver.executor.graph_counts()
    tokens = driver.executor._streams[1].encoded[0]
    assert counts["replays"]["text"] == counts["replays"]["prefill"] == {"32": 1}
    assert counts["live"]["text"] == counts["live"]["prefill"] == tokens
    assert counts["padded"]["text"] == 32 - tokens
    frames = sum(counts["replays"]["depth"].values())
    assert frames == counts["live"]["depth"] == driver.streams[1].made
    assert counts["padded"]["depth"] == sum((int(b) - 1) * n for b, n in counts["replays"]["depth"].items())
    assert counts["misses"] == {}
    assert counts["recorded"] == 1.0
    assert all(count > 0 for buckets in counts["bytes"].values() for count in buckets.values())
    assert counts["bytes"].keys() == set(frame_graphs.STAGES)


# ---- the emulation finds what would break a graph --------------------------------------------------------------------


def test_a_value_that_python_read_at_recording_is_found() -> None:
    """The planted fault: a scale taken from the host when recorded.  The replay uses it for ever."""
    scale = {"now": 2.0}
    graph = StepGraph(EmulatedRecorder(), lambda x: (x * scale["now"],), (torch.ones(3),))
    scale["now"] = 5.0
    (replayed,) = graph.run(torch.full((3,), 10.0))
    assert replayed.tolist() == [20.0] * 3


@pytest.mark.parametrize(
    "reads", [lambda x: (x * x.sum().item(),), lambda x: (x * (2 if x.sum() > 0 else 3),), lambda x: (x[x > 0],)]
)
def test_a_step_that_waits_for_the_device_cannot_be_recorded(reads: object) -> None:
    """The planted faults: a number read back, a branch on a tensor, a shape that depends on values."""
    with pytest.raises(NotCapturable):
        StepGraph(EmulatedRecorder(), reads, (torch.ones(3),))  # type: ignore[arg-type]


def test_an_output_that_is_read_after_the_next_replay_is_found() -> None:
    """Reproduction 8, and the planted fault: what a graph returns is overwritten by the next replay."""
    graph = StepGraph(EmulatedRecorder(), lambda x: (x + 1,), (torch.zeros(2),))
    (first,) = graph.run(torch.ones(2))
    assert first.tolist() == [2, 2]
    graph.run(torch.ones(2))
    assert first.tolist() == [-77, -77]


def test_inputs_are_always_at_the_same_place() -> None:
    """A graph reads the memory it was recorded with, so inputs are copied there."""
    places: list[int] = []

    def function(x: Tensor) -> tuple[Tensor, ...]:
        places.append(x.data_ptr())
        return (x * 2,)

    class Once:
        def pool_bytes(self) -> int:
            return 0

        def record(self, function, buffers):  # type: ignore[no-untyped-def]
            return lambda: function(*buffers)

    graph = StepGraph(Once(), function, (torch.zeros(2),))
    outputs = [graph.run(torch.full((2,), float(value)))[0].tolist() for value in range(3)]
    assert outputs == [[0, 0], [2, 2], [4, 4]]
    assert len(set(places)) == 1
    with pytest.raises(AssertionError, match="was given"):
        graph.run(torch.zeros(3))


# ---- tensors with a device and no memory ----------------------------------------------------------------------------


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Executor:
    """An executor on a device that is not there; of a model of any size, for its tensors hold nothing."""
    config = getattr(request, "param", tiny)()
    # It is measured with numbers.
    monkeypatch.setattr(executor_module, "independent_row_counts", lambda model: (4,))
    with torch.device("meta"):
        model = SpeechModel(config, frontend=lambda _voice: ByteFrontend(whole=True))
    return Executor(model, max_streams=2, kv_pages=8, device="meta")


@pytest.mark.parametrize("fake", [tiny, breeze_tts_2], indirect=True)
def test_no_step_waits_for_the_device_or_copies_to_the_host(fake: Executor) -> None:
    """Every stage of the published size too runs from buffers on the device to outputs on the device."""
    fake.record_graphs(MetaRecorder())
    assert fake.graphs is not None
    assert fake.graphs.recorded == 1.0
    assert all(fake.graphs.table.has(stage) for stage in frame_graphs.STAGES)


@pytest.mark.parametrize(
    "fault",
    [
        lambda x: x.cpu(),
        lambda x: x * x.sum().item(),
        lambda x: x * x.tolist()[0],
        lambda x: x[x > 0],
        lambda x: x if x.sum() > 0 else -x,
        lambda x: torch.ones(4).to(x.device),
        lambda x: x + torch.ones(4, device="cpu"),
        lambda x: torch.empty(x.shape, device="cpu").copy_(x),
        lambda x: x.nonzero(),
    ],
    ids=["cpu", "item", "tolist", "mask", "branch", "upload", "two devices", "copy_", "nonzero"],
)
def test_a_wait_or_a_copy_is_found_without_a_gpu(
    fake: Executor, fault: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted faults, each in the depth step: reproduction 13 (vllm-omni issue 4563, a boolean mask) among them."""
    depth_frame = frame_graphs.depth_frame
    monkeypatch.setattr(frame_graphs, "depth_frame", lambda *args: fault(depth_frame(*args)))
    with pytest.raises(NotCapturable):
        fake.record_graphs(MetaRecorder())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: real graphs are not verified here")
def test_cuda_graphs_say_what_eager_steps_say_on_the_same_device(model: SpeechModel) -> None:
    both = []
    for records in (False, True):
        driver = ExecutorDriver(SpeechModel.load("tiny"), streams=2, device="cuda")
        if records:
            driver.executor.record_graphs(CudaRecorder())
        driver.open(1, 0, TEXTS[0], seed=7)
        both.append(driver.speak(1, FRAMES, (1, 2)))
    assert np.allclose(*both, atol=1e-3)
