"""MappingSolver: the common interface of all mapping strategies."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from math import log2

import numpy as np

from sparseflow.codesign.mapping.bounds import compute_lower_bound
from sparseflow.codesign.mapping.branch_and_bound import branch_and_bound
from sparseflow.codesign.mapping.contiguous import estimate_steps, solve_contiguous
from sparseflow.codesign.mapping.cpsat import find_feasible_mapping, solve_cpsat
from sparseflow.codesign.mapping.local_search import NO_EFFORT, SearchEffort, search_locally
from sparseflow.codesign.mapping.objective import (
    SERIAL_WEIGHT,
    MappingGoal,
    Mode,
    check_mapping,
    evaluate_mapping,
)
from sparseflow.codesign.mapping.problem import MappingProblem, check_feasible, make_infeasible_error
from sparseflow.codesign.mapping.search import MappingRequest, MappingResult, StrategyResult
from sparseflow.core.checks import check_at_least, check_one_of, check_positive
from sparseflow.core.extras import require
from sparseflow.errors import InputError, MissingExtraError, RunError

MAX_EXACT_BITS = 24.0
"""K log2(S) up to which `"auto"` proves optimality: 12 segments on 4 slots."""

COARSE_SEGMENTS, COARSE_SLOTS = 16, 8
"""Of a coarse plan, at most: it is made in some ten milliseconds, with a short try at the proof."""

COARSE_EFFORT, COARSE_NODES = SearchEffort(rounds=2, steps=10_000, neighborhoods=10, max_nodes=500), 3_000
"""Local search for it, and nodes of that try."""

MAX_CONTIGUOUS_STEPS = 2e7
"""Maximum number of steps for a contiguous start, about 10 ms."""


class MappingSolver:
    """Maps segments to slots.

    Strategies:

    - `"dp"`: the best contiguous mapping, for up to twelve slots (see `contiguous`); ignores `start`.
    - `"exact"`: branch and bound, for up to about two dozen segments (see `branch_and_bound`).
    - `"local"`: local search from contiguous and greedy mappings, for any size (see `local_search`).
    - `"cpsat"`: OR-Tools CP-SAT from the given or a greedy start, until the time limit.
    - `"auto"`: exact for at most 4^12 mappings, otherwise local; up to 16 segments on 8 slots a short local
      search with a short attempt at a proof.
    - `"best"`: auto, then CP-SAT for the remaining time.

    Args:
        strategy: One of the above.
        mode: `"balanced"` minimizes `period_ms`, `"serial"` minimizes `serial_ms`.
        time_limit_s: Time limit, s; the best mapping so far is returned.
        seed: Random seed, at least 0.
        serial_weight: Weight of `serial_ms` in mode `"balanced"`.
        workers: Threads of CP-SAT; 0 for all cores.

    Raises:
        InputError: A value is out of range.
    """

    def __init__(
        self,
        *,
        strategy: str = "auto",
        mode: Mode = "balanced",
        time_limit_s: float = 10.0,
        seed: int = 0,
        serial_weight: float = SERIAL_WEIGHT,
        workers: int = 0,
    ) -> None:
        self.goal = MappingGoal(mode=mode, tie_weight=serial_weight)
        check_positive(time_limit_s=time_limit_s)
        check_at_least(0, seed=seed, workers=workers)
        check_one_of(_STRATEGIES, strategy=strategy)
        self.strategy, self.time_limit_s, self.seed = strategy, time_limit_s, seed
        self.workers = workers

    def solve_mapping(
        self,
        problem: MappingProblem,
        *,
        strategy: str | None = None,
        start: MappingResult | Sequence[int] | np.ndarray | None = None,
    ) -> MappingResult:
        """Find a mapping.

        Args:
            problem: Segments, edges and slots.
            strategy: Overrides the solver's strategy.
            start: Initial mapping; the result is never worse (except for `"dp"`). Infeasible ones are
                ignored.

        Raises:
            InputError: There is no feasible mapping, the strategy does not support the problem, or `start` is
                invalid.
            RunError: The time limit was reached without a feasible mapping.
            MissingExtraError: Numba, SciPy or, if needed, OR-Tools is missing.
        """
        name = self.strategy if strategy is None else strategy
        check_one_of(_STRATEGIES, strategy=name)
        is_large = name != "dp" and _count_bits(problem) > MAX_EXACT_BITS
        _compile_kernels(tree_search=name != "dp", local_search=is_large or name in ("local", "cpsat"))
        if name in ("cpsat", "best"):
            # Import it before time is measured, because that takes seconds. Strategies report it if missing.
            with suppress(MissingExtraError):
                require("ortools.sat.python.cp_model", "codesign")
        check_feasible(problem)
        slots = np.flatnonzero(problem.allowed.any(axis=0))
        request = MappingRequest(
            problem=problem if len(slots) == problem.num_slots else problem.select_slots(slots),
            goal=self.goal,
            time_limit_s=self.time_limit_s,
            seed=self.seed,
            workers=self.workers,
        )
        if start is not None:
            initial = check_mapping(problem, start.mapping if isinstance(start, MappingResult) else start)
            if evaluate_mapping(problem, initial).feasible:
                request = replace(request, start=np.searchsorted(slots, initial))
        answer, strategy_used = _STRATEGIES[name](request)
        if answer.infeasible:
            raise make_infeasible_error(problem)
        if answer.mapping is None:
            raise RunError(
                f"strategy {name!r} found no feasible mapping in {request.elapsed_s:.1f} s and no proof "
                "that there is none; increase `time_limit_s` or the memory of the slots"
            )
        bound = answer.lower_bound_ms
        if bound == 0.0:
            value = self.goal.objective_ms(evaluate_mapping(request.problem, answer.mapping))
            bound = compute_lower_bound(request.problem, self.goal, incumbent_ms=value).value_ms
        return MappingResult.from_mapping(
            problem,
            self.goal,
            slots[answer.mapping],
            lower_bound_ms=bound,
            strategy=strategy_used,
            finished=answer.finished,
            elapsed_s=request.elapsed_s,
        )


@functools.cache
def _compile_kernels(*, tree_search: bool, local_search: bool) -> None:
    """Compile or load the kernels that a strategy needs before time is measured."""
    links = np.array([[0.0, 1.0], [1.0, 0.0]])
    problem = MappingProblem.chain(
        latency_ms=np.ones((3, 2)), memory_mb=np.ones(3), limit_mb=np.full(2, 3.0), traffic_bytes=np.ones(2),
        fixed_ms=links, ms_per_byte=links,
    )  # fmt: skip
    request = MappingRequest(problem=problem, goal=MappingGoal(), time_limit_s=float("inf"))
    solve_contiguous(request)
    if tree_search:
        branch_and_bound(request)
    if local_search:
        search_locally(request, effort=SearchEffort(rounds=1, steps=1, neighborhoods=1))


def _find_contiguous_starts(request: MappingRequest) -> list[np.ndarray]:
    """The best contiguous mapping, if it exists and is fast to find."""
    if estimate_steps(request.problem) > MAX_CONTIGUOUS_STEPS:
        return []
    mapping = solve_contiguous(request).mapping
    return [] if mapping is None else [mapping]


def _count_bits(problem: MappingProblem) -> float:
    return problem.num_segments * log2(problem.num_slots)


def _objective_ms(request: MappingRequest, mapping: np.ndarray | None) -> float:
    return (
        float("inf")
        if mapping is None
        else request.goal.objective_ms(evaluate_mapping(request.problem, mapping))
    )


def _with_best_start(request: MappingRequest, mappings: Sequence[np.ndarray | None]) -> MappingRequest:
    """Set the best of the mappings as the start of the request."""
    best = min((request.start, *mappings), key=lambda mapping: _objective_ms(request, mapping))
    return replace(request, start=best)


def _search_with_fallback(request: MappingRequest, effort: SearchEffort | None) -> StrategyResult:
    """Local search; if it finds no feasible mapping, start it from one found by CP-SAT."""
    starts = _find_contiguous_starts(request)
    answer = search_locally(request, starts=starts, effort=effort)
    if answer.mapping is None:
        answer = find_feasible_mapping(request)
        if answer.mapping is not None:
            answer = search_locally(replace(request, start=answer.mapping), effort=effort)
    return answer


def _run_contiguous(request: MappingRequest) -> tuple[StrategyResult, str]:
    answer = solve_contiguous(request)
    if answer.mapping is None:
        raise InputError(
            "no contiguous mapping is feasible: consecutive segments do not fit the memory or network of "
            f"{request.problem.num_slots} slots; use the strategy 'auto'"
        )
    return answer, "dp"


def _run_exact(request: MappingRequest) -> tuple[StrategyResult, str]:
    if _count_bits(request.problem) <= MAX_EXACT_BITS:
        return branch_and_bound(_with_best_start(request, _find_contiguous_starts(request))), "exact"
    first = search_locally(request, starts=_find_contiguous_starts(request), effort=COARSE_EFFORT)
    return branch_and_bound(_with_best_start(request, [first.mapping])), "exact"


def _run_local(request: MappingRequest) -> tuple[StrategyResult, str]:
    return _search_with_fallback(request, None), "local"


def _run_auto(request: MappingRequest) -> tuple[StrategyResult, str]:
    if _count_bits(request.problem) <= MAX_EXACT_BITS:
        return _run_exact(request)
    if request.problem.num_segments > COARSE_SEGMENTS or request.problem.num_slots > COARSE_SLOTS:
        return _run_local(request)
    answer = _search_with_fallback(request, COARSE_EFFORT)
    if answer.mapping is None or not answer.finished:
        return answer, "local"
    before = _objective_ms(request, answer.mapping)
    proof = branch_and_bound(_with_best_start(request, [answer.mapping]), max_nodes=COARSE_NODES)
    better = proof.finished or _objective_ms(request, proof.mapping) < before
    return replace(proof, finished=proof.finished or request.remaining_s > 0.0), (
        "exact" if better else "local"
    )


def _run_cpsat(request: MappingRequest) -> tuple[StrategyResult, str]:
    return _improve_with_cpsat(
        request, search_locally(request, starts=_find_contiguous_starts(request), effort=NO_EFFORT)
    ), "cpsat"


def _run_best(request: MappingRequest) -> tuple[StrategyResult, str]:
    answer, used = _run_auto(request)
    optimal = answer.lower_bound_ms >= _objective_ms(request, answer.mapping)
    if answer.mapping is None or optimal or request.remaining_s <= 0.0:
        return answer, used
    result = _improve_with_cpsat(request, answer)
    better = _objective_ms(request, result.mapping) < _objective_ms(request, answer.mapping)
    return result, "cpsat" if better else used


def _improve_with_cpsat(request: MappingRequest, first: StrategyResult) -> StrategyResult:
    """Run CP-SAT from the best known mapping."""
    request = _with_best_start(request, [first.mapping])
    known = _objective_ms(request, request.start)
    bound = compute_lower_bound(request.problem, request.goal, incumbent_ms=known).value_ms
    return solve_cpsat(replace(request, lower_bound_ms=min(max(bound, first.lower_bound_ms), known)))


_STRATEGIES: dict[str, Callable[[MappingRequest], tuple[StrategyResult, str]]] = {
    "auto": _run_auto,
    "dp": _run_contiguous,
    "exact": _run_exact,
    "local": _run_local,
    "cpsat": _run_cpsat,
    "best": _run_best,
}
