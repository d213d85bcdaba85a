"""Tests of GPM readings with a simulated NVML."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from sparseflow.core.telemetry import gpm, nvml
from sparseflow.core.telemetry.gpm import GpmReader
from sparseflow.errors import DeviceError, InputError, MissingExtraError


class NVMLError(Exception):
    """Stand-in for `pynvml.NVMLError`."""


class Library(ModuleType):
    """Simulated pynvml with one Hopper GPU whose counters are `values`."""

    NVMLError = NVMLError
    NVML_GPM_METRICS_GET_VERSION = 1

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.values = {1: 60.0, 2: 50.0, 3: 25.0, 5: 12.5, 10: 100.4, 20: 100.0, 21: 200.0}
        self.returns: dict[int, int] = {}
        self.live_samples = 0
        self.supported = 1

    def nvmlGpmQueryDeviceSupport(self, gpu: str) -> Any:
        return SimpleNamespace(isSupportedDevice=self.supported)

    def nvmlDeviceGetUUID(self, gpu: str) -> bytes:
        return b"GPU-abc"

    def nvmlDeviceGetName(self, gpu: str) -> str:
        return "NVIDIA H200"

    def nvmlDeviceGetIndex(self, gpu: str) -> int:
        return 3

    def nvmlDeviceGetMaxPcieLinkGeneration(self, gpu: str) -> int:
        return 5

    def nvmlDeviceGetMaxPcieLinkWidth(self, gpu: str) -> int:
        return 16

    def nvmlGpmSampleAlloc(self) -> SimpleNamespace:
        self.live_samples += 1
        return SimpleNamespace(filled=False)

    def nvmlGpmSampleGet(self, gpu: str, sample: SimpleNamespace) -> None:
        sample.filled = True

    def nvmlGpmSampleFree(self, sample: SimpleNamespace) -> None:
        self.live_samples -= 1

    def c_nvmlGpmMetricsGet_t(self) -> SimpleNamespace:
        # Entries that are not written stay visible: the value is NaN and the return code an error.
        entries = [SimpleNamespace(metricId=0, nvmlReturn=999, value=math.nan) for _ in range(20)]
        return SimpleNamespace(version=0, numMetrics=0, sample1=None, sample2=None, metrics=entries)

    def nvmlGpmMetricsGet(self, request: SimpleNamespace) -> None:
        assert request.version == 1 and request.sample1.filled and request.sample2.filled
        for metric in request.metrics[: request.numMetrics]:
            metric.value = self.values[metric.metricId]
            metric.nvmlReturn = self.returns.get(metric.metricId, 0)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    module = Library()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr(gpm, "require", lambda package, extra: module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(nvml, "get_handle", lambda device: "handle" if str(device) != "cuda:9" else None)
    ticks = iter(range(100))
    monkeypatch.setattr(
        gpm,
        "time",
        SimpleNamespace(monotonic=lambda: float(next(ticks)), time=lambda: 1e9, sleep=lambda s: None),
    )
    return module


def test_read_converts_percent_to_shares(library: Library) -> None:
    reader = GpmReader("cuda:0")
    load = reader.read(0.5)
    assert load.shares == {"busy": 0.5, "active": 0.6, "occupancy": 0.25, "tensor": 0.125, "dram": 1.0}
    assert tuple(load.shares) == reader.metrics
    assert (load.source, load.device, load.timestamp_s) == ("gpm", "cuda:0", 1e9)
    assert (reader.index, reader.uuid, reader.model) == (3, "GPU-abc", "NVIDIA H200")


def test_read_divides_bytes_by_link_bandwidth(library: Library) -> None:
    load = GpmReader("cuda:0", metrics=("pcie_tx", "pcie_rx", "busy")).read()
    link = 3938e6 * 16 / 2**20
    assert load.shares == pytest.approx({"busy": 0.5, "pcie_tx": 100 / link, "pcie_rx": 200 / link})


def test_read_frees_all_samples(library: Library) -> None:
    reader = GpmReader("cuda:0")
    reader.read()
    assert library.live_samples == 0

    library.returns = {5: 3}
    with pytest.raises(DeviceError):
        reader.read()
    assert library.live_samples == 0

    def refuse(gpu: str, sample: SimpleNamespace) -> None:
        raise NVMLError("Insufficient Permissions")

    library.nvmlGpmSampleGet = refuse  # type: ignore[method-assign]
    with pytest.raises(DeviceError, match="Insufficient Permissions"):
        reader.read()
    assert library.live_samples == 0


def test_read_failed_metric_raises(library: Library) -> None:
    library.returns = {5: 3}
    with pytest.raises(DeviceError, match=r"GPM metric 5 \(`tensor`\) of cuda:0.*returned 3"):
        GpmReader("cuda:0").read()


@pytest.mark.parametrize("value", [math.nan, -5.0, 250.0])
def test_read_invalid_percentage_raises(library: Library, value: float) -> None:
    library.values[2] = value
    with pytest.raises(DeviceError, match="`busy`"):
        GpmReader("cuda:0").read()


def test_stop_twice_raises(library: Library) -> None:
    recording = GpmReader("cuda:0").start()
    recording.stop()
    with pytest.raises(InputError):
        recording.stop()
    assert library.live_samples == 0


def test_reader_without_counters_raises(library: Library) -> None:
    library.supported = 0
    with pytest.raises(DeviceError, match=r"Hopper.*DCGM"):
        GpmReader("cuda:0")


def test_reader_unsupported_metric_raises(library: Library) -> None:
    with pytest.raises(DeviceError, match="`steal`"):
        GpmReader("cuda:0", metrics=("steal",))
    with pytest.raises(InputError, match="`metrics`"):
        GpmReader("cuda:0", metrics=())


@pytest.mark.parametrize("method", ["nvmlDeviceGetMaxPcieLinkWidth", "nvmlDeviceGetMaxPcieLinkGeneration"])
def test_reader_unknown_link_raises(library: Library, method: str) -> None:
    zero: Callable[[str], int] = lambda gpu: 0  # noqa: E731
    setattr(library, method, zero)
    with pytest.raises(DeviceError, match="pcie_tx"):
        GpmReader("cuda:0", metrics=("pcie_tx",))


def test_reader_invalid_device_raises(library: Library) -> None:
    with pytest.raises(InputError, match="'cpu'"):
        GpmReader("cpu")
    with pytest.raises(DeviceError, match="cuda:9"):
        GpmReader("cuda:9")


def test_reader_without_gpu_names_host(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match=r"cuda:0.*host"):
        GpmReader("cuda:0")


def test_reader_without_package_names_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparseflow.core.extras.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"sparseflow\[latency\]"):
        GpmReader("cuda:0")


@pytest.mark.gpu
def test_read_gpu_of_this_machine() -> None:
    reader = GpmReader("cuda:0")
    assert tuple(reader.read(0.5).shares) == reader.metrics
