"""Convolution that skips blocks of zeros: launchers of its two stages, `prescan` and `sparse_conv2d`.

`geometry.py` defines blocks, chunks, words and tiles; `triton.py` contains the kernels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
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
    """Result of stage 1: the occupancy of the input's blocks, and the active chunks of each output tile.

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
        """Compute the fraction of all-zero blocks (of one chunk each). Waits for the device."""
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
    """Run stage 1: mark the non-zero blocks and list the active chunks of each output tile.

    Stage 1 launches two kernels and does not synchronize with the host.

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
    tiling = tiling or choose_tiling(geometry, x.dtype, _is_channels_last(x), out_channels)
    tiles_h, tiles_w = _count_tiles(geometry, tiling)
    num_tiles, num_chunks = len(x) * tiles_h * tiles_w, geometry.count_chunks(tiling.group)
    words_shape = (len(x), geometry.grid_h, geometry.grid_w, num_chunks)
    active = ActiveChunks(
        geometry=geometry,
        tiling=tiling,
        words=torch.empty(words_shape, dtype=torch.int32, device=x.device),
        counts=torch.empty(num_tiles, dtype=torch.int32, device=x.device),
        chunks=torch.empty((num_tiles, num_chunks), dtype=torch.int32, device=x.device),
    )
    if num_tiles:
        with _use_device(x.device):
            _launch_words(kernels, x, active)
            _launch_list_chunks(kernels, active)
    return active


def _launch_words(kernels: ModuleType, x: torch.Tensor, active: ActiveChunks) -> None:
    """Launch the kernel that writes the occupancy words, by the memory format of the input."""
    n, c, h, w = x.shape
    _, grid_h, grid_w, num_chunks = active.words.shape
    block, group = active.geometry.block, active.tiling.group
    stride_n, stride_c, stride_h, stride_w = x.stride()
    if _is_channels_last(x):
        power = _find_common_power((stride_n, stride_h, stride_w, c), x)
        max_channels = max(_WORDS_TILE // block**2, group)
        channels = min(max(_round_up_to_power_of_two(c), group), max_channels)  # of one program
        parts = -(-c // channels)
        kernels.compute_pixel_words[(n * grid_h * grid_w * parts,)](
            x, active.words, c // power, h, w,
            stride_n // power, stride_c, stride_h // power, stride_w // power,
            grid_h, grid_w, num_chunks, parts,
            A=power, B=block, CB=channels, GROUP=group, num_warps=8 if block**2 * channels > 8192 else 4,
        )  # fmt: skip
    else:
        power = _find_common_power((stride_n, stride_c, stride_h, w), x)
        columns = min(max(_round_up_to_power_of_two(w), block), 128)  # of one iteration
        kernels.compute_plane_words[(n * grid_h * num_chunks,)](
            x, active.words, c, h, w // power,
            stride_n // power, stride_c // power, stride_h // power, stride_w,
            grid_h, num_chunks,
            A=power, B=block, COLS=columns, GROUP=group, FULL=c % group == 0,
            num_warps=min(max(block * columns // 256, 1), 4),
        )  # fmt: skip


def _launch_list_chunks(kernels: ModuleType, active: ActiveChunks) -> None:
    """Launch the kernel that converts the occupancy words to lists of active chunks."""
    geometry, tiling = active.geometry, active.tiling
    num_tiles, num_chunks = active.chunks.shape
    reach_h, reach_w = compute_reach(geometry, tiling)
    padded_chunks = _round_up_to_power_of_two(num_chunks)
    program_tiles = max(256 // padded_chunks, 1)
    kernels.list_chunks[(-(-num_tiles // program_tiles),)](
        active.words, active.counts, active.chunks, num_tiles, *_count_tiles(geometry, tiling),
        geometry.height, geometry.width, geometry.grid_h, geometry.grid_w, num_chunks,
        K=geometry.kernel, S=geometry.stride, P=geometry.padding, B=geometry.block,
        TH=tiling.tile_h, TW=tiling.tile_w, REACH_H=reach_h, REACH_W=reach_w,
        TB=program_tiles, GP=padded_chunks, num_warps=4,
    )  # fmt: skip


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
    """Compute `F.conv2d`, but skip blocks of zeros.

    The function launches three kernels and does not synchronize with the host. A NaN or Inf weight affects an
    output only if it is multiplied by a non-zero input, because zeros are skipped.

    The kernel reads a copy of the weight in another layout. The copy is kept as long as the weight, and the
    next call after a change of the weight updates it. A captured CUDA graph reads the same copy, so it uses a
    changed weight after the next call outside a capture.

    Args:
        x: [N, C_in, H, W], fp16, bf16, fp32 or fp64, any strides; the output has the same memory format.
        weight: [C_out, C_in, k, k] in x's dtype, k = 1 or 3.
        bias: [C_out] or None.
        stride: 1 or 2.
        padding: 0, or 1 for a 3x3 kernel.
        block_size: Edge of a block in pixels: 4, 8 or 16.
        allow_tf32: Whether to round fp32 operands to TF32 for the tensor cores. Spikes remain exact, weights
            do not.
        active: Result of `prescan` for this input and convolution; by default computed.
        tiling: Tile sizes; by default chosen by rule.

    Returns:
        [N, C_out, H_out, W_out] in x's dtype, deterministic.

    Raises:
        InputError: A shape, dtype or argument is not supported, or `active` belongs to another convolution.
        DeviceError: `x` is not on a GPU (Triton's interpreter accepts CPU tensors).
    """
    _validate_inputs(x, weight, bias)
    geometry = make_geometry(
        tuple(x.shape), kernel_size=weight.shape[2], stride=stride, padding=padding, block_size=block_size
    )
    kernels = _load_kernels(x)
    channels_last = _is_channels_last(x)
    c_out = weight.shape[0]
    if active is None:
        tiling = tiling or choose_tiling(geometry, x.dtype, channels_last, c_out)
        active = prescan(
            x, block_size, kernel_size=weight.shape[2], stride=stride, padding=padding, tiling=tiling
        )
    if active.geometry != geometry or active.words.shape[0] != x.shape[0]:
        raise InputError(f"`active` is for {active.geometry}, expected {geometry}")
    y = torch.empty(
        (x.shape[0], c_out, geometry.out_h, geometry.out_w), dtype=x.dtype, device=x.device,
        memory_format=torch.channels_last if channels_last else torch.contiguous_format,
    )  # fmt: skip
    if y.numel():
        layout = _get_weight_layout(weight, active.tiling)
        with _use_device(x.device):
            _launch_convolve(kernels, x, layout, bias, y, active, allow_tf32=allow_tf32)
    return y


def _launch_convolve(
    kernels: ModuleType,
    x: torch.Tensor,
    layout: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    active: ActiveChunks,
    *,
    allow_tf32: bool,
) -> None:
    """Launch the kernel of stage 2, which writes `y`; `layout` is that of `_get_weight_layout`."""
    geometry, tiling = active.geometry, active.tiling
    channels_last = _is_channels_last(x)
    _, padded_c_in, padded_c_out = layout.shape
    inner_dim = 1 if channels_last else 3
    x_strides, x_power = _divide_strides(x, x.stride(), inner_dim)
    # The kernel takes the innermost size of the output divided by the same power.
    y_strides, y_power = _divide_strides(y, _get_strides(y, channels_last), inner_dim, y.shape[inner_dim])
    out_sizes = [size // y_power if dim == inner_dim else size for dim, size in enumerate(y.shape)]
    _, out_channels, out_h, out_w = out_sizes
    kernels.convolve[(active.counts.numel() * (padded_c_out // tiling.tile_c),)](
        x, layout, y if bias is None else bias, y, active.counts, active.chunks,
        *_count_tiles(geometry, tiling), padded_c_in // tiling.group,
        geometry.channels, geometry.height, geometry.width, out_channels, padded_c_out, out_h, out_w,
        *x_strides, *y_strides,
        K=geometry.kernel, S=geometry.stride, P=geometry.padding, GROUP=tiling.group,
        TH=tiling.tile_h, TW=tiling.tile_w, TC=tiling.tile_c,
        PIXELS=channels_last, XA=x_power, YA=y_power,
        FULL=geometry.channels % tiling.group == 0, BIAS=bias is not None,
        ACC=kernels.tl.float64 if x.dtype == torch.float64 else kernels.tl.float32,
        PRECISION="tf32" if allow_tf32 and x.dtype == torch.float32 else "ieee",
        STAGES=tiling.stages, num_warps=tiling.warps,
    )  # fmt: skip


def _count_tiles(geometry: ConvGeometry, tiling: ConvTiling) -> tuple[int, int]:
    """Count the rows and columns of tiles of one output image."""
    return -(-geometry.out_h // tiling.tile_h), -(-geometry.out_w // tiling.tile_w)


def _get_strides(y: torch.Tensor, channels_last: bool) -> tuple[int, ...]:
    """Return the strides of a tensor in its memory format; `y.stride()` differs in dimensions of size 1."""
    _, c, h, w = y.shape
    return (c * h * w, 1, w * c, c) if channels_last else (c * h * w, h * w, w, 1)


def _divide_strides(
    x: torch.Tensor, strides: Sequence[int], inner_dim: int, *sizes: int
) -> tuple[list[int], int]:
    """Divide all strides but that of `inner_dim` by their common power of two, which also divides `sizes`.

    Returns:
        Divided strides, and the power.
    """
    outer_strides = [stride for dim, stride in enumerate(strides) if dim != inner_dim]
    power = _find_common_power([*outer_strides, *sizes], x)
    divided = [stride if dim == inner_dim else stride // power for dim, stride in enumerate(strides)]
    return divided, power


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
"""Weight -> {(group, tile_c): ((data pointer, version), layout)}; see `_get_weight_layout`."""


def _get_weight_layout(weight: torch.Tensor, tiling: ConvTiling) -> torch.Tensor:
    """Return a copy of a weight as [k*k, C_in, C_out], with channels zero-padded to whole chunks and tiles.

    The copy is cached, and updated if the weight has changed.
    """
    c_out, c_in, k, _ = weight.shape
    shape = k * k, -(-c_in // tiling.group) * tiling.group, -(-c_out // tiling.tile_c) * tiling.tile_c
    # An inference tensor has no version counter, so a cached layout could be stale.
    if weight.is_inference():
        return _fill_layout(weight, weight.new_zeros(shape))
    version = weight.data_ptr(), weight._version
    cached_layouts = _layouts.setdefault(weight, {})
    cached_version, layout = cached_layouts.get((tiling.group, tiling.tile_c), (None, None))
    if layout is not None and cached_version == version:
        return layout
    if weight.is_cuda and torch.cuda.is_current_stream_capturing():
        # A layout that is filled in a capture is empty until the graph is replayed, so it is not cached.
        return _fill_layout(weight, weight.new_zeros(shape))
    # A changed weight is written to the same memory, because a graph may have captured it.
    if layout is None or layout.dtype != weight.dtype or layout.device != weight.device:
        layout = weight.new_zeros(shape)
    cached_layouts[tiling.group, tiling.tile_c] = version, _fill_layout(weight, layout)
    return layout


def _fill_layout(weight: torch.Tensor, layout: torch.Tensor) -> torch.Tensor:
    """Copy a weight to its layout, and return the layout."""
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
    """Whether channels are innermost in memory."""
    return x.stride(1) == 1 and x.shape[1] > 1 and not x.is_contiguous()


def _find_common_power(numbers: Sequence[int], x: torch.Tensor) -> int:
    """Find the largest power of two, at most 16 bytes of `x`, that divides all `numbers`."""
    power = 16 // x.element_size()
    while any(number % power for number in numbers):
        power //= 2
    return power


def _round_up_to_power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


def _use_device(device: torch.device) -> Any:
    """Return a context in which `device` is the current device, on which Triton launches."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
