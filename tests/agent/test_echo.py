"""The agent's own voice, back through a loudspeaker and a microphone: real speech, real codecs, real voice activity."""

from __future__ import annotations

import asyncio
import wave
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_call import RATE, FakeCall, FakeReply, FakeVoice, ScriptedEars, now, run
from speech import spoken

from breeze_rtc.agent.echo import EchoGuard
from breeze_rtc.agent.session import AgentSession, Callbacks
from breeze_rtc.agent.vad import FRAME_SAMPLES, Cue, SpeechGate, VoiceActivity
from breeze_rtc.media.libopus import Decoder
from breeze_rtc.media.opus import SpeechEncoder
from breeze_rtc.runtime.engine import Engine

HUMAN = Path("/usr/share/pocketsphinx/test/data/librivox/sense_and_sensibility_01_austen_64kb-0870.wav")
TEXT = (
    "Once there was a small boat on a wide sea. It had one sail and one old sailor. "
    "Every night the sailor looked at the stars and told the boat a story."
)


@pytest.fixture(scope="module")
def agent() -> np.ndarray:
    """The nano voice, 24 kHz float32."""

    async def speak() -> bytes:
        async with Engine("nano", process=False, measures=False) as engine:
            speech = engine.speak(seed=1)
            speech.push(TEXT)
            speech.end()
            return b"".join([chunk.pcm async for chunk in speech])

    return np.frombuffer(asyncio.run(speak()), np.int16).astype(np.float32) / 32_768


@pytest.fixture(scope="module")
def user() -> np.ndarray:
    """A person reading (Debian's pocketsphinx-testdata), or espeak-ng where that is not installed; 24 kHz."""
    if not HUMAN.exists():
        return spoken("wait a moment please, I have a question about the boat", rate=RATE)
    with wave.open(str(HUMAN)) as file:
        samples = np.frombuffer(file.readframes(1_000_000), np.int16).astype(np.float32) / 32_768
    at = np.arange(len(samples) * 3 // 2) * 2 / 3
    return np.interp(at, np.arange(len(samples)), samples).astype(np.float32)


def through_opus(sound: np.ndarray, rate: int) -> np.ndarray:
    encoder, decoder = SpeechEncoder(RATE), Decoder(rate)
    packets = encoder.encode((np.clip(sound, -1, 1) * 32_767).astype(np.int16)) + encoder.end()
    return np.concatenate([decoder.decode(packet.payload) for packet in packets])


def microphone(
    agent: np.ndarray, *, echo_db: float | None, delay_s: float, user: np.ndarray | None = None, at_s: float = 0.0
) -> np.ndarray:
    """What the server gets at 16 kHz: the agent's sound after a codec, a room and `delay_s`, the user, a little noise,
    and a codec back."""
    random = np.random.default_rng(1)
    sound = random.standard_normal(len(agent) + 2 * RATE).astype(np.float32) * 3e-4
    if echo_db is not None:
        room = random.standard_normal(RATE // 4) * np.exp(-6.9 * np.linspace(0, 1, RATE // 4)) * 0.05
        room[0] = 1.0
        far = np.convolve(through_opus(agent, RATE), room)[: len(agent)] * 10 ** (echo_db / 20)
        first = round(delay_s * RATE)
        sound[first : first + len(far)] += far
    if user is not None:
        first = round(at_s * RATE)
        said = (user / np.abs(user).max() * 0.4)[: len(sound) - first]
        sound[first : first + len(said)] += said
    return through_opus(sound, 16_000)


def onsets(agent: np.ndarray, heard: np.ndarray, *, guarded: bool) -> list[float]:
    """When a session would think that the user begins, in seconds."""

    async def listen() -> list[float]:
        activity = VoiceActivity()
        track, gate, guard = activity.open(), SpeechGate(), EchoGuard(RATE)
        jitter = np.random.default_rng(2)
        pcm = (np.clip(agent, -1, 1) * 32_767).astype("<i2").tobytes()
        found, made = [], 0
        for count, (frame, of_voice) in enumerate(await track.feed(heard)):
            clock_s = (count + 1) * FRAME_SAMPLES / 16_000
            arrived_s = 1_000 + clock_s + jitter.exponential(0.004)
            ear = round(clock_s * RATE)
            while made < min(len(agent), ear + RATE // 2):  # made half a second ahead
                guard.made(1, pcm[2 * made : 2 * made + 2 * 9_600])
                made += 9_600
            guard.plays({1: min(ear, len(agent))} if ear < len(agent) + 2_400 else {}, arrived_s)
            probability = guard.judge(frame, of_voice, arrived_s) if guarded else of_voice
            if gate.feed(probability) is Cue.ONSET:
                found.append(clock_s)
        activity.close()
        return found

    return asyncio.run(listen())


@pytest.mark.parametrize(("echo_db", "delay_s"), [(-20, 0.18), (-20, 0.5), (-30, 0.08)])
def test_the_agents_own_voice_is_no_user(agent: np.ndarray, echo_db: float, delay_s: float) -> None:
    """A loudspeaker into the microphone: the voice activity alone would interrupt, the guarded one does not.

    Reproduction 42 (livekit#315, #3758, pipecat#3062).
    """
    heard = microphone(agent, echo_db=echo_db, delay_s=delay_s)
    assert onsets(agent, heard, guarded=False)
    assert onsets(agent, heard, guarded=True) == []


@pytest.mark.parametrize("at_s", [1.2, 3.0])
def test_a_user_over_the_echo_is_believed(agent: np.ndarray, user: np.ndarray, at_s: float) -> None:
    """Within 350 ms of when the voice activity would have believed a user without any echo."""
    alone = onsets(agent, microphone(agent, echo_db=None, delay_s=0, user=user, at_s=at_s), guarded=False)
    over = onsets(agent, microphone(agent, echo_db=-20, delay_s=0.18, user=user, at_s=at_s), guarded=True)
    assert alone[0] <= over[0] <= alone[0] + 0.35


@pytest.mark.parametrize(("at_s", "later_s"), [(0.1, 0.5), (0.6, 0.5), (1.2, 0.1), (3.0, 0.1)])
def test_without_an_echo_a_user_is_believed(agent: np.ndarray, user: np.ndarray, at_s: float, later_s: float) -> None:
    """A user with headphones interrupts as before; one who begins with the agent, half a second later at the most."""
    heard = microphone(agent, echo_db=None, delay_s=0, user=user, at_s=at_s)
    plain, guarded = onsets(agent, heard, guarded=False), onsets(agent, heard, guarded=True)
    assert plain[0] <= guarded[0] <= plain[0] + later_s


def test_a_session_hears_through_the_guard() -> None:
    """A call whose loudspeaker feeds its microphone, on the virtual clock: the agent says all it has to say and is not
    held once; without the guard it is."""

    class Voice(FakeVoice):
        """Words of noise, each with a loudness and a colour of its own."""

        def __init__(self) -> None:
            super().__init__()
            self.pcm = np.zeros(0, np.float32)

        def speak(self, *, voice: str | None = None) -> Any:
            reply = super().speak(voice=voice)
            reply.__class__ = NoisyReply
            return reply

    class NoisyReply(FakeReply):
        async def __aiter__(self) -> AsyncIterator[Any]:
            async for chunk in super().__aiter__():
                random = np.random.default_rng(chunk.start_samples)
                noise = np.convolve(random.standard_normal(chunk.samples + 63), random.standard_normal(64), "valid") / 8
                noise *= 0.15 * np.repeat(random.uniform(0.05, 1, chunk.samples // 1_200), 1_200)
                pcm = (np.clip(noise, -1, 1) * 32_767).astype("<i2")
                self._voice.pcm = np.concatenate((self._voice.pcm, pcm.astype(np.float32) / 32_768))  # type: ignore[attr-defined]
                yield type(chunk)(chunk.start_samples, chunk.samples, chunk.packets, chunk.marks, pcm.tobytes())

    class Loudness:
        def open(self) -> Loudness:
            return self

        async def feed(self, block: np.ndarray) -> list[tuple[np.ndarray, float]]:
            return [(block, float(np.sqrt(np.square(block).mean()) > 0.002))]

    async def play(*, is_guarded: bool) -> bool:
        voice, call = Voice(), FakeCall()
        session = AgentSession(Callbacks(), call=call, voice=voice, ears=ScriptedEars("stop"), activity=Loudness())  # type: ignore[arg-type]
        if not is_guarded:
            session._echo.judge = lambda frame, probability, now_s: probability  # type: ignore[method-assign]

        async def loop_back() -> None:
            while True:
                await asyncio.sleep(FRAME_SAMPLES / 16_000)
                at = np.arange(FRAME_SAMPLES) * 1.5 + call.sink.heard(1, now() - 0.18) - 1.5 * FRAME_SAMPLES
                echo = 0.1 * np.interp(at, np.arange(len(voice.pcm)), voice.pcm, 0, 0) if len(voice.pcm) else 0 * at
                call._mic.put_nowait(echo.astype(np.float32))

        async with asyncio.TaskGroup() as group:
            held = group.create_task(session.run())
            microphone = group.create_task(loop_back())
            await asyncio.sleep(1)
            handle = await session.say("one two three four five six seven eight nine ten eleven twelve")
            microphone.cancel()
            call.closed.set()
            await held
        return not handle.interrupted and call.flushes == []

    async def both() -> None:
        assert await play(is_guarded=True)
        assert not await play(is_guarded=False)

    run(both())
