"""Mixed plans in one engine: each request gets exactly the tokens that it gets alone, in float64."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from typing import Any

import pytest

from sparseflow.adaptive.adapters import Adapter, get_adapter
from sparseflow.adaptive.engine.engine import Engine
from sparseflow.adaptive.engine.requests.request import GenerationRequest
from sparseflow.adaptive.plan.runtime import PlanRuntime
from sparseflow.adaptive.plan.space import Plan
from tests.adaptive import tiny
from tests.adaptive.engine.serving import (
    DEEP,
    LATER,
    PLANS,
    SHALLOW,
    attached,
    generate_alone,
    make_idle_engine,
    make_random_requests,
    model,
    request,
    run_mixed,
    run_until_idle,
    words,
)


def images(family: str, count: int) -> tuple[list[Any], tuple[Plan, ...]]:
    """Prompts with images, and plans of several tiers."""
    tiny_model = model(family)
    prompts = [tiny.make_prompt(tiny_model, tokens=3 + seed, seed=seed) for seed in range(count)]
    plans = [replace(plan, tier=tier) for plan in (DEEP, SHALLOW) for tier in ("low", "medium", "high")]
    return prompts, tuple(plans)


@pytest.mark.parametrize("seed", range(2))
def test_text_requests_of_mixed_plans_match_separate_runs(
    olmoe: tuple[Adapter, PlanRuntime], seed: int
) -> None:
    draw = random.Random(seed)
    prompts = [words(draw.randint(1, 20), index) for index in range(6)]
    sizes = None if seed % 2 else (4, 16)
    engine = make_idle_engine(
        olmoe,
        max_batch=draw.choice([2, 4]),
        prompts=sizes,
        contexts=(8, 16),
        fairness=draw.choice([1, 4]),
    )
    run_mixed(*olmoe, engine, make_random_requests(draw, prompts, PLANS, 12), draw)


@pytest.mark.parametrize(("family", "sizes"), [
    ("llava_siglip", None), ("llava_siglip", (24, 40, 80)), ("qwen3_vl_moe", (24, 40)),
])  # fmt: skip
def test_image_requests_of_mixed_plans_match_separate_runs(
    family: str, sizes: tuple[int, ...] | None
) -> None:
    with attached(family) as both:
        draw = random.Random(7)
        prompts, plans = images(family, 3)
        engine = make_idle_engine(both, plans=(*plans, SHALLOW), max_tokens=96, prompts=sizes)
        requests = make_random_requests(draw, prompts, plans, 6) + make_random_requests(
            draw, [words(5)], (SHALLOW,), 3
        )
        run_mixed(*both, engine, requests, draw)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("family", ["olmoe", "mixtral", "llava_clip"])
def test_many_requests_of_mixed_plans_match_separate_runs(family: str, seed: int) -> None:
    with attached(family) as both:
        draw = random.Random(seed)
        prompts, plans = [words(draw.randint(1, 30), index) for index in range(10)], PLANS
        if family == "llava_clip":
            prompts, plans = images(family, 4)
        engine = make_idle_engine(
            both, plans=plans, max_batch=5, max_tokens=96, prompts=draw.choice([None, (16, 64)])
        )
        run_mixed(*both, engine, make_random_requests(draw, prompts, plans, 60), draw)


def test_requests_of_several_threads_match_separate_runs(olmoe: tuple[Adapter, PlanRuntime]) -> None:
    draw = random.Random(11)
    requests = make_random_requests(draw, [words(length, length) for length in (2, 7, 12)], PLANS, 12)
    collected: dict[str, tuple[int, ...]] = {}

    def user(user_requests: list[GenerationRequest]) -> None:
        for user_request in user_requests:
            collected[user_request.id] = engine.submit(user_request).result().tokens

    with Engine(*olmoe, plans=PLANS, max_batch=3, max_tokens=48) as engine:
        users = [threading.Thread(target=user, args=(requests[index::3],)) for index in range(3)]
        for thread in users:
            thread.start()
        for thread in users:
            thread.join(60)
    assert collected == {user_request.id: generate_alone(*olmoe, user_request) for user_request in requests}


def test_requests_with_equal_decode_plan_share_a_batch(olmoe: tuple[Adapter, PlanRuntime]) -> None:
    engine = make_idle_engine(olmoe)
    for plan in (DEEP, LATER, SHALLOW):
        engine.submit(request(plan=plan, max_new_tokens=9))
    for _ in range(3):
        engine.step()
    snapshot = engine.snapshot()
    assert snapshot.batches == {DEEP.id: 2, SHALLOW.id: 1} and snapshot.running == 3
    run_until_idle(engine)


def test_prompts_of_one_fixed_plan_and_length_are_prefilled_together(
    olmoe: tuple[Adapter, PlanRuntime],
) -> None:
    engine = make_idle_engine(olmoe)
    handles = [engine.submit(request(6, seed=seed, max_new_tokens=4)) for seed in range(3)]
    other = engine.submit(request(5, max_new_tokens=4))
    engine.step()
    assert [len(handle.tokens) for handle in handles] == [2, 2, 2] and not other.tokens
    run_until_idle(engine)
    for handle in (*handles, other):
        assert handle.result().tokens == generate_alone(*olmoe, handle.request)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["olmoe", "mixtral", "llava_siglip", "qwen3_vl_moe"])
def test_mixed_plans_on_gpu_match_separate_runs(family: str) -> None:
    tiny_model = tiny.FAMILIES[family]().cuda()
    adapter = get_adapter(tiny_model)
    runtime, draw = PlanRuntime(adapter), random.Random(0)
    prompts, plans = [words(draw.randint(1, 20), index) for index in range(6)], PLANS
    if adapter.geometry.tiers:
        prompts, plans = images(family, 3)
    prompts = [{name: value.cuda() for name, value in inputs.items()} for inputs in prompts]
    engine = Engine(
        adapter, runtime, plans=plans, max_tokens=96, prompts=(24, 48, 96), contexts=(32,), start=False
    )
    engine.warm_up(prompts[0] if adapter.geometry.tiers else None)
    run_mixed(adapter, runtime, engine, make_random_requests(draw, prompts, plans, 40), draw)
    assert engine.snapshot().captured > 0 and engine.snapshot().uncaptured == ()
