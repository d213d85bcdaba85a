"""Searches of tests end soon: what they find is looked at, and not how fast it is."""

from __future__ import annotations

import pytest

from sparseflow.tuning import evaluate, finals


@pytest.fixture(autouse=True)
def short_finals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finals, "_TURN_S", 0.0)
    monkeypatch.setattr(finals, "_TURNS", 1)
    monkeypatch.setattr(evaluate, "_PROCESSES", 1)
