"""Deciding: plans that fit are chosen, by controllers or worth; the rest is refused, run or cut short."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch

from sparseflow.adaptive.controllers.controllers import Controllers
from sparseflow.adaptive.controllers.cpu_policy import CpuWordEmbeddings
from sparseflow.adaptive.engine.requests.request import GenerationRequest, InitialDecision, Rejection
from sparseflow.adaptive.plan.space import ModelGeometry, Plan, PlanSpace
from sparseflow.adaptive.policy.selector import OnInfeasible, PlanSelector, RequestPolicy
from sparseflow.errors import InputError

GEOMETRY = ModelGeometry(depth=16, top_k=8)
SPACE = PlanSpace.from_importance(GEOMETRY, [1.0 / (1 + block) for block in range(16)])
WIDTH = 8
TIERS = {"low": 0.0, "medium": 20.0, "high": 50.0}


def work_ms(plan: Plan, new_tokens: int) -> float:
    return TIERS[plan.tier or "low"] + len(plan.blocks) + plan.top_k + 2.0 * new_tokens


def count_steps(plan: Plan) -> int:
    """Calls of experts for a prompt of three words and an image."""
    return (3 + Formula().metadata.vision_tokens[plan.tier]) * GEOMETRY.expert_calls(plan)


class Formula:
    """A predictor that is exact; the 99th percentile is 10 % above the median."""

    def __init__(self, space: PlanSpace = SPACE) -> None:
        self.space, self.tiers = space, space.geometry.tiers
        self.metadata = SimpleNamespace(vision_tokens={"low": 10, "medium": 30, "high": 60}, config={})
        self.queries: list[dict[str, Any]] = []

    def predict_all(
        self, *, new_tokens: int, after: str = "receipt", **queries: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        self.queries.append({"new_tokens": new_tokens, "after": after, **queries})
        spent = 10.0 if after == "insertion" else 0.0
        p50 = np.array([work_ms(plan, new_tokens) for plan in self.space.plans]) - spent
        return p50, 1.1 * p50


def selector(**parts: Any) -> PlanSelector:
    table = torch.nn.Embedding(32, WIDTH)
    adapter: Any = SimpleNamespace(
        geometry=GEOMETRY, embed=table, decoder=table, context=None,
        model=SimpleNamespace(config=SimpleNamespace(image_token_id=31)),
    )  # fmt: skip
    return PlanSelector(**{"adapter": adapter, "predictor": Formula(), **parts})


def controllers(seed: int = 0) -> Controllers:
    return Controllers(SPACE, width=WIDTH, model_id="m", seed=seed).eval()


def queries(decide: Any, budget_ms: float | None = None, new_tokens: int = 4) -> GenerationRequest:
    ids = torch.tensor([[31, 31, 3, 4, 5]])
    return GenerationRequest(
        inputs={"input_ids": ids}, decide=decide, budget_ms=budget_ms, max_new_tokens=new_tokens
    )


def decided(
    plan_selector: PlanSelector,
    remaining_ms: float,
    *,
    left_ms: float | None = None,
    images: float = 1,
    **options: Any,
) -> tuple[Any, Any, RequestPolicy]:
    decider = plan_selector.make_policy(text_tokens=3, images=images, **options)
    request = queries(decider)
    first = decider.choose_initial(request, remaining_ms)
    if isinstance(first, Rejection):
        return first, None, decider
    queued_left_ms = remaining_ms - 10.0 if left_ms is None else left_ms
    return first, decider.choose_plan(torch.randn(WIDTH), request, queued_left_ms), decider


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("budget_ms", [35.0, 50.0, 60.0, 77.0, 95.0, 200.0])
@pytest.mark.parametrize("learned", [False, True])
def test_chosen_plan_fits_budget(seed: int, budget_ms: float, learned: bool) -> None:
    plan_selector = selector(controllers=controllers(seed) if learned else None)
    first, second, _ = decided(plan_selector, budget_ms)
    assert isinstance(first, InitialDecision) and first.feasible and second.feasible
    # By the insertion 10 ms are spent, and no longer uncertain.
    assert 1.1 * (work_ms(second.plan, 4) - 10.0) <= budget_ms - 10.0
    assert (second.plan.tier, second.plan.insertion_position) == (first.tier, first.insertion_position)
    assert second.plan in SPACE.plans and second.max_new_tokens == 4


@pytest.mark.parametrize("learned", [False, True])
def test_prepare_does_not_change_decision(learned: bool) -> None:
    plan_selector = selector(controllers=controllers(1) if learned else None)
    token = torch.randn(WIDTH)
    for remaining_ms in (30.0, 60.0, 95.0, math.inf):
        collected = []
        for ready in (False, True):
            decider = plan_selector.make_policy(text_tokens=3, images=1)
            request = queries(decider)
            decider.choose_initial(request, remaining_ms)
            if ready:
                decider.prepare(request)
            # 40 ms were lost since.
            second = decider.choose_plan(token, request, remaining_ms - 40.0)
            collected.append((second.plan, second.feasible, second.max_new_tokens))
        assert collected[0] == collected[1]


def test_choose_initial_again_starts_over() -> None:
    plan_selector = selector(controllers=controllers(1))
    decider = plan_selector.make_policy(text_tokens=3, images=1)
    request = queries(decider)
    decider.choose_initial(request, 200.0)
    decider.prepare(request)
    # Before it found memory, its time was over: the quickest plan, whatever was thought of before.
    repeated = decider.choose_initial(request, 1.0)
    assert isinstance(repeated, InitialDecision) and not repeated.feasible
    decision = decider.choose_plan(torch.randn(WIDTH), request, 1.0)
    assert (decision.plan.tier, decision.plan.insertion_position) == (
        repeated.tier,
        repeated.insertion_position,
    )
    assert work_ms(decision.plan, 4) == min(work_ms(plan, 4) for plan in SPACE.plans)


def test_without_controllers_selects_highest_quality() -> None:
    _, second, _ = decided(selector(), 70.0)
    find_feasible = [count_steps(plan) for plan in SPACE.plans if 1.1 * work_ms(plan, 4) <= 70.0]
    assert count_steps(second.plan) == max(find_feasible)
    best = SPACE.plans[37]
    plan_quality = [1.0 if plan == best else 0.5 for plan in SPACE.plans]
    assert decided(selector(plan_quality=plan_quality), 1000.0)[1].plan == best


def test_noisy_maximum_does_not_replace_larger_plan() -> None:
    """All plans are equally good: on each of 256 questions, a third of them answers by chance."""
    rng = np.random.default_rng(0)
    shared, separate = rng.random(256) < 0.9, rng.random((len(SPACE), 256)) < 0.9
    accuracy = np.where(rng.random(separate.shape) < 1 / 3, separate, shared).mean(1).tolist()
    full = GEOMETRY.full_plan()
    assert SPACE.plans[int(np.argmax(accuracy))] != full
    assert decided(selector(plan_quality=accuracy, quality_samples=256), 1000.0)[1].plan == full
    tight = decided(selector(plan_quality=accuracy, quality_samples=256), 70.0)[1].plan
    feasible = [plan for plan in SPACE.plans if 1.1 * work_ms(plan, 4) <= 70.0]
    assert count_steps(tight) == max(count_steps(plan) for plan in feasible)


def test_significantly_better_plan_replaces_larger_plan() -> None:
    best = SPACE.plans[37]
    for gain, selected in ((0.08, best), (0.04, GEOMETRY.full_plan())):
        accuracy = [0.8 + gain * (plan == best) for plan in SPACE.plans]
        # Two standard errors of a difference are about 0.055 for 400 answers.
        plan_selector = selector(plan_quality=accuracy, quality_samples=400)
        assert decided(plan_selector, 1000.0)[1].plan == selected
        assert selected in (plan_selector.select_front(4).plans or ())
    # Accuracies of 1 have an error as well.
    perfect = [1.0 if plan == best else 0.95 for plan in SPACE.plans]
    assert decided(selector(plan_quality=perfect, quality_samples=20), 1000.0)[1].plan == GEOMETRY.full_plan()


def test_quality_does_not_depend_on_predicted_latency() -> None:
    class Noisy(Formula):
        def predict_all(self, **queries: Any) -> tuple[np.ndarray, np.ndarray]:
            p50, p99 = super().predict_all(**queries)
            noise = np.random.default_rng(0).permuted(p50)
            return noise, np.maximum(noise, p99)

    plan = decided(selector(predictor=Noisy()), 10_000.0)[1].plan
    assert count_steps(plan) == count_steps(GEOMETRY.full_plan()) and plan.tier == "high"


def test_equal_quality_selects_faster_plan() -> None:
    _, second, _ = decided(selector(plan_quality=[1.0] * len(SPACE)), 1000.0)
    assert work_ms(second.plan, 4) == min(work_ms(plan, 4) for plan in SPACE.plans)


def test_without_budget_selects_largest_plan() -> None:
    for plan_selector in (selector(), selector(controllers=controllers())):
        _, second, _ = decided(plan_selector, math.inf)
        assert second.plan.tier == "high" and second.plan.top_k == 8 and len(second.plan.blocks) == 16


def test_selects_allowed_plans_only() -> None:
    few_plans = SPACE.plans[:40:7]
    for plan_selector in (selector(plans=few_plans), selector(plans=few_plans, controllers=controllers())):
        for budget_ms in (40.0, 60.0, 500.0, math.inf):
            assert decided(plan_selector, budget_ms)[1].plan in few_plans


def test_lost_time_selects_fastest_matching_plan() -> None:
    first, second, decider = decided(selector(controllers=controllers()), 60.0, left_ms=1.0)
    assert not second.feasible
    prompt_tokens = [
        work_ms(plan, 4)
        for plan in SPACE.plans
        if (plan.tier, plan.insertion_position) == (first.tier, first.insertion_position)
    ]
    assert work_ms(second.plan, 4) == min(prompt_tokens)
    assert [query["after"] for query in decider.selector.predictor.queries] == ["receipt", "insertion"]  # type: ignore[attr-defined]


def test_reject_reports_smallest_feasible_budget() -> None:
    start_s = time.perf_counter()
    refusal, _, _ = decided(selector(), 20.0, on_infeasible="reject")
    passed_ms = 1e3 * (time.perf_counter() - start_s)
    assert isinstance(refusal, Rejection)
    min_ms = min(1.1 * work_ms(plan, 4) for plan in SPACE.plans)
    assert refusal.least_ms is not None and min_ms <= refusal.least_ms <= min_ms + passed_ms


@pytest.mark.parametrize("learned", [False, True])
def test_best_effort_selects_fastest_plan(learned: bool) -> None:
    first, second, _ = decided(selector(controllers=controllers() if learned else None), 20.0)
    assert not first.feasible and not second.feasible and first.max_new_tokens is None
    assert work_ms(second.plan, 4) == min(work_ms(plan, 4) for plan in SPACE.plans)


def test_truncate_limits_tokens_to_budget() -> None:
    quickest = min(work_ms(plan, 0) for plan in SPACE.plans)
    first, second, _ = decided(selector(), 1.1 * (quickest + 2.0 * 3) + 1e-6, on_infeasible="truncate")
    assert first.feasible and first.max_new_tokens == second.max_new_tokens == 3
    refusal, _, _ = decided(selector(), 1.1 * (quickest + 1.0), on_infeasible="truncate")
    assert isinstance(refusal, Rejection) and "one token" in refusal.reason


def test_text_request_has_no_tier() -> None:
    for plan_selector in (selector(), selector(controllers=controllers())):
        first, second, _ = decided(plan_selector, 60.0, images=0)
        assert first.tier is None and second.plan.tier is None


def test_largest_plan_depends_on_request_size() -> None:
    _, _, decider = decided(selector(), 60.0, batch=3, load=0.5)
    for query in decider.selector.predictor.queries:  # type: ignore[attr-defined]
        assert {"text_tokens": 3, "images": 1, "batch": 3, "load": 0.5}.items() <= query.items()


def test_predicted_ms_includes_waiting_time() -> None:
    decider = selector().make_policy(text_tokens=3, images=1)
    request = replace(queries(decider), received_s=queries(decider).received_s - 2.0)
    first = decider.choose_initial(request, 60.0)
    second = decider.choose_plan(torch.randn(WIDTH), request, 50.0)
    assert (
        isinstance(first, InitialDecision)
        and first.predicted_ms is not None
        and second.predicted_ms is not None
    )
    assert first.predicted_ms > 2000.0 and second.predicted_ms > 2000.0


def test_selector_of_mismatched_parts_raises() -> None:
    other = PlanSpace.from_importance(ModelGeometry(depth=12, top_k=8), [0.0] * 12)
    with pytest.raises(InputError):
        selector(predictor=Formula(other))
    elsewhere = PlanSpace.from_importance(GEOMETRY, list(range(16)))
    with pytest.raises(InputError):
        selector(controllers=Controllers(elsewhere, width=WIDTH, model_id="m"))
    adapter: Any = selector().adapter
    with pytest.raises(InputError, match="`word_embeddings`"):
        selector(word_embeddings=CpuWordEmbeddings(adapter))
    adapter.model.get_input_embeddings = lambda: adapter.embed
    with pytest.raises(InputError, match=f"9.*{WIDTH}"):
        selector(adapter=adapter, controllers=Controllers(SPACE, width=9, model_id="m"))
    with pytest.raises(InputError, match="`plan_quality`"):
        selector(plan_quality=[1.0, 2.0, 3.0])
    with pytest.raises(InputError, match="`plans`"):
        selector(plans=[])
    with pytest.raises(InputError):
        selector(plans=[Plan(tier="high", insertion_position=5, top_k=8, blocks=tuple(range(12)))])
    with pytest.raises(InputError, match="`on_infeasible`"):
        selector().make_policy(text_tokens=1, images=0, on_infeasible="shrug")  # pyright: ignore[reportArgumentType]
    assert set(get_args(OnInfeasible)) == {"reject", "best_effort", "truncate"}


def test_tiers_beyond_context_are_excluded() -> None:
    # 3 words, 10, 30 or 60 vision tokens, and 4 new ones, of which the last takes no room.
    for max_tokens, tier in ((66, "high"), (65, "medium"), (36, "medium"), (35, "low")):
        for plan_selector in (
            selector(max_total_tokens=max_tokens),
            selector(max_total_tokens=max_tokens, controllers=controllers()),
        ):
            for budget_ms in (60.0, 1000.0, math.inf):
                first, second, _ = decided(plan_selector, budget_ms)
                assert first.tier == second.plan.tier <= "medium" or max_tokens == 66
            assert decided(plan_selector, math.inf)[1].plan.tier == tier
    # Where none does, the one that comes nearest, so that the error tells how much room there is.
    assert decided(selector(max_total_tokens=10), math.inf)[1].plan.tier == "low"
    # Two images take twice the room; what a plan does to text alone, its tier does not matter to.
    assert decided(selector(max_total_tokens=66), math.inf, images=2)[1].plan.tier == "medium"
    assert len(decided(selector(max_total_tokens=10), math.inf, images=0)[1].plan.blocks) == 16


def test_max_total_tokens_defaults_to_profile_or_model() -> None:
    class Engine(Formula):
        def __init__(self) -> None:
            super().__init__()
            self.metadata.config = {"max_tokens": 40}

    assert selector().max_total_tokens is None
    assert selector(predictor=Engine()).max_total_tokens == 40
    assert (
        replace(selector(predictor=Engine(), max_total_tokens=50), plans=SPACE.plans[:3]).max_total_tokens
        == 50
    )


def test_select_front_keeps_front_and_ends() -> None:
    full, all_plans = GEOMETRY.full_plan(), SPACE.plans
    quickest = min(all_plans, key=lambda plan: work_ms(plan, 16))
    # By worth: the best plan is a cheap one, and still the one that does most is kept, for who has time.
    plan_quality = [1.0 if index == 37 else 0.5 + 0.001 * (index % 7) for index in range(len(all_plans))]
    for max_tokens in (2, 3, 8):
        front = selector(plan_quality=plan_quality).select_front(max_tokens).plans
        assert front is not None and len(front) <= max_tokens and full in front and quickest in front
        assert list(front) == sorted(front, key=lambda plan: work_ms(plan, 16))
        assert (all_plans[37] in front) == (max_tokens > 2)
    # By what controllers chose.
    learned = controllers()
    learned.plan_frequency[[5, 70, 200]] = torch.tensor([0.2, 0.7, 0.1])
    front = selector(controllers=learned, plan_quality=plan_quality).select_front(4).plans
    assert front is not None and set(front) == {quickest, full, all_plans[70], all_plans[5]}
    assert len(selector(controllers=controllers()).select_front(8).plans or ()) <= 8
    # Plans that have no room are none of them.
    assert {
        plan.tier for plan in selector(max_total_tokens=80).select_front(8, new_tokens=16).plans or ()
    } <= {
        "low",
        "medium",
    }
    with pytest.raises(InputError):
        selector().select_front(1)


def test_unmeasured_tiers_are_excluded() -> None:
    class Low(Formula):
        def __init__(self) -> None:
            super().__init__()
            self.tiers = ("low", "medium")

    for plan_selector in (selector(predictor=Low()), selector(predictor=Low(), controllers=controllers())):
        for budget_ms in (60.0, 1000.0, math.inf):
            assert decided(plan_selector, budget_ms)[1].plan.tier != "high"
    assert decided(selector(predictor=Low()), math.inf)[1].plan.tier == "medium"
    assert all(plan.tier != "high" for plan in selector(predictor=Low()).select_front(8).plans or ())
    with pytest.raises(InputError):
        selector(predictor=Low(), plans=[plan for plan in SPACE.plans if plan.tier == "high"])


def test_known_vision_tokens_replace_estimate() -> None:
    # By the profile's proportions, half of its image would be 5, 15 and 30 tokens.
    vision: Any = {"low": 20, "medium": 28, "high": 31}
    plan_selector = selector(max_total_tokens=35)
    assert decided(plan_selector, math.inf, images=0.5)[1].plan.tier == "medium"
    for max_tokens, tier in ((37, "high"), (36, "medium"), (34, "medium"), (33, "low")):
        decision = decided(selector(max_total_tokens=max_tokens), math.inf, images=0.5, vision=vision)[
            1
        ].plan.tier
        assert decision == tier
