"""Geometry of convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn


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

    @property
    def is_square(self) -> bool:
        """Whether it is the same in both directions."""
        sizes = (self.kernel_size, self.stride, self.padding, self.dilation)
        return all(not isinstance(size, str) and size[0] == size[1] for size in sizes)

    @classmethod
    def from_layer(cls, layer: nn.Module) -> ConvGeometry:
        """Return the geometry of a Conv2d, a Conv1d or a linear layer."""
        if isinstance(layer, nn.Linear):
            return cls()
        assert isinstance(layer, (nn.Conv1d, nn.Conv2d))
        padding = get_padding(layer)
        sizes = (layer.kernel_size, layer.stride, layer.dilation)
        kernel_size, stride, dilation = map(to_pair, sizes)
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


def get_padding(conv: nn.Conv1d | nn.Conv2d | nn.ConvTranspose2d) -> tuple[int, int] | None:
    """Return the zeros on either side of (height, width); None if the sides differ ('same', even kernel)."""
    if conv.padding == "valid":
        return 0, 0
    if conv.padding == "same":
        spans = [step * (size - 1) for step, size in zip(conv.dilation, conv.kernel_size, strict=True)]
        return None if any(span % 2 for span in spans) else to_pair([span // 2 for span in spans], fill=0)
    return to_pair(conv.padding, fill=0)


def to_pair(sizes: object, fill: int = 1) -> tuple[int, int]:
    """Return (height, width); the height of a one-dimensional layer is `fill`."""
    assert isinstance(sizes, Sequence) and len(sizes) in (1, 2)
    return (fill if len(sizes) == 1 else int(sizes[0])), int(sizes[-1])
