"""What every way to map is given, and what it hands back."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from sparseflow.codesign.mapping.objective import Goal
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
