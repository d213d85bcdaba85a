"""Timing of calls at the end of a search."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from sparseflow.tuning.codegen.kernel import Kernel
from sparseflow.tuning.search import rerank


class Clock:
    """A clock that only advances while kernels compute."""

    current_s = 0.0


class Pretended:
    """A kernel with a given call time; its first calls may take longer."""

    def __init__(self, clock: Clock, seconds: float, *, slowly: int = 0) -> None:
        self.clock, self.seconds, self.slowly, self.calls = clock, seconds, slowly, 0

    def compute(self, *inputs: Any) -> np.ndarray:
        self.calls += 1
        self.clock.current_s += self.seconds * (20.0 if self.calls <= self.slowly else 1.0)
        return np.empty(0)


def test_call_times_use_best_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow first calls do not count."""
    clock = Clock()
    monkeypatch.setattr(rerank, "time", SimpleNamespace(perf_counter=lambda: clock.current_s))
    monkeypatch.setattr(rerank, "_NUM_TURNS", 3)
    monkeypatch.setattr(rerank, "_TURN_S", 0.1)
    kernels = [Pretended(clock, 2e-4), Pretended(clock, 1e-4, slowly=50), Pretended(clock, 4e-4)]
    result, _ = rerank.measure_call_times(cast(list[Kernel], kernels), ())
    assert result == pytest.approx([0.2, 0.1, 0.4])
    assert clock.current_s == pytest.approx(0.9, rel=0.3)
