"""The agent's side of a call: texts in, sound at the ear out, and what of it was heard.

A `Mouth` speaks one `SpeechHandle` after another.  It knows nothing of turns: its owner says when it may sound, when to
hold its breath, and when to be silent for good.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Coroutine, Generator
from contextlib import aclosing
from typing import Any

from breeze_rtc.agent.call import Call, Reply, Voice
from breeze_rtc.agent.figures import Timeline
from breeze_rtc.agent.reserve import KEEPS_UP, MOST_S, PACKET_S, Reserve
from breeze_rtc.agent.text import TextFilter
from breeze_rtc.agent.transcript import Message, Transcript
from breeze_rtc.clock import SECOND, ns_to_samples
from breeze_rtc.errors import StepFailed
from breeze_rtc.playback import PlaybackReport, TextMark

log = logging.getLogger(__name__)

_POLL_S, _SHORTEST_POLL_S = 0.1, 0.02
# A voice may hold a sentence back until the next one begins.  One with no more sound than this before the ear, that has
# neither got text nor made sound for as long as that, is given more, up to two and a half times the bound: it may also
# just be slow.
_SHORT_LEAD_S, _DRY_VOICE_S, _MOST_BOUNDS = 0.8, 0.25, 2.5
# One that has made no sound of its last text for so long is given more in any case: it may need the whole text.
_SILENT_VOICE_S = 1.0
# A slow voice that makes no more sound for so long, at a pace of 1, is not waited for.
_STARVED_S = 2.0
# Longer than a listener without sound waits for sound that is there.
_STARVED_BESIDE_SOUND_S = 0.2
_FINALLY_S = 2.0

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class SpeechHandle:
    """One thing the agent says.  `await handle` returns it once it was really heard, or interrupted.

    Awaiting raises what stopped it, if that was an error: the callback's own, or a BreezeError of the voice.
    """

    def __init__(
        self, sample_rate: int, *, allow_interruptions: bool = True, text_filter: TextFilter | None = None
    ) -> None:
        self.interrupted = False
        """It was cut off before all of it was heard."""
        self.error: Exception | None = None
        """What stopped it, when that was neither its end nor an interruption."""
        self.allow_interruptions = allow_interruptions
        """Whether the user's voice, text and Stop button cut it off."""
        self.timeline = Timeline()
        """When what became of it."""
        self.is_filler = False
        """It only fills a silence until the answer is there."""
        self.false_interruptions = 0
        """Times that a sound which was no speech held it."""
        self.gaps = 0
        """Times that the listener heard silence inside of it because its sound was late."""
        self.gap_s = 0.0
        """How long that was, together."""
        self.concealed_s = 0.0
        """What the listener's player made up while it was heard."""
        self.words_unsure = 0
        """Of an interrupted one: words that may or may not have been heard."""
        self.held_back_s = 0.0
        """How much later its sentences began than their first sound was there, because the voice is slower than speech:
        silence before the first, and pauses between them."""
        # What the player had made up when it began to be heard.
        self._concealed_before_ns: int | None = None
        self._transcript = Transcript(sample_rate)
        # Sound on its way to the sink; and since when the sink has none because it is kept back.
        self._reserve = Reserve(sample_rate)
        self._is_slow = False  # its voice is slower than speech
        self._silent_from_s: float | None = None
        self._filter = text_filter
        # Of the filter's text, how much the voice has been given, and where its last mark is, spoken and written.
        self._spoken_chars = 0
        self._marked_chars = 0, 0
        self._sample_rate = sample_rate
        self._reply: Reply | None = None
        self._task: asyncio.Task[None] | None = None
        self._done = asyncio.Event()
        self._captioned_chars = 0
        self._entry: Message | None = None
        # When it last got text, and last made sound.
        self._pushed_at_s = self._made_at_s = 0.0
        # How much sound there was then.
        self._pushed_samples = 0
        # All its text is with the voice; and when its sound last grew, or moved at the ear: see `Mouth._watch`.
        self._has_all_text = False
        self._moved_at_s = 0.0

    def _hear(self, report: PlaybackReport) -> None:
        """Where the listener is, and what became of the sound."""
        self._transcript.hear(report.heard_samples)
        self.gaps, self.gap_s = max(self.gaps, report.gaps), max(self.gap_s, report.gap_ns / SECOND)
        if self._transcript.heard_samples:
            if self._concealed_before_ns is None:
                self._concealed_before_ns = report.concealed_ns
            self.concealed_s = (report.concealed_ns - self._concealed_before_ns) / SECOND

    def _written(self, marks: tuple[TextMark, ...]) -> tuple[TextMark, ...]:
        """Marks in what was spoken, as marks in what was written."""
        if self._filter is None or not marks:
            return marks
        self._marked_chars = marks[-1].chars, self._filter.written_chars(marks[-1].chars)
        self._count_silent()
        return tuple(TextMark(mark.samples, self._filter.written_chars(mark.chars)) for mark in marks)

    def _spoken(self, text: str) -> str:
        """More written text, which the transcript has, as it is to be spoken."""
        if self._filter is None:
            return text
        spoken = self._filter.push(text)
        self._spoken_chars += len(spoken)
        self._count_silent()
        return spoken

    def _count_silent(self) -> None:
        """Markup after the last mark takes no time, so nobody waits for it to be heard."""
        spoken, written = self._marked_chars
        silent_chars = len(self.text) - written - (self._spoken_chars - spoken)
        self._transcript.silent_chars = max(0, silent_chars)

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
    def unheard_s(self) -> float:
        """Seconds of it that were made and have not been heard: at an interruption, what was made in vain."""
        return (self._reserve.made_samples - self._transcript.heard_samples) / self._sample_rate

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


class Mouth:
    """Speaks in one call.

    text_filter: makes what turns written text into spoken, one for each speech; None: the text is spoken as it is.
    spawn: makes a task of the call.  on_speech: a speech has its first words and may sound.  on_end: a speech is over
    that was not silenced.  on_error: what went wrong in one.  on_stall: what went wrong and was put right.  on_sound: a
    stream's next PCM, as it is made.  on_done: a speech is over, in whatever way.
    """

    def __init__(
        self,
        call: Call,
        voice: Voice,
        *,
        voice_name: str | None,
        text_filter: Callable[[], TextFilter] | None,
        max_unheard_s: float,
        stall_timeout_s: float,
        spawn: Spawn,
        on_speech: Callable[[SpeechHandle], None],
        on_end: Callable[[SpeechHandle], None],
        on_error: Callable[[Exception], None],
        on_stall: Callable[[Exception], None],
        on_sound: Callable[[int, bytes], None],
        on_done: Callable[[SpeechHandle], None],
    ) -> None:
        self.speeches: list[SpeechHandle] = []
        """Not yet done, in the order they were asked for."""
        self.history: list[Message] = []
        """The call so far, the user's turns included."""
        self._call = call
        self._voice = voice
        self._voice_name = voice_name
        self._text_filter = text_filter
        self._max_unheard_s = max_unheard_s
        self._stall_timeout_s = stall_timeout_s
        self._spawn = spawn
        self._on_speech = on_speech
        self._on_end = on_end
        self._on_error = on_error
        self._on_stall = on_stall
        self._on_sound = on_sound
        self._on_done = on_done
        self._floor = asyncio.Event()
        self._floor.set()
        self._turn = asyncio.Lock()
        # How much sound was made in this call, and how long its speeches were, in characters.
        self._made_s = 0.0
        self._lengths: list[int] = []
        self._cut: list[SpeechHandle] = []  # silenced, their last position not confirmed yet
        self.is_held = False
        """Between `hold` and what ends it."""

    # -- speaking

    def handle(self, *, allow_interruptions: bool = True) -> SpeechHandle:
        """A handle for something to be said in this voice."""
        text_filter = self._text_filter() if self._text_filter is not None else None
        return SpeechHandle(self._voice.sample_rate, allow_interruptions=allow_interruptions, text_filter=text_filter)

    def say(self, texts: AsyncGenerator[str, None], *, allow_interruptions: bool = True) -> SpeechHandle:
        """Speak `texts` after what is being spoken."""
        handle = self.handle(allow_interruptions=allow_interruptions)
        handle.timeline.asked_s = _now()
        self.speeches.append(handle)
        handle._task = self._spawn(self._speak(handle, texts))
        return handle

    @property
    def is_sounding(self) -> bool:
        """Whether a speech has begun that is not over."""
        return any(handle._reply is not None for handle in self.speeches)

    @property
    def is_protected(self) -> bool:
        """Whether what is being spoken must not be interrupted."""
        return any(not handle.allow_interruptions and handle._reply is not None for handle in self.speeches)

    def positions(self) -> dict[int, int]:
        """Where the ear is now in each stream that it has not left behind, in samples."""
        streams = [handle._reply.stream for handle in [*self._cut, *self.speeches] if handle._reply is not None]
        return {stream: self._call.position(stream).heard_samples for stream in streams}

    def may_sound(self, may: bool) -> None:
        """A speech that is ready waits while it may not."""
        if may:
            self._floor.set()
        else:
            self._floor.clear()

    async def _speak(self, handle: SpeechHandle, texts: AsyncGenerator[str, None]) -> None:
        try:
            try:
                # A cut speech enters the history before the callback that answers the interruption reads it.
                await self.cuts_confirmed()
                first = await _first_text(texts)
                if first:
                    handle.timeline.first_text_s = _now()
                    if not handle.is_filler:
                        self._drop_silent_fillers()
                    async with self._turn:
                        await self._room()
                        await self._floor.wait()
                        self._on_speech(handle)
                        await self._pronounce(handle, first, texts)
                    await self._heard(handle)
            finally:
                await _close(texts)
        except Exception as error:
            handle.error = error
            self._on_error(error)
        finally:
            if handle in self.speeches:
                self._finish(handle)

    async def _pronounce(self, handle: SpeechHandle, first: str, texts: AsyncGenerator[str, None]) -> None:
        """Open a stream, feed it the text as fast as the listener allows, and hand its sound to the sink."""
        reply = handle._reply = self._voice.speak(voice=self._voice_name)
        handle._moved_at_s = _now()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._forward(handle, reply))
                try:
                    self._push(handle, reply, first)
                    await self._room(handle)
                    async for text in texts:
                        if text:
                            self._push(handle, reply, _checked(text))
                            await self._room(handle)
                except Exception as error:  # the callback's; what it has said is heard all the same
                    handle.error = error
                    self._on_error(error)
                rest = handle._filter.end() if handle._filter is not None else ""
                if rest:
                    reply.push(rest)
                reply.end()
                handle._has_all_text = True
                handle._moved_at_s = _now()
                handle._reserve.know(handle.text, is_all=True)
                self._hand_on(handle, reply)
        except ExceptionGroup as group_error:
            raise group_error.exceptions[0] from None

    def _push(self, handle: SpeechHandle, reply: Reply, text: str) -> None:
        handle._transcript.push(text)
        handle._pushed_at_s = _now()
        handle._pushed_samples = handle._transcript.delivered_samples
        handle._reserve.know(handle.text)
        self._call.send({"type": "speech", "stream": reply.stream, "text": text})
        spoken = handle._spoken(text)
        if spoken:
            reply.push(spoken)

    async def _forward(self, handle: SpeechHandle, reply: Reply) -> None:
        async for chunk in reply:
            if handle.interrupted:
                break  # a step that was running when the user interrupted still delivers
            handle._moved_at_s = handle._made_at_s = _now()
            self._on_sound(reply.stream, chunk.pcm)
            end_samples = chunk.start_samples + chunk.samples
            handle._reserve.make(end_samples, chunk.packets, handle._written(chunk.marks))
            self._made_s += chunk.samples / self._voice.sample_rate
            self._hand_on(handle, reply)
        if not handle.interrupted:  # a stream that was cancelled ends too, but in the middle of its text
            self._hand_on(handle, reply, is_all=True)
            handle._transcript.complete()
            if not handle.is_filler:
                self._lengths.append(len(handle.text))
        self._call.sink.end(reply.stream)

    def _hand_on(self, handle: SpeechHandle, reply: Reply, *, is_all: bool = False) -> None:
        """Give the sink what of the sound may go: all of it where the voice keeps up, or makes no more of it."""
        reserve, pace, lead_s = handle._reserve, self._voice.pace, 0.0
        # Until a speech has begun a voice that was too slow once is not believed to keep up after all.
        was_slow = handle._is_slow and reserve.out_samples == 0
        handle._is_slow = pace is not None and (was_slow or pace < KEEPS_UP)
        if handle._is_slow:
            report = self._call.position(reply.stream)
            in_sink = handle._transcript.delivered_samples - report.heard_samples
            lead_s = max(0.0, in_sink / self._voice.sample_rate - report.path_delay_ns / SECOND)
        if handle._is_slow and not is_all:
            assert pace is not None
            packets, marks = reserve.take(
                lead_s,
                pace=pace,
                stumble_s=self._voice.stumble_s,
                known_s=self._made_s,
                usual_chars=self._usual_chars(),
            )
        else:
            packets, marks = reserve.take_all()
        if packets:
            if handle._silent_from_s is not None:
                handle.held_back_s += max(0.0, _now() - handle._silent_from_s)
                handle._silent_from_s = None
            if handle.timeline.first_sound_s is None:
                handle.timeline.first_sound_s = _now()
            self._call.sink.write(reply.stream, packets)
        handle._transcript.deliver(reserve.out_samples, marks)
        if reserve.is_kept_back and handle._silent_from_s is None:
            handle._silent_from_s = _now() + lead_s + len(packets) * PACKET_S
            self._call.sink.rest(reply.stream, reserve.out_samples)

    def _usual_chars(self) -> int:
        """What the speeches of this call are long, in the middle."""
        return sorted(self._lengths)[len(self._lengths) // 2] if self._lengths else 0

    async def _room(self, handle: SpeechHandle | None = None) -> None:
        """Wait until less than the bound of all speech is unheard."""
        while True:
            self._follow()
            unheard_s = sum(speech._transcript.unheard_s for speech in self.speeches)
            if unheard_s <= self._max_unheard_s:
                return
            if handle is not None and not self.is_held:
                transcript, waited_s = handle._transcript, _now() - max(handle._pushed_at_s, handle._made_at_s)
                # What a slow voice has in hand does not count, nor what it would have in hand if it had the text.
                if handle._is_slow and unheard_s <= self._max_unheard_s + MOST_S:
                    return
                lead_s = (transcript.delivered_samples - transcript.heard_samples) / self._voice.sample_rate
                is_short = lead_s < _SHORT_LEAD_S and unheard_s <= _MOST_BOUNDS * self._max_unheard_s
                is_silent = lead_s <= 0 and transcript.delivered_samples == handle._pushed_samples
                if (is_short and waited_s > _DRY_VOICE_S) or (is_silent and waited_s > _SILENT_VOICE_S):
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
        for handle in self.speeches:
            if handle._reply is not None:
                before = handle._transcript.heard_samples
                report = self._call.position(handle._reply.stream)
                handle._hear(report)
                if handle._transcript.heard_samples > before or not report.is_playing:
                    handle._moved_at_s = _now()
                if before == 0 < handle._transcript.heard_samples:
                    handle.timeline.first_heard_s = _now() - handle.playback_position_s

    def _finish(self, handle: SpeechHandle) -> None:
        """A speech that was not interrupted is over: heard, empty, failed, or left behind by the end of the call."""
        self.speeches.remove(handle)
        if handle._reply is not None:
            if not handle._transcript.is_complete:
                handle.interrupted = handle.error is None
                handle._reply.cancel()
                self._call.sink.clear(handle._reply.stream)
            self._record(handle)
            self._tell_end(handle)
        self._is_over(handle)
        self._on_end(handle)

    def _is_over(self, handle: SpeechHandle) -> None:
        handle.timeline.done_s = _now()
        handle._done.set()
        self._on_done(handle)

    # -- being held, and silenced

    def hold(self) -> None:
        """Hold the breath: silence at the ear, and nothing is lost."""
        if not self.is_held and self.is_sounding:
            self.is_held = True
            self._call.pause()

    def go_on(self) -> None:
        """Speak on from the first sample that was not heard."""
        if self.is_held:
            self.is_held = False
            for handle in self.speeches:
                handle.false_interruptions += handle._reply is not None
            self._call.resume()

    def silence(self, *, force: bool = False) -> list[SpeechHandle]:
        """Stop every speech now, those that allow no interruption only by `force`; return those that were stopped.

        The order is the promise: first the sound (engine and sink), then the callbacks, then the words.
        """
        self._follow()
        stopped = [handle for handle in self.speeches if force or handle.allow_interruptions]
        self.speeches = [handle for handle in self.speeches if handle not in stopped]
        if not self.speeches:
            # Who has the turn is among the stopped; a callback that is slow to close must not keep it.
            self._turn = asyncio.Lock()
        for handle in stopped:
            handle.interrupted = True
            handle.timeline.stopped_s = _now()
            if handle._reply is not None:
                handle._reply.cancel()
                self._call.sink.clear(handle._reply.stream)
        for handle in stopped:
            if handle._task is not None and handle._task is not asyncio.current_task():
                handle._task.cancel()
            self._record(handle)
        self._cut += stopped
        return stopped

    async def confirm(self, stopped: list[SpeechHandle]) -> None:
        """The listener's own word on where the sound stopped replaces ours."""
        try:
            if self.is_held or any(handle._transcript.delivered_samples for handle in stopped):
                self.is_held = False
                await self._call.flush()
        finally:
            self.confirmed(stopped)

    def confirmed(self, stopped: list[SpeechHandle]) -> None:
        """No better word will come on where these stopped."""
        for handle in stopped:
            if handle._reply is not None:
                report = self._call.position(handle._reply.stream)
                handle._hear(report)
                if report.error_ns is not None:
                    error_samples = ns_to_samples(report.error_ns, self._voice.sample_rate)
                    handle.words_unsure = handle._transcript.words_within(error_samples)
                self._record(handle)
                self._tell_end(handle)
            self._cut.remove(handle)
            self._is_over(handle)

    async def cuts_confirmed(self) -> None:
        """Wait until the history says what was heard of all that was interrupted."""
        for handle in tuple(self._cut):
            await handle._done.wait()

    def _drop_silent_fillers(self) -> None:
        for filler in [handle for handle in self.speeches if handle.is_filler]:
            if filler.timeline.first_sound_s is None:
                self.drop(filler)

    def drop(self, handle: SpeechHandle) -> None:
        """Take back what has not made a sound: it leaves no trace."""
        self.speeches.remove(handle)
        handle.interrupted = True
        if handle._reply is not None:
            handle._reply.cancel()
            self._call.sink.clear(handle._reply.stream)
            self._tell_end(handle)
        if handle._task is not None:
            handle._task.cancel()
        self._is_over(handle)

    def end(self) -> None:
        """The call is over."""
        for handle in [*self.speeches, *self._cut]:
            self._call.sink.clear(handle._reply.stream) if handle._reply else None
            handle._done.set()

    # -- words

    def _record(self, handle: SpeechHandle) -> None:
        """Enter a speech into the history, at the place it took when it ended."""
        message = Message("assistant", handle.heard_text, handle.interrupted)
        if handle._entry is None:
            self.history.append(message)
        else:
            at = next(at for at, entry in enumerate(self.history) if entry is handle._entry)
            self.history[at] = message
        handle._entry = message

    def _tell_end(self, handle: SpeechHandle) -> None:
        assert handle._reply is not None
        chars = handle._transcript.heard_chars
        self._call.send(
            {"type": "speech_end", "stream": handle._reply.stream, "interrupted": handle.interrupted, "chars": chars}
        )

    async def caption(self) -> None:
        """Tell the page, word by word, what has been heard, as long as the call lasts."""
        while True:
            # Looked at often enough for what else is watched, and when the next word will have been heard.
            next_word_s = min((handle._transcript.next_mark_s for handle in self.speeches), default=_POLL_S)
            await asyncio.sleep(min(_POLL_S, max(_SHORTEST_POLL_S, next_word_s)))
            self._follow()
            for handle in self.speeches:
                chars = handle._transcript.heard_chars
                if handle._reply is not None and chars > handle._captioned_chars:
                    handle._captioned_chars = chars
                    self._call.send({"type": "heard", "stream": handle._reply.stream, "chars": chars})
            self._watch()

    def _watch(self) -> None:
        """A voice that has all its text and makes no more sound, for a listener who waits, will not recover."""
        for handle in self.speeches:
            quiet_s = _now() - max(handle._pushed_at_s, handle._made_at_s)
            if (
                handle._reply is not None
                and handle._reserve.is_kept_back
                and quiet_s > _STARVED_S / (self._voice.pace or 1)
            ):
                self._hand_on(handle, handle._reply, is_all=True)
            transcript = handle._transcript
            is_starved = transcript.heard_samples >= transcript.delivered_samples and not transcript.is_complete
            if self.is_held or not is_starved:
                continue
            starved_s = _now() - handle._moved_at_s
            if starved_s > _STARVED_BESIDE_SOUND_S and handle._reply is not None and handle._reply.nudge():
                self._on_stall(StepFailed("voice", f"sound was ready for a listener without any for {starved_s:.1f} s"))
            if handle._has_all_text and starved_s >= self._stall_timeout_s and handle._task is not None:
                detail = f"no sound for {self._stall_timeout_s:g} s in the middle of a speech"
                handle.error = StepFailed("voice", detail)
                self._on_error(handle.error)
                handle._task.cancel()
                return


async def texts_of(text: str | AsyncIterable[str]) -> AsyncGenerator[str, None]:
    """What `say` takes, as one kind of thing; closing it closes what it was made of."""
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


async def _first_text(texts: AsyncGenerator[str, None]) -> str:
    """The first text that is not blank, with the blank before it, or "" if there is none."""
    blank = ""
    async for text in texts:
        blank += _checked(text)
        if blank.strip():
            return blank
    return ""


async def _close(texts: AsyncGenerator[str, None]) -> None:
    """Close the generator so that its `finally` runs; one that does not end in time is left behind."""
    try:
        async with asyncio.timeout(_FINALLY_S):
            await texts.aclose()
    except TimeoutError:
        log.warning("a callback took more than %.0f s to close after it was interrupted", _FINALLY_S)


def _checked(text: object) -> str:
    if not isinstance(text, str):
        raise TypeError(f"an agent's callback yields text (str), not {type(text).__name__}")
    return text


def _now() -> float:
    return asyncio.get_running_loop().time()
