"""Backend interface of the server: a latency forecast for admission, and events of running requests.

`engine_backend.py` implements it with the engine. The server queues requests itself: a backend gets at most
`slots` requests at a time, each with a target end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from sparseflow.adaptive.engine.requests.sampling import SamplingParams
from sparseflow.adaptive.plan.space import Plan
from sparseflow.adaptive.policy.selector import OnInfeasible
from sparseflow.adaptive.prompts.messages import ApiError, Prompt


@dataclass(frozen=True, kw_only=True, eq=False)
class BackendJob:
    """A request to run now.

    Attributes:
        id: Name for logs.
        prompt: Prompt.
        max_new_tokens: Maximum number of generated tokens.
        expected_tokens: Number of tokens for which times are predicted.
        sampling: Sampling parameters.
        received_s: Receipt time, by `time.perf_counter`.
        budget_ms: Latency budget from receipt to last token; None without.
        target_end_s: Latest end that plans should be selected for, by the same clock: the deadline, or an
            earlier time because of queued requests or underestimated latencies; infinite without a target.
        on_infeasible: Behavior if no plan meets the budget. With `"reject"` only feasible budgets get here.
        num_concurrent: Number of other running requests at the start.
        load: Utilization of the device by others at the start, 0 to 1; set by the backend.
    """

    id: str
    prompt: Prompt
    max_new_tokens: int
    expected_tokens: int
    sampling: SamplingParams
    received_s: float
    budget_ms: float | None = None
    target_end_s: float = math.inf
    on_infeasible: OnInfeasible = "reject"
    num_concurrent: int = 0
    load: float = 0.0

    @property
    def deadline_s(self) -> float:
        """Time at which the budget ends; infinite without a budget."""
        return math.inf if self.budget_ms is None else self.received_s + self.budget_ms / 1000.0


@dataclass(frozen=True, kw_only=True)
class StartedEvent:
    """The plan is selected; precedes the first token.

    Attributes:
        plan: Plan for the whole request.
        p50_ms: Predicted median latency from receipt to last token.
        p99_ms: Predicted 99th percentile.
    """

    plan: Plan
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True)
class TokensEvent:
    """New tokens, without stop tokens."""

    ids: tuple[int, ...]


@dataclass(frozen=True)
class EndedEvent:
    """The request completed: a stop token, the maximum length, or the length that fits the budget."""

    reason: Literal["stop", "length", "truncated"]


@dataclass(frozen=True)
class FailedEvent:
    """The request failed."""

    error: ApiError


Event = StartedEvent | TokensEvent | EndedEvent | FailedEvent


def make_stopped_error() -> ApiError:
    """Create the error of a backend that is not alive."""
    return ApiError(
        503, "the engine has stopped; use another server", code="engine_stopped", retry_after_s=5.0
    )


class ServiceTime(NamedTuple):
    """Predicted time of a request, milliseconds.

    Attributes:
        p50: Median.
        p99: 99th percentile.
    """

    p50: float
    p99: float


class ServingBackend(Protocol):
    """Runs requests.

    Attributes:
        slots: Maximum number of running requests.
        context: Maximum number of tokens of a prompt and its answer together.
        alive: Whether requests can run. Once False, it stays False.
    """

    @property
    def slots(self) -> int: ...

    @property
    def context(self) -> int: ...

    @property
    def alive(self) -> bool: ...

    def min_service_ms(self, prompt: Prompt, max_new_tokens: int, num_concurrent: int | None) -> ServiceTime:
        """Return the time of the cheapest plan, from start to last token.

        Called on the event loop; must take at most a millisecond.

        Args:
            prompt: Prompt.
            max_new_tokens: Number of generated tokens.
            num_concurrent: Number of other running requests; None for an idle device.
        """
        ...

    def submit(self, job: BackendJob, emit: Callable[[Event], None]) -> Callable[[], None]:
        """Run a request. Called on the event loop; returns immediately.

        Args:
            job: Request.
            emit: Event callback, called on the event loop: `StartedEvent` once, then `TokensEvent`, and
                `EndedEvent` or `FailedEvent` last. A failure may be the only event.

        Returns:
            A function that cancels the request and frees its slot; later events are ignored.
        """
        ...

    def close(self) -> None:
        """Release all resources. Called once, from any thread, when nothing runs. May block."""
        ...
