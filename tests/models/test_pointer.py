"""The pointer's items: what a frame reads, and that training sees what stepping sees."""

from __future__ import annotations

import torch
from torch import Tensor

from breeze_rtc.models.checkpoint import seeded
from breeze_rtc.models.pointer import LOOK_AHEAD, PointerConfig, TextPointer
from breeze_rtc.models.presets import tiny_pointer
from breeze_rtc.models.sampling import Sampling
from breeze_rtc.runtime.executor import Executor
from breeze_rtc.scheduling.step import Row, Stage, Step


def test_item_is_the_sum_of_three_linears_and_the_time_spent() -> None:
    """One matrix over the three vectors side by side; the time on a token saturates."""
    pointer = TextPointer(PointerConfig(text=6, hidden=5, max_elapsed=4))
    window, elapsed = torch.randn(2, 3, 6), torch.tensor([1, 40])
    parts = pointer.text.weight.split(6, 1)
    expected = sum((window[:, i] @ parts[i].t() for i in range(LOOK_AHEAD)), torch.zeros(2, 5))
    expected = expected + pointer.elapsed.weight[torch.tensor([1, 3])]
    torch.testing.assert_close(pointer.item(window, elapsed), expected)


@torch.no_grad()
def test_stepping_equals_training() -> None:
    """The codes and the pointer's path that the executor finds greedily are those that the whole-sequence form of the
    same classes finds from its own history."""
    model = seeded(tiny_pointer()).eval()
    pointer = model.pointer
    assert pointer is not None
    executor = Executor(model, max_streams=1, kv_pages=8)
    executor.open(1, 0, sampling=Sampling(temperature=0, depth_temperature=0, repetition_penalty=1))
    frontend = model.frontend()
    segment = frontend.push("hello, you two") + frontend.end()
    tokens: list[int] = []
    for piece in segment:
        tokens += piece.tokens
        count = executor.add_text(1, piece)
        executor.run(Step(0, Stage.TEXT, (Row(1, 0, 0, count),), 1))
    executor.end_text(1)
    frames = 0
    while frames < 24:
        stage = Stage.BACKBONE if frames else Stage.PREFILL
        pages = (frames // 16,) if frames % 16 == 0 else ()
        if executor.run(Step(0, stage, (Row(1, 0, frames, 1, pages),), 4)).rows[0].ended:
            break
        executor.run(Step(0, Stage.DEPTH, (Row(1, 0, frames, 1),), 4))
        frames += 1
    codes = executor.state.ring[0, :frames].clone()

    vectors = torch.cat(
        [model.text(torch.tensor([piece.tokens]), torch.tensor([len(piece.tokens)]))[0] for piece in segment]
    )
    padded = torch.cat((vectors, vectors.new_zeros(LOOK_AHEAD, vectors.shape[1])))
    place = elapsed = 0
    inputs: list[Tensor] = []
    for frame in range(frames):
        before = pointer.start if frame == 0 else model.depth.embed_frame(codes[frame - 1])
        inputs.append(before + pointer.item(padded[place : place + LOOK_AHEAD], torch.tensor(elapsed)))
        hidden = model.backbone(torch.stack(inputs)[None], torch.arange(frame + 1)[None])[0, -1]
        assert int(model.backbone.head(hidden).argmax()) == int(codes[frame, 0])
        assert torch.equal(model.depth(hidden[None], codes[frame][None]).argmax(-1)[0], codes[frame, 1:])
        advance = int(pointer.advance_logits(hidden).argmax())
        elapsed = 0 if advance else elapsed + 1
        place = min(place + advance, len(tokens))
    assert frames > 5
    assert place == executor._streams[1].pointer
