"""OR-Tools CP-SAT: any problem, with a lower bound that improves until the time limit.

x[k, s] is 1 if segment k is on slot s; y[e, a, b] is 1 if edge e goes from slot a to slot b, with sum_b y[e,
a, b] = x[src, a] and sum_a y[e, a, b] = x[dst, b], which is tighter than linearized products. CP-SAT uses
integers: a tick is `1 / TICKS` of the known objective (or of the longest possible time), and all times are
rounded down to ticks. The bound times the tick is therefore valid for the real problem, and the solution is
within (K + E) / TICKS of the optimum. The weight of the sum is rounded down to a fraction of integers. Pairs
that alone exceed the known objective are excluded.
"""

from __future__ import annotations

from math import ceil, floor, inf
from typing import Any

import numpy as np

from sparseflow.codesign.mapping.objective import MappingGoal, evaluate_mapping
from sparseflow.codesign.mapping.problem import MappingProblem
from sparseflow.codesign.mapping.search import MappingRequest, StrategyResult
from sparseflow.core.extras import require
from sparseflow.errors import InputError

TICKS = 10**7
MAX_VARIABLES = 400_000


def solve_cpsat(request: MappingRequest) -> StrategyResult:
    """Find the best mapping within the time limit, and a lower bound.

    Raises:
        InputError: The problem has more than `MAX_VARIABLES` variables.
        MissingExtraError: OR-Tools is missing.
    """
    cp = require("ortools.sat.python.cp_model", "codesign")
    problem, goal, start = request.problem, request.goal, request.start
    variables = problem.num_segments * problem.num_slots + problem.num_edges * problem.num_slots**2
    if variables > MAX_VARIABLES:
        raise InputError(
            f"{problem.num_segments} segments, {problem.num_edges} edges and {problem.num_slots} slots need "
            f"{variables} variables; strategy 'cpsat' supports at most {MAX_VARIABLES}; use 'local'"
        )
    incumbent_ms = inf if start is None else goal.objective_ms(evaluate_mapping(problem, start))
    model = _CpSatModel(cp, problem)
    unit_ms = model.minimize(goal, incumbent_ms)
    if start is not None:
        model.hint(start)
    status, mapping, value = model.solve(request)
    if status == cp.INFEASIBLE:
        return StrategyResult(mapping=None, infeasible=True)
    if mapping is None or goal.objective_ms(evaluate_mapping(problem, mapping)) > incumbent_ms:
        # The start may be better within the resolution of ticks.
        mapping = start
    bound = max(request.lower_bound_ms, value * unit_ms)
    if mapping is not None:
        bound = min(bound, goal.objective_ms(evaluate_mapping(problem, mapping)))
    return StrategyResult(mapping=mapping, lower_bound_ms=bound, finished=status == cp.OPTIMAL)


def find_feasible_mapping(request: MappingRequest) -> StrategyResult:
    """Find any feasible mapping or prove that there is none, within the time limit.

    Raises:
        MissingExtraError: OR-Tools is missing.
    """
    cp = require("ortools.sat.python.cp_model", "codesign")
    model = _CpSatModel(cp, request.problem)
    model.require_connected()
    status, mapping, _ = model.solve(request)
    none = status == cp.INFEASIBLE
    return StrategyResult(mapping=mapping, finished=none or mapping is not None, infeasible=none)


class _CpSatModel:
    """Model of assignment and memory; connectivity and objective are added by methods."""

    def __init__(self, cp: Any, problem: MappingProblem) -> None:
        self.cp, self.problem, self.model = cp, problem, cp.CpModel()
        self.hints: list[tuple[Any, tuple[int, ...]]] = []
        allowed, limit = problem.allowed, problem.limit_bytes
        memory, activation = problem.memory_bytes, problem.activation_bytes
        # Divide by the common divisor to keep numbers small.
        sizes = np.concatenate([memory[allowed], activation[allowed]])
        divisor = max(int(np.gcd.reduce(sizes, initial=0)), 1)
        self.x = {(k, s): self.model.new_bool_var(f"x{k},{s}") for k, s in np.argwhere(allowed).tolist()}
        for k in range(problem.num_segments):
            self.model.add_exactly_one(self.x[k, s] for s in range(problem.num_slots) if allowed[k, s])
        for s in range(problem.num_slots):
            segments = [k for k in range(problem.num_segments) if allowed[k, s]]
            capacity = int(limit[s]) // divisor
            peak = self.model.new_int_var(0, capacity, f"peak{s}")
            for k in segments:
                if activation[k, s]:
                    self.model.add(peak >= int(activation[k, s]) // divisor).only_enforce_if(self.x[k, s])
            self.model.add(
                self._sum(
                    [*(self.x[k, s] for k in segments), peak],
                    [*(int(memory[k, s]) // divisor for k in segments), 1],
                )
                <= capacity
            )

    def _sum(self, variables: list[Any], factors: list[int]) -> Any:
        return self.cp.LinearExpr.weighted_sum(variables, factors)

    def require_connected(self) -> None:
        """Forbid edges between unconnected slots."""
        for a, b in np.argwhere(~self.problem.connected).tolist():
            for u, v in zip(self.problem.src.tolist(), self.problem.dst.tolist(), strict=True):
                if a != b and (u, a) in self.x and (v, b) in self.x:
                    self.model.add_bool_or(~self.x[u, a], ~self.x[v, b])

    def minimize(self, goal: MappingGoal, incumbent_ms: float) -> float:
        """Add times and the objective; returns the duration of one objective unit, ms."""
        problem, model, weights = self.problem, self.model, goal.period_weight + goal.serial_weight
        slots, connected = range(problem.num_slots), problem.connected
        slot_pairs = [(a, b) for a in slots for b in slots if a != b and connected[a, b]]
        transfers = {
            (e, a, b): float(problem.fixed_ms[a, b] + size * problem.ms_per_byte[a, b])
            for e, size in enumerate(problem.traffic_bytes.tolist())
            for a, b in slot_pairs
        }
        longest = incumbent_ms / weights
        if longest == inf:
            longest = float(np.where(problem.allowed, problem.latency_ms, 0.0).max(axis=1).sum())
            for e in range(problem.num_edges):
                longest += max((transfers[e, a, b] for a, b in slot_pairs), default=0.0)
        tick = longest / TICKS if longest > 0.0 else 1.0

        variables: list[list[Any]] = [[] for _ in slots]
        times: list[list[int]] = [[] for _ in slots]

        def charge(slot: int, variable: Any, time_ms: float) -> None:
            if time_ms > longest * (1.0 + 1e-9):
                model.add(variable == 0)
            variables[slot].append(variable)
            # The quotient must not be rounded up to the next integer.
            times[slot].append(max(floor(time_ms / tick - 1e-6), 0))

        for (k, s), variable in self.x.items():
            charge(s, variable, float(problem.latency_ms[k, s]))
        for e, (u, v) in enumerate(zip(problem.src.tolist(), problem.dst.tolist(), strict=True)):
            leaves: dict[int, list[Any]] = {a: [] for a in slots if (u, a) in self.x}
            enters: dict[int, list[Any]] = {b: [] for b in slots if (v, b) in self.x}
            for a in leaves:
                for b in enters:
                    if connected[a, b]:
                        y = model.new_bool_var(f"y{e},{a},{b}")
                        self.hints.append((y, (u, a, v, b)))
                        leaves[a].append(y)
                        enters[b].append(y)
                        if a != b:
                            charge(b, y, transfers[e, a, b])
            for k, ends in ((u, leaves), (v, enters)):
                for s, those in ends.items():
                    model.add(sum(those) == self.x[k, s])
        if goal.serial_weight > 0.0 and goal.period_weight > 0.0:
            scale = min(max(ceil(1e3 / goal.serial_weight), 1), 10**6)
        else:
            scale = 1
        period, serial = round(goal.period_weight) * scale, floor(goal.serial_weight * scale + 1e-9)
        z = model.new_int_var(0, TICKS + 1, "z")
        for s in slots:
            if goal.period_weight > 0.0:
                model.add(self._sum(variables[s], times[s]) <= z)
        all_variables = [variable for literals in variables for variable in literals]
        summed = [serial * time for those in times for time in those]
        model.minimize(self._sum([*all_variables, z], [*summed, period]))
        return tick / scale

    def hint(self, mapping: np.ndarray) -> None:
        """Set the initial solution."""
        for (k, s), variable in self.x.items():
            self.model.add_hint(variable, int(mapping[k] == s))
        for variable, (u, a, v, b) in self.hints:
            self.model.add_hint(variable, int(mapping[u] == a and mapping[v] == b))

    def solve(self, request: MappingRequest) -> tuple[Any, np.ndarray | None, float]:
        """Return the status, the mapping if there is one, and the bound in objective units."""
        solver = self.cp.CpSolver()
        solver.parameters.max_time_in_seconds = max(request.remaining_s, 0.01)
        solver.parameters.num_workers = request.workers
        solver.parameters.random_seed = request.seed % 2**31
        status = solver.solve(self.model)
        assert status != self.cp.MODEL_INVALID, self.model.validate()
        if status not in (self.cp.OPTIMAL, self.cp.FEASIBLE):
            return status, None, 0.0
        mapping = np.full(self.problem.num_segments, -1, dtype=np.int64)
        for (k, s), variable in self.x.items():
            if solver.boolean_value(variable):
                mapping[k] = s
        return status, mapping, float(solver.best_objective_bound)
