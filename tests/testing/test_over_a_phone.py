"""What the history says was heard is what came out of a telephone: a real socket, marks, real time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from barge_ins import STORY, moments, tell, words_off
from carrier_line import CarrierLine
from page import serving, until
from websockets.asyncio.client import connect

from breeze_rtc.agent.session import AgentSession, Callbacks
from breeze_rtc.server.phone import Phone
from breeze_rtc.testing import Recording, ToneVoice

CUTS = 8


async def cuts(words_per_minute: int, *, has_underrun: bool) -> list[int]:
    """Words off at each cut of one call; the carrier plays 8 kHz mu-law and knows nothing of words."""
    voice = ToneVoice(words_per_minute=words_per_minute, stalls={4: 2.0} if has_underrun else {})
    sessions: list[AgentSession] = []

    async def answer(session: AgentSession) -> AsyncGenerator[str, None]:
        sessions.append(session)
        yield ""

    callbacks = Callbacks(on_enter=answer, on_user_turn=tell)
    phone = Phone("https://agent.example.org", key="secret")
    claims: dict[int, str] = {}
    async with (
        serving(callbacks, engine=voice, phone=phone) as hall,
        connect(hall.http.replace("http", "ws") + "/phone/secret/twilio") as socket,
    ):
        line = CarrierLine(socket)
        await line.start()
        await until(lambda: sessions)
        (session,) = sessions
        for moment_s in moments(seed=words_per_minute, count=CUTS, longest_s=4.5):
            before = sum(line.heard_is_speech)
            session.type("go")
            await until(lambda before=before: sum(line.heard_is_speech) > before)
            await asyncio.sleep(moment_s)
            session.interrupt()
            await asyncio.sleep(0.8)
            last = session.history[-1]
            claims[voice.last_stream] = last.text if last.role == "assistant" else ""
        ear = Recording(line.samples(), 8_000, voice.words, 0.0)
        await line.close()
    assert all(STORY.startswith(claim) for claim in claims.values())
    return [
        words_off(claim, [heard for heard in ear.words if heard.word.stream == stream])
        for stream, claim in claims.items()
    ]


async def test_words_at_random_cuts_are_within_one_over_a_phone() -> None:
    """At three speaking rates, with and without a hole of 1.5 s: six calls at once.

    Reproduction 6 (livekit#2201): as over WebRTC, so by telephone.
    """
    rates = [(rate, has_underrun) for rate in (120, 170, 250) for has_underrun in (False, True)]
    results = await asyncio.gather(*(cuts(rate, has_underrun=has_underrun) for rate, has_underrun in rates))
    for rate, off in zip(rates, results, strict=True):
        print(rate, off)
        assert len(off) == CUTS
        assert max(off) <= 1, (rate, off)
