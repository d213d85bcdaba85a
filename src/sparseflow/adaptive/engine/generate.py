"""Generation of tokens with a fixed plan, or with a policy and a budget.

`generate` uses the model's own forward with a growing cache; it works for any transformers model with an
adapter, and its greedy tokens equal those of the model's `generate` under the same plan. `generate_on`
submits the request to an engine, which runs many requests concurrently in static shapes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparseflow.adaptive.engine.admission import check_length, check_token_ids
from sparseflow.adaptive.engine.decode import last_logits_args
from sparseflow.adaptive.engine.prefill.embedding import on_decoder_call
from sparseflow.adaptive.engine.requests.plan_request import PlanRequest
from sparseflow.adaptive.engine.requests.request import (
    FixedPlan,
    GenerationRequest,
    PlanDecider,
    RequestTimings,
    as_policy,
    check_inputs,
    check_limits,
)
from sparseflow.adaptive.engine.requests.sampling import SamplingParams, UniformStream, sample_tokens
from sparseflow.adaptive.plan.adapter import Adapter, Inputs
from sparseflow.adaptive.plan.runtime import PlanRuntime
from sparseflow.adaptive.plan.space import Plan
from sparseflow.core.extras import require
from sparseflow.errors import InputError, RunError

if TYPE_CHECKING:
    from sparseflow.adaptive.engine.engine import Engine


class Timestamps:
    """Named timestamps of a call: CUDA events on a GPU, CPU times elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: dict[str, Any] = {}

    def record(self, name: str) -> None:
        """Record a timestamp."""
        if self._device.type != "cuda":
            self._events[name] = time.perf_counter()
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._events[name] = event

    def wait(self) -> None:
        """Wait until the device has passed all timestamps."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def elapsed_ms(self, first: str, last: str) -> float:
        """Milliseconds between two timestamps."""
        if self._device.type != "cuda":
            return (self._events[last] - self._events[first]) * 1e3
        return float(self._events[first].elapsed_time(self._events[last]))


OnTokens = Callable[[list[int]], None]
"""Called with each new token of all rows."""


@dataclass(frozen=True, kw_only=True)
class GenerationResult:
    """Result of a call.

    Attributes:
        sequences: Prompt as it was run, and answer, [batch, tokens] int64; padded after the stop token.
        prompt_tokens: Tokens of the prompt.
        plan: Plan that was run.
        feasible: Whether the policy expected the budget to be met.
        predicted_ms: Latency that the policy expected, for the maximum number of tokens.
        budget_ms: Requested budget.
        timings: Time per phase.
    """

    sequences: Tensor
    prompt_tokens: int
    plan: Plan
    feasible: bool
    predicted_ms: float | None
    budget_ms: float | None
    timings: RequestTimings

    @property
    def new_tokens(self) -> Tensor:
        """The answer, [batch, tokens] int64."""
        return self.sequences[:, self.prompt_tokens :]

    @property
    def measured_ms(self) -> float:
        """Time from arrival to the last token."""
        return self.timings.total_ms

    @property
    def budget_met(self) -> bool | None:
        """Whether the last token was in time; None without a budget."""
        return None if self.budget_ms is None else self.timings.total_ms <= self.budget_ms


def generate(
    adapter: Adapter,
    runtime: PlanRuntime,
    inputs: Inputs,
    plan: Plan | PlanDecider,
    *,
    max_new_tokens: int = 64,
    budget_ms: float | None = None,
    received_s: float | None = None,
    sampling: SamplingParams | None = None,
    stop: Collection[int] = (),
    max_total_tokens: int | None = None,
    on_tokens: OnTokens | None = None,
) -> GenerationResult:
    """Generate tokens with the model's own forward.

    Args:
        adapter: Adapter of the model.
        runtime: Plan runtime of the model.
        inputs: Inputs at the highest tier. Rows of a batch are padded on the left.
        plan: Plan to run, or policy that chooses it; a policy takes one row.
        max_new_tokens: Maximum number of tokens to generate, above 0.
        budget_ms: Time from arrival to the last token, for the policy.
        received_s: Arrival time on the `time.perf_counter` clock; default: now.
        sampling: Sampling parameters of every row; greedy by default.
        stop: Token ids that end a row; the model's pad token or a stop token fills the rest.
        max_total_tokens: Maximum number of tokens of prompt and answer; default: the model's context length.
        on_tokens: Called with each new token of all rows.

    Raises:
        InputError: A value is out of range or does not fit.
        PlanError: The model cannot run the chosen plan.
        RequestRejected: The policy rejects the request.
    """
    received = time.perf_counter() if received_s is None else received_s
    check_inputs(inputs)
    check_limits(max_new_tokens, budget_ms)
    check_token_ids(adapter, inputs)
    device = next(adapter.decoder.parameters()).device
    inputs = {
        name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()
    }
    rows = len(inputs["input_ids"])
    decide = as_policy(plan)
    if rows > 1 and not isinstance(decide, FixedPlan):
        raise InputError(f"a policy takes one row, not {rows}; pass a Plan for a batch")
    request: Any = None
    if rows == 1:
        request = GenerationRequest(
            inputs=inputs,
            decide=decide,
            max_new_tokens=max_new_tokens,
            budget_ms=budget_ms,
            received_s=received,
        )
    plan_request = PlanRequest(
        decide, request, lambda: math.inf if request is None else request.remaining_ms(time.perf_counter())
    )
    streams = [UniformStream(sampling or SamplingParams()) for _ in range(rows)]
    sampler = _TokenSampler(streams, frozenset(stop), _get_pad_id(adapter, stop), on_tokens)
    with torch.no_grad():
        start_s = time.perf_counter()
        prompt, running_plan, times = _generate(
            adapter, runtime, inputs, plan_request, sampler, max_new_tokens,
            adapter.context if max_total_tokens is None else max_total_tokens,
        )  # fmt: skip
    total_ms, times["queued_ms"] = (time.perf_counter() - received) * 1e3, (start_s - received) * 1e3
    return GenerationResult(
        sequences=torch.cat([prompt, *(value[:, None] for value in sampler.tokens)], dim=1),
        prompt_tokens=prompt.shape[1],
        plan=running_plan,
        feasible=plan_request.feasible,
        predicted_ms=plan_request.predicted_ms,
        budget_ms=budget_ms,
        timings=RequestTimings(**times, total_ms=total_ms),
    )


def generate_on(engine: Engine, adapter: Adapter, request: GenerationRequest) -> GenerationResult:
    """Generate tokens on an engine and wait for them.

    Args:
        engine: Engine of the model.
        adapter: Adapter of the model.
        request: Request with one of the engine's plans, or a policy that chooses one.

    Raises:
        InputError: The request does not fit.
        RequestRejected: The policy rejects the request, or the queue is full.
        RunError: The engine cannot run it: memory is exhausted, the plan is not the engine's, logits are NaN,
            or it stopped.
    """
    handle = engine.submit(request)
    try:
        output = handle.result()
    except BaseException:
        # Without this the request of an interrupted call would continue.
        handle.cancel()
        raise
    prompt = adapter.reduce_to_tier(request.inputs, output.plan.tier)["input_ids"]
    return GenerationResult(
        sequences=torch.cat([prompt, prompt.new_tensor([output.tokens])], dim=1),
        prompt_tokens=prompt.shape[1],
        plan=output.plan,
        feasible=output.feasible,
        predicted_ms=output.predicted_ms,
        budget_ms=request.budget_ms,
        timings=output,
    )


class _TokenSampler:
    """Samples and collects the new tokens of all rows.

    Attributes:
        tokens: New tokens per step, [rows] int64.
        finished: Whether every row has reached a stop token.
    """

    def __init__(
        self, streams: Sequence[UniformStream], stop: frozenset[int], pad_id: int, on_tokens: OnTokens | None
    ) -> None:
        self._streams, self._stop, self._pad_id, self._on_tokens = streams, stop, pad_id, on_tokens
        self._finished_rows = [False] * len(streams)
        self.tokens: list[Tensor] = []

    @property
    def finished(self) -> bool:
        return all(self._finished_rows)

    def sample(self, logits: Tensor) -> Tensor:
        """Sample the next token of each row from logits [rows, vocabulary]."""
        samplings = [stream.sampling for stream in self._streams]
        sampled = sample_tokens(logits, samplings, [stream.next() for stream in self._streams]).tolist()
        if min(sampled) < 0:
            raise RunError("the model's logits are NaN; check its weights and inputs")
        rows = list(zip(sampled, self._finished_rows, strict=True))
        tokens = [self._pad_id if finished else token for token, finished in rows]
        self._finished_rows = [finished or token in self._stop for token, finished in rows]
        self.tokens.append(torch.tensor(tokens, device=logits.device))
        if self._on_tokens is not None:
            self._on_tokens(tokens)
        return self.tokens[-1]


def _generate(
    adapter: Adapter,
    runtime: PlanRuntime,
    inputs: Inputs,
    plan_request: PlanRequest,
    sampler: _TokenSampler,
    max_new_tokens: int,
    max_total_tokens: int | None,
) -> tuple[Tensor, Plan, dict[str, float]]:
    """Run the model; returns the prompt as it was run, the plan, and times."""
    timestamps = Timestamps(inputs["input_ids"].device)
    choice = plan_request.choose_initial()
    before_s = plan_request.policy_s
    timestamps.record("start")
    reduced = adapter.reduce_to_tier(inputs, choice.tier)
    if max_total_tokens is not None:
        check_length(reduced["input_ids"].shape[1], plan_request.limit(max_new_tokens), max_total_tokens)
    position_ids, next_position = adapter.compute_positions(reduced)
    mask = reduced.get("attention_mask")
    if mask is not None and bool(mask.bool().all()):
        # Without padding the mask is redundant, and it would disable the fastest attention.
        mask = None
    cache = require("transformers.cache_utils", "adaptive").DynamicCache()
    logits_args = last_logits_args(adapter.model)
    with (
        runtime.use_decided_plan(
            choice.tier, choice.insertion_position, lambda hidden: plan_request.choose_plan(hidden[0, -1])
        ) as running,
        on_decoder_call(adapter, lambda _: timestamps.record("blocks")),
    ):
        output: Any = adapter.model(
            **{**reduced, "attention_mask": mask, "position_ids": position_ids}, past_key_values=cache,
            use_cache=True, **logits_args,
        )  # fmt: skip
    assert running.plan is not None
    last = sampler.sample(output.logits[:, -1])
    timestamps.record("first")
    limit = plan_request.limit(max_new_tokens)
    with runtime.use_plan(running.plan):
        while len(sampler.tokens) < limit and not sampler.finished:
            mask = None if mask is None else torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
            output = adapter.model(
                input_ids=last[:, None], attention_mask=mask, position_ids=next_position[:, None],
                past_key_values=cache, use_cache=True, **logits_args,
            )  # fmt: skip
            next_position, last = next_position + 1, sampler.sample(output.logits[:, -1])
    timestamps.record("last")
    timestamps.wait()
    # The remaining policy time fell between the first block and the first token.
    later_ms = (plan_request.policy_s - before_s) * 1e3
    return reduced["input_ids"], running.plan, {
        "decide_ms": plan_request.policy_s * 1e3, "vision_ms": timestamps.elapsed_ms("start", "blocks"),
        "prefill_ms": timestamps.elapsed_ms("blocks", "first") - later_ms,
        "decode_ms": timestamps.elapsed_ms("first", "last"),
    }  # fmt: skip


def _get_pad_id(adapter: Adapter, stop: Collection[int]) -> int:
    pad_id = getattr(getattr(adapter.model, "generation_config", None), "pad_token_id", None)
    return min(stop, default=0) if pad_id is None else int(pad_id)
