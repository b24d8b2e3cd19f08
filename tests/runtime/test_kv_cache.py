"""Paged keys and values: a backbone stepped through pages says what it says of the whole sequence."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from breeze_rtc.models.backbone import Backbone
from breeze_rtc.models.presets import tiny
from breeze_rtc.runtime.kv_cache import KVRow, PagedKV, PageTable


def backbone(window: int | None) -> Backbone:
    torch.manual_seed(3)
    return Backbone(replace(tiny().backbone, window=window)).double().eval()


def paged(model: Backbone, *, pages: int = 12, page_tokens: int = 4) -> PagedKV:
    block = model.config.block
    return PagedKV(
        layers=model.config.layers,
        kv_heads=block.kv_heads,
        head_dim=block.head_dim,
        pages=pages,
        page_tokens=page_tokens,
        window=model.config.window,
        dtype=torch.float64,
    )


def table(*pages: int) -> PageTable:
    made = PageTable(4)
    made.extend(pages)
    return made


@torch.no_grad()
def run(model: Backbone, kv: PagedKV, rows: list[tuple[PageTable, int, Tensor]], bucket: int) -> list[Tensor]:
    """One step; rows: (table, start, x (T, hidden)).  Pads are NaN, to see that they stay to themselves."""
    longest = max(len(x) for _, _, x in rows)
    batch = torch.full((bucket, longest, model.config.block.hidden), float("nan"), dtype=torch.float64)
    positions = torch.zeros(bucket, longest, dtype=torch.int64)
    for index, (_, start, x) in enumerate(rows):
        batch[index] = 1e3  # behind a shorter row's own positions: any finite value
        batch[index, : len(x)] = x
        positions[index] = torch.arange(start, start + longest)
    cache = kv.step([KVRow(pages, start, len(x)) for pages, start, x in rows], bucket)
    hidden = model(batch, positions, cache)
    cache.commit()
    return [hidden[index, : len(x)] for index, (_, _, x) in enumerate(rows)]


@pytest.mark.parametrize("window", [None, 5, 16])
@pytest.mark.parametrize("cuts", [(40,), (28,) + (1,) * 12, (7, 1, 1, 16, 15), (39, 1)])
def test_pieces_are_the_whole(window: int | None, cuts: tuple[int, ...]) -> None:
    """Prefill in any pieces, then steps of one, over scattered pages, equals one forward over everything."""
    model = backbone(window)
    kv = paged(model)
    x = torch.randn(40, 32, dtype=torch.float64)
    pages = PageTable(4)
    free = [11, 0, 5, 7, 2, 9, 1, 10, 3, 8]
    pieces, start = [], 0
    for count in cuts:
        while pages.capacity < start + count:
            pages.extend((free.pop(),))
        pieces += run(model, kv, [(pages, start, x[start : start + count])], 2)
        start += count
    with torch.no_grad():
        whole = model(x[None], torch.arange(40)[None])[0]
    torch.testing.assert_close(torch.cat(pieces), whole, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("window", [None, 5])
def test_rows_of_unequal_length_in_one_step(window: int | None) -> None:
    """A row that is new, one that is long and one that brings several positions share a step without seeing each
    other."""
    model = backbone(window)
    kv = paged(model, pages=20)
    xs = [torch.randn(n, 32, dtype=torch.float64) for n in (3, 30, 12)]
    tables = [table(4), table(*range(8, 16)), table(1, 0, 3)]
    run(model, kv, [(tables[1], 0, xs[1][:29])], 1)
    run(model, kv, [(tables[2], 0, xs[2][:5])], 1)
    found = run(model, kv, [(tables[0], 0, xs[0]), (tables[1], 29, xs[1][29:]), (tables[2], 5, xs[2][5:])], 4)
    with torch.no_grad():
        for got, x in zip(found, xs, strict=True):
            whole = model(x[None], torch.arange(len(x))[None])[0]
            torch.testing.assert_close(got, whole[-len(got) :], atol=1e-6, rtol=1e-6)


def test_pads_write_to_the_dummy_page_alone() -> None:
    """After a step with three NaN pads, every token of the pool that is no stream's is what it was."""
    model = backbone(None)
    kv = paged(model)
    kv.pool[:, :, :, : kv.zero] = 7.0
    run(model, kv, [(table(2), 0, torch.randn(3, 32, dtype=torch.float64))], 4)
    own = {8, 9, 10}
    others = [token for token in range(kv.pool.shape[3]) if token not in own and token != kv.trash]
    expected = torch.full_like(kv.pool[:, :, :, others], 7.0)
    expected[:, :, :, [i for i, token in enumerate(others) if token >= kv.zero]] = 0.0
    assert torch.equal(kv.pool[:, :, :, others], expected)


def test_columns_are_blocked_by_sixteen() -> None:
    """A row of one position sees the same number of columns for all lengths of a block, so its sums have one shape."""
    kv = paged(backbone(None))
    shapes = {kv.step([KVRow(table(*range(12)), start, 1)], 4).mask.shape[-1] for start in range(16)}
    assert shapes == {16}
    assert kv.step([KVRow(table(*range(12)), 16, 1)], 4).mask.shape[-1] == 32


@pytest.mark.parametrize("kept", [8, 12])
def test_places_behind_the_window_are_used_again(kept: int) -> None:
    """Two pages, or three, hold a window of five for ever, and say what pages for everything say."""
    model = backbone(5)
    kv = paged(model)
    x = torch.randn(40, 32, dtype=torch.float64)
    few = PageTable(4, kept)
    few.extend((7, 2, 9)[: kept // 4])
    all_of_them = table(11, 0, 5, 1, 10, 3, 8, 4, 6)
    for start in range(36):
        step = x[start : start + 1]
        assert torch.equal(
            run(model, kv, [(few, start, step)], 2)[0], run(model, kv, [(all_of_them, start, step)], 2)[0]
        )


def test_position_without_a_page() -> None:
    """A position that no page holds is our own mistake and asserts."""
    with pytest.raises(AssertionError, match="position 4 has no page"):
        table(3).places(0, 5)


def test_page_table_follows_the_order_of_its_pages() -> None:
    """Positions run through the pages in the order they were given."""
    assert np.array_equal(table(3, 1).places(2, 7), [14, 15, 4, 5, 6])
