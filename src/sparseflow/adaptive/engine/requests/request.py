"""Requests, policies that decide how they run, and results.

A policy is queried twice with the remaining budget: before the vision encoder, for tier and insertion
position (or a rejection); and at the insertion, for the plan. It also decides whether an infeasible request
runs anyway or is truncated. While a GPU works it may prepare its next decision.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from sparseflow.adaptive.engine.requests.sampling import SamplingParams
from sparseflow.adaptive.plan.adapter import Inputs
from sparseflow.adaptive.plan.space import Plan, Tier
from sparseflow.core.checks import check_at_least, check_positive
from sparseflow.errors import InputError, RunError

Reason = Literal["stop", "length", "truncated"]
"""Why a request ended: a stop token, the requested number of tokens, or the number that the budget allows."""


class RequestRejected(RunError):
    """The policy rejected a request.

    Args:
        reason: Reason.
        least_ms: Smallest budget that it would accept; None if unknown.
    """

    def __init__(self, reason: str, least_ms: float | None = None) -> None:
        self.least_ms = least_ms
        suffix = "" if least_ms is None else f"; it needs at least {least_ms:.1f} ms"
        super().__init__(reason + suffix)


class RequestCancelled(RunError):
    """The caller cancelled the request."""


class RequestOutOfMemory(RunError):
    """A request does not fit on the device, even without others."""


class RequestFailed(RunError):
    """A request failed; the cause is the error of the model or the policy."""


class EngineStopped(RunError):
    """The engine is shut down or failed."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Expectations of a policy, common to both decisions.

    Attributes:
        max_new_tokens: Reduced number of tokens, to meet the budget; None for the requested number.
        feasible: Whether the budget is expected to be met.
        predicted_ms: Expected time from arrival to the last token.
    """

    max_new_tokens: int | None = None
    feasible: bool = True
    predicted_ms: float | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None:
            check_at_least(1, max_new_tokens=self.max_new_tokens)


@dataclass(frozen=True, kw_only=True)
class InitialDecision(Decision):
    """Tier and insertion position, decided before the vision encoder."""

    tier: Tier | None
    insertion_position: int


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """A request that is not run; the attributes are those of `RequestRejected`."""

    reason: str
    least_ms: float | None = None


@dataclass(frozen=True, kw_only=True)
class PlanDecision(Decision):
    """The plan, decided at the insertion."""

    plan: Plan


class PlanDecider(Protocol):
    """Decides how requests run. Called on the engine's thread and must be fast."""

    def choose_initial(self, request: GenerationRequest, remaining_ms: float) -> InitialDecision | Rejection:
        """Decide before the vision encoder.

        Args:
            request: The request, with inputs at the highest tier.
            remaining_ms: Remaining budget; infinite without one, negative if exceeded.
        """
        ...

    def choose_plan(
        self, latency_token: Tensor, request: GenerationRequest, remaining_ms: float
    ) -> Plan | PlanDecision:
        """Decide at the insertion.

        Args:
            latency_token: Hidden state of the last prompt token, [d].
            request: The request.
            remaining_ms: Remaining budget.

        Returns:
            A plan with the tier and position chosen before.
        """
        ...


@runtime_checkable
class SupportsPreparation(Protocol):
    """A policy that prepares its decision at the insertion while the device works."""

    def prepare(self, request: GenerationRequest) -> None:
        """Called after `choose_initial`, while a split prompt waits for the GPU."""
        ...


@dataclass(frozen=True, kw_only=True)
class FixedPlan:
    """A policy that always returns one plan."""

    plan: Plan

    def choose_initial(self, request: GenerationRequest, remaining_ms: float) -> InitialDecision:
        return InitialDecision(tier=self.plan.tier, insertion_position=self.plan.insertion_position)

    def choose_plan(self, latency_token: Tensor, request: GenerationRequest, remaining_ms: float) -> Plan:
        return self.plan


def as_policy(plan: Plan | PlanDecider) -> PlanDecider:
    """Policy that always returns a plan; a policy is returned unchanged."""
    return FixedPlan(plan=plan) if isinstance(plan, Plan) else plan


@dataclass(frozen=True, kw_only=True, eq=False)
class GenerationRequest:
    """A request to a model.

    Attributes:
        inputs: Inputs at the highest tier, one row without padding.
        decide: Policy of the request.
        max_new_tokens: Maximum number of tokens to generate, above 0.
        budget_ms: Time from arrival to the last token; None for no budget.
        received_s: Arrival time on the `time.perf_counter` clock.
        sampling: Sampling parameters.
        stop: Token ids that end the answer; the answer includes the stop token.
        id: Name in logs.

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
        """Prompt tokens at the highest tier."""
        return self.inputs["input_ids"].shape[1]

    @property
    def deadline_s(self) -> float:
        """Time at which the last token is due; infinite without a budget."""
        return math.inf if self.budget_ms is None else self.received_s + self.budget_ms / 1e3

    def remaining_ms(self, now_s: float) -> float:
        """Remaining budget."""
        return (self.deadline_s - now_s) * 1e3


@dataclass(frozen=True, kw_only=True)
class RequestTimings:
    """Time per phase of a request.

    Attributes:
        queued_ms: From arrival to the start of the work.
        decide_ms: Time in the policy.
        vision_ms: From the start to the first block: vision encoder and embedding.
        prefill_ms: From the first block to the first token, without the policy.
        decode_ms: From the first to the last token.
        total_ms: From arrival to the last token, on the CPU clock.
    """

    queued_ms: float
    decide_ms: float
    vision_ms: float
    prefill_ms: float
    decode_ms: float
    total_ms: float


@dataclass(frozen=True, kw_only=True)
class RequestOutput(RequestTimings):
    """Result of a request.

    Attributes:
        tokens: Generated tokens.
        plan: Plan that was run.
        reason: Why the request ended.
        prompt_tokens: Tokens of the prompt as it was run, including vision tokens.
        feasible: Whether the policy expected the budget to be met.
        predicted_ms: Latency that the policy expected.
        budget_ms: Budget of the request.
    """

    tokens: tuple[int, ...]
    plan: Plan
    reason: Reason
    prompt_tokens: int
    feasible: bool
    predicted_ms: float | None
    budget_ms: float | None

    @property
    def budget_met(self) -> bool | None:
        """Whether the last token was in time; None without a budget."""
        return None if self.budget_ms is None else self.total_ms <= self.budget_ms


def check_inputs(inputs: Inputs, *, rows: int | None = None) -> None:
    """Check that inputs are rows of tokens; with `rows`, of that many rows without padding.

    Several rows may be padded on the left. Other padding is refused: the first new token of a row follows its
    last column, and positions are counted from its first token.

    Raises:
        InputError: They are not.
    """
    ids = inputs.get("input_ids")
    if ids is None:
        raise InputError(
            "`input_ids` is None; pass the inputs of a request: `open_folder(...).prompt(...).inputs`"
        )
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.dtype != torch.int64:
        description = f"{tuple(ids.shape)} {ids.dtype}" if isinstance(ids, Tensor) else type(ids).__name__
        raise InputError(f"`input_ids` must be [batch, tokens] int64, not {description}")
    if ids.numel() == 0 or (rows is not None and len(ids) != rows):
        raise InputError(
            f"`input_ids` of shape {tuple(ids.shape)} must have {rows or 'one or more'} rows with "
            "at least one token"
        )
    mask = inputs.get("attention_mask")
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.shape != ids.shape:
        description = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise InputError(
            f"`attention_mask` {description} must have the shape of `input_ids`, {tuple(ids.shape)}"
        )
    values = mask.numpy(force=True)
    if not np.isin(values, (0, 1)).all():
        raise InputError("`attention_mask` must be 1 for a token and 0 for padding")
    if rows == 1 and not values.all():
        raise InputError("a request is one row without padding; `attention_mask` must be all ones")
    values = values.astype(bool)
    invalid_rows = np.flatnonzero(~values[:, -1] | (values[:, :-1] & ~values[:, 1:]).any(1))
    if len(invalid_rows):
        raise InputError(
            f"row {invalid_rows[0]} of `attention_mask` has padding after its first token; pad rows on the "
            'left, with `tokenizer.padding_side = "left"`, or run them separately'
        )


def check_limits(max_new_tokens: int, budget_ms: float | None) -> None:
    """Check token limit and budget.

    Raises:
        InputError: One is out of range.
    """
    check_at_least(1, max_new_tokens=max_new_tokens)
    if budget_ms is not None:
        check_positive(budget_ms=budget_ms)
