"""Sesame CSM against transformers, over tiny checkpoints written and loaded under the published names."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from breeze_reference import transformers
from csm_reference import CODEBOOKS, CODES, FRAME, SPECIAL, TEXTS, VOCAB, CsmReference
from numpy.typing import NDArray

from breeze_rtc.errors import BadRequest, CheckpointError
from breeze_rtc.models.codec import CodecState
from breeze_rtc.models.csm import CsmFrontend, CsmPrompts, _codec, _language, csm_config, csm_encoder_config
from breeze_rtc.models.mimi import MimiConfig, MimiDecoder
from breeze_rtc.models.prompt import Voice
from breeze_rtc.models.published import encoder_sources
from breeze_rtc.models.sampling import Sampling
from breeze_rtc.models.speech_model import SpeechModel, TextSegment
from breeze_rtc.runtime import frame_graphs
from breeze_rtc.runtime.engine import Engine, Speech
from breeze_rtc.runtime.executor import Executor
from breeze_rtc.runtime.graphs import EmulatedRecorder
from breeze_rtc.scheduling.policy import Policy
from breeze_rtc.scheduling.step import Row, Stage, Step

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers (the Makefile installs it)"
)
GREEDY = Sampling(temperature=0, depth_temperature=0, repetition_penalty=1)


class Case:
    """One checkpoint, loaded by both."""

    def __init__(self, folder: Path, reference: CsmReference | None = None) -> None:
        torch.set_num_threads(1)
        self.reference = reference or CsmReference()
        self.folder = self.reference.save(folder)
        self.model = SpeechModel.load(str(self.folder)).eval()

    @property
    def prompts(self) -> CsmPrompts:
        prompts = self.model.prompts
        assert isinstance(prompts, CsmPrompts)
        return prompts

    def segments(self, text: str = TEXTS[0], speaker: str = "0") -> list[TextSegment]:
        frontend = self.model.frontend(speaker)
        assert frontend.push(text) == []
        return frontend.end()

    def cloned(self, words: str, sound: torch.Tensor, text: str = TEXTS[0]) -> list[TextSegment]:
        codes = self.model.reference_encoder()(sound)[0].tolist()
        frontend = self.prompts.frontend(Voice(reference_text=words, reference=tuple(map(tuple, codes))))
        frontend.push(text)
        return frontend.end()


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("csm"))


def sound(frames: float, seed: int = 3) -> torch.Tensor:
    """Noise whose level moves, (1, samples)."""
    samples = round(frames * FRAME)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, samples, generator=generator) * 0.3 * (torch.linspace(0, 9, samples).sin().abs() + 0.05)


# ---- stage by stage --------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_text_and_backbone(case: Case) -> None:
    """Codebook-0 logits agree at every position of a text and of frames."""
    tokens = torch.tensor([case.segments()[0].tokens])
    theirs = case.reference.model(input_ids=tokens).logits
    ours = case.model.text(tokens, torch.tensor([tokens.shape[1]]))
    positions = torch.arange(tokens.shape[1])[None]
    torch.testing.assert_close(
        case.model.backbone.head(case.model.backbone(ours, positions)), theirs, atol=1e-5, rtol=1e-5
    )
    frames = torch.randint(0, VOCAB, (1, 90, CODEBOOKS), generator=torch.Generator().manual_seed(1))
    theirs = case.reference.model(input_ids=frames).logits
    hidden = case.model.backbone(case.model.depth.embed_frame(frames), torch.arange(90)[None])
    torch.testing.assert_close(case.model.backbone.head(hidden), theirs, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_depth(case: Case) -> None:
    """Logits of every codebook agree, teacher forced and step by step."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(4, 32, generator=generator)
    codes = torch.randint(0, CODES, (4, CODEBOOKS), generator=generator)
    read = torch.cat((torch.zeros(4, 1, dtype=torch.int64), codes[:, :-1]), 1)
    theirs = case.reference.model.depth_decoder(input_ids=read, backbone_last_hidden_state=hidden).logits
    torch.testing.assert_close(case.model.depth(hidden, codes), theirs, atol=1e-5, rtol=1e-5)
    seen = []

    def forced(codebook: int, logits: torch.Tensor) -> torch.Tensor:
        seen.append(logits)
        return codes[:, codebook]

    assert torch.equal(case.model.depth.generate(hidden, codes[:, 0], forced), codes)
    torch.testing.assert_close(torch.stack(seen, 1), theirs, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("chunk", [1, 2, 4, 16, 48])
def test_codec_in_chunks(case: Case, chunk: int) -> None:
    """Fed in chunks, in float64, far past the attention window of 5 frames, the codec says what transformers' says of
    the whole."""
    assert isinstance(case.model.config.codec, MimiConfig)
    codec = MimiDecoder(case.model.config.codec).double()
    codec.load_state_dict(case.model.codec.state_dict())
    codes = torch.randint(0, CODES, (2, CODEBOOKS, 48), generator=torch.Generator().manual_seed(4))
    whole = _wide(case.reference.codec, codes)
    assert 0.005 < float(whole.abs().mean()) < float(whole.abs().max()) < 1
    torch.testing.assert_close(codec(codes), whole, atol=1e-6, rtol=0)
    state = codec.new_state(3)
    slots = torch.tensor([2, 0])
    pieces = [codec(codes[:, :, start : start + chunk], state, slots) for start in range(0, 48, chunk)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, atol=1e-6, rtol=0)
    # A frame of before the window still matters through the layers below, and the first one of all does not.
    other = codes.clone()
    other[:, :, 20] = (codes[:, :, 20] + 1) % CODES
    assert not torch.equal(codec(other)[:, 26 * FRAME], codec(codes)[:, 26 * FRAME])


def _wide(codec: Any, codes: torch.Tensor) -> torch.Tensor:
    """transformers' sound in float64, (B, samples)."""
    try:
        for layer in _books(codec):
            layer._embed = None
        found: torch.Tensor = codec.double().decode(codes).audio_values[:, 0]
    finally:
        codec.float()
        for layer in _books(codec):
            layer._embed = None
    return found


def _books(codec: Any) -> list[Any]:
    return [part for part in codec.modules() if hasattr(part, "embed_sum")]


@torch.no_grad()
def test_codec_in_float32_in_any_pieces(case: Case) -> None:
    """What a server computes: pieces of any sizes, rows of others beside them, a slot used again; to rounding the sound
    of the whole."""
    codec = case.model.codec
    codes = torch.randint(0, CODES, (1, CODEBOOKS, 40), generator=torch.Generator().manual_seed(5))
    whole = case.reference.codec.decode(codes).audio_values[:, 0]
    state: CodecState = codec.new_state(2)
    noise = torch.randint(0, CODES, (1, CODEBOOKS, 9), generator=torch.Generator().manual_seed(6))
    codec(noise, state, torch.tensor([1]))
    state.open(1)
    pieces, start = [], 0
    for size in (1, 3, 1, 8, 2, 16, 9):
        both = torch.cat((noise[:, :, :1].expand(-1, -1, size), codes[:, :, start : start + size]))
        pieces.append(codec(both, state, torch.tensor([0, 1]))[1:])
        start += size
    torch.testing.assert_close(torch.cat(pieces, 1), whole, atol=2e-6, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("frames", [0.4, 1, 3.5, 30])
def test_codes_of_a_recording(case: Case, frames: float) -> None:
    """They are transformers', for a recording of six windows and for a last frame that is begun only."""
    heard = sound(frames)
    theirs = case.reference.codec.encode(heard[:, None]).audio_codes.transpose(1, 2)
    ours = case.model.reference_encoder()(heard)
    assert torch.equal(ours, theirs)
    if frames > 20:
        assert all(len(ours[0, :, book].unique()) > 2 for book in range(CODEBOOKS))


# ---- whole speech ----------------------------------------------------------------------------------------------------


def speak(
    model: SpeechModel, segments: list[TextSegment], frames: int, chunk: int = 100, *, records: bool = False
) -> list[list[int]]:
    """Greedy codes of one stream through the executor, at most `frames`, its prompt run `chunk` positions a step."""
    executor = Executor(model, max_streams=1, kv_pages=90, page_tokens=8)
    if records:
        executor.specs = {stage: replace(spec, buckets=spec.buckets[:1]) for stage, spec in executor.specs.items()}
        executor.record_graphs(EmulatedRecorder())
    executor.open(1, 0, sampling=GREEDY)
    pages = list(range(90))
    held = prompt = 0

    def run(stage: Stage, start: int, count: int, positions: int = 0) -> bool:
        nonlocal held
        new = max(0, -(-positions // 8) - held)
        held += new
        row = Row(1, 0, start, count, tuple(pages.pop() for _ in range(new)))
        result = executor.run(Step(0, stage, (row,), 1)).rows[0]
        assert result.error == ""
        return result.ended

    for segment in segments:
        run(Stage.TEXT, prompt, executor.add_text(1, segment))
        prompt += len(segment.tokens)
    executor.end_text(1)
    ended = False
    for start in range(0, prompt, chunk):
        ended = run(Stage.PREFILL, start, min(chunk, prompt - start), min(start + chunk, prompt))
    made = 0
    while not ended and made < frames:
        run(Stage.DEPTH, made, 1)
        made += 1
        ended = made < frames and run(Stage.BACKBONE, made, 1, prompt + made)
    if not made:
        return []
    run(Stage.CODEC, 0, 1)
    pcm, _ = executor.take(1)
    with torch.inference_mode():
        assert np.abs(pcm - model.codec(executor.state.ring[:1, :1].transpose(1, 2))[0].numpy()).max() < 1e-6
    if records:
        assert executor.graphs is not None
        assert {stage for stage, _ in executor.graphs.table.replays} == set(frame_graphs.STAGES)
    codes: list[list[int]] = executor.state.ring[0, :made].tolist()
    return codes


@pytest.mark.parametrize("speaker", ["0", "3"])
@pytest.mark.parametrize("text", TEXTS)
def test_greedy_codes(case: Case, text: str, speaker: str) -> None:
    """Twelve frames of greedy codes are those of transformers, prompt of its processor included."""
    inputs = case.reference.inputs(text, speaker)
    segments = case.segments(text, speaker)
    assert [token for segment in segments for token in segment.tokens] == inputs["input_ids"][0].tolist()
    expected = case.reference.generate(12, **inputs)
    assert len(expected) == 12
    assert speak(case.model, segments, 12, 7) == expected


def test_greedy_codes_of_a_cloned_voice(case: Case) -> None:
    """A recording and its words stand before the text, as a turn that has been spoken."""
    heard = sound(11.5)
    inputs = case.reference.inputs(TEXTS[0], spoken=(TEXTS[1], heard[0]))
    segments = case.cloned(TEXTS[1], heard)
    assert [token for segment in segments for token in segment.tokens] == inputs["input_ids"][0].tolist()
    expected = case.reference.generate(12, **inputs)
    assert speak(case.model, segments, 12) == expected
    assert expected != case.reference.generate(12, **case.reference.inputs(TEXTS[0]))


def test_replayed_steps(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded as graphs, the steps say the same; what one graph gave is not read when another has run."""
    monkeypatch.setattr(frame_graphs, "GRAPH_COLUMNS", (128,))
    monkeypatch.setattr(frame_graphs, "GRAPH_FRAMES", (1,))
    monkeypatch.setattr(frame_graphs, "GRAPH_TOKENS", (64,))
    monkeypatch.setattr(frame_graphs, "PROMPT_COLUMNS", 80)
    monkeypatch.setattr(frame_graphs, "PACK_ROWS", 1)
    segments = case.segments()
    assert speak(case.model, segments, 6, records=True) == speak(case.model, segments, 6)


@pytest.fixture(scope="module")
def ending(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A checkpoint whose speech of the first text ends after five frames."""
    reference = CsmReference()
    _let_end(reference, reference.inputs(TEXTS[0]), 5)
    return Case(tmp_path_factory.mktemp("ending"), reference)


@torch.no_grad()
def _let_end(reference: CsmReference, inputs: dict[str, torch.Tensor], after: int) -> None:
    """Make the code 0 of every codebook but the last the likeliest in frame `after`, and no likelier in those before
    it: its weights are the part of that frame's hidden state that the others have not."""
    model = reference.model

    def hidden_states(frames: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the backbone at each of the frames, (N, 32), and of the depth decoder, (N, K - 1, 24)."""
        codes = torch.tensor(frames)
        text = model.embed_text_tokens(inputs["input_ids"])
        x = torch.cat((text, model.backbone_model.embed_tokens(codes[None, :-1])), 1)
        hidden = model.backbone_model(inputs_embeds=x).last_hidden_state[0, -len(frames) :]
        read = torch.cat((torch.zeros(len(frames), 1, dtype=torch.int64), codes[:, :-1]), 1)
        inner = model.depth_decoder.model(input_ids=read, backbone_last_hidden_state=hidden).last_hidden_state
        return hidden, inner[:, 1:]

    def pointing_at_last(states: torch.Tensor) -> torch.Tensor:
        before, last = states[:-1], states[-1]
        rest = last - before.T @ torch.linalg.lstsq(before.T, last).solution
        return 30 * rest / rest.square().sum()

    before = reference.generate(after, **inputs)
    hidden, inner = hidden_states([*before, [0] * CODEBOOKS])
    assert not any(0 in frame for frame in before), "choose another seed: a code of these frames would change"
    model.lm_head.weight[0] = pointing_at_last(hidden)
    for book in range(CODEBOOKS - 2):
        model.depth_decoder.codebooks_head.weight[book, :, 0] = pointing_at_last(inner[:, book])


def test_a_frame_of_zeros_ends_speech(ending: Case) -> None:
    """Whatever its last code is; it is not heard, and nothing comes behind it."""
    inputs = ending.reference.inputs(TEXTS[0])
    with torch.no_grad():
        found = ending.reference.model.generate(
            **inputs, max_new_tokens=12, do_sample=False, depth_decoder_do_sample=False
        )[0].tolist()
    assert found[5][:-1] == [0] * (CODEBOOKS - 1)
    assert found[5][-1] != 0
    assert len(found) == 6
    assert speak(ending.model, ending.segments(), 12) == found[:5]


def test_speech_of_no_frames(case: Case, tmp_path: Path) -> None:
    """The published model has been seen to end before it began: that is no error."""
    reference = CsmReference()
    model = reference.model
    with torch.no_grad():
        hidden = model(input_ids=reference.inputs("on")["input_ids"], output_hidden_states=True).hidden_states[-1][
            0, -1
        ]
        model.lm_head.weight[0] = 30 * hidden
        read = torch.zeros(1, CODEBOOKS, dtype=torch.int64)
        inner = model.depth_decoder.model(input_ids=read, backbone_last_hidden_state=hidden[None]).last_hidden_state[0]
        for book in range(CODEBOOKS - 1):
            model.depth_decoder.codebooks_head.weight[book, :, 0] = 30 * inner[book + 1]
    other = Case(tmp_path, reference)
    assert reference.generate(4, **reference.inputs("on")) == []
    assert speak(other.model, other.segments("on"), 4) == []


# ---- the engine ------------------------------------------------------------------------------------------------------


async def heard(speech: Speech, frames: int = 1_000) -> NDArray[np.float32]:
    made = bytearray()
    async for chunk in speech:
        made += chunk.pcm
        if len(made) >= 2 * FRAME * frames:
            speech.cancel()
    return np.frombuffer(bytes(made[: 2 * FRAME * frames]), np.int16) / np.float32(32_767)


def begin(engine: Engine, text: str, **options: Any) -> Speech:
    speech = engine.speak(interactive=False, **options)
    speech.push(text)
    speech.end()
    return speech


async def test_an_engine_speaks_it(ending: Case) -> None:
    """From the folder's name to sound, to its end: what the engine says is what transformers makes of it."""
    inputs = ending.reference.inputs(TEXTS[0])
    codes = ending.reference.generate(12, **inputs)
    with torch.no_grad():
        expected = ending.reference.codec.decode(torch.tensor(codes).T[None]).audio_values[0, 0].numpy()
    greedy = {"temperature": 0, "depth_temperature": 0}
    async with Engine(str(ending.folder), process=False, measures=False, max_streams=2) as engine:
        assert engine.voices == tuple("0123456789")
        ours = await heard(begin(engine, TEXTS[0], sampling=greedy))
    assert len(ours) == len(expected) == 5 * FRAME
    assert np.abs(ours - expected).max() < 1e-3
    assert np.abs(expected).max() > 0.05


async def test_together_as_alone(case: Case) -> None:
    """Five streams of other texts, speakers and samplings say together what each says alone, and one that begins behind
    a cancelled one, in its slot, too."""
    wanted: list[tuple[str, dict[str, Any]]] = [
        (TEXTS[0], {"voice": "0", "seed": 1}),
        (TEXTS[1], {"voice": "7", "seed": 2}),
        ("on the way", {"voice": "0", "seed": 3, "sampling": {"temperature": 0}}),
        (TEXTS[1] * 2, {"voice": "1", "seed": 4, "sampling": {"depth_temperature": 0}}),
        (TEXTS[0], {"voice": "2", "seed": 1, "sampling": {"top_k": 3}}),
    ]
    frames = 14
    # However slow the machine is.
    policy = Policy(admits_by_load=False)
    async with Engine(str(case.folder), process=False, measures=False, max_streams=5, policy=policy) as engine:
        alone = [await heard(begin(engine, text, **options), frames) for text, options in wanted]
        others = [begin(engine, text, **options) for text, options in wanted]
        async for _ in others[0]:
            break
        # In the middle of their speech: all five slots are taken, and are given to the next five.
        for speech in others:
            speech.cancel()
        together = await asyncio.gather(*(heard(begin(engine, text, **options), frames) for text, options in wanted))
    for one, other in zip(alone, together, strict=True):
        assert len(one) == frames * FRAME
        assert np.array_equal(one, other)
    assert len({one.tobytes() for one in alone}) == len(alone)


async def test_cloned_voice(case: Case, tmp_path: Path) -> None:
    """A recording becomes a voice, and what it says is what its prompt gives: the positions kept of it included."""
    from breeze_rtc.media.recording_file import read_recording

    recording = _wav(sound(500)[0])
    samples = torch.from_numpy(read_recording(recording, 24_000))[None]
    expected = speak(case.model, case.cloned(TEXTS[1], samples), 6)
    with torch.no_grad():
        wave = case.reference.codec.decode(torch.tensor(expected).T[None]).audio_values[0, 0].numpy()
    greedy = {"temperature": 0, "depth_temperature": 0}
    async with Engine(str(case.folder), process=False, measures=False, max_streams=2, voices=tmp_path) as engine:
        await engine.add_voice("ann", recording, TEXTS[1])
        ours = await heard(begin(engine, TEXTS[0], voice="ann", sampling=greedy), 6)
        with pytest.raises(BadRequest, match="no instructions"):
            await heard(begin(engine, TEXTS[0], voice="ann", instruction="slowly"))
    assert np.abs(ours - wave).max() < 1e-3


def _wav(samples: torch.Tensor) -> bytes:
    import io
    import wave

    made = io.BytesIO()
    with wave.open(made, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(24_000)
        file.writeframes((samples.clamp(-1, 1) * 32_767).to(torch.int16).numpy().tobytes())
    return made.getvalue()


# ---- text and files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [*TEXTS, "  \n a", "on <|end_of_text|>on<|AUD<|AUDIO|>IO|> on ", "e\u0301e\u0301 \t"])
def test_marks_reach_the_end_of_the_text(case: Case, text: str) -> None:
    """Marks never go back, the last is the length of the text, and the user's text makes no special token."""
    (segment,) = case.segments(text)
    assert list(segment.ends) == sorted(segment.ends)
    assert segment.ends[-1] == len(text)
    special = [case.reference.tokenizer.token_to_id(name) for name in SPECIAL]
    assert (segment.tokens[0], segment.tokens[-1]) == (special[0], special[1])
    assert not set(segment.tokens[1:-1]) & set(special)


@pytest.mark.parametrize("text", ["", " \n", "<|end_of_text|>"])
def test_nothing_to_say(case: Case, text: str) -> None:
    """No prompt is made of no text."""
    assert case.segments(text) == []


def test_what_the_checkpoint_says_of_itself(case: Case) -> None:
    """Its generation config gives the defaults, and ids that are no codes are never spoken."""
    model = case.model
    assert model.sampling == Sampling(temperature=0.8, depth_temperature=0.7, top_k=40, repetition_penalty=1.0)
    assert (model.config.end_class, model.config.reserved) == (None, (CODES, VOCAB - 1))
    assert model.config.max_positions == 2048
    assert model.clones


def test_an_instruction_is_refused(case: Case) -> None:
    """This model has no words for how to speak."""
    with pytest.raises(BadRequest, match="no instructions"):
        case.prompts.frontend(Voice(instruction="A tired old man."))
    assert isinstance(case.prompts.frontend(Voice()), CsmFrontend)


@pytest.mark.parametrize(
    ("part", "change", "says"),
    [
        ("", {"tie_codebooks_embeddings": False}, "tie_codebooks_embeddings is False"),
        ("", {"codebook_eos_token_id": 3}, "codebook_eos_token_id is 3"),
        ("codec_config", {"model_type": "encodec"}, "model_type is 'encodec'"),
        ("codec_config", {"use_causal_conv": False}, "use_causal_conv is False"),
        ("depth_decoder_config", {"hidden_size": 40}, "expected"),
    ],
)
def test_another_structure_is_refused(
    case: Case, tmp_path: Path, part: str, change: dict[str, object], says: str
) -> None:
    """By the name of the key, or of the tensor."""
    for file in case.folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((case.folder / "config.json").read_text())
    (config[part] if part else config).update(change)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=says):
        SpeechModel.load(str(tmp_path))


def test_a_folder_as_transformers_writes_it(case: Case, tmp_path: Path) -> None:
    """With its weights under the usual name, and one table under the other of its two names."""
    from safetensors.torch import load_file, save_file

    weights = load_file(case.folder / "transformers-00001-of-00001.safetensors")
    table = weights.pop("depth_decoder.model.embed_tokens.weight")
    weights["backbone_model.embed_tokens.embed_audio_tokens.weight"] = table
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "tokenizer.json").symlink_to(case.folder / "tokenizer.json")
    config = json.loads((case.folder / "config.json").read_text())
    del config["transformers_weights"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = SpeechModel.load(str(tmp_path))
    assert torch.equal(model.depth.table.weight, case.model.depth.table.weight)
    assert model.sampling == Sampling(repetition_penalty=1.0)


def test_the_published_size() -> None:
    """Every tensor of the published index of 538 is read, or is the second name of the shared table, or says nothing;
    the shapes are those of transformers at its defaults, which are the published ones."""
    library = transformers()
    defaults = library.CsmConfig(codec_config={"model_type": "mimi"})
    with torch.device("meta"):
        theirs = library.CsmForConditionalGeneration(defaults).state_dict()
    renames = {
        "codec_model.encoder.encoder_seanet.": "codec_model.encoder.",
        "codec_model.encoder.encoder_transformer.": "codec_model.encoder_transformer.",
        "codec_model.encoder.downsample.": "codec_model.downsample.",
        "codec_model.decoder.decoder_seanet.": "codec_model.decoder.",
        "codec_model.decoder.decoder_transformer.": "codec_model.decoder_transformer.",
        "codec_model.decoder.upsample.": "codec_model.upsample.",
    }
    published = {}
    for name, tensor in theirs.items():
        old = next((old for old in renames if name.startswith(old)), "")
        published[name.replace(old, renames[old]) if old else name] = tuple(tensor.shape)
    assert len(published) == 538
    config = defaults.to_dict()
    ours = csm_config(config, Path("csm-1b"))
    assert isinstance(ours.codec, MimiConfig)
    names = SimpleNamespace(names=lambda: list(published))
    sources = [*_language(ours, names), *_codec(ours.codec)]  # type: ignore[arg-type]
    heard = encoder_sources(csm_encoder_config(config, Path("csm-1b")), "codec_model.encoder", "codec_model.")
    read = {name: shape for source in (*sources, *heard) for name, shape in source.pieces}
    assert read.items() <= published.items()
    left = {name for name in published.keys() - read.keys() if not name.endswith("codebook.initialized")}
    assert left == {"backbone_model.embed_tokens.embed_audio_tokens.weight"}
    assert ours.codec.frame_samples == 1920
    with torch.device("meta"):
        model = SpeechModel(ours, frontend=lambda _voice: CsmFrontend(None, "0", []))  # type: ignore[arg-type]
    assert {source.ours for source in sources} == set(model.state_dict())
    # The attention's window, and what each convolution looks back: an upsampling a step, a kernel its length less one.
    convolutions = 512 + 6 * 512 + sum(width + 2 * (width // 2) for width in (1024, 512, 256, 128)) + 2 * 64
    assert model.codec.state_size == 8 * 2 * 249 * 512 + convolutions
