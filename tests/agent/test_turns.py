"""The table of turn-taking."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breeze_rtc.agent.turns import TABLE, Action, Event, State, TurnTaking, agent_may_speak, turn


@pytest.mark.parametrize("state", [State.THINKING, State.SPEAKING])
def test_the_user_always_wins(state: State) -> None:
    """Whatever the agent does, text and the button interrupt it first of all, and a sound silences it."""
    assert turn(state, Event.TYPED)[1][0] is Action.INTERRUPT
    assert turn(state, Event.STOP)[1][0] is Action.INTERRUPT
    assert turn(state, Event.ONSET)[1][0] is Action.HOLD


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
    """Sound without words resumes what it held."""
    for events in ([Event.PAUSE, Event.NO_WORDS], [Event.NO_WORDS], [Event.PAUSE, Event.ONSET, Event.NO_WORDS]):
        state, actions = turn(State.SPEAKING, Event.ONSET)
        assert actions == (Action.HOLD,)
        for event in events:
            state, actions = turn(state, event)
        assert (state, actions) == (State.THINKING, (Action.RESUME,))


@pytest.mark.parametrize("state", [State.OVERLAP, State.DOUBT])
@pytest.mark.parametrize("event", Event)
def test_a_held_agent_is_let_go_or_silenced(state: State, event: Event) -> None:
    """No way leads out of a hold to a state in which the agent may speak without one of the two."""
    after, actions = turn(state, event)
    if agent_may_speak(after):
        assert Action.RESUME in actions or Action.INTERRUPT in actions


def test_words_that_come_too_late_change_nothing() -> None:
    """A reading that ends after the user went on, or when nobody speaks any more, is no event."""
    for state in (State.LISTENING, State.HEARING):
        assert turn(state, Event.WORDS) == (state, ())


@pytest.mark.parametrize(
    ("text", "interrupts"),
    [
        ("Uh-huh.", False),
        ("Mm-hmm, right.", False),
        ("OK", False),
        ("Okay, stop.", True),
        ("no", True),
        ("ja", True),
        ("", False),
        ("...", False),
        ("好", True),
    ],
)
def test_signs_to_go_on_are_told_from_words(text: str, interrupts: bool) -> None:
    """Alone they let the agent go on; with anything else, in any language, they do not."""
    assert TurnTaking().interrupts(text) == interrupts


def test_an_author_may_ask_for_more_words_and_name_other_signs() -> None:
    manners = TurnTaking(min_interruption_words=2, backchannels=frozenset({"genau"}))
    assert not manners.interrupts("stop")
    assert not manners.interrupts("genau genau")
    assert manners.interrupts("yeah yeah")


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
    assert [state for state in State if not agent_may_speak(state)] == [
        State.HEARING,
        State.READING,
        State.OVERLAP,
        State.DOUBT,
    ]
    assert all(state in State and event in Event for state, event in TABLE)
