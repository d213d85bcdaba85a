"""What a step of the joint training does: both stages choose, all four choices are rewarded as one.

A step draws prompts, lets the controllers choose a group of plans for each, has these tried, and makes a few
updates from what they were worth. Its prompts and all chance in it come from the seed and the step's own
number, drawn for all processes together and then shared out: how many processes there are changes the order
of sums only.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparseflow.adaptive.controllers.controllers import Controllers, SampledPlans
from sparseflow.adaptive.controllers.plan_distribution import PlanDistribution
from sparseflow.adaptive.policy.outcomes import Costs, Environment, OutcomeTable, draw_budgets, fitting
from sparseflow.adaptive.policy.policies import OraclePolicy
from sparseflow.adaptive.training.config import GrpoConfig
from sparseflow.adaptive.training.grpo import advantages, centred, grpo_loss
from sparseflow.core.training.distributed import DistributedContext
from sparseflow.errors import InputError, RunError


class ImitationTargets:
    """What there is to imitate.

    Args:
        outcomes: Requests and what every plan makes of them.
        costs: As in `ControllerPolicy`: the label is the best of the plans that are not masked.
    """

    def __init__(self, outcomes: OutcomeTable, costs: Costs | None = None) -> None:
        self._outcomes, self._costs = outcomes, costs
        self._oracle = OraclePolicy(prefer=outcomes.correct.mean(0))
        self._actions = PlanDistribution(outcomes.space).actions

    def loss(self, controllers: Controllers, samples: Tensor, budgets_ms: Tensor) -> Tensor:
        """Mean negative log-likelihood of the oracle's choices: [n] and [n] -> a scalar, in nats."""
        allowed = None
        if self._costs is not None:
            allowed = fitting(self._costs(self._outcomes, samples), budgets_ms)
        plans = self._oracle.choose(self._outcomes, samples, budgets_ms, allowed=allowed)
        choice = controllers.choose(
            self._outcomes.language_of(samples), budgets_ms,
            lambda rows, tiers, positions: self._outcomes.tokens_of(
                samples[rows.cpu()], tiers.cpu(), positions.cpu()
            ),
            allowed=allowed, action=self._actions[plans].to(controllers.device),
        )  # fmt: skip
        return -choice.log_prob.mean()


_FIT = 1024
"""Samples that features are put on one scale by."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Rollout:
    """Choices that were tried, of n = prompts · group rows; those of a prompt stand together.

    Attributes:
        language: [prompts, d].
        budget_ms: [prompts].
        token: Latency tokens, [n, d].
        allowed: [prompts, plans] bool; None where nothing is masked.
        action: [n, 4].
        log_prob: When they were made: [n].
        reference: By the reference policy: [n].
        advantage: [n].
    """

    language: Tensor
    budget_ms: Tensor
    token: Tensor
    allowed: Tensor | None
    action: Tensor
    log_prob: Tensor
    reference: Tensor
    advantage: Tensor

    def part(self, at: int, parts: int) -> Rollout:
        """One of so many equal parts of the prompts."""
        mine = {
            name: value.chunk(parts)[at] for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **mine)


class JointTrainer:
    """Both controllers in training, and how far they are.

    Args:
        config: How.
        environment: What they learn from.
        costs: What plans take: those beyond a budget are masked. None lets rewards alone teach latency.
        model_id: Of the model.
        mine: This process among all that train.

    Raises:
        InputError: Prompts cannot be shared out evenly, or the environment cannot be imitated on.
    """

    def __init__(
        self,
        config: GrpoConfig,
        environment: Environment,
        costs: Costs | None,
        model_id: str,
        mine: DistributedContext,
    ) -> None:
        if config.prompts % (config.minibatches * mine.world_size):
            raise InputError(
                f"`prompts` (={config.prompts}) must be divisible by `minibatches` (={config.minibatches}) "
                f"times the {mine.world_size} processes"
            )
        self.config, self._environment, self._costs, self._mine = config, environment, costs, mine
        self._span = config.budgets_ms or environment.span_ms()
        self.controllers = Controllers(
            environment.space, width=environment.width, model_id=model_id, seed=config.seed
        )
        self._imitation: ImitationTargets | None = None
        if isinstance(environment, OutcomeTable):
            self._imitation = ImitationTargets(environment, costs)
            some = torch.from_numpy(np.random.default_rng(config.seed).permutation(len(environment))[:_FIT])
            self.controllers.fit_features(environment.language[some], environment.tokens[some])
        elif config.warm_start:
            raise InputError(
                "a warm start imitates the oracle, which needs a table of outcomes; set `warm_start` to 0"
            )
        self.controllers.to(mine.device)
        self.multiplier = config.price()
        self.step = 0
        self._begin()

    def _begin(self) -> None:
        """A new optimizer, and the policy as it is as the reference."""
        weights, decay = list(self.controllers.parameters()), self.config.weight_decay
        self._optimizer = torch.optim.AdamW(
            [
                {"params": [each for each in weights if each.ndim > 1], "weight_decay": decay},
                {"params": [each for each in weights if each.ndim <= 1], "weight_decay": 0.0},
            ],
            lr=self.config.rate,
        )  # fmt: skip
        self._refer()

    def _refer(self) -> None:
        self._reference = copy.deepcopy(self.controllers).requires_grad_(False)

    def state(self) -> dict[str, Any]:
        """What `restore` takes."""
        return {
            "step": self.step,
            "controllers": self.controllers.state_dict(),
            "reference": self._reference.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "multiplier": self.multiplier.value,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self.controllers.load_state_dict(state["controllers"])
        self._reference.load_state_dict(state["reference"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.multiplier.value = state["multiplier"]
        self.step = state["step"]

    def advance(self) -> dict[str, float]:
        """One step; its numbers.

        Raises:
            RunError: A loss, a gradient or a logit is no longer finite; no weight took it up.
        """
        try:
            numbers = self._imitate() if self.step < self.config.warm_start else self._reinforce()
        except RunError as error:
            raise RunError(
                f"the training failed in step {self.step + 1}: {error}. The checkpoint before is kept"
            ) from error
        self.step += 1
        if self.step == self.config.warm_start:
            self._begin()
        elif self.step > self.config.warm_start and (
            (self.step - self.config.warm_start) % self.config.reference_every == 0
        ):
            self._refer()
        return numbers

    def validate(self, held_out: Environment) -> dict[str, float]:
        """The most probable plans, on requests and budgets that are the same each time; the controllers keep
        how often each was chosen.

        Returns:
            `"accuracy"`, `"attainment"`, `"latency_ms"`, and the `"score"` that the best weights are kept by:
            accuracy less the highest price of each violation beyond what is allowed.
        """
        random = np.random.default_rng(self.config.seed)
        count = self.config.validation
        # Budgets at equal ratios, in an order of their own: chance leaves no gap.
        places = torch.from_numpy((random.permutation(count) + random.random(count)) / count)
        samples = torch.from_numpy(random.permutation(np.arange(count) % len(held_out)))
        budgets = draw_budgets(self._span, places.float())
        jitter = torch.from_numpy(random.random(count))
        with torch.no_grad():
            found = self.controllers.choose(
                held_out.language_of(samples), budgets,
                lambda rows, tiers, positions: held_out.tokens_of(
                    samples[rows.cpu()], tiers.cpu(), positions.cpu()
                ),
                allowed=self._allowed(held_out, samples, budgets),
            )  # fmt: skip
            plans = found.plan.cpu()
            self.controllers.chosen.copy_(torch.bincount(plans, minlength=len(held_out.space)) / count)
        right, latency_ms = held_out.run(samples, plans, jitter)
        accuracy, attained = float(right.mean()), float((latency_ms <= budgets).float().mean())
        beyond = max(0.0, 1.0 - attained - self.config.violations)
        return {
            "accuracy": accuracy, "attainment": attained, "latency_ms": float(latency_ms.mean()),
            "score": accuracy - self.config.multiplier_most * beyond,
        }  # fmt: skip

    def _allowed(self, environment: Environment, samples: Tensor, budgets: Tensor) -> Tensor | None:
        return None if self._costs is None else fitting(self._costs(environment, samples), budgets)

    def _prompts(self) -> tuple[Tensor, Tensor, Tensor]:
        """This process' share of a step: samples, budgets, and numbers to draw choices and jitter from."""
        config, mine = self.config, self._mine
        random = np.random.default_rng([config.seed, self.step])
        samples = random.integers(len(self._environment), size=config.prompts)
        budgets = random.random(config.prompts)
        chance = random.random((config.prompts, config.group, 5))
        # Each minibatch is shared out, so that any number of processes makes the same updates.
        order = (
            np.arange(config.prompts).reshape(config.minibatches, mine.world_size, -1)[:, mine.rank].ravel()
        )
        return (
            torch.from_numpy(samples[order]),
            draw_budgets(self._span, torch.from_numpy(budgets[order])),
            torch.from_numpy(chance[order]).flatten(0, 1),
        )

    def _imitate(self) -> dict[str, float]:
        assert self._imitation is not None
        samples, budgets, _ = self._prompts()
        rate = self.config.rate_at(self.step, self.config.warm_start)
        loss = self._imitation.loss(self.controllers, samples, budgets.float())
        norm = self._update(loss, rate)
        return {"imitation": float(self._mine.all_reduce_mean(loss)), "gradient": norm, "rate": rate}

    def _reinforce(self) -> dict[str, float]:
        config = self.config
        rollout, numbers = self._try()
        at = self.step - config.warm_start
        rate = config.rate_at(at, config.steps)
        told: dict[str, list[Tensor]] = {"loss": [], "kl": [], "entropy": [], "clipped": []}
        norms = []
        for _ in range(config.passes):
            for number in range(config.minibatches):
                part = rollout.part(number, config.minibatches)
                now = self._weigh(self.controllers, part)
                loss = grpo_loss(
                    now.log_prob, part.log_prob, part.reference, part.advantage, now.entropy,
                    clip=config.clip, kl_weight=config.kl,
                    entropy_weight=config.entropy * (1.0 - at / config.steps),
                )  # fmt: skip
                norms.append(self._update(loss.total, rate))
                for name, value in zip(told, (loss.policy, loss.kl, loss.entropy, loss.clipped), strict=True):
                    told[name].append(value)
        numbers |= {
            name: float(self._mine.all_reduce_mean(torch.stack(values).mean()))
            for name, values in told.items()
        }
        self.multiplier.update(1.0 - numbers["attainment"])
        return numbers | {"gradient": max(norms), "multiplier": self.multiplier.value, "rate": rate}

    def _try(self) -> tuple[Rollout, dict[str, float]]:
        """Let the controllers choose, and see what it is worth."""
        config, environment, device = self.config, self._environment, self._mine.device
        samples, budgets, chance = self._prompts()
        budgets = budgets.float()
        rows = samples.repeat_interleave(config.group)

        def look(some: Tensor, tiers: Tensor, positions: Tensor) -> Tensor:
            return environment.tokens_of(rows[some.cpu()], tiers.cpu(), positions.cpu())

        language = environment.language_of(samples).to(device)
        allowed = self._allowed(environment, samples, budgets)
        with torch.no_grad():
            chosen = self.controllers.choose(
                language, budgets, look, allowed=allowed, uniform=chance[:, :4].to(device), group=config.group
            )
        right, latency_ms = environment.run(rows, chosen.plan.cpu(), chance[:, 4])
        many = budgets.repeat_interleave(config.group)
        worth = config.reward(right, latency_ms, many, self.multiplier.value)
        rewards = worth.view(-1, config.group).to(device)
        variance = self._mine.all_reduce_mean(centred(rewards).square().mean())
        rollout = Rollout(
            language=language, budget_ms=budgets.to(device), token=chosen.token,
            allowed=None if allowed is None else allowed.to(device), action=chosen.action,
            log_prob=chosen.log_prob, reference=chosen.log_prob,
            advantage=advantages(rewards, variance=variance).flatten(),
        )  # fmt: skip
        if config.kl > 0.0:
            with torch.no_grad():
                rollout = replace(rollout, reference=self._weigh(self._reference, rollout).log_prob)
        each = {
            "reward": rewards.mean().cpu(), "accuracy": right.mean(),
            "attainment": (latency_ms <= many).float().mean(),
        }  # fmt: skip
        return rollout, {
            name: float(self._mine.all_reduce_mean(value.to(device))) for name, value in each.items()
        }

    def _weigh(self, controllers: Controllers, part: Rollout) -> SampledPlans:
        return controllers.choose(
            part.language, part.budget_ms, lambda rows, *_: part.token[rows], allowed=part.allowed,
            group=self.config.group, action=part.action,
        )  # fmt: skip

    def _update(self, loss: Tensor, rate: float) -> float:
        """One update of the weights; the norm of its gradient."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.zero_grad()
        loss.backward()
        self._mine.average_gradients(self.controllers.parameters())
        norm = float(torch.nn.utils.clip_grad_norm_(self.controllers.parameters(), self.config.max_norm))
        value = float(self._mine.all_reduce_mean(loss))
        if not (math.isfinite(value) and math.isfinite(norm)):
            raise RunError(
                f"its loss is {value}, the norm of its gradient {norm}; lower `rate` (={self.config.rate})"
            )
        self._optimizer.step()
        return norm
