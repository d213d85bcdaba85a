"""State of one forward pass under a plan, and the plan that a key-value cache belongs to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from sparseflow.adaptive.plan.space import Plan, Tier
from sparseflow.errors import ModelError, PlanError

RouteOverride = Callable[[nn.Module, int, Tensor], Any]
"""Replacement for a router's forward: (router, top-k, hidden states) -> routing; None if it does not handle
the router.
"""

DecidePlan = Callable[[Tensor], Plan]
"""Stage 2: hidden states [batch, tokens, d] after the last block before the insertion -> plan."""

_ON_CACHE = "_sparseflow_begun"
"""Attribute of a cache that holds its `CachePlan`, so that copies keep it."""


@dataclass(kw_only=True)
class PlanExecution:
    """State of one forward pass under a plan.

    Attributes:
        tier: Tier of the plan.
        insertion_position: Insertion position of the plan.
        plan: The plan; None until stage 2 has decided it.
        decide: Decides the plan; called once, at the insertion.
        executed_blocks: Blocks that ran in the last forward, in order.
        executed_routers: Blocks whose router ran in the last forward.
        route_override: Replacement for routers, if any.
    """

    tier: Tier | None
    insertion_position: int
    plan: Plan | None
    decide: DecidePlan | None = None
    executed_blocks: list[int] = field(default_factory=list)
    executed_routers: set[int] = field(default_factory=set)
    route_override: RouteOverride | None = None

    def runs(self, block: int) -> bool:
        """Whether a block runs."""
        if block < self.insertion_position:
            return True
        assert self.plan is not None
        return self.plan.runs(block)

    def decide_plan(self, hidden: Tensor) -> Plan:
        """Run stage 2.

        Raises:
            PlanError: The result is not a plan, or differs in tier or insertion position.
        """
        assert self.decide is not None
        plan = self.decide(hidden)
        if not isinstance(plan, Plan):
            raise PlanError(f"stage 2 must return a Plan, not {plan!r}")
        if (plan.tier, plan.insertion_position) != (self.tier, self.insertion_position):
            raise PlanError(
                f"stage 2 chose {plan.id}, but stage 1 chose tier {self.tier!r} and position "
                f"{self.insertion_position}"
            )
        return plan


@dataclass(kw_only=True)
class CachePlan:
    """The plan that a cache was filled with.

    Attributes:
        plan: Plan of the request.
        state: Values of `Adapter.state` for the request.
    """

    plan: Plan
    state: list[Any] = field(default_factory=list)

    @staticmethod
    def read_from(cache: Any) -> CachePlan | None:
        """Read the plan of a cache; None without a cache or a plan."""
        return getattr(cache, _ON_CACHE, None)

    def attach_to(self, cache: Any) -> None:
        """Store this on a cache.

        Raises:
            ModelError: The cache does not accept attributes.
        """
        try:
            setattr(cache, _ON_CACHE, self)
        except AttributeError:
            raise ModelError(
                f"{type(cache).__name__} does not accept attributes; the adapter must make the model "
                "use a cache that does"
            ) from None

    def check(self, running: PlanExecution, lengths: Mapping[int, int]) -> None:
        """Check that a forward continues the cache with the plan that filled it.

        Raises:
            PlanError: Another plan runs, or the cache is incomplete.
        """
        if running.plan != self.plan:
            other_plan = "one that is still to be decided" if running.plan is None else running.plan.id
            raise PlanError(
                f"this cache was filled with plan {self.plan.id}, but the forward runs {other_plan}; "
                "use a new cache"
            )
        self.check_lengths(lengths)

    def check_lengths(self, lengths: Mapping[int, int]) -> None:
        """Check that all blocks of the plan hold equally many tokens, and other blocks none.

        Args:
            lengths: Block -> cached tokens, for blocks with any.

        Raises:
            PlanError: They do not.
        """
        if tuple(lengths) != self.plan.blocks or len(set(lengths.values())) > 1:
            raise PlanError(
                f"the cache of {self.plan.id} must hold equally many tokens of each of its blocks, "
                f"but holds {dict(lengths)}; use a new cache"
            )
