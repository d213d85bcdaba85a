"""Admission of requests: decisions of policies, and invalid input."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sparseflow.adaptive.adapters import Adapter
from sparseflow.adaptive.engine.requests.request import (
    FixedPlan,
    GenerationRequest,
    PlanDecision,
    Rejection,
    RequestFailed,
    RequestRejected,
)
from sparseflow.adaptive.plan.runtime import PlanRuntime
from sparseflow.errors import InputError, PlanError
from tests.adaptive import tiny
from tests.adaptive.engine.serving import (
    DEEP,
    SHALLOW,
    ScriptedPolicy,
    attached,
    generate_alone,
    make_idle_engine,
    model,
    request,
    run_until_idle,
)


class TestPolicies:
    @pytest.mark.parametrize("sizes", [None, (64,)])
    def test_policy_is_queried_before_vision_and_at_insertion(self, sizes: tuple[int, ...] | None) -> None:
        with attached("llava_siglip") as both:
            plan = replace(SHALLOW, tier="medium")
            engine = make_idle_engine(both, plans=[plan], max_tokens=64, prompts=sizes)
            decide = ScriptedPolicy(plan)
            inputs = tiny.make_prompt(model("llava_siglip"))
            handle = engine.submit(
                GenerationRequest(inputs=inputs, decide=decide, budget_ms=1e5, max_new_tokens=3)
            )
            run_until_idle(engine)
            output = handle.result()
            (name, tokens, initial_ms), (next_name, latency_token, final_ms) = decide.calls
            assert (name, tokens, next_name) == ("choose_initial", 66, "choose_plan")
            assert latency_token.shape == (tiny.WIDTH,) and 1e5 > initial_ms >= final_ms > 0
            assert output.prompt_tokens == 30 and output.predicted_ms == 9.0 and output.decide_ms > 0.0
            fixed = GenerationRequest(inputs=inputs, decide=FixedPlan(plan=plan), max_new_tokens=3)
            assert output.tokens == generate_alone(*both, fixed)

    def test_remaining_budget_counts_from_receipt(self, olmoe: tuple[Adapter, PlanRuntime]) -> None:
        engine = make_idle_engine(olmoe)
        decide = ScriptedPolicy(SHALLOW, feasible=False)
        query = request(decide=decide, budget_ms=50.0, max_new_tokens=2)
        handle = engine.submit(replace(query, received_s=query.received_s - 10.0))
        run_until_idle(engine)
        assert decide.calls[0][2] < -9_000.0
        output = handle.result()
        assert not output.feasible and output.budget_met is False and output.queued_ms >= 10_000.0

    def test_policy_that_truncates_limits_answer(self, olmoe: tuple[Adapter, PlanRuntime]) -> None:
        engine = make_idle_engine(olmoe)
        handle = engine.submit(request(decide=ScriptedPolicy(SHALLOW, max_new_tokens=3), max_new_tokens=9))
        run_until_idle(engine)
        full_tokens = generate_alone(*olmoe, request(plan=SHALLOW, max_new_tokens=9))
        assert (handle.result().reason, handle.result().tokens) == ("truncated", full_tokens[:3])

    def test_policy_that_rejects_ends_request(self, olmoe: tuple[Adapter, PlanRuntime]) -> None:
        engine = make_idle_engine(olmoe)
        rejection = Rejection(reason="the budget is too small", least_ms=12.0)
        handle = engine.submit(request(decide=ScriptedPolicy(DEEP, rejection=rejection)))
        other = engine.submit(request(max_new_tokens=2))
        run_until_idle(engine)
        with pytest.raises(RequestRejected) as caught:
            handle.result()
        assert caught.value.least_ms == 12.0 and other.result()
        assert engine.snapshot().ended == {"refused": 1, "finished": 1}

    def test_plan_that_engine_does_not_have_is_refused(self, olmoe: tuple[Adapter, PlanRuntime]) -> None:
        engine = make_idle_engine(olmoe, plans=[DEEP])
        handle = engine.submit(request(plan=SHALLOW))
        run_until_idle(engine)
        with pytest.raises(PlanError):
            handle.result()
        assert engine.snapshot().running == 0

    def test_policy_that_raises_fails_only_its_request(self, olmoe: tuple[Adapter, PlanRuntime]) -> None:
        class Broken(ScriptedPolicy):
            def choose_plan(
                self, latency_token: torch.Tensor, request: GenerationRequest, remaining_ms: float
            ) -> PlanDecision:
                raise KeyError("no such table")

        engine = make_idle_engine(olmoe)
        handle, other = engine.submit(request(decide=Broken(DEEP))), engine.submit(request(max_new_tokens=3))
        run_until_idle(engine)
        with pytest.raises(RequestFailed) as caught:
            handle.result()
        assert isinstance(caught.value.__cause__, KeyError)
        assert other.result().tokens == generate_alone(*olmoe, other.request)

    def test_tier_without_image_and_image_without_tier_are_refused(self) -> None:
        with attached("llava_siglip") as both:
            engine = make_idle_engine(both, plans=[replace(DEEP, tier="low"), DEEP])
            wrong = engine.submit(request(plan=replace(DEEP, tier="low")))
            image = engine.submit(
                GenerationRequest(
                    inputs=tiny.make_prompt(model("llava_siglip")),
                    decide=FixedPlan(plan=DEEP),
                    max_new_tokens=2,
                )
            )
            right = engine.submit(request(plan=DEEP, max_new_tokens=2))
            run_until_idle(engine)
            for handle in (wrong, image):
                with pytest.raises(PlanError):
                    handle.result()
            assert right.result().tokens == generate_alone(*both, right.request)


class TestInvalidInput:
    def test_submit_request_that_cannot_run_is_refused(self, olmoe: tuple[Adapter, PlanRuntime]) -> None:
        engine = make_idle_engine(olmoe, max_tokens=10, queue_limit=1)
        ids = torch.tensor([[3, tiny.VOCABULARY]])
        with pytest.raises(InputError):
            engine.submit(
                GenerationRequest(inputs={"input_ids": ids}, decide=FixedPlan(plan=DEEP), max_new_tokens=2)
            )
        with pytest.raises(InputError):
            engine.submit(request(6, max_new_tokens=6))
        engine.submit(request(6, max_new_tokens=5))
        with pytest.raises(RequestRejected):
            engine.submit(request(6, max_new_tokens=5))
        run_until_idle(engine)

    def test_tier_above_context_is_refused(self) -> None:
        with attached("llava_siglip") as both:
            plans = [replace(DEEP, tier=tier) for tier in ("low", "high")]
            engine = make_idle_engine(both, plans=plans, max_tokens=40)
            inputs = tiny.make_prompt(model("llava_siglip"))
            low, high = (
                engine.submit(GenerationRequest(inputs=inputs, decide=FixedPlan(plan=plan), max_new_tokens=3))
                for plan in plans
            )
            run_until_idle(engine)
            assert low.result().tokens == generate_alone(*both, low.request)
            with pytest.raises(InputError):
                high.result()

    def test_pixels_of_wrong_shape_fail_only_their_request(self) -> None:
        with attached("llava_siglip") as both:
            plan = replace(DEEP, tier="low")
            engine = make_idle_engine(both, plans=[plan], max_tokens=96, prompts=(32,))
            inputs = tiny.make_prompt(model("llava_siglip"))
            fewer_pixels = inputs | {"pixel_values": inputs["pixel_values"][:3]}
            wide = inputs | {"pixel_values": inputs["pixel_values"].repeat(1, 1, 1, 2)}
            bad = [
                engine.submit(GenerationRequest(inputs=invalid_inputs, decide=FixedPlan(plan=plan)))
                for invalid_inputs in (fewer_pixels, wide)
            ]
            good = engine.submit(
                GenerationRequest(inputs=inputs, decide=FixedPlan(plan=plan), max_new_tokens=3)
            )
            run_until_idle(engine)
            for handle in bad:
                with pytest.raises((PlanError, RequestFailed)):
                    handle.result()
            assert good.result().tokens == generate_alone(*both, good.request)

    @pytest.mark.parametrize(
        "overrides", [{"max_batch": 0}, {"max_tokens": 0}, {"fairness": 0}, {"queue_limit": 0}]
    )
    def test_engine_invalid_count_is_refused(
        self, olmoe: tuple[Adapter, PlanRuntime], overrides: dict[str, int]
    ) -> None:
        with pytest.raises(InputError, match=next(iter(overrides))):
            make_idle_engine(olmoe, **overrides)

    def test_engine_without_plans_or_with_invalid_plan_is_refused(
        self, olmoe: tuple[Adapter, PlanRuntime]
    ) -> None:
        with pytest.raises(InputError, match="`plans`"):
            make_idle_engine(olmoe, plans=[])
        with pytest.raises(PlanError):
            make_idle_engine(olmoe, plans=[replace(DEEP, top_k=9)])
