"""Tests of `codesign.mapping.problem`."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from sparseflow.codesign.mapping import MappingProblem
from sparseflow.errors import InputError
from tests.codesign.mapping.naive import changed

INF, NAN = float("inf"), float("nan")


def arrays(**overrides: Any) -> dict[str, Any]:
    """Three segments, two slots."""
    return {
        "latency_ms": [[1.0, 2.0], [3.0, INF], [1.0, 1.0]],
        "memory_mb": [10.0, 20.0, 30.0],
        "limit_mb": [40.0, 50.0],
        "src": [0, 0],
        "dst": [1, 2],
        "traffic_bytes": [100.0, 200.0],
        "fixed_ms": [[0.0, 0.1], [0.2, 0.0]],
        "ms_per_byte": [[0.0, 1e-3], [1e-3, 0.0]],
        **overrides,
    }


def test_problem_accepts_array_likes() -> None:
    problem = MappingProblem(**arrays())
    assert (problem.num_segments, problem.num_slots, problem.num_edges) == (3, 2, 2)
    assert problem.memory_mb.shape == (3, 2) and problem.latency_ms.dtype == np.float64
    assert problem.src.dtype == np.int64
    assert problem.allowed.tolist() == [[True, True], [True, False], [True, True]]
    with pytest.raises(ValueError, match="read-only"):
        problem.latency_ms[0, 0] = 5.0


def test_problem_copies_arrays() -> None:
    latency = np.ones((3, 2))
    problem = MappingProblem(**arrays(latency_ms=latency))
    latency[:] = 9.0
    assert (problem.latency_ms == 1.0).all()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("latency_ms", [1.0, 2.0], "`latency_ms` has shape [2]; expected [segments, slots]"),
        ("latency_ms", np.ones((0, 2)), "at least one of each"),
        (
            "latency_ms",
            [[1.0, 2.0], [3.0, NAN], [1.0, 1.0]],
            "`latency_ms`[1, 1] is nan",
        ),
        (
            "latency_ms",
            [[1.0, 2.0], [3.0, 4.0], [-1.0, 1.0]],
            "`latency_ms`[2, 0] is -1",
        ),
        ("latency_ms", [["a", 2.0]], "`latency_ms` is not an array of numbers"),
        ("memory_mb", [10.0, 20.0], "`memory_mb` has shape [2]; expected [3, 2]"),
        ("memory_mb", [10.0, NAN, 1.0], "`memory_mb`[1, 0] is nan"),
        ("memory_mb", [1e12, 1.0, 1.0], "expected MB, not bytes"),
        ("activation_mb", [1.0, 2.0], "`activation_mb` has shape [2]; expected [3, 2]"),
        ("activation_mb", [1.0, -2.0, 1.0], "`activation_mb`[1, 0] is -2"),
        ("activation_mb", [1e10, 1.0, 1.0], "expected MB, not bytes"),
        ("limit_mb", [40.0], "`limit_mb` has shape [1]; expected [2]"),
        ("limit_mb", [40.0, -1.0], "`limit_mb`[1] is -1"),
        ("traffic_bytes", [100.0, INF], "`traffic_bytes`[1] is inf; expected a finite number"),
        ("traffic_bytes", [100.0, -2.0], "`traffic_bytes`[1] is -2"),
        ("traffic_bytes", [[100.0], [1.0]], "`traffic_bytes` has shape [2, 1]; expected ['edges']"),
        ("src", [0], "`src` has shape [1]; expected [2], one for each of `traffic_bytes`"),
        ("src", [0.0, 1.0], "`src` has dtype float64"),
        ("src", [0, 2], "edge 1 goes from segment 2 to segment 2"),
        ("src", [-1, 0], "edge 0 goes from segment -1 to segment 1"),
        ("dst", [1, 3], "both from 0 to 2"),
        ("fixed_ms", np.zeros((3, 3)), "`fixed_ms` has shape [3, 3]; expected [2, 2]"),
        ("fixed_ms", [[0.0, 1.0], [1.0, 0.5]], "`fixed_ms`[1, 1] is 0.5; expected 0"),
        ("ms_per_byte", [[0.0, NAN], [1.0, 0.0]], "`ms_per_byte`[0, 1] is nan"),
    ],
)
def test_invalid_value_is_named_with_index(name: str, value: Any, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        MappingProblem(**arrays(**{name: value}))


def test_chain_connects_consecutive_segments() -> None:
    arguments = {name: value for name, value in arrays().items() if name not in ("src", "dst")}
    problem = MappingProblem.chain(**arguments)
    assert problem.src.tolist() == [0, 1] and problem.dst.tolist() == [1, 2]
    first = {**arguments, "latency_ms": [[1.0, 1.0]], "memory_mb": [1.0], "traffic_bytes": []}
    assert MappingProblem.chain(**first).num_edges == 0


def test_memory_is_rounded_to_bytes() -> None:
    # In floating point 0.1 + 0.2 is above 0.3.
    problem = MappingProblem(**arrays(memory_mb=[0.1, 0.2, 1e-7], limit_mb=[0.3, INF]))
    assert problem.memory_bytes[:, 0].tolist() == [100_000, 200_000, 1]
    assert problem.limit_bytes.tolist() == [300_000, 300_002]
    assert problem.allowed[:, 0].all()


def test_allowed_pairs() -> None:
    problem = MappingProblem(**arrays(memory_mb=[[0.0, 0.0], [60.0, 1.0], [INF, 1.0]], limit_mb=[40.0, 0.0]))
    # Nothing runs where there is no chip, even if it needs no memory.
    assert problem.allowed.tolist() == [[True, False], [False, False], [False, False]]


def test_lower_bound_of_memory_has_all_weights_and_one_activation() -> None:
    assert MappingProblem(**arrays(activation_mb=[5.0, 20.0, 1.0])).min_total_bytes == 80_000_000
    assert MappingProblem(**arrays()).min_total_bytes == 60_000_000


def test_select_slots() -> None:
    problem = MappingProblem(**arrays(activation_mb=[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    assert problem.select_slots(np.array([1])).activation_mb.tolist() == [[2.0], [4.0], [6.0]]
    swapped = problem.select_slots(np.array([1, 0]))
    assert swapped.fixed_ms.tolist() == [[0.0, 0.2], [0.1, 0.0]] and swapped.limit_mb.tolist() == [50.0, 40.0]
    restricted = problem.select_slots(np.array([1]))
    assert restricted.num_slots == 1 and restricted.latency_ms[:, 0].tolist() == [2.0, INF, 1.0]


def test_connected_needs_both_arrays_finite() -> None:
    problem = changed(MappingProblem(**arrays()), ms_per_byte=[[0.0, INF], [1e-3, 0.0]])
    assert problem.connected.tolist() == [[True, False], [True, True]]
