"""Settings of the controller training."""

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
    """Settings of the controller training.

    Attributes:
        steps: GRPO steps; each samples new prompts.
        warm_start: Preceding imitation steps; needs a table of outcomes. The oracle knows more than stage 1,
            so controllers trained by imitation ignore some inputs, from which GRPO recovers slowly.
        prompts: Requests with a budget per step, over all processes.
        group: Choices per prompt, at least 16.
        minibatches: Updates into which the prompts of a step are divided.
        passes: Passes over the prompts of a step.
        rate: Peak learning rate of AdamW, with linear warm-up over 5 % of the steps and cosine decay.
        weight_decay: Weight decay of AdamW.
        clip: Clipping range of the probability ratio around 1.
        kl: Weight of the divergence from the reference policy, a copy from some steps ago.
        reference_every: Steps between updates of the reference; the first is after the warm start.
        entropy: Initial weight of the entropy; decays to 0.
        max_norm: Maximum gradient norm.
        reward: Shape of the reward.
        violations: Allowed fraction of requests that exceed their budget.
        multiplier: Initial price of a violation.
        multiplier_rate: Change of the price per step if all requests exceeded their budget.
        multiplier_most: Maximum price.
        budgets_ms: Range of budgets; default: that of the environment.
        seed: Seed of initial weights, prompts and choices.
        validate_every: Steps between validations; the first is before any step.
        validation: Requests with a budget per validation.
        checkpoint_every: Steps between checkpoints.

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
        minimums = {
            "steps": 0, "warm_start": 0, "prompts": 1, "group": 16, "minibatches": 1, "passes": 1, "seed": 0,
            "reference_every": 1, "validate_every": 1, "validation": 1, "checkpoint_every": 1,
        }  # fmt: skip
        for name, bound in minimums.items():
            value = getattr(self, name)
            if type(value) is not int or value < bound:
                raise InputError(f"`{name}` (={value!r}) must be an integer of at least {bound}")
        if not self.steps + self.warm_start:
            raise InputError("`steps` and `warm_start` are both 0")
        for name in ("rate", "clip", "max_norm"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise InputError(f"`{name}` (={getattr(self, name)}) must be above 0")
        for name in ("weight_decay", "kl", "entropy"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise InputError(f"`{name}` (={getattr(self, name)}) must be at least 0")
        if self.prompts % self.minibatches:
            raise InputError(
                f"`prompts` (={self.prompts}) must be divisible by `minibatches` (={self.minibatches})"
            )
        self.make_multiplier()
        if self.budgets_ms is not None:
            draw_budgets(self.budgets_ms, torch.zeros(1))

    @property
    def total_steps(self) -> int:
        """Steps including the warm start."""
        return self.warm_start + self.steps

    def make_multiplier(self) -> ConstraintMultiplier:
        """Create the initial multiplier."""
        return ConstraintMultiplier(
            value=self.multiplier,
            target=self.violations,
            rate=self.multiplier_rate,
            max_value=self.multiplier_most,
        )

    def learning_rate_at(self, step: int, steps: int) -> float:
        """Learning rate of step `step` (from 0) of `steps`."""
        rising = max(1, round(0.05 * steps))
        if step < rising:
            return self.rate * (step + 1) / rising
        return self.rate * 0.5 * (1.0 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))


def read_config(source: Path | str, changes: Mapping[str, Any] | None = None) -> GrpoConfig:
    """Read settings from a file.

    Args:
        source: YAML file, or the name of a shipped one: `grpo`.
        changes: Overrides such as `"steps"` or `"reward.excess"` -> value.

    Raises:
        InputError: The file is missing, or a setting is unknown or out of range.
        FileFormatError: The file is not YAML, or has another content.
        MissingExtraError: PyYAML is missing.
    """
    content = apply_overrides(read_config_file(source, package=_PACKAGE, extra="adaptive"), changes or {})
    parts = {"": (GrpoConfig, content), "reward.": (Reward, content.get("reward"))}
    unknown = [
        f"{prefix}{name}"
        for prefix, (settings_type, section) in parts.items()
        for name in (section if isinstance(section, Mapping) else ())
        if name not in {field.name for field in fields(settings_type)}
    ]
    if unknown:
        raise InputError(f"{source} has unknown settings: {', '.join(unknown)}")
    try:
        return TypeAdapter(GrpoConfig).validate_python(content)
    except ValidationError as error:
        raise InputError(f"{source} is invalid: {describe_validation_error(error)}") from error
