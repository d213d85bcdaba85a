"""Tests of `codesign.mapping.objective`."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.codesign import exhaustive as kernel
from sparseflow.codesign.mapping import MappingGoal, MappingProblem, evaluate_mapping
from sparseflow.codesign.mapping.arrays import build_arrays
from sparseflow.codesign.mapping.kernels import annealing as local_kernel
from sparseflow.errors import InputError
from tests.codesign.mapping.naive import GOALS, busy, changed, fits, objective, varied


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 10**6), data=st.data())
def test_evaluate_mapping_matches_plain_definition(seed: int, data: st.DataObject) -> None:
    problem = varied(seed)
    mapping = data.draw(
        st.lists(
            st.integers(0, problem.num_slots - 1),
            min_size=problem.num_segments,
            max_size=problem.num_segments,
        )
    )
    result, expected = evaluate_mapping(problem, mapping), busy(problem, mapping)
    np.testing.assert_allclose(result.busy_ms, expected, rtol=1e-12)
    assert result.fits == fits(problem, mapping)
    assert result.serial_ms == pytest.approx(sum(expected), rel=1e-12)
    assert result.period_ms == max(result.busy_ms)
    for goal in GOALS:
        assert goal.objective_ms(result) == pytest.approx(objective(problem, goal, mapping), rel=1e-12)

    arrays, slot = build_arrays(problem), np.array(mapping, dtype=np.int64)
    times, (remaining, peak) = np.empty(problem.num_slots), np.empty((2, problem.num_slots), dtype=np.int64)
    assert kernel.evaluate(arrays, slot, times, remaining, peak) == result.feasible
    if result.feasible:
        np.testing.assert_allclose(times, result.busy_ms, rtol=1e-12)
        np.testing.assert_allclose((arrays.limit - remaining + peak) / 1e6, result.memory_mb, rtol=1e-12)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10**6), data=st.data())
def test_incremental_state_matches_recomputation(seed: int, data: st.DataObject) -> None:
    problem = varied(seed)
    finite = np.isfinite(problem.latency_ms)
    start = np.array([data.draw(st.sampled_from(np.flatnonzero(row).tolist())) for row in finite])
    slots, segments = problem.num_slots, problem.num_segments
    full = {
        "busy": np.zeros(slots),
        "free_bytes": np.zeros(slots, dtype=np.int64),
        "num_broken": np.zeros(1, np.int64),
    }
    overrides = {name: np.zeros(1) for name in local_kernel.AnnealingState._fields}
    state = local_kernel.AnnealingState(
        **{
            **overrides,
            **full,
            "slot": start.copy(),
            "random": np.zeros(1, dtype=np.uint64),
            "best_slot": start.copy(),
            "moved_segments": np.zeros(segments, dtype=np.int64),
            "previous_slot": np.zeros(segments, dtype=np.int64),
            "previous_busy": np.zeros(slots),
            "previous_free_bytes": np.zeros(slots, dtype=np.int64),
        }
    )
    arrays = build_arrays(problem)._replace(
        latency=problem.latency_ms.copy(),
        memory=problem.memory_bytes.copy(),
        activation=problem.activation_bytes.copy(),
        max_activation=problem.activation_bytes.max(axis=0),
    )
    local_kernel.recompute(tuple(arrays), tuple(state))
    for _ in range(5):
        k = data.draw(st.integers(0, segments - 1))
        t = data.draw(st.sampled_from(np.flatnonzero(finite[k]).tolist()))
        local_kernel.move_segment(arrays, state, k, t)
    saved = state.busy.copy(), state.free_bytes.copy(), int(state.num_broken[0])
    local_kernel.recompute(tuple(arrays), tuple(state))
    np.testing.assert_allclose(saved[0], state.busy, atol=1e-12)
    assert saved[1].tolist() == state.free_bytes.tolist() and saved[2] == state.num_broken[0]
    evaluation = evaluate_mapping(problem, state.slot)
    excess = [local_kernel.excess_bytes(arrays, state, slot) for slot in range(slots)]
    needed = np.round(evaluation.memory_mb * 1e6).astype(np.int64)
    assert excess == np.maximum(needed - problem.limit_bytes, 0).tolist()
    assert (state.num_broken[0] > 0) == math.isinf(evaluation.comm_ms)
    if state.num_broken[0] == 0:
        np.testing.assert_allclose(state.busy, evaluation.busy_ms, rtol=1e-12)


def test_memory_is_the_sum_of_weights_and_the_largest_activation() -> None:
    problem = changed(small(), activation_mb=[5.0, 1.0, 10.0])
    evaluation = evaluate_mapping(problem, [0, 0, 1])
    assert evaluation.memory_mb.tolist() == [35.0, 40.0] and evaluation.fits
    evaluation = evaluate_mapping(problem, [0, 1, 1])
    assert evaluation.memory_mb.tolist() == [15.0, 60.0] and not evaluation.fits


def small() -> MappingProblem:
    return MappingProblem(
        latency_ms=np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]),
        memory_mb=np.array([10.0, 20.0, 30.0]),
        limit_mb=np.array([40.0, 50.0]),
        src=np.array([0, 0, 1]),
        dst=np.array([1, 2, 2]),
        traffic_bytes=np.array([100.0, 200.0, 0.0]),
        fixed_ms=np.array([[0.0, 0.5], [0.25, 0.0]]),
        ms_per_byte=np.array([[0.0, 0.01], [0.02, 0.0]]),
    )


def test_busy_times_by_hand() -> None:
    evaluation = evaluate_mapping(small(), [0, 1, 0])
    # 0 -> 1 comes into slot 1; 1 -> 2 comes back into slot 0, and takes its time though it is empty.
    assert evaluation.busy_ms.tolist() == [1.0 + 5.0 + 0.25, 4.0 + 0.5 + 1.0]
    assert evaluation.comm_ms == 1.75 and evaluation.serial_ms == evaluation.busy_ms.sum() == 11.75
    assert evaluation.period_ms == 6.25 and evaluation.memory_mb.tolist() == [40.0, 20.0]
    assert evaluation.feasible
    assert (
        MappingGoal().objective_ms(evaluation) == 6.25 + 1e-3 * 11.75
        and MappingGoal().total_latency_ms(evaluation) == 6.25
    )
    assert (
        MappingGoal(mode="serial").objective_ms(evaluation)
        == MappingGoal(mode="serial").total_latency_ms(evaluation)
        == 11.75
    )


def test_memory_is_summed_per_slot() -> None:
    # 30 MB at most are on slot 0 at a time, 60 MB in all: they do not fit into 40.
    evaluation = evaluate_mapping(small(), [0, 0, 0])
    assert not evaluation.fits and MappingGoal().objective_ms(evaluation) == math.inf
    assert evaluate_mapping(small(), [0, 1, 0]).fits and not evaluate_mapping(small(), [1, 1, 1]).fits


@pytest.mark.parametrize("mapping", [[0, 1], [0, 1, 2], [0, -1, 0], [0.0, 1.0, 0.0], [[0, 1, 0]]])
def test_invalid_mapping_is_refused(mapping: list[int]) -> None:
    with pytest.raises(InputError, match=re.escape("`mapping`")):
        evaluate_mapping(small(), mapping)


@pytest.mark.parametrize("settings", [{"mode": "fast"}, {"tie_weight": -1.0}, {"tie_weight": math.nan}])
def test_invalid_goal_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises(InputError):
        MappingGoal(**settings)  # pyright: ignore[reportArgumentType]
