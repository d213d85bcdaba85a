"""Load of an NVIDIA GPU from NVML's GPM counters (Hopper and later), which DCGM reports through a daemon.

NVML computes each metric between two samples. GPM reports percent and MiB/s, which are converted to shares.

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
"""Number of each metric in `nvmlGpmMetricId_t`."""

DEFAULT_METRICS = ("busy", "active", "occupancy", "tensor", "dram")

LANE_BYTES_PER_S = {1: 250e6, 2: 500e6, 3: 984.6e6, 4: 1969e6, 5: 3938e6, 6: 7563e6}
"""Bandwidth of one lane in one direction after line coding, by PCIe generation."""


class GpmReader:
    """`LoadReader` of one GPU, including the work of other processes.

    Args:
        device: `"cuda"` or `"cuda:N"`.
        metrics: Metrics to read, among the keys of `GPM_IDS`.

    Raises:
        InputError: A metric is unknown.
        MissingExtraError: `nvidia-ml-py` is not installed.
        DeviceError: NVML, the GPU, its GPM counters or, for PCIe metrics, its link cannot be read.
    """

    name = "gpm"

    def __init__(
        self, device: str | torch.device = "cuda", *, metrics: Collection[str] = DEFAULT_METRICS
    ) -> None:
        check_metrics(metrics)
        if unknown := [name for name in metrics if name not in GPM_IDS]:
            raise DeviceError(f"GPM does not provide `{unknown[0]}`; it provides: {', '.join(GPM_IDS)}")
        if not metrics:
            raise InputError("`metrics` must contain at least one metric")
        self.metrics = tuple(name for name in METRICS if name in metrics)
        self._nvml: Any = require("pynvml", "latency")
        self._gpu = _find_gpu(device)
        self.device = str(device)
        try:
            supported = self._nvml.nvmlGpmQueryDeviceSupport(self._gpu).isSupportedDevice
            self.uuid = _decode(self._nvml.nvmlDeviceGetUUID(self._gpu))
            self.model = _decode(self._nvml.nvmlDeviceGetName(self._gpu))
            self.index = int(self._nvml.nvmlDeviceGetIndex(self._gpu))
        except self._nvml.NVMLError as error:
            raise DeviceError(f"{device}: NVML cannot describe this GPU: {error}") from error
        if not supported:
            raise DeviceError(
                f"{device} ({self.model}) has no GPM counters, which need Hopper or later; "
                "run DCGM and read it through Prometheus instead"
            )
        needs_link = bool({"pcie_tx", "pcie_rx"} & set(self.metrics))
        self.pcie_bytes_per_s = self._read_link_bandwidth() if needs_link else None

    def read(self, window_s: float = 1.0) -> LoadReading:
        """Record for `window_s` seconds; raises like `LoadReader.read`."""
        check_window(window_s)
        recording = self.start()
        time.sleep(window_s)
        return recording.stop()

    def start(self) -> GpmRecording:
        """Start to record; raises DeviceError if NVML returns no sample."""
        return GpmRecording(self, self._take_sample(), time.monotonic())

    def _take_sample(self) -> Any:
        sample = None
        try:
            sample = self._nvml.nvmlGpmSampleAlloc()
            self._nvml.nvmlGpmSampleGet(self._gpu, sample)
        except self._nvml.NVMLError as error:
            if sample is not None:
                self._nvml.nvmlGpmSampleFree(sample)
            raise DeviceError(f"{self.device}: NVML returned no GPM sample: {error}") from error
        return sample

    def _compute_shares(self, first: Any, last: Any) -> dict[str, float]:
        request = self._nvml.c_nvmlGpmMetricsGet_t()
        request.version = self._nvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(self.metrics)
        request.sample1, request.sample2 = first, last
        for index, name in enumerate(self.metrics):
            request.metrics[index].metricId = GPM_IDS[name]
        try:
            self._nvml.nvmlGpmMetricsGet(request)
        except self._nvml.NVMLError as error:
            raise DeviceError(f"{self.device}: NVML computed no GPM metrics: {error}") from error
        shares = {}
        for index, name in enumerate(self.metrics):
            result = request.metrics[index]
            source = f"GPM metric {GPM_IDS[name]} (`{name}`) of {self.device}"
            if result.nvmlReturn != 0:
                raise DeviceError(
                    f"{source} cannot be read: NVML returned {result.nvmlReturn}; leave it out of `metrics`"
                )
            shares[name] = normalize_share(result.value, self._get_scale(name), source)
        return shares

    def _get_scale(self, name: str) -> float:
        if self.pcie_bytes_per_s is None or name in DEFAULT_METRICS:
            return 100.0
        return self.pcie_bytes_per_s / 2**20

    def _read_link_bandwidth(self) -> float:
        try:
            generation = self._nvml.nvmlDeviceGetMaxPcieLinkGeneration(self._gpu)
            lanes = self._nvml.nvmlDeviceGetMaxPcieLinkWidth(self._gpu)
        except self._nvml.NVMLError as error:
            raise DeviceError(
                f"{self.device}: NVML cannot read its PCIe link ({error}); leave out pcie_tx and pcie_rx"
            ) from error
        if generation not in LANE_BYTES_PER_S or lanes < 1:
            raise DeviceError(
                f"{self.device}: unknown PCIe link of generation {generation} with {lanes} lanes; "
                "leave out pcie_tx and pcie_rx"
            )
        return LANE_BYTES_PER_S[generation] * lanes


class GpmRecording:
    """Reading of a GPU in progress; created by `GpmReader.start`."""

    def __init__(self, reader: GpmReader, first: Any, start_s: float) -> None:
        self._reader = reader
        self._first = first
        self._start_s = start_s

    def stop(self) -> LoadReading:
        """Return the load since the start, once; raises like `LoadRecording.stop`."""
        if self._first is None:
            raise InputError("this recording is already stopped; start another one")
        first, self._first = self._first, None
        last = None
        try:
            seconds = time.monotonic() - self._start_s
            check_recording_length(seconds)
            last = self._reader._take_sample()
            shares = self._reader._compute_shares(first, last)
        finally:
            # Samples are allocated by NVML and not garbage-collected.
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


def _find_gpu(device: str | torch.device) -> Any:
    if not str(device).startswith("cuda"):
        raise InputError(f"`device` (={str(device)!r}) must be 'cuda' or 'cuda:N' to be read through GPM")
    import torch

    if not torch.cuda.is_available():
        raise DeviceError(f"{device} does not exist: torch sees no CUDA device; read the host instead")
    try:
        handle = nvml.get_handle(device)
    except (AssertionError, RuntimeError) as error:
        raise DeviceError(f"{device} does not exist: {error}") from error
    if handle is None:
        raise DeviceError(
            f"{device}: NVML is missing or does not know this GPU; check the driver installation"
        )
    return handle


def _decode(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
