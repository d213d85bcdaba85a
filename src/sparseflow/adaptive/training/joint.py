"""Joint training of both controller stages: one step of imitation or GRPO.

A GRPO step samples prompts, lets the controllers choose a group of plans for each, runs these, and makes a
few updates from the rewards. Prompts and random numbers depend only on the seed and the step, and are drawn
for all processes together and then divided; the number of processes only changes the order of sums.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparseflow.adaptive.controllers.controllers import Controllers, LatencyTokens, SampledPlans
from sparseflow.adaptive.controllers.plan_distribution import PlanDistribution
from sparseflow.adaptive.policy.outcomes import OutcomeTable, draw_budgets, find_feasible
from sparseflow.adaptive.policy.policies import OraclePolicy
from sparseflow.adaptive.training.config import GrpoConfig
from sparseflow.adaptive.training.grpo import center_rewards, compute_advantages, compute_grpo_loss
from sparseflow.core.training.distributed import DistributedContext
from sparseflow.core.training.optimizer import (
    check_finite,
    lr_factor,
    set_learning_rate,
    split_weight_decay,
)
from sparseflow.errors import InputError


class ImitationTargets:
    """Oracle plans to imitate.

    Args:
        outcomes: Table of outcomes.
        costs_ms: Latency bounds as for `ControllerPolicy`; the target is the best plan that is not masked.
    """

    def __init__(self, outcomes: OutcomeTable, costs_ms: Tensor | None = None) -> None:
        self._outcomes, self._costs_ms = outcomes, costs_ms
        self._oracle = OraclePolicy(prefer=outcomes.correct.mean(0))
        self._actions = PlanDistribution(outcomes.space).actions

    def loss(self, controllers: Controllers, samples: Tensor, budgets_ms: Tensor) -> Tensor:
        """Mean negative log-likelihood of the oracle's choices in nats: [n] and [n] -> scalar."""
        allowed = None if self._costs_ms is None else find_feasible(self._costs_ms, budgets_ms)
        plans = self._oracle.choose(self._outcomes, samples, budgets_ms, allowed=allowed)
        choice = controllers.choose(
            self._outcomes.get_language(samples), budgets_ms, _make_token_lookup(self._outcomes, samples),
            allowed=allowed, action=self._actions[plans].to(controllers.device),
        )  # fmt: skip
        return -choice.log_prob.mean()


def _make_token_lookup(outcomes: OutcomeTable, samples: Tensor) -> LatencyTokens:
    """Latency tokens of rows of `samples`, for `Controllers.choose`."""
    return lambda rows, tiers, positions: outcomes.get_latency_tokens(
        samples[rows.cpu()], tiers.cpu(), positions.cpu()
    )


_NUM_FIT_SAMPLES = 1024
"""Samples used to fit the feature standardization."""
_WARMUP = 0.05
"""Fraction of the steps with rising learning rate."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Rollout:
    """Evaluated choices of n = prompts · group rows, stored by prompt.

    Attributes:
        language: Language features, [prompts, d].
        budget_ms: Budgets, [prompts].
        token: Latency tokens, [n, d].
        allowed: Allowed plans, [prompts, plans] bool; None if nothing is masked.
        action: Choices, [n, 4].
        log_prob: Log-probabilities at sampling time, [n].
        reference: Log-probabilities by the reference policy, [n].
        advantage: Advantages, [n].
    """

    language: Tensor
    budget_ms: Tensor
    token: Tensor
    allowed: Tensor | None
    action: Tensor
    log_prob: Tensor
    reference: Tensor
    advantage: Tensor

    def chunk(self, index: int, parts: int) -> Rollout:
        """Part `index` of `parts` equal parts of the prompts."""
        chunks = {
            name: value.chunk(parts)[index] for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **chunks)


class JointTrainer:
    """State of the joint training.

    Args:
        config: Settings.
        outcomes: Outcomes of the training requests.
        costs_ms: Latency bound of each plan, [plans]: plans above a budget are masked. None teaches latency
            by rewards alone.
        model_id: Id of the model.
        context: This process within the distributed training.

    Attributes:
        controllers: Controllers in training.
        multiplier: Price of a violation.
        step: Completed steps.

    Raises:
        InputError: Prompts cannot be divided evenly.
    """

    def __init__(
        self,
        config: GrpoConfig,
        outcomes: OutcomeTable,
        costs_ms: Tensor | None,
        model_id: str,
        context: DistributedContext,
    ) -> None:
        if config.prompts % (config.minibatches * context.world_size):
            raise InputError(
                f"`prompts` (={config.prompts}) must be divisible by `minibatches` (={config.minibatches}) "
                f"times the {context.world_size} processes"
            )
        self.config, self._outcomes, self._costs_ms, self._context = config, outcomes, costs_ms, context
        self._budget_range = config.budgets_ms or outcomes.budget_range_ms()
        self._imitation = ImitationTargets(outcomes, costs_ms)
        self.controllers = Controllers(
            outcomes.space, width=outcomes.width, model_id=model_id, seed=config.seed
        )
        sample_ids = np.random.default_rng(config.seed).permutation(len(outcomes))[:_NUM_FIT_SAMPLES]
        self.controllers.fit_features(outcomes.language[sample_ids], outcomes.tokens[sample_ids])
        self.controllers.to(context.device)
        self.multiplier = config.make_multiplier()
        self.step = 0
        self._reset_optimizer()

    def _reset_optimizer(self) -> None:
        """Create a new optimizer and make the current policy the reference."""
        self._optimizer = torch.optim.AdamW(
            split_weight_decay(self.controllers.parameters(), self.config.weight_decay), lr=self.config.rate
        )
        self._update_reference()

    def _update_reference(self) -> None:
        self._reference = copy.deepcopy(self.controllers).requires_grad_(False)

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint."""
        return {
            "step": self.step,
            "controllers": self.controllers.state_dict(),
            "reference": self._reference.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "multiplier": self.multiplier.value,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state from a checkpoint."""
        self.controllers.load_state_dict(state["controllers"])
        self._reference.load_state_dict(state["reference"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.multiplier.value = state["multiplier"]
        self.step = state["step"]

    def train_step(self) -> dict[str, float]:
        """Run one step; returns its metrics.

        Raises:
            RunError: A loss, gradient or logit is not finite; the weights are unchanged.
        """
        warm_start = self.config.warm_start
        metrics = self._imitation_step() if self.step < warm_start else self._grpo_step()
        self.step += 1
        if self.step == warm_start:
            self._reset_optimizer()
        elif self.step > warm_start and (self.step - warm_start) % self.config.reference_every == 0:
            self._update_reference()
        return metrics

    def validate(self, held_out: OutcomeTable) -> dict[str, float]:
        """Evaluate the most probable plans on fixed requests and budgets.

        Also updates the plan frequencies of the controllers.

        Returns:
            `"accuracy"`, `"attainment"`, `"latency_ms"`, and `"score"`, by which the best weights are
            selected: accuracy minus the maximum price times the violations above the allowed fraction.
        """
        generator = np.random.default_rng(self.config.seed)
        count = self.config.validation
        # Stratified budgets in random order.
        quantiles = torch.from_numpy((generator.permutation(count) + generator.random(count)) / count)
        samples = torch.from_numpy(generator.permutation(np.arange(count) % len(held_out)))
        budgets = draw_budgets(self._budget_range, quantiles.float())
        uniform = torch.from_numpy(generator.random(count))
        with torch.no_grad():
            choices = self.controllers.choose(
                held_out.get_language(samples), budgets, _make_token_lookup(held_out, samples),
                allowed=self._find_allowed(budgets),
            )  # fmt: skip
            plans = choices.plan.cpu()
            self.controllers.plan_frequency.copy_(
                torch.bincount(plans, minlength=len(held_out.space)) / count
            )
        right, latency_ms = held_out.run(samples, plans, uniform)
        accuracy, attained = float(right.mean()), float((latency_ms <= budgets).float().mean())
        excess_violations = max(0.0, 1.0 - attained - self.config.violations)
        return {
            "accuracy": accuracy, "attainment": attained, "latency_ms": float(latency_ms.mean()),
            "score": accuracy - self.config.multiplier_most * excess_violations,
        }  # fmt: skip

    def _find_allowed(self, budgets: Tensor) -> Tensor | None:
        return None if self._costs_ms is None else find_feasible(self._costs_ms, budgets)

    def _sample_prompts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Samples, budgets, and uniform numbers of this process for the current step."""
        config, context = self.config, self._context
        generator = np.random.default_rng([config.seed, self.step])
        samples = generator.integers(len(self._outcomes), size=config.prompts)
        budgets = generator.random(config.prompts)
        uniform = generator.random((config.prompts, config.group, 5))
        # Each minibatch is divided among the processes, so that their number does not change the updates.
        order = (
            np.arange(config.prompts)
            .reshape(config.minibatches, context.world_size, -1)[:, context.rank]
            .ravel()
        )
        return (
            torch.from_numpy(samples[order]),
            draw_budgets(self._budget_range, torch.from_numpy(budgets[order])),
            torch.from_numpy(uniform[order]).flatten(0, 1),
        )

    def _imitation_step(self) -> dict[str, float]:
        samples, budgets, _ = self._sample_prompts()
        rate = self._set_rate(self.step, self.config.warm_start)
        loss = self._imitation.loss(self.controllers, samples, budgets.float())
        norm = self._apply_gradients(loss)
        return {"imitation": float(self._context.all_reduce_mean(loss)), "gradient": norm, "rate": rate}

    def _grpo_step(self) -> dict[str, float]:
        config = self.config
        rollout, metrics = self._collect_rollout()
        grpo_step = self.step - config.warm_start
        rate = self._set_rate(grpo_step, config.steps)
        terms: dict[str, list[Tensor]] = {"loss": [], "kl": [], "entropy": [], "clipped": []}
        norms = []
        for _ in range(config.passes):
            for index in range(config.minibatches):
                part = rollout.chunk(index, config.minibatches)
                current = self._evaluate_actions(self.controllers, part)
                loss = compute_grpo_loss(
                    current.log_prob, part.log_prob, part.reference, part.advantage, current.entropy,
                    clip=config.clip, kl_weight=config.kl,
                    entropy_weight=config.entropy * (1.0 - grpo_step / config.steps),
                )  # fmt: skip
                norms.append(self._apply_gradients(loss.total))
                values = (loss.policy, loss.kl, loss.entropy, loss.clipped)
                for name, value in zip(terms, values, strict=True):
                    terms[name].append(value)
        metrics |= {
            name: float(self._context.all_reduce_mean(torch.stack(values).mean()))
            for name, values in terms.items()
        }
        self.multiplier.update(1.0 - metrics["attainment"])
        return metrics | {"gradient": max(norms), "multiplier": self.multiplier.value, "rate": rate}

    def _collect_rollout(self) -> tuple[Rollout, dict[str, float]]:
        """Sample choices and compute their rewards and advantages."""
        config, device = self.config, self._context.device
        samples, budgets, uniform = self._sample_prompts()
        budgets = budgets.float()
        rows = samples.repeat_interleave(config.group)
        language, allowed = self._outcomes.get_language(samples).to(device), self._find_allowed(budgets)
        with torch.no_grad():
            choices = self.controllers.choose(
                language, budgets, _make_token_lookup(self._outcomes, rows), allowed=allowed,
                uniform=uniform[:, :4].to(device), group=config.group,
            )  # fmt: skip
        right, latency_ms = self._outcomes.run(rows, choices.plan.cpu(), uniform[:, 4])
        row_budgets = budgets.repeat_interleave(config.group)
        row_rewards = config.reward(right, latency_ms, row_budgets, self.multiplier.value)
        rewards = row_rewards.view(-1, config.group).to(device)
        variance = self._context.all_reduce_mean(center_rewards(rewards).square().mean())
        rollout = Rollout(
            language=language, budget_ms=budgets.to(device), token=choices.token,
            allowed=None if allowed is None else allowed.to(device), action=choices.action,
            log_prob=choices.log_prob, reference=choices.log_prob,
            advantage=compute_advantages(rewards, variance=variance).flatten(),
        )  # fmt: skip
        if config.kl > 0.0:
            with torch.no_grad():
                rollout = replace(
                    rollout, reference=self._evaluate_actions(self._reference, rollout).log_prob
                )
        metrics = {
            "reward": rewards.mean().cpu(), "accuracy": right.mean(),
            "attainment": (latency_ms <= row_budgets).float().mean(),
        }  # fmt: skip
        return rollout, {
            name: float(self._context.all_reduce_mean(value.to(device))) for name, value in metrics.items()
        }

    def _evaluate_actions(self, controllers: Controllers, part: Rollout) -> SampledPlans:
        return controllers.choose(
            part.language, part.budget_ms, lambda rows, *_: part.token[rows], allowed=part.allowed,
            group=self.config.group, action=part.action,
        )  # fmt: skip

    def _set_rate(self, step: int, num_steps: int) -> float:
        """Set the learning rate of a step of the warm start or of GRPO, and return it."""
        rate = self.config.rate * lr_factor(step, num_steps, warmup=_WARMUP)
        set_learning_rate(self._optimizer, rate)
        return rate

    def _apply_gradients(self, loss: Tensor) -> float:
        """Update the weights; returns the gradient norm."""
        self._optimizer.zero_grad()
        loss.backward()
        self._context.average_gradients(self.controllers.parameters())
        norm = float(torch.nn.utils.clip_grad_norm_(self.controllers.parameters(), self.config.max_norm))
        check_finite(
            {"loss": float(self._context.all_reduce_mean(loss)), "gradient norm": norm},
            step=self.step + 1, hint=f"lower `rate` (={self.config.rate})",
        )  # fmt: skip
        self._optimizer.step()
        return norm
