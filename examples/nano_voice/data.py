"""Let the teacher speak: sentences -> phonemes, durations and spectral features, in shards that can be resumed.

Features, 100 a second, 162 numbers each (the order that breeze_rtc.models.source_filter reads):
log f0, voicing (0 or 1), 80 harmonic and 80 noise log amplitudes in mel bands.

    python examples/nano_voice/data.py --count 16000 --work nano_work
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path

import hibari.dsp
import hibari.tts
import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from sentences import Sentences, plain_key
from tqdm import tqdm

from breeze_rtc.models.pronunciation import Lexicon

HERE = Path(__file__).parent
LEXICON = HERE.parents[1] / "breeze_rtc/voices/nano/lexicon.txt.gz"
BANDS = (80, 80)
SHARD = 200
SOUND_EVERY = 4  # shards; of the others the sound is not kept
FLOOR = -9.5  # log amplitude: -82 dB, inaudible
PIECE = re.compile(r"[A-Za-z]+(?:'[A-Za-z]+)*'?|[.,;:!?]+")


def band_matrix(bands: int, bins: int, *, rate: int = 24_000) -> NDArray[np.float32]:
    """(bands, bins) triangles that sum to one each, evenly spaced on the mel scale from 0 to half the rate."""
    top = 2595 * np.log10(1 + rate / 2 / 700)
    centres = 700 * (10 ** (np.linspace(0, top, bands) / 2595) - 1)
    frequencies = np.linspace(0, rate / 2, bins)
    edges = np.concatenate([[-centres[1]], centres, [2 * centres[-1] - centres[-2]]])
    rising = (frequencies - edges[:-2, None]) / (edges[1:-1, None] - edges[:-2, None])
    falling = (edges[2:, None] - frequencies) / (edges[2:, None] - edges[1:-1, None])
    weights = np.maximum(0, np.minimum(rising, falling))
    # Low bands can be narrower than a bin: there the nearest bin stands for the band.
    nearest = np.abs(frequencies[None] - centres[:, None]).argmin(1)
    weights[np.arange(bands), nearest] += 1e-3
    return (weights / weights.sum(1, keepdims=True)).astype(np.float32)


class Teacher:
    """hibari's network with its phoneme durations as one more output."""

    def __init__(self, work: Path) -> None:
        work.mkdir(parents=True, exist_ok=True)
        graph = work / "teacher.onnx"
        if not graph.exists():
            model = onnx.load(str(Path(hibari.tts.ASSETS) / "hibari.onnx"))
            durations = onnx.helper.make_tensor_value_info("/Clip_output_0", onnx.TensorProto.FLOAT, None)
            model.graph.output.append(durations)
            onnx.save(model, str(graph))
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
        self.vocabulary: dict[str, int] = json.loads((Path(hibari.tts.ASSETS) / "vocab.json").read_text("utf-8"))
        self._harmonic, self._noise = (band_matrix(bands, 601) for bands in BANDS)

    def _run(self, phonemes: str) -> tuple[list[NDArray[np.float32]], list[int]]:
        """The network's six outputs (see hibari.dsp), and 25 ms units for each phoneme and a pad at either end."""
        ids = [0, *(self.vocabulary[sound] for sound in phonemes), 0]
        feeds = {"ids": np.asarray([ids], np.int64), "speed": np.ones(1, np.float32)}
        *outputs, durations = self._session.run(None, feeds)
        return [output[0] for output in outputs], [round(float(units)) for units in durations]

    def speak(self, phonemes: str) -> tuple[NDArray[np.float16], list[int], NDArray[np.float32]]:
        """Features (T, 162) at 100 Hz, 25 ms units for each phoneme with one silent pad at either end, and the sound.

        The sound, at 24 kHz, has 240 T samples; feature t stands at sample 240 (t + 1).
        """
        ids = [0, *(self.vocabulary[sound] for sound in phonemes), 0]
        feeds = {"ids": np.asarray([ids], np.int64), "speed": np.ones(1, np.float32)}
        *outputs, durations = self._session.run(None, feeds)
        outputs = [output[0] for output in outputs]
        harmonic, _, noise, free, _, f0 = outputs
        features = self.features(harmonic, noise, free, f0)
        sound = hibari.dsp.synth(*outputs, np.random.default_rng(0))[: len(features) * 240]
        padded = np.pad(sound, (0, len(features) * 240 - len(sound)))
        return features, [round(float(units)) for units in durations], padded

    def features(
        self,
        harmonic: NDArray[np.float32],
        noise: NDArray[np.float32],
        free: NDArray[np.float32],
        f0: NDArray[np.float32],
    ) -> NDArray[np.float16]:
        voiced = f0 > 40
        frames = np.arange(len(f0))
        if voiced.any():
            log_f0 = np.interp(frames, frames[voiced], np.log(f0[voiced]))
        else:
            log_f0 = np.full(len(f0), np.log(200.0))
        # The teacher's spectra belong to an inverse STFT of 1200 points whose Hann windows' squares sum to 1.5.  A
        # cosine of amplitude 1 peaks at 300 there; white noise of unit variance through a filter of gain g sounds as
        # loud as a random spectrum of mean power 1800 g^2.
        # The free branch (magnitude and phase without a model) is noise here.  Giving its low part to the harmonics
        # where the voice sounds costs half a point of DistillMOS.
        harmonic_power = np.exp(2 * np.minimum(harmonic, 7))
        noise_power = 2 * np.exp(2 * np.minimum(noise, 7)) + np.exp(2 * np.minimum(free, 7))
        rows = np.concatenate(
            [
                log_f0[None],
                voiced[None].astype(np.float32),
                np.maximum(np.log(self._harmonic @ harmonic_power) / 2 - np.log(300), FLOOR),
                np.maximum(np.log(self._noise @ noise_power) / 2 - np.log(1800) / 2, FLOOR),
            ]
        )
        # From frames of 12.5 ms to 10 ms; feature t stands at the end of its 10 ms.
        at = (np.arange(int(len(f0) * 1.25)) + 1) * 0.8
        low = np.minimum(at.astype(int), len(f0) - 1)
        high = np.minimum(low + 1, len(f0) - 1)
        weight = at - np.floor(at)
        return (rows[:, low] * (1 - weight) + rows[:, high] * weight).T.astype(np.float16)


def read(text: str, lexicon: Lexicon, unknown: Callable[[str], str]) -> list[list[str]]:
    """[[written, phonemes], ...] for words and punctuation; unknown words are read by the teacher's own model."""
    pieces = [piece.group() for piece in PIECE.finditer(text)]
    items: list[list[str]] = []
    group: list[str] = []
    for piece in [*pieces, ""]:
        if piece and piece[0].isalpha():
            group.append(piece)
            continue
        for word, said in zip(group, lexicon.say(group), strict=True):
            items.append([word, said if said is not None else unknown(word)])
        group = []
        if piece and items and items[-1][0][0].isalpha():
            items.append([piece, "…" if piece.startswith("..") else piece[0]])
    return items


def joined(items: list[list[str]]) -> str:
    """The teacher's phonemes for what `read` returns: words after a space, marks after their word."""
    return "".join(said if said in ".,;:!?…" or index == 0 else " " + said for index, (_, said) in enumerate(items))


def unknown_reader() -> Callable[[str], str]:
    """How the teacher itself reads a word that no lexicon has."""
    from hibari.g2p import G2P

    read_unknown = G2P().oov
    return lambda word: str(read_unknown(word)).replace("ɾ", "T").replace("ʔ", "t")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--count", type=int, default=16_000, help="sentences")
    parser.add_argument("--work", type=Path, default=Path("nano_work"))
    parser.add_argument("--part", default="0/1", help="i/n: make every n-th shard, for several processes")
    arguments = parser.parse_args()
    part, parts = map(int, arguments.part.split("/"))
    folder = arguments.work / "data"
    folder.mkdir(parents=True, exist_ok=True)

    held_out = frozenset(plain_key(line) for line in (HERE / "heldout.txt").read_text("utf-8").splitlines())
    texts = Sentences(seed=1, held_out=held_out).take(arguments.count)
    lexicon = Lexicon.load(LEXICON)
    teacher = Teacher(arguments.work)
    unknown = unknown_reader()
    for number in tqdm(range(part, (len(texts) + SHARD - 1) // SHARD, parts), unit="shard"):
        path = folder / f"{number:04d}.npz"
        if path.exists():
            continue
        features, records, sounds = [], [], []
        for text in texts[number * SHARD : (number + 1) * SHARD]:
            items = read(text, lexicon, unknown)
            phonemes = joined(items)
            if not 1 <= len(phonemes) <= 300 or any(sound not in teacher.vocabulary for sound in phonemes):
                continue
            spoken, units, sound = teacher.speak(phonemes)
            records.append({"text": text, "items": items, "phonemes": phonemes, "units": units, "frames": len(spoken)})
            features.append(spoken)
            if number % SOUND_EVERY == 0:
                sounds.append((np.clip(sound, -1, 1) * 32767).astype(np.int16))
        if sounds:
            np.save(folder / f"{number:04d}.sound.npy", np.concatenate(sounds))
        temporary = path.with_suffix(".part")
        with temporary.open("wb") as file:
            np.savez(file, features=np.concatenate(features), records=np.array(json.dumps(records)))
        temporary.rename(path)


if __name__ == "__main__":
    main()
