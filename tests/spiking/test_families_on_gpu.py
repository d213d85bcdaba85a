"""Every model family on a GPU, in both step modes and every group mode, equals its network."""

from __future__ import annotations

import warnings

import pytest
import torch

pytest.importorskip("spikingjelly")
pytest.importorskip("triton", reason="the packed kernels need triton")

from spikingjelly.activation_based import functional

from sparseflow.spiking.api import optimize, restore
from sparseflow.spiking.backends.packed.backend import PackedBackend
from sparseflow.spiking.graph.analysis import analyze
from sparseflow.spiking.runtime.plan import Plan
from tests.spiking.families import BY_VALUE, CASES, FAMILIES
from tests.spiking.nets import dyadic, force, from_rest, membranes, same

pytestmark = pytest.mark.gpu

ROUNDED = BY_VALUE | {"snas_net"}
"""Families with rounded sums; snas_net scales its maps by a factor, and cuDNN adds them in another order."""


@pytest.fixture(autouse=True)
def _exact_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


@pytest.mark.parametrize("group_mode", ["dense", "sparse"])
@pytest.mark.parametrize(("name", "mode"), CASES)
def test_every_family_in_every_group_mode(name: str, mode: str, group_mode: str) -> None:
    net, x = FAMILIES[name](mode)
    dyadic(net)
    net, x = net.cuda(), x.mul(16).round().div(16).cuda()
    plan = Plan(analyze(net, (x,)), PackedBackend("cuda", torch.float32))
    ways = force(plan, group_mode, x)
    functional.reset_net(net)
    with torch.no_grad():
        expected = [(net(x), membranes(net)) for _ in range(2)]
        functional.reset_net(net)
        actual = [(plan.run(x), membranes(net)) for _ in range(2)]
    if name in ROUNDED:
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-3)
    else:
        assert same(actual, expected)
    assert not ways or set(ways.values()) & {group_mode, "dense"}


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_every_family_optimised(name: str, mode: str) -> None:
    """Any decision keeps outputs and keys; `restore` returns the original network."""
    net, x = FAMILIES[name](mode)
    dyadic(net)
    net, x = net.cuda(), x.mul(16).round().div(16).cuda()
    expected, keys = from_rest(net, x), list(net.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that the network runs without a CUDA graph would be one
        optimize(net, x, cache=False)
    for _ in range(2):
        torch.testing.assert_close(from_rest(net, x), expected, rtol=1e-4, atol=1e-3)
    assert list(net.state_dict()) == keys
    restore(net)
    assert same(from_rest(net, x), expected)
