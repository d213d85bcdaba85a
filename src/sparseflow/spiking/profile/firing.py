"""Measure what flows into each convolution: firing rate, zero blocks, silent channels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from sparseflow.spiking.backends.blocks.geometry import static_block
from sparseflow.spiking.graph.module_state import untouched

SILENT_RATE = 0.001
"""A layer that fires less than this is flagged: a speed-up on it says little about a working network."""


@dataclass(frozen=True, kw_only=True)
class Activity:
    """What one convolution was fed with on the sample.

    Attributes:
        firing_rate: Fraction of non-zeros in the input.
        zero_block_ratio: Fraction of blocks without any spike; a block is `block` x `block` pixels of one
            channel of one image at one time step.
        block: Edge of a block in pixels (the static rule's; 4 where that rule leaves the layer dense).
        silent_channels: Fraction of input channels that never fired on the sample.
        height, width: Of the input, in pixels.
    """

    firing_rate: float
    zero_block_ratio: float
    block: int
    silent_channels: float
    height: int
    width: int

    @property
    def nearly_silent(self) -> bool:
        """The layer fires so little that its speed-up should not be taken at face value."""
        return self.firing_rate < SILENT_RATE


def zero_block_ratio(x: torch.Tensor, block: int) -> float:
    """Fraction of `block` x `block` pixel blocks of [..., H, W] that hold no non-zero.

    Blocks at the right and lower edge may be cut off.
    """
    planes = (x != 0).flatten(0, -3).unsqueeze(1).float()
    busy = F.max_pool2d(planes, block, stride=block, ceil_mode=True)
    return 1.0 - busy.mean().item()


def activity_of(x: torch.Tensor) -> Activity:
    """Describe one convolution's input [C, H, W], [N, C, H, W] or [T, N, C, H, W]."""
    x = x.unsqueeze(0) if x.dim() == 3 else x
    height, width = x.shape[-2:]
    block = static_block(height) or 4
    fired = (x != 0).flatten(0, -4).sum(dim=(0, 2, 3))
    return Activity(
        firing_rate=(x != 0).float().mean().item(),
        zero_block_ratio=zero_block_ratio(x, block),
        block=block,
        silent_channels=(fired == 0).float().mean().item(),
        height=height,
        width=width,
    )


def activities(
    model: nn.Module, inputs: tuple[torch.Tensor, ...], names: Iterable[str]
) -> dict[str, Activity]:
    """Run `model` once and describe what each convolution in `names` was fed with.

    The model's memories and random state are put back afterwards. Where a convolution runs several times
    (step mode 's'), its last input counts.
    """
    found: dict[str, Activity] = {}
    handles = []
    for name in names:

        def look(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = name) -> None:
            found[name] = activity_of(args[0] if args else next(iter(kwargs.values())))

        handles.append(model.get_submodule(name).register_forward_pre_hook(look, with_kwargs=True))
    try:
        with untouched(model):
            model(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    return found
