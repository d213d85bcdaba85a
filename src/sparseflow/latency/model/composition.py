"""Latency of a graph from the latencies of its kernels.

Kernels that run one after another add up; if a runtime overlaps them (see `measure.overlap`), the longest
path counts. Inside a graph a kernel's latency differs from its isolated latency: it needs no call of its own,
but finds less of its input in the caches, and a view does not copy. These differences are learned from full
models as costs per kernel and per byte. A single factor would overestimate models of few large kernels and
underestimate those of many small ones.

On a GPU, host and device work concurrently and kernels are measured in a stream (`measure.stream`). The graph
is then a queue: a kernel starts when the host has issued it and the device has finished the previous ones, so
that ::

    latency = max over nodes k of   (issue time of the nodes up to k)  +  (device time of k and all later
    nodes)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import NonNegativeFloat

from sparseflow.core.checks import check_one_of
from sparseflow.core.extras import require
from sparseflow.errors import InputError
from sparseflow.latency.graph.analysis import Graph
from sparseflow.latency.graph.kernels import KernelSpec
from sparseflow.latency.measure.overlap import CRITICAL_PATH, SUM

QUEUE = "queue"
MODES = (SUM, CRITICAL_PATH, QUEUE)

VIEW_OPS = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Dropout"})
"""Operators whose output is their input with another shape."""

MIN_SHARE = 0.05
"""Minimum latency inside a graph, as a share of the isolated latency."""

_REGULARIZATION = 0.25
"""Weight of the penalty on costs, each as a share of a model's latency."""

_CACHES = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
_QUEUE_CACHES = (0.0, 4.0, 16.0)
"""Sizes of a cache that are fitted, mebibytes; a queue has few, because each takes seconds."""

_CACHE_RANGE = 4.0
"""Weights over the size of a cache at which nothing of them stays in it; up to 1 all of them stay."""

_NO_COSTS = {
    "per_kernel_ms": 0.0, "per_view_ms": 0.0, "per_weight_ms": 0.0, "per_activation_ms": 0.0,
    "cache": 0.0, "issue_scale": 1.0, "per_issue_ms": 0.0, "call_ms": 0.0,
}  # fmt: skip

MIN_VIEW_MS = 1e-4
"""Minimum cost of a view, which is still a node to execute."""


@dataclass(frozen=True, kw_only=True)
class KernelContribution:
    """Contribution of a kernel to a graph's latency.

    Attributes:
        count: Number of nodes whose time counts.
        ms: Mean contribution of one of them, milliseconds.
    """

    count: int
    ms: float


@dataclass(frozen=True, kw_only=True)
class ComposedLatency:
    """Latency of a graph: `call_ms` and the sum of all contributions.

    Attributes:
        total_ms: Latency.
        call_ms: Overhead of the call, which belongs to no kernel.
        parts: Kernel id -> contribution.
    """

    total_ms: float
    call_ms: float
    parts: Mapping[str, KernelContribution]

    def scale(self, factors: Mapping[str, float]) -> ComposedLatency:
        """Multiply the contributions by factors; `factors` maps every kernel id to one."""
        parts = {name: replace(part, ms=part.ms * factors[name]) for name, part in self.parts.items()}
        total_ms = self.call_ms + sum(part.count * part.ms for part in parts.values())
        return ComposedLatency(total_ms=total_ms, call_ms=self.call_ms, parts=parts)


@dataclass(frozen=True, kw_only=True)
class CompositionModel:
    """Costs of kernels inside a graph, relative to isolated kernels; create one with `CompositionModel.fit`.

    Attributes:
        mode: `"sum"`, `"critical_path"` or `"queue"`.
        per_kernel_ms: Cost per kernel; negative if the overhead of an isolated call is larger. Outside a
            queue its magnitude is at most the latency of the fastest isolated kernel.
        per_view_ms: Latency of a view, independent of its isolated latency; unused in a queue.
        per_weight_ms: Cost per mebibyte of weights that come from the cache if the kernel runs alone, but not
            in the graph.
        cache: Size of that cache, mebibytes; 0 if all weights have the cost.
        per_activation_ms: Cost per mebibyte of activations, inputs and outputs.
        issue_scale: In a queue, factor of the measured host time.
        per_issue_ms: In a queue, additional host time per node, of either sign.
        call_ms: Overhead of the call; outside a queue the part of an isolated kernel's latency that one in a
            graph does not have.
        models: Number of models of the fit.
    """

    mode: str
    per_kernel_ms: float
    per_view_ms: float
    per_weight_ms: float
    per_activation_ms: float
    cache: NonNegativeFloat
    issue_scale: float
    per_issue_ms: float
    call_ms: NonNegativeFloat
    models: int

    def __post_init__(self) -> None:
        check_one_of(MODES, mode=self.mode)

    @classmethod
    def fit(
        cls,
        graphs: Sequence[Graph],
        isolated_ms: Mapping[str, float],
        measured_ms: Sequence[float],
        mode: str = SUM,
        host_ms: Mapping[str, float] | None = None,
    ) -> CompositionModel:
        """Fit to full models; without any, the costs are zero.

        Args:
            graphs: Graphs of the models.
            isolated_ms: Kernel id -> isolated latency, for every kernel; in a queue the device time.
            measured_ms: Latency of each model.
            mode: `"sum"`, `"critical_path"` or `"queue"`.
            host_ms: Kernel id -> host time to issue it; required for a queue.

        Raises:
            InputError: The lengths differ, or a kernel has no latency.
        """
        if len(graphs) != len(measured_ms):
            raise InputError(
                f"expected one latency per graph, got {len(graphs)} graphs and {len(measured_ms)} latencies"
            )
        needed = {n.kernel_id for graph in graphs for n in graph.nodes}
        known = set(isolated_ms) if mode != QUEUE else isolated_ms.keys() & (host_ms or {}).keys()
        if needed - known:
            raise InputError(f"{len(needed - known)} kernels have no latency, such as {min(needed - known)}")
        costs = {}
        if graphs and mode == QUEUE:
            costs = _fit_queue(graphs, isolated_ms, measured_ms, host_ms or {})
        elif graphs:
            costs = _fit_sum(graphs, isolated_ms, measured_ms, mode)
        return cls(mode=mode, models=len(graphs), **(_NO_COSTS | costs))

    def predict_kernel_ms(self, kernel: KernelSpec, isolated_ms: float, weights: float = 0.0) -> float:
        """Return the latency of a kernel inside a graph.

        Args:
            kernel: The kernel.
            isolated_ms: Its isolated latency.
            weights: Weights of the graph, mebibytes.
        """
        if kernel.node_op in VIEW_OPS:
            if self.mode == QUEUE:
                return 0.0
            if not self.models:
                return isolated_ms
            cost = max(self.per_view_ms, MIN_VIEW_MS)
            return min(cost, isolated_ms) if isolated_ms else cost
        costs = (self.per_kernel_ms, self.per_view_ms, self.per_weight_ms, self.per_activation_ms)
        terms = _compute_terms(kernel, weights, self.cache)
        added = sum(cost * term for cost, term in zip(costs, terms, strict=True))
        return max(isolated_ms + added, MIN_SHARE * isolated_ms)

    def compose(
        self, graph: Graph, isolated_ms: Mapping[str, float], host_ms: Mapping[str, float] | None = None
    ) -> ComposedLatency:
        """Compute the latency of a graph.

        Args:
            graph: Graph of the model.
            isolated_ms: Kernel id -> isolated latency; in a queue the device time.
            host_ms: Kernel id -> host time to issue it; required for a queue.

        Raises:
            InputError: `host_ms` is missing for a queue.
        """
        if self.mode == QUEUE and host_ms is None:
            raise InputError("`host_ms` is required for the mode queue")
        kernels = {kernel.id: kernel for kernel in graph.kernels}
        weights = _count_weights(graph)
        inside = {
            name: self.predict_kernel_ms(kernel, isolated_ms[name], weights)
            for name, kernel in kernels.items()
        }
        contributions_ms: dict[str, list[float]] = {}
        if host_ms is not None and self.mode == QUEUE:
            host = [host_ms[node.kernel_id] for node in graph.nodes]
            host = [max(self.issue_scale * ms + self.per_issue_ms, MIN_SHARE * ms) for ms in host]
            device = [inside[node.kernel_id] for node in graph.nodes]
            # The node that determines the latency: before it the host is slower, after it the device.
            crossover = _compute_end_times_ms(host, device).argmax() if host else 0
            for position, node in enumerate(graph.nodes):
                issue_ms = host[position] if position <= crossover else 0.0
                device_ms = device[position] if position >= crossover else 0.0
                contributions_ms.setdefault(node.kernel_id, []).append(issue_ms + device_ms)
        else:
            for kernel in list_counted_kernels(graph, inside, self.mode):
                contributions_ms.setdefault(kernel.id, []).append(inside[kernel.id])
        parts = {
            name: KernelContribution(count=len(ms), ms=sum(ms) / len(ms))
            for name, ms in contributions_ms.items()
        }
        total = self.call_ms + sum(part.count * part.ms for part in parts.values())
        return ComposedLatency(total_ms=total, call_ms=self.call_ms, parts=parts)


def list_counted_kernels(graph: Graph, ms: Mapping[str, float], mode: str) -> list[KernelSpec]:
    """List the kernels whose latencies add up to the graph's: those of all nodes, or of the longest path."""
    if mode != CRITICAL_PATH:
        return [node.kernel for node in graph.nodes]
    on_path = set(find_critical_path(graph, ms))
    return [node.kernel for node in graph.nodes if node.name in on_path]


def find_critical_path(graph: Graph, ms: Mapping[str, float]) -> list[str]:
    """Return the names of the nodes on the longest path, in order.

    Args:
        graph: Graph with nodes in topological order.
        ms: Kernel id -> milliseconds.
    """
    end_ms: dict[str, float] = {}
    predecessors: dict[str, str | None] = {}
    for node in graph.nodes:
        before = max(node.inputs, key=lambda name: end_ms[name], default=None)
        end_ms[node.name] = ms[node.kernel_id] + (end_ms[before] if before is not None else 0.0)
        predecessors[node.name] = before
    path: list[str] = []
    node_name = max(end_ms, key=lambda name: end_ms[name], default=None)
    while node_name is not None:
        path.append(node_name)
        node_name = predecessors[node_name]
    return path[::-1]


def _count_weights(graph: Graph) -> float:
    """Return the mebibytes of all weights that a run reads."""
    return sum(_get_weight_bytes(node.kernel) for node in graph.nodes) / 2**20


def _get_weight_bytes(kernel: KernelSpec) -> float:
    """Return the bytes of weights that a kernel reads; a lookup reads few rows of a large table."""
    return min(kernel.constant_bytes, kernel.bytes_moved)


def _compute_terms(
    kernel: KernelSpec, graph_weights: float, cache: float
) -> tuple[float, float, float, float]:
    """Return the multiplicities of the costs: kernels, views, mebibytes of weights and of activations.

    Weights only count if they are in the cache when the kernel runs alone, but not in the graph.
    """
    if kernel.node_op in VIEW_OPS:
        return 0.0, 1.0, 0.0, 0.0
    mebibyte = 1 << 20
    weights = _get_weight_bytes(kernel) / mebibyte
    uncached = 1.0
    if cache:
        uncached = _compute_cached_share(weights, cache) * (1.0 - _compute_cached_share(graph_weights, cache))
    return 1.0, 0.0, uncached * weights, kernel.bytes_moved / mebibyte - weights


def _compute_cached_share(weights: float, cache: float) -> float:
    """Return the share of weights that stay in a cache between two runs, both in mebibytes."""
    return min(max((_CACHE_RANGE - weights / cache) / (_CACHE_RANGE - 1.0), 0.0), 1.0)


def _fit_sum(
    graphs: Sequence[Graph], isolated_ms: Mapping[str, float], measured_ms: Sequence[float], mode: str
) -> dict[str, float]:
    """Fit the costs of kernels that add up."""
    import numpy as np

    counted = [list_counted_kernels(graph, isolated_ms, mode) for graph in graphs]
    kernels_ms = np.array(
        [sum(isolated_ms[k.id] for k in kernels if k.node_op not in VIEW_OPS) for kernels in counted]
    )
    measured = np.asarray(measured_ms, float)
    targets = 1.0 - kernels_ms / measured
    # Inside a graph a kernel needs no call of its own, so its cost is at most one launch, of either sign.
    launch_ms = min(isolated_ms[kernel_id] for graph in graphs for kernel_id in graph.count_kernel_uses())
    max_launch_ms = max(launch_ms, MIN_VIEW_MS)
    weights = [_count_weights(graph) for graph in graphs]
    solutions = []
    for cache in _CACHES:
        totals = [
            np.sum([_compute_terms(kernel, total, cache) for kernel in kernels], axis=0)
            for total, kernels in zip(weights, counted, strict=True)
        ]
        # Divided by the latency, so that errors are relative.
        terms = np.array(totals) / measured[:, None]
        calls = np.outer(1.0 / measured, [1.0, 0.0, 0.0, 0.0])
        costs, error = _solve_least_squares(terms - calls, targets, max_launch_ms)
        if costs[0] > 0.0:
            # A graph has no call that its isolated kernels have not.
            costs, error = _solve_least_squares(terms, targets, max_launch_ms)
        solutions.append((error, cache, costs))
    _, cache, (kernel, view, weight, flow) = min(solutions)
    return {
        "per_kernel_ms": kernel, "per_view_ms": view, "per_weight_ms": weight, "per_activation_ms": flow,
        "cache": cache, "call_ms": max(-kernel, 0.0),
    }  # fmt: skip


def _fit_queue(
    graphs: Sequence[Graph],
    isolated_ms: Mapping[str, float],
    measured_ms: Sequence[float],
    host_ms: Mapping[str, float],
) -> dict[str, float]:
    """Fit the costs of kernels in a queue."""
    solutions = [
        _fit_queue_costs(graphs, isolated_ms, measured_ms, host_ms, cache) for cache in _QUEUE_CACHES
    ]
    return min(solutions, key=lambda solution: solution[0])[1]


def _fit_queue_costs(
    graphs: Sequence[Graph],
    isolated_ms: Mapping[str, float],
    measured_ms: Sequence[float],
    host_ms: Mapping[str, float],
    cache: float,
) -> tuple[float, dict[str, float]]:
    """Fit the costs of kernels in a queue for a size of the cache; return the error and the costs."""
    import numpy as np

    optimize = require("scipy.optimize", "latency")
    models = []
    for graph, measured in zip(graphs, measured_ms, strict=True):
        weights = _count_weights(graph)
        terms = np.array([_compute_terms(node.kernel, weights, cache) for node in graph.nodes])
        on_device = terms[:, 1] == 0.0
        device = np.array([isolated_ms[node.kernel_id] for node in graph.nodes]) * on_device
        host = np.array([host_ms[node.kernel_id] for node in graph.nodes])
        models.append((terms[:, [0, 2, 3]], device, host, measured))
    # Unit of each cost: 1 is the full latency of some model.
    units = np.zeros(6)
    for terms, _, host, measured in models:
        sums = [*terms.sum(axis=0), host.sum(), len(host), 1.0]
        units = np.maximum(units, np.array(sums) / measured)
    units[units == 0.0] = 1.0

    def errors(values: np.ndarray) -> np.ndarray:
        values = values - 1.0
        *per_term, scale, issued, call = values / units
        relative_errors = []
        for terms, device, host, measured in models:
            work = np.maximum(device + terms @ np.array(per_term), MIN_SHARE * device)
            issue = np.maximum((1.0 + scale) * host + issued, MIN_SHARE * host)
            longest = _compute_end_times_ms(issue, work).max()
            relative_errors.append((longest + call) / measured - 1.0)
        return np.concatenate([relative_errors, _REGULARIZATION * values])

    # Offset by 1, since `diff_step` is relative to the value.
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
    costs = {
        "per_kernel_ms": kernel, "per_weight_ms": weight, "per_activation_ms": flow, "cache": cache,
        "issue_scale": 1.0 + scale, "per_issue_ms": issued, "call_ms": call,
    }  # fmt: skip
    return float(solved.cost), costs


def _compute_end_times_ms(host: Any, device: Any) -> Any:
    """Return, for each node, the issue time of all nodes up to it plus the device time from it on."""
    import numpy as np

    return np.cumsum(host) + np.cumsum(device[::-1])[::-1]


def _solve_least_squares(terms: Any, targets: Any, max_first: float) -> tuple[list[float], float]:
    """Solve for non-negative costs, except for the first one, whose magnitude is at most `max_first`.

    Returns:
        The costs, and the squared error with the penalty.
    """
    import numpy as np

    scale = np.abs(terms).max(axis=0)
    scale[scale == 0.0] = 1.0
    # Prevents large costs that cancel each other when there are only a few models.
    penalty = _REGULARIZATION * np.eye(terms.shape[1])
    lowest, highest = np.zeros(terms.shape[1]), np.full(terms.shape[1], np.inf)
    lowest[0], highest[0] = -max_first * scale[0], max_first * scale[0]
    solved = require("scipy.optimize", "latency").lsq_linear(
        np.vstack([terms / scale, penalty]),
        np.concatenate([targets, np.zeros(len(penalty))]),
        bounds=(lowest, highest),
        method="bvls",
    )
    return (solved.x / scale).tolist(), float(solved.cost)
