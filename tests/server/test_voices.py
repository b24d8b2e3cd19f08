"""Cloned voices over HTTP, with the real engine and a very small model of random weights."""

from __future__ import annotations

import io
import wave
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from page import serving

from breeze_rtc.agent.session import Callbacks
from breeze_rtc.runtime.engine import Engine

WORDS = {"transcript": "What was said here."}


def recording(seconds: float = 1.2, seed: int = 1) -> bytes:
    """A WAV file of noise whose level moves."""
    samples = round(seconds * 24_000)
    sound = np.random.default_rng(seed).normal(0, 0.1, samples) * np.abs(np.sin(np.arange(samples) / 3_000))
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(24_000)
        out.writeframes((sound * 32_767).astype("<i2").tobytes())
    return file.getvalue()


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    engine = Engine("tiny", process=False, measures=False, voices=tmp_path / "voices")
    async with (
        serving(Callbacks(), engine=engine, accepts_voices=True) as hall,
        httpx.AsyncClient(base_url=hall.http, timeout=60) as client,
    ):
        yield client


async def said(client: httpx.AsyncClient, **fields: object) -> bytes:
    body = {"input": "And this now.", "seed": 3, "stream": False, "response_format": "pcm", **fields}
    answer = await client.post("/v1/audio/speech", json=body)
    assert answer.status_code == 200, answer.text
    return answer.content


async def test_a_voice_from_recording_to_speech_and_away(client: httpx.AsyncClient) -> None:
    """PUT clones it, the list and /health name it, speech is in it, another recording changes it, DELETE forgets it."""
    plain = await said(client)
    made = await client.put("/v1/voices/anna", params=WORDS, content=recording())
    assert (made.status_code, made.json()) == (201, {"name": "anna"})
    assert (await client.get("/v1/voices")).json() == {"voices": ["default", "anna"]}
    assert (await client.get("/health")).json()["voices"] == ["default", "anna"]
    first = await said(client, voice="anna")
    assert first == await said(client, voice="anna") != plain
    directed = await said(client, voice="anna", instructions="Slowly.", cfg_scale=2.0)
    assert directed not in {first, plain}
    await client.put("/v1/voices/anna", params=WORDS, content=recording(seed=2))
    assert await said(client, voice="anna") != first
    gone = await client.delete("/v1/voices/anna")
    assert gone.status_code == 204
    answer = await client.post("/v1/audio/speech", json={"input": "hi", "voice": "anna"})
    assert answer.json()["error"]["code"] == "unknown_voice"
    assert (await client.delete("/v1/voices/anna")).json()["error"]["code"] == "unknown_voice"


@pytest.mark.parametrize(
    ("name", "query", "content", "error"),
    [
        ("anna", WORDS, b"", (400, "bad_recording")),
        ("anna", WORDS, b"no sound", (400, "bad_recording")),
        ("anna", WORDS, recording(0.3), (400, "bad_recording")),
        ("anna", {}, recording(), (400, "bad_text")),
        ("Anna", WORDS, recording(), (400, "bad_request")),
        ("default", WORDS, recording(), (400, "bad_request")),
        ("anna", WORDS, bytes((20 << 20) + 1), (413, "body_too_large")),
    ],
)
async def test_what_no_voice_can_be_made_of(
    client: httpx.AsyncClient, name: str, query: dict[str, str], content: bytes, error: tuple[int, str]
) -> None:
    """A status, a code and what to do; and no voice."""
    answer = await client.put(f"/v1/voices/{name}", params=query, content=content)
    assert (answer.status_code, answer.json()["error"]["code"]) == error
    assert (await client.get("/v1/voices")).json() == {"voices": ["default"]}


async def test_instructions_and_guidance_are_checked(client: httpx.AsyncClient) -> None:
    """Instructions are a text; a guidance scale without them is refused by name."""
    for fields, code in (
        ({"instructions": 3}, "bad_field"),
        ({"language": 3}, "bad_field"),
        ({"language": "German"}, "bad_request"),
        ({"instructions": "x" * 1_001}, "bad_text"),
        ({"cfg_scale": 2.0}, "bad_request"),
        ({"reference_scale": 2.0, "instructions": "Slowly."}, "bad_request"),
    ):
        answer = await client.post("/v1/audio/speech", json={"input": "hi", **fields})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)
    assert await said(client, instructions="Slowly.") != await said(client)


async def test_other_sites_pages_add_no_voices(client: httpx.AsyncClient) -> None:
    """A browser says which page asks."""
    answer = await client.put(
        "/v1/voices/anna", params=WORDS, content=recording(), headers={"Origin": "https://elsewhere.example"}
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "foreign_origin")


async def test_a_server_takes_no_voices_unless_told_to() -> None:
    """Neither adds nor deletes."""
    async with (
        serving(Callbacks()) as hall,
        httpx.AsyncClient(base_url=hall.http, timeout=20) as client,
    ):
        for answer in (
            await client.put("/v1/voices/anna", params=WORDS, content=recording()),
            await client.delete("/v1/voices/anna"),
        ):
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "no_new_voices")
