"""Train text encoder, pointer, backbone and depth decoder on the codec's codes.

    python examples/nano_voice/train_lm.py --work nano_work --steps 2200

Resumes from nano_work/lm.pt.  The codes are made on the fly by the trained codec (nano_work/codec.pt), or by the
package's.  Every 100 steps it speaks sentences that it does not train on, and the judge's word error goes into the log.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from corpus import Corpus, text_of
from evaluate import speak
from export import codec_tensors, write_voice
from judge import Judge
from rows import Batch, Rows
from safetensors.torch import load_file
from torch import Tensor, nn
from tqdm import tqdm
from train_codec import VOICE, CodecTraining

from breeze_rtc.models.backbone import Backbone
from breeze_rtc.models.depth import DepthDecoder
from breeze_rtc.models.pointer import TextPointer
from breeze_rtc.models.presets import ModelConfig, nano
from breeze_rtc.models.pronunciation import VOCABULARY
from breeze_rtc.models.text_encoder import TextEncoder

AVERAGING = 0.994
HEARD_TEXTS = 16
DEPTH_SHARE = 0.4  # of the frames train the depth decoder in each step


class LanguageModel(nn.Module):
    """The four parts of the package that are trained here, under the names they have in SpeechModel."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.pointer is not None
        self.text = TextEncoder(config.text)
        self.backbone = Backbone(config.backbone)
        self.depth = DepthDecoder(config.depth)
        self.pointer = TextPointer(config.pointer)

    @torch.no_grad()
    def start_from(self, codebooks: Tensor, *, spread: float) -> None:
        """Codes begin as what they mean: tables and heads are the codebooks, through fixed random projections.

        codebooks: (K, V, D); spread: standard deviation of the latents they sum to.
        """
        K, V, D = codebooks.shape
        width = self.depth.config.embedding
        project = torch.randn(D, width) * (D**-0.5 / spread)
        self.depth.table.weight.copy_((codebooks @ project).reshape(K * V, width))
        whole = (codebooks - codebooks.mean(1, keepdim=True)) / codebooks.std((1, 2), keepdim=True)
        self.backbone.output.weight.copy_(whole[0] @ torch.randn(D, width) * (D * width) ** -0.5)
        hidden = self.depth.config.block.hidden
        for head, book in zip(self.depth.heads, whole[1:], strict=True):
            head.copy_((book @ torch.randn(D, hidden) * (D * hidden) ** -0.5).T)

    def encode_text(self, segments: list[list[int]]) -> Tensor:
        """Vectors of all tokens one after the other, and a row of zeros: (N + 1, E)."""
        order = sorted(range(len(segments)), key=lambda index: len(segments[index]))
        parts: list[Tensor] = [torch.empty(0)] * len(segments)
        quarter = -(-len(order) // 4)
        for begin in range(0, len(order), quarter):
            chosen = order[begin : begin + quarter]
            lengths = torch.tensor([len(segments[index]) for index in chosen])
            ids = torch.zeros(len(chosen), int(lengths.max()), dtype=torch.int64)
            for row, index in enumerate(chosen):
                ids[row, : len(segments[index])] = torch.tensor(segments[index])
            for row, (index, vectors) in enumerate(zip(chosen, self.text(ids, lengths), strict=True)):
                parts[index] = vectors[: lengths[row]]
        return F.pad(torch.cat(parts), (0, 0, 0, 1))

    def hidden(self, batch: Batch, past: Tensor) -> Tensor:
        """past: (B, L, K) codes, what stands at f is shown to frame f + 1.  Returns (B, L, hidden)."""
        vectors = self.encode_text(batch.segments)
        items = self.pointer.item(vectors[batch.window], batch.elapsed)
        before = self.depth.embed_frame(past[:, :-1])
        start = self.pointer.start.expand(len(past), 1, -1)
        positions = torch.arange(past.shape[1])[None]
        out: Tensor = self.backbone(items + torch.cat([start, before], 1), positions)
        return out


def worn(codes: Tensor, *, frames: float, entries: float) -> Tensor:
    """History as it may look when the model hears itself: some frames and some fine codes come from elsewhere."""
    B, L, K = codes.shape
    other = codes.view(B * L, K)[torch.randint(B * L, (B * L, 2))].view(B, L, 2, K)
    whole = torch.rand(B, L, 1) < frames
    worn = torch.where(whole, other[:, :, 0], codes)
    # Finer codebooks are guessed worse.
    chance = entries * torch.arange(K) / (K - 1) * 2
    return torch.where(torch.rand(B, L, K) < chance, other[:, :, 1], worn)


def losses(model: LanguageModel, batch: Batch, codes: Tensor, *, train: bool) -> dict[str, Tensor]:
    past = worn(codes, frames=0.15, entries=0.15) if train else codes
    hidden = model.hidden(batch, past)
    flat, targets = hidden.flatten(0, 1), codes.flatten(0, 1)
    chosen = torch.randperm(len(flat))[: int(len(flat) * DEPTH_SHARE)]
    fine = model.depth(flat[chosen], targets[chosen])
    return {
        "c0": F.cross_entropy(model.backbone.head(flat), targets[:, 0]),
        "advance": F.cross_entropy(model.pointer.advance_logits(flat), batch.advance.flatten()),
        **{f"c{k}": F.cross_entropy(fine[:, k - 1], targets[chosen, k]) for k in range(1, codes.shape[-1])},
    }


def total(parts: dict[str, Tensor]) -> Tensor:
    """The fine codebooks count less and less: what they carry is close to noise."""
    fine = sum(parts[f"c{k}"] * weight for k, weight in enumerate([0.35, 0.25, 0.2, 0.15, 0.12, 0.1, 0.08], 1))
    return parts["c0"] + parts["advance"] + fine


def word_error(voice: Path, texts: list[str]) -> float:
    """Of a voice's folder, as the engine speaks it; who has not learnt to stop is stopped."""
    spoken = asyncio.run(speak(str(voice), texts, {}, 8, longest_s=12))
    return Judge().score(texts, [one.pcm for one in spoken])[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--work", type=Path, default=Path("nano_work"))
    parser.add_argument("--steps", type=int, default=2200, help="at which the learning rate arrives at its end")
    parser.add_argument("--rate", type=float, default=2.2e-3)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--frames", type=int, default=192, help="of each row")
    parser.add_argument("--from-package", action="store_true", help="start from the package's, with a small --rate")
    parser.add_argument("--shards", type=int, default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    corpus = Corpus.load(arguments.work, limit=arguments.shards)
    codec = CodecTraining.start(arguments.work)
    codec.eval().requires_grad_(False)

    def encode(batch: Batch) -> Tensor:
        with torch.no_grad():
            return codec.quantizer.encode(codec.latents(batch.features))[0]

    training, validation = corpus.utterances[:-120], corpus.utterances[-120:]
    model = LanguageModel(nano(vocab=VOCABULARY))
    if arguments.from_package:
        state = load_file(VOICE / "model.safetensors")
        model.load_state_dict({name: t.float() for name, t in state.items() if not name.startswith("codec.")})
    else:
        books = codec.decoder.codebooks
        model.start_from(books, spread=books.square().sum(2).mean(1).sum().div(books.shape[2]).sqrt().item())
    # Everything but matrices is spared weight decay.
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.05},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=arguments.rate, betas=(0.9, 0.95))
    # What is exported and checked is the average of the last steps' weights.
    averaged = {name: value.clone() for name, value in model.state_dict().items()}
    path, first, trained_s = arguments.work / "lm.pt", 0, 0.0
    if path.exists():
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        averaged = saved["averaged"]
        optimizer.load_state_dict(saved["optimizer"])
        first, trained_s = saved["step"], saved.get("cpu_s", 0.0)
    # A quarter faster; the text encoder's shapes change with every batch.
    model.backbone.compile()
    model.depth.compile()
    torch.manual_seed(first)
    shape = {"rows": arguments.rows, "frames": arguments.frames}
    rows = Rows(corpus, training, **shape, seed=first)
    checks = [Rows(corpus, validation, **shape, seed=1).next() for _ in range(1)]
    checks = [(batch, encode(batch)) for batch in checks]

    texts = [text_of(utterance) for utterance in validation[:HEARD_TEXTS]]
    log = (arguments.work / "lm_log.jsonl").open("a")
    started = time.process_time() - trained_s
    mean: dict[str, float] = {}
    for step in (bar := tqdm(range(first, arguments.steps), unit="step", mininterval=5)):
        progress = step / arguments.steps
        rate = arguments.rate * min(1, (step + 1) / 120) * (0.02 + 0.98 * (1 + math.cos(math.pi * progress)) / 2)
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = rows.next()
        parts = losses(model, batch, encode(batch), train=True)
        optimizer.zero_grad(set_to_none=True)
        total(parts).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        share = max(1 - AVERAGING, 1 / (step + 1))
        torch._foreach_lerp_(list(averaged.values()), list(model.state_dict().values()), share)
        for name, value in parts.items():
            mean[name] = mean.get(name, value.item()) * 0.95 + value.item() * 0.05
        if step % 20 == 0:
            bar.set_postfix({name: f"{mean[name]:.2f}" for name in ("c0", "advance", "c1", "c4", "c7")})
        if (step + 1) % 100 == 0 or step + 1 == arguments.steps:
            with torch.no_grad():
                own = {name: value.clone() for name, value in model.state_dict().items()}
                model.load_state_dict(averaged)
                checked = losses(model, *checks[0], train=False)
                model.load_state_dict(own)
            trained_s = time.process_time() - started
            line = {
                "step": step + 1,
                "cpu_s": round(trained_s),
                "train": {k: round(v, 3) for k, v in mean.items()},
                "validation": {k: round(v.item(), 3) for k, v in checked.items()},
            }
            write_voice(arguments.work / "voice", averaged | codec_tensors(codec))
            line["word_error"] = round(word_error(arguments.work / "voice", texts), 4)
            log.write(json.dumps(line) + "\n")
            log.flush()
            torch.save(
                {
                    "model": own,
                    "averaged": averaged,
                    "optimizer": optimizer.state_dict(),
                    "step": step + 1,
                    "cpu_s": trained_s,
                },
                path.with_suffix(".part"),
            )
            started = time.process_time() - trained_s
            path.with_suffix(".part").rename(path)


if __name__ == "__main__":
    main()
