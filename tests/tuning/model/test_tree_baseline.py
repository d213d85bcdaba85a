"""The baseline of gradient boosting on schedules."""

from __future__ import annotations

import numpy as np
import pytest

from sparseflow.core.costmodel import trees
from sparseflow.errors import InputError
from sparseflow.tuning.model import tree_baseline
from sparseflow.tuning.model.net.tokenizer import PARTS, PRIMITIVES, ROLES, ScheduleTokenizer
from sparseflow.tuning.model.ranking import evaluate_ranking, summarize_scores
from sparseflow.tuning.model.tree_baseline import TreeBaseline
from sparseflow.tuning.schedule.operators import SPMM, SPMV
from sparseflow.tuning.schedule.schedule import Schedule
from tests.tuning.random_schedules import CSR_LINE, SPMM_LINE, SPMV_LINE
from tests.tuning.synthetic_labels import made_up


def test_vector_has_all_token_values() -> None:
    encoder = ScheduleTokenizer()
    ids = encoder.encode([Schedule.parse(line) for line in (CSR_LINE, SPMM_LINE)], SPMM)
    slots = np.unique(tree_baseline._compute_slots(encoder.table)[1:])
    vectors = tree_baseline._build_vectors(ids, encoder.table, slots).reshape(2, len(slots), 5)

    def parent(primitive: str, role: str, part: str) -> list[list[float]]:
        number = (PRIMITIVES.index(primitive) * len(ROLES) + ROLES.index(role)) * len(PARTS) + PARTS.index(
            part
        )
        return vectors[:, int(np.searchsorted(slots, number))].tolist()

    csr, blocked = parent("parallel", "rows", "whole")
    assert csr == [0.0, 0.0, 0.0, 1.0, 4.0] and blocked == [-1.0] * 5
    csr, blocked = parent("fmode", "rows", "inner")
    assert csr == [-1.0] * 5 and blocked == [4 / 16, 0.0, 2.0, 2.0, 3.0]
    csr, blocked = parent("run", "none", "none")
    assert csr == [1 / 16, 4 / 16, 0.0, 0.0, 0.0] and blocked == [7 / 16, 9 / 16, 0.0, 0.0, 0.0]


def test_unknown_slots_are_ignored() -> None:
    encoder = ScheduleTokenizer()
    ids = encoder.encode([Schedule.parse(CSR_LINE)], SPMM)
    slots = np.unique(tree_baseline._compute_slots(encoder.table)[1:])
    other = encoder.encode([Schedule.parse(SPMV_LINE)], SPMV)
    vectors = tree_baseline._build_vectors(other, encoder.table, slots)
    assert vectors.shape == tree_baseline._build_vectors(ids, encoder.table, slots).shape
    assert (vectors >= -1.0).all() and (vectors > -1.0).any()


def test_fit_generalizes_to_other_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(trees._NUM_ROUNDS, trees.BOOSTED, 60)
    data = made_up(operators=["spmv"], matrices=3, schedules=60)
    fitted = TreeBaseline.fit(data.groups[:2], data.encoder.table)
    scores = evaluate_ranking(data.groups[2:], lambda group: fitted.score(group, data.encoder.table))
    summary = summarize_scores(scores)
    assert summary["pair_accuracy"]["mean"] > 0.8
    assert summary["top1"]["mean"] > summary["top1"]["random"]


def test_fit_without_groups_raises() -> None:
    with pytest.raises(InputError):
        TreeBaseline.fit([], made_up(matrices=1).encoder.table)
