"""An environment that runs the model: as a table of outcomes, but asked when an answer is needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparseflow.adaptive.plan import Plan, PlanSpace
from sparseflow.errors import InputError, RunError


@dataclass(frozen=True, kw_only=True)
class Live:
    """Requests to a model that is there.

    Attributes:
        space: The plans.
        width: Of the model.
        size: How many requests there are.
        language: Gives a request's language feature, [width].
        token: Gives a request's latency token, [width], at a tier and a position, both by index.
        answer: Runs a request under a plan; gives the answer's score, from 0 to 1, and milliseconds.
        budgets_ms: Budgets worth asking for, from and to.
        name: Of model and data; trainings in one folder must have the same.
    """

    space: PlanSpace
    width: int
    size: int
    language: Callable[[int], Tensor]
    token: Callable[[int, int, int], Tensor]
    answer: Callable[[int, Plan], tuple[float, float]]
    budgets_ms: tuple[float, float]
    name: str

    def __post_init__(self) -> None:
        if self.size < 1 or self.width < 1:
            raise InputError(f"`size` (={self.size}) and `width` (={self.width}) must be at least 1")

    def __len__(self) -> int:
        return self.size

    def language_of(self, samples: Tensor) -> Tensor:
        """As `Environment`."""
        return torch.stack([self.language(sample).float().cpu() for sample in samples.tolist()])

    def tokens_of(self, samples: Tensor, tiers: Tensor, positions: Tensor) -> Tensor:
        """As `Environment`; each is computed once a call, however many rows ask for it."""
        asked = list(zip(samples.tolist(), tiers.tolist(), positions.tolist(), strict=True))
        found = {each: self.token(*each).float().cpu() for each in dict.fromkeys(asked)}
        return torch.stack([found[each] for each in asked])

    def run(self, samples: Tensor, plans: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """As `Environment`; every row is run, jitter and all, and nothing is drawn.

        Raises:
            RunError: A score or a time is not one.
        """
        every = self.space.plans
        rows = [
            self.answer(sample, every[plan])
            for sample, plan in zip(samples.tolist(), plans.tolist(), strict=True)
        ]
        correct, latency_ms = torch.tensor(rows, dtype=torch.float32).reshape(-1, 2).T
        if not bool(((correct >= 0) & (correct <= 1) & (latency_ms > 0) & latency_ms.isfinite()).all()):
            raise RunError(
                "a request gave a score beyond 0 to 1, or a latency that is not above 0 ms and finite"
            )
        return correct, latency_ms

    def span_ms(self) -> tuple[float, float]:
        """As `Environment`."""
        return self.budgets_ms

    def identity(self) -> dict[str, str | int]:
        """As `Environment`."""
        return {"samples": self.size, "plans": len(self.space), "digest": self.name}
