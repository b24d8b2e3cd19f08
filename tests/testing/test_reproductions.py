"""Complaints that real users of voice agents have filed, each as a call that must go right.

They are numbered; those that need a real wire, browser or model stand beside what they test, under the same numbers:

6   `test_over_aiortc`, `test_over_a_phone`, `tests/e2e/test_heard_words`      17  `tests/transport/test_playout`
18  `tests/transport/test_webrtc`      19  `tests/server/test_call`            42  `tests/agent/test_echo`
45, 46  `tests/agent/test_session`     47, 48  `tests/server/test_call`        49  `tests/e2e/test_demo`, `test_firefox`
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from dataclasses import replace

import numpy as np
import pytest
from barge_ins import STORY, STORYTELLER
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from speech import spoken

from breeze_rtc.agent.figures import TurnFigures
from breeze_rtc.agent.session import AgentSession, Callbacks, Recovery, UserTurn
from breeze_rtc.agent.text import SpokenText
from breeze_rtc.agent.vad import VoiceActivity
from breeze_rtc.testing import Caller, Network, ToneVoice, run, tones
from breeze_rtc.testing.ear import GAP_S


def saying(text: str) -> Callbacks:
    async def reply(session: AgentSession, turn: UserTurn) -> AsyncGenerator[str, None]:
        yield text

    return Callbacks(on_user_turn=reply)


async def cut_after(caller: Caller, seconds: float) -> None:
    """Ask, hear the answer for so long, and stop it."""
    await caller.type("go", waits=False)
    await caller.first_sound()
    await caller.wait(seconds)
    caller.interrupt()
    await caller.wait(0.5)


def test_a_cut_answer_counts_as_far_as_the_ear_got() -> None:
    """Tokens go to the voice faster than they are heard; spoken over at 3.1 s, the history holds what was heard.

    Reproduction 1 (pipecat#5426).
    """

    async def call() -> None:
        async with Caller(STORYTELLER) as caller:
            await caller.type("go", waits=False)
            await caller.first_sound()
            await caller.wait(3.1)
            await caller.say("stop there", waits=False)
            heard = caller.heard_words or caller.ear.words
            await caller.wait(1.0)
            heard = [word for word in caller.ear.words if word.word.stream == 1]
            claim = next(message for message in caller.session.history if message.role == "assistant")
            assert claim.interrupted
            assert claim.text.split() in (
                STORY.split()[: len(heard)],
                STORY.split()[: len(heard) - 1],
            )
            assert 7 <= len(heard) <= 13

    run(call())


def test_without_word_timings_a_cut_answer_is_neither_empty_nor_full() -> None:
    """Heard for 3 s of 20, with nothing that says where the words are.  Reproduction 2 (pipecat#2791)."""

    async def call() -> None:
        async with Caller(STORYTELLER, voice=ToneVoice(has_marks=False)) as caller:
            await cut_after(caller, 3.0)
            claim = caller.session.history[-1]
            assert claim.role == "assistant"
            assert STORY.startswith(claim.text)
            assert abs(len(claim.text.split()) - len(caller.heard_words)) <= 3

    run(call())


@pytest.mark.parametrize("cut_s", [0.31, 1.0, 2.22, 4.4])
def test_the_position_is_the_listeners(cut_s: float) -> None:
    """`playback_position_s` at the interruption is what the loudspeaker has played, to one packet.

    Reproduction 3 (pipecat#5605).
    """
    positions: list[float] = []

    async def told(session: AgentSession, speech: object) -> None:
        positions.append(speech.playback_position_s)  # type: ignore[attr-defined]

    async def call() -> None:
        async with Caller(Callbacks(on_user_turn=STORYTELLER.on_user_turn, on_interrupted=told)) as caller:
            await cut_after(caller, cut_s)
            last = caller.heard_words[-1]
            played_s = last.word.start_samples / caller.voice.sample_rate + last.sounded_s
            assert positions[0] == pytest.approx(played_s, abs=0.02 + 0.02)

    run(call())


def test_a_cut_before_anything_was_audible_leaves_nothing() -> None:
    """The first packet had left 40 ms ago, and was on its way.  Reproduction 4 (pipecat#5303)."""

    async def call() -> None:
        async with Caller(STORYTELLER) as caller:
            await caller.wait(1.0)
            await caller.type("go", waits=False)
            while not caller.call.sink.first_ticks(1):
                await caller.wait(0.001)
            await caller.wait(0.04)
            caller.interrupt()
            await caller.wait(0.5)
            assert caller.heard_text == ""
            assert [message.role for message in caller.session.history] == ["user"]

    run(call())


AWKWARD = 'He said: "Well, $100?" - and Dr. No, of M.I.6 (in 1962), paid 3,50 EUR... "No way!" 😀 end'


@settings(max_examples=15, deadline=None)
@given(st.floats(0.05, 6.0), st.one_of(st.just(AWKWARD), st.text(min_size=1, max_size=60)))
def test_heard_and_unheard_are_the_text_byte_for_byte(cut_s: float, text: str) -> None:
    """Whatever the text holds and wherever it is cut: nothing is doubled, nothing is lost.

    Reproduction 5 (pipecat#5111, #5094).
    """
    parts: list[tuple[str, str]] = []

    async def told(session: AgentSession, speech: object) -> None:
        parts.append((speech.heard_text, speech.unheard_text))  # type: ignore[attr-defined]

    async def call() -> None:
        callbacks = Callbacks(on_user_turn=saying(text).on_user_turn, on_interrupted=told)
        async with Caller(callbacks) as caller:
            await caller.type("go", waits=False)
            await caller.wait(cut_s)
            caller.interrupt()
            await caller.wait(0.5)
            answers = [message for message in caller.session.history if message.role == "assistant"]
            if parts:
                assert [heard + unheard for heard, unheard in parts] == [text]
                assert "".join(message.text for message in answers) == parts[0][0]
            else:
                assert "".join(message.text for message in answers) in ("", text)

    run(call())


def test_captions_do_not_lead_the_ear() -> None:
    """Nearly two seconds of remote delay: a word lights up after it was heard, and soon.

    Reproduction 7 (livekit#889).
    """

    async def call() -> None:
        async with Caller(STORYTELLER, network=Network(delay_s=1.8)) as caller:
            await caller.type("go")
            ends = {word.word.end_chars: word.end_s for word in caller.heard_words}
            captions = [(at, said["chars"]) for at, said in caller.call.messages if said["type"] == "heard"]
            lags = [at - ends[chars] for at, chars in captions if chars in ends]
            assert len(lags) > 30
            # The reader of tones and the playhead are good to 20 ms each.
            assert min(lags) > -0.04
            assert max(lags) < 0.04

    run(call())


@pytest.mark.parametrize("says", ["before", "during"])
def test_a_noise_takes_the_word_from_nobody(says: str) -> None:
    """150 ms of noise just before the agent answers, or into the answer: it is heard from its first word to its last,
    and what the noise held goes on where the ear was.

    Reproduction 43 (pipecat#4308, livekit#1229, #4039).
    """

    async def call() -> None:
        async with Caller(STORYTELLER) as caller:
            await caller.say("go", waits=False)
            if says == "before":
                await caller.wait(0.3)
            else:
                await caller.first_sound()
                await caller.wait(2.0)
            await caller.sound(np.full(2_400, 0.9, np.float32), waits=False)
            await caller.quiet()
            assert caller.session.history[-1].text.strip() == STORY
            heard = [word for word in caller.ear.words if word.word.stream == 1]
            assert [word.word.index for word in heard] == list(range(len(STORY.split())))
            assert all(word.sounded_s > word.word.voiced_s - 0.06 for word in heard)
            assert not caller.session.history[-1].interrupted

    run(call())


def babble(seconds: float) -> NDArray[np.float32]:
    """Six voices at once, 10 dB below a caller of -24 dB."""
    text = "Would you pass me the salt? They say it will rain tomorrow. I have not seen her for years. "
    mixed = np.zeros(round(seconds * 16_000), np.float32)
    for number, kind in enumerate(("m1", "m3", "m5", "f1", "f2", "f4")):
        voice = spoken(text, f"en-us+{kind}")
        mixed += np.resize(np.roll(voice / np.sqrt(np.square(voice).mean()), 7_000 * number), len(mixed))
    return (mixed * 0.06 * 10 ** (-10 / 20) / np.sqrt(np.square(mixed).mean())).astype(np.float32)


def test_a_room_full_of_voices_holds_the_agent_once() -> None:
    """Twelve seconds of babble, 10 dB below what a caller has, through the real voice activity: where nobody makes
    words of it the agent is held for two seconds, says the rest over it, and nothing is cut.  What a recogniser makes
    of such babble is in `bench/noise.py`.

    Reproduction 44 (pipecat#3036, #1391).
    """
    heard: list[float] = []

    class Ears:
        async def transcribe(self, samples: NDArray[np.float32]) -> str:
            heard.append(len(samples) / 16_000)
            return ""

    async def call() -> None:
        activity = VoiceActivity()
        async with Caller(STORYTELLER, ears=Ears(), activity=activity) as caller:
            await caller.type("go", waits=False)
            await caller.first_sound()
            await caller.wait(1.0)
            began = caller.now
            await caller.sound(babble(12.0), waits=False)
            spoken_s = sum(word.sounded_s for word in caller.ear.words if word.start_s > began)
            print(len(heard), round(spoken_s, 1), [round(gap, 2) for gap in caller.ear.gaps_s])
            assert heard, "the voice activity took it for a voice"
            assert spoken_s > 7.0
            await caller.quiet()
            assert not any(message.interrupted for message in caller.session.history)
            assert caller.session.history[-1].text.strip() == STORY
        activity.close()

    run(call())


def test_a_voice_that_stumbles_is_waited_for_once() -> None:
    """It stands still for 600 ms again and again.  The first time is heard; then the machine is known to stumble, and
    so much is made ahead that nobody hears it.

    Reproduction 24 (livekit#3604, pipecat#3222).
    """

    async def call() -> None:
        stalls = dict.fromkeys(range(5, 60, 6), 0.6)
        async with Caller(STORYTELLER, voice=ToneVoice(stalls=stalls)) as caller:
            await caller.type("go")
            print(caller.ear.gaps_s)
            assert len(caller.ear.gaps_s) <= 1
            assert max(caller.ear.gaps_s, default=0) < 0.6
            assert caller.session.history[-1].text.strip() == STORY
            await caller.type("go")
            assert len(caller.ear.gaps_s) <= 1

    run(call())


def silences(caller: Caller) -> tuple[list[float], list[float]]:
    """In the answer at the ear, longer than the voice's own: inside a sentence, and between two."""
    inside, between = [], []
    for one, other in itertools.pairwise(caller.heard_words):
        broken = one.end_s - one.start_s - one.sounded_s
        pause = other.start_s - one.end_s - tones.PAUSE_S
        (between if one.text[-1] in ".?!" else inside).append(pause)
        inside.append(broken)
    return [gap for gap in inside if gap > GAP_S], [gap for gap in between if gap > GAP_S]


STALLS = dict.fromkeys(range(5, 60, 6), 0.6)


@pytest.mark.parametrize("text", ["whole", "streamed"])
@pytest.mark.parametrize(
    ("slowness", "stalls", "pace"),
    [(11.0, {}, 0.91), (11.0, STALLS, 0.73), (8.0, STALLS, 0.93)],
    ids=["0.9x", "0.9x and stalls", "0.9x with its stalls"],
)
def test_a_voice_slower_than_speech_breaks_off_in_no_sentence(
    slowness: float, stalls: dict[int, float], pace: float, text: str
) -> None:
    """Nine tenths of a second of sound in a second, and every two seconds it stands still for 600 ms; in the first turn
    of a call as in the next.  It begins later, by what it will lack, and once it has begun there is no silence in it:
    not between sentences either, though the text comes bit by bit.  All of the wait is in the figures, and is no more
    than what was missing and what stalls that did not come would have cost.

    Reproduction 24 (livekit#3604, pipecat#3222).
    """
    seen: list[TurnFigures] = []
    callbacks = saying(STORY) if text == "whole" else STORYTELLER

    async def call() -> None:
        voice = ToneVoice(slowness=slowness, stalls=stalls)
        async with Caller(callbacks, voice=voice, observe=seen.append) as caller:
            for is_known in (False, True):
                asked_s = caller.now
                await caller.type("go")
                inside, between = silences(caller)
                words = caller.heard_words
                speech_s = sum(word.word.seconds for word in words)
                late_s = words[0].start_s - asked_s - 0.3  # a voice that keeps up is heard after 0.3 s
                print(inside, between, late_s, seen[-1].gap_s, seen[-1].held_back_s)
                assert (inside, between) == ([], [])
                assert seen[-1].gap_s <= 0.04  # two packets, which is no gap at the ear
                assert seen[-1].held_back_s == pytest.approx(late_s, abs=0.4)
                stalls_s = 4.5 if is_known else 5.5
                assert late_s < speech_s * (1 / pace - 1) + stalls_s
                assert caller.session.history[-1].text.strip() == STORY

    run(call())


ANSWER = "You can come on Monday at ten. Bring your card and a warm coat."


@pytest.mark.parametrize("stalls", [STALLS, {}])
def test_an_answer_of_a_slow_voice_is_without_any_silence_once_it_has_begun(stalls: dict[int, float]) -> None:
    """Five seconds, of nine tenths of a second in a second and stalls of 600 ms: all that will be missing is waited for
    before the first word.

    Reproduction 24 (livekit#3604, pipecat#3222).
    """

    async def call() -> None:
        async with Caller(saying(ANSWER), voice=ToneVoice(slowness=11.0, stalls=stalls)) as caller:
            for _ in range(2):
                await caller.type("go")
                assert silences(caller) == ([], [])
                assert caller.session.history[-1].text.strip() == ANSWER

    run(call())


@pytest.mark.parametrize("slowness", [1.0, 5.0])
def test_a_voice_that_keeps_up_begins_with_its_first_sound(slowness: float) -> None:
    """Twice as fast as speech, or ten times: nothing is kept back, not for a packet."""
    seen: list[TurnFigures] = []

    async def call() -> None:
        async with Caller(STORYTELLER, voice=ToneVoice(slowness=slowness), observe=seen.append) as caller:
            for _ in range(2):
                await caller.type("go")
                assert (seen[-1].held_back_s, seen[-1].gaps) == (0.0, 0)

    run(call())


def test_a_slow_voice_that_waits_for_its_text_says_what_it_has() -> None:
    """An answer stops in the middle of a sentence, for a tool that takes its time: what was written is heard."""

    async def reply(session: AgentSession, turn: UserTurn) -> AsyncGenerator[str, None]:
        yield "Let me see what they "
        await asyncio.sleep(6.0)
        yield "have written."

    async def call() -> None:
        async with Caller(Callbacks(on_user_turn=reply), voice=ToneVoice(slowness=11)) as caller:
            asked_s = caller.now
            await caller.type("go")
            assert [word.text.strip() for word in caller.heard_words if word.start_s < asked_s + 6.0][:4] == [
                *("Let", "me", "see", "what"),
            ]
            assert caller.heard_text == "Let me see what they have written."

    run(call())


def test_sound_that_is_ready_and_not_taken_is_an_error_and_taken_after_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader of a speech is not woken any more, in the middle of it: the listener is without sound that is there.
    That is said within 0.3 s, not when they speak, and all is heard.

    Reproduction 25 (pipecat#2941).
    """

    async def call() -> None:
        async with Caller(saying("one two three four five six seven eight"), raises=False) as caller:
            await caller.type("go", waits=False)
            await caller.first_sound()
            await caller.wait(0.5)
            monkeypatch.setattr("breeze_rtc.runtime.engine._Inbox.wake", lambda inbox: None)
            while not caller.errors:
                await caller.wait(0.02)
            silent_from_s = max(word.start_s + word.sounded_s for word in caller.heard_words)
            assert caller.now - silent_from_s < 0.4
            assert "sound was ready" in caller.errors[0]
            monkeypatch.undo()
            await caller.quiet()
            assert caller.heard_text == "one two three four five six seven eight"

    run(call())


def test_a_wake_up_that_is_lost_silences_nobody_for_long() -> None:
    """The engine is not told that text has come, so the agent says nothing.  The session notices, says that something
    went wrong, and the next turn is answered: nobody waits until they speak.

    Reproduction 25 (pipecat#2941).
    """

    async def call() -> None:
        callbacks = replace(saying("one two three"), recovery=Recovery(stall_timeout_s=2.0))
        async with Caller(callbacks, raises=False) as caller:
            line = caller.voice._peer
            face = line.face  # type: ignore[union-attr]
            say, face.send = face.send, line._to_driver.append  # type: ignore[union-attr]
            began = caller.now
            await caller.type("go", waits=False)
            await caller.wait(2.5)
            face.send = say
            await caller.quiet()
            assert caller.now - began < 8.0
            assert any("no sound for 2 s" in error for error in caller.errors)
            await caller.type("go")
            assert caller.heard_text == "one two three"

    run(call())


CHINESE = "今天天气很好,我们去公园散步吧。那里有很多花和树,还有一个小湖!你觉得怎么样?"
THAI = "สวัสดีครับ วันนี้อากาศดีมาก เราไปเดินเล่นที่สวนกันเถอะ"


@pytest.mark.parametrize("text", [CHINESE, THAI])
def test_scripts_without_spaces_are_cut_to_a_prefix(text: str) -> None:
    """No space appears and none is lost.  Reproduction 8 (livekit#3872, pipecat#2307, #4515)."""

    async def call() -> None:
        async with Caller(saying(text)) as caller:
            await cut_after(caller, 1.7)
            claim = caller.session.history[-1].text
            assert text.startswith(claim)
            assert 0 < len(claim) < len(text)
            heard = "".join(word.text for word in caller.heard_words)
            assert abs(len(claim) - len(heard)) <= 2

    run(call())


def test_chinese_is_heard_before_its_first_sentence_has_ended() -> None:
    """A splitter that knows no Chinese full stop would wait for the whole answer.  Reproduction 52 (livekit#930)."""

    async def reply(session: AgentSession, turn: UserTurn) -> AsyncGenerator[str, None]:
        for char in CHINESE:
            await asyncio.sleep(0.2)
            yield char

    async def call() -> None:
        async with Caller(Callbacks(on_user_turn=reply)) as caller:
            await caller.type("go", waits=False)
            await caller.first_sound()
            assert caller.now - caller.began_s < 0.2 * CHINESE.index("。")

    run(call())


MARKDOWN = (
    "## Plan\n\n1. Take the **red** bus 🚌.\n2. See [the town hall](https://example.org/hall?x=1), it is *free*.\n\n"
    "```python\n" + "print('this is not said')\n" * 40 + "```\nThat is `all` there is."
)
SAID = "Plan. 1. Take the red bus . 2. See the town hall, it is free. That is all there is."


@pytest.mark.parametrize("cut_s", [None, 0.9, 2.0, 3.3])
def test_markup_is_not_said_and_the_history_is_what_was_written(cut_s: float | None) -> None:
    """What is heard has no stars in it; what is kept is a prefix of the text as it was given, byte for byte."""

    async def reply(session: AgentSession, turn: UserTurn) -> AsyncGenerator[str, None]:
        for at in range(0, len(MARKDOWN), 5):
            yield MARKDOWN[at : at + 5]

    async def call() -> None:
        async with Caller(Callbacks(on_user_turn=reply)) as caller:
            if cut_s is None:
                await caller.type("go")
                assert caller.heard_text.split() == SAID.replace(" .", " ").replace("bus  2", "bus . 2").split()
                assert caller.session.history[-1].text == MARKDOWN
                assert max(caller.ear.gaps_s, default=0) < 0.1
            else:
                await cut_after(caller, cut_s)
                claim = caller.session.history[-1].text
                assert MARKDOWN.startswith(claim)
                filter_ = SpokenText()
                said = filter_.push(MARKDOWN) + filter_.end()
                ends = [filter_.written_chars(at - 1) for at in range(1, len(said)) if said[at].isspace()]
                words = [end for end in dict.fromkeys(ends) if MARKDOWN[:end].strip()]
                claimed = sum(end < len(claim) for end in words)
                assert abs(claimed - len(caller.heard_words)) <= 2

    run(call())


LONG_CHINESE = "如果你真的想知道的话，那是一个很长的故事，从很久以前开始。那时候有一条小船。它在大海上。" * 3


@pytest.mark.parametrize("text", [STORY, LONG_CHINESE])
def test_a_voice_that_reads_whole_texts_begins_before_the_first_sentence_ends(text: str) -> None:
    """It gets sentences one after another, is one stream to its listener, and a cut is as exact.

    Reproduction 52 (livekit#930).
    """

    async def reply(session: AgentSession, turn: UserTurn) -> AsyncGenerator[str, None]:
        for char in text:
            await asyncio.sleep(0.03)
            yield char

    async def call() -> None:
        voice = ToneVoice(reads_whole_text=True)
        async with Caller(Callbacks(on_user_turn=reply), voice=voice) as caller:
            began = caller.now
            await caller.type("go", waits=False)
            await caller.first_sound()
            stops = [text.find(stop) for stop in "。." if stop in text]
            assert caller.now - began < max(0.03 * min(stops), 1.5)
            await caller.quiet()
            assert [*filter(str.isalnum, caller.heard_text)] == [*filter(str.isalnum, text)]
            assert caller.session.history[-1].text == text
            assert [gap for gap in caller.ear.gaps_s if gap > 0.1] == []
            assert len({message["stream"] for _, message in caller.call.messages if message["type"] == "speech"}) == 1
            await cut_after(caller, 6.0)
            claim = caller.session.history[-1].text
            assert text.startswith(claim)
            whole = "".join(word.text for word in caller.heard_words if word.is_whole)
            assert abs(len(claim.split()) - len(whole.split())) <= 1
            assert abs(len(claim) - len(whole)) <= 8

    run(call())
