"""Answers without looking are at chance, and would not be if questions told something."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sparseflow.adaptive.grid_vqa import report
from sparseflow.adaptive.grid_vqa.config import KINDS, Kind
from sparseflow.adaptive.grid_vqa.dataset import VqaDataset
from sparseflow.adaptive.grid_vqa.question_generator import QuestionBatch, sample_questions
from sparseflow.adaptive.grid_vqa.report import measure_blind_baseline
from tests.adaptive.grid_vqa.little import bank, quick

DATA = VqaDataset(quick(**{"scene.grid": 3}), bank=bank(6))


def test_without_looking_answers_are_at_chance() -> None:
    baseline = measure_blind_baseline(DATA, count=20_000)
    ways: dict[Kind, int] = {"at": 6, "count": 4, "where": 3, "left": 2, "small": 4}
    for kind, count in ways.items():
        # Four standard deviations of some thousands of guesses.
        assert baseline.by_kind[kind] == pytest.approx(1 / count, abs=0.035), kind
    assert baseline.by_kind["list"] < 0.01
    assert baseline.accuracy == pytest.approx(baseline.chance, abs=0.02)
    shares = DATA.config.test_shares
    assert baseline.chance == pytest.approx(
        sum(shares[kind] / count for kind, count in ways.items()), abs=0.01
    )


def test_a_question_that_tells_its_answer_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def telling(*args: Any) -> QuestionBatch:
        sampled = sample_questions(*args)
        index = sampled.kinds == KINDS.index("at")
        sampled.slots[index, 0] = sampled.text[np.arange(len(sampled)), sampled.prompts][index]
        return sampled

    monkeypatch.setattr(report, "sample_questions", telling)
    monkeypatch.setattr("sparseflow.adaptive.grid_vqa.dataset.sample_questions", telling)
    baseline = measure_blind_baseline(VqaDataset(quick(), bank=bank()), count=2000)
    assert baseline.by_kind["at"] == 1.0 and baseline.accuracy > baseline.chance + 0.1
