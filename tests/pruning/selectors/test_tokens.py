"""Dropping, masking and merging of tokens, and token orders."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparseflow.pruning.selectors.tokens import (
    TokenState,
    compute_weighted_mean,
    count_kept_tokens,
    drop_tokens,
    make_uniform_order,
    mask_tokens,
    rank_scores,
    select_top_tokens,
)
from sparseflow.pruning.selectors.tome import merge_similar_tokens


def make_tokens(b: int, front: int, s: int, c: int = 5, *, seed: int = 0) -> TokenState:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(b, front + s, c, generator=g, dtype=torch.float64)
    return TokenState(x=x, num_prefix=front, positions=torch.arange(s).expand(b, -1))


def scores(b: int, s: int, *, seed: int = 1) -> Tensor:
    return torch.randn(b, s, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(
    ("share", "tokens", "num_kept"),
    [(0.5, 64, 32), (1.0, 7, 7), (1e-9, 64, 1), (0.6, 1568, 941), (0.3, 1, 1)],
)
def test_count_kept_tokens_rounds_share(share: float, tokens: int, num_kept: int) -> None:
    assert count_kept_tokens(share, tokens) == num_kept


@settings(deadline=None, max_examples=30)
@given(s=st.integers(1, 20), seed=st.integers(0, 99), data=st.data())
def test_select_top_tokens_returns_sorted_top_scores(s: int, seed: int, data: st.DataObject) -> None:
    num_kept = data.draw(st.integers(1, s))
    score = scores(3, s, seed=seed)
    if seed % 2:
        score = score.round()  # Ties.
    indices = select_top_tokens(score, num_kept)
    assert indices.shape == (3, num_kept)
    assert (indices.diff(dim=1) > 0).all()
    for row, selected in zip(score, indices, strict=True):
        assert sorted(row[selected].tolist()) == sorted(row.tolist())[-num_kept:]


@pytest.mark.parametrize("front", [0, 1, 2])
@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("retained", [1, 5, 9])
def test_dropping_equals_masking(front: int, merge: bool, retained: int) -> None:
    tokens, score = make_tokens(3, front, 9), scores(3, 9)
    dropped = drop_tokens(tokens, score, retained, merge=merge)
    weight = torch.zeros_like(score).scatter(1, select_top_tokens(score, retained), 1.0)
    masked = mask_tokens(tokens, weight, weight.log(), weight == 1.0, merge=merge)
    assert dropped.num_prefix == masked.num_prefix == front + merge
    assert dropped.x.shape == (3, front + merge + retained, 5) and masked.x.shape == (3, front + merge + 9, 5)
    assert (
        torch.equal(masked.positions, tokens.positions)
        and dropped.weight is None
        and dropped.attn_bias is None
    )
    assert masked.weight is not None and masked.attn_bias is not None
    remaining = masked.retained
    assert (
        remaining is not None and torch.equal(remaining, weight == 1.0) and torch.equal(masked.weight, weight)
    )
    assert torch.equal(masked.grid[remaining].view(3, retained, 5), dropped.grid)
    assert torch.equal(masked.positions[remaining].view(3, retained), dropped.positions)
    assert (
        torch.equal(masked.attn_bias[:, masked.num_prefix :] == 0.0, remaining)
        and not masked.attn_bias[:, : masked.num_prefix].any()
    )
    torch.testing.assert_close(masked.x[:, : masked.num_prefix], dropped.x[:, : masked.num_prefix])
    assert torch.equal(dropped.x[:, :front], tokens.x[:, :front])
    if merge and retained < 9:
        for index in range(3):
            torch.testing.assert_close(dropped.x[index, front], tokens.grid[index, ~remaining[index]].mean(0))
    elif merge:
        assert dropped.x[:, front].abs().max() < 1e-12


@pytest.mark.parametrize("merge", [False, True])
def test_dropping_twice_equals_masking_twice(merge: bool) -> None:
    tokens, first, second = make_tokens(2, 1, 12), scores(2, 12), scores(2, 12, seed=2)
    once = drop_tokens(tokens, first, 8, merge=merge)
    dropped = drop_tokens(once, second.gather(1, once.positions), 3, merge=merge)
    weight = torch.zeros_like(first).scatter(1, select_top_tokens(first, 8), 1.0)
    masked = mask_tokens(tokens, weight, weight.log(), weight == 1.0, merge=merge)
    weight = torch.zeros_like(first).scatter(
        1, select_top_tokens(second.masked_fill(weight == 0.0, -torch.inf), 3), 1.0
    )
    masked = mask_tokens(masked, weight, weight.log(), weight == 1.0, merge=merge)
    assert dropped.num_prefix == masked.num_prefix == 1 + 2 * merge
    torch.testing.assert_close(masked.x[:, : masked.num_prefix], dropped.x[:, : masked.num_prefix])
    assert torch.equal(masked.grid[weight == 1.0].view(2, 3, 5), dropped.grid)


def test_drop_tokens_gathers_all_fields() -> None:
    tokens = TokenState(
        x=make_tokens(2, 1, 6).x, num_prefix=1, positions=torch.arange(6).expand(2, -1) * 10,
        size=scores(2, 6), attn_bias=torch.cat([torch.zeros(2, 1), scores(2, 6)], 1),
    )  # fmt: skip
    score = scores(2, 6, seed=5)
    dropped, selected = drop_tokens(tokens, score, 4, merge=True), select_top_tokens(score, 4)
    assert tokens.size is not None and tokens.attn_bias is not None
    assert dropped.size is not None and dropped.attn_bias is not None
    assert torch.equal(dropped.positions, selected * 10) and torch.equal(
        dropped.size, tokens.size.gather(1, selected)
    )
    assert torch.equal(dropped.attn_bias[:, 2:], tokens.attn_bias[:, 1:].gather(1, selected))
    assert not dropped.attn_bias[:, :2].any()


def test_mask_tokens_merges_removed_weight() -> None:
    tokens, weight = make_tokens(1, 0, 4), torch.tensor([[1.0, 0.75, 0.5, 0.0]], dtype=torch.float64)
    masked = mask_tokens(tokens, weight, weight.log(), weight > 0.6, merge=True)
    assert masked.retained is not None and masked.retained.tolist() == [[True, True, False, False]]
    lost = (0.25 * tokens.grid[:, 1] + 0.5 * tokens.grid[:, 2] + tokens.grid[:, 3]) / 1.75
    torch.testing.assert_close(masked.x[:, 0], lost)
    lower = weight * 0.5
    remasked = mask_tokens(masked, lower, lower.log(), masked.retained, merge=True)
    # The new token is the mean of the weight that this stage removes.
    lost = (weight - lower)[..., None] * masked.grid
    torch.testing.assert_close(remasked.x[:, 1], lost.sum(1) / (weight - lower).sum())


@pytest.mark.parametrize("front", [0, 1])
@pytest.mark.parametrize(
    ("s", "retained"), [(9, 9), (9, 8), (9, 5), (9, 4), (9, 2), (9, 1), (8, 1), (2, 1), (1, 1)]
)
def test_merging_keeps_sums_and_counts(front: int, s: int, retained: int) -> None:
    tokens = make_tokens(3, front, s)
    merged = merge_similar_tokens(tokens, scores(3, s * 4).view(3, s, 4), retained)
    assert merged.grid.shape == (3, retained, 5) and merged.num_prefix == front
    assert merged.size is not None and merged.attn_bias is not None
    torch.testing.assert_close(merged.size.sum(1), torch.full((3,), float(s), dtype=torch.float64))
    torch.testing.assert_close((merged.size[..., None] * merged.grid).sum(1), tokens.grid.sum(1))
    assert torch.equal(merged.x[:, :front], tokens.x[:, :front])
    torch.testing.assert_close(merged.attn_bias[:, front:].double(), merged.size.log(), rtol=1e-6, atol=1e-6)
    assert not merged.attn_bias[:, :front].any()
    assert all(len(set(row)) == retained for row in merged.positions.tolist())


def test_merging_twice_adds_sizes() -> None:
    tokens = make_tokens(2, 1, 12)
    once = merge_similar_tokens(tokens, scores(2, 48).view(2, 12, 4), 8)
    second = merge_similar_tokens(once, scores(2, 32).view(2, 8, 4), 3)
    assert second.size is not None and (second.size.sum(1) == 12.0).all()
    torch.testing.assert_close((second.size[..., None] * second.grid).sum(1), tokens.grid.sum(1))
    for row, before in zip(second.positions.tolist(), once.positions.tolist(), strict=True):
        assert set(row) <= set(before)


def test_only_most_similar_tokens_are_merged() -> None:
    x = torch.arange(12.0, dtype=torch.float64).view(1, 6, 2)
    keys = torch.eye(6, dtype=torch.float64)[None].clone()
    keys[0, 2] = keys[0, 5] * 3.0  # Only the direction matters.
    merged = merge_similar_tokens(TokenState(x=x, num_prefix=0, positions=torch.arange(6)[None]), keys, 5)
    assert merged.size is not None
    # Even positions without the merged token, then odd positions.
    assert merged.positions.tolist() == [[0, 4, 1, 3, 5]] and merged.size.tolist() == [
        [1.0, 1.0, 1.0, 1.0, 2.0]
    ]
    torch.testing.assert_close(merged.x[0, 4], (x[0, 2] + x[0, 5]) / 2)
    for index, position in enumerate([0, 4, 1, 3]):
        assert torch.equal(merged.x[0, index], x[0, position])


def test_merging_is_differentiable() -> None:
    x = make_tokens(1, 1, 6).x.requires_grad_()
    keys = scores(1, 24).view(1, 6, 4)
    position = torch.arange(6)[None]
    assert torch.autograd.gradcheck(
        lambda x: merge_similar_tokens(TokenState(x=x, num_prefix=1, positions=position), keys, 2).x, (x,)
    )


def test_weighted_mean_ignores_scale_of_weights() -> None:
    x, weight = scores(2, 24).view(2, 6, 4), scores(2, 6, seed=2).abs()
    weight[0, 3] = 0.0
    expected = (x * weight[..., None]).sum(1) / weight.sum(1, keepdim=True)
    torch.testing.assert_close(compute_weighted_mean(x, weight), expected)
    torch.testing.assert_close(compute_weighted_mean(x, 1e3 * weight), expected)
    assert not compute_weighted_mean(x, torch.zeros_like(weight)).any()
    differentiable_weight = weight.requires_grad_()
    assert torch.autograd.gradcheck(lambda weight: compute_weighted_mean(x, weight), (differentiable_weight,))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weighted_mean_of_many_large_features_does_not_overflow(dtype: torch.dtype) -> None:
    x, weight = torch.full((1, 4000, 2), 3e4, dtype=dtype), torch.ones(1, 4000)
    mean = compute_weighted_mean(x, weight)
    assert mean.dtype == dtype
    torch.testing.assert_close(mean.float(), x[:, 0].float(), rtol=1e-2, atol=0.0)


@pytest.mark.parametrize("num_tokens", [1, 2, 6, 64, 1568, 25088])
def test_uniform_order_is_a_permutation(num_tokens: int) -> None:
    order = make_uniform_order(num_tokens)
    assert order.dtype == torch.int64
    assert torch.equal(order.sort().values, torch.arange(num_tokens))
    assert torch.equal(order, make_uniform_order(num_tokens))


def test_rank_scores_matches_sorting() -> None:
    assert rank_scores(torch.tensor([0.5, -1.0, 3.0, 0.6])).tolist() == [1, 0, 3, 2]
    assert rank_scores(torch.zeros(0)).dtype == torch.int64


@pytest.mark.parametrize("grid", [(8, 14, 14), (16, 7, 7), (8, 8, 8)])
def test_uniform_order_spreads_any_number_of_tokens(grid: tuple[int, int, int]) -> None:
    tokens = grid[0] * grid[1] * grid[2]
    score = make_uniform_order(tokens)[None]
    for retained in range(1, tokens, max(1, tokens // 50)):
        selected = select_top_tokens(score, retained)[0]
        # Along the tokens, gaps are of three sizes at most, the largest the sum of the others (Steinhaus).
        gaps = sorted(set(selected.diff().tolist()))
        assert len(gaps) <= 3 and (len(gaps) < 3 or gaps[2] == gaps[0] + gaps[1]), retained
        remaining = torch.zeros(tokens).index_fill(0, selected, 1.0).view(grid)
        # Each frame, and each row and column over all frames; random tokens would deviate twice as much.
        for over in ((1, 2), (0, 2), (0, 1)):
            slices = remaining.sum(over)
            assert (slices - slices.mean()).abs().max() <= 7.0, (retained, over)


def test_merging_very_many_does_not_overflow_float16() -> None:
    x = torch.full((1, 2048, 1), 150.0, dtype=torch.float16)
    tokens = TokenState(x=x, num_prefix=0, positions=torch.arange(2048)[None])
    keys = torch.randn(1, 2048, 4, generator=torch.Generator().manual_seed(0)).half()
    merged = merge_similar_tokens(tokens, keys, 2)
    assert merged.x.dtype == torch.float16 and merged.x.flatten().tolist() == [150.0, 150.0]
    assert merged.size is not None and float(merged.size.sum()) == 2048.0
