"""Segments of consecutive layers and the traffic between them: the units that a mapping places on slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from sparseflow.codesign.workload.layers import to_float
from sparseflow.core.checks import check_at_least
from sparseflow.core.layers import LayerNode
from sparseflow.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Consecutive layers that run on one slot.

    Attributes:
        id: Index in the graph.
        layer_ids: Indices of the layers, ascending.
        flops: Sum over the layers.
        bytes: Bytes read and written, summed over the layers.
        weight_bytes: Sum over the layers.
        memory_bytes: All weights plus the largest activation memory of a layer.
        traffic_in_bytes: Size of the input state.
        traffic_out_bytes: Size of the output state.
    """

    id: int
    layer_ids: tuple[int, ...]
    flops: float
    bytes: float
    weight_bytes: int
    memory_bytes: int
    traffic_in_bytes: int
    traffic_out_bytes: int


@dataclass(frozen=True, kw_only=True)
class Edge:
    """Traffic from segment `src` to segment `dst`, in bytes per batch."""

    src: int
    dst: int
    traffic_bytes: int


@dataclass(frozen=True, kw_only=True)
class SegmentGraph:
    """Segments in execution order and the traffic between them.

    Raises:
        InputError: An edge refers to a missing segment or points backwards.
    """

    segments: tuple[Segment, ...]
    edges: tuple[Edge, ...]

    def __post_init__(self) -> None:
        for edge in self.edges:
            if not 0 <= edge.src < edge.dst < len(self.segments):
                raise InputError(
                    f"an edge goes from segment {edge.src} to {edge.dst}; expected from a lower index to a "
                    f"higher one, below {len(self.segments)}"
                )


def merge_layers(id: int, layers: Sequence[LayerNode]) -> Segment:
    """Merge consecutive layers into one segment."""
    return Segment(
        id=id,
        layer_ids=tuple(layer.id for layer in layers),
        flops=sum(to_float(layer.flops) for layer in layers),
        bytes=sum(to_float(layer.bytes) for layer in layers),
        weight_bytes=sum(layer.weight_bytes for layer in layers),
        memory_bytes=sum(layer.weight_bytes for layer in layers)
        + max(layer.memory_bytes - layer.weight_bytes for layer in layers),
        traffic_in_bytes=layers[0].traffic_in_bytes,
        traffic_out_bytes=layers[-1].traffic_out_bytes,
    )


def build_chain(layers: Sequence[LayerNode], first_layers: Sequence[int]) -> SegmentGraph:
    """Cut a chain of layers into segments.

    Args:
        layers: All layers, in order.
        first_layers: Index of the first layer of each segment, ascending from 0.

    Raises:
        InputError: There are no layers, or `first_layers` does not ascend from 0.
    """
    indices = list(first_layers)
    if indices[:1] != [0] or sorted(set(indices)) != indices or indices[-1] >= len(layers):
        raise InputError(
            f"`first_layers` (={indices}) must ascend from 0 and stay below the number of layers "
            f"(={len(layers)})"
        )
    bounds = pairwise([*indices, len(layers)])
    segments = tuple(merge_layers(index, layers[start:end]) for index, (start, end) in enumerate(bounds))
    edges = tuple(
        Edge(src=index, dst=index + 1, traffic_bytes=segment.traffic_out_bytes)
        for index, segment in enumerate(segments[:-1])
    )
    return SegmentGraph(segments=segments, edges=edges)


def build_balanced_chain(layers: Sequence[LayerNode], max_segments: int) -> SegmentGraph:
    """Cut layers into consecutive segments so that the largest segment has the fewest FLOPs.

    Args:
        layers: All layers, in order.
        max_segments: Maximum number of segments; there are never more segments than layers.

    Raises:
        InputError: There are no layers, or `max_segments` is below 1.
    """
    check_at_least(1, max_segments=max_segments, num_layers=len(layers))
    work = np.concatenate([[0.0], np.cumsum([to_float(layer.flops) for layer in layers])])
    n, k = len(layers), min(max_segments, len(layers))
    # best[j, i]: minimum over cuts of the largest of j segments of the first i layers.
    best = np.full((k + 1, n + 1), np.inf)
    last = np.zeros((k + 1, n + 1), dtype=np.int64)
    best[0, 0] = 0.0
    for j in range(1, k + 1):
        for i in range(j, n + 1):
            cuts = np.arange(j - 1, i)
            costs = np.maximum(best[j - 1, cuts], work[i] - work[cuts])
            index = int(costs.argmin())
            best[j, i], last[j, i] = costs[index], cuts[index]
    cuts, i = [], n
    for j in range(k, 0, -1):
        i = int(last[j, i])
        cuts.append(i)
    return build_chain(layers, cuts[::-1])
