"""Tests of NVML readings with a simulated library."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from sparseflow.core.telemetry import nvml


class NVMLError(Exception):
    """Stand-in for `pynvml.NVMLError`."""


@pytest.fixture(autouse=True)
def clear_cache() -> Iterator[None]:
    nvml._load.cache_clear()
    yield
    nvml._load.cache_clear()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Simulated pynvml with one GPU."""
    module: Any = ModuleType("pynvml")
    module.NVMLError, module.NVML_CLOCK_SM, module.NVML_CLOCK_MEM = NVMLError, 1, 2

    def by_uuid(uuid: str) -> str:
        if uuid != "GPU-abc":
            raise NVMLError(uuid)
        return "handle"

    module.nvmlInit = lambda: None
    module.nvmlDeviceGetHandleByUUID = by_uuid
    module.nvmlSystemGetDriverVersion = lambda: b"580.1"
    module.nvmlDeviceGetTotalEnergyConsumption = lambda handle: 2500
    module.nvmlDeviceGetClockInfo = lambda handle, domain: {1: 1980, 2: 3201}[domain]
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="abc"))
    return module


@pytest.mark.usefixtures("library")
def test_readings_have_units() -> None:
    assert nvml.read_energy_j("cuda:0") == 2.5
    assert nvml.read_clocks_mhz("cuda:0") == {"core": 1980.0, "memory": 3201.0}
    assert nvml.read_driver_version() == "580.1"


def test_unsupported_counter_is_none(library: Any) -> None:
    def unsupported(*_: object) -> int:
        raise NVMLError("not supported")

    library.nvmlDeviceGetTotalEnergyConsumption = unsupported
    library.nvmlDeviceGetClockInfo = unsupported
    assert nvml.read_energy_j("cuda:0") is None
    assert nvml.read_clocks_mhz("cuda:0") == {}


def test_unknown_gpu_is_none(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="other"))
    assert nvml.read_energy_j("cuda:0") is None


def test_missing_driver_library_is_none(library: Any) -> None:
    def absent() -> None:
        raise NVMLError("library not found")

    library.nvmlInit = absent
    assert nvml.read_energy_j("cuda:0") is None and nvml.read_driver_version() is None


def test_missing_package_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml.read_energy_j("cuda:0") is None and nvml.read_driver_version() is None


def test_cpu_is_none() -> None:
    assert nvml.read_energy_j("cpu") is None
    assert nvml.read_clocks_mhz("cpu") == {}
