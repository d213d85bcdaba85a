"""What is asked of a model, who decides how it is run, and what comes back.

A decider is asked up to three times, each time with the milliseconds that are left: before the vision
encoder, for the tier and the insertion position (or a refusal); after it, where it wants to be, for the
position once more; and at the insertion, for the plan. It says too whether a request that cannot be met is
run all the same, or cut short. While a GPU works it may get ready for what it will be asked.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from sparseflow.adaptive.engine.requests.sampling import SamplingParams
from sparseflow.adaptive.plan.adapter import Inputs
from sparseflow.adaptive.plan.space import Plan, Tier
from sparseflow.errors import InputError, RunError

Reason = Literal["stop", "length", "truncated"]
"""Why a request ended: a stop token, as many tokens as were asked for, or as many as its budget allows."""


class RequestRejected(RunError):
    """The decider refused a request.

    Args:
        reason: Why.
        least_ms: The least budget that it would take; None where that is not known.
    """

    def __init__(self, reason: str, least_ms: float | None = None) -> None:
        self.least_ms = least_ms
        least = "" if least_ms is None else f"; it needs at least {least_ms:.1f} ms"
        super().__init__(reason + least)


class RequestCancelled(RunError):
    """Whoever asked does not want the answer any more."""


class RequestOutOfMemory(RunError):
    """A request does not fit beside what the device holds, not even alone."""


class RequestFailed(RunError):
    """A request failed; its cause is the error of the model or of the decider."""


class EngineStopped(RunError):
    """The engine was shut down, takes no more requests, or broke."""


@dataclass(frozen=True, kw_only=True)
class InitialDecision:
    """What is decided before the vision encoder.

    Attributes:
        tier: As in `Plan`.
        insertion_position: As in `Plan`.
        max_new_tokens: Fewer than were asked for, to meet the budget; None for all of them.
        feasible: Whether the budget is thought to be met.
        predicted_ms: What the request is thought to take from receipt to its last token.
    """

    tier: Tier | None
    insertion_position: int
    max_new_tokens: int | None = None
    feasible: bool = True
    predicted_ms: float | None = None

    def __post_init__(self) -> None:
        _check_new_tokens(self.max_new_tokens)


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """A request that is not run; the attributes are those of `RequestRejected`."""

    reason: str
    least_ms: float | None = None


@dataclass(frozen=True, kw_only=True)
class PlanDecision:
    """A plan, and what there is to say about it; the other attributes are those of `Choice`."""

    plan: Plan
    max_new_tokens: int | None = None
    feasible: bool = True
    predicted_ms: float | None = None

    def __post_init__(self) -> None:
        _check_new_tokens(self.max_new_tokens)


class PlanDecider(Protocol):
    """Who decides how requests are run. It is asked on the engine's thread and must not take long."""

    def first(self, request: GenerationRequest, remaining_ms: float) -> InitialDecision | Rejection:
        """Before the vision encoder.

        Args:
            request: Its inputs are those of the highest tier, where they were handed in.
            remaining_ms: What is left of the budget; infinite without one, negative when it is over.
        """
        ...

    def second(
        self, latency_token: Tensor, request: GenerationRequest, remaining_ms: float
    ) -> Plan | PlanDecision:
        """At the insertion.

        Args:
            latency_token: What the last prompt token has become by then, [d].
            request: As before.
            remaining_ms: As before.

        Returns:
            A plan of the tier and the position decided before.
        """
        ...


@runtime_checkable
class SupportsReplanning(Protocol):
    """A decider that wants to be asked after the vision encoder, too."""

    def again(self, request: GenerationRequest, choice: InitialDecision, remaining_ms: float) -> int:
        """The insertion position to go on with."""
        ...


@runtime_checkable
class SupportsPreparation(Protocol):
    """A decider that gets ready to be asked at the insertion while the device works."""

    def prepare(self, request: GenerationRequest) -> None:
        """After `first`, on a GPU where prompts run in parts: the request waits for the device anyway."""
        ...


@dataclass(frozen=True, kw_only=True)
class FixedPlan:
    """A decider that always gives one plan."""

    plan: Plan

    def first(self, request: GenerationRequest, remaining_ms: float) -> InitialDecision:
        return InitialDecision(tier=self.plan.tier, insertion_position=self.plan.insertion_position)

    def second(self, latency_token: Tensor, request: GenerationRequest, remaining_ms: float) -> Plan:
        return self.plan


@dataclass(frozen=True, kw_only=True, eq=False)
class GenerationRequest:
    """What is asked of a model.

    Attributes:
        inputs: Those of the highest tier, one row without padding.
        decide: Who decides how it is run.
        max_new_tokens: Most tokens to generate, > 0.
        budget_ms: From receipt to the last token; None where there is none.
        received_s: When it was received, by `time.perf_counter`.
        sampling: How tokens are drawn.
        stop: Tokens that end the answer; the last token of an answer may be one of them.
        id: A name, for logs.

    Raises:
        InputError: A value is out of range, or the inputs are not one row of tokens.
    """

    inputs: Inputs
    decide: PlanDecider
    max_new_tokens: int = 64
    budget_ms: float | None = None
    received_s: float = field(default_factory=time.perf_counter)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: Iterable[int] = frozenset()
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", frozenset(self.stop))
        check_inputs(self.inputs, rows=1)
        check_limits(self.max_new_tokens, self.budget_ms)

    @property
    def tokens(self) -> int:
        """Tokens of the prompt, at the highest tier."""
        return self.inputs["input_ids"].shape[1]

    @property
    def deadline_s(self) -> float:
        """When the last token is due, by the same clock; infinite without a budget."""
        return math.inf if self.budget_ms is None else self.received_s + self.budget_ms / 1e3

    def remaining_ms(self, now_s: float) -> float:
        """What is left of the budget."""
        return (self.deadline_s - now_s) * 1e3


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """An answer.

    Attributes:
        tokens: What was generated.
        plan: What was run.
        reason: Why it ended.
        prompt_tokens: Of the prompt as it was run, vision tokens included.
        feasible: Whether the decider thought that the budget would be met.
        predicted_ms: What it thought that the request would take.
        budget_ms: As in `GenerationRequest`.
        queued_ms: From receipt until work began.
        decide_ms: Spent in the decider, all times together.
        vision_ms: From there to the first block: vision encoder and embedding.
        prefill_ms: From the first block to the first token, decisions left out.
        decode_ms: From the first token to the last.
        total_ms: From receipt to the last token.
    """

    tokens: tuple[int, ...]
    plan: Plan
    reason: Reason
    prompt_tokens: int
    feasible: bool
    predicted_ms: float | None
    budget_ms: float | None
    queued_ms: float
    decide_ms: float
    vision_ms: float
    prefill_ms: float
    decode_ms: float
    total_ms: float

    @property
    def budget_met(self) -> bool | None:
        """Whether the last token came in time; None without a budget."""
        return None if self.budget_ms is None else self.total_ms <= self.budget_ms


def check_inputs(inputs: Inputs, *, rows: int | None = None) -> None:
    """That inputs are rows of tokens; where `rows` is given, so many and without padding.

    Raises:
        InputError: They are not.
    """
    ids = inputs.get("input_ids")
    if ids is None:
        raise InputError(
            "there are no `input_ids`; give a request's inputs: `open_folder(...).prompt(...).inputs`, "
            "not NoneType"
        )
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.dtype != torch.int64:
        what = f"{tuple(ids.shape)} {ids.dtype}" if isinstance(ids, Tensor) else type(ids).__name__
        raise InputError(f"`input_ids` must be [batch, tokens] int64, not {what}")
    if ids.numel() == 0 or (rows is not None and len(ids) != rows):
        raise InputError(
            f"`input_ids` of shape {tuple(ids.shape)} must hold {rows or 'some'} rows with a token at least"
        )
    mask = inputs.get("attention_mask")
    if mask is not None and mask.shape != ids.shape:
        raise InputError(
            f"`attention_mask` {tuple(mask.shape)} must have the shape of `input_ids`, {tuple(ids.shape)}"
        )
    if rows == 1 and mask is not None and not mask.numpy(force=True).all():
        raise InputError("a request is one row without padding; `attention_mask` must be all ones")


def check_limits(max_new_tokens: int, budget_ms: float | None) -> None:
    """That a request asks for something that can be.

    Raises:
        InputError: It does not.
    """
    _check_new_tokens(max_new_tokens)
    number = isinstance(budget_ms, int | float) and not isinstance(budget_ms, bool)
    if budget_ms is not None and not (number and math.isfinite(budget_ms) and budget_ms > 0.0):
        raise InputError(
            f"the latency budget (`budget_ms`, ={budget_ms!r}) must be a finite number above 0, or None for "
            "no budget"
        )


def _check_new_tokens(count: int | None) -> None:
    if count is not None and (type(count) is not int or count < 1):
        raise InputError(f"`max_new_tokens` (={count!r}) must be a whole number, at least 1")
