"""Tabu search three times over: the reference, on one core, and in Triton's interpreter or on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("numba", reason="tabu search on a core needs numba")
pytest.importorskip("triton", reason="the kernel of tabu search needs triton")

from sparseflow.codesign.layout.qap.assignment import beginning
from sparseflow.codesign.layout.qap.kernels.tabu import cpu, reference, triton
from sparseflow.codesign.layout.qap.kernels.tabu.rule import ALWAYS, Rule, untouched
from sparseflow.codesign.layout.qap.problem import cost
from sparseflow.codesign.layout.qap.terms import Terms
from tests.codesign.layout.qap.problems import KINDS, random_problem

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

pytestmark = [
    # Triton's interpreter turns its one-element arrays into loop bounds this way; numpy below 2.4 allows it.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]


def given_to(terms: Terms, dtype: torch.dtype, restarts: int, device: str, rule: Rule) -> dict[str, Any]:
    """What both kinds of `Restarts` are made of."""
    beginnings = [beginning(0, restart, terms.n) for restart in range(restarts)]
    return {
        "a": torch.tensor(terms.a).to(dtype).to(device),
        "b": torch.tensor(terms.b).to(dtype).to(device),
        "movers": terms.movers,
        "wall": terms.wall if dtype.is_floating_point else int(terms.wall),
        "start": torch.tensor(terms.inside(np.stack([p for p, _ in beginnings]))).to(device),
        "until": torch.tensor(untouched(terms.n, terms.movers)).to(device),
        "seed": torch.tensor([own for _, own in beginnings]).to(device),
        "rule": rule,
    }


def on_core(terms: Terms, made: dict[str, Any], restart: int, steps: tuple[int, ...], dtype: Any) -> Any:
    """Where each is, the best permutation and the worth of both, after so many moves at a time."""
    rule = made["rule"]
    a, b = terms.a.astype(dtype), terms.b.astype(dtype)
    here = made["start"][restart].cpu().numpy().copy()
    best, worth, until = here.copy(), np.zeros(2, dtype), untouched(terms.n, terms.movers)
    ordered, done = terms.ordered(b, here), 0
    delta, gate = np.empty((terms.n, terms.n), dtype), np.empty((terms.n, terms.n), np.int64)
    cpu.fill(a, ordered, here, until, delta, gate)
    for moves in steps:
        cpu.advance(
            a, ordered, here, best, worth, until, delta, gate, terms.movers, done + 1, moves, rule.low,
            rule.span, rule.patience, dtype(terms.wall), int(made["seed"][restart]),
        )  # fmt: skip
        done += moves
    return here, best, worth


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [2, 3, 9, 18])
@pytest.mark.parametrize("dtype", [np.int64, np.float64])
def test_a_core_makes_the_moves_of_the_reference(kind: str, n: int, dtype: Any) -> None:
    terms = Terms.of(*random_problem(kind, n))
    rule = Rule(low=max(1, n // 2), span=n, patience=20)
    made = given_to(terms, torch.float64, 2, "cpu", rule)
    state = reference.Restarts(**made)
    state.advance(60)
    for restart in range(2):
        here, best, _ = on_core(terms, made, restart, (1, 42, 17), dtype)
        np.testing.assert_array_equal(here, state.here()[restart])
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
def test_triton_makes_the_moves_of_the_reference(kind: str, n: int, dtype: torch.dtype) -> None:
    terms = Terms.of(*random_problem(kind, n))
    # So short a patience that swaps which waited for long are made, too.
    rule = Rule(low=max(1, n // 2), span=n, patience=6)
    made = given_to(terms, dtype, 2, DEVICE, rule)
    expected, found = reference.Restarts(**made), triton.Restarts(symmetric=terms.symmetric, **made)
    expected.advance(12)
    found.advance(5)
    found.advance(7)
    torch.testing.assert_close(found.here(), expected.here(), rtol=0, atol=0)
    torch.testing.assert_close(found.best(), expected.best(), rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("floats", [False, True])
def test_what_is_added_up_is_what_the_permutations_cost(kind: str, floats: bool) -> None:
    flow, distance = random_problem(kind, 10, floats=floats)
    terms = Terms.of(flow, distance)
    made = given_to(terms, torch.float64, 1, "cpu", Rule.of(10))
    here, best, worth = on_core(terms, made, 0, (200,), np.float64)
    before = cost(flow, distance, terms.outside(made["start"][0].numpy()))
    for permutation, change in ((here, worth[0]), (best, worth[1])):
        after = cost(flow, distance, terms.outside(permutation))
        assert after - before == pytest.approx(change / terms.scale, rel=1e-9, abs=1e-9)
    assert worth[1] <= min(0.0, worth[0])


def test_what_is_tabu_is_left_alone() -> None:
    # Three things: after two moves all three pairs are tabu for long, and nothing moves any more.
    terms = Terms.of(np.array([[0, 1, 2], [1, 0, 4], [2, 4, 0]]), np.array([[0, 3, 5], [3, 0, 9], [5, 9, 0]]))
    rule = Rule(low=1000, span=1, patience=10_000)
    made = given_to(terms, torch.float64, 1, "cpu", rule)
    settled, later = reference.Restarts(**made), reference.Restarts(**made)
    settled.advance(40)
    later.advance(41)
    torch.testing.assert_close(settled.here(), later.here())
    here, _, _ = on_core(terms, made, 0, (41,), np.float64)
    np.testing.assert_array_equal(here, later.here()[0])
    found = triton.Restarts(symmetric=1, **given_to(terms, torch.int32, 1, DEVICE, rule))
    found.advance(41)
    torch.testing.assert_close(found.here().cpu(), later.here())


def test_draws_are_spread_evenly() -> None:
    drawn = torch.stack([reference.mix(counter, torch.tensor([1, 2, 2**32 - 1])) for counter in range(2000)])
    assert drawn.min() >= 0 and drawn.max() < 2**32
    shares = torch.bincount((drawn.flatten() * 8) >> 32, minlength=8) / drawn.numel()
    assert shares.min() > 0.1 and shares.max() < 0.15
    assert len(drawn.unique()) == drawn.numel()


def test_dummies_are_always_tabu_and_movers_never_at_first() -> None:
    until = untouched(5, 3)
    assert (until[3:] == ALWAYS).all() and until[:3].max() < 0
    assert len(np.unique(until[:3])) == 15
