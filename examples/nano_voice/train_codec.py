"""Train the codec: features -> 8 codes every 40 ms -> features.  The decoder is the package's; the encoder stays here.

    python examples/nano_voice/train_codec.py --work nano_work --steps 4000

Resumes from nano_work/codec.pt.  The decoder learns in whitened features; `export.py` folds that scale into its last
layer.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from corpus import STEPS, Corpus
from safetensors.torch import load_file
from torch import Tensor, nn
from tqdm import tqdm

from breeze_rtc.models.codec import CodecDecoder
from breeze_rtc.models.presets import nano

HERE = Path(__file__).parent
VOICE = HERE.parents[1] / "breeze_rtc" / "voices" / "nano"
ENCODER = HERE / "encoder.safetensors"
CODE_DIM = nano().codec.code_dim
FEATURES = nano().codec.features


class EncoderBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Conv1d(width, width, 5, padding=2, groups=width)
        self.norm = nn.LayerNorm(width)
        self.expand, self.shrink = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.norm(self.mix(x.transpose(1, 2)).transpose(1, 2))
        out: Tensor = x + self.shrink(F.gelu(self.expand(mixed)))
        return out


class Encoder(nn.Module):
    """(B, T * 4, 162) whitened features -> (B, T, 64); sees two frames ahead in each of its blocks."""

    def __init__(self, width: int = 320, blocks: int = 3) -> None:
        super().__init__()
        self.enter = nn.Linear(STEPS * FEATURES, width)
        self.blocks = nn.ModuleList(EncoderBlock(width) for _ in range(blocks))
        self.leave = nn.Linear(width, CODE_DIM)

    def forward(self, features: Tensor) -> Tensor:
        batch, frames, channels = features.shape
        x = self.enter(features.reshape(batch, frames // STEPS, STEPS * channels))
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.leave(x)
        return out


class ResidualQuantizer:
    """Codebooks learnt by moving averages; they live in the decoder's `codebooks` (K, V, D)."""

    def __init__(self, codebooks: Tensor, *, decay: float = 0.97) -> None:
        self.codebooks = codebooks
        self.decay = decay
        self.counts = torch.ones(codebooks.shape[:2])
        self.sums = codebooks.detach().clone()

    @torch.no_grad()
    def seed(self, latents: Tensor, *, rounds: int = 8) -> None:
        """k-means on (N, D), one level after the other on what is left."""
        rest = latents.clone()
        for level, book in enumerate(self.codebooks):
            book.copy_(rest[torch.randperm(len(rest))[: len(book)]])
            for _ in range(rounds):
                codes = _nearest(rest, book)
                counts = torch.bincount(codes, minlength=len(book)).float()
                sums = torch.zeros_like(book).index_add_(0, codes, rest)
                book.copy_(torch.where(counts[:, None] > 0, sums / counts.clamp(min=1)[:, None], book))
            codes = _nearest(rest, book)
            self.counts[level] = torch.bincount(codes, minlength=len(book)).float().clamp(min=1) / len(rest) * 512
            self.sums[level] = book * self.counts[level][:, None]
            rest = rest - book[codes]

    @torch.no_grad()
    def encode(self, latents: Tensor, *, learn: bool = False) -> tuple[Tensor, Tensor]:
        """(..., D) -> codes (..., K) and what each level adds (..., K, D)."""
        rest = latents.reshape(-1, latents.shape[-1])
        codes, added = [], []
        for level, book in enumerate(self.codebooks):
            code = _nearest(rest, book)
            entry = book[code]
            if learn:
                counts = torch.bincount(code, minlength=len(book)).float()
                self.counts[level].mul_(self.decay).add_(counts, alpha=1 - self.decay)
                self.sums[level].mul_(self.decay).add_(
                    torch.zeros_like(book).index_add_(0, code, rest), alpha=1 - self.decay
                )
                book.copy_(self.sums[level] / self.counts[level][:, None].clamp(min=1e-4))
                # An entry that nobody chooses starts again at a latent that nobody served well.
                idle = self.counts[level] < 0.02
                if idle.any():
                    fresh = rest[torch.randint(len(rest), (int(idle.sum()),))]
                    book[idle], self.sums[level][idle], self.counts[level][idle] = fresh, fresh, 1.0
            rest = rest - entry
            codes.append(code)
            added.append(entry)
        shape = latents.shape[:-1]
        return torch.stack(codes, -1).view(*shape, -1), torch.stack(added, 1).view(*shape, len(codes), -1)


def _nearest(points: Tensor, book: Tensor) -> Tensor:
    return (book.square().sum(1) - 2 * points @ book.T).argmin(1)


def feature_loss(guess: Tensor, truth: Tensor) -> dict[str, Tensor]:
    """L1 in natural units (nepers, log Hz); harmonics and pitch count where there is a voice. (B, T, 162) each."""
    voiced = truth[..., 1]
    certain = (voiced > 0.5).float()
    off = (guess - truth).abs()
    total = certain.sum().clamp(min=1)
    return {
        "harmonic": (off[..., 2:82].mean(-1) * (0.1 + 0.9 * certain)).mean(),
        "noise": off[..., 82:].mean(),
        "pitch": (off[..., 0] * certain).sum() / total,
        "voicing": off[..., 1].mean(),
    }


WEIGHTS = {"harmonic": 1.0, "noise": 0.8, "pitch": 6.0, "voicing": 1.0}


def filter_of_the_bands() -> tuple[Tensor, Tensor]:
    """(162, 162) and (162,): what the decoder's features are multiplied by, and what is added then.

    What a decoder is not told it answers with the mean, so its envelopes are too smooth: what differs from the envelope
    smoothed over six bands is made 1.4 times as large for the harmonics and 1.6 times for the noise.  Loud and soft
    harmonics come 10 % nearer to each other, and the voice has a little more of low harmonics and of high noise, 2.6 dB
    at either end.  Being linear, it costs nothing: `export.py` puts it into the last layer.
    """
    off = torch.arange(80.0)[:, None] - torch.arange(80.0)
    smooth = (-0.5 * (off / 6).square()).exp()
    smooth /= smooth.sum(1, keepdim=True)
    tilt = torch.arange(80) / 79 - 0.5
    factors, added = torch.eye(FEATURES), torch.zeros(FEATURES)
    for first, gain, spread, middle, slope in ((2, 1.4, 0.9, -3.0, -0.6), (82, 1.6, 1.0, 0.0, 0.6)):
        bands = slice(first, first + 80)
        factors[bands, bands] = spread * (smooth + gain * (torch.eye(80) - smooth))
        added[bands] = (1 - spread) * middle + slope * tilt
    return factors, added


class CodecTraining(nn.Module):
    """Encoder, quantiser, decoder and the features' mean and scale."""

    mean: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.decoder = CodecDecoder(nano().codec)
        self.decoder.codebooks.requires_grad_(False)
        self.decoder.mix_rest.weight = self.decoder.mix_first.weight  # one projection of the whole sum
        self.quantizer = ResidualQuantizer(self.decoder.codebooks.data)
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.register_buffer("scale", torch.ones(FEATURES))

    @classmethod
    def start(cls, work: Path) -> CodecTraining:
        """The codec of nano_work/codec.pt, or the package's, whose encoder lies beside this file."""
        codec = cls()
        if (work / "codec.pt").exists():
            codec.load_state_dict(torch.load(work / "codec.pt")["model"])
            return codec
        state = {name: value.float() for name, value in load_file(ENCODER).items()}
        state |= {
            name.replace("codec.", "decoder."): value.float()
            for name, value in load_file(VOICE / "model.safetensors").items()
            if name.startswith("codec.")
        }
        # `export.py` put scale, mean and filter into the last layer.
        factors, added = filter_of_the_bands()
        back = torch.linalg.inv(factors)
        weight = back @ state["decoder.to_features.weight"]
        bias = back @ (state["decoder.to_features.bias"] - added)
        state["decoder.to_features.weight"] = weight / state["scale"][:, None]
        state["decoder.to_features.bias"] = (bias - state["mean"]) / state["scale"]
        codec.load_state_dict(state)
        return codec

    def latents(self, features: Tensor) -> Tensor:
        return self.encoder((features - self.mean) / self.scale)

    def decode(self, summed: Tensor) -> Tensor:
        """The sum of the entries (B, T, D) -> features (B, 4 T, 162)."""
        return self.decoder.features_of(self.decoder.mix_first(summed)).transpose(1, 2) * self.scale + self.mean


def batches(corpus: Corpus, *, size: int, frames: int, seed: int):  # type: ignore[no-untyped-def]
    """Endless random crops (size, frames * 4, 162); half of them begin where an utterance begins."""
    pick = np.random.default_rng(seed)
    length = frames * STEPS
    long_enough = [u for u in corpus.utterances if u.frames >= length]
    while True:
        rows = []
        for _ in range(size):
            utterance = long_enough[pick.integers(len(long_enough))]
            room = utterance.frames - length
            start = 0 if pick.random() < 0.5 else int(pick.integers(room + 1))
            rows.append(corpus.features[utterance.start + start : utterance.start + start + length])
        yield torch.from_numpy(np.stack(rows).astype(np.float32))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--work", type=Path, default=Path("nano_work"))
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--plain-steps", type=int, default=250, help="steps before the quantiser starts")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--shards", type=int, default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    corpus = Corpus.load(arguments.work, limit=arguments.shards)
    model = CodecTraining()
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.rate, betas=(0.9, 0.98), weight_decay=0.01)
    path, first = arguments.work / "codec.pt", 0
    if path.exists():
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        model.quantizer.counts, model.quantizer.sums, first = saved["counts"], saved["sums"], saved["step"]
    else:
        sample = torch.from_numpy(corpus.features[:: max(1, len(corpus.features) // 200_000)].astype(np.float32))
        model.mean.copy_(sample.mean(0))
        # Bands share one scale, so that a neper is a neper in each of them.
        model.scale.copy_(sample.std(0))
        model.scale[2:82], model.scale[82:] = model.scale[2:82].mean(), model.scale[82:].mean()

    stream = batches(corpus, size=16, frames=40, seed=first)
    recent: list[Tensor] = []
    log = (arguments.work / "codec_log.jsonl").open("a")
    started = time.process_time()
    for step in (bar := tqdm(range(first, arguments.steps), unit="step", mininterval=5)):
        progress = step / arguments.steps
        rate = arguments.rate * min(1, (step + 1) / 100) * (0.03 + 0.97 * (1 + math.cos(math.pi * progress)) / 2)
        for group in optimizer.param_groups:
            group["lr"] = rate
        truth = next(stream)
        latent = model.latents(truth)
        commit = torch.zeros(())
        if step < arguments.plain_steps:
            summed = latent
            recent = [*recent[-40:], latent.detach().reshape(-1, CODE_DIM)]
        else:
            if step == arguments.plain_steps:
                model.quantizer.seed(torch.cat(recent))
            _, added = model.quantizer.encode(latent.detach(), learn=True)
            levels = torch.full((len(truth),), added.shape[2])
            dropped = torch.rand(len(truth)) < 0.3
            levels[dropped] = torch.randint(1, added.shape[2], (int(dropped.sum()),))
            kept = torch.arange(added.shape[2]) < levels[:, None]
            quantized = (added * kept[:, None, :, None]).sum(2)
            commit = F.mse_loss(latent, added.sum(2))
            summed = latent + (quantized - latent).detach()
        guess = model.decode(summed)
        losses = feature_loss(guess, truth)
        loss = sum(WEIGHTS[name] * value for name, value in losses.items()) + 0.25 * commit
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0:
            values = {name: round(value.item(), 4) for name, value in losses.items()}
            log.write(json.dumps({"step": step, "cpu_s": round(time.process_time() - started), **values}) + "\n")
            log.flush()
            bar.set_postfix(values)
        if (step + 1) % 250 == 0 or step + 1 == arguments.steps:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": step + 1,
                "counts": model.quantizer.counts,
                "sums": model.quantizer.sums,
            }
            torch.save(state, path.with_suffix(".part"))
            path.with_suffix(".part").rename(path)


if __name__ == "__main__":
    main()
