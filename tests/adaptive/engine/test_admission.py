"""How requests begin: what deciders are asked and what their answers do, and input that cannot be used."""

from __future__ import annotations

from collections.abc import Iterator
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
    Budgeted,
    attached,
    driven,
    generate_alone,
    model,
    request,
    still,
)


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def olmoe() -> Iterator[tuple[Adapter, PlanRuntime]]:
    with attached() as both:
        yield both


class TestDeciders:
    @pytest.mark.parametrize("sizes", [None, (64,)])
    def test_asked_three_times(self, sizes: tuple[int, ...] | None) -> None:
        with attached("llava_siglip") as both:
            plan = replace(SHALLOW, tier="medium")
            engine = still(both, plans=[plan], max_tokens=64, prompts=sizes)
            decide = Budgeted(plan, position=1)
            inputs = tiny.make_prompt(model("llava_siglip"))
            handle = engine.submit(
                GenerationRequest(inputs=inputs, decide=decide, budget_ms=1e5, max_new_tokens=3)
            )
            driven(engine)
            output = handle.result()
            assert [call[:2] for call in decide.calls] == [
                ("first", 66),
                ("again", 1),
                ("second", tiny.WIDTH),
            ]
            remaining_ms_values = [call[2] for call in decide.calls]
            assert 1e5 > remaining_ms_values[0] >= remaining_ms_values[1] >= remaining_ms_values[2] > 0
            assert output.prompt_tokens == 30 and output.predicted_ms == 9.0 and output.decide_ms > 0.0
            fixed = GenerationRequest(inputs=inputs, decide=FixedPlan(plan=plan), max_new_tokens=3)
            assert output.tokens == generate_alone(*both, fixed)

    def test_what_is_left_counts_from_receipt(self, olmoe: tuple[Adapter, PlanRuntime]) -> None:
        engine = still(olmoe)
        decide = Budgeted(SHALLOW, feasible=False)
        query = request(decide=decide, budget_ms=50.0, max_new_tokens=2)
        handle = engine.submit(replace(query, received_s=query.received_s - 10.0))
        driven(engine)
        assert decide.calls[0][2] < -9_000.0
        # Best effort: run all the same, and said so.
        output = handle.result()
        assert not output.feasible and output.budget_met is False and output.queued_ms >= 10_000.0

    def test_truncated(self, olmoe: tuple[Adapter, PlanRuntime]) -> None:
        engine = still(olmoe)
        handle = engine.submit(request(decide=Budgeted(SHALLOW, tokens=3), max_new_tokens=9))
        driven(engine)
        full_tokens = generate_alone(*olmoe, request(plan=SHALLOW, max_new_tokens=9))
        assert (handle.result().reason, handle.result().tokens) == ("truncated", full_tokens[:3])

    def test_refused(self, olmoe: tuple[Adapter, PlanRuntime]) -> None:
        engine = still(olmoe)
        refusal = Rejection(reason="the budget is too small", least_ms=12.0)
        handle = engine.submit(request(decide=Budgeted(DEEP, refusal=refusal)))
        other = engine.submit(request(max_new_tokens=2))
        driven(engine)
        with pytest.raises(RequestRejected) as caught:
            handle.result()
        assert caught.value.least_ms == 12.0 and other.result()
        assert engine.snapshot().ended == {"refused": 1, "finished": 1}

    def test_a_plan_that_the_engine_does_not_know(self, olmoe: tuple[Adapter, PlanRuntime]) -> None:
        engine = still(olmoe, plans=[DEEP])
        handle = engine.submit(request(plan=SHALLOW))
        driven(engine)
        with pytest.raises(PlanError):
            handle.result()
        assert engine.snapshot().running == 0

    def test_a_decider_that_fails(self, olmoe: tuple[Adapter, PlanRuntime]) -> None:
        class Broken(Budgeted):
            def choose_plan(
                self, latency_token: torch.Tensor, request: GenerationRequest, remaining_ms: float
            ) -> PlanDecision:
                raise KeyError("no such table")

        engine = still(olmoe)
        handle, other = engine.submit(request(decide=Broken(DEEP))), engine.submit(request(max_new_tokens=3))
        driven(engine)
        with pytest.raises(RequestFailed) as caught:
            handle.result()
        assert isinstance(caught.value.__cause__, KeyError)
        assert other.result().tokens == generate_alone(*olmoe, other.request)

    def test_a_tier_without_image(self) -> None:
        with attached("llava_siglip") as both:
            engine = still(both, plans=[replace(DEEP, tier="low"), DEEP])
            wrong = engine.submit(request(plan=replace(DEEP, tier="low")))
            image = engine.submit(
                GenerationRequest(
                    inputs=tiny.make_prompt(model("llava_siglip")),
                    decide=FixedPlan(plan=DEEP),
                    max_new_tokens=2,
                )
            )
            right = engine.submit(request(plan=DEEP, max_new_tokens=2))
            driven(engine)
            for handle in (wrong, image):
                with pytest.raises(PlanError):
                    handle.result()
            assert right.result().tokens == generate_alone(*both, right.request)


class TestBadInput:
    def test_never_taken(self, olmoe: tuple[Adapter, PlanRuntime]) -> None:
        engine = still(olmoe, max_tokens=10, queue_limit=1)
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
        driven(engine)

    def test_a_tier_that_does_not_fit(self) -> None:
        with attached("llava_siglip") as both:
            plans = [replace(DEEP, tier=tier) for tier in ("low", "high")]
            engine = still(both, plans=plans, max_tokens=40)
            inputs = tiny.make_prompt(model("llava_siglip"))
            low, high = (
                engine.submit(GenerationRequest(inputs=inputs, decide=FixedPlan(plan=plan), max_new_tokens=3))
                for plan in plans
            )
            driven(engine)
            assert low.result().tokens == generate_alone(*both, low.request)
            with pytest.raises(InputError):
                high.result()

    def test_pixels_that_do_not_fit(self) -> None:
        with attached("llava_siglip") as both:
            plan = replace(DEEP, tier="low")
            engine = still(both, plans=[plan], max_tokens=96, prompts=(32,))
            inputs = tiny.make_prompt(model("llava_siglip"))
            fewer_pixels = inputs | {"pixel_values": inputs["pixel_values"][:3]}
            wide = inputs | {"pixel_values": inputs["pixel_values"].repeat(1, 1, 1, 2)}
            bad = [
                engine.submit(GenerationRequest(inputs=item, decide=FixedPlan(plan=plan)))
                for item in (fewer_pixels, wide)
            ]
            good = engine.submit(
                GenerationRequest(inputs=inputs, decide=FixedPlan(plan=plan), max_new_tokens=3)
            )
            driven(engine)
            for handle in bad:
                with pytest.raises((PlanError, RequestFailed)):
                    handle.result()
            assert good.result().tokens == generate_alone(*both, good.request)

    @pytest.mark.parametrize(
        "overrides", [{"max_batch": 0}, {"max_tokens": 0}, {"fairness": 0}, {"queue_limit": 0}]
    )
    def test_counts(self, olmoe: tuple[Adapter, PlanRuntime], overrides: dict[str, int]) -> None:
        with pytest.raises(InputError, match=next(iter(overrides))):
            still(olmoe, **overrides)

    def test_plans_and_device(self, olmoe: tuple[Adapter, PlanRuntime]) -> None:
        with pytest.raises(InputError, match="`plans`"):
            still(olmoe, plans=[])
        with pytest.raises(PlanError):
            still(olmoe, plans=[replace(DEEP, top_k=9)])
        with pytest.raises(InputError):
            still(olmoe, device="cuda")
