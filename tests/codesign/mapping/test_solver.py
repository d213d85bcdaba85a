"""Tests of `codesign.mapping.solver`."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from benchmarks.codesign.exhaustive import exhaust
from benchmarks.codesign.random_problem import random_problem
from sparseflow.codesign.mapping import (
    MappingGoal,
    MappingProblem,
    MappingResult,
    MappingSolver,
    Mode,
    evaluate_mapping,
)
from sparseflow.codesign.mapping import solver as module
from sparseflow.errors import InputError, RunError
from tests.codesign.mapping.naive import changed, fits, objective, varied

LONG_S = 600.0
"""Far more than a search takes that is to end by itself."""
MODES: tuple[Mode, ...] = ("balanced", "serial")
all_strategies = pytest.mark.parametrize("strategy", ["auto", "dp", "exact", "local", "cpsat", "best"])


@all_strategies
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(6))
def test_results_are_feasible_and_consistent(strategy: str, mode: Mode, seed: int) -> None:
    problem = random_problem(7, 3, seed=seed, skips=0.3, slack=1.4)
    goal = MappingGoal(mode=mode)
    solver = MappingSolver(strategy=strategy, mode=mode, workers=1, time_limit_s=LONG_S)
    ((best, _),) = exhaust(problem, [goal])
    if strategy == "dp" and seed != 0:
        # Runs may not fit where a mapping does.
        problem = changed(problem, limit_mb=problem.limit_mb * 3.0)
        ((best, _),) = exhaust(problem, [goal])
    result = solver.solve_mapping(problem)
    assert fits(problem, result.mapping)
    assert result.objective_ms == pytest.approx(objective(problem, goal, result.mapping), rel=1e-12)
    assert result.lower_bound_ms <= best * (1.0 + 1e-12) and result.objective_ms >= best * (1.0 - 1e-9)
    assert result.gap == pytest.approx(1.0 - result.lower_bound_ms / result.objective_ms, abs=1e-12)
    evaluation = evaluate_mapping(problem, result.mapping)
    assert (
        result.per_slot_time == evaluation.busy_ms.tolist()
        and result.memory_mb == evaluation.memory_mb.tolist()
    )
    assert (result.serial_ms, result.period_ms, result.comm_ms) == (
        evaluation.serial_ms,
        evaluation.period_ms,
        evaluation.comm_ms,
    )
    assert result.total_latency_ms == (result.period_ms if mode == "balanced" else result.serial_ms)
    assert result.finished and result.elapsed_s >= 0.0
    if strategy in ("auto", "exact", "best"):
        assert result.optimal and result.objective_ms == pytest.approx(best, rel=1e-9)
    json.dumps(asdict(result))


@pytest.mark.parametrize("seed", range(50))
def test_auto_respects_memory_and_bound(seed: int) -> None:
    problem = varied(seed, most_segments=10, most_slots=6)
    goal = MappingGoal(mode=MODES[seed % 2])
    try:
        result = MappingSolver(mode=goal.mode, seed=seed, time_limit_s=LONG_S).solve_mapping(problem)
    except InputError:
        # Only links that were cut can make these impossible.
        assert not problem.connected.all()
        return
    assert fits(problem, result.mapping) and math.isfinite(objective(problem, goal, result.mapping))
    assert result.lower_bound_ms <= result.objective_ms


@pytest.mark.parametrize("mode", MODES)
def test_large_problems_use_local_search(mode: Mode) -> None:
    middle, large = (
        random_problem(13, 6, seed=0, slack=1.3),
        random_problem(18, 6, seed=0, slack=1.3, skips=0.2),
    )
    results = [
        MappingSolver(mode=mode, time_limit_s=LONG_S).solve_mapping(problem) for problem in (middle, large)
    ]
    for problem, result in zip((middle, large), results, strict=True):
        assert fits(problem, result.mapping) and 0.0 <= result.gap < 0.5 and result.finished
    assert results[1].strategy == "local"


def test_solver_is_deterministic_for_a_seed() -> None:
    problem = random_problem(18, 6, seed=0, slack=1.3)
    first, two = (MappingSolver(seed=5, time_limit_s=LONG_S).solve_mapping(problem) for _ in range(2))
    assert first.mapping == two.mapping and first.lower_bound_ms == two.lower_bound_ms


def test_slots_without_chips_stay_empty() -> None:
    problem = random_problem(8, 5, seed=2, slack=4.0)
    limit = np.full(5, 1e4)
    limit[[0, 3]] = 0.0
    problem = changed(problem, limit_mb=limit)
    ((best, _),) = exhaust(problem, [MappingGoal()])
    result = MappingSolver().solve_mapping(problem, start=[1, 2, 4, 1, 2, 4, 1, 2])
    assert set(result.mapping) <= {1, 2, 4}
    assert result.objective_ms == pytest.approx(best, rel=1e-9)
    assert len(result.per_slot_time) == 5 and result.memory_mb[0] == 0.0
    # A start on a slot that has lost its chip is left out.
    assert MappingSolver().solve_mapping(problem, start=[0] * 8).mapping == result.mapping


@pytest.mark.parametrize("strategy", ["auto", "exact", "local", "cpsat", "best"])
def test_solver_is_no_worse_than_start(strategy: str) -> None:
    problem = random_problem(12, 5, seed=3, slack=1.5)
    first = MappingSolver(strategy="best", time_limit_s=60.0, workers=1).solve_mapping(problem)
    short = MappingSolver(strategy=strategy, time_limit_s=0.05, workers=1)
    for start in (first, first.mapping, np.array(first.mapping)):
        assert short.solve_mapping(problem, start=start).objective_ms <= first.objective_ms * (1.0 + 1e-12)


def test_strategy_override() -> None:
    solver = MappingSolver(strategy="exact")
    assert solver.solve_mapping(random_problem(5, 2, seed=0), strategy="local").strategy == "local"
    assert solver.solve_mapping(random_problem(5, 2, seed=0)).strategy == "exact"


def short_of(**overrides: Any) -> MappingProblem:
    return MappingProblem.chain(
        **{
            "latency_ms": np.ones((4, 2)),
            "memory_mb": [3000.0, 1200.0, 500.0, 500.0],
            "limit_mb": [2048.0, 2048.0],
            "traffic_bytes": np.zeros(3),
            "fixed_ms": np.zeros((2, 2)),
            "ms_per_byte": np.zeros((2, 2)),
            **overrides,
        }
    )


@pytest.mark.parametrize("strategy", ["auto", "dp", "exact", "local", "cpsat", "best"])
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {},
            "segment 0 needs 3000 MB, but the largest slot that can run it has 2048 MB: 952 MB are missing",
        ),
        (
            {"memory_mb": [1300.0] * 4},
            "4 segments need 5200 MB, but all 2 slots with a chip have 4096 MB: 1104 MB are missing",
        ),
        # By a byte: rounded figures would say that they need what there is.
        (
            {"memory_mb": [1024.0, 1024.0, 1024.0, 1024.000001]},
            "4 segments need 4096 MB, but all 2 slots with a chip have 4096 MB: 1e-06 MB are missing",
        ),
        (
            {"memory_mb": [2048.000001, 1.0, 1.0, 1.0]},
            "segment 0 needs 2048 MB, but the largest slot that can run it has 2048 MB: 1e-06 MB are missing",
        ),
        ({"memory_mb": [np.inf, 1.0, 1.0, 1.0]}, "segment 0 does not fit on"),
        ({"limit_mb": [0.0, 0.0]}, "2 slots"),
        (
            {"latency_ms": [[1.0, 1.0], [np.inf, np.inf], [1.0, 1.0], [1.0, 1.0]], "memory_mb": [1.0] * 4},
            "segment 1 cannot run on any of the 2 slots with a chip",
        ),
    ],
)
def test_infeasible_memory_states_missing_amount(
    strategy: str, overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        MappingSolver(strategy=strategy).solve_mapping(short_of(**overrides))


@pytest.mark.parametrize("strategy", ["auto", "exact", "local", "cpsat", "best"])
def test_infeasible_packing_is_proven(strategy: str) -> None:
    # Three segments of 1300 MB are 3900 MB; no slot of 2048 MB holds two.
    problem = short_of(memory_mb=[1300.0, 1300.0, 1300.0, 1.0])
    with pytest.raises(InputError, match=r"4 segments of 3901 MB.* 2048 MB"):
        MappingSolver(strategy=strategy).solve_mapping(problem)


@pytest.mark.parametrize("strategy", ["auto", "exact", "local", "cpsat"])
def test_unconnected_slots_are_named(strategy: str) -> None:
    distances = np.where(np.eye(2, dtype=bool), 0.0, np.inf)
    problem = short_of(memory_mb=[1200.0] * 2 + [1.0] * 2, fixed_ms=distances)
    with pytest.raises(InputError, match=re.escape("1")):
        MappingSolver(strategy=strategy).solve_mapping(problem)


def test_large_infeasible_problem_is_proven() -> None:
    segments, slots = 30, 6
    problem = MappingProblem.chain(
        latency_ms=np.ones((segments, slots)),
        memory_mb=np.full(segments, 1000.0),
        limit_mb=np.full(slots, 5990.0),
        traffic_bytes=np.ones(segments - 1),
        fixed_ms=np.zeros((slots, slots)),
        ms_per_byte=np.zeros((slots, slots)),
    )
    assert MappingSolver(time_limit_s=LONG_S).solve_mapping(problem).finished
    # Four to a slot, and five to the last: 25 at most, though there would be room for 30 in all.
    limit = np.append(np.full(slots - 1, 5499.0), 6500.0)
    with pytest.raises(InputError):
        MappingSolver().solve_mapping(changed(problem, memory_mb=np.full(segments, 1100.0), limit_mb=limit))


def test_timeout_without_mapping_is_a_run_error(monkeypatch: pytest.MonkeyPatch) -> None:
    zero = module.StrategyResult(mapping=None, finished=False)
    monkeypatch.setattr(module, "search_locally", lambda *_, **__: zero)
    monkeypatch.setattr(module, "find_feasible_mapping", lambda *_: zero)
    with pytest.raises(RunError):
        MappingSolver(strategy="local").solve_mapping(random_problem(6, 3, seed=0))


def test_timeout_reports_gap() -> None:
    result = MappingSolver(strategy="exact", time_limit_s=0.1).solve_mapping(random_problem(40, 8, seed=0))
    assert not result.finished and not result.optimal and 0.0 < result.gap < 1.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategy": "magic"}, "`strategy` (='magic') must be one of: auto, dp, exact, local, cpsat, best"),
        ({"mode": "quick"}, "`mode` (='quick') must be one of: balanced, serial"),
        ({"time_limit_s": 0.0}, "`time_limit_s` (=0.0)"),
        ({"time_limit_s": math.nan}, "`time_limit_s` (=nan)"),
        ({"seed": -1}, "`seed` (=-1)"),
        ({"workers": 1.5}, "`workers` (=1.5)"),
        ({"serial_weight": -1.0}, "`serial_weight` (=-1.0)"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        MappingSolver(**settings)
    with pytest.raises(InputError, match=re.escape("`strategy` (='other')")):
        MappingSolver().solve_mapping(random_problem(3, 2, seed=0), strategy="other")


@pytest.mark.parametrize("start", [[0, 1], [0, 1, 2], [0.5, 1.0, 0.0]])
def test_invalid_start_is_refused(start: list[Any]) -> None:
    with pytest.raises(InputError, match="`mapping`"):
        MappingSolver().solve_mapping(random_problem(3, 2, seed=0), start=start)


def test_cached_kernels_take_no_named_tuples() -> None:
    # A cache that refers to a class of the package cannot be read after the class moves.
    from numba.core import types
    from numba.core.caching import FunctionCache

    from sparseflow.codesign.mapping.kernels import annealing, branch_and_bound, contiguous

    module._compile_kernels(tree_search=True, local_search=True)
    modules = (annealing, branch_and_bound, contiguous)
    kernels = {kernel for source in modules for kernel in vars(source).values()
               if isinstance(getattr(kernel, "_cache", None), FunctionCache)}  # fmt: skip
    assert len(kernels) == 6
    for kernel in kernels:
        arguments = [argument for signature in kernel.nopython_signatures for argument in signature.args]
        assert arguments and not any(isinstance(item, types.BaseNamedTuple) for item in arguments)


def test_import_loads_no_optional_package() -> None:
    script = (
        "import sys; import sparseflow.codesign.mapping; "
        "print(*sorted({'numba', 'scipy', 'ortools', 'torch'} & set(sys.modules)))"
    )
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not process.stdout.split()


def test_zero_objective_is_optimal() -> None:
    problem = short_of(latency_ms=np.zeros((4, 2)), memory_mb=[1.0] * 4)
    for strategy in ("auto", "local", "cpsat", "dp"):
        result = MappingSolver(strategy=strategy).solve_mapping(problem)
        assert isinstance(result, MappingResult) and result.gap == 0.0 and result.optimal
