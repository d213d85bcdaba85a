"""Calling the two stages: `prescan` finds what is active, `sparse_conv2d` convolves it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from sparseflow.core import extras
from sparseflow.errors import DeviceError, InputError
from sparseflow.spiking.backends.blocks.geometry import (
    DTYPES,
    Geometry,
    Tiling,
    choose_tiling,
    geometry_of,
    reach,
)

if TYPE_CHECKING:
    from types import ModuleType

_WORDS_TILE = 16384
"""Values that one program of `words_of_pixels` holds at once."""


@dataclass(frozen=True, kw_only=True)
class ActiveChunks:
    """What stage 1 found: where the input is not zero, and what each output tile has to do.

    Attributes:
        geometry: The convolution it was made for.
        tiling: The tile and chunk sizes it was made for.
        words: int32 [N, grid_h, grid_w, chunks], the occupancy of every block; see `geometry.py`.
        counts: int32 [tiles], active chunks of every output tile, in the order (image, tile row, tile
            column).
        chunks: int32 [tiles, chunks]; the first `counts` entries of a row are the active chunks, ascending.
            The others are not initialised.
    """

    geometry: Geometry
    tiling: Tiling
    words: torch.Tensor
    counts: torch.Tensor
    chunks: torch.Tensor

    def zero_block_ratio(self) -> float:
        """Fraction of blocks (of one chunk each) without a non-zero. Waits for the device."""
        return (self.words == 0).double().mean().item()

    def active_ratio(self) -> float:
        """Fraction of (tile, chunk) pairs that stage 2 works on. Waits for the device."""
        return self.counts.sum().item() / max(self.chunks.numel(), 1)


def prescan(
    x: torch.Tensor,
    block_size: int = 16,
    *,
    kernel_size: int = 3,
    stride: int = 1,
    padding: int = 1,
    out_channels: int = 64,
    tiling: Tiling | None = None,
) -> ActiveChunks:
    """Stage 1: mark the blocks that are not zero and list the active chunks of every output tile.

    Two kernel launches, no host synchronisation.

    Args:
        x: [N, C, H, W], fp16, bf16, fp32 or fp64, any strides; any value but 0 (NaN, too) is active.
        block_size: Edge of a block in pixels: 4, 8 or 16.
        kernel_size: 1 or 3, of the convolution to come.
        stride: 1 or 2.
        padding: Zeros on every side: 0 or 1.
        out_channels: Of the convolution to come; only the choice of tile sizes looks at it.
        tiling: Tile sizes; chosen by rule when None.

    Raises:
        InputError: Shape, dtype or an argument is not covered.
        DeviceError: `x` is not on a GPU (Triton's interpreter takes CPU tensors).
    """
    geometry = geometry_of(
        tuple(x.shape), kernel_size=kernel_size, stride=stride, padding=padding, block_size=block_size
    )
    kernels = _kernels(x)
    pixels = _pixels_innermost(x)
    tiling = tiling or choose_tiling(geometry, x.dtype, pixels, out_channels)
    n, c, h, w = x.shape
    b, group = block_size, tiling.group
    grid_h, grid_w, chunks = geometry.grid_h, geometry.grid_w, geometry.chunks(group)
    tiles_h, tiles_w = -(-geometry.out_h // tiling.tile_h), -(-geometry.out_w // tiling.tile_w)
    tiles = n * tiles_h * tiles_w
    words = torch.empty((n, grid_h, grid_w, chunks), dtype=torch.int32, device=x.device)
    counts = torch.empty(tiles, dtype=torch.int32, device=x.device)
    listed = torch.empty((tiles, chunks), dtype=torch.int32, device=x.device)
    active = ActiveChunks(geometry=geometry, tiling=tiling, words=words, counts=counts, chunks=listed)
    if tiles == 0:
        return active
    strides = list(x.stride())
    with _on(x.device):
        if pixels:
            a = _common_power((*strides[:1], *strides[2:], c), x)
            cb = min(max(_power_of_two(c), group), max(_WORDS_TILE // (b * b), group))
            parts = -(-c // cb)
            kernels.words_of_pixels[(n * grid_h * grid_w * parts,)](
                x, words, c // a, h, w, strides[0] // a, strides[1], strides[2] // a, strides[3] // a,
                grid_h, grid_w, chunks, parts,
                A=a, B=b, CB=cb, GROUP=group, num_warps=8 if b * b * cb > 8192 else 4,
            )  # fmt: skip
        else:
            a = _common_power((*strides[:3], w), x)
            columns = min(max(_power_of_two(w), b), 128)
            kernels.words_of_planes[(n * grid_h * chunks,)](
                x, words, c, h, w // a, strides[0] // a, strides[1] // a, strides[2] // a, strides[3],
                grid_h, chunks,
                A=a, B=b, COLS=columns, GROUP=group, FULL=c % group == 0,
                num_warps=min(max(b * columns // 256, 1), 4),
            )  # fmt: skip
        reach_h, reach_w = reach(geometry, tiling)
        gp = _power_of_two(chunks)
        tb = max(256 // gp, 1)
        kernels.list_chunks[(-(-tiles // tb),)](
            words, counts, listed, tiles, tiles_h, tiles_w, h, w, grid_h, grid_w, chunks,
            K=kernel_size, S=stride, P=padding, B=b, TH=tiling.tile_h, TW=tiling.tile_w,
            REACH_H=reach_h, REACH_W=reach_w, TB=tb, GP=gp, num_warps=4,
        )  # fmt: skip
    return active


def sparse_conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    stride: int = 1,
    padding: int = 1,
    block_size: int = 16,
    allow_tf32: bool = False,
    active: ActiveChunks | None = None,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """`F.conv2d` that skips blocks of zeros: both stages, three kernel launches, no host synchronisation.

    A weight that is NaN or Inf spoils an output only where a non-zero input meets it: 0 x NaN is skipped.
    The weight is laid out anew when it has changed since the last call (one small copy, kept as long as the
    weight lives). A captured CUDA graph reads that copy: it sees a changed weight after the next call outside
    of a capture.

    Args:
        x: [N, C_in, H, W], fp16, bf16, fp32 or fp64, any strides; channels-last in gives channels-last out.
        weight: [C_out, C_in, k, k] in x's dtype, k = 1 or 3.
        bias: [C_out] or None.
        stride: 1 or 2.
        padding: 0, or 1 for a 3x3 kernel.
        block_size: Edge of a block in pixels: 4, 8 or 16.
        allow_tf32: Round fp32 operands to TF32 for the tensor cores. Spikes survive that, weights lose bits.
        active: What `prescan` found for this very input and convolution; found anew when None.
        tiling: Tile sizes; chosen by rule when None.

    Returns:
        [N, C_out, H_out, W_out] in x's dtype; the same bits at every call.

    Raises:
        InputError: Shapes, dtypes or an argument are not covered, or `active` belongs to another convolution.
        DeviceError: `x` is not on a GPU (Triton's interpreter takes CPU tensors).
    """
    if (
        weight.dim() != 4
        or weight.shape[2] != weight.shape[3]
        or x.dim() != 4
        or weight.shape[1] != x.shape[1]
    ):
        raise InputError(
            f"an input of shape {tuple(x.shape)} and a weight of shape {tuple(weight.shape)} do not make a "
            "convolution: [N, C_in, H, W] and [C_out, C_in, k, k] are expected"
        )
    for name, other in (("weight", weight), ("bias", bias)):
        if other is not None and (other.dtype != x.dtype or other.device != x.device):
            raise InputError(
                f"`{name}` ({other.dtype}, {other.device}) must be as the input is ({x.dtype}, {x.device})"
            )
    geometry = geometry_of(
        tuple(x.shape), kernel_size=weight.shape[2], stride=stride, padding=padding, block_size=block_size
    )
    kernels = _kernels(x)
    pixels = _pixels_innermost(x)
    c_out = weight.shape[0]
    if active is None:
        tiling = tiling or choose_tiling(geometry, x.dtype, pixels, c_out)
        active = prescan(
            x, block_size, kernel_size=weight.shape[2], stride=stride, padding=padding, tiling=tiling
        )
    if active.geometry != geometry or active.words.shape[0] != x.shape[0]:
        raise InputError(f"`active` was found for {active.geometry}, not for {geometry}")
    t = active.tiling
    tiles_h, tiles_w = -(-geometry.out_h // t.tile_h), -(-geometry.out_w // t.tile_w)
    y = torch.empty(
        (x.shape[0], c_out, geometry.out_h, geometry.out_w), dtype=x.dtype, device=x.device,
        memory_format=torch.channels_last if pixels else torch.contiguous_format,
    )  # fmt: skip
    if y.numel() == 0:
        return y
    laid = _laid_out(weight, t)
    xs = list(x.stride())
    ys = [c_out * geometry.out_h * geometry.out_w, 1, geometry.out_w * c_out, c_out] if pixels else (
        [c_out * geometry.out_h * geometry.out_w, geometry.out_h * geometry.out_w, geometry.out_w, 1]
    )  # fmt: skip
    inner = 1 if pixels else 3
    xa = _common_power([s for d, s in enumerate(xs) if d != inner], x)
    ya = _common_power([c_out if pixels else geometry.out_w, *(s for d, s in enumerate(ys) if d != inner)], y)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    with _on(x.device):
        kernels.convolve[(active.counts.numel() * (laid.shape[2] // t.tile_c),)](
            x, laid, y if bias is None else bias, y, active.counts, active.chunks,
            tiles_h, tiles_w, laid.shape[1] // t.group, geometry.channels, geometry.height, geometry.width,
            c_out // ya if pixels else c_out, laid.shape[2],
            geometry.out_h, geometry.out_w if pixels else geometry.out_w // ya,
            *(s if d == inner else s // xa for d, s in enumerate(xs)),
            *(s if d == inner else s // ya for d, s in enumerate(ys)),
            K=geometry.kernel, S=stride, P=padding, GROUP=t.group, TH=t.tile_h, TW=t.tile_w, TC=t.tile_c,
            PIXELS=pixels, XA=xa, YA=ya, FULL=geometry.channels % t.group == 0, BIAS=bias is not None,
            ACC=kernels.tl.float64 if wide == torch.float64 else kernels.tl.float32,
            PRECISION="tf32" if allow_tf32 and x.dtype == torch.float32 else "ieee", STAGES=t.stages,
            num_warps=t.warps,
        )  # fmt: skip
    return y


_layouts: Any = WeakTensorKeyDictionary()
"""Weight -> {(group, tile_c): (data pointer and version of the weight, layout)}."""


def _laid_out(weight: torch.Tensor, tiling: Tiling) -> torch.Tensor:
    """[k*k, C_in, C_out], both channels padded with zeros to whole chunks and tiles, contiguous."""
    c_out, c_in, k, _ = weight.shape
    shape = k * k, -(-c_in // tiling.group) * tiling.group, -(-c_out // tiling.tile_c) * tiling.tile_c
    # An inference tensor does not count its changes, so nothing tells whether a kept layout is still right.
    if weight.is_inference():
        return _fill(weight, weight.new_zeros(shape))
    stamp = weight.data_ptr(), weight._version
    kept = _layouts.setdefault(weight, {})
    known = kept.get((tiling.group, tiling.tile_c))
    if known is not None and known[0] == stamp:
        return known[1]
    if weight.is_cuda and torch.cuda.is_current_stream_capturing():
        # It holds nothing until the graph is replayed: part of the graph, not for other callers.
        return _fill(weight, weight.new_zeros(shape))
    # A changed weight goes into the same memory, since a graph may have been captured with it.
    reuse = known is not None and known[1].dtype == weight.dtype and known[1].device == weight.device
    laid = _fill(weight, known[1] if known is not None and reuse else weight.new_zeros(shape))
    kept[tiling.group, tiling.tile_c] = stamp, laid
    return laid


def _fill(weight: torch.Tensor, laid: torch.Tensor) -> torch.Tensor:
    c_out, c_in, k, _ = weight.shape
    with torch.no_grad():
        laid[:, :c_in, :c_out] = weight.detach().permute(2, 3, 1, 0).reshape(k * k, c_in, c_out)
    return laid


def _kernels(x: torch.Tensor) -> ModuleType:
    """The module of kernels, once `x` is known to be something they can run on."""
    extras.require("triton", "spiking")
    from triton.runtime import JITFunction

    from sparseflow.spiking.backends.blocks import triton as kernels

    if x.dtype not in DTYPES:
        raise InputError(f"the input's dtype (={x.dtype}) must be one of {', '.join(map(str, DTYPES))}")
    if not x.is_cuda and isinstance(kernels.convolve, JITFunction):
        raise DeviceError(f"the Triton kernels need a CUDA device, and the input is on {x.device}")
    return kernels


def _pixels_innermost(x: torch.Tensor) -> bool:
    """Whether channels are innermost in memory, so that one pixel's values lie side by side."""
    return x.stride(1) == 1 and x.shape[1] > 1 and not x.is_contiguous()


def _common_power(numbers: Any, x: torch.Tensor) -> int:
    """The largest power of two, up to 16 bytes of `x`, that divides all `numbers`."""
    power = 16 // x.element_size()
    while any(number % power for number in numbers):
        power //= 2
    return power


def _power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


def _on(device: torch.device) -> Any:
    """Triton launches on the current device: make it the tensor's."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
