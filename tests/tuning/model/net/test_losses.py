"""Ranking losses against direct implementations."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sparseflow.errors import InputError
from sparseflow.tuning.model.net import losses
from sparseflow.tuning.model.net.losses import LOSSES, expected_pick, ranking_loss


def plain(kind: str, scores: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Compute the loss pair by pair."""
    result = []
    for s, label, weight in zip(scores, labels, weights, strict=True):
        present = [item for item in range(len(s)) if weight[item] > 0]
        rank = {item: 1 + n for n, item in enumerate(sorted(present, key=lambda item: -s[item].item()))}
        cost, total = torch.zeros((), dtype=s.dtype), 0.0
        for i in present:
            for j in present:
                if label[i] <= label[j]:
                    continue
                d, counts = s[i] - s[j], float(weight[i] * weight[j])
                costs = torch.clamp(1 - d, min=0) if kind == "margin" else torch.log2(1 + torch.exp(-d))
                if kind == "rank":
                    counts *= float(label[i] - label[j])
                if kind == "lambda":
                    swap = 1 / math.log2(1 + rank[i]) - 1 / math.log2(1 + rank[j])
                    counts *= (2 ** float(label[i]) - 2 ** float(label[j])) * abs(swap)
                cost, total = cost + counts * costs, total + counts
        if total:
            result.append(cost / total)
    return torch.stack(result).mean()


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = np.random.default_rng(seed)
    scores = torch.tensor(random.normal(size=(4, 9)), requires_grad=True)
    labels = torch.tensor(random.choice([1.0, 0.7, 0.5, 0.2], size=(4, 9)))
    weights = torch.tensor(random.choice([0.0, 0.5, 1.0], size=(4, 9)))
    weights[3] = 0.0
    weights[3, 2] = 1.0  # a group without pairs
    return scores, labels, weights


@pytest.mark.parametrize("pairs", [2**21, 100, 7])
@pytest.mark.parametrize("kind", LOSSES)
def test_loss_and_gradient_match_all_pairs(
    kind: losses.LossKind, pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "_MAX_PAIRS", pairs)
    scores, labels, weights = batch()
    result = ranking_loss(kind, scores, labels, weights)
    expected = plain(kind, scores, labels, weights)
    assert result.item() == pytest.approx(expected.item())
    (gradient,) = torch.autograd.grad(3 * result, scores)
    (expected_gradient,) = torch.autograd.grad(3 * expected, scores)
    torch.testing.assert_close(gradient, expected_gradient)


@pytest.mark.parametrize("kind", LOSSES)
def test_loss_ignores_padding(kind: losses.LossKind) -> None:
    scores, labels, weights = batch()
    other = torch.where(weights > 0, scores, 50.0)
    result, same = (ranking_loss(kind, item, labels, weights) for item in (scores, other))
    assert result.item() == pytest.approx(same.item())


@pytest.mark.parametrize("kind", LOSSES)
def test_loss_prefers_correct_order(kind: losses.LossKind) -> None:
    labels = torch.tensor([[1.0, 0.8, 0.4, 0.1], [0.2, 0.9, 1.0, 0.5]])
    scores = torch.zeros(2, 4, requires_grad=True)
    start = ranking_loss(kind, scores, labels).item()
    assert ranking_loss(kind, 5 * labels, labels).item() < start
    assert ranking_loss(kind, -5 * labels, labels).item() > start
    for _ in range(50):
        (gradient,) = torch.autograd.grad(ranking_loss(kind, scores, labels), scores)
        scores = (scores - gradient).detach().requires_grad_()
    assert torch.equal(scores.argsort(1), labels.argsort(1))


@pytest.mark.parametrize("kind", LOSSES)
def test_loss_without_pairs_is_zero(kind: losses.LossKind) -> None:
    scores = torch.randn(2, 3, requires_grad=True)
    loss = ranking_loss(kind, scores, torch.ones(2, 3))
    loss.backward()
    assert loss.item() == 0.0
    assert scores.grad is not None and not scores.grad.any()


def test_loss_weighs_groups_equally() -> None:
    scores, labels = torch.zeros(2, 6), torch.rand(2, 6)
    weights = torch.ones(2, 6)
    weights[1, 2:] = 0.0
    both = ranking_loss("rank", scores, labels, weights)
    item = [
        ranking_loss("rank", scores[index : index + 1], labels[index : index + 1], weights[index : index + 1])
        for index in (0, 1)
    ]
    assert both.item() == pytest.approx(sum(part.item() for part in item) / 2)


def test_loss_invalid_batch_raises() -> None:
    with pytest.raises(InputError):
        ranking_loss("mse", torch.zeros(1, 2), torch.ones(1, 2))  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError):
        ranking_loss("rank", torch.zeros(1, 2), torch.ones(1, 3))


def test_expected_pick_is_expected_label() -> None:
    scores = torch.tensor([[2.0, 1.0, -3.0], [0.0, 0.0, 5.0], [1.0, 2.0, 3.0]], dtype=torch.float64)
    labels = torch.tensor([[0.5, 1.0, 0.2], [0.3, 1.0, 0.7], [1.0, 1.0, 1.0]], dtype=torch.float64)
    weights = torch.tensor([[0.9, 0.5, 0.7], [0.5, 0.5, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    odds = scores[0].exp() / scores[0].exp().sum()
    expected = ((odds * labels[0]).sum() + 0.65) / 2
    torch.testing.assert_close(expected_pick(scores, labels, weights), expected)
    assert expected_pick(scores[2:], labels[2:], weights[2:]) == 0.0
    scores.requires_grad_()
    assert torch.autograd.gradcheck(lambda item: expected_pick(item, labels, weights), (scores,))


def test_expected_pick_descent_finds_best() -> None:
    labels = torch.tensor([[0.2, 1.0, 0.4, 0.9]])
    scores = torch.zeros(1, 4, requires_grad=True)
    optimizer = torch.optim.SGD([scores], lr=5.0)
    for _ in range(200):
        optimizer.zero_grad()
        (-expected_pick(scores, labels)).backward()
        optimizer.step()
    assert scores.argmax() == 1 and expected_pick(scores, labels) > 0.97
