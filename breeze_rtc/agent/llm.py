"""A language model behind an OpenAI-compatible endpoint, as an agent.

Any server that offers `POST {base_url}/chat/completions` with `stream: true` will do: a hosted one, llama.cpp, vLLM,
Ollama.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import httpx

from ..errors import BreezeError
from .parrot import GREETING
from .session import AgentSession, Callbacks, UserTurn
from .transcript import Message

log = logging.getLogger(__name__)

INSTRUCTIONS = (
    "You are a friendly voice on a phone call. Answer in one to three short, plain sentences. "
    "Write only words that can be read aloud: no lists, no markup, no emoji, no links."
)
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

    async def reply(self, history: list[Message]) -> AsyncIterator[str]:
        """The pieces of one reply as they come.  Raises LanguageModelError; closing the iterator drops the request."""
        body = {"model": self._model, "stream": True, "messages": messages(self._instructions, history)}
        try:
            async with self._client.stream("POST", self._url, json=body) as response:
                if response.status_code != 200:
                    detail = (await response.aread()).decode("utf-8", "replace")[:300]
                    raise LanguageModelError(f"{self._url} answered {response.status_code}: {detail}")
                async for line in response.aiter_lines():
                    text = delta(line)
                    if text is None:
                        return
                    if text:
                        yield text
        except httpx.HTTPError as error:
            raise LanguageModelError(f"{self._url}: {error or type(error).__name__}") from error


def messages(instructions: str, history: list[Message]) -> list[dict[str, str]]:
    """The request's messages; what was cut off is marked, so that the model knows what was not heard."""
    said = [
        {"role": message.role, "content": message.text + (" [interrupted by the user]" if message.interrupted else "")}
        for message in history
    ]
    return [{"role": "system", "content": instructions}, *said]


def delta(line: str) -> str | None:
    """The text in one line of the event stream: "" for a line without any, None at the end of the reply.

    Raises LanguageModelError for a line that carries an error or is not what the interface promises.
    """
    if not line.startswith("data:"):
        return ""
    data = line[5:].strip()
    if data == "[DONE]":
        return None
    try:
        event: Any = json.loads(data)
        if "error" in event:
            raise LanguageModelError(f"the language model failed: {event['error']}")
        choices = event.get("choices") or [{}]
        text = (choices[0].get("delta") or {}).get("content") or ""
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise LanguageModelError(f"not a chat completion chunk: {data[:200]!r}") from error
    return text if isinstance(text, str) else ""


def agent(model: ChatModel, *, voice: str | None = None) -> Callbacks:
    """The callbacks of an agent that answers with `model`; a failure is spoken kindly and logged."""

    async def greet(session: AgentSession) -> AsyncGenerator[str, None]:
        yield GREETING

    async def reply(session: AgentSession, turn: UserTurn) -> AsyncGenerator[str, None]:
        try:
            async for text in model.reply(session.history):
                yield text
        except LanguageModelError as error:
            log.error("no reply from the language model: %s", error)
            yield f" {SORRY}"

    return Callbacks(on_enter=greet, on_user_turn=reply, voice=voice)
