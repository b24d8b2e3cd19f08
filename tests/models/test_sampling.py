"""Sampling: the laws of the order of operations, and noise that depends on the request alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from breeze_rtc.errors import BadSampling
from breeze_rtc.models.sampling import RowSampling, Sampling, choose, gumbel, penalise
from breeze_rtc.runtime.frame_steps import Batch, BatchRow, batch_of


def rows_of(samplings: list[Sampling], columns: int) -> RowSampling:
    """The sampling values of codebook 0 of rows with so many logits each."""
    rows = [BatchRow(slot, 0, 0, sampling) for slot, sampling in enumerate(samplings)]
    ints, floats, kind = batch_of(rows, columns, depth=False)
    return Batch(ints, floats).sampling(kind)


def noise(rows: int, columns: int, *, seed: int = 5, frames: int = 0) -> Tensor:
    seeds = torch.full((rows,), seed)
    return gumbel(seeds, torch.arange(rows) + frames, torch.zeros(1, dtype=torch.int64), columns)[:, 0]


def draw(logits: Tensor, sampling: Sampling, draws: int) -> Tensor:
    """Codes of `draws` frames with the same logits (V,)."""
    rows = rows_of([sampling] * draws, len(logits))
    return choose(logits.expand(draws, -1), noise(draws, len(logits)), rows)


def test_noise_is_gumbel() -> None:
    """Mean, variance and the distribution function are those of a standard Gumbel variable."""
    x = noise(400, 1000).double()
    assert x.mean() == pytest.approx(0.5772, abs=0.01)
    assert x.var() == pytest.approx(math.pi**2 / 6, abs=0.02)
    for value in (-1.0, 0.0, 1.0, 3.0):
        assert (x <= value).double().mean() == pytest.approx(math.exp(-math.exp(-value)), abs=0.004)
    assert x.isfinite().all()


def test_noise_depends_on_each_coordinate_and_on_nothing_else() -> None:
    """Seed, frame, codebook and column each change it; row, batch and what is drawn beside it do not."""
    seeds, frames = torch.tensor([1, 2, 1, 1]), torch.tensor([7, 7, 8, 7])
    x = gumbel(seeds, frames, torch.arange(3), 50)
    assert torch.equal(x[0], x[3])
    assert torch.equal(x[2], gumbel(seeds[2:3], frames[2:3], torch.arange(3), 50)[0])
    assert torch.equal(x[:, 2], gumbel(seeds, frames, torch.tensor([2]), 50)[:, 0])
    assert torch.equal(x[..., :20], gumbel(seeds, frames, torch.arange(3), 20))
    flat = torch.stack((x[0, 0], x[1, 0], x[2, 0], x[0, 1]))
    assert len(flat.unique()) == flat.numel()


def test_neighbouring_frames_are_independent() -> None:
    """Noise of consecutive frames, codebooks and seeds is uncorrelated."""
    frame = noise(200, 500)
    assert abs(torch.corrcoef(torch.stack((frame[:-1].ravel(), frame[1:].ravel())))[0, 1]) < 0.01
    assert abs(torch.corrcoef(torch.stack((frame.ravel(), noise(200, 500, seed=6).ravel())))[0, 1]) < 0.01
    books = gumbel(torch.tensor([3]), torch.tensor([9]), torch.arange(200), 500)[0]
    assert abs(torch.corrcoef(torch.stack((books[:-1].ravel(), books[1:].ravel())))[0, 1]) < 0.01


def test_draws_follow_the_softmax() -> None:
    """Frequencies over many frames are the probabilities at the temperature asked."""
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    codes = draw(logits, Sampling(temperature=0.7, top_k=0), 20_000)
    found = torch.bincount(codes, minlength=4) / len(codes)
    torch.testing.assert_close(found, (logits / 0.7).softmax(0), atol=0.012, rtol=0)


def test_temperature_zero_is_the_likeliest() -> None:
    """A greedy row takes the argmax, also beside a row that samples."""
    logits = torch.tensor([[0.0, 3.0, 2.9], [0.0, 3.0, 2.9]])
    rows = rows_of([Sampling(temperature=0), Sampling(temperature=5.0, top_k=0)], 3)
    greedy = [int(choose(logits, noise(2, 3, frames=n), rows)[0]) for n in range(50)]
    assert set(greedy) == {1}


def test_top_k_keeps_equals_of_the_last() -> None:
    """k = 2 with three codes equal to the second: four may be drawn, and no other."""
    codes = draw(torch.tensor([5.0, 1.0, 4.0, 4.0, 4.0, 3.9]), Sampling(temperature=2.0, top_k=2), 2_000)
    assert set(codes.tolist()) == {0, 2, 3, 4}


def test_top_k_is_each_rows_own() -> None:
    """Rows of one step keep their own limits."""
    logits = torch.tensor([3.0, 2.9, 2.8, 2.7]).expand(2, -1)
    rows = rows_of([Sampling(top_k=1), Sampling(top_k=3)], 4)
    seen: list[set[int]] = [set(), set()]
    for n in range(300):
        for row, code in enumerate(choose(logits, noise(2, 4, frames=2 * n), rows).tolist()):
            seen[row].add(code)
    assert seen == [{0}, {0, 1, 2}]


def test_top_p_is_shifted() -> None:
    """A code stays if those before it sum to less than p; the first stays whatever p is."""
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert set(draw(logits, Sampling(temperature=1.0, top_k=0, top_p=0.55), 2_000).tolist()) == {0, 1}
    assert set(draw(logits, Sampling(temperature=1.0, top_k=0, top_p=0.01), 200).tolist()) == {0}


def test_top_p_within_top_k_needs_no_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the k best, those whose probabilities among the k reach p; a row beside it without that limit loses none."""
    logits = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05]).log()
    sampling = Sampling(temperature=1.0, top_k=3, top_p=0.6)
    monkeypatch.setattr(Tensor, "sort", lambda *_: pytest.fail("all codes were sorted"))
    # 0.47, 0.35 and 0.18 of the three: the first two reach 0.6.
    assert set(draw(logits, sampling, 500).tolist()) == {0, 1}
    rows = rows_of([sampling, Sampling(temperature=1.0, top_k=4, top_p=1.0)] * 500, 5)
    codes = choose(logits.expand(1000, -1), noise(1000, 5), rows)
    assert set(codes[::2].tolist()) == {0, 1}
    assert set(codes[1::2].tolist()) == {0, 1, 2, 3}


def test_no_top_p_is_no_top_p_beside_one() -> None:
    """Probabilities that sum to one but for rounding cut nothing off a row that has no such limit."""
    logits = torch.randn(4, 2051, generator=torch.Generator().manual_seed(1)) * 6
    rows = rows_of([Sampling(temperature=1.0, top_k=0, top_p=p) for p in (1.0, 0.9, 1.0, 1.0)], 2051)
    unlikely = torch.where(torch.arange(2051) == logits.argmin(-1, keepdim=True), 1e6, 0.0)
    codes = choose(logits, unlikely, rows)
    assert codes[0] == logits[0].argmin()
    assert torch.equal(codes[2:], logits[2:].argmin(-1))
    assert codes[1] != logits[1].argmin()


def test_top_p_follows_temperature() -> None:
    """Probabilities are taken after the temperature: a colder row keeps fewer."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert set(draw(logits, Sampling(temperature=0.2, top_k=0, top_p=0.75), 1_000).tolist()) == {0}
    assert set(draw(logits, Sampling(temperature=1.0, top_k=0, top_p=0.75), 1_000).tolist()) == {0, 1, 2}


def test_penalty_pulls_towards_zero_from_above_and_away_from_below() -> None:
    """Positive logits of used codes are divided, negative ones multiplied; others stay."""
    out = penalise(torch.tensor([[2.0, -2.0, 2.0]]), torch.tensor([[True, True, False]]), torch.tensor([[1.25]]))
    torch.testing.assert_close(out, torch.tensor([[1.6, -2.5, 2.0]]))


def test_reserved_ids_are_never_drawn() -> None:
    """-inf stays -inf through temperature, limits and noise."""
    logits = torch.tensor([0.0, float("-inf"), 0.0])
    assert 1 not in draw(logits, Sampling(temperature=10.0, top_k=0, top_p=0.99), 2_000).tolist()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("depth_temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("repetition_penalty", 0.9),
        ("cfg_scale", 0.0),
        ("cfg_scale", math.nan),
    ],
)
def test_values_out_of_range(name: str, value: float) -> None:
    """A value that is not finite or out of range is named."""
    with pytest.raises(BadSampling, match=name):
        Sampling(**{name: value})  # type: ignore[arg-type]
