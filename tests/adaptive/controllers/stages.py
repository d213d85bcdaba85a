"""Separate stages of the controllers, as a reference for `CpuControllers`."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseflow.adaptive.controllers.budget_encoding import encode_budget
from sparseflow.adaptive.controllers.controllers import Controllers


def choose_stage1(
    controllers: Controllers, language: Tensor, budget_ms: Tensor, *, allowed: Tensor | None = None
) -> Tensor:
    """Choose the most probable tier and insertion position.

    Args:
        controllers: The controllers.
        language: Language features, [b, d].
        budget_ms: Budgets, [b].
        allowed: Plans that may follow, [b, plans] bool; default: all.

    Returns:
        Indices of tier and position, [b, 2] int64.
    """
    with torch.no_grad():
        path = controllers._make_path(len(language), allowed)
        for logits in controllers.stage1(language, encode_budget(budget_ms)):
            path.step(logits)
        return torch.stack(path.choices, 1)


def choose_stage2(
    controllers: Controllers,
    latency_token: Tensor,
    budget_ms: Tensor,
    stage1_output: Tensor,
    *,
    allowed: Tensor | None = None,
) -> Tensor:
    """Choose the most probable top-k and block count.

    Args:
        controllers: The controllers.
        latency_token: Latency tokens, [b, d].
        budget_ms: Budgets, [b].
        stage1_output: Result of `choose_stage1`, [b, 2].
        allowed: Plans that may follow, [b, plans] bool; default: all.

    Returns:
        Plan numbers, [b] int64.
    """
    with torch.no_grad():
        path = controllers._make_path(len(stage1_output), allowed)
        path.choices += stage1_output.T
        for logits in controllers.stage2(latency_token, encode_budget(budget_ms), path.choices[1] + 1):
            path.step(logits)
        return controllers._distribution.plans(torch.stack(path.choices, 1))
