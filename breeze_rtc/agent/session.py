"""One call: it listens, lets the agent answer, and knows what was heard.

The session imports neither a transport nor an engine; `call` says what it needs of them, and whoever opens the door
joins the parts.  `speaking` is the agent's side, `listening` the user's, `turns` the table between them.  Its promises:

- `history` holds what was *heard*, never what was only generated;
- the agent is silent at the ear as soon as the user makes a sound, and goes on where the ear was if that was no speech;
- an interruption stops everything at once: the callback's generator is closed, the voice's stream cancelled, the sink
  cleared, and the transcript cut at the listener's position;
- a callback is not pulled further while more than `max_unheard_s` of speech is still unheard.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from breeze_rtc.agent import numbers
from breeze_rtc.agent.call import Call, Ears, Telephone, Voice
from breeze_rtc.agent.echo import EchoGuard
from breeze_rtc.agent.endpointing import EndOfTurn, sounds_finished
from breeze_rtc.agent.figures import TurnFigures, figures_of, trace
from breeze_rtc.agent.listening import Listening
from breeze_rtc.agent.speaking import Mouth, SpeechHandle, texts_of
from breeze_rtc.agent.text import SpokenText, TextFilter
from breeze_rtc.agent.tools import Tool, Tools
from breeze_rtc.agent.transcript import Message
from breeze_rtc.agent.turns import Action, Event, State, TurnTaking, agent_may_speak, turn
from breeze_rtc.agent.vad import Cue, Samples, SpeechGate, VoiceActivity
from breeze_rtc.agent.waiting import Waiting, WaitingSound
from breeze_rtc.errors import BreezeError, LineCannot

__all__ = ["AgentSession", "Call", "Callbacks", "Ears", "Recovery", "SpeechHandle", "UserTurn", "Voice"]

log = logging.getLogger(__name__)

_DOUBT_POLL_S = 0.1
_SHORTEST_WORD_MS = 224
"""Voice that holds a word.  "No" has 290 ms of it and more; of 150 ms cut out of speech, most have 192 at most, and a
recogniser makes words of them all the same."""
_NOISE_TAIL_S = 1.0  # of a sound without words that does not stop, so much may be the beginning of some
_STATE_NAMES = {
    State.LISTENING: "listening",
    State.HEARING: "listening",
    State.OVERLAP: "listening",
    State.READING: "thinking",
    State.DOUBT: "thinking",
    State.THINKING: "thinking",
    State.SPEAKING: "speaking",
}


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


@dataclass(frozen=True, slots=True)
class Recovery:
    """What the caller hears when something fails.  An empty text is silence; the log says why in any case."""

    callback_failed: str = "Sorry, something went wrong here. Please say that again."
    """The agent's own code raised."""
    not_understood: str = "Sorry, I could not hear that. Please say it again."
    """The recogniser raised, so that a turn was lost."""
    voice_failed: str = "Sorry, I lost my voice for a moment."
    """The voice failed in the middle of a speech.  When this fails too, silence follows."""
    stall_timeout_s: float = 8.0
    """A voice that has text and makes no sound for so long, for a listener who waits, has failed."""


@dataclass(slots=True)
class Callbacks:
    """What makes one agent: async generators of text (or plain coroutines), the name of its voice, and its manners."""

    on_enter: OnEnter | None = None
    on_user_turn: OnUserTurn | None = None
    on_interrupted: OnInterrupted | None = None
    on_dtmf: OnDtmf | None = None
    voice: str | None = None
    text_filter: Callable[[], TextFilter] | None = SpokenText
    tools: dict[str, Tool] = field(default_factory=dict)
    turn_taking: TurnTaking = field(default_factory=TurnTaking)
    recovery: Recovery = field(default_factory=Recovery)
    waiting: Waiting | None = None


class AgentSession:
    """One call of one agent; `await session.run()` lasts as long as the call.

    max_unheard_s: how far callbacks may run ahead of the listener.  observe: gets the figures of each thing said.
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
        observe: Callable[[TurnFigures], None] = lambda figures: None,
    ) -> None:
        self.state = State.LISTENING
        """Who has the floor."""
        self.metadata: Mapping[str, str] = {}
        """What is known of the call: of a telephone's, the carrier's names and numbers."""
        self.telephone: Telephone | None = None
        """The line, if this is a telephone call."""
        self._callbacks = callbacks
        self._manners = callbacks.turn_taking
        self._call = call
        self._ears = ears
        self._activity = activity
        self._echo = EchoGuard(voice.sample_rate)
        self._mouth = Mouth(
            call,
            voice,
            voice_name=callbacks.voice,
            text_filter=_reading(callbacks.text_filter, voice),
            max_unheard_s=max_unheard_s,
            stall_timeout_s=callbacks.recovery.stall_timeout_s,
            spawn=self._spawn,
            on_speech=self._begins,
            on_end=lambda handle: self._settle_down(),
            on_error=self._recover,
            on_stall=self._report,
            on_sound=self._echo.made,
            on_done=self._measure,
        )
        gate = SpeechGate(
            onset_ms=round(1000 * self._manners.onset_s),
            min_endpointing_delay_ms=round(1000 * self._manners.min_endpointing_delay_s),
        )
        self._listening = Listening(ears, gate, self, spawn_read=self._spawn)
        self._told_state = _STATE_NAMES[self.state]
        self._observe = observe
        # When the turn that waits for its answer ended, and when its words were there.
        self._unanswered: tuple[float, float] | None = None
        self._has_shown = False
        self._has_lost_words = False  # the recogniser failed in this turn
        self._ended = asyncio.Event()
        self._is_closing = False
        self._is_sorry = False
        self._group: asyncio.TaskGroup | None = None
        self._children: set[asyncio.Task[Any]] = set()
        self._thinking: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._doubting: asyncio.Task[None] | None = None
        self._early: _EarlyAnswer | None = None
        # What fills the silence in which the agent thinks, and how many turns it has.
        self._passing: asyncio.Task[None] | None = None
        self._fillers = 0
        waiting = callbacks.waiting
        self._waiting_sound = (
            WaitingSound(call, waiting.sound, voice.sample_rate) if waiting and waiting.sound is not None else None
        )

    # -- what an agent uses

    @property
    def history(self) -> list[Message]:
        """The call so far: the user's turns, and of the agent's speech what was heard."""
        return [message for message in self._mouth.history if message.text]

    @property
    def tools(self) -> Tools:
        """The agent's tools in this call, for a language model that may use them."""
        return Tools(self._callbacks.tools, self)

    def say(self, text: str | AsyncIterable[str], *, allow_interruptions: bool = True) -> SpeechHandle:
        """Speak `text` after whatever is being spoken; await the handle to know that it was heard.

        allow_interruptions: without, the user's voice, text and Stop button leave it alone, and what is said over it
        goes unheard.  In a call that is over nothing is spoken: the handle comes back done and interrupted.
        """
        if self._group is None or self._is_over:
            handle = self._mouth.handle(allow_interruptions=allow_interruptions)
            handle._transcript.push(text if isinstance(text, str) else "")
            handle.interrupted = True
            handle._done.set()
            return handle
        return self._mouth.say(texts_of(text), allow_interruptions=allow_interruptions)

    def interrupt(self, *, force: bool = False) -> None:
        """Silence the agent now and drop what it was about to say; what allows no interruption only by `force`."""
        if force:
            self._silence(force=True)
        self._happen(Event.STOP)

    def type(self, text: str) -> None:
        """The user sent `text`: a turn without sound.  Blank text is no turn."""
        if text.strip() and not self._is_over:
            self._unanswered = _now(), _now()
            self._happen(Event.TYPED, UserTurn(text))

    def press(self, digit: str) -> None:
        """The user pressed a key of the telephone: 0 to 9, *, #, A to D."""
        if self._callbacks.on_dtmf is not None and not self._is_over:
            self._aside(_called(self._callbacks.on_dtmf, self, digit))

    async def send_dtmf(self, keys: str) -> None:
        """Press keys of the telephone: 0 to 9, *, #, A to D.

        Where the line has no word for keys they are tones in the sound, after what is being said.  Raises `LineCannot`
        in a call that is no telephone's, `BadRequest` for what is no key, `CarrierRefused`.
        """
        if self.telephone is None:
            raise LineCannot("pressing keys", "it is no telephone's")
        await self.telephone.send_dtmf(keys)

    async def transfer(self, to: str) -> None:
        """Put the caller through to another number, such as +4930123456, in the agent's place; the call ends here.

        Await what is to be heard before.  Raises `LineCannot` where the line has no way, `BadRequest` for what is no
        number, `CarrierRefused`; the call goes on then.
        """
        if self.telephone is None:
            raise LineCannot("putting through", "it is no telephone's")
        await self.telephone.transfer(to)

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
                self._spawn(self._mouth.caption())
                if self._activity is not None:
                    self._spawn(self._hear(self._activity))
                if self._callbacks.on_enter is not None:
                    self._think(_called(self._callbacks.on_enter, self))
                await _first(self._call.closed, self._ended)
                self._ended.set()
                self._silence(force=True)
                for task in tuple(self._children):
                    task.cancel()
        finally:
            self._ended.set()
            self._mouth.end()

    # -- turns

    @property
    def _is_over(self) -> bool:
        return self._ended.is_set() or self._call.closed.is_set()

    def _happen(self, event: Event, user_turn: UserTurn | None = None) -> None:
        """Take one event through the table and do what it says; nothing here waits."""
        self.state, actions = turn(self.state, event)
        self._mouth.may_sound(agent_may_speak(self.state))
        for action in actions:
            match action:
                case Action.HOLD:
                    self._mouth.hold()
                    self._doubt()
                case Action.INTERRUPT:
                    self._silence()
                case Action.READ:
                    self._reading = self._spawn(self._read())
                case Action.FORGET:
                    self._forget(goes_on=not self._listening.gate.is_silent)
                    self._drop_early()
                case Action.ANSWER:
                    assert user_turn is not None
                    self._answer(user_turn)
                case Action.RESUME:
                    self._mouth.go_on()
                    if self._mouth.is_sounding:
                        self._happen(Event.SPEECH)
                    self._settle_down()
        self._pass_time()
        name = _STATE_NAMES[self.state]
        if name != self._told_state:
            self._told_state = name
            self._call.send({"type": "state", "state": name})

    def _pass_time(self) -> None:
        """Fill the silence as long as the agent thinks."""
        waiting, is_passing = self._callbacks.waiting, self._passing is not None
        if waiting is None or (self.state is State.THINKING) == is_passing:
            return
        if self._passing is None:
            self._passing = self._spawn(self._fill_silence(waiting))
        else:
            self._passing.cancel()
            self._passing = None

    async def _fill_silence(self, waiting: Waiting) -> None:
        await asyncio.sleep(waiting.after_s)
        if waiting.words:
            words = waiting.words[self._fillers % len(waiting.words)]
            self._fillers += 1
            self._mouth.say(texts_of(words)).is_filler = True
        elif self._waiting_sound is not None:
            await self._waiting_sound.play()

    def _begins(self, handle: SpeechHandle) -> None:
        """A speech has its first words and the floor."""
        if self._unanswered is not None and not handle.is_filler:
            handle.timeline.user_ended_s, handle.timeline.transcript_s = self._unanswered
            self._unanswered = None
        self._happen(Event.SPEECH)

    def _measure(self, handle: SpeechHandle) -> None:
        if handle.text:
            figures = figures_of(handle)
            self._observe(figures)
            trace(figures)

    def _answer(self, user_turn: UserTurn) -> None:
        self._is_sorry = False
        self._call.send({"type": "user", "text": user_turn.text, "final": True})
        if self._early is not None and self._early.answers(user_turn):
            self._early = None  # it is under way, and the floor is free now
        else:
            self._drop_early()
            self._mouth.history.append(Message("user", user_turn.text))
            if self._callbacks.on_user_turn is not None:
                self._think(_called(self._callbacks.on_user_turn, self, user_turn))
        if self._mouth.is_sounding:  # what allows no interruption is still being spoken
            self._happen(Event.SPEECH)
        self._settle_down()

    def _think(self, result: CallbackResult) -> None:
        """Run a callback: a generator's text is spoken, a coroutine is awaited."""
        if isinstance(result, AsyncGenerator):
            self._mouth.say(result)
        else:
            if self._thinking is not None:
                self._thinking.cancel()
            self._thinking = self._spawn(self._run(result))

    async def _run(self, result: Awaitable[object]) -> None:
        try:
            await self._mouth.cuts_confirmed()
            _silent(await result)
        except Exception as error:
            self._recover(error)
        finally:
            if isinstance(result, Coroutine):
                result.close()
            if self._thinking is asyncio.current_task():
                self._thinking = None
            self._settle_down()

    def _aside(self, result: CallbackResult) -> None:
        """Run a callback that takes nobody's turn."""
        if isinstance(result, AsyncGenerator):
            self._mouth.say(result)
        else:
            self._spawn(self._awaited(result))

    async def _awaited(self, result: Awaitable[object]) -> None:
        try:
            _silent(await result)
        except Exception as error:
            self._recover(error)

    def _settle_down(self) -> None:
        if not self._mouth.speeches and self._thinking is None:
            self._mouth.go_on()
            self._happen(Event.DONE)
        self._end_when_quiet()

    def _end_when_quiet(self) -> None:
        if self._is_closing and not self._mouth.speeches and self._thinking is None:
            self._ended.set()

    async def _end_after(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        except TimeoutError:
            log.warning("the call is closed before the last words were heard: %.0f s have passed", timeout_s)
            self._ended.set()

    # -- interruptions, and what only sounded like one

    def _silence(self, *, force: bool = False) -> None:
        """Stop what may be stopped, and tell the agent once the listener has said where."""
        stopped = self._mouth.silence(force=force)
        if self._thinking is not None and self._thinking is not asyncio.current_task():
            self._thinking.cancel()
            self._thinking = None
        if self._is_over:
            self._mouth.confirmed(stopped)
        elif stopped or self._mouth.is_held:
            self._spawn(self._confirm(stopped))

    async def _confirm(self, stopped: list[SpeechHandle]) -> None:
        await self._mouth.confirm(stopped)
        if self._callbacks.on_interrupted is not None:
            for handle in stopped:
                if handle.text:
                    self._aside(_called(self._callbacks.on_interrupted, self, handle))

    def _doubt(self) -> None:
        """The agent holds: for good, if words come; else it goes on."""
        if self._manners.false_interruption_timeout_s is None:
            self._happen(Event.SOME_WORDS)
            return
        if self._doubting is not None:
            self._doubting.cancel()
        self._doubting = self._spawn(self._wait_for_words(self._manners.false_interruption_timeout_s))

    async def _wait_for_words(self, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        gate = self._listening.gate
        silent_since = loop.time()
        while self.state in (State.OVERLAP, State.DOUBT):
            if self.state is State.OVERLAP and not gate.is_silent:
                silent_since = loop.time()
                if self._ears is None and gate.voiced_ms >= 1000 * self._manners.min_interruption_duration_s:
                    self._happen(Event.SOME_WORDS)
            elif loop.time() - silent_since >= timeout_s:
                self._no_words()
            await asyncio.sleep(_DOUBT_POLL_S)

    def _no_words(self) -> None:
        """What was heard over the agent does not interrupt it."""
        if self.state is State.OVERLAP:
            if self._listening.gate.is_silent:
                self._listening.gate.reset()
                self._forget()
            else:
                self._listening.keep_last(_NOISE_TAIL_S)
        self._unshow()
        self._happen(Event.NO_WORDS)

    # -- listening

    async def _hear(self, activity: VoiceActivity) -> None:
        track = activity.open()
        async for block in self._call.microphone():
            frames = await track.feed(block)
            now_s = asyncio.get_running_loop().time()
            self._echo.plays(self._mouth.positions(), now_s)
            for frame, of_voice in frames:
                probability = self._echo.judge(frame, of_voice, now_s)
                if self._mouth.is_protected:
                    self._listening.gate.reset()
                match self._listening.hear(frame, 0.0 if self._mouth.is_protected else probability):
                    case Cue.ONSET:
                        self._reading = None  # the user went on
                        self._drop_early()
                        self._happen(Event.ONSET)
                    case Cue.LULL if self._manners.end_of_turn is not None:
                        self._spawn(self._judge_end(self._manners.end_of_turn))
                    case Cue.PAUSE:
                        if self.state in (State.HEARING, State.OVERLAP):
                            self._happen(Event.PAUSE)
                        elif self._reading is None:
                            self._forget()  # the end of a sound that held no words

    async def _judge_end(self, judge: EndOfTurn) -> None:
        try:
            is_over = await judge.is_over(self._listening.recording.copy())
        except Exception as error:
            log.error("the judge of the turn's end failed", exc_info=error)
            return
        if not is_over:
            self._listening.gate.wait(round(1000 * self._manners.max_endpointing_delay_s))

    def understood(self, text: str, seconds: float, *, is_lull: bool) -> None:
        """So much of what is being said holds these words."""
        interrupts = self._interrupts(text)
        if text and self.state in (State.HEARING, State.OVERLAP) and (interrupts or self.state is State.HEARING):
            self._show(text)
        if self.state is State.LISTENING and text:  # words in a sound that had held none
            self._happen(Event.ONSET)
        if is_lull and not sounds_finished(text):
            self._listening.gate.wait(round(1000 * self._manners.max_endpointing_delay_s))
        if self.state is State.HEARING:
            if is_lull and text and self._manners.preemptive_generation:
                self._answer_early(text)
        elif interrupts and self._reading is None:  # else the reading of the whole turn will tell
            self._happen(Event.SOME_WORDS)
        elif self.state is State.OVERLAP:
            # "Uh-huh" is over at a lull.  No words at a lull may be the first word of some, too short to be understood.
            is_sign = is_lull and bool(text) and not self._manners.interrupts(text)
            timeout_s = self._manners.false_interruption_timeout_s
            if is_sign or (timeout_s is not None and not text and seconds >= timeout_s):
                self._no_words()
        elif self.state in (State.THINKING, State.SPEAKING):
            self._listening.keep_last(_NOISE_TAIL_S)

    def _interrupts(self, text: str) -> bool:
        """Whether the sound over the agent's speech was long enough for words, and these are such."""
        return self._listening.gate.voiced_ms >= _SHORTEST_WORD_MS and self._manners.interrupts(text)

    def failed(self, error: Exception) -> None:
        """The recogniser raised."""
        self._has_lost_words = True
        self._report(error)

    async def _read(self) -> None:
        """The turn is over: its words, or that there were none."""
        text, audio = await self._listening.words()
        if self._reading is not asyncio.current_task():
            return  # the user went on, or typed
        voiced_s = self._listening.gate.voiced_ms / 1000
        has_agent_the_floor = self.state is not State.READING
        if self._ears is None:
            has_words = not has_agent_the_floor or voiced_s >= self._manners.min_interruption_duration_s
        else:
            has_words = self._interrupts(text) if has_agent_the_floor else bool(text)
        if has_words:
            self._unanswered = _now() - self._listening.gate.silent_ms / 1000, _now()
            self._has_shown = False
            self._forget()
            self._happen(Event.WORDS, UserTurn(text, audio))
        else:
            is_loss = self._has_lost_words and not has_agent_the_floor
            self._unshow()
            self._forget()
            self._drop_early()
            self._happen(Event.NO_WORDS)
            if is_loss:
                self._apologise(self._callbacks.recovery.not_understood)

    def _forget(self, *, goes_on: bool = False) -> None:
        self._listening.forget(goes_on=goes_on)
        self._reading = None
        self._has_lost_words = False

    def _show(self, text: str) -> None:
        self._has_shown = True
        self._call.send({"type": "user", "text": text, "final": False})

    def _unshow(self) -> None:
        if self._has_shown:
            self._has_shown = False
            self._call.send({"type": "user", "text": "", "final": True})

    # -- answers before the end of the turn

    def _answer_early(self, text: str) -> None:
        """The user may have finished: let the agent think; it has not got the floor, so nothing is heard of it."""
        if self._early is not None or self._callbacks.on_user_turn is None:
            return
        entry = Message("user", text)
        self._mouth.history.append(entry)
        result = _called(self._callbacks.on_user_turn, self, UserTurn(text))
        if isinstance(result, AsyncGenerator):
            self._early = _EarlyAnswer(text, entry, self._mouth.say(result))
        else:  # a coroutine may do more than speak, so it waits for the turn
            self._mouth.history.remove(entry)
            if isinstance(result, Coroutine):
                result.close()

    def _drop_early(self) -> None:
        if self._early is not None:
            early, self._early = self._early, None
            self._take_back(early)

    def _take_back(self, early: _EarlyAnswer) -> None:
        if early.handle in self._mouth.speeches:
            self._mouth.drop(early.handle)
        self._mouth.history = [entry for entry in self._mouth.history if entry is not early.entry]

    # -- failures

    def _recover(self, error: Exception) -> None:
        """Something failed: the call goes on, the page and the log say what it was, and the caller hears a word."""
        self._report(error)
        recovery = self._callbacks.recovery
        self._apologise(recovery.voice_failed if isinstance(error, BreezeError) else recovery.callback_failed)

    def _apologise(self, text: str) -> None:
        """Once between two turns: an apology that fails needs no apology."""
        if text and not self._is_sorry and not self._is_over:
            self._is_sorry = True
            self._mouth.say(texts_of(text))

    def _report(self, error: Exception) -> None:
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

    # -- tasks

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task of this call; it is cancelled with the call and waited for."""
        assert self._group is not None
        task = self._group.create_task(work)
        self._children.add(task)
        task.add_done_callback(self._children.discard)
        return task


@dataclass(frozen=True, slots=True)
class _EarlyAnswer:
    """What is being thought of while the user may not have finished."""

    text: str
    entry: Message
    handle: SpeechHandle

    def answers(self, user_turn: UserTurn) -> bool:
        return self.text == user_turn.text and not self.handle.interrupted and self.handle.error is None


def _called(callback: Callable[..., CallbackResult], *given: Any) -> CallbackResult:
    """What a callback makes of it.  Where it fails at once, a coroutine that fails so: one way for all faults."""
    try:
        result = callback(*given)
        if not isinstance(result, AsyncGenerator | Awaitable):
            name = getattr(callback, "__name__", "the callback")
            raise TypeError(
                f"{name} returned {_kind(result)}: define it with `async def`, and `yield` the text to speak"
            )
    except Exception as error:
        return _failed(error)
    return result


async def _failed(error: Exception) -> None:
    raise error


def _silent(result: object) -> None:
    """Text that is returned is heard by nobody."""
    if isinstance(result, str):
        raise TypeError("the callback returned text; `yield` it instead, or `await session.say(...)`")


def _kind(value: object) -> str:
    return "nothing" if value is None else type(value).__name__


def _now() -> float:
    return asyncio.get_running_loop().time()


def _reading(text_filter: Callable[[], TextFilter] | None, voice: Voice) -> Callable[[], TextFilter] | None:
    """The filter; with numbers read out where it is the usual one and the voice does not read them itself."""
    if text_filter is SpokenText and not voice.reads_numbers and numbers.is_installed():
        return partial(SpokenText, read=numbers.read)
    return text_filter


async def _first(*events: asyncio.Event) -> None:
    """Wait for any of the events."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
