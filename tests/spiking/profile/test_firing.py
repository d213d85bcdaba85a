"""Firing statistics against counting by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("spikingjelly")

from sparseflow.spiking.profile.firing import (
    NEARLY_SILENT_RATE,
    FiringStats,
    compute_zero_block_ratio,
    measure_firing,
    profile_firing,
)
from tests.spiking.nets import Loop, from_rest, images, membranes, ready, same, small


def by_hand(x: torch.Tensor, block: int) -> float:
    planes = x.reshape(-1, *x.shape[-2:])
    actual = [
        not bool(plane[top : top + block, first : first + block].any())
        for plane in planes
        for top in range(0, plane.shape[0], block)
        for first in range(0, plane.shape[1], block)
    ]
    return sum(actual) / len(actual)


@pytest.mark.parametrize("block", [1, 4, 8, 16])
@pytest.mark.parametrize("shape", [(2, 3, 16, 16), (2, 1, 3, 5, 9), (1, 1, 1, 1), (3, 2, 17, 33)])
def test_zero_blocks_are_counted_with_those_that_are_cut_off(shape: tuple[int, ...], block: int) -> None:
    x = (torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.03).float() * 3
    assert compute_zero_block_ratio(x, block) == pytest.approx(by_hand(x, block), abs=1e-6)


@pytest.mark.parametrize(("value", "ratio"), [(0.0, 1.0), (1.0, 0.0)])
def test_all_ones_and_all_zeros(value: float, ratio: float) -> None:
    assert compute_zero_block_ratio(torch.full((1, 2, 9, 9), value), 4) == ratio


def test_single_image_needs_no_batch_axis() -> None:
    x = (torch.rand(4, 9, 9, generator=torch.Generator().manual_seed(0)) < 0.1).float()
    assert measure_firing(x) == measure_firing(x.unsqueeze(0))


@pytest.mark.parametrize("lead", [(2,), (3, 2)])
def test_firing_stats_of_an_input(lead: tuple[int, ...]) -> None:
    x = torch.zeros(*lead, 4, 12, 10)
    x[..., 1, 0, 0] = 2.0
    x[0].select(-3, 3)[..., 11, 9] = 1.0
    actual = measure_firing(x)
    spikes = x.flatten(0, -4).shape[0] + (1 if len(lead) == 1 else lead[1])
    assert actual.firing_rate == pytest.approx(spikes / x.numel())
    assert (actual.height, actual.width, actual.block) == (12, 10, 4)
    assert actual.silent_channels == 0.5
    assert actual.zero_block_ratio == pytest.approx(by_hand(x, 4))


@pytest.mark.parametrize(("height", "block"), [(32, 16), (16, 8), (8, 4), (7, 4)])
def test_blocks_are_those_of_the_static_rule(height: int, block: int) -> None:
    assert measure_firing(torch.zeros(1, 1, height, 5)).block == block


@pytest.mark.parametrize(
    ("rate", "flagged"), [(NEARLY_SILENT_RATE, False), (NEARLY_SILENT_RATE * 0.99, True), (0.0, True)]
)
def test_nearly_silent_layers_are_flagged(rate: float, flagged: bool) -> None:
    layer = FiringStats(
        firing_rate=rate, zero_block_ratio=0.0, block=4, silent_channels=0.0, height=8, width=8
    )
    assert layer.nearly_silent == flagged


@pytest.mark.parametrize("mode", ["s", "m"])
def test_observation_leaves_no_trace(mode: str) -> None:
    net = small(mode)
    x = images(3, 2) if mode == "m" else images(2)
    from_rest(net, x)
    saved_state, v = {}, membranes(net)
    handle = net.conv2.register_forward_pre_hook(lambda m, args: saved_state.update(x=args[0].clone()))
    with torch.no_grad():
        net(x)
    handle.remove()
    from_rest(net, x)
    actual = profile_firing(net, (x,), ["conv2", "conv3"])
    assert set(actual) == {"conv2", "conv3"}
    assert actual["conv2"] == measure_firing(saved_state["x"]), "from the membranes that it had"
    assert same(membranes(net), v)
    assert not any(m._forward_pre_hooks for m in net.modules())


def test_profile_firing_last_call_counts() -> None:
    net, x = ready(Loop()), images(3, 2)
    observed: list[torch.Tensor] = []
    handle = net.net.conv2.register_forward_pre_hook(lambda m, args: observed.append(args[0].clone()))
    from_rest(net, x)
    handle.remove()
    for neuron in (net.net.sn1, net.net.sn2, net.net.sn3):
        neuron.reset()
    assert profile_firing(net, (x,), ["net.conv2"])["net.conv2"] == measure_firing(observed[-1])


def test_hooks_are_gone_after_a_failure() -> None:
    net = small()
    with pytest.raises(RuntimeError):
        profile_firing(net, (images(3, 2, channels=5),), ["conv2"])
    assert not any(m._forward_pre_hooks for m in net.modules())


def test_convolution_called_by_keyword_is_analyzed() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(input=x)

    assert profile_firing(Net(), (torch.ones(1, 2, 3, 3),), ["conv"])["conv"].firing_rate == 1.0
