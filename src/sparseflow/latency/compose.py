"""From what each kernel takes to what the whole graph takes.

Kernels that run one after the other add up; where a runtime overlaps them (`overlap.py` says whether), the
longest path through the graph counts. Inside a graph a kernel takes something else than alone: it needs no
call of its own, but finds less of what it reads in the caches; and what only renames a tensor, which alone
must copy it, costs next to nothing. These differences are learned from whole models as costs a kernel and a
byte, never as a factor over everything, which would punish models of few large kernels for those of many
small ones.

On a GPU host and device work at the same time, and kernels are measured in a stream (`stream.py`). There the
graph is a queue: a kernel begins when the host has issued it and the device is done with those before,

    latency = the longest, over all nodes k, of   what issuing up to k takes  +  what k and the rest take

so that small kernels hide behind large ones before them, and the other way round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sparseflow.core.extras import require
from sparseflow.errors import FileFormatError, InputError
from sparseflow.latency.graph import Graph
from sparseflow.latency.kernels import Kernel
from sparseflow.latency.overlap import CRITICAL_PATH, SUM

QUEUE = "queue"
MODES = (SUM, CRITICAL_PATH, QUEUE)

VIEWS = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Dropout"})
"""Operators whose output is their input under another shape."""

LEAST_SHARE = 0.05
"""Inside a graph a kernel takes at least this share of what it takes alone."""

_CAUTION = 0.25
"""How unlikely costs are that make up much of a model: the scatter of models over what costs make up."""

LEAST_VIEW_MS = 1e-4
"""A view is a node that is visited all the same."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A kernel's part in a graph's latency.

    Attributes:
        count: Nodes of it whose time counts.
        ms: What one of them adds, the mean over them, milliseconds.
    """

    count: int
    ms: float


@dataclass(frozen=True, kw_only=True)
class Composed:
    """A graph's latency and what it consists of: `call_ms` and every part, as often as it counts.

    Attributes:
        total_ms: The latency, milliseconds.
        call_ms: Of it what belongs to no kernel: the call itself.
        parts: Kernel's id -> its part.
    """

    total_ms: float
    call_ms: float
    parts: Mapping[str, Part]


@dataclass(frozen=True, kw_only=True)
class Composition:
    """What a kernel inside a graph costs beside what it takes alone. Make one with `Composition.fit`.

    Attributes:
        mode: `"sum"`, `"critical_path"` or `"queue"`.
        per_kernel_ms: Cost of a kernel, milliseconds; negative where the call of its own weighs more.
        per_view_ms: Cost of a kernel that only renames a tensor, whatever it takes alone, milliseconds. In a
            queue it is nothing to the device.
        per_weight_ms: Cost of a mebibyte of weights, milliseconds.
        per_flow_ms: Cost of a mebibyte of what flows in and out, milliseconds.
        issue_scale: In a queue, the host's time for a node over what was measured of it.
        per_issue_ms: In a queue, cost of a node to the host beside that, milliseconds, of either sign.
        call_ms: In a queue, cost of the call, milliseconds.
        models: Measured models that it is from.
    """

    mode: str = SUM
    per_kernel_ms: float = 0.0
    per_view_ms: float = 0.0
    per_weight_ms: float = 0.0
    per_flow_ms: float = 0.0
    issue_scale: float = 1.0
    per_issue_ms: float = 0.0
    call_ms: float = 0.0
    models: int = 0

    @classmethod
    def fit(
        cls,
        graphs: Sequence[Graph],
        alone_ms: Mapping[str, float],
        measured_ms: Sequence[float],
        mode: str = SUM,
        host_ms: Mapping[str, float] | None = None,
    ) -> Composition:
        """Learn from whole models; without any, a graph is no more than its kernels.

        Args:
            graphs: The models.
            alone_ms: Kernel's id -> what it takes alone, for every kernel of them; in a queue of the device.
            measured_ms: What each model takes.
            mode: `"sum"`, `"critical_path"` or `"queue"`.
            host_ms: Kernel's id -> what the host takes to issue it; needed by a queue.

        Raises:
            InputError: The lengths differ, or a kernel has no latency.
        """
        if len(graphs) != len(measured_ms):
            raise InputError(f"{len(graphs)} graphs and {len(measured_ms)} latencies")
        needed = {n.kernel_id for graph in graphs for n in graph.nodes}
        known = set(alone_ms) if mode != QUEUE else alone_ms.keys() & (host_ms or {}).keys()
        if needed - known:
            raise InputError(f"{len(needed - known)} kernels have no latency, {min(needed - known)} for one")
        if not graphs:
            return cls(mode=mode)
        if mode == QUEUE:
            costs = _fit_queue(graphs, alone_ms, measured_ms, host_ms or {})
        else:
            costs = _fit_sum(graphs, alone_ms, measured_ms, mode)
        return cls(mode=mode, models=len(graphs), **costs)

    def inside_ms(self, kernel: Kernel, alone_ms: float) -> float:
        """What a kernel takes inside a graph, given what it takes alone, milliseconds."""
        if kernel.node_op in VIEWS:
            if self.mode == QUEUE:
                return 0.0
            if not self.models:
                return alone_ms
            cost = max(self.per_view_ms, LEAST_VIEW_MS)
            return min(cost, alone_ms) if alone_ms else cost
        costs = (self.per_kernel_ms, self.per_view_ms, self.per_weight_ms, self.per_flow_ms)
        added = sum(cost * term for cost, term in zip(costs, _terms(kernel), strict=True))
        return max(alone_ms + added, LEAST_SHARE * alone_ms)

    def compose(
        self, graph: Graph, alone_ms: Mapping[str, float], host_ms: Mapping[str, float] | None = None
    ) -> Composed:
        """What a graph takes.

        Args:
            graph: The graph.
            alone_ms: Kernel's id -> what it takes alone; in a queue of the device.
            host_ms: Kernel's id -> what the host takes to issue it; needed by a queue.

        Raises:
            InputError: A queue has no `host_ms`.
        """
        if self.mode == QUEUE and host_ms is None:
            raise InputError("a queue is composed of what the host takes as well: give `host_ms`")
        kernels = {kernel.id: kernel for kernel in graph.kernels}
        inside = {name: self.inside_ms(kernel, alone_ms[name]) for name, kernel in kernels.items()}
        added: dict[str, list[float]] = {}
        if host_ms is not None and self.mode == QUEUE:
            host = [host_ms[node.kernel_id] for node in graph.nodes]
            host = [max(self.issue_scale * ms + self.per_issue_ms, LEAST_SHARE * ms) for ms in host]
            device = [inside[node.kernel_id] for node in graph.nodes]
            turn = _turn(host, device)
            for place, node in enumerate(graph.nodes):
                ms = (host[place] if place <= turn else 0.0) + (device[place] if place >= turn else 0.0)
                added.setdefault(node.kernel_id, []).append(ms)
        else:
            for kernel in counted_nodes(graph, inside, self.mode):
                added.setdefault(kernel.id, []).append(inside[kernel.id])
        parts = {name: Part(count=len(ms), ms=sum(ms) / len(ms)) for name, ms in added.items()}
        total = self.call_ms + sum(part.count * part.ms for part in parts.values())
        return Composed(total_ms=total, call_ms=self.call_ms, parts=parts)

    def to_dict(self) -> dict[str, Any]:
        """The costs in JSON's types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Composition:
        """Read back what `to_dict` gave. Raises FileFormatError where it is something else."""
        try:
            if set(record) != set(cls.__dataclass_fields__):
                raise TypeError(f"its fields are {sorted(record)}")
            found = cls(**record)
            numbers = [value for name, value in record.items() if name != "mode"]
            good = all(map(math.isfinite, numbers)) and found.call_ms >= 0.0
        except TypeError as error:
            raise FileFormatError(f"the costs of a composition cannot be read: {error!r}") from error
        if not good:
            raise FileFormatError("the costs of a composition cannot be read: a number is out of range")
        if found.mode not in MODES:
            raise FileFormatError(f"the composition {found.mode!r} must be one of: {', '.join(MODES)}")
        return found


def counted_nodes(graph: Graph, ms: Mapping[str, float], mode: str) -> list[Kernel]:
    """Kernels of the nodes whose latencies add up to the graph's: all, or those on the longest path."""
    if mode != CRITICAL_PATH:
        return [node.kernel for node in graph.nodes]
    on_path = set(critical_path(graph, ms))
    return [node.kernel for node in graph.nodes if node.name in on_path]


def critical_path(graph: Graph, ms: Mapping[str, float]) -> list[str]:
    """Names of the nodes on the longest path, in order.

    Args:
        graph: The graph; a node stands behind all that it reads from.
        ms: Kernel's id -> milliseconds.
    """
    ends: dict[str, float] = {}
    came: dict[str, str | None] = {}
    for node in graph.nodes:
        before = max(node.inputs, key=lambda name: ends[name], default=None)
        ends[node.name] = ms[node.kernel_id] + (ends[before] if before is not None else 0.0)
        came[node.name] = before
    path: list[str] = []
    at = max(ends, key=lambda name: ends[name], default=None)
    while at is not None:
        path.append(at)
        at = came[at]
    return path[::-1]


def _terms(kernel: Kernel) -> tuple[float, float, float, float]:
    """How often each cost occurs: a kernel, a view, mebibytes of weights, mebibytes that flow."""
    if kernel.node_op in VIEWS:
        return 0.0, 1.0, 0.0, 0.0
    mebibyte = 1 << 20
    weights = kernel.constant_bytes / mebibyte
    return 1.0, 0.0, weights, kernel.bytes_moved / mebibyte - weights


def _fit_sum(
    graphs: Sequence[Graph], alone_ms: Mapping[str, float], measured_ms: Sequence[float], mode: str
) -> dict[str, float]:
    """Costs of kernels that add up, by their names."""
    import numpy as np

    terms, rest = [], []
    for graph, measured in zip(graphs, measured_ms, strict=True):
        counted = counted_nodes(graph, alone_ms, mode)
        totals = np.sum([_terms(kernel) for kernel in counted], axis=0)
        # Relative errors count: each model is divided by what it takes.
        terms.append(totals / measured)
        alone = sum(alone_ms[kernel.id] for kernel in counted if kernel.node_op not in VIEWS)
        rest.append(1.0 - alone / measured)
    kernel, view, weight, flow = _least_squares(np.asarray(terms), np.asarray(rest))
    return {
        "per_kernel_ms": kernel, "per_view_ms": view, "per_weight_ms": weight, "per_flow_ms": flow,
    }  # fmt: skip


def _fit_queue(
    graphs: Sequence[Graph],
    alone_ms: Mapping[str, float],
    measured_ms: Sequence[float],
    host_ms: Mapping[str, float],
) -> dict[str, float]:
    """Costs of kernels in a queue, by their names."""
    import numpy as np

    optimize = require("scipy.optimize", "latency")
    models = []
    for graph, measured in zip(graphs, measured_ms, strict=True):
        terms = np.array([_terms(node.kernel) for node in graph.nodes])
        works = terms[:, 1] == 0.0
        device = np.array([alone_ms[node.kernel_id] for node in graph.nodes]) * works
        host = np.array([host_ms[node.kernel_id] for node in graph.nodes])
        models.append((terms[:, [0, 2, 3]], device, host, measured))
    # Each cost in units in which 1 is all of some model's latency.
    units = np.zeros(6)
    for terms, _, host, measured in models:
        sums = [*terms.sum(axis=0), host.sum(), len(host), 1.0]
        units = np.maximum(units, np.array(sums) / measured)
    units[units == 0.0] = 1.0

    def errors(values: np.ndarray) -> np.ndarray:
        values = values - 1.0
        *per_term, scale, issued, call = values / units
        found = []
        for terms, device, host, measured in models:
            work = np.maximum(device + terms @ np.array(per_term), LEAST_SHARE * device)
            issue = np.maximum((1.0 + scale) * host + issued, LEAST_SHARE * host)
            # The longest over all nodes of what is issued up to it and worked off from it on.
            longest = (np.cumsum(issue) + np.cumsum(work[::-1])[::-1]).max()
            found.append((longest + call) / measured - 1.0)
        return np.concatenate([found, _CAUTION * values])

    # Counted from 1, since a step of the search is a share of the value.
    lowest = np.array([-1.0, 0.0, 0.0, -min(1.0, units[3]), -1.0, 0.0])
    solved = optimize.least_squares(
        errors,
        np.ones(len(units)),
        bounds=(1.0 + lowest, np.full(len(units), 2.0)),
        diff_step=1e-4,
        loss="soft_l1",
        f_scale=0.05,
    )
    kernel, weight, flow, scale, issued, call = (float(value) for value in (solved.x - 1.0) / units)
    return {
        "per_kernel_ms": kernel, "per_weight_ms": weight, "per_flow_ms": flow, "issue_scale": 1.0 + scale,
        "per_issue_ms": issued, "call_ms": call,
    }  # fmt: skip


def _turn(host: Sequence[float], device: Sequence[float]) -> int:
    """Place of the node up to which the host decides, and from which on the device does."""
    issued, left = 0.0, sum(device)
    best, place = -1.0, 0
    for number, (ms, work) in enumerate(zip(host, device, strict=True)):
        issued += ms
        if issued + left > best:
            best, place = issued + left, number
        left -= work
    return place


def _least_squares(terms: Any, rest: Any) -> tuple[float, ...]:
    """Costs that are not negative, but for that of a kernel, which may have either sign."""
    import numpy as np

    # Twice the first column, with either sign, so that all unknowns may be held above 0.
    columns = np.column_stack([-terms[:, 0], terms])
    scale = np.abs(columns).max(axis=0)
    scale[scale == 0.0] = 1.0
    # A few models must not be explained by large costs that cancel each other.
    held = _CAUTION * np.eye(columns.shape[1])
    found, _ = require("scipy.optimize", "latency").nnls(
        np.vstack([columns / scale, held]), np.concatenate([rest, np.zeros(len(held))])
    )
    down, up, *others = (float(value) for value in found / scale)
    return up - down, *others
