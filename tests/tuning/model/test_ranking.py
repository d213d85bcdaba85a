"""Rankings judged over tasks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparseflow.core.costmodel.ranking import top_k_score
from sparseflow.errors import InputError
from sparseflow.tuning.model.dataset import CellLimits
from sparseflow.tuning.model.net.network import AutoSparseNet
from sparseflow.tuning.model.net.scoring import score_schedules
from sparseflow.tuning.model.ranking import evaluate_ranking, make_network_scorer, summarize_scores
from sparseflow.tuning.schedule.operators import OPERATORS
from sparseflow.tuning.schedule.schedule import Schedule
from tests.tuning.synthetic_labels import NO_PATTERN, SMALL, MadeUp, made_up


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
