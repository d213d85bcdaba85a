"""The convolutions of a network: what feeds them, and whether a sparse one can replace them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor, nn

from sparseflow.spiking.backends.conv_geometry import get_padding, to_pair
from sparseflow.spiking.graph import values as v
from sparseflow.spiking.graph.values import SpikeValue


class Refusal(StrEnum):
    """Why a convolution is not replaced."""

    NOT_SPIKE_FED = "not-spike-fed"
    REAL_VALUES = "real-values"
    NOT_CALLED = "not-called"
    SHARED_MODULE = "shared-module"
    OPAQUE = "inside-opaque-module"
    UNTRACEABLE = "untraceable-without-sample"
    TRANSPOSED = "transposed"
    CUSTOM_CONV = "custom-convolution"
    HOOKED = "hooked"
    KERNEL_SIZE = "kernel-size"
    STRIDE = "stride"
    DILATION = "dilation"
    GROUPS = "groups"
    PADDING = "padding"
    PADDING_MODE = "padding-mode"
    NOT_A_MAP = "not-a-feature-map"


SpikeLayer = nn.Conv2d | nn.ConvTranspose2d | nn.Conv1d | nn.Linear


@dataclass(frozen=True, kw_only=True)
class ConvSite:
    """One convolution module, or a linear layer that reads spikes.

    Attributes:
        name: Module name.
        num_calls: How often the forward pass calls it.
        kernel_size, stride: (height, width).
        fed_by: Names of the neurons whose spikes it reads, sorted.
        value: What is known about its input (over all its calls).
        replaceable: Whether a sparse convolution can replace it.
        refusal: Why not, as a code; None if replaceable.
        reason: The refusal as a sentence.
    """

    name: str
    num_calls: int
    kernel_size: tuple[int, int]
    stride: tuple[int, int]
    in_channels: int
    out_channels: int
    fed_by: tuple[str, ...]
    value: SpikeValue
    replaceable: bool
    refusal: Refusal | None
    reason: str | None


def describe_site(
    name: str, conv: SpikeLayer, reads: Sequence[SpikeValue], absent: tuple[Refusal, str]
) -> ConvSite:
    """Describe one convolution and decide whether it can be replaced.

    Args:
        name: Module name.
        conv: The module: a convolution or a linear layer.
        reads: Input value of each of its calls, in order.
        absent: Refusal and sentence to use if there are no calls.
    """
    value = v.join(reads, "calls") if len(reads) > 1 else next(iter(reads), v.make_dense(absent[1]))
    refusal = (_check_input(value, reads) if reads else absent) or _check_module(conv)
    return ConvSite(
        name=name,
        num_calls=len(reads),
        kernel_size=(1, 1) if isinstance(conv, nn.Linear) else to_pair(conv.kernel_size),
        stride=(1, 1) if isinstance(conv, nn.Linear) else to_pair(conv.stride),
        in_channels=conv.in_features if isinstance(conv, nn.Linear) else conv.in_channels,
        out_channels=conv.out_features if isinstance(conv, nn.Linear) else conv.out_channels,
        fed_by=tuple(sorted(value.sources)) if value.kind != "dense" else (),
        value=value,
        replaceable=refusal is None,
        refusal=None if refusal is None else refusal[0],
        reason=None if refusal is None else refusal[1],
    )


def _check_input(value: SpikeValue, reads: Sequence[SpikeValue]) -> tuple[Refusal, str] | None:
    if value.is_spikes:
        return None
    if num_spike_calls := sum(read.is_spikes for read in reads):
        return (
            Refusal.SHARED_MODULE,
            f"called {len(reads)} times, but only {num_spike_calls} of the calls read spikes",
        )
    if value.kind == "sparse_real":
        return Refusal.REAL_VALUES, "fed by scaled or subtracted spikes: " + " > ".join(value.path)
    return Refusal.NOT_SPIKE_FED, f"fed by {value.cause or 'no neuron'}"


def _check_module(conv: SpikeLayer) -> tuple[Refusal, str] | None:
    """Return why the layer itself is not supported, or None."""
    if isinstance(conv, (nn.Linear, nn.Conv1d)):
        return Refusal.NOT_A_MAP, "it runs sparse only in a traced network"
    if isinstance(conv, nn.ConvTranspose2d):
        return Refusal.TRANSPOSED, "transposed convolutions are not replaced"
    if not is_plain_conv(conv):
        return Refusal.CUSTOM_CONV, f"`{type(conv).__name__}` defines its own forward pass"
    if conv._forward_hooks or conv._forward_pre_hooks:
        return Refusal.HOOKED, "it has forward hooks, which a replacement would not call"
    return check_geometry(conv)


def check_geometry(conv: nn.Conv2d) -> tuple[Refusal, str] | None:
    """Return why the shape of the convolution is not supported, or None."""
    if conv.kernel_size not in ((1, 1), (3, 3)):
        return Refusal.KERNEL_SIZE, f"`kernel_size` (={conv.kernel_size}) is neither 3x3 nor 1x1"
    if conv.stride not in ((1, 1), (2, 2)):
        return Refusal.STRIDE, f"`stride` (={conv.stride}) is neither 1 nor 2"
    if conv.dilation != (1, 1):
        return Refusal.DILATION, f"`dilation` (={conv.dilation}) is not 1"
    if conv.groups != 1:
        return Refusal.GROUPS, f"`groups` (={conv.groups}) is not 1"
    if get_padding(conv) not in ((0, 0), (1, 1)):
        return Refusal.PADDING, f"`padding` (={conv.padding}) is neither 0 nor 1 on every side"
    if conv.padding_mode != "zeros":
        return Refusal.PADDING_MODE, f"`padding_mode` (={conv.padding_mode!r}) is not 'zeros'"
    return None


def count_products(layer: nn.Module) -> int:
    """Return the products per value of the input of a convolution (of stride 1) or a linear layer."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight.numel() // weight.shape[1]


def is_plain_conv(conv: nn.Conv2d) -> bool:
    """Return whether the module computes exactly nn.Conv2d from `weight` and `bias`."""
    cls = type(conv)
    if "forward" in vars(conv) or cls._conv_forward is not nn.Conv2d._conv_forward:
        return False
    if cls.forward is nn.Conv2d.forward:
        return True
    defining_function = cls.forward.__qualname__, cls.forward.__module__
    return defining_function == ("Conv2d.forward", "spikingjelly.activation_based.layer.stateless_wrapper")
