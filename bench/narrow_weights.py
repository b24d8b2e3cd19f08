"""What do 8 bit weights change?  How often another code is the likeliest, and whether words are lost.

Both kinds (`int8`, `fp8`) against the weights as they are, with the same past: random codes, so that a difference does
not lead to others.  `sure`: the same where the first choice was clearer than in half of all cases.  With --words the
nano voice speaks with each, and Whisper tiny.en writes down what it hears (the `dev` extra has it).

    python bench/narrow_weights.py [--quick] [--words] [--seed N] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from origin import origin
from torch import Tensor

from breeze_rtc.models.quantised import TYPES
from breeze_rtc.models.speech_model import SpeechModel
from breeze_rtc.runtime.engine import Engine
from breeze_rtc.scheduling.stream import Priority

NANO_VOICE = Path(__file__).parents[1] / "examples" / "nano_voice"
MODELS = ("nano", "mid")


@torch.inference_mode()
def logits_of(model: SpeechModel, codes: Tensor) -> tuple[Tensor, Tensor]:
    """codes (N, T, K) -> logits of codebook 0 behind each frame (N, T, classes), and of the others (N, T, K - 1, V)."""
    positions = torch.arange(codes.shape[1])[None]
    hidden = model.backbone(model.depth.embed_frame(codes), positions)
    others = model.depth(hidden.flatten(0, 1), codes.flatten(0, 1)).unflatten(0, codes.shape[:2])
    return model.backbone.head(hidden), others


def agreement(wide: Tensor, narrow: Tensor) -> dict[str, float]:
    best = wide.topk(2, -1)
    is_same = narrow.argmax(-1) == best.indices[..., 0]
    gaps = best.values[..., 0] - best.values[..., 1]
    is_sure = gaps > gaps.median()
    return {"same": float(is_same.float().mean()), "sure": float(is_same[is_sure].float().mean())}


def codes_part(name: str, sequences: int, frames: int, seed: int) -> dict[str, Any]:
    wide = SpeechModel.load(name)
    depth = wide.config.depth
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, wide.config.codec.codes, (sequences, frames, depth.codebooks), generator=generator)
    expected = logits_of(wide, codes)
    found = {}
    for kind in TYPES:
        first, others = logits_of(SpeechModel.load(name, weights=kind), codes)
        found[kind] = {"first": agreement(expected[0], first), "others": agreement(expected[1], others)}
        said = ", ".join(
            f"{which} {100 * one['same']:.2f} % (sure: {100 * one['sure']:.2f} %)" for which, one in found[kind].items()
        )
        print(f"{name:5} {kind:5} likeliest code the same: {said}", flush=True)
    return found


async def spoken(weights: str, texts: list[str], threads: int) -> list[NDArray[np.float32]]:
    sounds = []
    async with Engine("nano", weights=weights, threads=threads, process=False, measures=False) as engine:
        for number, text in enumerate(texts):
            speech = engine.speak(seed=number, interactive=False, priority=Priority.BATCH)
            speech.push(text)
            speech.end()
            pcm = b"".join([chunk.pcm async for chunk in speech])
            sounds.append(np.frombuffer(pcm, "<i2").astype(np.float32) / 32_768)
    return sounds


def words_part(count: int | None) -> dict[str, float]:
    """Word error by kind of weights; the same texts and seeds."""
    sys.path.insert(0, str(NANO_VOICE))
    from judge import Judge

    texts = (NANO_VOICE / "heldout.txt").read_text("utf-8").splitlines()[:count]
    judge = Judge()
    found = {}
    for kind in ("", *TYPES):
        error, _ = judge.score(texts, asyncio.run(spoken(kind, texts, 1)))
        found[kind or "as_stored"] = error
        print(f"nano {kind or 'as stored':9} word error {100 * error:.2f} % over {len(texts)} sentences", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="nano alone, few frames")
    parser.add_argument("--words", action="store_true", help="speak, and count the words that are heard")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sequences, frames = (4, 64) if options.quick else (16, 64)
    codes = {
        name: codes_part(name, sequences, frames, options.seed) for name in (MODELS[:1] if options.quick else MODELS)
    }
    words = words_part(8 if options.quick else None) if options.words else {}
    if options.json:
        document = origin("torch", "numpy") | {"codes": codes, "words": words}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    said = [
        f"same_{name}_{kind}_{which}={one['same']:.4f}"
        for name, kinds in codes.items()
        for kind, found in kinds.items()
        for which, one in found.items()
    ]
    said += [f"word_error_{kind}={error:.4f}" for kind, error in words.items()]
    print("RESULT", *said)


if __name__ == "__main__":
    main()
