"""Tests of `codesign.workload.segments`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st

from sparseflow.codesign.workload.layers import to_float
from sparseflow.codesign.workload.segments import (
    Edge,
    SegmentGraph,
    build_balanced_chain,
    build_chain,
    merge_layers,
)
from sparseflow.core.layers import LAYER_TYPES, PRECISIONS, LayerNode
from sparseflow.errors import InputError
from tests.codesign.nodes import WIDTHS, made_layers


def working(work: Sequence[float]) -> list[LayerNode]:
    """Layers with so many operations."""
    subset = made_layers(len(work), seed=0)
    return [replace(subset[index], flops=float(item)) for index, item in enumerate(work)]


def conserved(graph: SegmentGraph, layers: Sequence[LayerNode]) -> None:
    """Every layer is in one segment, in order, and what it costs is there too."""
    assert [segment.id for segment in graph.segments] == list(range(len(graph.segments)))
    assert [id for segment in graph.segments for id in segment.layer_ids] == [layer.id for layer in layers]
    assert all(segment.layer_ids for segment in graph.segments)
    for name in ("flops", "bytes"):
        full = sum(float(getattr(layer, name)) for layer in layers)
        assert sum(getattr(segment, name) for segment in graph.segments) == pytest.approx(full)
    assert sum(item.weight_bytes for item in graph.segments) == sum(item.weight_bytes for item in layers)
    for segment in graph.segments:
        own_part = [layers[id] for id in segment.layer_ids]
        assert segment.memory_bytes == sum(item.weight_bytes for item in own_part) + max(
            item.memory_bytes - item.weight_bytes for item in own_part
        )
        assert max(item.memory_bytes for item in own_part) <= segment.memory_bytes
        assert segment.memory_bytes <= sum(item.memory_bytes for item in own_part)
        assert segment.traffic_in_bytes == own_part[0].traffic_in_bytes
        assert segment.traffic_out_bytes == own_part[-1].traffic_out_bytes
    for edge, (before, after) in zip(graph.edges, itertools.pairwise(graph.segments), strict=True):
        assert (edge.src, edge.dst) == (before.id, after.id)
        assert edge.traffic_bytes == before.traffic_out_bytes == after.traffic_in_bytes


@pytest.mark.parametrize("precision", PRECISIONS)
def test_made_layers_form_a_chain(precision: str) -> None:
    layers = made_layers(3, seed=1, precision=precision)
    assert [layer.id for layer in layers] == list(range(8)) and len({layer.name for layer in layers}) == 8
    assert [layer.layer_type for layer in layers] == ["embed", *["attention", "mlp"] * 3, "head"]
    assert set(WIDTHS) == set(PRECISIONS) and {layer.layer_type for layer in layers} == set(LAYER_TYPES)
    assert (
        layers == made_layers(3, seed=1, precision=precision) != made_layers(3, seed=2, precision=precision)
    )
    for before, after in itertools.pairwise(layers):
        assert before.traffic_out_bytes == after.traffic_in_bytes and before.seq_len >= after.seq_len
    for layer in layers:
        assert layer.weight_bytes < layer.memory_bytes and layer.weight_bytes < to_float(layer.bytes)
        assert layer.splittable == (layer.units > 1) == (layer.split_in_bytes > 0)
    assert not any(layer.splittable for layer in made_layers(3, seed=1, splittable=False))


def test_build_chain_merges_layers() -> None:
    layers = made_layers(2, seed=3)
    graph = build_chain(layers, [0, 1, 4])
    assert [segment.layer_ids for segment in graph.segments] == [(0,), (1, 2, 3), (4, 5)]
    conserved(graph, layers)
    assert graph.segments[1] == merge_layers(1, layers[1:4])
    full = build_chain(layers, [0])
    assert len(full.segments) == 1 and not full.edges
    conserved(full, layers)


def test_segment_memory_is_weights_and_largest_activation() -> None:
    first, second, third = made_layers(1, seed=0)[:3]
    three = [
        replace(first, weight_bytes=10, memory_bytes=15),
        replace(second, weight_bytes=20, memory_bytes=60),
        replace(third, weight_bytes=100, memory_bytes=101),
    ]
    segment = merge_layers(0, three)
    assert (segment.weight_bytes, segment.memory_bytes) == (130, 170)


@pytest.mark.parametrize(("src", "dst"), [(1, 0), (1, 1), (-1, 0), (0, 3), (3, 4)])
def test_invalid_edge_is_refused(src: int, dst: int) -> None:
    segments = build_chain(made_layers(1, seed=0), [0, 1, 2]).segments
    with pytest.raises(InputError, match=rf"{dst}"):
        SegmentGraph(segments=segments, edges=(Edge(src=src, dst=dst, traffic_bytes=1),))


@pytest.mark.parametrize("starts", [[], [1], [0, 0], [0, 2, 1], [0, 4], [-1, 0], [0, 99], [1, 0]])
def test_first_layers_that_do_not_ascend_are_refused(starts: list[int]) -> None:
    with pytest.raises(InputError, match="first_layers"):
        build_chain(made_layers(1, seed=0), starts)


def test_empty_chain_is_refused() -> None:
    with pytest.raises(InputError):
        build_chain([], [0])
    with pytest.raises(InputError, match=r"\(=0\)"):
        build_balanced_chain([], 2)
    for segments in (0, -1):
        with pytest.raises(InputError, match=rf"\(={segments}\)"):
            build_balanced_chain(made_layers(1, seed=0), segments)


def fairest(work: Sequence[float], segments: int) -> float:
    """The largest of at most so many runs at its least, by looking at every cut."""
    return min(
        max(sum(work[a:b]) for a, b in itertools.pairwise((0, *cuts, len(work))))
        for count in range(min(segments, len(work)))
        for cuts in itertools.combinations(range(1, len(work)), count)
    )


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.integers(1, 11))
@budget(max_examples=50, deadline=None)
def test_balanced_chain_minimizes_largest_segment(work: list[int], segments: int) -> None:
    layers = working(work)
    graph = build_balanced_chain(layers, segments)
    assert 1 <= len(graph.segments) <= min(segments, len(layers))
    conserved(graph, layers)
    assert max(segment.flops for segment in graph.segments) == fairest(work, segments)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("segments", [1, 2, 3, 5, 12])
def test_balanced_chain_of_networks(seed: int, segments: int) -> None:
    layers = made_layers(4, seed=seed)
    graph = build_balanced_chain(layers, segments)
    conserved(graph, layers)
    minimum = fairest([to_float(layer.flops) for layer in layers], segments)
    assert max(segment.flops for segment in graph.segments) == pytest.approx(minimum)


def test_balanced_chain_with_one_segment_per_layer() -> None:
    layers = made_layers(2, seed=0)
    for segments in (6, 7, 100):
        assert [segment.layer_ids for segment in build_balanced_chain(layers, segments).segments] == [
            (id,) for id in range(6)
        ]


def test_segments_of_gated_layers_are_numbers() -> None:
    layers = made_layers(2, seed=5)
    gate_value = torch.tensor(1.0, requires_grad=True)
    soft = [
        replace(layer, flops=gate_value * layer.flops, bytes=gate_value * layer.bytes) for layer in layers
    ]
    for graph in (build_balanced_chain(soft, 3), build_chain(soft, [0, 2, 5])):
        conserved(graph, layers)
        assert all(type(segment.flops) is type(segment.bytes) is float for segment in graph.segments)
    assert [s.layer_ids for s in build_balanced_chain(soft, 3).segments] == [
        s.layer_ids for s in build_balanced_chain(layers, 3).segments
    ]
    assert to_float(gate_value * 2.5) == to_float(2.5) == 2.5 and to_float(3) == 3.0


def test_balanced_chain_of_a_hundred_layers() -> None:
    layers = working(np.random.default_rng(0).uniform(1.0, 2.0, 100).tolist())
    largest = [
        max(segment.flops for segment in build_balanced_chain(layers, k).segments)
        for k in (1, 2, 5, 10, 50, 100)
    ]
    assert largest == sorted(largest, reverse=True)
    assert largest[-1] == max(to_float(layer.flops) for layer in layers)
    # No segment need be above a fair share by more than the largest layer.
    assert largest[3] <= largest[0] / 10 + largest[-1]
