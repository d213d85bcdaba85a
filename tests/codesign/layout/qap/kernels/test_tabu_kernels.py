"""Tabu kernels against their reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("numba", reason="tabu search on a core needs numba")
pytest.importorskip("triton", reason="the kernel of tabu search needs triton")

from sparseflow.codesign.layout.qap.assignment import draw_start
from sparseflow.codesign.layout.qap.kernels.tabu import cpu, reference, triton
from sparseflow.codesign.layout.qap.kernels.tabu.rule import ALWAYS, TabuRule, init_tabu
from sparseflow.codesign.layout.qap.problem import compute_cost
from sparseflow.codesign.layout.qap.terms import QapTerms
from tests.codesign.layout.qap.problems import KINDS, random_problem

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

pytestmark = [
    # Triton's interpreter turns its one-element arrays into loop bounds this way; numpy below 2.4 allows it.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]


def given_to(
    terms: QapTerms, dtype: torch.dtype, restarts: int, device: str, rule: TabuRule
) -> dict[str, Any]:
    """What both kinds of `Restarts` are made of."""
    beginnings = [draw_start(0, restart, terms.n) for restart in range(restarts)]
    return {
        "a": torch.tensor(terms.a).to(dtype).to(device),
        "b": torch.tensor(terms.b).to(dtype).to(device),
        "num_movers": terms.num_movers,
        "big_m": terms.big_m if dtype.is_floating_point else int(terms.big_m),
        "start": torch.tensor(terms.to_rows(np.stack([p for p, _ in beginnings]))).to(device),
        "until": torch.tensor(init_tabu(terms.n, terms.num_movers)).to(device),
        "seed": torch.tensor([own_value for _, own_value in beginnings]).to(device),
        "rule": rule,
    }


def on_core(
    terms: QapTerms, created: dict[str, Any], restart: int, steps: tuple[int, ...], dtype: Any
) -> Any:
    """Where each is, the best permutation and the worth of both, after so many moves at a time."""
    rule = created["rule"]
    a, b = terms.a.astype(dtype), terms.b.astype(dtype)
    current = created["start"][restart].cpu().numpy().copy()
    best, objective, until = current.copy(), np.zeros(2, dtype), init_tabu(terms.n, terms.num_movers)
    ordered, completed = terms.order_distances(b, current), 0
    delta, gate_value = np.empty((terms.n, terms.n), dtype), np.empty((terms.n, terms.n), np.int64)
    cpu.initialize(a, ordered, current, until, delta, gate_value)
    for moves in steps:
        cpu.advance(
            a,
            ordered,
            current,
            best,
            objective,
            until,
            delta,
            gate_value,
            terms.num_movers,
            completed + 1,
            moves,
            rule.low,
            rule.span,
            rule.patience,
            dtype(terms.big_m),
            int(created["seed"][restart]),
        )
        completed += moves
    return current, best, objective


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [2, 3, 9, 18])
@pytest.mark.parametrize("dtype", [np.int64, np.float64])
def test_cpu_equals_reference(kind: str, n: int, dtype: Any) -> None:
    terms = QapTerms.from_matrices(*random_problem(kind, n))
    rule = TabuRule(low=max(1, n // 2), span=n, patience=20)
    created = given_to(terms, torch.float64, 2, "cpu", rule)
    state = reference.ReferenceRestarts(**created)
    state.advance(60)
    for restart in range(2):
        current, best, _ = on_core(terms, created, restart, (1, 42, 17), dtype)
        np.testing.assert_array_equal(current, state.current()[restart])
        np.testing.assert_array_equal(best, state.best()[restart])


# Only here: Numba compiles no function that calls a numpy whose `empty` is poisoned.
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize(
    ("kind", "n", "dtype"),
    [
        ("symmetric", 2, torch.int32),
        ("asymmetric", 3, torch.int64),
        ("asymmetric flow", 11, torch.int32),
        ("asymmetric", 16, torch.float64),
        ("dummies", 9, torch.int32),
        ("stack", 7, torch.float64),
        ("symmetric", 33, torch.int32),
    ],
)
def test_triton_equals_reference(kind: str, n: int, dtype: torch.dtype) -> None:
    terms = QapTerms.from_matrices(*random_problem(kind, n))
    # So short a patience that swaps which waited for long are made, too.
    rule = TabuRule(low=max(1, n // 2), span=n, patience=6)
    created = given_to(terms, dtype, 2, DEVICE, rule)
    expected, result = (
        reference.ReferenceRestarts(**created),
        triton.TritonRestarts(symmetric=terms.num_symmetric, **created),
    )
    expected.advance(12)
    result.advance(5)
    result.advance(7)
    torch.testing.assert_close(result.current(), expected.current(), rtol=0, atol=0)
    torch.testing.assert_close(result.best(), expected.best(), rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("floats", [False, True])
def test_tracked_costs_match_permutations(kind: str, floats: bool) -> None:
    flow, distance = random_problem(kind, 10, floats=floats)
    terms = QapTerms.from_matrices(flow, distance)
    created = given_to(terms, torch.float64, 1, "cpu", TabuRule.for_size(10))
    current, best, objective = on_core(terms, created, 0, (200,), np.float64)
    before = compute_cost(flow, distance, terms.from_rows(created["start"][0].numpy()))
    for permutation, change in ((current, objective[0]), (best, objective[1])):
        after = compute_cost(flow, distance, terms.from_rows(permutation))
        assert after - before == pytest.approx(change / terms.scale, rel=1e-9, abs=1e-9)
    assert objective[1] <= min(0.0, objective[0])


def test_tabu_swaps_are_not_made() -> None:
    # Three things: after two moves all three pairs are tabu for long, and nothing moves any more.
    terms = QapTerms.from_matrices(
        np.array([[0, 1, 2], [1, 0, 4], [2, 4, 0]]), np.array([[0, 3, 5], [3, 0, 9], [5, 9, 0]])
    )
    rule = TabuRule(low=1000, span=1, patience=10_000)
    created = given_to(terms, torch.float64, 1, "cpu", rule)
    settled, later = reference.ReferenceRestarts(**created), reference.ReferenceRestarts(**created)
    settled.advance(40)
    later.advance(41)
    torch.testing.assert_close(settled.current(), later.current())
    current, _, _ = on_core(terms, created, 0, (41,), np.float64)
    np.testing.assert_array_equal(current, later.current()[0])
    result = triton.TritonRestarts(symmetric=1, **given_to(terms, torch.int32, 1, DEVICE, rule))
    result.advance(41)
    torch.testing.assert_close(result.current().cpu(), later.current())


def test_hash_is_uniform() -> None:
    sampled = torch.stack(
        [reference.hash_counter(counter, torch.tensor([1, 2, 2**32 - 1])) for counter in range(2000)]
    )
    assert sampled.min() >= 0 and sampled.max() < 2**32
    shares = torch.bincount((sampled.flatten() * 8) >> 32, minlength=8) / sampled.numel()
    assert shares.min() > 0.1 and shares.max() < 0.15
    assert len(sampled.unique()) == sampled.numel()


def test_initial_tabu_times() -> None:
    until = init_tabu(5, 3)
    assert (until[3:] == ALWAYS).all() and until[:3].max() < 0
    assert len(np.unique(until[:3])) == 15
