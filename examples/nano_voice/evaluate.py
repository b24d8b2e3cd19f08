"""What a voice is worth, spoken by the engine that serves: word error, opinion scores, durations, word times, joints.

python examples/nano_voice/evaluate.py [--model FOLDER] [--opinions] [--json examples/nano_voice/results.json]
python examples/nano_voice/evaluate.py --texts examples/nano_voice/heldout_long.txt
python examples/nano_voice/evaluate.py --ten-minutes
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import subprocess
import time
import wave
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from alignment import HOP, RATE, Reader, Reading, span, spectrum, warp
from judge import Judge, Opinions, plain_words, word_edits
from numpy.typing import NDArray

from breeze_rtc.playback import TextMark
from breeze_rtc.runtime.engine import Engine
from breeze_rtc.scheduling.stream import Priority

HERE = Path(__file__).parent


@dataclass
class Spoken:
    """One text as the engine spoke it."""

    pcm: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    marks: list[TextMark] = field(default_factory=list)
    joints: list[int] = field(default_factory=list)
    """Samples at which chunks begin, without the first."""


async def speak(
    model: str,
    texts: list[str],
    sampling: dict[str, float],
    together: int,
    *,
    voice: str | None = None,
    longest_s: float = math.inf,
) -> list[Spoken]:
    """Each text as one stream, `together` at a time; a voice that does not stop by itself is cut off."""
    spoken = [Spoken() for _ in texts]
    async with Engine(model, process=False) as engine:
        turns = asyncio.Semaphore(together)

        async def one(index: int) -> None:
            async with turns:
                speech = engine.speak(
                    voice=voice, seed=index, sampling=sampling, interactive=False, priority=Priority.BATCH
                )
                speech.push(texts[index])
                speech.end()
                chunks = []
                async for chunk in speech:
                    chunks.append(chunk)
                    if chunk.start_samples > longest_s * RATE:
                        speech.cancel()
                spoken[index].pcm = np.frombuffer(b"".join(c.pcm for c in chunks), "<i2").astype(np.float32) / 32768
                spoken[index].marks = [mark for chunk in chunks for mark in chunk.marks]
                spoken[index].joints = [
                    chunk.start_samples for chunk in chunks if chunk.start_samples and chunk.samples
                ]

        async with asyncio.TaskGroup() as group:
            for index in range(len(texts)):
                group.create_task(one(index))
    return spoken


def joints(spoken: list[Spoken]) -> dict[str, float]:
    """The largest step between two samples where chunks meet, and the largest elsewhere."""
    at, inside = 0.0, 0.0
    for one in spoken:
        steps = np.abs(np.diff(one.pcm))
        places = np.array([joint - 1 for joint in one.joints if joint < len(one.pcm)], np.int64)
        at = max(at, float(steps[places].max(initial=0)))
        inside = max(inside, float(np.delete(steps, places).max()))
    return {"largest_step_at_joints": round(at, 3), "largest_step_inside": round(inside, 3)}


def times(spoken: list[Spoken], readings: list[Reading]) -> dict[str, Any]:
    """How long the voice takes against the teacher, and how far its word times are from the teacher's, warped."""
    ratios, errors = [], []
    for one, reading in zip(spoken, readings, strict=True):
        ours, theirs = spectrum(one.pcm), spectrum(reading.pcm)
        (begin, end), (their_begin, their_end) = span(ours), span(theirs)
        ratios.append((end - begin) / (their_end - their_begin))
        path = warp(ours[begin:end], theirs[their_begin:their_end])
        ends = {mark.chars: mark.samples for mark in reversed(one.marks)}
        for chars, second in reading.words:
            mark = min((samples for at, samples in ends.items() if at >= chars), default=len(one.pcm))
            row = min(max(round(second * RATE / HOP) - their_begin, 0), len(path) - 1)
            errors.append(mark / RATE - (begin + path[row]) * HOP / RATE)
    ms = np.array(errors) * 1000
    return {
        "duration_ratio": [round(float(f(ratios)), 3) for f in (np.min, np.mean, np.max)],
        "word_time_error_ms": round(float(np.abs(ms).mean()), 1),
        "word_time_bias_ms": round(float(ms.mean()), 1),
        "word_times_within_80_ms": round(float((np.abs(ms) <= 80).mean()), 3),
        "words": len(ms),
    }


def ten_minutes(model: str) -> None:
    """One stream of ten minutes: it is spoken to its end, at the same rate in each minute."""
    texts = (HERE / "heldout_long.txt").read_text("utf-8").splitlines()
    text = " ".join(texts + texts[:15])
    (spoken,) = asyncio.run(speak(model, [text], {}, 1))
    minutes = len(spoken.pcm) / RATE / 60
    rates = []
    for minute in range(int(minutes)):
        inside = [mark.chars for mark in spoken.marks if minute <= mark.samples / RATE / 60 < minute + 1]
        rates.append((max(inside) - min(inside)) / 60)
    ended = spoken.marks[-1].chars == len(text)
    print(f"RESULT minutes={minutes:.2f} to_the_end={ended} characters_a_second={min(rates):.1f} to {max(rates):.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="nano", help="a preset or a folder; 'teacher' for the teacher itself")
    parser.add_argument("--voice", default=None, help="one of the engine's, e.g. hibari; the model's own by default")
    parser.add_argument("--texts", type=Path, default=HERE / "heldout.txt", help="one text a line")
    parser.add_argument("--count", type=int, default=None, help="only the first texts")
    parser.add_argument("--together", type=int, default=8, help="streams at once")
    parser.add_argument("--sampling", default="{}", help='changes to the model\'s own, e.g. {"temperature": 0.3}')
    parser.add_argument("--opinions", action="store_true", help="DistillMOS and DNSMOS as well")
    parser.add_argument("--ten-minutes", action="store_true", help="only this: one stream of ten minutes")
    parser.add_argument("--work", type=Path, default=Path("nano_work"), help="where the teacher's graph is kept")
    parser.add_argument("--json", type=Path, default=None, help="where to add the result")
    parser.add_argument("--wav", type=Path, default=None, help="folder for the sounds")
    arguments = parser.parse_args()
    if arguments.ten_minutes:
        ten_minutes(arguments.model)
        return
    texts = arguments.texts.read_text("utf-8").splitlines()[: arguments.count]
    sampling = json.loads(arguments.sampling)

    reader = Reader(arguments.work)
    readings = [reader.read(text) for text in texts]
    started = time.process_time()
    if arguments.model == "teacher":
        spoken = [Spoken(reading.pcm) for reading in readings]
    else:
        spoken = asyncio.run(speak(arguments.model, texts, sampling, arguments.together, voice=arguments.voice))
    cpu_s = time.process_time() - started
    sounds = [one.pcm for one in spoken]
    audio_s = sum(map(len, sounds)) / RATE
    error, heard = Judge().score(texts, sounds)
    for text, words, sound in zip(texts, heard, sounds, strict=True):
        edits = word_edits(plain_words(text), plain_words(words))
        if edits:
            print(f"{edits} {len(sound) / RATE:5.2f} s  {text}\n          {words}")
    result: dict[str, Any] = {"word_error": round(error, 4), "audio_s": round(audio_s, 1)}
    if arguments.model != "teacher":
        result |= {"cpu_s": round(cpu_s, 1), "real_time_factor": round(cpu_s / audio_s, 3)}
        result |= times(spoken, readings) | joints(spoken)
    if arguments.opinions:
        opinions = Opinions()
        distill, dns = np.array([opinions.of(sound) for sound in sounds]).T
        result |= {"distillmos": round(distill.mean(), 2), "dnsmos": round(dns.mean(), 2)}
    if arguments.wav:
        arguments.wav.mkdir(parents=True, exist_ok=True)
        for index, sound in enumerate(sounds):
            with wave.open(str(arguments.wav / f"{index:02d}.wav"), "wb") as file:
                file.setparams((1, 2, RATE, 0, "NONE", ""))
                file.writeframes((sound * 32767).astype("<i2").tobytes())
    if arguments.json:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        results = json.loads(arguments.json.read_text()) if arguments.json.exists() else []
        what = {
            "model": arguments.model,
            "voice": arguments.voice,
            "texts": arguments.texts.name,
            "sentences": len(texts),
            "sampling": sampling,
            "commit": commit,
            "together": arguments.together,
        }
        results.append(what | result | {"heard": heard})
        arguments.json.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    print("RESULT", *(f"{name}={value}" for name, value in result.items()))


if __name__ == "__main__":
    main()
