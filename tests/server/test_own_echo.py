"""A caller's loudspeaker, heard by their microphone, over real packets: the nano voice, the real voice activity."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator

import numpy as np
from page import serving
from python_listener import Microphone, PythonListener, clock
from speech import human

from breeze_rtc.agent.session import AgentSession, Callbacks
from breeze_rtc.clock import MS
from breeze_rtc.media import rtp
from breeze_rtc.runtime.engine import Engine

TEXT = (
    "Once there was a small boat on a wide sea. It had one sail and one old sailor. "
    "Every night the sailor looked at the stars and told the boat a story. "
    "It was a story about the land, and the trees it had been, before it was a boat."
)
DELAY_NS = 180 * MS


class OpenMicrophone(Microphone):
    """Hears the room: what the page's loudspeaker plays, 20 dB down and 180 ms later, and the user over it."""

    def __init__(self, user: np.ndarray) -> None:
        super().__init__(np.zeros(0, np.int16))
        self.listener: PythonListener | None = None
        self.user_at_ns: int | None = None
        self._user = iter(np.split(user[: len(user) // 960 * 960], len(user) // 960))
        self._frames = self._room()

    def _room(self) -> Iterator[np.ndarray]:
        while True:
            at_ns = self._start_ns + self._sent * 20 * MS
            sound = np.zeros(960, np.float32)
            if self.listener is not None and self.listener.heard:
                first = self.listener.heard[0]
                ticks = (at_ns - DELAY_NS - first.pulled_ns) * 48 // MS
                if ticks >= 0:
                    sound = self.listener.pcm(rtp.add(first.rtp, ticks), 960) * np.float32(0.1)
            if self.user_at_ns is not None and at_ns >= self.user_at_ns:
                sound = sound + next(self._user, np.zeros(960, np.float32))
            yield np.clip(sound, -32_768, 32_767).astype(np.int16)


async def test_the_agent_speaks_through_its_echo_and_yields_to_a_user() -> None:
    """Five seconds of its own voice in the microphone do not hold it once; a person who reads over it does, soon.

    Reproduction 42 (livekit#315), over a real connection.
    """
    clip = human()[0][0]
    user = np.interp(np.arange(3 * len(clip)) / 3, np.arange(len(clip)), clip) / np.abs(clip).max() * 13_000

    async def enter(session: AgentSession) -> AsyncGenerator[str, None]:
        yield TEXT

    class Ears:
        async def transcribe(self, samples: np.ndarray) -> str:
            return "wait a moment"

        async def close(self) -> None:
            """Nothing to close."""

    engine = Engine("nano", process=True, measures=False)
    async with serving(Callbacks(on_enter=enter), engine=engine) as hall:
        hall.server._listener = Ears()  # type: ignore[assignment]
        microphone = OpenMicrophone(user)
        async with hall.page(microphone=microphone) as page:
            microphone.listener = page.listener
            await page.call()
            await page.one("heard")
            await asyncio.sleep(5)
            assert page.all("flush") == []
            (call,) = hall.server._calls
            assert call._session._echo.lag is not None
            microphone.user_at_ns = clock.now()
            end = await page.one("speech_end")
            assert end["interrupted"]
            assert (clock.now() - microphone.user_at_ns) / MS < 2_500
            assert len(page.all("flush")) == 1
