"""Train the codec's decoder further, its codes as they are, so that a language model trained on them stays good.

    python examples/nano_voice/refine_codec.py --work nano_work --steps 400 --sound-steps 600

First towards the teacher's features, then, through the synthesis that serves, towards the spectra of its sound: what
the bands should hold so that pulses and noise sound like the teacher is more than its own bands say.  Without
nano_work/codec.pt it starts from the package's codec.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
from corpus import STEPS, Corpus
from torch import Tensor, nn
from tqdm import tqdm
from train_codec import WEIGHTS, CodecTraining, feature_loss

from breeze_rtc.models.source_filter import SourceFilterHead, SourceFilterState

HOP = 240
FRAMES = 40 * STEPS
SILENCE = -9.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--work", type=Path, default=Path("nano_work"))
    parser.add_argument("--steps", type=int, default=400, help="towards the teacher's features")
    parser.add_argument("--sound-steps", type=int, default=600, help="towards the teacher's sound")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = CodecTraining.start(arguments.work)
    model.encoder.requires_grad_(False)
    if arguments.steps:
        features = Corpus.load(arguments.work)
        refine(
            model, features, steps=arguments.steps, top_rate=1.2e-3, rows=16, log=arguments.work / "refine_log.jsonl"
        )
    if arguments.sound_steps:
        corpus = Corpus.load(arguments.work, with_sound=True)
        refine(
            model, corpus, steps=arguments.sound_steps, top_rate=8e-4, rows=8, log=arguments.work / "sound_log.jsonl"
        )
    path = arguments.work / "codec.pt"
    saved = torch.load(path) if path.exists() else {}
    torch.save(saved | {"model": model.state_dict()}, path)


def refine(model: CodecTraining, corpus: Corpus, *, steps: int, top_rate: float, rows: int, log: Path) -> None:
    """Towards the corpus's sound where it holds any, else towards its features."""
    trained = [parameter for parameter in model.decoder.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=top_rate, betas=(0.9, 0.98), weight_decay=0.01)
    head = SourceFilterHead()
    pick = np.random.default_rng(1)
    long_enough = [utterance for utterance in corpus.utterances if utterance.frames >= FRAMES]
    lines = log.open("w")
    started = time.process_time()
    for step in (bar := tqdm(range(steps), unit="step", mininterval=5)):
        rate = top_rate * min(1, (step + 1) / 50) * (0.02 + 0.98 * (1 + math.cos(math.pi * step / steps)) / 2)
        for group in optimizer.param_groups:
            group["lr"] = rate
        starts = []
        for _ in range(rows):
            utterance = long_enough[pick.integers(len(long_enough))]
            room = utterance.frames - FRAMES
            starts.append(utterance.start + (0 if pick.random() < 0.5 else int(pick.integers(room + 1))))
        truth = _crops(corpus.features, starts, FRAMES)
        with torch.no_grad():
            _, added = model.quantizer.encode(model.latents(truth))
        guess = model.decode(added.sum(2))
        losses = feature_loss(guess, truth)
        weights = WEIGHTS
        if corpus.sound is not None:
            weights = WEIGHTS | {"harmonic": 0.1, "noise": 0.1, "sound": 1.0}
            wanted = _crops(corpus.sound, [start * HOP for start in starts], FRAMES * HOP) / 32768
            # The head speaks one hop late.
            losses["sound"] = spectral_loss(speak(head, guess, truth)[:, HOP:], wanted[:, :-HOP])
        optimizer.zero_grad(set_to_none=True)
        sum(weights[name] * value for name, value in losses.items()).backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        if step % 20 == 0:
            values = {name: round(value.item(), 4) for name, value in losses.items()}
            lines.write(json.dumps({"step": step, "cpu_s": round(time.process_time() - started), **values}) + "\n")
            lines.flush()
            bar.set_postfix(values)


def _crops(rows: np.ndarray, starts: list[int], length: int) -> Tensor:
    return torch.from_numpy(np.stack([rows[start : start + length] for start in starts]).astype(np.float32))


def speak(head: SourceFilterHead, guess: Tensor, truth: Tensor) -> Tensor:
    """(B, T * 240) from the guessed bands, at the true pitch and voicing, so that harmonics lie where they should.

    Each row draws noise and phase of its own, or the decoder would learn them by heart.
    """
    features = torch.cat([truth[..., :2], guess[..., 2:]], -1)
    count = len(features)
    state = SourceFilterState(head.cfg, count, dtype=torch.float32, device="cpu")
    state.position[:] = torch.randint(1, 10**7, (count + 1,))
    state.phase[:] = torch.rand(count + 1, dtype=torch.float64)
    state.frames[:count] = features[:, :1].detach()
    state.frames[:count, :, 2:] = SILENCE
    samples: Tensor = head(features.transpose(1, 2), state, torch.arange(count))
    return samples


def spectral_loss(guess: Tensor, truth: Tensor) -> Tensor:
    """Log magnitudes and spectral convergence at four resolutions, mean; (B, N) each."""
    total = torch.zeros(())
    for size in (2048, 1024, 512, 256):
        window = torch.hann_window(size)
        ours, theirs = (
            (
                torch.view_as_real(torch.stft(x, size, size // 4, window=window, return_complex=True)).square().sum(-1)
                + 1e-9
            )
            .sqrt()
            .div(window.square().sum().sqrt())
            for x in (guess, truth)
        )
        total = total + ((ours + 1e-3).log() - (theirs + 1e-3).log()).abs().mean()
        off = (ours - theirs).square().sum((1, 2)).sqrt() / theirs.square().sum((1, 2)).sqrt().clamp(min=1e-2)
        total = total + 0.5 * off.mean()
    return total / 4


if __name__ == "__main__":
    main()
