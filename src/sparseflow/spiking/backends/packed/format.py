"""`PackedSpikes`: one bit a spike, channels last, in the order in which a tensor core wants them.

Memory is int16 `data[T, P, G, 4]`: P places a time step, G = ceil(C / 64) blocks of 64 channels, four
halfwords a block. Bit `2j + p` (0 <= j < 8, 0 <= p < 2) of halfword `q` is channel `8j + 2q + p` of its
block: exactly the columns that lane `q` of a quad holds in a wgmma accumulator fragment, so a kernel stores
its own spikes without a shuffle, and exactly the bits that lane needs as an A fragment of the next
convolution. Channels from C to 64 G are always 0.

The places are the pixels of all images, row by row, with one place of border in front of every row and one
row of it in front of every image and behind the last::

    pixel (n, y, x) is place ((H + 1) n + y + 1) (W + 1) + x + 1,    P = ((H + 1) N + 1) (W + 1) + 1

What lies left of a row is also what lies right of the row above, and what lies above an image is also what
lies below the image before: (y, x) may each be one outside the image and the formula still finds a zero. So
a 3x3 convolution needs no masks at the edges, for half of the bytes that a border for every image alone would
add. Kernels never write the border, except those that allocate what they write.

A spike reaches the tensor core as a power of two (its bit is moved, by a rotation by 4 and one AND, to
one of four fp16 exponent positions); `K_CHANNEL` and `K_EXPONENT` say which channel sits at which place
along K and which power it carries, and the prepared weights are permuted by the one and scaled by the
inverse of the other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparseflow.errors import InputError

BLOCK = 64
"""Channels in a block; the unit of skipping and of a K step."""


def _halfword_bit(k: int) -> tuple[int, int]:
    """Bit of the halfword, and log2 of the value it becomes, at place `k` along a K step of 64."""
    r, p = k // 8, k % 2
    turn, e = r // 2, r % 2
    position = 11 + 2 * p + e  # fp16 bit 11, 12 | 13, 14: exponent field 2, 4 | 8, 16
    return (position - 4 * turn) % 16, {11: -13, 12: -11, 13: -7, 14: 1}[position]


def _channel(bit: int, lane: int) -> int:
    return 8 * (bit // 2) + 2 * lane + bit % 2


K_CHANNEL: tuple[int, ...] = tuple(_channel(_halfword_bit(k)[0], (k % 8) // 2) for k in range(BLOCK))
"""Channel of a block at each place along K."""

K_EXPONENT: tuple[int, ...] = tuple(_halfword_bit(k)[1] for k in range(BLOCK))
"""log2 of the value that a spike has at each place along K."""

ACTIVITY_STEPS = 32
"""Time steps that an activity word has bits for."""

WEIGHT_LIMIT = 65504.0 * 2.0**-13
"""Largest |weight| that still fits fp16 after the scaling by the inverse powers (just under 8)."""


@dataclass(frozen=True, kw_only=True)
class PackedSpikes:
    """Spikes of T time steps, N images, C channels and H x W pixels, one bit each.

    Attributes:
        data: int16 [T, places_of(N, H, W), ceil(C / 64), 4], contiguous; its border is zero.
        shape: (T, N, C, H, W); padding channels from C up to the next multiple of 64 are zero.
        activity: int32 [ceil(C / 64), ceil(N H W / tile)] or None: bit t of a word is set where `tile`
            consecutive pixels (counted over images, rows and columns, without border) may hold a spike of
            that block of channels in time step t. A bit that is set without need costs time, a missing one
            spikes.
        tile: Pixels of an activity word, 0 without activity.
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
    def T(self) -> int:
        """Time steps."""
        return self.shape[0]

    @property
    def N(self) -> int:
        """Images."""
        return self.shape[1]

    @property
    def C(self) -> int:
        """Channels, without padding."""
        return self.shape[2]

    @property
    def H(self) -> int:
        """Rows, without border."""
        return self.shape[3]

    @property
    def W(self) -> int:
        """Columns, without border."""
        return self.shape[4]

    @property
    def words(self) -> Tensor:
        """The same memory as one int64 a place and block, [T, P, G].

        Channel `8j + 2q + p` of a block is bit `16q + 2j + p` of its word.
        """
        return self.data.view(torch.int64).squeeze(-1)

    @property
    def pixels(self) -> Tensor:
        """The same memory without the border, int16 [T, N, H, W, G, 4]: a view to read and write."""
        inner = self.data[:, self.W + 2 :].unflatten(1, (self.N, self.H + 1, self.W + 1))
        return inner[:, :, : self.H, : self.W]

    @property
    def nbytes(self) -> int:
        """Bytes that travel from layer to layer: the words with their border, and the activity words."""
        return self.data.nbytes + (0 if self.activity is None else self.activity.nbytes)


def places_of(n: int, h: int, w: int) -> int:
    """Places of a time step: N images of H x W pixels and the border that they share."""
    return (n * (h + 1) + 1) * (w + 1) + 1


def blocks_of(channels: int) -> int:
    """Blocks of 64 channels that hold `channels`."""
    return -(-channels // BLOCK)


def empty_packed(
    t: int, n: int, c: int, h: int, w: int, device: torch.device | str, *, tile: int = 0, border: bool = True
) -> PackedSpikes:
    """Allocate spikes, all zero (the border must be; few kernels write it).

    Args:
        t: Time steps.
        n: Images.
        c: Channels.
        h: Rows.
        w: Columns.
        device: Where.
        tile: Pixels of an activity word, at most 32 time steps then; 0 for no activity. The words start as
            "may fire everywhere".
        border: Whether to write zeros; without, the memory is left for a kernel that writes all of it.

    Raises:
        InputError: Activity of more than 32 time steps.
    """
    allocate = torch.zeros if border else torch.empty
    data = allocate((t, places_of(n, h, w), blocks_of(c), 4), dtype=torch.int16, device=device)
    activity = None
    if tile:
        if t > ACTIVITY_STEPS:
            raise InputError(f"activity words have {ACTIVITY_STEPS} bits, got {t} time steps")
        words = (blocks_of(c), -(-n * h * w // tile))
        activity = allocate(words, dtype=torch.int32, device=device)
        if border:
            activity.fill_(-1)
    return PackedSpikes(data=data, shape=(t, n, c, h, w), activity=activity, tile=tile)


def channel_table(places: Tensor | None, channels: int, device: torch.device | str) -> Tensor | None:
    """Where kernels find the membrane of each of their channels, as they take it.

    Args:
        places: [channels], a permutation: which channel of the membrane's memory is the group's at each
            place. None where they lie alike.
        channels: How many.
        device: Where the kernels run.

    Returns:
        int32 [channels], or None.

    Raises:
        InputError: `places` is not a permutation; a kernel would write elsewhere.
    """
    if places is None:
        return None
    if places.shape != (channels,) or not torch.equal(places.cpu().sort().values, torch.arange(channels)):
        raise InputError(
            f"the membrane's channels must be a permutation of {channels}, got {places.dtype} "
            f"{tuple(places.shape)}"
        )
    return places.to(device, torch.int32).contiguous()


def pack(spikes: Tensor) -> PackedSpikes:
    """Pack spikes [T, N, C, H, W] of zeros and ones of any dtype (plain torch: the reference of the kernels).

    Raises:
        InputError: `spikes` is not five-dimensional.
    """
    if spikes.dim() != 5:
        raise InputError(f"spikes must be [T, N, C, H, W], got a tensor of shape {tuple(spikes.shape)}")
    t, n, c, h, w = spikes.shape
    out = empty_packed(t, n, c, h, w, spikes.device)
    g = blocks_of(c)
    ones = torch.zeros((t, n, h, w, g * BLOCK), dtype=torch.int32, device=spikes.device)
    ones[..., :c] = (spikes != 0).permute(0, 1, 3, 4, 2).to(torch.int32)
    # channel 64g + 8j + 2q + p -> [g, q, bit 2j + p]
    bits = ones.view(t, n, h, w, g, 8, 4, 2).permute(0, 1, 2, 3, 4, 6, 5, 7).reshape(t, n, h, w, g, 4, 16)
    weight = 1 << torch.arange(16, dtype=torch.int32, device=spikes.device)
    half = (bits * weight).sum(-1, dtype=torch.int32)
    out.pixels.copy_(torch.where(half >= 1 << 15, half - (1 << 16), half).to(torch.int16))
    return out


def unpack(spikes: PackedSpikes, dtype: torch.dtype = torch.float32) -> Tensor:
    """Dense spikes [T, N, C, H, W] of `dtype` (plain torch: the reference of the kernels)."""
    t, n, c, h, w = spikes.shape
    half = spikes.pixels.to(torch.int32)
    shifts = torch.arange(16, dtype=torch.int32, device=half.device)
    bits = (half.unsqueeze(-1) >> shifts) & 1
    ones = bits.view(t, n, h, w, spikes.blocks, 4, 8, 2).permute(0, 1, 2, 3, 4, 6, 5, 7)
    return (
        ones.reshape(t, n, h, w, spikes.blocks * BLOCK)[..., :c].permute(0, 1, 4, 2, 3).to(dtype).contiguous()
    )


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
