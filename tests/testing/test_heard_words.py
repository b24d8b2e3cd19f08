"""What the history says was heard is what was heard."""

from __future__ import annotations

import pytest
from barge_ins import STORYTELLER, moments, words_off

from breeze_rtc.testing import Caller, Network, ToneVoice, run

QUIET, ROUGH = Network(), Network(jitter_s=0.03, loss=0.03)


@pytest.mark.parametrize("has_underrun", [False, True], ids=["whole", "underrun"])
@pytest.mark.parametrize(
    ("words_per_minute", "network"),
    [(120, QUIET), (170, QUIET), (250, QUIET), (170, ROUGH)],
    ids=["120", "170", "250", "170 rough"],
)
def test_words_at_twenty_random_cuts_are_within_one(
    words_per_minute: int, has_underrun: bool, network: Network
) -> None:
    """At any speaking rate, across a hole of 1.5 s and while speech is still being made, also on a poor network."""
    voice = ToneVoice(words_per_minute=words_per_minute, stalls={5: 2.0} if has_underrun else {})
    off: list[int] = []
    gaps: list[float] = []
    claims: dict[int, str] = {}

    async def call() -> None:
        async with Caller(STORYTELLER, voice=voice, network=network) as caller:
            for moment_s in moments(seed=words_per_minute, count=20, longest_s=7.0):
                await caller.type("go", waits=False)
                await caller.first_sound()
                await caller.wait(moment_s)
                caller.interrupt()
                await caller.wait(0.6)
                last = caller.session.history[-1]
                claims[voice.last_stream] = last.text if last.role == "assistant" else ""
            heard = caller.ear.words
            for stream, claim in claims.items():
                off.append(words_off(claim, [word for word in heard if word.word.stream == stream]))
            gaps.extend(caller.ear.gaps_s)

    run(call(), within_s=600)
    assert max(off) <= 1, off
    assert len(off) == 20
    long_gaps = [gap for gap in gaps if gap > 1.0]
    assert len(long_gaps) >= (5 if has_underrun else 0)
    print(long_gaps)
    # A hole is the stall less what was in hand: a quarter of a second where the machine was not known to stumble, half
    # a second from then on, a packet more or less where so many stalls have made it a slow one.
    assert all(1.4 < gap < 1.6 for gap in long_gaps[1:]), long_gaps
    assert all(1.4 < gap < 1.85 for gap in long_gaps[:1]), long_gaps
