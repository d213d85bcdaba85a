"""Convolutions over the active cells of sparse grids, in plain torch.

Only *sites*, coordinates that are active, have features; whatever lies beside them counts as zero. The
submanifold convolution (Graham et al., "3D Semantic Segmentation with Submanifold Sparse Convolutional
Networks", CVPR 2018) keeps the sites; the strided one halves coordinates, and its sites are the halves that
occur, as in MinkowskiEngine (Choy et al., CVPR 2019).

A table says for every output and every offset of the kernel which input is read there. A convolution gathers
by it what all offsets read, and multiplies that by all weights at once; of many outputs, some at a time, so
that what it holds does not grow with them. Gradients are gathered, too, by the table the other way round:
nothing is scattered, so no result depends on the order in which threads add. On one device the same batch
gives the same bits, forward and backward; the same pattern in another batch need not, as matrix products of
other sizes may add up otherwise.

Searching for neighbours takes longer than convolving: the `Sites` of a pattern keep what was found, and a
`Batch` puts together patterns whose neighbours are known.
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

from sparseflow.errors import InputError

_AT_ONCE = {"cpu": 2**18, "cuda": 2**25}
"""Numbers that are gathered at a time, about: on a CPU, what its caches hold."""


@dataclass(frozen=True, kw_only=True)
class KernelMap:
    """Which inputs the outputs read.

    Attributes:
        reads: Shape (outputs, offsets), int32: 1 + the input's place; 0 for none.
        read_by: Shape (inputs, offsets), int32: 1 + the place of the output that reads an input; 0 for none.
    """

    reads: Tensor
    read_by: Tensor

    @classmethod
    def of(cls, reads: Tensor, inputs: int) -> KernelMap:
        """The map with these reads of so many inputs."""
        outputs, offsets = reads.shape
        # What reads nothing writes to the first row, in any order, and that is cut off.
        found = reads.new_zeros(inputs + 1, offsets)
        places = torch.arange(1, outputs + 1, dtype=torch.int32, device=found.device)
        found = found.scatter_(0, reads.long(), places[:, None].expand(-1, offsets))
        return cls(reads=reads, read_by=found[1:].contiguous())

    @classmethod
    def joined(cls, maps: Sequence[KernelMap]) -> KernelMap:
        """The map of a batch, from those of its items."""
        reads, read_by = [one.reads for one in maps], [one.read_by for one in maps]
        return cls(
            reads=_shifted(reads, [len(table) for table in read_by]),
            read_by=_shifted(read_by, [len(table) for table in reads]),
        )


def _shifted(tables: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Tables below each other, each counting from where the ones before it end."""
    before = itertools.accumulate(sizes, initial=0)
    return torch.cat(
        [torch.where(table > 0, table + size, 0) for table, size in zip(tables, before, strict=False)]
    )


class Sites:
    """The active coordinates of a grid, with what was found out about their neighbourhood.

    Attributes:
        keys: Shape (n,), int64, sorted: row * columns + column.
        grid: Rows and columns.
    """

    def __init__(self, keys: Tensor, grid: tuple[int, int]) -> None:
        self.keys, self.grid = keys, grid
        self._neighbours: dict[tuple[int, int], KernelMap] = {}
        self._below: dict[int, KernelMap] = {}

    @classmethod
    def of(cls, coords: Tensor, grid: tuple[int, int]) -> Sites:
        """Sites of a pattern.

        Args:
            coords: Shape (n, 2), int64: rows and columns, sorted, nothing twice.
            grid: Rows and columns of the grid.

        Raises:
            InputError: Coordinates are not sorted or not in the grid, or the grid is too large.
        """
        rows, cols = grid
        if rows * cols >= 2**63:
            raise InputError(f"a grid of {rows}x{cols} is too large; take larger cells")
        outside = (coords < 0) | (coords >= torch.tensor(grid, device=coords.device))
        keys = coords[:, 0] * cols + coords[:, 1]
        if outside.any() or not (keys[1:] > keys[:-1]).all():
            raise InputError(f"coordinates are not sorted, there twice or outside of their grid {grid}")
        return cls(keys, grid)

    def __len__(self) -> int:
        return len(self.keys)

    @cached_property
    def rows(self) -> Tensor:
        """Shape (n,), int64."""
        return self.keys // self.grid[1]

    @cached_property
    def cols(self) -> Tensor:
        """Shape (n,), int64."""
        return self.keys % self.grid[1]

    def find(self, rows: Tensor, cols: Tensor) -> Tensor:
        """Places of sites, int32, of the shape that both are broadcast to: 1 + the place, 0 for none.

        Args:
            rows: int64, within the grid, and perhaps beyond it.
            cols: Likewise.
        """
        wanted = rows * self.grid[1] + cols
        inside = (rows >= 0) & (rows < self.grid[0]) & (cols >= 0) & (cols < self.grid[1])
        if not len(self):
            return torch.zeros_like(wanted, dtype=torch.int32)
        found = torch.searchsorted(self.keys, wanted)
        inside &= self.keys[found.clamp(max=len(self) - 1)] == wanted
        return torch.where(inside, found + 1, 0).int()

    def neighbours(self, kernel: int, dilation: int) -> KernelMap:
        """What a submanifold convolution reads."""
        if (kernel, dilation) not in self._neighbours:
            # What a site reads at an offset is read, at the opposite one, by that site: half of them will do.
            offsets = _offsets(kernel, dilation, self.keys.device)[: kernel * kernel // 2]
            reads = self.find(self.rows[:, None] + offsets[:, 0], self.cols[:, None] + offsets[:, 1])
            half = KernelMap.of(reads, len(self))
            own = torch.arange(1, len(self) + 1, dtype=torch.int32, device=self.keys.device)
            reads = torch.cat([half.reads, own[:, None], half.read_by.flip(1)], 1)
            self._neighbours[kernel, dilation] = KernelMap(reads=reads, read_by=reads.flip(1))
        return self._neighbours[kernel, dilation]

    @cached_property
    def halved(self) -> Sites:
        """The sites of half the rows and columns: halves of coordinates, rounded down, that occur."""
        rows, cols = (-(-extent // 2) for extent in self.grid)
        return Sites(torch.unique(self.rows // 2 * cols + self.cols // 2), (rows, cols))

    def below(self, kernel: int) -> KernelMap:
        """What a strided convolution reads of these sites: an output, around twice its coordinates."""
        if kernel not in self._below:
            outputs = self.halved
            offsets = _offsets(kernel, 1, self.keys.device)
            rows, cols = 2 * outputs.rows[:, None], 2 * outputs.cols[:, None]
            reads = self.find(rows + offsets[:, 0], cols + offsets[:, 1])
            self._below[kernel] = KernelMap.of(reads, len(self))
        return self._below[kernel]


class Batch:
    """Several patterns' sites, one after the other.

    Args:
        items: At least one, all on one device.

    Raises:
        InputError: There is none.
    """

    def __init__(self, items: Sequence[Sites]) -> None:
        if not items:
            raise InputError("a batch takes the sites of at least one pattern; found none")
        self.items = tuple(items)

    @property
    def lengths(self) -> list[int]:
        """Sites of each item."""
        return [len(item) for item in self.items]

    @cached_property
    def filled(self) -> Tensor:
        """Shape (items, longest item), bool: where an item has a site, if each had as many slots."""
        device = self.items[0].keys.device
        lengths = torch.tensor(self.lengths, device=device)
        return torch.arange(max(1, *self.lengths), device=device) < lengths[:, None]

    @cached_property
    def slots(self) -> Tensor:
        """Shape (n,), int64: the slot of each site, counted through all items."""
        longest, device = self.filled.shape[1], self.items[0].keys.device
        return torch.cat(
            [torch.arange(length, device=device) + at * longest for at, length in enumerate(self.lengths)]
        )

    def neighbours(self, kernel: int, dilation: int) -> KernelMap:
        """What a submanifold convolution reads."""
        return KernelMap.joined([item.neighbours(kernel, dilation) for item in self.items])

    @cached_property
    def halved(self) -> Batch:
        """The halved sites of each item."""
        return Batch([item.halved for item in self.items])

    def below(self, kernel: int) -> KernelMap:
        """What a strided convolution reads."""
        return KernelMap.joined([item.below(kernel) for item in self.items])


def _offsets(kernel: int, dilation: int, device: torch.device) -> Tensor:
    """Shape (kernel**2, 2), int64: rows and columns, in the order of the weights, (0, 0) in the middle."""
    steps = dilation * (torch.arange(kernel, device=device) - kernel // 2)
    return torch.cartesian_prod(steps, steps)


class _Convolve(torch.autograd.Function):
    """(features (inputs, in), weight (offsets, in, out), map) -> (outputs, out).

    Only the inputs are kept for the gradients: what was gathered is gathered again.
    """

    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, kernel_map: KernelMap) -> Tensor:
        ctx.save_for_backward(features, weight)
        ctx.map = kernel_map
        return _products(features, kernel_map.reads, weight.flatten(0, 1))

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # what the decorator returns is untyped
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None]:
        features, weight = ctx.saved_tensors
        kernel_map: KernelMap = ctx.map
        of_features = of_weight = None
        if ctx.needs_input_grad[0]:
            of_features = _products(gradient, kernel_map.read_by, weight.transpose(1, 2).flatten(0, 1))
        if ctx.needs_input_grad[1]:
            of_weight = torch.zeros_like(weight).flatten(0, 1)
            for rows, read in _gathered(features, kernel_map.reads):
                of_weight.addmm_(read.T, gradient[rows])
            of_weight = of_weight.view_as(weight)
        return of_features, of_weight, None


def _gathered(features: Tensor, table: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """What some rows of a table read, side by side: (rows, (len(rows), offsets * channels)).

    What was given before is overwritten.
    """
    padded = torch.cat([features.new_zeros(1, features.shape[1]), features])
    offsets, channels = table.shape[1], features.shape[1]
    most = _AT_ONCE.get(features.device.type, _AT_ONCE["cuda"])
    step = min(max(1, most // (offsets * channels)), max(1, len(table)))
    room = features.new_empty(step * offsets, channels)
    for first in range(0, len(table), step):
        places = table[first : first + step].flatten()
        read = torch.index_select(padded, 0, places, out=room[: len(places)])
        yield slice(first, first + step), read.view(-1, offsets * channels)


def _products(features: Tensor, table: Tensor, weight: Tensor) -> Tensor:
    """What each row of a table reads, times weights (offsets * channels, out)."""
    found = features.new_empty(len(table), weight.shape[1])
    for rows, read in _gathered(features, table):
        torch.mm(read, weight, out=found[rows])
    return found


class _Conv2d(nn.Module):
    """Weights of a sparse convolution.

    Attributes:
        weight: Shape (kernel**2, in, out); offsets in the order of a dense kernel's rows and columns.
        bias: Shape (out,).
    """

    def __init__(self, in_channels: int, out_channels: int, kernel: int) -> None:
        super().__init__()
        if kernel < 1 or kernel % 2 == 0:
            raise InputError(f"`kernel` (={kernel}) must be odd, so that it has a middle")
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
    """A convolution whose outputs are at the sites of its inputs.

    Args:
        in_channels: Features of an input.
        out_channels: Features of an output.
        kernel: Rows and columns of the kernel, odd.
        dilation: Coordinates from one of its weights to the next.

    Raises:
        InputError: The kernel is even, or the dilation below 1.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel: int, dilation: int = 1) -> None:
        super().__init__(in_channels, out_channels, kernel)
        if dilation < 1:
            raise InputError(f"`dilation` (={dilation}) must be 1 or more")
        self.dilation = dilation

    def forward(self, features: Tensor, batch: Batch) -> Tensor:
        """Features (n, in) of a batch's n sites -> (n, out)."""
        return self._apply_map(features, batch.neighbours(self.kernel, self.dilation))


class StridedConv2d(_Conv2d):
    """A convolution of stride 2: its outputs are at `halved` sites, and sum around twice their coordinates.

    Args:
        in_channels: Features of an input.
        out_channels: Features of an output.
        kernel: Rows and columns of the kernel, odd.

    Raises:
        InputError: The kernel is even.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel: int = 3) -> None:
        super().__init__(in_channels, out_channels, kernel)

    def forward(self, features: Tensor, batch: Batch) -> tuple[Tensor, Batch]:
        """Features (n, in) of a batch's n sites -> (m, out) and the m sites where they are."""
        return self._apply_map(features, batch.below(self.kernel)), batch.halved


def pool(features: Tensor, batch: Batch) -> Tensor:
    """The mean and the maximum of every channel over the sites of each item of the batch.

    Args:
        features: Shape (n, channels).
        batch: Of n sites.

    Returns:
        Shape (items, 2 * channels): means, then maxima; zeros where an item has no site.
    """
    count, longest = batch.filled.shape
    # Copied to rows of their own, not added: the order of threads does not matter.
    slots = features.new_zeros(count * longest, features.shape[1]).index_copy(0, batch.slots, features)
    slots = slots.view(count, longest, features.shape[1])
    mean = slots.sum(1) / batch.filled.sum(1, keepdim=True).clamp(min=1)
    # Of an item without sites, the first slot's zeros.
    shown = batch.filled.clone()
    shown[:, 0] = True
    return torch.cat([mean, slots.masked_fill(~shown[:, :, None], -math.inf).amax(1)], 1)
