"""Convolutions over the active cells of sparse grids, in plain torch.

Only *sites*, coordinates that are active, have features; whatever lies beside them counts as zero. The
submanifold convolution (Graham et al., "3D Semantic Segmentation with Submanifold Sparse Convolutional
Networks", CVPR 2018) keeps the sites; the strided one halves coordinates, and its sites are the halves that
occur, as in MinkowskiEngine (Choy et al., CVPR 2019).

For every offset of the kernel a table says which input an output reads there. A convolution gathers by the
table, multiplies and adds, one offset after the other, so that what it holds at a time does not grow with
the kernel. Gradients are gathered, too, by the table the other way round: nothing is scattered, so no result
depends on the order in which threads add. On one device the same batch gives the same bits, forward and
backward; the same pattern in another batch need not, as matrix products of other sizes may add up otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sparseflow.errors import InputError


@dataclass(frozen=True, kw_only=True)
class KernelMap:
    """Which inputs the outputs read.

    Attributes:
        reads: Shape (offsets, outputs), int32: the input's place; as many as there are inputs for none.
        inputs: How many there are.
    """

    reads: Tensor
    inputs: int

    @cached_property
    def used(self) -> tuple[int, ...]:
        """Offsets at which any output reads something."""
        return tuple((self.reads < self.inputs).any(1).nonzero().flatten().tolist())

    @cached_property
    def read_by(self) -> Tensor:
        """Shape (offsets, inputs), int32: the output that reads an input; as many as there are for none."""
        offsets, outputs = self.reads.shape
        # What reads nothing writes to a last column, in any order, and that is cut off.
        found = self.reads.new_full((offsets, self.inputs + 1), outputs)
        places = torch.arange(outputs, dtype=torch.int32, device=found.device).expand(offsets, -1)
        return found.scatter_(1, self.reads.long(), places)[:, :-1]


class Sites:
    """The active coordinates of a batch of grids, with what was found out about their neighbourhood.

    Attributes:
        keys: Shape (n,), int64, sorted: (item of the batch * rows + row) * columns + column.
        items: Grids in the batch.
        grid: Rows and columns, those of the largest.
    """

    def __init__(self, keys: Tensor, *, items: int, grid: tuple[int, int]) -> None:
        self.keys, self.items, self.grid = keys, items, grid
        self._neighbours: dict[tuple[int, int], KernelMap] = {}
        self._below: dict[int, KernelMap] = {}

    @classmethod
    def of(
        cls, coords: Sequence[Tensor], grids: Sequence[tuple[int, int]], device: torch.device | None = None
    ) -> Sites:
        """Sites of a batch.

        Args:
            coords: For each item (n, 2), int64: rows and columns, sorted, nothing twice.
            grids: For each item, rows and columns of its grid.
            device: Where to; by default they stay.

        Raises:
            InputError: There is no item, coordinates are not sorted or not in their grid, or the grids are
                too large for a batch of so many.
        """
        if not coords or len(coords) != len(grids):
            raise InputError(f"{len(coords)} lists of coordinates and {len(grids)} grids make no batch")
        rows, cols = (max(grid[axis] for grid in grids) for axis in (0, 1))
        if len(coords) * rows * cols >= 2**63:
            raise InputError(f"{len(coords)} grids of {rows}x{cols} are too large for one batch; take fewer")
        keys = []
        for item, (found, grid) in enumerate(zip(coords, grids, strict=True)):
            outside = (found < 0) | (found >= torch.tensor(grid, device=found.device))
            keys.append((item * rows + found[:, 0]) * cols + found[:, 1])
            if outside.any() or not (keys[-1][1:] > keys[-1][:-1]).all():
                raise InputError(
                    f"coordinates of item {item} are not sorted, there twice or outside of its grid {grid}"
                )
        return cls(torch.cat(keys).to(device), items=len(coords), grid=(rows, cols))

    def __len__(self) -> int:
        return len(self.keys)

    @cached_property
    def cols(self) -> Tensor:
        """Shape (n,), int64."""
        return self.keys % self.grid[1]

    @cached_property
    def rows(self) -> Tensor:
        """Shape (n,), int64: counted through the batch, grid after grid."""
        return self.keys // self.grid[1]

    @cached_property
    def starts(self) -> Tensor:
        """Shape (items + 1,), int64: where the sites of each item begin, and the last ones end."""
        first = torch.arange(self.items + 1, device=self.keys.device) * (self.grid[0] * self.grid[1])
        return torch.searchsorted(self.keys, first)

    def find(self, rows: Tensor, cols: Tensor, items: Tensor) -> Tensor:
        """Places of sites: `len(self)` where there is none.

        Args:
            rows: int64, within an item's grid, and perhaps beyond it.
            cols: Likewise.
            items: Items of the batch. All three are broadcast.

        Returns:
            int32, of the broadcast shape.
        """
        wanted = (items * self.grid[0] + rows) * self.grid[1] + cols
        inside = (rows >= 0) & (rows < self.grid[0]) & (cols >= 0) & (cols < self.grid[1])
        if not len(self):
            return torch.zeros_like(wanted, dtype=torch.int32)
        found = torch.searchsorted(self.keys, wanted)
        inside &= self.keys[found.clamp(max=len(self) - 1)] == wanted
        return torch.where(inside, found, len(self)).int()

    def neighbours(self, kernel: int, dilation: int) -> KernelMap:
        """What a submanifold convolution reads."""
        if (kernel, dilation) not in self._neighbours:
            # What a site reads at an offset is read, at the opposite one, by that site: half of them will do.
            offsets = _offsets(kernel, dilation, self.keys.device)[: kernel * kernel // 2, :, None]
            rows, items = self.rows % self.grid[0], self.rows // self.grid[0]
            half = KernelMap(
                reads=self.find(rows + offsets[:, 0], self.cols + offsets[:, 1], items), inputs=len(self)
            )
            own = torch.arange(len(self), dtype=torch.int32, device=self.keys.device)
            reads = torch.cat([half.reads, own[None], half.read_by.flip(0)])
            self._neighbours[kernel, dilation] = KernelMap(reads=reads, inputs=len(self))
        return self._neighbours[kernel, dilation]

    @cached_property
    def halved(self) -> Sites:
        """The sites of half the rows and columns: halves of coordinates, rounded down, that occur."""
        rows, cols = (-(-extent // 2) for extent in self.grid)
        items = self.rows // self.grid[0]
        keys = (items * rows + self.rows % self.grid[0] // 2) * cols + self.cols // 2
        return Sites(torch.unique(keys), items=self.items, grid=(rows, cols))

    def below(self, kernel: int) -> KernelMap:
        """What a strided convolution reads of these sites: an output, around twice its coordinates."""
        if kernel not in self._below:
            outputs = self.halved
            offsets = _offsets(kernel, 1, self.keys.device)[:, :, None]
            rows, items = outputs.rows % outputs.grid[0], outputs.rows // outputs.grid[0]
            reads = self.find(2 * rows + offsets[:, 0], 2 * outputs.cols + offsets[:, 1], items)
            self._below[kernel] = KernelMap(reads=reads, inputs=len(self))
        return self._below[kernel]


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
        padded = _padded(features)
        result = features.new_zeros(kernel_map.reads.shape[1], weight.shape[2])
        for offset in kernel_map.used:
            result.addmm_(padded.index_select(0, kernel_map.reads[offset]), weight[offset])
        return result

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # what the decorator returns is untyped
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None]:
        features, weight = ctx.saved_tensors
        kernel_map: KernelMap = ctx.map
        of_features = of_weight = None
        if ctx.needs_input_grad[0]:
            padded = _padded(gradient)
            of_features = torch.zeros_like(features)
            for offset in kernel_map.used:
                read = padded.index_select(0, kernel_map.read_by[offset])
                of_features.addmm_(read, weight[offset].T)
        if ctx.needs_input_grad[1]:
            padded = _padded(features)
            of_weight = torch.zeros_like(weight)
            for offset in kernel_map.used:
                read = padded.index_select(0, kernel_map.reads[offset])
                torch.mm(read.T, gradient, out=of_weight[offset])
        return of_features, of_weight, None


def _padded(features: Tensor) -> Tensor:
    """With a row of zeros behind, for what is not there."""
    return torch.cat([features, features.new_zeros(1, features.shape[1])])


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

    def forward(self, features: Tensor, sites: Sites) -> Tensor:
        """Features (n, in) of the sites -> (n, out)."""
        return self._apply_map(features, sites.neighbours(self.kernel, self.dilation))


class StridedConv2d(_Conv2d):
    """A convolution of stride 2: its outputs are at `sites.halved`, and sum around twice their coordinates.

    Args:
        in_channels: Features of an input.
        out_channels: Features of an output.
        kernel: Rows and columns of the kernel, odd.

    Raises:
        InputError: The kernel is even.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel: int = 3) -> None:
        super().__init__(in_channels, out_channels, kernel)

    def forward(self, features: Tensor, sites: Sites) -> tuple[Tensor, Sites]:
        """Features (n, in) of the sites -> (m, out) and the m sites where they are."""
        return self._apply_map(features, sites.below(self.kernel)), sites.halved


def pool(features: Tensor, sites: Sites) -> Tensor:
    """The mean and the maximum of every channel over the sites of each item of the batch.

    Args:
        features: Shape (n, channels).
        sites: The n sites.

    Returns:
        Shape (items, 2 * channels): means, then maxima; zeros where an item has no site.
    """
    lengths = sites.starts.diff()
    longest = max(1, int(lengths.max()))
    items = sites.rows // sites.grid[0]
    own = torch.arange(len(sites), device=items.device) - sites.starts[items] + items * longest
    # Copied to rows of their own, not added: the order of threads does not matter.
    slots = features.new_zeros(sites.items * longest, features.shape[1]).index_copy(0, own, features)
    slots = slots.view(sites.items, longest, features.shape[1])
    mean = slots.sum(1) / lengths.clamp(min=1)[:, None]
    missing = torch.arange(longest, device=items.device) >= lengths.clamp(min=1)[:, None]
    return torch.cat([mean, slots.masked_fill(missing[:, :, None], -math.inf).amax(1)], 1)
