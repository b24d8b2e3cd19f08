"""Calls that are placed, put through and keyed, by the carriers' own libraries at an office that keeps their rules."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from offices import API_KEY, NUMBER, Office
from page import Hall, serving, until
from pressed_keys import keys_heard
from tone_engine import ToneEngine

from breeze_rtc import Agent
from breeze_rtc.agent.session import AgentSession, Callbacks
from breeze_rtc.errors import BadRequest, CarrierRefused, LineCannot, MissingExtra, NoAnswer
from breeze_rtc.server.agent import read_agent
from breeze_rtc.server.app import listen
from breeze_rtc.server.carrier_api import carrier_api, carrier_apis
from breeze_rtc.server.phone import Phone

CARRIERS = ("twilio", "telnyx", "plivo", "vonage")
TO = "+4930123456"
OTHER = "+4930654321"


class Talk:
    """A server with accounts at an office's carriers, and an agent that does something."""

    def __init__(self, hall: Hall, office: Office, sessions: list[AgentSession]) -> None:
        self.hall = hall
        self.office = office
        self.sessions = sessions

    async def dial(self, kind: str) -> str:
        return await asyncio.wait_for(self.hall.server.dial(kind, TO, caller=NUMBER), 30)


Then = Callable[[AgentSession], Awaitable[None]]


@asynccontextmanager
async def talking(then: Then, *, answers: bool = True) -> AsyncIterator[Talk]:
    """The agent says two words, does `then`, says another and hangs up."""
    sessions: list[AgentSession] = []

    async def greet(session: AgentSession) -> None:
        sessions.append(session)
        await session.say("one two")
        await then(session)
        await session.say("three")
        await session.close()

    address = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{address.getsockname()[1]}"
    async with Office(answers=answers) as office:
        environment = office.environment()
        apis = {kind: carrier_api(kind, environment, base_url=office.base_url(kind)) for kind in CARRIERS}
        phone = Phone(url, key="secret", twilio_token=environment["TWILIO_AUTH_TOKEN"], apis=apis)
        async with serving(Callbacks(on_enter=greet), phone=phone, engine=ToneEngine(), address=address) as hall:
            yield Talk(hall, office, sessions)
            await hall.is_free()


async def nothing(session: AgentSession) -> None:
    pass


@pytest.mark.parametrize("kind", CARRIERS)
async def test_a_telephone_is_called_and_the_agent_talks_to_whoever_answers(kind: str) -> None:
    """The library asks, the office rings, fetches the webhook, streams: the whole greeting is heard, and the call ends
    with the agent's last word.  Who was called is known to the session."""
    async with talking(nothing) as talk:
        assert await talk.dial(kind) == "the agent ended the call"
        await until(lambda: talk.office.line.state == "completed")
        heard = np.abs(np.frombuffer(talk.office.line.heard, "<i2"))
        assert 1.1 <= np.count_nonzero(heard.reshape(-1, 160).max(axis=1) > 1_000) * 0.02 <= 1.3
        metadata = talk.sessions[0].metadata
        assert metadata["carrier"] == kind
        assert metadata["to"].lstrip("+") == TO.lstrip("+")
        assert metadata["from"].lstrip("+") == NUMBER.lstrip("+")
        assert talk.office.line.to == TO


@pytest.mark.parametrize("kind", ["twilio", "telnyx", "vonage"])
async def test_a_telephone_that_is_busy_is_no_answer(kind: str) -> None:
    async with talking(nothing, answers=False) as talk:
        with pytest.raises(NoAnswer, match=r"\+4930123456 did not answer"):
            await talk.dial(kind)
        assert not talk.sessions


@pytest.mark.parametrize("kind", CARRIERS)
async def test_a_caller_is_put_through_to_a_number_and_the_agent_leaves(kind: str) -> None:
    """The carrier is told by REST, nothing is said after it, and nobody hangs the caller up."""

    async def transfer(session: AgentSession) -> None:
        await session.transfer(OTHER)

    async with talking(transfer) as talk:
        assert await talk.dial(kind) == "the caller was put through"
        line = talk.office.line
        assert line.put_through == OTHER
        await until(lambda: bool(line.close_reason))
        assert line.state == "in-progress"
        loud = np.abs(np.frombuffer(line.heard, "<i2")).reshape(-1, 160).max(axis=1) > 1_000
        assert np.count_nonzero(loud) * 0.02 < 0.9
        assert not any("hangup" in path or method == "DELETE" for method, path in line.asked)


@pytest.mark.parametrize("kind", CARRIERS)
async def test_keys_are_pressed_in_a_call(kind: str) -> None:
    """By the stream's own word at Plivo, by REST at Telnyx and Vonage; at Twilio, which has neither, by their tones."""

    async def press(session: AgentSession) -> None:
        await session.send_dtmf("15*0#")

    async with talking(press) as talk:
        await talk.dial(kind)
        line = talk.office.line
        by_sound = keys_heard(line.heard)
        assert (by_sound, line.keys) == (("15*0#", "") if kind == "twilio" else ("", "15*0#"))


async def test_what_is_no_key_and_no_number_is_refused_and_the_call_goes_on() -> None:
    refused: list[str] = []

    async def ask(session: AgentSession) -> None:
        for ask, wrong in ((session.send_dtmf, "1 2"), (session.send_dtmf, ""), (session.transfer, "the boss")):
            with pytest.raises(BadRequest) as error:
                await ask(wrong)
            refused.append(str(error.value))

    async with talking(ask) as talk:
        assert await talk.dial("twilio") == "the agent ended the call"
    assert len(refused) == 3
    assert "no keys of a telephone" in refused[0]
    assert "+4930123456" in refused[2]


@pytest.mark.parametrize("kind", CARRIERS)
async def test_a_call_that_nobody_waits_for_any_more_does_not_go_on_ringing(kind: str) -> None:
    """Given up while the carrier is being asked, before it has said the call's name."""
    async with talking(nothing) as talk:
        dialling = asyncio.create_task(talk.dial(kind))
        line = talk.office.line
        while not line.asked:  # noqa: ASYNC110 - the carrier has been asked, and its answer is not here yet
            await asyncio.sleep(0)
        dialling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await dialling
        await until(lambda: line.state == "completed")
        assert not line.was_answered


async def test_a_carrier_that_refuses_says_why_in_our_words() -> None:
    async with Office() as office:
        right = office.environment()
        wrong = {
            "twilio": ({**right, "TWILIO_AUTH_TOKEN": "no"}, "Authenticate"),
            "telnyx": ({**right, "TELNYX_API_KEY": API_KEY + "x"}, "Authentication failed"),
            "plivo": ({**right, "PLIVO_AUTH_TOKEN": "no"}, "authenticate"),
            "vonage": ({**right, "VONAGE_APPLICATION_ID": "00000000-bbbb-4ccc-8ddd-0123456789ab"}, "401"),
        }
        for kind, (environment, words) in wrong.items():
            api = carrier_api(kind, environment, base_url=office.base_url(kind))
            with pytest.raises(CarrierRefused, match=words) as refused:
                await api.dial(TO, NUMBER, webhook="https://x/", socket="wss://x/")
            assert refused.value.carrier == kind.capitalize()
        twilio = carrier_api("twilio", right, base_url=office.url)
        with pytest.raises(CarrierRefused, match="not yet verified"):
            await twilio.dial(TO, "+15550199", webhook="https://x/", socket="wss://x/")
    nobody = carrier_api("twilio", right, base_url=office.url)
    with pytest.raises(CarrierRefused):
        await nobody.dial(TO, NUMBER, webhook="https://x/", socket="wss://x/")


@pytest.mark.parametrize(
    ("kind", "missing"),
    [
        ("twilio", "TWILIO_ACCOUNT_SID and TWILIO_AUTH_TOKEN"),
        ("telnyx", "TELNYX_API_KEY"),
        ("plivo", "PLIVO_AUTH_ID and PLIVO_AUTH_TOKEN"),
        ("vonage", "VONAGE_APPLICATION_ID and VONAGE_PRIVATE_KEY"),
    ],
)
def test_without_credentials_the_variables_are_named(kind: str, missing: str) -> None:
    with pytest.raises(BadRequest, match=missing):
        carrier_api(kind, {})
    assert carrier_apis({}) == {}


def test_an_unknown_carrier_and_a_missing_library_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadRequest, match="twilio, telnyx, plivo, vonage"):
        carrier_api("pigeon", {})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install 'breeze_rtc\[telnyx\]'"):
        carrier_api("telnyx", {"TELNYX_API_KEY": "k"})


async def test_a_call_that_is_no_telephones_has_no_keys_and_puts_nobody_through() -> None:
    agent = Agent()
    sessions: list[Any] = []

    @agent.on_enter
    async def greet(session: Any) -> None:
        sessions.append(session)

    async with agent.test() as caller:
        await caller.quiet()
        with pytest.raises(LineCannot, match="no telephone's"):
            await sessions[0].send_dtmf("1")
        with pytest.raises(LineCannot, match="no telephone's"):
            await sessions[0].transfer(TO)


AGENT = """
from breeze_rtc import Agent

agent = Agent()


@agent.on_enter
async def greet(session):
    await session.say("Hello there.")
    await session.close()


agent.run()
"""


async def test_the_command_calls_with_the_agent_of_a_file_and_ends_with_the_call(tmp_path: Path) -> None:
    """`breeze-rtc call`, as a user starts it, with a small real engine; the file runs its agent, unguarded."""
    (tmp_path / "agent.py").write_text(AGENT)
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    async with Office() as office:
        command = (
            *("-m", "breeze_rtc", "call", "--carrier", "twilio", "--to", TO, "--from", NUMBER, "--port", str(port)),
            *("--phone-url", f"http://127.0.0.1:{port}", "--carrier-url", office.url, "--model", "tiny", "--no-listen"),
            str(tmp_path / "agent.py"),
        )
        program = await asyncio.create_subprocess_exec(
            sys.executable,
            *command,
            env={**os.environ, **office.environment()},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        async with asyncio.timeout(120):
            printed = (await program.communicate())[0].decode()
        assert program.returncode == 0, printed
        assert f"Calling {TO}" in printed
        assert "The call is over: the agent ended the call" in printed
        assert np.abs(np.frombuffer(office.line.heard, "<i2")).max() > 0


def test_the_agent_of_a_file_is_found_whether_it_is_run_or_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run.py").write_text(AGENT)
    (tmp_path / "made.py").write_text(AGENT.replace("agent.run()", ""))
    (tmp_path / "none.py").write_text("x = 1\n")
    assert read_agent(tmp_path / "run.py").callbacks.on_enter is not None
    assert read_agent(tmp_path / "made.py").callbacks.on_enter is not None
    assert caplog.messages == []
    (tmp_path / "run.py").write_text(AGENT.replace("run()", "run(max_calls=1)"))
    assert read_agent(tmp_path / "run.py").callbacks.on_enter is not None
    assert "max_calls" in caplog.messages[0]
    for wrong in ("none.py", "missing.py"):
        with pytest.raises(BadRequest, match=wrong):
            read_agent(tmp_path / wrong)
