"""The server with the real engine and a very small model of random weights: the parts fit."""

from __future__ import annotations

import asyncio
import io
import json
import wave
from collections.abc import AsyncIterator

import httpx
import pytest
from page import Hall, serving, until
from prometheus_client.parser import text_string_to_metric_families

from breeze_rtc.agent.session import AgentSession, Callbacks, UserTurn
from breeze_rtc.runtime.engine import Engine

GREEDY = {"temperature": 0.0, "depth_temperature": 0.0}
"""With random weights, speech that goes on for long."""


async def reply(session: AgentSession, turn: UserTurn) -> AsyncIterator[str]:
    yield turn.text


@pytest.fixture
async def hall() -> AsyncIterator[Hall]:
    engine = Engine("tiny", process=False)
    async with serving(Callbacks(on_user_turn=reply), engine=engine) as hall:  # type: ignore[arg-type]
        yield hall


async def test_speech_over_http(hall: Hall) -> None:
    """A WAV of the engine's samples; half a surrogate pair is a 400."""
    async with httpx.AsyncClient(base_url=hall.http, timeout=60) as client:
        answer = await client.post("/v1/audio/speech", json={"input": "Hi.", "seed": 1, "stream": False})
        assert answer.status_code == 200
        with wave.open(io.BytesIO(answer.content)) as file:
            assert file.getframerate() == hall.engine.sample_rate
            assert file.getnframes() > 0
        again = await client.post("/v1/audio/speech", json={"input": "Hi.", "seed": 1, "stream": False})
        assert again.content == answer.content
        bad = await client.post("/v1/audio/speech", content=b'{"input": "\\ud800"}')
        assert (bad.status_code, bad.json()["error"]["code"]) == (400, "bad_text")
        bad = await client.post("/v1/audio/speech", json={"input": "hi", "seed": -1})
        assert (bad.status_code, bad.json()["error"]["code"]) == (400, "bad_sampling")


async def test_a_call_is_heard_to_its_end_and_leaves_nothing(hall: Hall) -> None:
    """A typed turn is spoken by the real engine over a real peer; afterwards the engine holds no stream."""
    async with hall.page() as page:
        await page.call()
        await page.type("Hi.")
        end = await page.one("speech_end")
        assert (end["interrupted"], end["chars"]) == (False, 3)
    await until(lambda: not hall.server._calls and not hall.engine._inboxes)


async def test_metrics_say_how_good_the_predictions_were() -> None:
    """After one call: its steps by duration over prediction, and how far its listener's reports moved the deadline."""
    # Random weights may stop before the first report; the nano voice speaks for longer than it is made ahead.
    engine = Engine("nano", process=False, measures=False)
    async with serving(Callbacks(on_user_turn=reply), engine=engine) as hall:  # type: ignore[arg-type]
        async with hall.page() as page:
            await page.call()
            await page.type("How long will this take? I ask because the train to the coast leaves in twenty minutes.")
            await page.one("speech_end")
        await until(lambda: not engine._inboxes and not engine.stats["streams"])
        async with httpx.AsyncClient(base_url=hall.http, timeout=60) as client:
            text = (await client.get("/metrics")).text
    values = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    for stage in ("BACKBONE", "DEPTH", "CODEC"):
        steps = values["breeze_step_ratio_count", stage]
        assert steps > 0
        within = values["breeze_step_ratio_bucket", "1.0", stage]
        assert 0 < within <= steps == values["breeze_step_ratio_bucket", "+Inf", stage]
        assert values["breeze_step_margin", stage] >= 1
        assert 0 < values["breeze_step_ratio_sum", stage] / steps < 100
    assert values["breeze_deadline_error_seconds_bucket", "+Inf", "estimate"] == 1
    assert values["breeze_deadline_error_seconds_bucket", "+Inf", "report"] >= 1


async def test_a_request_for_which_there_is_no_room_waits_and_is_told_when_to_come_back() -> None:
    """One slot: who streams is refused after three seconds, 503 with Retry-After; a file waits and is made."""
    engine = Engine("tiny", process=False, max_streams=1)
    async with (
        serving(Callbacks(on_user_turn=reply), engine=engine) as hall,  # type: ignore[arg-type]
        httpx.AsyncClient(base_url=hall.http, timeout=60) as client,
    ):
        speaking = engine.speak(seed=1)
        speaking.push("Somebody who does not come to the end of what they")
        batch = asyncio.create_task(client.post("/v1/audio/speech", json={"input": "Hi.", "seed": 1, "stream": False}))
        began_at = asyncio.get_running_loop().time()
        refused = await client.post("/v1/audio/speech", json={"input": "Hi.", "seed": 1})
        assert 2.5 < asyncio.get_running_loop().time() - began_at < 10
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        assert int(refused.headers["Retry-After"]) >= 1
        assert "1 of 1 streams are open" in refused.json()["error"]["message"]
        await until(lambda: engine.stats.get("refused", {}).get("stream") == 1)
        text = (await client.get("/metrics")).text
        assert 'breeze_refused_streams_total{class="stream"} 1.0' in text
        assert 'breeze_queued_streams{class="batch"} 1.0' in text
        assert not batch.done()
        speaking.cancel()
        assert (await batch).status_code == 200
        await until(lambda: engine.stats.get("free_slots") == 1 and not engine._inboxes)


@pytest.mark.parametrize("leaves", ["at once", "after the first sound", "in the middle"])
async def test_a_client_whose_socket_drops_leaves_its_place_to_the_next(leaves: str) -> None:
    """Reproduction 19 of serving (breeze-tts 20: a lock was kept when its client was gone, and 409 for ever after).

    There is room for one stream: whenever the connection is reset, the next request is spoken, and nothing is left of
    those before.
    """
    engine = Engine("tiny", process=False, measures=False, max_streams=1)
    async with (
        serving(Callbacks(), engine=engine) as hall,  # type: ignore[arg-type]
        httpx.AsyncClient(base_url=hall.http, timeout=60) as client,
    ):
        for streams in (True, False):
            body = json.dumps({"input": "for a long time", "stream": streams, **GREEDY}).encode()
            reader, writer = await asyncio.open_connection("127.0.0.1", int(hall.http.rsplit(":", 1)[1]))
            writer.write(b"POST /v1/audio/speech HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            if leaves == "at once" or not streams:
                await until(lambda: engine.stats.get("streams"))
            else:
                head = await reader.readuntil(b"\r\n\r\n")
                assert b" 200 OK" in head, (head, await reader.read())
                await reader.readexactly(1_000 if leaves == "after the first sound" else 60_000)
            writer.transport.abort()
            answer = await client.post("/v1/audio/speech", json={"input": "Hi.", "seed": 1})
            assert answer.status_code == 200, answer.text
            assert len(answer.content) > 44
            await until(lambda: engine.stats.get("free_slots") == 1 and not engine._inboxes)
            assert hall.server._speech._requests == 0
