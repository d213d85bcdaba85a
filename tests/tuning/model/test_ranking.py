"""Ranking metrics against hand-computed values and full enumeration, and their means over tasks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseflow.errors import InputError
from sparseflow.tuning.model import ranking
from sparseflow.tuning.model.dataset import CellLimits
from sparseflow.tuning.model.net.network import AutoSparseNet
from sparseflow.tuning.model.ranking import (
    evaluate_ranking,
    make_network_scorer,
    summarize_scores,
    top_k_score,
)
from sparseflow.tuning.schedule.operators import OPERATORS
from sparseflow.tuning.schedule.schedule import Schedule
from tests.tuning.synthetic_labels import NO_PATTERN, SMALL, MadeUp, made_up, score_schedules

LATENCY = [4.0, 1.0, 2.0, 8.0]


def test_top_k_score_is_the_relative_speed_of_the_best_of_k() -> None:
    scores = [9.0, 1.0, 3.0, 4.0]  # ranks 4, 8, 2, 1 ms
    score = [ranking.top_k_score(scores, LATENCY, k) for k in (1, 2, 3, 4, 5)]
    assert score == pytest.approx([1 / 4, 1 / 4, 1 / 2, 1.0, 1.0])


def test_top_k_score_with_ties_is_the_mean_over_orders() -> None:
    scores = [5.0, 0.0, 0.0, 0.0]
    # 4 ms is always selected, and one of 1, 2 and 8 ms.
    assert ranking.top_k_score(scores, LATENCY, 2) == pytest.approx((1.0 + 1 / 2 + 1 / 4) / 3)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from([1.0, 1.5, 2.0, 7.0])), min_size=1, max_size=6),
    st.integers(1, 7),
)
def test_top_k_score_matches_enumeration_of_tie_orders(pool: list[tuple[int, float]], k: int) -> None:
    best_of_orders = []
    for order in itertools.permutations(pool):
        ranked = sorted(order, key=lambda candidate: -candidate[0])[:k]  # stable: ties stay in this order
        best_of_orders.append(min(latency for _, latency in ranked))
    best = min(latency for _, latency in pool)
    expected = np.mean([best / latency for latency in best_of_orders])
    score = ranking.top_k_score([score for score, _ in pool], [latency for _, latency in pool], k)
    assert score == pytest.approx(expected)


def test_random_top_k_score_is_the_mean_over_subsets() -> None:
    for k in (1, 2, 3):
        subsets = [1.0 / min(subset) for subset in itertools.combinations(LATENCY, k)]
        assert ranking.random_top_k_score(LATENCY, k) == pytest.approx(np.mean(subsets))


def test_random_top_k_score_of_a_large_pool_matches_sampling() -> None:
    random = np.random.default_rng(0)
    latency = random.uniform(1.0, 100.0, 20_000)
    sampled = [latency.min() / random.choice(latency, 20, replace=False).min() for _ in range(2000)]
    assert ranking.random_top_k_score(latency, 20) == pytest.approx(np.mean(sampled), abs=0.02)


def test_pair_accuracy_counts_ties_half() -> None:
    assert ranking.pair_accuracy([1, 4, 3, 0], LATENCY) == 1.0
    assert ranking.pair_accuracy([4, 1, 2, 8], LATENCY) == 0.0
    assert ranking.pair_accuracy([0, 0, 0, 0], LATENCY) == 0.5
    # Pairs (1, 2), (1, 4), (1, 8), (2, 4), (2, 8), (4, 8): correct, correct, tied, wrong, wrong, wrong.
    assert ranking.pair_accuracy([1, 2, 0, 2], LATENCY) == pytest.approx(2.5 / 6)


def test_pair_accuracy_ignores_pairs_of_equal_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ranking.pair_accuracy([1.0, 2.0], [3.0, 3.0]) == 0.5
    random = np.random.default_rng(0)
    latency, scores = random.integers(1, 9, 60).astype(float), random.integers(0, 5, 60)
    pairs = [(a, b) for a in range(60) for b in range(60) if latency[a] < latency[b]]
    expected = np.mean([(scores[a] > scores[b]) + 0.5 * (scores[a] == scores[b]) for a, b in pairs])
    assert ranking.pair_accuracy(scores, latency) == pytest.approx(expected)
    monkeypatch.setattr(ranking, "_MAX_PAIRS_IN_MEMORY", 150)
    assert ranking.pair_accuracy(scores, latency) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ranking.top_k_score([1.0], [1.0, 2.0], 1), r"\[1\] and \[2\]"),
        (lambda: ranking.top_k_score([], [], 1), r"\[0\] and \[0\]"),
        (lambda: ranking.top_k_score([np.nan, 1.0], [1.0, 2.0], 1), "1 of 2 scores"),
        (lambda: ranking.top_k_score([1.0], [np.inf], 1), "above 0"),
        (lambda: ranking.top_k_score([1.0], [1.0], 0), r"`k` \(=0\)"),
        (lambda: ranking.pair_accuracy([1.0], [0.0]), "above 0"),
    ],
)
def test_metrics_with_invalid_input_raise(call, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()


def test_perfect_and_constant_scores() -> None:
    data = made_up()
    perfect = summarize_scores(evaluate_ranking(data.groups, lambda group: -group.latency))
    assert perfect["tasks"] == 6 and perfect["matrices"] == 3 and perfect["pool"] == 12
    for name in ("top1", "top5", "top20", "pair_accuracy"):
        assert perfect[name]["mean"] == perfect[name]["low"] == perfect[name]["high"] == 1.0
        assert perfect[name]["random"] < 1.0 or name == "top20"
    blind = evaluate_ranking(data.groups, lambda group: np.zeros(len(group)))
    assert all(item.top_k == item.random_top_k and item.pair_accuracy == 0.5 for item in blind)
    with pytest.raises(InputError):
        summarize_scores([])


def test_scores_belong_to_pools() -> None:
    data = made_up()
    random = np.random.default_rng(0)
    scores = {id(group): random.normal(size=len(group)) for group in data.groups}
    for item, group in zip(
        evaluate_ranking(data.groups, lambda group: scores[id(group)]), data.groups, strict=True
    ):
        assert (item.operator, item.matrix, item.family) == (
            group.task.operator, group.task.matrix, group.task.family,
        )  # fmt: skip
        assert item.top_k[5] == top_k_score(scores[id(group)], group.latency, 5) and item.pool == len(group)


@pytest.mark.parametrize("config", [SMALL, NO_PATTERN], ids=["pattern", "bare"])
def test_network_scorer_matches_score_schedules(config) -> None:
    labels, data, net = MadeUp(), made_up(), AutoSparseNet(config)
    by = make_network_scorer(net, data)
    for group in data.groups:
        task = group.task
        cells = None if task.pattern is None else data.get_cells(task.pattern, 64)
        schedules = [Schedule.parse(line) for line in labels.read_latencies(task).schedules]
        context = net.embed_task(cells, group.statistics)
        expected = score_schedules(net, schedules, OPERATORS[task.operator], task.extents(), context)
        np.testing.assert_allclose(by(group), expected, rtol=1e-4, atol=1e-5)


def test_oversized_pattern_is_coarsened(monkeypatch: pytest.MonkeyPatch) -> None:
    data, net = made_up(), AutoSparseNet(SMALL)
    limits, embed = CellLimits(data, 64), net.embed_patterns

    def full(cells):
        if len(cells[0].coords) > 0:
            raise torch.OutOfMemoryError("no memory")
        return embed(cells)

    monkeypatch.setattr(net, "embed_patterns", full)
    (group,) = (item for item in data.groups if item.task.pattern == "0" and item.task.operator == "spmv")
    scores = make_network_scorer(net, data, limits)(group)
    assert limits.limits == {"0": 0}
    monkeypatch.undo()
    task = group.task
    schedules = [Schedule.parse(line) for line in MadeUp().read_latencies(task).schedules]
    bare = score_schedules(
        net, schedules, OPERATORS["spmv"], task.extents(), net.embed_task(None, group.statistics)
    )
    np.testing.assert_allclose(scores, bare, rtol=1e-4, atol=1e-5)
