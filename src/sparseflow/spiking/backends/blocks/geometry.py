"""Blocks and chunks of a convolution's input, tiles of its output, and the static block rule.

Terms:

- *block*: `block` x `block` input pixels (4, 8 or 16) on a grid that starts at pixel (0, 0);
- *chunk*: `group` consecutive input channels, multiplied by one step of the tensor cores;
- *word*: occupancy of one block of one chunk, int32: bit r is set if row r holds a non-zero, bit 16 + c if
  column c does. The block is zero exactly if its word is;
- *tile*: `tile_h` x `tile_w` output pixels, computed by one program for each `tile_c` output channels;
- *field*: the input pixels that a tile reads; it extends into neighboring blocks (the halo).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from sparseflow.core.checks import check_one_of
from sparseflow.errors import InputError

BLOCK_SIZES = (4, 8, 16)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, kw_only=True)
class ConvTiling:
    """Tile sizes; they affect speed only.

    Attributes:
        group: Input channels of a chunk, a power of two, at least 16.
        tile_h, tile_w: Output pixels of a tile, powers of two with a product of at least 16.
        tile_c: Output channels of a tile, a power of two, at least 16.
        warps: Warps per program.
        stages: Pipeline depth of operand loads.
    """

    group: int = 16
    tile_h: int = 8
    tile_w: int = 16
    tile_c: int = 64
    warps: int = 4
    stages: int = 4


@dataclass(frozen=True, kw_only=True)
class ConvGeometry:
    """Shape of one convolution, without its number of images and output channels.

    Attributes:
        channels, height, width: Input size.
        kernel: 1 or 3.
        stride: 1 or 2.
        padding: Zeros on each side, 0 or 1.
        block: Edge of a block in pixels.
    """

    channels: int
    height: int
    width: int
    kernel: int
    stride: int
    padding: int
    block: int

    def compute_out_size(self, size: int) -> int:
        """Compute the output rows (columns) for `size` input rows (columns)."""
        return (size + 2 * self.padding - self.kernel) // self.stride + 1

    @property
    def out_h(self) -> int:
        return self.compute_out_size(self.height)

    @property
    def out_w(self) -> int:
        return self.compute_out_size(self.width)

    @property
    def grid_h(self) -> int:
        """Rows of blocks."""
        return -(-self.height // self.block)

    @property
    def grid_w(self) -> int:
        """Columns of blocks."""
        return -(-self.width // self.block)

    def count_chunks(self, group: int) -> int:
        """Count chunks of `group` input channels; the last may be partial."""
        return -(-self.channels // group)

    def compute_field(self, tile: int, size: int, start: int) -> tuple[int, int]:
        """Compute the first and last input row (column) of a tile of `tile` rows from output row `start`.

        Clipped to the input's `size`; the last is before the first if the tile reads padding only.
        """
        first = start * self.stride - self.padding
        last = first + (tile - 1) * self.stride + self.kernel - 1
        return max(first, 0), min(last, size - 1)


def make_geometry(
    shape: tuple[int, ...], *, kernel_size: int, stride: int, padding: int, block_size: int
) -> ConvGeometry:
    """Validate a convolution of an input [N, C, H, W] and describe it.

    Raises:
        InputError: The kernels do not support it.
    """
    if len(shape) != 4:
        raise InputError(f"the input must be [N, C, H, W], not of shape {tuple(shape)}")
    if (kernel_size, padding) not in ((3, 0), (3, 1), (1, 0)) or stride not in (1, 2):
        raise InputError(
            f"kernel_size (={kernel_size}), stride (={stride}) and padding (={padding}) must be a 3x3 "
            "convolution with padding 0 or 1, or a 1x1 one without, and stride 1 or 2"
        )
    check_one_of(BLOCK_SIZES, block_size=block_size)
    _, channels, height, width = shape
    if channels < 1 or min(height, width) + 2 * padding < kernel_size:
        raise InputError(
            f"an input of shape {tuple(shape)} is too small for a {kernel_size}x{kernel_size} kernel"
        )
    return ConvGeometry(
        channels=channels, height=height, width=width, kernel=kernel_size, stride=stride, padding=padding,
        block=block_size,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def choose_tiling(geometry: ConvGeometry, dtype: torch.dtype, channels_last: bool, c_out: int) -> ConvTiling:
    """Choose tile sizes by rule, without measuring.

    Rows of 32 pixels keep stores of NCHW outputs contiguous. Channels-last outputs store whole pixels and
    gain from squarer tiles with a smaller halo. Small tiles and few registers keep many programs on a
    multiprocessor, which suits nearly silent layers that mostly write their bias. Small chunks are skipped
    more often; a 1x1 convolution has no taps and takes larger ones.
    """
    full = dtype in (torch.float32, torch.float64)  # products run on the ALUs
    out_w = geometry.out_w
    if out_w <= 8:
        tile_w = 8
    elif channels_last:
        tile_w = 8 if geometry.block == 4 else 16
    else:
        tile_w = 16 if out_w <= 16 else 32
    pixels = 128 if channels_last and not full and tile_w == 16 else 64
    return ConvTiling(
        group=16 if geometry.kernel == 3 or full else 32,
        tile_h=pixels // tile_w,
        tile_w=tile_w,
        tile_c=16 if c_out <= 16 else 32 if c_out <= 32 or dtype == torch.float64 else 64,
        warps=8 if channels_last and dtype == torch.float32 else 4,
    )


@lru_cache(maxsize=1024)
def compute_reach(geometry: ConvGeometry, tiling: ConvTiling) -> tuple[int, int]:
    """Compute the largest number of blocks, down and across, that the field of any tile touches."""

    def max_blocks(tile: int, size: int, out: int) -> int:
        spans = [1]
        for start in range(0, out, tile):
            first, last = geometry.compute_field(tile, size, start)
            spans.append(last // geometry.block - first // geometry.block + 1)
        return max(spans)

    return (
        max_blocks(tiling.tile_h, geometry.height, geometry.out_h),
        max_blocks(tiling.tile_w, geometry.width, geometry.out_w),
    )


def select_block_size(height: int) -> int | None:
    """Select the block edge in pixels for a feature map of `height` rows; None if blocks do not pay off."""
    for min_height, block in ((32, 16), (16, 8), (8, 4)):
        if height >= min_height:
            return block
    return None
