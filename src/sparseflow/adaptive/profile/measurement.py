"""One request of a profile, and how long each part of it took."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparseflow.adaptive.plan.space import Plan
from sparseflow.errors import FileFormatError, InputError

Turn = tuple[str, int, int, float, int]
"""What is measured once: plan, text tokens, batch, load, round."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One request that was run.

    Attributes:
        plan: With a tier, it had one image.
        text_tokens: Of the prompt, those that are not of the image.
        batch: Requests that ran when its turn came, itself included.
        load: Share of the device that others wanted, 0 to 1: in an engine those who come later.
        round: How often this had been run before.
        session: Index into the circumstances.
        prefill_ms: To the first token; None where it could not be run.
        steps_ms: Each further token, in order.
        error: Why it could not be run, else None.

    Raises:
        InputError: A figure is out of range.
    """

    plan: Plan
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
                f"{self.plan.id}, {self.text_tokens} tokens: a visit has either a time or an error"
            )
        if self.text_tokens < 1 or self.batch < 1 or not 0.0 <= self.load <= 1.0 or self.round < 0:
            raise InputError(
                f"{self.plan.id}: `text_tokens` (={self.text_tokens}) and `batch` (={self.batch}) must be at "
                f"least 1, `load` (={self.load}) in [0, 1], `round` (={self.round}) not negative"
            )

    @property
    def turn(self) -> Turn:
        """What it measured; again, where more steps are asked for than there are, or it has an error."""
        return (self.plan.id, self.text_tokens, self.batch, self.load, self.round)

    @property
    def key(self) -> tuple[str, int, int, float, int, int]:
        """A profile has one of each: its turn, and how many steps it has."""
        return (*self.turn, len(self.steps_ms))

    def total_ms(self, new_tokens: int) -> float:
        """What a request of so many new tokens took; the first comes from the prefill.

        Raises:
            InputError: It has not so many.
        """
        if self.prefill_ms is None or not 1 <= new_tokens <= 1 + len(self.steps_ms):
            raise InputError(
                f"`new_tokens` (={new_tokens}) must be 1 to {1 + len(self.steps_ms)}, of a visit with times"
            )
        return self.prefill_ms + sum(self.steps_ms[: new_tokens - 1])

    def to_dict(self) -> dict[str, Any]:
        """As a line of the journal."""
        return {**vars(self), "plan": self.plan.to_dict(), "steps_ms": list(self.steps_ms)}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Measurement:
        """What `to_dict` gave.

        Raises:
            FileFormatError: It is no visit.
        """
        try:
            own = {name: record[name] for name in cls.__dataclass_fields__}
            own |= {"plan": Plan.from_dict(record["plan"]), "steps_ms": tuple(record["steps_ms"])}
            return cls(**own)
        except FileFormatError:
            raise
        except (KeyError, TypeError, InputError) as error:
            raise FileFormatError(f"not a visit of a profile: {error!r}") from error
