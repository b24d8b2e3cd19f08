"""What a session needs of the world: a call, a voice, and ears.  Whoever opens the door brings them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Protocol

from breeze_rtc.agent.vad import Samples
from breeze_rtc.playback import AudioSink, PlaybackReport, SpeechPacket, TextMark


class SpokenChunk(Protocol):
    """Some sound of one stream, as the voice makes it."""

    @property
    def start_samples(self) -> int: ...
    @property
    def samples(self) -> int: ...
    @property
    def packets(self) -> tuple[SpeechPacket, ...]: ...
    @property
    def pcm(self) -> bytes: ...
    @property
    def marks(self) -> tuple[TextMark, ...]: ...


class Reply(Protocol):
    """One utterance being spoken: text goes in, chunks of sound come out until the last."""

    @property
    def stream(self) -> int: ...
    def push(self, text: str) -> None: ...
    def end(self) -> None: ...
    def nudge(self) -> bool:
        """Wake whoever reads it and sleeps although there is sound; whether there was one."""

    def cancel(self) -> None: ...
    def __aiter__(self) -> AsyncIterator[SpokenChunk]: ...


class Voice(Protocol):
    """What speaks."""

    @property
    def sample_rate(self) -> int: ...
    @property
    def reads_numbers(self) -> bool:
        """Whether it says "$12.50" as a person would; otherwise it gets words."""

    @property
    def pace(self) -> float | None:
        """Seconds of speech that it makes in a second; None while nobody knows."""

    @property
    def stumble_s(self) -> float:
        """The longest that it has lately stood still."""

    def speak(self, *, voice: str | None = None) -> Reply: ...


class Ears(Protocol):
    """What understands speech: 16 kHz mono float32 -> words, "" when there are none."""

    async def transcribe(self, samples: Samples) -> str: ...


class Telephone(Protocol):
    """What the line of a telephone call can do besides sound."""

    async def send_dtmf(self, keys: str) -> None:
        """Press keys: 0 to 9, *, #, A to D."""

    async def transfer(self, to: str) -> None:
        """Put the caller through to another number."""


class Call(Protocol):
    """The other end: a sink for packets, and where its listener is."""

    @property
    def sink(self) -> AudioSink: ...
    @property
    def closed(self) -> asyncio.Event: ...
    def position(self, stream: int) -> PlaybackReport:
        """Where the listener is in `stream` now."""

    def pause(self) -> None:
        """Silence the ear now and keep all there is to say."""

    def resume(self) -> None:
        """Speak on from the first sample that was not heard; without a pause, nothing."""

    async def flush(self) -> None:
        """Silence what is already on its way, unless a pause has; return once the listener's position is final, or soon
        in any case.  What was not cleared goes on then."""

    def send(self, message: dict[str, Any]) -> None:
        """Tell the page something; never waits."""

    def microphone(self) -> AsyncIterator[Samples]:
        """16 kHz mono float32 blocks of the user's microphone; ends with the call."""
