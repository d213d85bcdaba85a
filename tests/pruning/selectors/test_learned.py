"""Learned score: absent tokens do not matter, and soft masks train it."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from sparseflow.errors import InputError
from sparseflow.pruning import ASTConfig
from sparseflow.pruning.selectors.learned import LearnedScore
from tests.pruning.models import awake, clips


def test_score_does_not_depend_on_absent_tokens() -> None:
    torch.manual_seed(0)
    score, x = LearnedScore(8).double(), torch.randn(2, 6, 8, dtype=torch.float64)
    retained = torch.tensor([[True, True, False, True, False, True]]).expand(2, -1)
    expected = score(x[:, retained[0]])
    torch.testing.assert_close(score(x, retained)[:, retained[0]], expected)


def test_training_finds_the_tokens_that_matter() -> None:
    """One patch of each clip has the class; the others are noise."""
    torch.manual_seed(0)
    model = awake({"stages": {0: 0.125}, "selector": "dynamic_vit", "softness": 0.5}).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def make_clips(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        labels, patches = torch.randint(5, (count,)), torch.randint(64, (count,))
        x = 0.1 * torch.randn(count, 4, 3, 16, 16)
        frames, rows, columns = patches // 16, patches % 16 // 4 * 4, patches % 4 * 4
        for index in range(count):
            row, column = int(rows[index]), int(columns[index])
            x[index, frames[index], :, row : row + 4, column : column + 4] = 0.5 * labels[index] - 1.25
        return x, labels, patches

    for _ in range(150):
        x, labels, _ = make_clips(32)
        optimizer.zero_grad()
        functional.cross_entropy(model(x), labels).backward()
        optimizer.step()
    x, _, patches = make_clips(200)
    with torch.no_grad():
        _, info = model.eval()(x, return_intermediate=True)
    recall = info["kept_tokens"].flatten(1)[torch.arange(200), patches].float().mean()
    assert recall > 0.5  # 8 of 64 tokens are kept, so that chance is 0.125


def test_selector_without_soft_masks_is_refused() -> None:
    with pytest.raises(InputError, match=r"softness.*dynamic_vit"):
        ASTConfig(selector="dynamic_vit", softness=0.0)
    model = awake({"stages": {1: 0.5}, "selector": "dynamic_vit"})
    assert model.pruner is not None
    with pytest.raises(InputError, match="dynamic_vit"):
        model.pruner(clips(model), 0.5)
