"""One way in to all strategies."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from math import isfinite, log2

import numpy as np

from sparseflow.codesign.mapping.bounds import lower_bound
from sparseflow.codesign.mapping.branch_and_bound import exact
from sparseflow.codesign.mapping.contiguous import dp, steps
from sparseflow.codesign.mapping.cpsat import any_mapping, cpsat
from sparseflow.codesign.mapping.local_search import NONE, Effort, local
from sparseflow.codesign.mapping.objective import SERIAL_WEIGHT, Goal, Mode, checked, evaluate
from sparseflow.codesign.mapping.problem import Problem, check_possible, impossible
from sparseflow.codesign.mapping.search import Answer, Mapping, Progress, Request
from sparseflow.core.extras import require
from sparseflow.errors import InputError, MissingExtraError, RunError

SMALL_BITS = 24.0
"""K log2(S) up to which `"auto"` goes on until it has the proof: 12 segments on 4 slots."""

COARSE_SEGMENTS, COARSE_SLOTS = 16, 8
"""Of a coarse plan, at most: it is made in some ten milliseconds, with a short try at the proof."""

COARSE, COARSE_NODES = Effort(rounds=2, steps=10_000, tries=10, nodes=500), 3_000
"""Local search for it, and nodes of that try."""

DP_STEPS = 2e7
"""What a contiguous start is worth in steps: some ten milliseconds."""


class MappingSolver:
    """Places segments on slots.

    Strategies:

    - `"dp"`: the best contiguous mapping, for up to twelve slots (see `dp`); `start` is not used.
    - `"exact"`: branch and bound to the end, for a dozen segments or two (see `exact`).
    - `"local"`: annealing from contiguous and greedy mappings, for any size (see `local`).
    - `"cpsat"`: OR-Tools CP-SAT from the start given or a greedy one, for as long as there is time.
    - `"auto"`: exact where there are at most 4^12 mappings; elsewhere local, for up to 16 segments on 8 slots
      only for some milliseconds, with a short try at the proof.
    - `"best"`: auto, then CP-SAT from there for the time that is left.

    Args:
        strategy: One of the above.
        mode: `"balanced"` makes `period_ms` small, `"serial"` makes `serial_ms` small.
        time_limit_s: After which a search ends with its best so far.
        seed: Of everything random, 0 or above.
        serial_weight: What `serial_ms` weighs beside `period_ms` in the mode `"balanced"`.
        workers: Threads of CP-SAT; 0 for as many as there are cores.
        progress: Told now and then how far a search has come; CP-SAT calls it from a thread of its own.

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
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        self.goal = Goal(mode=mode, tie_weight=serial_weight)
        if not (isfinite(time_limit_s) and time_limit_s > 0.0):
            raise InputError(f"`time_limit_s` (={time_limit_s}) must be a finite number above 0")
        for name, value in (("seed", seed), ("workers", workers)):
            if type(value) is not int or value < 0:
                raise InputError(f"`{name}` (={value!r}) must be a whole number of 0 or above")
        self.strategy, self.time_limit_s, self.seed = _known(strategy), time_limit_s, seed
        self.workers, self.progress = workers, progress

    def solve_mapping(
        self,
        problem: Problem,
        *,
        strategy: str | None = None,
        start: Mapping | Sequence[int] | np.ndarray | None = None,
    ) -> Mapping:
        """Find a mapping.

        Args:
            problem: Segments, edges and slots.
            strategy: Instead of that of the solver.
            start: A mapping to begin with; the answer is no worse (but for `"dp"`). One that cannot run
                is left out.

        Raises:
            InputError: No mapping can run; says by how much. Or the strategy does not take such a problem, or
                `start` is not a mapping of it.
            RunError: The time ran out before there was any mapping that can run.
            MissingExtraError: Numba, SciPy or, where it is needed, OR-Tools is missing.
        """
        name = _known(self.strategy if strategy is None else strategy)
        _compiled()
        if name in ("cpsat", "best"):
            # To import it takes seconds, before any clock starts; whoever needs it says that it is missing.
            with suppress(MissingExtraError):
                require("ortools.sat.python.cp_model", "codesign")
        check_possible(problem)
        slots = np.flatnonzero(problem.allowed.any(axis=0))
        request = Request(
            problem=problem if len(slots) == problem.slots else problem.restricted(slots),
            goal=self.goal,
            time_limit_s=self.time_limit_s,
            seed=self.seed,
            workers=self.workers,
            progress=self.progress,
        )
        if start is not None:
            first = checked(problem, start.mapping if isinstance(start, Mapping) else start)
            if evaluate(problem, first).feasible:
                request = replace(request, start=np.searchsorted(slots, first))
        answer, used = _STRATEGIES[name](request)
        if answer.none_exists:
            raise impossible(problem)
        if answer.mapping is None:
            raise RunError(
                f"the strategy {name!r} found no mapping that can run in {request.seconds:.1f} s, and no "
                "proof that there is none: give it more time, or more memory to the slots"
            )
        bound = answer.lower_bound_ms
        if bound == 0.0:
            value = self.goal.objective_ms(evaluate(request.problem, answer.mapping))
            bound = lower_bound(request.problem, self.goal, known_ms=value).value_ms
        return Mapping.of(
            problem,
            self.goal,
            slots[answer.mapping],
            lower_bound_ms=bound,
            strategy=used,
            finished=answer.finished,
            seconds=request.seconds,
        )


def _known(strategy: str) -> str:
    if strategy not in _STRATEGIES:
        raise InputError(f"`strategy` (={strategy!r}) must be one of: {', '.join(_STRATEGIES)}")
    return strategy


@functools.cache
def _compiled() -> None:
    """Compile the kernels, or load them from disk, before any clock starts."""
    links = np.array([[0.0, 1.0], [1.0, 0.0]])
    problem = Problem.chain(
        latency_ms=np.ones((3, 2)), memory_mb=np.ones(3), limit_mb=np.full(2, 3.0), traffic_bytes=np.ones(2),
        fixed_ms=links, ms_per_byte=links,
    )  # fmt: skip
    request = Request(problem=problem, goal=Goal(), time_limit_s=float("inf"))
    dp(request)
    exact(request)
    local(request, effort=Effort(rounds=1, steps=1, tries=1))


def _contiguous(request: Request) -> list[np.ndarray]:
    """The best contiguous mapping, where it is soon found and there is one."""
    if steps(request.problem) > DP_STEPS:
        return []
    found = dp(request).mapping
    return [] if found is None else [found]


def _bits(request: Request) -> float:
    return request.problem.segments * log2(request.problem.slots)


def _value(request: Request, mapping: np.ndarray | None) -> float:
    return float("inf") if mapping is None else request.goal.objective_ms(evaluate(request.problem, mapping))


def _begun(request: Request, mappings: Sequence[np.ndarray | None]) -> Request:
    """The request with the best start there is."""
    best = min((request.start, *mappings), key=lambda mapping: _value(request, mapping))
    return replace(request, start=best)


def _searched(request: Request, effort: Effort | None) -> Answer:
    """Annealing, from a mapping by CP-SAT where memory or network is so tight that nothing else finds one."""
    starts = _contiguous(request)
    answer = local(request, starts=starts, effort=effort)
    if answer.mapping is None:
        answer = any_mapping(request)
        if answer.mapping is not None:
            answer = local(replace(request, start=answer.mapping), effort=effort)
    return answer


def _dp(request: Request) -> tuple[Answer, str]:
    answer = dp(request)
    if answer.mapping is None:
        raise InputError(
            "no contiguous mapping can run: runs of consecutive segments do not fit the memory of "
            f"{request.problem.slots} slots, or the way between them; use the strategy 'auto'"
        )
    return answer, "dp"


def _exact(request: Request) -> tuple[Answer, str]:
    if _bits(request) <= SMALL_BITS:
        return exact(_begun(request, _contiguous(request))), "exact"
    first = local(request, starts=_contiguous(request), effort=COARSE)
    return exact(_begun(request, [first.mapping])), "exact"


def _local(request: Request) -> tuple[Answer, str]:
    return _searched(request, None), "local"


def _auto(request: Request) -> tuple[Answer, str]:
    if _bits(request) <= SMALL_BITS:
        return _exact(request)
    if request.problem.segments > COARSE_SEGMENTS or request.problem.slots > COARSE_SLOTS:
        return _local(request)
    answer = _searched(request, COARSE)
    if answer.mapping is None or not answer.finished:
        return answer, "local"
    before = _value(request, answer.mapping)
    proof = exact(_begun(request, [answer.mapping]), most_nodes=COARSE_NODES)
    better = proof.finished or _value(request, proof.mapping) < before
    return replace(proof, finished=proof.finished or request.seconds_left > 0.0), (
        "exact" if better else "local"
    )


def _cpsat(request: Request) -> tuple[Answer, str]:
    return _proved(request, local(request, starts=_contiguous(request), effort=NONE)), "cpsat"


def _best(request: Request) -> tuple[Answer, str]:
    answer, used = _auto(request)
    done = answer.lower_bound_ms >= _value(request, answer.mapping)
    if answer.mapping is None or done or request.seconds_left <= 0.0:
        return answer, used
    found = _proved(request, answer)
    better = _value(request, found.mapping) < _value(request, answer.mapping)
    return found, "cpsat" if better else used


def _proved(request: Request, first: Answer) -> Answer:
    """CP-SAT from what was found so far."""
    request = _begun(request, [first.mapping])
    known = _value(request, request.start)
    bound = lower_bound(request.problem, request.goal, known_ms=known).value_ms
    return cpsat(replace(request, lower_bound_ms=min(max(bound, first.lower_bound_ms), known)))


_STRATEGIES: dict[str, Callable[[Request], tuple[Answer, str]]] = {
    "auto": _auto,
    "dp": _dp,
    "exact": _exact,
    "local": _local,
    "cpsat": _cpsat,
    "best": _best,
}
