"""A call with an agent, without a browser, a network or a wait: who is interrupted when, and what was really heard.

    async with agent.test() as caller:
        await caller.say("What time is it?")
        assert caller.heard_text.startswith("It is")

The session, the scheduler, the encoder, the sink and the playhead are the ones that serve; the network, the player and
the loop's clock are simulated.  What the agent says is tones, one pair for each word, so that the recording at the ear
says which words were heard, whatever the session believes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from breeze_rtc.agent.session import AgentSession, Callbacks, Ears
from breeze_rtc.agent.turns import State
from breeze_rtc.agent.vad import FRAME_SAMPLES, SAMPLE_RATE, Samples, VoiceActivity
from breeze_rtc.clock import SECOND
from breeze_rtc.playback import PlaybackReport
from breeze_rtc.testing.ear import HeardWord, Listener, Network, Path, Recording
from breeze_rtc.testing.virtual_time import LoopClock, virtual_time
from breeze_rtc.testing.voice import ToneVoice
from breeze_rtc.transport.playhead import Playhead, Position
from breeze_rtc.transport.playout import SLOT_NS, Playout, Slot
from breeze_rtc.transport.signaling import Flushed, Report

_REPORT_S = 0.1
_FLUSH_CONFIRM_S = 0.3
_FRAME_S = FRAME_SAMPLES / SAMPLE_RATE
_PLAYER_PHASE_S = 0.007
_USERS = (State.HEARING, State.READING, State.OVERLAP, State.DOUBT)


class SimulatedCall:
    """The other end, as the session sees it: what `WebRtcCall` and a page do, in virtual time."""

    def __init__(self, voice: ToneVoice, network: Network, listener: Listener, clock: LoopClock) -> None:
        self.closed = asyncio.Event()
        self.messages: list[tuple[float, dict[str, Any]]] = []
        """What the page was told, and when."""
        self.flushes: list[tuple[float, int]] = []
        """When each interruption silenced the ear, and the number of the next word that the voice would be given."""
        self.microphone_blocks: asyncio.Queue[Samples | None] = asyncio.Queue()
        self._voice = voice
        self._listener = listener
        self._clock = clock
        self._down, self._up = Path(network, seed=1), Path(network, seed=2)
        self._sink = Playout(sample_rate=voice.sample_rate, ear=self._ear_ticks)
        self._flushed = asyncio.Event()
        self._paused_s = 0.0, 0
        self._sink.start(clock.now())
        slots = self._sink.clock
        assert slots is not None
        self._playhead = Playhead(slots, 0)

    # --- the session's Call

    @property
    def sink(self) -> Playout:
        return self._sink

    def position(self, stream: int) -> PlaybackReport:
        where = self._where()
        gaps, gap_ns = self._sink.gaps_in(stream)
        return PlaybackReport(
            stream=stream,
            heard_samples=self._sink.heard_samples(stream, where.ticks),
            at_ns=where.at_ns,
            path_delay_ns=where.path_delay_ns,
            dry_at_ns=self._sink.dry_at(stream, where.at_ns),
            is_playing=where.is_playing and not self._sink.is_paused,
            is_measured=where.is_measured,
            error_ns=where.error_ns,
            gaps=gaps,
            gap_ns=gap_ns,
            concealed_ns=self._listener.concealed * SLOT_NS,
        )

    def pause(self) -> None:
        now = self._clock.now()
        self._paused_s = now / SECOND, len(self._voice.words)
        resume_ticks = self._sink.pause(now)
        self._playhead.flush(resume_ticks)
        self._flushed.clear()
        self._down.send(lambda: self._mute(resume_ticks), is_reliable=True)

    def resume(self) -> None:
        self._sink.resume()

    async def flush(self) -> None:
        if not self._sink.is_paused:
            self.pause()
        self.flushes.append(self._paused_s)
        with suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH_CONFIRM_S):
                await self._flushed.wait()
        self._sink.resume()

    def send(self, message: dict[str, Any]) -> None:
        self.messages.append((self._clock.now() / SECOND, message))

    async def microphone(self) -> AsyncIterator[Samples]:
        while (block := await self.microphone_blocks.get()) is not None:
            yield block

    # --- its life

    async def run(self) -> None:
        """Send, play and report, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._send())
            group.create_task(self._play())
            group.create_task(self._report())

    def hear(self, block: Samples) -> None:
        """A block of the caller's microphone sets out."""
        self._up.send(lambda: self.microphone_blocks.put_nowait(block), is_reliable=True)

    async def _send(self) -> None:
        while True:
            await self._until(self._sink.next_at())
            self._send_slot(self._sink.next_slot(self._clock.now()))

    def _send_slot(self, slot: Slot) -> None:
        self._down.send(lambda: self._listener.receive(slot.ticks, slot.payload))

    async def _play(self) -> None:
        at = self._clock.now() + round(_PLAYER_PHASE_S * SECOND)
        while True:
            await self._until(at)
            self._listener.pull()
            at += SLOT_NS

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(_REPORT_S)
            self._send_report(self._listener.report())

    def _send_report(self, report: Report) -> None:
        self._up.send(lambda: self._take(report), is_reliable=True)

    def _take(self, report: Report) -> None:
        now = self._clock.now()
        self._playhead.report(report, self._sink.sent_ticks, now)
        where = self._where()
        self._sink.hold(is_playing=where.is_playing)
        if self._playhead.has_played and where.is_playing:
            self._sink.open()
        for stream in self._sink.streams:
            self._voice.report(self.position(stream))
        self._sink.forget(where.ticks)

    def _mute(self, resume_ticks: int) -> None:
        flushed = self._listener.mute(resume_ticks)
        if flushed is not None:
            self._up.send(lambda: self._fell_silent(flushed), is_reliable=True)

    def _fell_silent(self, flushed: Flushed) -> None:
        ticks = self._playhead.flushed(flushed, self._sink.sent_ticks)
        if ticks is not None:
            self._sink.silenced_at(ticks)
        self._flushed.set()

    def _where(self) -> Position:
        return self._playhead.position(self._clock.now(), self._sink.sent_ticks)

    def _ear_ticks(self) -> int:
        return self._where().ticks

    async def _until(self, at_ns: int) -> None:
        # A little longer, because floats may end a sleep a nanosecond early, and no slot leaves before its time.
        await asyncio.sleep((at_ns - self._clock.now()) / SECOND + 1e-8)


class ScriptedActivity:
    """Stands in for the voice activity model where a caller's speech is text: whatever is not silent is voice."""

    def open(self) -> ScriptedActivity:
        return self

    async def feed(self, block: Samples) -> list[tuple[Samples, float]]:
        return [(block, float(np.abs(block).max() > 0.1))]


class ScriptedEars:
    """Understands what `Caller.say` says, as far as it has been said."""

    def __init__(self) -> None:
        self._words: list[str] = []

    def speech_of(self, text: str) -> Samples:
        """Sound that stands for `text`: the loudness of each piece is the number of its word."""
        pieces = []
        for word in text.split():
            loudness = 0.25 + len(self._words) % 2_048 / 4_096
            self._words.append(word)
            samples = round((0.15 + 0.065 * len(word)) * SAMPLE_RATE)
            pieces.append(np.resize(np.array([loudness, -loudness], np.float32), samples))
        return np.concatenate(pieces)

    async def transcribe(self, samples: Samples) -> str:
        numbers = np.rint((np.abs(samples) - 0.25) * 4_096)
        order = dict.fromkeys(int(number) for number in numbers[np.abs(samples) > 0.1])
        return " ".join(self._words[number] for number in order if 0 <= number < len(self._words))


@dataclass(frozen=True, slots=True)
class BargeIn:
    """One interruption; times are seconds of the loop's clock."""

    onset_s: float | None
    """When the caller began to speak; None where a button was pressed or a text was typed."""
    decided_s: float
    """When the agent was told to be silent."""
    silent_s: float
    """When its last sound had left the loudspeaker."""

    @property
    def stop_s(self) -> float:
        """From the decision to silence at the ear; 0 where nothing was heard after it."""
        return max(0.0, self.silent_s - self.decided_s)


class Caller:
    """Somebody who calls an agent; `async with agent.test() as caller`.

    voice, network: how the agent speaks and how its sound travels; a `ToneVoice` and a `Network` of 30 ms by default.
    ears, activity: what understands the caller, for tests with real sound; by default the text of `say` is understood.
    raises: an error of the agent's own code fails the test at the end of the call; `errors` has them in any case.
    Other options are `AgentSession`'s.
    """

    def __init__(
        self,
        callbacks: Callbacks,
        *,
        voice: ToneVoice | None = None,
        network: Network | None = None,
        ears: Ears | None = None,
        activity: VoiceActivity | None = None,
        raises: bool = True,
        **options: Any,
    ) -> None:
        self.voice = voice or ToneVoice()
        self.network = network or Network()
        self._callbacks = callbacks
        self._script = ScriptedEars()
        self._ears = ears or self._script
        self._activity: Any = activity or ScriptedActivity()
        self._raises = raises
        self._options = options
        self._stack = AsyncExitStack()
        self._unsaid: list[Samples] = []
        self._onsets_s: list[float] = []
        self._spoken = asyncio.Event()
        self._said_s = 0.0
        self._answered_after_stream = 0
        self._ear: tuple[float, Recording] | None = None

    async def __aenter__(self) -> Self:
        stack = self._stack
        try:
            stack.enter_context(virtual_time())
            await stack.enter_async_context(self.voice)
            self._clock = LoopClock()
            self.listener = Listener(self._clock)
            self.call = SimulatedCall(self.voice, self.network, self.listener, self._clock)
            self.session = AgentSession(
                self._callbacks,
                call=self.call,
                voice=self.voice,
                ears=self._ears,
                activity=self._activity,
                **self._options,
            )
            self.began_s = self.now
            self._running = [asyncio.create_task(work) for work in (self.call.run(), self._speak())]
            self._conversation = asyncio.create_task(self.session.run())
            await asyncio.sleep(0)  # It begins.
        except BaseException:
            await stack.aclose()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        try:
            await self.hang_up()
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)
            await self._stack.aclose()
        if kind is None and self._raises and self.errors:
            raise RuntimeError(f"the agent failed: {self.errors[0]}")

    # --- what a caller does

    async def say(self, text: str, *, waits: bool = True) -> None:
        """Say `text`, at the pace of a person.

        Returns when the agent has heard it and its answer has been heard in full; with `waits=False` once the last word
        has been said.
        """
        await self._sound(self._script.speech_of(text), waits)

    async def sound(self, samples: Samples, *, waits: bool = True) -> None:
        """Make a sound, 16 kHz mono float32: a cough, or real speech where `ears` and `activity` are real."""
        await self._sound(samples, waits)

    async def type(self, text: str, *, waits: bool = True) -> None:
        """Send `text` as the page's text box does."""
        self._begin_turn()
        self._said_s = self.now
        self.session.type(text)
        if waits:
            await self.quiet()

    def interrupt(self) -> None:
        """Press the page's button."""
        self.session.interrupt()

    async def wait(self, seconds: float) -> None:
        """Let so much of the call pass."""
        await asyncio.sleep(seconds)

    async def first_sound(self) -> None:
        """Wait until the agent's next sound leaves the loudspeaker, or is leaving it."""
        await self._until(self.listener.is_sounding, 0.01)

    async def quiet(self) -> None:
        """Wait until the agent has no more to say and all of it was heard."""
        await asyncio.sleep(0.05)
        await self._until(lambda: self.session.state is State.LISTENING)
        await asyncio.sleep(0.1)

    async def hang_up(self) -> None:
        """End the call; returns when the agent has put everything away."""
        self.call.closed.set()
        await self._conversation

    # --- what became of it

    @property
    def now(self) -> float:
        """The loop's clock, in seconds."""
        return asyncio.get_running_loop().time()

    @property
    def is_over(self) -> bool:
        """The call has ended."""
        return self._conversation.done()

    @property
    def ear(self) -> Recording:
        """What has been heard so far, from the first sample of the call."""
        if self._ear is None or self._ear[0] != self.now:
            self._ear = self.now, self.listener.recording(self.voice.words)
        return self._ear[1]

    @property
    def heard_words(self) -> list[HeardWord]:
        """The agent's words that sounded at the ear, of what it began to say since the caller's last turn."""
        return [heard for heard in self.ear.words if heard.word.stream > self._answered_after_stream]

    @property
    def heard_text(self) -> str:
        """The same as text, without words of which less than half was heard: the answer, as far as it was heard."""
        texts: dict[int, str] = {}
        for heard in self.heard_words:
            if heard.sounded_s >= heard.word.voiced_s / 2:
                texts[heard.word.stream] = texts.get(heard.word.stream, "") + heard.text
        return " ".join(text.strip() for text in texts.values())

    @property
    def words_wrong(self) -> int:
        """By how many words what the session says was heard differs from the recording, at the worst of all speeches.

        A word of which a part was heard may count or not.
        """
        written: dict[int, str] = {}
        worst = 0
        for _, said in self.call.messages:
            if said["type"] == "speech":
                written[said["stream"]] = written.get(said["stream"], "") + said["text"]
            elif said["type"] == "speech_end":
                stream, chars = said["stream"], said["chars"]
                heard = [word for word in self.ear.words if word.word.stream == stream]
                # What the network garbled was heard if a word after it was.
                begun = heard[-1].word.index + 1 if heard else 0
                whole = begun if not heard or heard[-1].is_whole else begun - 1
                claimed = sum(word.stream == stream and word.end_chars <= chars for word in self.voice.words)
                worst = max(worst, claimed - begun, whole - claimed)
        return worst

    @property
    def reply_delay_s(self) -> float | None:
        """From the end of the caller's last turn to the first sound of the answer at the ear; None before that."""
        words = self.heard_words
        return words[0].start_s - self._said_s if words else None

    @property
    def barge_ins(self) -> list[BargeIn]:
        """The interruptions so far that had something to silence."""
        found = []
        for decided_s, first_new_word in self.call.flushes:
            old = [heard.end_s for heard in self.ear.words if heard.word.number < first_new_word]
            onset_s = max((at for at in self._onsets_s if at <= decided_s), default=None)
            if onset_s is not None and decided_s - onset_s > 2.0:
                onset_s = None
            if old:
                found.append(BargeIn(onset_s, decided_s, max(old)))
        return found

    @property
    def wasted_s(self) -> float:
        """Seconds of speech that were made and have not been heard."""
        return self.voice.made_s - sum(
            heard.sounded_s + heard.word.seconds - heard.word.voiced_s for heard in self.ear.words
        )

    @property
    def errors(self) -> list[str]:
        """What went wrong in the agent, as the page was told."""
        return [f"{said['message']}. {said['fix']}" for _, said in self.call.messages if said["type"] == "error"]

    # ---

    async def _until(self, check: Callable[[], bool], step_s: float = 0.02) -> None:
        """Look again and again, for looking takes no time; until the call ends, at the latest."""
        while not check() and not self.is_over:  # noqa: ASYNC110 - it watches from outside
            await asyncio.sleep(step_s)

    def _begin_turn(self) -> None:
        self._answered_after_stream = self.voice.last_stream

    async def _sound(self, samples: Samples, waits: bool) -> None:
        self._begin_turn()
        self._spoken.clear()
        self._unsaid += np.split(samples, range(FRAME_SAMPLES, len(samples), FRAME_SAMPLES))
        await self._spoken.wait()
        self._said_s = self.now
        if not waits:
            return
        await asyncio.sleep(0.3)
        await self._until(lambda: self.session.state not in _USERS)
        await self.quiet()

    async def _speak(self) -> None:
        """The microphone: a block of 32 ms each 32 ms, silent or not."""
        silence = np.zeros(FRAME_SAMPLES, np.float32)
        is_speaking, at_s = False, self.now
        while True:
            block = self._unsaid.pop(0) if self._unsaid else silence
            if self._unsaid or block is not silence:
                if not is_speaking:
                    self._onsets_s.append(self.now)
                is_speaking = True
            elif is_speaking:
                is_speaking = False
                self._spoken.set()
            at_s += _FRAME_S
            await asyncio.sleep(max(0.0, at_s - self.now))
            self.call.hear(np.pad(block, (0, FRAME_SAMPLES - len(block))))
