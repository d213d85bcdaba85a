"""Launchers of the two stages: `prescan` and `sparse_conv2d`."""

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
    ConvGeometry,
    ConvTiling,
    choose_tiling,
    compute_reach,
    make_geometry,
)

if TYPE_CHECKING:
    from types import ModuleType

_WORDS_TILE = 16384
"""Values that one program of `compute_pixel_words` holds at once."""


@dataclass(frozen=True, kw_only=True)
class ActiveChunks:
    """Result of stage 1: where the input is not zero, and the work list of each output tile.

    Attributes:
        geometry: The convolution.
        tiling: Tile and chunk sizes.
        words: int32 [N, grid_h, grid_w, chunks], occupancy of each block; see `geometry.py`.
        counts: int32 [tiles], active chunks of each output tile, in the order (image, tile row, tile column).
        chunks: int32 [tiles, chunks]; the first `counts` entries of a row are the active chunks, ascending.
            The other entries are not initialized.
    """

    geometry: ConvGeometry
    tiling: ConvTiling
    words: torch.Tensor
    counts: torch.Tensor
    chunks: torch.Tensor

    def compute_zero_block_ratio(self) -> float:
        """Compute the fraction of blocks (of one chunk each) without a non-zero. Waits for the device."""
        return (self.words == 0).double().mean().item()

    def compute_active_ratio(self) -> float:
        """Compute the fraction of (tile, chunk) pairs that stage 2 works on. Waits for the device."""
        return self.counts.sum().item() / max(self.chunks.numel(), 1)


def prescan(
    x: torch.Tensor,
    block_size: int = 16,
    *,
    kernel_size: int = 3,
    stride: int = 1,
    padding: int = 1,
    out_channels: int = 64,
    tiling: ConvTiling | None = None,
) -> ActiveChunks:
    """Stage 1: mark the non-zero blocks and list the active chunks of each output tile.

    Two kernel launches, no host synchronization.

    Args:
        x: [N, C, H, W], fp16, bf16, fp32 or fp64, any strides; any value but 0 (also NaN) is active.
        block_size: Edge of a block in pixels: 4, 8 or 16.
        kernel_size: 1 or 3.
        stride: 1 or 2.
        padding: Zeros on each side: 0 or 1.
        out_channels: Output channels of the convolution; used only to choose tile sizes.
        tiling: Tile sizes; chosen by rule if None.

    Raises:
        InputError: A shape, dtype or argument is not supported.
        DeviceError: `x` is not on a GPU (Triton's interpreter accepts CPU tensors).
    """
    geometry = make_geometry(
        tuple(x.shape), kernel_size=kernel_size, stride=stride, padding=padding, block_size=block_size
    )
    kernels = _load_kernels(x)
    pixels = _is_channels_last(x)
    tiling = tiling or choose_tiling(geometry, x.dtype, pixels, out_channels)
    n, c, h, w = x.shape
    b, group = block_size, tiling.group
    grid_h, grid_w, chunks = geometry.grid_h, geometry.grid_w, geometry.count_chunks(group)
    tiles_h, tiles_w = -(-geometry.out_h // tiling.tile_h), -(-geometry.out_w // tiling.tile_w)
    tiles = n * tiles_h * tiles_w
    words = torch.empty((n, grid_h, grid_w, chunks), dtype=torch.int32, device=x.device)
    counts = torch.empty(tiles, dtype=torch.int32, device=x.device)
    listed = torch.empty((tiles, chunks), dtype=torch.int32, device=x.device)
    active = ActiveChunks(geometry=geometry, tiling=tiling, words=words, counts=counts, chunks=listed)
    if tiles == 0:
        return active
    strides = list(x.stride())
    with _use_device(x.device):
        if pixels:
            a = _find_common_power((*strides[:1], *strides[2:], c), x)
            cb = min(max(_round_up_to_power_of_two(c), group), max(_WORDS_TILE // (b * b), group))
            parts = -(-c // cb)
            kernels.compute_pixel_words[(n * grid_h * grid_w * parts,)](
                x, words, c // a, h, w, strides[0] // a, strides[1], strides[2] // a, strides[3] // a,
                grid_h, grid_w, chunks, parts,
                A=a, B=b, CB=cb, GROUP=group, num_warps=8 if b * b * cb > 8192 else 4,
            )  # fmt: skip
        else:
            a = _find_common_power((*strides[:3], w), x)
            columns = min(max(_round_up_to_power_of_two(w), b), 128)
            kernels.compute_plane_words[(n * grid_h * chunks,)](
                x, words, c, h, w // a, strides[0] // a, strides[1] // a, strides[2] // a, strides[3],
                grid_h, chunks,
                A=a, B=b, COLS=columns, GROUP=group, FULL=c % group == 0,
                num_warps=min(max(b * columns // 256, 1), 4),
            )  # fmt: skip
        reach_h, reach_w = compute_reach(geometry, tiling)
        gp = _round_up_to_power_of_two(chunks)
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
    tiling: ConvTiling | None = None,
) -> torch.Tensor:
    """`F.conv2d` that skips blocks of zeros: three kernel launches, no host synchronization.

    A NaN or Inf weight affects an output only where it meets a non-zero input: 0 x NaN is skipped. The
    weight is laid out again if it has changed since the last call (a small copy, kept as long as the
    weight). A captured CUDA graph reads that copy: it sees a changed weight after the next call outside a
    capture.

    Args:
        x: [N, C_in, H, W], fp16, bf16, fp32 or fp64, any strides; the output has the same memory format.
        weight: [C_out, C_in, k, k] in x's dtype, k = 1 or 3.
        bias: [C_out] or None.
        stride: 1 or 2.
        padding: 0, or 1 for a 3x3 kernel.
        block_size: Edge of a block in pixels: 4, 8 or 16.
        allow_tf32: Round fp32 operands to TF32 for the tensor cores. Exact for spikes, not for weights.
        active: Result of `prescan` for this input and convolution; computed if None.
        tiling: Tile sizes; chosen by rule if None.

    Returns:
        [N, C_out, H_out, W_out] in x's dtype, deterministic.

    Raises:
        InputError: A shape, dtype or argument is not supported, or `active` is of another convolution.
        DeviceError: `x` is not on a GPU (Triton's interpreter accepts CPU tensors).
    """
    _validate_inputs(x, weight, bias)
    geometry = make_geometry(
        tuple(x.shape), kernel_size=weight.shape[2], stride=stride, padding=padding, block_size=block_size
    )
    kernels = _load_kernels(x)
    pixels = _is_channels_last(x)
    c_out = weight.shape[0]
    if active is None:
        tiling = tiling or choose_tiling(geometry, x.dtype, pixels, c_out)
        active = prescan(
            x, block_size, kernel_size=weight.shape[2], stride=stride, padding=padding, tiling=tiling
        )
    if active.geometry != geometry or active.words.shape[0] != x.shape[0]:
        raise InputError(f"`active` is for {active.geometry}, expected {geometry}")
    t = active.tiling
    tiles_h, tiles_w = -(-geometry.out_h // t.tile_h), -(-geometry.out_w // t.tile_w)
    y = torch.empty(
        (x.shape[0], c_out, geometry.out_h, geometry.out_w), dtype=x.dtype, device=x.device,
        memory_format=torch.channels_last if pixels else torch.contiguous_format,
    )  # fmt: skip
    if y.numel() == 0:
        return y
    layout = _get_weight_layout(weight, t)
    xs = list(x.stride())
    ys = [c_out * geometry.out_h * geometry.out_w, 1, geometry.out_w * c_out, c_out] if pixels else (
        [c_out * geometry.out_h * geometry.out_w, geometry.out_h * geometry.out_w, geometry.out_w, 1]
    )  # fmt: skip
    inner = 1 if pixels else 3
    xa = _find_common_power([s for d, s in enumerate(xs) if d != inner], x)
    ya = _find_common_power(
        [c_out if pixels else geometry.out_w, *(s for d, s in enumerate(ys) if d != inner)], y
    )
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    with _use_device(x.device):
        kernels.convolve[(active.counts.numel() * (layout.shape[2] // t.tile_c),)](
            x, layout, y if bias is None else bias, y, active.counts, active.chunks,
            tiles_h, tiles_w, layout.shape[1] // t.group, geometry.channels, geometry.height, geometry.width,
            c_out // ya if pixels else c_out, layout.shape[2],
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


def _validate_inputs(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    if (
        weight.dim() != 4
        or weight.shape[2] != weight.shape[3]
        or x.dim() != 4
        or weight.shape[1] != x.shape[1]
    ):
        raise InputError(
            f"an input of shape {tuple(x.shape)} and a weight of shape {tuple(weight.shape)} do not match: "
            "expected [N, C_in, H, W] and [C_out, C_in, k, k]"
        )
    for name, other in (("weight", weight), ("bias", bias)):
        if other is not None and (other.dtype != x.dtype or other.device != x.device):
            raise InputError(
                f"`{name}` ({other.dtype}, {other.device}) must match the input ({x.dtype}, {x.device})"
            )


_layouts: Any = WeakTensorKeyDictionary()
"""Weight -> {(group, tile_c): ((data pointer, version), layout)}."""


def _get_weight_layout(weight: torch.Tensor, tiling: ConvTiling) -> torch.Tensor:
    """Lay out a weight as [k*k, C_in, C_out], channels zero-padded to whole chunks and tiles."""
    c_out, c_in, k, _ = weight.shape
    shape = k * k, -(-c_in // tiling.group) * tiling.group, -(-c_out // tiling.tile_c) * tiling.tile_c
    # An inference tensor has no version counter, so a cached layout could be stale.
    if weight.is_inference():
        return _fill_layout(weight, weight.new_zeros(shape))
    stamp = weight.data_ptr(), weight._version
    cached_layouts = _layouts.setdefault(weight, {})
    cached = cached_layouts.get((tiling.group, tiling.tile_c))
    if cached is not None and cached[0] == stamp:
        return cached[1]
    if weight.is_cuda and torch.cuda.is_current_stream_capturing():
        # It is empty until the graph is replayed, so it must not be cached.
        return _fill_layout(weight, weight.new_zeros(shape))
    # A changed weight is written to the same memory, since a graph may have captured it.
    reuse = cached is not None and cached[1].dtype == weight.dtype and cached[1].device == weight.device
    layout = _fill_layout(weight, cached[1] if cached is not None and reuse else weight.new_zeros(shape))
    cached_layouts[tiling.group, tiling.tile_c] = stamp, layout
    return layout


def _fill_layout(weight: torch.Tensor, layout: torch.Tensor) -> torch.Tensor:
    c_out, c_in, k, _ = weight.shape
    with torch.no_grad():
        layout[:, :c_in, :c_out] = weight.detach().permute(2, 3, 1, 0).reshape(k * k, c_in, c_out)
    return layout


def _load_kernels(x: torch.Tensor) -> ModuleType:
    """Import the Triton kernels and check that they can run on `x`."""
    extras.require("triton", "spiking")
    from triton.runtime import JITFunction

    from sparseflow.spiking.backends.blocks import triton as kernels

    if x.dtype not in DTYPES:
        raise InputError(f"the input's dtype (={x.dtype}) must be one of {', '.join(map(str, DTYPES))}")
    if not x.is_cuda and isinstance(kernels.convolve, JITFunction):
        raise DeviceError(f"the Triton kernels need a CUDA device, and the input is on {x.device}")
    return kernels


def _is_channels_last(x: torch.Tensor) -> bool:
    return x.stride(1) == 1 and x.shape[1] > 1 and not x.is_contiguous()


def _find_common_power(numbers: Any, x: torch.Tensor) -> int:
    """Find the largest power of two, at most 16 bytes of `x`, that divides all `numbers`."""
    power = 16 // x.element_size()
    while any(number % power for number in numbers):
        power //= 2
    return power


def _round_up_to_power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


def _use_device(device: torch.device) -> Any:
    """Make the tensor's device current, on which Triton launches."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
