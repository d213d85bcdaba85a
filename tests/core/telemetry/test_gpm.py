"""GPM readings, from an NVML of our own making."""

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
    """As in pynvml."""


class Library(ModuleType):
    """A pynvml with one Hopper, whose counters are whatever `values` says."""

    NVMLError = NVMLError
    NVML_GPM_METRICS_GET_VERSION = 1

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.values = {1: 60.0, 2: 50.0, 3: 25.0, 5: 12.5, 10: 100.4, 20: 100.0, 21: 200.0}
        self.returns: dict[int, int] = {}
        self.alive = 0
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
        self.alive += 1
        return SimpleNamespace(taken=False)

    def nvmlGpmSampleGet(self, gpu: str, sample: SimpleNamespace) -> None:
        sample.taken = True

    def nvmlGpmSampleFree(self, sample: SimpleNamespace) -> None:
        self.alive -= 1

    def c_nvmlGpmMetricsGet_t(self) -> SimpleNamespace:
        # What nobody writes shows: an untouched value is NaN and an untouched return code an error.
        untouched = [SimpleNamespace(metricId=0, nvmlReturn=999, value=math.nan) for _ in range(20)]
        return SimpleNamespace(version=0, numMetrics=0, sample1=None, sample2=None, metrics=untouched)

    def nvmlGpmMetricsGet(self, asked: SimpleNamespace) -> None:
        assert asked.version == 1 and asked.sample1.taken and asked.sample2.taken
        for metric in asked.metrics[: asked.numMetrics]:
            metric.value = self.values[metric.metricId]
            metric.nvmlReturn = self.returns.get(metric.metricId, 0)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    module = Library()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr(gpm, "require", lambda package, extra: module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(nvml, "get_handle", lambda device: "handle" if str(device) != "cuda:9" else None)
    now = iter(range(100))
    monkeypatch.setattr(
        gpm,
        "time",
        SimpleNamespace(monotonic=lambda: float(next(now)), time=lambda: 1e9, sleep=lambda s: None),
    )
    return module


def test_percent_becomes_a_share(library: Library) -> None:
    reader = GpmReader("cuda:0")
    load = reader.read(0.5)
    assert load.shares == {"busy": 0.5, "active": 0.6, "occupancy": 0.25, "tensor": 0.125, "dram": 1.0}
    assert tuple(load.shares) == reader.metrics
    assert (load.source, load.device, load.timestamp_s) == ("gpm", "cuda:0", 1e9)
    assert (reader.index, reader.uuid, reader.model) == (3, "GPU-abc", "NVIDIA H200")


def test_bytes_become_a_share_of_the_link(library: Library) -> None:
    load = GpmReader("cuda:0", metrics=("pcie_tx", "pcie_rx", "busy")).read()
    link = 3938e6 * 16 / 2**20
    assert load.shares == pytest.approx({"busy": 0.5, "pcie_tx": 100 / link, "pcie_rx": 200 / link})


def test_every_sample_is_given_back(library: Library) -> None:
    reader = GpmReader("cuda:0")
    reader.read()
    assert library.alive == 0

    library.returns = {5: 3}
    with pytest.raises(DeviceError):
        reader.read()
    assert library.alive == 0

    def refuse(gpu: str, sample: SimpleNamespace) -> None:
        raise NVMLError("Insufficient Permissions")

    library.nvmlGpmSampleGet = refuse  # type: ignore[method-assign]
    with pytest.raises(DeviceError, match="no GPM sample: Insufficient Permissions"):
        reader.read()
    assert library.alive == 0


def test_a_metric_that_nvml_did_not_compute_is_an_error_and_never_zero(library: Library) -> None:
    library.returns = {5: 3}
    with pytest.raises(DeviceError, match=r"GPM metric 5 \(`tensor`\) of cuda:0 cannot be read .*returned 3"):
        GpmReader("cuda:0").read()


@pytest.mark.parametrize("value", [math.nan, -5.0, 250.0])
def test_a_value_that_is_no_percentage_is_an_error(library: Library, value: float) -> None:
    library.values[2] = value
    with pytest.raises(DeviceError, match="`busy`"):
        GpmReader("cuda:0").read()


def test_a_watch_is_stopped_once(library: Library) -> None:
    watch = GpmReader("cuda:0").start()
    watch.stop()
    with pytest.raises(InputError, match="stopped before"):
        watch.stop()
    assert library.alive == 0


def test_a_gpu_without_the_counters_says_what_to_do(library: Library) -> None:
    library.supported = 0
    with pytest.raises(DeviceError, match="came with Hopper; run DCGM"):
        GpmReader("cuda:0")


def test_what_gpm_does_not_count_is_an_error(library: Library) -> None:
    with pytest.raises(DeviceError, match="`steal` is not told by GPM"):
        GpmReader("cuda:0", metrics=("steal",))
    with pytest.raises(InputError, match="at least one"):
        GpmReader("cuda:0", metrics=())


@pytest.mark.parametrize("wrong", ["nvmlDeviceGetMaxPcieLinkWidth", "nvmlDeviceGetMaxPcieLinkGeneration"])
def test_an_unknown_link_is_an_error(library: Library, wrong: str) -> None:
    odd: Callable[[str], int] = lambda gpu: 0  # noqa: E731
    setattr(library, wrong, odd)
    with pytest.raises(DeviceError, match="leave pcie_tx and pcie_rx out"):
        GpmReader("cuda:0", metrics=("pcie_tx",))


def test_a_device_that_is_none_or_not_there(library: Library) -> None:
    with pytest.raises(InputError, match="'cpu'"):
        GpmReader("cpu")
    with pytest.raises(DeviceError, match="cuda:9"):
        GpmReader("cuda:9")


def test_without_a_gpu_the_host_is_named(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="read the host instead"):
        GpmReader("cuda:0")


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparseflow.core.extras.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"sparseflow\[latency\]"):
        GpmReader("cuda:0")


@pytest.mark.gpu
def test_this_machines_gpu_can_be_read() -> None:
    reader = GpmReader("cuda:0")
    assert tuple(reader.read(0.5).shares) == reader.metrics
