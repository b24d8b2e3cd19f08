"""Every mode and form of guidance, from text and recording to greedy codes, against the public classes joined by hand.

The rows of the oracle are written out here from the published templates, not made by our prompt code.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import pytest
import torch
from breeze_reference import Reference
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing

from breeze_rtc.models.prompt import BreezePrompts, Codes, Voice
from breeze_rtc.models.sampling import Sampling
from breeze_rtc.models.speech_model import SpeechModel, TextFrontend
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

    def text(self, string: str) -> torch.Tensor:
        return self.reference.encode(tokenizer().encode(string).ids)

    def audio(self) -> torch.Tensor:
        return self.reference.embed(torch.tensor([*self.codes, (0,) * len(self.codes[0])]))

    def clone(self, last: str) -> list[torch.Tensor]:
        return [self.text(f"[S0]{WORDS}"), self.audio(), self.text(last)]


@pytest.fixture(scope="module")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Studio:
    torch.set_num_threads(1)
    reference = Reference()
    model = SpeechModel.load(str(reference.save(tmp_path_factory.mktemp("breeze")))).eval()
    recording = torch.randn(1, 7 * 96 - 30, generator=torch.Generator().manual_seed(5)) * 0.3
    with torch.no_grad():
        theirs = reference.encoder.encode(recording[:, None]).audio_codes[0, :4].T.tolist()
    ours = model.reference_encoder()(recording)[0].tolist()
    assert ours == theirs
    assert len(ours) == 7
    return Studio(reference, model, BreezePrompts(tokenizer), tuple(map(tuple, ours)))


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


def oracle(studio: Studio, mode: str, scale: float, reference_scale: float) -> list[list[int]]:
    instructed = f"[S0]<ins_bos>{HOW}<ins_eos>{TEXT}"
    plain = [studio.text(f"[S0]{TEXT}")]
    rows = {
        "plain": [plain],
        "design": [[studio.text(instructed)], plain],
        "clone": [studio.clone(f"[S0]{TEXT}")],
        "direction": [studio.clone(instructed), studio.clone(f"[S0]{TEXT}")],
        "dual": [[studio.text(instructed)], plain, studio.clone(f"[S0]{TEXT}")],
    }[mode]
    if scale == 1 and mode != "dual":
        rows = rows[:1]
    return studio.reference.generate(rows, FRAMES, scale, reference_scale=reference_scale)


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
