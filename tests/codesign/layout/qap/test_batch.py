"""Tests of `codesign.layout.qap.batch`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sparseflow.codesign.layout.qap.assignment import assign
from sparseflow.codesign.layout.qap.batch import assign_batch
from sparseflow.codesign.layout.qap.problem import compute_cost
from sparseflow.errors import DeviceError, InputError
from tests.codesign.layout.qap.problems import KINDS, chain, random_problem

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_batch_equals_single_core(kind: str) -> None:
    flow, distance = random_problem(kind, 8)
    core = assign(flow, distance, method="tabu", restarts=3, iterations=60, seed=5)
    batch = assign_batch(flow, distance, restarts=3, iterations=60, seed=5, device="cpu")
    np.testing.assert_array_equal(batch.permutations, core.permutations)
    assert (batch.costs, batch.cost, batch.lower_bound) == (core.costs, core.cost, core.lower_bound)
    assert batch.evaluations == core.evaluations and batch.finished


@pytest.mark.parametrize("floats", [False, True])
def test_triton_equals_single_core(floats: bool) -> None:
    pytest.importorskip("triton", reason="the kernel of tabu search needs triton")
    flow, distance = random_problem("dummies", 7, floats=floats)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    result = assign_batch(
        flow, distance, restarts=2, iterations=15, device=device, backend="triton", num_warps=1
    )
    core = assign(flow, distance, method="tabu", restarts=2, iterations=15)
    assert list(result.costs) == [compute_cost(flow, distance, p) for p in result.permutations]
    if not floats:
        np.testing.assert_array_equal(result.permutations, core.permutations)


@pytest.mark.gpu
def test_many_gpu_restarts_find_optimum() -> None:
    flow, distance, best = chain(24)
    result = assign_batch(flow, distance, restarts=512, iterations=2000)
    assert result.cost == best
    core = assign(flow, distance, method="tabu", restarts=3, iterations=2000)
    np.testing.assert_array_equal(result.permutations[:3], core.permutations)


def test_batch_of_floats() -> None:
    flow, distance, best = chain(8)
    result = assign_batch(flow * 0.1, distance / 3.0, restarts=4, iterations=80, device="cpu")
    assert result.cost == pytest.approx(best * 0.1 / 3.0)


def test_batch_of_huge_integers_is_exact() -> None:
    flow, distance, best = chain(6)
    result = assign_batch(flow * (2**45 + 1), distance, restarts=4, iterations=60, device="cpu")
    assert result.cost == best * (2**45 + 1)


def test_batch_within_budget_returns_best_so_far() -> None:
    flow, distance = random_problem("symmetric", 10)
    result = assign_batch(flow, distance, restarts=200, iterations=2**29, budget_s=1e-3, device="cpu")
    assert not result.finished and len(result.costs) == 200
    assert result.cost == compute_cost(flow, distance, result.permutation)


def test_batch_is_no_worse_than_start() -> None:
    flow, distance = random_problem("asymmetric", 6)
    start = [5, 4, 3, 2, 1, 0]
    result = assign_batch(flow, distance, restarts=2, iterations=1, start=start, device="cpu")
    assert result.costs[0] <= compute_cost(flow, distance, start)


def test_batch_without_flow() -> None:
    result = assign_batch([[3]], [[5]], restarts=2, device="cpu")
    assert (result.cost, result.gap, result.evaluations) == (15, 0.0, 0)
    idle = assign_batch(np.zeros((3, 3)), np.ones((3, 3)), restarts=2, start=[2, 0, 1], device="cpu")
    assert idle.permutations[0].tolist() == [2, 0, 1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backend": "numba"}, r"`backend` \(='numba'\)"),
        ({"device": "abacus"}, r"`device` \(='abacus'\)"),
        ({"restarts": 0}, r"`restarts` \(=0\)"),
        ({"iterations": -1}, r"`iterations` \(=-1\)"),
        ({"start": [1, 1, 0]}, r"a permutation of 0 … 2"),
    ],
)
def test_invalid_arguments_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        assign_batch(np.eye(3), np.eye(3), **{"device": "cpu", **settings})


def test_triton_with_too_many_sites_is_refused() -> None:
    pytest.importorskip("triton", reason="the kernel of tabu search needs triton")
    flow, distance, _ = chain(129)
    with pytest.raises(InputError, match="128"):
        assign_batch(flow, distance, device="cpu", backend="triton")


def test_missing_gpu_index_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(DeviceError, match="'cuda:2'"):
        assign_batch(np.eye(3), np.eye(3), device="cuda:2")


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a CUDA device here")
def test_missing_cuda_names_alternatives() -> None:
    with pytest.raises(DeviceError, match="`device='cpu'`"):
        assign_batch(np.eye(3), np.eye(3))
