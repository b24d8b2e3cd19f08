"""Keys and values of the backbone, in pages that streams hold and give back.

One pool holds all layers.  A step gathers the columns its rows may see into one tensor, the layers add their new ones,
and `commit` writes those back: two copies per step whatever the number of layers, and the layers see plain tensors.

A row's columns stand where its own history puts them, whatever else is in the step: position p in column p (all
history) or the last `window - 1` positions right-aligned (sliding window), the new ones last, and the number of columns
a multiple of 16.  Columns a row may not see add exact zeros, so its sums come out the same, bit for bit, in any batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

COLUMNS = 16
"""Columns are gathered in multiples of this, so that no row's sums depend on another row's length."""


class PageTable:
    """Which pages of the pool hold the positions of one backbone row."""

    def __init__(self, page_tokens: int, kept: int | None = None) -> None:
        """kept: once the pages hold so many positions, each new position takes the place of the one `kept` before it,
        which no window reaches any more; None: every position stays."""
        self._page_tokens = page_tokens
        self._kept = kept
        self._places = np.empty(0, np.int64)
        """places[p]: token of the pool that holds position p, and later p + kept."""

    @property
    def capacity(self) -> int:
        """Positions that the pages hold."""
        return len(self._places)

    def extend(self, pages: tuple[int, ...]) -> None:
        """Append pages."""
        if pages:
            new = np.asarray(pages, np.int64)[:, None] * self._page_tokens + np.arange(self._page_tokens)
            self._places = np.concatenate((self._places, new.ravel()))

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
