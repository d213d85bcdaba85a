"""Effect of each leaf layer (other than a neuron) on what is known about its input.

A layer that is not listed here yields a dense value.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from sparseflow.spiking.backends.spec import MaxPooling
from sparseflow.spiking.graph import values as v
from sparseflow.spiking.graph.values import SpikeValue

_PRESERVING_LAYERS = (
    nn.Identity, nn.Flatten, nn.Unflatten, nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle,
    nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d,
    nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d,
    nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d, nn.ReplicationPad1d, nn.ReplicationPad2d,
    nn.ReplicationPad3d, nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d,
)  # fmt: skip
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_DENSE_LAYER_NAMES: tuple[tuple[tuple[type, ...], str], ...] = (
    ((nn.modules.batchnorm._NormBase,), "batch normalisation"),
    ((nn.GroupNorm, nn.LayerNorm), "normalisation"),
    ((nn.modules.pooling._AvgPoolNd, nn.modules.pooling._AdaptiveAvgPoolNd), "average pooling"),
    ((nn.modules.conv._ConvNd,), "a convolution"),
    ((nn.Linear,), "a linear layer"),
    ((nn.Upsample,), "interpolation"),
)


def apply_layer_rule(layer: nn.Module, name: str, values: tuple[Any, ...]) -> SpikeValue:
    """Compute what is known about the output of a leaf module that is not a neuron."""
    preserved = _preserve_value(layer, values)
    if preserved is not None:
        return preserved.append_op(f"{type(layer).__name__}@{name}")
    description = next(
        (words for types, words in _DENSE_LAYER_NAMES if isinstance(layer, types)), type(layer).__name__
    )
    return v.make_dense(f"{description} at `{name}`")


def _preserve_value(layer: nn.Module, values: tuple[Any, ...]) -> SpikeValue | None:
    """Return what the layer preserves of its input's value; None if nothing."""
    if len(values) != 1 or not isinstance(values[0], SpikeValue) or not has_library_forward(layer):
        return None
    value: SpikeValue = values[0]
    if isinstance(layer, _PRESERVING_LAYERS):
        return None if getattr(layer, "return_indices", False) else value
    spikingjelly_type = (
        type(layer).__name__
        if type(layer).__module__.startswith("spikingjelly.activation_based.layer")
        else ""
    )
    if spikingjelly_type == "PrintShapeModule":
        return value
    if isinstance(layer, _DROPOUTS) or spikingjelly_type in ("Dropout", "Dropout2d"):
        return v.multiply(value, v.make_dense("an active dropout")) if layer.training else value
    if isinstance(layer, (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)):
        dilation = layer.dilation if isinstance(layer.dilation, int) else max(layer.dilation)
        return value if dilation == 1 and not layer.return_indices else None
    if isinstance(layer, nn.modules.padding._ConstantPadNd):
        return value if layer.value == 0 else None
    if isinstance(layer, nn.Upsample):
        return value if layer.mode in ("nearest", "nearest-exact") else None
    if isinstance(layer, nn.ReLU):
        return v.clamp_at_zero(value) if value.kind != "dense" else None
    return None


def has_library_forward(layer: nn.Module) -> bool:
    """Return whether forward is the library's own and has no hooks that could change the output."""
    if "forward" in vars(layer) or layer._forward_hooks or layer._forward_pre_hooks:
        return False
    defining_module = type(layer).forward.__module__ or ""
    return defining_module.startswith(
        ("torch.nn.", "spikingjelly.activation_based.layer", "spikingjelly.activation_based.base")
    )


def layer_may_alias(layer: nn.Module) -> bool:
    """Return whether a leaf module that is not a neuron may return (a view of) its input."""
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


def match_max_pooling(layer: nn.Module, *, takes_time: bool, folds: bool = False) -> MaxPooling | None:
    """Match a max pooling with equal sizes in both directions.

    Args:
        layer: A leaf module.
        takes_time: Whether its input has a time axis.
        folds: Whether it is called with the time axis folded into the batch.
    """
    if not isinstance(layer, nn.MaxPool2d) or not has_library_forward(layer):
        return None
    # nn.MaxPool2d takes no time axis; spikingjelly's takes one in step mode "m".
    is_multi_step = (
        type(layer).__module__.startswith("spikingjelly.") and getattr(layer, "step_mode", "s") == "m"
    )
    options = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    size, stride, padding, dilation = map(_get_common_size, options)
    if (folds or is_multi_step) != takes_time or layer.ceil_mode or layer.return_indices or dilation != 1:
        return None
    if size is None or stride is None or padding is None or 2 * padding > size:
        return None
    return MaxPooling(size, stride, padding)


def _get_common_size(size: object) -> int | None:
    if isinstance(size, int):
        return size
    return size[0] if isinstance(size, tuple) and len(set(size)) == 1 else None
