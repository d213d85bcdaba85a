"""Settings of the controller training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

import torch
from pydantic import Field, model_validator

from sparseflow.adaptive.policy.outcomes import draw_budgets
from sparseflow.adaptive.training.grpo import ConstraintMultiplier, Reward
from sparseflow.core.config import StrictModel, apply_overrides, read_config_file, validate_config

_PACKAGE = "sparseflow.adaptive"

_Count = Annotated[int, Field(ge=0, strict=True)]
_PositiveCount = Annotated[int, Field(ge=1, strict=True)]
_Positive = Annotated[float, Field(gt=0.0)]
_NonNegative = Annotated[float, Field(ge=0.0)]


class GrpoConfig(StrictModel):
    """Settings of the controller training.

    Attributes:
        steps: GRPO steps; each samples new prompts.
        warm_start: Preceding imitation steps. The oracle knows more than stage 1, so controllers trained by
            imitation ignore some inputs, from which GRPO recovers slowly.
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
        multiplier_most: Maximum price. An answer is worth at most 1, so at 10 one violation in ten never
            pays.
        budgets_ms: Range of budgets; default: that of the training outcomes.
        seed: Seed of initial weights, prompts and choices.
        validate_every: Steps between validations; the first is before any step.
        validation: Requests with a budget per validation.
        checkpoint_every: Steps between checkpoints.
    """

    steps: _Count = 300
    warm_start: _Count = 0
    prompts: _PositiveCount = 64
    group: Annotated[int, Field(ge=16, strict=True)] = 16
    minibatches: _PositiveCount = 2
    passes: _PositiveCount = 2
    rate: _Positive = 1e-3
    weight_decay: _NonNegative = 0.01
    clip: _Positive = 0.2
    kl: _NonNegative = 0.01
    reference_every: _PositiveCount = 25
    entropy: _NonNegative = 0.05
    max_norm: _Positive = 1.0
    reward: Reward = Field(default_factory=Reward)
    violations: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.01
    multiplier: _NonNegative = 1.0
    multiplier_rate: _NonNegative = 0.5
    multiplier_most: _NonNegative = 10.0
    budgets_ms: tuple[float, float] | None = None
    seed: _Count = 0
    validate_every: _PositiveCount = 25
    validation: _PositiveCount = 2048
    checkpoint_every: _PositiveCount = 25

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if not self.total_steps:
            raise ValueError("`steps` and `warm_start` are both 0")
        if self.prompts % self.minibatches:
            raise ValueError(
                f"`prompts` (={self.prompts}) must be divisible by `minibatches` (={self.minibatches})"
            )
        if self.multiplier > self.multiplier_most:
            raise ValueError(
                f"`multiplier` (={self.multiplier}) must not exceed `multiplier_most` "
                f"(={self.multiplier_most})"
            )
        if self.budgets_ms is not None:
            draw_budgets(self.budgets_ms, torch.zeros(1))
        return self

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


def read_config(source: Path | str, overrides: Mapping[str, Any] | None = None) -> GrpoConfig:
    """Read settings from a file.

    Args:
        source: YAML file, or the name of a shipped one: `grpo`.
        overrides: Settings to override, such as `{"steps": 3, "reward.excess": 0.5}`.

    Raises:
        InputError: The file does not exist, or a setting is unknown or out of range.
        FileFormatError: The file is not YAML, or has another content.
        MissingExtraError: PyYAML is missing.
    """
    content = apply_overrides(read_config_file(source, package=_PACKAGE, extra="adaptive"), overrides or {})
    return validate_config(GrpoConfig, content, str(source))
