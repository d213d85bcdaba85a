"""Settings of the joint training by GRPO."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from sparseflow.adaptive.policy.outcomes import draw_budgets
from sparseflow.adaptive.training.grpo import ConstraintMultiplier, Reward
from sparseflow.core.config import apply_overrides, describe_validation_error, read_config_file
from sparseflow.errors import InputError

_PACKAGE = "sparseflow.adaptive"


@dataclass(frozen=True, kw_only=True)
class GrpoConfig:
    """How controllers are trained.

    Attributes:
        steps: Of GRPO; each draws prompts anew.
        warm_start: Steps of imitating the oracle before; needs a table of outcomes. The oracle knows what
            Stage 1 cannot, so its imitators do not learn to look: of many steps GRPO recovers slowly.
        prompts: Requests with a budget in a step, over all processes.
        group: Choices for each, 16 or more.
        minibatches: Updates that a step's prompts are parted into.
        passes: How often a step's prompts are gone through.
        rate: Highest learning rate of AdamW; it rises over the first twentieth and falls as a cosine.
        weight_decay: AdamW's.
        clip: How far from 1 the ratio of probabilities may go.
        kl: Weight of the divergence from the reference, which is the policy as it was some steps ago.
        reference_every: Steps after which the policy becomes the reference; the first is the one after the
            warm start.
        entropy: Weight of the entropy, which falls to 0 on the way.
        max_norm: Largest norm of the gradient.
        reward: Shape of the reward.
        violations: Share of requests that may overrun their budget.
        multiplier: First price of a violation.
        multiplier_rate: By how much it changes for each violation too many in every request.
        multiplier_most: Highest price.
        budgets_ms: Budgets to draw, from and to; by default those of the environment.
        seed: What first weights, prompts and choices are drawn from.
        validate_every: Steps from one look at the held-out requests to the next; the first is before any
            step.
        validation: Requests with a budget that are looked at.
        checkpoint_every: Steps from one checkpoint to the next.

    Raises:
        InputError: A value is out of range.
    """

    steps: int = 300
    warm_start: int = 0
    prompts: int = 64
    group: int = 16
    minibatches: int = 2
    passes: int = 2
    rate: float = 1e-3
    weight_decay: float = 0.01
    clip: float = 0.2
    kl: float = 0.01
    reference_every: int = 25
    entropy: float = 0.05
    max_norm: float = 1.0
    reward: Reward = field(default_factory=Reward)
    violations: float = 0.01
    multiplier: float = 1.0
    multiplier_rate: float = 0.5
    multiplier_most: float = 10.0
    budgets_ms: tuple[float, float] | None = None
    seed: int = 0
    validate_every: int = 25
    validation: int = 2048
    checkpoint_every: int = 25

    def __post_init__(self) -> None:
        least = {
            "steps": 0, "warm_start": 0, "prompts": 1, "group": 16, "minibatches": 1, "passes": 1, "seed": 0,
            "reference_every": 1, "validate_every": 1, "validation": 1, "checkpoint_every": 1,
        }  # fmt: skip
        for name, bound in least.items():
            value = getattr(self, name)
            if type(value) is not int or value < bound:
                raise InputError(f"`{name}` (={value!r}) must be a whole number of at least {bound}")
        if not self.steps + self.warm_start:
            raise InputError("`steps` and `warm_start` are both 0; there is nothing to do")
        for name in ("rate", "clip", "max_norm"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise InputError(f"`{name}` (={getattr(self, name)}) must be above 0")
        for name in ("weight_decay", "kl", "entropy"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise InputError(f"`{name}` (={getattr(self, name)}) must be 0 or more")
        if self.prompts % self.minibatches:
            raise InputError(
                f"`prompts` (={self.prompts}) must be divisible by `minibatches` (={self.minibatches})"
            )
        self.price()
        if self.budgets_ms is not None:
            draw_budgets(self.budgets_ms, torch.zeros(1))

    @property
    def all_steps(self) -> int:
        """With those of the warm start."""
        return self.warm_start + self.steps

    def price(self) -> ConstraintMultiplier:
        """The multiplier as a training begins with it."""
        return ConstraintMultiplier(
            value=self.multiplier, asked=self.violations, rate=self.multiplier_rate, most=self.multiplier_most
        )

    def rate_at(self, step: int, steps: int) -> float:
        """The learning rate of a step, the first being 0, of so many."""
        rising = max(1, round(0.05 * steps))
        if step < rising:
            return self.rate * (step + 1) / rising
        return self.rate * 0.5 * (1.0 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))


def read_config(source: Path | str, changes: Mapping[str, Any] | None = None) -> GrpoConfig:
    """Read settings from a file.

    Args:
        source: A YAML file, or the name of one that comes with SparseFlow: `grpo`.
        changes: `"steps"` or `"reward.excess"` -> a value that goes before the file's.

    Raises:
        InputError: There is no such file, or a setting is unknown or out of range.
        FileFormatError: The file is not YAML, or holds something else.
        MissingExtraError: PyYAML is missing.
    """
    content = apply_overrides(read_config_file(source, package=_PACKAGE, extra="adaptive"), changes or {})
    parts = {"": (GrpoConfig, content), "reward.": (Reward, content.get("reward"))}
    unknown = [
        f"{before}{name}"
        for before, (kind, given) in parts.items()
        for name in (given if isinstance(given, Mapping) else ())
        if name not in {each.name for each in fields(kind)}
    ]
    if unknown:
        raise InputError(f"{source} has settings that are not known: {', '.join(unknown)}")
    try:
        return TypeAdapter(GrpoConfig).validate_python(content)
    except ValidationError as error:
        raise InputError(f"{source} cannot be used: {describe_validation_error(error)}") from error
