"""The load of an NVIDIA GPU from NVML's GPM counters: what DCGM shows, with no daemon; Hopper and later.

Two samples are taken and NVML computes each metric between them. GPM counts in percent and MiB/s; both
become shares here and nowhere else.

Source: NVML API Reference, "GPM" (docs.nvidia.com/deploy/nvml-api).
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from sparseflow.core.extras import require
from sparseflow.core.telemetry import nvml
from sparseflow.core.telemetry.schema import (
    METRICS,
    LoadReading,
    check_metrics,
    check_recording_length,
    check_window,
    normalize_share,
)
from sparseflow.errors import DeviceError, InputError

if TYPE_CHECKING:
    import torch

GPM_IDS = {"busy": 2, "active": 1, "occupancy": 3, "tensor": 5, "dram": 10, "pcie_tx": 20, "pcie_rx": 21}
"""Metric -> its number in `nvmlGpmMetricId_t`."""

DEFAULT_METRICS = ("busy", "active", "occupancy", "tensor", "dram")

LANE_BYTES_PER_S = {1: 250e6, 2: 500e6, 3: 984.6e6, 4: 1969e6, 5: 3938e6, 6: 7563e6}
"""PCIe generation -> what one lane carries in one direction, after line coding."""


class GpmReader:
    """Reads one GPU as a whole, whoever uses it. A `LoadReader`.

    Args:
        device: The GPU, as torch names it: `"cuda"` or `"cuda:N"`.
        metrics: What to read, among the keys of `GPM_IDS`.

    Raises:
        InputError: An unknown metric.
        MissingExtraError: `nvidia-ml-py` is not installed.
        DeviceError: NVML, the GPU, its GPM counters or (for the PCIe metrics) its link cannot be read.
    """

    name = "gpm"

    def __init__(
        self, device: str | torch.device = "cuda", *, metrics: Collection[str] = DEFAULT_METRICS
    ) -> None:
        check_metrics(metrics)
        if unknown := [name for name in metrics if name not in GPM_IDS]:
            raise DeviceError(f"`{unknown[0]}` is not told by GPM, which tells: {', '.join(GPM_IDS)}")
        if not metrics:
            raise InputError("`metrics` must name at least one")
        self.metrics = tuple(name for name in METRICS if name in metrics)
        self._nvml: Any = require("pynvml", "latency")
        self._gpu = _find(device)
        self.device = str(device)
        try:
            supported = self._nvml.nvmlGpmQueryDeviceSupport(self._gpu).isSupportedDevice
            self.uuid = _text(self._nvml.nvmlDeviceGetUUID(self._gpu))
            self.model = _text(self._nvml.nvmlDeviceGetName(self._gpu))
            self.index = int(self._nvml.nvmlDeviceGetIndex(self._gpu))
        except self._nvml.NVMLError as error:
            raise DeviceError(f"{device}: NVML does not describe this GPU: {error}") from error
        if not supported:
            raise DeviceError(
                f"{device} ({self.model}) has no GPM counters, which came with Hopper; "
                "run DCGM and read it through Prometheus instead"
            )
        self.pcie_bytes_per_s = self._link() if {"pcie_tx", "pcie_rx"} & set(self.metrics) else None

    def read(self, window_s: float = 1.0) -> LoadReading:
        """Watch for `window_s` seconds. Raises as `LoadReader.read` says."""
        check_window(window_s)
        watch = self.start()
        time.sleep(window_s)
        return watch.stop()

    def start(self) -> GpmRecording:
        """Begin to watch. Raises DeviceError where NVML gives no sample."""
        return GpmRecording(self, self._sample(), time.monotonic())

    def _sample(self) -> Any:
        sample = None
        try:
            sample = self._nvml.nvmlGpmSampleAlloc()
            self._nvml.nvmlGpmSampleGet(self._gpu, sample)
        except self._nvml.NVMLError as error:
            if sample is not None:
                self._nvml.nvmlGpmSampleFree(sample)
            raise DeviceError(f"{self.device}: NVML gave no GPM sample: {error}") from error
        return sample

    def _between(self, first: Any, last: Any) -> dict[str, float]:
        asked = self._nvml.c_nvmlGpmMetricsGet_t()
        asked.version = self._nvml.NVML_GPM_METRICS_GET_VERSION
        asked.numMetrics = len(self.metrics)
        asked.sample1, asked.sample2 = first, last
        for place, name in enumerate(self.metrics):
            asked.metrics[place].metricId = GPM_IDS[name]
        try:
            self._nvml.nvmlGpmMetricsGet(asked)
        except self._nvml.NVMLError as error:
            raise DeviceError(f"{self.device}: NVML computed no GPM metrics: {error}") from error
        found = {}
        for place, name in enumerate(self.metrics):
            told = asked.metrics[place]
            what = f"GPM metric {GPM_IDS[name]} (`{name}`) of {self.device}"
            if told.nvmlReturn != 0:
                raise DeviceError(
                    f"{what} cannot be read here: NVML returned {told.nvmlReturn}; leave it out of `metrics`"
                )
            found[name] = normalize_share(told.value, self._scale(name), what)
        return found

    def _scale(self, name: str) -> float:
        return (
            100.0
            if self.pcie_bytes_per_s is None or name in DEFAULT_METRICS
            else self.pcie_bytes_per_s / 2**20
        )

    def _link(self) -> float:
        try:
            generation = self._nvml.nvmlDeviceGetMaxPcieLinkGeneration(self._gpu)
            lanes = self._nvml.nvmlDeviceGetMaxPcieLinkWidth(self._gpu)
        except self._nvml.NVMLError as error:
            raise DeviceError(
                f"{self.device}: NVML does not tell its PCIe link ({error}); leave pcie_tx and pcie_rx out"
            ) from error
        if generation not in LANE_BYTES_PER_S or lanes < 1:
            raise DeviceError(
                f"{self.device}: a PCIe link of generation {generation} with {lanes} lanes is not known; "
                "leave pcie_tx and pcie_rx out"
            )
        return LANE_BYTES_PER_S[generation] * lanes


class GpmRecording:
    """A reading of the GPU that has begun; made by `GpmReader.start`."""

    def __init__(self, reader: GpmReader, first: Any, at_s: float) -> None:
        self._reader = reader
        self._first = first
        self._at_s = at_s

    def stop(self) -> LoadReading:
        """The load since the start; only once. Raises as `Watch.stop` says."""
        if self._first is None:
            raise InputError("this watch was stopped before; start another")
        first, self._first = self._first, None
        last = None
        try:
            seconds = time.monotonic() - self._at_s
            check_recording_length(seconds)
            last = self._reader._sample()
            shares = self._reader._between(first, last)
        finally:
            # NVML allocates them outside Python's memory.
            for sample in (first, last):
                if sample is not None:
                    self._reader._nvml.nvmlGpmSampleFree(sample)
        return LoadReading(
            timestamp_s=time.time(),
            interval_s=seconds,
            source=self._reader.name,
            device=self._reader.device,
            shares=shares,
        )


def _find(device: str | torch.device) -> Any:
    if not str(device).startswith("cuda"):
        raise InputError(f"`device` (={str(device)!r}) must be 'cuda' or 'cuda:N' to be read through GPM")
    import torch

    if not torch.cuda.is_available():
        raise DeviceError(f"{device} was asked for and torch sees no CUDA device here; read the host instead")
    try:
        found = nvml.get_handle(device)
    except (AssertionError, RuntimeError) as error:
        raise DeviceError(f"{device} is not there: {error}") from error
    if found is None:
        raise DeviceError(
            f"{device}: NVML is absent or does not know this GPU; is the driver's library there?"
        )
    return found


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
