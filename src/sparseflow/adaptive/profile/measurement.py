"""One measured request of a profile."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from sparseflow.adaptive.plan.space import Plan
from sparseflow.core.artifact import DictField
from sparseflow.errors import InputError

CaseKey = tuple[str, int, int, float, int]
"""Plan id, text tokens, batch size, load and round: what is measured once."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One measured request.

    Attributes:
        plan: Plan; the request had one image if the plan has a tier.
        text_tokens: Prompt tokens that do not belong to the image.
        batch: Concurrent requests when it started to run, including itself.
        load: Share of the device that others used, 0 to 1; for an engine, by requests that arrive later.
        round: Round of the collection.
        session: Index into `PlanProfile.environments`.
        prefill_ms: Time to the first token; None if the request failed.
        steps_ms: Time of each further token, in order.
        error: Why the request failed, else None.

    Raises:
        InputError: A value is out of range.
    """

    plan: Annotated[Plan, DictField()]
    text_tokens: int
    batch: int = 1
    load: float = 0.0
    round: int = 0
    session: int = 0
    prefill_ms: float | None = None
    steps_ms: tuple[float, ...] = ()
    error: str | None = None

    def __post_init__(self) -> None:
        times = [*self.steps_ms] if self.prefill_ms is None else [self.prefill_ms, *self.steps_ms]
        if not all(math.isfinite(value) and value > 0.0 for value in times):
            raise InputError(
                f"{self.plan.id}, {self.text_tokens} tokens: times must be finite and above 0 ms"
            )
        if (self.prefill_ms is None) != (self.error is not None):
            raise InputError(
                f"{self.plan.id}, {self.text_tokens} tokens: expected either a time or an error, got "
                f"`prefill_ms` (={self.prefill_ms}) and `error` (={self.error!r})"
            )
        if self.text_tokens < 1 or self.batch < 1 or not 0.0 <= self.load <= 1.0 or self.round < 0:
            raise InputError(
                f"{self.plan.id}: `text_tokens` (={self.text_tokens}) and `batch` (={self.batch}) must be at "
                f"least 1, `load` (={self.load}) between 0 and 1, `round` (={self.round}) not negative"
            )

    @property
    def case(self) -> CaseKey:
        """Measured case; it is repeated if it failed, or if more steps are requested."""
        return (self.plan.id, self.text_tokens, self.batch, self.load, self.round)

    @property
    def key(self) -> tuple[str, int, int, float, int, int]:
        """Unique key in a profile: the case and the number of steps."""
        return (*self.case, len(self.steps_ms))

    def total_ms(self, new_tokens: int) -> float:
        """Time of the request up to its `new_tokens`-th token.

        Raises:
            InputError: The request has fewer tokens.
        """
        if self.prefill_ms is None or not 1 <= new_tokens <= 1 + len(self.steps_ms):
            raise InputError(
                f"`new_tokens` (={new_tokens}) must be from 1 to {1 + len(self.steps_ms)}, and the request "
                "must not have failed"
            )
        return self.prefill_ms + sum(self.steps_ms[: new_tokens - 1])
