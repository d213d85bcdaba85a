"""Tokens between blocks: gathered or weighed is the same, merged is summed, and a lattice is spread."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparseflow.pruning.selectors.tokens import (
    Tokens,
    best,
    count,
    drop,
    lattice,
    mask,
    merge_alike,
    ranks,
    weighted_mean,
)


def made(b: int, front: int, s: int, c: int = 5, *, seed: int = 0) -> Tokens:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(b, front + s, c, generator=g, dtype=torch.float64)
    return Tokens(x=x, front=front, place=torch.arange(s).expand(b, -1))


def scores(b: int, s: int, *, seed: int = 1) -> Tensor:
    return torch.randn(b, s, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(
    ("share", "tokens", "left"), [(0.5, 64, 32), (1.0, 7, 7), (1e-9, 64, 1), (0.6, 1568, 941), (0.3, 1, 1)]
)
def test_a_share_is_a_count(share: float, tokens: int, left: int) -> None:
    assert count(share, tokens) == left


@settings(deadline=None, max_examples=30)
@given(s=st.integers(1, 20), seed=st.integers(0, 99), data=st.data())
def test_the_best_are_the_best_each_once_and_in_order(s: int, seed: int, data: st.DataObject) -> None:
    kept = data.draw(st.integers(1, s))
    score = scores(3, s, seed=seed)
    if seed % 2:
        score = score.round()  # Ties.
    found = best(score, kept)
    assert found.shape == (3, kept)
    assert (found.diff(dim=1) > 0).all()
    for row, chosen in zip(score, found, strict=True):
        assert sorted(row[chosen].tolist()) == sorted(row.tolist())[-kept:]


@pytest.mark.parametrize("front", [0, 1, 2])
@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("kept", [1, 5, 9])
def test_dropping_and_masking_leave_the_same(front: int, merge: bool, kept: int) -> None:
    tokens, score = made(3, front, 9), scores(3, 9)
    dropped = drop(tokens, score, kept, merge=merge)
    weight = torch.zeros_like(score).scatter(1, best(score, kept), 1.0)
    masked = mask(tokens, weight, weight.log(), weight == 1.0, merge=merge)
    assert dropped.front == masked.front == front + merge
    assert dropped.x.shape == (3, front + merge + kept, 5) and masked.x.shape == (3, front + merge + 9, 5)
    assert torch.equal(masked.place, tokens.place) and dropped.weight is None and dropped.bias is None
    assert masked.weight is not None and masked.bias is not None
    left = masked.left
    assert left is not None and torch.equal(left, weight == 1.0) and torch.equal(masked.weight, weight)
    assert torch.equal(masked.grid[left].view(3, kept, 5), dropped.grid)
    assert torch.equal(masked.place[left].view(3, kept), dropped.place)
    assert (
        torch.equal(masked.bias[:, masked.front :] == 0.0, left) and not masked.bias[:, : masked.front].any()
    )
    torch.testing.assert_close(masked.x[:, : masked.front], dropped.x[:, : masked.front])
    assert torch.equal(dropped.x[:, :front], tokens.x[:, :front])
    if merge and kept < 9:
        for at in range(3):
            torch.testing.assert_close(dropped.x[at, front], tokens.grid[at, ~left[at]].mean(0))
    elif merge:
        assert dropped.x[:, front].abs().max() < 1e-12


@pytest.mark.parametrize("merge", [False, True])
def test_twice(merge: bool) -> None:
    tokens, first, second = made(2, 1, 12), scores(2, 12), scores(2, 12, seed=2)
    once = drop(tokens, first, 8, merge=merge)
    dropped = drop(once, second.gather(1, once.place), 3, merge=merge)
    weight = torch.zeros_like(first).scatter(1, best(first, 8), 1.0)
    masked = mask(tokens, weight, weight.log(), weight == 1.0, merge=merge)
    weight = torch.zeros_like(first).scatter(1, best(second.masked_fill(weight == 0.0, -torch.inf), 3), 1.0)
    masked = mask(masked, weight, weight.log(), weight == 1.0, merge=merge)
    assert dropped.front == masked.front == 1 + 2 * merge
    torch.testing.assert_close(masked.x[:, : masked.front], dropped.x[:, : masked.front])
    assert torch.equal(masked.grid[weight == 1.0].view(2, 3, 5), dropped.grid)


def test_what_is_known_of_a_token_goes_with_it() -> None:
    tokens = Tokens(
        x=made(2, 1, 6).x, front=1, place=torch.arange(6).expand(2, -1) * 10, size=scores(2, 6),
        bias=torch.cat([torch.zeros(2, 1), scores(2, 6)], 1),
    )  # fmt: skip
    score = scores(2, 6, seed=5)
    found, chosen = drop(tokens, score, 4, merge=True), best(score, 4)
    assert tokens.size is not None and tokens.bias is not None
    assert found.size is not None and found.bias is not None
    assert torch.equal(found.place, chosen * 10) and torch.equal(found.size, tokens.size.gather(1, chosen))
    assert torch.equal(found.bias[:, 2:], tokens.bias[:, 1:].gather(1, chosen))
    assert not found.bias[:, :2].any()


def test_soft_weights_merge_what_they_lose() -> None:
    tokens, weight = made(1, 0, 4), torch.tensor([[1.0, 0.75, 0.5, 0.0]], dtype=torch.float64)
    found = mask(tokens, weight, weight.log(), weight > 0.6, merge=True)
    assert found.left is not None and found.left.tolist() == [[True, True, False, False]]
    lost = (0.25 * tokens.grid[:, 1] + 0.5 * tokens.grid[:, 2] + tokens.grid[:, 3]) / 1.75
    torch.testing.assert_close(found.x[:, 0], lost)
    lower = weight * 0.5
    again = mask(found, lower, lower.log(), found.left, merge=True)
    # Only what is lost now, not what was lost before.
    lost = (weight - lower)[..., None] * found.grid
    torch.testing.assert_close(again.x[:, 1], lost.sum(1) / (weight - lower).sum())


@pytest.mark.parametrize("front", [0, 1])
@pytest.mark.parametrize(
    ("s", "kept"), [(9, 9), (9, 8), (9, 5), (9, 4), (9, 2), (9, 1), (8, 1), (2, 1), (1, 1)]
)
def test_merging_keeps_sums_and_counts(front: int, s: int, kept: int) -> None:
    tokens = made(3, front, s)
    found = merge_alike(tokens, scores(3, s * 4).view(3, s, 4), kept)
    assert found.grid.shape == (3, kept, 5) and found.front == front
    assert found.size is not None and found.bias is not None
    torch.testing.assert_close(found.size.sum(1), torch.full((3,), float(s), dtype=torch.float64))
    torch.testing.assert_close((found.size[..., None] * found.grid).sum(1), tokens.grid.sum(1))
    assert torch.equal(found.x[:, :front], tokens.x[:, :front])
    torch.testing.assert_close(found.bias[:, front:].double(), found.size.log(), rtol=1e-6, atol=1e-6)
    assert not found.bias[:, :front].any()
    assert all(len(set(row)) == kept for row in found.place.tolist())


def test_merging_goes_on_from_sizes() -> None:
    tokens = made(2, 1, 12)
    once = merge_alike(tokens, scores(2, 48).view(2, 12, 4), 8)
    twice = merge_alike(once, scores(2, 32).view(2, 8, 4), 3)
    assert twice.size is not None and (twice.size.sum(1) == 12.0).all()
    torch.testing.assert_close((twice.size[..., None] * twice.grid).sum(1), tokens.grid.sum(1))
    for row, before in zip(twice.place.tolist(), once.place.tolist(), strict=True):
        assert set(row) <= set(before)


def test_the_most_alike_are_merged_and_the_others_are_what_they_were() -> None:
    x = torch.arange(12.0, dtype=torch.float64).view(1, 6, 2)
    keys = torch.eye(6, dtype=torch.float64)[None].clone()
    keys[0, 2] = keys[0, 5] * 3.0  # Direction is what counts.
    found = merge_alike(Tokens(x=x, front=0, place=torch.arange(6)[None]), keys, 5)
    assert found.size is not None
    # The first of turns, without what went; then the second.
    assert found.place.tolist() == [[0, 4, 1, 3, 5]] and found.size.tolist() == [[1.0, 1.0, 1.0, 1.0, 2.0]]
    torch.testing.assert_close(found.x[0, 4], (x[0, 2] + x[0, 5]) / 2)
    for at, place in enumerate([0, 4, 1, 3]):
        assert torch.equal(found.x[0, at], x[0, place])


def test_merging_is_differentiable() -> None:
    x = made(1, 1, 6).x.requires_grad_()
    keys = scores(1, 24).view(1, 6, 4)
    place = torch.arange(6)[None]
    assert torch.autograd.gradcheck(lambda x: merge_alike(Tokens(x=x, front=1, place=place), keys, 2).x, (x,))


def test_a_weighted_mean() -> None:
    x, weight = scores(2, 24).view(2, 6, 4), scores(2, 6, seed=2).abs()
    weight[0, 3] = 0.0
    expected = (x * weight[..., None]).sum(1) / weight.sum(1, keepdim=True)
    torch.testing.assert_close(weighted_mean(x, weight), expected)
    torch.testing.assert_close(weighted_mean(x, 1e3 * weight), expected)
    assert not weighted_mean(x, torch.zeros_like(weight)).any()
    learns = weight.requires_grad_()
    assert torch.autograd.gradcheck(lambda weight: weighted_mean(x, weight), (learns,))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_mean_of_many_large_features_does_not_overflow(dtype: torch.dtype) -> None:
    x, weight = torch.full((1, 4000, 2), 3e4, dtype=dtype), torch.ones(1, 4000)
    found = weighted_mean(x, weight)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), x[:, 0].float(), rtol=1e-2, atol=0.0)


@pytest.mark.parametrize("tokens", [1, 2, 6, 64, 1568, 25088])
def test_a_lattice_has_every_rank_once(tokens: int) -> None:
    found = lattice(tokens)
    assert found.dtype == torch.int64
    assert torch.equal(found.sort().values, torch.arange(tokens))
    assert torch.equal(found, lattice(tokens))


def test_ranks() -> None:
    assert ranks(torch.tensor([0.5, -1.0, 3.0, 0.6])).tolist() == [1, 0, 3, 2]
    assert ranks(torch.zeros(0)).dtype == torch.int64


@pytest.mark.parametrize("grid", [(8, 14, 14), (16, 7, 7), (8, 8, 8)])
def test_any_number_of_a_lattice_is_spread(grid: tuple[int, int, int]) -> None:
    tokens = grid[0] * grid[1] * grid[2]
    score = lattice(tokens)[None]
    for kept in range(1, tokens, max(1, tokens // 50)):
        chosen = best(score, kept)[0]
        # Along the tokens, gaps are of three sizes at most, the largest the sum of the others (Steinhaus).
        gaps = sorted(set(chosen.diff().tolist()))
        assert len(gaps) <= 3 and (len(gaps) < 3 or gaps[2] == gaps[0] + gaps[1]), kept
        left = torch.zeros(tokens).index_fill(0, chosen, 1.0).view(grid)
        # Each frame, and each row and column of patches over all frames. By chance it would be twice as much.
        for over in ((1, 2), (0, 2), (0, 1)):
            slices = left.sum(over)
            assert (slices - slices.mean()).abs().max() <= 7.0, (kept, over)


def test_merging_very_many_does_not_overflow_float16() -> None:
    x = torch.full((1, 2048, 1), 150.0, dtype=torch.float16)
    tokens = Tokens(x=x, front=0, place=torch.arange(2048)[None])
    keys = torch.randn(1, 2048, 4, generator=torch.Generator().manual_seed(0)).half()
    found = merge_alike(tokens, keys, 2)
    assert found.x.dtype == torch.float16 and found.x.flatten().tolist() == [150.0, 150.0]
    assert found.size is not None and float(found.size.sum()) == 2048.0
