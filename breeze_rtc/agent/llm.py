"""A language model behind an OpenAI-compatible endpoint, as an agent.

Any server that offers `POST {base_url}/chat/completions` with `stream: true` will do: a hosted one, llama.cpp, vLLM,
Ollama.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import httpx

from breeze_rtc.agent.parrot import GREETING
from breeze_rtc.agent.session import AgentSession, Callbacks, UserTurn
from breeze_rtc.agent.tools import Tools
from breeze_rtc.agent.transcript import Message
from breeze_rtc.errors import BreezeError

log = logging.getLogger(__name__)

INSTRUCTIONS = (
    "You are a friendly voice on a phone call. Answer in one to three short, plain sentences. "
    "Write only words that can be read aloud: no lists, no markup, no emoji, no links."
)
MAX_ROUNDS = 8
"""Times that a model may ask for tools before it has to answer."""
SORRY = "I am sorry, I can not think right now. Please try again in a moment."


class LanguageModelError(BreezeError):
    """The endpoint cannot be reached, refuses, or answers with something else than a stream of text."""


class ChatModel:
    """Streams replies; `async with ChatModel(...) as model`, then `model.reply(history)`.

    base_url: such as "http://127.0.0.1:8080/v1".
    api_key_env: the environment variable that holds the key; an unset one means that no key is sent.
    first_token_timeout_s: how long a reply may take to begin, or to go on.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key_env: str = "OPENAI_API_KEY",
        instructions: str = INSTRUCTIONS,
        first_token_timeout_s: float = 20.0,
    ) -> None:
        key = os.environ.get(api_key_env, "")
        self._url = base_url.rstrip("/") + "/chat/completions"
        self._model = model
        self._instructions = instructions
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(first_token_timeout_s, connect=5.0),
        )

    async def __aenter__(self) -> ChatModel:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; may be called twice."""
        await self._client.aclose()

    async def reply(self, history: list[Message], tools: Tools | None = None) -> AsyncIterator[str]:
        """The pieces of one reply as they come.  Raises LanguageModelError; closing the iterator drops the request.

        tools: `session.tools`.  Those the model asks for are run, together, while what it has said so far is spoken;
        what they return goes back to the model, which goes on.
        """
        said = messages(self._instructions, history)
        for round_ in range(MAX_ROUNDS):
            body: dict[str, Any] = {"model": self._model, "stream": True, "messages": said}
            if tools and round_ < MAX_ROUNDS - 1:
                body["tools"] = tools.schemas
            text, calls = "", Calls()
            async with aclosing(self._stream(body)) as pieces:
                async for piece in pieces:
                    calls.add(piece.calls)
                    if piece.text:
                        text += piece.text
                        yield piece.text
            if not calls.made or not tools:
                return
            results = await asyncio.gather(*(tools.call(call.name, call.arguments) for call in calls.made))
            said.append({"role": "assistant", "content": text or None, "tool_calls": calls.as_message()})
            for call, result in zip(calls.made, results, strict=True):
                said.append({"role": "tool", "tool_call_id": call.id, "content": result})
            if text and not text[-1].isspace():
                yield " "

    async def _stream(self, body: dict[str, Any]) -> AsyncGenerator[Delta, None]:
        try:
            async with self._client.stream("POST", self._url, json=body) as response:
                if response.status_code != 200:
                    detail = (await response.aread()).decode("utf-8", "replace")[:300]
                    raise LanguageModelError(f"{self._url} answered {response.status_code}: {detail}")
                async for line in response.aiter_lines():
                    piece = delta(line)
                    if piece is None:
                        return
                    yield piece
        except httpx.HTTPError as error:
            raise LanguageModelError(f"{self._url}: {error or type(error).__name__}") from error


@dataclass(slots=True)
class ToolCall:
    """A tool the model asks for; its arguments come in pieces."""

    id: str = ""
    name: str = ""
    arguments: str = ""


class Calls:
    """The tools that one reply asks for."""

    def __init__(self) -> None:
        self._by_index: dict[int, ToolCall] = {}

    def add(self, pieces: list[dict[str, Any]]) -> None:
        for piece in pieces:
            call = self._by_index.setdefault(piece.get("index", len(self._by_index)), ToolCall())
            call.id = piece.get("id") or call.id or f"call_{len(self._by_index)}"
            function = piece.get("function") or {}
            call.name += function.get("name") or ""
            call.arguments += function.get("arguments") or ""

    @property
    def made(self) -> list[ToolCall]:
        return list(self._by_index.values())

    def as_message(self) -> list[dict[str, Any]]:
        return [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in self.made
        ]


@dataclass(frozen=True, slots=True)
class Delta:
    """What one line of the stream adds."""

    text: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)


def messages(instructions: str, history: list[Message]) -> list[dict[str, Any]]:
    """The request's messages; what was cut off is marked, so that the model knows what was not heard."""
    said: list[dict[str, Any]] = [
        {"role": message.role, "content": message.text + (" [interrupted by the user]" if message.interrupted else "")}
        for message in history
    ]
    return [{"role": "system", "content": instructions}, *said]


def delta(line: str) -> Delta | None:
    """What one line of the event stream adds, which may be nothing; None at the end of the reply.

    Raises LanguageModelError for a line that carries an error or is not what the interface promises.
    """
    if not line.startswith("data:"):
        return Delta()
    data = line[5:].strip()
    if data == "[DONE]":
        return None
    try:
        event: Any = json.loads(data)
        if "error" in event:
            raise LanguageModelError(f"the language model failed: {event['error']}")
        choices = event.get("choices") or [{}]
        fields = choices[0].get("delta") or {}
        text, calls = fields.get("content") or "", [dict(call) for call in fields.get("tool_calls") or []]
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise LanguageModelError(f"not a chat completion chunk: {data[:200]!r}") from error
    return Delta(text if isinstance(text, str) else "", calls)


def agent(model: ChatModel, *, voice: str | None = None) -> Callbacks:
    """The callbacks of an agent that answers with `model`; a failure is spoken kindly and logged."""

    async def greet(session: AgentSession) -> AsyncGenerator[str, None]:
        yield GREETING

    async def reply(session: AgentSession, turn: UserTurn) -> AsyncGenerator[str, None]:
        try:
            async for text in model.reply(session.history, session.tools):
                yield text
        except LanguageModelError as error:
            log.error("no reply from the language model: %s", error)
            yield f" {SORRY}"

    return Callbacks(on_enter=greet, on_user_turn=reply, voice=voice)
