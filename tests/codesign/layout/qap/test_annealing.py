"""Annealing judges swaps rightly, cools as it should and keeps the best it saw."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba", reason="annealing needs numba")

from sparseflow.codesign.layout.qap.kernels.annealing import cpu
from sparseflow.codesign.layout.qap.problem import cost
from sparseflow.codesign.layout.qap.search import COLDEST, WARMEST, Annealing
from sparseflow.codesign.layout.qap.terms import Terms
from tests.codesign.layout.qap.problems import KINDS, chain, random_problem


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("floats", [False, True])
def test_a_change_is_what_a_swap_changes(kind: str, floats: bool) -> None:
    flow, distance = random_problem(kind, 7, floats=floats)
    terms = Terms.of(flow, distance)
    a, b, _ = terms.working()
    here = terms.inside(np.random.default_rng(0).permutation(7))
    ordered = terms.ordered(b, here)
    before = cost(flow, distance, terms.outside(here))
    for r, s in ((0, 1), (2, 6), (5, 3), (4, 4)):
        swapped = here.copy()
        swapped[[r, s]] = swapped[[s, r]]
        after = cost(flow, distance, terms.outside(swapped))
        change: Any = cpu.change_of(a, ordered, r, s)
        assert change / terms.scale == pytest.approx(after - before, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_the_walk_keeps_its_books(kind: str) -> None:
    flow, distance = random_problem(kind, 9)
    terms = Terms.of(flow, distance)
    a, b, _ = terms.working()
    start = terms.inside(np.arange(9))
    here, best, ordered = start.copy(), start.copy(), terms.ordered(b, start)
    worth, counts = np.zeros(2), np.array([0, 0, 0, 1])
    heat = np.array([5000.0, 5000.0, 1e-6])
    warmth = 5000.0
    for trials in (1, 100, 33):
        cpu.walk(a, ordered, here, best, worth, heat, counts, terms.movers, trials, 7)
        for _ in range(trials):
            warmth = warmth / (1.0 + 1e-6 * warmth)
    before = cost(flow, distance, terms.outside(start))
    for permutation, change in ((here, worth[cpu.HERE]), (best, worth[cpu.BEST])):
        assert cost(flow, distance, terms.outside(permutation)) - before == change / terms.scale
    np.testing.assert_array_equal(ordered, terms.ordered(b, here))
    assert heat[cpu.WARMTH] == pytest.approx(warmth)
    assert counts[cpu.TRIED] == 134 == (134 // terms.swaps) * terms.swaps + 134 % terms.swaps
    # All swaps in turn, and only those that can change something.
    pairs = [(r, s) for r in range(min(terms.movers, 8)) for s in range(r + 1, 9)]
    assert (counts[cpu.FIRST], counts[cpu.SECOND]) == pairs[134 % len(pairs)]
    assert len(pairs) == terms.swaps


def test_it_cools_from_the_warmest_to_the_coldest() -> None:
    flow, distance = random_problem("symmetric", 12)
    search = Annealing(Terms.of(flow, distance))
    a, b, _ = search._working
    trials = 5000
    first, at_best, cooling = search._heat(a, np.ascontiguousarray(b), trials, 3)
    assert first == at_best
    last = first
    for _ in range(trials):
        last = last / (1.0 + cooling * last)
    assert last / first == pytest.approx(COLDEST / WARMEST, rel=1e-3)


def test_a_frozen_walk_goes_on_where_the_best_was_found() -> None:
    flow, distance, _ = chain(6)
    terms = Terms.of(flow, distance)
    a, b, _ = terms.working()
    # The chain in its order: no swap is taken at so low a temperature.
    here = terms.inside(np.argsort(_walk(flow)))
    heat, counts = np.array([1e-6, 0.5, 1e-9]), np.array([0, 0, 0, 1])
    cpu.walk(a, terms.ordered(b, here), here, here.copy(), np.zeros(2), heat, counts, 6, terms.swaps, 1)
    assert heat[cpu.WARMTH] == 0.5 and heat[cpu.COOLING] == 0.0


def _walk(flow: np.ndarray) -> list[int]:
    """The things of a chain, from one end to the other."""
    found = [int(np.flatnonzero(flow.sum(0) == 1)[0])]
    while len(found) < len(flow):
        found.append(next(int(k) for k in np.flatnonzero(flow[found[-1]]) if int(k) not in found))
    return found
