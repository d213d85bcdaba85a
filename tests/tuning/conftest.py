"""Searches of tests end soon: what they find is looked at, and not how fast it is."""

from __future__ import annotations

import pytest

from sparseflow.tuning.measure import evaluator
from sparseflow.tuning.search import rerank


@pytest.fixture(autouse=True)
def short_finals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rerank, "_TURN_S", 0.0)
    monkeypatch.setattr(rerank, "_NUM_TURNS", 1)
    monkeypatch.setattr(evaluator, "_THOROUGH_PROCESSES", 1)
