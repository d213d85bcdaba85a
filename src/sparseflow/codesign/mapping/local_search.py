"""Local search for large problems: simulated annealing followed by large-neighborhood search.

An annealing step moves a segment (and evicts others if memory is short), swaps two segments, moves a run of
segments to another slot, or swaps two slots. Its cost is proportional to the edges of the moved segments plus
the number of slots. Moves that exceed memory limits are rejected. Edges between unconnected slots are
penalized, and mappings with such edges are never returned. Each round starts from another mapping; the number
of steps grows with the problem. Results are deterministic for a seed unless the time limit is reached.

Annealing balances slots approximately; further improvements require several simultaneous moves.
Large-neighborhood search therefore optimizes some segments of four slots by branch and bound with a node
limit, always including the busiest slot if the period counts:

    Shaw: Using constraint programming and local search methods to solve vehicle routing problems. CP 1998.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sparseflow.codesign.mapping.arrays import build_arrays
from sparseflow.codesign.mapping.branch_and_bound import BranchAndBound
from sparseflow.codesign.mapping.objective import evaluate_mapping
from sparseflow.codesign.mapping.problem import MappingProblem
from sparseflow.codesign.mapping.search import MappingRequest, StrategyResult
from sparseflow.core.extras import require

NEIGHBORHOOD_SLOTS, NEIGHBORHOOD_SEGMENTS = 4, 16
"""Of a neighbourhood."""

NEIGHBORHOOD_NODES = 2_000
"""Maximum number of nodes per neighborhood, about 1 to 2 ms."""


@dataclass(frozen=True, kw_only=True)
class SearchEffort:
    """Limits of the search.

    Attributes:
        rounds: Number of rounds.
        steps: Annealing steps per round.
        neighborhoods: Neighborhoods per round.
        max_nodes: Maximum number of nodes per neighborhood.
    """

    rounds: int
    steps: int
    neighborhoods: int
    max_nodes: int = NEIGHBORHOOD_NODES

    @classmethod
    def for_problem(cls, problem: MappingProblem) -> SearchEffort:
        """Choose the effort by problem size: tenths of a second for 200 (segment, slot) pairs, seconds for
        more.
        """
        pairs = problem.num_segments * problem.num_slots
        steps = min(max(pairs**3 // 80, 5_000), 500_000)
        return cls(rounds=4, steps=steps, neighborhoods=min(max(2_000_000 // pairs, 20), 80))


NO_EFFORT = SearchEffort(rounds=0, steps=0, neighborhoods=0)
"""Evaluate the given and greedy starts only."""

INITIAL_TEMPERATURES, FINAL_TEMPERATURE_RATIO = (0.1, 0.4), 0.02
"""First temperature, in mean times of a segment, by weight of period and of sum; and the last over it."""

CHUNK_STEPS = 50_000
"""Annealing steps between two time checks, about 10 ms."""

OPTIMALITY_TOLERANCE = 1e-9
"""Relative distance from a bound below which the best mapping is optimal."""

REPAIR_STEPS = 20_000
"""Repair steps for each infeasible greedy mapping."""


def search_locally(
    request: MappingRequest, *, starts: Sequence[np.ndarray] = (), effort: SearchEffort | None = None
) -> StrategyResult:
    """Search for a good mapping.

    Args:
        request: Problem and limits.
        starts: Feasible mappings, in addition to that of the request.
        effort: Limits of the search; by default chosen by problem size.

    Raises:
        MissingExtraError: Numba is missing.
    """
    problem, goal = request.problem, request.goal
    effort = SearchEffort.for_problem(problem) if effort is None else effort
    walker = _Annealer(request)
    candidates = [start for start in (request.start, *starts) if start is not None] + walker.greedy()
    if not candidates:
        return StrategyResult(mapping=None)
    candidates.sort(key=lambda start: goal.objective_ms(evaluate_mapping(problem, start)))
    best, finished = candidates[0], True
    best_ms = goal.objective_ms(evaluate_mapping(problem, best))
    for round_index in range(effort.rounds):
        if best_ms <= request.lower_bound_ms * (1.0 + OPTIMALITY_TOLERANCE):
            break
        mapping = walker.anneal(candidates[round_index % len(candidates)], effort.steps, round_index)
        if mapping is not None:
            mapping = refine_neighborhoods(
                request,
                mapping,
                max_neighborhoods=effort.neighborhoods,
                max_nodes=effort.max_nodes,
                seed=round_index,
            )
            value = goal.objective_ms(evaluate_mapping(problem, mapping))
            if value < best_ms:
                best, best_ms = mapping, value
        finished = request.remaining_s > 0.0
        if not finished:
            break
    return StrategyResult(mapping=best if best_ms < np.inf else None, finished=finished)


class _Annealer:
    """Kernel state for greedy construction and annealing."""

    def __init__(self, request: MappingRequest) -> None:
        require("numba", "codesign")
        from sparseflow.codesign.mapping.kernels import annealing as kernel

        self.kernel, self.request = kernel, request
        self.problem, self.goal, self.arrays = request.problem, request.goal, build_arrays(request.problem)
        segments, slots = self.problem.num_segments, self.problem.num_slots
        self.state = kernel.AnnealingState(
            slot=np.zeros(segments, dtype=np.int64),
            busy=np.zeros(slots),
            free_bytes=np.zeros(slots, dtype=np.int64),
            num_broken=np.zeros(1, dtype=np.int64),
            random=np.zeros(1, dtype=np.uint64),
            best=np.full(1, np.inf),
            best_slot=np.full(segments, -1, dtype=np.int64),
            moved_segments=np.zeros(segments, dtype=np.int64),
            previous_slot=np.zeros(segments, dtype=np.int64),
            previous_busy=np.zeros(slots),
            previous_free_bytes=np.zeros(slots, dtype=np.int64),
        )

    def reseed(self, part: int, number: int) -> None:
        """Seed the random state for one stage of the search, independent of earlier stages."""
        sequence = np.random.SeedSequence([self.request.seed, part, number])
        self.state.random[:] = sequence.generate_state(1, np.uint64)

    def greedy(self) -> list[np.ndarray]:
        """Construct greedy mappings within memory limits in several orders; edges may be unconnected."""
        allowed, state = self.problem.allowed, self.state
        memory = (self.arrays.memory + self.arrays.activation).max(axis=1)
        latency = np.where(allowed, self.problem.latency_ms, np.inf).min(axis=1)
        orders = (
            np.arange(self.problem.num_segments),
            np.argsort(-memory, kind="stable"),
            np.argsort(-latency, kind="stable"),
        )
        weights = self.goal.period_weight, self.goal.serial_weight
        penalty = float(sum(weights) * latency.sum()) + 1.0
        mappings = []
        for number, order in enumerate(orders):
            self.reseed(0, number)
            if self.kernel.construct(
                tuple(self.arrays), tuple(state), order, *weights, penalty, REPAIR_STEPS
            ):
                mappings.append(state.slot.copy())
        return mappings

    def anneal(self, start: np.ndarray, steps: int, number: int) -> np.ndarray | None:
        """Run one round within the time limit and return its best feasible mapping."""
        state, request = self.state, self.request
        weights = self.goal.period_weight, self.goal.serial_weight
        self.reseed(1, number)
        state.slot[:] = state.best_slot[:] = start
        state.best[0] = self.goal.objective_ms(evaluate_mapping(self.problem, start))
        self.kernel.recompute(tuple(self.arrays), tuple(state))
        mean = float(state.busy.sum()) / self.problem.num_segments
        hot = (INITIAL_TEMPERATURES[0] * weights[0] + INITIAL_TEMPERATURES[1] * weights[1]) * (mean or 1.0)
        for first_step in range(0, steps, CHUNK_STEPS):
            last_step = min(first_step + CHUNK_STEPS, steps)
            self.kernel.anneal(
                tuple(self.arrays),
                tuple(state),
                *weights,
                hot,
                FINAL_TEMPERATURE_RATIO * hot,
                first_step,
                last_step,
                steps,
            )
            if request.remaining_s <= 0.0:
                break
        return state.best_slot.copy() if state.best[0] < np.inf else None


def refine_neighborhoods(
    request: MappingRequest,
    start: np.ndarray,
    *,
    max_neighborhoods: int,
    seed: int,
    max_nodes: int = NEIGHBORHOOD_NODES,
) -> np.ndarray:
    """Improve a mapping by large-neighborhood search; the result is never worse.

    Args:
        request: Problem and limits.
        start: A feasible mapping, int64 [K].
        max_neighborhoods: Maximum number of neighborhoods.
        seed: Random seed, combined with that of the request.
        max_nodes: Maximum number of nodes per neighborhood.

    Raises:
        MissingExtraError: Numba is missing.
    """
    problem, goal = request.problem, request.goal
    if problem.num_slots == 1:
        return start
    arrays = build_arrays(problem)
    branching, best = BranchAndBound(arrays, goal), start
    current = evaluate_mapping(problem, best)
    rng = np.random.default_rng([request.seed, 2, seed])
    speed = _compute_speeds(arrays.latency)
    none = np.zeros(problem.num_slots)
    # Neighborhoods of the current mapping that were already searched.
    visited: set[bytes] = set()
    for _ in range(max_neighborhoods):
        if request.remaining_s <= 0.0:
            break
        order = rng.permutation(problem.num_slots)
        if goal.period_weight > 0.0:
            busiest = int(np.argmax(current.busy_ms))
            order = np.concatenate([[busiest], order[order != busiest]])
        allowed = np.zeros(problem.num_slots, dtype=bool)
        allowed[order[:NEIGHBORHOOD_SLOTS]] = True
        segments = rng.permutation(np.flatnonzero(allowed[best]))[:NEIGHBORHOOD_SEGMENTS]
        free = np.zeros(problem.num_segments, dtype=bool)
        free[segments] = True
        neighborhood = allowed.tobytes() + free.tobytes()
        if len(segments) == 0 or neighborhood in visited:
            continue
        visited.add(neighborhood)
        weights, best_ms = np.where(allowed, speed, 0.0), goal.objective_ms(current)
        branching.reset(best_ms, best, free, goal.period_weight * weights / weights.sum(), none, allowed)
        branching.expand(max_nodes)
        if branching.best_ms < best_ms and branching.best is not None:
            best, visited = branching.best, set()
            current = evaluate_mapping(problem, best)
    return best


def _compute_speeds(latency: np.ndarray) -> np.ndarray:
    """Inverse mean latency of each slot, float64 [S], from latencies [K, S]; inf where a segment cannot
    run.

    Used as multipliers: weighting faster slots higher makes segments cost about the same everywhere.
    """
    usable = np.isfinite(latency)
    mean = np.where(usable, latency, 0.0).sum(axis=0) / np.maximum(usable.sum(axis=0), 1)
    # Limits the weight of slots with zero latency.
    return 1.0 / np.maximum(mean, 1e-3 * mean.max() or 1.0)
