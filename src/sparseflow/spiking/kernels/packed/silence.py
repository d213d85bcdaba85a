"""Where packed spikes are silent: the activity words that let a group skip blocks of channels.

The fused group writes them as it fires; `mark` makes the same ones from spikes that come from elsewhere.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from sparseflow.errors import InputError
from sparseflow.spiking.kernels.packed.format import ACTIVITY_STEPS, PackedSpikes


def mark(spikes: PackedSpikes, tile: int = 16) -> PackedSpikes:
    """The same spikes with activity words (plain torch; no host synchronisation).

    Args:
        spikes: At most 32 time steps.
        tile: Pixels of a word.

    Raises:
        InputError: There are more time steps, or `tile` is not positive.
    """
    if spikes.T > ACTIVITY_STEPS or tile < 1:
        raise InputError(
            f"activity words have {ACTIVITY_STEPS} bits, one a time step, and at least one pixel: "
            f"got {spikes.T} time steps and tiles of {tile}"
        )
    t, n, _, h, w = spikes.shape
    fires = (spikes.pixels != 0).any(-1).reshape(t, n * h * w, spikes.blocks)
    tiles = -(-n * h * w // tile)
    padded = torch.zeros((t, tiles * tile, spikes.blocks), dtype=torch.bool, device=fires.device)
    padded[:, : n * h * w] = fires
    active = padded.view(t, tiles, tile, spikes.blocks).any(2)
    bits = torch.ones(t, dtype=torch.int64, device=fires.device) << torch.arange(t, device=fires.device)
    words = (active * bits.view(-1, 1, 1)).sum(0)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words)
    return replace(spikes, activity=words.t().to(torch.int32).contiguous(), tile=tile)


def words_of_a_tile(
    *, pixels: int, images: int, height: int, width: int, in_height: int, in_width: int, stride: int,
    reach: int, tile: int,
) -> int:  # fmt: skip
    """Most activity words that the inputs of one tile of output pixels spread over.

    Args:
        pixels: Output pixels of a tile.
        images: N.
        height: Output rows.
        width: Output columns.
        in_height: Input rows.
        in_width: Input columns.
        stride: Of the convolution.
        reach: Rows and columns that it looks to every side (1 for a 3x3, 0 for a 1x1).
        tile: Input pixels of an activity word.
    """
    count = images * height * width
    first = torch.arange(0, count, pixels)
    last = (first + pixels - 1).clamp(max=count - 1)

    def place(pixel: torch.Tensor) -> torch.Tensor:
        n, y, x = pixel // (height * width), pixel // width % height, pixel % width
        return (n * in_height + y * stride) * in_width + x * stride

    halo = reach * (in_width + 1)
    low = (place(first) - halo).clamp(min=0) // tile
    high = (place(last) + halo).clamp(max=images * in_height * in_width - 1) // tile
    return int((high - low).max()) + 1
