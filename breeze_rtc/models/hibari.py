"""The voice of hibari-tts (Apache-2.0), an optional extra: `pip install breeze-rtc[hibari]`.

Its network reads a whole sentence and draws five spectra and a pitch for every 12.5 ms of it, and says how long each
phoneme lasts; `Sentence` makes sound of them piece by piece, so that the work is shared out fairly and the first sound
is there at once.  What the parts mean is written in `hibari.dsp`.  Text is read by our own front end, whose
phonemes are of the same alphabet.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
import onnxruntime
from hibari import dsp
from hibari.g2p.oov import OOV
from hibari.tts import ASSETS
from numpy.typing import NDArray

from breeze_rtc.models.pronunciation import LETTERS, PUNCTUATION, SOUNDS, SPACE, phoneme_tokens
from breeze_rtc.models.speech_model import TextFrontend, TextSegment

SAMPLE_RATE: int = dsp.SR
_HOP: int = dsp.HOP
_BLOCKS = dsp.N_FFT // _HOP
_DURATIONS = "/Clip_output_0"
"""Inside the graph: how long each phoneme lasts, in units of two frames."""
_LOUD = -2.0
"""Natural log of the largest magnitude in a frame's spectrum, from which on it counts as sound."""
_LEAD_FRAMES = 4
"""Kept of the silence before a sentence, 50 ms; the network draws 300 ms, which whoever waits for an answer hears."""
_WINDOW_SQUARED = (dsp.WIN * dsp.WIN).reshape(_BLOCKS, _HOP)

Spectrum = NDArray[np.float32]


class Hibari:
    """The network and the reader of unknown words, shared by all streams."""

    def __init__(self) -> None:
        """Loads the voice that is in the wheel.  Raises OSError and onnxruntime's errors for a damaged installation."""
        assets = Path(ASSETS)
        graph = (assets / "hibari.onnx").read_bytes()
        # A protobuf message is merged with whatever stands behind it, so its graph gets one more output without `onnx`:
        # fields ModelProto.graph = 7, GraphProto.output = 12, ValueInfoProto.name = 1.
        graph += _field(7, _field(12, _field(1, _DURATIONS.encode())))
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        self._ids: dict[str, int] = json.loads((assets / "vocab.json").read_text("utf-8"))
        self._unknown = OOV(str(assets / "oov.onnx"))
        self._sounds = _sounds()

    def frontend(self, english: TextFrontend) -> HibariFrontend:
        """A new stream's front end over ours for English."""
        return HibariFrontend(self, english)

    def read(self, ids: Sequence[int], seed: int) -> Sentence:
        """Phonemes of a sentence -> its spectra.  The whole of the network's work is done here."""
        feeds = {"ids": np.asarray([[0, *ids, 0]], np.int64), "speed": np.ones(1, np.float32)}
        *branches, pitch, units = self._session.run(None, feeds)
        return Sentence([branch[0] for branch in branches], pitch[0], np.rint(units).astype(np.int64), seed)

    def translated(self, segment: TextSegment) -> TextSegment:
        """A segment of our tokens in hibari's phonemes; a word that is spelled in letters is read as a whole."""
        spoken: list[tuple[str, int]] = []
        for is_spelled, group in groupby(
            zip(segment.tokens, segment.ends, strict=True), lambda pair: pair[0] in _LETTER
        ):
            pairs = list(group)
            if is_spelled:
                sounds = _plain(self._unknown("".join(_LETTER[token] for token, _ in pairs)))
                spoken += [(sound, pairs[0][1]) for sound in sounds[:-1]]
                spoken += [(sound, pairs[-1][1]) for sound in sounds[-1:]]
            else:
                spoken += [(sound, end) for token, end in pairs for sound in self._sounds[token]]
        known = [(self._ids[sound], end) for sound, end in spoken if sound in self._ids]
        while len(known) > 1 and known[-1][0] == self._ids[" "]:
            known.pop()
        # What comes last has been said when all of it has, be it a blank or a word that nobody can read.
        known[-1:] = [(known[-1][0] if known else self._ids["."], segment.ends[-1])]
        ids, ends = zip(*known, strict=True)
        return TextSegment(ids, ends)


def _field(number: int, content: bytes) -> bytes:
    """A length-delimited protobuf field (https://protobuf.dev/programming-guides/encoding)."""
    length, size = len(content), b""
    while length > 127:
        size += bytes([length & 127 | 128])
        length >>= 7
    return bytes([number << 3 | 2]) + size + bytes([length]) + content


def _plain(phonemes: str | None) -> str:
    """The reader of unknown words writes two sounds as espeak does."""
    return (phonemes or "").replace("ɾ", "T").replace("ʔ", "t")


_LETTER = {token: letter for letter, token in LETTERS.items()}


def _sounds() -> dict[int, str]:
    """Our token -> its phonemes in misaki's alphabet; letters have none."""
    sounds = {SPACE: " "} | {token: mark for mark, token in PUNCTUATION.items()}
    for stress in ("", "ˈ", "ˌ"):
        for sound in SOUNDS:
            sounds |= {token: stress + sound for token, _ in phoneme_tokens(stress + sound) if token not in sounds}
    return sounds


class HibariFrontend:
    """One stream's text: our front end's segments in hibari's phonemes."""

    def __init__(self, hibari: Hibari, english: TextFrontend) -> None:
        self._hibari = hibari
        self._english = english

    def push(self, text: str) -> list[TextSegment]:
        """See `TextFrontend`."""
        return [self._hibari.translated(segment) for segment in self._english.push(text)]

    def end(self) -> list[TextSegment]:
        """See `TextFrontend`."""
        return [self._hibari.translated(segment) for segment in self._english.end()]


class Sentence:
    """One sentence as the network drew it, and how much of its sound has been made."""

    def __init__(
        self, branches: list[Spectrum], pitch: NDArray[np.float32], units: NDArray[np.int64], seed: int
    ) -> None:
        """branches: (601, F) each, in the order of `hibari.dsp.synth`.  pitch: (F,) Hz.  units: of each phoneme and of
        the silence at either end, two frames each.  seed: of the noise."""
        loud = _loudness(branches, pitch) > _LOUD
        first = max(0, int(loud.argmax()) - _LEAD_FRAMES)
        self._branches = [np.ascontiguousarray(branch[:, first:].T) for branch in branches]
        frames = len(pitch) - first
        self.samples = frames * _HOP
        self.ends = _ends(units, loud, first)
        """Of each phoneme: the sample at which it ends."""
        pulses = np.pad(dsp.pulses(pitch[first:]), dsp.N_FFT // 2, mode="reflect")
        self._source = np.lib.stride_tricks.sliding_window_view(pulses, dsp.N_FFT)[::_HOP][:frames]
        self._noise = np.random.default_rng(seed)
        # Overlapping frames added up, and the squares of their windows; the first two blocks lie before the sound.
        self._blocks = np.zeros((frames + _BLOCKS - 1, _HOP), np.float32)
        self._weights = np.zeros_like(self._blocks)
        # Frames in them; samples given out.
        self._drawn = self._given = 0

    def sound(self, samples: int) -> NDArray[np.float32]:
        """The next samples, in [-1, 1]; behind the last one is silence.  The same whatever pieces they are made in."""
        begin, end = self._given, self._given + samples
        self._given = end
        half = dsp.N_FFT // 2
        # A block is complete once the frames that begin in it and in the two before have been drawn.
        self._draw(min(len(self._source), -(-end // _HOP) + _BLOCKS // 2))
        last = min(end, self.samples)
        out = np.zeros(samples, np.float32)
        if begin < last:
            span = slice(half + begin, half + last)
            out[: last - begin] = self._blocks.reshape(-1)[span] / self._weights.reshape(-1)[span]
        return np.clip(out, -1, 1)

    def _draw(self, stop: int) -> None:
        """Frames up to `stop` as `hibari.dsp.synth` makes them.

        One by one, because a library rounds several transforms at once differently, by how many they are.
        """
        for frame in range(self._drawn, stop):
            harmonic, turn, noise, free, phase = (branch[frame] for branch in self._branches)
            spectrum = dsp.rfft(self._source[frame] * dsp.WIN_SRC, 0)
            spectrum *= _polar(harmonic, np.float32(np.pi) * np.tanh(turn))
            drawn = self._noise.standard_normal(2 * len(spectrum), dtype=np.float32)
            spectrum += drawn.view(np.complex64) * dsp.ex(noise)
            spectrum += _polar(free, phase)
            self._blocks[frame : frame + _BLOCKS] += (dsp.irfft(spectrum, dsp.N_FFT, 0) * dsp.WIN).reshape(
                _BLOCKS, _HOP
            )
            self._weights[frame : frame + _BLOCKS] += _WINDOW_SQUARED
        self._drawn = max(self._drawn, stop)


def _polar(log_magnitude: Spectrum, angle: Spectrum) -> NDArray[np.complex64]:
    out = np.empty(angle.shape, np.complex64)
    magnitude = dsp.ex(log_magnitude)
    np.multiply(np.cos(angle), magnitude, out=out.real)
    np.multiply(np.sin(angle), magnitude, out=out.imag)
    return out


def _loudness(branches: list[Spectrum], pitch: NDArray[np.float32]) -> NDArray[np.float32]:
    """(F,) the largest log magnitude in each frame; harmonics count where there is a voice."""
    harmonic, _, noise, free, _ = (branch.max(0) for branch in branches)
    out: NDArray[np.float32] = np.maximum(np.where(pitch > 40, harmonic, -np.inf), np.maximum(noise, free))
    return out


def _ends(units: NDArray[np.int64], loud: NDArray[np.bool_], first: int) -> list[int]:
    """Where each phoneme ends, in samples.

    The network counts much of a pause as the phoneme before it, so one that falls silent has ended there.
    """
    ends = []
    frame = 2 * int(units[0])
    for count in units[1:-1]:
        begin, frame = frame, frame + 2 * int(count)
        sounding = np.flatnonzero(loud[begin:frame])
        end = begin + int(sounding[-1]) + 1 if len(sounding) else frame
        ends.append(max(0, end - first) * _HOP)
    return ends
