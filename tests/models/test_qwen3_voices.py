"""Qwen3-TTS in every kind of voice against the qwen-tts package: named, described, cloned with and without the words.

The package's own code makes the prompts that are compared.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from breeze_reference import CODEBOOKS, transformers
from numpy.typing import NDArray
from qwen_reference import QwenReference
from test_parity import speak
from voice_studio import TEXT, WORDS, Studio, recording

from breeze_rtc.errors import BadRequest, BadSampling, CheckpointError
from breeze_rtc.media.recording_file import read_recording
from breeze_rtc.models.prompt import Voice
from breeze_rtc.models.qwen3_tts import load_speaker_encoder
from breeze_rtc.models.speaker_encoder import log_mel, mel_filters
from breeze_rtc.models.speech_model import SpeechModel, TextSegment
from breeze_rtc.runtime.engine import Engine
from breeze_rtc.runtime.executor import Executor
from breeze_rtc.runtime.messages import Open

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("transformers", "qwen_tts")),
    reason="needs transformers and, without its dependencies, qwen-tts (the Makefile installs both)",
)

HOW = "A tired old man."
FRAMES = 8
LANGUAGES = ("english", "chinese")
SOUND = torch.from_numpy(read_recording(recording(), 24_000))
SHORT = SOUND[:2_000]
"""A store takes a second at least, which is many of these frames."""


class Case:
    """One checkpoint, loaded by both."""

    def __init__(self, kind: str, folder: Path, inner: int = 24) -> None:
        torch.set_num_threads(1)
        self.reference = QwenReference(kind, inner)
        self.folder = self.reference.save(folder)
        self.model = SpeechModel.load(str(self.folder)).eval()
        self.library = transformers().Qwen2Tokenizer.from_pretrained(str(self.folder))

    def ids(self, text: str) -> list[torch.Tensor]:
        return [torch.tensor([self.library(text)["input_ids"]])]

    def package(self, mode: str, sound: torch.Tensor = SHORT) -> dict[str, Any]:
        """A mode's arguments of the package's `generate`, as its `generate_custom_voice`, `generate_voice_design` and
        `generate_voice_clone` make them."""
        asked: dict[str, Any] = {
            "input_ids": self.ids(f"<|im_start|>assistant\n{TEXT}<|im_end|>\n<|im_start|>assistant\n"),
            "languages": ["Auto"],
        }
        if "named" in mode:
            asked["speakers"] = ["dylan" if "dialect" in mode else "vivian"]
        for language in LANGUAGES:
            if language in mode:
                asked["languages"] = [language.capitalize()]
        if "described" in mode:
            asked["instruct_ids"] = self.ids(f"<|im_start|>user\n{HOW}<|im_end|>\n")
        if "cloned" in mode:
            asked["voice_clone_prompt"] = self.reference.clone(sound, has_words="words" in mode)
            asked["ref_ids"] = self.ids(f"<|im_start|>assistant\n{WORDS}<|im_end|>\n")
        return asked

    def voice(self, mode: str) -> Voice:
        """The same as ours, its recording heard by our encoders."""
        voice: dict[str, Any] = {"instruction": HOW} if "described" in mode else {}
        if "named" in mode:
            voice["name"] = "dylan" if "dialect" in mode else "vivian"
        voice["language"] = next((language for language in LANGUAGES if language in mode), "")
        if "cloned" in mode:
            encoder = self.model.reference_encoder()
            assert encoder.speaker is not None
            voice["vector"] = tuple(encoder.speaker.vector(SHORT).tolist())
            if "words" in mode:
                voice |= {"reference": tuple(map(tuple, encoder(SHORT[None])[0].tolist())), "reference_text": WORDS}
        return Voice(**voice)

    def segments(self, mode: str) -> list[TextSegment]:
        assert self.model.prompts is not None
        frontend = self.model.prompts.frontend(self.voice(mode))
        assert frontend.push(TEXT) == []
        return frontend.end()


@pytest.fixture(scope="module")
def custom(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case("custom_voice", tmp_path_factory.mktemp("custom"))


@pytest.fixture(scope="module")
def design(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case("voice_design", tmp_path_factory.mktemp("design"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case("base", tmp_path_factory.mktemp("base"))


MODES = [
    ("custom", "named"),
    ("custom", "named dialect"),
    ("custom", "named english"),
    ("custom", "named chinese"),
    ("custom", "named dialect english"),
    ("custom", "named dialect chinese"),
    ("custom", "named and described"),
    ("custom", "named dialect and described"),
    ("design", "plain"),
    ("design", "described english"),
    ("design", "described"),
    ("base", "plain"),
    ("base", "cloned"),
    ("base", "cloned with words"),
    ("base", "cloned with words english"),
]


@torch.no_grad()
@pytest.mark.parametrize(("kind", "mode"), MODES)
def test_prompts_and_greedy_codes(request: pytest.FixtureRequest, kind: str, mode: str) -> None:
    """What the backbone reads is what the package gives its talker, and eight frames of greedy codes are its own,
    whatever the pieces of the prefill."""
    case: Case = request.getfixturevalue(kind)
    asked = case.package(mode)
    segments = case.segments(mode)
    read = torch.cat(Executor(case.model, max_streams=1, kv_pages=1).encode(segments))
    torch.testing.assert_close(read, case.reference.prompt(**asked)["inputs_embeds"][0], atol=1e-5, rtol=1e-5)
    expected = case.reference.generate(FRAMES, **asked)
    assert len(expected) == FRAMES
    for chunk in (7, 200):
        assert speak(case.model, segments, FRAMES, 1.0, chunk) == expected


def test_the_modes_differ(request: pytest.FixtureRequest) -> None:
    """No two of a checkpoint say the same, so that agreement means something."""
    for kind in ("custom", "design", "base"):
        case: Case = request.getfixturevalue(kind)
        modes = [mode for other, mode in MODES if other == kind]
        said = [case.reference.generate(FRAMES, **case.package(mode)) for mode in modes]
        # Chinese is what a speaker of a dialect speaks without being asked.
        assert len(set(map(str, said))) == len(set(modes) - {"named dialect chinese"})
        assert len({frame[0] for codes in said for frame in codes}) > 3


@torch.no_grad()
def test_who_speaks_in_a_recording(base: Case) -> None:
    """The vector of the speaker is the package's, its mel filters those that librosa would give it, and another
    recording has another vector."""
    encoder = base.model.reference_encoder().speaker
    assert encoder is not None
    package = base.reference.model.extract_speaker_embedding(SOUND.numpy(), 24_000)
    torch.testing.assert_close(encoder.vector(SOUND), package, atol=1e-5, rtol=1e-4)
    filters = transformers().audio_utils.mel_filter_bank(513, 128, 0, 12_000, 24_000, norm="slaney", mel_scale="slaney")
    torch.testing.assert_close(mel_filters(128), torch.from_numpy(filters.T).float(), atol=1e-7, rtol=1e-5)
    assert log_mel(SOUND[None], 128).std() > 0.5
    tone = 0.3 * (torch.arange(len(SOUND)) * (2 * torch.pi * 440 / 24_000)).sin()
    assert (encoder.vector(tone) - package).norm() > 0.5 * package.norm()


def package_sound(case: Case, mode: str, frames: int) -> NDArray[np.float32]:
    """As its `generate_voice_clone` does: the recording's frames and the made ones are decoded as one, then the first
    are cut off."""
    asked = case.package(mode, SOUND)
    heard = asked["voice_clone_prompt"]["ref_code"][0] if "cloned" in mode else None
    codes = torch.tensor(case.reference.generate(frames, **asked))
    before = 0 if heard is None else len(heard)
    whole = codes if heard is None else torch.cat((heard, codes))
    with torch.no_grad():
        sound: NDArray[np.float32] = case.reference.codec(whole.t()[None])[0, 0].numpy()
    return sound[before * len(sound) // len(whole) :]


@pytest.mark.parametrize("mode", ["plain", "cloned", "cloned with words"])
@pytest.mark.parametrize("chunks", [(1,), (3, 1, 4)])
@pytest.mark.parametrize("prefix_pages", [16, 0])
def test_sound_of_a_stream(base: Case, tmp_path: Path, mode: str, chunks: tuple[int, ...], prefix_pages: int) -> None:
    """From recording and text to sound, decoded in pieces of any size, behind kept keys and values or without them, it
    is what the package makes offline; after a recording with words the codec has heard it."""
    studio = Studio(base.model, tmp_path, prefix_pages=prefix_pages)
    name = mode.split(maxsplit=1)[0].replace("plain", "default")
    if name != "default":
        assert studio.add(name, recording(), WORDS if "words" in mode else "") == ""
    greedy = {"temperature": 0.0, "depth_temperature": 0.0, "repetition_penalty": 1.1}
    studio.open(3, Open(1, name, 7, greedy, 0, False), TEXT)
    sound = studio.driver.speak(1, FRAMES, chunks)
    expected = package_sound(base, mode, FRAMES)
    # One of them ends by itself before that.
    assert len(sound) == len(expected) >= 4 * base.model.frame_samples
    np.testing.assert_allclose(sound, expected, atol=3e-5)
    assert np.abs(expected).max() > 0.05


def test_a_cloned_voice_is_kept(base: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that does not depend on the text is on disk, and of a stream only the text, and of a recording with
    words its frames, are left to read."""
    studio = Studio(base.model, tmp_path)
    assert studio.add("anna", recording(), WORDS) == studio.add("bea", recording(2), "") == ""
    first = {name: studio.say(name) for name in ("anna", "bea", "default")}
    plain = first["default"][1]
    # Three of the beginning, three of the language, and where the text begins.
    assert first["bea"][1] == plain - 7
    assert first["anna"][1] == plain - 7 + -(-len(SOUND) // base.model.frame_samples)
    assert not np.array_equal(first["anna"][0], first["bea"][0])
    # Where the language is said, nothing is kept, and the prompt has one position more.
    assert studio.say("bea", language="english")[1] == plain + 2
    for name in ("_encoded", "_vectors"):
        monkeypatch.delattr(type(studio.store), name)
    again = Studio(base.model, tmp_path)
    again.store.warm()
    monkeypatch.delattr(type(studio.store), "_read")
    for name, (sound, tokens) in first.items():
        found, found_tokens = again.say(name)
        assert np.array_equal(found, sound)
        # Of the voice without a recording, too, what it begins with is kept now.
        assert found_tokens == (plain - 7 if name == "default" else tokens)


MIXED = [("default", "one, two. "), ("anna", "a longer text, in two parts."), ("bea", "x"), ("anna", "no. no. no.")]


@pytest.mark.parametrize("prefix_pages", [16, 0])
def test_cloned_voices_together_are_alone(base: Case, tmp_path: Path, prefix_pages: int) -> None:
    """Streams without a voice, with a vector alone and with a recording each say sample for sample what each says
    alone."""
    together = Studio(base.model, tmp_path, prefix_pages=prefix_pages)
    assert together.add("anna", recording(), WORDS) == together.add("bea", recording(2), "") == ""
    messages = [Open(n, name, 100 + n, {}, 0, False) for n, (name, _) in enumerate(MIXED)]
    for slot, message in zip((5, 2, 0, 6), messages, strict=True):
        together.open(slot, message, MIXED[message.stream][1])
    said = together.driver.speak_together([0, 1, 2, 3], 9, seed=3)
    assert all(len(sound) for sound in said.values())
    for message in messages:
        alone = Studio(base.model, tmp_path, prefix_pages=prefix_pages)
        alone.open(3, message, MIXED[message.stream][1])
        assert np.array_equal(alone.driver.speak(message.stream, 9), said[message.stream]), message


def test_described_voices_together_are_alone(custom: Case) -> None:
    """Named speakers with and without an instruction or a dialect."""
    mixed = [("vivian", ""), ("dylan", HOW), ("vivian", HOW), ("dylan", "")]
    messages = [Open(n, name, 100 + n, {}, 0, False, how) for n, (name, how) in enumerate(mixed)]
    together = Studio(custom.model, Path("/nowhere"))
    for message in messages:
        together.open(message.stream, message, TEXT)
    said = together.driver.speak_together([0, 1, 2, 3], 7, seed=5)
    assert len({sound.tobytes() for sound in said.values()}) == 4
    for message in messages:
        alone = Studio(custom.model, Path("/nowhere"))
        alone.open(3, message, TEXT)
        assert np.array_equal(alone.driver.speak(message.stream, 7), said[message.stream]), message


def test_what_named_voices_begin_with_is_kept(custom: Case, tmp_path: Path) -> None:
    """The same sound as without, and of a prompt the text alone is left to read, unless more is asked for."""
    cold, warm = Studio(custom.model, tmp_path), Studio(custom.model, tmp_path)
    warm.store.warm()
    kept = {}
    for name in ("vivian", "dylan"):
        (sound, whole), (again, rest) = cold.say(name), warm.say(name)
        assert np.array_equal(again, sound)
        kept[name] = whole - rest
    # Three of the beginning, three of the language (of a dialect four), the speaker, and where the text begins.
    assert kept == {"vivian": 8, "dylan": 9}
    assert warm.say("vivian", instruction=HOW)[1] == cold.say("vivian", instruction=HOW)[1]


def test_what_a_checkpoint_cannot(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Its kind is named: Base and the small CustomVoice follow no instructions, the others clone nothing, and none has
    an unguided form."""
    base, custom = (Studio(request.getfixturevalue(kind).model, tmp_path) for kind in ("base", "custom"))
    with pytest.raises(BadRequest, match="a Base checkpoint of Qwen3-TTS follows no instructions: leave them out"):
        base.store.speaker(Open(1, "default", 0, {}, 0, False, HOW))
    small = Studio(Case("custom_voice", tmp_path / "small", inner=32).model, tmp_path)
    with pytest.raises(BadRequest, match=r"the CustomVoice checkpoint of 0\.6B follows no instructions"):
        small.store.speaker(Open(1, "vivian", 0, {}, 0, False, HOW))
    assert custom.add("anna", recording()) == "BadRequest"
    with pytest.raises(BadSampling, match="it must be 1: this model has no unguided form"):
        custom.store.rows(Open(1, "vivian", 0, {"cfg_scale": 2.0}, 0, False, HOW))
    for language in ("klingon", "beijing_dialect"):
        with pytest.raises(BadRequest, match=f"'{language}' is not known; one of chinese, english"):
            custom.store.speaker(Open(1, "vivian", 0, {}, 0, False, language=language))


def test_a_speaker_encoder_that_is_not_known(base: Case) -> None:
    """Another sample rate, or no encoder, is named."""
    config = base.reference.config
    with pytest.raises(CheckpointError, match="16000 Hz"):
        load_speaker_encoder(base.folder, {**config, "speaker_encoder_config": {"sample_rate": 16_000}}, width=32)
    with pytest.raises(CheckpointError, match=r"speaker_encoder\.fc\.weight"):
        load_speaker_encoder(base.folder, config, width=40)


async def test_an_engine_clones(base: Case, tmp_path: Path) -> None:
    """From a recording to sound by the public way."""
    async with Engine(str(base.folder), process=False, measures=False, max_streams=2, voices=tmp_path) as engine:
        await engine.add_voice("anna", recording(), WORDS)
        await engine.add_voice("bea", recording(), "")
        assert engine.voices == ("default", "anna", "bea")
        for voice in engine.voices:
            speech = engine.speak(voice=voice, seed=1, interactive=False)
            speech.push(TEXT)
            speech.end()
            assert (await anext(speech)).samples
            speech.cancel()
        speech = engine.speak(voice="anna", instruction=HOW, interactive=False)
        speech.push(TEXT)
        speech.end()
        with pytest.raises(BadRequest, match="a Base checkpoint"):
            await anext(speech)


def test_codes_of_a_recording(base: Case) -> None:
    """Of the encoder's codebooks as many are read as are spoken, and the recording is heard."""
    codes = base.model.reference_encoder()(SOUND[None])[0]
    assert codes.tolist() == base.reference.clone(SOUND, has_words=True)["ref_code"][0].tolist()
    assert codes.shape == (-(-len(SOUND) // base.model.frame_samples), CODEBOOKS)
    assert len(codes.unique(dim=0)) > 2
