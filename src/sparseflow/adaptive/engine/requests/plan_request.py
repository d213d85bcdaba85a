"""Asking a decider about one request, and keeping what it said."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor

from sparseflow.adaptive.engine.requests.request import (
    GenerationRequest,
    InitialDecision,
    PlanDecider,
    PlanDecision,
    Rejection,
    RequestRejected,
    SupportsPreparation,
    SupportsReplanning,
)
from sparseflow.adaptive.plan.space import Plan
from sparseflow.errors import PlanError


class PlanRequest:
    """The questions to a decider about one request.

    Args:
        decide: The decider.
        request: What it is told of the request.
        remaining_ms: What is left of the budget, now.
        plans: Those that it may choose; None for all.

    Attributes:
        spent_s: Time in the decider so far.
    """

    def __init__(
        self,
        decide: PlanDecider,
        request: GenerationRequest,
        remaining_ms: Callable[[], float],
        *,
        plans: Collection[Plan] | None = None,
    ) -> None:
        self._decide, self._request, self._remaining_ms, self._plans = decide, request, remaining_ms, plans
        self._choice: InitialDecision | None = None
        self._decision: PlanDecision | None = None
        self.spent_s = 0.0

    @property
    def again_wanted(self) -> bool:
        """Whether the decider wants to be asked after the vision encoder."""
        return isinstance(self._decide, SupportsReplanning)

    @property
    def feasible(self) -> bool:
        """Whether it thinks that the budget will be met."""
        return all(found.feasible for found in self._found())

    @property
    def predicted_ms(self) -> float | None:
        """What it thinks that the request takes; the later word counts."""
        told = [found.predicted_ms for found in self._found() if found.predicted_ms is not None]
        return told[-1] if told else None

    def limit(self, max_new_tokens: int) -> int:
        """Tokens to generate at most, of those that were asked for."""
        told = [found.max_new_tokens for found in self._found() if found.max_new_tokens is not None]
        return min([max_new_tokens, *told])

    def first(self) -> InitialDecision:
        """Before the vision encoder.

        Raises:
            Refused: It refuses.
            PlanError: It gives something else than a choice.
        """
        found = self._timed(lambda: self._decide.first(self._request, self._remaining_ms()))
        if isinstance(found, Rejection):
            raise RequestRejected(found.reason, found.least_ms)
        if not isinstance(found, InitialDecision):
            raise PlanError(f"the decider must give a Choice or a Refusal first, not {found!r}")
        self._choice = found
        return found

    def prepare(self) -> None:
        """While the device works, which should take longer: so it is not counted as time in the decider."""
        if isinstance(self._decide, SupportsPreparation):
            self._decide.prepare(self._request)

    def again(self, position: int) -> int:
        """After the vision encoder: the position to go on with."""
        decide, choice = self._decide, self._choice
        if choice is None or not isinstance(decide, SupportsReplanning):
            return position
        return self._timed(lambda: decide.again(self._request, choice, self._remaining_ms()))

    def second(self, latency_token: Tensor) -> Plan:
        """At the insertion.

        Raises:
            PlanError: It gives no plan, or one that it may not choose.
        """
        found = self._timed(lambda: self._decide.second(latency_token, self._request, self._remaining_ms()))
        decision = PlanDecision(plan=found) if isinstance(found, Plan) else found
        if not isinstance(decision, PlanDecision):
            raise PlanError(f"the decider must give a Plan or a Decision, not {found!r}")
        if self._plans is not None and decision.plan not in self._plans:
            raise PlanError(
                f"{decision.plan.id} is not among the {len(self._plans)} plans of this engine; decide among "
                "its `plans`"
            )
        self._decision = decision
        return decision.plan

    def _found(self) -> list[InitialDecision | PlanDecision]:
        return [found for found in (self._choice, self._decision) if found is not None]

    def _timed(self, ask: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        try:
            return ask()
        finally:
            self.spent_s += time.perf_counter() - begin
