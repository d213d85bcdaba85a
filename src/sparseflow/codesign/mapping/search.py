"""Requests and results of mapping searches."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from sparseflow.codesign.mapping.objective import MappingGoal, evaluate_mapping
from sparseflow.codesign.mapping.problem import MappingProblem


@dataclass(frozen=True, kw_only=True, eq=False)
class MappingRequest:
    """A problem and the limits of its search.

    Attributes:
        problem: The problem; every slot can run some segment.
        goal: The objective.
        time_limit_s: Time limit from `start_s`, s; strategies then return their best mapping.
        seed: Random seed.
        workers: Threads, for strategies that use several.
        start: A feasible mapping, int64 [K]; the result is never worse.
        lower_bound_ms: Known lower bound, ms.
        start_s: `time.perf_counter()` at the start.
    """

    problem: MappingProblem
    goal: MappingGoal
    time_limit_s: float
    seed: int = 0
    workers: int = 1
    start: np.ndarray | None = None
    lower_bound_ms: float = 0.0
    start_s: float = field(default_factory=time.perf_counter)

    @property
    def elapsed_s(self) -> float:
        """Time since the start, s."""
        return time.perf_counter() - self.start_s

    @property
    def remaining_s(self) -> float:
        return self.time_limit_s - self.elapsed_s


@dataclass(frozen=True, kw_only=True, eq=False)
class StrategyResult:
    """Result of a strategy.

    Attributes:
        mapping: int64 [K]; None if none was found.
        lower_bound_ms: Proven lower bound of the objective, ms; 0 without a proof.
        finished: Whether the strategy ended before the time limit.
        infeasible: Whether the strategy proved that there is no feasible mapping.
    """

    mapping: np.ndarray | None
    lower_bound_ms: float = 0.0
    finished: bool = True
    infeasible: bool = False


OPTIMALITY_GAP = 1e-9
"""Gap up to which a mapping counts as optimal, for floating-point rounding."""


@dataclass(frozen=True, kw_only=True)
class MappingResult:
    """A feasible mapping. Terms are defined in `mapping.objective`.

    Attributes:
        mapping: Slot of each segment, [K].
        per_slot_time: Busy time of each slot, ms, [S].
        total_latency_ms: `period_ms` in mode `"balanced"`, `serial_ms` in mode `"serial"`.
        serial_ms: Latency of one sample without overlap, ms.
        period_ms: Period of the full pipeline, ms.
        comm_ms: Sum of all transfer times, ms; part of `serial_ms`.
        memory_mb: Memory on each slot, MB, [S].
        objective_ms: The minimized objective, ms.
        lower_bound_ms: Lower bound of `objective_ms`, up to a relative rounding error of 1e-10.
        gap: (objective - bound) / objective; 0 if the mapping is proven optimal.
        strategy: Strategy that found the mapping.
        finished: False if the time limit ended the search.
        elapsed_s: Search time, s, without compilation.
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
    elapsed_s: float

    @property
    def optimal(self) -> bool:
        """Whether the mapping is proven optimal."""
        return self.gap <= OPTIMALITY_GAP

    @classmethod
    def from_mapping(
        cls,
        problem: MappingProblem,
        goal: MappingGoal,
        mapping: np.ndarray,
        *,
        lower_bound_ms: float,
        strategy: str,
        finished: bool,
        elapsed_s: float,
    ) -> MappingResult:
        """Evaluate a mapping and build its result."""
        evaluation = evaluate_mapping(problem, mapping)
        assert evaluation.feasible, "a strategy returned a mapping that cannot run"
        objective = goal.objective_ms(evaluation)
        bound = min(lower_bound_ms, objective)
        return cls(
            mapping=mapping.tolist(),
            per_slot_time=evaluation.busy_ms.tolist(),
            total_latency_ms=goal.total_latency_ms(evaluation),
            serial_ms=evaluation.serial_ms,
            period_ms=evaluation.period_ms,
            comm_ms=evaluation.comm_ms,
            memory_mb=evaluation.memory_mb.tolist(),
            objective_ms=objective,
            lower_bound_ms=bound,
            gap=(objective - bound) / objective if objective > 0.0 else 0.0,
            strategy=strategy,
            finished=finished,
            elapsed_s=elapsed_s,
        )
