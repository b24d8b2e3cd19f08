"""Word error of a voice over the held-out sentences, spoken by the engine that serves and heard by the judge.

python examples/nano_voice/evaluate.py [--model FOLDER] [--json examples/nano_voice/results.json] [--wav FOLDER]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import time
import wave
from pathlib import Path

import numpy as np
from judge import Judge, plain_words, word_edits
from numpy.typing import NDArray

from breeze_rtc.runtime.engine import Engine
from breeze_rtc.scheduling.stream import Priority

HERE = Path(__file__).parent


async def speak(model: str, texts: list[str], sampling: dict[str, float], together: int) -> list[NDArray[np.float32]]:
    """Each text as one stream, `together` at a time."""
    sounds: list[NDArray[np.float32]] = [np.empty(0, np.float32)] * len(texts)
    async with Engine(model, process=False) as engine:
        turns = asyncio.Semaphore(together)

        async def one(index: int) -> None:
            async with turns:
                speech = engine.speak(seed=index, sampling=sampling, interactive=False, priority=Priority.BATCH)
                speech.push(texts[index])
                speech.end()
                pcm = b"".join([chunk.pcm async for chunk in speech])
                sounds[index] = np.frombuffer(pcm, "<i2").astype(np.float32) / 32768

        async with asyncio.TaskGroup() as group:
            for index in range(len(texts)):
                group.create_task(one(index))
    return sounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="nano", help="a preset or a folder")
    parser.add_argument("--texts", type=Path, default=HERE / "heldout.txt", help="one sentence a line")
    parser.add_argument("--count", type=int, default=None, help="only the first sentences")
    parser.add_argument("--together", type=int, default=8, help="streams at once")
    parser.add_argument("--sampling", default="{}", help='changes to the model\'s own, e.g. {"temperature": 0.3}')
    parser.add_argument("--json", type=Path, default=None, help="where to add the result")
    parser.add_argument("--wav", type=Path, default=None, help="folder for the sounds")
    arguments = parser.parse_args()
    texts = arguments.texts.read_text("utf-8").splitlines()[: arguments.count]
    sampling = json.loads(arguments.sampling)

    started = time.process_time()
    sounds = asyncio.run(speak(arguments.model, texts, sampling, arguments.together))
    cpu_s = time.process_time() - started
    audio_s = sum(map(len, sounds)) / 24_000
    error, heard = Judge().score(texts, sounds)
    for text, words, sound in zip(texts, heard, sounds, strict=True):
        edits = word_edits(plain_words(text), plain_words(words))
        if edits:
            print(f"{edits} {len(sound) / 24_000:5.2f} s  {text}\n          {words}")
    if arguments.wav:
        arguments.wav.mkdir(parents=True, exist_ok=True)
        for index, sound in enumerate(sounds):
            with wave.open(str(arguments.wav / f"{index:02d}.wav"), "wb") as file:
                file.setparams((1, 2, 24_000, 0, "NONE", ""))
                file.writeframes((sound * 32767).astype("<i2").tobytes())
    if arguments.json:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        results = json.loads(arguments.json.read_text()) if arguments.json.exists() else []
        results.append(
            {
                "model": arguments.model,
                "texts": arguments.texts.name,
                "sentences": len(texts),
                "sampling": sampling,
                "commit": commit,
                "together": arguments.together,
                "word_error": round(error, 4),
                "audio_s": round(audio_s, 1),
                "cpu_s": round(cpu_s, 1),
                "heard": heard,
            }
        )
        arguments.json.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    print(
        f"RESULT word_error={error:.4f} sentences={len(texts)} audio_s={audio_s:.1f} cpu_s={cpu_s:.1f} "
        f"real_time_factor={cpu_s / audio_s:.3f}"
    )


if __name__ == "__main__":
    main()
