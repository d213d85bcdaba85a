r"""OR-Tools CP-SAT: general, with a bound that rises until it meets the best mapping, or time is up.

x[k, s] says that segment k is on slot s; y[e, a, b] that edge e leads from slot a to slot b, with
sum_b y[e, a, b] = x[src, a] and sum_a y[e, a, b] = x[dst, b], which is tighter than products taken apart.
CP-SAT counts in whole numbers: a tick is a share `1 / TICKS` of the known objective (or of the longest that
any mapping can take), and every time is rounded down to ticks. So its bound, times the tick, holds for the
real problem; and what it takes for the optimum is within (K + E) / TICKS of it. The weight of the sum is a
fraction of whole numbers, rounded down, too. What alone would take longer than the known objective is left
out.
"""

from __future__ import annotations

from math import ceil, floor, inf
from typing import Any

import numpy as np

from sparseflow.codesign.mapping.objective import Goal, evaluate
from sparseflow.codesign.mapping.problem import Problem
from sparseflow.codesign.mapping.search import Answer, Request
from sparseflow.core.extras import require
from sparseflow.errors import InputError

TICKS = 10**7
MOST_VARIABLES = 400_000


def cpsat(request: Request) -> Answer:
    """The best mapping by the end of the time, and a bound.

    Raises:
        InputError: There are more than `MOST_VARIABLES` variables.
        MissingExtraError: OR-Tools is missing.
    """
    cp = require("ortools.sat.python.cp_model", "codesign")
    problem, goal, start = request.problem, request.goal, request.start
    variables = problem.segments * problem.slots + problem.edges * problem.slots**2
    if variables > MOST_VARIABLES:
        raise InputError(
            f"{problem.segments} segments, {problem.edges} edges and {problem.slots} slots make {variables} "
            f"variables for the strategy 'cpsat'; at most {MOST_VARIABLES} were expected: use 'local'"
        )
    known = inf if start is None else goal.objective_ms(evaluate(problem, start))
    model = _Model(cp, problem)
    unit_ms = model.minimise(goal, known)
    if start is not None:
        model.hint(start)
    best, bound = known, request.lower_bound_ms

    def found(mapping: np.ndarray) -> None:
        nonlocal best
        best = min(best, goal.objective_ms(evaluate(problem, mapping)))
        request.tell("cpsat", best, min(bound, best))

    def proved(value: float) -> None:
        nonlocal bound
        bound = max(bound, value * unit_ms)
        request.tell("cpsat", best, min(bound, best))

    status, mapping, value = model.solve(request, found, proved)
    if status == cp.INFEASIBLE:
        return Answer(mapping=None, none_exists=True)
    if mapping is None or goal.objective_ms(evaluate(problem, mapping)) > known:
        # The start may be better by less than ticks tell.
        mapping = start
    bound = max(request.lower_bound_ms, value * unit_ms)
    if mapping is not None:
        bound = min(bound, goal.objective_ms(evaluate(problem, mapping)))
    return Answer(mapping=mapping, lower_bound_ms=bound, finished=status == cp.OPTIMAL)


def any_mapping(request: Request) -> Answer:
    """Some mapping that can run, or the proof that there is none, or neither by the end of the time.

    Raises:
        MissingExtraError: OR-Tools is missing.
    """
    cp = require("ortools.sat.python.cp_model", "codesign")
    model = _Model(cp, request.problem)
    model.keep_connected()
    status, mapping, _ = model.solve(request)
    none = status == cp.INFEASIBLE
    return Answer(mapping=mapping, finished=none or mapping is not None, none_exists=none)


class _Model:
    """Segments, slots and memory; what else is asked is added."""

    def __init__(self, cp: Any, problem: Problem) -> None:
        self.cp, self.problem, self.model = cp, problem, cp.CpModel()
        self.hints: list[tuple[Any, tuple[int, ...]]] = []
        allowed, memory, limit = problem.allowed, problem.memory_bytes, problem.limit_bytes
        # A common divisor changes nothing but the size of numbers.
        divisor = max(int(np.gcd.reduce(memory[allowed], initial=0)), 1)
        self.x = {(k, s): self.model.new_bool_var(f"x{k},{s}") for k, s in np.argwhere(allowed).tolist()}
        for k in range(problem.segments):
            self.model.add_exactly_one(self.x[k, s] for s in range(problem.slots) if allowed[k, s])
        for s in range(problem.slots):
            there = [k for k in range(problem.segments) if allowed[k, s]]
            held = self._sum([self.x[k, s] for k in there], [int(memory[k, s]) // divisor for k in there])
            self.model.add(held <= int(limit[s]) // divisor)

    def _sum(self, variables: list[Any], factors: list[int]) -> Any:
        return self.cp.LinearExpr.weighted_sum(variables, factors)

    def keep_connected(self) -> None:
        """No edge leads between slots that are not connected."""
        for a, b in np.argwhere(~self.problem.connected).tolist():
            for u, v in zip(self.problem.src.tolist(), self.problem.dst.tolist(), strict=True):
                if a != b and (u, a) in self.x and (v, b) in self.x:
                    self.model.add_bool_or(~self.x[u, a], ~self.x[v, b])

    def minimise(self, goal: Goal, known: float) -> float:
        """Add times and the objective; returns what one of it is, ms."""
        problem, model, weights = self.problem, self.model, goal.period_weight + goal.serial_weight
        slots, connected = range(problem.slots), problem.connected
        apart = [(a, b) for a in slots for b in slots if a != b and connected[a, b]]
        transfers = {
            (e, a, b): float(problem.fixed_ms[a, b] + size * problem.ms_per_byte[a, b])
            for e, size in enumerate(problem.traffic_bytes.tolist())
            for a, b in apart
        }
        longest = known / weights
        if longest == inf:
            longest = float(np.where(problem.allowed, problem.latency_ms, 0.0).max(axis=1).sum())
            for e in range(problem.edges):
                longest += max((transfers[e, a, b] for a, b in apart), default=0.0)
        tick = longest / TICKS if longest > 0.0 else 1.0

        variables: list[list[Any]] = [[] for _ in slots]
        times: list[list[int]] = [[] for _ in slots]

        def charge(slot: int, variable: Any, time_ms: float) -> None:
            if time_ms > longest * (1.0 + 1e-9):
                model.add(variable == 0)
            variables[slot].append(variable)
            # Division must not round up past a whole number.
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
            whole = min(max(ceil(1e3 / goal.serial_weight), 1), 10**6)
        else:
            whole = 1
        period, serial = round(goal.period_weight) * whole, floor(goal.serial_weight * whole + 1e-9)
        z = model.new_int_var(0, TICKS + 1, "z")
        for s in slots:
            if goal.period_weight > 0.0:
                model.add(self._sum(variables[s], times[s]) <= z)
        every = [variable for those in variables for variable in those]
        summed = [serial * time for those in times for time in those]
        model.minimize(self._sum([*every, z], [*summed, period]))
        return tick / whole

    def hint(self, mapping: np.ndarray) -> None:
        """Where to begin."""
        for (k, s), variable in self.x.items():
            self.model.add_hint(variable, int(mapping[k] == s))
        for variable, (u, a, v, b) in self.hints:
            self.model.add_hint(variable, int(mapping[u] == a and mapping[v] == b))

    def solve(
        self, request: Request, found: Any = None, proved: Any = None
    ) -> tuple[Any, np.ndarray | None, float]:
        """Status, mapping if there is one, and bound on the objective in its own units."""
        x, segments = self.x, self.problem.segments

        def mapping(value: Any) -> np.ndarray:
            slot = np.full(segments, -1, dtype=np.int64)
            for (k, s), variable in x.items():
                if value(variable):
                    slot[k] = s
            return slot

        class Listener(self.cp.CpSolverSolutionCallback):
            def on_solution_callback(self) -> None:
                found(mapping(self.boolean_value))

        solver = self.cp.CpSolver()
        solver.parameters.max_time_in_seconds = max(request.seconds_left, 0.01)
        solver.parameters.num_workers = request.workers
        solver.parameters.random_seed = request.seed % 2**31
        if proved is not None:
            solver.best_bound_callback = proved
        status = solver.solve(self.model, None if found is None else Listener())
        assert status != self.cp.MODEL_INVALID, self.model.validate()
        if status not in (self.cp.OPTIMAL, self.cp.FEASIBLE):
            return status, None, 0.0
        return status, mapping(solver.boolean_value), float(solver.best_objective_bound)
