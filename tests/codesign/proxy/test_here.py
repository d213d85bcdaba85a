"""The device at hand."""

from __future__ import annotations

import pytest

from sparseflow.codesign.proxy import device_here
from sparseflow.codesign.proxy import here as module
from sparseflow.core.ceilings import Ceilings
from sparseflow.errors import InputError


class Counter:
    """A clock, and a counter of energy that moves every 50 ms, by 20 J while something runs."""

    def __init__(self) -> None:
        self.now, self.calls = 100.0, 0

    def work(self) -> None:
        self.now += 0.02
        self.calls += 1

    def energy_j(self, device: object) -> float:
        return 5000.0 + 20.0 * int(self.now / 0.05 + 1e-6)


def test_power_is_energy_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = Counter()
    monkeypatch.setattr(module.nvml, "read_energy_j", counter.energy_j)
    monkeypatch.setattr(module.time, "monotonic", lambda: counter.now)
    found = module.mean_power_w(counter.work, "cuda", 1.0)
    assert found == pytest.approx(400.0, rel=0.05) and counter.calls in (50, 51)
    # Too short for the counter to move twice.
    assert module.mean_power_w(counter.work, "cuda", 0.05) is None


def test_where_nothing_counts_there_is_no_power() -> None:
    assert module.mean_power_w(lambda: pytest.fail("called"), "cpu", 1.0) is None


def test_ceilings_make_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Ceilings(flops_per_s={"float32": 1e11, "bfloat16": 2e11}, bytes_per_s=1e10)
    monkeypatch.setattr(module, "measure_ceilings", lambda device: told)
    found = device_here("cpu", tdp_w=65.0)
    assert (found.peak_flops, found.peak_bw, found.tdp_w, found.idle_w) == (2e11, 1e10, 65.0, 0.0)
    assert found.rate("float32") == 1e11 and found.cores is not None and found.mem_gb > 0.0


def test_on_a_cpu_somebody_must_say_what_it_draws() -> None:
    with pytest.raises(InputError, match="give `tdp_w`"):
        device_here("cpu")
