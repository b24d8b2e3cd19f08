"""Words and sounds that fill a silence, on the virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from fake_call import RATE, FakeCall, FakeSink, FakeVoice, now, run

from breeze_rtc.agent.session import AgentSession, Callbacks, UserTurn
from breeze_rtc.agent.waiting import Waiting
from breeze_rtc.media.libopus import Decoder
from breeze_rtc.playback import SpeechPacket


class Sink(FakeSink):
    """Remembers the packets of sounds, and when they were to be heard."""

    def __init__(self) -> None:
        super().__init__(0.1)
        self.sounds: dict[int, list[bytes]] = {}

    def write(self, stream: int, packets: tuple[SpeechPacket, ...]) -> None:
        super().write(stream, packets)
        if stream < 0:
            self.sounds.setdefault(stream, []).extend(packet.payload for packet in packets)


async def reply(session: AgentSession, turn: UserTurn) -> AsyncGenerator[str, None]:
    await asyncio.sleep(float(turn.text))
    yield "here it is"


def waiting(waiting: Waiting, act: Callable[[AgentSession, Sink], Coroutine[Any, Any, None]]) -> AgentSession:
    sessions = []

    async def play() -> None:
        call = FakeCall()
        call.sink = Sink()
        session = AgentSession(Callbacks(on_user_turn=reply, waiting=waiting), call=call, voice=FakeVoice())
        sessions.append(session)
        async with asyncio.TaskGroup() as group:
            group.create_task(session.run())
            await asyncio.sleep(0)
            await act(session, call.sink)
            call.closed.set()

    run(play())
    return sessions[0]


def said(session: AgentSession) -> list[str]:
    return [message.text for message in session.history if message.role == "assistant"]


def test_a_slow_answer_is_preceded_by_a_filler() -> None:
    """One a turn, round and round, and none where the answer comes in time."""

    async def act(session: AgentSession, sink: Sink) -> None:
        for seconds in ("2", "0.5", "2", "2"):
            session.type(seconds)
            await asyncio.sleep(6)

    words = ("let me see", "one moment")
    answer = "here it is"
    session = waiting(Waiting(1.0, words), act)
    assert said(session) == ["let me see", answer, answer, "one moment", answer, "let me see", answer]


@pytest.mark.parametrize("seconds", ["1.02", "1.3"])
def test_a_filler_is_spoken_whole_or_not_at_all(seconds: str) -> None:
    """Not yet audible when the answer is ready, it is dropped; begun, it is heard to its end, and the answer follows
    without a hole."""

    async def act(session: AgentSession, sink: Sink) -> None:
        session.type(seconds)
        await asyncio.sleep(6)
        if seconds == "1.02":
            assert sink.heard(1, now()) == 0
        else:
            assert len(sink.spoken(1)) == 1
            assert sink.spoken(2)[0][0] - sink.spoken(1)[0][1] < 0.021

    session = waiting(Waiting(1.0, ("let me see",)), act)
    assert said(session) == (["here it is"] if seconds == "1.02" else ["let me see", "here it is"])
    assert all(not message.interrupted for message in session.history)


def test_a_sound_goes_on_until_the_answer_begins_and_does_not_click() -> None:
    """Through the real codec: loud from beginning to end, and at both ends no step larger than its own."""
    tone = (8_000 * np.sin(2 * np.pi * 300 * np.arange(RATE // 3) / RATE)).astype(np.int16)

    async def act(session: AgentSession, sink: Sink) -> None:
        session.type("3")
        await asyncio.sleep(6)
        (sound,) = sink.spoken(-1)
        assert sound[0] == pytest.approx(1.1, abs=0.03)
        assert sound[1] == pytest.approx(3.1, abs=0.16)
        assert sink.spoken(1)[0][0] - sound[1] < 0.1
        decoder = Decoder(RATE)
        heard = np.concatenate([decoder.decode(payload) for payload in sink.sounds[-1]])
        steps = np.abs(np.diff(heard))
        inside = steps[RATE // 5 : -RATE // 5].max()
        assert np.abs(heard[RATE // 5 : -RATE // 5]).max() > 0.2
        assert max(abs(heard[0]), steps[: RATE // 50].max(), steps[-RATE // 25 :].max()) <= inside
        assert np.abs(heard[-60:]).max() < 0.02

    waiting(Waiting(1.0, sound=tone), act)


def test_a_user_who_goes_on_ends_the_sound() -> None:
    async def act(session: AgentSession, sink: Sink) -> None:
        session.type("30")
        await asyncio.sleep(3)
        session.interrupt()
        await asyncio.sleep(1)
        assert sink.spoken(-1)[-1][1] < 3.0 + 0.1 + 0.16
        assert -1 in sink.ended

    waiting(Waiting(1.0, sound=np.full(1_000, 3_000, np.int16)), act)
