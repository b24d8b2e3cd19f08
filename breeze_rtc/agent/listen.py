"""Speech to text: Moonshine tiny (MIT), run by onnxruntime in a process of its own.

The decoding loop is Python, so it must not share an interpreter with the media loop: one busy thread beside it moves
the pacing of every call.  All calls of a server share one worker; a turn of four seconds takes it about a tenth of a
second.

The weights come with the moonshine-voice wheel, release 0.0.73 (the `listen` extra); nothing is downloaded at run time.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import multiprocessing
import os
import re
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import MissingExtra

SAMPLE_RATE = 16_000
MAX_SECONDS = 30.0
"""Longer sound is cut into pieces by the caller; the model was trained on clips up to about this length."""
_MIN_SECONDS = 0.4
_LAYERS, _HEADS, _HEAD_DIM = 6, 8, 36
_BEGIN, _END = 1, 2
_TOKENS_PER_SECOND = 6.5  # the published guard against endless repetition

log = logging.getLogger(__name__)

Samples = npt.NDArray[np.float32]


class Listener:
    """Turns 16 kHz sound into text; `async with Listener() as listener`.

    Raises MissingExtra when the recogniser is not installed.  A worker that dies is replaced at the next turn.
    """

    def __init__(self) -> None:
        self._folder = model_folder()
        self._pool = self._new_pool()

    async def __aenter__(self) -> Listener:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    async def warm(self) -> None:
        """Start the worker and run it once, so that the first turn does not wait for it."""
        await self.transcribe(np.zeros(SAMPLE_RATE, dtype=np.float32))

    async def transcribe(self, samples: Samples) -> str:
        """The words in `samples` (16 kHz mono float32, at most MAX_SECONDS), or "" when there are none."""
        samples = samples[: int(MAX_SECONDS * SAMPLE_RATE)]
        if len(samples) < _MIN_SECONDS * SAMPLE_RATE:
            samples = np.pad(samples, (0, int(_MIN_SECONDS * SAMPLE_RATE) - len(samples)))
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._pool, _transcribe, samples.astype(np.float32).tobytes())
        except BrokenProcessPool:
            log.warning("the speech recognition worker died; starting it again")
            self._pool.shutdown(wait=False)
            self._pool = self._new_pool()
            return await loop.run_in_executor(self._pool, _transcribe, samples.astype(np.float32).tobytes())

    def close(self) -> None:
        """End the worker; may be called twice."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _new_pool(self) -> ProcessPoolExecutor:
        # spawn: a fork would copy the media process's sockets and locks.
        return ProcessPoolExecutor(
            1, multiprocessing.get_context("spawn"), initializer=_start, initargs=(str(self._folder),)
        )


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
        """16 kHz mono float32 in [-1, 1] -> text."""
        audio = samples[None]
        (hidden,) = self._encoder.run(
            None, {"input_values": audio, "attention_mask": np.ones(audio.shape, dtype=np.int64)}
        )
        mask = np.ones(hidden.shape[:2], dtype=np.int64)
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
        return decode(tokens, self._vocabulary)


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


_worker: list[Moonshine] = []
"""The worker process's model; empty in the media process."""


def _start(folder: str) -> None:
    os.nice(5)  # text that comes a little later hurts less than sound that does
    _worker.append(Moonshine(Path(folder)))


def _transcribe(samples: bytes) -> str:
    return _worker[0].transcribe(np.frombuffer(samples, dtype=np.float32))
