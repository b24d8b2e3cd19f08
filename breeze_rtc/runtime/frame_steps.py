"""What a step computes once its rows are known, as functions of tensors: the same eagerly and replayed from a graph.

Nothing here reads a tensor on the host, branches on one or makes a shape of one, so each function can be captured as a
CUDA graph, or recorded (`graphs`).  What differs between two steps of one shape comes in as tensors; what a shape is
made of (`Kind`) is known on the host.  The state of all slots is updated in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from breeze_rtc.models.attention import Ragged
from breeze_rtc.models.codec import CodecState, Tape
from breeze_rtc.models.depth import DepthWay, Generate
from breeze_rtc.models.sampling import RowSampling, Sampling, choose, combine, gumbel, penalise
from breeze_rtc.models.speech_model import SpeechModel
from breeze_rtc.runtime.kv_cache import PagedKV, PromptPlaces, StepCache

RING_FRAMES = 256
"""Frames a stream may have made and not yet decoded."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What of the rows' sampling changes which operations run."""

    draws: bool
    """Some row draws; otherwise all take the likeliest code and no noise is made."""
    max_top_k: int
    """The largest limit of a row; 0: no row has one that matters."""
    uses_top_p: bool
    penalises: bool
    guides: int
    """Backbone rows beside the first that some row has: 1 with guidance, 2 with dual guidance."""


class Batch:
    """The rows of a step, pads included, as two small tensors, so that two copies carry them to the device."""

    INTS, FLOATS = 5, 6

    def __init__(self, ints: Tensor, floats: Tensor) -> None:
        """ints: (5, R) int64: slot, seed, frame, place in the ring, top-k.  floats: (6, R) float32: temperature, scale
        of the noise, top-p, repetition penalty, and the guidance of rows 0 and 2."""
        self.ints = ints
        self.floats = floats
        self.slots, self.seeds, self.frames, self.places, top_k = ints.unbind()
        temperature, noise_scale, top_p, penalty, scale, other_scale = floats[:, :, None].unbind()
        self.temperature, self.noise_scale, self.top_p = temperature, noise_scale, top_p
        self.top_k = top_k[:, None]
        self.penalty, self.scale, self.other_scale = penalty, scale, other_scale

    def sampling(self, kind: Kind) -> RowSampling:
        return RowSampling(
            temperature=self.temperature,
            noise_scale=self.noise_scale,
            top_k=self.top_k,
            top_p=self.top_p,
            is_greedy=not kind.draws,
            max_top_k=kind.max_top_k,
            uses_top_p=kind.uses_top_p,
        )


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One row on the host."""

    slot: int
    seed: int
    frame: int
    sampling: Sampling
    scales: tuple[float, float] = (1.0, 0.0)
    """What its first backbone row, and its third in dual guidance, weigh against the second; (1, 0): no guidance."""


def pad_row(dummy: int) -> BatchRow:
    """What fills a step up: nobody's, in the dummy slot."""
    return BatchRow(dummy, 0, 0, _PAD)


_PAD = Sampling(temperature=0, depth_temperature=0, top_k=0, repetition_penalty=1)


def batch_of(rows: list[BatchRow], columns: int, *, depth: bool) -> tuple[Tensor, Tensor, Kind]:
    """Rows with `columns` logits each -> what `Batch` is made of, on the host, and its kind."""
    temperatures = [row.sampling.depth_temperature if depth else row.sampling.temperature for row in rows]
    # No limit changes which code is the likeliest.
    limits = [
        (row.sampling.top_k if 0 < row.sampling.top_k < columns else columns) if temperature else 1
        for row, temperature in zip(rows, temperatures, strict=True)
    ]
    drawn = [limit for limit, temperature in zip(limits, temperatures, strict=True) if temperature]
    ints = torch.tensor(
        [
            [row.slot for row in rows],
            [row.seed for row in rows],
            [row.frame for row in rows],
            [row.frame % RING_FRAMES for row in rows],
            limits,
        ]
    )
    floats = torch.tensor(
        [
            [temperature or 1.0 for temperature in temperatures],
            [float(temperature > 0) for temperature in temperatures],
            [row.sampling.top_p for row in rows],
            [row.sampling.repetition_penalty for row in rows],
            *zip(*(row.scales for row in rows), strict=True),
        ]
    )
    kind = Kind(
        draws=bool(drawn),
        max_top_k=max(drawn) if any(limit < columns for limit in drawn) else 0,
        uses_top_p=any(row.sampling.top_p < 1 for row in rows),
        penalises=not depth and any(row.sampling.repetition_penalty != 1 for row in rows),
        guides=max((2 if other else int(scale != 1) for scale, other in (row.scales for row in rows)), default=0),
    )
    return ints, floats, kind


@dataclass(slots=True)
class SlotState:
    """What is kept of every stream on the device, one slot each; the last slot is the dummy of padded rows."""

    codes: Tensor
    """(slots, K) int64: codes of the frame in work or just made."""
    hidden: Tensor
    """(slots, 3, hidden): hidden states of the frame in work, of each of a stream's backbone rows."""
    ring: Tensor
    """(slots, RING_FRAMES, K) int64: codes of frames not decoded yet."""
    seen: Tensor
    """(slots, classes) bool: classes of codebook 0 that a stream has used."""
    codec: CodecState
    depth_codebooks: Tensor
    """(K - 1,) int64: 1, 2 ..."""
    first_codebook: Tensor
    """(1,) int64: 0."""


def guided(logits: Sequence[Tensor], batch: Batch) -> Tensor:
    """The logits of a batch's backbone rows, (R, V) each, as one.

    Classifier-free guidance where a stream has it: away from row 1, towards row 0 and, in dual guidance, row 2.  A
    scale of 1 would round, so streams without it are left alone.
    """
    first, unguided, *others = logits
    out = combine(first, unguided, batch.scale)
    for other in others:
        out = torch.addcmul(out, batch.other_scale, other - unguided)
    return torch.where((batch.scale == 1) & (batch.other_scale == 0), first, out)


def first_codes(model: SpeechModel, state: SlotState, batch: Batch, kind: Kind) -> tuple[Tensor, Tensor]:
    """Code 0 of each row's frame, from the hidden states in the slots; see `choose_first`."""
    hidden = state.hidden[batch.slots]
    logits = model.backbone.head(hidden[:, 0])
    if kind.guides:
        others = [model.backbone.head(hidden[:, row]) for row in range(1, 1 + kind.guides)]
        logits = guided([logits, *others], batch)
    return choose_first(model, state, batch, kind, logits)


def choose_first(
    model: SpeechModel, state: SlotState, batch: Batch, kind: Kind, logits: Tensor
) -> tuple[Tensor, Tensor]:
    """logits (R, classes) -> code 0 of each row (R,), the class that ends speech included, and whether its logits were
    finite."""
    is_good = logits.amax(-1).isfinite()
    if kind.penalises:
        logits = penalise(logits, state.seen[batch.slots], batch.penalty)
    logits = model.silence_reserved(logits)
    if model.config.min_frames and model.config.end_class is not None:
        is_early = batch.frames < model.config.min_frames
        logits[:, model.config.end_class].masked_fill_(is_early, float("-inf"))
    noise = None
    if kind.draws:
        noise = gumbel(batch.seeds, batch.frames, state.first_codebook, logits.shape[-1])[:, 0]
    codes = choose(logits, noise, batch.sampling(kind))
    state.seen[batch.slots, codes] = True
    # The class that ends speech is no code; a pad may have drawn it too, and its slot is embedded and decoded again.
    is_end = codes == model.config.end_class if model.config.end_class is not None else None
    state.codes[batch.slots, 0] = codes if is_end is None else codes.masked_fill(is_end, 0)
    return codes, is_good


def depth_frame(model: SpeechModel, state: SlotState, batch: Batch, kind: Kind, way: DepthWay | None = None) -> Tensor:
    """The other codes of each row's frame, into its slot and its ring.

    way: how the passes run; None: eagerly.
    Returns (R,), finite where all logits were.
    """
    rows = len(batch.slots)
    hidden = state.hidden[batch.slots]
    first = state.codes[batch.slots, 0]
    values = batch.sampling(kind)
    noise = None
    if kind.draws:
        noise = gumbel(batch.seeds, batch.frames, state.depth_codebooks, model.config.depth.vocab)
    largest = torch.zeros(rows, device=hidden.device)
    draw = None if way is None or kind.uses_top_p else way.choose

    def pick(codebook: int, logits: Tensor) -> Tensor:
        drawn = None if noise is None else noise[:, codebook - 1]
        if draw is not None:
            scales = {"scale": batch.scale, "other_scale": batch.other_scale}
            chosen = draw(logits, drawn, values, guides=kind.guides, **scales, largest=largest, silent=model.silent)
        else:
            if kind.guides:
                logits = guided(torch.split(logits, rows), batch)
            largest.add_(logits.amax(-1))
            chosen = choose(model.silence_reserved(logits), drawn, values)
        return chosen.repeat(1 + kind.guides) if kind.guides else chosen

    generate: Generate = model.depth.generate if way is None else way.generate
    if kind.guides:
        # All first rows, then all second ones, and so on; streams without guidance are computed so often and read once.
        beside = 1 + kind.guides
        together = hidden[:, :beside].transpose(0, 1).reshape(beside * rows, -1)
        codes = generate(together, first.repeat(beside), pick)[:rows]
    else:
        codes = generate(hidden[:, 0], first, pick)
    state.codes[batch.slots] = codes
    state.ring[batch.slots, batch.places] = codes
    return largest


def codec_frames(
    model: SpeechModel,
    state: SlotState,
    slots: Tensor,
    starts: Tensor,
    frames: int,
    *,
    live: int | None = None,
    features: Callable[[Tensor, Tape], Tensor] | None = None,
) -> Tensor:
    """Sound of the next `frames` frames of each row, whose first is number `starts` (R,): (R or live, samples)."""
    codes = codes_in_ring(state, slots, starts, frames)
    sound: Tensor = model.codec(codes, state.codec, slots, live=live, features=features)
    return sound


def codes_in_ring(state: SlotState, slots: Tensor, starts: Tensor, frames: int) -> Tensor:
    """The next `frames` frames of each row, whose first is number `starts` (R,): (R, K, frames)."""
    places = (starts[:, None] + torch.arange(frames, device=starts.device)) % RING_FRAMES
    return state.ring[slots[:, None], places].transpose(1, 2)


def next_hidden(  # noqa: PLR0917 (a graph's inputs)
    model: SpeechModel, state: SlotState, slots: Tensor, twins: Tensor, positions: Tensor, cache: StepCache
) -> None:
    """The hidden state of each row's next frame, into its slot: of a model that reads nothing but its own past.

    twins: (R,) int64, 1 where the row is an unguided twin.  positions: (R,), of the frame before, which is read now.
    """
    x = model.depth.embed_frame(state.codes[slots])
    hidden = model.backbone(x[:, None], positions[:, None], cache)[:, 0]
    cache.commit()
    state.hidden[slots, twins] = hidden


def prompt_hidden(  # noqa: PLR0917 (a graph's inputs)
    model: SpeechModel,
    state: SlotState,
    kv: PagedKV,
    x: Tensor,
    ragged: Ragged,
    places: PromptPlaces,
    ends: Tensor,
    slots: Tensor,
    twins: Tensor,
) -> None:
    """Run pieces of prompts of any rows, one behind another, and put the hidden states at `ends` into the slots.

    x: (N, hidden), pads last.  ends: (R,), where in x a row's prompt ends; slots, twins: (R,), whose it is; a row whose
    prompt goes on has the dummy slot.
    """
    positions = places.starts[ragged.back // ragged.places.shape[1]] + ragged.offsets
    cache = kv.prompt_cache(places.read, places.write, places.starts, ragged)
    hidden = model.backbone(x[None], positions[None], cache)[0]
    state.hidden[slots, twins] = hidden[ends]
