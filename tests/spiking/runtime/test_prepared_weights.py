"""Prepared weights share the memory of equal ones, and are dropped if nothing runs with them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

pytest.importorskip("spikingjelly")
pytest.importorskip("numba")

from spikingjelly.activation_based import functional, layer, neuron

import sparseflow
from sparseflow.spiking.accelerated import get_accelerated_forward
from sparseflow.spiking.graph.analysis import analyze
from sparseflow.spiking.graph.simplification import simplify_network
from sparseflow.spiking.runtime.dense_network import DenseNetwork, FoldedLayer
from tests.spiking.conftest import FakeTimes
from tests.spiking.nets import from_rest, images, ready, same, small

X = torch.randint(2, (3, 2, 24), generator=torch.Generator().manual_seed(0)).float()


def make_head() -> nn.Sequential:
    """Linear layers without BatchNorm, each with a neuron."""
    net = nn.Sequential(
        layer.Linear(24, 16, bias=False),
        neuron.IFNode(v_threshold=0.25),
        layer.Linear(16, 8, bias=False),
        neuron.IFNode(v_threshold=0.25),
    )
    functional.set_step_mode(net, "m")
    return ready(net)


def test_dense_layer_without_batch_norm_runs_with_its_own_weight(prefer: Callable[..., FakeTimes]) -> None:
    prefer("dense")
    net = make_head()
    expected = from_rest(net, X)
    sparseflow.optimize(net, X, compile=False)
    assert same(from_rest(net, X), expected)
    (plan,) = get_accelerated_forward(net).list_plans()
    assert plan is not None and [group.mode for group in plan.groups] == ["dense", "dense"]
    used: list[torch.Tensor] = []
    for group in plan.groups:
        used += group._dense_weights.values()
        used += [
            weight for prepared in group._prepared.values() for weight in vars(prepared)["_dense_weights"]
        ]
    assert [weight.data_ptr() for weight in used] == [weight.data_ptr() for weight in net.parameters()]
    with torch.no_grad():
        net.get_parameter("0.weight").neg_()
    actual = from_rest(net, X)
    assert same(actual, from_rest(sparseflow.restore(net), X)) and not same(actual, expected)


def test_compiled_network_has_its_own_weights() -> None:
    net = make_head()
    network = DenseNetwork(simplify_network(analyze(net, (X,))), torch.float32)
    layers = [module for module in network.module.modules() if isinstance(module, FoldedLayer)]
    memory = {parameter.data_ptr() for parameter in net.parameters()}
    assert len(layers) == 2 and not any(item.weight.data_ptr() in memory for item in layers)


def test_group_that_runs_as_modules_drops_its_weights(prefer: Callable[..., FakeTimes]) -> None:
    prefer("module")
    net = small()
    sparseflow.optimize(net, images(3, 2))
    plans = [plan for plan in get_accelerated_forward(net).list_plans() if plan is not None]
    assert plans and not any(
        group._prepared or group._dense_weights for plan in plans for group in plan.groups
    )
