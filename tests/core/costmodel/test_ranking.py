"""Rankings judged, in numbers worked out by hand or by listing every case."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparseflow.core import metrics
from sparseflow.core.costmodel import ranking
from sparseflow.errors import InputError

LATENCY = [4.0, 1.0, 2.0, 8.0]


def test_the_fastest_among_the_first_k_counts() -> None:
    scores = [9.0, 1.0, 3.0, 4.0]  # ranks 4, 8, 2, 1 ms
    found = [ranking.top_k_score(scores, LATENCY, k) for k in (1, 2, 3, 4, 5)]
    assert found == pytest.approx([1 / 4, 1 / 4, 1 / 2, 1.0, 1.0])


def test_equal_scores_give_the_mean_over_all_orders() -> None:
    scores = [5.0, 0.0, 0.0, 0.0]
    # The 4 ms for sure, and one of 1, 2, 8 ms.
    assert ranking.top_k_score(scores, LATENCY, 2) == pytest.approx((1.0 + 1 / 2 + 1 / 4) / 3)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from([1.0, 1.5, 2.0, 7.0])), min_size=1, max_size=6),
    st.integers(1, 7),
)
def test_top_k_is_the_expectation_over_random_orders_of_ties(pool: list[tuple[int, float]], k: int) -> None:
    seen = []
    for order in itertools.permutations(pool):
        ranked = sorted(order, key=lambda one: -one[0])[:k]  # stable: ties stay in this order
        seen.append(min(latency for _, latency in ranked))
    best = min(latency for _, latency in pool)
    expected = np.mean([best / one for one in seen])
    found = ranking.top_k_score([score for score, _ in pool], [latency for _, latency in pool], k)
    assert found == pytest.approx(expected)


def test_a_random_pick_is_the_mean_over_all_subsets() -> None:
    for k in (1, 2, 3):
        subsets = [1.0 / min(some) for some in itertools.combinations(LATENCY, k)]
        assert ranking.random_top_k_score(LATENCY, k) == pytest.approx(np.mean(subsets))


def test_a_large_pool_stays_exact() -> None:
    random = np.random.default_rng(0)
    latency = random.uniform(1.0, 100.0, 20_000)
    drawn = [latency.min() / random.choice(latency, 20, replace=False).min() for _ in range(2000)]
    assert ranking.random_top_k_score(latency, 20) == pytest.approx(np.mean(drawn), abs=0.02)


def test_pairs_in_the_right_order_are_counted_and_equal_scores_count_half() -> None:
    assert ranking.pair_accuracy([1, 4, 3, 0], LATENCY) == 1.0
    assert ranking.pair_accuracy([4, 1, 2, 8], LATENCY) == 0.0
    assert ranking.pair_accuracy([0, 0, 0, 0], LATENCY) == 0.5
    # Pairs (1, 2), (1, 4), (1, 8), (2, 4), (2, 8), (4, 8): right, right, equal, wrong, wrong, wrong.
    assert ranking.pair_accuracy([1, 2, 0, 2], LATENCY) == pytest.approx(2.5 / 6)


def test_pairs_of_equal_latency_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ranking.pair_accuracy([1.0, 2.0], [3.0, 3.0]) == 0.5
    random = np.random.default_rng(0)
    latency, scores = random.integers(1, 9, 60).astype(float), random.integers(0, 5, 60)
    pairs = [(a, b) for a in range(60) for b in range(60) if latency[a] < latency[b]]
    expected = np.mean([(scores[a] > scores[b]) + 0.5 * (scores[a] == scores[b]) for a, b in pairs])
    assert ranking.pair_accuracy(scores, latency) == pytest.approx(expected)
    monkeypatch.setattr(ranking, "_BLOCK", 150)
    assert ranking.pair_accuracy(scores, latency) == pytest.approx(expected)


def test_an_interval_holds_the_mean_and_widens_with_fewer_groups() -> None:
    values = np.random.default_rng(0).normal(0.5, 0.1, 64)
    low, high = metrics.bootstrap_mean(values)
    assert low < values.mean() < high
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 8, rel=0.1)
    wide = metrics.bootstrap_mean(values, [at // 8 for at in range(64)])
    assert wide != (low, high)
    assert metrics.bootstrap_mean(values, seed=1) != (low, high) == metrics.bootstrap_mean(values)


def test_values_of_one_group_are_drawn_together() -> None:
    low, high = metrics.bootstrap_mean([0.0, 0.0, 1.0, 1.0], list("aabb"))
    assert (low, high) == (0.0, 1.0)
    assert metrics.bootstrap_mean([0.2, 0.4], ["a", "a"]) == pytest.approx((0.3, 0.3))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ranking.top_k_score([1.0], [1.0, 2.0], 1), "two lists"),
        (lambda: ranking.top_k_score([], [], 1), "not empty"),
        (lambda: ranking.top_k_score([np.nan, 1.0], [1.0, 2.0], 1), "1 of 2 scores are not a number"),
        (lambda: ranking.top_k_score([1.0], [np.inf], 1), "leave out what did not run"),
        (lambda: ranking.top_k_score([1.0], [1.0], 0), r"`k` \(=0\)"),
        (lambda: ranking.pair_accuracy([1.0], [0.0]), "above 0"),
        (lambda: metrics.bootstrap_mean([]), "at least one"),
        (lambda: metrics.bootstrap_mean([1.0], ["a", "b"]), "2 groups"),
        (lambda: metrics.bootstrap_mean([1.0], confidence=1.0), "between 0 and 1"),
    ],
)
def test_what_cannot_be_judged_is_refused(call, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()
