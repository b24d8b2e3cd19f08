"""A voice that reads whole sentences, beside nano in one engine.  Needs the `hibari` extra."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio

from breeze_rtc.clock import MS, VirtualClock
from breeze_rtc.models.speech_model import TextSegment
from breeze_rtc.playback import TextMark
from breeze_rtc.runtime.engine import Engine, Speech
from breeze_rtc.runtime.sentence_executor import SentenceExecutor
from breeze_rtc.scheduling.step import Row, RowResult, Stage, Step

TEXTS = [
    "Good morning.",
    "The next train leaves at twenty past nine, and it is on time.",
    "No.",
    "Thank you! I will call again. Have a nice day.",
]


class Ramp:
    """A sentence whose samples count up from its first token, 100 samples for each token."""

    def __init__(self, tokens: tuple[int, ...], seed: int) -> None:
        self.samples = 100 * len(tokens)
        self.ends = [100 * (place + 1) for place in range(len(tokens))]
        self._next = tokens[0] + 1_000 * seed

    def sound(self, samples: int) -> np.ndarray:
        out = np.arange(self._next, self._next + samples, dtype=np.float32)
        self._next += samples
        return out


class Lone:
    """One stream in a SentenceExecutor of 40-sample frames."""

    def __init__(self, seed: int = 0) -> None:
        self.clock = VirtualClock()
        self.executor = SentenceExecutor(Ramp, frame_samples=40, clock=self.clock)
        self.executor.open(1, 0, seed=seed)

    def step(self, stage: Stage, start: int = 0, count: int = 1) -> RowResult:
        step = Step(1, stage, (Row(1, 0, start, count),), 1)
        (row,) = self.executor.run(step).rows
        return row


def segment(text_before: int, *tokens: int) -> TextSegment:
    return TextSegment(tokens, tuple(text_before + place + 1 for place in range(len(tokens))))


def test_frames_are_those_of_the_sentences() -> None:
    """Two sentences of 100 and 200 samples are 3 and 5 frames of 40; each begins with a frame of its own."""
    lone = Lone()
    assert lone.executor.add_text(1, segment(0, 5)) == 1
    assert lone.executor.add_text(1, segment(1, 7, 8)) == 2
    lone.executor.end_text(1)
    lone.step(Stage.TEXT, count=1)
    lone.step(Stage.TEXT, count=2)
    for frame in range(8):
        row = lone.step(Stage.BACKBONE, frame)
        assert not row.ended
        assert not row.wants_text
        lone.step(Stage.DEPTH, frame)
    assert lone.step(Stage.BACKBONE, 8).ended
    assert lone.step(Stage.CODEC, 0, 2).samples == 80
    first, marks = lone.executor.take(1)
    assert (first[0], marks) == (5, ())
    assert lone.step(Stage.CODEC, 2, 6).samples == 240
    rest, marks = lone.executor.take(1)
    # The second sentence is read with another seed, so that its noise is not the first one's again.
    assert (first[-1], rest[0], rest[40]) == (84, 85, 1_007)
    assert marks == (TextMark(100, 1), TextMark(220, 2), TextMark(320, 3))


def test_a_stream_out_of_text_says_so_and_goes_on_when_more_comes() -> None:
    """The frame before the last of what has been read wants text, unless that was all."""
    lone = Lone()
    lone.executor.add_text(1, segment(0, 5))
    lone.step(Stage.TEXT)
    assert [lone.step(Stage.BACKBONE, frame).wants_text for frame in range(3)] == [False, False, True]
    lone.executor.add_text(1, segment(1, 6))
    lone.executor.end_text(1)
    lone.step(Stage.TEXT)
    assert [lone.step(Stage.BACKBONE, frame).wants_text for frame in range(3, 6)] == [False, False, False]
    assert lone.step(Stage.BACKBONE, 6).ended


def test_what_cannot_be_run_is_the_rows_error() -> None:
    """Frames that are not there, a slot that is another's, a stream that is closed."""
    lone = Lone()
    assert "0 to 0 there" in lone.step(Stage.CODEC).error
    (row,) = lone.executor.run(Step(1, Stage.TEXT, (Row(1, 3, 0, 1),), 1)).rows
    assert "not open" in row.error
    lone.executor.close(1)
    assert "not open" in lone.step(Stage.TEXT).error


def test_a_sentence_that_cannot_be_read_is_the_rows_error() -> None:
    """And its time is told all the same."""
    clock = VirtualClock()

    def broken(tokens: tuple[int, ...], seed: int) -> Ramp:
        clock.advance(4 * MS)
        raise ValueError("no such phoneme")

    executor = SentenceExecutor(broken, frame_samples=40, clock=clock)
    executor.open(1, 0)
    executor.add_text(1, segment(0, 5))
    result = executor.run(Step(1, Stage.TEXT, (Row(1, 0, 0, 1),), 1))
    assert result.rows[0].error == "ValueError: no such phoneme"
    assert result.duration_ns == 4 * MS


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[Engine]:
    pytest.importorskip("hibari", reason="hibari-tts is missing: pip install 'breeze-rtc[hibari]'")
    async with Engine("nano", process=False, measures=False) as running:
        yield running


def say(engine: Engine, text: str, voice: str) -> Speech:
    speech = engine.speak(voice=voice, seed=11, interactive=False)
    assert isinstance(speech, Speech)
    speech.push(text)
    speech.end()
    return speech


async def heard(speech: Speech) -> tuple[bytes, list[TextMark]]:
    chunks = [chunk async for chunk in speech]
    return b"".join(chunk.pcm for chunk in chunks), [mark for chunk in chunks for mark in chunk.marks]


@pytest.mark.asyncio(loop_scope="module")
async def test_the_same_alone_and_eight_at_once_of_two_voices(engine: Engine) -> None:
    """Same text, seed and voice: the same samples and marks, though steps hold rows of both."""
    asked = [(text, voice) for text in TEXTS for voice in ("nano", "hibari")]
    alone = [await heard(say(engine, *one)) for one in asked]
    assert len({pcm for pcm, _ in alone}) == 8
    assert await asyncio.gather(*(heard(say(engine, *one)) for one in asked)) == alone


@pytest.mark.asyncio(loop_scope="module")
async def test_marks_lead_to_the_end_of_the_text(engine: Engine) -> None:
    """Every word of every sentence, in order, inside the sound; text may come in pieces."""
    text = TEXTS[3]
    pcm, marks = await heard(say(engine, text, "hibari"))
    assert [mark.chars for mark in marks] == sorted({mark.chars for mark in marks})
    assert {place for place, char in enumerate(text) if char == " "} <= {mark.chars for mark in marks} | {
        mark.chars - 1 for mark in marks
    }
    assert marks[-1].chars == len(text)
    assert 0 < marks[0].samples < marks[-1].samples <= len(pcm) // 2
    speech = engine.speak(voice="hibari", seed=11, interactive=False)
    for piece in (text[:3], text[3:25], text[25:]):
        speech.push(piece)
        await asyncio.sleep(0)
    speech.end()
    assert isinstance(speech, Speech)
    assert await heard(speech) == (pcm, marks)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_cancelled_voice_leaves_nothing(engine: Engine) -> None:
    """The others go on, and a stream of the model may take its place."""
    neighbour = asyncio.create_task(heard(say(engine, TEXTS[1], "nano")))
    speech = say(engine, TEXTS[1] * 10, "hibari")
    await anext(aiter(speech))
    speech.cancel()
    assert [chunk async for chunk in speech] == []
    alone = await heard(say(engine, TEXTS[1], "nano"))
    assert await neighbour == alone


@pytest.mark.asyncio(loop_scope="module")
async def test_voices_are_named_with_the_models_first(engine: Engine) -> None:
    """Who asks for none gets the model's."""
    assert engine.voices == ("nano", "hibari")
