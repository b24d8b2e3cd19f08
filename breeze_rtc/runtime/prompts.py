"""What is there before a stream's first frame: its text encoded, its prompt run, and what streams have in common.

Texts and prompts of several streams go through a call together, one behind another, and come out as each would alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from breeze_rtc.models.attention import Ragged
from breeze_rtc.models.speech_model import SpeechModel, TextSegment
from breeze_rtc.runtime.frame_graphs import FrameGraphs, Piece, packs, prompt_inputs
from breeze_rtc.runtime.frame_steps import SlotState, prompt_hidden
from breeze_rtc.runtime.kv_cache import KVRow, PagedKV, PageTable, Prefix, PrefixPages, PromptPlaces

TOKEN_STEP = 16
"""Tokens of text and prompts, over all pieces and of the longest, are padded to multiples of this: so a piece is
computed in the same shape of sums whatever stands beside it."""


class Prompts:
    """The text encoder and the backbone's prompt pass of one model, and the prefixes that rows may begin with."""

    def __init__(
        self,
        model: SpeechModel,
        state: SlotState,
        kv: PagedKV,
        prefixes: PrefixPages,
        *,
        dummy: int,
        least_tokens: int,
        most_tokens: int,
    ) -> None:
        """dummy: the slot of pads.  least_tokens: no call is shorter, pads included.  most_tokens: of a prefix in one
        call."""
        self._model = model
        self._state = state
        self._kv = kv
        self._device = kv.pool.device
        self._dummy = dummy
        self._least_tokens = least_tokens
        self._most_tokens = most_tokens
        self.prefixes = prefixes
        self.graphs: FrameGraphs | None = None
        """None: every call runs eagerly."""

    @torch.inference_mode()
    def encode(self, segments: Sequence[TextSegment]) -> list[Tensor]:
        """What the backbone reads of each segment, text or reference audio: (tokens, hidden) each.

        Segments of text are encoded in as few calls as `packs` allows, and say what each says alone.
        """
        vectors: list[Tensor | None] = [self._model.embed_audio(s) if s.codes else None for s in segments]
        texts = [index for index, segment in enumerate(segments) if not segment.codes]
        for share in packs([len(segments[index].tokens) for index in texts]):
            indices = [texts[n] for n in share]
            tokens = [segments[index].tokens for index in indices]
            lengths = [len(each) for each in tokens]
            encoded = torch.split(self._encode(tokens)[: sum(lengths)], lengths)
            for index, found in zip(indices, encoded, strict=True):
                vector = segments[index].vector
                vectors[index] = found + torch.tensor(vector).to(found) if vector else found
        return [found for found in vectors if found is not None]

    def _encode(self, tokens: list[tuple[int, ...]]) -> Tensor:
        """Vectors of segments of text, one behind another: (tokens or more, output)."""
        if self.graphs is not None:
            with self.graphs.turn:
                vectors = self.graphs.text(tokens)
                if vectors is not None:
                    # The next replay overwrites them, and there may be one before they are used.
                    return vectors.clone()
        lengths = [len(segment) for segment in tokens]
        ragged = self._ragged(lengths)
        flat = np.zeros(len(ragged.back), np.int64)
        flat[: sum(lengths)] = np.concatenate([np.asarray(segment, np.int64) for segment in tokens])
        device = self._device
        return self._model.text.packed(
            torch.from_numpy(flat).to(device),
            torch.tensor(lengths, device=device),
            Ragged(ragged.places.to(device), ragged.back.to(device)),
        )

    def _ragged(self, lengths: list[int]) -> Ragged:
        """Pieces of these lengths in a call of their own, its shape rounded up."""
        longest, total = (-(-n // TOKEN_STEP) * TOKEN_STEP for n in (max(lengths), sum(lengths)))
        return Ragged.of(lengths, max(total, self._least_tokens), len(lengths), longest)

    def run(self, pieces: list[Piece]) -> None:
        """Run pieces of prompts in as few calls as `packs` allows; the hidden state of a prompt's end goes into its
        stream's slot."""
        for share in packs([len(x) for *_, x in pieces]):
            self._run_together(pieces[share.start : share.stop])

    def _run_together(self, pieces: list[Piece]) -> None:
        if self.graphs is not None:
            with self.graphs.turn:
                if self.graphs.prefill(pieces):
                    return
        rows = [row for _, _, row, _ in pieces]
        ragged = self._ragged([row.count for row in rows])
        columns = -(-max(row.start + row.count for row in rows) // TOKEN_STEP) * TOKEN_STEP
        x, *host = prompt_inputs(self._kv, pieces, ragged, columns, self._dummy)
        places, back, read, write, starts, ends, slots, twins = (tensor.to(self._device) for tensor in host)
        at = PromptPlaces(read, write, starts)
        prompt_hidden(self._model, self._state, self._kv, x, Ragged(places, back), at, ends, slots, twins)

    @torch.inference_mode()
    def add_prefix(self, vectors: Tensor, kv: Tensor | None = None) -> Prefix | None:
        """Keep what rows may begin with: what the backbone reads at positions 0 ... L - 1, (L, hidden).

        kv: the keys and values of those positions, where they are known (see `prefix_kv`); else they are computed now.
        None where the memory is taken.  Whoever gets it calls `drop_prefix` when it will open no more streams with it.
        """
        assert self._model.config.feed == "prefix", "this model's streams have nothing in common but their weights"
        prefix = self.prefixes.take(len(vectors))
        if prefix is None:
            return None
        if kv is not None:
            self._kv.pool.index_copy_(3, self._places(prefix), kv.to(self._kv.pool))
            return prefix
        table = PageTable(self._kv.page_tokens, prefix=prefix)
        for start in range(0, len(vectors), self._most_tokens):
            piece = vectors[start : start + self._most_tokens].to(self._kv.pool)
            self._run_together([(None, 0, KVRow(table, start, len(piece)), piece)])
        return prefix

    @torch.inference_mode()
    def prefix_kv(self, prefix: Prefix) -> Tensor:
        """Keys and values of a prefix, (layers, 2, kv_heads, L, head_dim), to give to `add_prefix` another time."""
        return self._kv.pool.index_select(3, self._places(prefix))

    def drop_prefix(self, prefix: Prefix) -> None:
        """No more streams begin with it; its memory is free when the last of those that did has closed."""
        self.prefixes.let_go(prefix)

    def _places(self, prefix: Prefix) -> Tensor:
        return torch.from_numpy(prefix.places).to(self._device)
