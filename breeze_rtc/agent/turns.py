"""Who has the floor: turn-taking as one table.

Read a row as: in this state, when this happens, do that and go there.  Nothing here waits, listens or speaks; the
session feeds in what happened and carries out what comes back, so every conversation can be replayed as a list of
events.

Two rules the table keeps:
- the user always wins: whatever the agent does, speech onset or typed text takes the floor at once;
- a sound without words gives the floor back: the agent goes on with what was not heard.
"""

from __future__ import annotations

from enum import Enum


class State(Enum):
    """Who has the floor."""

    LISTENING = "listening"
    """Nobody speaks."""
    HEARING = "hearing"
    """The user speaks."""
    READING = "reading"
    """The user has stopped; what was said is being turned into text."""
    THINKING = "thinking"
    """The agent has a turn and has not made a sound yet."""
    SPEAKING = "speaking"
    """The agent speaks, or is about to: sound is on its way to the listener."""


class Event(Enum):
    """What can happen to a call's floor."""

    ONSET = "the user has begun to speak"
    PAUSE = "the user has been silent long enough"
    WORDS = "the user's speech was read"
    NO_WORDS = "there were no words in it"
    TYPED = "the user sent text"
    STOP = "the user, or the program, asked for silence"
    SPEECH = "the agent's first words of a speech are there"
    DONE = "all the agent had to say was heard"


class Action(Enum):
    """What the session must do, in the order given."""

    INTERRUPT = "silence the agent now and cut its transcript"
    READ = "turn the user's speech into text"
    ANSWER = "give the turn to the agent"
    FORGET = "drop the sound of the turn that is being heard"
    RESUME = "say again what the interruption left unheard"


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
    (S.READING, E.NO_WORDS): (S.LISTENING, (A.RESUME,)),
    (S.READING, E.TYPED): (S.THINKING, (A.FORGET, A.ANSWER)),
    (S.THINKING, E.ONSET): (S.HEARING, (A.INTERRUPT,)),
    (S.THINKING, E.TYPED): (S.THINKING, (A.INTERRUPT, A.ANSWER)),
    (S.THINKING, E.STOP): (S.LISTENING, (A.INTERRUPT,)),
    (S.THINKING, E.SPEECH): (S.SPEAKING, ()),
    (S.THINKING, E.DONE): (S.LISTENING, ()),
    (S.SPEAKING, E.ONSET): (S.HEARING, (A.INTERRUPT,)),
    (S.SPEAKING, E.TYPED): (S.THINKING, (A.INTERRUPT, A.ANSWER)),
    (S.SPEAKING, E.STOP): (S.LISTENING, (A.INTERRUPT,)),
    (S.SPEAKING, E.DONE): (S.LISTENING, ()),
}
"""Every pair that is not a row changes nothing: a second onset, a pause nobody waits for, words that came too late."""


def turn(state: State, event: Event) -> tuple[State, tuple[Action, ...]]:
    """The state after `event`, and what to do on the way there."""
    return TABLE.get((state, event), (state, ()))


def agent_may_speak(state: State) -> bool:
    """A speech that is ready waits while the user has the floor."""
    return state not in (State.HEARING, State.READING)
