"""Models, plans, requests and engines that tests of the engine share."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from sparseflow.adaptive.adapters import Adapter, get_adapter
from sparseflow.adaptive.engine.engine import Engine
from sparseflow.adaptive.engine.generate import generate
from sparseflow.adaptive.engine.requests.handle import RequestHandle
from sparseflow.adaptive.engine.requests.request import (
    FixedPlan,
    GenerationRequest,
    InitialDecision,
    PlanDecision,
    Rejection,
)
from sparseflow.adaptive.engine.requests.sampling import SamplingParams
from sparseflow.adaptive.plan.runtime import PlanRuntime
from sparseflow.adaptive.plan.space import Plan
from tests.adaptive import tiny

DEEP = Plan(tier=None, insertion_position=1, top_k=6, blocks=(0, 1, 2, 3, 4, 5))
LATER = Plan(tier=None, insertion_position=3, top_k=6, blocks=(0, 1, 2, 3, 4, 5))
"""Decodes as DEEP does."""
SHALLOW = Plan(tier=None, insertion_position=2, top_k=3, blocks=(0, 1, 4))
NARROW = Plan(tier=None, insertion_position=1, top_k=2, blocks=(0, 2, 3, 5))
PLANS = (DEEP, LATER, SHALLOW, NARROW)


@cache
def model(family: str = "olmoe") -> Any:
    """Tiny float64 model; tests do not change it."""
    return tiny.FAMILIES[family]()


@contextmanager
def attached(family: str = "olmoe") -> Iterator[tuple[Adapter, PlanRuntime]]:
    """Adapter and plan runtime of a model; the runtime is removed at the end."""
    adapter = get_adapter(model(family))
    runtime = PlanRuntime(adapter)
    try:
        yield adapter, runtime
    finally:
        runtime.remove()


class ScriptedPolicy:
    """Policy with fixed decisions that records its calls.

    Args:
        plan: Plan to choose.
        **decisions: `rejection`, `max_new_tokens` and `feasible`, if not the defaults.

    Attributes:
        calls: (method, argument, remaining budget) of each call.
    """

    def __init__(self, plan: Plan, **decisions: Any) -> None:
        self.plan, self.decisions, self.calls = plan, decisions, []

    def choose_initial(self, request: GenerationRequest, remaining_ms: float) -> InitialDecision | Rejection:
        self.calls.append(("choose_initial", request.tokens, remaining_ms))
        if "rejection" in self.decisions:
            return self.decisions["rejection"]
        return InitialDecision(
            tier=self.plan.tier,
            insertion_position=self.plan.insertion_position,
            max_new_tokens=self.decisions.get("max_new_tokens"),
            predicted_ms=7.0,
        )

    def choose_plan(
        self, latency_token: Tensor, request: GenerationRequest, remaining_ms: float
    ) -> PlanDecision:
        self.calls.append(("choose_plan", latency_token, remaining_ms))
        return PlanDecision(plan=self.plan, feasible=self.decisions.get("feasible", True), predicted_ms=9.0)


def words(tokens: int, seed: int = 0) -> dict[str, Tensor]:
    """Prompt of random tokens, without a mask."""
    return {"input_ids": tiny.make_text_prompt(tokens=tokens, seed=seed)["input_ids"]}


def request(tokens: int = 5, *, plan: Plan = DEEP, seed: int = 0, **overrides: Any) -> GenerationRequest:
    """Request of random tokens with a fixed plan."""
    overrides = {"decide": FixedPlan(plan=plan), "max_new_tokens": 8} | overrides
    return GenerationRequest(inputs=words(tokens, seed), **overrides)


def generate_alone(adapter: Adapter, runtime: PlanRuntime, request: GenerationRequest) -> tuple[int, ...]:
    """Generate the answer of a request without other requests and without slots."""
    result = generate(
        adapter, runtime, request.inputs, request.decide, max_new_tokens=request.max_new_tokens,
        sampling=request.sampling, stop=tuple(request.stop),
    )  # fmt: skip
    return tuple(result.new_tokens[0].tolist())


def make_idle_engine(both: tuple[Adapter, PlanRuntime], **overrides: Any) -> Engine:
    """Engine without a thread; the test calls `step`."""
    options: dict[str, Any] = {"plans": PLANS, "max_batch": 4, "max_tokens": 48, "start": False}
    return Engine(*both, **(options | overrides))


def run_until_idle(engine: Engine, max_steps: int = 10_000) -> None:
    """Run steps until no work is left."""
    for _ in range(max_steps):
        if not engine.step():
            return
    raise AssertionError(f"there is still work after {max_steps} steps")


def make_random_requests(
    draw: random.Random, inputs: Sequence[Mapping[str, Any]], plans: tuple[Plan, ...], count: int
) -> list[GenerationRequest]:
    """Random requests with all kinds of parameters."""
    samplings = [
        SamplingParams(),
        SamplingParams(),
        SamplingParams(temperature=1.5, seed=1),
        SamplingParams(temperature=0.7, top_p=0.8),
    ]
    return [
        GenerationRequest(
            inputs=draw.choice(inputs), decide=FixedPlan(plan=draw.choice(plans)),
            sampling=draw.choice(samplings), max_new_tokens=draw.choice([1, 2, 5, 9]),
            budget_ms=draw.choice([None, 1.0, 1e3, 1e6]), stop=draw.choice([(), (7, 21, 40)]),
        )
        for _ in range(count)
    ]  # fmt: skip


def run_mixed(
    adapter: Adapter,
    runtime: PlanRuntime,
    engine: Engine,
    requests: list[GenerationRequest],
    draw: random.Random,
) -> int:
    """Submit requests at random steps and cancel some; each must get the tokens that it gets alone.

    Returns:
        Number of requests that were cancelled before their end.
    """
    handles: list[RequestHandle] = []
    waiting = list(requests)
    while waiting or not all(handle.finished for handle in handles):
        while waiting and draw.random() < 0.5:
            handles.append(engine.submit(waiting.pop()))
        if handles and draw.random() < 0.1:
            draw.choice(handles).cancel()
        engine.step()
    num_cancelled = 0
    for handle in handles:
        expected = generate_alone(adapter, runtime, handle.request)
        tokens = handle.tokens
        assert tokens == expected[: len(tokens)], handle.request
        if len(tokens) == len(expected):
            assert handle.result().tokens == expected
        else:
            assert handle.cancelled
            num_cancelled += 1
    snapshot = engine.snapshot()
    assert snapshot.running == snapshot.queued == 0 and snapshot.submitted == len(requests)
    assert sum(snapshot.ended.values()) == len(requests)
    return num_cancelled


def copy_state(model: Any) -> dict[str, Tensor]:
    """Copy the parameters and buffers of a model."""
    return {name: value.clone() for name, value in (*model.named_parameters(), *model.named_buffers())}


def is_unchanged(model: Any, before: dict[str, Tensor]) -> bool:
    """Whether the parameters and buffers of a model equal copies bit for bit."""
    current_state = dict((*model.named_parameters(), *model.named_buffers()))
    return current_state.keys() == before.keys() and all(
        torch.equal(current_state[name], before[name]) for name in before
    )
