"""Text in, speech out over HTTP, in the shape of OpenAI's `audio/speech`; and the voices it may be spoken in.

POST    /v1/audio/speech      {"input": "..."}: a WAV, sent as it is made
GET     /v1/voices            their names, the default first
PUT     /v1/voices/NAME       a recording: clone its voice
DELETE  /v1/voices/NAME
"""

from __future__ import annotations

import json
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import NoReturn

from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from breeze_rtc.clock import SECOND, Clock, ns_to_samples
from breeze_rtc.errors import Overloaded
from breeze_rtc.playback import PlaybackReport
from breeze_rtc.runtime.engine import (
    MAX_RECORDING_BYTES,
    MAX_TEXT_CHARS,
    SAMPLING_RANGES,
    Engine,
    SentenceSpeech,
    Speech,
)
from breeze_rtc.scheduling.stream import Priority
from breeze_rtc.server.http_error import HttpError, errors_as_json, http_error
from breeze_rtc.server.metrics import Metrics

MAX_BODY_BYTES = 256 * 1024
MAX_REQUESTS = 32
_FORMATS = {"wav": "audio/wav", "pcm": "audio/pcm"}


class SpeechApi:
    """The routes of one engine."""

    def __init__(
        self,
        engine: Engine,
        *,
        metrics: Metrics,
        clock: Clock,
        accepts_voices: bool,
        is_own_page: Callable[[HTTPConnection], bool],
    ) -> None:
        """accepts_voices: whoever reaches this server may add and delete voices, but for pages of other sites."""
        self._engine = engine
        self._metrics = metrics
        self._clock = clock
        self._accepts_voices = accepts_voices
        self._is_own_page = is_own_page
        # Being answered.
        self._requests = 0

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/v1/audio/speech", errors_as_json(self.speech), methods=["POST"]),
            Route("/v1/voices", errors_as_json(self.list_voices)),
            Route("/v1/voices/{name}", errors_as_json(self.change_voice), methods=["PUT", "DELETE"]),
        ]

    async def speech(self, request: Request) -> Response:
        """Text in, speech out, in the shape of OpenAI's `audio/speech`; sent as it is made unless `stream` is false."""
        wanted = read_speech_request(await _json_body(request))
        if self._requests >= MAX_REQUESTS:
            raise http_error(Overloaded(f"{MAX_REQUESTS} requests are being answered", 5))
        arrived_at = self._clock.now()
        speech = self._engine.speak(
            voice=wanted.voice,
            instruction=wanted.instruction,
            language=wanted.language,
            seed=wanted.seed,
            sampling=wanted.sampling,
            # Not interactive: nobody interrupts a file, so nothing is wasted by making it early.
            interactive=False,
            priority=Priority.STREAM if wanted.streams else Priority.BATCH,
        )
        self._requests += 1
        chunks = self._paced(speech, wanted.text)
        try:
            # The first sound is waited for, so that what goes wrong before it has a status of its own.
            first = await anext(chunks, b"")
            self._metrics.first_packet.observe((self._clock.now() - arrived_at) / SECOND)
            if wanted.streams:
                body = _continued(_header(wanted.format, self._engine.sample_rate, None), first, chunks)
                return StreamingResponse(body, media_type=_FORMATS[wanted.format])
            async with aclosing(chunks):
                pcm = await _whole(first, chunks, request)
            return Response(
                _header(wanted.format, self._engine.sample_rate, len(pcm)) + pcm, media_type=_FORMATS[wanted.format]
            )
        except BaseException:
            await chunks.aclose()
            raise

    async def _paced(self, speech: Speech | SentenceSpeech, text: str) -> AsyncGenerator[bytes, None]:
        """The speech's PCM, with the reader's progress reported as a listener's.

        What the connection took is the most that can have been heard; the rest follows the clock, so that a fast reader
        does not look like a starving one.  A slow reader slows the speech.  Closing cancels it.
        """
        started_at: int | None = None
        taken = 0
        try:
            speech.push(text)
            speech.end()
            async for chunk in speech:
                now = self._clock.now()
                started_at = now if started_at is None else started_at
                if chunk.pcm:
                    yield chunk.pcm
                taken = chunk.start_samples + chunk.samples
                now = self._clock.now()
                played = min(taken, ns_to_samples(now - started_at, self._engine.sample_rate))
                self._engine.report(PlaybackReport(speech.stream, played, now, path_delay_ns=0, is_measured=False))
        finally:
            speech.cancel()
            self._requests -= 1

    async def list_voices(self, request: Request) -> Response:
        """Their names, the default first."""
        return JSONResponse({"voices": list(self._engine.voices)})

    async def change_voice(self, request: Request) -> Response:
        """PUT a recording to clone its voice, DELETE to forget one; only where the server was told to allow it."""
        if not self._accepts_voices:
            raise HttpError(403, "no_new_voices", "this server takes no voices", "Start it with --accept-voices.")
        if not self._is_own_page(request):
            raise HttpError(403, "foreign_origin", "another site's page asks", "Allow it with --allowed-origin.")
        name = request.path_params["name"]
        if request.method == "DELETE":
            self._engine.remove_voice(name)
            return Response(status_code=204)
        recording = await _body(request, MAX_RECORDING_BYTES, "Send 5 to 15 s of one voice.")
        await self._engine.add_voice(name, recording, request.query_params.get("transcript", ""))
        return JSONResponse({"name": name}, 201)


@dataclass(frozen=True, slots=True)
class SpeechRequest:
    """What a request to `/v1/audio/speech` asks for."""

    text: str
    voice: str | None
    format: str
    streams: bool
    seed: int | None
    sampling: dict[str, float]
    instruction: str = ""
    language: str = ""


_KNOWN = {"input", "voice", "response_format", "stream", "seed", "model", "speed", "instructions", "language"}
_KNOWN |= {"stream_format"}


def read_speech_request(body: object) -> SpeechRequest:
    """Check the fields; raises HttpError that names the first wrong one.

    `model` is taken and not looked at: a server has one.  Sampling values are checked by the engine.
    """
    if not isinstance(body, dict):
        _bad("not_an_object", "the body is JSON but no object", 'Send {"input": "..."}.')
    text = body.get("input")
    if not isinstance(text, str) or not text.strip():
        _bad("no_input", '"input" is missing or empty', 'Send {"input": "the text to speak"}.')
    if len(text) > MAX_TEXT_CHARS:
        raise HttpError(
            413,
            "text_too_long",
            f'"input" has {len(text)} characters, more than {MAX_TEXT_CHARS}',
            "Split the text and send the parts one after another.",
        )
    voice = body.get("voice")
    if voice is not None and not isinstance(voice, str):
        _bad("bad_field", '"voice" is not a name', 'Leave "voice" out for the default.')
    form = body.get("response_format", "wav")
    if not isinstance(form, str) or form not in _FORMATS:
        _bad("bad_format", f'"response_format" is {form!r:.40}', f"Use one of {', '.join(_FORMATS)}.")
    streams = body.get("stream", True)
    if not isinstance(streams, bool):
        _bad("bad_field", '"stream" is not true or false', "Send true to hear it while it is made.")
    if body.get("speed", 1) != 1:
        _bad("bad_field", '"speed" cannot be changed', 'Leave "speed" out.')
    unknown = [name for name in body if name not in _KNOWN and name not in SAMPLING_RANGES]
    if unknown:
        known = ", ".join(sorted(_KNOWN | set(SAMPLING_RANGES)))
        _bad("unknown_field", f"no field is called {unknown[0]!r:.60}", f"Known fields: {known}.")
    sampling = {name: body[name] for name in SAMPLING_RANGES if name in body}
    instruction = body.get("instructions") or ""
    if not isinstance(instruction, str):
        _bad("bad_field", '"instructions" is no text', 'Send {"instructions": "Speak slowly."}, or leave it out.')
    language = body.get("language") or ""
    if not isinstance(language, str):
        _bad("bad_field", '"language" is no name', 'Send {"language": "German"}, or leave it out.')
    return SpeechRequest(text, voice, form, streams, body.get("seed"), sampling, instruction, language)


def _bad(code: str, message: str, fix: str) -> NoReturn:
    raise HttpError(400, code, message, fix)


async def _body(request: Request, most_bytes: int, fix: str) -> bytes:
    """The request's body, read no further than the limit."""
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > most_bytes:
            raise HttpError(413, "body_too_large", f"the body is larger than {most_bytes} bytes", fix)
    return bytes(data)


async def _json_body(request: Request) -> object:
    data = await _body(request, MAX_BODY_BYTES, "Send less text at once.")

    def no_number(name: str) -> NoReturn:
        _bad("not_finite", f"{name} is no JSON", "Send finite numbers.")

    try:
        return json.loads(data, parse_constant=no_number)
    except (ValueError, RecursionError) as error:
        raise HttpError(400, "not_json", "the body is not JSON", 'Send {"input": "..."} as UTF-8.') from error


async def _continued(header: bytes, first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    async with aclosing(rest):
        yield header + first
        async for piece in rest:
            yield piece


async def _whole(first: bytes, rest: AsyncIterator[bytes], request: Request) -> bytes:
    pcm = bytearray(first)
    async for piece in rest:
        pcm += piece
        if await request.is_disconnected():
            raise ClientDisconnect
    return bytes(pcm)


def _header(form: str, sample_rate: int, pcm_bytes: int | None) -> bytes:
    """A WAV header (mono s16le); a stream, whose length nobody knows yet, says the largest a header can."""
    if form != "wav":
        return b""
    size = 0xFFFF_FFFF - 36 if pcm_bytes is None else pcm_bytes
    return struct.pack(
        "<4sI4s4sIHHIIHH4sI",
        *(b"RIFF", size + 36, b"WAVE", b"fmt ", 16, 1, 1, sample_rate, sample_rate * 2, 2, 16, b"data", size),
    )
