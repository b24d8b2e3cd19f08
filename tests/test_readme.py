"""What the README shows works as it stands there."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from breeze_rtc import Agent
from breeze_rtc.agent.tools import Tools

ROOT = Path(__file__).parent.parent


def blocks(path: str) -> list[str]:
    """The Python in a document."""
    return re.findall(r"```python\n(.*?)```", (ROOT / path).read_text(), re.DOTALL)


@pytest.fixture
def hello(monkeypatch: pytest.MonkeyPatch) -> Agent:
    """The agent of the README's first example, which has got as far as `agent.run()`."""
    served: list[Agent] = []
    monkeypatch.setattr(Agent, "run", lambda agent, **options: served.append(agent))
    exec(compile(blocks("README.md")[0], "README.md", "exec"), {"__name__": "__main__"})
    (agent,) = served
    return agent


async def test_the_hello_world_talks(hello: Agent) -> None:
    """It greets, answers, and stops when it is spoken over."""
    async with hello.test() as caller:
        await caller.quiet()
        assert caller.heard_text == "Hi! Talk to me, and interrupt me whenever you like."
        await caller.say("good morning to you")
        assert caller.heard_text == "You said: good morning to you"


async def test_the_examples_of_the_test_kit_hold() -> None:
    """Each is run with an agent that it could be about."""
    agent = Agent()

    @agent.on_user_turn
    async def reply(session: Any, turn: Any) -> Any:
        yield "It is noon." if "time" in turn.text else "Once there was a boat, and it was small, on a sea " * 3

    first, second = blocks("docs/testing.md")
    names: dict[str, Any] = {"agent": agent}
    exec(compile(first, "docs/testing.md", "exec"), names)
    await names["test_it_answers"]()
    lines = second.splitlines()
    imports = [line for line in lines if line.startswith("from")]
    body = [f"    {line}" for line in lines if line not in imports]
    exec(compile("\n".join([*imports, "async def run():", *body]), "docs/testing.md", "exec"), names)
    await names["run"]()


async def test_the_examples_about_agents_hold() -> None:
    """One after another they make an agent, its judge of turns, and a tool that answers."""
    names: dict[str, Any] = {"__name__": "docs"}
    for block in blocks("docs/agents.md") + blocks("docs/phone.md"):
        if "SmartTurn" in block and find_spec("pipecat") is None:
            continue
        exec(compile(block, "docs/agents.md", "exec"), names)
    tools = Tools(names["agent"].callbacks.tools, None)
    assert [schema["function"]["name"] for schema in tools.schemas] == ["time_in"]
    assert re.fullmatch(r"\d\d:\d\d", await tools.call("time_in", '{"zone": "Europe/Paris"}'))
    assert names["agent"].callbacks.on_dtmf is names["key"]
    await names["model"].close()


def test_the_recognisers_of_the_documentation_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both examples give the server something that listens."""
    given: list[Any] = []
    monkeypatch.setattr(Agent, "run", lambda agent, *, recogniser: given.append(recogniser))
    for block in blocks("docs/listening.md"):
        exec(compile(block, "docs/listening.md", "exec"), {"agent": Agent(), "__name__": "docs"})
    by_name, own = given
    for ears in (by_name(), own()):
        assert callable(ears.transcribe)
        assert callable(ears.warm)
        assert callable(ears.close)
