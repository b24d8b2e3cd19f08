"""Speech to text: what a recogniser is, and those that run in a process of their own.

Anything with `transcribe` is a recogniser; it is asked for a growing turn about once a second, so that words are shown
and interruptions are known while the user still speaks, and for the whole turn at its end.

A decoding loop is Python, so it must not share an interpreter with the media loop: one busy thread beside it moves the
pacing of every call.  All calls of a server share one worker.

- Moonshine tiny (MIT), English, run by onnxruntime: a turn of four seconds takes it about a tenth of a second.  The
  weights come with the moonshine-voice wheel, release 0.0.73 (the `listen` extra); nothing is downloaded at run time.
- faster-whisper (MIT), many languages, with any CTranslate2 model: a folder, or a name that faster-whisper looks up in
  the Hugging Face cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import re
import struct
import sys
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from breeze_rtc.errors import BadRequest, BreezeError, MissingExtra

SAMPLE_RATE = 16_000
MAX_SECONDS = 30.0
"""Longer sound is cut into pieces by the caller; the model was trained on clips up to about this length."""
_MIN_SECONDS = 0.4
_LAYERS, _HEADS, _HEAD_DIM = 6, 8, 36
_BEGIN, _END = 1, 2
_TOKENS_PER_SECOND = 6.5  # the published guard against endless repetition
_NO_WORDS = "You"
"""What the model says to silence, noise, knocks and coughs, sure of itself; to the spoken word it says "You." """
_HARDLY_SPEECH = 0.6  # Whisper's own threshold
_STOP_S = 2.0
# A message either way is its length in bytes, then so many bytes: float32 samples in, UTF-8 text out.
_LENGTH = struct.Struct("<I")
_PACKAGE_ROOT = Path(__file__).parents[2]

log = logging.getLogger(__name__)

Samples = npt.NDArray[np.float32]


class ListenFailed(BreezeError):
    """The recogniser could not read a turn."""


class Recogniser(Protocol):
    """What understands speech.  One serves all calls of a server, which closes it; none of this may block the loop."""

    async def transcribe(self, samples: Samples) -> str:
        """16 kHz mono float32, at most MAX_SECONDS -> its words so far, "" when there are none.

        Called for the same turn again and again as it grows, and for several calls at once; may be cancelled.  An error
        costs the turn, and the caller hears an apology.
        """

    async def warm(self) -> None:
        """Get ready, so that the first turn does not wait; an error is logged."""

    async def close(self) -> None:
        """Free everything; may be called twice."""


class Listener:
    """A recogniser in a process of its own; `async with Listener() as listener`.

    whisper: a CTranslate2 model for faster-whisper, a folder or a name; None: Moonshine.  language: a code such as
    "de"; None: Whisper finds out, turn by turn.  Moonshine knows English.
    Raises MissingExtra when the recogniser is not installed, BadRequest for a language it does not know.  A worker that
    dies is replaced at the next turn.
    """

    # Not `multiprocessing`: its new processes run the caller's main script again, which starts a server.

    def __init__(self, *, whisper: str | None = None, language: str | None = None) -> None:
        if whisper is not None:
            if importlib.util.find_spec("faster_whisper") is None:
                raise MissingExtra("Listening with Whisper", "listen-whisper")
            self._model = ("whisper", whisper, language or "")
        else:
            if language not in (None, "en"):
                raise BadRequest(f"Moonshine understands English, not {language!r}; use Whisper or an endpoint")
            self._model = ("moonshine", str(model_folder()), "")
        self._worker: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._exchanges: set[asyncio.Task[str]] = set()
        self._is_closed = False

    async def __aenter__(self) -> Listener:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    @property
    def pid(self) -> int | None:
        """The worker's process; None before the first turn and after the end."""
        return self._worker.pid if self._worker is not None else None

    async def warm(self) -> None:
        """Start the worker and run it once, so that the first turn does not wait for it."""
        await self.transcribe(np.zeros(SAMPLE_RATE, dtype=np.float32))

    async def transcribe(self, samples: Samples) -> str:
        """The words in `samples` (16 kHz mono float32, at most MAX_SECONDS), or "" when there are none.

        Cancelling loses the text and nothing else.  Raises ListenFailed.
        """
        samples = samples[: int(MAX_SECONDS * SAMPLE_RATE)]
        if len(samples) < _MIN_SECONDS * SAMPLE_RATE:
            samples = np.pad(samples, (0, int(_MIN_SECONDS * SAMPLE_RATE) - len(samples)))
        exchange = asyncio.create_task(self._ask(samples.astype("<f4").tobytes()))
        self._exchanges.add(exchange)
        exchange.add_done_callback(self._exchanges.discard)
        # Half an exchange would put the next one out of step.
        return await asyncio.shield(exchange)

    async def close(self) -> None:
        """End the worker; may be called twice."""
        self._is_closed = True
        for exchange in tuple(self._exchanges):
            exchange.cancel()
        await asyncio.gather(*self._exchanges, return_exceptions=True)
        await self._stop()

    async def _ask(self, request: bytes) -> str:
        async with self._turn:
            for _ in range(2):
                worker = await self._running()
                assert worker.stdin is not None
                assert worker.stdout is not None
                try:
                    worker.stdin.write(_LENGTH.pack(len(request)) + request)
                    await worker.stdin.drain()
                    (size,) = _LENGTH.unpack(await worker.stdout.readexactly(_LENGTH.size))
                    return (await worker.stdout.readexactly(size)).decode()
                except (asyncio.IncompleteReadError, ConnectionError):
                    log.warning("the speech recognition process died; starting it again")
                    await self._stop()
            raise ListenFailed("the speech recognition process died; the turn can be typed")

    async def _running(self) -> asyncio.subprocess.Process:
        if self._is_closed:
            raise ListenFailed("speech recognition is closed")
        if self._worker is None:
            path = os.pathsep.join(filter(None, (str(_PACKAGE_ROOT), os.environ.get("PYTHONPATH"))))
            self._worker = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "breeze_rtc.agent.listen", *self._model),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C in a terminal reaches the server, which closes this one in time
            )
        return self._worker

    async def _stop(self) -> None:
        worker, self._worker = self._worker, None
        if worker is None:
            return
        assert worker.stdin is not None
        worker.stdin.close()  # it leaves at the end of its input
        try:
            async with asyncio.timeout(_STOP_S):
                await worker.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                worker.kill()
            await worker.wait()


def model_folder() -> Path:
    """Where the weights are; raises MissingExtra when they are not installed."""
    spec = importlib.util.find_spec("moonshine_voice")
    if spec is None or spec.origin is None:
        raise MissingExtra("Listening to the microphone", "listen")
    folder = Path(spec.origin).parent / "assets" / "tiny-en"
    if not (folder / "encoder_model.ort").exists():
        raise MissingExtra(
            "Listening to the microphone (the installed moonshine-voice has no weights inside)", "listen"
        )
    return folder


class Moonshine:
    """Encoder, decoder and vocabulary in this process: greedy decoding with a cache."""

    def __init__(self, folder: Path) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self._encoder = onnxruntime.InferenceSession(
            str(folder / "encoder_model.ort"), options, providers=["CPUExecutionProvider"]
        )
        self._decoder = onnxruntime.InferenceSession(
            str(folder / "decoder_model_merged.ort"), options, providers=["CPUExecutionProvider"]
        )
        self._vocabulary = read_vocabulary((folder / "tokenizer.bin").read_bytes())
        self._outputs = [output.name for output in self._decoder.get_outputs()]

    def transcribe(self, samples: Samples) -> str:
        """16 kHz mono float32 in [-1, 1] -> text, "" for sound without words."""
        audio = samples[None]
        # Of samples, for the decoder too: it takes each 384th, as many as there are hidden frames.
        mask = np.ones(audio.shape, dtype=np.int64)
        (hidden,) = self._encoder.run(None, {"input_values": audio, "attention_mask": mask})
        empty = np.zeros((1, _HEADS, 0, _HEAD_DIM), dtype=np.float32)
        cache: dict[str, Any] = {
            f"past_key_values.{layer}.{side}.{part}": empty
            for layer in range(_LAYERS)
            for side in ("decoder", "encoder")
            for part in ("key", "value")
        }
        tokens: list[int] = []
        token = _BEGIN
        for step in range(max(4, int(len(samples) / SAMPLE_RATE * _TOKENS_PER_SECOND))):
            outputs = dict(
                zip(
                    self._outputs,
                    self._decoder.run(
                        None,
                        {
                            "encoder_attention_mask": mask,
                            "encoder_hidden_states": hidden,
                            "input_ids": np.array([[token]], dtype=np.int64),
                            "use_cache_branch": np.array([step > 0]),
                            **cache,
                        },
                    ),
                    strict=True,
                )
            )
            token = int(outputs["logits"][0, -1].argmax())
            if token == _END:
                break
            tokens.append(token)
            for name in cache:
                # The encoder's keys are computed in the first step only; later steps return them empty.
                if step == 0 or ".decoder." in name:
                    cache[name] = outputs[name.replace("past_key_values", "present")]
        text = decode(tokens, self._vocabulary)
        return "" if text == _NO_WORDS else text


class Whisper:
    """faster-whisper in this process: greedy decoding, each turn by itself."""

    def __init__(self, model: str, language: str) -> None:
        from faster_whisper import WhisperModel

        self._model = WhisperModel(model, device="auto", compute_type="int8", cpu_threads=1)
        self._language = language or None

    def transcribe(self, samples: Samples) -> str:
        """16 kHz mono float32 in [-1, 1] -> text, "" for sound that is hardly speech."""
        segments, _ = self._model.transcribe(
            samples, language=self._language, beam_size=1, without_timestamps=True, condition_on_previous_text=False
        )
        return " ".join(segment.text.strip() for segment in segments if segment.no_speech_prob < _HARDLY_SPEECH)


def read_vocabulary(data: bytes) -> list[bytes]:
    """The file is one entry after another: length (7 bits a byte, low first, high bit = more), then that many bytes."""
    entries: list[bytes] = []
    at = 0
    while at < len(data):
        size = shift = 0
        while True:
            byte = data[at]
            at += 1
            size |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        entries.append(data[at : at + size])
        at += size
    return entries


def decode(tokens: list[int], vocabulary: list[bytes]) -> str:
    """Token ids -> text; byte tokens (`<0x..>`) are joined before they are read as UTF-8, control tokens left out."""
    out = bytearray()
    for token in tokens:
        entry = vocabulary[token]
        if match := re.fullmatch(rb"<0x([0-9A-Fa-f]{2})>", entry):
            out.append(int(match[1], 16))
        elif not (entry.startswith(b"<") and entry.endswith(b">")):
            out += entry
    return out.decode("utf-8", "replace").replace("\u2581", " ").strip()


def work(model: Moonshine | Whisper, requests: BinaryIO, answers: BinaryIO) -> None:
    """The worker's whole life: one turn after another, until the input ends."""
    while len(length := requests.read(_LENGTH.size)) == _LENGTH.size:
        samples = np.frombuffer(requests.read(_LENGTH.unpack(length)[0]), dtype="<f4")
        text = model.transcribe(samples).encode()
        answers.write(_LENGTH.pack(len(text)) + text)
        answers.flush()


def _main() -> None:
    os.nice(5)  # text that comes a little later hurts less than sound that does
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not get between the answers
    kind, model, language = sys.argv[1:]
    loaded = Whisper(model, language) if kind == "whisper" else Moonshine(Path(model))
    with contextlib.suppress(BrokenPipeError):  # whoever asked is gone
        work(loaded, sys.stdin.buffer, answers)


if __name__ == "__main__":
    _main()
