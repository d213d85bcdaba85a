"""What tests of the runtime share: models with knobs, plans, and what a request gets alone."""

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
    """A tiny model, float64; tests leave it as it is."""
    return tiny.FAMILIES[family]()


@contextmanager
def attached(family: str = "olmoe") -> Iterator[tuple[Adapter, PlanRuntime]]:
    """A model with knobs, which are taken away whatever happens."""
    adapter = get_adapter(model(family))
    runtime = PlanRuntime(adapter)
    try:
        yield adapter, runtime
    finally:
        runtime.remove()


class Budgeted:
    """A decider that keeps what it is told, and says what it was made to say."""

    def __init__(self, plan: Plan, **decisions: Any) -> None:
        self.plan, self.decisions, self.calls = plan, decisions, []

    def choose_initial(self, request: GenerationRequest, remaining_ms: float) -> InitialDecision | Rejection:
        self.calls.append(("first", request.inputs["input_ids"].shape[1], remaining_ms))
        if "refusal" in self.decisions:
            return self.decisions["refusal"]
        position = self.decisions.get("position", self.plan.insertion_position)
        return InitialDecision(
            tier=self.plan.tier,
            insertion_position=position,
            max_new_tokens=self.decisions.get("tokens"),
            predicted_ms=7.0,
        )

    def replan(self, request: GenerationRequest, choice: InitialDecision, remaining_ms: float) -> int:
        self.calls.append(("again", choice.insertion_position, remaining_ms))
        return self.plan.insertion_position

    def choose_plan(
        self, latency_token: Tensor, request: GenerationRequest, remaining_ms: float
    ) -> PlanDecision:
        self.calls.append(("second", latency_token.shape[0], remaining_ms))
        return PlanDecision(plan=self.plan, feasible=self.decisions.get("feasible", True), predicted_ms=9.0)


def words(tokens: int, seed: int = 0) -> dict[str, Tensor]:
    """A prompt of random words, without a mask."""
    return {"input_ids": tiny.make_text_prompt(tokens=tokens, seed=seed)["input_ids"]}


def request(tokens: int = 5, *, plan: Plan = DEEP, seed: int = 0, **overrides: Any) -> GenerationRequest:
    """A request of random words with a fixed plan."""
    overrides = {"decide": FixedPlan(plan=plan), "max_new_tokens": 8} | overrides
    return GenerationRequest(inputs=words(tokens, seed), **overrides)


def generate_alone(adapter: Adapter, runtime: PlanRuntime, request: GenerationRequest) -> tuple[int, ...]:
    """Generate the answer of a request without other requests and without slots."""
    result = generate(
        adapter, runtime, request.inputs, request.decide, max_new_tokens=request.max_new_tokens,
        sampling=request.sampling, stop=tuple(request.stop),
    )  # fmt: skip
    return tuple(result.new_tokens[0].tolist())


def still(both: tuple[Adapter, PlanRuntime], **overrides: Any) -> Engine:
    """An engine without a thread; the test calls its steps."""
    options: dict[str, Any] = {"plans": PLANS, "max_batch": 4, "max_tokens": 48, "start": False}
    return Engine(*both, **(options | overrides))


def driven(engine: Engine, turns: int = 10_000) -> None:
    """Take turns until nothing is left to do."""
    for _ in range(turns):
        if not engine.step():
            return
    raise AssertionError(f"there is still work after {turns} turns")


def arrivals(
    draw: random.Random, inputs: Sequence[Mapping[str, Any]], plans: tuple[Plan, ...], count: int
) -> list[GenerationRequest]:
    """Requests of all kinds."""
    ways = [
        SamplingParams(),
        SamplingParams(),
        SamplingParams(temperature=1.5, seed=1),
        SamplingParams(temperature=0.7, top_p=0.8),
    ]
    return [
        GenerationRequest(
            inputs=draw.choice(inputs), decide=FixedPlan(plan=draw.choice(plans)), sampling=draw.choice(ways),
            max_new_tokens=draw.choice([1, 2, 5, 9]), budget_ms=draw.choice([None, 1.0, 1e3, 1e6]),
            stop=draw.choice([(), (7, 21, 40)]),
        )
        for _ in range(count)
    ]  # fmt: skip


def mixed(
    adapter: Adapter,
    runtime: PlanRuntime,
    engine: Engine,
    requests: list[GenerationRequest],
    draw: random.Random,
) -> int:
    """Requests come at random turns and some are called off; each must get what it gets alone.

    Returns:
        How many were called off before they were done.
    """
    handles: list[RequestHandle] = []
    waiting = list(requests)
    while waiting or not all(handle.finished for handle in handles):
        while waiting and draw.random() < 0.5:
            handles.append(engine.submit(waiting.pop()))
        if handles and draw.random() < 0.1:
            draw.choice(handles).cancel()
        engine.step()
    off = 0
    for handle in handles:
        expected = generate_alone(adapter, runtime, handle.request)
        tokens = handle.tokens
        assert tokens == expected[: len(tokens)], handle.request
        if len(tokens) == len(expected):
            assert handle.result().tokens == expected
        else:
            assert handle.cancelled
            off += 1
    snapshot = engine.snapshot()
    assert snapshot.running == snapshot.queued == 0 and snapshot.submitted == len(requests)
    assert sum(snapshot.ended.values()) == len(requests)
    return off


def parameters(model: Any) -> dict[str, Tensor]:
    """Copies of a model's parameters and buffers."""
    return {name: value.clone() for name, value in (*model.named_parameters(), *model.named_buffers())}


def same(model: Any, before: dict[str, Tensor]) -> bool:
    """Whether a model has the parameters and buffers that it had, bit for bit."""
    current_state = dict((*model.named_parameters(), *model.named_buffers()))
    return current_state.keys() == before.keys() and all(
        torch.equal(current_state[name], before[name]) for name in before
    )
