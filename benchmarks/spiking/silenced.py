"""Networks in which a share of the channels never fires, as pruned and trained ones have them.

The silent channels lie scattered over a layer, so that clustering has to find them: a kernel skips 64
neighbouring channels at once or none. In layers of more than 64 channels their number is a multiple of 64, so
that whole groups can fall silent. In layers of 64 or fewer channels the same share falls silent, of which no
kernel that skips blocks of 64 gains anything.

Everything that identity shortcuts add together, a stage's stem and blocks, is silent in the same channels.
Inner convolutions have silent channels of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sparseflow.errors import InputError
from sparseflow.spiking.models.spiking_resnet import SpikingBlock, SpikingResNet

GROUP = 64
"""Channels that a kernel skips together."""

DRIVE = -100.0
"""Bias behind a silenced BatchNorm, in thresholds: no shortcut lifts a neuron over that."""


def silent_count(channels: int, share: float) -> int:
    """How many of `channels` fall silent: whole groups where there is more than one."""
    return round(share * channels / GROUP) * GROUP if channels > GROUP else round(share * channels)


def silence_channels(net: nn.Module, share: float, *, seed: int = 0) -> dict[str, Tensor]:
    """Silence channels of a `SpikingResNet`; take its BatchNorms' statistics anew afterwards.

    Args:
        net: Changed in place: weight 0 and a strongly negative bias in the BatchNorms of silent channels.
        share: Of the channels of every layer, from 0 to 1 (exclusive).
        seed: Of the choice.

    Returns:
        Neuron's name -> its silent channels in ascending order, int64 on the CPU.

    Raises:
        InputError: `net` is another network, or `share` is out of its range.
    """
    if not isinstance(net, SpikingResNet):
        raise InputError(f"only a SpikingResNet can be silenced, not a {type(net).__name__}")
    if not 0 <= share < 1:
        raise InputError(f"`share` (={share}) must be at least 0 and below 1")
    generator = torch.Generator().manual_seed(seed)
    names = {module: name for name, module in net.named_modules()}
    silent_channels: dict[str, Tensor] = {}

    def draw(norm: nn.Module) -> Tensor:
        assert isinstance(norm, nn.BatchNorm2d)
        order = torch.randperm(norm.num_features, generator=generator)
        return order[: silent_count(norm.num_features, share)].sort().values

    def quieten(norm: nn.Module, neuron: nn.Module | None, channels: Tensor) -> None:
        assert isinstance(norm, nn.BatchNorm2d)
        with torch.no_grad():
            norm.weight[channels] = 0.0
            norm.bias[channels] = DRIVE
        if neuron is not None:
            silent_channels[names[neuron]] = channels

    common = draw(net.bn1)
    quieten(net.bn1, net.sn1, common)
    for block in (b for b in net.modules() if isinstance(b, SpikingBlock)):
        quieten(block.bn1, block.sn1, draw(block.bn1))
        if block.bottleneck:
            quieten(block.bn2, block.sn2, draw(block.bn2))
        norm, neuron = (block.bn3, block.sn3) if block.bottleneck else (block.bn2, block.sn2)
        if block.downsample is not None:
            assert isinstance(block.downsample, nn.Sequential)
            common = draw(norm)
            spikes = block.downsample[2] if len(block.downsample) > 2 else None
            quieten(block.downsample[1], spikes, common)
        quieten(norm, neuron, common)
    return silent_channels
