"""Real-time voice agents in Python, with the text-to-speech engine inside.

from breeze_rtc import Agent

agent = Agent()

@agent.on_user_turn
async def reply(session, turn):
    yield f"You said: {turn.text}"

agent.run()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from breeze_rtc.agent.session import AgentSession, Recovery, SpeechHandle, UserTurn
    from breeze_rtc.agent.turns import TurnTaking
    from breeze_rtc.agent.waiting import Waiting
    from breeze_rtc.runtime.engine import Engine
    from breeze_rtc.server.agent import Agent

__all__ = ["Agent", "AgentSession", "Engine", "Recovery", "SpeechHandle", "TurnTaking", "UserTurn", "Waiting"]
__version__ = "0.1.0"

_HOMES = {
    "Agent": "breeze_rtc.server.agent",
    "AgentSession": "breeze_rtc.agent.session",
    "Engine": "breeze_rtc.runtime.engine",
    "Recovery": "breeze_rtc.agent.session",
    "SpeechHandle": "breeze_rtc.agent.session",
    "TurnTaking": "breeze_rtc.agent.turns",
    "UserTurn": "breeze_rtc.agent.session",
    "Waiting": "breeze_rtc.agent.waiting",
}


def __getattr__(name: str) -> Any:
    # Looked up when asked for: the engine's process imports this package too, and needs no web server.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
