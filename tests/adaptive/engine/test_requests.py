"""Requests, the decisions of their policies, and their handles."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch

from sparseflow.adaptive.engine.requests.handle import RequestHandle
from sparseflow.adaptive.engine.requests.plan_request import PlanRequest
from sparseflow.adaptive.engine.requests.request import (
    FixedPlan,
    GenerationRequest,
    InitialDecision,
    PlanDecision,
    Rejection,
    RequestCancelled,
    RequestOutput,
    RequestRejected,
)
from sparseflow.adaptive.engine.requests.sampling import SamplingParams
from sparseflow.adaptive.plan.space import Plan
from sparseflow.errors import InputError, PlanError, RunError
from tests.adaptive.engine.serving import DEEP, SHALLOW, request


def finished(**overrides: Any) -> RequestOutput:
    fields: dict[str, Any] = {
        "tokens": (4, 5), "plan": DEEP, "reason": "length", "prompt_tokens": 3, "feasible": True,
        "predicted_ms": None, "budget_ms": None, "queued_ms": 1.0, "decide_ms": 1.0, "vision_ms": 1.0,
        "prefill_ms": 1.0, "decode_ms": 1.0, "total_ms": 5.0,
    }  # fmt: skip
    return RequestOutput(**(fields | overrides))


class TestRequest:
    def test_request_defaults_have_no_budget_and_greedy_sampling(self) -> None:
        generation_request = request(7)
        assert (
            generation_request.tokens == 7
            and generation_request.max_new_tokens == 8
            and generation_request.stop == frozenset()
        )
        assert (
            generation_request.sampling == SamplingParams()
            and generation_request.deadline_s == generation_request.remaining_ms(1e9) == math.inf
        )
        assert generation_request.id != request(7).id

    def test_request_with_budget_computes_deadline(self) -> None:
        generation_request = request(received_s=10.0, budget_ms=250.0)
        assert generation_request.deadline_s == 10.25
        assert generation_request.remaining_ms(10.2) == pytest.approx(
            50.0
        ) and generation_request.remaining_ms(11.0) == pytest.approx(-750.0)

    def test_request_stop_tokens_become_a_set(self) -> None:
        assert request(stop=[3, 3, 4]).stop == {3, 4}

    @pytest.mark.parametrize("budget", [0.0, -1.0, math.nan, math.inf])
    def test_request_invalid_budget_is_refused(self, budget: float) -> None:
        with pytest.raises(InputError):
            request(budget_ms=budget)

    @pytest.mark.parametrize("count", [0, -3, 1.5, True])
    def test_request_and_decisions_with_invalid_token_count_are_refused(self, count: Any) -> None:
        with pytest.raises(InputError):
            request(max_new_tokens=count)
        for kind in (
            lambda: InitialDecision(tier=None, insertion_position=1, max_new_tokens=count),
            lambda: PlanDecision(plan=DEEP, max_new_tokens=count),
        ):
            with pytest.raises(InputError):
                kind()

    @pytest.mark.parametrize(
        "inputs",
        [
            {},
            {"input_ids": [[1, 2]]},
            {"input_ids": torch.ones(1, 2)},
            {"input_ids": torch.ones(2, dtype=torch.int64)},
            {"input_ids": torch.ones(1, 0, dtype=torch.int64)},
            {"input_ids": torch.ones(2, 3, dtype=torch.int64)},
            {"input_ids": torch.ones(1, 3, dtype=torch.int64), "attention_mask": torch.ones(1, 2)},
            {"input_ids": torch.ones(1, 2, dtype=torch.int64), "attention_mask": torch.tensor([[0, 1]])},
            {"input_ids": torch.ones(1, 2, dtype=torch.int64), "attention_mask": [[1, 1]]},
            {"input_ids": torch.ones(1, 2, dtype=torch.int64), "attention_mask": torch.tensor([[1.0, 0.5]])},
        ],
    )
    def test_request_other_than_one_row_is_refused(self, inputs: dict[str, Any]) -> None:
        with pytest.raises(InputError):
            GenerationRequest(inputs=inputs, decide=FixedPlan(plan=DEEP))

    def test_output_budget_met_compares_total_time(self) -> None:
        assert finished().budget_met is None
        assert finished(budget_ms=5.0).budget_met and not finished(budget_ms=4.9).budget_met


class RawPolicy:
    """Policy that returns given values of any type and records its calls."""

    def __init__(self, initial: Any, final: Any) -> None:
        self.initial, self.final, self.calls = initial, final, []

    def choose_initial(self, request: GenerationRequest, remaining_ms: float) -> Any:
        self.calls.append(("choose_initial", remaining_ms))
        return self.initial

    def choose_plan(
        self, latency_token: torch.Tensor, request: GenerationRequest, remaining_ms: float
    ) -> Any:
        self.calls.append(("choose_plan", remaining_ms))
        return self.final


def make_plan_request(policy: Any, *, plans: tuple[Plan, ...] | None = None) -> PlanRequest:
    remaining_ms_values = iter([9.0, 8.0])
    return PlanRequest(policy, request(), lambda: next(remaining_ms_values), plans=plans)


class TestPlanRequest:
    def test_decisions_in_order_update_limit_and_prediction(self) -> None:
        initial = InitialDecision(tier=None, insertion_position=1, max_new_tokens=5, predicted_ms=80.0)
        policy = RawPolicy(
            initial, PlanDecision(plan=SHALLOW, max_new_tokens=7, feasible=False, predicted_ms=90.0)
        )
        plan_request = make_plan_request(policy)
        assert plan_request.choose_initial() == initial
        assert (plan_request.limit(9), plan_request.limit(3)) == (5, 3)
        assert plan_request.feasible and plan_request.predicted_ms == 80.0
        assert plan_request.choose_plan(torch.zeros(2)) == SHALLOW
        assert (plan_request.limit(9), plan_request.feasible, plan_request.predicted_ms) == (5, False, 90.0)
        assert policy.calls == [("choose_initial", 9.0), ("choose_plan", 8.0)] and plan_request.policy_s > 0.0

    def test_prepare_is_optional_and_not_counted_as_policy_time(self) -> None:
        class PreparingPolicy(RawPolicy):
            def prepare(self, request: GenerationRequest) -> None:
                self.calls.append(("prepare", request.max_new_tokens))

        preparing = PreparingPolicy(InitialDecision(tier=None, insertion_position=1), SHALLOW)
        for policy in (preparing, RawPolicy(preparing.initial, preparing.final)):
            plan_request = make_plan_request(policy)
            plan_request.choose_initial()
            before = plan_request.policy_s
            plan_request.prepare()
            assert plan_request.policy_s == before
            assert plan_request.choose_plan(torch.zeros(2)) == SHALLOW
        assert [name for name, _ in preparing.calls] == ["choose_initial", "prepare", "choose_plan"]

    def test_choose_plan_accepts_bare_plan(self) -> None:
        initial = InitialDecision(tier=None, insertion_position=2, predicted_ms=3.0)
        plan_request = make_plan_request(RawPolicy(initial, SHALLOW))
        plan_request.choose_initial()
        assert plan_request.choose_plan(torch.zeros(2)) == SHALLOW
        assert plan_request.feasible and plan_request.predicted_ms == 3.0

    def test_rejection_raises_with_least_budget(self) -> None:
        with pytest.raises(RequestRejected) as caught:
            make_plan_request(RawPolicy(Rejection(reason="too little", least_ms=12.5), None)).choose_initial()
        assert caught.value.least_ms == 12.5 and isinstance(caught.value, RunError)
        with pytest.raises(RequestRejected):
            make_plan_request(RawPolicy(Rejection(reason="busy"), None)).choose_initial()

    def test_decision_of_wrong_type_or_unknown_plan_is_refused(self) -> None:
        with pytest.raises(PlanError):
            make_plan_request(RawPolicy(SHALLOW, None)).choose_initial()
        with pytest.raises(PlanError):
            make_plan_request(RawPolicy(None, "low")).choose_plan(torch.zeros(2))
        with pytest.raises(PlanError):
            make_plan_request(RawPolicy(None, DEEP), plans=(SHALLOW,)).choose_plan(torch.zeros(2))


class TestHandle:
    def test_handle_result_waits_and_keeps_first_outcome(self) -> None:
        handle = RequestHandle(request())
        with pytest.raises(TimeoutError):
            handle.result(0.0)
        handle.append_token(4)
        assert handle.tokens == (4,) and not handle.finished
        handle.finish(finished())
        handle.finish(RequestCancelled("too late"))
        assert handle.finished and handle.result() == finished()

    def test_result_raises_error_of_request(self) -> None:
        handle = RequestHandle(request())
        handle.append_token(4)
        handle.finish(RequestCancelled("cancelled"))
        with pytest.raises(RequestCancelled):
            handle.result()
        assert handle.tokens == (4,)

    def test_handle_cancel_wakes_engine(self) -> None:
        woken: list[int] = []
        handle = RequestHandle(request(), lambda: woken.append(1))
        assert not handle.cancelled
        handle.cancel()
        assert handle.cancelled and woken == [1] and not handle.finished

    def test_handle_listeners_are_called_and_their_errors_logged(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        handle, messages = RequestHandle(request()), []
        handle.add_listener(lambda: messages.append(handle.tokens))

        def broken() -> None:
            raise ValueError("listener error")

        handle.add_listener(broken)
        with caplog.at_level(logging.ERROR):
            handle.append_token(4)
        assert "a listener" in caplog.text
        handle.add_listener(lambda: messages.append("late"))
        handle.finish(finished())
        assert messages == [(4,), "late", (4,), "late"]
