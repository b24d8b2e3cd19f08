"""What a CPU can prove of graphs, stage by stage, and that each proof would notice: every fault is planted in every
stage it can be in, and must be found there.

What only a GPU can show (pools, streams, what capture refuses, time) is not verified here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from executor_driver import Direct, ExecutorDriver
from torch import Tensor

from breeze_rtc.models.quantised import NarrowLinear, narrow
from breeze_rtc.models.sampling import Sampling
from breeze_rtc.models.speech_model import ByteFrontend, SpeechModel, TextSegment
from breeze_rtc.runtime import executor as executor_module
from breeze_rtc.runtime import frame_graphs, prompts
from breeze_rtc.runtime.executor import Executor
from breeze_rtc.runtime.frame_graphs import STAGES, FrameGraphs
from breeze_rtc.runtime.graphs import (
    EmulatedRecorder,
    Function,
    GraphTable,
    Key,
    MetaRecorder,
    NotCapturable,
    Recorder,
    StepGraph,
)
from breeze_rtc.runtime.lane import NullLane, There

TEXT = "one, two. "
FRAMES = 5
GREEDY = Sampling(temperature=0, depth_temperature=0)


@pytest.fixture(scope="module", autouse=True)
def _small() -> Iterator[None]:
    """One thread, and the least of shapes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    patch = pytest.MonkeyPatch()
    patch.setattr(frame_graphs, "GRAPH_COLUMNS", (64,))
    patch.setattr(frame_graphs, "GRAPH_FRAMES", (1,))
    patch.setattr(frame_graphs, "GRAPH_TOKENS", (32,))
    patch.setattr(frame_graphs, "PROMPT_COLUMNS", 48)
    yield
    patch.undo()
    torch.set_num_threads(threads)
    torch._dynamo.reset()


@pytest.fixture
def model() -> SpeechModel:
    return SpeechModel.load("tiny")


def record(driver: ExecutorDriver, recorder: Recorder, stages: tuple[str, ...] = STAGES) -> GraphTable:
    """The smallest graph of each of these stages, and no others: tracing takes a second a shape."""
    shapes = FrameGraphs._shapes

    def least(graphs: FrameGraphs, stage: str) -> list[Key]:
        return shapes(graphs, stage)[-1:] if stage in {"text", "prefill", "codec"} else _unguided(shapes(graphs, stage))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frame_graphs, "STAGES", stages)
        patch.setattr(FrameGraphs, "_shapes", least)
        driver.executor.record_graphs(recorder)
    assert driver.executor.graphs is not None
    return driver.executor.graphs.table


def _unguided(keys: list[Key]) -> list[Key]:
    rows = min(key[1] for key in keys)
    return [key for key in keys if key[1] == rows and key[2] == 0]


def alter(patch: pytest.MonkeyPatch, model: SpeechModel, stage: str, fault: Callable[[Tensor], Tensor]) -> None:
    """Let this stage's step end with `fault`: of what it gives, or of the hidden states that it leaves in slots."""
    if stage == "text":
        packed = model.text.packed
        patch.setattr(model.text, "packed", lambda *args: fault(packed(*args)))
        return
    name = {"prefill": "prompt_hidden", "backbone": "next_hidden", "depth": "depth_frame", "codec": "codec_frames"}
    inner = getattr(frame_graphs, name[stage])
    at = {"prefill": (7, 8), "backbone": (2, 3)}.get(stage)

    def altered(*args: Any, **options: Any) -> Any:
        found = inner(*args, **options)
        if at is None:
            return fault(found)
        state, where = args[1], tuple(args[n] for n in at)
        state.hidden[where] = fault(state.hidden[where])
        return None

    for module in (frame_graphs, prompts if stage == "prefill" else executor_module):
        patch.setattr(module, name[stage], altered)


def spoken(driver: ExecutorDriver, stream: int = 1, sampling: Sampling = GREEDY) -> Any:
    driver.open(stream, stream - 1, TEXT, seed=7, sampling=sampling)
    sound = driver.speak(stream, FRAMES)
    error = driver.streams[stream].error
    driver.close(stream)
    return sound if not error else np.full(1, np.nan)


# ---- recorded once, replayed on other inputs -------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_a_value_baked_into_a_stage_is_found(model: SpeechModel, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale that Python held when the stage was recorded: the replay keeps it, and says something else than the eager
    step once it has changed.  While it has not, they are the same to the last bit."""
    host = {"scale": 1.0}
    alter(monkeypatch, model, stage, lambda x: x * host["scale"])
    eager, traced = ExecutorDriver(model, streams=1), ExecutorDriver(model, streams=1)
    table = record(traced, EmulatedRecorder(), (stage,))
    expected = spoken(eager)
    assert len(expected) == FRAMES * model.frame_samples
    assert np.array_equal(spoken(traced), expected)
    assert sum(table.replays.values()) >= 1
    assert not table.misses
    if stage == "depth":
        # What it gives is whether its logits were finite.
        host["scale"] = float("nan")
    else:
        host["scale"] = -2.0
    assert not np.array_equal(spoken(traced), spoken(eager))


class Compiled(Direct):
    """Every function compiled as one graph of torch.compile, without a break: no part of it is left to Python."""

    def record(self, function: Function, buffers: tuple[Tensor, ...]) -> Callable[[], tuple[Tensor, ...]]:
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, backend="eager", dynamic=False)
        compiled(*buffers)

        def replay() -> tuple[Tensor, ...]:
            for output in self._given:
                output.fill_(-77)
            self._given = [output.clone() for output in compiled(*buffers)]
            return tuple(self._given)

        return replay


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_is_one_graph_to_a_compiler(model: SpeechModel, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token for token what it is eagerly; a stage that asks for a value on its way cannot be compiled so."""
    driver = ExecutorDriver(model, streams=1)
    table = record(driver, Compiled(), (stage,))
    assert np.array_equal(
        spoken(driver, sampling=Sampling()), spoken(ExecutorDriver(model, streams=1), sampling=Sampling())
    )
    assert sum(table.replays.values()) >= 1
    assert not table.misses
    alter(monkeypatch, model, stage, lambda x: x if float(x.sum()) > 1e9 else x + 0)
    with pytest.raises(Exception, match=r"(?i)graph break|data.dependent|Unsupported|item"):
        record(ExecutorDriver(model, streams=1), Compiled(), (stage,))


@pytest.mark.parametrize(
    ("recorder", "stages"), [(EmulatedRecorder, ("depth", "backbone", "prefill")), (Compiled, ("backbone",))]
)
def test_int8_layers_in_graphs(recorder: type[EmulatedRecorder], stages: tuple[str, ...]) -> None:
    """Backbone, prompts and depth decoder with the layers kept small, replayed and compiled: what they say eagerly."""
    small = SpeechModel.load("tiny", weights="int8")
    driver = ExecutorDriver(small, streams=1)
    table = record(driver, recorder(), stages)
    expected = spoken(ExecutorDriver(small, streams=1))
    assert np.array_equal(spoken(driver), expected)
    assert {stage for stage, _ in table.replays} == set(stages)
    assert sum(isinstance(part, NarrowLinear) for part in small.modules()) >= 8


def test_dual_guidance_could_be_recorded_too(model: SpeechModel) -> None:
    """A server makes no graphs of it, for it is rare; its steps are such that it could: three rows of a stream in a
    graph say what they say eagerly."""
    rows = [
        TextSegment(tuple(range(70, 82)), (0,) * 12, row=1),
        TextSegment(tuple(range(40, 49)), (0,) * 9, row=2),
        TextSegment(tuple(range(65, 90)), tuple(range(1, 26))),
    ]
    sampling = Sampling(cfg_scale=1.5, reference_scale=0.7)
    eager, traced = ExecutorDriver(model, streams=1), ExecutorDriver(model, streams=1)
    table = record(traced, EmulatedRecorder(), ("codec",))
    graphs = traced.executor.graphs
    assert graphs is not None
    keys: list[Key] = [("backbone", 1, 2, 64), ("depth", 1, 2)]
    graphs._frame_rows = (1, 2, 3)
    with torch.inference_mode():
        for key in keys:
            function, *inputs = graphs._recordable(key)
            table.publish({key: StepGraph(EmulatedRecorder(), function, tuple(inputs))})
    sounds = []
    for driver in (eager, traced):
        driver.open(1, 0, rows, seed=9, sampling=sampling)
        sounds.append(driver.speak(1, FRAMES))
    assert len(sounds[0]) > 0
    assert np.array_equal(*sounds)
    assert table.replays["backbone", 1] == table.replays["depth", 1] - 1 == FRAMES - 1


# ---- outputs that the next replay overwrites -------------------------------------------------------------------------


def test_text_kept_without_a_copy_is_found(model: SpeechModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """More segments than go into one call take two, the second before the vectors of the first are used."""
    monkeypatch.setattr(frame_graphs, "GRAPH_TOKENS", (64,))
    segments = [TextSegment((65 + n, 66), (1, 2)) for n in range(frame_graphs.PACK_ROWS + 1)]
    expected = torch.cat(ExecutorDriver(model, streams=1).executor.encode(segments))
    driver = ExecutorDriver(model, streams=1)
    table = record(driver, Direct(), ("text",))
    assert torch.equal(torch.cat(driver.executor.encode(segments)), expected)
    assert sum(table.replays.values()) >= 2
    graphs = driver.executor.graphs
    assert graphs is not None
    monkeypatch.setattr(driver.executor._prompts, "_encode", graphs.text)
    assert not torch.equal(torch.cat(driver.executor.encode(segments)), expected)


class NoCopies(NullLane):
    """The planted fault: results are handed over where a graph left them."""

    def run(self, work: Callable[[], Tensor]) -> There:
        return There(work())

    def send(self, values: Tensor) -> There:
        return There(values)


def test_code_0_read_without_a_copy_is_found(model: SpeechModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read behind the launch of the depth decoder, whose replay writes over it: the end of speech is not seen."""
    logits = torch.zeros(model.config.backbone.classes)
    logits[model.config.end_class] = 9.0
    ended = []
    for lane in (NullLane(), NoCopies()):
        driver = ExecutorDriver(model, streams=1)
        record(driver, Direct())
        driver.executor._lane = lane
        driver.executor.goes_ahead = True
        driver.open(1, 0, TEXT, seed=1, sampling=GREEDY)
        driver.prefill([1])
        driver.depth([1])
        with monkeypatch.context() as patch:
            patch.setattr(model.backbone, "head", lambda hidden: logits.expand(len(hidden), -1).clone())
            driver.backbone([1])
        ended.append(driver.streams[1].has_ended)
    assert ended == [True, False]


def test_sound_read_without_a_copy_is_found(model: SpeechModel) -> None:
    """It is asked for behind the replay of the next chunk.  (Of the depth decoder's output something new is worked out
    before it is sent, and prompts leave their states in slots.)"""
    found = []
    for lane in (NullLane(), NoCopies()):
        driver = ExecutorDriver(model, streams=2)
        record(driver, Direct(), ("codec",))
        driver.executor._lane = lane
        for stream in (1, 2):
            driver.open(stream, stream - 1, TEXT, seed=stream, sampling=GREEDY)
        driver.prefill([1, 2])
        driver.depth([1, 2])
        with torch.inference_mode():
            ways = [driver.executor._sound([driver.executor._streams[stream]], 1) for stream in (1, 2)]
        found.append(ways[0].wait().tolist())
    assert found[0] != found[1]


# ---- pads ------------------------------------------------------------------------------------------------------------


def padded(model: SpeechModel, monkeypatch: pytest.MonkeyPatch, *, poison: bool) -> Any:
    """A stream in the largest graphs.  poison: whatever pads read or own is NaN, and their codes are others."""
    driver = ExecutorDriver(model, streams=2)
    shapes = FrameGraphs._shapes
    with monkeypatch.context() as patch:
        patch.setattr(FrameGraphs, "_shapes", lambda graphs, stage: shapes(graphs, stage)[:1])
        driver.executor.record_graphs(Direct())
    executor, dummy = driver.executor, 2
    graphs = executor.graphs
    assert graphs is not None
    graphs._frame_rows, graphs._sound_rows = graphs._frame_rows[-1:], graphs._sound_rows[-1:]
    state, bad = executor.state, float("nan") if poison else 0.0
    with monkeypatch.context() as patch, torch.inference_mode():
        inputs = frame_graphs.prompt_inputs

        def poisoned(*args: Any, **options: Any) -> Any:
            x, *rest = inputs(*args, **options)
            x[sum(len(vectors) for *_, vectors in args[1]) :] = bad
            return x, *rest

        patch.setattr(frame_graphs, "prompt_inputs", poisoned)
        embed = model.text.embed
        patch.setattr(model.text, "embed", lambda ids: embed(ids).masked_fill((ids == 0)[..., None], bad))
        driver.open(1, 0, TEXT, seed=7, sampling=GREEDY)
        for step in (driver.prefill, driver.depth, *(driver.backbone, driver.depth) * (FRAMES - 1)):
            # The steps before have left something there.
            state.hidden[dummy] = state.codec.flat[dummy] = bad
            state.codes[dummy] = state.ring[dummy] = (model.config.codec.codes - 1) * poison
            executor._kv.pool[:, :, :, executor._kv.trash] = bad
            if not driver.streams[1].error:
                step([1])
        sound = driver.decode_all(1, (1,))
    if driver.streams[1].error:
        return np.full(1, np.nan)
    assert {stage for stage, _ in graphs.table.replays} == set(STAGES)
    assert all(graphs.table.padded[stage] > 0 for stage in STAGES)
    assert not graphs.table.misses
    return sound


def test_poison_in_the_pads_of_every_stage_reaches_nobody(model: SpeechModel, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = spoken(ExecutorDriver(model, streams=2))
    assert np.array_equal(padded(model, monkeypatch, poison=False), expected)
    assert np.array_equal(padded(model, monkeypatch, poison=True), expected)


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_in_which_pads_reach_others_is_found(
    model: SpeechModel, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault: a mean over all rows or tokens, which pads change."""

    def mixed(x: Tensor) -> Tensor:
        return x + 0.1 * x.mean(0, keepdim=True)

    if stage == "prefill":
        # Behind it, pads have what the first token has.
        inner = frame_graphs.prompt_hidden
        monkeypatch.setattr(
            frame_graphs, "prompt_hidden", lambda model, state, kv, x, *rest: inner(model, state, kv, mixed(x), *rest)
        )
    else:
        alter(monkeypatch, model, stage, mixed)
    clean = padded(model, monkeypatch, poison=False)
    assert len(clean) > 1
    assert not np.array_equal(padded(model, monkeypatch, poison=True), clean)


# ---- tensors with a device and no memory -----------------------------------------------------------------------------


def fake(monkeypatch: pytest.MonkeyPatch, *, int8: bool = False) -> Executor:
    """On a device that is not there."""
    # It is measured with numbers.
    monkeypatch.setattr(executor_module, "independent_row_counts", lambda model: (4,))
    config = SpeechModel.load("tiny").config
    with torch.device("meta"):
        model = SpeechModel(config, frontend=lambda _voice: ByteFrontend(whole=True))
        if int8:
            narrow(model)
    return Executor(model, max_streams=2, kv_pages=8, device="meta")


FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "cpu": lambda x: x.cpu(),
    "item": lambda x: x * x.sum().item(),
    "tolist": lambda x: x * x.flatten().tolist()[0],
    "mask": lambda x: x + x[x > 0].sum(),
    "branch": lambda x: x if x.sum() > 0 else -x,
    "upload": lambda x: x + torch.ones(x.shape).to(x.device),
    "two devices": lambda x: x + torch.ones(x.shape, device="cpu"),
    "nonzero": lambda x: x + len(x.nonzero()),
}


@pytest.mark.parametrize("fault", list(FAULTS))
@pytest.mark.parametrize("stage", STAGES)
def test_a_wait_or_a_copy_in_a_stage_is_found(stage: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reproduction 13 (vllm-omni 4563: a boolean mask) among them."""
    executor = fake(monkeypatch)
    monkeypatch.setattr(frame_graphs, "STAGES", (stage,))
    alter(monkeypatch, executor.model, stage, FAULTS[fault])
    with pytest.raises(NotCapturable):
        executor.record_graphs(MetaRecorder())


def test_int8_layers_wait_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = fake(monkeypatch, int8=True)
    executor.record_graphs(MetaRecorder())
    assert executor.graphs is not None
    assert executor.graphs.recorded == 1.0
