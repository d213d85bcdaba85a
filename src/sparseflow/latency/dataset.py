"""What collections say, ready to learn from: a latency at rest for every item, and slowdowns beside loads.

Each row is set right for the machine's drift first: the reference item is measured again and again at the
least loaded level, and a row there is divided by how much slower than usual the reference was around it.

Where kernels were measured in a stream as well (`stream.py`), what they take is the device's time there, and
kernels that were only run alone, or whose two times were not told apart, are left out. That time needs no
setting right: each run of it is paired with one of the plug.
"""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparseflow.core.telemetry.schema import METRICS
from sparseflow.errors import FileFormatError, InputError
from sparseflow.latency import descriptions
from sparseflow.latency.campaign import MODEL_OP
from sparseflow.latency.collect import read, read_plan
from sparseflow.latency.compose import VIEWS
from sparseflow.latency.fingerprint import Fingerprint
from sparseflow.latency.graph import Graph
from sparseflow.latency.kernels import Kernel

BEFORE = "before_"
LEAST_DEVICE_MS = 5e-4
"""Less is no kernel of a GPU, but the scatter of the measurement."""

NEIGHBOURS = 4
"""Measurements of the reference around a row that tell how fast the machine was then."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """One measurement beside a load.

    Attributes:
        item: Id of the kernel, or name of the model.
        model: Whether it is a whole model.
        level: Load asked for, in [0, 1].
        stressor: Kind of load.
        load: Metric -> share, read just before, while the measured work rested.
        alone: Share that the load got then.
        rest_ms: Latency at rest, run alone, milliseconds.
        slowdown: Mean latency over that.
        ratios: Each sample over that.
    """

    item: str
    model: bool
    level: float
    stressor: str
    load: Mapping[str, float]
    alone: float
    rest_ms: float
    slowdown: float
    ratios: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Collections of one device put together.

    Attributes:
        fingerprint: The device and what ran there.
        kernels: Id -> description, of those that were measured and those that measured models run.
        graphs: Name -> graph, of the models that were measured.
        rest_ms: Item -> latency at rest, milliseconds; of a kernel in a stream the device's time, 0 where
            it is nothing to it.
        visits_ms: Item -> the same of each visit, of which that is the median.
        host_ms: Kernel's id -> the host's time to issue it in a stream; empty where none was measured so.
        jitter: Item -> samples at rest over that latency.
        calm: Metric -> share that was read at rest, the median.
        loaded: Measurements beside loads.
        failed: Rows without a latency.
    """

    fingerprint: Fingerprint
    kernels: Mapping[str, Kernel]
    graphs: Mapping[str, Graph]
    rest_ms: Mapping[str, float]
    visits_ms: Mapping[str, tuple[float, ...]]
    host_ms: Mapping[str, float]
    jitter: Mapping[str, tuple[float, ...]]
    calm: Mapping[str, float]
    loaded: tuple[Loaded, ...]
    failed: int

    def kernel_ids(self) -> list[str]:
        """Kernels that were measured at rest, sorted."""
        return sorted(name for name in self.rest_ms if name not in self.graphs)

    @property
    def nothing(self) -> frozenset[str]:
        """Operators whose kernels are nothing to the device: views, where host and device were told apart."""
        return VIEWS if self.host_ms else frozenset()

    def working_ids(self) -> list[str]:
        """Kernels that were measured at rest and are something to the device, sorted."""
        return [name for name in self.kernel_ids() if self.kernels[name].node_op not in self.nothing]

    def models(self) -> list[str]:
        """Models that were measured at rest, sorted."""
        return sorted(name for name in self.rest_ms if name in self.graphs)


def load(folders: Iterable[Path | str]) -> Dataset:
    """Put collections of one device together.

    Args:
        folders: Those that `latency collect` wrote, whole or not.

    Raises:
        InputError: There is none, they are of different devices or settings, or nothing was measured at
            rest.
        FileFormatError: One of them is damaged.
    """
    listed = [Path(folder) for folder in folders]
    if not listed:
        raise InputError("name at least one collection; make one with: sparseflow latency collect")
    fingerprint: Fingerprint | None = None
    kernels: dict[str, Kernel] = {}
    graphs: dict[str, Graph] = {}
    rows: list[dict[str, Any]] = []
    failed = 0
    for folder in listed:
        here = Fingerprint.of_plan(read_plan(folder))
        if fingerprint is None:
            fingerprint = here
        fingerprint.check(here, f"the collection {folder}")
        kernels |= descriptions.read_kernels(folder)
        graphs |= descriptions.read_graphs(folder)
        found = read(folder)
        good = [row for row in found if row["error"] is None]
        failed += len(found) - len(good)
        rows += _set_right(good)
    assert fingerprint is not None
    lost = {
        row["kernel_id"]
        for row in rows
        if row["kernel_id"] not in (graphs if row["op_type"] == MODEL_OP else kernels)
    }
    if lost:
        raise FileFormatError(
            f"{len(lost)} measured items have no description beside the rows, {min(lost)} for one: restore "
            f"`{descriptions.KERNELS}/` and `{descriptions.GRAPHS}/`, or collect into another folder"
        )
    at_rest, loaded = [r for r in rows if not r["level"]], [r for r in rows if r["level"]]
    if not at_rest:
        raise InputError("nothing was measured at rest: `levels` of a collection must hold 0")
    alone = _visits(at_rest)
    rest = {name: statistics.median(values) for name, values in alone.items()}
    visits, host = _streamed(at_rest, kernels)
    if visits:
        visits |= {name: values for name, values in alone.items() if name in graphs}
    else:
        visits = alone
    return Dataset(
        fingerprint=fingerprint,
        kernels=kernels,
        graphs=graphs,
        rest_ms={name: statistics.median(values) for name, values in visits.items()},
        visits_ms=visits,
        host_ms=host,
        jitter=_jitter(at_rest, rest),
        calm=_calm(at_rest),
        loaded=tuple(_loaded(row, rest) for row in loaded if row["kernel_id"] in rest),
        failed=failed,
    )


def _set_right(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of one collection with `pace`: how slow the machine was around each, 1 being usual."""
    lowest = min((row["level"] for row in rows), default=0.0)
    reference = [row for row in rows if row["role"] == "reference" and row["level"] == lowest]
    if not reference:
        return [row | {"pace": 1.0} for row in rows]
    usual = statistics.median(row["p50_ms"] for row in reference)
    reference.sort(key=lambda row: row["start_s"])
    times = [row["start_s"] for row in reference]
    set_right = []
    for row in rows:
        if row["role"] == "reference":
            # It cannot be set right by itself, and is no sample of its item.
            continue
        place = bisect.bisect(times, row["start_s"])
        around = reference[max(place - NEIGHBOURS // 2, 0) : place + NEIGHBOURS // 2]
        pace = statistics.median(near["p50_ms"] for near in around) / usual
        set_right.append(row | {"pace": pace})
    return set_right


def _visits(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, ...]]:
    """The median of each visit: at rest, what is slower was disturbed."""
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row["kernel_id"], []).append(row["p50_ms"] / row["pace"])
    return {name: tuple(values) for name, values in sorted(found.items())}


def _streamed(
    rows: Sequence[Mapping[str, Any]], kernels: Mapping[str, Kernel]
) -> tuple[dict[str, tuple[float, ...]], dict[str, float]]:
    """Kernel's id -> the device's time at each visit, and the host's time, of those measured in a stream."""
    device: dict[str, list[float]] = {}
    host: dict[str, list[float]] = {}
    for row in rows:
        name = row["kernel_id"]
        if row.get("device_ms") is None or row.get("overtaken") or name not in kernels:
            continue
        nothing = kernels[name].node_op in VIEWS
        device.setdefault(name, []).append(0.0 if nothing else max(row["device_ms"], LEAST_DEVICE_MS))
        host.setdefault(name, []).append(row["host_ms"])
    return (
        {name: tuple(values) for name, values in sorted(device.items())},
        {name: statistics.median(values) for name, values in sorted(host.items())},
    )


def _jitter(rows: Sequence[Mapping[str, Any]], rest: Mapping[str, float]) -> dict[str, tuple[float, ...]]:
    found: dict[str, list[float]] = {}
    for row in rows:
        scale = 1e-6 / row["pace"] / rest[row["kernel_id"]]
        found.setdefault(row["kernel_id"], []).extend(value * scale for value in row["samples_ns"])
    return {name: tuple(values) for name, values in found.items()}


def _calm(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    shares = [load_before(row) for row in rows]
    told = set.intersection(*(set(found) for found in shares)) if shares else set()
    return {name: statistics.median(found[name] for found in shares) for name in METRICS if name in told}


def _loaded(row: Mapping[str, Any], rest: Mapping[str, float]) -> Loaded:
    rest_ms = rest[row["kernel_id"]] * row["pace"]
    return Loaded(
        item=row["kernel_id"],
        model=row["op_type"] == MODEL_OP,
        level=row["level"],
        stressor=row["stressor"],
        load=load_before(row),
        alone=row["stress_alone"],
        rest_ms=rest[row["kernel_id"]],
        slowdown=row["latency_ms"] / rest_ms,
        ratios=tuple(value * 1e-6 / rest_ms for value in row["samples_ns"]),
    )


def load_before(row: Mapping[str, Any]) -> dict[str, float]:
    """Metric -> share, as read just before the block that a row is of."""
    return {name: row[BEFORE + name] for name in METRICS if isinstance(row.get(BEFORE + name), float)}
