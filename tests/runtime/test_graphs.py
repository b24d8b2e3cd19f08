"""Graphs, on a CPU by emulation: recorded once, replayed on other inputs, they say what eager steps say.

What only a GPU can show (pools, streams, what capture refuses, time) is marked `gpu` and not verified without one.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from executor_driver import ExecutorDriver
from torch import Tensor

from breeze_rtc.models.sampling import Sampling
from breeze_rtc.models.speech_model import SpeechModel, TextSegment
from breeze_rtc.runtime import executor as executor_module
from breeze_rtc.runtime.graphs import CudaRecorder, EmulatedRecorder, GraphTable, NotCapturable, StepGraph

TEXTS = ("one, two. ", "a somewhat longer text, in two parts.")
FRAMES = 14
GUIDED = [
    TextSegment(tuple(range(70, 82)), (0,) * 12, row=1),
    TextSegment(tuple(range(65, 95)), tuple(range(1, 31))),
]


@pytest.fixture(scope="module", autouse=True)
def _small() -> Iterator[None]:
    """One thread, and fewer shapes than a server has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    patch = pytest.MonkeyPatch()
    patch.setattr(executor_module, "GRAPH_COLUMNS", (64,))
    patch.setattr(executor_module, "GRAPH_FRAMES", (1, 2))
    yield
    patch.undo()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model() -> SpeechModel:
    return SpeechModel.load("tiny")


@pytest.fixture(scope="module")
def recorded(model: SpeechModel) -> ExecutorDriver:
    driver = ExecutorDriver(model, streams=2)
    driver.executor.record_graphs(EmulatedRecorder())
    return driver


@pytest.fixture
def driver(recorded: ExecutorDriver) -> Iterator[ExecutorDriver]:
    """The same graphs for every test, its streams closed."""
    table = graphs(recorded)
    table.replays = table.misses = table.live_rows = table.padded_rows = 0
    yield recorded
    for stream in tuple(recorded.streams):
        recorded.close(stream)


def graphs(driver: ExecutorDriver) -> GraphTable:
    assert driver.executor.graphs is not None
    return driver.executor.graphs


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
    model: SpeechModel, driver: ExecutorDriver, sampling: Sampling
) -> None:
    """Sample for sample, drawn or greedy; every frame and codec step was a replay."""
    eager = ExecutorDriver(model, streams=2)
    for each in (eager, driver):
        each.open(1, 0, TEXTS[0], seed=5, sampling=sampling)
    expected, sound = eager.speak(1, FRAMES, (1, 2)), driver.speak(1, FRAMES, (1, 2))
    assert np.array_equal(sound, expected)
    assert len(sound) > 0
    assert graphs(driver).misses == 0


def test_streams_together_with_guidance_and_without(model: SpeechModel, driver: ExecutorDriver) -> None:
    """Two rows of one stream, one of the other: replayed together as eagerly alone."""
    eager = ExecutorDriver(model, streams=2)
    eager.open(1, 1, GUIDED, seed=9, sampling=Sampling(cfg_scale=3.0))
    expected = eager.speak(1, FRAMES)
    eager.open(2, 0, TEXTS[1], seed=6)
    plain = eager.speak(2, FRAMES)
    driver.open(1, 1, GUIDED, seed=9, sampling=Sampling(cfg_scale=3.0))
    driver.open(2, 0, TEXTS[1], seed=6)
    together = driver.speak_together([1, 2], FRAMES, 3)
    assert np.array_equal(together[1], expected)
    assert np.array_equal(together[2], plain)
    assert graphs(driver).replays > 0


def test_nothing_is_recorded_while_serving(driver: ExecutorDriver) -> None:
    """The graphs after a hundred steps are those from before."""
    before = dict(graphs(driver).graphs)
    driver.open(1, 0, TEXTS[0], seed=5)
    driver.speak(1, FRAMES)
    assert graphs(driver).graphs == before


def test_what_no_graph_fits_runs_eagerly_and_is_counted(model: SpeechModel, driver: ExecutorDriver) -> None:
    """A nucleus limit, a history longer than any graph's, a chunk of three frames."""
    eager = ExecutorDriver(model, streams=2)
    text = "no. " * 20
    for each in (eager, driver):
        each.open(1, 0, text, seed=1, sampling=Sampling(top_p=0.8))
        each.open(2, 1, "two", seed=1)
    assert np.array_equal(driver.speak(1, FRAMES), eager.speak(1, FRAMES))
    assert driver.executor._streams[1].encoded[0] > 64
    missed = graphs(driver).misses
    assert missed >= driver.streams[1].made > 1
    assert np.array_equal(driver.speak(2, FRAMES, (3,)), eager.speak(2, FRAMES, (3,)))
    assert driver.streams[2].made >= 3
    assert graphs(driver).misses > missed


def test_pads_touch_no_slot_and_no_page_but_their_own(driver: ExecutorDriver) -> None:
    """One stream in a graph of more rows: every other slot stays as it was, to the bit."""
    state, kv = driver.executor.state, driver.executor._kv
    driver.open(1, 0, TEXTS[0], seed=5)
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


def test_counters_say_how_many_rows_were_pads(driver: ExecutorDriver) -> None:
    driver.open(1, 0, TEXTS[0], seed=5)
    driver.speak(1, 5)
    table = graphs(driver)
    assert table.replays > 0
    assert table.live_rows == table.replays
    assert driver.executor.graph_counts() == {
        "replays": table.replays,
        "misses": 0,
        "live_rows": table.replays,
        "padded_rows": table.padded_rows,
    }


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
    """The planted fault: what a graph returns is overwritten by its next replay."""
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
        def record(self, function, buffers):  # type: ignore[no-untyped-def]
            return lambda: function(*buffers)

    graph = StepGraph(Once(), function, (torch.zeros(2),))
    outputs = [graph.run(torch.full((2,), float(value)))[0].tolist() for value in range(3)]
    assert outputs == [[0, 0], [2, 2], [4, 4]]
    assert len(set(places)) == 1
    with pytest.raises(AssertionError, match="was given"):
        graph.run(torch.zeros(3))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: real graphs are not verified here")
def test_cuda_graphs_say_what_eager_steps_say_on_the_same_device(model: SpeechModel) -> None:
    both = []
    for records in (False, True):
        driver = ExecutorDriver(SpeechModel.load("tiny"), streams=2, device="cuda")
        if records:
            driver.executor.record_graphs(CudaRecorder())
        driver.open(1, 0, TEXTS[0], seed=5)
        both.append(driver.speak(1, FRAMES, (1, 2)))
    assert np.allclose(*both, atol=1e-3)
