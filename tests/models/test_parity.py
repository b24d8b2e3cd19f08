"""Every stage against the public classes, over a tiny checkpoint written and loaded under the published names."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from breeze_reference import CODEBOOKS, CODES, VOCAB, Reference

from breeze_rtc.models.attention import Ragged
from breeze_rtc.models.codec import CodecDecoder
from breeze_rtc.models.sampling import Sampling, combine
from breeze_rtc.models.speech_model import SpeechModel, TextSegment
from breeze_rtc.runtime.executor import Executor
from breeze_rtc.scheduling.step import Row, Stage, Step

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("transformers", "qwen_tts")),
    reason="needs transformers and, without its dependencies, qwen-tts (the Makefile installs both)",
)

TOKENS = [2, 5, 50, 7, 9, 30, 31, 2, 44, 12, 13, 14, 15, 16, 17, 18, 19, 20]
"""More than two windows of the encoder, with the token that has a vector of its own."""


@pytest.fixture(scope="module")
def reference() -> Reference:
    torch.set_num_threads(1)
    return Reference()


@pytest.fixture(scope="module")
def model(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> SpeechModel:
    return SpeechModel.load(str(reference.save(tmp_path_factory.mktemp("breeze")))).eval()


@torch.no_grad()
def test_text_encoder(reference: Reference, model: SpeechModel) -> None:
    """Encoder and projection agree, for a segment alone and for one padded beside a longer one."""
    rows = torch.tensor([TOKENS, TOKENS[:5] + [0] * 13])
    ours = model.text(rows, torch.tensor([18, 5]))
    torch.testing.assert_close(ours[0], reference.encode(TOKENS), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours[1, :5], reference.encode(TOKENS[:5]), atol=1e-5, rtol=1e-5)
    # And one behind another, as they are served.
    packed = model.text.packed(torch.tensor(TOKENS[:5] + TOKENS), torch.tensor([5, 18]), Ragged.of([5, 18], 23, 2, 18))
    torch.testing.assert_close(packed[:5], reference.encode(TOKENS[:5]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(packed[5:], reference.encode(TOKENS), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_embedding_scale_is_rounded_to_the_weights_type(model: SpeechModel) -> None:
    """In bfloat16 the square root of 1152 is 34.0, as the published model multiplies."""
    config = replace(model.config.text, block=replace(model.config.text.block, hidden=1152), own_vector_id=None)
    encoder = type(model.text)(replace(config, full_attention=())).bfloat16()
    row = encoder.embedding.weight[7]
    assert torch.equal(encoder.embed(torch.tensor([[7]]))[0, 0], row * 34.0)


@torch.no_grad()
def test_backbone(reference: Reference, model: SpeechModel) -> None:
    """Hidden states and codebook-0 logits agree over a whole sequence."""
    x = torch.randn(2, 21, 32, generator=torch.Generator().manual_seed(1))
    theirs = reference.backbone(inputs_embeds=x).last_hidden_state
    ours = model.backbone(x, torch.arange(21)[None])
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(model.backbone.head(ours), reference.head(theirs), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_frame_embedding(reference: Reference, model: SpeechModel) -> None:
    """The sum over codebooks of one shared table."""
    codes = torch.randint(0, VOCAB, (5, CODEBOOKS), generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(model.depth.embed_frame(codes), reference.embed(codes))


@torch.no_grad()
def test_depth(reference: Reference, model: SpeechModel) -> None:
    """Logits of every codebook agree, teacher forced and step by step."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(5, 32, generator=generator)
    codes = torch.randint(0, CODES, (5, CODEBOOKS), generator=generator)
    theirs = torch.stack(
        [
            torch.stack([reference.depth_logits(hidden[n], codes[n, :k].tolist()) for k in range(1, CODEBOOKS)])
            for n in range(5)
        ]
    )
    torch.testing.assert_close(model.depth(hidden, codes), theirs, atol=1e-5, rtol=1e-5)
    seen = []

    def forced(codebook: int, logits: torch.Tensor) -> torch.Tensor:
        seen.append(logits)
        return codes[:, codebook]

    assert torch.equal(model.depth.generate(hidden, codes[:, 0], forced), codes)
    torch.testing.assert_close(torch.stack(seen, 1), theirs, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("chunk", [1, 2, 4, 8, 16])
def test_codec_in_chunks(reference: Reference, model: SpeechModel, chunk: int) -> None:
    """Reproductions 3 and 24 (vllm-omni 2439 and 2480: too little left context, heard at every chunk; Qwen3-TTS 239:
    drift).  Fed in chunks, in float64, far past the attention window of 6 frames, the codec says what the public one
    says of the whole.
    """
    assert reference.codec is not None
    codec = CodecDecoder(model.config.codec).double()
    codec.load_state_dict(model.codec.double().state_dict())
    model.codec.float()
    codes = torch.randint(0, CODES, (2, CODEBOOKS, 48), generator=torch.Generator().manual_seed(4))
    whole = reference.codec.double()(codes)[:, 0]
    reference.codec.float()
    assert 0.005 < float(whole.abs().mean()) < float(whole.abs().max()) < 1
    torch.testing.assert_close(codec(codes), whole, atol=1e-6, rtol=0)
    state = codec.new_state(3)
    slots = torch.tensor([2, 0])
    pieces = [codec(codes[:, :, start : start + chunk], state, slots) for start in range(0, 48, chunk)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, atol=1e-6, rtol=0)


def speak(model: SpeechModel, segments: list[TextSegment], frames: int, scale: float, chunk: int) -> list[list[int]]:
    """Greedy codes of one stream, through the executor, its prompt run `chunk` positions a step."""
    executor = Executor(model, max_streams=2, kv_pages=16, page_tokens=8)
    executor.open(1, 1, sampling=Sampling(temperature=0, depth_temperature=0, cfg_scale=scale))
    rows = 1 if scale == 1 else 2
    pages = list(range(16))
    held = prompt = 0

    def run(stage: Stage, start: int, count: int, positions: int = 0) -> bool:
        nonlocal held
        new = -(-positions // 8) * rows - held
        held += max(0, new)
        row = Row(1, 1, start, count, tuple(pages.pop() for _ in range(new)))
        result = executor.run(Step(0, stage, (row,), 4)).rows[0]
        assert result.error == ""
        return result.ended

    for segment in segments:
        count = executor.add_text(1, segment)
        if count:
            run(Stage.TEXT, prompt, count)
            prompt += count
    executor.end_text(1)
    for start in range(0, prompt, chunk):
        run(Stage.PREFILL, start, min(chunk, prompt - start), min(start + chunk, prompt))
    for frame in range(frames):
        if frame:
            run(Stage.BACKBONE, frame, 1, prompt + frame)
        run(Stage.DEPTH, frame, 1)
    codes: list[list[int]] = executor.state.ring[1, :frames].tolist()
    return codes


@torch.no_grad()
@pytest.mark.parametrize("chunk", [5, 100])
def test_greedy_codes_of_a_cloned_voice(reference: Reference, model: SpeechModel, chunk: int) -> None:
    """Text, reference audio and text as the prompt: eight frames of greedy codes are identical to the public
    classes'."""
    audio = ((1, 2, 3, 4), (5, 6, 7, 8), (9, 10, 11, 12))
    frames = torch.tensor([*audio, (0, 0, 0, 0)])
    expected = reference.generate(
        [[reference.encode(TOKENS[:7]), reference.embed(frames), reference.encode(TOKENS)]], 8
    )
    segments = [
        TextSegment(tuple(TOKENS[:7]), (0,) * 7),
        TextSegment((40, 40, 40, 41), (0,) * 4, codes=audio),
        TextSegment(tuple(TOKENS), tuple(range(1, 19))),
    ]
    assert len(expected) == 8
    assert speak(model, segments, 8, 1.0, chunk) == expected


@torch.no_grad()
@pytest.mark.parametrize(("scale", "length"), [(0.5, 6), (1.5, 16)])
def test_greedy_codes_under_guidance(reference: Reference, model: SpeechModel, scale: float, length: int) -> None:
    """Two rows of unequal length, each with its own cache and hidden state, in the backbone and in all depth heads."""
    expected = reference.generate([[reference.encode(TOKENS)], [reference.encode(TOKENS[:length])]], 8, scale)
    segments = [
        TextSegment(tuple(TOKENS[:length]), (0,) * length, row=1),
        TextSegment(tuple(TOKENS), tuple(range(1, 19))),
    ]
    assert len(expected) == 8
    assert speak(model, segments, 8, scale, 7) == expected
    assert expected != reference.generate([[reference.encode(TOKENS)]], 8)


def test_guidance_of_one_changes_nothing() -> None:
    """u + s (c - u) is c at s = 1, and pushes away from u beyond."""
    c, u = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 3.0]])
    assert torch.equal(combine(c, u, torch.ones(1, 1)), c)
    assert torch.equal(combine(c, u, torch.full((1, 1), 4.0)), torch.tensor([[4.0, -1.0]]))


def test_the_published_size_of_the_codec_state() -> None:
    """At the published dimensions a stream's state is the 1,314,880 numbers that were counted in the public decoder,
    less the column of the current frame."""
    from breeze_rtc.models.attention import BlockConfig, RopeConfig
    from breeze_rtc.models.codec import CodecConfig

    block = BlockConfig(hidden=512, heads=16, kv_heads=16, head_dim=64, ffn=1024, eps=1e-5)
    config = CodecConfig(
        codebooks=16, codes=2048, code_dim=256, mixed=512, latent=1024, block=block, layers=8, rope=RopeConfig(1e4),
        window=72, upsample=(2, 2), expansion=4, head="snake", sample_rate=24_000, frame_samples=1920, decoder=1536,
        rates=(8, 5, 4, 3),
    )  # fmt: skip
    with torch.device("meta"):
        codec = CodecDecoder(config)
    assert codec.state_size == 1_314_880 - 2 * 8 * 16 * 64


def test_the_checkpoint_folder_is_told_apart(model: SpeechModel) -> None:
    """What was loaded has the reserved ids and the end class of its own vocabulary, and says its licence."""
    assert model.config.reserved == (CODES, VOCAB - 1)
    assert model.config.end_class == VOCAB
    assert model.config.backbone.block.eps == 1e-6
    assert "non-commercial" in model.licence_note.lower()


def test_dead_tensors_are_not_read(reference: Reference, tmp_path: Path) -> None:
    """The unused text embedding and the old codec need not even be there."""
    folder = reference.save(tmp_path, shards=1)
    model = SpeechModel.load(str(folder))
    names = {name for name, _ in model.named_parameters()}
    assert not any("embed_text" in name or "codec_model" in name for name in names)
    assert len([name for name in names if name.endswith("table.weight")]) == 1
