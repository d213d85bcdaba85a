"""From what each kernel takes to what the whole graph takes.

Kernels that run one after the other add up; where a runtime overlaps them (`overlap.py` says whether), the
longest path through the graph counts. Inside a graph a kernel takes something else than alone: it needs no
call of its own, but finds less of what it reads in the caches; and what only renames a tensor, which alone
must copy it, costs next to nothing. These differences are learned from whole models as costs a kernel and a
byte, never as a factor over everything, which would punish models of few large kernels for those of many
small ones.
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

MODES = (SUM, CRITICAL_PATH)

VIEWS = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Dropout"})
"""Operators whose output is their input under another shape."""

LEAST_SHARE = 0.05
"""Inside a graph a kernel takes at least this share of what it takes alone."""

_CAUTION = 0.25
"""How unlikely costs are that make up much of a model: the scatter of models over what costs make up."""

LEAST_VIEW_MS = 1e-4
"""A view is a node that is visited all the same."""


@dataclass(frozen=True, kw_only=True)
class Composition:
    """What a kernel inside a graph costs beside what it takes alone. Make one with `Composition.fit`.

    Attributes:
        mode: `"sum"` or `"critical_path"`.
        per_kernel_ms: Cost of a kernel, milliseconds; negative where the call of its own weighs more.
        per_view_ms: Cost of a kernel that only renames a tensor, whatever it takes alone, milliseconds.
        per_weight_ms: Cost of a mebibyte of weights, milliseconds.
        per_flow_ms: Cost of a mebibyte of what flows in and out, milliseconds.
        models: Measured models that it is from.
    """

    mode: str
    per_kernel_ms: float
    per_view_ms: float
    per_weight_ms: float
    per_flow_ms: float
    models: int

    @classmethod
    def fit(
        cls,
        graphs: Sequence[Graph],
        alone_ms: Mapping[str, float],
        measured_ms: Sequence[float],
        mode: str = SUM,
    ) -> Composition:
        """Learn from whole models; without any, a graph is no more than its kernels.

        Args:
            graphs: The models.
            alone_ms: Kernel's id -> what it takes alone, for every kernel of them.
            measured_ms: What each model takes.
            mode: `"sum"` or `"critical_path"`.

        Raises:
            InputError: The lengths differ, or a kernel has no latency.
        """
        import numpy as np

        if len(graphs) != len(measured_ms):
            raise InputError(f"{len(graphs)} graphs and {len(measured_ms)} latencies")
        absent = {n.kernel_id for graph in graphs for n in graph.nodes} - alone_ms.keys()
        if absent:
            raise InputError(f"{len(absent)} kernels have no latency, {sorted(absent)[0]} for one")
        if not graphs:
            return cls(
                mode=mode, per_kernel_ms=0.0, per_view_ms=0.0, per_weight_ms=0.0, per_flow_ms=0.0, models=0
            )
        terms, rest = [], []
        for graph, measured in zip(graphs, measured_ms, strict=True):
            counted = counted_nodes(graph, alone_ms, mode)
            totals = np.sum([_terms(kernel) for kernel in counted], axis=0)
            # Relative errors count: each model is divided by what it takes.
            terms.append(totals / measured)
            alone = sum(alone_ms[kernel.id] for kernel in counted if kernel.node_op not in VIEWS)
            rest.append(1.0 - alone / measured)
        found = _least_squares(np.asarray(terms), np.asarray(rest))
        return cls(
            mode=mode,
            per_kernel_ms=found[0],
            per_view_ms=found[1],
            per_weight_ms=found[2],
            per_flow_ms=found[3],
            models=len(graphs),
        )

    def inside_ms(self, kernel: Kernel, alone_ms: float) -> float:
        """What a kernel takes inside a graph, given what it takes alone, milliseconds."""
        if kernel.node_op in VIEWS:
            return min(max(self.per_view_ms, LEAST_VIEW_MS), alone_ms) if self.models else alone_ms
        costs = (self.per_kernel_ms, self.per_view_ms, self.per_weight_ms, self.per_flow_ms)
        added = sum(cost * term for cost, term in zip(costs, _terms(kernel), strict=True))
        return max(alone_ms + added, LEAST_SHARE * alone_ms)

    def counts(self, graph: Graph, ms: Mapping[str, float]) -> dict[str, int]:
        """Kernel's id -> nodes of it whose latencies add up to the graph's, given what each kernel takes."""
        found: dict[str, int] = {}
        for kernel in counted_nodes(graph, ms, self.mode):
            found[kernel.id] = found.get(kernel.id, 0) + 1
        return found

    def to_dict(self) -> dict[str, Any]:
        """The costs in JSON's types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Composition:
        """Read back what `to_dict` gave. Raises FileFormatError where it is something else."""
        try:
            found = cls(**record)
            costs = (found.per_kernel_ms, found.per_view_ms, found.per_weight_ms, found.per_flow_ms)
            good = all(map(math.isfinite, (*costs, found.models)))
        except TypeError as error:
            raise FileFormatError(f"the costs of a composition cannot be read: {error!r}") from error
        if not good:
            raise FileFormatError("the costs of a composition cannot be read: a number is not finite")
        if found.mode not in MODES:
            raise FileFormatError(f"the composition {found.mode!r} must be one of: {', '.join(MODES)}")
        return found


def counted_nodes(graph: Graph, ms: Mapping[str, float], mode: str) -> list[Kernel]:
    """Kernels of the nodes whose latencies add up to the graph's: all, or those on the longest path."""
    if mode == SUM:
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
