"""Layers outside all groups that spikes pass without leaving the backend's own form.

An Identity, a Dropout in eval mode, a maximum over windows and a mean over whole feature maps need no dense
tensor: where the spikes in front of them are packed or listed, they stay so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from sparseflow.spiking.graph.layer_rules import forward_is_librarys


@dataclass(frozen=True)
class Passage:
    """What a layer does to spikes.

    Attributes:
        kind: "same" hands them on, "max" takes the maximum over windows, "mean" the mean over rows and
            columns (a real number, so that spikes end there).
        kernel, stride, padding: Of the windows, in pixels.
    """

    kind: Literal["same", "max", "mean"]
    kernel: int = 1
    stride: int = 1
    padding: int = 0


def passage(layer: nn.Module, *, single: bool) -> Passage | None:
    """How spikes pass `layer`, or None when it needs a dense tensor.

    Args:
        layer: A leaf module.
        single: Whether its input carries no time axis: [N, C, H, W] rather than [T, N, C, H, W].
    """
    if not forward_is_librarys(layer):
        return None
    theirs = type(layer).__module__.startswith("spikingjelly.")
    if isinstance(layer, nn.Identity):
        return Passage("same")
    if isinstance(layer, (nn.Dropout, nn.Dropout2d)) or (
        theirs and type(layer).__name__ in ("Dropout", "Dropout2d")
    ):
        return None if layer.training else Passage("same")
    if isinstance(layer, nn.AdaptiveAvgPool2d):
        return Passage("mean") if layer.output_size in (1, (1, 1)) else None
    if isinstance(layer, nn.MaxPool2d):
        # A plain MaxPool2d takes no time axis; spikingjelly's takes one in step mode "m".
        takes_time = theirs and getattr(layer, "step_mode", "s") == "m"
        return _windows(layer) if takes_time != single else None
    return None


def _windows(layer: nn.MaxPool2d) -> Passage | None:
    """The windows of a maximum, where both directions are alike and the border is at most a pixel."""
    sizes = [_both(layer.kernel_size), _both(layer.stride), _both(layer.padding), _both(layer.dilation)]
    if layer.ceil_mode or layer.return_indices or sizes[3] != 1 or any(size is None for size in sizes):
        return None
    kernel, stride, padding = (int(size) for size in sizes[:3] if size is not None)
    return Passage("max", kernel, stride, padding) if padding <= 1 and 2 * padding <= kernel else None


def _both(size: object) -> int | None:
    """A size given once, or twice the same."""
    if isinstance(size, int):
        return size
    return size[0] if isinstance(size, tuple) and len(set(size)) == 1 else None
