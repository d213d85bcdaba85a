"""What a mapping is worth: the package, its compiled twin and plain Python agree."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.codesign import exhaustive as kernel
from sparseflow.codesign.mapping import Goal, Problem, evaluate
from sparseflow.codesign.mapping.arrays import tables
from sparseflow.codesign.mapping.kernels import annealing as local_kernel
from sparseflow.errors import InputError
from tests.codesign.mapping.naive import GOALS, busy, fits, objective, varied


@settings(deadline=None, max_examples=200)
@given(seed=st.integers(0, 10**6), data=st.data())
def test_all_definitions_agree(seed: int, data: st.DataObject) -> None:
    problem = varied(seed)
    mapping = data.draw(
        st.lists(st.integers(0, problem.slots - 1), min_size=problem.segments, max_size=problem.segments)
    )
    found, expected = evaluate(problem, mapping), busy(problem, mapping)
    np.testing.assert_allclose(found.busy_ms, expected, rtol=1e-12)
    assert found.fits == fits(problem, mapping)
    assert found.serial_ms == pytest.approx(sum(expected), rel=1e-12)
    assert found.period_ms == max(found.busy_ms)
    for goal in GOALS:
        assert goal.objective_ms(found) == pytest.approx(objective(problem, goal, mapping), rel=1e-12)

    arrays, slot = tables(problem), np.array(mapping, dtype=np.int64)
    times, left = np.empty(problem.slots), np.empty(problem.slots, dtype=np.int64)
    assert kernel.evaluate(arrays, slot, times, left) == found.feasible
    if found.feasible:
        np.testing.assert_allclose(times, found.busy_ms, rtol=1e-12)
        np.testing.assert_allclose((arrays.limit - left) / 1e6, found.memory_mb, rtol=1e-12)


@settings(deadline=None, max_examples=100)
@given(seed=st.integers(0, 10**6), data=st.data())
def test_what_local_search_keeps_is_what_it_would_find_from_nothing(seed: int, data: st.DataObject) -> None:
    problem = varied(seed)
    finite = np.isfinite(problem.latency_ms)
    start = np.array([data.draw(st.sampled_from(np.flatnonzero(row).tolist())) for row in finite])
    slots, segments = problem.slots, problem.segments
    whole = {
        "busy": np.zeros(slots),
        "left": np.zeros(slots, dtype=np.int64),
        "broken": np.zeros(1, np.int64),
    }
    others = {name: np.zeros(1) for name in local_kernel.State._fields}
    state = local_kernel.State(
        **{
            **others,
            **whole,
            "slot": start.copy(),
            "random": np.zeros(1, dtype=np.uint64),
            "best_slot": start.copy(),
            "moved": np.zeros(segments, dtype=np.int64),
            "came": np.zeros(segments, dtype=np.int64),
            "busy_before": np.zeros(slots),
            "left_before": np.zeros(slots, dtype=np.int64),
        }
    )
    arrays = tables(problem)._replace(latency=problem.latency_ms.copy(), memory=problem.memory_bytes.copy())
    local_kernel.refresh(arrays, state)
    for _ in range(5):
        k = data.draw(st.integers(0, segments - 1))
        t = data.draw(st.sampled_from(np.flatnonzero(finite[k]).tolist()))
        local_kernel.shift(arrays, state, k, t)
    kept = state.busy.copy(), state.left.copy(), int(state.broken[0])
    local_kernel.refresh(arrays, state)
    np.testing.assert_allclose(kept[0], state.busy, atol=1e-12)
    assert kept[1].tolist() == state.left.tolist() and kept[2] == state.broken[0]
    found = evaluate(problem, state.slot)
    assert (state.broken[0] > 0) == math.isinf(found.comm_ms)
    if state.broken[0] == 0:
        np.testing.assert_allclose(state.busy, found.busy_ms, rtol=1e-12)


def small() -> Problem:
    return Problem(
        latency_ms=np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]),
        memory_mb=np.array([10.0, 20.0, 30.0]),
        limit_mb=np.array([40.0, 50.0]),
        src=np.array([0, 0, 1]),
        dst=np.array([1, 2, 2]),
        traffic_bytes=np.array([100.0, 200.0, 0.0]),
        fixed_ms=np.array([[0.0, 0.5], [0.25, 0.0]]),
        ms_per_byte=np.array([[0.0, 0.01], [0.02, 0.0]]),
    )


def test_a_receiver_waits_and_the_sum_over_slots_is_one_sample_through() -> None:
    found = evaluate(small(), [0, 1, 0])
    # 0 -> 1 comes into slot 1; 1 -> 2 comes back into slot 0, and takes its time though it is empty.
    assert found.busy_ms.tolist() == [1.0 + 5.0 + 0.25, 4.0 + 0.5 + 1.0]
    assert found.comm_ms == 1.75 and found.serial_ms == found.busy_ms.sum() == 11.75
    assert found.period_ms == 6.25 and found.memory_mb.tolist() == [40.0, 20.0]
    assert found.feasible
    assert Goal().objective_ms(found) == 6.25 + 1e-3 * 11.75 and Goal().total_ms(found) == 6.25
    assert Goal(mode="serial").objective_ms(found) == Goal(mode="serial").total_ms(found) == 11.75


def test_memory_is_summed() -> None:
    # 30 MB at most are on slot 0 at a time, 60 MB in all: they do not fit into 40.
    found = evaluate(small(), [0, 0, 0])
    assert not found.fits and Goal().objective_ms(found) == math.inf
    assert evaluate(small(), [0, 1, 0]).fits and not evaluate(small(), [1, 1, 1]).fits


@pytest.mark.parametrize("mapping", [[0, 1], [0, 1, 2], [0, -1, 0], [0.0, 1.0, 0.0], [[0, 1, 0]]])
def test_what_is_no_mapping_is_refused(mapping: list[int]) -> None:
    with pytest.raises(InputError, match=re.escape("`mapping`")):
        evaluate(small(), mapping)


@pytest.mark.parametrize("settings", [{"mode": "fast"}, {"tie_weight": -1.0}, {"tie_weight": math.nan}])
def test_a_goal_is_checked(settings: dict[str, object]) -> None:
    with pytest.raises(InputError):
        Goal(**settings)  # pyright: ignore[reportArgumentType]
