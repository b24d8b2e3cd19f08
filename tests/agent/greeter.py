"""An agent for tests of lines: it greets, answers nothing, and keeps what happened."""

from __future__ import annotations

from collections.abc import AsyncIterator

from breeze_rtc.agent.session import AgentSession, Callbacks, SpeechHandle, UserTurn


class Greeter:
    """`callbacks` are what a server takes."""

    def __init__(self, greeting: str = "one two three") -> None:
        self.greeting = greeting
        self.sessions: list[AgentSession] = []
        self.cut: list[SpeechHandle] = []
        self.turns: list[UserTurn] = []
        self.keys: list[str] = []

    @property
    def callbacks(self) -> Callbacks:
        async def greet(session: AgentSession) -> AsyncIterator[str]:
            self.sessions.append(session)
            yield self.greeting

        async def keep_turn(session: AgentSession, turn: UserTurn) -> None:
            self.turns.append(turn)

        async def keep_cut(session: AgentSession, speech: SpeechHandle) -> None:
            self.cut.append(speech)

        async def keep_key(session: AgentSession, digit: str) -> None:
            self.keys.append(digit)

        return Callbacks(on_enter=greet, on_user_turn=keep_turn, on_interrupted=keep_cut, on_dtmf=keep_key)

    @property
    def heard(self) -> list[str]:
        """Of each text that the agent said, as much as was heard."""
        return [message.text for session in self.sessions for message in session.history if message.role == "assistant"]
