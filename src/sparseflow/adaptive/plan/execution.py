"""One call's way through a model, and what a cache remembers of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from sparseflow.adaptive.plan.space import Plan, Tier
from sparseflow.errors import ModelError, PlanError

Route = Callable[[nn.Module, int, Tensor], Any]
"""In place of a router's forward: the router, how many experts, and what it is given. None where it does not
take this router."""

Decide = Callable[[Tensor], Plan]
"""Stage 2: from what leaves the last block before the insertion, [batch, tokens, d], to a plan."""

_ON_CACHE = "_sparseflow_begun"
"""Where a cache keeps how it was begun: on itself, so that a copy of it knows, too."""


@dataclass(kw_only=True)
class PlanExecution:
    """One call's way through a model.

    Attributes:
        tier: As in `Plan`.
        insertion_position: As in `Plan`.
        plan: The plan; None until the second controller has decided.
        decide: Called once, at the insertion.
        ran: Blocks that ran in the last forward, in order.
        routed: Blocks whose router was asked in it.
        route: What stands in for routers, if anything does.
    """

    tier: Tier | None
    insertion_position: int
    plan: Plan | None
    decide: Decide | None = None
    ran: list[int] = field(default_factory=list)
    routed: set[int] = field(default_factory=set)
    route: Route | None = None

    def runs(self, block: int) -> bool:
        """Whether a block runs."""
        if block < self.insertion_position:
            return True
        assert self.plan is not None
        return self.plan.runs(block)

    def decided(self, hidden: Tensor) -> Plan:
        """What the second controller decides.

        Raises:
            PlanError: It is no plan, or decides anew what was decided before.
        """
        assert self.decide is not None
        plan = self.decide(hidden)
        if not isinstance(plan, Plan):
            raise PlanError(f"the second controller must give a whole plan, not {plan!r}")
        if (plan.tier, plan.insertion_position) != (self.tier, self.insertion_position):
            raise PlanError(
                f"the second controller chose {plan.id}, but tier {self.tier!r} and position "
                f"{self.insertion_position} were decided before"
            )
        return plan


@dataclass(kw_only=True)
class CachePlan:
    """How a cache was begun.

    Attributes:
        plan: The plan of its request.
        state: What the model keeps on itself for the request, as `Adapter.state` names it.
    """

    plan: Plan
    state: list[Any] = field(default_factory=list)

    @staticmethod
    def of(cache: Any) -> CachePlan | None:
        """How a cache was begun; None where there is no cache, or one without a plan."""
        return getattr(cache, _ON_CACHE, None)

    def mark(self, cache: Any) -> None:
        """Have a cache remember it.

        Raises:
            ModelError: It cannot, as a tuple.
        """
        try:
            setattr(cache, _ON_CACHE, self)
        except AttributeError:
            raise ModelError(
                f"a cache of type {type(cache).__name__} cannot remember its plan; the adapter must have the "
                "model use one that takes attributes"
            ) from None

    def check(self, running: PlanExecution, lengths: Mapping[int, int]) -> None:
        """That the cache is gone on with as it was begun.

        Raises:
            PlanError: Another plan runs, or the cache is not whole.
        """
        if running.plan != self.plan:
            asked = "one that is still to be decided" if running.plan is None else running.plan.id
            raise PlanError(
                f"a plan is frozen for a request's life: this cache was begun with {self.plan.id}, not with "
                f"{asked}; begin a new one"
            )
        self.check_lengths(lengths)

    def check_lengths(self, lengths: Mapping[int, int]) -> None:
        """That a cache holds as many tokens of each of the plan's blocks, and none of others.

        Args:
            lengths: Block -> tokens, of those that have any.

        Raises:
            PlanError: It does not.
        """
        if tuple(lengths) != self.plan.blocks or len(set(lengths.values())) > 1:
            raise PlanError(
                f"a cache of {self.plan.id} must hold as many tokens of each of its blocks, and holds "
                f"{dict(lengths)}: a forward broke off, or something else wrote to it; begin a new one"
            )
