"""What there is room for: requests in a slot, and the slots of a plan on a device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sparseflow.adaptive.adapters import get_adapter
from sparseflow.adaptive.engine.engine import Engine
from sparseflow.adaptive.engine.requests.request import FixedPlan, GenerationRequest
from sparseflow.adaptive.plan.runtime import PlanRuntime
from sparseflow.adaptive.plan.space import Plan
from sparseflow.adaptive.profile import EngineRunner
from sparseflow.adaptive.profile.memory import check_cache_memory, compute_cache_bytes, select_fitting_tiers
from sparseflow.errors import InputError
from tests.adaptive import tiny


@pytest.fixture(params=tiny.FAMILIES)
def runtime(request: pytest.FixtureRequest) -> Iterator[PlanRuntime]:
    runtime = PlanRuntime(get_adapter(tiny.FAMILIES[request.param](dtype=torch.float32)))
    yield runtime
    runtime.remove()


def test_select_fitting_tiers_excludes_last_token() -> None:
    sizes: dict[str, Any] = {"vision_tokens": {"low": 4, "medium": 20, "high": 56}, "text_tokens": 10}
    for limit, actual in (
        (70, ("low", "medium", "high")), (69, ("low", "medium")), (18, ("low",)), (17, ()),
    ):  # fmt: skip
        assert select_fitting_tiers(**sizes, new_tokens=5, max_tokens=limit) == actual


def test_compute_cache_bytes_equals_engine_cache(runtime: PlanRuntime) -> None:
    plan = Plan(tier=None, insertion_position=1, top_k=2, blocks=(0, 2, 5))
    with Engine(runtime.adapter, runtime, plans=[plan], max_batch=3, max_tokens=40) as engine:
        engine.submit(
            GenerationRequest(inputs=tiny.make_text_prompt(), decide=FixedPlan(plan=plan), max_new_tokens=2)
        ).result()
        messages = engine.snapshot().cache_bytes
    assert messages == compute_cache_bytes(runtime.adapter, plan, slots=3, tokens=40) > 0
    check_cache_memory(runtime.adapter, plan, slots=3, tokens=40, free_bytes=messages)
    with pytest.raises(InputError, match=r"`max_batch` 3 and `max_tokens` 40, .* lower `max_tokens` or"):
        check_cache_memory(runtime.adapter, plan, slots=3, tokens=40, free_bytes=messages - 1)


def test_runner_with_too_large_cache_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = PlanRuntime(get_adapter(tiny.build_olmoe(dtype=torch.float32)))
    adapter, plans = runtime.adapter, [runtime.geometry.full_plan()]
    free = "sparseflow.adaptive.profile.engine_runner._get_free_bytes"
    monkeypatch.setattr(free, lambda device: 1000)
    for group in (None, 1):
        with pytest.raises(InputError, match="1e-06 GB"):
            EngineRunner(runtime, plans, max_batch=4, max_tokens=96, plans_per_group=group)
    needed = compute_cache_bytes(adapter, plans[0], slots=4, tokens=96)
    monkeypatch.setattr(free, lambda device: needed)
    assert EngineRunner(runtime, plans, max_batch=4, max_tokens=96, plans_per_group=1).groups == (
        tuple(plans),
    )
    runtime.remove()
