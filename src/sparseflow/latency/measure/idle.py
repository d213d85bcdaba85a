"""Idle measurements on a device that other work uses too.

On a CPU with one thread, onnxruntime and OpenVINO run in the calling thread. The CPU time of that thread is
then the latency that a run has without other work, apart from colder caches, so the fastest of several rows
counts. This holds for short and long runs alike, whereas the least disturbed samples would be faster only for
runs that are shorter than a time slice, and the sum of kernels would be too small for a network.

With several threads, the CPU time of the calling thread contains the time in which it waits for the other
threads by spinning. Beside other work it is only an upper bound, as is the wall time on a GPU. Such rows are
used only for targets without undisturbed rows, and the predictor says so.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from sparseflow.core.telemetry.schema import METRICS
from sparseflow.latency.graph import session

LOAD_METRICS: Mapping[str, str] = {"cpu": "others", "cuda": "busy"}
"""Device type -> metric that is the time share of other work on the device."""

MAX_IDLE_LOAD = 0.1
"""Largest share of a device that other work uses while the device counts as idle."""

BEFORE_PREFIX = "before_"

Row = Mapping[str, Any]
RowT = TypeVar("RowT", bound=Row)


def get_load_before(row: Row) -> dict[str, float]:
    """Return metric -> share of the reading just before the row's block."""
    return {
        name: row[BEFORE_PREFIX + name]
        for name in METRICS
        if isinstance(row.get(BEFORE_PREFIX + name), float)
    }


def is_exact(row: Row) -> bool:
    """Return whether `compute_idle_ms` of a row is right beside other work: on a CPU with one thread."""
    return _has_cpu_time(row) and row.get("threads") == 1


def compute_idle_ms(row: Row) -> float:
    """Return the latency of a row without the time in which other work had the CPU, milliseconds."""
    # The median, since slower samples were disturbed.
    if not _has_cpu_time(row):
        return row["p50_ms"]
    cpu_ms = row["latency_ms"] * row["cpu_ratio"]
    if is_quiet(row, LOAD_METRICS["cpu"]):
        return min(row["p50_ms"], cpu_ms)
    # Of several threads, rarely all run undisturbed.
    return cpu_ms if row.get("threads") == 1 else min(min(row["samples_ns"]) / 1e6, cpu_ms)


def get_other_load(row: Row, metric: str) -> float | None:
    """Return the share of the device that other work used around a row; None if it was not read.

    On a CPU other work can start after the reading. Then the measuring thread waits for a CPU, and the share
    in which it waited counts if it is larger.
    """
    before = get_load_before(row).get(metric)
    return max(before or 0.0, 1.0 - row["cpu_ratio"]) if _has_cpu_time(row) else before


def is_quiet(row: Row, metric: str) -> bool:
    """Return whether other work used at most `MAX_IDLE_LOAD` around a row, or was not read."""
    return (get_other_load(row, metric) or 0.0) <= MAX_IDLE_LOAD


def compute_other_load(rows: Iterable[Row], metric: str) -> float | None:
    """Return the mean share of the device that other work used in idle rows; None if it was not read."""
    shares = [share for row in rows if (share := get_other_load(row, metric)) is not None]
    return statistics.fmean(shares) if shares else None


def select_idle_rows(rows: Sequence[RowT], metric: str) -> list[RowT]:
    """Omit rows beside other work, except for targets that have no other rows."""
    quiet = {row["kernel_id"] for row in rows if is_quiet(row, metric)}
    return [row for row in rows if is_quiet(row, metric) or row["kernel_id"] not in quiet]


def combine_idle_ms(values_ms: Sequence[float], quiet: bool) -> float:
    """Return the idle latency of a target from those of its rows: the median of quiet rows, else the minimum.

    Other work empties caches and uses memory bandwidth, so it adds to CPU times, too, but subtracts nothing.
    """
    return statistics.median(values_ms) if quiet else min(values_ms)


def describe_other_load(rows: Sequence[Row], metric: str) -> str | None:
    """Say how other work affects the idle latencies of these rows; None if it does not."""
    other_load = compute_other_load(rows, metric)
    if other_load is None or other_load <= MAX_IDLE_LOAD:
        return None
    selected = select_idle_rows(rows, metric)
    num_disturbed = sum(not (is_exact(row) or is_quiet(row, metric)) for row in selected)
    if num_disturbed:
        effect = (
            f"{num_disturbed} of {len(rows)} idle latencies are too high: stop the other work and collect "
            "again, or on a CPU collect with `threads: 1`, whose CPU time other work does not change"
        )
    elif len(selected) < len(rows):
        effect = f"training omits {len(rows) - len(selected)} of {len(rows)}"
    else:
        effect = "training uses their CPU times, which it does not change"
    return f"other work used {100 * other_load:.0f} % of the device during the idle measurements; {effect}"


def _has_cpu_time(row: Row) -> bool:
    """Return whether the CPU time of the calling thread is at least the latency without other work.

    With several threads of OpenVINO, the calling thread sleeps.
    """
    provider = row.get("provider")
    is_bound = provider == session.PROVIDERS["cpu"] or row.get("threads") == 1
    return provider in session.CPU_PROVIDERS and is_bound and bool(row.get("cpu_ratio"))
