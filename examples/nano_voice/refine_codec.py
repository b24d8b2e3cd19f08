"""Train the codec's decoder further, its codes as they are, so that a language model trained on them stays good.

python examples/nano_voice/refine_codec.py --work nano_work --steps 1500
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
import torch
from corpus import STEPS, Corpus
from numpy.typing import NDArray
from torch import nn
from tqdm import tqdm
from train_codec import WEIGHTS, CodecTraining, feature_loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--work", type=Path, default=Path("nano_work"))
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--rate", type=float, default=1.2e-3)
    arguments = parser.parse_args()
    corpus = Corpus.load(arguments.work)
    saved = torch.load(arguments.work / "codec.pt")
    model = CodecTraining()
    model.load_state_dict(saved["model"])
    refine(model, corpus, corpus.features, steps=arguments.steps, top_rate=arguments.rate)
    saved["model"] = model.state_dict()
    torch.save(saved, arguments.work / "codec.pt")


def refine(model: CodecTraining, corpus: Corpus, truth: NDArray[np.float16], *, steps: int, top_rate: float) -> None:
    """truth: what the decoder shall say where the corpus's features were encoded, row for row."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model.encoder.requires_grad_(False)
    trained = [parameter for parameter in model.decoder.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=top_rate, betas=(0.9, 0.98), weight_decay=0.01)

    pick = np.random.default_rng(1)
    length = 40 * STEPS
    long_enough = [utterance for utterance in corpus.utterances if utterance.frames >= length]
    for step in (bar := tqdm(range(steps), unit="step", mininterval=5)):
        rate = top_rate * min(1, (step + 1) / 50) * (0.02 + 0.98 * (1 + math.cos(math.pi * step / steps)) / 2)
        for group in optimizer.param_groups:
            group["lr"] = rate
        starts = []
        for _ in range(16):
            utterance = long_enough[pick.integers(len(long_enough))]
            room = utterance.frames - length
            starts.append(utterance.start + (0 if pick.random() < 0.5 else int(pick.integers(room + 1))))
        crops = [
            torch.from_numpy(np.stack([rows[start : start + length] for start in starts]).astype(np.float32))
            for rows in (corpus.features, truth)
        ]
        with torch.no_grad():
            _, added = model.quantizer.encode(model.latents(crops[0]))
        losses = feature_loss(model.decode(added.sum(2)), crops[1])
        optimizer.zero_grad(set_to_none=True)
        sum(WEIGHTS[name] * value for name, value in losses.items()).backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        if step % 20 == 0:
            bar.set_postfix({name: round(value.item(), 4) for name, value in losses.items()})


if __name__ == "__main__":
    main()
