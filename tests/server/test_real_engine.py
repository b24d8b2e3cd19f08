"""The server with the real engine and a very small model of random weights: the parts fit."""

from __future__ import annotations

import io
import wave
from collections.abc import AsyncIterator

import httpx
import pytest
from page import Hall, serving, until
from prometheus_client.parser import text_string_to_metric_families

from breeze_rtc.agent.session import AgentSession, Callbacks, UserTurn
from breeze_rtc.runtime.engine import Engine


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


async def test_metrics_say_how_good_the_predictions_were(hall: Hall) -> None:
    """After one call: its steps by duration over prediction, and how far its listener's reports moved the deadline."""
    async with hall.page() as page:
        await page.call()
        await page.type("How long will this take?")
        await page.one("speech_end")
    await until(lambda: not hall.engine._inboxes and not hall.engine.stats["streams"])
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
