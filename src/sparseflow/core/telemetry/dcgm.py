"""Names of load metrics in Prometheus: DCGM fields, and `SPARSEFLOW_*` for metrics that DCGM does not have.

DCGM's profiling fields are shares, `DCGM_FI_DEV_GPU_UTIL` is in percent, and its PCIe fields are bytes per
second, which are divided by the link bandwidth. Its exporter omits fields that a GPU does not support, and
its default list contains only some of these fields.

Source: NVIDIA DCGM API Reference, "Field Identifiers".
"""

from __future__ import annotations

from dataclasses import dataclass

from sparseflow.core.telemetry.schema import METRICS

HOST_SOURCE = "sparseflow-host"
"""Label `source` of CPU readings that are exported under DCGM names."""

GPM_SOURCE = "sparseflow-gpm"


@dataclass(frozen=True, kw_only=True)
class Series:
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
        name="DCGM_FI_PROF_SM_ACTIVE",
        metric="busy",
        scale=1.0,
        help="Share of time in which an SM had a warp resident, averaged over the SMs.",
    ),
    Series(
        name="DCGM_FI_PROF_GR_ENGINE_ACTIVE",
        metric="active",
        scale=1.0,
        help="Share of time in which the compute engine was active.",
    ),
    Series(
        name="DCGM_FI_DEV_GPU_UTIL",
        metric="active",
        scale=100.0,
        help="Time in which a kernel ran, in percent.",
    ),
    Series(
        name="DCGM_FI_PROF_SM_OCCUPANCY",
        metric="occupancy",
        scale=1.0,
        help="Resident warps as a share of the maximum.",
    ),
    Series(
        name="DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
        metric="tensor",
        scale=1.0,
        help="Share of time in which the tensor pipes were active.",
    ),
    Series(
        name="DCGM_FI_PROF_DRAM_ACTIVE",
        metric="dram",
        scale=1.0,
        help="Share of time in which the memory interface moved data.",
    ),
    Series(
        name="DCGM_FI_PROF_PCIE_TX_BYTES",
        metric="pcie_tx",
        scale=None,
        help="Bytes sent over PCIe per second.",
    ),
    Series(
        name="DCGM_FI_PROF_PCIE_RX_BYTES",
        metric="pcie_rx",
        scale=None,
        help="Bytes received over PCIe per second.",
    ),
    Series(
        name="SPARSEFLOW_OTHERS_BUSY",
        metric="others",
        scale=1.0,
        help="Busy share of the CPUs minus the share of the exporter.",
    ),
    Series(
        name="SPARSEFLOW_STEAL",
        metric="steal",
        scale=1.0,
        help="Share of CPU time that a hypervisor gave to other guests.",
    ),
    Series(
        name="SPARSEFLOW_QUEUE",
        metric="queue",
        scale=1.0,
        help="Share of the runnable tasks that wait for a CPU.",
    ),
    Series(
        name="SPARSEFLOW_SWITCHING",
        metric="switching",
        scale=1.0,
        help="Share of CPU time lost to context switches, at 10 microseconds each.",
    ),
    Series(
        name="SPARSEFLOW_CPU_PRESSURE",
        metric="cpu_pressure",
        scale=1.0,
        help="Share of time in which some task waited for a CPU.",
    ),
    Series(
        name="SPARSEFLOW_MEMORY_PRESSURE",
        metric="memory_pressure",
        scale=1.0,
        help="Share of time in which some task waited for memory.",
    ),
    Series(
        name="SPARSEFLOW_IO_PRESSURE",
        metric="io_pressure",
        scale=1.0,
        help="Share of time in which some task waited for input or output.",
    ),
    Series(
        name="SPARSEFLOW_MEMORY_USED",
        metric="memory_used",
        scale=1.0,
        help="Share of memory that a new process cannot use.",
    ),
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
