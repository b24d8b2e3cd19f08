"""An agent that thinks with any OpenAI-compatible endpoint, and a word about each interruption.

    python examples/llm_agent.py http://127.0.0.1:8080/v1 the-model

The model may ask for the time; while it waits for an answer, what it has said so far is spoken.

The key, if the endpoint wants one, is read from OPENAI_API_KEY.  `session.history` holds what was heard, so after an
interruption the model knows which of its words never arrived.
"""

import sys
from datetime import datetime
from zoneinfo import ZoneInfo

from breeze_rtc import Agent, AgentSession, SpeechHandle, UserTurn
from breeze_rtc.agent.llm import ChatModel

if len(sys.argv) != 3:
    sys.exit("usage: python examples/llm_agent.py BASE_URL MODEL")

agent = Agent()
model = ChatModel(sys.argv[1], sys.argv[2])


@agent.on_enter
async def greet(session: AgentSession):
    yield "Hello! What is on your mind?"


@agent.tool
async def time_in(zone: str) -> str:
    """The time somewhere on earth.

    zone: a name of the tz database, such as Europe/Paris
    """
    return f"{datetime.now(ZoneInfo(zone)):%H:%M on %A}"


@agent.on_user_turn
async def reply(session: AgentSession, turn: UserTurn):
    async for text in model.reply(session.history, session.tools):
        yield text


@agent.on_interrupted
async def note(session: AgentSession, speech: SpeechHandle):
    print(f"heard: {speech.heard_text!r}, not heard: {speech.unheard_text!r}")


agent.run()
