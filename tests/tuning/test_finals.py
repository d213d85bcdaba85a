"""How calls are timed at the end of a search."""

from __future__ import annotations

import time
from typing import Any, cast

import numpy as np
import pytest

from sparseflow.tuning import finals
from sparseflow.tuning.finals import call_times
from sparseflow.tuning.kernel import Kernel


class Pretended:
    """A kernel that takes as long as it is told; the first calls may take longer."""

    def __init__(self, seconds: float, *, slowly: int = 0) -> None:
        self.seconds, self.slowly, self.calls = seconds, slowly, 0

    def compute(self, *inputs: Any) -> np.ndarray:
        self.calls += 1
        end = time.perf_counter() + self.seconds * (20.0 if self.calls <= self.slowly else 1.0)
        while time.perf_counter() < end:
            pass
        return np.empty(0)


def test_a_kernel_has_its_best_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that were slow to be parted at first are not held against it."""
    monkeypatch.setattr(finals, "_TURNS", 3)
    monkeypatch.setattr(finals, "_TURN_S", 0.01)
    monkeypatch.setattr(finals, "_SAMPLE_S", 1e-3)
    kernels = [Pretended(2e-4), Pretended(1e-4, slowly=12), Pretended(4e-4)]
    found = call_times(cast(list[Kernel], kernels), ())
    assert found[1] < found[0] < found[2]
    assert all(kernel.calls > 20 for kernel in kernels)
