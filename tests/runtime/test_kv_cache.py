"""Paged keys and values: a backbone stepped through pages says what it says of the whole sequence."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from breeze_rtc.models.attention import Ragged
from breeze_rtc.models.backbone import Backbone
from breeze_rtc.models.presets import tiny
from breeze_rtc.runtime.kv_cache import KVRow, PagedKV, PageTable, Prefix, PrefixPages


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


# ---- prompts ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def prompts(model: Backbone, kv: PagedKV, rows: list[tuple[PageTable, int, Tensor]]) -> list[Tensor]:
    """One step of pieces of prompts; rows: (table, start, x (T, hidden))."""
    counts = [len(x) for _, _, x in rows]
    total, longest = (-(-n // 16) * 16 for n in (sum(counts), max(counts)))
    ragged = Ragged.of(counts, total, len(rows), longest)
    pads = torch.full((total - sum(counts), model.config.block.hidden), 1e3, dtype=torch.float64)
    x = torch.cat([*[x for _, _, x in rows], pads])
    pieces = [KVRow(pages, start, len(piece)) for pages, start, piece in rows]
    places = kv.prompt(pieces, ragged, -(-max(row.start + row.count for row in pieces) // 16) * 16)
    cache = kv.prompt_cache(places.read, places.write, places.starts, ragged)
    positions = places.starts[ragged.back // longest] + ragged.offsets
    return list(model(x[None], positions[None], cache)[0, : sum(counts)].split(counts))


def test_prompts_of_unequal_rows_in_any_pieces() -> None:
    """Three prompts run side by side, in pieces that begin at different positions, are each the whole, to the bit."""
    model = backbone(None)
    xs = [torch.randn(n, 32, dtype=torch.float64) for n in (5, 40, 23)]
    alone = []
    for x in xs:
        kv = paged(model, pages=20)
        alone.append(prompts(model, kv, [(table(*range(11)), 0, x)])[0])
        with torch.no_grad():
            torch.testing.assert_close(alone[-1], model(x[None], torch.arange(len(x))[None])[0], atol=1e-6, rtol=1e-6)
    kv = paged(model, pages=20)
    kv.pool.fill_(float("nan"))
    kv.pool[:, :, :, kv.zero] = 0
    tables = [table(4, 0), table(*range(8, 18)), table(1, 19, 3, 5, 6, 7)]
    first = prompts(model, kv, [(tables[1], 0, xs[1][:17]), (tables[2], 0, xs[2][:2])])
    second = prompts(model, kv, [(tables[0], 0, xs[0]), (tables[2], 2, xs[2][2:]), (tables[1], 17, xs[1][17:])])
    assert torch.equal(second[0], alone[0])
    assert torch.equal(torch.cat((first[0], second[2])), alone[1])
    assert torch.equal(torch.cat((first[1], second[1])), alone[2])


# ---- what rows have in common ----------------------------------------------------------------------------------------


def test_a_row_goes_on_behind_what_it_shares() -> None:
    """Two rows begin with the same six positions, which end within a page, and go on differently: each says what it
    says by itself, and the shared positions stay as they were."""
    model = backbone(None)
    kv = paged(model, pages=12)
    pages = PrefixPages(range(8, 12), 4)
    prefix = pages.take(6)
    assert prefix is not None
    x = torch.randn(6, 32, dtype=torch.float64)
    prompts(model, kv, [(PageTable(4, prefix=prefix), 0, x)])
    before = kv.pool[:, :, :, prefix.places].clone()
    rows = [(PageTable(4, prefix=prefix), torch.randn(n, 32, dtype=torch.float64)) for n in (3, 9)]
    rows[0][0].extend((0,))
    rows[1][0].extend((5, 2, 7))
    found = prompts(model, kv, [(pages_of, 6, more) for pages_of, more in rows])
    last = [torch.randn(1, 32, dtype=torch.float64) for _ in rows]
    stepped = run(model, kv, [(rows[0][0], 9, last[0]), (rows[1][0], 15, last[1])], 4)
    with torch.no_grad():
        for index, (_, more) in enumerate(rows):
            whole = torch.cat((x, more, last[index]))
            expected = model(whole[None], torch.arange(len(whole))[None])[0]
            torch.testing.assert_close(found[index], expected[6:-1], atol=1e-6, rtol=1e-6)
            torch.testing.assert_close(stepped[index], expected[-1:], atol=1e-6, rtol=1e-6)
    assert torch.equal(kv.pool[:, :, :, prefix.places], before)


def test_no_room_for_a_prefix() -> None:
    """What does not fit is refused whole, and fits when another is gone."""
    pages = PrefixPages(range(10, 13), 4)
    first = pages.take(8)
    assert first is not None
    assert pages.take(5) is None
    assert pages.free == 1
    pages.let_go(first)
    assert pages.take(12) is not None
    assert pages.free == 0


class Sharing(RuleBasedStateMachine):
    """Streams that open, grow, close and are cancelled at any time, with voices that come and go, over one pool."""

    POOL, SHARED, TOKENS = 24, 8, 4

    def __init__(self) -> None:
        super().__init__()
        self.own = list(range(self.POOL))
        self.pages = PrefixPages(range(self.POOL, self.POOL + self.SHARED), self.TOKENS)
        # Voices in the store; streams with their pages and, per row, its table and length.
        self.voices: list[Prefix] = []
        self.streams: list[tuple[list[int], list[PageTable]]] = []

    @rule(positions=st.integers(1, 14))
    def store_a_voice(self, positions: int) -> None:
        before = self.pages.free
        prefix = self.pages.take(positions)
        assert (prefix is None) == (-(-positions // self.TOKENS) > before)
        if prefix is not None:
            assert prefix.positions == positions
            self.voices.append(prefix)

    @precondition(lambda self: self.voices)
    @rule(data=st.data())
    def forget_a_voice(self, data: st.DataObject) -> None:
        self.pages.let_go(self.voices.pop(data.draw(st.integers(0, len(self.voices) - 1))))

    @rule(data=st.data(), rows=st.integers(1, 3))
    def open_a_stream(self, data: st.DataObject, rows: int) -> None:
        tables = []
        for _ in range(rows):
            voice = data.draw(st.sampled_from([None, *self.voices]))
            if voice is not None:
                self.pages.hold(voice)
            tables.append(PageTable(self.TOKENS, prefix=voice))
        self.streams.append(([], tables))

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        pages, tables = data.draw(st.sampled_from(self.streams))
        if len(self.own) >= len(tables):
            for each in tables:
                pages.append(self.own.pop())
                each.extend((pages[-1],))

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def close_or_cancel(self, data: st.DataObject) -> None:
        pages, tables = self.streams.pop(data.draw(st.integers(0, len(self.streams) - 1)))
        self.own += pages
        for each in tables:
            if each.prefix is not None:
                self.pages.let_go(each.prefix)

    @invariant()
    def nobody_writes_where_another_reads(self) -> None:
        """The tokens that a row may still write belong to it alone, whoever reads the shared ones."""
        shared = {place for voice in self._held() for place in voice.places.tolist()}
        written: list[int] = []
        for _, tables in self.streams:
            for each in tables:
                start = 0 if each.prefix is None else each.prefix.positions
                assert each.places(0, start).tolist() == ([] if each.prefix is None else each.prefix.places.tolist())
                written += each.places(start, each.capacity).tolist()
        assert len(set(written)) == len(written)
        assert not shared & set(written)

    @invariant()
    def pages_are_conserved(self) -> None:
        held = [page for voice in self._held() for page in voice.pages]
        assert len(set(held)) == len(held), "a page of two prefixes"
        assert len(held) + self.pages.free == self.SHARED
        assert len(self.own) + sum(len(pages) for pages, _ in self.streams) == self.POOL

    def _held(self) -> list[Prefix]:
        voices = {id(voice): voice for voice in self.voices}
        for _, tables in self.streams:
            voices |= {id(each.prefix): each.prefix for each in tables if each.prefix is not None}
        return list(voices.values())

    def teardown(self) -> None:
        while self.streams:
            for each in self.streams.pop()[1]:
                if each.prefix is not None:
                    self.pages.let_go(each.prefix)
        while self.voices:
            self.pages.let_go(self.voices.pop())
        assert self.pages.free == self.SHARED, "a page has leaked"


Sharing.TestCase.settings = settings(deadline=None, suppress_health_check=list(HealthCheck), stateful_step_count=40)
TestSharing = Sharing.TestCase
