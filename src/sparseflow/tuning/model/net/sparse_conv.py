"""Sparse 2-D convolutions in plain PyTorch.

Only *sites*, the active coordinates, have features; all other coordinates are zero. The submanifold
convolution (Graham et al., "3D Semantic Segmentation with Submanifold Sparse Convolutional Networks", CVPR
2018) keeps the sites. The strided convolution halves the coordinates; its sites are the halves that occur, as
in MinkowskiEngine (Choy et al., CVPR 2019).

A kernel map has the input of every output and kernel offset. A convolution gathers the inputs of all offsets
and multiplies them by all weights at once, in chunks of outputs, so that memory is bounded. Gradients are
gathered with the inverse map. Nothing is scattered, so no result depends on the order of threads. On one
device a batch gives identical bits in every run. A pattern in another batch may give other bits, because
matrix products of other sizes may sum in another order.

Finding neighbors takes longer than convolving. `ActiveSites` caches the kernel maps of a pattern, and a
`SiteBatch` concatenates them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sparseflow.core.checks import check_at_least
from sparseflow.errors import InputError

_GATHER_NUMBERS = {"cpu": 2**18, "cuda": 2**25}
"""Approximate number of values that are gathered at once; on a CPU they fit its caches."""


@dataclass(frozen=True, kw_only=True)
class KernelMap:
    """Inputs of each output, and the inverse.

    Attributes:
        reads: 1 + index of the input, or 0, shape [outputs, offsets], int32.
        read_by: 1 + index of the output that reads an input, or 0, shape [inputs, offsets], int32.
    """

    reads: Tensor
    read_by: Tensor

    @classmethod
    def from_reads(cls, reads: Tensor, inputs: int) -> KernelMap:
        """Compute the inverse of `reads`."""
        outputs, offsets = reads.shape
        # Index 0 (no input) writes to the first row, which is dropped.
        read_by = reads.new_zeros(inputs + 1, offsets)
        outputs_index = torch.arange(1, outputs + 1, dtype=torch.int32, device=read_by.device)
        read_by = read_by.scatter_(0, reads.long(), outputs_index[:, None].expand(-1, offsets))
        return cls(reads=reads, read_by=read_by[1:].contiguous())

    @classmethod
    def concatenate(cls, maps: Sequence[KernelMap]) -> KernelMap:
        """Concatenate the maps of the items of a batch."""
        reads, read_by = (
            [kernel_map.reads for kernel_map in maps],
            [kernel_map.read_by for kernel_map in maps],
        )
        return cls(
            reads=_concatenate_tables(reads, [len(table) for table in read_by]),
            read_by=_concatenate_tables(read_by, [len(table) for table in reads]),
        )


def _concatenate_tables(tables: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Concatenate tables and offset their indices by the sizes of the previous items."""
    before = itertools.accumulate(sizes, initial=0)
    return torch.cat(
        [torch.where(table > 0, table + size, 0) for table, size in zip(tables, before, strict=False)]
    )


class ActiveSites:
    """Active coordinates of a grid, with cached kernel maps.

    Attributes:
        keys: row * columns + column, sorted, shape [n], int64.
        grid: Rows and columns.
    """

    def __init__(self, keys: Tensor, grid: tuple[int, int]) -> None:
        self.keys, self.grid = keys, grid
        self._neighbor_maps: dict[tuple[int, int], KernelMap] = {}
        self._strided_maps: dict[int, KernelMap] = {}

    @classmethod
    def from_coords(cls, coords: Tensor, grid: tuple[int, int]) -> ActiveSites:
        """Create the sites of a pattern.

        Args:
            coords: Rows and columns, sorted, without duplicates, shape [n, 2], int64.
            grid: Rows and columns of the grid; their product is below 2**63.
        """
        return cls(coords[:, 0] * grid[1] + coords[:, 1], grid)

    def __len__(self) -> int:
        return len(self.keys)

    @cached_property
    def rows(self) -> Tensor:
        """Row indices, shape [n], int64."""
        return self.keys // self.grid[1]

    @cached_property
    def cols(self) -> Tensor:
        """Column indices, shape [n], int64."""
        return self.keys % self.grid[1]

    def find(self, rows: Tensor, cols: Tensor) -> Tensor:
        """Return 1 + the index of the site at each coordinate, 0 if there is none, int32.

        Args:
            rows: Row indices, int64, possibly outside the grid.
            cols: Column indices; broadcast with `rows`.
        """
        keys = rows * self.grid[1] + cols
        inside = (rows >= 0) & (rows < self.grid[0]) & (cols >= 0) & (cols < self.grid[1])
        if not len(self):
            return torch.zeros_like(keys, dtype=torch.int32)
        index = torch.searchsorted(self.keys, keys)
        inside &= self.keys[index.clamp(max=len(self) - 1)] == keys
        return torch.where(inside, index + 1, 0).int()

    def neighbor_map(self, kernel: int, dilation: int) -> KernelMap:
        """Return the kernel map of a submanifold convolution."""
        if (kernel, dilation) not in self._neighbor_maps:
            # The inverse of an offset is the opposite offset, so half of the offsets suffice.
            offsets = _offsets(kernel, dilation, self.keys.device)[: kernel * kernel // 2]
            reads = self.find(self.rows[:, None] + offsets[:, 0], self.cols[:, None] + offsets[:, 1])
            half = KernelMap.from_reads(reads, len(self))
            center = torch.arange(1, len(self) + 1, dtype=torch.int32, device=self.keys.device)
            reads = torch.cat([half.reads, center[:, None], half.read_by.flip(1)], 1)
            self._neighbor_maps[kernel, dilation] = KernelMap(reads=reads, read_by=reads.flip(1))
        return self._neighbor_maps[kernel, dilation]

    @cached_property
    def downsampled(self) -> ActiveSites:
        """Sites of the grid with half the rows and columns."""
        rows, cols = (-(-extent // 2) for extent in self.grid)
        return ActiveSites(torch.unique(self.rows // 2 * cols + self.cols // 2), (rows, cols))

    def strided_map(self, kernel: int) -> KernelMap:
        """Return the kernel map of a strided convolution, centered at twice the output coordinates."""
        if kernel not in self._strided_maps:
            outputs = self.downsampled
            offsets = _offsets(kernel, 1, self.keys.device)
            rows, cols = 2 * outputs.rows[:, None], 2 * outputs.cols[:, None]
            reads = self.find(rows + offsets[:, 0], cols + offsets[:, 1])
            self._strided_maps[kernel] = KernelMap.from_reads(reads, len(self))
        return self._strided_maps[kernel]


class SiteBatch:
    """Concatenated sites of several patterns.

    Args:
        items: At least one, all on one device.

    Raises:
        InputError: `items` is empty.
    """

    def __init__(self, items: Sequence[ActiveSites]) -> None:
        if not items:
            raise InputError("a batch needs the sites of at least one pattern")
        self.items = tuple(items)

    @property
    def lengths(self) -> list[int]:
        """Number of sites of each item."""
        return [len(item) for item in self.items]

    @cached_property
    def slot_mask(self) -> Tensor:
        """Whether a slot has a site; all items have equally many slots. Shape [items, longest item], bool."""
        device = self.items[0].keys.device
        lengths = torch.tensor(self.lengths, device=device)
        return torch.arange(max(1, *self.lengths), device=device) < lengths[:, None]

    @cached_property
    def slots(self) -> Tensor:
        """Slot of each site, counted over all items, shape [n], int64."""
        longest, device = self.slot_mask.shape[1], self.items[0].keys.device
        return torch.cat(
            [
                torch.arange(length, device=device) + index * longest
                for index, length in enumerate(self.lengths)
            ]
        )

    def neighbor_map(self, kernel: int, dilation: int) -> KernelMap:
        """Return the kernel map of a submanifold convolution."""
        return KernelMap.concatenate([item.neighbor_map(kernel, dilation) for item in self.items])

    @cached_property
    def downsampled(self) -> SiteBatch:
        """Downsampled sites of each item."""
        return SiteBatch([item.downsampled for item in self.items])

    def strided_map(self, kernel: int) -> KernelMap:
        """Return the kernel map of a strided convolution."""
        return KernelMap.concatenate([item.strided_map(kernel) for item in self.items])


def _offsets(kernel: int, dilation: int, device: torch.device) -> Tensor:
    """Return kernel offsets (row, column) in the order of the weights, shape [kernel**2, 2], int64."""
    steps = dilation * (torch.arange(kernel, device=device) - kernel // 2)
    return torch.cartesian_prod(steps, steps)


class _Convolve(torch.autograd.Function):
    """(features [inputs, in], weight [offsets, in, out], kernel map) -> [outputs, out].

    Only the inputs are saved for the gradients; gathered values are gathered again.
    """

    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, kernel_map: KernelMap) -> Tensor:
        ctx.save_for_backward(features, weight)
        ctx.map = kernel_map
        return _multiply_gathered(features, kernel_map.reads, weight.flatten(0, 1))

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator's result is untyped
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None]:
        features, weight = ctx.saved_tensors
        kernel_map: KernelMap = ctx.map
        grad_features = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_features = _multiply_gathered(
                gradient, kernel_map.read_by, weight.transpose(1, 2).flatten(0, 1)
            )
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight).flatten(0, 1)
            for rows, read in _gather_chunks(features, kernel_map.reads):
                grad_weight.addmm_(read.T, gradient[rows])
            grad_weight = grad_weight.view_as(weight)
        return grad_features, grad_weight, None


def _gather_chunks(features: Tensor, table: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield (rows, gathered inputs [rows, offsets * channels]); the next chunk overwrites the buffer."""
    padded = torch.cat([features.new_zeros(1, features.shape[1]), features])
    offsets, channels = table.shape[1], features.shape[1]
    max_numbers = _GATHER_NUMBERS.get(features.device.type, _GATHER_NUMBERS["cuda"])
    step = min(max(1, max_numbers // (offsets * channels)), max(1, len(table)))
    buffer = features.new_empty(step * offsets, channels)
    for first in range(0, len(table), step):
        inputs = table[first : first + step].flatten()
        read = torch.index_select(padded, 0, inputs, out=buffer[: len(inputs)])
        yield slice(first, first + step), read.view(-1, offsets * channels)


def _multiply_gathered(features: Tensor, table: Tensor, weight: Tensor) -> Tensor:
    """Multiply the gathered inputs of each row by weights [offsets * channels, out]."""
    products = features.new_empty(len(table), weight.shape[1])
    for rows, read in _gather_chunks(features, table):
        torch.mm(read, weight, out=products[rows])
    return products


class _Conv2d(nn.Module):
    """Weights of a sparse convolution.

    Attributes:
        weight: Shape [kernel**2, in, out], with offsets in row-major order.
        bias: Shape [out].
    """

    def __init__(self, in_channels: int, out_channels: int, kernel: int) -> None:
        super().__init__()
        if kernel < 1 or kernel % 2 == 0:
            raise InputError(f"`kernel` (={kernel}) must be odd")
        self.kernel = kernel
        self.weight = nn.Parameter(torch.empty(kernel * kernel, in_channels, out_channels))
        self.bias = nn.Parameter(torch.empty(out_channels))
        bound = 1 / math.sqrt(kernel * kernel * in_channels)
        nn.init.uniform_(self.weight, -math.sqrt(3) * bound, math.sqrt(3) * bound)
        nn.init.uniform_(self.bias, -bound, bound)

    def _apply_map(self, features: Tensor, kernel_map: KernelMap) -> Tensor:
        result = _Convolve.apply(features, self.weight, kernel_map)
        assert isinstance(result, Tensor)
        return result + self.bias


class SubmanifoldConv2d(_Conv2d):
    """Convolution whose output sites are its input sites.

    Args:
        in_channels: Input features.
        out_channels: Output features.
        kernel: Rows and columns of the kernel, odd.
        dilation: Distance of kernel offsets.

    Raises:
        InputError: The kernel is even, or the dilation is below 1.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel: int, dilation: int = 1) -> None:
        super().__init__(in_channels, out_channels, kernel)
        check_at_least(1, dilation=dilation)
        self.dilation = dilation

    def forward(self, features: Tensor, batch: SiteBatch) -> Tensor:
        """Map features [n, in] of the batch's sites to [n, out]."""
        return self._apply_map(features, batch.neighbor_map(self.kernel, self.dilation))


class StridedConv2d(_Conv2d):
    """Convolution with stride 2 whose output sites are the downsampled sites.

    Args:
        in_channels: Input features.
        out_channels: Output features.
        kernel: Rows and columns of the kernel, odd.

    Raises:
        InputError: The kernel is even.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel: int = 3) -> None:
        super().__init__(in_channels, out_channels, kernel)

    def forward(self, features: Tensor, batch: SiteBatch) -> tuple[Tensor, SiteBatch]:
        """Map features [n, in] of the batch's sites to [m, out] and return the m output sites."""
        return self._apply_map(features, batch.strided_map(self.kernel)), batch.downsampled


def pool(features: Tensor, batch: SiteBatch) -> Tensor:
    """Compute the mean and the maximum of every channel over the sites of each item.

    Args:
        features: Shape [n, channels].
        batch: Sites.

    Returns:
        Means, then maxima, shape [items, 2 * channels]; 0 for items without sites.
    """
    count, longest = batch.slot_mask.shape
    # Rows are copied to distinct slots, so the result does not depend on the order of threads.
    slots = features.new_zeros(count * longest, features.shape[1]).index_copy(0, batch.slots, features)
    slots = slots.view(count, longest, features.shape[1])
    mean = slots.sum(1) / batch.slot_mask.sum(1, keepdim=True).clamp(min=1)
    # An item without sites uses the zeros of its first slot.
    mask = batch.slot_mask.clone()
    mask[:, 0] = True
    return torch.cat([mean, slots.masked_fill(~mask[:, :, None], -math.inf).amax(1)], 1)
