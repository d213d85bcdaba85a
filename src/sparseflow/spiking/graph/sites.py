"""The convolutions of a network: what feeds them, and whether a sparse one can replace them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from torch import nn

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
class ConvGeometry:
    """A layer as a convolution of feature maps: a linear layer is 1x1, a Conv1d runs over maps of one row.

    Attributes:
        kernel_size, stride, dilation: (height, width).
        padding: (height, width), or 'same' with sides that differ.
        groups: Groups of channels.
    """

    kernel_size: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] | str = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    @classmethod
    def from_layer(cls, layer: nn.Module) -> ConvGeometry:
        """Return the geometry of a Conv2d, a Conv1d or a linear layer."""
        if isinstance(layer, nn.Linear):
            return cls()
        assert isinstance(layer, (nn.Conv1d, nn.Conv2d))
        padding = get_padding(layer)
        sizes = (layer.kernel_size, layer.stride, layer.dilation)
        kernel_size, stride, dilation = map(_to_pair, sizes)
        return cls(
            kernel_size=kernel_size,
            stride=stride,
            padding=str(layer.padding) if padding is None else padding,
            dilation=dilation,
            groups=layer.groups,
        )

    def compute_out_sizes(self, height: int, width: int) -> tuple[int, int]:
        """Compute the rows and columns of the output."""
        if isinstance(self.padding, str):
            return height, width
        sizes = []
        for size, k, s, p, d in zip(
            (height, width), self.kernel_size, self.stride, self.padding, self.dilation, strict=True
        ):
            sizes.append((size + 2 * p - d * (k - 1) - 1) // s + 1)
        return sizes[0], sizes[1]


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
        kernel_size=(1, 1) if isinstance(conv, nn.Linear) else _to_pair(conv.kernel_size),
        stride=(1, 1) if isinstance(conv, nn.Linear) else _to_pair(conv.stride),
        in_channels=conv.in_features if isinstance(conv, nn.Linear) else conv.in_channels,
        out_channels=conv.out_features if isinstance(conv, nn.Linear) else conv.out_channels,
        fed_by=tuple(sorted(value.sources)) if value.kind != "dense" else (),
        value=value,
        replaceable=refusal is None,
        refusal=None if refusal is None else refusal[0],
        reason=None if refusal is None else refusal[1],
    )


def get_padding(conv: nn.Conv1d | nn.Conv2d | nn.ConvTranspose2d) -> tuple[int, int] | None:
    """Return the zeros on either side of (height, width); None if the sides differ ('same', even kernel)."""
    if conv.padding == "valid":
        return 0, 0
    if conv.padding == "same":
        spans = [step * (size - 1) for step, size in zip(conv.dilation, conv.kernel_size, strict=True)]
        return None if any(span % 2 for span in spans) else _to_pair([span // 2 for span in spans], fill=0)
    return _to_pair(conv.padding, fill=0)


def _to_pair(sizes: object, fill: int = 1) -> tuple[int, int]:
    """Return (height, width); the height of a one-dimensional layer is `fill`."""
    assert isinstance(sizes, Sequence) and len(sizes) in (1, 2)
    return (fill if len(sizes) == 1 else int(sizes[0])), int(sizes[-1])


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


def is_plain_conv(conv: nn.Conv2d) -> bool:
    """Return whether the module computes exactly nn.Conv2d from `weight` and `bias`."""
    cls = type(conv)
    if "forward" in vars(conv) or cls._conv_forward is not nn.Conv2d._conv_forward:
        return False
    if cls.forward is nn.Conv2d.forward:
        return True
    defining_function = cls.forward.__qualname__, cls.forward.__module__
    return defining_function == ("Conv2d.forward", "spikingjelly.activation_based.layer.stateless_wrapper")
