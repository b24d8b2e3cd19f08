"""A call in a terminal: type to the agent, or talk to it with this machine's microphone and loudspeaker.

Either way the session, the engine and the playout queue are those of a call over the network, and where the listener is
comes back as `PlaybackReport`s: from the sound card's own time of each block, or, with text alone, from a listener who
reads along at the pace of speech.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress
from typing import Any, NamedTuple, Protocol, TextIO

import numpy as np
from numpy.typing import NDArray

from breeze_rtc.agent.call import Ears
from breeze_rtc.agent.session import AgentSession, Callbacks
from breeze_rtc.agent.turns import State
from breeze_rtc.agent.vad import FRAME_SAMPLES, SAMPLE_RATE, Samples, VoiceActivity
from breeze_rtc.clock import SECOND, Clock, MonotonicClock
from breeze_rtc.errors import BadRequest, MissingExtra, UnknownVoice
from breeze_rtc.media import rtp
from breeze_rtc.media.libopus import Decoder
from breeze_rtc.media.opus import LOOK_AHEAD_48K
from breeze_rtc.playback import PlaybackReport
from breeze_rtc.runtime.engine import Engine
from breeze_rtc.transport.playout import SLOT_NS, SLOT_TICKS, Playout, Slot

_REPORT_S = 0.1
_AHEAD_BLOCKS = 3
"""Blocks that wait for the sound card: what it asks for while the loop is busy, and what a barge-in still hears."""
_NOTHING_SAID_S = 0.3


class _Played(NamedTuple):
    ticks: int
    at_ns: int
    """When its first sample left the loudspeaker."""


class Loudspeaker(Protocol):
    """Takes a block of 20 ms each 20 ms, by its own clock."""

    async def play(self, take: Callable[[], Slot], played: Callable[[int, int], None]) -> None:
        """Until cancelled: `take` the next slot, and tell when it was `played`: its ticks, and the time in ns."""


class Reader:
    """The loudspeaker of a call in text: nobody hears it, and everybody reads at the pace of speech."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    async def play(self, take: Callable[[], Slot], played: Callable[[int, int], None]) -> None:
        """See `Loudspeaker`."""
        at = self._clock.now()
        while True:
            played(take().ticks, at)
            at += SLOT_NS
            await asyncio.sleep(max(0, at - self._clock.now()) / SECOND)


class SoundCard:
    """This machine's loudspeaker and microphone, by PortAudio.

    Raises MissingExtra without the `console` extra, and BadRequest where there is no sound card.
    """

    def __init__(self, clock: Clock) -> None:
        try:
            import sounddevice
        except ImportError:
            raise MissingExtra("Talking in the terminal", "console") from None
        except OSError as error:  # its wheel finds no PortAudio
            raise BadRequest(f"no sound here ({error}); on Debian: sudo apt-get install libportaudio2") from error
        self._device = sounddevice
        self._clock = clock
        self._blocks: deque[tuple[int, NDArray[np.float32]]] = deque()
        self._told: deque[_Played] = deque()
        self._lock = threading.Lock()  # PortAudio calls from a thread of its own
        self._decoder = Decoder(rtp.RTP_RATE)
        try:
            sounddevice.check_output_settings(samplerate=rtp.RTP_RATE, channels=1)
            sounddevice.check_input_settings(samplerate=SAMPLE_RATE, channels=1)
        except (sounddevice.PortAudioError, ValueError) as error:
            raise BadRequest(f"no sound card that speaks and listens ({error}); add --text to type instead") from error

    async def play(self, take: Callable[[], Slot], played: Callable[[int, int], None]) -> None:
        """See `Loudspeaker`."""
        with self._device.OutputStream(
            samplerate=rtp.RTP_RATE, channels=1, blocksize=SLOT_TICKS, dtype="float32", callback=self._fill
        ):
            while True:
                while len(self._blocks) < _AHEAD_BLOCKS:
                    slot = take()
                    pcm = self._decoder.decode(slot.payload)
                    self._blocks.append((slot.ticks, np.zeros(SLOT_TICKS, np.float32) if pcm is None else pcm))
                with self._lock:
                    told, self._told = self._told, deque()
                for block in told:
                    played(*block)
                await asyncio.sleep(SLOT_NS / 2 / SECOND)

    def _fill(self, out: NDArray[np.float32], frames: int, time: Any, status: Any) -> None:
        leaves_ns = self._clock.now() + round((time.outputBufferDacTime - time.currentTime) * SECOND)
        if not self._blocks:
            out.fill(0)
            return
        ticks, pcm = self._blocks.popleft()
        out[:, 0] = pcm[:frames]
        with self._lock:
            self._told.append(_Played(ticks, leaves_ns))

    async def microphone(self) -> AsyncIterator[Samples]:
        """Blocks of 32 ms at 16 kHz, for as long as they are read."""
        loop, blocks = asyncio.get_running_loop(), asyncio.Queue[Samples]()

        def heard(sound: NDArray[np.float32], frames: int, time: Any, status: Any) -> None:
            loop.call_soon_threadsafe(blocks.put_nowait, sound[:, 0].copy())

        with self._device.InputStream(
            samplerate=SAMPLE_RATE, channels=1, blocksize=FRAME_SAMPLES, dtype="float32", callback=heard
        ):
            while True:
                yield await blocks.get()


class ConsoleCall:
    """The session's `Call` on this machine."""

    def __init__(
        self,
        engine: Engine,
        loudspeaker: Loudspeaker,
        microphone: AsyncIterator[Samples] | None,
        screen: Screen,
        clock: Clock,
    ) -> None:
        self.closed = asyncio.Event()
        self._engine = engine
        self._loudspeaker = loudspeaker
        self._microphone = microphone
        self._screen = screen
        # The slot clock counts the sound card's blocks, so it runs as the card does and no slot is ever missed.
        self._sink = Playout(sample_rate=engine.sample_rate, ear=self._ear_ticks)
        self._sink.start(0)
        self._sink.open()
        self._taken_ns = 0
        self._taken_at: deque[tuple[int, int]] = deque(maxlen=100)
        self._played: _Played | None = None
        self._path_ns = 0
        self._clock = clock

    @property
    def sink(self) -> Playout:
        return self._sink

    def position(self, stream: int) -> PlaybackReport:
        now = self._clock.now()
        dry_ns = self._sink.dry_at(stream, self._taken_ns)
        return PlaybackReport(
            stream=stream,
            heard_samples=self._sink.heard_samples(stream, self._ear_ticks()),
            at_ns=now,
            path_delay_ns=self._path_ns,
            dry_at_ns=None if dry_ns is None else now + dry_ns - self._taken_ns,
            is_playing=not self._sink.is_paused,
        )

    def pause(self) -> None:
        self._sink.pause(self._taken_ns)

    def resume(self) -> None:
        self._sink.resume()

    async def flush(self) -> None:
        """What the sound card has taken is heard in a moment; then nothing more is."""
        if not self._sink.is_paused:
            self.pause()
        await asyncio.sleep(self._path_ns / SECOND)
        self._sink.silenced_at(self._sink.sent_ticks)
        self._sink.resume()

    def send(self, message: dict[str, Any]) -> None:
        self._screen.show(message)

    async def microphone(self) -> AsyncIterator[Samples]:
        if self._microphone is None:
            await self.closed.wait()
            return
        async for block in self._microphone:
            yield block

    async def run(self) -> None:
        """Play and report until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._loudspeaker.play(self._take, self._has_played))
            group.create_task(self._report())

    def _take(self) -> Slot:
        slot = self._sink.next_slot(self._taken_ns)
        self._taken_ns += SLOT_NS
        self._taken_at.append((slot.ticks, self._clock.now()))
        return slot

    def _has_played(self, ticks: int, at_ns: int) -> None:
        self._played = _Played(ticks, at_ns)
        taken_ns = next((at for taken, at in self._taken_at if taken == ticks), at_ns)
        self._path_ns = max(0, at_ns - taken_ns)

    def _ear_ticks(self) -> int:
        if self._played is None:
            return 0
        since = (self._clock.now() - self._played.at_ns) * rtp.RTP_RATE // SECOND
        return max(0, min(self._played.ticks + since - LOOK_AHEAD_48K, self._sink.sent_ticks))

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(_REPORT_S)
            for stream in self._sink.streams:
                self._engine.report(self.position(stream))
            self._sink.forget(self._ear_ticks())


class Screen:
    """Writes a call down as it is heard."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._texts: dict[int, str] = {}
        self._shown: dict[int, int] = {}
        self._line: int | None = None  # the stream whose line has no end yet

    def show(self, message: dict[str, Any]) -> None:
        """One message of the session."""
        stream = message.get("stream", 0)
        match message["type"]:
            case "speech":
                self._texts[stream] = self._texts.get(stream, "") + message["text"]
            case "heard":
                self._until(stream, message["chars"])
            case "speech_end":
                self._until(stream, message["chars"])
                if stream == self._line:
                    self._end_line(is_cut=message["interrupted"])
            case "user" if message["final"] and message["text"]:
                self._end_line(is_cut=True)
                self._write(f"you: {message['text']}\n")
            case "error":
                self._end_line(is_cut=True)
                self._write(f"! {message['message']}. {message['fix']}\n")

    def _until(self, stream: int, chars: int) -> None:
        shown = self._shown.get(stream, 0)
        if chars > shown and (stream == self._line or stream not in self._shown):
            if stream not in self._shown:
                self._end_line(is_cut=False)
                self._line = stream
                self._write("agent: ")
            self._write(self._texts.get(stream, "")[shown:chars].replace("\n", " "))
            self._shown[stream] = chars

    def _end_line(self, *, is_cut: bool) -> None:
        if self._line is not None:
            self._line = None
            self._write(" --\n" if is_cut else "\n")

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


async def talk(
    callbacks: Callbacks,
    *,
    engine: Engine,
    lines: AsyncIterator[str],
    out: TextIO,
    is_piped: bool = False,
    card: SoundCard | None = None,
    ears: Ears | None = None,
    activity: VoiceActivity | None = None,
    clock: Clock | None = None,
) -> None:
    """Hold one call, until the agent ends it or there are no more lines.

    is_piped: a line waits until the agent has said what it had to say; a person's interrupts it.
    """
    clock = clock or MonotonicClock()
    microphone = card.microphone() if card is not None else None
    call = ConsoleCall(engine, card or Reader(clock), microphone, Screen(out), clock)
    session = AgentSession(callbacks, call=call, voice=engine, ears=ears, activity=activity)

    async def type_lines() -> None:
        await asyncio.sleep(_NOTHING_SAID_S)
        async for line in lines:
            if is_piped:
                await _quiet(session)
            session.type(line)
        if is_piped:
            await _quiet(session)
        await session.close()

    tasks = [asyncio.create_task(call.run()), asyncio.create_task(type_lines())]
    try:
        await session.run()
    finally:
        call.closed.set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _quiet(session: AgentSession) -> None:
    await asyncio.sleep(_NOTHING_SAID_S)
    while session.state is not State.LISTENING:  # noqa: ASYNC110 - it watches from outside
        await asyncio.sleep(0.02)


async def typed() -> AsyncIterator[str]:
    """Lines of standard input, from a terminal, a pipe or a file."""
    loop, lines = asyncio.get_running_loop(), asyncio.Queue[str | None]()

    def read() -> None:
        # A thread that ends with the process: nothing can wake a read of a terminal.
        with suppress(RuntimeError):
            for line in sys.stdin:
                loop.call_soon_threadsafe(lines.put_nowait, line)
            loop.call_soon_threadsafe(lines.put_nowait, None)

    threading.Thread(target=read, daemon=True).start()
    while (line := await lines.get()) is not None:
        yield line.strip()


def run(
    callbacks: Callbacks,
    *,
    text: bool = False,
    engine: Engine | None = None,
    recogniser: Callable[[], Any] | None = None,
) -> None:
    """Talk to an agent in this terminal.

    text: by typing alone, without a sound card.  engine: what speaks, not started yet; by default with the nano voice.
    recogniser: makes what understands the microphone; by default moonshine.
    """
    engine = engine or Engine(measures=False)
    asyncio.run(_run(callbacks, engine, text=text, recogniser=recogniser))


async def _run(callbacks: Callbacks, engine: Engine, *, text: bool, recogniser: Callable[[], Any] | None) -> None:
    from breeze_rtc.agent.listen import Listener

    is_piped = not sys.stdin.isatty()
    card = None if text else SoundCard(MonotonicClock())
    async with AsyncExitStack() as stack:
        ears, activity = None, None
        if card is not None:
            activity = VoiceActivity()
            stack.callback(activity.close)
            try:
                ears = (recogniser or Listener)()
                stack.push_async_callback(ears.close)
            except MissingExtra as error:
                print(f"{error}; until then, type.")
        await stack.enter_async_context(engine)
        if callbacks.voice is not None and callbacks.voice not in engine.voices:
            raise UnknownVoice(callbacks.voice, engine.voices)
        if not is_piped:
            print(
                "Talk, or type and press Enter; Ctrl-D ends the call." if card else "Type and press Enter; Ctrl-D ends."
            )
        await talk(
            callbacks,
            engine=engine,
            lines=typed(),
            out=sys.stdout,
            is_piped=is_piped,
            card=card,
            ears=ears,
            activity=activity,
        )
