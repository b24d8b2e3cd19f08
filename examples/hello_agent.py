"""An agent that says back what it hears.  Run it, open the address it prints, and interrupt it."""

from breeze_rtc import Agent, AgentSession, UserTurn

agent = Agent()


@agent.on_enter
async def greet(session: AgentSession):
    yield "Hi! Talk to me, and interrupt me whenever you like."


@agent.on_user_turn
async def reply(session: AgentSession, turn: UserTurn):
    yield f"You said: {turn.text}"


if __name__ == "__main__":
    agent.run()
