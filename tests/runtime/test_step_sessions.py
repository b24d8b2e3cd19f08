"""The nano voice's step graphs: what ONNX Runtime computes is what torch computes, alone and in any company."""

from __future__ import annotations

import lzma
from pathlib import Path

import numpy as np
import pytest
import torch
from executor_driver import ExecutorDriver

from breeze_rtc.errors import CheckpointError
from breeze_rtc.models.checkpoint import read_graphs, write_graphs
from breeze_rtc.models.speech_model import SpeechModel
from breeze_rtc.runtime.step_sessions import StepSessions
from breeze_rtc.scheduling.step import Stage

FRAMES = 40
TEXTS = ["Good morning.", "How are you today?", "It is twenty past nine, and the train has left.", "No.", "A b c."]


@pytest.fixture(scope="module")
def nano() -> SpeechModel:
    return SpeechModel.load("nano")


@pytest.fixture(scope="module")
def eager() -> SpeechModel:
    model = SpeechModel.load("nano")
    model.graphs = {}
    return model


def spoken(model: SpeechModel, text: str, chunks: tuple[int, ...] = (1,), **options: object) -> np.ndarray:
    driver = ExecutorDriver(model)
    driver.open(1, 3, text, **options)
    return driver.speak(1, FRAMES, chunks)


def test_sessions_say_what_torch_says(nano: SpeechModel, eager: SpeechModel) -> None:
    """The same codes, frame by frame (another code would be another sound altogether), and sound equal to rounding."""
    for text in TEXTS[:3]:
        by_graph, by_torch = spoken(nano, text), spoken(eager, text)
        assert len(by_graph) == len(by_torch) > 0
        assert np.abs(by_graph - by_torch).max() < 1e-3


def test_together_is_alone(nano: SpeechModel) -> None:
    driver = ExecutorDriver(nano)
    for stream, text in enumerate(TEXTS):
        driver.open(stream, stream, text)
    together = driver.speak_together(list(range(len(TEXTS))), FRAMES, seed=3)
    for stream, text in enumerate(TEXTS):
        assert np.array_equal(together[stream], spoken(nano, text)), text


@pytest.mark.parametrize("chunks", [(1, 2, 4, 8, 16), (3,), (16,)])
def test_chunks_do_not_matter(nano: SpeechModel, chunks: tuple[int, ...]) -> None:
    """The same for any sizes of codec chunks, past the codec's window of 32 frames."""
    assert np.array_equal(spoken(nano, TEXTS[2], chunks), spoken(nano, TEXTS[2]))


def test_a_stream_that_draws_stands_beside_one_that_does_not(nano: SpeechModel) -> None:
    """Drawn codes are computed by torch and likeliest codes by the graph; neither disturbs the other in one step."""
    drawn = {"seed": 5, "sampling": {"depth_temperature": 0.8, "top_k": 20}}
    driver = ExecutorDriver(nano)
    driver.open(0, 0, TEXTS[1])
    driver.open(1, 1, TEXTS[1], **drawn)
    together = driver.speak_together([0, 1], FRAMES, seed=1)
    assert np.array_equal(together[0], spoken(nano, TEXTS[1]))
    assert np.array_equal(together[1], spoken(nano, TEXTS[1], **drawn))
    assert not np.array_equal(together[0], together[1])


def test_a_row_that_is_not_finite_fails_alone(nano: SpeechModel) -> None:
    driver = ExecutorDriver(nano)
    for stream, text in enumerate(TEXTS[:2]):
        driver.open(stream, stream, text)
    driver.run(Stage.PREFILL, {0: (0, 1), 1: (0, 1)}, 2)
    with torch.inference_mode():
        driver.executor.state.hidden[0] = torch.nan
    results = driver.run(Stage.DEPTH, {0: (0, 1), 1: (0, 1)}, 2)
    assert "not finite" in results[0].error
    assert not results[1].error


def test_graphs_that_do_not_fit_are_named(nano: SpeechModel) -> None:
    with pytest.raises(CheckpointError, match="depth"):
        StepSessions(nano, {"backbone": nano.graphs["backbone"]})
    with pytest.raises(CheckpointError, match="do not fit"):
        StepSessions(SpeechModel.load("tiny-pointer"), nano.graphs)
    with pytest.raises(CheckpointError, match="do not fit"):
        StepSessions(nano, {**nano.graphs, "depth": b"no graph"})


def test_a_damaged_graph_file_is_named(tmp_path: Path) -> None:
    write_graphs(tmp_path, {"depth": b"graph"})
    assert read_graphs(tmp_path) == {"depth": b"graph"}
    path = tmp_path / "depth.onnx.xz"
    path.write_bytes(lzma.compress(b"graph")[:-5])
    with pytest.raises(CheckpointError, match=r"depth\.onnx\.xz"):
        read_graphs(tmp_path)
