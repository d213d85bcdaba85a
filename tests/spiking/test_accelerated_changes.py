"""Changes after `optimize` are detected: weights, modules, hooks, training and gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("spikingjelly")
pytest.importorskip("numba")

from spikingjelly.activation_based import functional, layer, neuron

import sparseflow
from tests.spiking.nets import (
    KINDS,
    Small,
    from_rest,
    images,
    numbers,
    ready,
    same,
    small,
)

X = images(3, 2)
Prefer = Callable[..., Any]


# --- what changes afterwards --------------------------------------------------------------------------------


def negate(net: Any) -> None:
    with torch.no_grad():
        net.conv2.weight.neg_()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "in place": negate,
    "load_state_dict": lambda n: n.load_state_dict(
        {k: -v if "conv" in k else v for k, v in numbers(n).items()}
    ),
    "load_state_dict, assigned": lambda n: n.load_state_dict(
        {k: -v if "conv" in k else v for k, v in numbers(n).items()}, assign=True
    ),
    "a buffer": lambda n: n.bn2.running_mean.add_(0.5),
    "a parameter replaced": lambda n: setattr(n.conv2, "weight", nn.Parameter(-n.conv2.weight.detach())),
    "data replaced": lambda n: setattr(n.conv2.weight, "data", -n.conv2.weight.detach()),
    "a convolution replaced": lambda n: setattr(n, "conv2", ready(Small(), seed=9).conv2),
    "a neuron replaced": lambda n: setattr(n, "sn2", neuron.IFNode(v_threshold=0.25, step_mode="m")),
    "the head replaced": lambda n: setattr(n, "fc", layer.Linear(8, 3, step_mode="m")),
    "a threshold": lambda n: setattr(n.sn2, "v_threshold", 0.25),
    "a reset": lambda n: setattr(n.sn2, "v_reset", None),
    "sequences recorded": lambda n: setattr(n.sn2, "store_v_seq", True),
    "a forward replaced": lambda n: setattr(n.sn2, "forward", lambda x: (x > 1).float()),
    "a BatchNorm to training": lambda n: (setattr(n.bn2, "eps", 1e-5), n.bn2.train()),
}


@pytest.mark.parametrize("when", ["before the first call", "between calls"])
@pytest.mark.parametrize("change", CHANGES)
def test_changed_network_equals_original(change: str, when: str, planned: Callable[..., Any]) -> None:
    net = small()
    before = from_rest(net, X)
    runs = planned(net, X)
    if when == "between calls":
        assert same(from_rest(net, X), before)
    CHANGES[change](net)
    duplicate = copy.deepcopy(net)
    actual = from_rest(net, X)
    second = from_rest(net, X)
    expected = from_rest(sparseflow.restore(duplicate), X)
    if change != "a BatchNorm to training":
        assert same(actual, expected) and same(second, expected)
    else:
        torch.testing.assert_close(actual, expected)
        assert int(net.bn2.num_batches_tracked) == 2, "the module itself ran, once a call"
    assert change == "sequences recorded" or not same(actual, before)
    if change == "sequences recorded":
        assert net.sn2.v_seq.shape == (3, 2, 6, 8, 8)
    assert same(from_rest(sparseflow.restore(net), X), expected) or change == "a BatchNorm to training"
    assert runs or change in ("a BatchNorm to training", "a forward replaced")


def test_changed_parameter_is_used(planned: Callable[..., Any]) -> None:
    class Shifted(Small):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Module()
            self.inner.shift = nn.Parameter(torch.zeros(1, 2, 6, 8, 8))

        def features(self, x: torch.Tensor) -> torch.Tensor:
            s = self.sn1(self.bn1(self.conv1(x)))
            return self.sn3(self.conv3(self.sn2(self.bn2(self.conv2(s)) + self.inner.shift)))

    for assign in (False, True):
        net = ready(Shifted())
        before = from_rest(net, X)
        runs = planned(net, X)
        numbers_now = numbers(net) | {"inner.shift": torch.ones(1, 2, 6, 8, 8)}
        net.load_state_dict(numbers_now, assign=assign)
        actual = from_rest(net, X)
        assert runs and not same(actual, before)
        assert same(from_rest(sparseflow.restore(net), X), actual)


def test_another_dtype_and_step_mode(planned: Callable[..., Any]) -> None:
    net = small()
    expected = from_rest(net, X).double()
    planned(net, X)
    from_rest(net, X)
    net.double()
    assert same(from_rest(net, X.double()), expected)
    with pytest.raises(RuntimeError, match=r"dtype|type"):
        from_rest(net, X)
    net.float()
    assert same(from_rest(net, X), expected.float())
    functional.set_step_mode(net, "s")
    functional.reset_net(net)
    with torch.no_grad():
        steps = torch.stack([net(x) for x in X])
    assert same(steps, expected.float())
    functional.set_step_mode(net, "m")
    assert same(from_rest(net, X), expected.float())


def test_optimize_again_sees_writes_through_data(planned: Callable[..., Any]) -> None:
    """torch does not count such writes, as documented."""
    net = small()
    before = from_rest(net, X)
    planned(net, X)
    from_rest(net, X)
    net.conv2.weight.data.neg_()
    assert same(from_rest(net, X), before)
    sparseflow.optimize(net, X)
    actual = from_rest(net, X)
    assert not same(actual, before) and same(from_rest(sparseflow.restore(net), X), actual)


# --- hooks, training, gradients -----------------------------------------------------------------------------


def test_hooks_registered_later_fire(planned: Callable[..., Any]) -> None:
    net: Any = nn.Sequential(nn.Sequential(small()), nn.Identity()).eval()
    expected = from_rest(net, X)
    runs = planned(net, X)
    inner = net[0][0]
    for module in (net[0], inner, inner.conv2, inner.bn2, inner.sn2, inner.fc, net[1], net):
        calls: list[int] = []
        handles = [
            module.register_forward_hook(lambda *a, calls=calls: calls.append(1)),
            module.register_forward_pre_hook(lambda *a, calls=calls: calls.append(2)),
        ]
        assert same(from_rest(net, X), expected)
        assert sorted(calls) == [1, 2], type(module).__name__
        for handle in handles:
            handle.remove()
    runs.clear()
    assert same(from_rest(net, X), expected) and runs == [1], "back on the plan"


def test_hook_that_changes_a_value_changes_the_output(planned: Callable[..., Any]) -> None:
    net = small()
    before = from_rest(net, X)
    planned(net, X)
    net.sn2.register_forward_hook(lambda m, i, o: o * 0)
    actual = from_rest(net, X)
    assert not same(actual, before) and same(from_rest(sparseflow.restore(net), X), actual)


def gradients(net: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    functional.reset_net(net)
    net.zero_grad()
    net(x).square().sum().backward()
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
def test_training_falls_back_with_gradients_intact(kind: str, prefer: Prefer) -> None:
    prefer("sparse", "events")
    build, options = KINDS[kind]
    net, plain = build(), build()
    sparseflow.optimize(net, X, **options)
    for module in (net, plain):
        module.train()
        for part in module.modules():
            if isinstance(part, nn.BatchNorm2d):
                part.eps = 1e-5
    expected, actual = gradients(plain, X), gradients(net, X)
    assert actual.keys() == expected.keys() and len(actual) > 6
    for name, value in expected.items():
        assert torch.equal(actual[name], value) and (value.abs().sum() > 0 or "bias" in name), name
    assert same(numbers(net), numbers(plain)), "BatchNorm has seen the same"
    optimiser = torch.optim.SGD(net.parameters(), 0.1)
    optimiser.step()
    net.eval()
    after = from_rest(net, X)
    assert same(from_rest(sparseflow.restore(net), X), after)


@pytest.mark.parametrize("kind", KINDS)
def test_input_that_requires_gradients_gets_them(kind: str, prefer: Prefer) -> None:
    prefer("sparse", "events")
    build, options = KINDS[kind]
    net, plain = build(), build()
    sparseflow.optimize(net, X, **options)
    grads = []
    for module in (plain, net):
        functional.reset_net(module)
        x = X.clone().requires_grad_()
        module(x).square().sum().backward()
        grads.append(x.grad)
    assert grads[0].abs().sum() > 0 and same(*grads)


def test_in_eval_mode_weights_get_gradients(planned: Callable[..., Any]) -> None:
    """Fine-tuning with frozen BatchNorms runs the network's own code, and says so once."""
    net, plain = small(), small()
    runs = planned(net, X)
    with pytest.warns(UserWarning, match=r"no_grad") as reports:
        actual = [gradients(net, X), gradients(net, X)]
    assert same(actual, [gradients(plain, X), gradients(plain, X)]) and runs == [] and len(reports) == 1


def test_frozen_weights_run_the_plan_with_gradients_enabled(planned: Callable[..., Any]) -> None:
    net = small().requires_grad_(False)
    runs = planned(net, X)
    functional.reset_net(net)
    assert not net(X).requires_grad and runs == [1]
    net.fc.weight.requires_grad_()
    functional.reset_net(net)
    with pytest.warns(UserWarning, match=r"no_grad"):
        assert net(X).requires_grad and runs == [1]


@pytest.mark.parametrize("enabled", [False, True], ids=["no_grad", "grad"])
def test_frozen_network_does_not_look_for_changes(enabled: bool, planned: Callable[..., Any]) -> None:
    net = small()
    planned(net, X, freeze=True)
    before = from_rest(net, X)
    net.sn2.v_threshold = 0.25
    hook = net.sn2.register_forward_hook(lambda *_: pytest.fail("the hook was called"))
    with torch.set_grad_enabled(enabled):
        functional.reset_net(net)
        after = net(X)
    assert same(after, before) and not after.requires_grad
    hook.remove()
    changed = from_rest(sparseflow.optimize(net, X), X)
    assert not same(changed, before)
