"""`PackedSpikes`: one bit per spike, channels last, in the order that tensor cores read.

Memory is int16 `data[T, P, G, 4]`: P positions per time step, G = ceil(C / 64) blocks of 64 channels, four
halfwords per block. Bit `2j + p` (0 <= j < 8, 0 <= p < 2) of halfword `q` is channel `8j + 2q + p` of its
block: the columns that lane `q` of a quad holds in a wgmma accumulator fragment, so a kernel stores its own
spikes without a shuffle, and the bits that the lane needs as an A fragment of the next convolution.
Channels from C to 64 G are always 0.

The positions are the pixels of all images, row by row, with one border position before each row and one
border row before each image and after the last::

    pixel (n, y, x) is position ((H + 1) n + y + 1) (W + 1) + x + 1,    P = ((H + 1) N + 1) (W + 1) + 1

The border left of a row is also the one right of the row above, and the border above an image is also the
one below the previous image: (y, x) may be one outside the image and the formula still yields a zero. A 3x3
convolution therefore needs no masks at the edges, for half of the bytes that a separate border per image
would add. Kernels never write the border, except those that allocate their output.

A spike reaches the tensor core as a power of two (its bit is moved, by a rotation by 4 and one AND, to one
of four fp16 exponent positions). `K_CHANNEL` and `K_EXPONENT` give the channel at each position along K and
its power; the prepared weights are permuted by the former and scaled by the inverse of the latter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparseflow.errors import InputError

BLOCK = 64
"""Channels per block, the unit of skipping and of a K step."""


def _compute_halfword_bit(k: int) -> tuple[int, int]:
    """Return the bit of the halfword, and log2 of its value, at position `k` of a K step of 64."""
    r, p = k // 8, k % 2
    turn, e = r // 2, r % 2
    position = 11 + 2 * p + e  # fp16 bit 11, 12 | 13, 14: exponent field 2, 4 | 8, 16
    return (position - 4 * turn) % 16, {11: -13, 12: -11, 13: -7, 14: 1}[position]


def _compute_channel(bit: int, lane: int) -> int:
    return 8 * (bit // 2) + 2 * lane + bit % 2


K_CHANNEL: tuple[int, ...] = tuple(
    _compute_channel(_compute_halfword_bit(k)[0], (k % 8) // 2) for k in range(BLOCK)
)
"""Channel of a block at each position along K."""

K_EXPONENT: tuple[int, ...] = tuple(_compute_halfword_bit(k)[1] for k in range(BLOCK))
"""log2 of a spike's value at each position along K."""

MAX_ACTIVITY_STEPS = 32
"""Time steps that fit into an activity word."""

WEIGHT_LIMIT = 65504.0 * 2.0**-13
"""Largest |weight| that fits fp16 after scaling by the inverse powers (just under 8)."""


@dataclass(frozen=True, kw_only=True)
class PackedSpikes:
    """Spikes of T time steps, N images, C channels and H x W pixels, one bit each.

    Attributes:
        data: int16 [T, count_padded_pixels(N, H, W), ceil(C / 64), 4], contiguous; its border is zero.
        shape: (T, N, C, H, W); padding channels from C up to the next multiple of 64 are zero.
        activity: int32 [ceil(C / 64), ceil(N H W / tile)] or None: bit t of a word is set if `tile`
            consecutive pixels (counted over images, rows and columns, without border) may hold a spike of
            that block of channels in time step t. A bit set without need costs time; a missing bit loses
            spikes.
        tile: Pixels per activity word, 0 without activity.
    """

    data: Tensor
    shape: tuple[int, int, int, int, int]
    activity: Tensor | None = None
    tile: int = 0

    @property
    def blocks(self) -> int:
        """Blocks of 64 channels."""
        return self.data.shape[-2]

    @property
    def words(self) -> Tensor:
        """The memory as one int64 per position and block, [T, P, G].

        Channel `8j + 2q + p` of a block is bit `16q + 2j + p` of its word.
        """
        return self.data.view(torch.int64).squeeze(-1)

    @property
    def pixels(self) -> Tensor:
        """The memory without the border, int16 [T, N, H, W, G, 4], as a writable view."""
        _, n, _, h, w = self.shape
        return self.data[:, w + 2 :].unflatten(1, (n, h + 1, w + 1))[:, :, :h, :w]

    @property
    def nbytes(self) -> int:
        """Bytes of the words with their border and of the activity words."""
        return self.data.nbytes + (0 if self.activity is None else self.activity.nbytes)


def count_padded_pixels(n: int, h: int, w: int) -> int:
    """Count the positions of a time step: N images of H x W pixels and their shared border."""
    return (n * (h + 1) + 1) * (w + 1) + 1


def count_blocks(channels: int) -> int:
    return -(-channels // BLOCK)


def allocate_packed(
    t: int, n: int, c: int, h: int, w: int, device: torch.device | str, *, tile: int = 0, zero: bool = True
) -> PackedSpikes:
    """Allocate spikes.

    Args:
        t: Time steps.
        n: Images.
        c: Channels.
        h: Rows.
        w: Columns.
        device: Device.
        tile: Pixels per activity word (then at most 32 time steps); 0 for no activity.
        zero: Write zeros, and activity bits of 1; otherwise the memory is left for a kernel that writes all
            of it. The border must be zero and few kernels write it.

    Raises:
        InputError: Activity is requested for more than 32 time steps.
    """
    allocate = torch.zeros if zero else torch.empty
    data = allocate((t, count_padded_pixels(n, h, w), count_blocks(c), 4), dtype=torch.int16, device=device)
    activity = None
    if tile:
        if t > MAX_ACTIVITY_STEPS:
            raise InputError(f"activity words have {MAX_ACTIVITY_STEPS} bits, got {t} time steps")
        words = (count_blocks(c), -(-n * h * w // tile))
        activity = allocate(words, dtype=torch.int32, device=device)
        if zero:
            activity.fill_(-1)
    return PackedSpikes(data=data, shape=(t, n, c, h, w), activity=activity, tile=tile)


def make_channel_table(
    permutation: Tensor | None, channels: int, device: torch.device | str
) -> Tensor | None:
    """Make the table of membrane channels that kernels read.

    Args:
        permutation: [channels], the channel of the membrane's memory for each of the group's channels. None
            for the identity.
        channels: Number of channels.
        device: Device of the kernels.

    Returns:
        int32 [channels], or None.

    Raises:
        InputError: `permutation` is not a permutation; kernels would write out of bounds.
    """
    if permutation is None:
        return None
    if permutation.shape != (channels,) or not torch.equal(
        permutation.cpu().sort().values, torch.arange(channels)
    ):
        raise InputError(
            f"the membrane's channels must be a permutation of {channels}, got {permutation.dtype} "
            f"{tuple(permutation.shape)}"
        )
    return permutation.to(device, torch.int32).contiguous()


def pack(spikes: Tensor) -> PackedSpikes:
    """Pack spikes [T, N, C, H, W] of zeros and ones of any dtype (plain-torch reference of the kernel).

    Raises:
        InputError: `spikes` is not five-dimensional.
    """
    if spikes.dim() != 5:
        raise InputError(f"spikes must be [T, N, C, H, W], got a tensor of shape {tuple(spikes.shape)}")
    t, n, c, h, w = spikes.shape
    out = allocate_packed(t, n, c, h, w, spikes.device)
    g = count_blocks(c)
    ones = torch.zeros((t, n, h, w, g * BLOCK), dtype=torch.int32, device=spikes.device)
    ones[..., :c] = (spikes != 0).permute(0, 1, 3, 4, 2).to(torch.int32)
    # channel 64g + 8j + 2q + p -> [g, q, bit 2j + p]
    bits = ones.view(t, n, h, w, g, 8, 4, 2).permute(0, 1, 2, 3, 4, 6, 5, 7).reshape(t, n, h, w, g, 4, 16)
    weight = 1 << torch.arange(16, dtype=torch.int32, device=spikes.device)
    half = (bits * weight).sum(-1, dtype=torch.int32)
    out.pixels.copy_(torch.where(half >= 1 << 15, half - (1 << 16), half).to(torch.int16))
    return out


def unpack(spikes: PackedSpikes, dtype: torch.dtype = torch.float32) -> Tensor:
    """Unpack to [T, N, C, H, W] of `dtype` (plain-torch reference of the kernel)."""
    t, n, c, h, w = spikes.shape
    half = spikes.pixels.to(torch.int32)
    shifts = torch.arange(16, dtype=torch.int32, device=half.device)
    bits = (half.unsqueeze(-1) >> shifts) & 1
    ones = bits.view(t, n, h, w, spikes.blocks, 4, 8, 2).permute(0, 1, 2, 3, 4, 6, 5, 7)
    return (
        ones.reshape(t, n, h, w, spikes.blocks * BLOCK)[..., :c].permute(0, 1, 4, 2, 3).to(dtype).contiguous()
    )


def add_activity(spikes: PackedSpikes, tile: int = 16) -> PackedSpikes:
    """Return the same spikes with activity words (plain-torch reference of the kernels; no host
    synchronization).

    Args:
        spikes: At most 32 time steps.
        tile: Pixels per activity word.

    Raises:
        InputError: There are more time steps, or `tile` is not positive.
    """
    t, n, _, h, w = spikes.shape
    if t > MAX_ACTIVITY_STEPS or tile < 1:
        raise InputError(
            f"activity words have {MAX_ACTIVITY_STEPS} bits, one a time step, and at least one pixel: "
            f"got {t} time steps and tiles of {tile}"
        )
    fires = (spikes.pixels != 0).any(-1).reshape(t, n * h * w, spikes.blocks)
    tiles = -(-n * h * w // tile)
    padded = torch.zeros((t, tiles * tile, spikes.blocks), dtype=torch.bool, device=fires.device)
    padded[:, : n * h * w] = fires
    active = padded.view(t, tiles, tile, spikes.blocks).any(2)
    bits = torch.ones(t, dtype=torch.int64, device=fires.device) << torch.arange(t, device=fires.device)
    words = (active * bits.view(-1, 1, 1)).sum(0)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words)
    return replace(spikes, activity=words.t().to(torch.int32).contiguous(), tile=tile)
