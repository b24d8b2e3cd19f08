"""The engine's voices, with a very small model of random weights."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from test_voice_store import WORDS, recording

from breeze_rtc.errors import BadRecording, BadRequest, EngineClosed, UnknownVoice
from breeze_rtc.runtime import voice_folder
from breeze_rtc.runtime.engine import Engine, Speech
from breeze_rtc.scheduling.stream import Priority


async def said(engine: Engine, voice: str | None = None) -> bytes:
    speech = engine.speak(voice=voice, seed=3, interactive=False)
    speech.push("And this now.")
    speech.end()
    return b"".join([chunk.pcm async for chunk in speech])


async def test_a_new_voice_while_others_speak(tmp_path: Path) -> None:
    """Several are made one behind another while a stream is spoken; each can be spoken with as soon as it is said to be
    there, and the next engine has them."""
    async with Engine("tiny", process=False, measures=False, voices=tmp_path) as engine:
        plain = await said(engine)
        speaking = asyncio.create_task(said(engine))
        await asyncio.gather(engine.add_voice("anna", recording(), WORDS), engine.add_voice("bea", recording(2), WORDS))
        assert await speaking == plain
        assert engine.voices == ("default", "anna", "bea")
        sounds = [await said(engine, name) for name in engine.voices]
        assert len(set(sounds)) == 3
    async with Engine("tiny", process=False, measures=False, voices=tmp_path) as engine:
        assert [await said(engine, name) for name in engine.voices] == sounds
        engine.remove_voice("anna")
        with pytest.raises(UnknownVoice, match="default, bea"):
            engine.speak(voice="anna")


async def test_a_voice_that_goes_while_a_stream_waits(tmp_path: Path) -> None:
    """The stream that wanted it fails in words; others go on."""
    async with Engine("tiny", process=False, measures=False, voices=tmp_path, max_streams=1) as engine:
        await engine.add_voice("anna", recording(), WORDS)
        # It has no text yet, so it keeps the only slot until it is cancelled.
        first = engine.speak()
        speech = engine.speak(voice="anna", interactive=False, priority=Priority.BATCH)
        assert isinstance(speech, Speech)
        speech.push("Hello.")
        speech.end()
        voice_folder.remove(tmp_path, "anna")
        first.cancel()
        with pytest.raises(BadRequest, match="no voice is called 'anna'"):
            await anext(speech)
        assert await said(engine)


async def test_why_a_voice_cannot_be_made(tmp_path: Path) -> None:
    """A bad recording, an engine without a folder, a model that cannot, an engine that closes meanwhile."""
    async with Engine("tiny", process=False, measures=False, voices=tmp_path) as engine:
        with pytest.raises(BadRecording, match="must be 1 to 30 s"):
            await engine.add_voice("anna", recording(seconds=0.2), WORDS)
        making = asyncio.create_task(engine.add_voice("anna", recording(seconds=20), WORDS))
        await asyncio.sleep(0)
    with pytest.raises(EngineClosed):
        await making
    with pytest.raises(EngineClosed):
        await engine.add_voice("anna", recording(), WORDS)
    with pytest.raises(BadRequest, match="no folder for voices"):
        await Engine("tiny").add_voice("anna", recording(), WORDS)
    async with Engine("tiny-pointer", process=False, measures=False, voices=tmp_path) as engine:
        with pytest.raises(BadRequest, match="tiny-pointer cannot clone"):
            await engine.add_voice("anna", recording(), WORDS)
