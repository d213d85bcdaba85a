"""Requests, what deciders say, and the end that owners hold."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
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
    SupportsReplanning,
)
from sparseflow.adaptive.engine.requests.sampling import SamplingParams
from sparseflow.adaptive.plan.space import Plan
from sparseflow.errors import InputError, PlanError, RunError
from tests.adaptive.engine.serving import DEEP, SHALLOW, request, words


def finished(**overrides: Any) -> RequestOutput:
    fields: dict[str, Any] = {
        "tokens": (4, 5), "plan": DEEP, "reason": "length", "prompt_tokens": 3, "feasible": True,
        "predicted_ms": None, "budget_ms": None, "queued_ms": 1.0, "decide_ms": 1.0, "vision_ms": 1.0,
        "prefill_ms": 1.0, "decode_ms": 1.0, "total_ms": 5.0,
    }  # fmt: skip
    return RequestOutput(**(fields | overrides))


class TestRequest:
    def test_defaults(self) -> None:
        query = request(7)
        assert query.tokens == 7 and query.max_new_tokens == 8 and query.stop == frozenset()
        assert query.sampling == SamplingParams() and query.deadline_s == query.remaining_ms(1e9) == math.inf
        assert query.id != request(7).id

    def test_deadline(self) -> None:
        query = request(received_s=10.0, budget_ms=250.0)
        assert query.deadline_s == 10.25
        assert query.remaining_ms(10.2) == pytest.approx(50.0) and query.remaining_ms(11.0) == pytest.approx(
            -750.0
        )

    def test_stop_is_a_set(self) -> None:
        assert request(stop=[3, 3, 4]).stop == {3, 4}

    @pytest.mark.parametrize("budget", [0.0, -1.0, math.nan, math.inf])
    def test_budgets_that_cannot_be(self, budget: float) -> None:
        with pytest.raises(InputError):
            request(budget_ms=budget)

    @pytest.mark.parametrize("count", [0, -3, 1.5, True])
    def test_counts_that_cannot_be(self, count: Any) -> None:
        with pytest.raises(InputError):
            request(max_new_tokens=count)
        for kind in (
            lambda: InitialDecision(tier=None, insertion_position=1, max_new_tokens=count),
            lambda: PlanDecision(plan=DEEP, max_new_tokens=count),
        ):
            with pytest.raises(InputError):
                kind()

    @pytest.mark.parametrize(
        ("inputs", "decisions"),
        [
            ({}, ""),
            ({"input_ids": [[1, 2]]}, ""),
            ({"input_ids": torch.ones(1, 2)}, ""),
            ({"input_ids": torch.ones(2, dtype=torch.int64)}, ""),
            ({"input_ids": torch.ones(1, 0, dtype=torch.int64)}, ""),
            ({"input_ids": torch.ones(2, 3, dtype=torch.int64)}, ""),
            ({"input_ids": torch.ones(1, 3, dtype=torch.int64), "attention_mask": torch.ones(1, 2)}, ""),
            ({"input_ids": torch.ones(1, 2, dtype=torch.int64), "attention_mask": torch.tensor([[0, 1]])},
             ""),
        ],
    )  # fmt: skip
    def test_inputs_that_are_no_row(self, inputs: dict[str, Any], decisions: str) -> None:
        with pytest.raises(InputError, match=decisions or None):
            GenerationRequest(inputs=inputs, decide=FixedPlan(plan=DEEP))

    def test_budget_met(self) -> None:
        assert finished().budget_met is None
        assert finished(budget_ms=5.0).budget_met and not finished(budget_ms=4.9).budget_met


class Scripted:
    """A decider that says what it was told to say."""

    def __init__(self, first: Any, second: Any) -> None:
        self.decisions, self.calls = (first, second), []

    def choose_initial(self, request: GenerationRequest, remaining_ms: float) -> Any:
        self.calls.append(("first", remaining_ms))
        return self.decisions[0]

    def choose_plan(
        self, latency_token: torch.Tensor, request: GenerationRequest, remaining_ms: float
    ) -> Any:
        self.calls.append(("second", remaining_ms))
        return self.decisions[1]


class Careful(Scripted):
    """As that, but wants to be asked once more."""

    def replan(self, request: GenerationRequest, choice: InitialDecision, remaining_ms: float) -> int:
        self.calls.append(("again", remaining_ms))
        return choice.insertion_position + 1


def asking(decide: Any, *, plans: tuple[Plan, ...] | None = None) -> PlanRequest:
    remaining_ms_values = iter([9.0, 8.0, 7.0])
    return PlanRequest(decide, request(), lambda: next(remaining_ms_values), plans=plans)


class TestAsking:
    def test_in_order(self) -> None:
        first = InitialDecision(tier=None, insertion_position=1, max_new_tokens=5, predicted_ms=80.0)
        decide = Careful(
            first, PlanDecision(plan=SHALLOW, max_new_tokens=7, feasible=False, predicted_ms=90.0)
        )
        assert isinstance(decide, SupportsReplanning)
        actual = asking(decide)
        assert actual.needs_replan and actual.choose_initial() == first
        assert (actual.limit(9), actual.limit(3), actual.feasible, actual.predicted_ms) == (5, 3, True, 80.0)
        assert actual.replan(1) == 2
        assert actual.choose_plan(torch.zeros(2)) == SHALLOW
        assert (actual.limit(9), actual.feasible, actual.predicted_ms) == (5, False, 90.0)
        assert decide.calls == [("first", 9.0), ("again", 8.0), ("second", 7.0)] and actual.policy_s > 0.0

    def test_getting_ready_is_not_counted(self) -> None:
        class Getting(Scripted):
            def prepare(self, request: GenerationRequest) -> None:
                self.calls.append(("prepare", request.max_new_tokens))

        decide = Getting(InitialDecision(tier=None, insertion_position=1), SHALLOW)
        for item in (decide, Scripted(*decide.decisions)):
            actual = asking(item)
            actual.choose_initial()
            before = actual.policy_s
            actual.prepare()
            assert actual.policy_s == before
            assert actual.choose_plan(torch.zeros(2)) == SHALLOW
        assert [name for name, _ in decide.calls] == ["first", "prepare", "second"]

    def test_a_plan_is_decision_enough(self) -> None:
        actual = asking(Scripted(InitialDecision(tier=None, insertion_position=2, predicted_ms=3.0), SHALLOW))
        actual.choose_initial()
        assert not actual.needs_replan and actual.replan(2) == 2
        assert (
            actual.choose_plan(torch.zeros(2)) == SHALLOW and actual.feasible and actual.predicted_ms == 3.0
        )

    def test_refusal(self) -> None:
        with pytest.raises(RequestRejected) as caught:
            asking(Scripted(Rejection(reason="too little", least_ms=12.5), None)).choose_initial()
        assert caught.value.least_ms == 12.5 and isinstance(caught.value, RunError)
        with pytest.raises(RequestRejected):
            asking(Scripted(Rejection(reason="busy"), None)).choose_initial()

    def test_what_is_no_answer(self) -> None:
        with pytest.raises(PlanError):
            asking(Scripted(SHALLOW, None)).choose_initial()
        with pytest.raises(PlanError):
            asking(Scripted(None, "low")).choose_plan(torch.zeros(2))
        with pytest.raises(PlanError):
            asking(Scripted(None, DEEP), plans=(SHALLOW,)).choose_plan(torch.zeros(2))


class TestHandle:
    def test_result(self) -> None:
        handle = RequestHandle(request())
        with pytest.raises(TimeoutError):
            handle.result(0.0)
        handle.append_token(4)
        assert handle.tokens == (4,) and not handle.finished
        handle.finish(finished())
        handle.finish(RequestCancelled("too late"))
        assert handle.finished and handle.result() == finished()

    def test_iterates_while_tokens_come(self) -> None:
        handle, observed, first = RequestHandle(request()), [], threading.Event()

        def read() -> None:
            for token in handle:
                observed.append(token)
                first.set()

        threads = [threading.Thread(target=read) for _ in range(2)]
        for thread in threads:
            thread.start()
        handle.append_token(4)
        first.wait(10)
        handle.append_token(5)
        handle.finish(finished())
        for thread in threads:
            thread.join(10)
        assert sorted(observed) == [4, 4, 5, 5] and list(handle) == [4, 5]

    def test_raises_what_went_wrong_after_what_came(self) -> None:
        handle, observed = RequestHandle(request()), []
        handle.append_token(4)
        handle.finish(RequestCancelled("off"))
        with pytest.raises(RequestCancelled):
            for token in handle:
                observed.append(token)
        assert observed == [4]
        with pytest.raises(RequestCancelled):
            handle.result()

    def test_cancel_wakes(self) -> None:
        woken: list[int] = []
        handle = RequestHandle(request(), lambda: woken.append(1))
        assert not handle.cancelled
        handle.cancel()
        assert handle.cancelled and woken == [1] and not handle.finished

    def test_listeners(self, caplog: pytest.LogCaptureFixture) -> None:
        handle, messages = RequestHandle(request()), []
        handle.add_listener(lambda: messages.append(handle.tokens))

        def broken() -> None:
            raise ValueError("not the engine's business")

        handle.add_listener(broken)
        with caplog.at_level(logging.ERROR):
            handle.append_token(4)
        assert "a listener" in caplog.text
        handle.add_listener(lambda: messages.append("late"))
        handle.finish(finished())
        assert messages == [(4,), "late", (4,), "late"]

    def test_for_a_coroutine(self) -> None:
        handle = RequestHandle(request())

        async def read() -> list[int]:
            return [token async for token in handle]

        def write() -> None:
            for token in (4, 5, 6):
                handle.append_token(token)
            handle.finish(finished())

        async def both() -> list[int]:
            reading = asyncio.create_task(read())
            await asyncio.sleep(0)
            await asyncio.to_thread(write)
            return await reading

        assert asyncio.run(both()) == [4, 5, 6]
        # A loop that is over does not hurt the engine.
        handle.append_token(7)

    def test_a_coroutine_gets_the_error(self) -> None:
        handle = RequestHandle(request())
        handle.finish(RequestCancelled("off"))

        async def read() -> list[int]:
            return [token async for token in handle]

        with pytest.raises(RequestCancelled):
            asyncio.run(read())


def test_words_are_a_prompt() -> None:
    assert words(3)["input_ids"].shape == (1, 3)
