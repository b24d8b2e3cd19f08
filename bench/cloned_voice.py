"""Does a cloned voice start as fast as a plain one?  Time from request to the first chunk, by what the store has.

A model of random weights with Breeze TTS 2's structure and a thirtieth of its size speaks on this machine's CPU: in its
own voice (*plain*), in one that was cloned from a recording and whose keys and values are in memory (*warm*), in one
whose are read from the disk, as for the first stream after others took its place (*disk*), and with no room for any,
so that each stream encodes and prefills the whole reference (*cold*, which is how a server without a store does it).
The kinds take turns, so that what else the machine does falls on all of them.

`--model qwen` is Qwen3-TTS as `peers_serving.py` makes it small, and has one kind more: cloned without the words of the
recording (*by ear*), of which nothing but the text is left to prefill.  With the words the recording's frames are: they
stand behind the text.

    python bench/cloned_voice.py [--model mid|qwen] [--quick] [--seed N] [--json FILE] [--reference SECONDS]
                                 [--threads N]
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import statistics
import time
import wave
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import peers_serving
import torch
from origin import origin

from breeze_rtc.models import checkpoint, presets
from breeze_rtc.models.prompt import Voice
from breeze_rtc.models.speaker_encoder import SpeakerEncoder, SpeakerEncoderConfig
from breeze_rtc.models.speech_model import SpeechModel
from breeze_rtc.runtime import process, voice_store
from breeze_rtc.runtime.engine import Engine
from breeze_rtc.scheduling.stream import Priority

TEXT = "The listener's real position tells the scheduler how much time there is."
TRANSCRIPT = "This is what I say so that the machine may learn how I sound, and now that is enough of it."
NAME, BY_EAR = "anna", "bea"


def recording(seconds: float, seed: int) -> bytes:
    """A WAV file of noise whose level moves."""
    samples = round(seconds * 24_000)
    sound = np.random.default_rng(seed).normal(0, 0.1, samples) * np.abs(np.sin(np.arange(samples) / 3_000))
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(24_000)
        out.writeframes((sound * 32_767).astype("<i2").tobytes())
    return file.getvalue()


async def first_chunk_ms(engine: Engine, voice: str, seed: int) -> float:
    began = time.perf_counter()
    speech = engine.speak(voice=voice, seed=seed, interactive=False, priority=Priority.BATCH)
    speech.push(TEXT)
    speech.end()
    await anext(speech)
    took_ms = (time.perf_counter() - began) * 1e3
    speech.cancel()
    return took_ms


async def together(engine: Engine, voice: str, seed: int, streams: int) -> list[float]:
    found = await asyncio.gather(*(first_chunk_ms(engine, voice, seed + k) for k in range(streams)))
    # What was cancelled is over before the next begin.
    await asyncio.sleep(0.05)
    return list(found)


async def run(options: argparse.Namespace) -> None:
    model = qwen(options.seed) if options.model == "qwen" else checkpoint.load("mid")
    prompts = model.prompts
    assert prompts is not None
    # A plain stream's text in the tokens of the others' prompts.
    model._frontend = lambda voice: prompts.frontend(Voice(name=voice))
    checkpoint.load = lambda _name, **_options: model  # type: ignore[assignment]
    stores: list[voice_store.VoiceStore] = []
    warm = voice_store.VoiceStore.warm

    def kept(store: voice_store.VoiceStore) -> None:
        stores.append(store)
        warm(store)

    voice_store.VoiceStore.warm = kept  # type: ignore[method-assign]
    figures: dict[str, str] = {}
    raw: dict[str, list[float]] = {}
    with TemporaryDirectory() as folder:
        shared = {"threads": options.threads, "process": False, "measures": False, "voices": Path(folder)}
        async with Engine("mid", **shared) as engine:
            began = time.perf_counter()
            await engine.add_voice(NAME, recording(options.reference, options.seed), TRANSCRIPT)
            figures["add_s"] = f"{time.perf_counter() - began:.2f}"
            kinds = [("plain", "", model.voices[0]), ("warm", "", NAME), ("disk", "", NAME), ("cold", "without", NAME)]
            if options.model == "qwen":
                await engine.add_voice(BY_EAR, recording(options.reference, options.seed), "")
                kinds.append(("by_ear", "", BY_EAR))
            process.VOICES = 0
            async with Engine("mid", **shared) as without:
                for streams in (1, 4):
                    rounds = 6 if options.quick else 40 // streams
                    for number in range(rounds + 1):
                        for kind, where, voice in kinds:
                            if kind == "disk":
                                stores[0]._drop(NAME)
                            speaker = without if where else engine
                            times = await together(speaker, voice, options.seed + 100 * number, streams)
                            # The first round is warm-up.
                            raw.setdefault(f"{kind}_c{streams}", []).extend(times if number else [])
    for key, times in raw.items():
        p50 = statistics.median(times)
        base = statistics.median(raw[f"plain_c{key.rpartition('_c')[2]}"])
        print(f"{key}: first chunk p50 {p50:6.1f} ms, worst {max(times):6.1f}; {p50 / base:.2f} of plain")
        figures[f"{key}_p50_ms"] = f"{p50:.1f}"
        if not key.startswith("plain"):
            figures[f"{key}_to_plain"] = f"{p50 / base:.2f}"
    if options.json:
        document = origin("torch", "av", "numpy") | {
            "parameters": sum(p.numel() for p in model.parameters()),
            "raw": raw,
        }
        options.json.write_text(json.dumps(document))
    print("RESULT", *(f"{key}={value}" for key, value in figures.items()))


def qwen(seed: int) -> SpeechModel:
    """Random weights, with encoders for recordings."""
    with TemporaryDirectory() as folder:
        peers_serving.write_qwen(Path(folder) / "qwen", torch.Generator().manual_seed(seed))
        model = checkpoint.load(str(Path(folder) / "qwen"))
        assert model.prompts is not None
        # Reads the tokenizer while it is there.
        # Reads the tokenizer, while it is there.
        model.prompts.reference(Voice(vector=(0.0,)))
    encoder = checkpoint._seeded_encoder(presets.tiny_encoder(model.config), seed)
    encoder.speaker = SpeakerEncoder(SpeakerEncoderConfig(model.config.backbone.block.hidden)).eval()
    model._encoder = lambda: encoder
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("mid", "qwen"), default="mid")
    parser.add_argument("--quick", action="store_true", help="a few rounds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--reference", type=float, default=10.0, help="seconds of the recording")
    parser.add_argument("--threads", type=int, default=1)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
