"""Fixtures of the tuning tests: one cache of compiled kernels, and final measurements that end soon."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sparseflow.tuning.search import rerank


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of compiled kernels; every source is compiled once in a test run."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # shared by all workers
    return base / "kernels" / "tuning"


@pytest.fixture(autouse=True)
def default_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEFLOW_CACHE", str(cache.parent))


@pytest.fixture(autouse=True)
def short_finals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rerank, "_TURN_S", 0.0)
    monkeypatch.setattr(rerank, "_NUM_TURNS", 1)
    monkeypatch.setattr(rerank, "_NUM_PROCESSES", 1)
