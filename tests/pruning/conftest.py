"""Fixtures of the pruning tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the report page of trainings, which takes longer than the trainings."""
    monkeypatch.setattr("sparseflow.pruning.training.train.write_training_page", lambda *_, **__: None)
