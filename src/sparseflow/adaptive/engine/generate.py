"""Generate tokens with a plan, or with a decider and a budget.

`generate` is the plain way, by the model's own forward: any model of transformers that has an adapter, one
call after the other, keys and values in a cache that grows. Greedy tokens are those of the model's own
`generate` under the same plan. `generate_on` hands the call to an engine, which does the same for many
requests at a time, in static shapes that a GPU can record.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparseflow.adaptive.engine.admission import check_room, check_words
from sparseflow.adaptive.engine.decode import last_logits
from sparseflow.adaptive.engine.prefill.embedding import at_decoder
from sparseflow.adaptive.engine.requests.plan_request import PlanRequest
from sparseflow.adaptive.engine.requests.request import (
    FixedPlan,
    GenerationRequest,
    PlanDecider,
    check_inputs,
    check_limits,
)
from sparseflow.adaptive.engine.requests.sampling import SamplingParams, UniformStream, pick
from sparseflow.adaptive.plan.adapter import Adapter, Inputs
from sparseflow.adaptive.plan.runtime import PlanRuntime
from sparseflow.adaptive.plan.space import Plan
from sparseflow.core.extras import require
from sparseflow.errors import InputError, RunError

if TYPE_CHECKING:
    from sparseflow.adaptive.engine.engine import Engine


class Timestamps:
    """Named moments on one device.

    Args:
        device: Where the work is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: dict[str, Any] = {}

    def mark(self, name: str) -> None:
        """This is the moment of that name."""
        if self._device.type != "cuda":
            self._marks[name] = time.perf_counter()
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._marks[name] = event

    def wait(self) -> None:
        """Until the device has done all."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def between_ms(self, first: str, last: str) -> float:
        """Milliseconds from one moment to another; on a GPU it must have been waited for."""
        if self._device.type != "cuda":
            return (self._marks[last] - self._marks[first]) * 1e3
        return float(self._marks[first].elapsed_time(self._marks[last]))


OnTokens = Callable[[list[int]], None]
"""Called with each new token of all rows, as they come."""


@dataclass(frozen=True, kw_only=True)
class RequestTimings:
    """Where the time of a call went, as in `runtime.requests.RequestOutput`.

    On a GPU, phases of the plain way lie between CUDA events, so nothing waits.

    Attributes:
        queued_ms: From receipt until work began.
        decide_ms: Spent in the decider, all times together.
        vision_ms: From there to the first block: vision encoder and embedding.
        prefill_ms: From the first block to the first token, decisions left out.
        decode_ms: From the first token to the last.
        total_ms: From receipt to the last token, by the host's clock.
    """

    queued_ms: float
    decide_ms: float
    vision_ms: float
    prefill_ms: float
    decode_ms: float
    total_ms: float


@dataclass(frozen=True, kw_only=True)
class GenerationResult:
    """What a call gave.

    Attributes:
        sequences: Prompt, as it was run, and answer: [batch, tokens] int64. Behind its stop token a row is
            padded.
        prompt_tokens: Tokens of the prompt.
        plan: What was run.
        feasible: Whether the decider thought that the budget would be met.
        predicted_ms: What it thought that the call would take, if all of the tokens asked for are generated.
        budget_ms: What was asked for.
        timings: Where the time went.
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
        """The answer: [batch, tokens] int64."""
        return self.sequences[:, self.prompt_tokens :]

    @property
    def measured_ms(self) -> float:
        """What the call took, from receipt to the last token."""
        return self.timings.total_ms

    @property
    def budget_met(self) -> bool | None:
        """Whether the last token came in time; None without a budget."""
        return None if self.budget_ms is None else self.timings.total_ms <= self.budget_ms


def generate(
    adapter: Adapter,
    knobs: PlanRuntime,
    inputs: Inputs,
    plan: Plan | PlanDecider,
    *,
    max_new_tokens: int = 64,
    budget_ms: float | None = None,
    received_s: float | None = None,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    stop: Collection[int] = (),
    pad_id: int | None = None,
    most_tokens: int | None = None,
    on_tokens: OnTokens | None = None,
) -> GenerationResult:
    """Generate tokens.

    Args:
        adapter: The model.
        knobs: The knobs on it.
        inputs: Those of the highest tier. Rows of a batch are padded on their left.
        plan: What to run, or who decides it; a decider takes one row.
        max_new_tokens: Most tokens to generate, > 0.
        budget_ms: From receipt to the last token, for the decider.
        received_s: When the request was received, by `time.perf_counter`; by default now.
        sampling: How tokens are drawn, for all rows or for each; greedy by default.
        stop: Tokens that end a row.
        pad_id: What follows a stop token in a row while others go on; by default the model's own, or the stop
            token.
        most_tokens: Of a prompt and its answer together; by default as many as the model has positions for.
        on_tokens: Called with each new token of all rows, as they come.

    Raises:
        InputError: Something is out of range, or does not fit.
        PlanError: The model cannot run what was decided.
        Refused: The decider refuses.
    """
    received = time.perf_counter() if received_s is None else received_s
    check_inputs(inputs)
    check_limits(max_new_tokens, budget_ms)
    check_words(adapter, inputs)
    device = next(adapter.decoder.parameters()).device
    inputs = {name: each.to(device) if isinstance(each, Tensor) else each for name, each in inputs.items()}
    rows = len(inputs["input_ids"])
    decide: Any = FixedPlan(plan=plan) if isinstance(plan, Plan) else plan
    if rows > 1 and not isinstance(decide, FixedPlan):
        raise InputError(
            f"a decider decides for one row, not {rows}: rows of a batch share a plan, so give a Plan"
        )
    asked: Any = None
    if rows == 1:
        asked = GenerationRequest(
            inputs=inputs,
            decide=decide,
            max_new_tokens=max_new_tokens,
            budget_ms=budget_ms,
            received_s=received,
        )
    asking = PlanRequest(
        decide, asked, lambda: math.inf if asked is None else asked.remaining_ms(time.perf_counter())
    )
    draws = [UniformStream(each) for each in _for_rows(sampling, rows)]
    answer = _TokenSampler(draws, frozenset(stop), _padding(adapter, pad_id, stop), on_tokens)
    with torch.no_grad():
        began = time.perf_counter()
        prompt, running_plan, times = _run(
            adapter, knobs, inputs, asking, answer, max_new_tokens,
            adapter.context if most_tokens is None else most_tokens,
        )  # fmt: skip
    total_ms, times["queued_ms"] = (time.perf_counter() - received) * 1e3, (began - received) * 1e3
    return GenerationResult(
        sequences=torch.cat([prompt, *(each[:, None] for each in answer.tokens)], dim=1),
        prompt_tokens=prompt.shape[1],
        plan=running_plan,
        feasible=asking.feasible,
        predicted_ms=asking.predicted_ms,
        budget_ms=budget_ms,
        timings=RequestTimings(**times, total_ms=total_ms),
    )


def generate_on(
    engine: Engine,
    adapter: Adapter,
    inputs: Inputs,
    plan: Plan | PlanDecider,
    *,
    max_new_tokens: int = 64,
    budget_ms: float | None = None,
    received_s: float | None = None,
    sampling: SamplingParams | None = None,
    stop: Collection[int] = (),
) -> GenerationResult:
    """Generate tokens by an engine, and wait for them; other threads' requests may run beside.

    Args:
        engine: Of the model.
        adapter: The model.
        inputs: As of `generate`, of one row.
        plan: One of the engine's, or who decides among them.
        max_new_tokens: As of `generate`, as the next ones.
        budget_ms: From receipt to the last token, for the decider.
        received_s: By default now.
        sampling: Greedy by default.
        stop: Tokens that end the answer.

    Raises:
        InputError: Something is out of range, or the request does not fit.
        Refused: The decider refuses, or too many wait.
        RunError: The engine cannot run it: no memory, a plan that is not the engine's, NaN, or it stopped.
    """
    request = GenerationRequest(
        inputs=inputs, decide=FixedPlan(plan=plan) if isinstance(plan, Plan) else plan, stop=stop,
        max_new_tokens=max_new_tokens, budget_ms=budget_ms, sampling=sampling or SamplingParams(),
        received_s=time.perf_counter() if received_s is None else received_s,
    )  # fmt: skip
    handle = engine.submit(request)
    try:
        found = handle.result()
    except BaseException:
        # Nobody waits any more: without this an interrupted call would go on.
        handle.cancel()
        raise
    prompt = adapter.at_tier(inputs, found.plan.tier)["input_ids"]
    return GenerationResult(
        sequences=torch.cat([prompt, prompt.new_tensor([found.tokens])], dim=1),
        prompt_tokens=prompt.shape[1], plan=found.plan, feasible=found.feasible,
        predicted_ms=found.predicted_ms, budget_ms=budget_ms,
        timings=RequestTimings(**{each.name: getattr(found, each.name) for each in fields(RequestTimings)}),
    )  # fmt: skip


class _TokenSampler:
    """New tokens of all rows.

    Attributes:
        tokens: Step by step: [rows] int64.
        done: Whether every row has met a stop token.
    """

    def __init__(
        self, draws: Sequence[UniformStream], stop: frozenset[int], pad_id: int, on_tokens: OnTokens | None
    ) -> None:
        self._draws, self._stop, self._pad_id, self._on_tokens = draws, stop, pad_id, on_tokens
        self._over = [False] * len(draws)
        self.tokens: list[Tensor] = []

    @property
    def done(self) -> bool:
        return all(self._over)

    def take(self, logits: Tensor) -> Tensor:
        """Draw the next token of each row from logits [rows, vocabulary].

        Raises:
            RunError: Logits are NaN.
        """
        samplings = [draws.sampling for draws in self._draws]
        found = pick(logits, samplings, [draws.next() for draws in self._draws]).tolist()
        if min(found) < 0:
            raise RunError("the model's logits are NaN; look at its weights and inputs")
        told = [self._pad_id if over else token for token, over in zip(found, self._over, strict=True)]
        self._over = [over or token in self._stop for token, over in zip(found, self._over, strict=True)]
        self.tokens.append(torch.tensor(told, device=logits.device))
        if self._on_tokens is not None:
            self._on_tokens(told)
        return self.tokens[-1]


def _run(
    adapter: Adapter,
    knobs: PlanRuntime,
    inputs: Inputs,
    asking: PlanRequest,
    answer: _TokenSampler,
    max_new_tokens: int,
    most_tokens: int | None,
) -> tuple[Tensor, Plan, dict[str, float]]:
    """Fill an answer; gives the prompt as it was run, the plan, and times."""
    marks = Timestamps(inputs["input_ids"].device)
    choice = asking.first()
    before_s = asking.spent_s
    marks.mark("start")
    given = adapter.at_tier(inputs, choice.tier)
    if most_tokens is not None:
        check_room(given["input_ids"].shape[1], asking.limit(max_new_tokens), most_tokens)
    places, after = adapter.positions(given)
    mask = given.get("attention_mask")
    if mask is not None and bool(mask.bool().all()):
        # Without padding there is nothing to mask, and a mask would cost the fastest attention.
        mask = None
    cache = require("transformers.cache_utils", "adaptive").DynamicCache()
    few = last_logits(adapter.model)
    images = adapter.vision_tokens(given) > 0
    with knobs.deciding(
        choice.tier, choice.insertion_position, lambda hidden: asking.second(hidden[0, -1])
    ) as running:

        def entered(named: dict[str, Any]) -> None:
            marks.mark("blocks")
            if asking.again_wanted:
                if images:
                    marks.wait()
                running.insertion_position = asking.again(choice.insertion_position)

        with at_decoder(adapter, entered):
            found: Any = adapter.model(
                **{**given, "attention_mask": mask, "position_ids": places}, past_key_values=cache,
                use_cache=True, **few,
            )  # fmt: skip
    assert running.plan is not None
    last = answer.take(found.logits[:, -1])
    marks.mark("first")
    limit = asking.limit(max_new_tokens)
    with knobs.running(running.plan):
        while len(answer.tokens) < limit and not answer.done:
            mask = None if mask is None else torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
            found = adapter.model(
                input_ids=last[:, None], attention_mask=mask, position_ids=after[:, None],
                past_key_values=cache, use_cache=True, **few,
            )  # fmt: skip
            after, last = after + 1, answer.take(found.logits[:, -1])
    marks.mark("last")
    marks.wait()
    # Of the time in the decider, the rest fell between the first block and the first token.
    later_ms = (asking.spent_s - before_s) * 1e3
    return given["input_ids"], running.plan, {
        "decide_ms": asking.spent_s * 1e3, "vision_ms": marks.between_ms("start", "blocks"),
        "prefill_ms": marks.between_ms("blocks", "first") - later_ms,
        "decode_ms": marks.between_ms("first", "last"),
    }  # fmt: skip


def _for_rows(sampling: SamplingParams | Sequence[SamplingParams] | None, rows: int) -> list[SamplingParams]:
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling or SamplingParams()] * rows
    if len(sampling) != rows:
        raise InputError(
            f"`sampling` has {len(sampling)} entries; give one for each of {rows} rows, or one for all"
        )
    return list(sampling)


def _padding(adapter: Adapter, pad_id: int | None, stop: Collection[int]) -> int:
    config = getattr(adapter.model, "generation_config", None)
    for found in (pad_id, getattr(config, "pad_token_id", None)):
        if found is not None:
            return int(found)
    return min(stop, default=0)
