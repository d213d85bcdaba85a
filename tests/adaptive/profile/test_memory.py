"""What there is room for: requests in a slot, and the slots of a plan on a device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sparseflow.adaptive.adapters import adapter_of
from sparseflow.adaptive.engine.engine import Engine
from sparseflow.adaptive.engine.requests.request import FixedPlan, GenerationRequest
from sparseflow.adaptive.plan.runtime import PlanRuntime
from sparseflow.adaptive.plan.space import Plan
from sparseflow.adaptive.profile import EngineRunner
from sparseflow.adaptive.profile.memory import cache_bytes, check_memory, fitting
from sparseflow.errors import InputError
from tests.adaptive import tiny


@pytest.fixture(params=tiny.FAMILIES)
def knobs(request: pytest.FixtureRequest) -> Iterator[PlanRuntime]:
    found = PlanRuntime(adapter_of(tiny.FAMILIES[request.param](dtype=torch.float32)))
    yield found
    found.remove()


def test_the_last_new_token_needs_no_place() -> None:
    sizes: dict[str, Any] = {"vision_tokens": {"low": 4, "medium": 20, "high": 56}, "text_tokens": 10}
    for limit, found in (
        (70, ("low", "medium", "high")), (69, ("low", "medium")), (18, ("low",)), (17, ()),
    ):  # fmt: skip
        assert fitting(**sizes, new_tokens=5, max_tokens=limit) == found


def test_bytes_are_those_of_an_engine(knobs: PlanRuntime) -> None:
    plan = Plan(tier=None, insertion_position=1, top_k=2, blocks=(0, 2, 5))
    with Engine(knobs.adapter, knobs, plans=[plan], max_batch=3, max_tokens=40) as engine:
        engine.submit(
            GenerationRequest(inputs=tiny.text(), decide=FixedPlan(plan=plan), max_new_tokens=2)
        ).result()
        told = engine.snapshot().cache_bytes
    assert told == cache_bytes(knobs.adapter, plan, slots=3, tokens=40) > 0
    check_memory(knobs.adapter, plan, slots=3, tokens=40, free=told)
    with pytest.raises(InputError, match=r"`max_batch` 3 and `max_tokens` 40, .* lower `max_tokens` or"):
        check_memory(knobs.adapter, plan, slots=3, tokens=40, free=told - 1)


def test_a_runner_refuses_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    knobs = PlanRuntime(adapter_of(tiny.olmoe(dtype=torch.float32)))
    adapter, plans = knobs.adapter, [knobs.geometry.full()]
    free = "sparseflow.adaptive.profile.engine_runner._free_bytes"
    monkeypatch.setattr(free, lambda device: 1000)
    for group in (None, 1):
        with pytest.raises(InputError, match="and the device has 1e-06 GB left"):
            EngineRunner(knobs, plans, max_batch=4, max_tokens=96, group=group)
    needed = cache_bytes(adapter, plans[0], slots=4, tokens=96)
    monkeypatch.setattr(free, lambda device: needed)
    assert EngineRunner(knobs, plans, max_batch=4, max_tokens=96, group=1).groups == (tuple(plans),)
    knobs.remove()
