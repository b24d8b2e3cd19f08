"""The asyncio face of the engine.

    async with Engine("nano") as engine:
        speech = engine.speak()
        speech.push("Hello there. ")
        speech.end()
        async for chunk in speech:
            sink.write(speech.stream, chunk.packets)

Behind it stands a process of its own (or, with `process=False`, a thread) that computes; this side only moves messages
and imports no torch.  An engine that dies is started again; what was being spoken is lost and says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from breeze_rtc.clock import SECOND
from breeze_rtc.errors import (
    BadRecording,
    BadRequest,
    BadSampling,
    BadText,
    BreezeError,
    CannotKeep,
    CheckpointError,
    EngineClosed,
    Overloaded,
    StepFailed,
    UnknownVoice,
)
from breeze_rtc.media.opus import PACKET_MS
from breeze_rtc.playback import PlaybackReport, SpeechPacket, TextMark
from breeze_rtc.runtime import voice_folder
from breeze_rtc.runtime.link import Link, Peer, launch
from breeze_rtc.runtime.messages import (
    AddVoice,
    Cancel,
    Chunk,
    EndText,
    Failed,
    Finished,
    Loading,
    Measuring,
    Message,
    Open,
    Ready,
    Report,
    Start,
    Stats,
    Taken,
    Text,
    VoiceAdded,
)
from breeze_rtc.scheduling.policy import Policy
from breeze_rtc.scheduling.stream import Feed, Priority
from breeze_rtc.sentences import piece_end

log = logging.getLogger(__name__)

MAX_TEXT_CHARS = 20_000
"""Text of one stream: about twenty minutes of speech."""
MAX_INSTRUCTION_CHARS = 1_000
MAX_RECORDING_BYTES = 20 << 20
"""Of a sound file that a voice is cloned from."""
RESTART_PAUSES_S = (0.1, 0.5, 2.0, 5.0, 15.0)
"""Pauses before each attempt to start a dead engine again; after the last one it stays down."""
STEADY_S = 60.0
"""An engine that ran this long is not the one that keeps dying: its pauses begin anew."""


@dataclass(frozen=True, slots=True)
class SpeechChunk:
    """The next samples of a stream, in order and without gaps."""

    start_samples: int
    """Media position of the first sample."""
    samples: int
    """How many; 0 in a last chunk that brings only packets."""
    packets: tuple[SpeechPacket, ...]
    """The 20 ms Opus packets these samples complete."""
    pcm: bytes
    """The samples, s16le mono."""
    marks: tuple[TextMark, ...]
    """Where in the text the stream will be at positions up to the end of this chunk."""


class _Inbox:
    """What has come of one stream and was not read yet.  Shared by the engine, which fills it, and one Speech."""

    def __init__(self) -> None:
        self.chunks: deque[SpeechChunk] = deque()
        # Nothing more will come; `error` says why when that is not the stream's natural end.
        self.is_over = False
        self.error: BreezeError | None = None
        # The reader, while it waits.
        self.waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def finish(self, error: BreezeError | None = None) -> None:
        if not self.is_over:
            self.is_over = True
            self.error = error
            self.wake()


class Speech:
    """One stream: text goes in, sound comes out of the iterator, which ends after the last chunk.

    Iterating raises StepFailed when a stage fails on this stream, Overloaded when it has waited for room as long as its
    priority may, BadText when the text cannot be spoken, EngineClosed when the engine closes or dies; chunks made
    before that are delivered first.

    One task reads.  A reader that is cancelled while it waits cancels the stream, because nobody else would: to wait
    with a timeout, shield the read.  A Speech that is dropped unread is cancelled too.
    """

    def __init__(self, engine: Engine, stream: int, inbox: _Inbox) -> None:
        self.stream = stream
        self._engine = engine
        self._inbox = inbox
        self._chars = 0
        self._has_all_text = False
        # Samples of the chunks read so far, and how many of them the engine has been told of.
        self._taken = 0
        self._told = 0
        weakref.finalize(self, _abandon, weakref.ref(engine), stream).atexit = False

    def push(self, text: str) -> None:
        """Say more.  Text may come in pieces of any size; what is unfinished waits for the next piece or for `end`.

        Text for a stream that is over (cancelled, failed) is dropped: its iterator has said so.
        Raises BadText, with nothing taken, for what is not Unicode text or is too much for one stream.
        """
        _check_text(text, self._chars, has_ended=self._has_all_text)
        self._chars += len(text)
        if text and not self._inbox.is_over:
            self._engine._say(Text(self.stream, text))

    def end(self) -> None:
        """All text has been pushed.  Calling it again does nothing."""
        if not self._has_all_text and not self._inbox.is_over:
            self._engine._say(EndText(self.stream))
        self._has_all_text = True

    def nudge(self) -> bool:
        """Wake a reader who sleeps although there is sound, because a wake-up was lost; whether there was one."""
        waiter = self._inbox.waiter
        if not self._inbox.chunks or waiter is None or waiter.done():
            return False
        waiter.set_result(None)
        return True

    def cancel(self) -> None:
        """Stop at once: what is unread is dropped, the iterator ends, the engine frees what the stream held."""
        self._inbox.chunks.clear()
        self._engine._cancel(self.stream)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SpeechChunk:
        inbox = self._inbox
        while not inbox.chunks:
            if inbox.is_over:
                if inbox.error is not None:
                    raise inbox.error
                raise StopAsyncIteration
            assert inbox.waiter is None, "two tasks read one speech"
            inbox.waiter = asyncio.get_running_loop().create_future()
            try:
                await inbox.waiter
            except asyncio.CancelledError:
                self.cancel()
                raise
            finally:
                inbox.waiter = None
        chunk = inbox.chunks.popleft()
        self._taken = chunk.start_samples + chunk.samples
        # The engine holds a stream that is 30 s behind its reader; once a second is soon enough to hear of it.
        if self._taken - self._told >= self._engine.sample_rate and not inbox.is_over:
            self._told = self._taken
            self._engine._say(Taken(self.stream, self._taken))
        return chunk


class SentenceSpeech:
    """A `Speech` of a model that reads its whole text before it speaks: one stream after another, a piece of text each.

    To whoever reads it is one stream, whose positions and marks go on from piece to piece.  The next piece begins when
    the one before has been made, and holds all sentences that have come meanwhile.
    """

    def __init__(self, engine: Engine, stream: int, begin: Callable[[int, int], Speech]) -> None:
        self.stream = stream
        self._engine = engine
        self._begin = begin
        self._text = ""
        self._has_all_text = False
        self._is_cancelled = False
        # The first begins with the speech, so that it waits for room while its text comes.
        self._piece: Speech | None = begin(stream, 0)
        self._pieces = 1
        self._has_piece_text = False
        # Where the piece in work begins, in samples and in the text; how far sound and text have come.
        self._start_samples = self._start_chars = 0
        self._end_samples = self._end_chars = 0
        self._more = asyncio.Event()

    def push(self, text: str) -> None:
        """See `Speech.push`."""
        _check_text(text, len(self._text), has_ended=self._has_all_text)
        self._text += text
        self._feed()

    def end(self) -> None:
        """See `Speech.end`."""
        self._has_all_text = True
        self._feed()

    def _feed(self) -> None:
        """Give the piece in work its text, if it has none and there is some."""
        self._more.set()
        if self._piece is None or self._has_piece_text:
            return
        end = self._piece_end()
        if end > self._end_chars or self._has_all_text:
            self._piece.push(self._text[self._end_chars : end])
            self._piece.end()
            self._has_piece_text = True
            self._start_chars, self._end_chars = self._end_chars, end

    def _piece_end(self) -> int:
        return piece_end(self._text, self._end_chars, is_first=self._end_chars == 0, is_all=self._has_all_text)

    def nudge(self) -> bool:
        """See `Speech.nudge`."""
        return self._piece is not None and self._piece.nudge()

    def cancel(self) -> None:
        """See `Speech.cancel`."""
        self._is_cancelled = True
        if self._piece is not None:
            self._piece.cancel()
        self._more.set()

    def of_its_piece(self, report: PlaybackReport) -> PlaybackReport:
        """A report on this speech as one on the piece in work, which may not be heard yet."""
        stream = self._piece.stream if self._piece is not None else 0
        return replace(report, stream=stream, heard_samples=max(0, report.heard_samples - self._start_samples))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SpeechChunk:
        while not self._is_cancelled:
            if self._piece is None and not await self._next_piece():
                break
            assert self._piece is not None
            try:
                chunk = await anext(self._piece)
            except StopAsyncIteration:
                self._piece = None
                self._start_samples = self._end_samples
                continue
            except asyncio.CancelledError:
                self.cancel()
                raise
            return self._joined(chunk)
        raise StopAsyncIteration

    async def _next_piece(self) -> bool:
        """Begin the next piece once there is one; False when there will be none."""
        while not self._is_cancelled:
            if self._piece_end() > self._end_chars:
                self._piece = self._begin(self._engine._next_stream(), self._pieces)
                self._pieces += 1
                self._has_piece_text = False
                self._feed()
                return True
            if self._has_all_text:
                return False
            self._more.clear()
            try:
                await self._more.wait()
            except asyncio.CancelledError:
                self.cancel()
                raise
        return False

    def _joined(self, chunk: SpeechChunk) -> SpeechChunk:
        start = self._start_samples
        packets = tuple(SpeechPacket(start + packet.start_samples, packet.payload) for packet in chunk.packets)
        marks = tuple(TextMark(start + mark.samples, self._start_chars + mark.chars) for mark in chunk.marks)
        samples, pcm = chunk.samples, chunk.pcm
        if not samples and packets:
            # The last packets are filled up with silence; the next piece begins behind it.
            packet_samples = self._engine.sample_rate * PACKET_MS // 1000
            samples = chunk.packets[-1].start_samples + packet_samples - chunk.start_samples
            pcm = bytes(2 * samples)
        self._end_samples = start + chunk.start_samples + samples
        return SpeechChunk(start + chunk.start_samples, samples, packets, pcm, marks)


def _check_text(text: object, chars: int, *, has_ended: bool) -> None:
    """Raises BadText for what one speech of `chars` so far cannot take."""
    if not isinstance(text, str):
        raise BadText(f"text must be a str, not {type(text).__name__}")
    if has_ended:
        raise BadText("this speech has ended; speak() makes another")
    if chars + len(text) > MAX_TEXT_CHARS:
        raise BadText(
            f"{chars + len(text)} characters are more than the {MAX_TEXT_CHARS} of one speech; "
            "split the text and speak the parts one after another"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadText("the text holds half a surrogate pair; decode it with errors='replace'") from error


def _abandon(engine: weakref.ref[Engine], stream: int) -> None:
    """The last reference to a Speech is gone.  Runs wherever that happened, so the loop does the rest."""
    alive = engine()
    if alive is not None:
        alive._cancel_soon(stream)


class Engine:
    """Speaks many streams at once; see the module's docstring.  Made and used on one event loop."""

    def __init__(
        self,
        model: str = "nano",
        *,
        device: str = "cpu",
        threads: int = 1,
        process: bool = True,
        max_streams: int = 16,
        voices: Path | None = None,
        trace: Path | None = None,
        policy: Policy | None = None,
        measures: bool = True,
        weights: str = "",
        codec_device: str = "",
        on_restart: Callable[[str], None] | None = None,
        on_loading: Callable[[str, float], None] | None = None,
        on_measuring: Callable[[float], None] | None = None,
    ) -> None:
        """Nothing is loaded until `start`.

        model: a preset's name, a checkpoint's folder or its Hugging Face id.  weights: "int8" or "fp8" keeps the large
        layers in half the memory.  codec_device: "cpu" leaves the codec there, in a thread of its own beside `device`.
        threads: torch's.  voices: the folder of the cloned voices, which need not be there yet; None: no cloned voices.
        trace: a file for the scheduler's inputs; an engine that is started again writes to a file of its own beside
        it, numbered.  policy: the scheduler's rules, to measure what each is worth.  measures: the first start on a
        machine takes some seconds to find out how long its steps take, and keeps that in the user's cache folder;
        False: the scheduler learns it from the first streams.  on_restart: called on the loop with a sentence when an
        engine that died is running again.
        on_loading: called there while large weights are read, with what it is and how much of it is done, 0 to 1;
        on_measuring: the same for the measurement.
        """
        self.model_name = model
        self.on_restart = on_restart
        self.on_loading = on_loading
        self.on_measuring = on_measuring
        # The latest snapshot, about ten times a second while something is spoken: see `Driver`.
        self.stats: dict[str, Any] = {}
        # How often a dead engine was started again.
        self.restarts = 0
        self._device = device
        self._threads = threads
        self._process = process
        self._max_streams = max_streams
        self._voices = voices.absolute() if voices is not None else None
        self._trace = trace
        self._policy = policy or Policy()
        self._measures = measures
        self._weights = weights
        self._codec_device = codec_device
        self._facts: Ready | None = None
        # Streams the engine has not finished.
        self._inboxes: dict[int, _Inbox] = {}
        self._in_sentences: weakref.WeakValueDictionary[int, SentenceSpeech] = weakref.WeakValueDictionary()
        self._last_stream = 0
        # Recordings that the engine makes a voice of.
        self._new_voices: dict[int, asyncio.Future[None]] = {}
        # Set while an engine is running and ready.
        self._link: Link | None = None
        self._peer: Peer | None = None
        # Why there is none, when there is none.
        self._why_down = "the engine has not been started: use `async with Engine(...)`"
        self._is_closed = False
        self._keeper: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Load the model and wait until it is ready.

        Raises CheckpointError when it is missing or broken, BadRequest when the trace cannot be written, EngineClosed
        when the engine ends before it is ready.
        """
        assert self._keeper is None, "start() was called before"
        self._loop = asyncio.get_running_loop()
        await self._launch()
        self._keeper = self._loop.create_task(self._keep(), name="breeze-engine-keeper")

    async def close(self) -> None:
        """Stop the engine; open speech ends with EngineClosed.  May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        link, self._link = self._link, None
        self._go_down("the engine is closed")
        if link is not None:
            link.close()
        if self._peer is not None:
            await asyncio.to_thread(self._peer.wait)

    @property
    def sample_rate(self) -> int:
        """Of PCM and media positions."""
        return self._known.sample_rate

    @property
    def frame_samples(self) -> int:
        """Samples of one codec frame."""
        return self._known.frame_samples

    @property
    def reads_numbers(self) -> bool:
        """Whether the model's own front end turns numbers, dates and amounts into words.

        A model whose prompt is the text as it is has none.
        """
        return self._known.feed != Feed.PREFIX.value

    @property
    def pace(self) -> float | None:
        """Seconds of speech that it makes in a second, of each stream; None while nobody knows."""
        frame_ns = self.stats.get("frame_ns") or self._known.frame_ns
        return self.frame_samples * SECOND / self.sample_rate / frame_ns if frame_ns else None

    @property
    def stumble_s(self) -> float:
        """The longest that it has lately stood still."""
        return float(self.stats.get("stumble_ns", 0)) / SECOND

    @property
    def voices(self) -> tuple[str, ...]:
        """Names for `speak`: the model's own, the default first, then the cloned ones."""
        known = self._known
        cloned = voice_folder.names(self._voices) if self._voices is not None and known.clones else ()
        return known.voices + tuple(name for name in cloned if name not in known.voices)

    @property
    def licence_note(self) -> str:
        """What the weights' licence asks to be said; empty for none."""
        return self._known.licence_note

    @property
    def summary(self) -> str:
        """What was loaded, where, and what it holds there."""
        return self._known.summary

    @property
    def is_running(self) -> bool:
        """An engine is there to speak; False before `start`, after `close`, and while a dead one starts again."""
        return self._link is not None

    @property
    def pid(self) -> int | None:
        """The engine's process; None for a thread or while none is running."""
        return self._peer.pid if self._peer is not None and self._link is not None else None

    @property
    def _known(self) -> Ready:
        if self._facts is None:
            raise EngineClosed(self._why_down)
        return self._facts

    def speak(
        self,
        *,
        voice: str | None = None,
        instruction: str = "",
        language: str = "",
        seed: int | None = None,
        sampling: Mapping[str, float] | None = None,
        priority: Priority = Priority.LIVE,
        interactive: bool = True,
        max_s: float | None = None,
    ) -> Speech | SentenceSpeech:
        """Begin a stream.

        voice: one of `voices`, the first by default.  instruction: in words, who speaks or how; of models that read
        one, others fail the stream with BadRequest.  language: of the text, by its English name, for models that are
        told; "" and "auto": the model finds out.  seed: the same seed and text give the same samples; random by
        default.  sampling: any of `SAMPLING_RANGES`, the model's own values by default.  interactive: somebody may
        interrupt, so it is not generated far ahead of the ear.  max_s: the speech ends at the codec frame that reaches
        it, finished or not; each piece of it, where a model reads a whole piece before it speaks.
        Raises UnknownVoice, BadText for the instruction, BadSampling, and EngineClosed while no engine is running.
        """
        if self._link is None:
            raise EngineClosed(self._why_down)
        voice = self._known.voices[0] if voice is None else voice
        if voice not in self._known.voices and voice not in self.voices:
            raise UnknownVoice(str(voice), self.voices)
        _check_text(instruction, 0, has_ended=False)
        if len(instruction) > MAX_INSTRUCTION_CHARS:
            raise BadText(f"an instruction of {len(instruction)} characters; {MAX_INSTRUCTION_CHARS} are read")
        seed = secrets.randbits(63) if seed is None else seed
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 63:
            raise BadSampling("seed", seed, "an integer from 0 to 2**63 - 1")
        if max_s is not None and not (math.isfinite(max_s) and max_s > 0):
            raise BadSampling("max_s", max_s, "a number of seconds over 0")
        frames = 0 if max_s is None else math.ceil(max_s * self.sample_rate / self.frame_samples)
        language = "" if language.lower() == "auto" else language.lower()
        stream = self._next_stream()
        checked, asked = checked_sampling(sampling or {}), int(priority)
        if interactive and self._known.feed == Feed.PREFIX.value:
            voice_, seed_ = voice, seed

            def begin(stream: int, piece: int) -> Speech:
                seed = (seed_ + piece) % (1 << 63)
                return self._begin(
                    Open(stream, voice_, seed, checked, asked, interactive, instruction, frames, language)
                )

            speech = SentenceSpeech(self, stream, begin)
            self._in_sentences[stream] = speech
            return speech
        return self._begin(Open(stream, voice, seed, checked, asked, interactive, instruction, frames, language))

    def _next_stream(self) -> int:
        self._last_stream += 1
        return self._last_stream

    def _begin(self, message: Open) -> Speech:
        if self._link is None:
            raise EngineClosed(self._why_down)
        inbox = self._inboxes[message.stream] = _Inbox()
        self._say(message)
        return Speech(self, message.stream, inbox)

    async def add_voice(self, name: str, recording: bytes, transcript: str) -> None:
        """Clone a voice, in place of one of that name; when this returns it can be spoken with.

        recording: a sound file of 1 to 30 s in which one voice says `transcript`.  It is encoded beside what is spoken.
        Raises BadRequest, BadRecording, BadText, CannotKeep, and EngineClosed while no engine is running.
        """
        if self._voices is None:
            raise BadRequest("this engine has no folder for voices; give it one: Engine(voices=...)")
        if self._link is None:
            raise EngineClosed(self._why_down)
        if not self._known.clones:
            raise BadRequest(f"the model {self.model_name} cannot clone a voice")
        voice_folder.check(name, transcript, self._known.voices)
        if len(recording) > MAX_RECORDING_BYTES:
            raise BadRecording(f"the recording has more than {MAX_RECORDING_BYTES >> 20} MB")
        request = self._next_stream()
        made = self._new_voices[request] = asyncio.get_running_loop().create_future()
        self._say(AddVoice(request, name, transcript, recording))
        try:
            await made
        finally:
            self._new_voices.pop(request, None)

    def remove_voice(self, name: str) -> None:
        """Delete a cloned voice; streams that have begun go on.  Raises BadRequest, UnknownVoice, CannotKeep."""
        if self._voices is None or name in self._known.voices:
            raise BadRequest(f"{name!r} is no cloned voice")
        voice_folder.remove(self._voices, name)

    def report(self, report: PlaybackReport) -> None:
        """Where a listener is.  Of no use, and dropped, once the whole stream has been made."""
        in_sentences = self._in_sentences.get(report.stream)
        if in_sentences is not None:
            report = in_sentences.of_its_piece(report)
        if report.stream in self._inboxes:
            self._say(Report(report))

    # ---- the engine behind it ----------------------------------------------------------------------------------------

    async def _launch(self) -> None:
        """Start an engine and wait until it is ready; `_link` and `_peer` are set then, and only then."""
        start = Start(
            self.model_name,
            self._device,
            self._threads,
            self._max_streams,
            self._trace_path(),
            self._policy.state(),
            self._measures,
            self._weights,
            str(self._voices or ""),
            self._codec_device,
        )
        link, peer, self._facts = await launch(start, self._hear, own_process=self._process)
        if self._facts.licence_note:
            log.warning("%s", self._facts.licence_note)
        self._link, self._peer = link, peer

    def _trace_path(self) -> str:
        if self._trace is None:
            return ""
        path = self._trace if not self.restarts else self._trace.with_suffix(f".{self.restarts}{self._trace.suffix}")
        return str(path.absolute())

    async def _keep(self) -> None:
        """See to it that an engine is running, until it dies too often."""
        loop = asyncio.get_running_loop()
        pauses = iter(RESTART_PAUSES_S)
        while True:
            assert self._link is not None
            assert self._peer is not None
            ready_at = loop.time()
            fault = await self._link.lost
            self._link = None
            self._go_down("the engine has died and is starting again; try again in a moment")
            how = str(fault) if fault else f"the engine {await asyncio.to_thread(self._peer.wait)}"
            log.error("%s; starting it again", how)
            if loop.time() - ready_at > STEADY_S:
                pauses = iter(RESTART_PAUSES_S)
            while self._link is None:
                pause_s = next(pauses, None)
                if pause_s is None:
                    self._why_down = f"{how}, and could not be started again"
                    log.error("%s", self._why_down)
                    return
                await asyncio.sleep(pause_s)
                self.restarts += 1
                try:
                    await self._launch()
                except BreezeError as error:
                    log.error("the engine could not be started again: %s", error)
                    how = str(error)
            log.warning("the engine is running again")
            if self.on_restart is not None:
                try:
                    self.on_restart(how)
                except Exception:
                    log.exception("on_restart failed")

    def _go_down(self, why: str) -> None:
        self._why_down = why
        inboxes, self._inboxes = self._inboxes, {}
        for inbox in inboxes.values():
            inbox.finish(EngineClosed(why))
        for made in self._new_voices.values():
            if not made.done():
                made.set_exception(EngineClosed(why))

    # ---- messages ----------------------------------------------------------------------------------------------------

    def _say(self, message: Message) -> None:
        if self._link is not None:
            self._link.send(message)

    def _cancel(self, stream: int) -> None:
        inbox = self._inboxes.pop(stream, None)
        if inbox is not None:
            inbox.finish()
            self._say(Cancel(stream))

    def _cancel_soon(self, stream: int) -> None:
        assert self._loop is not None
        # A loop that is closed has no engine either.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._cancel, stream)

    def _hear(self, message: Message) -> None:
        match message:
            case Chunk(stream, start_samples, pcm, packets, marks):
                # None: cancelled while the chunk was on its way.
                inbox = self._inboxes.get(stream)
                if inbox is not None:
                    inbox.chunks.append(SpeechChunk(start_samples, len(pcm) // 2, packets, pcm, marks))
                    inbox.wake()
            case Finished(stream):
                self._end(stream, None)
            case Failed(stream):
                self._end(stream, _stream_error(message))
            case VoiceAdded(request):
                made = self._new_voices.get(request)
                # None: nobody waits for it any more.
                if made is not None and not made.done():
                    if message.error:
                        made.set_exception(_voice_error(message))
                    else:
                        made.set_result(None)
            case Stats(values):
                self.stats = values
            case Loading(what, share):
                if self.on_loading is not None:
                    self.on_loading(what, share)
            case Measuring(share):
                if self.on_measuring is not None:
                    self.on_measuring(share)
            case _:
                log.error("the engine said %s, which is for engines to hear", type(message).__name__)

    def _end(self, stream: int, error: BreezeError | None) -> None:
        inbox = self._inboxes.pop(stream, None)
        if inbox is not None:
            inbox.finish(error)


SAMPLING_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 10),
    "depth_temperature": (0, 10),
    "top_k": (0, 1 << 20),
    "top_p": (1e-6, 1),
    "repetition_penalty": (1, 10),
    "cfg_scale": (1e-6, 100),
    "reference_scale": (0, 100),
}
"""Sampling values `speak` takes, and their ranges, ends included.  What they mean: `models.sampling.Sampling`, which
this side does not import because it brings torch along."""


def checked_sampling(sampling: Mapping[str, float]) -> dict[str, float]:
    """The values as they go to the engine.  Raises BadSampling for an unknown name and for a value out of its range."""
    for name, value in sampling.items():
        if name not in SAMPLING_RANGES:
            raise BadSampling(name, value, f"left out: sampling knows {', '.join(SAMPLING_RANGES)}")
        low, high = SAMPLING_RANGES[name]
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or not low <= value <= high:
            raise BadSampling(name, value, f"a number from {low:g} to {high:g}")
        if name == "top_k" and value != int(value):
            raise BadSampling(name, value, "a whole number")
    return {name: int(value) if name == "top_k" else float(value) for name, value in sampling.items()}


def _voice_error(message: VoiceAdded) -> BreezeError:
    known: dict[str, type[BreezeError]] = {
        error.__name__: error for error in (BadRequest, BadText, BadRecording, CheckpointError)
    }
    if message.error == "CannotKeep":
        return CannotKeep(message.detail)
    return known.get(message.error, BreezeError)(message.detail)


def _stream_error(message: Failed) -> BreezeError:
    if message.error == "StepFailed":
        return StepFailed(message.stage, message.detail)
    if message.error == "Overloaded":
        return Overloaded(message.detail, message.retry_after_s)
    return BadText(message.detail) if message.error == "BadText" else BadRequest(message.detail)
