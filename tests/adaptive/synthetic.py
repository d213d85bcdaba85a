"""Requests whose needs are known: what a policy can reach is known, too.

A request is right where its plan has the tier that it needs, and either many blocks or many experts,
whichever it needs. The language feature tells the tier that is needed. The latency token tells the other, but
only from the third position on; and the blocks before it run whole, which takes time. Latency is what vision,
blocks and experts take, with jitter. Most budgets pay for some of the needs only.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from sparseflow.adaptive.plan.space import ModelGeometry, PlanSpace
from sparseflow.adaptive.policy.outcomes import OutcomeTable

WIDTH = 16
BLOCKS, EXPERTS = 16, 7
"""What a request needs of one of the two; of the other it is content with the least."""
TELLS = 2
"""Index of the first position whose latency token tells which."""


@cache
def space(depth: int = 16, top_k: int = 8, tiers: int = 3) -> PlanSpace:
    geometry = ModelGeometry(depth=depth, top_k=top_k, tiers=("low", "medium", "high")[:tiers])
    return PlanSpace.from_importance(geometry, [float(depth - at) for at in range(depth)])


def outcomes(
    samples: int = 512,
    *,
    seed: int = 0,
    repeats: int = 5,
    jitter: float = 0.02,
    luck: float = 0.0,
    plans: PlanSpace | None = None,
) -> OutcomeTable:
    """A table of requests.

    Args:
        samples: How many; four have one image.
        seed: What they are drawn from.
        repeats: Latencies measured of each plan.
        jitter: Standard deviation of a latency's logarithm.
        luck: Share of answers that are the other way round.
        plans: What to choose among; those of the document by default.
    """
    given = plans or space()
    random = np.random.default_rng(seed)
    # The same directions for all splits: they are the model's.
    words, marks, shift = (
        np.random.default_rng(99).normal(size=shape) for shape in ((3, WIDTH), (2, WIDTH), (5, WIDTH))
    )
    tiers, positions = len(given.tiers), len(given.geometry.positions)
    tier_need, block_need = _needs(random, samples, tiers)
    language = 3.0 + 0.3 * words[tier_need] + 0.1 * random.normal(size=(samples, WIDTH))
    tokens = np.empty((samples, tiers, positions, WIDTH))
    for tier in range(tiers):
        for position in range(positions):
            noise = random.normal(size=(samples, WIDTH))
            mark = marks[block_need] if position >= TELLS else 0.0
            tokens[:, tier, position] = 5.0 * shift[position] + mark + 0.5 * words[tier] + 0.2 * noise

    actions = [given.action(plan) for plan in given.plans]
    tier = np.array([each.tier for each in actions])
    depth = np.array([len(plan.blocks) for plan in given.plans]) * 16 / given.geometry.depth
    experts = np.array([plan.top_k for plan in given.plans])
    before = np.array([plan.insertion_position for plan in given.plans])
    routed = 8 * before + experts * (depth - before)
    base_ms = 10.0 + 20.0 * tier + (1.0 + 0.5 * tier) * (3.0 * depth + 0.5 * routed)
    enough = np.where(block_need[:, None] == 1, depth >= BLOCKS, experts >= EXPERTS)
    right = (tier >= tier_need[:, None]) & enough
    right ^= random.random(right.shape) < luck
    latency_ms = base_ms[:, None] * np.exp(jitter * random.normal(size=(samples, len(given), repeats)))
    return OutcomeTable(
        space=given,
        correct=torch.from_numpy(right.astype(np.float32)),
        latency_ms=torch.from_numpy(latency_ms.astype(np.float32)),
        language=torch.from_numpy(language.astype(np.float32)),
        tokens=torch.from_numpy(tokens.astype(np.float32)),
        images=torch.arange(samples) // 4,
    )


def reachable(
    samples: int,
    *,
    seed: int,
    budgets_ms: torch.Tensor,
    plans: PlanSpace | None = None,
    costs_ms: torch.Tensor | None = None,
) -> torch.Tensor:
    """Goodput that no pair of controllers exceeds, but by luck: by every rule that knows what they can know.

    Args:
        samples: As of the table.
        seed: As of the table.
        budgets_ms: [budgets].
        plans: As of the table.
        costs_ms: What plans are taken to take, [plans]; those beyond a budget are masked.

    Returns:
        [budgets].
    """
    table = outcomes(samples, seed=seed, plans=plans)
    random = np.random.default_rng(seed)
    tier_need, block_need = map(torch.from_numpy, _needs(random, samples, len(table.space.tiers)))
    actions = [table.space.action(plan) for plan in table.space.plans]
    begins = torch.tensor([each.tier * 5 + each.position for each in actions])
    tells = torch.tensor([each.position >= TELLS for each in actions])
    found = torch.zeros(len(budgets_ms))
    for at, budget in enumerate(budgets_ms):
        good = table.correct * (table.latency_ms <= budget).float().mean(2)
        if costs_ms is not None:
            good = good * (costs_ms <= budget)
        for need in tier_need.unique():
            every = [good[(tier_need == need) & (block_need == kind)].sum(0) for kind in (0, 1)]
            best = 0.0
            for begin in begins.unique():
                here = begins == begin
                told = bool(tells[here].any())
                mine = [each[here] for each in every]
                best = max(
                    best, float(sum(each.max() for each in mine) if told else (mine[0] + mine[1]).max())
                )
            found[at] += best / samples
    return found


def _needs(random: np.random.Generator, samples: int, tiers: int) -> tuple[np.ndarray, np.ndarray]:
    """The tier that each request needs, and whether it needs blocks (1) or experts (0)."""
    return random.integers(tiers, size=samples), random.integers(2, size=samples)
