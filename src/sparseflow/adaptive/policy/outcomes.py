"""Tables of outcomes: score and measured latencies of every plan on every sample."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparseflow.adaptive.plan.space import PlanSpace
from sparseflow.core.checks import check_at_least, check_between
from sparseflow.errors import InputError

COST_QUANTILE = 0.99
"""Quantile of measured latencies that serves as the latency bound of a plan."""
_BUDGET_HEADROOM = 1.1
"""Largest budget, relative to the most expensive plan; every plan fits it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class OutcomeTable:
    """Outcome of every plan for every request of one data split.

    Attributes:
        space: The plans.
        correct: Score of each answer in [0, 1], [samples, plans] float32.
        latency_ms: Measured latencies, [samples, plans, repeats] float32.
        language: Language features, [samples, d].
        tokens: Latency tokens, [samples, tiers, positions, d], floating.

    Raises:
        InputError: Shapes do not match each other or the plans, or a value is not finite or out of range.
    """

    space: PlanSpace
    correct: Tensor
    latency_ms: Tensor
    language: Tensor
    tokens: Tensor

    def __post_init__(self) -> None:
        for name in ("correct", "latency_ms"):
            object.__setattr__(self, name, torch.as_tensor(getattr(self, name)).float())
        for name in ("language", "tokens"):
            object.__setattr__(self, name, torch.as_tensor(getattr(self, name)))
        count, geometry = len(self.correct), self.space.geometry
        expected_shapes = {
            "correct": (count, len(self.space)),
            "latency_ms": (count, len(self.space), max(1, self.latency_ms.shape[-1])),
            "language": (count, self.width),
            "tokens": (count, len(self.space.tiers), len(geometry.positions), self.width),
        }
        for name, shape in expected_shapes.items():
            actual_shape = tuple(getattr(self, name).shape)
            if actual_shape != shape:
                raise InputError(f"`{name}` has shape {actual_shape}; expected {shape}")
        if not count:
            raise InputError("a table of outcomes needs at least one sample")
        if not bool(((self.correct >= 0) & (self.correct <= 1)).all()):
            raise InputError("`correct` must be in [0, 1]")
        if not bool((self.latency_ms.isfinite() & (self.latency_ms > 0)).all()):
            raise InputError("`latency_ms` must be finite and above 0")
        if not all(bool(features.isfinite().all()) for features in (self.language, self.tokens)):
            raise InputError("`language` and `tokens` must be finite")

    def __len__(self) -> int:
        return len(self.correct)

    @property
    def width(self) -> int:
        """Size of language features and latency tokens."""
        return self.language.shape[-1]

    def get_language(self, samples: Tensor) -> Tensor:
        """Language features: [n] int64 -> [n, width] float32."""
        return self.language[samples].float()

    def get_latency_tokens(self, samples: Tensor, tiers: Tensor, positions: Tensor) -> Tensor:
        """Latency tokens for samples, tier and position indices, each [n] int64 -> [n, width] float32."""
        return self.tokens[samples, tiers, positions].float()

    def run(self, samples: Tensor, plans: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Run plans on requests.

        Args:
            samples: [n] int64.
            plans: Plan numbers, [n] int64.
            uniform: Uniform numbers in [0, 1) that select the measured latency, [n].

        Returns:
            Scores in [0, 1] and latencies in milliseconds, each [n] float32.
        """
        repeats = self.latency_ms.shape[2]
        # A float32 just below 1 can round up to the count.
        repeat = (uniform * repeats).long().clamp_max(repeats - 1)
        return self.correct[samples, plans], self.latency_ms[samples, plans, repeat]

    def budget_range_ms(self) -> tuple[float, float]:
        """Range of relevant budgets, from the 99 % latency quantiles of the plans."""
        costs = self.latency_quantiles_ms()
        return float(costs.min()), float(costs.max()) * _BUDGET_HEADROOM

    def latency_quantiles_ms(self, quantile: float = COST_QUANTILE) -> Tensor:
        """Latency quantile of each plan over all samples and repeats, [plans].

        Raises:
            InputError: The quantile is not in [0, 1].
        """
        check_between(0.0, 1.0, quantile=quantile)
        latencies = self.latency_ms.transpose(1, 2).flatten(0, 1).numpy()
        return torch.from_numpy(np.quantile(latencies, quantile, axis=0, method="higher").astype(np.float32))

    def identity(self) -> dict[str, str | int]:
        """Fingerprint of the table for checkpoints."""
        digest = hashlib.sha256()
        for tensor in (self.correct, self.latency_ms, self.language.float(), self.tokens.float()):
            digest.update(tensor.contiguous().numpy().tobytes())
        return {"samples": len(self), "plans": len(self.space), "digest": digest.hexdigest()[:16]}


def draw_budgets(budget_range_ms: tuple[float, float], uniform: Tensor) -> Tensor:
    """Map uniform numbers to log-uniform budgets.

    Args:
        budget_range_ms: Smallest and largest budget.
        uniform: Numbers in [0, 1), of any shape.

    Returns:
        Milliseconds, of the same shape.

    Raises:
        InputError: The range is empty or not positive.
    """
    low, high = budget_range_ms
    if not 0.0 < low <= high < math.inf:
        raise InputError(f"budgets from {low} to {high} ms must be above 0, finite and ordered")
    return low * (high / low) ** uniform


def budget_grid(budget_range_ms: tuple[float, float], count: int) -> Tensor:
    """Budgets at equal ratios, the midpoints of equal parts of `draw_budgets`, [count]."""
    check_at_least(1, count=count)
    return draw_budgets(budget_range_ms, (torch.arange(count) + 0.5) / count)


def find_feasible(costs_ms: Tensor, budget_ms: Tensor) -> Tensor:
    """Plans that fit a budget.

    Args:
        costs_ms: Latency bound of each plan, [plans].
        budget_ms: Budgets, [n].

    Returns:
        [n, plans] bool; if no plan fits, the cheapest is included so that one can be chosen.
    """
    fits = costs_ms <= budget_ms[:, None]
    cheapest = costs_ms == costs_ms.min()
    return fits | (cheapest & ~fits.any(1, keepdim=True))
