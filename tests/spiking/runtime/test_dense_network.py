"""The dense network of a plan computes what the network computes from rest, membranes included."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("spikingjelly")

from spikingjelly.activation_based import functional, neuron

from sparseflow.spiking.graph.analysis import analyze
from sparseflow.spiking.graph.registry import get_neuron_info
from sparseflow.spiking.graph.simplification import simplify_network
from sparseflow.spiking.runtime import dense_network
from sparseflow.spiking.runtime.dense_network import DenseNetwork, LoopNeuron, UnsupportedNetworkError
from tests.spiking.families import BY_VALUE, CASES, FAMILIES
from tests.spiking.nets import Loop, Small, dyadic, images, membranes, ready, same, small
from tests.spiking.runtime.test_plan import NEURONS

X = images(3, 2)


def build(net: nn.Module, x: torch.Tensor, dtype: torch.dtype = torch.float32) -> DenseNetwork:
    return DenseNetwork(simplify_network(analyze(net, (x,))), dtype)


@pytest.mark.parametrize("shape", [(4, 2, 3, 5, 6), (4, 2, 7)])
@pytest.mark.parametrize("make", NEURONS.values(), ids=NEURONS)
def test_loop_neuron_equals_the_neuron(make: Any, shape: tuple[int, ...]) -> None:
    original = make().eval()
    original.step_mode = "m"
    info = get_neuron_info(original)
    assert info is not None and info.spec is not None
    loop = LoopNeuron(info.spec)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul(48).round().div(16)
    with torch.no_grad():
        expected = original(x)
        for _ in range(2):
            spikes, v = loop(x)
            assert same(spikes, expected) and same(v, original.v)
    assert 0.02 < expected.mean() < 0.95


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_families(name: str, mode: str) -> None:
    net, x = FAMILIES[name](mode)
    dyadic(net)
    x = x.mul(16).round().div(16)
    functional.reset_net(net)
    try:
        dense = build(net, x)
    except UnsupportedNetworkError:
        assert name == "spike_dhs" or mode == "s"
        return
    with torch.no_grad():
        expected = net(x), membranes(net)
        functional.reset_net(net)
        output, v = dense.module(x)
    actual = output, {name: v[dense.neurons.index(net.get_submodule(name))] for name in expected[1]}
    if name in BY_VALUE:
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-3)
    else:
        assert same(actual, expected)


def test_a_loop_over_time_steps_is_one_call_of_each_layer() -> None:
    net = ready(Loop())
    with torch.no_grad():
        assert same(build(net, X).module(X)[0], net(X))


def test_batch_norms_are_folded_and_the_network_is_unchanged() -> None:
    net = small(make=neuron.LIFNode)
    saved = copy.deepcopy(net.state_dict())
    dense = build(net, X)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in dense.module.modules())
    assert same(net.state_dict(), saved) and type(net.sn1) is neuron.LIFNode


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_new_weights_are_taken_over(dtype: torch.dtype) -> None:
    """A layer without BatchNorm, one behind it, and one that is not folded."""

    def make(seed: int) -> Any:
        net = ready(Small(make=neuron.ParametricLIFNode), seed=seed)
        net.fc = nn.Sequential(net.fc, nn.LayerNorm(5))
        return net.eval()

    net = make(0)
    dense = build(net, X, dtype)
    with torch.no_grad():
        net.load_state_dict(make(1).state_dict())
        net.fc[1].bias.add_(1.0)
        assert dense.refresh()
        functional.reset_net(net)
        expected, (actual, _) = net(X), dense.module(X)
    assert actual.dtype == torch.float32
    assert float((actual - expected).abs().mean()) < (1e-6 if dtype == torch.float32 else 0.1)
    with torch.no_grad():
        net.sn2.w.add_(1.0)
    assert not dense.refresh()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda net: setattr(net, "sn1", neuron.KLIFNode(step_mode="m")), "`sn1` is not a loop of known"),
        (lambda net: setattr(net, "sn2", net.sn1), "`sn1` is not a loop of known"),
        (lambda net: functional.set_step_mode(net, "s"), "`sn1` runs one time step per call"),
    ],
)
def test_unsupported_networks(change: Any, reason: str) -> None:
    net = Small()
    change(net)
    x = X[0] if net.sn1.step_mode == "s" else X
    with pytest.raises(UnsupportedNetworkError, match=reason):
        build(ready(net), x)


def test_many_time_steps_are_not_unrolled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_network, "MAX_STEPS", 2)
    with pytest.raises(UnsupportedNetworkError, match="runs 3 time steps, over 2"):
        build(small(), X)
