"""Some plans that tell about all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sparseflow.adaptive.plan import Plan, PlanSpace, Tier
from sparseflow.errors import InputError


def spread(
    space: PlanSpace,
    count: int,
    *,
    seed: int = 0,
    text_only: int = 0,
    tiers: Sequence[Tier | None] | None = None,
) -> tuple[Plan, ...]:
    """Some plans that tell about the others: of each tier the dearest, the cheapest, and random ones.

    Args:
        space: The plans.
        count: How many, at least two a tier; all of them where there are fewer.
        seed: What they are drawn from.
        text_only: How many more to choose for requests without image, of a model that takes them.
        tiers: Those to choose plans of; by default all of the space.

    Raises:
        InputError: A count is too small.
    """
    tiers = space.tiers if tiers is None else tiers
    if count < 2 * len(tiers) or text_only < 0:
        raise InputError(
            f"`count` (={count}) must be at least {2 * len(tiers)}, two a tier; `text_only` not negative"
        )
    generator = np.random.default_rng(seed)
    found: list[Plan] = []
    for at, tier in enumerate(tiers):
        mine = [plan for plan in space.plans if plan.tier == tier]
        share = count // len(tiers) + (at < count % len(tiers))
        found += _extremes(mine, share, generator)
    if text_only and space.geometry.tiers:
        bare = {_without_image(plan): None for plan in space.plans}
        found += _extremes(list(bare), text_only, generator)
    return tuple(found)


def _extremes(plans: list[Plan], count: int, generator: np.random.Generator) -> list[Plan]:
    """The dearest, the cheapest, and random ones of the rest."""
    ranked = sorted(plans, key=lambda plan: (len(plan.blocks), plan.top_k, plan.insertion_position))
    if count >= len(ranked):
        return ranked
    ends = [ranked[-1], ranked[0]][:count]
    rest = ranked[1:-1]
    drawn = generator.choice(len(rest), size=max(min(count - 2, len(rest)), 0), replace=False)
    return ends + [rest[at] for at in sorted(drawn)]


def _without_image(plan: Plan) -> Plan:
    return Plan(tier=None, insertion_position=plan.insertion_position, top_k=plan.top_k, blocks=plan.blocks)
