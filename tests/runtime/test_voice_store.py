"""The voice store: what is kept of a cloned voice, when it is used, and when it is made again."""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from executor_driver import ExecutorDriver
from safetensors.torch import load_file
from voice_studio import TEXT, WORDS, Studio, recording

from breeze_rtc.errors import BadRequest, BadSampling, BadText, CannotKeep, UnknownVoice
from breeze_rtc.models.speech_model import SpeechModel
from breeze_rtc.runtime import voice_folder, voice_store
from breeze_rtc.runtime.messages import Open
from breeze_rtc.runtime.voice_store import VoiceStore


@pytest.fixture(scope="module")
def model() -> SpeechModel:
    return SpeechModel.load("tiny")


@pytest.fixture
def studio(model: SpeechModel, tmp_path: Path) -> Studio:
    made = Studio(model, tmp_path / "voices")
    assert made.add("anna", recording()) == ""
    return made


def test_a_cloned_voice_is_kept_whole(studio: Studio, tmp_path: Path) -> None:
    """Recording, transcript, codes, what the backbone reads and its keys and values, under the voice's name."""
    folder = tmp_path / "voices" / "anna"
    assert sorted(path.name for path in folder.iterdir()) == ["prompt.safetensors", "recording", "voice.json"]
    assert json.loads((folder / "voice.json").read_text()) == {"format": 1, "transcript": WORDS}
    assert (folder / "recording").read_bytes() == recording()
    kept = load_file(folder / "prompt.safetensors")
    frames = -(-round(1.3 * 24_000) // 1920)
    assert kept["codes"].shape == (frames, 4)
    assert len(kept["codes"].unique(dim=0)) > 2, "the test's recording is heard"
    positions = len(kept["vectors"])
    assert positions == 2 + len(WORDS) + frames + 1
    assert kept["keys_values"].shape[3] == positions
    assert studio.store.names() == ("default", "anna")


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"instruction": "Slowly."},
        {"instruction": "Slowly.", "cfg_scale": 2.0},
        {"instruction": "Slowly.", "cfg_scale": 2.0, "reference_scale": 1.5},
    ],
    ids=["clone", "direction", "guided", "dual"],
)
def test_warm_says_what_cold_says(model: SpeechModel, studio: Studio, tmp_path: Path, how: dict[str, object]) -> None:
    """With shared pages, or without any so that each stream computes its reference itself: the same, sample for sample;
    and warm, only the stream's own text is encoded."""
    warm, tokens = studio.say("anna", **how)  # type: ignore[arg-type]
    cold, all_tokens = Studio(model, tmp_path / "voices", prefix_pages=0).say("anna", **how)  # type: ignore[arg-type]
    assert len(warm) > 0
    np.testing.assert_allclose(warm, cold, atol=2e-5)
    own = 2 + len(TEXT) + (2 + len("Slowly.")) * bool(how)
    assert tokens == own
    if "reference_scale" not in how:
        assert all_tokens == own + 2 + len(WORDS) + 17 + 1
    other, _ = studio.say("default")
    assert not np.array_equal(other, warm), "the recording is really read"


MIXED = [
    (Open(0, "default", 100, {}, 0, False), "one, two. "),
    (Open(1, "anna", 101, {}, 0, False), "a somewhat longer text, in two parts."),
    (Open(2, "bea", 102, {"cfg_scale": 3.0, "reference_scale": 1.5}, 0, False, "Softly."), "x"),
    (Open(3, "default", 103, {"cfg_scale": 2.0}, 0, False, "An old man."), "what? what? what?"),
    (Open(4, "bea", 104, {}, 0, False), "yes"),
    (Open(5, "anna", 105, {"cfg_scale": 1.5}, 0, False, "Slowly, as if to a small child."), "no. no. no. no."),
    (Open(6, "anna", 106, {}, 0, False, "Louder."), "hm, hm"),
    (Open(7, "anna", 107, {"reference_scale": 0.5}, 0, False, "Low."), "eight"),
]


@pytest.mark.parametrize("prefix_pages", [64, 0])
def test_mixed_modes_together_are_alone(model: SpeechModel, studio: Studio, tmp_path: Path, prefix_pages: int) -> None:
    """Plain, designed, cloned, directed and dual streams of two voices and many lengths, that join at random and run in
    random parts, each say sample for sample what each says alone."""
    assert studio.add("bea", recording(2)) == ""
    together = Studio(model, tmp_path / "voices", prefix_pages=prefix_pages)
    slots = np.random.default_rng(1).permutation(8).tolist()
    for slot, (message, text) in zip(slots, MIXED, strict=True):
        together.open(slot, message, text)
    said = together.driver.speak_together(list(range(8)), 9, seed=3)
    assert sum(len(sound) > 0 for sound in said.values()) >= 6
    for message, text in MIXED:
        alone = Studio(model, tmp_path / "voices", prefix_pages=prefix_pages)
        alone.open(3, message, text)
        assert np.array_equal(alone.driver.speak(message.stream, 9), said[message.stream]), message


def test_another_process_finds_it_ready(
    model: SpeechModel, studio: Studio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is computed of a voice that is kept: neither its codes, nor what the backbone reads, nor its keys."""
    expected, _ = studio.say("anna")
    for name in ("_encoded", "_vectors"):
        monkeypatch.delattr(VoiceStore, name)
    again = Studio(model, tmp_path / "voices")
    again.store.warm()
    monkeypatch.delattr(VoiceStore, "_read")
    assert np.array_equal(again.say("anna")[0], expected)


def test_a_change_of_any_input_makes_it_again(studio: Studio, tmp_path: Path) -> None:
    """Another transcript, another recording under the same name, in the folder of a running server (reproduction 20:
    what a voice was kept under did not have all that it was made of)."""
    first, _ = studio.say("anna")
    folder = tmp_path / "voices"
    prompt = (folder / "anna" / "prompt.safetensors").read_bytes()
    voice_folder.write(folder, "anna", "Other words altogether.", recording(), prompt)
    second, _ = studio.say("anna")
    assert not np.array_equal(first, second)
    made = (folder / "anna" / "prompt.safetensors").read_bytes()
    assert made != prompt
    voice_folder.write(folder, "anna", "Other words altogether.", recording(2), made)
    third, _ = studio.say("anna")
    assert not np.array_equal(second, third)
    voice_folder.write(folder, "anna", WORDS, recording(), b"")
    assert np.array_equal(studio.say("anna")[0], first)


@pytest.mark.parametrize("part", ["text.layers.0.mlp.down.weight", "backbone.layers.1.attention.qkv.weight"])
def test_other_weights_make_it_again(studio: Studio, tmp_path: Path, part: str) -> None:
    """One number of the model that differs is enough."""
    changed = SpeechModel.load("tiny")
    with torch.no_grad():
        changed.get_parameter(part)[0, 0] += 1.0
    other = Studio(changed, tmp_path / "voices")
    said, _ = other.say("anna")
    cold, _ = Studio(changed, tmp_path / "voices", prefix_pages=0).say("anna")
    np.testing.assert_allclose(said, cold, atol=2e-5)


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped header", "gone"])
def test_a_damaged_file_is_made_again(model: SpeechModel, studio: Studio, tmp_path: Path, damage: str) -> None:
    """What can be computed is no reason to fail."""
    expected, _ = studio.say("anna")
    path = tmp_path / "voices" / "anna" / "prompt.safetensors"
    whole = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes({"empty": b"", "cut": whole[:-100], "flipped header": b"\xff" * 20 + whole[20:]}[damage])
    assert np.array_equal(Studio(model, tmp_path / "voices").say("anna")[0], expected)
    assert path.read_bytes() == whole


def test_the_voices_used_last_stay(model: SpeechModel, studio: Studio, tmp_path: Path) -> None:
    """Where there is room for two, a third takes the place of the one used least recently; what they say does not
    change by it."""
    for n, name in enumerate(("bea", "cleo")):
        assert studio.add(name, recording(10 + n)) == ""
    expected = {name: studio.say(name)[0] for name in ("anna", "bea", "cleo")}
    # 39 positions each: three pages of 16.
    small = Studio(model, tmp_path / "voices", prefix_pages=6)
    small.store.warm()
    reads: list[str] = []
    read = small.store._read

    def counted(folder: Path, name: str, signature: tuple[int, ...], *, evicts: bool) -> object:
        reads.append(name)
        return read(folder, name, signature, evicts=evicts)

    small.store._read = counted  # type: ignore[method-assign, assignment]
    for name in ("anna", "bea", "anna", "cleo", "anna", "bea"):
        sound, tokens = small.say(name)
        assert np.array_equal(sound, expected[name])
        assert tokens == 2 + len(TEXT)
    assert reads == ["cleo", "bea"]
    assert small.driver.executor._prompts.prefixes.free == 0


def test_pages_in_use_are_not_taken(model: SpeechModel, studio: Studio, tmp_path: Path) -> None:
    """While a stream speaks on, its voice's pages stay as they are; a voice that finds no room speaks without, and both
    say what they say alone."""
    assert studio.add("bea", recording(2)) == ""
    expected = {name: studio.say(name)[0] for name in ("anna", "bea")}
    small = Studio(model, tmp_path / "voices", prefix_pages=3)
    speaker = small.store.speaker(Open(50, "anna", 7, {}, 0, False))
    small.driver.open(50, 5, speaker.frontend.push(TEXT) + speaker.frontend.end(), seed=7, prefixes=speaker.prefixes)
    sound, tokens = small.say("bea")
    assert tokens > 2 + len(TEXT)
    np.testing.assert_allclose(sound, expected["bea"], atol=2e-5)
    assert np.array_equal(small.driver.speak(50, 6), expected["anna"])


def test_a_voice_that_is_gone(studio: Studio) -> None:
    """Is unknown at once, with the names there are; and one that never was."""
    studio.say("anna")
    voice_folder.remove(studio.store._folder, "anna")  # type: ignore[arg-type]
    for name in ("anna", "nobody", "../anna", ""):
        with pytest.raises(UnknownVoice, match="default"):
            studio.store.speaker(Open(1, name, 0, {}, 0, False))
    with pytest.raises(UnknownVoice):
        voice_folder.remove(studio.store._folder, "anna")  # type: ignore[arg-type]


@contextmanager
def full_disk(after_bytes: int) -> Iterator[None]:
    """Files may grow so far: the kernel refuses what is beyond, as it does on a disk that is full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (after_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("after_bytes", [0, 10, 30_000, 62_443])
def test_a_full_disk_leaves_nothing_half_written(studio: Studio, tmp_path: Path, after_bytes: int) -> None:
    """The new voice is refused, the folder holds what it held, and the voice that was there speaks as before."""
    expected, _ = studio.say("anna")
    folder = tmp_path / "voices"
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with full_disk(after_bytes):
        assert studio.add("bea", recording(2)) == "CannotKeep"
        assert studio.add("anna", recording(2)) == "CannotKeep"
        with pytest.raises(CannotKeep, match=r"anna cannot be kept in .*: File too large"):
            voice_folder.write_prompt(folder, "anna", bytes(70_000))
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert [path.name for path in folder.iterdir()] == ["anna"]
    assert np.array_equal(studio.say("anna")[0], expected)


@pytest.mark.parametrize(
    ("name", "transcript", "error"),
    [
        ("Anna", WORDS, BadRequest),
        ("../anna", WORDS, BadRequest),
        ("", WORDS, BadRequest),
        ("a" * 65, WORDS, BadRequest),
        ("default", WORDS, BadRequest),
        ("bea", "word " * 300, BadText),
    ],
)
def test_names_and_transcripts_are_checked(studio: Studio, name: str, transcript: str, error: type[BadRequest]) -> None:
    """Before anything is computed."""
    with pytest.raises(error):
        voice_folder.check(name, transcript, ("default",))
    assert studio.add(name, b"not even looked at", transcript) == error.__name__


def test_a_prompt_without_a_language_says_so(studio: Studio) -> None:
    """For the model's own voice and for a cloned one."""
    for voice in ("default", "anna"):
        with pytest.raises(BadRequest, match="not told a language"):
            studio.store.speaker(Open(1, voice, 0, {}, 0, False, language="german"))


def test_a_model_that_needs_the_words_says_so(studio: Studio) -> None:
    """Before the recording is looked at."""
    assert studio.add("bea", b"not even looked at", "  ") == "BadText"
    assert studio.store.names() == ("default", "anna")


def test_a_recording_of_no_use_leaves_no_voice(studio: Studio) -> None:
    """It says so, and there is no such voice."""
    assert studio.add("bea", recording(seconds=0.4)) == "BadRecording"
    assert studio.store.names() == ("default", "anna")


def test_guidance_needs_its_prompts(studio: Studio) -> None:
    """A scale without instructions, or a recording's weight without a recording, is refused by name."""
    rows = studio.store.rows
    assert rows(Open(1, "anna", 0, {}, 0, False, "Slowly.")) == 1
    with pytest.raises(BadSampling, match="cfg_scale"):
        rows(Open(1, "anna", 0, {"cfg_scale": 3.0}, 0, False))
    with pytest.raises(BadSampling, match="reference_scale"):
        rows(Open(1, "default", 0, {"reference_scale": 1.0}, 0, False, "Slowly."))
    with pytest.raises(BadSampling, match="reference_scale"):
        rows(Open(1, "anna", 0, {"reference_scale": 1.0}, 0, False))


def test_a_prompt_longer_than_the_model_reads(studio: Studio) -> None:
    """Is refused before anything is computed, with the numbers; the voice's own positions count."""
    object.__setattr__(studio.driver.model.config, "max_positions", 60)
    try:
        with pytest.raises(BadText, match="takes 62 tokens, those of its voice included, and this model reads 58"):
            studio.say("anna")
        studio.say("default")
    finally:
        object.__setattr__(studio.driver.model.config, "max_positions", 2048)


def test_a_model_that_only_has_voices_of_its_own(tmp_path: Path) -> None:
    """It lists no others, and says that it follows no instructions."""
    model = SpeechModel.load("tiny-pointer")
    (tmp_path / "anna").mkdir()
    (tmp_path / "anna" / "voice.json").write_text("{}")
    store = VoiceStore(model, ExecutorDriver(model).executor, tmp_path)
    store.warm()
    assert store.names() == ("default",)
    with pytest.raises(UnknownVoice):
        store.speaker(Open(1, "anna", 0, {}, 0, False))
    with pytest.raises(BadRequest, match="follows no instructions"):
        store.speaker(Open(1, "default", 0, {}, 0, False, "Slowly."))
    with pytest.raises(BadRequest, match="not told a language"):
        store.speaker(Open(1, "default", 0, {}, 0, False, language="german"))


def test_the_weights_are_named_by_every_number() -> None:
    """A single bit of one weight changes the name."""
    model = SpeechModel.load("tiny")
    before = voice_store._weights(model)
    assert voice_store._weights(SpeechModel.load("tiny")) == before
    with torch.no_grad():
        weight = model.backbone.layers[0].mlp.down.weight
        weight.view(torch.int32)[3, 5] ^= 1
    assert voice_store._weights(model) != before
