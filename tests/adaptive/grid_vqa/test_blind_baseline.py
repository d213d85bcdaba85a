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
    found = measure_blind_baseline(DATA, count=20_000)
    ways: dict[Kind, int] = {"at": 6, "count": 4, "where": 3, "left": 2, "small": 4}
    for kind, count in ways.items():
        # Four standard deviations of some thousands of guesses.
        assert found.by_kind[kind] == pytest.approx(1 / count, abs=0.035), kind
    assert found.by_kind["list"] < 0.01
    assert found.accuracy == pytest.approx(found.chance, abs=0.02)
    shares = DATA.config.test_shares
    assert found.chance == pytest.approx(sum(shares[kind] / count for kind, count in ways.items()), abs=0.01)


def test_a_question_that_tells_its_answer_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def telling(*args: Any) -> QuestionBatch:
        drawn = sample_questions(*args)
        at = drawn.kinds == KINDS.index("at")
        drawn.slots[at, 0] = drawn.text[np.arange(len(drawn)), drawn.prompts][at]
        return drawn

    monkeypatch.setattr(report, "sample_questions", telling)
    monkeypatch.setattr("sparseflow.adaptive.grid_vqa.dataset.sample_questions", telling)
    found = measure_blind_baseline(VqaDataset(quick(), bank=bank()), count=2000)
    assert found.by_kind["at"] == 1.0 and found.accuracy > found.chance + 0.1
