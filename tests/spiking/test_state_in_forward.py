"""A forward that resets its neurons, or has modules with state of their own, runs by a plan."""

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
from sparseflow.spiking import accelerated
from sparseflow.spiking.accelerated import get_accelerated_forward
from sparseflow.spiking.runtime.compiled_network import CompiledNetwork
from sparseflow.spiking.runtime.plan import Plan
from tests.spiking.conftest import FakeTimes
from tests.spiking.nets import Small, dyadic, images, membranes, same

X = images(3, 2)


class Resetting(Small):
    """Resets its neurons before it runs, after it ran, or only one of them.

    Args:
        when: "before", "after", "one" or "between".
    """

    def __init__(self, when: str, **options: Any) -> None:
        super().__init__(**options)
        self.when = when

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.when == "before":
            functional.reset_net(self)
        elif self.when == "one":
            functional.reset_net(self.sn2)
        y = super().forward(x)
        if self.when == "after":
            functional.reset_net(self)
        elif self.when == "between":
            functional.reset_net(self)
            y = y + super().forward(x)
        return y


class SteppingNet(nn.Module):
    """Resets its neurons, then loops over the time steps; or resets them at one of the steps."""

    def __init__(self, reset_step: int) -> None:
        super().__init__()
        self.reset_step = reset_step
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False), neuron.IFNode(),
            nn.Conv2d(8, 8, 3, padding=1, bias=False), neuron.IFNode(),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = []
        for step, image in enumerate(x):
            if step == self.reset_step:
                functional.reset_net(self)
            steps.append(self.body(image))
        return torch.stack(steps)


class Readout(nn.Module):
    """A leaky sum over calls, in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.v: Any = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.v = 0.5 * self.v + x
        return self.v


class WithReadout(Small):
    def __init__(self, readout: nn.Module) -> None:
        super().__init__()
        self.readout = readout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.readout(super().forward(x))


def check_calls(net: nn.Module) -> Plan:
    """Compare an optimized copy over four calls, a reset in between; return its plan."""
    net = dyadic(net).eval()
    reference = copy.deepcopy(net)
    sparseflow.optimize(net, X)
    for call in range(4):
        if call == 2:
            functional.reset_net(net)
            functional.reset_net(reference)
        with torch.no_grad():
            assert same(net(X), reference(X))
        assert same(membranes(net), membranes(reference))
    (plan,) = get_accelerated_forward(net).list_plans()
    assert plan is not None
    return plan


@pytest.mark.parametrize(
    ("when", "starts_at_rest"), [("before", True), ("after", False), ("one", False), ("between", False)]
)
def test_a_forward_may_reset_neurons(
    prefer: Callable[..., FakeTimes], when: str, starts_at_rest: bool
) -> None:
    prefer("sparse")
    plan = check_calls(Resetting(when))
    assert plan.starts_at_rest == starts_at_rest
    assert len(plan.groups) == (0 if when == "between" else 3)  # neurons that run twice are not fused


@pytest.mark.parametrize("reset_step", [0, 1, 2])
def test_a_loop_may_reset_neurons(prefer: Callable[..., FakeTimes], reset_step: int) -> None:
    prefer("sparse")
    plan = check_calls(SteppingNet(reset_step))
    assert plan.starts_at_rest == (reset_step == 0)
    assert len(plan.groups) == (2 if reset_step == 0 else 0)


def test_a_network_that_resets_itself_runs_compiled_from_every_state(
    prefer: Callable[..., FakeTimes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda module, **_: module)
    monkeypatch.setattr(accelerated, "MIN_COMPILED_LATENCY", 0.0)
    runs: list[int] = []
    run = CompiledNetwork.__call__
    monkeypatch.setattr(CompiledNetwork, "__call__", lambda self, *x: runs.append(1) or run(self, *x))
    for when, count in (("before", 3), ("after", 0), ("between", 0)):
        prefer("dense", compiled=0.5)
        net = dyadic(Resetting(when)).eval()
        reference = copy.deepcopy(net)
        sparseflow.optimize(net, X, compile=True, cache=False)
        runs.clear()
        for _ in range(3):
            with torch.no_grad():
                assert same(net(X), reference(X))
            assert same(membranes(net), membranes(reference))
        assert len(runs) == count


@pytest.mark.parametrize("readout", [Readout, lambda: layer.SynapseFilter(2.0, step_mode="m")])
def test_a_module_with_its_own_state_runs_as_it_is(
    prefer: Callable[..., FakeTimes], monkeypatch: pytest.MonkeyPatch, readout: Callable[[], nn.Module]
) -> None:
    prefer("sparse", compiled=0.1)
    monkeypatch.setattr(accelerated, "MIN_COMPILED_LATENCY", 0.0)
    net = dyadic(WithReadout(readout())).eval()
    reference = copy.deepcopy(net)
    sparseflow.optimize(net, X, compile=True)
    for _ in range(3):
        with torch.no_grad():
            assert same(net(X), reference(X))
    forward = get_accelerated_forward(net)
    (plan,) = forward.list_plans()
    assert plan is not None and plan.keeps_other_state and len(plan.groups) >= 2
    assert forward.network_decision is not None
    assert "`readout` keeps state between calls" in forward.network_decision.reason


def test_a_module_that_replaces_its_buffer_rules_out_a_plan(prefer: Callable[..., FakeTimes]) -> None:
    prefer("sparse")

    class BufferReadout(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.total = self.total + x.sum()
            return x * self.total

    net = dyadic(WithReadout(BufferReadout())).eval()
    sparseflow.optimize(net, X)
    decision = get_accelerated_forward(net).network_decision
    assert decision is not None and decision.choice == "layers"


def test_a_module_that_the_forward_creates_is_traced(prefer: Callable[..., FakeTimes]) -> None:
    prefer("sparse")

    class Creating(Small):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            readout = Readout()
            return readout(super().forward(x)) + readout.v

    net = dyadic(Creating()).eval()
    reference = copy.deepcopy(net)
    sparseflow.optimize(net, X)
    with torch.no_grad():
        assert same(net(X), reference(X))
