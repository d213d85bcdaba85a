"""Annealing search and its kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba", reason="annealing needs numba")

from sparseflow.codesign.layout.qap.kernels import annealing as kernel
from sparseflow.codesign.layout.qap.problem import compute_cost
from sparseflow.codesign.layout.qap.search import FINAL_TEMPERATURE, INITIAL_TEMPERATURE, AnnealingSearch
from sparseflow.codesign.layout.qap.terms import QapTerms
from tests.codesign.layout.qap.problems import KINDS, chain, random_problem


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("floats", [False, True])
def test_swap_change_matches_cost_difference(kind: str, floats: bool) -> None:
    flow, distance = random_problem(kind, 7, floats=floats)
    terms = QapTerms.from_matrices(flow, distance)
    a, b, _ = terms.to_working_dtype()
    current = terms.to_rows(np.random.default_rng(0).permutation(7))
    ordered = terms.order_distances(b, current)
    before = compute_cost(flow, distance, terms.from_rows(current))
    for r, s in ((0, 1), (2, 6), (5, 3), (4, 4)):
        swapped = current.copy()
        swapped[[r, s]] = swapped[[s, r]]
        after = compute_cost(flow, distance, terms.from_rows(swapped))
        change: Any = kernel.swap_change(a, ordered, r, s)
        assert change / terms.scale == pytest.approx(after - before, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_annealing_tracks_cost_and_best(kind: str) -> None:
    flow, distance = random_problem(kind, 9)
    terms = QapTerms.from_matrices(flow, distance)
    a, b, _ = terms.to_working_dtype()
    start = terms.to_rows(np.arange(9))
    current, best, ordered = start.copy(), start.copy(), terms.order_distances(b, start)
    objective, counts = np.zeros(2), np.array([0, 0, 0, 1])
    heat = np.array([5000.0, 5000.0, 1e-6])
    temperature = 5000.0
    for trials in (1, 100, 33):
        kernel.anneal(a, ordered, current, best, objective, heat, counts, terms.num_movers, trials, 7)
        for _ in range(trials):
            temperature = temperature / (1.0 + 1e-6 * temperature)
    before = compute_cost(flow, distance, terms.from_rows(start))
    for permutation, change in ((current, objective[kernel.CURRENT]), (best, objective[kernel.BEST])):
        assert compute_cost(flow, distance, terms.from_rows(permutation)) - before == change / terms.scale
    np.testing.assert_array_equal(ordered, terms.order_distances(b, current))
    assert heat[kernel.TEMPERATURE] == pytest.approx(temperature)
    assert (
        counts[kernel.NUM_TRIALS] == 134 == (134 // terms.num_swaps) * terms.num_swaps + 134 % terms.num_swaps
    )
    # All swaps in turn, and only those that can change something.
    pairs = [(r, s) for r in range(min(terms.num_movers, 8)) for s in range(r + 1, 9)]
    assert (counts[kernel.FIRST], counts[kernel.SECOND]) == pairs[134 % len(pairs)]
    assert len(pairs) == terms.num_swaps


def test_temperature_schedule() -> None:
    flow, distance = random_problem("symmetric", 12)
    search = AnnealingSearch(QapTerms.from_matrices(flow, distance))
    a, b, _ = search._working
    trials = 5000
    first, at_best, cooling = search._init_schedule(a, np.ascontiguousarray(b), trials, 3)
    assert first == at_best
    last = first
    for _ in range(trials):
        last = last / (1.0 + cooling * last)
    assert last / first == pytest.approx(FINAL_TEMPERATURE / INITIAL_TEMPERATURE, rel=1e-3)


def test_frozen_search_continues_at_best_temperature() -> None:
    flow, distance, _ = chain(6)
    terms = QapTerms.from_matrices(flow, distance)
    a, b, _ = terms.to_working_dtype()
    # The chain in its order: no swap is taken at so low a temperature.
    current = terms.to_rows(np.argsort(_anneal(flow)))
    heat, counts = np.array([1e-6, 0.5, 1e-9]), np.array([0, 0, 0, 1])
    kernel.anneal(
        a,
        terms.order_distances(b, current),
        current,
        current.copy(),
        np.zeros(2),
        heat,
        counts,
        6,
        terms.num_swaps,
        1,
    )
    assert heat[kernel.TEMPERATURE] == 0.5 and heat[kernel.COOLING] == 0.0


def _anneal(flow: np.ndarray) -> list[int]:
    """The things of a chain, from one end to the other."""
    rows = [int(np.flatnonzero(flow.sum(0) == 1)[0])]
    while len(rows) < len(flow):
        rows.append(next(int(k) for k in np.flatnonzero(flow[rows[-1]]) if int(k) not in rows))
    return rows
