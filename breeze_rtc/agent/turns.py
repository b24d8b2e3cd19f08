"""Who has the floor: turn-taking as one table, and what its author may tune.

Read a row as: in this state, when this happens, do that and go there.  Nothing here waits, listens or speaks; the
session feeds in what happened and carries out what comes back, so every conversation can be replayed as a list of
events.

Three rules the table keeps:
- the user always wins: whatever the agent does, speech onset or typed text silences it at once;
- a sound is no interruption until it proves to be words: until then the agent only holds its breath, and goes on where
  the ear was;
- what ends without words gives the floor back.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from breeze_rtc.agent.endpointing import EndOfTurn

BACKCHANNELS = frozenset(
    (
        *("uh", "huh", "uhhuh", "um", "mm", "mmm", "hm", "hmm", "mhm", "mmhm", "mmhmm", "ah", "aha", "oh", "wow"),
        *("yeah", "yep", "yup", "right", "okay", "ok", "sure"),
    )
)
"""Words that tell a speaker to go on.  Alone, and over the agent's speech, they do not interrupt it."""


@dataclass(frozen=True, slots=True)
class TurnTaking:
    """How an agent shares the floor.  The names are those of other frameworks, with the unit behind them."""

    min_endpointing_delay_s: float = 0.6
    """Silence that ends the user's turn when it sounds finished."""
    max_endpointing_delay_s: float = 2.5
    """Silence that ends it when it does not."""
    end_of_turn: EndOfTurn | None = None
    """Listens to how a turn was said, such as `endpointing.SmartTurn()`; one serves all calls."""
    onset_s: float = 0.16
    """Voiced sound that counts as the user beginning to speak: a shorter noise does not even hold the agent."""
    false_interruption_timeout_s: float | None = 2.0
    """The agent goes on when no words have come so long after the sound that made it hold.  None: it never holds, every
    onset interrupts."""
    min_interruption_words: int = 1
    """Fewer words than that, spoken over the agent, do not interrupt it."""
    min_interruption_duration_s: float = 0.5
    """The same in voiced sound, where nothing here can understand words."""
    backchannels: frozenset[str] = BACKCHANNELS
    """Lower-case words that do not interrupt when nothing else is said."""
    preemptive_generation: bool = False
    """Ask the agent for its answer while the user's silence may still be a pause; what the user's going on makes
    wrong is dropped before it has made a sound, but its callback has run."""

    def interrupts(self, text: str) -> bool:
        """Whether `text`, said over the agent, is more than a sign to go on."""
        words = [word for word in re.split(r"[\W_]+", text.lower()) if word]
        return len(words) >= self.min_interruption_words and any(word not in self.backchannels for word in words)


class State(Enum):
    """Who has the floor."""

    LISTENING = "listening"
    """Nobody speaks."""
    HEARING = "hearing"
    """The user speaks."""
    READING = "reading"
    """The user has stopped; what was said is being turned into text."""
    OVERLAP = "overlap"
    """The user makes a sound while the agent has the floor; the agent holds its breath."""
    DOUBT = "doubt"
    """That sound has stopped, and whether it was words is being found out; the agent still holds."""
    THINKING = "thinking"
    """The agent has a turn and has not made a sound yet."""
    SPEAKING = "speaking"
    """The agent speaks, or is about to: sound is on its way to the listener."""


class Event(Enum):
    """What can happen to a call's floor."""

    ONSET = "the user has begun to speak"
    PAUSE = "the user has been silent long enough"
    WORDS = "the user's speech was read"
    SOME_WORDS = "words were understood while the user still speaks"
    NO_WORDS = "there were no words in it, or none that interrupt"
    TYPED = "the user sent text"
    STOP = "the user, or the program, asked for silence"
    SPEECH = "the agent's first words of a speech are there"
    DONE = "all the agent had to say was heard"


class Action(Enum):
    """What the session must do, in the order given."""

    HOLD = "silence the agent now and keep all it was about to say"
    INTERRUPT = "silence the agent now and cut its transcript"
    READ = "turn the user's speech into text"
    ANSWER = "give the turn to the agent"
    FORGET = "drop the sound of the turn that is being heard"
    RESUME = "let the agent go on from the first sample that was not heard"


S, E, A = State, Event, Action

TABLE: dict[tuple[State, Event], tuple[State, tuple[Action, ...]]] = {
    (S.LISTENING, E.ONSET): (S.HEARING, ()),
    (S.LISTENING, E.TYPED): (S.THINKING, (A.ANSWER,)),
    (S.LISTENING, E.SPEECH): (S.SPEAKING, ()),
    # Asked for silence while no speech has begun: one may be waiting for its words, or for the floor.
    (S.LISTENING, E.STOP): (S.LISTENING, (A.INTERRUPT,)),
    (S.HEARING, E.STOP): (S.HEARING, (A.INTERRUPT,)),
    (S.READING, E.STOP): (S.READING, (A.INTERRUPT,)),
    (S.HEARING, E.PAUSE): (S.READING, (A.READ,)),
    (S.HEARING, E.TYPED): (S.THINKING, (A.FORGET, A.ANSWER)),
    # The user went on before the last words were read: they belong to the same turn, and the agent must not answer yet.
    (S.READING, E.ONSET): (S.HEARING, ()),
    (S.READING, E.WORDS): (S.THINKING, (A.ANSWER,)),
    (S.READING, E.NO_WORDS): (S.LISTENING, ()),
    (S.READING, E.TYPED): (S.THINKING, (A.FORGET, A.ANSWER)),
    # A sound over the agent, until it is known what it was.
    (S.THINKING, E.ONSET): (S.OVERLAP, (A.HOLD,)),
    (S.SPEAKING, E.ONSET): (S.OVERLAP, (A.HOLD,)),
    (S.OVERLAP, E.PAUSE): (S.DOUBT, (A.READ,)),
    (S.OVERLAP, E.SOME_WORDS): (S.HEARING, (A.INTERRUPT,)),
    (S.OVERLAP, E.NO_WORDS): (S.THINKING, (A.RESUME,)),
    (S.OVERLAP, E.TYPED): (S.THINKING, (A.FORGET, A.INTERRUPT, A.ANSWER)),
    (S.OVERLAP, E.STOP): (S.HEARING, (A.INTERRUPT,)),
    (S.OVERLAP, E.DONE): (S.HEARING, ()),
    (S.DOUBT, E.ONSET): (S.OVERLAP, ()),
    (S.DOUBT, E.WORDS): (S.THINKING, (A.INTERRUPT, A.ANSWER)),
    (S.DOUBT, E.NO_WORDS): (S.THINKING, (A.RESUME,)),
    (S.DOUBT, E.TYPED): (S.THINKING, (A.FORGET, A.INTERRUPT, A.ANSWER)),
    (S.DOUBT, E.STOP): (S.READING, (A.INTERRUPT,)),
    (S.DOUBT, E.DONE): (S.READING, ()),
    # The agent went on, and words came of it after all: the reading was slow, or the user kept speaking.
    (S.THINKING, E.SOME_WORDS): (S.HEARING, (A.INTERRUPT,)),
    (S.SPEAKING, E.SOME_WORDS): (S.HEARING, (A.INTERRUPT,)),
    (S.THINKING, E.WORDS): (S.THINKING, (A.INTERRUPT, A.ANSWER)),
    (S.SPEAKING, E.WORDS): (S.THINKING, (A.INTERRUPT, A.ANSWER)),
    (S.THINKING, E.TYPED): (S.THINKING, (A.INTERRUPT, A.ANSWER)),
    (S.THINKING, E.STOP): (S.LISTENING, (A.INTERRUPT,)),
    (S.THINKING, E.SPEECH): (S.SPEAKING, ()),
    (S.THINKING, E.DONE): (S.LISTENING, ()),
    (S.SPEAKING, E.TYPED): (S.THINKING, (A.INTERRUPT, A.ANSWER)),
    (S.SPEAKING, E.STOP): (S.LISTENING, (A.INTERRUPT,)),
    (S.SPEAKING, E.DONE): (S.LISTENING, ()),
}
"""Every pair that is not a row changes nothing: a second onset, a pause nobody waits for."""


def turn(state: State, event: Event) -> tuple[State, tuple[Action, ...]]:
    """The state after `event`, and what to do on the way there."""
    return TABLE.get((state, event), (state, ()))


def agent_may_speak(state: State) -> bool:
    """A speech that is ready waits while the user has the floor, or may have it."""
    return state not in (State.HEARING, State.READING, State.OVERLAP, State.DOUBT)
