"""The agent that needs no key: it greets, answers a few simple things, and otherwise says back what it heard.

Its sentences are short and of plain words: they are spoken by a very small voice.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable
from datetime import datetime

from breeze_rtc.agent.session import AgentSession, Callbacks, UserTurn

GREETING = "Hi there! I am a small voice, made on this computer. Say something, and stop me whenever you like."

_MAX_COUNT = 30
_MAX_ECHO_CHARS = 400
_ONES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("", "", "twenty", "thirty", "forty", "fifty")
_JOKES = (
    "Why did the robot go on a holiday? It had to recharge.",
    "Why was the clock so quiet? It had nothing to say at the time.",
    "What do you call a dog that does magic? A labra cadabra dor.",
)


def agent(*, voice: str | None = None, now: Callable[[], datetime] = datetime.now) -> Callbacks:
    """The callbacks of one parrot; `now` tells it the local time of day."""

    async def greet(session: AgentSession) -> AsyncGenerator[str, None]:
        yield GREETING

    async def reply(session: AgentSession, turn: UserTurn) -> AsyncGenerator[str, None]:
        if not turn.text:
            yield "I can hear you, but I can not understand speech here. Please write to me instead."
            return
        yield answer(turn.text, now(), turns=sum(message.role == "user" for message in session.history))
        if is_goodbye(turn.text):
            await session.close()

    return Callbacks(on_enter=greet, on_user_turn=reply, voice=voice)


def answer(text: str, now: datetime, turns: int = 1) -> str:
    """What the parrot says to `text`, the call's user turn number `turns`."""
    words = _words(text)
    for pattern, reply in _ANSWERS:
        if match := re.search(pattern, words):
            return reply(match, now, turns)
    if len(text) > _MAX_ECHO_CHARS:
        return f"That was a lot of text. It began like this: {_start(text)}"
    return f"You said: {text.strip()}"


def is_goodbye(text: str) -> bool:
    """The user wants to end the call."""
    return re.search(_GOODBYE, _words(text)) is not None


def number(value: int) -> str:
    """0 to 59 in words."""
    if value < 20:
        return _ONES[value]
    return _TENS[value // 10] + (f" {_ONES[value % 10]}" if value % 10 else "")


def time_of_day(now: datetime) -> str:
    """As a person would say it: "half past three in the afternoon"."""
    hour, minute = now.hour, now.minute
    part = (
        "at night"
        if hour < 5
        else "in the morning"
        if hour < 12
        else "in the afternoon"
        if hour < 18
        else "in the evening"
    )
    name = number(hour % 12 or 12)
    if minute == 0:
        return f"{name} o'clock {part}"
    if minute == 30:
        return f"half past {name} {part}"
    if minute < 30:
        return f"{_minutes(minute)} past {name} {part}"
    return f"{_minutes(60 - minute)} to {number((hour + 1) % 12 or 12)} {part}"


def date(now: datetime) -> str:
    """ "Sunday, November the twenty ninth"."""
    return f"{now:%A}, {now:%B} the {_ordinal(now.day)}"


def _minutes(minutes: int) -> str:
    if minutes == 15:
        return "a quarter"
    return f"{number(minutes)} minute{'s' if minutes > 1 else ''}"


def _ordinal(day: int) -> str:
    special = {1: "first", 2: "second", 3: "third", 5: "fifth", 8: "eighth", 9: "ninth", 12: "twelfth", 20: "twentieth"}
    if day in special:
        return special[day]
    if day == 30:
        return "thirtieth"
    if day > 20:
        return f"{_TENS[day // 10]} {_ordinal(day % 10)}"
    return number(day) + "th"


def _words(text: str) -> str:
    """Lower-case words with one space on each side, so that patterns match whole words."""
    return " " + " ".join(re.findall(r"[a-z0-9']+", text.lower().replace("’", "'"))) + " "


def _start(text: str) -> str:
    return text[:120].rsplit(" ", 1)[0].strip() + "."


def _count(match: re.Match[str], now: datetime, turns: int) -> str:
    said = match.group(1) or "ten"
    limit = int(said) if said.isdigit() else (_ONES.index(said) if said in _ONES else 10)
    return ", ".join(number(value) for value in range(1, max(1, min(limit, _MAX_COUNT)) + 1)) + "."


_GOODBYE = r" (good ?bye|bye|bye bye|see you|hang up|that is all|that's all) "

_Reply = Callable[[re.Match[str], datetime, int], str]
_ANSWERS: tuple[tuple[str, _Reply], ...] = (
    (_GOODBYE, lambda match, now, turns: "Goodbye! It was nice to talk to you."),
    (r" (your name|who are you|what are you) ", lambda match, now, turns: "My name is Nano. I am a very small voice."),
    (r" my name is (\w+) ", lambda match, now, turns: f"Nice to meet you, {match.group(1).capitalize()}."),
    (r" (what time|the time|what's the time) ", lambda match, now, turns: f"It is {time_of_day(now)}."),
    (
        r" (what day|the date|what date|today's date|day is it) ",
        lambda match, now, turns: f"Today is {date(now)}.",
    ),
    (r" joke ", lambda match, now, turns: _JOKES[turns % len(_JOKES)]),
    (r" count (?:up )?(?:to )?(\w+)?", _count),
    (
        r" how (do|does) (you|this|it) work ",
        lambda match, now, turns: (
            "Your words come to me as text. I make the sound in small pieces, just in time. "
            "Your browser tells me what you have really heard, so I know when to make the next piece."
        ),
    ),
    (
        r" (help|what can you do|what can i say) ",
        lambda match, now, turns: (
            "Ask me for the time, the date, or a joke. Ask me to count. Or just talk, and I say it back."
        ),
    ),
    (
        r" (long story|tell me a story|story) ",
        lambda match, now, turns: (
            "Once there was a small boat on a wide sea. It had one sail and one old sailor. "
            "Every night the sailor looked at the stars and told the boat a story. "
            "One night the wind stopped, and the boat told a story back. "
            "It was a story about the land, and the trees it had been, before it was a boat. "
            "In the morning the wind came home, and they sailed on."
        ),
    ),
    (r" (thanks|thank you) ", lambda match, now, turns: "You are welcome."),
    (r" how are you ", lambda match, now, turns: "I am well, thank you. And how are you?"),
    (r"^ (hi|hello|hey)( there)? $", lambda match, now, turns: "Hello! What would you like to talk about?"),
)
