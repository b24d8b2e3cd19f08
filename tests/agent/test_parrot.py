"""What the agent without a key answers."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta

import pytest
from fake_call import FakeCall, FakeVoice, run

from breeze_rtc.agent import parrot
from breeze_rtc.agent.parrot import answer, date, is_goodbye, time_of_day
from breeze_rtc.agent.session import AgentSession

NOW = datetime(2026, 11, 29, 15, 45)


@pytest.mark.parametrize(
    ("text", "reply"),
    [
        ("What time is it?", "It is a quarter to four in the afternoon."),
        ("what's the date today", "Today is Sunday, November the twenty ninth."),
        ("What is your name?", "My name is Nano. I am a very small voice."),
        ("My name is Ada.", "Nice to meet you, Ada."),
        ("Count to five", "one, two, three, four, five."),
        ("count to 1000000", "one, two, three, " + answer("count to 30", NOW).split("three, ", 1)[1]),
        ("Count.", answer("count to ten", NOW)),
        ("Thank you!", "You are welcome."),
        ("Hello", "Hello! What would you like to talk about?"),
        ("Hello, the sky is blue", "You said: Hello, the sky is blue"),
        ("Bye bye", "Goodbye! It was nice to talk to you."),
    ],
)
def test_simple_things_have_an_answer(text: str, reply: str) -> None:
    """By words, whatever the case and punctuation; the rest is said back."""
    assert answer(text, NOW) == reply


def test_jokes_change() -> None:
    """The same question twice is not the same joke."""
    assert answer("tell me a joke", NOW, turns=1) != answer("tell me a joke", NOW, turns=2)


@pytest.mark.parametrize(
    ("hour", "minute", "said"),
    [
        (0, 0, "twelve o'clock at night"),
        (0, 1, "one minute past twelve at night"),
        (9, 30, "half past nine in the morning"),
        (11, 59, "one minute to twelve in the morning"),
        (12, 40, "twenty minutes to one in the afternoon"),
        (23, 15, "a quarter past eleven in the evening"),
    ],
)
def test_the_time_is_said_as_people_say_it(hour: int, minute: int, said: str) -> None:
    """No digits: a small voice reads words best."""
    assert time_of_day(NOW.replace(hour=hour, minute=minute)) == said


def test_every_minute_and_day_has_words() -> None:
    """None raises, none has a digit."""
    for minutes in range(0, 24 * 60):
        assert not any(char.isdigit() for char in time_of_day(datetime(2026, 1, 1) + timedelta(minutes=minutes)))
    days = [date(datetime(2026, 1, 1) + timedelta(days=day)) for day in range(31)]
    assert [day.rsplit(" ", 1)[1] for day in days[:3]] == ["first", "second", "third"]
    assert not any(char.isdigit() for day in days for char in day)


def test_a_long_text_is_not_said_back_whole() -> None:
    """A page of text gets its beginning."""
    assert len(answer("word " * 10_000, NOW)) < 300


def test_goodbye_ends_the_call_after_it_was_heard() -> None:
    """The parrot greets, says goodbye, and hangs up."""
    assert is_goodbye("OK, goodbye!")
    assert not is_goodbye("I will buy it by Monday, see?")

    async def call() -> None:
        end = FakeCall()
        session = AgentSession(parrot.agent(), call=end, voice=FakeVoice())
        task = asyncio.create_task(session.run())
        await asyncio.sleep(2)
        session.type("Goodbye")
        await task
        assert session.history[-1].text == "Goodbye! It was nice to talk to you."
        assert session.history[0].interrupted

    run(call())
