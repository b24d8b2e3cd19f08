"""A language model over real sockets: a small server that speaks the protocol, and breaks it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from breeze_rtc.agent import llm
from breeze_rtc.agent.llm import ChatModel, LanguageModelError, delta, messages
from breeze_rtc.agent.session import UserTurn
from breeze_rtc.agent.tools import Tool, Tools
from breeze_rtc.agent.transcript import Message


class Endpoint:
    """Answers every request with `reply` (raw bytes after the status line) and remembers what it was asked."""

    def __init__(self) -> None:
        self.base_url = ""
        self.status = "200 OK"
        self.events: list[str] = []
        self.pause_s = 0.0
        self.requests: list[dict[str, Any]] = []
        self.headers = ""
        self.dropped = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            self.headers = (await reader.readuntil(b"\r\n\r\n")).decode()
            size = int(self.headers.lower().split("content-length:")[1].split("\r\n")[0])
            self.requests.append(json.loads(await reader.readexactly(size)))
            writer.write(
                f"HTTP/1.1 {self.status}\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n".encode()
            )
            for event in self.events:
                writer.write(event.encode())
                await writer.drain()
                await asyncio.sleep(self.pause_s)
        except ConnectionError:
            self.dropped.set()
        finally:
            writer.close()


def event(text: str) -> str:
    return f"data: {json.dumps({'choices': [{'delta': {'content': text}}]})}\n\n"


@asynccontextmanager
async def endpoint() -> AsyncIterator[Endpoint]:
    made = Endpoint()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.base_url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/"
    async with server:
        yield made


async def test_a_reply_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces come as they are sent; the request carries model, instructions, history and the key from its variable."""
    monkeypatch.setenv("MY_KEY", "secret-key")
    async with endpoint() as server:
        server.events = [
            ": keep-alive\n\n",
            event("Hel"),
            event("lo."),
            'data: {"choices": []}\n\n',
            "data: [DONE]\n\n",
        ]
        async with ChatModel(server.base_url, "small", api_key_env="MY_KEY") as model:
            history = [Message("user", "hi"), Message("assistant", "Well", interrupted=True), Message("user", "go on")]
            assert [piece async for piece in model.reply(history)] == ["Hel", "lo."]
        assert server.requests[0]["model"] == "small"
        assert server.requests[0]["stream"] is True
        assert [message["role"] for message in server.requests[0]["messages"]] == [
            "system",
            "user",
            "assistant",
            "user",
        ]
        assert server.requests[0]["messages"][2]["content"] == "Well [interrupted by the user]"
        assert "Bearer secret-key" in server.headers


def call_event(index: int, **function: str) -> str:
    call = {"index": index, "function": function, **({"id": f"id{index}"} if "name" in function else {})}
    return f"data: {json.dumps({'choices': [{'delta': {'tool_calls': [call]}}]})}\n\n"


async def test_tools_run_while_the_reply_is_spoken() -> None:
    """Calls come in pieces and run side by side; their results go back, and the reply goes on in the next request."""
    running = asyncio.Barrier(2)
    seen: list[Any] = []

    async def weather(session: object, city: str, days: int = 1) -> dict[str, Any]:
        """What the weather will be."""
        seen.append((session, city, days))
        await running.wait()
        return {"sky": "clear"}

    def clock() -> str:
        """The time."""
        asyncio.run_coroutine_threadsafe(running.wait(), loop).result(10)
        return "noon"

    loop = asyncio.get_running_loop()
    tools = Tools({"weather": Tool(weather), "clock": Tool(clock)}, "the session")
    first = [event("Let me look."), call_event(0, name="weather", arguments='{"ci')]
    first += [call_event(0, arguments='ty": "Oslo"}'), call_event(1, name="clock"), "data: [DONE]\n\n"]
    async with endpoint() as server:
        server.events = first
        async with ChatModel(server.base_url, "small") as model:
            pieces = []
            async for piece in model.reply([Message("user", "hi")], tools):
                pieces.append(piece)
                server.events = [event("It is clear."), "data: [DONE]\n\n"]
        assert "".join(pieces) == "Let me look. It is clear."
        assert seen == [("the session", "Oslo", 1)]
        asked, told = server.requests
        assert [tool["function"]["name"] for tool in asked["tools"]] == ["weather", "clock"]
        assert asked["tools"][0]["function"]["parameters"]["required"] == ["city"]
        assert [message["role"] for message in told["messages"][2:]] == ["assistant", "tool", "tool"]
        assert told["messages"][2]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
        assert [message["content"] for message in told["messages"][3:]] == ['{"sky": "clear"}', "noon"]
        assert told["messages"][3]["tool_call_id"] == "id0"


async def test_a_model_that_only_calls_tools_is_stopped() -> None:
    """After MAX_ROUNDS it is offered none and must answer."""
    tools = Tools({"nothing": Tool(nothing)}, None)
    async with endpoint() as server:
        server.events = [call_event(0, name="nothing", arguments="{}"), "data: [DONE]\n\n"]
        async with ChatModel(server.base_url, "small") as model:
            assert [piece async for piece in model.reply([], tools)] == []
        assert ["tools" in request for request in server.requests] == [True] * (llm.MAX_ROUNDS - 1) + [False]


def nothing() -> None:
    """Nothing."""


async def test_closing_a_reply_drops_the_request() -> None:
    """An interruption does not leave the model talking to nobody."""
    async with endpoint() as server:
        server.events = [event("word ")] * 1_000
        server.pause_s = 0.01
        async with ChatModel(server.base_url, "small") as model:
            reply = model.reply([])
            assert await anext(reply) == "word "
            await reply.aclose()  # type: ignore[attr-defined]
            await asyncio.wait_for(server.dropped.wait(), 10)


@pytest.mark.parametrize(
    ("status", "events", "words"),
    [
        ("401 Unauthorized", ["no key"], "answered 401: no key"),
        ("500 Oops", [], "answered 500"),
        ("200 OK", ["data: nonsense\n\n"], "not a chat completion chunk"),
        ("200 OK", ['data: {"error": {"message": "too long"}}\n\n'], "too long"),
    ],
)
async def test_what_goes_wrong_is_one_error(status: str, events: list[str], words: str) -> None:
    """Refusals, nonsense and errors in the stream are LanguageModelErrors that say what came."""
    async with endpoint() as server:
        server.status, server.events = status, events
        async with ChatModel(server.base_url, "small") as model:
            with pytest.raises(LanguageModelError, match=words):
                [piece async for piece in model.reply([])]


async def test_a_failure_is_spoken_kindly() -> None:
    """The agent says that it cannot think now; the caller does not hear a status code."""
    async with ChatModel("http://127.0.0.1:1/v1", "small") as model:
        callbacks = llm.agent(model)

        class Session:
            history = [Message("user", "hi")]  # noqa: RUF012
            tools = None

        assert callbacks.on_user_turn is not None
        said = [text async for text in callbacks.on_user_turn(Session(), UserTurn("hi"))]  # type: ignore[arg-type, union-attr]
        assert said == [f" {llm.SORRY}"]


@pytest.mark.parametrize("line", ["data: 7", "data: null", 'data: {"choices": 3}', 'data: {"choices": [1]}', "data: {"])
def test_malformed_lines_are_errors_of_the_tree(line: str) -> None:
    """No KeyError, no TypeError."""
    with pytest.raises(LanguageModelError):
        delta(line)


def test_lines_without_text_are_empty() -> None:
    """Comments, blank lines, role deltas and nulls say nothing."""
    for line in ("", ": ping", "event: x", 'data: {"choices": [{"delta": {"role": "assistant", "content": null}}]}'):
        assert delta(line) == llm.Delta()
    assert messages("be kind", [])[0] == {"role": "system", "content": "be kind"}
