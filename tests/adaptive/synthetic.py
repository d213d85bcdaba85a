"""Synthetic requests for which the best possible policy is known.

A plan answers a request correctly if it has the tier that the request needs and either many blocks or many
experts, whichever it needs. The language feature reveals the tier. The latency token reveals the other need,
but only from the third insertion position on, and the blocks before it run in full, which takes time. Latency
is a function of vision, blocks and experts, with jitter. Most budgets suffice for some of the needs only.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from sparseflow.adaptive.plan.space import ModelGeometry, PlanSpace
from sparseflow.adaptive.policy.outcomes import OutcomeTable
from sparseflow.adaptive.policy.policies import LookupTablePolicy

WIDTH = 16
MIN_BLOCKS, MIN_EXPERTS = 16, 7
"""Number of blocks, or of experts, that a request needs; of the other the minimum suffices."""
REVEALING_POSITION = 2
"""Index of the first position whose latency token reveals the need."""


@cache
def make_space(depth: int = 16, top_k: int = 8, tiers: int = 3) -> PlanSpace:
    geometry = ModelGeometry(depth=depth, top_k=top_k, tiers=("low", "medium", "high")[:tiers])
    return PlanSpace.from_importance(geometry, [float(depth - block) for block in range(depth)])


def make_outcomes(
    samples: int = 512,
    *,
    seed: int = 0,
    repeats: int = 5,
    jitter: float = 0.02,
    luck: float = 0.0,
    plans: PlanSpace | None = None,
) -> OutcomeTable:
    """Return a table of requests.

    Args:
        samples: Number of requests.
        seed: Random seed.
        repeats: Number of latencies per plan.
        jitter: Standard deviation of the logarithm of a latency.
        luck: Fraction of answers that are inverted.
        plans: Plan space; `make_space()` by default.
    """
    plan_space = plans or make_space()
    rng = np.random.default_rng(seed)
    # The directions belong to the model, so all splits share them.
    tier_directions, need_directions, position_offsets = (
        np.random.default_rng(99).normal(size=shape) for shape in ((3, WIDTH), (2, WIDTH), (5, WIDTH))
    )
    tiers, positions = len(plan_space.tiers), len(plan_space.geometry.positions)
    tier_need, block_need = _sample_needs(rng, samples, tiers)
    language = 3.0 + 0.3 * tier_directions[tier_need] + 0.1 * rng.normal(size=(samples, WIDTH))
    tokens = np.empty((samples, tiers, positions, WIDTH))
    for tier in range(tiers):
        for position in range(positions):
            noise = rng.normal(size=(samples, WIDTH))
            need_signal = need_directions[block_need] if position >= REVEALING_POSITION else 0.0
            tokens[:, tier, position] = (
                5.0 * position_offsets[position] + need_signal + 0.5 * tier_directions[tier] + 0.2 * noise
            )

    actions = [plan_space.action(plan) for plan in plan_space.plans]
    tier = np.array([action.tier for action in actions])
    depth = np.array([len(plan.blocks) for plan in plan_space.plans]) * 16 / plan_space.geometry.depth
    experts = np.array([plan.top_k for plan in plan_space.plans])
    positions_before = np.array([plan.insertion_position for plan in plan_space.plans])
    routed = 8 * positions_before + experts * (depth - positions_before)
    base_ms = 10.0 + 20.0 * tier + (1.0 + 0.5 * tier) * (3.0 * depth + 0.5 * routed)
    enough = np.where(block_need[:, None] == 1, depth >= MIN_BLOCKS, experts >= MIN_EXPERTS)
    correct = (tier >= tier_need[:, None]) & enough
    correct ^= rng.random(correct.shape) < luck
    latency_ms = base_ms[:, None] * np.exp(jitter * rng.normal(size=(samples, len(plan_space), repeats)))
    return OutcomeTable(
        space=plan_space,
        correct=torch.from_numpy(correct.astype(np.float32)),
        latency_ms=torch.from_numpy(latency_ms.astype(np.float32)),
        language=torch.from_numpy(language.astype(np.float32)),
        tokens=torch.from_numpy(tokens.astype(np.float32)),
    )


def make_lookup_policy(table: OutcomeTable, *, quantile: float = 0.99) -> LookupTablePolicy:
    """Return the lookup table of a table of outcomes, with latency bounds at a quantile."""
    return LookupTablePolicy(accuracy=table.correct.mean(0), costs_ms=table.latency_quantiles_ms(quantile))


def compute_max_goodput(
    samples: int,
    *,
    seed: int,
    budgets_ms: torch.Tensor,
    plans: PlanSpace | None = None,
    costs_ms: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the maximum goodput of any pair of controllers, shape [budgets].

    Enumerates all rules that use only the information that controllers have.

    Args:
        samples: See `make_outcomes`.
        seed: See `make_outcomes`.
        budgets_ms: Budgets, shape [budgets].
        plans: See `make_outcomes`.
        costs_ms: Assumed latency of each plan, shape [plans]; plans above a budget are excluded.
    """
    table = make_outcomes(samples, seed=seed, plans=plans)
    rng = np.random.default_rng(seed)
    tier_need, block_need = map(torch.from_numpy, _sample_needs(rng, samples, len(table.space.tiers)))
    actions = [table.space.action(plan) for plan in table.space.plans]
    first_actions = torch.tensor([action.tier * 5 + action.position for action in actions])
    reveals_need = torch.tensor([action.position >= REVEALING_POSITION for action in actions])
    goodput = torch.zeros(len(budgets_ms))
    for index, budget in enumerate(budgets_ms):
        good = table.correct * (table.latency_ms <= budget).float().mean(2)
        if costs_ms is not None:
            good = good * (costs_ms <= budget)
        for need in tier_need.unique():
            goodput_by_need = [good[(tier_need == need) & (block_need == kind)].sum(0) for kind in (0, 1)]
            best_goodput = 0.0
            for first_action in first_actions.unique():
                mask = first_actions == first_action
                need_known = bool(reveals_need[mask].any())
                candidates = [values[mask] for values in goodput_by_need]
                best_goodput = max(
                    best_goodput,
                    float(
                        sum(values.max() for values in candidates)
                        if need_known
                        else (candidates[0] + candidates[1]).max()
                    ),
                )
            goodput[index] += best_goodput / samples
    return goodput


def _sample_needs(rng: np.random.Generator, samples: int, tiers: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the tier that each request needs, and whether it needs blocks (1) or experts (0)."""
    return rng.integers(tiers, size=samples), rng.integers(2, size=samples)
