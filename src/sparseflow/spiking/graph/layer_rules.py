"""What each leaf layer (other than a neuron) does to what is known about its input.

A layer that is not named here yields a dense value.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from sparseflow.spiking.graph import values as v
from sparseflow.spiking.graph.values import Value

_KEEPING_LAYERS = (
    nn.Identity, nn.Flatten, nn.Unflatten, nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle,
    nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d,
    nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d,
    nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d, nn.ReplicationPad1d, nn.ReplicationPad2d,
    nn.ReplicationPad3d, nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d,
)  # fmt: skip
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_PLAIN_LAYERS: tuple[tuple[tuple[type, ...], str], ...] = (
    ((nn.modules.batchnorm._NormBase,), "batch normalisation"),
    ((nn.GroupNorm, nn.LayerNorm), "normalisation"),
    ((nn.modules.pooling._AvgPoolNd, nn.modules.pooling._AdaptiveAvgPoolNd), "average pooling"),
    ((nn.modules.conv._ConvNd,), "a convolution"),
    ((nn.Linear,), "a linear layer"),
    ((nn.Upsample,), "interpolation"),
)


def apply_layer(layer: nn.Module, name: str, values: tuple[Any, ...]) -> Value:
    """What is known about the output of a leaf module that is not a neuron."""
    kept = _kept_by(layer, values)
    if kept is not None:
        return kept.step(f"{type(layer).__name__}@{name}")
    plain = next((words for types, words in _PLAIN_LAYERS if isinstance(layer, types)), type(layer).__name__)
    return v.dense(f"{plain} at `{name}`")


def _kept_by(layer: nn.Module, values: tuple[Any, ...]) -> Value | None:
    """The input as far as it survives; None when nothing does."""
    if len(values) != 1 or not isinstance(values[0], Value) or not forward_is_librarys(layer):
        return None
    value: Value = values[0]
    if isinstance(layer, _KEEPING_LAYERS):
        return None if getattr(layer, "return_indices", False) else value
    theirs = (
        type(layer).__name__
        if type(layer).__module__.startswith("spikingjelly.activation_based.layer")
        else ""
    )
    if theirs == "PrintShapeModule":
        return value
    if isinstance(layer, _DROPOUTS) or theirs in ("Dropout", "Dropout2d"):
        return v.multiply(value, v.dense("an active dropout")) if layer.training else value
    if isinstance(layer, (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)):
        dilation = layer.dilation if isinstance(layer.dilation, int) else max(layer.dilation)
        return value if dilation == 1 and not layer.return_indices else None
    if isinstance(layer, nn.modules.padding._ConstantPadNd):
        return value if layer.value == 0 else None
    if isinstance(layer, nn.Upsample):
        return value if layer.mode in ("nearest", "nearest-exact") else None
    if isinstance(layer, nn.ReLU):
        return v.floor_at_zero(value) if value.kind != "dense" else None
    return None


def forward_is_librarys(layer: nn.Module) -> bool:
    """Whether forward is the library's own, with nothing hooked in that could change the output."""
    if "forward" in vars(layer) or layer._forward_hooks or layer._forward_pre_hooks:
        return False
    author = type(layer).forward.__module__ or ""
    return author.startswith(
        ("torch.nn.", "spikingjelly.activation_based.layer", "spikingjelly.activation_based.base")
    )


def layer_may_alias(layer: nn.Module) -> bool:
    """Whether a leaf module that is not a neuron may return (a view of) its input."""
    if getattr(layer, "inplace", False) or isinstance(layer.__dict__.get("_memories"), dict):
        return True
    computes = (
        nn.modules.conv._ConvNd,
        nn.Linear,
        nn.modules.batchnorm._NormBase,
        nn.GroupNorm,
        nn.LayerNorm,
    )
    return not isinstance(layer, (*computes, nn.modules.pooling._MaxPoolNd, nn.modules.pooling._AvgPoolNd))
