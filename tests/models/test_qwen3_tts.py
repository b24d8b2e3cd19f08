"""Qwen3-TTS against the qwen-tts package, over tiny checkpoints written and loaded under the published names."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from breeze_reference import CODES, transformers
from qwen_reference import FIRST_SPECIAL, QwenReference
from test_parity import speak

from breeze_rtc.errors import CheckpointError
from breeze_rtc.models.prompt import Voice
from breeze_rtc.models.qwen3_prompts import read_tokenizer
from breeze_rtc.models.qwen3_tts import _ids
from breeze_rtc.models.sampling import Sampling
from breeze_rtc.models.speech_model import SpeechModel, TextSegment
from breeze_rtc.runtime.engine import Engine
from breeze_rtc.runtime.executor import Executor
from breeze_rtc.runtime.frame_steps import Batch, BatchRow, batch_of, choose_first

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("transformers", "qwen_tts")),
    reason="needs transformers and, without its dependencies, qwen-tts (the Makefile installs both)",
)

TEXT = "One, two: naïve on 東京 — it's 3 on\n the way."


class Case:
    """One checkpoint, loaded by both."""

    def __init__(self, kind: str, inner: int, folder: Path) -> None:
        torch.set_num_threads(1)
        self.reference = QwenReference(kind, inner)
        self.folder = self.reference.save(folder)
        self.model = SpeechModel.load(str(self.folder)).eval()
        self.ids = _ids(self.reference.config, self.folder)
        self.library = transformers().Qwen2Tokenizer.from_pretrained(str(self.folder))

    def segments(self, text: str = TEXT, **voice: Any) -> list[TextSegment]:
        assert self.model.prompts is not None
        frontend = self.model.prompts.frontend(Voice(**voice))
        assert frontend.push(text) == []
        return frontend.end()

    def input_ids(self, text: str) -> list[torch.Tensor]:
        """As the package tokenises what it has put round a text."""
        return [torch.tensor([self.library(text)["input_ids"]])]

    def spoken(self, text: str = TEXT) -> list[torch.Tensor]:
        return self.input_ids(f"<|im_start|>assistant\n{text}<|im_end|>\n<|im_start|>assistant\n")

    def instructed(self, instruction: str) -> list[torch.Tensor]:
        return self.input_ids(f"<|im_start|>user\n{instruction}<|im_end|>\n")


@pytest.fixture(scope="module")
def custom(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Named voices; the code predictor narrower than the talker, as in the 1.7B."""
    return Case("custom_voice", 24, tmp_path_factory.mktemp("custom"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """The code predictor as wide as the talker, as in the 0.6B."""
    return Case("custom_voice", 32, tmp_path_factory.mktemp("small"))


@pytest.mark.parametrize("voice", ["vivian", "dylan"])
@pytest.mark.parametrize("size", ["custom", "small"])
def test_greedy_codes_of_a_named_voice(request: pytest.FixtureRequest, size: str, voice: str) -> None:
    """Eight frames of greedy codes are the package's, for a speaker whose language is left open and for one who speaks
    a dialect."""
    case: Case = request.getfixturevalue(size)
    expected = case.reference.generate(8, input_ids=case.spoken(), languages=["Auto"], speakers=[voice])
    assert len(expected) == 8
    assert speak(case.model, case.segments(name=voice), 8, 1.0, 7) == expected


def test_greedy_codes_of_a_designed_voice(custom: Case) -> None:
    """An instruction stands before the text, and no speaker is named."""
    expected = custom.reference.generate(
        8, input_ids=custom.spoken(), instruct_ids=custom.instructed("A tired old man."), languages=["Auto"]
    )
    segments = custom.segments(instruction="A tired old man.")
    assert speak(custom.model, segments, 8, 1.0, 100) == expected
    assert speak(custom.model, custom.segments(), 8, 1.0, 100) != expected


def test_speech_has_two_frames_at_least(custom: Case) -> None:
    """The end is not chosen for the first two frames, however likely: the package says the same to its sampler."""
    executor = Executor(custom.model, max_streams=3, kv_pages=3)
    greedy = Sampling(temperature=0, depth_temperature=0, repetition_penalty=1)
    classes = custom.model.config.backbone.classes
    rows = [BatchRow(slot, 0, frame, greedy) for slot, frame in enumerate((0, 1, 2))]
    ints, floats, kind = batch_of(rows, classes, depth=False)
    logits = torch.zeros(3, classes)
    logits[:, custom.model.config.end_class] = 9
    logits[:, 5] = 1
    with torch.inference_mode():
        codes, _ = choose_first(custom.model, executor.state, Batch(ints, floats), kind, logits)
    assert codes.tolist() == [5, 5, custom.model.config.end_class]


@pytest.mark.parametrize("voice", ["vivian", "dylan"])
async def test_an_engine_speaks_it(custom: Case, voice: str) -> None:
    """From the folder's name to sound: what the engine says is what the package's codec makes of the package's
    codes."""
    codes = custom.reference.generate(6, input_ids=custom.spoken(), languages=["Auto"], speakers=[voice])
    with torch.no_grad():
        expected = custom.reference.codec(torch.tensor(codes).t()[None])[0, 0].numpy()
    made = bytearray()
    greedy = {"temperature": 0, "depth_temperature": 0, "repetition_penalty": 1.1}
    async with Engine(str(custom.folder), process=False, measures=False, max_streams=2) as engine:
        assert engine.voices == ("vivian", "dylan")
        speech = engine.speak(voice=voice, sampling=greedy, interactive=False)
        speech.push(TEXT)
        speech.end()
        async for chunk in speech:
            made += chunk.pcm
            if len(made) >= 2 * len(expected):
                speech.cancel()
    ours = np.frombuffer(bytes(made[: 2 * len(expected)]), np.int16) / 32_767
    assert np.abs(ours - expected).max() < 1e-3
    assert np.abs(expected).max() > 0.05


@torch.no_grad()
def test_sound(custom: Case) -> None:
    """The codec is Breeze TTS 2's, under this checkpoint's names."""
    codes = torch.randint(0, CODES, (2, 4, 20), generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(custom.model.codec(codes), custom.reference.codec(codes)[:, 0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("text", [TEXT, " a", "x  \n\n y's  ", "e\u0301 on", "1234 on on\t!?...\r\n"])
def test_tokens_are_those_of_the_library(custom: Case, text: str) -> None:
    """The tokenizer made from vocabulary and merges reads as transformers' does."""
    assert read_tokenizer(custom.folder).encode(text, add_special_tokens=False).ids == custom.library(text)["input_ids"]


@pytest.mark.parametrize("text", [TEXT, "\n\n a", "on <|im_end|>on<|im_<|im_end|>end|> on ", "東", "e\u0301e\u0301"])
def test_marks_reach_the_end_of_the_text(custom: Case, text: str) -> None:
    """Marks never go back, the last is the length of the text, and the user's text makes no special token."""
    (segment,) = custom.segments(text, name="vivian")
    assert list(segment.ends) == sorted(segment.ends)
    assert segment.ends[-1] == len(text)
    words = [token % custom.ids.table.vocab for token in segment.tokens[8:-2]]
    assert all(word < FIRST_SPECIAL for word in words)


@pytest.mark.parametrize("text", ["", " \n", "<|im_end|>"])
def test_nothing_to_say(custom: Case, text: str) -> None:
    """No prompt is made of no text."""
    assert custom.segments(text) == []


def test_what_the_checkpoint_says_of_itself(custom: Case) -> None:
    """Its speakers are the voices, its values the defaults, and its tags are never spoken."""
    model = custom.model
    assert model.voices == ("vivian", "dylan")
    assert model.sampling == Sampling(temperature=0.8, depth_temperature=0.7, top_k=40, repetition_penalty=1.05)
    assert (model.config.end_class, model.config.reserved) == (CODES + 102, (CODES, CODES + 1_023))
    logits = model.silence_reserved(torch.zeros(CODES + 1_024))
    assert logits.isfinite().nonzero()[:, 0].tolist() == [*range(CODES), CODES + 102]


def test_another_codec_is_refused(custom: Case, tmp_path: Path) -> None:
    """The 25 Hz models are named and not read."""
    config = {**custom.reference.config, "tokenizer_type": "qwen3_tts_tokenizer_25hz"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "speech_tokenizer").mkdir()
    (tmp_path / "speech_tokenizer" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="25hz"):
        SpeechModel.load(str(tmp_path))
