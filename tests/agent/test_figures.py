"""What a turn cost, on the virtual clock."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from fake_call import RATE, WORD_SAMPLES, FakeCall, FakeVoice, LoudnessActivity, ScriptedEars, run

from breeze_rtc.agent import figures as module
from breeze_rtc.agent.figures import Timeline, TurnFigures
from breeze_rtc.agent.session import AgentSession, Callbacks, UserTurn

WORD_S = WORD_SAMPLES / RATE


async def reply(session: AgentSession, turn: UserTurn) -> AsyncGenerator[str, None]:
    await asyncio.sleep(0.3)
    yield "one two three four five"


def observed(act: Any) -> list[TurnFigures]:
    seen: list[TurnFigures] = []

    async def play() -> None:
        call = FakeCall()
        session = AgentSession(
            Callbacks(on_user_turn=reply),
            call=call,
            voice=FakeVoice(),
            ears=ScriptedEars("go on"),
            activity=LoudnessActivity(),  # type: ignore[arg-type]
            observe=seen.append,
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(session.run())
            await asyncio.sleep(0)
            await act(session, call)
            call.closed.set()

    run(play())
    return seen


def test_each_stage_of_a_spoken_turn_is_timed() -> None:
    """From the user's last sound: words at the end of the silence, then text, sound made, sound at the ear."""

    async def act(session: AgentSession, call: FakeCall) -> None:
        await call.speak(voiced_s=1.0, silent_s=0.64)
        await asyncio.sleep(4)

    (figures,) = observed(act)
    delays = [figures.delay_s(stage) for stage in module.STAGES]
    assert delays == pytest.approx([0.6, 0.9, 0.95, 1.05], abs=0.05)
    assert (figures.interrupted, figures.words_heard, figures.wasted_s) == (False, 5, 0.0)
    assert figures.heard_s == pytest.approx(5 * WORD_S)


def test_an_interruption_tells_what_was_wasted() -> None:
    """All was made when the ear had half of it."""

    async def act(session: AgentSession, call: FakeCall) -> None:
        session.type("hello")
        await asyncio.sleep(0.3 + 0.05 + 0.1 + 2.5 * WORD_S)
        session.interrupt()
        await asyncio.sleep(1)

    (figures,) = observed(act)
    assert figures.interrupted
    assert figures.wasted_s == pytest.approx(2.5 * WORD_S, abs=0.03)
    assert figures.words_heard == 2
    line = figures.timeline
    assert line.stopped_s is not None
    assert line.done_s is not None
    assert line.done_s - line.stopped_s == pytest.approx(0.03)


def test_a_false_interruption_is_counted() -> None:
    async def act(session: AgentSession, call: FakeCall) -> None:
        session._listening._ears = ScriptedEars("")
        session.say("one two three four five")
        await asyncio.sleep(0.5)
        await call.speak(voiced_s=0.4, silent_s=0.8)
        await asyncio.sleep(4)

    (figures,) = observed(act)
    assert (figures.false_interruptions, figures.interrupted) == (1, False)
    assert figures.delay_s("first_heard") is None


def test_without_opentelemetry_nothing_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    module.trace(TurnFigures(Timeline(asked_s=0.0, done_s=1.0), False, False, 1.0, 0.0, 2, 0))


def test_a_turn_is_a_span_with_its_stages() -> None:
    """The real API and SDK: names, parents, times in nanoseconds since 1970."""
    pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed")
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    line = Timeline(10.0, 10.6, 10.6, 10.9, 10.95, 11.05, None, 13.0)
    missed = {"gaps": 2, "gap_s": 0.3, "concealed_s": 0.02, "words_unheard": 4, "words_unsure": 1}
    module.trace(TurnFigures(line, False, False, 1.9, 0.1, 5, 1, **missed))
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert list(spans) == [
        f"breeze.{name}" for name in ("transcribe", "think", "synthesise", "deliver", "speak", "turn")
    ]
    turn = spans["breeze.turn"]
    assert turn.end_time - turn.start_time == 3_000_000_000
    assert all(span.parent.span_id == turn.context.span_id for name, span in spans.items() if name != "breeze.turn")
    assert turn.attributes["breeze.wasted_s"] == 0.1
    assert {name: turn.attributes[f"breeze.{name}"] for name in missed} == missed
