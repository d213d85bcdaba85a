"""What every way to map is given, and what it hands back."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from sparseflow.codesign.mapping.objective import Goal, evaluate
from sparseflow.codesign.mapping.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a search has come.

    Attributes:
        strategy: Which.
        objective_ms: Of the best mapping so far; inf where there is none yet.
        lower_bound_ms: No mapping is better than that.
        seconds: Since the search began.
    """

    strategy: str
    objective_ms: float
    lower_bound_ms: float
    seconds: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """A problem, and how to go about it.

    Attributes:
        problem: Every slot of it can hold something.
        goal: What is made small.
        time_limit_s: From `began` on; a strategy that looks at the time stops then with its best so far.
        seed: Of everything random.
        workers: Threads, where a strategy uses several.
        start: A mapping that can run, int64 [K]; the answer is no worse.
        lower_bound_ms: What is known already.
        progress: Told now and then.
        began: `time.perf_counter()` at the start.
    """

    problem: Problem
    goal: Goal
    time_limit_s: float
    seed: int = 0
    workers: int = 1
    start: np.ndarray | None = None
    lower_bound_ms: float = 0.0
    progress: Callable[[Progress], None] | None = None
    began: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.perf_counter() - self.began

    @property
    def seconds_left(self) -> float:
        return self.time_limit_s - self.seconds

    def tell(self, strategy: str, objective_ms: float, lower_bound_ms: float) -> None:
        """Report progress, if anyone listens."""
        if self.progress is not None:
            self.progress(
                Progress(
                    strategy=strategy,
                    objective_ms=objective_ms,
                    lower_bound_ms=lower_bound_ms,
                    seconds=self.seconds,
                )
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    """What a strategy found.

    Attributes:
        mapping: int64 [K]; None where it found none.
        lower_bound_ms: On the objective of every mapping; 0 where the strategy proves nothing.
        finished: Whether it came to its own end, not to that of its time.
        none_exists: Whether it proved that no mapping can run.
    """

    mapping: np.ndarray | None
    lower_bound_ms: float = 0.0
    finished: bool = True
    none_exists: bool = False


PROVEN = 1e-9
"""Gap below which a mapping counts as the optimum: what floating-point sums are off by."""


@dataclass(frozen=True, kw_only=True)
class Mapping:
    """A mapping that can run. Terms are defined in `objective`.

    Attributes:
        mapping: Slot of each segment, [K].
        per_slot_time: How long each slot is busy for a sample, ms, [S].
        total_latency_ms: `period_ms` in the mode `"balanced"`, `serial_ms` in the mode `"serial"`.
        serial_ms: One sample through, nothing overlapping.
        period_ms: From one result to the next with the pipeline full.
        comm_ms: Of all transfers; part of `serial_ms`.
        memory_mb: On each slot, [S].
        objective_ms: What was made small: `total_latency_ms`, and in the mode `"balanced"` the weighted
            `serial_ms` besides.
        lower_bound_ms: No mapping has a lower `objective_ms` than this (by more than a share of 1e-10, which
            is what sums of floats may be off by).
        gap: How far the objective may be from the best, as a share of it; 0 where it is proven.
        strategy: What found it.
        finished: False where the time ran out first: the best so far.
        seconds: From the call to the answer, without what compiling takes the first time.
    """

    mapping: list[int]
    per_slot_time: list[float]
    total_latency_ms: float
    serial_ms: float
    period_ms: float
    comm_ms: float
    memory_mb: list[float]
    objective_ms: float
    lower_bound_ms: float
    gap: float
    strategy: str
    finished: bool
    seconds: float

    @property
    def optimal(self) -> bool:
        """Whether nothing is better, by proof."""
        return self.gap <= PROVEN

    @classmethod
    def of(
        cls,
        problem: Problem,
        goal: Goal,
        mapping: np.ndarray,
        *,
        lower_bound_ms: float,
        strategy: str,
        finished: bool,
        seconds: float,
    ) -> Mapping:
        """A mapping with all that follows from it."""
        found = evaluate(problem, mapping)
        assert found.feasible, "a strategy returned a mapping that cannot run"
        objective = goal.objective_ms(found)
        bound = min(lower_bound_ms, objective)
        return cls(
            mapping=mapping.tolist(),
            per_slot_time=found.busy_ms.tolist(),
            total_latency_ms=goal.total_ms(found),
            serial_ms=found.serial_ms,
            period_ms=found.period_ms,
            comm_ms=found.comm_ms,
            memory_mb=found.memory_mb.tolist(),
            objective_ms=objective,
            lower_bound_ms=bound,
            gap=(objective - bound) / objective if objective > 0.0 else 0.0,
            strategy=strategy,
            finished=finished,
            seconds=seconds,
        )
