"""Whether the user has finished, or only draws breath.

Two judges: the last word of what was understood, which costs nothing and is always asked; and, for an agent that has
one, a model that listens to how it was said.  Where either thinks that more is to come, the turn ends after
`max_endpointing_delay_s` of silence instead of `min_endpointing_delay_s`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import numpy as np
import onnxruntime

from breeze_rtc.agent.vad import SAMPLE_RATE, Samples
from breeze_rtc.errors import MissingExtra

WHEEL = "pipecat-ai==1.14.0"
_SECONDS = 8
_OPEN_WORDS = frozenset(
    (
        *("a", "an", "the", "my", "your", "our", "their", "and", "or", "but", "because", "if", "than", "of", "to"),
        *("um", "uh", "i'm", "i'll", "i'd", "i've", "you're", "we're", "they're", "it's", "let's", "what's", "that's"),
    )
)
"""English words that ask for another one: with one of these last, hardly anybody has finished."""


def sounds_finished(text: str) -> bool:
    """Whether `text` may be all that was to be said.  Text that is not English, and none at all, may."""
    words = re.findall(r"[a-z']+", text.lower())
    return not words or words[-1] not in _OPEN_WORDS


class EndOfTurn(Protocol):
    """A judge of sound."""

    async def is_over(self, turn: Samples) -> bool:
        """Whether the user has finished, by the turn's sound up to a short silence; 16 kHz mono float32."""


class SmartTurn:
    """Smart Turn v3.2 of Daily (BSD-2), an ONNX graph of 8.7 MB; `TurnTaking(end_of_turn=SmartTurn())` uses it.

    Its weights and its 7 kB of features are taken out of the pipecat-ai wheel, of which nothing else is installed or
    imported.  A decision takes about 50 ms of one core, on a thread of its own.

    threshold: the probability from which the turn counts as over.  On 32 finished and 32 unfinished turns of a clear
    voice 0.9 let all finished ones pass and caught 72 % of the others, 0.5 caught 47 %.

    Raises MissingExtra when the wheel is not installed.
    """

    def __init__(self, *, threshold: float = 0.9) -> None:
        spec = importlib.util.find_spec("pipecat")
        folder = Path(spec.origin).parent / "audio" / "turn" / "smart_turn" if spec and spec.origin else Path("missing")
        model = folder / "data" / "smart-turn-v3.2-cpu.onnx"
        features = importlib.util.spec_from_file_location("smart_turn_features", folder / "_whisper_features.py")
        if not model.exists() or features is None or features.loader is None:
            raise MissingExtra("Judging by ear whether a turn is over", "", f"pip install --no-deps {WHEEL}")
        self._features = importlib.util.module_from_spec(features)
        features.loader.exec_module(self._features)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
        self._threshold = threshold
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="end-of-turn")

    async def is_over(self, turn: Samples) -> bool:
        probability = await asyncio.get_running_loop().run_in_executor(self._thread, self.probability, turn)
        return probability >= self._threshold

    def probability(self, turn: Samples) -> float:
        """That the turn is over.  Blocks for about 50 ms."""
        last = turn[-_SECONDS * SAMPLE_RATE :]
        padded = np.pad(last, (_SECONDS * SAMPLE_RATE - len(last), 0))
        mel = self._features.compute_whisper_log_mel_features(padded, do_normalize=True)
        (output,) = self._session.run(None, {"input_features": mel[None]})
        return float(output[0].item())
