"""Every mode and form of guidance, from text and recording to greedy codes, against the public classes joined by hand.

The rows of the oracle are written out here from the published templates, not made by our prompt code.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from breeze_reference import Reference
from executor_driver import Direct, ExecutorDriver
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing

from breeze_rtc.models.prompt import BreezePrompts, Codes, Voice
from breeze_rtc.models.sampling import Sampling
from breeze_rtc.models.speech_model import SpeechModel, TextFrontend
from breeze_rtc.runtime import frame_graphs, frame_steps
from breeze_rtc.runtime.executor import Executor
from breeze_rtc.runtime.kv_cache import Prefix
from breeze_rtc.scheduling.step import Row, Stage, Step

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("transformers", "qwen_tts")),
    reason="needs transformers and, without its dependencies, qwen-tts (the Makefile installs both)",
)

TEXT, WORDS, HOW = "so they say, again.", "it was said here", "calm, low"
FRAMES = 8


def tokenizer() -> Tokenizer:
    """One token a letter, the control tokens, and the start token that every text gets."""
    specials = ["<pad>", "<eos>", "<bos>", "<|AUDIO|>", "<|audio_eos|>", "[S0]", "<ins_bos>", "<ins_eos>"]
    letters = "abcdefghijklmnopqrstuvwxyz ,."
    made = Tokenizer(WordLevel({token: n for n, token in enumerate([*specials, *letters])}, unk_token="?"))
    made.pre_tokenizer = Split("", "isolated")
    made.decoder = Fuse()
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    made.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    return made


@dataclass
class Studio:
    reference: Reference
    model: SpeechModel
    prompts: BreezePrompts
    codes: Codes
    said: dict[tuple[str, float, float], list[list[int]]] = field(default_factory=dict)

    def text(self, string: str) -> torch.Tensor:
        return self.reference.encode(tokenizer().encode(string).ids)

    def audio(self) -> torch.Tensor:
        return self.reference.embed(torch.tensor([*self.codes, (0,) * len(self.codes[0])]))


@pytest.fixture(scope="module")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Studio:
    torch.set_num_threads(1)
    reference = Reference()
    model = SpeechModel.load(str(reference.save(tmp_path_factory.mktemp("breeze")))).eval()
    theirs = reference_codes(reference)
    ours = model.reference_encoder()(RECORDING)[0].tolist()
    assert ours == theirs
    assert len(ours) == 7
    return Studio(reference, model, BreezePrompts(tokenizer), tuple(map(tuple, ours)))


RECORDING = torch.randn(1, 7 * 96 - 30, generator=torch.Generator().manual_seed(5)) * 0.3


@torch.no_grad()
def reference_codes(reference: Reference) -> list[list[int]]:
    """The recording's, by the public class."""
    codes: list[list[int]] = reference.encoder.encode(RECORDING[:, None]).audio_codes[0, :4].T.tolist()
    return codes


def speak(
    model: SpeechModel,
    frontend: TextFrontend,
    sampling: Sampling,
    *,
    chunk: int,
    executor: Executor | None = None,
    prefixes: tuple[Prefix | None, ...] = (),
) -> list[list[int]]:
    """Greedy codes of one stream, through the executor, its prompt run `chunk` positions a step."""
    executor = executor or Executor(model, max_streams=3, kv_pages=64, page_tokens=8)
    executor.open(1, 1, sampling=sampling, prefixes=prefixes)
    pages = list(range(64))
    held = prompt = 0

    def run(stage: Stage, start: int, count: int, positions: int = 0) -> None:
        nonlocal held
        new = max(0, -(-positions // 8) * sampling.rows - held)
        held += new
        row = Row(1, 1, start, count, tuple(pages.pop() for _ in range(new)))
        result = executor.run(Step(0, stage, (row,), 4)).rows[0]
        assert result.error == ""

    for segment in frontend.push(TEXT) + frontend.end():
        count = executor.add_text(1, segment)
        if count:
            run(Stage.TEXT, prompt, count)
            prompt += count
    executor.end_text(1)
    for start in range(0, prompt, chunk):
        run(Stage.PREFILL, start, min(chunk, prompt - start), min(start + chunk, prompt))
    for frame in range(FRAMES):
        if frame:
            run(Stage.BACKBONE, frame, 1, prompt + frame)
        run(Stage.DEPTH, frame, 1)
    codes: list[list[int]] = executor.state.ring[1, :FRAMES].tolist()
    executor.close(1)
    return codes


def greedy(cfg_scale: float = 1.0, reference_scale: float = 0.0) -> Sampling:
    return Sampling(temperature=0, depth_temperature=0, cfg_scale=cfg_scale, reference_scale=reference_scale)


def pieces_of(mode: str, scale: float) -> list[list[str | None]]:
    """The prompts of the backbone's rows, piece by piece; None: the recording."""
    instructed = f"[S0]<ins_bos>{HOW}<ins_eos>{TEXT}"
    plain: list[str | None] = [f"[S0]{TEXT}"]
    heard: list[str | None] = [f"[S0]{WORDS}", None]
    rows = {
        "plain": [plain],
        "design": [[instructed], plain],
        "clone": [heard + plain],
        "direction": [[*heard, instructed], heard + plain],
        "dual": [[instructed], plain, heard + plain],
    }[mode]
    return rows[:1] if scale == 1 and mode != "dual" else rows


def rows_of(studio: Studio, mode: str, scale: float) -> list[list[torch.Tensor]]:
    """What the backbone's rows read at first."""
    return [
        [studio.audio() if piece is None else studio.text(piece) for piece in row] for row in pieces_of(mode, scale)
    ]


def oracle(studio: Studio, mode: str, scale: float, reference_scale: float) -> list[list[int]]:
    """The public classes' codes, computed once."""
    case = (mode, scale, reference_scale)
    if case not in studio.said:
        rows = rows_of(studio, mode, scale)
        studio.said[case] = studio.reference.generate(rows, FRAMES, scale, reference_scale=reference_scale)
    return studio.said[case]


CASES = [
    ("plain", 1.0, 0.0),
    ("design", 1.0, 0.0),
    ("design", 1.5, 0.0),
    ("clone", 1.0, 0.0),
    ("direction", 1.0, 0.0),
    ("direction", 0.5, 0.0),
    ("direction", 1.5, 0.0),
    ("dual", 1.0, 0.7),
    ("dual", 0.4, 1.3),
]


def voice(studio: Studio, mode: str) -> Voice:
    instruction = HOW if mode in {"design", "direction", "dual"} else ""
    if mode in {"plain", "design"}:
        return Voice(instruction=instruction)
    return Voice(instruction=instruction, reference_text=WORDS, reference=studio.codes)


@torch.no_grad()
@pytest.mark.parametrize("chunk", [5, 100])
@pytest.mark.parametrize(("mode", "scale", "reference_scale"), CASES)
def test_greedy_codes(studio: Studio, mode: str, scale: float, reference_scale: float, chunk: int) -> None:
    """Eight frames are identical, whatever the pieces of the prefill."""
    expected = oracle(studio, mode, scale, reference_scale)
    assert len(expected) == FRAMES
    sampling = greedy(scale, reference_scale)
    frontend = studio.prompts.frontend(voice(studio, mode), is_dual=mode == "dual")
    assert speak(studio.model, frontend, sampling, chunk=chunk) == expected


@torch.no_grad()
@pytest.mark.parametrize(("mode", "scale", "reference_scale"), CASES)
def test_every_stage(studio: Studio, mode: str, scale: float, reference_scale: float) -> None:
    """What the backbone reads, the hidden states behind the prompts, the logits of codebook 0, those of every codebook
    of the depth decoder and the sound of eight frames are the public classes', to five digits."""
    reference, model = studio.reference, studio.model
    driver = ExecutorDriver(model, streams=2)
    frontend = studio.prompts.frontend(voice(studio, mode), is_dual=mode == "dual")
    segments = frontend.push(TEXT) + frontend.end()
    sampling = greedy(scale, reference_scale)
    logits: list[torch.Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        inner = frame_steps.choose
        patch.setattr(
            frame_steps, "choose", lambda found, *rest: logits.append(found[0].clone()) or inner(found, *rest)
        )
        driver.open(1, 1, segments, sampling=sampling)
        s = driver.executor._streams[1]
        read = [vectors[:count].clone() for vectors, count in zip(s.vectors, s.encoded, strict=True)]
        driver.prefill([1])
        driver.depth([1])
    rows = rows_of(studio, mode, scale)
    assert len(rows) == len(read) == sampling.rows
    hidden = [reference.hidden(torch.cat(row)) for row in rows]
    # In dual guidance the longer row stands first, which is that of the reference.
    for place, row, expected in zip((2, 1, 0) if mode == "dual" else range(3), rows, hidden, strict=False):
        torch.testing.assert_close(read[place], torch.cat(row), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(driver.executor.state.hidden[1, place], expected, atol=1e-5, rtol=1e-5)
    codes = driver.executor.state.codes[1].tolist()
    first = reference.combined([reference.head(h) for h in hidden], scale, reference_scale)
    expected_logits = [first] + [
        reference.combined([reference.depth_logits(h, codes[:k]) for h in hidden], scale, reference_scale)
        for k in range(1, len(codes))
    ]
    assert len(logits) == len(expected_logits)
    for found, expected in zip(logits, expected_logits, strict=True):
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
    while driver.goes_on(1, FRAMES):
        driver.backbone([1])
        driver.depth([1])
    whole = torch.tensor(oracle(studio, mode, scale, reference_scale)).T[None]
    assert reference.codec is not None
    sound = reference.codec(whole)[0, 0].clamp(-1, 1)
    assert sound.abs().max() > 0.005
    torch.testing.assert_close(torch.from_numpy(driver.decode_all(1, (1, 2))), sound, atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("has_graphs", [False, True])
def test_all_modes_in_one_batch(studio: Studio, has_graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine streams of all modes, forms of guidance and lengths in the same steps, their prompts run seven positions a
    step: eagerly and from graphs (those of dual guidance, which have none, with all that run beside them), each has the
    codes of the public classes."""
    monkeypatch.setattr(frame_graphs, "GRAPH_COLUMNS", (128,))
    monkeypatch.setattr(frame_graphs, "GRAPH_FRAMES", (1,))
    driver = ExecutorDriver(studio.model, streams=9)
    if has_graphs:
        driver.executor.record_graphs(Direct())
    for stream, (mode, scale, reference_scale) in enumerate(CASES):
        frontend = studio.prompts.frontend(voice(studio, mode), is_dual=mode == "dual")
        segments = frontend.push(TEXT) + frontend.end()
        driver.open(stream, 8 - stream, segments, sampling=greedy(scale, reference_scale))
    for streams in ([0, 1, 2, 3, 4, 5, 6], [7, 8]):
        driver.prefill(streams, 7)
        driver.depth(streams)
    for turn in range(3 + FRAMES):
        # Those of dual guidance join late.
        going = [stream for stream in range(7 if turn < 3 else 9) if driver.goes_on(stream, FRAMES)]
        driver.backbone(going)
        driver.depth(going)
    for stream, case in enumerate(CASES):
        codes = driver.executor.state.ring[8 - stream, :FRAMES].tolist()
        assert codes == oracle(studio, *case), case
    if has_graphs:
        assert driver.executor.graphs is not None
        table = driver.executor.graphs.table
        for stage in ("depth", "backbone", "prefill", "text"):
            assert sum(count for (name, _), count in table.replays.items() if name == stage) >= 3, stage


@torch.no_grad()
@pytest.mark.parametrize(("mode", "scale", "reference_scale"), [CASES[0], CASES[6], CASES[8]])
def test_speech_ends_where_the_reference_ends(
    studio: Studio, tmp_path: Path, mode: str, scale: float, reference_scale: float
) -> None:
    """The class that ends speech competes with the codes: one row, two and three stop behind the same frame, and no
    frame comes of it."""
    reference = studio.reference
    kept = reference.head.weight[-1].clone()
    rows = [torch.cat(row) for row in rows_of(studio, mode, scale)]
    made = torch.tensor(oracle(studio, mode, scale, reference_scale)[:5])
    # Along what the fifth frame's hidden state has and the ones before have not.
    states = torch.stack(
        [
            sum(
                weight * reference.hidden(torch.cat((row, reference.embed(made[:n]))))
                for row, weight in zip(rows, weights_of(len(rows), scale, reference_scale), strict=True)
            )
            for n in range(6)
        ]
    )
    target = torch.full((6,), -5.0)
    target[5] = 50.0
    try:
        reference.head.weight[-1] = torch.linalg.lstsq(states, target[:, None]).solution[:, 0]
        expected = reference.generate(rows_of(studio, mode, scale), FRAMES, scale, reference_scale=reference_scale)
        model = SpeechModel.load(str(reference.save(tmp_path))).eval()
    finally:
        reference.head.weight[-1] = kept
    assert expected == made.tolist()
    driver = ExecutorDriver(model, streams=1)
    frontend = studio.prompts.frontend(voice(studio, mode), is_dual=mode == "dual")
    driver.open(1, 0, frontend.push(TEXT) + frontend.end(), sampling=greedy(scale, reference_scale))
    sound = driver.speak(1, FRAMES)
    assert driver.streams[1].has_ended
    assert driver.executor.state.ring[0, :5].tolist() == expected
    assert len(sound) == 5 * model.frame_samples


def weights_of(rows: int, scale: float, reference_scale: float) -> tuple[float, ...]:
    """What each row's logits weigh in the sum."""
    if rows == 1:
        return (1.0,)
    return (scale, 1 - scale - reference_scale, reference_scale)[:rows]


def test_the_public_classes_joined_by_hand_say_what_the_published_code_says(studio: Studio) -> None:
    """Its own templates, caches and guidance, over the same checkpoint: `make_breeze_golden.py` wrote down what it
    says."""
    golden = json.loads((Path(__file__).parent / "breeze_golden.json").read_text())
    assert [tuple(entry["case"]) for entry in golden] == CASES
    with torch.no_grad():
        assert [entry["codes"] for entry in golden] == [oracle(studio, *case) for case in CASES]


def test_the_modes_differ(studio: Studio) -> None:
    """No two of them say the same, so that agreement means something."""
    with torch.no_grad():
        said = [str(oracle(studio, *case)) for case in CASES]
    assert len(set(said)) == len(said)


@torch.no_grad()
@pytest.mark.parametrize(
    ("mode", "scale", "reference_scale"), [case for case in CASES if case[0] in {"clone", "direction", "dual"}]
)
def test_greedy_codes_behind_a_shared_prefix(studio: Studio, mode: str, scale: float, reference_scale: float) -> None:
    """The same where the reference's keys and values were computed before, by another stream's time, and are shared."""
    model = studio.model
    executor = Executor(model, max_streams=3, kv_pages=64, page_tokens=8, prefix_pages=8)
    cloned = voice(studio, mode)
    vectors = torch.cat(executor.encode(studio.prompts.reference(cloned)))
    assert len(vectors) == 2 + len(WORDS) + 7 + 1
    prefix = executor.add_prefix(vectors)
    assert prefix is not None
    sampling = greedy(scale, reference_scale)
    prefixes = (None, None, prefix) if mode == "dual" else (prefix,) * sampling.rows
    expected = oracle(studio, mode, scale, reference_scale)
    for _ in range(2):
        frontend = studio.prompts.frontend(cloned, has_prefix=True, is_dual=mode == "dual")
        found = speak(model, frontend, sampling, chunk=6, executor=executor, prefixes=prefixes)
        assert found == expected
