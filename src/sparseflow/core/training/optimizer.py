"""Learning-rate schedule, weight-decay groups and the finite check of training steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from sparseflow.errors import RunError


def lr_factor(step: int, num_steps: int, *, warmup: float, cooldown: float | None = None) -> float:
    """Factor on the peak learning rate: linear warm-up, then decay to 0.

    Args:
        step: Step, from 0.
        num_steps: Steps of the schedule.
        warmup: Fraction of the steps with rising rate, from 0 to 1; at least one step.
        cooldown: Fraction of the steps, at the end, with linearly falling rate; the rate is constant before.
            None falls along a half cosine from the end of the warm-up instead.

    Returns:
        A factor above 0 and at most 1.
    """
    warmup_steps = max(1, round(warmup * num_steps))
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if cooldown is None:
        decay_steps = max(1, num_steps - warmup_steps)
        return 0.5 * (1.0 + math.cos(math.pi * (step - warmup_steps) / decay_steps))
    return min(1.0, (1.0 - step / num_steps) / max(1e-9, cooldown))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of every parameter group, times the group's `"lr_scale"` if it has one."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)


def split_weight_decay(parameters: Iterable[torch.nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups for AdamW that decay matrices only, not biases, norms and other vectors.

    Args:
        parameters: Parameters to optimize.
        weight_decay: Weight decay of parameters with two or more dimensions.

    Returns:
        Two groups: decayed and not decayed.
    """
    parameters = list(parameters)
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


def check_finite(metrics: Mapping[str, float], *, step: int, hint: str = "") -> None:
    """Stop the training if a metric of a step is NaN or infinite. Call it before the optimizer's step.

    Args:
        metrics: Values to check, such as the loss and the gradient norm.
        step: Step, from 1.
        hint: Advice for the user, such as ``"lower `rate` (=0.1)"``.

    Raises:
        RunError: A value is not finite.
    """
    bad = {name: value for name, value in metrics.items() if not math.isfinite(value)}
    if bad:
        values = ", ".join(f"{name} is {value}" for name, value in bad.items())
        advice = f"; {hint}" if hint else ""
        raise RunError(f"training failed in step {step}: {values}. The last checkpoint is kept{advice}")
