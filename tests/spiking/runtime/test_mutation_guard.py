"""A watch notices what a prepared plan must not outlive, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparseflow.spiking.runtime.mutation_guard import MutationGuard


class Neuron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.v_threshold, self.v_reset = 1.0, None
        self.v: float | torch.Tensor = 0.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.neuron = nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), Neuron()


@pytest.fixture
def net() -> Net:
    return Net().eval()


def watch(net: Net) -> MutationGuard:
    return MutationGuard(net, [net.neuron])


def test_an_untouched_network_is_the_same(net: Net) -> None:
    observed = watch(net)
    net.neuron.v = torch.ones(2)  # a membrane is no constant
    assert observed.is_structure_unchanged() and observed.are_values_unchanged()


@pytest.mark.parametrize(
    "write",
    [
        lambda net: net.conv.weight.add_(1),
        lambda net: net.bn.running_mean.mul_(2),
        lambda net: net.load_state_dict({k: v.clone() for k, v in net.state_dict().items()}),
        lambda net: setattr(net.conv.weight, "data", net.conv.weight.data.clone()),
    ],
    ids=["weight", "buffer", "load_state_dict", "other memory"],
)
def test_new_values_are_detected(net: Net, write) -> None:  # type: ignore[no-untyped-def]
    observed = watch(net)
    with torch.no_grad():
        write(net)
    assert observed.is_structure_unchanged()
    assert not observed.are_values_unchanged()


@pytest.mark.parametrize(
    "swap",
    [
        lambda net: setattr(net, "conv", nn.Conv2d(2, 3, 3)),
        lambda net: setattr(net.conv, "weight", nn.Parameter(net.conv.weight.detach().clone())),
        lambda net: setattr(net.neuron, "v_threshold", 0.5),
        lambda net: setattr(net.neuron, "v_reset", 0.0),
        lambda net: delattr(net.neuron, "v_reset"),
        lambda net: net.add_module("extra", nn.Identity()),
    ],
    ids=["module", "parameter", "threshold", "reset", "deleted", "added"],
)
def test_replaced_modules_are_detected(net: Net, swap) -> None:  # type: ignore[no-untyped-def]
    observed = watch(net)
    swap(net)
    assert not observed.is_structure_unchanged()


def test_inference_tensors_can_be_watched() -> None:
    with torch.inference_mode():
        net = Net().eval()
    observed = watch(net)
    assert observed.is_structure_unchanged() and observed.are_values_unchanged()
