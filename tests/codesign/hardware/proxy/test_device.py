"""Tests of `codesign.hardware.proxy.device`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparseflow.codesign.hardware.chips import read_library
from sparseflow.codesign.hardware.proxy import DeviceSpec, measure_device
from sparseflow.codesign.hardware.proxy import device as module
from sparseflow.core.device.ceilings import Ceilings
from sparseflow.errors import InputError
from tests.codesign.hardware.proxy.made_up import GPU


def test_from_chip() -> None:
    chip = read_library().get_chip("h200")
    spec = DeviceSpec.from_chip(chip, cores=132)
    assert (spec.name, spec.peak_flops, spec.tdp_w, spec.cores) == ("h200", 989e12, 700, 132)
    assert (spec.rate("float64"), spec.rate("float32"), spec.rate("bfloat16")) == (67e12, 67e12, 989e12)
    assert DeviceSpec.from_chip(spec) is spec


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": ""}, {"peak_flops": 0.0}, {"peak_bw": float("nan")}, {"tdp_w": -1.0}, {"idle_w": 501.0},
        {"cores": 0}, {"rates": (("int8", 1e15),)}, {"rates": (("float32", 0.0),)}, {"rates": ()},
    ],
)  # fmt: skip
def test_invalid_specification_is_refused(wrong: dict) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        replace(GPU, **wrong)


class Counter:
    """A clock, and a counter of energy that moves every 50 ms, by 20 J while something runs."""

    def __init__(self) -> None:
        self.current_time, self.calls = 100.0, 0

    def work(self) -> None:
        self.current_time += 0.02
        self.calls += 1

    def energy_j(self, device: object) -> float:
        return 5000.0 + 20.0 * int(self.current_time / 0.05 + 1e-6)


def test_measure_power_divides_energy_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = Counter()
    monkeypatch.setattr(module.nvml, "read_energy_j", counter.energy_j)
    monkeypatch.setattr(module.time, "monotonic", lambda: counter.current_time)
    result = module.measure_power_w(counter.work, "cuda", 1.0)
    assert result == pytest.approx(400.0, rel=0.05) and counter.calls in (50, 51)
    # Too short for the counter to move twice.
    assert module.measure_power_w(counter.work, "cuda", 0.05) is None


def test_measure_power_without_counter_is_none() -> None:
    assert module.measure_power_w(lambda: pytest.fail("called"), "cpu", 1.0) is None


def test_measure_device_uses_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    record = Ceilings(flops_per_s={"float32": 1e11, "tf32": 3e11, "bfloat16": 2e11}, bytes_per_s=1e10)
    monkeypatch.setattr(module, "measure_ceilings", lambda device: record)
    spec = measure_device("cpu", tdp_w=65.0)
    assert (spec.peak_flops, spec.peak_bw, spec.tdp_w, spec.idle_w) == (2e11, 1e10, 65.0, 0.0)
    assert dict(spec.rates) == {"float32": 1e11, "bfloat16": 2e11}
    assert spec.cores is not None and spec.mem_gb > 0.0
    with pytest.raises(InputError, match=r"has no FLOP/s for float16, only for float32, bfloat16; add it"):
        spec.rate("float16")


def test_measure_device_on_cpu_needs_tdp() -> None:
    with pytest.raises(InputError, match="`tdp_w`"):
        measure_device("cpu")
