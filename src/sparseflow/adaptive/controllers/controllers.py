"""The two-stage controllers of one model, and their file format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Annotated, ClassVar

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from sparseflow.adaptive.controllers.budget_encoding import encode_budget
from sparseflow.adaptive.controllers.networks import Stage1, Stage2
from sparseflow.adaptive.controllers.plan_distribution import PlanDistribution, PlanPath
from sparseflow.adaptive.plan.space import POSITIONS, TIERS, PlanSpace
from sparseflow.core.artifact import Artifact, DictField
from sparseflow.core.checks import check_at_least
from sparseflow.errors import FileFormatError, InputError

LatencyTokens = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Latency tokens [m, d] for (rows, tiers, positions), each [m]; tiers and positions are indices."""


@dataclass(frozen=True, kw_only=True)
class SampledPlans:
    """Plans chosen for n rows.

    Attributes:
        action: Indices of tier, position, top-k and option, [n, 4] int64.
        plan: Plan numbers, [n] int64.
        log_prob: Joint log-probability of the four choices, [n].
        entropy: Sum of their entropies in nats, [n].
        token: Input of stage 2, [n, d].
    """

    action: Tensor
    plan: Tensor
    log_prob: Tensor
    entropy: Tensor
    token: Tensor


class _Record(Artifact):
    """Metadata of a file of controllers, whose tensors are the weights."""

    FORMAT: ClassVar[str] = "sparseflow.adaptive.controllers"
    VERSION: ClassVar[int] = 3
    HINT: ClassVar[str] = "train them with `sparseflow adaptive train`"

    model_id: str
    width: PositiveInt
    space: Annotated[PlanSpace, DictField()]


class Controllers(nn.Module):
    """Both controller stages for the plans of one model.

    Args:
        space: Plans of the model.
        width: Hidden size d of the model.
        model_id: Id of the model, as `profile.weights_id` computes it; stored in the file.
        seed: Seed of the initial weights.

    Attributes:
        plan_frequency: Fraction of held-out requests for which each plan was chosen, [plans]; zeros before
            validation.
    """

    plan_frequency: Tensor

    def __init__(self, space: PlanSpace, *, width: int, model_id: str, seed: int = 0) -> None:
        super().__init__()
        check_at_least(1, width=width)
        self.space, self.width, self.model_id = space, width, model_id
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.stage1, self.stage2 = Stage1(width), Stage2(width, space.option_mask())
        self.register_buffer("plan_frequency", torch.zeros(len(space)))
        self._distribution = PlanDistribution(space)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.stage1.fuse.weight.device

    def fit_features(self, language: Tensor, tokens: Tensor) -> None:
        """Fit the feature standardization to training data.

        Args:
            language: Language features, [samples, d].
            tokens: Latency tokens, [samples, tiers, positions, d].

        Raises:
            InputError: A shape does not fit the model.
        """
        positions = len(self.space.geometry.positions)
        if language.shape[1:] != (self.width,) or tokens.shape[2:] != (positions, self.width):
            raise InputError(
                f"features of shape {list(language.shape)} and {list(tokens.shape)} do not fit a "
                f"model of width {self.width} with {positions} positions"
            )
        self.stage1.language.fit(language[None])
        by_position = tokens.transpose(0, 2).flatten(1, 2).float()
        missing = by_position[-1:].expand(len(POSITIONS) - positions, -1, -1)
        self.stage2.latency_token.fit(torch.cat([by_position, missing]))

    def choose(
        self,
        language: Tensor,
        budget_ms: Tensor,
        tokens: LatencyTokens,
        *,
        allowed: Tensor | None = None,
        uniform: Tensor | None = None,
        group: int = 1,
        action: Tensor | None = None,
    ) -> SampledPlans:
        """Make all four choices and compute their log-probability.

        Args:
            language: Language features, [b, d].
            budget_ms: Budgets, [b].
            tokens: Returns latency tokens once tiers and positions of the n = b · group rows are chosen;
                called for one row of each request with the same tier and position.
            allowed: Plans to choose from, [b, plans] bool; default: all.
            uniform: Uniform numbers in [0, 1) to sample with, [n, 4]; without them the most probable choices
                are made.
            group: Number of choices per row, stored consecutively.
            action: Choices to evaluate instead of making new ones, [n, 4].

        Raises:
            InputError: A budget is NaN or not above 0, or a row allows no plan.
        """
        budget = encode_budget(budget_ms.to(self.device))
        path = self._make_path(len(language), allowed, group)
        for step, logits in enumerate(self.stage1(language, budget)):
            path.step(logits.repeat_interleave(group, 0), **_select_column(step, uniform, action))
        tier, position = path.choices
        row = torch.arange(len(language), device=self.device).repeat_interleave(group)
        unique_rows, inverse = _find_unique((row * len(TIERS) + tier) * len(POSITIONS) + position)
        token = tokens(unique_rows, tier[unique_rows], position[unique_rows]).to(self.device)
        stage2_logits = self.stage2(token, budget[row[unique_rows]], position[unique_rows] + 1)
        for step, logits in enumerate(stage2_logits, start=2):
            path.step(logits[inverse], **_select_column(step, uniform, action))
        actions = torch.stack(path.choices, 1)
        assert isinstance(path.log_prob, Tensor) and isinstance(path.entropy, Tensor)
        return SampledPlans(
            action=actions,
            plan=self._distribution.plans(actions),
            log_prob=path.log_prob,
            entropy=path.entropy,
            token=token[inverse],
        )

    def save(self, path: FilePath | str) -> None:
        """Write weights, plans and model id; replaces the file.

        Raises:
            OSError: The file cannot be written.
        """
        record = _Record(model_id=self.model_id, width=self.width, space=self.space)
        record.save_tensors(path, self.state_dict())

    @classmethod
    def load(
        cls, path: FilePath | str, *, model_id: str | None = None, device: torch.device | str = "cpu"
    ) -> Controllers:
        """Read controllers.

        Args:
            path: The file.
            model_id: Id of the model that they shall control; controllers of another model are refused.
            device: Device of the weights.

        Raises:
            InputError: The file is missing, or belongs to another model.
            FileFormatError: The file is damaged or has another format.
        """
        record, weights = _Record.load_tensors(path)
        try:
            if weights["stage1.language.norm.weight"].shape != (record.width,):
                raise ValueError(f"the weights do not have width {record.width}")
            controllers = cls(record.space, width=record.width, model_id=record.model_id)
            controllers.load_state_dict(weights)
        except (KeyError, ValueError, RuntimeError) as error:
            text = " ".join(str(error).split()) or repr(error)
            raise FileFormatError(f"{path} does not contain controllers: {text}") from error
        if not all(bool(weight.isfinite().all()) for weight in weights.values()):
            raise FileFormatError(
                f"{path} contains controllers with weights that are not finite; train them again"
            )
        if model_id is not None and controllers.model_id != model_id:
            raise InputError(
                f"{path} contains controllers of model {controllers.model_id}, not {model_id}; train "
                "controllers for this model"
            )
        return controllers.to(device).eval()

    def _make_path(self, rows: int, allowed: Tensor | None, group: int = 1) -> PlanPath:
        choices = self._distribution.to(self.device)
        if allowed is not None and len(allowed) != rows:
            raise InputError(f"`allowed` has {len(allowed)} rows; expected {rows}")
        masks = choices.masks(None if allowed is None else allowed.to(self.device))
        row = torch.arange(rows, device=self.device).repeat_interleave(group)
        # Without `allowed` all rows share one mask.
        return PlanPath(masks, row if allowed is not None else torch.zeros_like(row))


def _find_unique(keys: Tensor) -> tuple[Tensor, Tensor]:
    """First occurrence of each unique key [m], and the unique index of each key [n]."""
    unique_keys, inverse = keys.unique(return_inverse=True)
    first = torch.full((len(unique_keys),), len(keys), device=keys.device)
    return first.scatter_reduce(0, inverse, torch.arange(len(keys), device=keys.device), "amin"), inverse


def _select_column(index: int, uniform: Tensor | None, action: Tensor | None) -> Mapping[str, Tensor | None]:
    return {
        "uniform": None if uniform is None else uniform[:, index],
        "choice": None if action is None else action[:, index],
    }
