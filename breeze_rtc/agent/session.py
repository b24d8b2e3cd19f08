"""One call: it listens, lets the agent answer, and knows what was heard.

The session imports neither a transport nor an engine; it declares what it needs of them (`Call`, `Voice`, `Ears`) and
whoever opens the door joins the parts.  Its three promises:

- `history` holds what was *heard*, never what was only generated;
- a barge-in stops everything at once: the callback's generator is closed, the voice's stream cancelled, the sink
  cleared, the listener told to flush, and the transcript cut at the listener's position;
- a callback is not pulled further while more than `max_unheard_s` of speech is still unheard.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Mapping,
)
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..errors import BreezeError
from ..playback import AudioSink, PlaybackReport, SpeechPacket, TextMark
from .transcript import Message, Transcript
from .turns import Action, Event, State, agent_may_speak, turn
from .vad import SAMPLE_RATE as EAR_RATE
from .vad import Cue, Recording, Samples, SpeechGate, VoiceActivity

log = logging.getLogger(__name__)

_POLL_S = 0.1
# A voice may hold a sentence back until the next one begins.  One with no more sound than this before the ear, and no
# text for as long as that, is given more, whatever the bound says.
_SHORT_LEAD_S, _DRY_VOICE_S = 0.8, 0.3
_PIECE_SECONDS, _MAX_PIECE_SECONDS, _MAX_TURN_SECONDS = 10.0, 25.0, 180.0
_PARTIAL_SECONDS = 0.8
_FINALLY_S = 2.0
_STATE_NAMES = {
    State.LISTENING: "listening",
    State.HEARING: "listening",
    State.READING: "thinking",
    State.THINKING: "thinking",
    State.SPEAKING: "speaking",
}


class SpokenChunk(Protocol):
    """Some sound of one stream, as the voice makes it."""

    @property
    def start_samples(self) -> int: ...
    @property
    def samples(self) -> int: ...
    @property
    def packets(self) -> tuple[SpeechPacket, ...]: ...
    @property
    def marks(self) -> tuple[TextMark, ...]: ...


class Reply(Protocol):
    """One utterance being spoken: text goes in, chunks of sound come out until the last."""

    @property
    def stream(self) -> int: ...
    def push(self, text: str) -> None: ...
    def end(self) -> None: ...
    def cancel(self) -> None: ...
    def __aiter__(self) -> AsyncIterator[SpokenChunk]: ...


class Voice(Protocol):
    """What speaks."""

    @property
    def sample_rate(self) -> int: ...
    def speak(self, *, voice: str | None = None) -> Reply: ...


class Ears(Protocol):
    """What understands speech: 16 kHz mono float32 -> words, "" when there are none."""

    async def transcribe(self, samples: Samples) -> str: ...


class Call(Protocol):
    """The other end: a sink for packets, and where its listener is."""

    @property
    def sink(self) -> AudioSink: ...
    @property
    def closed(self) -> asyncio.Event: ...
    def position(self, stream: int) -> PlaybackReport:
        """Where the listener is in `stream` now."""

    async def flush(self) -> None:
        """Silence what is already on its way; return once the listener's position is final, or soon in any case."""

    def send(self, message: dict[str, Any]) -> None:
        """Tell the page something; never waits."""

    def microphone(self) -> AsyncIterator[Samples]:
        """16 kHz mono float32 blocks of the user's microphone; ends with the call."""


@dataclass(frozen=True, slots=True)
class UserTurn:
    """What the user said, or typed."""

    text: str
    """The words; "" when speech was heard that nothing here can understand (see `audio`)."""
    audio: Samples | None = None
    """The sound of a spoken turn, 16 kHz mono float32; None when it was typed."""


CallbackResult = AsyncGenerator[str, None] | Awaitable[None]
OnEnter = Callable[["AgentSession"], CallbackResult]
OnUserTurn = Callable[["AgentSession", UserTurn], CallbackResult]
OnInterrupted = Callable[["AgentSession", "SpeechHandle"], CallbackResult]
OnDtmf = Callable[["AgentSession", str], CallbackResult]


@dataclass(slots=True)
class Callbacks:
    """What makes one agent: async generators of text (or plain coroutines), and the name of its voice."""

    on_enter: OnEnter | None = None
    on_user_turn: OnUserTurn | None = None
    on_interrupted: OnInterrupted | None = None
    on_dtmf: OnDtmf | None = None
    voice: str | None = None


class SpeechHandle:
    """One thing the agent says.  `await handle` returns it once it was really heard, or interrupted.

    Awaiting raises what stopped it, if that was an error: the callback's own, or a BreezeError of the voice.
    """

    def __init__(self, sample_rate: int) -> None:
        self.interrupted = False
        """It was cut off before all of it was heard."""
        self.error: Exception | None = None
        """What stopped it, when that was neither its end nor an interruption."""
        self._transcript = Transcript(sample_rate)
        self._sample_rate = sample_rate
        self._reply: Reply | None = None
        self._task: asyncio.Task[None] | None = None
        self._done = asyncio.Event()
        self._captioned_chars = 0
        self._entry: Message | None = None
        self._pushed_at_s = 0.0

    @property
    def text(self) -> str:
        """All its text so far."""
        return self._transcript.text

    @property
    def heard_text(self) -> str:
        """What has been heard, in whole words; `heard_text + unheard_text == text`."""
        return self._transcript.heard_text

    @property
    def unheard_text(self) -> str:
        return self._transcript.unheard_text

    @property
    def playback_position_s(self) -> float:
        """Seconds of it that have left the listener's loudspeaker."""
        return self._transcript.heard_samples / self._sample_rate

    @property
    def done(self) -> bool:
        """It was heard, interrupted, or failed."""
        return self._done.is_set()

    def __await__(self) -> Generator[Any, None, SpeechHandle]:
        return self._wait().__await__()

    async def _wait(self) -> SpeechHandle:
        if asyncio.current_task() is self._task and not self.done:
            raise RuntimeError("a callback cannot wait for its own speech to be heard; yield, and it will be spoken")
        await self._done.wait()
        if self.error is not None:
            raise self.error
        return self


class AgentSession:
    """One call of one agent; `await session.run()` lasts as long as the call.

    max_unheard_s: how far callbacks may run ahead of the listener.
    min_endpointing_delay_ms: silence that ends the user's turn.
    onset_ms: voiced sound that counts as the user speaking, and interrupts.
    """

    def __init__(
        self,
        callbacks: Callbacks,
        *,
        call: Call,
        voice: Voice,
        ears: Ears | None = None,
        activity: VoiceActivity | None = None,
        max_unheard_s: float = 4.0,
        min_endpointing_delay_ms: int = 600,
        onset_ms: int = 200,
    ) -> None:
        self.state = State.LISTENING
        """Who has the floor."""
        self.metadata: Mapping[str, str] = {}
        """What is known of the call: of a telephone's, the carrier's names and numbers."""
        self._callbacks = callbacks
        self._call = call
        self._voice = voice
        self._ears = ears
        self._activity = activity
        self._max_unheard_s = max_unheard_s
        self._gate = SpeechGate(onset_ms=onset_ms, min_endpointing_delay_ms=min_endpointing_delay_ms)
        self._history: list[Message] = []
        self._speeches: list[SpeechHandle] = []  # not yet done, in the order they were asked for
        self._cut: list[SpeechHandle] = []  # interrupted, their last position not confirmed yet
        self._resume: list[SpeechHandle] = []  # what the user's voice interrupted, until it proves to be words
        self._mouth = asyncio.Lock()
        self._floor = asyncio.Event()
        self._floor.set()
        self._ended = asyncio.Event()
        self._is_closing = False
        self._group: asyncio.TaskGroup | None = None
        self._children: set[asyncio.Task[Any]] = set()
        self._thinking: asyncio.Task[None] | None = None
        self._turn: UserTurn | None = None  # what the agent is to answer, while none of the answer has been heard
        self._recording = Recording()
        self._audio: list[Samples] = []
        self._pieces: list[asyncio.Task[str]] = []
        self._ahead: asyncio.Task[str] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._partial: asyncio.Task[None] | None = None
        self._shown_s = 0.0
        self._has_shown = False

    # -- what an agent uses

    @property
    def history(self) -> list[Message]:
        """The call so far: the user's turns, and of the agent's speech what was heard."""
        return [message for message in self._history if message.text]

    def say(self, text: str | AsyncIterable[str]) -> SpeechHandle:
        """Speak `text` after whatever is being spoken; await the handle to know that it was heard.

        In a call that is over nothing is spoken: the handle comes back done and interrupted.
        """
        if self._group is None or self._is_over:
            handle = SpeechHandle(self._voice.sample_rate)
            handle._transcript.push(text if isinstance(text, str) else "")
            handle.interrupted = True
            handle._done.set()
            return handle
        return self._start(_texts(text))

    def interrupt(self) -> None:
        """Silence the agent now and drop what it was about to say."""
        self._happen(Event.STOP)

    def type(self, text: str) -> None:
        """The user sent `text`: a turn without sound.  Blank text is no turn."""
        if text.strip() and not self._is_over:
            self._happen(Event.TYPED, UserTurn(text))

    def press(self, digit: str) -> None:
        """The user pressed a key of the telephone: 0 to 9, *, #, A to D."""
        if self._callbacks.on_dtmf is None or self._is_over:
            return
        result = self._callbacks.on_dtmf(self, digit)
        if isinstance(result, AsyncGenerator):
            self._start(result)
        else:
            self._spawn(self._aside(result))

    async def close(self, timeout_s: float = 15.0) -> None:
        """End the call once what was said has been heard, or after `timeout_s`; may be called twice.

        Called by a callback, whose own last words must still be heard, it returns at once and the call ends after them.
        """
        self._is_closing = True
        if self._group is None or self._is_over:
            self._ended.set()
            return
        self._end_when_quiet()
        own = asyncio.current_task() in self._children
        if own:
            self._spawn(self._end_after(timeout_s))
        else:
            await self._end_after(timeout_s)

    async def run(self) -> None:
        """Hold the call until it closes, or `close()` has let the last words be heard."""
        assert self._group is None, "a session runs once"
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                self._spawn(self._caption())
                if self._activity is not None:
                    self._spawn(self._hear(self._activity))
                if self._callbacks.on_enter is not None:
                    self._think(self._callbacks.on_enter(self))
                await _first(self._call.closed, self._ended)
                self._ended.set()
                self._silence()
                for task in tuple(self._children):
                    task.cancel()
        finally:
            self._ended.set()
            for handle in [*self._speeches, *self._cut]:
                self._call.sink.clear(handle._reply.stream) if handle._reply else None
                handle._done.set()

    # -- turns

    @property
    def _is_over(self) -> bool:
        return self._ended.is_set() or self._call.closed.is_set()

    def _happen(self, event: Event, user_turn: UserTurn | None = None) -> None:
        """Take one event through the table and do what it says; nothing here waits."""
        before = self.state
        self.state, actions = turn(before, event)
        for action in actions:
            match action:
                case Action.INTERRUPT:
                    stopped = self._silence()
                    self._resume = stopped if event is Event.ONSET else []
                case Action.READ:
                    self._reading = self._spawn(self._read())
                case Action.FORGET:
                    self._forget()
                case Action.ANSWER:
                    assert user_turn is not None
                    self._answer(user_turn)
                case Action.RESUME:
                    self._go_on()
        if agent_may_speak(self.state):
            self._floor.set()
        else:
            self._floor.clear()
        if _STATE_NAMES[self.state] != _STATE_NAMES[before]:
            self._call.send({"type": "state", "state": _STATE_NAMES[self.state]})

    def _answer(self, user_turn: UserTurn) -> None:
        self._resume = []
        self._turn = user_turn
        self._history.append(Message("user", user_turn.text))
        self._call.send({"type": "user", "text": user_turn.text, "final": True})
        if self._callbacks.on_user_turn is not None:
            self._think(self._callbacks.on_user_turn(self, user_turn))
        self._settle_down()

    def _go_on(self) -> None:
        """The interruption was no speech: say what it cut off, or answer again what had not been answered."""
        unheard = "".join(handle.unheard_text for handle in self._resume).strip()
        self._resume = []
        if unheard:
            self.say(unheard)
        elif self._turn is not None and self._callbacks.on_user_turn is not None:
            self._think(self._callbacks.on_user_turn(self, self._turn))

    def _think(self, result: CallbackResult) -> None:
        """Run a callback: a generator's text is spoken, a coroutine is awaited."""
        if isinstance(result, AsyncGenerator):
            self._start(result)
        else:
            if self._thinking is not None:
                self._thinking.cancel()
            self._thinking = self._spawn(self._run(result))

    async def _run(self, result: Awaitable[None]) -> None:
        try:
            await self._cuts_confirmed()
            await result
        except Exception as error:
            self._report(error)
        finally:
            if isinstance(result, Coroutine):
                result.close()
            if self._thinking is asyncio.current_task():
                self._thinking = None
            self._settle_down()

    async def _aside(self, result: Awaitable[None]) -> None:
        """A callback that takes nobody's turn."""
        try:
            await result
        except Exception as error:
            self._report(error)

    def _settle_down(self) -> None:
        if not self._speeches and self._thinking is None:
            self._happen(Event.DONE)
        self._end_when_quiet()

    def _end_when_quiet(self) -> None:
        if self._is_closing and not self._speeches and self._thinking is None:
            self._ended.set()

    async def _end_after(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        except TimeoutError:
            log.warning("the call is closed before the last words were heard: %.0f s have passed", timeout_s)
            self._ended.set()

    # -- speaking

    def _start(self, texts: AsyncGenerator[str, None]) -> SpeechHandle:
        handle = SpeechHandle(self._voice.sample_rate)
        self._speeches.append(handle)
        handle._task = self._spawn(self._speak(handle, texts))
        return handle

    async def _speak(self, handle: SpeechHandle, texts: AsyncGenerator[str, None]) -> None:
        try:
            try:
                # A cut speech enters the history before the callback that answers the interruption reads it.
                await self._cuts_confirmed()
                first = await _first_text(texts)
                if first:
                    async with self._mouth:
                        await self._floor.wait()
                        await self._room()
                        self._happen(Event.SPEECH)
                        await self._pronounce(handle, first, texts)
                    await self._heard(handle)
            finally:
                await self._close_callback(texts)
        except Exception as error:
            handle.error = error
            self._report(error)
        finally:
            if handle in self._speeches:
                self._finish(handle)

    async def _pronounce(self, handle: SpeechHandle, first: str, texts: AsyncGenerator[str, None]) -> None:
        """Open a stream, feed it the text as fast as the listener allows, and hand its sound to the sink."""
        reply = handle._reply = self._voice.speak(voice=self._callbacks.voice)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._forward(handle, reply))
                self._push(handle, reply, first)
                await self._room(handle)
                async for text in texts:
                    if text:
                        self._push(handle, reply, _checked(text))
                        await self._room(handle)
                reply.end()
        except ExceptionGroup as group_error:
            raise group_error.exceptions[0] from None

    def _push(self, handle: SpeechHandle, reply: Reply, text: str) -> None:
        handle._transcript.push(text)
        handle._pushed_at_s = asyncio.get_running_loop().time()
        self._call.send({"type": "speech", "stream": reply.stream, "text": text})
        reply.push(text)

    async def _forward(self, handle: SpeechHandle, reply: Reply) -> None:
        async for chunk in reply:
            if handle.interrupted:
                break  # a step that was running when the user interrupted still delivers
            self._call.sink.write(reply.stream, chunk.packets)
            handle._transcript.deliver(chunk.start_samples + chunk.samples, chunk.marks)
        if not handle.interrupted:  # a stream that was cancelled ends too, but in the middle of its text
            handle._transcript.complete()
        self._call.sink.end(reply.stream)

    async def _room(self, handle: SpeechHandle | None = None) -> None:
        """Wait until less than the bound of all speech is unheard."""
        loop = asyncio.get_running_loop()
        while True:
            self._follow()
            unheard_s = sum(speech._transcript.unheard_s for speech in self._speeches)
            if unheard_s <= self._max_unheard_s:
                return
            if handle is not None and loop.time() - handle._pushed_at_s > _DRY_VOICE_S:
                transcript = handle._transcript
                lead_samples = transcript.delivered_samples - transcript.heard_samples
                if lead_samples < _SHORT_LEAD_S * self._voice.sample_rate:
                    return  # the voice waits for text, not for the listener
            await asyncio.sleep(min(0.25, max(0.02, unheard_s - self._max_unheard_s)))

    async def _heard(self, handle: SpeechHandle) -> None:
        """Wait until the listener has heard the last sample."""
        transcript = handle._transcript
        while True:
            self._follow()
            left = transcript.delivered_samples - transcript.heard_samples
            if left <= 0:
                return
            await asyncio.sleep(min(0.25, max(0.02, left / self._voice.sample_rate)))

    def _follow(self) -> None:
        """Move each transcript to where the listener is now."""
        for handle in self._speeches:
            if handle._reply is not None:
                handle._transcript.hear(self._call.position(handle._reply.stream).heard_samples)
                if handle._transcript.heard_samples > 0:
                    self._turn = None

    def _finish(self, handle: SpeechHandle) -> None:
        """A speech that was not interrupted is over: heard, empty, failed, or left behind by the end of the call."""
        self._speeches.remove(handle)
        if handle._reply is not None:
            if not handle._transcript.is_complete:
                handle.interrupted = handle.error is None
                handle._reply.cancel()
                self._call.sink.clear(handle._reply.stream)
            self._record(handle)
            self._tell_end(handle)
        handle._done.set()
        self._settle_down()

    async def _close_callback(self, texts: AsyncGenerator[str, None]) -> None:
        """Close the generator so that its `finally` runs; one that does not end in time is left behind."""
        try:
            async with asyncio.timeout(_FINALLY_S):
                await texts.aclose()
        except TimeoutError:
            log.warning("a callback took more than %.0f s to close after it was interrupted", _FINALLY_S)

    # -- interruption

    def _silence(self) -> list[SpeechHandle]:
        """Stop every speech now; return those that were stopped.

        The order is the promise: first the sound (engine and sink), then the callbacks, then the words.
        """
        self._follow()
        stopped, self._speeches = self._speeches, []
        # Whoever holds the mouth or waits for it is among the stopped; a callback slow to close must not keep it shut.
        self._mouth = asyncio.Lock()
        for handle in stopped:
            handle.interrupted = True
            if handle._reply is not None:
                handle._reply.cancel()
                self._call.sink.clear(handle._reply.stream)
        for handle in stopped:
            if handle._task is not None and handle._task is not asyncio.current_task():
                handle._task.cancel()
            self._record(handle)
        if self._thinking is not None and self._thinking is not asyncio.current_task():
            self._thinking.cancel()
            self._thinking = None
        if stopped:
            self._cut += stopped
            if not self._is_over:
                self._spawn(self._confirm(stopped))
            else:
                self._confirmed(stopped)
        return stopped

    async def _confirm(self, stopped: list[SpeechHandle]) -> None:
        """The listener's own word on where the sound stopped replaces ours."""
        try:
            if any(handle._transcript.delivered_samples for handle in stopped):
                await self._call.flush()
        finally:
            self._confirmed(stopped)
        if self._callbacks.on_interrupted is not None:
            for handle in stopped:
                if handle.text:
                    result = self._callbacks.on_interrupted(self, handle)
                    if isinstance(result, AsyncGenerator):
                        self._start(result)
                    else:
                        try:
                            await result
                        except Exception as error:
                            self._report(error)

    def _confirmed(self, stopped: list[SpeechHandle]) -> None:
        for handle in stopped:
            if handle._reply is not None:
                handle._transcript.hear(self._call.position(handle._reply.stream).heard_samples)
                self._record(handle)
                self._tell_end(handle)
            self._cut.remove(handle)
            handle._done.set()

    async def _cuts_confirmed(self) -> None:
        for handle in tuple(self._cut):
            await handle._done.wait()

    # -- words

    def _record(self, handle: SpeechHandle) -> None:
        """Enter a speech into the history, at the place it took when it ended."""
        message = Message("assistant", handle.heard_text, handle.interrupted)
        if handle._entry is None:
            self._history.append(message)
        else:
            at = next(at for at, entry in enumerate(self._history) if entry is handle._entry)
            self._history[at] = message
        handle._entry = message

    def _tell_end(self, handle: SpeechHandle) -> None:
        assert handle._reply is not None
        chars = handle._transcript.heard_chars
        self._call.send(
            {"type": "speech_end", "stream": handle._reply.stream, "interrupted": handle.interrupted, "chars": chars}
        )

    async def _caption(self) -> None:
        """Tell the page, word by word, what has been heard."""
        while True:
            await asyncio.sleep(_POLL_S)
            self._follow()
            for handle in self._speeches:
                chars = handle._transcript.heard_chars
                if handle._reply is not None and chars > handle._captioned_chars:
                    handle._captioned_chars = chars
                    self._call.send({"type": "heard", "stream": handle._reply.stream, "chars": chars})

    def _report(self, error: Exception) -> None:
        """Something failed: the call goes on, the page and the log say what it was."""
        if isinstance(error, BreezeError):
            log.warning("a speech failed: %s", error)
            message = {"type": "error", "code": type(error).__name__, "message": str(error), "fix": ""}
        else:
            log.error("the agent's callback failed", exc_info=error)
            message = {
                "type": "error",
                "code": "agent_failed",
                "message": "The agent's own code raised an error; the call goes on",
                "fix": f"{type(error).__name__}: {error}. The server's log has the traceback.",
            }
        self._call.send(message)

    # -- listening

    async def _hear(self, activity: VoiceActivity) -> None:
        track = activity.open()
        async for block in self._call.microphone():
            for frame, probability in await track.feed(block):
                self._recording.add(frame)
                match self._gate.feed(probability):
                    case Cue.ONSET:
                        self._recording.begin(self._gate.onset_age_ms)
                        self._happen(Event.ONSET)
                    case Cue.LULL if self._recording.is_open:
                        self._read_ahead()
                    case Cue.PAUSE:
                        self._happen(Event.PAUSE)
                if self._recording.seconds > _MAX_PIECE_SECONDS:
                    self._next_piece()
                self._show_words()

    def _read_ahead(self) -> None:
        """Read what was said so far while the silence may still grow into the end of the turn."""
        if self._recording.seconds > _PIECE_SECONDS:
            self._next_piece()
        elif self._ears is not None:
            self._ahead = self._spawn_read(self._recording.copy())

    def _show_words(self) -> None:
        """From time to time, while the user speaks, let the page show what was understood so far."""
        if self._ears is None or not self._recording.is_open or not self._gate.is_speech:
            return
        is_reading = self._partial is not None and not self._partial.done()
        if not is_reading and self._recording.seconds >= self._shown_s + _PARTIAL_SECONDS:
            self._shown_s = self._recording.seconds
            self._partial = self._spawn(self._show(self._recording.copy()))

    async def _show(self, samples: Samples) -> None:
        before = [piece.result() for piece in self._pieces if piece.done() and not piece.cancelled()]
        words = _with_words([*before, await self._words_of(samples)])
        if words and self.state is State.HEARING:
            self._has_shown = True
            self._call.send({"type": "user", "text": words, "final": False})

    def _next_piece(self) -> None:
        """A long turn is read in pieces."""
        piece = self._recording.take_piece()
        self._ahead, self._shown_s = None, 0.0
        if sum(map(len, self._audio)) < _MAX_TURN_SECONDS * EAR_RATE:
            self._audio.append(piece)
            self._pieces.append(self._spawn_read(piece))

    def _spawn_read(self, samples: Samples) -> asyncio.Task[str]:
        assert self._group is not None
        task = self._group.create_task(self._words_of(samples))
        self._children.add(task)
        task.add_done_callback(self._children.discard)
        return task

    async def _words_of(self, samples: Samples) -> str:
        if self._ears is None:
            return ""
        try:
            return await self._ears.transcribe(samples)
        except Exception as error:
            known = isinstance(error, BreezeError)
            self._report(error if known else BreezeError(f"reading the user's speech failed: {error}"))
            return ""

    async def _read(self) -> None:
        """The turn is over: its words, or that there were none."""
        audio = [*self._audio, self._recording.copy()]
        last = self._ahead or self._spawn_read(audio[-1])
        words = [await piece for piece in [*self._pieces, last]]
        if self.state is not State.READING or self._reading is not asyncio.current_task():
            return  # the user went on, or typed
        text = _with_words(words)
        has_shown = self._has_shown
        self._forget()
        if text or self._ears is None:
            self._happen(Event.WORDS, UserTurn(text, np.concatenate(audio)))
        else:
            if has_shown:
                self._call.send({"type": "user", "text": "", "final": True})
            self._happen(Event.NO_WORDS)

    def _forget(self) -> None:
        self._recording.drop()
        self._audio, self._pieces, self._ahead = [], [], None
        self._shown_s, self._has_shown = 0.0, False

    # -- tasks

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task of this call; it is cancelled with the call and waited for."""
        assert self._group is not None
        task = self._group.create_task(work)
        self._children.add(task)
        task.add_done_callback(self._children.discard)
        return task


async def _texts(text: str | AsyncIterable[str]) -> AsyncGenerator[str, None]:
    if isinstance(text, str):
        yield text
        return
    iterator = aiter(text)
    if isinstance(iterator, AsyncGenerator):
        async with aclosing(iterator):
            async for part in iterator:
                yield part
    else:
        async for part in iterator:
            yield part


def _with_words(parts: list[str]) -> str:
    """The parts that hold a letter or a digit, as one text."""
    return " ".join(part for part in parts if any(char.isalnum() for char in part))


async def _first_text(texts: AsyncGenerator[str, None]) -> str:
    """The first text that is not blank, with the blank before it, or "" if there is none."""
    blank = ""
    async for text in texts:
        blank += _checked(text)
        if blank.strip():
            return blank
    return ""


def _checked(text: object) -> str:
    if not isinstance(text, str):
        raise TypeError(f"an agent's callback yields text (str), not {type(text).__name__}")
    return text


async def _first(*events: asyncio.Event) -> None:
    """Wait for any of the events."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
