"""Plans on the GPU backend: attention, stems, poolings, and the precision of what is outside of groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("spikingjelly")
pytest.importorskip("triton", reason="the packed kernels need triton")

from spikingjelly.activation_based import functional, layer, neuron

from sparseflow.spiking.autotune.candidates import make_group_key
from sparseflow.spiking.backends.packed.backend import PackedBackend
from sparseflow.spiking.graph.analysis import analyze
from sparseflow.spiking.runtime.attention_step import AttentionStep
from sparseflow.spiking.runtime.plan import Plan
from tests.spiking.nets import same

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
T, N, C, L, HEADS = 2, 3, 16, 6, 2

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _attend_channels_first(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of [T, N, C, L] as spikingjelly's Spikformer computes it."""
    q, k, v = (x.reshape(T, N, HEADS, C // HEADS, L) for x in (q, k, v))
    return ((v @ k.transpose(-2, -1)) @ q) * 0.25


def _attend_tokens(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of [T, N, C, L] as in the authors' Spikformer."""
    q, k, v = (
        x.transpose(-1, -2).reshape(T, N, L, HEADS, C // HEADS).permute(0, 1, 3, 2, 4).contiguous()
        for x in (q, k, v)
    )
    x = (q @ k.transpose(-2, -1)) @ v / 4
    return x.transpose(2, 3).reshape(T, N, L, C).contiguous()


def _attend_linearly(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention without heads that multiplies keys and values first."""
    return torch.matmul(q.transpose(-1, -2), torch.matmul(k, v.transpose(-1, -2)))


class _Attention(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (neuron.LIFNode(step_mode="m") for _ in range(4))
        self.attend = attend
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = x.chunk(3, dim=2)
        return self.out(self.attend(self.q(q), self.k(k), self.v(v)))


def _plan(net: nn.Module, x: torch.Tensor, mode: str, dtype: torch.dtype = torch.float32) -> Plan:
    plan = Plan(analyze(net, x), PackedBackend(DEVICE, dtype))
    for group in plan.groups:
        group.mode = mode  # type: ignore[assignment]
    plan.update_output_forms()
    return plan


def _agree(net: _Attention, x: torch.Tensor, plan: Plan) -> None:
    """Check outputs and membranes of two calls, the first from rest."""
    functional.reset_net(net)
    with torch.no_grad():
        expected = [(net(x), net.out.v) for _ in range(2)]
        functional.reset_net(net)
        actual = [(plan.run(x), net.out.v) for _ in range(2)]
    assert 0 < expected[0][0].mean() < 1 and not same(expected[0], expected[1])
    assert same(actual, expected)


@pytest.mark.parametrize("attend", [_attend_channels_first, _attend_tokens, _attend_linearly])
def test_attention_and_its_neuron_are_one_group(attend: Attend) -> None:
    net = _Attention(attend).to(DEVICE)
    x = 3 * torch.rand(T, N, 3 * C, L, device=DEVICE)
    for mode in ("module", "dense"):
        plan = _plan(net, x, mode)
        assert sum(isinstance(group, AttentionStep) for group in plan.groups) == 1
        _agree(net, x, plan)


@pytest.mark.parametrize(
    "attend",
    [
        lambda q, k, v: torch.softmax(q @ k.transpose(-2, -1), -1) @ v,  # not a product of spikes
        lambda q, k, v: (q @ k.transpose(-2, -1)) * 0.5 @ v,  # scaled between the products
    ],
)
def test_other_products_are_no_attention_of_spikes(attend: Attend) -> None:
    net = _Attention(attend).to(DEVICE)
    plan = _plan(net, 3 * torch.rand(T, N, 3 * C, L, device=DEVICE), "dense")
    assert not any(isinstance(group, AttentionStep) for group in plan.groups)


class _Stem(nn.Module):
    """Pooled and unpooled stems, and an operation on a parameter of the network."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool = layer.Conv2d(3, 8, 3, padding=1, bias=False), layer.MaxPool2d(3, 2, 1)
        self.bn, self.sn = layer.BatchNorm2d(8), neuron.IFNode()
        self.conv2, self.sn2 = layer.Conv2d(3, 8, 3, stride=2, padding=1), neuron.LIFNode()
        self.norm, self.weight = nn.LayerNorm(4), nn.Parameter(torch.ones(5, 4))
        functional.set_step_mode(self, "m")
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spikes = self.sn(self.pool(self.bn(self.conv(x)))) + self.sn2(self.conv2(x))
        return F.linear(self.norm(spikes), self.weight)


def _stem() -> tuple[_Stem, torch.Tensor]:
    torch.manual_seed(0)
    return _Stem().to(DEVICE), 3 * torch.randn(T, N, 3, 8, 8, device=DEVICE)


def test_pooling_before_the_neuron_is_part_of_the_group() -> None:
    net, x = _stem()
    for mode in ("module", "dense"):
        plan = _plan(net, x, mode)
        pooled, other = plan.groups
        assert pooled.match.pooling is not None and not pooled.can_fuse()
        assert other.match.pooling is None and other.can_fuse()
        functional.reset_net(net)
        expected = net(x).detach()
        functional.reset_net(net)
        torch.testing.assert_close(plan.run(x), expected, rtol=1e-5, atol=1e-5)


def test_what_is_outside_of_groups_runs_in_the_requested_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = _stem()
    plan = _plan(net, x, "dense", torch.float16)
    observed: list[torch.dtype] = []
    normalize = F.layer_norm
    monkeypatch.setattr(F, "layer_norm", lambda x, *args: observed.append(x.dtype) or normalize(x, *args))
    functional.reset_net(net)
    with torch.no_grad():
        half = plan.run(x)
    assert half.dtype == torch.float32 and observed == [torch.float16]
    functional.reset_net(net)
    torch.testing.assert_close(half, net(x), rtol=0.02, atol=0.02)
    assert net.norm.weight.dtype == torch.float32 and net.sn.v.dtype == torch.float32


def test_new_weights_reach_what_is_outside_of_groups() -> None:
    net, x = _stem()
    plan = _plan(net, x, "dense", torch.float16)
    with torch.no_grad():
        functional.reset_net(net)
        plan.run(x)
        net.norm.bias.add_(1)
        net.weight.mul_(2)
        plan.invalidate()
        functional.reset_net(net)
        actual = plan.run(x)
        functional.reset_net(net)
        torch.testing.assert_close(actual, net(x), rtol=0.02, atol=0.05)


def test_hooks_of_layers_that_run_as_a_copy_are_noticed() -> None:
    net, x = _stem()
    assert _plan(net, x, "dense").get_bypass_conflict() is None
    plans = _plan(net, x, "dense"), _plan(net, x, "dense", torch.float16)
    net.norm.register_forward_hook(lambda *_: None)
    assert [plan.get_bypass_conflict() for plan in plans] == [None, "a LayerNorm has hooks"]
    assert net.norm in plans[1].list_layers(include_called=False)


def test_attention_runs_from_a_membrane_that_is_a_number() -> None:
    net = _Attention(_attend_tokens).to(DEVICE)
    x = 3 * torch.rand(T, N, 3 * C, L, device=DEVICE)
    plan, out = _plan(net, x, "dense"), cast("Any", net.out)
    with torch.no_grad():
        functional.reset_net(net)
        out.v = 0.75
        expected = net(x)
        functional.reset_net(net)
        out.v = 0.75
        assert same(plan.run(x), expected)


def test_operations_that_refuse_the_precision_run_in_the_networks_own() -> None:
    class Net(_Stem):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(super().forward(x).float(), torch.eye(5, device=DEVICE))

    net, x = Net().to(DEVICE), 3 * torch.randn(T, N, 3, 8, 8, device=DEVICE)
    backend = PackedBackend(DEVICE, torch.float16)
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="dtype"):
            Plan(analyze(net, x), backend).run(x)
        functional.reset_net(net)
        expected = net(x)
        functional.reset_net(net)
        torch.testing.assert_close(Plan(analyze(net, x), backend, casts=False).run(x), expected)


class _Residual(nn.Module):
    """A residual stream of real numbers, as in MS-ResNet and in spike-driven transformers."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.sn1, self.sn2, self.sn3 = (neuron.IFNode() for _ in range(3))
        self.conv1, self.bn1 = layer.Conv2d(C, 8, 3, padding=1, bias=False), layer.BatchNorm2d(8)
        self.conv2, self.bn2 = layer.Conv2d(C, 8, 1, bias=False), layer.BatchNorm2d(8)
        self.conv3, self.bn3 = layer.Conv2d(8, 8, 1), layer.BatchNorm2d(8)
        functional.set_step_mode(self, "m")
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.uniform_(module.bias)
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spikes = self.sn1(x)
        x = self.bn1(self.conv1(spikes)) + self.bn2(self.conv2(spikes))
        y = self.bn3(self.conv3(self.sn2(x)))
        if self.in_place:
            y += x
        else:
            y = x + y
        return self.sn3(y) * y


@pytest.mark.parametrize("in_place", [False, True])
def test_what_is_added_to_convolutions_is_part_of_their_group(in_place: bool) -> None:
    torch.manual_seed(0)
    net = _Residual(in_place=in_place).to(DEVICE)
    x = 2 * torch.rand(T, N, C, 5, 6, device=DEVICE)
    with torch.no_grad():
        expected = net(x)
        for mode in ("module", "dense"):
            plan = _plan(net, x, mode)
            sums = [group.match for group in plan.groups if group.match.neuron is None]
            assert [(len(match.sources), len(match.dense)) for match in sums] == [(2, 0), (1, 1)]
            functional.reset_net(net)
            torch.testing.assert_close(plan.run(x), expected, rtol=1e-5, atol=1e-5)


def test_a_sum_that_writes_into_another_tensor_is_no_group() -> None:
    class Net(_Residual):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.bn1(self.conv1(self.sn1(x)))
            x += self.bn3(self.conv3(self.sn2(x)))
            return self.sn3(x) * x

    torch.manual_seed(0)
    net = Net(in_place=True).to(DEVICE)
    x = 2 * torch.rand(T, N, C, 5, 6, device=DEVICE)
    with torch.no_grad():
        expected = net(x)
        plan = _plan(net, x, "dense")
        assert plan.write_hazard is None
        functional.reset_net(net)
        torch.testing.assert_close(plan.run(x), expected, rtol=1e-5, atol=1e-5)


def test_membranes_that_nothing_reads_are_not_written() -> None:
    net, x = _stem()
    plan = Plan(analyze(net, x), PackedBackend(DEVICE, torch.float32), keeps_membranes=False)
    for group in plan.groups:
        group.mode = "fused" if group.can_fuse() else "dense"
    with torch.no_grad():
        functional.reset_net(net)
        expected = net(x)
        functional.reset_net(net)
        torch.testing.assert_close(plan.run(x), expected, rtol=1e-5, atol=1e-5)
    assert net.sn.v == net.sn2.v == 0.0


def test_groups_with_and_without_pooling_have_different_keys() -> None:
    class Net(nn.Module):
        def __init__(self, pools: bool) -> None:
            super().__init__()
            self.conv, self.sn = layer.Conv2d(3, 8, 3, padding=1), neuron.IFNode()
            self.pool = layer.MaxPool2d(3, 1, 1) if pools else nn.Identity()
            functional.set_step_mode(self, "m")
            self.eval()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.conv(x)
            return self.sn(self.pool(x) if isinstance(self.pool, nn.MaxPool2d) else x)

    x = torch.randn(T, N, 3, 8, 8, device=DEVICE)
    keys = set()
    for pools in (True, False):
        plan = _plan(Net(pools).to(DEVICE), x, "dense")
        (group,) = plan.groups
        keys.add(make_group_key(group, {node: x for node in group.match.inputs}, plan.backend))
    assert len(keys) == 2
