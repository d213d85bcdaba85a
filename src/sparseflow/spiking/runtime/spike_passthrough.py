"""Layers outside all groups that spikes pass in native form.

An Identity, a Dropout in eval mode, a max pooling and a mean over whole feature maps need no dense tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from sparseflow.spiking.graph.layer_rules import has_library_forward


@dataclass(frozen=True)
class Passthrough:
    """Effect of a layer on spikes.

    Attributes:
        kind: "same" returns them unchanged, "max" takes the maximum over windows, "mean" the mean over rows
            and columns (a real number, no longer spikes).
        kernel, stride, padding: Of the windows, in pixels.
    """

    kind: Literal["same", "max", "mean"]
    kernel: int = 1
    stride: int = 1
    padding: int = 0


def match_passthrough(layer: nn.Module, *, single_step: bool) -> Passthrough | None:
    """Return the effect of `layer` on spikes, or None if it needs a dense tensor.

    Args:
        layer: A leaf module.
        single_step: Whether its input has no time axis: [N, C, H, W] rather than [T, N, C, H, W].
    """
    if not has_library_forward(layer):
        return None
    is_spikingjelly = type(layer).__module__.startswith("spikingjelly.")
    if isinstance(layer, nn.Identity):
        return Passthrough("same")
    if isinstance(layer, (nn.Dropout, nn.Dropout2d)) or (
        is_spikingjelly and type(layer).__name__ in ("Dropout", "Dropout2d")
    ):
        return None if layer.training else Passthrough("same")
    if isinstance(layer, nn.AdaptiveAvgPool2d):
        return Passthrough("mean") if layer.output_size in (1, (1, 1)) else None
    if isinstance(layer, nn.MaxPool2d):
        # nn.MaxPool2d takes no time axis; spikingjelly's takes one in step mode "m".
        takes_time = is_spikingjelly and getattr(layer, "step_mode", "s") == "m"
        return _match_max_pool(layer) if takes_time != single_step else None
    return None


def _match_max_pool(layer: nn.MaxPool2d) -> Passthrough | None:
    """Match a max pooling with equal sizes in both directions and a border of at most one pixel."""
    sizes = [
        _get_common_size(layer.kernel_size),
        _get_common_size(layer.stride),
        _get_common_size(layer.padding),
        _get_common_size(layer.dilation),
    ]
    if layer.ceil_mode or layer.return_indices or sizes[3] != 1 or any(size is None for size in sizes):
        return None
    kernel, stride, padding = (int(size) for size in sizes[:3] if size is not None)
    return Passthrough("max", kernel, stride, padding) if padding <= 1 and 2 * padding <= kernel else None


def _get_common_size(size: object) -> int | None:
    if isinstance(size, int):
        return size
    return size[0] if isinstance(size, tuple) and len(set(size)) == 1 else None
