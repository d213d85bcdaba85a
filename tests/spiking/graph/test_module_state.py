"""Module state: snapshots, their restoration bit for bit, and detection of changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("spikingjelly")

from spikingjelly.activation_based import functional, neuron

from sparseflow.spiking.graph.module_state import (
    MutationGuard,
    copy_neuron_states,
    preserve_state,
    preserve_state_without_grad,
    restore_neuron_states,
)
from tests.spiking.nets import from_rest, images, membranes, same, small

Held = dict[tuple[str, str, str], tuple[Any, torch.Tensor | None]]


def state(net: nn.Module) -> Held:
    """Return all attributes of all modules, by identity and by bits."""
    actual: Held = {}
    for name, module in net.named_modules():
        for key, value in vars(module).items():
            items = value.items() if isinstance(value, dict) else [("", value)]
            for inner, item in items:
                bits = item.detach().clone() if isinstance(item, torch.Tensor) else None
                actual[name, key, str(inner)] = (item if isinstance(item, float) else id(item), bits)
    return actual


def differences(first: Held, right: Held) -> list[tuple[str, str, str]]:
    return [
        key
        for key in first.keys() | right.keys()
        if key not in first
        or key not in right
        or first[key][0] != right[key][0]
        or not same(first[key][1], right[key][1])
    ]


def test_copied_states_can_be_restored_repeatedly() -> None:
    net, x = small(), images(3, 2)
    from_rest(net, x)
    saved = copy_neuron_states(net)
    assert {type(m) for m in saved} >= {neuron.IFNode}
    before = membranes(net)
    with torch.no_grad():
        first = net(x)
        for _ in range(2):
            restore_neuron_states(saved)
            assert same(membranes(net), before)
            assert same(net(x), first)
            net.sn1.v.fill_(99.0)
    restore_neuron_states(saved)
    assert same(membranes(net), before)


def test_copied_states_at_rest_are_numbers() -> None:
    net = small()
    saved = copy_neuron_states(net)
    from_rest(net, images(3, 2))
    restore_neuron_states(saved)
    assert net.sn1.v == 0.0 and not isinstance(net.sn1.v, torch.Tensor)


def test_copied_state_of_a_custom_neuron_is_its_v() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.v: Any = 0.0

    net = nn.Sequential(Own())
    saved = copy_neuron_states(net)
    net[0].v = torch.ones(2)
    restore_neuron_states(saved)
    assert net[0].v == 0.0


@pytest.mark.parametrize("carried", [False, True])
def test_preserve_state_restores_everything(carried: bool) -> None:
    net, x = small(), images(3, 2)
    net.bn2.eps = 1e-5
    net.bn2.train()
    net.sn1.store_v_seq = True
    if carried:
        from_rest(net, x)
    before, seed = state(net), torch.random.get_rng_state()
    with preserve_state_without_grad(net):
        assert not torch.is_grad_enabled()
        net(x + 1)
        torch.rand(3)
        net.conv1.new = 1  # type: ignore[assignment]
        del net.conv2.stride
    assert differences(state(net), before) == [] and torch.equal(torch.random.get_rng_state(), seed)


def test_preserve_state_restores_after_an_error() -> None:
    net, x = small(), images(3, 2)
    before = state(net)
    with pytest.raises(RuntimeError), preserve_state_without_grad(net):
        net(x)
        net(x[..., :1, :, :, :3])
        raise RuntimeError
    assert differences(state(net), before) == []
    functional.reset_net(net)


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(()),
        torch.tensor([1.0, float("nan"), -0.0]),
        torch.ones(2, 3, dtype=torch.bool),
        torch.ones(2, 3, dtype=torch.float16),
        torch.ones(2, dtype=torch.complex64),
        torch.ones(2, dtype=torch.complex128),
        torch.ones(0, 3),
        # Contiguous, though its last stride is not 1: what a channels-last layer of one pixel holds.
        torch.ones(1, 1, 1, 8).movedim(-1, -3),
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.ones(3, 1).expand(3, 4),
    ],
    ids=lambda t: f"{t.dtype} {tuple(t.shape)} {t.stride()}",
)
def test_preserve_state_restores_every_kind_of_tensor(value: torch.Tensor) -> None:
    net = nn.Module()
    net.register_buffer("held", value)
    before = value.clone()
    with preserve_state(net):
        pass
    assert net.held is value
    if 0 not in value.stride() or value.numel() == 0:
        with preserve_state(net):
            value.zero_()
    assert net.held is value and torch.equal(value.nan_to_num(7.0), before.nan_to_num(7.0))


def test_preserve_state_restores_the_sign_of_zero() -> None:
    net = nn.Module()
    net.register_buffer("held", torch.tensor([-0.0]))
    with preserve_state(net):
        net.held.abs_()  # type: ignore[union-attr, operator]
    assert net.held.signbit().item()  # type: ignore[union-attr, operator]


class ConstantNeuron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.v_threshold, self.v_reset = 1.0, None
        self.v: float | torch.Tensor = 0.0


class GuardedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.neuron = nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), ConstantNeuron()


@pytest.fixture
def guarded() -> GuardedNet:
    return GuardedNet().eval()


def make_guard(net: GuardedNet) -> MutationGuard:
    return MutationGuard(net, [net.neuron])


def test_guard_accepts_an_untouched_network(guarded: GuardedNet) -> None:
    guard = make_guard(guarded)
    guarded.neuron.v = torch.ones(2)  # a membrane is not a constant
    assert guard.is_structure_unchanged() and guard.are_values_unchanged()


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
def test_guard_detects_new_values(guarded: GuardedNet, write) -> None:  # type: ignore[no-untyped-def]
    guard = make_guard(guarded)
    with torch.no_grad():
        write(guarded)
    assert guard.is_structure_unchanged()
    assert not guard.are_values_unchanged()


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
def test_guard_detects_replaced_modules(guarded: GuardedNet, swap) -> None:  # type: ignore[no-untyped-def]
    guard = make_guard(guarded)
    swap(guarded)
    assert not guard.is_structure_unchanged()


def test_guard_accepts_inference_tensors() -> None:
    with torch.inference_mode():
        guarded = GuardedNet().eval()
    guard = make_guard(guarded)
    assert guard.is_structure_unchanged() and guard.are_values_unchanged()
