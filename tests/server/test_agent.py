"""The agent as its author writes it: what is wrong with it is said where it stands."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
from starlette.testclient import TestClient
from tone_engine import ToneEngine

from breeze_rtc import Agent
from breeze_rtc.agent.session import Callbacks
from breeze_rtc.errors import UnknownVoice
from breeze_rtc.server.app import VoiceServer, create_app


async def spoken(session: Any, turn: Any) -> AsyncGenerator[str, None]:
    yield "text"


async def lonely(session: Any) -> AsyncGenerator[str, None]:
    yield "text"


def plain(session: Any, turn: Any) -> Any:
    yield "text"


@pytest.mark.parametrize(
    ("callback", "words"),
    [
        (lonely, "called with session and turn"),
        (plain, "is no `async def`"),
        ("text", "is a function"),
    ],
)
def test_what_is_no_callback_is_refused_where_it_stands(callback: Any, words: str) -> None:
    """With the shape it should have, at the decorator and not in the first call."""
    agent = Agent()
    with pytest.raises(TypeError, match=words) as refused:
        agent.on_user_turn(callback)
    assert "async def f(session, turn)" in str(refused.value)
    assert agent.callbacks.on_user_turn is None


@pytest.mark.parametrize("callback", [spoken, lambda session, _: spoken(session, None), partial(spoken)])
def test_whatever_can_be_called_so_is_taken(callback: Callable[..., Any]) -> None:
    """A generator, a lambda that returns one, a partial."""
    agent = Agent()
    assert agent.on_user_turn(callback) is callback
    assert agent.callbacks.on_user_turn is callback


def test_a_voice_that_is_not_there_is_named_at_the_start() -> None:
    """Unless cloned voices may still come over HTTP."""
    callbacks = Callbacks(voice="bob")
    app = create_app(VoiceServer(callbacks, engine=ToneEngine(), listens=False))
    with pytest.raises(UnknownVoice, match="'bob'; this model has high, low"), TestClient(app):
        pass
    app = create_app(VoiceServer(callbacks, engine=ToneEngine(), listens=False, accepts_voices=True))
    with TestClient(app) as client:
        assert client.get("/health").json()["status"] == "ok"


def test_what_keeps_an_agent_from_starting_is_one_sentence() -> None:
    """A port in use, for one: the program ends with it, and no traceback."""
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit, match=f"error: port {port} is in use"):
            Agent().run(port=port, engine=ToneEngine(), listens=False)


def test_an_agent_says_where_its_page_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All addresses are none to visit, and a free port is known once it is taken."""
    monkeypatch.setattr("breeze_rtc.server.app.run", lambda server, address: server._on_ready(server))
    Agent().run(host="0.0.0.0", port=0, engine=ToneEngine(), listens=False)
    assert re.search(r"http://localhost:[1-9]\d+/\n", capsys.readouterr().out)


SERVES = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background begins without
from tone_engine import ToneEngine
from breeze_rtc import Agent
Agent().run(port=0, engine=ToneEngine(), listens=False)
"""


def test_ctrl_c_ends_an_agent_without_a_traceback() -> None:
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command = [sys.executable, "-u", "-c", SERVES]
    with subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True, env=os.environ | {"PYTHONPATH": path}) as agent:
        assert agent.stdout is not None
        assert agent.stderr is not None
        try:
            assert agent.stdout.readline().startswith("Talk to the agent at")
            agent.send_signal(signal.SIGINT)
            assert agent.wait(timeout=60) == 130
            assert "Traceback" not in agent.stderr.read()
        finally:
            agent.kill()
