"""The depth decoder compiled: the same codes as pass by pass."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from breeze_rtc.models.depth import DepthDecoder
from breeze_rtc.models.sampling import Sampling, choose, gumbel
from breeze_rtc.models.speech_model import SpeechModel
from breeze_rtc.runtime.frame_steps import Batch, BatchRow, batch_of


@pytest.fixture(scope="module", autouse=True)
def _reset() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def depth() -> DepthDecoder:
    """In float64, where sums in another order do not change which code is the likeliest."""
    return SpeechModel.load("tiny").depth.double().eval()


@torch.inference_mode()
def codes_by(depth: DepthDecoder, step: object, rows: int, *, draws: bool) -> Tensor:
    """Codes of rows with hidden states of their own; step: None for `generate`."""
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, depth.config.embedding, generator=generator, dtype=torch.float64)
    first = torch.randint(0, depth.config.vocab, (rows,), generator=generator)
    sampling = Sampling(depth_temperature=0.9 if draws else 0.0)
    ints, floats, kind = batch_of(
        [BatchRow(0, row, 0, sampling) for row in range(rows)], depth.config.vocab, depth=True
    )
    batch = Batch(ints, floats)
    noise = gumbel(batch.seeds, batch.frames, torch.arange(1, depth.config.codebooks), depth.config.vocab)

    def pick(codebook: int, logits: Tensor) -> Tensor:
        return choose(logits, noise[:, codebook - 1], batch.sampling(kind))

    if step is None:
        return depth.generate(hidden, first, pick)
    return depth.generate_by(step, hidden, first, pick)  # type: ignore[arg-type]


@pytest.mark.parametrize("draws", [False, True])
def test_passes_of_one_shape_give_the_same_codes(depth: DepthDecoder, draws: bool) -> None:
    """The form that is compiled keeps all positions and masks those to come."""
    assert torch.equal(codes_by(depth, depth.step, 40, draws=draws), codes_by(depth, None, 40, draws=draws))


def test_stack_and_head_are_one_graph(depth: DepthDecoder) -> None:
    """No part of a pass is left to Python (fullgraph), two shapes serve all passes of any number of rows, and the codes
    are the same, drawn and greedy."""
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    step = depth.compiled_step(backend=counter)
    for rows in (5, 9, 32):
        for draws in (False, True):
            assert torch.equal(codes_by(depth, step, rows, draws=draws), codes_by(depth, None, rows, draws=draws))
    assert counter.frame_count == 2


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler: torch.compile cannot make kernels for a CPU")
def test_compiled_for_this_machine_it_gives_the_same_codes(depth: DepthDecoder) -> None:
    """Real kernels: two hundred frames, drawn, token for token."""
    step = depth.compiled_step()
    assert torch.equal(codes_by(depth, step, 200, draws=True), codes_by(depth, None, 200, draws=True))
