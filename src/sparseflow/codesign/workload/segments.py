"""Layers gathered into segments, and what segments send each other: what a mapping places on slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sparseflow.codesign.workload.layers import number
from sparseflow.core.layers import LayerNode
from sparseflow.errors import InputError

__all__ = ["Edge", "LayerNode", "Segment", "SegmentGraph", "chain", "coarse", "number"]


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Layers that run on one slot, one after the other.

    Attributes:
        id: Its place in the graph.
        layer_ids: Of its layers, ascending.
        flops: Sum over layers.
        bytes: Sum over layers.
        weight_bytes: Sum over layers.
        memory_bytes: All weights, and the most activations that a layer of it holds at a time.
        traffic_in_bytes: Of the state that comes in.
        traffic_out_bytes: Of the state that goes out.
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
    """What a segment sends another: `traffic_bytes` for each batch."""

    src: int
    dst: int
    traffic_bytes: int


@dataclass(frozen=True, kw_only=True)
class SegmentGraph:
    """Segments in the order they run, and what flows between them.

    Raises:
        InputError: An edge names a segment that is not there, or leads backwards.
    """

    segments: tuple[Segment, ...]
    edges: tuple[Edge, ...]

    def __post_init__(self) -> None:
        for edge in self.edges:
            if not 0 <= edge.src < edge.dst < len(self.segments):
                raise InputError(
                    f"an edge leads from segment {edge.src} to {edge.dst}; expected from a lower number to a "
                    f"higher one, below {len(self.segments)}"
                )

    def traffic(self) -> np.ndarray:
        """Bytes from each segment to each other, float64 [K, K]."""
        found = np.zeros((len(self.segments), len(self.segments)))
        for edge in self.edges:
            found[edge.src, edge.dst] += edge.traffic_bytes
        return found


def gathered(id: int, layers: Sequence[LayerNode]) -> Segment:
    """One segment of consecutive layers."""
    return Segment(
        id=id,
        layer_ids=tuple(layer.id for layer in layers),
        flops=sum(number(layer.flops) for layer in layers),
        bytes=sum(number(layer.bytes) for layer in layers),
        weight_bytes=sum(layer.weight_bytes for layer in layers),
        memory_bytes=sum(layer.weight_bytes for layer in layers)
        + max(layer.memory_bytes - layer.weight_bytes for layer in layers),
        traffic_in_bytes=layers[0].traffic_in_bytes,
        traffic_out_bytes=layers[-1].traffic_out_bytes,
    )


def chain(layers: Sequence[LayerNode], begins: Sequence[int]) -> SegmentGraph:
    """Cut layers that run one after the other into segments.

    Args:
        layers: All of them, in order.
        begins: Place of the first layer of each segment, ascending, from 0.

    Raises:
        InputError: There is no layer, or `begins` is not ascending from 0.
    """
    places = list(begins)
    if (
        not layers
        or not places
        or places[0] != 0
        or sorted(set(places)) != places
        or places[-1] >= len(layers)
    ):
        raise InputError(
            f"`begins` (={places}) must ascend from 0 and stay below the number of layers (={len(layers)})"
        )
    ends = [*places[1:], len(layers)]
    segments = tuple(
        gathered(at, layers[begin:end]) for at, (begin, end) in enumerate(zip(places, ends, strict=True))
    )
    edges = tuple(
        Edge(src=at, dst=at + 1, traffic_bytes=segment.traffic_out_bytes)
        for at, segment in enumerate(segments[:-1])
    )
    return SegmentGraph(segments=segments, edges=edges)


def coarse(layers: Sequence[LayerNode], segments: int) -> SegmentGraph:
    """Cut layers into at most so many consecutive segments, the largest of which has the fewest operations.

    Args:
        layers: In order.
        segments: How many at most; fewer where there are fewer layers.

    Raises:
        InputError: There is no layer, or `segments` is below 1.
    """
    if segments < 1 or not layers:
        raise InputError(f"`segments` (={segments}) and layers (={len(layers)}) must be at least 1")
    work = np.concatenate([[0.0], np.cumsum([number(layer.flops) for layer in layers])])
    n, k = len(layers), min(segments, len(layers))
    # best[j, i]: the largest of j segments of the first i layers, at its least.
    best = np.full((k + 1, n + 1), np.inf)
    last = np.zeros((k + 1, n + 1), dtype=np.int64)
    best[0, 0] = 0.0
    for j in range(1, k + 1):
        for i in range(j, n + 1):
            begins = np.arange(j - 1, i)
            costs = np.maximum(best[j - 1, begins], work[i] - work[begins])
            at = int(costs.argmin())
            best[j, i], last[j, i] = costs[at], begins[at]
    begins, i = [], n
    for j in range(k, 0, -1):
        i = int(last[j, i])
        begins.append(i)
    return chain(layers, begins[::-1])
