"""An agent that answers the telephone: the same one as on the page, with keys.

    python examples/phone_agent.py https://agent.example.org

prints what to paste at Twilio, Telnyx, Plivo, Vonage or Asterisk; docs/phone.md has each in five minutes.

    breeze-rtc call --carrier twilio --to NUMBER --from NUMBER --phone-url https://HOST examples/phone_agent.py

lets it call somebody.
"""

import os
import secrets
import sys

from breeze_rtc import Agent, AgentSession, SpeechHandle, UserTurn
from breeze_rtc.errors import CarrierRefused, LineCannot
from breeze_rtc.server.carrier_api import carrier_apis
from breeze_rtc.server.phone import Phone

agent = Agent()


@agent.on_enter
async def greet(session: AgentSession):
    yield "Hello, this is Breeze. Talk to me, or press a key."


@agent.on_user_turn
async def reply(session: AgentSession, turn: UserTurn):
    yield f"You said: {turn.text}"


@agent.on_dtmf
async def key(session: AgentSession, digit: str):
    if digit == "#":
        session.interrupt()
        await session.say("Good bye.")
        await session.close()
    elif digit == "0" and (number := os.environ.get("OPERATOR")):
        session.interrupt()
        await session.say("I put you through.")
        try:
            await session.transfer(number)
        except (LineCannot, CarrierRefused) as error:
            print(error)
            session.say("That did not work. I am still here.")
    else:
        session.say(f"You pressed {digit}.")


@agent.on_interrupted
async def note(session: AgentSession, speech: SpeechHandle):
    print(f"{session.metadata}: heard {speech.heard_text!r}, not heard {speech.unheard_text!r}")


if __name__ == "__main__":
    public_url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000"
    phone = Phone(
        public_url,
        # What is pasted stays right over a restart if the key does.
        key=os.environ.get("BREEZE_PHONE_KEY") or secrets.token_urlsafe(12),
        twilio_token=os.environ.get("TWILIO_AUTH_TOKEN"),
        audio_socket=("127.0.0.1", 9092),
        apis=carrier_apis(os.environ),
    )
    print(phone.instructions(8000))
    agent.run(phone=phone)
