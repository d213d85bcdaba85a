"""All mapping strategies against exhaustive search."""

from __future__ import annotations

import math
from itertools import product

import pytest

pytest.importorskip("ortools")

from sparseflow.codesign.mapping import MappingGoal, MappingSolver, Mode, compute_lower_bound
from sparseflow.errors import InputError
from tests.codesign.mapping.naive import changed, fits, objective, wild

LONG_S = 600.0
"""Far more than any search takes here."""
CLOSE = 1.0 + 1e-12
PROVES = {"auto": 1e-9, "exact": 1e-9, "best": 1e-9, "cpsat": 1e-5}
"""How far from the best, as a share, a strategy that ends may be; CP-SAT counts in ticks."""


@pytest.mark.parametrize("mode", ["balanced", "serial"])
@pytest.mark.parametrize("seed", range(40))
def test_all_strategies_against_exhaustive_search(seed: int, mode: Mode) -> None:
    problem = wild(seed)
    goal = MappingGoal(mode=mode, tie_weight=(0.0, 1e-3, 0.4, 10.0)[seed % 4])
    all_items = product(range(problem.num_slots), repeat=problem.num_segments)
    best = min(objective(problem, goal, mapping) for mapping in all_items)
    assert compute_lower_bound(problem, goal).value_ms <= best * CLOSE
    for strategy in ("auto", "exact", "local", "dp", "best", "cpsat"):
        solver = MappingSolver(
            strategy=strategy, mode=mode, serial_weight=goal.tie_weight, workers=1, time_limit_s=LONG_S
        )
        if math.isinf(best):
            with pytest.raises(InputError):
                solver.solve_mapping(problem)
            continue
        try:
            result = solver.solve_mapping(problem)
        except InputError:
            # A slot cannot have two runs of segments there.
            assert strategy == "dp"
            continue
        assert fits(problem, result.mapping) and result.finished
        assert result.objective_ms == pytest.approx(objective(problem, goal, result.mapping), rel=1e-12)
        assert result.lower_bound_ms <= best * CLOSE and best <= result.objective_ms * CLOSE
        if strategy in PROVES:
            assert result.objective_ms <= best * (1.0 + PROVES[strategy])
            assert result.optimal or strategy == "cpsat"


def test_problems_cover_all_cases() -> None:
    none = zero = distances = single = peaks = 0
    for seed in range(120):
        problem = wild(seed)
        all_items = list(product(range(problem.num_slots), repeat=problem.num_segments))
        best = min(objective(problem, MappingGoal(), mapping) for mapping in all_items)
        without = changed(problem, activation_mb=0.0)
        peaks += best != min(objective(without, MappingGoal(), mapping) for mapping in all_items)
        none += math.isinf(best)
        zero += best == 0.0
        distances += not problem.connected.all()
        single += problem.num_segments < problem.num_slots
    assert min(none, zero, distances, single, peaks) > 5
