"""The HTTP door over real sockets: page, speech, health, metrics, errors."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import sys
import wave
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
from page import Hall, serving, until
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient
from tone_engine import WORD, ToneEngine

from breeze_rtc.agent.figures import Timeline, TurnFigures
from breeze_rtc.agent.session import Callbacks
from breeze_rtc.errors import BadRequest, CheckpointError
from breeze_rtc.server.agent import Agent
from breeze_rtc.server.app import SWITCH_INTERVAL_S, VoiceServer, create_app, listen, page_url, web_folder


@pytest.fixture
async def hall() -> AsyncIterator[Hall]:
    async with serving(Callbacks()) as hall:
        yield hall
        await hall.is_free()


@pytest.fixture
async def client(hall: Hall) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=hall.http, timeout=20) as client:
        yield client


async def speak(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await client.post("/v1/audio/speech", json=fields)


async def test_threads_give_way_to_packets_while_serving() -> None:
    """The interpreter changes threads more often for as long as there may be calls, and not after."""
    before = sys.getswitchinterval()
    async with serving(Callbacks()):
        assert sys.getswitchinterval() == SWITCH_INTERVAL_S < before
    assert sys.getswitchinterval() == before


async def test_speech_is_a_wav_of_all_words(client: httpx.AsyncClient) -> None:
    """Whole files say their length; the samples are the engine's."""
    answer = await speak(client, input="one two three", stream=False)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "audio/wav"
    with wave.open(io.BytesIO(answer.content)) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 24_000)
        assert file.getnframes() == 3 * WORD


async def test_streamed_speech_leaves_while_it_is_made(client: httpx.AsyncClient) -> None:
    """A stream comes in chunks, with a header of unknown length; as PCM it is the same samples without one."""
    whole = await speak(client, input="one two three", stream=False, response_format="pcm")
    async with client.stream("POST", "/v1/audio/speech", json={"input": "one two three"}) as answer:
        assert answer.headers["transfer-encoding"] == "chunked"
        streamed = b"".join([piece async for piece in answer.aiter_raw()])
    assert streamed[:4] == b"RIFF"
    assert streamed[40:44] == b"\xdb\xff\xff\xff"
    assert streamed[44:] == whole.content
    assert len(whole.content) == 3 * WORD * 2


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 400, "not_json"),
        (b"{", 400, "not_json"),
        (b"[" * 100_000, 400, "not_json"),
        (b"\xff\xfe\x00", 400, "not_json"),
        (b"[]", 400, "not_an_object"),
        (b"{}", 400, "no_input"),
        (b'{"input": ""}', 400, "no_input"),
        (b'{"input": " \\n "}', 400, "no_input"),
        (b'{"input": 7}', 400, "no_input"),
        (json.dumps({"input": "x" * 100_000}).encode(), 413, "text_too_long"),
        (json.dumps({"input": "x" * 300_000}).encode(), 413, "body_too_large"),
        (b'{"input": "hi", "voice": "nobody"}', 400, "unknown_voice"),
        (b'{"input": "hi", "voice": 3}', 400, "bad_field"),
        (b'{"input": "hi", "response_format": "mp3"}', 400, "bad_format"),
        (b'{"input": "hi", "response_format": ["wav"]}', 400, "bad_format"),
        (b'{"input": "hi", "stream": "yes"}', 400, "bad_field"),
        (b'{"input": "hi", "speed": 2}', 400, "bad_field"),
        (b'{"input": "hi", "temperature": NaN}', 400, "not_finite"),
        (b'{"input": "hi", "temperature": -Infinity}', 400, "not_finite"),
        (b'{"input": "hi", "temperature": 1e999}', 400, "bad_sampling"),
        (b'{"input": "hi", "temperature": -1}', 400, "bad_sampling"),
        (b'{"input": "hi", "top_p": "all"}', 400, "bad_sampling"),
        (b'{"input": "hi", "colour": "red"}', 400, "unknown_field"),
    ],
)
async def test_what_cannot_be_spoken_is_a_clear_error(
    client: httpx.AsyncClient, body: bytes, status: int, code: str
) -> None:
    """Status, code, a sentence, and what to do; never a traceback and never a hang."""
    answer = await client.post("/v1/audio/speech", content=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert answer.json()["error"]["message"]
    assert answer.json()["error"]["fix"]
    assert "Traceback" not in answer.text


@pytest.mark.parametrize("text", ["emoji 👩‍🚀🎉", "שלום עולם", "nul \0 inside", "\u202eright to left", "你好，世界"])
async def test_unusual_text_is_spoken(client: httpx.AsyncClient, text: str) -> None:
    """What is text is taken as text."""
    assert (await speak(client, input=text)).status_code == 200


async def test_a_stage_that_raises_is_a_500_with_its_name(client: httpx.AsyncClient) -> None:
    """Before the first sound it has a status of its own; the next request is spoken."""
    answer = await speak(client, input="BOOM BOOM", stream=False)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "speech_failed")
    assert "depth" in answer.json()["error"]["message"]
    assert (await speak(client, input="fine")).status_code == 200


async def test_a_dead_engine_is_a_503(client: httpx.AsyncClient, hall: Hall) -> None:
    """Speech and health say so, and when to come again."""
    hall.engine.is_running = False
    answer = await speak(client, input="hello")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_closed")
    assert int(answer.headers["retry-after"]) >= 1
    assert (await client.get("/health")).status_code == 503
    hall.engine.is_running = True
    assert (await client.get("/health")).json()["status"] == "ok"


async def test_a_client_that_leaves_cancels_its_speech(client: httpx.AsyncClient, hall: Hall) -> None:
    """The engine's stream is cancelled as soon as the connection is gone."""
    async with client.stream("POST", "/v1/audio/speech", json={"input": "word " * 3_000}) as answer:
        await anext(answer.aiter_raw())
    await until(lambda: not hall.engine.open)
    assert hall.engine.speeches[-1].is_cancelled
    assert hall.engine.speeches[-1].made < 3_000 * WORD


async def test_a_slow_reader_slows_its_speech(hall: Hall) -> None:
    """What nobody reads is not made: the connection's buffers fill, and the engine is asked for no more."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(hall.http.rsplit(":", 1)[1]), limit=4096)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    body = json.dumps({"input": "word " * 3_500, "response_format": "pcm"}).encode()
    writer.write(b"POST /v1/audio/speech HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    await reader.read(1)
    before = -1
    speech = hall.engine.speeches[-1]
    while speech.made != before:
        before = speech.made
        await asyncio.sleep(0.5)
    assert speech.made < 3_500 * WORD // 2
    writer.transport.abort()


async def test_playback_is_reported_no_faster_than_time(client: httpx.AsyncClient, hall: Hall) -> None:
    """A reader that takes everything at once does not look like an ear that has heard it."""
    await speak(client, input="word " * 50)
    assert hall.engine.reports > 0
    assert hall.engine.speeches[-1].heard < 50 * WORD // 2


async def test_the_page_and_its_files_are_served(client: httpx.AsyncClient) -> None:
    """Every file of the page is there, with its type, and asked for again each time."""
    assert "text/html" in (await client.get("/")).headers["content-type"]
    for path in web_folder().glob("*.js"):
        answer = await client.get(f"/{path.name}")
        assert answer.content == path.read_bytes()
        assert "javascript" in answer.headers["content-type"]
        assert answer.headers["cache-control"] == "no-cache"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/../pyproject.toml", 404),
        ("GET", "/v1/audio/speech", 405),
        ("POST", "/", 405),
    ],
)
async def test_what_is_not_there_is_json_too(client: httpx.AsyncClient, method: str, path: str, status: int) -> None:
    """404 and 405 have the same shape as every other error."""
    answer = await client.request(method, path)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"code", "message", "fix"}


async def test_metrics_tell_the_figures(client: httpx.AsyncClient, hall: Hall) -> None:
    """Prometheus text, with the engine's own counts in it."""
    await speak(client, input="hello")
    lines = (await client.get("/metrics")).text.splitlines()
    assert "breeze_calls 0.0" in lines
    assert "breeze_first_packet_seconds_count 1.0" in lines
    assert 'breeze_stage_seconds_total{stage="CODEC"} 0.5' in lines
    for name in ("breeze_first_sound_seconds", "breeze_stop_seconds", "breeze_slack_seconds"):
        assert f"{name}_count 0.0" in lines
    for name in ("breeze_gaps", "breeze_wasted_audio_seconds", "breeze_heard_audio_seconds"):
        assert f"{name}_total 0.0" in lines


async def test_metrics_tell_what_a_listener_missed(client: httpx.AsyncClient, hall: Hall) -> None:
    """Of each speech whether it was whole, its words by what became of them, and what a player made up."""
    whole = TurnFigures(Timeline(), False, False, 2.0, 0.0, 5, 0)
    hall.server.metrics.observe(whole)
    hall.server.metrics.observe(replace(whole, gaps=2, words_unheard=3, words_unsure=1, concealed_s=0.25))
    lines = (await client.get("/metrics")).text.splitlines()
    assert 'breeze_speeches_total{sound="whole"} 1.0' in lines
    assert 'breeze_speeches_total{sound="broken"} 1.0' in lines
    for fate, words in (("heard", 10), ("unheard", 3), ("unsure", 1)):
        assert f'breeze_words_total{{were="{fate}"}} {words:.1f}' in lines
    assert "breeze_concealed_seconds_total 0.25" in lines


def test_mounting_keeps_the_apps_own_routes_and_life() -> None:
    """An app that exists gets the page and the API; its lifespan runs inside the engine's."""
    seen: list[str] = []

    @asynccontextmanager
    async def own_life(app: Starlette) -> AsyncIterator[None]:
        seen.append("app up")
        yield
        seen.append("app down")

    app = Starlette(routes=[Route("/own", lambda request: PlainTextResponse("mine"))], lifespan=own_life)
    engine = ToneEngine()
    Agent().mount(app, engine=engine, listens=False)
    with TestClient(app) as client:
        assert seen == ["app up"]
        assert engine.is_running
        assert client.get("/own").text == "mine"
        assert client.get("/health").json()["status"] == "ok"
        assert client.post("/v1/audio/speech", json={"input": ""}).json()["error"]["code"] == "no_input"
        with client.websocket_connect("/call") as page:
            assert page.receive_json()["type"] == "hello"
    assert seen == ["app up", "app down"]
    assert not engine.is_running


def test_a_page_chooses_its_voice_where_the_agent_has_none() -> None:
    """The choice is in the health and in the hello of the call; what is not offered is refused by name."""
    app = create_app(VoiceServer(Callbacks(), engine=ToneEngine(), listens=False))
    with TestClient(app) as client:
        assert client.get("/health").json()["page_voices"] == ["high", "low"]
        for address, voice in (("/call", "high"), ("/call?voice=low", "low")):
            with client.websocket_connect(address) as page:
                assert page.receive_json()["voice"] == voice
        with client.websocket_connect("/call?voice=nobody") as page:
            assert page.receive_json()["code"] == "unknown_voice"
    with TestClient(create_app(VoiceServer(Callbacks(voice="low"), engine=ToneEngine(), listens=False))) as client:
        assert client.get("/health").json()["page_voices"] == []
        with client.websocket_connect("/call?voice=high") as page:
            assert page.receive_json()["code"] == "unknown_voice"


def test_a_call_before_the_lifespan_is_refused_in_words() -> None:
    """An app that forgets to run its lifespan learns what is missing."""
    client = TestClient(create_app(VoiceServer(Callbacks(), engine=ToneEngine(), listens=False)))
    with client.websocket_connect("/call") as page:
        assert page.receive_json()["code"] == "not_started"


def test_a_port_in_use_is_a_sentence() -> None:
    """It names the next port to try."""
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BadRequest, match=f"port {port} is in use by another program; choose another"):
            listen("127.0.0.1", port)


async def test_a_model_that_cannot_be_loaded_stops_the_start() -> None:
    """The engine's own sentence comes through."""

    class Broken(ToneEngine):
        async def __aenter__(self) -> Any:
            raise CheckpointError("no such checkpoint")

    server = VoiceServer(Callbacks(), engine=Broken(), listens=False)
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        async with server.lifespan():
            pass


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000/"),
        ("0.0.0.0", "http://localhost:8000/"),
        ("::1", "http://[::1]:8000/"),
        ("example.org", "http://example.org:8000/"),
    ],
)
def test_the_printed_address_can_be_visited(host: str, url: str) -> None:
    """A browser lends no microphone to 0.0.0.0."""
    assert page_url(host, 8000) == url
