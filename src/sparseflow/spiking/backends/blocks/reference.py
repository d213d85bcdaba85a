"""Plain-torch reference of the two-stage kernels: occupancy words, active chunks, convolution."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sparseflow.spiking.backends.blocks.geometry import ConvGeometry, ConvTiling


def run_words_reference(x: torch.Tensor, block: int, group: int) -> torch.Tensor:
    """Compute the occupancy of each block of each chunk.

    Args:
        x: [N, C, H, W].
        block: Edge of a block in pixels, at most 16.
        group: Channels of a chunk.

    Returns:
        int32 [N, ceil(H/block), ceil(W/block), ceil(C/group)]; see `geometry.py` for the bits.
    """
    c, h, w = x.shape[1:]
    fired = F.pad((x != 0).to(torch.uint8), (0, -w % block, 0, -h % block, 0, -c % group)).bool()
    fired = fired.unflatten(3, (-1, block)).unflatten(2, (-1, block)).unflatten(1, (-1, group)).any(2)
    rows = fired.any(5)  # [N, G, GH, row, GW]
    columns = fired.any(3)  # [N, G, GH, GW, column]
    bit = 2 ** torch.arange(block, device=x.device)
    word = (rows * bit.view(-1, 1)).sum(3) + (columns * (bit << 16)).sum(4)
    return torch.where(word >= 2**31, word - 2**32, word).to(torch.int32).permute(0, 2, 3, 1).contiguous()


def run_active_reference(words: torch.Tensor, geometry: ConvGeometry, tiling: ConvTiling) -> list[list[int]]:
    """List the active chunks of each tile, ascending, in the order (image, tile row, tile column).

    A chunk is active if some block holds a non-zero in a row *and* in a column that the tile reads. This
    never misses a non-zero that the tile reads; it may include chunks whose non-zeros are in other pixels.
    """
    k, s, b = geometry.kernel, geometry.stride, geometry.block
    lists = []
    for image in words:
        for start_row in range(0, geometry.out_h, tiling.tile_h):
            for start_column in range(0, geometry.out_w, tiling.tile_w):
                rows, columns = (
                    {
                        i * s - geometry.padding + tap
                        for i in range(start, start + tile)
                        for tap in range(k)
                        if 0 <= i * s - geometry.padding + tap < size
                    }
                    for start, tile, size in (
                        (start_row, tiling.tile_h, geometry.height),
                        (start_column, tiling.tile_w, geometry.width),
                    )
                )
                active = torch.zeros(words.shape[3], dtype=torch.bool, device=words.device)
                for i in range(words.shape[1]):
                    for j in range(words.shape[2]):
                        row_bits = sum(1 << (r - i * b) for r in rows if r // b == i)
                        column_bits = sum(1 << (c - j * b) for c in columns if c // b == j)
                        word = image[i, j].long()
                        active |= ((word & row_bits) != 0) & (((word >> 16) & column_bits) != 0)
                lists.append(active.nonzero().flatten().tolist())
    return lists


def run_conv2d_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    stride: int = 1,
    padding: int = 1,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Run the dense convolution, [N, C_out, H_out, W_out] in `dtype`."""
    return F.conv2d(
        x.to(dtype),
        weight.to(dtype),
        None if bias is None else bias.to(dtype),
        stride=stride,
        padding=padding,
    )
