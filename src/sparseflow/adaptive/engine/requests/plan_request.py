"""Queries the policy of one request, and keeps its decisions."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor

from sparseflow.adaptive.engine.requests.request import (
    Decision,
    GenerationRequest,
    InitialDecision,
    PlanDecider,
    PlanDecision,
    Rejection,
    RequestRejected,
    SupportsPreparation,
)
from sparseflow.adaptive.plan.space import Plan
from sparseflow.errors import PlanError


class PlanRequest:
    """The decisions of a policy about one request.

    Args:
        decide: The policy.
        request: The request.
        remaining_ms: Returns the remaining budget.
        plans: Plans that may be chosen; None for all.

    Attributes:
        policy_s: Time spent in the policy.
    """

    def __init__(
        self,
        decide: PlanDecider,
        request: GenerationRequest,
        remaining_ms: Callable[[], float],
        *,
        plans: Collection[Plan] | None = None,
    ) -> None:
        self._policy, self._request, self._remaining_ms, self._plans = decide, request, remaining_ms, plans
        self._decisions: list[Decision] = []
        self.policy_s = 0.0

    @property
    def feasible(self) -> bool:
        """Whether the policy expects the budget to be met."""
        return all(decision.feasible for decision in self._decisions)

    @property
    def predicted_ms(self) -> float | None:
        """Latency expected by the latest decision."""
        predictions = (decision.predicted_ms for decision in reversed(self._decisions))
        return next((predicted for predicted in predictions if predicted is not None), None)

    def limit(self, max_new_tokens: int) -> int:
        """Maximum number of tokens to generate, at most `max_new_tokens`."""
        limits = (decision.max_new_tokens for decision in self._decisions)
        return min([max_new_tokens, *(limit for limit in limits if limit is not None)])

    def choose_initial(self) -> InitialDecision:
        """Decide before the vision encoder.

        Raises:
            RequestRejected: The policy rejects the request.
            PlanError: The policy returns another type.
        """
        decision = self._time_call(lambda: self._policy.choose_initial(self._request, self._remaining_ms()))
        if isinstance(decision, Rejection):
            raise RequestRejected(decision.reason, decision.least_ms)
        if not isinstance(decision, InitialDecision):
            raise PlanError(
                f"`choose_initial` must return an InitialDecision or a Rejection, not {decision!r}"
            )
        self._decisions.append(decision)
        return decision

    def prepare(self) -> None:
        """Let the policy prepare while the device works; not counted as policy time."""
        if isinstance(self._policy, SupportsPreparation):
            self._policy.prepare(self._request)

    def choose_plan(self, latency_token: Tensor) -> Plan:
        """Decide at the insertion.

        Raises:
            PlanError: The policy returns no plan, or one that is not allowed.
        """
        answer = self._time_call(
            lambda: self._policy.choose_plan(latency_token, self._request, self._remaining_ms())
        )
        decision = PlanDecision(plan=answer) if isinstance(answer, Plan) else answer
        if not isinstance(decision, PlanDecision):
            raise PlanError(f"`choose_plan` must return a Plan or a PlanDecision, not {answer!r}")
        if self._plans is not None and decision.plan not in self._plans:
            raise PlanError(f"{decision.plan.id} is not one of the {len(self._plans)} plans of this engine")
        self._decisions.append(decision)
        return decision.plan

    def _time_call(self, call: Callable[[], Any]) -> Any:
        start_s = time.perf_counter()
        try:
            return call()
        finally:
            self.policy_s += time.perf_counter() - start_s
