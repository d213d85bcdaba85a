"""Ranking losses.

Notation: g groups of up to s schedules of one task. Scores, labels and weights are [g, s]. A label is the
task's lowest latency over the schedule's latency, in (0, 1]; a weight of 0 is padding. The loss of a group is
the weighted mean over its pairs i, j with label i > label j; the total loss is the mean over groups with
pairs.

==========  ==============================  ==========================================================
loss        cost of a pair                  weight of a pair, times weight i * weight j
==========  ==============================  ==========================================================
margin      max(0, 1 - d)                   1, as in WACO (ASPLOS 2023)
rank        log2(1 + exp(-d))               label i - label j, with labels relative to the task's best as
                                            in TLP (ASPLOS 2023), so that tasks can be mixed
lambda      log2(1 + exp(-d))               (2**label i - 2**label j) |1/D i - 1/D j|, the change of
                                            NDCG if i and j swap: LambdaRank (Burges et al. 2006)
==========  ==============================  ==========================================================

d = score i - score j, and D = log2(1 + rank by score). Pairs are processed in blocks and the gradient is
computed with the loss, so memory is bounded for any s.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from sparseflow.core.checks import check_one_of
from sparseflow.errors import InputError

LossKind = Literal["margin", "rank", "lambda"]
LOSSES: tuple[str, ...] = get_args(LossKind)

_MAX_PAIRS = 2**21
"""Approximate number of pairs in memory."""

_LN2 = 0.6931471805599453


def ranking_loss(kind: LossKind, scores: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Compute the loss of one batch; 0 if no group has a pair.

    Args:
        kind: One of `LOSSES`.
        scores: Shape [g, s], floating point.
        labels: Shape [g, s], in (0, 1].
        weights: Shape [g, s], at least 0; by default 1.

    Returns:
        A scalar with a gradient for `scores`.

    Raises:
        InputError: The loss is unknown, or the shapes differ.
    """
    check_one_of(LOSSES, kind=kind)
    weights = torch.ones_like(scores) if weights is None else weights.to(scores.dtype)
    if scores.ndim != 2 or not scores.shape == labels.shape == weights.shape:
        raise InputError(
            f"scores {tuple(scores.shape)}, labels {tuple(labels.shape)} and weights {tuple(weights.shape)} "
            "must have one shape [groups, schedules]"
        )
    loss = _PairwiseLoss.apply(scores, labels.to(scores.dtype), weights, kind)
    assert isinstance(loss, Tensor)
    return loss


def expected_pick(scores: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Compute the expected label of a pick with softmax(score) probabilities, averaged over groups.

    This is a smooth top-1 score; pairwise losses depend little on the one best schedule among many.

    Args:
        scores: Shape [g, s], floating point.
        labels: Shape [g, s], in (0, 1].
        weights: Shape [g, s], 0 for padding; by default none is padding.

    Returns:
        A scalar with a gradient for `scores`, at most 1; 0 without schedules.
    """
    present = torch.ones_like(labels, dtype=torch.bool) if weights is None else weights > 0
    odds = torch.softmax(scores.masked_fill(~present, torch.finfo(scores.dtype).min), 1)
    expected = (odds * labels * present).sum(1)
    return expected.sum() / present.any(1).sum().clamp(min=1)


class _PairwiseLoss(torch.autograd.Function):
    """(scores, labels, weights, kind) -> loss; the gradient is computed in the forward pass."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, labels: Tensor, weights: Tensor, kind: str) -> Tensor:
        groups, schedules = scores.shape
        gradient = torch.zeros_like(scores)
        cost, total = scores.new_zeros(groups), scores.new_zeros(groups)
        discounts = _compute_discounts(scores, weights) if kind == "lambda" else None
        groups_at_once = max(1, _MAX_PAIRS // max(1, schedules * schedules))
        rows = max(1, min(schedules, _MAX_PAIRS // max(1, schedules)))
        for first in range(0, groups, groups_at_once):
            chunk = slice(first, first + groups_at_once)
            s, label, weight = scores[chunk], labels[chunk], weights[chunk]
            for start in range(0, schedules, rows):
                row = slice(start, start + rows)
                better = label[:, row, None] > label[:, None, :]
                counts = better * weight[:, row, None] * weight[:, None, :]
                if kind == "rank":
                    counts = counts * (label[:, row, None] - label[:, None, :])
                elif discounts is not None:
                    gain, discount = label.exp2(), discounts[chunk]
                    counts = counts * (gain[:, row, None] - gain[:, None, :])
                    counts = counts * (discount[:, row, None] - discount[:, None, :]).abs()
                difference = s[:, row, None] - s[:, None, :]
                if kind == "margin":
                    costs, slope = (1.0 - difference).clamp(min=0.0), -(difference < 1.0).to(s.dtype)
                else:
                    costs, slope = functional.softplus(-difference) / _LN2, -torch.sigmoid(-difference) / _LN2
                cost[chunk] += (counts * costs).sum((1, 2))
                total[chunk] += counts.sum((1, 2))
                slope = slope * counts
                gradient[chunk, row] += slope.sum(2)
                gradient[chunk] -= slope.sum(1)
        group_weights = torch.where(total > 0, 1.0 / total, 0.0) / (total > 0).sum().clamp(min=1)
        ctx.save_for_backward(gradient * group_weights[:, None])
        return (cost * group_weights).sum()

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator's result is untyped
        ctx: Any, upstream: Tensor
    ) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return upstream * gradient, None, None, None


def _compute_discounts(scores: Tensor, weights: Tensor) -> Tensor:
    """Compute 1 / log2(1 + rank by score), shape [g, s]; padding is ranked last."""
    masked_scores = scores.masked_fill(weights <= 0, -torch.inf)
    rank = torch.empty_like(masked_scores)
    ranks = torch.arange(
        2, masked_scores.shape[1] + 2, dtype=masked_scores.dtype, device=masked_scores.device
    ).expand_as(masked_scores)
    return (
        rank.scatter_(1, masked_scores.argsort(dim=1, descending=True, stable=True), ranks)
        .log2()
        .reciprocal()
    )
