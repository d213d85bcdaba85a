"""Both controllers of one model: they choose plans, weigh choices that were made, and are kept in a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath

import torch
from torch import Tensor, nn

from sparseflow.adaptive.controllers.budget_encoding import encode
from sparseflow.adaptive.controllers.networks import Stage1, Stage2
from sparseflow.adaptive.controllers.plan_distribution import PlanDistribution, PlanPath
from sparseflow.adaptive.plan.space import POSITIONS, TIERS, PlanSpace
from sparseflow.core.artifact import load_tensors, save_tensors
from sparseflow.errors import FileFormatError, InputError

__all__ = ["Controllers", "LatencyTokens", "SampledPlans", "Stage1", "Stage2"]

_MARK = {"sparseflow": "adaptive-controllers", "version": "1"}

LatencyTokens = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Latency tokens [m, d] of some rows: (rows, tiers, positions), [m] each, the last two as indices."""


@dataclass(frozen=True, kw_only=True)
class SampledPlans:
    """What was chosen for n rows.

    Attributes:
        action: Tier, position, top-k and option as indices: [n, 4] int64.
        plan: Numbers of plans: [n] int64.
        log_prob: Joint log-probability of the four choices: [n].
        entropy: Sum of their entropies: [n], nats.
        token: What Stage 2 looked at: [n, d].
    """

    action: Tensor
    plan: Tensor
    log_prob: Tensor
    entropy: Tensor
    token: Tensor


class Controllers(nn.Module):
    """Both stages, for the plans of one model.

    Args:
        space: The plans.
        width: Of the model, d.
        model_id: Of the model, as `profile.weights_id` gives it; kept in the file.
        seed: What first weights are drawn from.

    Attributes:
        chosen: Shares in which each plan was chosen for the requests that the weights were kept by, [plans];
            zeros before any.
    """

    chosen: Tensor

    def __init__(self, space: PlanSpace, *, width: int, model_id: str, seed: int = 0) -> None:
        super().__init__()
        if width < 1:
            raise InputError(f"`width` (={width}) must be that of the model, at least 1")
        self.space, self.width, self.model_id = space, width, model_id
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.stage1, self.stage2 = Stage1(width), Stage2(width, space.options())
        self.register_buffer("chosen", torch.zeros(len(space)))
        self._choices = PlanDistribution(space)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.stage1.fuse.weight.device

    def fit_features(self, language: Tensor, tokens: Tensor) -> None:
        """Put features on one scale, by what of them there is to learn from.

        Args:
            language: [samples, d].
            tokens: Latency tokens, [samples, tiers, positions, d].

        Raises:
            InputError: A shape is not that of this model.
        """
        positions = len(self.space.geometry.positions)
        if language.shape[1:] != (self.width,) or tokens.shape[2:] != (positions, self.width):
            raise InputError(
                f"features of {list(language.shape)} and {list(tokens.shape)} do not fit a model of width "
                f"{self.width} with {positions} positions"
            )
        self.stage1.language.fit(language[None])
        by_position = tokens.transpose(0, 2).flatten(1, 2).float()
        missing = by_position[-1:].expand(len(POSITIONS) - positions, -1, -1)
        self.stage2.latency_token.fit(torch.cat([by_position, missing]))

    def begin(self, language: Tensor, budget_ms: Tensor, *, allowed: Tensor | None = None) -> Tensor:
        """Stage 1's most probable choices.

        Args:
            language: [b, d].
            budget_ms: [b].
            allowed: Plans that may come of it, [b, plans] bool; by default all.

        Returns:
            Tier and position as indices, [b, 2] int64.

        Raises:
            InputError: A budget is NaN, 0 or less, or a row allows no plan.
        """
        with torch.no_grad():
            path = self._path(len(language), allowed)
            for logits in self._first(language, encode(budget_ms.to(self.device))):
                path.lead(logits)
            return torch.stack(path.chosen, 1)

    def finish(
        self, latency_token: Tensor, budget_ms: Tensor, begun: Tensor, *, allowed: Tensor | None = None
    ) -> Tensor:
        """Stage 2's most probable choices, which complete the plans.

        Args:
            latency_token: [b, d].
            budget_ms: [b].
            begun: What `begin` gave, [b, 2].
            allowed: Plans that may come of it, [b, plans] bool; at least one of the tier and position begun.

        Returns:
            Numbers of plans, [b] int64.

        Raises:
            InputError: A budget is NaN, 0 or less, or no allowed plan begins so.
        """
        with torch.no_grad():
            path = self._path(len(begun), allowed)
            for choice in begun.to(self.device).T:
                path.follow(choice)
            for logits in self._second(latency_token, encode(budget_ms.to(self.device)), path.chosen[1]):
                path.lead(logits)
            return self._choices.plans(torch.stack(path.chosen, 1))

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
        """All four choices, and how likely they are.

        Args:
            language: [b, d].
            budget_ms: [b].
            tokens: Asked for latency tokens of the n = b · group rows, once tiers and positions are chosen;
                for one row only of those of a request that chose alike.
            allowed: Plans to choose among, [b, plans] bool; by default all.
            uniform: [n, 4] in [0, 1), to draw from; without it the most probable are taken.
            group: Choices for each row; those of a row stand together.
            action: [n, 4], choices made before; they are then not made, only weighed.

        Raises:
            InputError: A budget is NaN, 0 or less, or a row allows no plan.
        """
        budget = encode(budget_ms.to(self.device))
        path = self._path(len(language), allowed, group)
        for at, logits in enumerate(self._first(language, budget)):
            path.step(logits.repeat_interleave(group, 0), **_column(at, uniform, action))
        tier, position = path.chosen
        row = torch.arange(len(language), device=self.device).repeat_interleave(group)
        some, of = _distinct((row * len(TIERS) + tier) * len(POSITIONS) + position)
        token = tokens(some, tier[some], position[some]).to(self.device)
        for at, logits in enumerate(self._second(token, budget[row[some]], position[some]), start=2):
            path.step(logits[of], **_column(at, uniform, action))
        found = torch.stack(path.chosen, 1)
        assert isinstance(path.log_prob, Tensor) and isinstance(path.entropy, Tensor)
        return SampledPlans(
            action=found, plan=self._choices.plans(found), log_prob=path.log_prob, entropy=path.entropy,
            token=token[of],
        )  # fmt: skip

    def save(self, path: FilePath | str) -> None:
        """Write weights, plans and the model's id in place of what is there.

        Raises:
            OSError: The file cannot be written.
        """
        made = {"model_id": self.model_id, "width": self.width, "space": self.space.to_dict()}
        save_tensors(path, self.state_dict(), _MARK | {"made": json.dumps(made)})

    @classmethod
    def load(
        cls, path: FilePath | str, *, model_id: str | None = None, device: torch.device | str = "cpu"
    ) -> Controllers:
        """Read controllers that `save` wrote.

        Args:
            path: The file.
            model_id: Of the model that they shall steer; one trained for another is refused.
            device: Where to put them.

        Raises:
            InputError: There is no such file, or it is of another model.
            FileFormatError: It is something else, or damaged.
        """
        metadata, weights = load_tensors(path, _MARK, "controllers")
        try:
            made = json.loads(metadata["made"])
            if weights["stage1.language.norm.weight"].shape != (made["width"],):
                raise ValueError(f"the weights are of another width than {made['width']}")
            found = cls(
                PlanSpace.from_dict(made["space"]), width=made["width"], model_id=str(made["model_id"])
            )
            found.load_state_dict(weights)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            text = " ".join(str(error).split()) or repr(error)
            raise FileFormatError(f"{path} holds no controllers that can be read: {text}") from error
        if not all(bool(each.isfinite().all()) for each in weights.values()):
            raise FileFormatError(
                f"{path} holds controllers with weights that are not finite; train them anew"
            )
        if model_id is not None and found.model_id != model_id:
            raise InputError(
                f"{path} holds controllers of the model {found.model_id}, not of {model_id}; train some for "
                "this one"
            )
        return found.to(device).eval()

    def _path(self, rows: int, allowed: Tensor | None, group: int = 1) -> PlanPath:
        choices = self._choices.to(self.device)
        if allowed is not None and len(allowed) != rows:
            raise InputError(f"`allowed` has {len(allowed)} rows; it needs one for each of {rows}")
        masks = choices.masks(None if allowed is None else allowed.to(self.device))
        row = torch.arange(rows, device=self.device).repeat_interleave(group)
        # Without a mask of its own, a row goes by the only one.
        return PlanPath(masks, row if allowed is not None else torch.zeros_like(row))

    def _first(self, language: Tensor, budget: Tensor) -> tuple[Tensor, Tensor]:
        heads = self.stage1(language.to(self.device), budget)
        return heads["tier_logits"], heads["insertion_logits"]

    def _second(self, token: Tensor, budget: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        heads = self.stage2(token.to(self.device), budget, position + 1)
        return heads["top_k_logits"], heads["option_logits"]


def _distinct(keys: Tensor) -> tuple[Tensor, Tensor]:
    """For keys [n], the first place of each distinct one [m], and which of these each is [n]."""
    found, of = keys.unique(return_inverse=True)
    first = torch.full((len(found),), len(keys), device=keys.device)
    return first.scatter_reduce(0, of, torch.arange(len(keys), device=keys.device), "amin"), of


def _column(at: int, uniform: Tensor | None, action: Tensor | None) -> Mapping[str, Tensor | None]:
    return {
        "uniform": None if uniform is None else uniform[:, at],
        "choice": None if action is None else action[:, at],
    }
