"""One call under virtual time: speaking, being interrupted, listening, closing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from fake_call import (
    RATE,
    WORD_SAMPLES,
    FakeCall,
    FakeVoice,
    LoudnessActivity,
    ScriptedEars,
    now,
    run,
)

from breeze_rtc.agent.session import AgentSession, Callbacks, Recovery, UserTurn
from breeze_rtc.agent.turns import State, TurnTaking
from breeze_rtc.errors import StepFailed

NUMBERS = "one two three four five six seven eight nine ten eleven twelve"
WORD_S = WORD_SAMPLES / RATE


class Stage:
    """A session, its call and its voice."""

    def __init__(self, callbacks: Callbacks | None = None, **options: Any) -> None:
        self.call = options.pop("call", None) or FakeCall()
        self.voice = options.pop("voice", None) or FakeVoice()
        self.session = AgentSession(callbacks or Callbacks(), call=self.call, voice=self.voice, **options)


def on_stage(
    act: Callable[[Stage], Coroutine[Any, Any, None]], callbacks: Callbacks | None = None, **options: Any
) -> Stage:
    """Run `act` beside a session in virtual time, hang up, and return what is left."""
    stages: list[Stage] = []

    async def play() -> None:
        made = {name: value() if callable(value) else value for name, value in options.items()}
        stage = Stage(callbacks, **made)
        stages.append(stage)
        async with asyncio.TaskGroup() as group:
            call = group.create_task(stage.session.run())
            await asyncio.sleep(0)
            await act(stage)
            stage.call.closed.set()
            await call

    run(play())
    return stages[0]


def echo(session: AgentSession, turn: UserTurn) -> AsyncGenerator[str, None]:
    async def reply() -> AsyncGenerator[str, None]:
        yield f"you said {turn.text}"

    return reply()


def history(stage: Stage) -> list[tuple[str, str]]:
    return [(message.role, message.text) for message in stage.session.history]


# -- saying


def test_a_handle_resolves_when_the_last_word_was_heard() -> None:
    """Not when it was generated, nor when it was sent, but when it had reached the ear."""

    async def act(stage: Stage) -> None:
        handle = await stage.session.say(NUMBERS)
        assert now() >= 12 * WORD_S + stage.call.sink.delay_s
        assert now() < 12 * WORD_S + stage.call.sink.delay_s + 0.5
        assert handle.heard_text == NUMBERS
        assert handle.playback_position_s == pytest.approx(12 * WORD_S)
        assert not handle.interrupted

    stage = on_stage(act)
    assert history(stage) == [("assistant", NUMBERS)]


def test_speeches_are_spoken_in_order_without_a_hole() -> None:
    """What is said next is ready when the first ends."""

    async def act(stage: Stage) -> None:
        first, second = stage.session.say("one two three"), stage.session.say("four five six")
        await first
        await second
        assert now() < 6 * WORD_S + 0.5

    stage = on_stage(act)
    assert history(stage) == [("assistant", "one two three"), ("assistant", "four five six")]


def test_text_may_come_piece_by_piece() -> None:
    """An async iterator of text is one speech; what the page shows is the text, byte for byte."""

    async def pieces() -> AsyncIterator[str]:
        for piece in ("", "  ", "Hel", "lo wor", "ld. ", "Good", "bye."):
            await asyncio.sleep(0.01)
            yield piece

    async def act(stage: Stage) -> None:
        handle = await stage.session.say(pieces())
        assert handle.text == "  Hello world. Goodbye."

    stage = on_stage(act)
    assert "".join(message["text"] for message in stage.call.messages("speech")) == "  Hello world. Goodbye."


def test_a_blank_speech_makes_no_sound_and_no_history() -> None:
    """Nothing to say is nothing said."""

    async def act(stage: Stage) -> None:
        assert not (await stage.session.say("  \n ")).interrupted

    stage = on_stage(act)
    assert stage.voice.replies == []
    assert history(stage) == []


def test_captions_follow_the_ear() -> None:
    """A word is shown as heard after its last sample was heard, and within a caption's step of it."""
    heard_at: list[tuple[float, int]] = []

    class TimedCall(FakeCall):
        def send(self, message: dict[str, Any]) -> None:
            super().send(message)
            if message["type"] == "heard":
                heard_at.append((now(), message["chars"]))

    async def act(stage: Stage) -> None:
        await stage.session.say(NUMBERS)

    on_stage(act, call=lambda: TimedCall(delay_s=1.8))
    ends = [NUMBERS.index(word) + len(word) for word in NUMBERS.split()]
    for at, chars in heard_at:
        words = ends.index(chars) + 1
        assert 1.8 + words * WORD_S <= at <= 1.8 + (words + 1) * WORD_S + 0.3
    assert len(heard_at) >= 11


# -- backpressure


def test_a_callback_is_not_pulled_further_than_the_bound() -> None:
    """A generator that could give an hour of text is held a few seconds ahead of the ear."""
    given: list[int] = []

    async def endless() -> AsyncIterator[str]:
        for number in range(10_000):
            given.append(number)
            yield "word "

    async def act(stage: Stage) -> None:
        stage.session.say(endless())
        for second in range(1, 12):
            await asyncio.sleep(1)
            heard_words = (second - stage.call.sink.delay_s) / WORD_S
            assert len(given) - heard_words <= 4.0 / WORD_S + 4
            assert len(given) - heard_words >= 3
        stage.session.interrupt()

    on_stage(act, max_unheard_s=4.0)


def test_a_voice_that_needs_the_whole_text_gets_it() -> None:
    """The bound is on sound; a voice that cannot begin before the end of the text does not wait for ever."""

    class WholeVoice(FakeVoice):
        def speak(self, *, voice: str | None = None) -> Any:
            reply = super().speak(voice=voice)
            find = reply._next_word_end
            reply._next_word_end = lambda start: find(start) if reply._ended else None
            return reply

    async def text() -> AsyncIterator[str]:
        for _ in range(30):
            yield "several words at once "

    async def act(stage: Stage) -> None:
        handle = await stage.session.say(text())
        assert handle.heard_text == handle.text

    on_stage(act, voice=WholeVoice)


def test_long_sentences_follow_each_other_without_a_hole() -> None:
    """The voice holds each back until the next one begins, and each alone is longer than the bound."""

    class SentenceVoice(FakeVoice):
        def speak(self, *, voice: str | None = None) -> Any:
            reply = super().speak(voice=voice)
            find = reply._next_word_end

            def next_word_end(start: int) -> int | None:
                end = find(start)
                return end if reply._ended or (end is not None and end <= reply.text.rfind(".", 0, -2)) else None

            reply._next_word_end = next_word_end
            return reply

    sentence = "this sentence goes on for rather longer than the bound on speech that is not heard yet. "
    words = 5 * len(sentence.split())

    async def text() -> AsyncIterator[str]:
        for _ in range(5):
            yield sentence

    async def act(stage: Stage) -> None:
        handle = await stage.session.say(text())
        assert handle.heard_text == handle.text
        assert now() < words * WORD_S + stage.call.sink.delay_s + 0.7
        assert len(stage.call.sink.spoken(1)) == 1

    on_stage(act, voice=SentenceVoice)


def test_a_voice_that_is_too_slow_is_not_given_all_the_text() -> None:
    """It always has less sound than the ear wants; the callback runs ahead by two and a half bounds and no more."""
    given: list[int] = []

    async def text() -> AsyncIterator[str]:
        for piece in range(100):
            given.append(piece)
            yield "five words in each piece "

    async def act(stage: Stage) -> None:
        stage.session.say(text())
        await asyncio.sleep(20)
        heard_words = 20 / (1.5 * WORD_S)
        assert 5 * len(given) < heard_words + 2.5 * 4.0 / WORD_S + 15
        stage.session.interrupt()

    on_stage(act, voice=lambda: FakeVoice(word_s=1.5 * WORD_S), max_unheard_s=4.0)


# -- barge-in


def test_an_interruption_keeps_what_the_ear_had() -> None:
    """History, handle and page agree on the words heard, and the rest is the unheard text."""
    closed: list[str] = []

    async def reply(session: AgentSession, turn: UserTurn) -> AsyncGenerator[str, None]:
        try:
            for word in NUMBERS.split():
                yield word + " "
        finally:
            closed.append("finally")

    async def act(stage: Stage) -> None:
        stage.session.type("go")
        await asyncio.sleep(3.0)
        assert stage.session.state is State.SPEAKING
        stage.session.interrupt()
        # The sound is gone before anything else happens.
        assert stage.voice.replies[0].is_cancelled
        assert stage.call.sink.cleared == {1}
        await asyncio.sleep(0.5)
        # 3.0 s less 0.05 s to the first sound and 0.1 s on the way: seven words of 0.4 s.
        assert history(stage) == [("user", "go"), ("assistant", "one two three four five six seven")]
        assert stage.session.history[-1].interrupted
        assert closed == ["finally"]
        assert stage.session.state is State.LISTENING

    stage = on_stage(act, Callbacks(on_user_turn=reply))
    (end,) = stage.call.messages("speech_end")
    chars = len("one two three four five six seven")
    assert end == {"type": "speech_end", "stream": 1, "interrupted": True, "chars": chars}
    assert len(stage.call.flushes) == 1


def test_a_cut_before_the_first_word_was_audible_keeps_nothing() -> None:
    """Sound that was sent but not heard is not in the history."""

    async def act(stage: Stage) -> None:
        handle = stage.session.say(NUMBERS)
        await asyncio.sleep(0.12)
        stage.session.interrupt()
        assert (await handle).heard_text == ""
        assert handle.interrupted
        assert handle.unheard_text == handle.text

    stage = on_stage(act, call=lambda: FakeCall(delay_s=0.3))
    assert history(stage) == []


@pytest.mark.parametrize("has_marks", [True, False])
@pytest.mark.parametrize("word_s", [0.05, 0.38])
def test_words_at_a_cut_are_right_within_one(has_marks: bool, word_s: float) -> None:
    """With marks to the word; without them never empty, never full, and near."""

    async def act(stage: Stage) -> None:
        handle = stage.session.say(NUMBERS)
        await asyncio.sleep(3.3)
        stage.session.interrupt()
        heard_s = stage.call.sink.heard(1, now()) / RATE
        await handle
        words = len(handle.heard_text.split())
        assert abs(words - heard_s / WORD_S) <= (1 if has_marks else 4)
        assert 0 < words < 12

    on_stage(act, voice=lambda: FakeVoice(word_s=word_s, has_marks=has_marks))


def test_the_page_has_the_last_word_on_where_the_sound_stopped() -> None:
    """What was still heard while the flush travelled counts as heard."""

    async def act(stage: Stage) -> None:
        handle = stage.session.say(NUMBERS)
        await asyncio.sleep(0.05 + 0.1 + 2 * WORD_S - 0.05)
        stage.session.interrupt()
        assert handle.heard_text == "one"
        await handle
        assert handle.heard_text == "one two"
        assert history(stage) == [("assistant", "one two")]

    on_stage(act, call=lambda: FakeCall(flush_s=0.2))


def test_a_cut_where_the_ear_has_all_there_is_keeps_no_more_than_that() -> None:
    """A voice slower than its listener is cut with nothing delivered and unheard; that is not the end of its text."""

    async def act(stage: Stage) -> None:
        handle = stage.session.say(NUMBERS)
        await asyncio.sleep(3.1)  # three words were made, one each 0.8 s, and the ear has had them all
        stage.session.interrupt()
        await handle
        assert handle.heard_text == "one two three"

    on_stage(act, voice=lambda: FakeVoice(word_s=2 * WORD_S))


def test_late_chunks_of_an_interrupted_stream_are_not_played() -> None:
    """A step that was running at the cut delivers into nothing."""

    async def act(stage: Stage) -> None:
        handle = stage.session.say("one two three")
        await asyncio.sleep(0.07)
        stage.session.interrupt()
        await handle
        await asyncio.sleep(1)
        assert handle.heard_text == ""
        assert stage.call.sink.heard(1, now()) < WORD_SAMPLES

    on_stage(act, voice=lambda: FakeVoice(delivers_late=True))


def test_everything_that_was_queued_goes_too() -> None:
    """A barge-in drops the speech that is audible and those behind it."""

    async def act(stage: Stage) -> None:
        handles = [stage.session.say(NUMBERS) for _ in range(3)]
        await asyncio.sleep(2)
        stage.session.interrupt()
        for handle in handles:
            await handle
        assert [handle.interrupted for handle in handles] == [True, True, True]
        assert handles[1].heard_text == handles[2].heard_text == ""

    on_stage(act)


def test_interrupting_again_and_again_changes_nothing() -> None:
    """interrupt() may come at any time, as often as it likes."""

    async def act(stage: Stage) -> None:
        stage.session.interrupt()
        handle = stage.session.say(NUMBERS)
        for _ in range(5):
            stage.session.interrupt()
            await asyncio.sleep(0.01)
        assert (await handle).interrupted
        assert (await stage.session.say("again")).heard_text == "again"

    on_stage(act)


def test_on_interrupted_is_told_what_was_heard() -> None:
    """The callback gets the handle once its position is final."""
    told: list[tuple[str, bool]] = []

    async def on_interrupted(session: AgentSession, speech: Any) -> None:
        told.append((speech.heard_text, speech.done))

    async def act(stage: Stage) -> None:
        stage.session.say(NUMBERS)
        await asyncio.sleep(1.1)
        stage.session.interrupt()
        await asyncio.sleep(1)

    on_stage(act, Callbacks(on_interrupted=on_interrupted))
    assert told == [("one two", True)]


def test_a_new_turn_interrupts_the_answer_to_the_last() -> None:
    """Typing while the agent speaks cuts it; the history stays in the order things were heard."""

    async def reply(session: AgentSession, turn: UserTurn) -> AsyncGenerator[str, None]:
        assert session.history[-1].text == turn.text
        yield f"{turn.text}: {NUMBERS}"

    async def act(stage: Stage) -> None:
        stage.session.type("first")
        await asyncio.sleep(2)
        stage.session.type("second")
        await asyncio.sleep(8)

    stage = on_stage(act, Callbacks(on_user_turn=reply))
    assert history(stage) == [
        ("user", "first"),
        ("assistant", "first: one two three"),
        ("user", "second"),
        ("assistant", f"second: {NUMBERS}"),
    ]


def test_a_superseded_answer_leaves_no_sound() -> None:
    """An answer that was still being thought of when the next turn came is never heard.

    Reproduction 46 (livekit#4219).
    """

    async def reply(session: AgentSession, turn: UserTurn) -> AsyncGenerator[str, None]:
        await asyncio.sleep(1)
        yield turn.text

    async def act(stage: Stage) -> None:
        stage.session.type("first")
        await asyncio.sleep(0.5)
        stage.session.type("second")
        await asyncio.sleep(4)

    stage = on_stage(act, Callbacks(on_user_turn=reply))
    assert [said.text for said in stage.voice.replies] == ["second"]
    assert history(stage) == [("user", "first"), ("user", "second"), ("assistant", "second")]


# -- the user's voice


def hearing(*texts: str, takes_s: float = 0.1) -> dict[str, Any]:
    return {"activity": LoudnessActivity, "ears": lambda: ScriptedEars(*texts, takes_s=takes_s)}


def test_a_spoken_turn_is_answered_soon_after_its_end() -> None:
    """The words are read while the silence that ends the turn is still growing."""

    async def act(stage: Stage) -> None:
        await stage.call.speak(voiced_s=1.0, silent_s=0.64)
        silent_since = now() - 0.64
        while not stage.voice.replies:  # noqa: ASYNC110 - it watches from outside
            await asyncio.sleep(0.01)
        assert now() - silent_since < 0.7
        await asyncio.sleep(3)

    stage = on_stage(act, Callbacks(on_user_turn=echo), **hearing("hello there"))
    assert history(stage) == [("user", "hello there"), ("assistant", "you said hello there")]


def test_speaking_interrupts_within_the_onset_time() -> None:
    """The agent is silent a fifth of a second after the user began to speak, not at the user's pause."""

    async def act(stage: Stage) -> None:
        stage.session.say(NUMBERS)
        await asyncio.sleep(2)
        began = now()
        await stage.call.speak(voiced_s=3.0)
        assert stage.call.flushes[0] - began <= 0.2

    on_stage(act, **hearing("stop"))


def test_the_first_sound_of_the_turn_is_kept() -> None:
    """The turn's sound begins at least 200 ms before the voice did.  Reproduction 45 (livekit#3261)."""
    ears = ScriptedEars("hello")

    async def act(stage: Stage) -> None:
        await stage.call.speak(voiced_s=0, silent_s=1.0)
        await stage.call.speak(voiced_s=1.0, silent_s=0.8)
        await asyncio.sleep(1)

    on_stage(act, activity=LoudnessActivity, ears=lambda: ears)
    audio = ears.audio[-1]
    assert 0.2 * 16_000 <= np.flatnonzero(audio)[0] <= 0.4 * 16_000
    assert audio.sum() == pytest.approx(1.0 * 16_000, abs=512)


def test_a_short_noise_does_not_interrupt() -> None:
    """An eighth of a second of something loud is no onset."""

    async def act(stage: Stage) -> None:
        handle = stage.session.say(NUMBERS)
        await asyncio.sleep(2)
        await stage.call.speak(voiced_s=0.128, silent_s=0.5)
        assert not (await handle).interrupted

    on_stage(act, **hearing("never read"))


def test_a_sound_too_short_for_a_word_does_not_interrupt_whatever_it_is_read_as() -> None:
    """It holds the agent, which goes on when the sound has been read; a recogniser hears words in anything."""

    async def act(stage: Stage) -> None:
        handle = stage.session.say(NUMBERS)
        await asyncio.sleep(2)
        await stage.call.speak(voiced_s=0.192, silent_s=1.0)
        assert stage.call.resumes
        assert not (await handle).interrupted

    stage = on_stage(act, Callbacks(on_user_turn=echo), **hearing("oh no"))
    assert history(stage) == [("assistant", NUMBERS)]


def test_after_a_noise_without_words_the_agent_goes_on_where_the_ear_was() -> None:
    """A longer cough holds the agent; the same stream goes on at the first unheard sample, and nobody asks again."""
    closed: list[str] = []

    async def tell(session: AgentSession, turn: UserTurn) -> AsyncGenerator[str, None]:
        try:
            for word in NUMBERS.split():
                yield word + " "
        finally:
            closed.append(session.state.name)

    async def act(stage: Stage) -> None:
        stage.session.type("count")
        await asyncio.sleep(2)
        began = now()
        await stage.call.speak(voiced_s=0.4, silent_s=0.8)
        assert stage.call.flushes[0] - began <= 0.2
        assert stage.call.resumes[0] - began <= 1.0
        await asyncio.sleep(6)
        (first, second) = stage.call.sink.spoken(1)
        # Every sample was heard: the fake ear sees to the order, and only a packet that was cut is heard twice.
        assert first[1] - first[0] + second[1] - second[0] == pytest.approx(12 * WORD_S, abs=0.041)
        assert second[0] - first[1] <= 1.0

    stage = on_stage(act, Callbacks(on_user_turn=tell), **hearing("..."))
    assert len(stage.voice.replies) == 1
    assert not stage.voice.replies[0].is_cancelled
    assert closed == ["SPEAKING"]
    assert history(stage) == [("user", "count"), ("assistant", NUMBERS + " ")]
    assert not stage.session.history[-1].interrupted


@pytest.mark.parametrize("said", ["Uh-huh.", "Mm-hmm", "yeah", "Right, okay."])
def test_a_sign_to_go_on_does_not_interrupt(said: str) -> None:
    """Backchannels over the agent's speech are no turn; the agent goes on a moment after them."""

    async def act(stage: Stage) -> None:
        handle = stage.session.say(NUMBERS)
        await asyncio.sleep(2)
        began = now()
        await stage.call.speak(voiced_s=0.5, silent_s=1.0)
        assert stage.call.resumes[0] - began <= 1.0
        assert (await handle).heard_text == NUMBERS
        assert not handle.interrupted

    stage = on_stage(act, Callbacks(on_user_turn=echo), **hearing(said))
    assert history(stage) == [("assistant", NUMBERS)]


def test_the_same_words_are_a_turn_when_the_agent_is_silent() -> None:
    """ "Yeah" answers a question."""

    async def act(stage: Stage) -> None:
        await stage.session.say("shall we")
        await stage.call.speak(voiced_s=0.5, silent_s=0.8)
        await asyncio.sleep(3)

    stage = on_stage(act, Callbacks(on_user_turn=echo), **hearing("Yeah."))
    assert history(stage) == [("assistant", "shall we"), ("user", "Yeah."), ("assistant", "you said Yeah.")]


def test_words_that_follow_make_it_a_real_interruption() -> None:
    """A long interjection: silence at the onset, the callback is closed at its first words, not at its end."""
    closed: list[float] = []

    async def tell(session: AgentSession, turn: UserTurn) -> AsyncGenerator[str, None]:
        try:
            yield NUMBERS if turn.text == "count" else f"you said {turn.text}"
        finally:
            closed.append(now())

    async def act(stage: Stage) -> None:
        stage.session.type("count")
        await asyncio.sleep(2)
        began = now()
        await stage.call.speak(voiced_s=4.0, silent_s=0.8)
        assert stage.voice.replies[0].is_cancelled
        assert stage.call.resumes == []
        assert closed[0] - began <= 1.3
        await asyncio.sleep(4)
        assert stage.call.sink.spoken(1)[-1][1] - began <= 0.25 + 0.03 + 0.021

    stage = on_stage(act, Callbacks(on_user_turn=tell), **hearing("no wait a moment"))
    assert history(stage) == [
        ("user", "count"),
        ("assistant", "one two three four five"),
        ("user", "no wait a moment"),
        ("assistant", "you said no wait a moment"),
    ]


def test_a_first_word_that_is_not_understood_by_itself_does_not_let_the_agent_go_on() -> None:
    """ "I ... no, wait": a short word, a short breath, and the rest.  Nothing is read in the word alone."""

    async def act(stage: Stage) -> None:
        stage.session.say(NUMBERS)
        await asyncio.sleep(2)
        await stage.call.speak(voiced_s=0.22, silent_s=0.4)
        await stage.call.speak(voiced_s=1.0, silent_s=0.8)
        await asyncio.sleep(2)
        assert stage.call.resumes == []

    stage = on_stage(act, Callbacks(on_user_turn=echo), **hearing("", "I no wait"))
    assert history(stage)[1:] == [("user", "I no wait"), ("assistant", "you said I no wait")]


def test_a_recogniser_that_takes_too_long_does_not_keep_the_agent_silent() -> None:
    """After the time-out the agent goes on; words that come later still interrupt it, for they were words."""

    async def act(stage: Stage) -> None:
        stage.session.say(NUMBERS)
        await asyncio.sleep(1)
        await stage.call.speak(voiced_s=0.4, silent_s=0.8)
        ended = now() - 0.8
        while not stage.call.resumes:  # noqa: ASYNC110 - it watches from outside
            await asyncio.sleep(0.01)
        assert 1.9 <= now() - ended <= 2.3
        await asyncio.sleep(4)

    stage = on_stage(act, Callbacks(on_user_turn=echo), **hearing("stop", takes_s=3.0))
    assert [text for _, text in history(stage)][1:] == ["stop", "you said stop"]
    assert stage.session.history[0].interrupted


def test_a_noise_that_does_not_end_holds_the_agent_once() -> None:
    """A vacuum cleaner: no words in two seconds of it, so the agent speaks on, and is not held again by the same
    noise; a word in it still interrupts."""
    words = ["", "", "", "", "", "", "", "", "stop it"]

    async def act(stage: Stage) -> None:
        stage.session.say(" ".join([NUMBERS] * 2))
        await asyncio.sleep(1)
        began = now()
        await stage.call.speak(voiced_s=10.0, silent_s=0.8)
        assert len(stage.call.flushes) == 2
        assert stage.call.resumes[0] - began <= 2.6
        await asyncio.sleep(3)

    stage = on_stage(act, Callbacks(on_user_turn=echo), **hearing(*words))
    assert [text for _, text in history(stage)][1:] == ["stop it", "you said stop it"]


@pytest.mark.parametrize("has_agent_the_floor", [False, True])
def test_a_turn_typed_beside_a_noise_does_not_make_the_agent_deaf(has_agent_the_floor: bool) -> None:
    """The noise has no end, so no new sound begins; a word in it interrupts the answer to what was typed."""
    words = ["", "", "", "", "", "", "", "stop it"]

    async def reply(session: AgentSession, turn: UserTurn) -> AsyncGenerator[str, None]:
        yield " ".join([NUMBERS] * 2) if turn.text == "count" else f"you said {turn.text}"

    async def act(stage: Stage) -> None:
        if has_agent_the_floor:
            stage.session.say(NUMBERS)
            await asyncio.sleep(1)
        noise = asyncio.create_task(stage.call.speak(voiced_s=10.0, silent_s=0.8))
        await asyncio.sleep(1)
        stage.session.type("count")
        await noise
        await asyncio.sleep(3)

    stage = on_stage(act, Callbacks(on_user_turn=reply), **hearing(*words))
    assert [text for _, text in history(stage)][-2:] == ["stop it", "you said stop it"]


@pytest.mark.parametrize(("voiced_s", "is_cut"), [(0.3, False), (1.0, True)])
def test_without_a_recogniser_the_length_of_a_sound_decides(voiced_s: float, is_cut: bool) -> None:
    """A cough holds the agent for a moment, half a second of voice interrupts it."""

    async def act(stage: Stage) -> None:
        handle = stage.session.say(NUMBERS)
        await asyncio.sleep(1)
        await stage.call.speak(voiced_s=voiced_s, silent_s=0.8)
        assert (await handle).interrupted == is_cut
        await asyncio.sleep(1)

    on_stage(act, Callbacks(on_user_turn=echo), activity=LoudnessActivity)


def test_without_a_timeout_every_onset_interrupts() -> None:
    """false_interruption_timeout_s=None: as before there was a second thought."""

    async def act(stage: Stage) -> None:
        handle = stage.session.say(NUMBERS)
        await asyncio.sleep(1)
        await stage.call.speak(voiced_s=0.3)
        assert (await handle).interrupted

    on_stage(act, Callbacks(turn_taking=TurnTaking(false_interruption_timeout_s=None)), **hearing("..."))


def test_a_noise_while_the_agent_thinks_does_not_lose_the_answer() -> None:
    """The answer comes, and was asked for once; it only waits until the sound is known to be no speech."""
    asked: list[str] = []

    async def reply(session: AgentSession, turn: UserTurn) -> AsyncGenerator[str, None]:
        asked.append(turn.text)
        await asyncio.sleep(1)
        yield "the answer"

    async def act(stage: Stage) -> None:
        stage.session.type("the question")
        await asyncio.sleep(0.5)
        await stage.call.speak(voiced_s=1.0, silent_s=0.8)
        await asyncio.sleep(4)

    stage = on_stage(act, Callbacks(on_user_turn=reply), **hearing(""))
    assert history(stage) == [("user", "the question"), ("assistant", "the answer")]
    assert asked == ["the question"]


def test_speech_at_the_end_of_a_speech_is_a_turn() -> None:
    """The agent had just been heard in full when the sound began: even "okay" is an answer then."""

    async def act(stage: Stage) -> None:
        stage.session.say("one two")
        await asyncio.sleep(0.05 + 0.1 + 2 * WORD_S - 0.1)
        await stage.call.speak(voiced_s=0.5, silent_s=0.8)
        await asyncio.sleep(3)

    stage = on_stage(act, Callbacks(on_user_turn=echo), call=lambda: FakeCall(flush_s=0.0), **hearing("okay"))
    assert history(stage)[-1] == ("assistant", "you said okay")


def test_what_must_be_said_is_not_interrupted() -> None:
    """allow_interruptions=False: voice, text and Stop leave it alone, a typed turn is answered behind it, and only
    force silences it."""

    async def act(stage: Stage) -> None:
        handle = stage.session.say("this call is recorded", allow_interruptions=False)
        await asyncio.sleep(0.5)
        stage.session.interrupt()
        await stage.call.speak(voiced_s=0.5)
        stage.session.type("hello")
        assert (await handle).heard_text == "this call is recorded"
        assert not handle.interrupted
        assert stage.call.flushes == []
        await asyncio.sleep(3)
        forced = stage.session.say("this too", allow_interruptions=False)
        await asyncio.sleep(0.3)
        stage.session.interrupt(force=True)
        assert (await forced).interrupted

    stage = on_stage(act, Callbacks(on_user_turn=echo), **hearing("hey"))
    assert [text for _, text in history(stage)][:3] == ["hello", "this call is recorded", "you said hello"]


def test_a_callback_is_closed_within_a_frame_of_the_decision() -> None:
    """Wherever it waits: for a model, for a tool, or for the listener."""
    closed: list[float] = []

    async def reply(session: AgentSession, turn: UserTurn) -> AsyncGenerator[str, None]:
        try:
            yield "well "
            await (asyncio.sleep(100) if turn.text == "model" else session.say("meanwhile"))
            while turn.text == "listener":
                yield NUMBERS
        finally:
            closed.append(now())

    async def act(stage: Stage) -> None:
        for text in ("model", "tool", "listener"):
            stage.session.type(text)
            await asyncio.sleep(3)
            decided = now()
            stage.session.interrupt()
            await asyncio.sleep(1)
            assert 0 <= closed.pop() - decided <= 0.02

    on_stage(act, Callbacks(on_user_turn=reply))


def test_a_pause_inside_a_sentence_does_not_end_the_turn() -> None:
    """Silence shorter than the endpointing delay belongs to the turn, which is read as one."""

    async def act(stage: Stage) -> None:
        await stage.call.speak(voiced_s=1.0, silent_s=0.4)
        await stage.call.speak(voiced_s=1.0, silent_s=0.8)
        await asyncio.sleep(2)

    stage = on_stage(act, Callbacks(on_user_turn=echo), **hearing("half", "the whole sentence"))
    assert history(stage)[0] == ("user", "the whole sentence")


def test_going_on_while_the_words_are_read_is_one_turn() -> None:
    """A user who resumes before the reading is done is not answered in between."""

    async def act(stage: Stage) -> None:
        await stage.call.speak(voiced_s=1.0, silent_s=0.64)
        await stage.call.speak(voiced_s=1.0, silent_s=0.8)
        await asyncio.sleep(4)

    stage = on_stage(act, Callbacks(on_user_turn=echo), **hearing("first half", "both halves", takes_s=0.9))
    assert [text for role, text in history(stage) if role == "user"] == ["both halves"]


def test_a_long_turn_is_read_in_pieces() -> None:
    """Speech longer than the recogniser's limit loses nothing."""
    longest_s = 0.0

    class Ears:
        async def transcribe(self, samples: np.ndarray) -> str:
            """Says how long it heard a voice."""
            nonlocal longest_s
            longest_s = max(longest_s, len(samples) / 16_000)
            return f"{samples.sum() / 16_000:.0f}"

    async def act(stage: Stage) -> None:
        for _ in range(5):
            await stage.call.speak(voiced_s=12.0, silent_s=0.4)
        await stage.call.speak(voiced_s=1.0, silent_s=0.8)
        await asyncio.sleep(2)

    stage = on_stage(act, Callbacks(on_user_turn=echo), activity=LoudnessActivity, ears=Ears)
    assert history(stage)[0] == ("user", "12 12 12 12 12 1")
    assert longest_s <= 30


def test_the_page_sees_the_words_while_they_are_spoken() -> None:
    """What was understood so far is shown, and the final text, or its absence, ends it."""

    async def act(stage: Stage) -> None:
        await stage.call.speak(voiced_s=3.0, silent_s=0.8)
        await asyncio.sleep(1)

    stage = on_stage(act, **hearing("so far"))
    shown = [(message["text"], message["final"]) for message in stage.call.messages("user")]
    assert shown[:2] == [("so far", False), ("so far", False)]
    assert shown[-1] == ("so far", True)

    class Unsure:
        async def transcribe(self, samples: np.ndarray) -> str:
            return "maybe" if samples[-1] else ""

    noise = on_stage(act, activity=LoudnessActivity, ears=Unsure)
    shown = [(message["text"], message["final"]) for message in noise.call.messages("user")]
    assert shown[0] == ("maybe", False)
    assert shown[-1] == ("", True)
    assert history(noise) == []


def test_without_a_recogniser_the_agent_gets_the_sound() -> None:
    """Barge-in and turns work; the text is empty and the audio is there."""
    turns: list[UserTurn] = []

    async def reply(session: AgentSession, turn: UserTurn) -> AsyncGenerator[str, None]:
        turns.append(turn)
        yield "I heard something"

    async def act(stage: Stage) -> None:
        await stage.call.speak(voiced_s=1.0, silent_s=0.8)
        await asyncio.sleep(3)

    on_stage(act, Callbacks(on_user_turn=reply), activity=LoudnessActivity)
    assert turns[0].text == ""
    assert turns[0].audio is not None
    assert len(turns[0].audio) > 16_000


def test_the_agent_does_not_talk_into_the_user() -> None:
    """A speech that becomes ready while the user speaks waits for the end of the turn."""

    async def act(stage: Stage) -> None:
        await stage.call.speak(voiced_s=0.5)
        handle = stage.session.say("over here")
        await stage.call.speak(voiced_s=2.0)
        assert stage.voice.replies == []
        await stage.call.speak(voiced_s=0, silent_s=0.8)
        assert not (await handle).interrupted

    on_stage(act, Callbacks(on_user_turn=echo), **hearing("hello"))


def test_a_recogniser_that_fails_does_not_end_the_call() -> None:
    """The page is told, and the next typed turn is answered."""

    class Broken:
        async def transcribe(self, samples: np.ndarray) -> str:
            raise OSError("no such worker")

    async def act(stage: Stage) -> None:
        await stage.call.speak(voiced_s=1.0, silent_s=0.8)
        stage.session.type("still there?")
        await asyncio.sleep(3)

    stage = on_stage(act, Callbacks(on_user_turn=echo), activity=LoudnessActivity, ears=Broken)
    assert "no such worker" in stage.call.messages("error")[0]["message"]
    assert history(stage)[-1] == ("assistant", "you said still there?")


# -- failures


def test_a_callback_that_raises_is_reported_and_the_call_goes_on() -> None:
    """What it had said is heard, the error reaches the page, and the next turn is answered."""

    async def reply(session: AgentSession, turn: UserTurn) -> AsyncGenerator[str, None]:
        yield "before the fault "
        if turn.text == "fail":
            raise ValueError("my bug")

    async def act(stage: Stage) -> None:
        stage.session.type("fail")
        await asyncio.sleep(3)
        stage.session.type("work")
        await asyncio.sleep(3)
        assert stage.session.state is State.LISTENING

    stage = on_stage(act, Callbacks(on_user_turn=reply))
    (error,) = stage.call.messages("error")
    assert error["code"] == "agent_failed"
    assert "my bug" in error["fix"]
    assert history(stage)[-1] == ("assistant", "before the fault ")


def test_a_stage_that_raises_fails_this_speech_only() -> None:
    """Awaiting the handle raises the voice's error; what was heard stays in the history; the next speech is spoken."""

    async def act(stage: Stage) -> None:
        handle = stage.session.say(NUMBERS)
        with pytest.raises(StepFailed):
            await handle
        stage.voice.error = None
        assert (await stage.session.say("better now")).heard_text == "better now"

    stage = on_stage(act, voice=lambda: FakeVoice(error=StepFailed("depth", "boom"), fails_after_words=3))
    assert stage.call.sink.cleared == {1}
    assert stage.call.messages("error")[0]["code"] == "StepFailed"


def test_yielding_something_else_than_text_is_a_clear_error() -> None:
    """Bytes are not spoken."""

    async def reply(session: AgentSession, turn: UserTurn) -> AsyncGenerator[Any, None]:
        yield b"bytes"

    async def act(stage: Stage) -> None:
        stage.session.type("go")
        await asyncio.sleep(1)

    stage = on_stage(act, Callbacks(on_user_turn=reply))
    assert "yields text (str), not bytes" in stage.call.messages("error")[0]["fix"]


def returns_text(session: AgentSession, turn: UserTurn) -> Any:
    return "some text"


async def returns_text_later(session: AgentSession, turn: UserTurn) -> Any:
    return "some text"


def raises_at_once(session: AgentSession, turn: UserTurn) -> Any:
    raise ValueError("my bug")


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (returns_text, "returns_text returned str: define it with `async def`, and `yield`"),
        (returns_text_later, "`yield` it instead"),
        (raises_at_once, "my bug"),
        (lambda session: None, "positional"),
    ],
)
def test_a_callback_of_the_wrong_kind_says_what_it_should_be(reply: Any, words: str) -> None:
    """Whatever is wrong with it is told in words, apologised for, and does not end the call."""

    async def act(stage: Stage) -> None:
        stage.session.type("go")
        await asyncio.sleep(5)
        assert stage.session.state is State.LISTENING

    stage = on_stage(act, Callbacks(on_user_turn=reply))
    assert words in stage.call.messages("error")[0]["fix"]
    assert history(stage)[-1] == ("assistant", Recovery().callback_failed)


def test_waiting_for_oneself_is_an_error_instead_of_a_hang() -> None:
    """A generator cannot await the hearing of its own speech."""
    handles: list[Any] = []

    async def reply(session: AgentSession, turn: UserTurn) -> AsyncGenerator[str, None]:
        yield "some words "
        await session._mouth.speeches[0]

    async def act(stage: Stage) -> None:
        stage.session.type("go")
        await asyncio.sleep(3)

    stage = on_stage(act, Callbacks(on_user_turn=reply))
    assert handles == []
    assert "cannot wait for its own speech" in stage.call.messages("error")[0]["fix"]


def test_a_callback_may_be_a_coroutine_that_says_things() -> None:
    """on_enter written as `await session.say(...)` works, and so does a say before a generator's first yield."""

    async def enter(session: AgentSession) -> None:
        await session.say("welcome")
        await session.say("how are you")

    async def reply(session: AgentSession, turn: UserTurn) -> AsyncGenerator[str, None]:
        await session.say("one moment")
        yield "here it is"

    async def act(stage: Stage) -> None:
        await asyncio.sleep(4)
        stage.session.type("go")
        await asyncio.sleep(4)
        assert stage.session.state is State.LISTENING

    stage = on_stage(act, Callbacks(on_enter=enter, on_user_turn=reply))
    assert [text for _, text in history(stage)] == ["welcome", "how are you", "go", "one moment", "here it is"]


def test_a_finally_that_hangs_does_not_hold_the_call() -> None:
    """A callback that will not close is left behind after a while; the sound stopped at once all the same."""

    async def reply(session: AgentSession, turn: UserTurn) -> AsyncGenerator[str, None]:
        try:
            yield NUMBERS
            await asyncio.sleep(100)
        finally:
            if turn.text == "hang":
                await asyncio.sleep(1000)

    async def act(stage: Stage) -> None:
        stage.session.type("hang")
        await asyncio.sleep(2)
        stage.session.type("next")
        await asyncio.sleep(2)
        assert history(stage)[-1] == ("user", "next")
        assert len(stage.voice.replies) == 2

    on_stage(act, Callbacks(on_user_turn=reply))


# -- ends


def test_closing_waits_for_the_goodbye_to_be_heard() -> None:
    """close() returns when the last word has reached the ear.  Reproduction 19 (pipecat#4647)."""

    async def act(stage: Stage) -> None:
        handle = stage.session.say("goodbye and good luck")
        await stage.session.close()
        assert handle.heard_text == "goodbye and good luck"
        assert now() < 4 * WORD_S + 1

    on_stage(act)


def test_closing_has_a_cap() -> None:
    """A listener that never plays does not keep the call."""

    async def act(stage: Stage) -> None:
        stage.call.sink.is_playing = False
        handle = stage.session.say("goodbye")
        await stage.session.close(timeout_s=3)
        assert now() == pytest.approx(3, abs=0.1)
        await asyncio.sleep(0.1)
        assert (await handle).interrupted

    on_stage(act)


def test_a_callback_may_close_the_call_after_its_last_words() -> None:
    """`yield "bye"; await session.close()` lets the bye be heard."""

    async def reply(session: AgentSession, turn: UserTurn) -> AsyncGenerator[str, None]:
        yield "bye for now"
        await session.close()

    ended: list[float] = []

    async def play() -> None:
        stage = Stage(Callbacks(on_user_turn=reply))
        task = asyncio.create_task(stage.session.run())
        await asyncio.sleep(0)
        stage.session.type("bye")
        await task
        ended.append(now())
        assert history(stage) == [("user", "bye"), ("assistant", "bye for now")]

    run(play())
    assert 3 * WORD_S < ended[0] < 3 * WORD_S + 1


@pytest.mark.parametrize("at_s", [0.0, 0.04, 0.3, 1.0, 2.0, 6.0])
def test_hanging_up_frees_everything_at_any_moment(at_s: float) -> None:
    """The voice's streams are cancelled or done, the sink holds nothing, every handle resolves, no task is left."""
    closed: list[bool] = []

    async def reply(session: AgentSession, turn: UserTurn) -> AsyncGenerator[str, None]:
        try:
            for word in NUMBERS.split():
                yield word + " "
        finally:
            closed.append(True)

    async def play() -> None:
        stage = Stage(Callbacks(on_user_turn=reply), activity=LoudnessActivity(), ears=ScriptedEars("x"))
        task = asyncio.create_task(stage.session.run())
        await asyncio.sleep(0)
        stage.session.type("go")
        handle = stage.session.say("and more")
        await asyncio.sleep(at_s)
        stage.call.closed.set()
        await task
        for reply_ in stage.voice.replies:
            assert reply_.is_cancelled or reply_.stream in stage.call.sink.ended
        assert handle.done
        assert (await stage.session.say("too late")).interrupted
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert bool(closed) == bool(stage.voice.replies) or at_s == 0.0

    run(play())


# -- the end of a turn, and answers before it


def understanding(words: dict[float, str]) -> dict[str, Any]:
    """Ears that understand as much as was said: seconds of voice -> words."""

    class Ears:
        async def transcribe(self, samples: np.ndarray) -> str:
            await asyncio.sleep(0.1)
            voiced_s = samples.sum() / 16_000
            return next((text for seconds, text in words.items() if voiced_s <= seconds + 0.1), "?")

    return {"activity": LoudnessActivity, "ears": Ears}


def test_a_turn_that_sounds_unfinished_is_waited_for() -> None:
    """A pause behind "and" does not end the turn at min_endpointing_delay_s; max_endpointing_delay_s does."""

    async def act(stage: Stage) -> None:
        await stage.call.speak(voiced_s=1.0, silent_s=1.5)
        await stage.call.speak(voiced_s=1.0, silent_s=0.8)
        await asyncio.sleep(3)
        await stage.call.speak(voiced_s=1.0, silent_s=2.4)
        assert stage.session.history[-1].role == "assistant"
        await stage.call.speak(voiced_s=0, silent_s=0.3)
        await asyncio.sleep(1)

    stage = on_stage(act, Callbacks(on_user_turn=echo), **understanding({1: "I want the", 2: "I want the cake"}))
    assert [text for role, text in history(stage) if role == "user"] == ["I want the cake", "I want the"]


@pytest.mark.parametrize(("is_over", "wait_s"), [(True, 0.6), (False, 2.0)])
def test_a_judge_of_sound_says_how_long_to_wait(is_over: bool, wait_s: float) -> None:
    """It is asked at the first lull, and hears the turn; one that fails is as none."""
    heard_s: list[float] = []

    class Judge:
        async def is_over(self, turn: np.ndarray) -> bool:
            heard_s.append(turn.sum() / 16_000)
            await asyncio.sleep(0.1)
            if is_over:
                raise OSError("no such graph")
            return False

    async def act(stage: Stage) -> None:
        await stage.call.speak(voiced_s=1.0)
        ended = now()
        await stage.call.speak(voiced_s=0.0, silent_s=2.5)
        assert stage.session.history[0].text == "tea"
        assert stage.call.messages("user")[-1]["final"]
        assert wait_s <= turned[0] - ended <= wait_s + 0.15

    turned: list[float] = []

    async def reply(session: AgentSession, turn: UserTurn) -> AsyncGenerator[str, None]:
        turned.append(now())
        yield "well"

    manners = TurnTaking(end_of_turn=Judge(), max_endpointing_delay_s=2.0)
    on_stage(act, Callbacks(on_user_turn=reply, turn_taking=manners), **hearing("tea"))
    assert heard_s == [pytest.approx(1.0, abs=0.05)]


@pytest.mark.parametrize("goes_on", [False, True])
def test_an_early_answer_is_heard_only_if_the_turn_was_over(goes_on: bool) -> None:
    """preemptive_generation: the answer is thought of at the first lull.  A user who goes on makes it void: no sound,
    no history, its generator closed."""
    asked: list[tuple[float, str]] = []
    closed: list[str] = []

    async def reply(session: AgentSession, turn: UserTurn) -> AsyncGenerator[str, None]:
        asked.append((now(), turn.text))
        assert session.history[-1].text == turn.text
        try:
            await asyncio.sleep(0.3)
            yield f"you said {turn.text}"
        finally:
            closed.append(turn.text)

    async def act(stage: Stage) -> None:
        await stage.call.speak(voiced_s=0.6, silent_s=0.5)
        assert asked[0][1] == "tea"
        assert stage.voice.replies == []
        if goes_on:
            await stage.call.speak(voiced_s=1.0)
            await stage.call.speak(voiced_s=0.0, silent_s=0.8)
        else:
            await stage.call.speak(voiced_s=0.0, silent_s=0.25)
            assert stage.session.state is State.SPEAKING
        await asyncio.sleep(4)

    ears = understanding({0.6: "tea", 1.6: "tea with milk"})
    manners = TurnTaking(preemptive_generation=True)
    stage = on_stage(act, Callbacks(on_user_turn=reply, turn_taking=manners), **ears)
    final = "tea with milk" if goes_on else "tea"
    assert history(stage) == [("user", final), ("assistant", f"you said {final}")]
    assert [said.text for said in stage.voice.replies] == [f"you said {final}"]
    assert closed == (["tea", final] if goes_on else ["tea"])
    assert [text for _, text in asked] == closed


# -- what the caller hears when something fails


def test_a_callback_that_raises_is_apologised_for_once() -> None:
    """The words are the author's; with an empty text there is silence."""

    async def reply(session: AgentSession, turn: UserTurn) -> AsyncGenerator[str, None]:
        yield "let me see "
        raise ValueError("my bug")

    async def act(stage: Stage) -> None:
        stage.session.type("go")
        await asyncio.sleep(5)

    stage = on_stage(act, Callbacks(on_user_turn=reply, recovery=Recovery(callback_failed="oh dear")))
    assert history(stage)[1:] == [("assistant", "let me see "), ("assistant", "oh dear")]
    silent = on_stage(act, Callbacks(on_user_turn=reply, recovery=Recovery(callback_failed="")))
    assert history(silent)[1:] == [("assistant", "let me see ")]


def test_a_turn_that_could_not_be_read_is_apologised_for() -> None:
    """The recogniser raised: the caller is asked again; a sound over the agent that could not be read lets it go on."""

    class Broken:
        async def transcribe(self, samples: np.ndarray) -> str:
            raise OSError("no such worker")

    async def act(stage: Stage) -> None:
        await stage.call.speak(voiced_s=0.6, silent_s=0.8)
        await asyncio.sleep(2)
        handle = stage.session.say(NUMBERS)
        await asyncio.sleep(1)
        await stage.call.speak(voiced_s=0.6, silent_s=0.8)
        assert not (await handle).interrupted

    stage = on_stage(act, Callbacks(recovery=Recovery(not_understood="pardon")), activity=LoudnessActivity, ears=Broken)
    assert history(stage) == [("assistant", "pardon"), ("assistant", NUMBERS)]


def test_a_voice_that_falls_silent_for_good_is_given_up() -> None:
    """It has text and makes no sound: after stall_timeout_s the log and the page say so, the caller hears an apology,
    and the next turn is answered."""

    async def act(stage: Stage) -> None:
        handle = stage.session.say(NUMBERS)
        await asyncio.sleep(0.07)
        stage.voice.word_s = 1e6
        with pytest.raises(StepFailed, match="no sound for 3 s"):
            await handle
        assert 3.8 < now() < 4.5
        stage.voice.word_s = 0.05
        await asyncio.sleep(2)
        stage.session.type("hello")
        await asyncio.sleep(3)

    recovery = Recovery(voice_failed="sorry", stall_timeout_s=3.0)
    stage = on_stage(act, Callbacks(on_user_turn=echo, recovery=recovery))
    assert [text for _, text in history(stage)] == ["one two", "sorry", "hello", "you said hello"]
    assert stage.call.messages("error")[0]["code"] == "StepFailed"


def test_a_voice_that_is_gone_is_not_apologised_for_for_ever() -> None:
    """The apology fails too; that is the end of it until the next turn."""

    async def act(stage: Stage) -> None:
        stage.session.say("hello")
        await asyncio.sleep(20)

    stage = on_stage(act, voice=lambda: FakeVoice(error=StepFailed("depth", "boom")))
    assert len(stage.voice.replies) == 2
