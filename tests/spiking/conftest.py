"""Shared fixtures: a decision cache per test, and fake timings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import sparseflow
from sparseflow.core import timing
from sparseflow.core.telemetry.cpu_contention import CpuUsageMonitor
from sparseflow.spiking import accelerated
from sparseflow.spiking.runtime.plan import Plan


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPARSEFLOW_CACHE", str(tmp_path / "decisions"))
    # Whether other programs run beside the tests must not decide what is cached.
    monkeypatch.setattr(CpuUsageMonitor, "measure_other_share", lambda self: 0.0)


class FakeTimes:
    """Replaces `timing.compare`: runs each candidate once and reports given times.

    Attributes:
        ms: Candidate -> milliseconds of all rounds, or one number per round.
        calls: The candidates of each call, in order.
    """

    def __init__(self, ms: Mapping[str, float | tuple[float, ...]]) -> None:
        self.ms = dict(ms)
        self.calls: list[tuple[str, ...]] = []

    def __call__(
        self, candidates: Mapping[str, Callable[[], object]], *, rounds: int, baseline: str, **_: Any
    ) -> timing.Comparison:
        self.calls.append(tuple(candidates))
        for work in candidates.values():
            work()
        times = {}
        for name in candidates:
            reports = self.ms.get(name, 5.0)
            times[name] = reports if isinstance(reports, tuple) else (reports,) * rounds
        return timing.Comparison(
            baseline=baseline,
            times_ms=times,
            order=(tuple(candidates),) * rounds,
            timer="made up",
            device="cpu",
            warmup=0,
            seed=0,
        )


@pytest.fixture
def prefer(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeTimes]:
    """`prefer("sparse")` makes every decision select this mode, and the plan faster than its network.

    Several modes are in order of preference; times can be given by name (`prefer("dense", plan=9.0)`).
    """

    def install(*ways: str, **ms: float | tuple[float, ...]) -> FakeTimes:
        ranked = {group_mode: 1.0 + i / 10 for i, group_mode in enumerate(ways)}
        made_up = FakeTimes({"own": 5.0, "plan": 1.0, "module": 5.0, **ranked, **ms})
        monkeypatch.setattr(timing, "compare", made_up)
        monkeypatch.setattr(accelerated, "MAX_GROUPS_OVER_NETWORK", math.inf)  # made-up times do not add up
        return made_up

    return install


@pytest.fixture
def planned(prefer: Callable[..., FakeTimes], monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Optimize with sparse groups preferred; returns a list that grows with each run of a plan."""

    def run(net: nn.Module, *args: Any, **options: Any) -> list[int]:
        prefer("sparse", "dense")
        assert sparseflow.optimize(net, *args, **options) is net
        runs: list[int] = []
        original = Plan.run
        monkeypatch.setattr(Plan, "run", lambda self, *a, **k: runs.append(1) or original(self, *a, **k))
        return runs

    return run
