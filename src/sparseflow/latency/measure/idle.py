"""Idle measurements on a device that other work uses too.

On a CPU with one thread, onnxruntime and OpenVINO run in the calling thread. The CPU time of that thread is
then the latency that a run has without other work, apart from colder caches. Where other work is present, the
samples that it disturbed least are closer still, if they are shorter than a time slice.

Elsewhere an idle row is valid only while other work uses at most `MAX_IDLE_LOAD` of the device.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from sparseflow.core.metrics import quantile
from sparseflow.core.telemetry.schema import METRICS
from sparseflow.latency.graph import session

LOAD_METRICS: Mapping[str, str] = {"cpu": "others", "cuda": "busy"}
"""Device type -> metric that is the time share of other work on the device."""

MAX_IDLE_LOAD = 0.1
"""Largest share of a device that other work uses while the device counts as idle."""

_LEAST_DISTURBED = 0.1
"""Quantile of the samples that other work disturbs least."""

BEFORE_PREFIX = "before_"

Row = Mapping[str, Any]


def get_load_before(row: Row) -> dict[str, float]:
    """Return metric -> share of the reading just before the row's block."""
    return {
        name: row[BEFORE_PREFIX + name]
        for name in METRICS
        if isinstance(row.get(BEFORE_PREFIX + name), float)
    }


def has_cpu_time(row: Row) -> bool:
    """Return whether the CPU time of the measuring thread is the latency of a row without other work."""
    return (
        row.get("provider") in session.CPU_PROVIDERS
        and row.get("threads") == 1
        and bool(row.get("cpu_ratio"))
    )


def compute_idle_ms(row: Row) -> float:
    """Return the latency of a row without the time in which other work had the CPU, milliseconds."""
    # The median, since slower samples were disturbed.
    if not has_cpu_time(row):
        return row["p50_ms"]
    cpu_ms = row["latency_ms"] * row["cpu_ratio"]
    if is_quiet(row, LOAD_METRICS["cpu"]):
        return min(row["p50_ms"], cpu_ms)
    return min(quantile(row["samples_ns"], _LEAST_DISTURBED) / 1e6, cpu_ms)


def is_quiet(row: Row, metric: str) -> bool:
    """Return whether other work used at most `MAX_IDLE_LOAD` before the row, or was not read."""
    return get_load_before(row).get(metric, 0.0) <= MAX_IDLE_LOAD


def compute_other_load(rows: Iterable[Row], metric: str) -> float | None:
    """Return the median share of the device that other work used in idle rows; None if it was not read."""
    shares = [load[metric] for row in rows if metric in (load := get_load_before(row))]
    return statistics.median(shares) if shares else None
