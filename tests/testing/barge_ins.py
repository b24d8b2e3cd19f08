"""Interruptions at random moments, and how far the words in the history are from those in the recording."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Sequence

from breeze_rtc.agent.session import AgentSession, Callbacks, UserTurn
from breeze_rtc.testing import HeardWord

STORY = (
    "Once there was a small boat on a wide sea. It had one sail and one old sailor. Every night the sailor looked at "
    "the stars and told the boat a story, and the boat listened as well as it could. One night the wind stopped, and "
    "the boat told a story back. It was a story about the land, and the trees it had been, before it was a boat."
)


async def tell(session: AgentSession, turn: UserTurn) -> AsyncGenerator[str, None]:
    """Word by word, as a language model would."""
    for word in STORY.split(" "):
        yield word + " "


STORYTELLER = Callbacks(on_user_turn=tell)


def moments(seed: int, count: int, longest_s: float) -> list[float]:
    """When to interrupt, in seconds after the first sound."""
    generator = random.Random(seed)
    return [generator.uniform(0.05, longest_s) for _ in range(count)]


def words_off(claim: str, heard: Sequence[HeardWord]) -> int:
    """By how many words a claim of what was heard says something else than the recording of its stream.

    A word of which a part was heard may stand in it or not.
    """
    # A word that the network garbled was heard if one after it was.
    begun = heard[-1].word.index + 1 if heard else 0
    whole = begun if not heard or heard[-1].is_whole else begun - 1
    claimed = len(claim.split())
    assert STORY.startswith(claim), "what was heard begins as what was said"
    return max(0, claimed - begun, whole - claimed)
