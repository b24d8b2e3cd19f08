"""The test kit as its user sees it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from importlib.util import find_spec

import numpy as np
import pytest
from barge_ins import STORYTELLER
from numpy.typing import NDArray
from speech import spoken

from breeze_rtc import Agent, AgentSession, UserTurn
from breeze_rtc.agent.figures import TurnFigures
from breeze_rtc.agent.listen import Moonshine, model_folder
from breeze_rtc.agent.vad import VoiceActivity
from breeze_rtc.media.opus import SpeechEncoder
from breeze_rtc.playback import SpeechPacket
from breeze_rtc.testing import Caller, Network, ToneVoice, run


@pytest.fixture
def agent() -> Agent:
    agent = Agent()

    @agent.on_enter
    async def greet(session: AgentSession) -> AsyncGenerator[str, None]:
        yield "Hi! Talk to me."

    @agent.on_user_turn
    async def reply(session: AgentSession, turn: UserTurn) -> AsyncGenerator[str, None]:
        if turn.text == "fail":
            raise ValueError("my bug")
        yield f"You said: {turn.text}."

    return agent


async def test_a_conversation_in_milliseconds(agent: Agent) -> None:
    """The words of both sides cross the call, half a minute of it in less than three seconds of a processor."""
    began = time.process_time()
    async with agent.test() as caller:
        await caller.quiet()
        assert caller.heard_text == "Hi! Talk to me."
        await caller.say("hello my friend")
        assert caller.heard_text == "You said: hello my friend."
        await caller.type("and now I write")
        assert caller.heard_text == "You said: and now I write."
        await caller.wait(20)
        assert caller.ear.gaps_s == []
        assert caller.wasted_s < 0.3
        assert 25 < caller.now - caller.began_s < 40
    assert time.process_time() - began < 3


async def test_time_is_real_again_after_the_call(agent: Agent) -> None:
    """The loop that a test runs on is left as it was."""
    loop = asyncio.get_running_loop()
    async with agent.test() as caller:
        await caller.wait(100)
    began = loop.time()
    await asyncio.sleep(0.05)
    assert 0.04 < loop.time() - began < 10
    assert asyncio.all_tasks() == {asyncio.current_task()}


def test_speaking_over_the_agent_stops_it() -> None:
    """Its last sound leaves the loudspeaker a quarter of a second after the caller began, and it waited for an end."""

    async def call() -> None:
        async with Caller(STORYTELLER) as caller:
            await caller.type("go", waits=False)
            await caller.first_sound()
            await caller.wait(2)
            await caller.say("wait a moment", waits=False)
            await caller.wait(1)
            (cut,) = caller.barge_ins
            assert cut.onset_s is not None
            assert cut.decided_s - cut.onset_s < 0.3
            # Half a round trip, and what a sound card holds.
            assert cut.stop_s < 0.12
            assert 0.2 < caller.wasted_s < 3

    run(call())


@pytest.mark.parametrize(("stall_s", "gaps"), [(0.0, 0), (3.0, 1)])
def test_the_ear_notices_a_hole(stall_s: float, gaps: int) -> None:
    """An engine that stands still is heard to do so, for as long as it lasts beyond what had been made."""

    async def call() -> None:
        async with Caller(STORYTELLER, voice=ToneVoice(stalls={10: stall_s})) as caller:
            await caller.type("go")
            assert [1.6 < gap < stall_s for gap in caller.ear.gaps_s] == [True] * gaps

    run(call())


def test_the_encoder_is_told_of_a_hole_and_of_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first sound behind it is coded for a decoder that begins anew; all other sound for one that goes on."""
    told: list[bool] = []
    encode = SpeechEncoder.encode

    def noted(self: SpeechEncoder, pcm: NDArray[np.int16], *, after_hole: bool = False) -> tuple[SpeechPacket, ...]:
        told.append(after_hole)
        return encode(self, pcm, after_hole=after_hole)

    monkeypatch.setattr(SpeechEncoder, "encode", noted)

    async def call() -> None:
        async with Caller(STORYTELLER, voice=ToneVoice(stalls={20: 2.5})) as caller:
            await caller.type("go")
            assert len(caller.ear.gaps_s) == 1

    run(call())
    assert told.count(True) == 1
    assert told.index(True) > 10


def test_a_turn_tells_what_its_listener_missed() -> None:
    """A hole of two seconds and a cut behind it: what the figures say is what the recording at the ear has."""
    seen: list[TurnFigures] = []

    async def call() -> None:
        async with Caller(STORYTELLER, voice=ToneVoice(stalls={6: 2.5}), observe=seen.append) as caller:
            await caller.type("go", waits=False)
            await caller.first_sound()
            await caller.wait(6.1)
            caller.interrupt()
            await caller.wait(0.5)
            (figures,) = seen
            (gap_s,) = caller.ear.gaps_s
            assert (figures.gaps, figures.interrupted) == (1, True)
            assert figures.gap_s == pytest.approx(gap_s, abs=0.06)
            written = "".join(said["text"] for _, said in caller.call.messages if said["type"] == "speech")
            assert figures.words_heard + figures.words_unheard == len(written.split())
            assert abs(figures.words_heard - len(caller.heard_words)) <= 1
            assert figures.words_unsure <= 1
            assert figures.concealed_s == 0
            assert caller.words_wrong <= 1

    run(call())


def test_a_turn_tells_what_the_network_cost() -> None:
    """Of packets that nothing makes good the player makes up the sound; a cut is as unsure as the position is."""
    seen: list[TurnFigures] = []

    async def call() -> None:
        network = Network(delay_s=0.08, jitter_s=0.06, loss=0.2, seed=5)
        async with Caller(STORYTELLER, network=network, observe=seen.append) as caller:
            await caller.type("go", waits=False)
            await caller.first_sound()
            before = caller.listener.concealed
            await caller.wait(8.0)
            caller.interrupt()
            await caller.wait(0.8)
            (figures,) = seen
            assert figures.concealed_s == pytest.approx((caller.listener.concealed - before) * 0.02, abs=0.3)
            assert figures.concealed_s > 0.1
            assert caller.words_wrong <= 1

    run(call())


def test_a_rough_network_is_rough() -> None:
    """Packets are lost and come late, the words come through all the same, and the same seed gives the same call."""
    lost: list[tuple[int, int]] = []

    async def call() -> None:
        async with Caller(STORYTELLER, network=Network(delay_s=0.08, jitter_s=0.04, loss=0.1, seed=5)) as caller:
            await caller.type("go")
            assert len(caller.heard_words) > 60
            lost.append((caller.listener.lost, caller.listener.concealed))

    run(call())
    run(call())
    assert lost[0] == lost[1]
    assert lost[0][0] > 50


async def test_a_cough_is_not_speech(agent: Agent) -> None:
    """150 ms of noise neither stop the agent nor make a turn."""
    async with agent.test() as caller:
        await caller.first_sound()
        await caller.sound(np.full(2_400, 0.9, np.float32), waits=False)
        await caller.quiet()
        assert caller.ear.text == "Hi! Talk to me."
        assert caller.barge_ins == []


async def test_an_error_in_the_agent_fails_its_test(agent: Agent) -> None:
    """Unless the test is about that."""
    with pytest.raises(RuntimeError, match="my bug"):
        async with agent.test() as caller:
            await caller.type("fail")
    async with agent.test(raises=False) as caller:
        await caller.type("fail")
        assert "my bug" in caller.errors[0]


async def test_hanging_up_in_mid_speech_is_an_end(agent: Agent) -> None:
    """Every handle resolves and no task is left."""
    async with agent.test() as caller:
        await caller.first_sound()
        handle = caller.session.say("and more")
        await caller.hang_up()
        assert handle.done
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.skipif(find_spec("moonshine_voice") is None, reason="the listen extra is not installed")
async def test_real_speech_is_heard_by_real_ears(agent: Agent) -> None:
    """The voice activity model and a recogniser in place of the script: both sides of the call are sound."""
    model = Moonshine(model_folder())

    class Ears:
        async def transcribe(self, samples: np.ndarray) -> str:
            return model.transcribe(samples)

    activity = VoiceActivity()
    async with agent.test(ears=Ears(), activity=activity) as caller:
        await caller.first_sound()
        await caller.wait(0.5)
        await caller.sound(spoken("Please tell me what time it is."))
        assert caller.heard_text == "You said: Please tell me what time it is.."
        (cut,) = caller.barge_ins
        assert cut.stop_s < 0.12
    activity.close()
