"""Losses of rankings: how far scores are from the order of labels, task by task.

Notation: g groups, each of up to s schedules of one task. Scores, labels and weights are (g, s); a label is
the task's lowest latency over the schedule's, in (0, 1], and a weight of 0 says that there is no schedule. A
group's loss is the mean over its pairs i, j with label i > label j, and the loss is the mean over groups that
have any.

==========  ==============================  ==========================================================
loss        a pair costs                    and counts, besides weight i * weight j
==========  ==============================  ==========================================================
margin      max(0, 1 - d)                   1, as in WACO (ASPLOS 2023)
rank        log2(1 + exp(-d))               label i - label j: labels relative to the task's best, as
                                            TLP (ASPLOS 2023) has them, so that tasks mix
lambda      log2(1 + exp(-d))               (2**label i - 2**label j) |1/D i - 1/D j|, the change of
                                            NDCG if the two swapped: LambdaRank (Burges et al. 2006)
==========  ==============================  ==========================================================

d = score i - score j, and D = log2(1 + rank by score). Pairs are looked at block by block and the gradient is
worked out with the loss, so memory stays bounded for any s.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from sparseflow.errors import InputError

Loss = Literal["margin", "rank", "lambda"]
LOSSES: tuple[str, ...] = get_args(Loss)

_PAIRS = 2**21
"""Pairs that are held at once, about."""

_LN2 = 0.6931471805599453


def ranking_loss(kind: Loss, scores: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """The loss of one batch; 0 where no group has a pair.

    Args:
        kind: One of `LOSSES`.
        scores: (g, s), floating point.
        labels: (g, s), in (0, 1].
        weights: (g, s), 0 and more; by default all count 1.

    Returns:
        A scalar with a gradient for `scores`.

    Raises:
        InputError: There is no such loss, or the shapes differ.
    """
    if kind not in LOSSES:
        raise InputError(f"`kind` (={kind!r}) must be one of: {', '.join(LOSSES)}")
    weights = torch.ones_like(scores) if weights is None else weights.to(scores.dtype)
    if scores.ndim != 2 or not scores.shape == labels.shape == weights.shape:
        raise InputError(
            f"scores {tuple(scores.shape)}, labels {tuple(labels.shape)} and weights {tuple(weights.shape)} "
            "must be of one shape, (groups, schedules)"
        )
    found = _Pairs.apply(scores, labels.to(scores.dtype), weights, kind)
    assert isinstance(found, Tensor)
    return found


def expected_pick(scores: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """The label that a pick with odds exp(score) is expected to have, the mean over groups.

    What a top-1 score measures, made smooth: pairs tell little about one best schedule among many.

    Args:
        scores: (g, s), floating point.
        labels: (g, s), in (0, 1].
        weights: (g, s), 0 where there is no schedule; by default there are all.

    Returns:
        A scalar with a gradient for `scores`, at most 1; 0 where there is no schedule at all.
    """
    there = torch.ones_like(labels, dtype=torch.bool) if weights is None else weights > 0
    odds = torch.softmax(scores.masked_fill(~there, torch.finfo(scores.dtype).min), 1)
    found = (odds * labels * there).sum(1)
    return found.sum() / there.any(1).sum().clamp(min=1)


class _Pairs(torch.autograd.Function):
    """(scores, labels, weights, kind) -> the loss; its gradient is ready before it is asked for."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, labels: Tensor, weights: Tensor, kind: str) -> Tensor:
        groups, schedules = scores.shape
        gradient = torch.zeros_like(scores)
        cost, total = scores.new_zeros(groups), scores.new_zeros(groups)
        discounts = _discounts(scores, weights) if kind == "lambda" else None
        together = max(1, _PAIRS // max(1, schedules * schedules))
        rows = max(1, min(schedules, _PAIRS // max(1, schedules)))
        for first in range(0, groups, together):
            some = slice(first, first + together)
            s, label, weight = scores[some], labels[some], weights[some]
            for begin in range(0, schedules, rows):
                row = slice(begin, begin + rows)
                better = label[:, row, None] > label[:, None, :]
                counts = better * weight[:, row, None] * weight[:, None, :]
                if kind == "rank":
                    counts = counts * (label[:, row, None] - label[:, None, :])
                elif discounts is not None:
                    gain, discount = label.exp2(), discounts[some]
                    counts = counts * (gain[:, row, None] - gain[:, None, :])
                    counts = counts * (discount[:, row, None] - discount[:, None, :]).abs()
                difference = s[:, row, None] - s[:, None, :]
                if kind == "margin":
                    costs, slope = (1.0 - difference).clamp(min=0.0), -(difference < 1.0).to(s.dtype)
                else:
                    costs, slope = functional.softplus(-difference) / _LN2, -torch.sigmoid(-difference) / _LN2
                cost[some] += (counts * costs).sum((1, 2))
                total[some] += counts.sum((1, 2))
                slope = slope * counts
                gradient[some, row] += slope.sum(2)
                gradient[some] -= slope.sum(1)
        share = torch.where(total > 0, 1.0 / total, 0.0) / (total > 0).sum().clamp(min=1)
        ctx.save_for_backward(gradient * share[:, None])
        return (cost * share).sum()

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # what the decorator returns is untyped
        ctx: Any, upstream: Tensor
    ) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return upstream * gradient, None, None, None


def _discounts(scores: Tensor, weights: Tensor) -> Tensor:
    """1 / log2(1 + rank by score), the highest first and what is not there last, (g, s)."""
    shown = scores.masked_fill(weights <= 0, -torch.inf)
    rank = torch.empty_like(shown)
    places = torch.arange(2, shown.shape[1] + 2, dtype=shown.dtype, device=shown.device).expand_as(shown)
    return rank.scatter_(1, shown.argsort(dim=1, descending=True, stable=True), places).log2().reciprocal()
