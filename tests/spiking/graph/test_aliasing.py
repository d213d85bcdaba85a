"""In-place operations: harmless ones are accepted; others prevent a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("spikingjelly")

import sparseflow
from sparseflow.spiking.accelerated import get_accelerated_forward
from tests.spiking.nets import Small, force, from_rest, images, membranes, planned, ready, same


class Written(Small):
    """`Small` with a given forward pass."""

    def __init__(self, forward: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__("m")
        self.run = forward
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.sn3(self.conv3(self.run(self, x))).flatten(-2).mean(-1))


def residual(m: Any, x: torch.Tensor) -> torch.Tensor:
    """ResNets add the shortcut in place to the convolution's output."""
    identity = m.sn1(m.bn1(m.conv1(x)))
    out = m.bn2(m.conv2(identity))
    out += identity
    return m.sn2(out)


def sew(m: Any, x: torch.Tensor) -> torch.Tensor:
    identity = m.sn1(m.bn1(m.conv1(x)))
    out = m.sn2(m.bn2(m.conv2(identity)))
    out += identity
    return out


def rectified(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.sn2(m.bn2(m.conv2(m.sn1(m.relu(m.bn1(m.conv1(x)))))))


def fresh(m: Any, x: torch.Tensor) -> torch.Tensor:
    s = m.sn1(m.bn1(m.conv1(x)))
    t = s * 1.0
    t.mul_(0.5)
    return m.sn2(m.bn2(m.conv2(s)) + t)


def under_another_name(m: Any, x: torch.Tensor) -> torch.Tensor:
    s = m.sn1(m.bn1(m.conv1(x)))
    t = s
    s += m.sn2(m.bn2(m.conv2(s)))
    return t


def through_a_view(m: Any, x: torch.Tensor) -> torch.Tensor:
    s = m.sn1(m.bn1(m.conv1(x)))
    s.view(-1).mul_(0.0)
    return m.sn2(m.bn2(m.conv2(s)))


def after_the_convolution(m: Any, x: torch.Tensor) -> torch.Tensor:
    s = m.sn1(m.bn1(m.conv1(x)))
    y = m.conv2(s)
    s.zero_()
    return m.sn2(m.bn2(y))


def into_the_identity(m: Any, x: torch.Tensor) -> torch.Tensor:
    identity = m.sn1(m.bn1(m.conv1(x)))
    out = m.sn2(m.bn2(m.conv2(identity)))
    identity += out
    return identity


def into_the_input(m: Any, x: torch.Tensor) -> torch.Tensor:
    x += 1
    return m.sn1(m.bn1(m.conv1(x)))


@pytest.mark.parametrize("forward", [residual, sew, rectified, fresh])
@pytest.mark.parametrize("group_mode", ["dense", "sparse"])
def test_harmless_writes_do_not_stop_a_plan(forward: Any, group_mode: str) -> None:
    net, x = ready(Written(forward)), images(3, 2)
    expected, v = from_rest(net, x), membranes(net)
    plan = planned(net, x)
    assert plan.write_hazard is None
    assert group_mode in force(plan, group_mode, x).values()
    assert same(plan.run(x), expected) and same(membranes(net), v)


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (under_another_name, "writes into"),
        (through_a_view, "writes into a tensor that `conv2` reads"),
        (after_the_convolution, "writes into a tensor that `conv2` reads"),
        (into_the_identity, "outside its group"),
        (into_the_input, "writes into the network's input"),
    ],
)
def test_observable_write_keeps_the_network(forward: Any, words: str, prefer: Callable[..., Any]) -> None:
    prefer("sparse", "dense")
    net, x = ready(Written(forward)), images(3, 2)
    expected = from_rest(net, x.clone())
    sparseflow.optimize(net, x.clone())
    assert get_accelerated_forward(net).list_plans() == [None]
    assert same(from_rest(net, x.clone()), expected)
    explanation = sparseflow.explain(net)
    assert words in explanation.summary
    assert all(row.backend == "dense" for row in explanation.layers)
