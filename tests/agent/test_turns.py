"""The table of turn-taking."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breeze_rtc.agent.turns import TABLE, Action, Event, State, agent_may_speak, turn


@pytest.mark.parametrize("state", [State.THINKING, State.SPEAKING])
@pytest.mark.parametrize("event", [Event.ONSET, Event.TYPED, Event.STOP])
def test_the_user_always_wins(state: State, event: Event) -> None:
    """Whatever the agent does, voice, text and the button interrupt it first of all."""
    assert turn(state, event)[1][0] is Action.INTERRUPT


@pytest.mark.parametrize("state", State)
def test_typed_text_is_always_answered(state: State) -> None:
    """There is no state in which a typed turn is lost."""
    after, actions = turn(state, Event.TYPED)
    assert after is State.THINKING
    assert actions[-1] is Action.ANSWER


def test_a_spoken_turn_goes_round() -> None:
    """Onset, pause, words, first sound, all heard."""
    state = State.LISTENING
    events = [Event.ONSET, Event.PAUSE, Event.WORDS, Event.SPEECH, Event.DONE]
    seen = []
    for event in events:
        state, actions = turn(state, event)
        seen.append((state, actions))
    assert seen == [
        (State.HEARING, ()),
        (State.READING, (Action.READ,)),
        (State.THINKING, (Action.ANSWER,)),
        (State.SPEAKING, ()),
        (State.LISTENING, ()),
    ]


def test_a_noise_gives_the_floor_back() -> None:
    """Sound without words resumes what it interrupted."""
    state, actions = turn(State.SPEAKING, Event.ONSET)
    assert actions == (Action.INTERRUPT,)
    state, _ = turn(state, Event.PAUSE)
    assert turn(state, Event.NO_WORDS) == (State.LISTENING, (Action.RESUME,))


def test_words_that_come_too_late_change_nothing() -> None:
    """A reading that ends after the user went on, or typed, is no event."""
    for state in (State.LISTENING, State.HEARING, State.THINKING, State.SPEAKING):
        assert turn(state, Event.WORDS) == (state, ())


@given(st.lists(st.sampled_from(Event), max_size=40))
def test_an_agent_that_is_silenced_or_done_never_leaves_the_call_stuck(events: list[Event]) -> None:
    """From anywhere, a pause, missing words and an empty answer lead back to listening."""
    state = State.LISTENING
    for event in events:
        state, _ = turn(state, event)
    for event in (Event.PAUSE, Event.NO_WORDS, Event.DONE):
        state, _ = turn(state, event)
    assert state is State.LISTENING


def test_the_agent_waits_only_while_the_user_has_the_floor() -> None:
    """Speech is held back while the user speaks or is being read, and at no other time."""
    assert [state for state in State if not agent_may_speak(state)] == [State.HEARING, State.READING]
    assert all(state in State and event in Event for state, event in TABLE)
