"""Keys and values of the backbone, in pages that streams hold and give back.

One pool holds all layers.  A step gathers the columns its rows may see into one tensor, the layers add their new ones,
and `commit` writes those back: two copies per step whatever the number of layers, and the layers see plain tensors.

A row's columns stand where its own history puts them, whatever else is in the step: position p in column p (all
history) or the last `window - 1` positions right-aligned (sliding window), the new ones last, and the number of columns
a multiple of 16.  Columns a row may not see add exact zeros, so its sums come out the same, bit for bit, in any batch.

A prompt step (`prompt`) brings many positions of unequal rows.  Its layers write theirs to the pool first and then read
position p in column p, so that neither the pieces a prompt is cut into nor the rows beside it move a column.

What several rows begin with, a stored voice, stands once, in pages behind those that streams are given
(`PrefixPages`).  A row's own positions begin in a page of its own, so a shared one is never written to and need not be
copied to be; it is free again when its store and the last stream that reads it have let go of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from breeze_rtc.models.attention import Ragged

COLUMNS = 16
"""Columns are gathered in multiples of this, so that no row's sums depend on another row's length."""


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """Positions that rows have in common, in pages of their own."""

    pages: tuple[int, ...]
    places: NDArray[np.int64]
    """places[p]: token of the pool that holds position p."""

    @property
    def positions(self) -> int:
        return len(self.places)


class PrefixPages:
    """The pages of prefixes, and who uses them."""

    def __init__(self, pages: range, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._free = list(reversed(pages))
        # How many hold each prefix: its store, and every row of a stream that begins with it.
        self._users: dict[Prefix, int] = {}

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def take(self, positions: int) -> Prefix | None:
        """Room for a prefix, held by whoever asks; None when there is none."""
        pages = -(-positions // self._page_tokens)
        if pages > len(self._free):
            return None
        taken = tuple(self._free.pop() for _ in range(pages))
        prefix = Prefix(taken, _tokens_of(taken, self._page_tokens)[:positions])
        self._users[prefix] = 1
        return prefix

    def hold(self, prefix: Prefix) -> None:
        """One more holds it."""
        assert prefix in self._users, "nobody holds this prefix any more"
        self._users[prefix] += 1

    def let_go(self, prefix: Prefix) -> None:
        """One less holds it; after the last its pages are free."""
        self._users[prefix] -= 1
        if not self._users[prefix]:
            del self._users[prefix]
            self._free.extend(reversed(prefix.pages))


def _tokens_of(pages: tuple[int, ...], page_tokens: int) -> NDArray[np.int64]:
    """The tokens of the pool that these pages are."""
    return (np.asarray(pages, np.int64)[:, None] * page_tokens + np.arange(page_tokens)).ravel()


class PageTable:
    """Which tokens of the pool hold the positions of one backbone row."""

    def __init__(self, page_tokens: int, kept: int | None = None, prefix: Prefix | None = None) -> None:
        """kept: once the pages hold so many positions, each new position takes the place of the one `kept` before it,
        which no window reaches any more; None: every position stays.  prefix: what the row begins with."""
        assert kept is None or prefix is None, "a row that forgets shares nothing"
        self._page_tokens = page_tokens
        self._kept = kept
        self.prefix = prefix
        self._places = np.empty(0, np.int64) if prefix is None else prefix.places
        """places[p]: token of the pool that holds position p, and later p + kept."""

    @property
    def capacity(self) -> int:
        """Positions that the pages hold."""
        return len(self._places)

    def extend(self, pages: tuple[int, ...]) -> None:
        """Append pages."""
        if pages:
            self._places = np.concatenate((self._places, _tokens_of(pages, self._page_tokens)))

    def places(self, start: int, end: int) -> NDArray[np.int64]:
        """Where positions [start, end) stand."""
        held = len(self._places)
        if held == self._kept:
            return self._places[np.arange(start, end) % held]
        assert end <= held, f"position {end - 1} has no page"
        return self._places[start:end]


@dataclass(frozen=True, slots=True)
class KVRow:
    """One row of a step: `count` new positions after `start` old ones."""

    table: PageTable
    start: int
    count: int


class PagedKV:
    """The pool.  One page more than asked for is the dummy: pads read its first token, always zero, and write its
    second."""

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        pages: int,
        page_tokens: int = 16,
        window: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        assert page_tokens >= 2
        self.page_tokens = page_tokens
        self.window = window
        shape = (layers, 2, kv_heads, (pages + 1) * page_tokens, head_dim)
        self.pool = torch.zeros(shape, dtype=dtype, device=device)
        """(layers, keys and values, kv_heads, tokens, head_dim): heads outermost, so that gathered columns of one head
        are the rows of one matrix."""
        self.zero = pages * page_tokens
        self.trash = self.zero + 1

    def step(self, rows: list[KVRow], bucket: int) -> StepCache:
        """The cache of one step: `rows`, then pads up to `bucket` rows."""
        new = max(row.count for row in rows)
        oldest = max(row.start for row in rows)
        past = self.window - 1 if self.window is not None else oldest
        columns = -(-(past + new) // COLUMNS) * COLUMNS
        past = columns - new
        read = np.full((bucket, past), self.zero, np.int64)
        write = np.full((bucket, new), self.trash, np.int64)
        blocked = np.ones((bucket, new, columns), np.bool_)
        # A query sees itself and the new positions before it; pads too, so that no softmax is empty.
        blocked[:, :, past:] = np.triu(np.ones((new, new), np.bool_), 1)
        for index, row in enumerate(rows):
            write[index, : row.count] = row.table.places(row.start, row.start + row.count)
            if self.window is None:
                read[index, : row.start] = row.table.places(0, row.start)
                blocked[index, :, : row.start] = False
                continue
            seen = min(row.start, self.window - 1)
            if seen:
                read[index, past - seen :] = row.table.places(row.start - seen, row.start)
                blocked[index, :, past - seen : past] = False
        if self.window is not None and new > 1:
            # New position t is `past + t - column` after a column.
            distance = past + np.arange(new)[:, None] - np.arange(columns)
            blocked |= distance >= self.window
        device = self.pool.device
        mask = torch.from_numpy(blocked).to(device)
        return StepCache(
            self.pool,
            torch.from_numpy(read).to(device),
            torch.from_numpy(write.ravel()).to(device),
            self.pool.new_zeros(blocked.shape).masked_fill_(mask, float("-inf"))[:, None],
        )

    def prompt(self, rows: list[KVRow], ragged: Ragged, columns: int) -> PromptPlaces:
        """Where the new positions of each row go in a step of prompts, on the host, for `prompt_cache`.

        ragged: where they stand in the step; it has room for at least these rows.
        """
        assert self.window is None, "all history in place"
        count, longest = ragged.places.shape
        write = np.full(len(ragged.back), self.trash, np.int64)
        read = np.full((count, columns), self.zero, np.int64)
        starts = np.zeros(count, np.int64)
        at = 0
        for index, row in enumerate(rows):
            end = row.start + row.count
            assert row.count <= longest
            read[index, :end] = row.table.places(0, end)
            write[at : at + row.count] = read[index, row.start : end]
            starts[index] = row.start
            at += row.count
        return PromptPlaces(torch.from_numpy(read), torch.from_numpy(write), torch.from_numpy(starts))

    def prompt_cache(self, read: Tensor, write: Tensor, starts: Tensor, ragged: Ragged) -> PromptCache:
        """The cache of a step of which `prompt` said where things stand; made of tensor operations only."""
        # Query t of a row is position `start + t`; a pad's see their own column 0, so that no softmax is empty.
        last = starts[:, None] + torch.arange(ragged.places.shape[1], device=read.device)
        hidden = torch.arange(read.shape[1], device=read.device) > last[..., None]
        mask = self.pool.new_zeros(hidden.shape).masked_fill(hidden, float("-inf"))
        return PromptCache(self.pool, read, write, ragged, mask)

    def places(self, rows: list[KVRow | None], bucket: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
        """Where one new position of each row goes in a step of fixed shape, on the host, for `fixed`.

        Returns the tokens of the pool that hold its past, (bucket, columns - 1), the token for the new one, (bucket,),
        and how many there are of the past, (bucket,).  None, or no row at all: a pad.
        """
        assert self.window is None, "all history in place"
        read = np.full((bucket, columns - 1), self.zero, np.int64)
        write = np.full(bucket, self.trash, np.int64)
        starts = np.zeros(bucket, np.int64)
        for index, row in enumerate(rows):
            if row is None:
                continue
            read[index, : row.start] = row.table.places(0, row.start)
            write[index] = row.table.places(row.start, row.start + 1)[0]
            starts[index] = row.start
        return torch.from_numpy(read), torch.from_numpy(write), torch.from_numpy(starts)

    def fixed(self, read: Tensor, write: Tensor, starts: Tensor) -> StepCache:
        """The cache of a step of which `places` said where things stand; made of tensor operations only."""
        column = torch.arange(read.shape[1] + 1, device=read.device)
        hidden = (column >= starts[:, None]) & (column < read.shape[1])
        mask = self.pool.new_zeros(hidden.shape).masked_fill(hidden, float("-inf"))
        return StepCache(self.pool, read, write, mask[:, None, None])


class PromptPlaces(NamedTuple):
    """Where a step of prompts reads and writes."""

    read: Tensor
    """(R, C): token of the pool that holds position c of each row; the zero token behind its end."""
    write: Tensor
    """(N,): where each new position goes."""
    starts: Tensor
    """(R,): how many positions each row had before."""


class PromptCache:
    """What the layers of a prompt step see and add to; a `KVCache` of the attention layers."""

    def __init__(self, pool: Tensor, read: Tensor, write: Tensor, ragged: Ragged, mask: Tensor) -> None:
        self._pool = pool
        self._read = read
        self._write = write
        self._ragged = ragged
        self._mask = mask

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pool = self._pool[layer]
        pool.index_copy_(2, self._write, torch.stack((k[0], v[0])))
        R, C = self._read.shape
        columns = pool.index_select(2, self._read.flatten()).view(2, -1, R, C, pool.shape[-1])
        return self._ragged.attend(q, columns[0], columns[1], self._mask)


class StepCache:
    """What the layers of one step see and add to; a `KVCache` of the attention layers."""

    def __init__(self, pool: Tensor, read: Tensor, write: Tensor, mask: Tensor) -> None:
        """read: (rows, P) tokens of the pool that hold the past.  write: (rows * T,), where the new ones go."""
        layers, _, kv_heads, _, head_dim = pool.shape
        self._pool = pool
        self._write = write
        bucket, self._past = read.shape
        past = pool.index_select(3, read.flatten())
        self.past = past.view(layers, 2, kv_heads, bucket, self._past, head_dim)
        """Keys and values of the positions before the step's: (layers, 2, kv_heads, rows, P, head_dim)."""
        self.mask = mask
        """(rows, 1 for the heads of a group, T, P + T), added to the scores."""
        # Past and new columns of all layers, once a layer asks.
        self._columns: Tensor | None = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self._columns is None:
            self._columns = self.past.new_empty(*self.past.shape[:4], self.mask.shape[-1], self.past.shape[-1])
            self._columns[..., : self._past, :] = self.past
        keys, values = self._columns[layer, 0], self._columns[layer, 1]
        keys[:, :, self._past :] = k.transpose(0, 1)
        values[:, :, self._past :] = v.transpose(0, 1)
        B, T, heads, D = q.shape
        kv_heads = keys.shape[0]
        groups = heads // kv_heads
        # (kv_heads, B, groups * T, D): the queries that share a key head are the rows of one product.
        q = q.view(B, T, kv_heads, groups, D).permute(2, 0, 3, 1, 4).reshape(kv_heads, B, groups * T, D)
        scores = (q @ keys.transpose(-1, -2)).view(kv_heads, B, groups, T, -1)
        scores = torch.add(self.mask, scores, alpha=D**-0.5)
        weights = scores.softmax(-1, dtype=torch.float32).type_as(q).view(kv_heads, B, groups * T, -1)
        seen = (weights @ values).view(kv_heads, B, groups, T, D)
        return seen.permute(1, 3, 0, 2, 4).reshape(B, T, heads * D)

    def commit(self, new: Tensor | None = None) -> None:
        """Write the new columns of all layers to the pool: `new`, (layers, 2, kv_heads, rows, T, head_dim), or those
        the layers have left here."""
        if new is None:
            assert self._columns is not None, "no layer has left anything"
            new = self._columns[..., self._past :, :]
        self._pool.index_copy_(3, self._write, new.reshape(*new.shape[:3], -1, new.shape[-1]))
