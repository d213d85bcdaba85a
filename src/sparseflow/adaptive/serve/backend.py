"""What the server needs of whatever runs a model: a forecast for admission, and events while a request runs.

`bridge.py` makes it of the engine; tests make a fake. The server keeps the line of those who wait, so a
backend gets no more requests at a time than it has slots, and is told of each by when it should end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from sparseflow.adaptive.engine.requests.sampling import SamplingParams
from sparseflow.adaptive.plan.space import Plan
from sparseflow.adaptive.policy.selector import OnInfeasible
from sparseflow.adaptive.prompts.messages import ApiError, Prompt


@dataclass(frozen=True, kw_only=True, eq=False)
class BackendJob:
    """A request whose turn has come.

    Attributes:
        id: A name, for logs.
        prompt: What the answer is to.
        max_new_tokens: Most tokens of the answer.
        sampling: How they are drawn.
        received_s: When the request came in, by `time.perf_counter`.
        budget_ms: From then to the last token; None without a budget.
        until_s: By when the last token should be there, by the same clock: the deadline, or earlier for the
            sake of those who wait, or where predictions turned out too short; infinite where nothing asks for
            an end. Plans are to be chosen for this, not for the budget.
        on_infeasible: What was asked for. Only budgets that can be kept get here with `"reject"`.
        beside: How many requests ran when its turn came, without this one.
        load: Share of the device that others wanted then, 0 to 1; the backend knows.
    """

    id: str
    prompt: Prompt
    max_new_tokens: int
    sampling: SamplingParams
    received_s: float
    budget_ms: float | None = None
    until_s: float = math.inf
    on_infeasible: OnInfeasible = "reject"
    beside: int = 0
    load: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StartedEvent:
    """The plan is decided; it comes before the first token.

    Attributes:
        plan: What is run, to the end.
        p50_ms: Predicted from receipt to the last token.
        p99_ms: What 99 of 100 such requests stay below.
    """

    plan: Plan
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True)
class TokensEvent:
    """New tokens of the answer; those that end it are left out."""

    ids: tuple[int, ...]


@dataclass(frozen=True)
class EndedEvent:
    """Nothing more comes: a stop token came, the answer is as long as asked for, or as the budget allows."""

    reason: Literal["stop", "length", "truncated"]


@dataclass(frozen=True)
class FailedEvent:
    """Nothing more comes: it went wrong."""

    refusal: ApiError


Event = StartedEvent | TokensEvent | EndedEvent | FailedEvent


class ServingBackend(Protocol):
    """What runs requests.

    Attributes:
        slots: How many requests run at once.
        context: Most tokens of a prompt, as it runs, and its answer together.
        alive: Whether it can run requests; once False it stays so.
    """

    @property
    def slots(self) -> int: ...

    @property
    def context(self) -> int: ...

    @property
    def alive(self) -> bool: ...

    def least_ms(self, prompt: Prompt, new_tokens: int, beside: int | None) -> float:
        """p99 of the cheapest plan, from a request's turn to its last token.

        Called on the event loop, so it is to take a millisecond at most.

        Args:
            prompt: Its prompt.
            new_tokens: Tokens of the answer.
            beside: How many other requests run; None for what could be kept if nobody else were there.
        """
        ...

    def submit(self, job: BackendJob, emit: Callable[[Event], None]) -> Callable[[], None]:
        """Run a request. Called on the event loop; returns at once.

        Args:
            job: The request.
            emit: To be called on the event loop: `StartedEvent` once, `TokensEvent`, and in the end
                `EndedEvent` or `FailedEvent`, which may come first.

        Returns:
            Calls the request off and frees its slot; events that come later are not looked at.
        """
        ...

    def close(self) -> None:
        """Give everything back; called once, from any thread, when nothing runs any more. May take its
        time."""
        ...
