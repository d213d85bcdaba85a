"""What the metrics of a load are called in Prometheus: DCGM's names, and ours for what DCGM does not have.

DCGM's profiling fields are shares already; `DCGM_FI_DEV_GPU_UTIL` is in percent and its PCIe fields are
bytes a second, which need the link's rate to become shares. Its exporter leaves out what a GPU does not
count, and only some of these fields are in its default list.

Source: NVIDIA DCGM API Reference, "Field Identifiers".
"""

from __future__ import annotations

from dataclasses import dataclass

from sparseflow.core.telemetry.schema import METRICS

HOST_SOURCE = "sparseflow-host"
"""Value of the label `source` where DCGM's names carry a CPU's readings."""

GPM_SOURCE = "sparseflow-gpm"


@dataclass(frozen=True, kw_only=True)
class Series:
    """One name in Prometheus.

    Attributes:
        name: The metric's name there.
        metric: What it stands for, among `METRICS`.
        scale: The value there that is a share of 1. None means the bytes a second of the PCIe link.
        help: What it is, as the exporter says it.
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
        help="Share of the warps that fit which were resident.",
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
        help="Bytes sent over PCIe, a second.",
    ),
    Series(
        name="DCGM_FI_PROF_PCIE_RX_BYTES",
        metric="pcie_rx",
        scale=None,
        help="Bytes received over PCIe, a second.",
    ),
    Series(
        name="SPARSEFLOW_OTHERS_BUSY",
        metric="others",
        scale=1.0,
        help="Busy share of the CPUs less what the exporter itself used.",
    ),
    Series(
        name="SPARSEFLOW_STEAL",
        metric="steal",
        scale=1.0,
        help="Share of CPU time that a hypervisor gave to others.",
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
        help="Share of memory that a new process could not have.",
    ),
)
"""Every name. Where two stand for one metric the first is preferred."""

HOST_HELP = {
    "busy": "Busy share of the CPUs that may be used; a CPU's value under DCGM's name.",
    "active": "Busy share of the busiest CPU; a CPU's value under DCGM's name.",
}

SERIES_BY_NAME = {series.name: series for series in SERIES}


def list_series(metric: str) -> tuple[Series, ...]:
    """The names that stand for a metric, best first."""
    return tuple(series for series in SERIES if series.metric == metric)


assert {series.metric for series in SERIES} == set(METRICS)
