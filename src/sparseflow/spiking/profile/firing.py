"""Firing statistics of convolution inputs: firing rate, zero blocks, silent channels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from sparseflow.spiking.backends.blocks.geometry import select_block_size
from sparseflow.spiking.graph.module_state import preserve_state_without_grad

NEARLY_SILENT_RATE = 0.001
"""Layers that fire less than this are flagged: a speedup on them says little about a working network."""


@dataclass(frozen=True, kw_only=True)
class FiringStats:
    """Statistics of one convolution's input on the sample.

    Attributes:
        firing_rate: Fraction of non-zeros.
        zero_block_ratio: Fraction of blocks without any spike; a block is `block` x `block` pixels of one
            channel of one image at one time step.
        block: Edge of a block in pixels (of the static rule; 4 if that rule leaves the layer dense).
        silent_channels: Fraction of input channels that never fired.
        height: Rows.
        width: Columns.
    """

    firing_rate: float
    zero_block_ratio: float
    block: int
    silent_channels: float
    height: int
    width: int

    @property
    def nearly_silent(self) -> bool:
        """Whether the layer fires so little that its speedup is not meaningful."""
        return self.firing_rate < NEARLY_SILENT_RATE


def compute_zero_block_ratio(x: torch.Tensor, block: int) -> float:
    """Compute the fraction of `block` x `block` pixel blocks of [..., H, W] without a non-zero.

    Blocks at the right and lower edge may be cut off.
    """
    planes = (x != 0).flatten(0, -3).unsqueeze(1).float()
    active = F.max_pool2d(planes, block, stride=block, ceil_mode=True)
    return 1.0 - active.mean().item()


def measure_firing(x: torch.Tensor) -> FiringStats:
    """Compute the statistics of one convolution's input [C, H, W], [N, C, H, W] or [T, N, C, H, W]."""
    x = x.unsqueeze(0) if x.dim() == 3 else x
    height, width = x.shape[-2:]
    block = select_block_size(height) or 4
    fired = (x != 0).flatten(0, -4).sum(dim=(0, 2, 3))
    return FiringStats(
        firing_rate=(x != 0).float().mean().item(),
        zero_block_ratio=compute_zero_block_ratio(x, block),
        block=block,
        silent_channels=(fired == 0).float().mean().item(),
        height=height,
        width=width,
    )


def observe_inputs(
    model: nn.Module,
    names: Iterable[str],
    run: Callable[[], object],
    observe: Callable[[str, torch.Tensor], None],
) -> None:
    """Call `run`, and `observe(name, input)` before each call of a module in `names`."""

    def make_hook(name: str) -> Callable[..., None]:
        return lambda _, args, kwargs: observe(name, args[0] if args else next(iter(kwargs.values())))

    handles = [
        model.get_submodule(name).register_forward_pre_hook(make_hook(name), with_kwargs=True)
        for name in names
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()


def _to_maps(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Convert the input of a linear layer or a Conv1d to maps of one row."""
    if isinstance(layer, nn.Linear):
        return x.reshape(-1, x.shape[-1])[..., None, None]
    return x.unsqueeze(-2) if isinstance(layer, nn.Conv1d) else x


def profile_firing(
    model: nn.Module,
    inputs: tuple[torch.Tensor, ...],
    names: Iterable[str],
    *,
    forward: Callable[..., object] | None = None,
) -> dict[str, FiringStats]:
    """Run `model` (or `forward`) once and compute the input statistics of each convolution in `names`.

    The model's state and the random state are restored. If a convolution runs several times (step mode
    's'), its last input counts.
    """
    stats: dict[str, FiringStats] = {}
    run = model if forward is None else forward
    with preserve_state_without_grad(model):
        observe_inputs(
            model,
            names,
            lambda: run(*inputs),
            lambda name, x: stats.update({name: measure_firing(_to_maps(model.get_submodule(name), x))}),
        )
    return stats
