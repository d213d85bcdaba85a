"""Collections as training data: idle latency of every target, and slowdowns under load.

Rows are first corrected for drift of the machine: the reference is measured repeatedly at the lowest load,
and a row there is divided by the reference's relative latency around it.

Idle latencies are CPU times where these are valid (see `measure.idle`); other idle rows that other work
disturbed are omitted if there are better ones. Where CPU times are the idle latencies, a model's idle row
beside other work is also a measurement under the load of that work.

If kernels were measured in a stream (`measure.stream`), their latency is the device time in the stream;
kernels without separated times are omitted. That time needs no correction, since each run is paired with one
of the blocking kernel.
"""

from __future__ import annotations

import bisect
import logging
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sparseflow.core.telemetry.schema import METRICS
from sparseflow.errors import FileFormatError, InputError
from sparseflow.latency.graph.analysis import Graph
from sparseflow.latency.graph.kernels import KernelSpec
from sparseflow.latency.measure import descriptions
from sparseflow.latency.measure.collection import read_plan, read_rows
from sparseflow.latency.measure.fingerprint import DeviceFingerprint
from sparseflow.latency.measure.idle import (
    LOAD_METRICS,
    MAX_IDLE_LOAD,
    combine_idle_ms,
    compute_idle_ms,
    compute_other_load,
    describe_other_load,
    get_load_before,
    is_exact,
    is_quiet,
    select_idle_rows,
)
from sparseflow.latency.measure.plan import MODEL_OP
from sparseflow.latency.model.composition import VIEW_OPS

logger = logging.getLogger(__name__)

MIN_DEVICE_MS = 5e-4
"""Minimum device time of a kernel; smaller values are measurement noise."""

NUM_NEIGHBORS = 4
"""Number of reference measurements around a row that determine the machine's speed."""


@dataclass(frozen=True, kw_only=True)
class LoadedMeasurement:
    """One measurement under load.

    Attributes:
        target: Id of the kernel, or name of the model.
        is_model: Whether the target is a full model.
        level: Requested load, in [0, 1]; in an idle row, that of other work to a tenth.
        load: Metric -> share, read just before the measurement while the measured work was idle.
        achieved: Share of the stressor during that reading.
        idle_ms: Idle latency of the isolated target.
        slowdown: Mean latency over the idle latency.
        ratios: Each sample over the idle latency.
    """

    target: str
    is_model: bool
    level: float
    load: Mapping[str, float]
    achieved: float
    idle_ms: float
    slowdown: float
    ratios: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class LatencyDataset:
    """Combined collections of one device.

    Attributes:
        fingerprint: Device and settings.
        kernels: Id -> kernel, for measured kernels and kernels of measured models.
        graphs: Name -> graph, for measured models.
        idle_ms: Target -> idle latency; for a kernel in a stream its device time, 0 for a view.
        measurements_ms: Target -> latency of each measurement. Their median is `idle_ms`, or their minimum if
            other work was beside all of them.
        host_ms: Kernel id -> host time to issue it in a stream; empty without stream measurements.
        jitter: Target -> idle samples over the idle latency, without those disturbed by other work.
        idle_load: Metric -> median share while idle; empty if other work disturbed every idle row.
        other_load: Mean share of the device that other work used during the idle measurements in `idle_ms`;
            None if it was not read.
        loaded: Measurements under load.
        failed: Number of rows without a latency.
        measured_s: POSIX time of the last measurement.
    """

    fingerprint: DeviceFingerprint
    kernels: Mapping[str, KernelSpec]
    graphs: Mapping[str, Graph]
    idle_ms: Mapping[str, float]
    measurements_ms: Mapping[str, tuple[float, ...]]
    host_ms: Mapping[str, float]
    jitter: Mapping[str, tuple[float, ...]]
    idle_load: Mapping[str, float]
    other_load: float | None
    loaded: tuple[LoadedMeasurement, ...]
    failed: int
    measured_s: float

    def list_kernels(self) -> list[str]:
        """List the kernels measured while idle, sorted."""
        return sorted(name for name in self.idle_ms if name not in self.graphs)

    @property
    def free_ops(self) -> frozenset[str]:
        """Operators without device work: views, if host and device times are separated."""
        return VIEW_OPS if self.host_ms else frozenset()

    def list_device_kernels(self) -> list[str]:
        """List the kernels measured while idle that have device work, sorted."""
        return [name for name in self.list_kernels() if self.kernels[name].node_op not in self.free_ops]

    def list_models(self) -> list[str]:
        """List the models measured while idle, sorted."""
        return sorted(name for name in self.idle_ms if name in self.graphs)


def load_dataset(collections: Iterable[Path | str]) -> LatencyDataset:
    """Combine collections of one device.

    Args:
        collections: Directories written by `latency collect`, complete or not.

    Raises:
        InputError: There are none, they differ in device or settings, or contain no idle measurement.
        FileFormatError: One of them is damaged.
    """
    directories = [Path(folder) for folder in collections]
    if not directories:
        raise InputError("no collection given; create one with `sparseflow latency collect`")
    fingerprint = DeviceFingerprint.from_plan(read_plan(directories[0]))
    metric = LOAD_METRICS[fingerprint.kind]
    kernels: dict[str, KernelSpec] = {}
    graphs: dict[str, Graph] = {}
    rows: list[dict[str, Any]] = []
    failed = 0
    for folder in directories:
        current = DeviceFingerprint.from_plan(read_plan(folder))
        fingerprint.check_equal(current, f"the collection {folder}")
        kernels |= descriptions.read_kernels(folder)
        graphs |= descriptions.read_graphs(folder)
        collection_rows = read_rows(folder)
        valid = [row for row in collection_rows if row["error"] is None]
        failed += len(collection_rows) - len(valid)
        rows += _correct_drift(valid, metric)
    missing = {
        row["kernel_id"]
        for row in rows
        if row["kernel_id"] not in (graphs if row["op_type"] == MODEL_OP else kernels)
    }
    if missing:
        raise FileFormatError(
            f"{len(missing)} measured targets have no description, such as {min(missing)}: restore "
            f"`{descriptions.KERNELS}/` and `{descriptions.GRAPHS}/`, or collect into another directory"
        )
    idle_rows, loaded_rows = [r for r in rows if not r["level"]], [r for r in rows if r["level"]]
    if not idle_rows:
        raise InputError("there is no idle measurement: `levels` of a collection must include 0")
    if warning := describe_other_load(idle_rows, metric):
        logger.warning("%s", warning)
    beside_work = [
        (row, share)
        for row in idle_rows
        if is_exact(row)
        and row["op_type"] == MODEL_OP
        and (share := get_load_before(row).get(metric, 0.0)) > MAX_IDLE_LOAD
    ]
    idle_rows = select_idle_rows(idle_rows, metric)
    quiet_rows = [row for row in idle_rows if is_quiet(row, metric)]
    quiet_targets = {row["kernel_id"] for row in quiet_rows}
    isolated_ms = _group_by_target(
        (row["kernel_id"], compute_idle_ms(row) / row["pace"]) for row in idle_rows
    )
    idle_ms = {name: combine_idle_ms(values, name in quiet_targets) for name, values in isolated_ms.items()}
    device_ms, host = _collect_stream_times(idle_rows, kernels)
    measurements_ms = isolated_ms
    if device_ms:
        measurements_ms = device_ms | {name: isolated_ms[name] for name in isolated_ms if name in graphs}
    return LatencyDataset(
        fingerprint=fingerprint,
        kernels=kernels,
        graphs=graphs,
        idle_ms={
            name: statistics.median(values) if name in device_ms else idle_ms[name]
            for name, values in measurements_ms.items()
        },
        measurements_ms=measurements_ms,
        host_ms=host,
        jitter=_group_by_target(
            (row["kernel_id"], value * 1e-6 / row["pace"] / idle_ms[row["kernel_id"]])
            for row in quiet_rows
            for value in row["samples_ns"]
        ),
        idle_load=_compute_idle_load(quiet_rows),
        other_load=compute_other_load(idle_rows, metric),
        loaded=tuple(
            [_make_measurement(row, idle_ms) for row in loaded_rows if row["kernel_id"] in idle_ms]
            + [replace(_make_measurement(row, idle_ms), level=round(share, 1)) for row, share in beside_work]
        ),
        failed=failed,
        measured_s=max(row["start_s"] for row in rows),
    )


def _correct_drift(rows: list[dict[str, Any]], metric: str) -> list[dict[str, Any]]:
    """Add `pace` to rows of one collection, the relative latency of the reference around each; drop the
    reference. It is 1 if other work changed all idle latencies of the reference.
    """
    lowest = min((row["level"] for row in rows), default=0.0)
    reference = [
        row
        for row in rows
        if row["role"] == "reference"
        and row["level"] == lowest
        and (lowest or is_exact(row) or is_quiet(row, metric))
    ]
    if not reference:
        return [row | {"pace": 1.0} for row in rows if row["role"] != "reference"]
    typical_ms = statistics.median(map(compute_idle_ms, reference))
    reference.sort(key=lambda row: row["start_s"])
    times = [row["start_s"] for row in reference]
    corrected = []
    for row in rows:
        if row["role"] == "reference":
            # The reference cannot correct itself, and is not a sample of its target.
            continue
        index = bisect.bisect(times, row["start_s"])
        neighbors = reference[max(index - NUM_NEIGHBORS // 2, 0) : index + NUM_NEIGHBORS // 2]
        pace = statistics.median(map(compute_idle_ms, neighbors)) / typical_ms
        corrected.append(row | {"pace": pace})
    return corrected


def _group_by_target(pairs: Iterable[tuple[str, float]]) -> dict[str, tuple[float, ...]]:
    """Return target -> its values, sorted by target."""
    values: dict[str, list[float]] = {}
    for name, value in pairs:
        values.setdefault(name, []).append(value)
    return {name: tuple(values[name]) for name in sorted(values)}


def _collect_stream_times(
    rows: Sequence[Mapping[str, Any]], kernels: Mapping[str, KernelSpec]
) -> tuple[dict[str, tuple[float, ...]], dict[str, float]]:
    """Return the device times of all measurements and the median host time, by kernel id."""
    device: list[tuple[str, float]] = []
    host: list[tuple[str, float]] = []
    for row in rows:
        name = row["kernel_id"]
        if (
            row.get("device_ms") is None
            or row.get("host_ms") is None
            or row.get("overtaken")
            or name not in kernels
        ):
            continue
        is_view = kernels[name].node_op in VIEW_OPS
        device.append((name, 0.0 if is_view else max(row["device_ms"], MIN_DEVICE_MS)))
        host.append((name, row["host_ms"]))
    host_ms = {name: statistics.median(values) for name, values in _group_by_target(host).items()}
    return _group_by_target(device), host_ms


def _compute_idle_load(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    readings = [get_load_before(row) for row in rows]
    common_metrics = [name for name in METRICS if readings and all(name in reading for reading in readings)]
    return {name: statistics.median(reading[name] for reading in readings) for name in common_metrics}


def _make_measurement(row: Mapping[str, Any], idle_ms: Mapping[str, float]) -> LoadedMeasurement:
    corrected_idle_ms = idle_ms[row["kernel_id"]] * row["pace"]
    return LoadedMeasurement(
        target=row["kernel_id"],
        is_model=row["op_type"] == MODEL_OP,
        level=row["level"],
        load=get_load_before(row),
        achieved=row["stress_alone"],
        idle_ms=idle_ms[row["kernel_id"]],
        slowdown=row["latency_ms"] / corrected_idle_ms,
        ratios=tuple(value * 1e-6 / corrected_idle_ms for value in row["samples_ns"]),
    )
