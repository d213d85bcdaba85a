"""Tests of exact rewrites: repeated inputs, poolings folded into linear layers, copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("spikingjelly")

from spikingjelly.activation_based import functional, layer, neuron

from sparseflow.spiking.graph.analysis import SpikeGraph, analyze
from sparseflow.spiking.graph.simplification import (
    FlattenedPooling,
    get_folded_pooling,
    match_repetition,
    simplify_network,
)
from sparseflow.spiking.graph.tracing import trace
from tests.spiking.nets import images


@pytest.mark.parametrize(
    ("repeat", "steps"),
    [
        (lambda x: x.unsqueeze(0).repeat(5, 1, 1, 1, 1), 5),
        (lambda x: x.unsqueeze(0).repeat((5, 1, 1, 1, 1)), 5),
        (lambda x: x.unsqueeze(0).expand(5, -1, -1, -1, -1), 5),
        (lambda x: x.unsqueeze(dim=0).expand([5, -1, -1, -1, -1]), 5),
        (lambda x: torch.unsqueeze(x, 0).repeat(5, 1, 1, 1, 1), 5),
        (lambda x: x.unsqueeze(0).repeat(5, 2, 1, 1, 1), None),
        (lambda x: x.unsqueeze(1).repeat(5, 1, 1, 1, 1), None),
        (lambda x: x.unsqueeze(0).repeat(x.shape[0], 1, 1, 1, 1), None),
        (lambda x: x.repeat(5, 1, 1, 1), None),
        (lambda x: x.unsqueeze(0) * 1, None),
    ],
)
def test_match_repetition(repeat: Any, steps: int | None) -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return repeat(x)

    node = list(trace(Net()).graph.nodes)[-2]
    match = match_repetition(node)
    assert (None if match is None else match[1]) == steps
    assert match is None or match[0] is node.all_input_nodes[0]


class _Stem(nn.Module):
    """Runs layers on an image that is repeated over time, and neurons on the result."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.stem = layer.SeqToANNContainer(*layers)
        self.neuron = neuron.IFNode(step_mode="m")
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.neuron(self.stem(x.unsqueeze(0).repeat(3, 1, 1, 1, 1)))


def _shapes(graph: SpikeGraph) -> dict[str, Any]:
    """Return the shape of each call's result by its target, in order."""
    assert graph.module is not None
    return {
        str(node.target): graph.values[node.name].shape
        for node in graph.module.graph.nodes
        if node.op in ("call_module", "call_method")
    }


def test_layers_of_a_repeated_input_run_once() -> None:
    net = _Stem(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.MaxPool2d(2), nn.ReLU())
    shapes = _shapes(simplify_network(analyze(net, images(2))))
    assert shapes == {
        "unsqueeze": (1, 2, 3, 8, 8),
        "stem.0": (1, 2, 4, 8, 8),
        "stem.1": (1, 2, 4, 8, 8),
        "stem.2": (1, 2, 4, 4, 4),
        "stem.3": (1, 2, 4, 4, 4),
        "expand": (3, 2, 4, 4, 4),
        "neuron": (3, 2, 4, 4, 4),
    }


def test_what_mixes_time_steps_or_writes_keeps_the_repetition() -> None:
    net = _Stem(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(inplace=True))
    assert _shapes(simplify_network(analyze(net, images(2))))["stem.0"] != (1, 2, 4, 8, 8)
    net = _Stem(neuron.IFNode())
    assert _shapes(simplify_network(analyze(net, images(2))))["repeat"] == (3, 2, 3, 8, 8)


def test_a_copy_disappears_and_a_view_becomes_a_reshape() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.neuron, self.fc = neuron.IFNode(step_mode="m"), nn.Linear(2, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(self.neuron(x).transpose(2, 3).contiguous().view(3, 2, 2, 2))

    net = Net().eval()
    assert list(_shapes(simplify_network(analyze(net, torch.rand(3, 2, 2, 2))))) == [
        "neuron", "transpose", "reshape", "fc",
    ]  # fmt: skip


class _Pooled(nn.Module):
    """A classifier that enlarges its maps to 3x3."""

    def __init__(self, flatten: Callable[[torch.Tensor], torch.Tensor], step_mode: str = "m") -> None:
        super().__init__()
        self.flatten = flatten
        self.neuron, self.pool, self.drop = neuron.IFNode(), layer.AdaptiveAvgPool2d(3), nn.Dropout()
        self.fc = layer.Linear(3 * 9, 5)
        functional.set_step_mode(self, step_mode)
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.drop(self.flatten(self.pool(self.neuron(x)))))


def _get_pooling(net: nn.Module, x: torch.Tensor) -> FlattenedPooling | None:
    graph = simplify_network(analyze(net, x))
    assert graph.module is not None
    (linear,) = (node for node in graph.module.graph.nodes if node.target == "fc")
    return get_folded_pooling(linear)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("step_mode", ["m", "s"])
def test_enlarging_pooling_is_folded_into_the_linear_layer(size: int, step_mode: str) -> None:
    x = torch.rand(*((2,) if step_mode == "m" else ()), 4, 3, size, size) * 2
    net = _Pooled(lambda x: torch.flatten(x, -3) if step_mode == "m" else x.flatten(1), step_mode)
    assert _get_pooling(net, x) == FlattenedPooling(3, (size, size), (3, 3))


def test_pooling_stays_if_an_operation_writes_into_a_tensor() -> None:
    net = _Pooled(lambda x: x.flatten(-3).mul_(2))
    assert _get_pooling(net, torch.rand(2, 4, 3, 1, 1)) is None


@pytest.mark.parametrize(
    ("flatten", "size"), [(lambda x: x.flatten(-3), 3), (lambda x: x.transpose(-1, -2).flatten(-3), 1)]
)
def test_other_poolings_stay(flatten: Callable[[torch.Tensor], torch.Tensor], size: int) -> None:
    assert _get_pooling(_Pooled(flatten), torch.rand(2, 4, 3, size, size)) is None


@pytest.mark.parametrize("sizes", [(1, 1), (2, 3)])
def test_folded_weights_compute_the_same(sizes: tuple[int, int]) -> None:
    pooling = FlattenedPooling(3, sizes, (4, 5))
    x, weight = torch.rand(2, 7, 3 * sizes[0] * sizes[1]).double(), torch.rand(6, 3 * 20).double()
    expected = F.linear(pooling.apply(x), weight)
    torch.testing.assert_close(F.linear(x, pooling.fold_weight(weight)), expected)
