"""Names of load metrics in Prometheus: DCGM fields, and `SPARSEFLOW_*` for metrics that DCGM does not have.

DCGM's profiling fields are shares, `DCGM_FI_DEV_GPU_UTIL` is in percent, and its PCIe fields are bytes per
second, which are divided by the link bandwidth. Its exporter omits fields that a GPU does not support, and
its default list contains only some of these fields.

Source: NVIDIA DCGM API Reference, "Field Identifiers".
"""

from __future__ import annotations

from typing import NamedTuple

from sparseflow.core.telemetry.schema import METRICS

HOST_SOURCE = "sparseflow-host"
"""Label `source` of CPU readings that are exported under DCGM names."""

GPM_SOURCE = "sparseflow-gpm"


class Series(NamedTuple):
    """One metric name in Prometheus.

    Attributes:
        name: Name in Prometheus.
        metric: Load metric, among `METRICS`.
        scale: Value that corresponds to a share of 1; None for the bandwidth of the PCIe link.
        help: Help text of the exporter.
    """

    name: str
    metric: str
    scale: float | None
    help: str


SERIES = (
    Series(
        "DCGM_FI_PROF_SM_ACTIVE", "busy", 1.0, "Share of time with a warp on an SM, averaged over the SMs."
    ),
    Series("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "active", 1.0, "Share of time with an active compute engine."),
    Series("DCGM_FI_DEV_GPU_UTIL", "active", 100.0, "Time in which a kernel ran, in percent."),
    Series("DCGM_FI_PROF_SM_OCCUPANCY", "occupancy", 1.0, "Resident warps as a share of the maximum."),
    Series("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "tensor", 1.0, "Share of time with active tensor pipes."),
    Series("DCGM_FI_PROF_DRAM_ACTIVE", "dram", 1.0, "Share of time with an active memory interface."),
    Series("DCGM_FI_PROF_PCIE_TX_BYTES", "pcie_tx", None, "Bytes sent over PCIe per second."),
    Series("DCGM_FI_PROF_PCIE_RX_BYTES", "pcie_rx", None, "Bytes received over PCIe per second."),
    Series("SPARSEFLOW_OTHERS_BUSY", "others", 1.0, "Busy share of the CPUs minus that of the exporter."),
    Series("SPARSEFLOW_STEAL", "steal", 1.0, "Share of CPU time that a hypervisor gave to other guests."),
    Series("SPARSEFLOW_QUEUE", "queue", 1.0, "Share of the runnable tasks that wait for a CPU."),
    Series(
        "SPARSEFLOW_SWITCHING", "switching", 1.0, "Share of CPU time lost to context switches, at 10 µs each."
    ),
    Series("SPARSEFLOW_CPU_PRESSURE", "cpu_pressure", 1.0, "Share of time in which a task waited for a CPU."),
    Series(
        "SPARSEFLOW_MEMORY_PRESSURE",
        "memory_pressure",
        1.0,
        "Share of time in which a task waited for memory.",
    ),
    Series("SPARSEFLOW_IO_PRESSURE", "io_pressure", 1.0, "Share of time in which a task waited for I/O."),
    Series("SPARSEFLOW_MEMORY_USED", "memory_used", 1.0, "Share of memory that a new process cannot use."),
)
"""All series. If two series provide one metric, the first is preferred."""

HOST_HELP = {
    "busy": "Busy share of the usable CPUs; a CPU value under the DCGM name.",
    "active": "Busy share of the busiest CPU; a CPU value under the DCGM name.",
}

SERIES_BY_NAME = {series.name: series for series in SERIES}


def list_series(metric: str) -> tuple[Series, ...]:
    """List the series that provide a metric, in order of preference."""
    return tuple(series for series in SERIES if series.metric == metric)


assert {series.metric for series in SERIES} == set(METRICS)
