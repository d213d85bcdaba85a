"""Fused stem: a convolution of few input channels and the neurons that read it.

A network's first convolution has few products per output, so that the library's convolution and the neurons
mostly write and read its output. The fused kernel keeps that in registers: the window of each output pixel is
a row of a matrix product. Another kernel first copies the input to maps with few more channels and a border
of zeros, in which a row of a window is contiguous.
"""

# Kernels are Triton's subset of Python.
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseflow.spiking.backends.conv_geometry import ConvGeometry
from sparseflow.spiking.backends.packed.format import PackedSpikes
from sparseflow.spiking.backends.packed.neuron import fire, make_rest
from sparseflow.spiking.backends.packed.words import (
    ceil_div,
    check_launchable,
    check_step_size,
    flat_to_padded_index,
    gather_bits,
    get_activity,
    launch,
    next_power_of_2,
    record_activity,
    store_activity,
)
from sparseflow.spiking.backends.spec import NeuronSpec

_PIXELS = 64
"""Pixels that one program of the kernel processes: twice as many if it multiplies in chunks, half in fp32."""

_PADDED_PIXELS = 256
"""Pixels that one program of the padding kernel processes."""

_MIN_DOT_SIZE = 16

_MAX_DOT_SIZE = 64
"""Products per output that one `tl.dot` sums in half precision; more are summed in chunks."""

_CHUNK_SIZE = 32
"""Products per output and chunk, if a row of the window has no more."""

_MIN_CHANNELS = 2
"""Channels of a padded pixel: together they fill a load of 4 bytes."""

MAX_PRODUCTS = 256
"""Largest number of products per output; above it, the library's convolution is faster."""


@triton.jit
def pad_kernel(
    x_ptr, out_ptr, x_t, x_n, x_c, x_y, x_x, pixels, out_step,
    C: tl.constexpr, CP: tl.constexpr, IH: tl.constexpr, IW: tl.constexpr, PY: tl.constexpr,
    PX: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Copy maps to channels-last maps with a border of zeros. Grid (tiles of B pixels, time steps).

    Args:
        x_ptr: Input, addressed by the strides x_t, x_n, x_c, x_y and x_x.
        out_ptr: [T, N, OH, OW, CP].
        pixels: Pixels of all padded images of a time step.
        out_step: Elements from one time step of the output to the next.
        C, CP: Channels of the input and of the output.
        IH, IW, OH, OW: Rows and columns of the input and of the output.
        PY, PX: Rows above and columns before the input.
    """
    pixel = tl.program_id(0) * B + tl.arange(0, B)
    t = tl.program_id(1).to(tl.int64)
    c = tl.arange(0, CP)
    row = (pixel // OW) % OH - PY
    column = pixel % OW - PX
    inside = (pixel < pixels) & (row >= 0) & (row < IH) & (column >= 0) & (column < IW)
    base = (pixel // (OH * OW)).to(tl.int64) * x_n + row.to(tl.int64) * x_y + column.to(tl.int64) * x_x
    source = x_ptr + t * x_t + base[:, None] + (c.to(tl.int64) * x_c)[None, :]
    value = tl.load(source, mask=inside[:, None] & (c < C)[None, :], other=0.0)
    target = out_ptr + t * out_step + (pixel * CP)[:, None] + c[None, :]
    tl.store(target, value.to(out_ptr.dtype.element_ty), mask=(pixel < pixels)[:, None])


@triton.jit
def multiply(x_ptr, window, weight, product, inside, EXACT: tl.constexpr):
    """Add the product of rows [P, K] at offsets `window`, which exist where `inside`, and weights [K, 64]."""
    rows = tl.load(x_ptr + window, mask=inside[:, None], other=0.0)
    if EXACT:
        return tl.dot(rows, weight, product, input_precision="ieee")
    else:
        return tl.dot(rows, weight, product)


@triton.jit
def multiply_windows(
    x_ptr, window, weight_ptr, weight, first, inside, x_chunk: tl.constexpr, weight_chunk: tl.constexpr,
    CHUNKS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Multiply the windows of pixels by the weights: fp32 [P, 64].

    Args:
        x_ptr: One time step of the input.
        window: Offsets of the first chunk of each window, [P, K].
        weight_ptr: The weights.
        weight: Offsets of the first chunk's weights, [K, 64].
        first: The first chunk's weights, [K, 64].
        inside: Which pixels exist, [P].
        x_chunk, weight_chunk: Elements from one chunk to the next.
        CHUNKS, EXACT: See `stem_kernel`.
    """
    product = tl.zeros([window.shape[0], 64], tl.float32)
    if CHUNKS == 1:
        product = multiply(x_ptr, window, first, product, inside, EXACT)
    else:
        for chunk in range(CHUNKS):
            factors = tl.load(weight_ptr + chunk * weight_chunk + weight)
            product = multiply(x_ptr + chunk * x_chunk, window, factors, product, inside, EXACT)
    return product


@triton.jit
def stem_kernel(
    x_ptr, weight_ptr, bias_ptr, v_in_ptr, v_out_ptr, v_columns_ptr, out_ptr, act_ptr, dense_ptr,
    x_step, alpha, beta, delta, threshold, reset_value, pixels, tiles, word_step, dense_step,
    CHUNKS: tl.constexpr, K: tl.constexpr, ROW: tl.constexpr, SY: tl.constexpr, SX: tl.constexpr,
    DY: tl.constexpr, CP: tl.constexpr, IH: tl.constexpr, IW: tl.constexpr, C: tl.constexpr,
    G: tl.constexpr, H: tl.constexpr, W: tl.constexpr, P: tl.constexpr, T: tl.constexpr,
    STEADY: tl.constexpr, RESET: tl.constexpr, EXACT: tl.constexpr, READ_V: tl.constexpr,
    WRITE_V: tl.constexpr, V_COLUMNS: tl.constexpr, PACKED: tl.constexpr, TILE: tl.constexpr,
    DENSE: tl.constexpr,
):  # fmt: skip
    """Run a convolution and its neurons over time. Grid (tiles of P pixels, blocks of 64 channels).

    Args:
        x_ptr: Padded input, [T, N, IH, IW, CP].
        weight_ptr: [CHUNKS, K, G * 64], see `pack_weight`.
        bias_ptr: fp32 [C].
        v_in_ptr: Initial membrane, fp32 [N, H, W, C]; read with READ_V.
        v_out_ptr: Membrane after the last step; written with WRITE_V.
        v_columns_ptr: int32 [C], the channel of both membranes for each channel; read with V_COLUMNS.
        out_ptr: Words of the packed output as int32 halves; written with PACKED.
        act_ptr: Activity words of the packed output, [blocks, tiles].
        dense_ptr: Dense output, [T, N, H, W, C]; written with DENSE.
        x_step: Elements from one time step of the input to the next.
        alpha, beta, delta, threshold, reset_value: Neuron dynamics, see `spec.py`.
        pixels: Pixels of all images of a time step.
        tiles: Activity words of a block.
        word_step: Words from one time step of the output to the next.
        dense_step: Elements from one time step of the dense output to the next.
        CHUNKS, K: Products per output: a number of chunks of K.
        ROW: Elements of the input that are read of each row of a window.
        SY, SX: Stride of the windows.
        DY: Rows of the input from one row of a window to the next.
        CP, IH, IW: Channels, rows and columns of the padded input.
        C, G, H, W: Channels, blocks of 64 channels, rows and columns of the output.
        P: Pixels of a program.
        T: Time steps.
        STEADY: Whether the input is constant over time.
        EXACT: Whether products are fp32.
        TILE: Pixels per activity word; 0 for no activity.
    """
    pixel = tl.program_id(0) * P + tl.arange(0, P)
    block = tl.program_id(1)
    inside = pixel < pixels
    lane = tl.arange(0, 64)
    c = block * 64 + lane
    real = inside[:, None] & (c < C)[None, :]
    flat = (pixel * C)[:, None] + c[None, :]
    word = flat_to_padded_index(pixel, H, W) * G + block

    k = tl.arange(0, K)
    window = ((pixel // (H * W)) * IH + (pixel // W) % H * SY) * (IW * CP) + pixel % W * (SX * CP)
    window = window[:, None] + (k // ROW * (DY * IW * CP) + k % ROW)[None, :]
    weight = k[:, None] * (G * 64) + c[None, :]
    first = tl.load(weight_ptr + weight)
    X_CHUNK: tl.constexpr = K // ROW * DY * IW * CP
    bias = tl.load(bias_ptr + c, mask=c < C, other=0.0) * beta + delta

    v_index = flat
    if V_COLUMNS:
        v_channel = tl.load(v_columns_ptr + c, mask=c < C, other=0)
        v_index = (pixel * C)[:, None] + v_channel[None, :]
    if READ_V:
        v = tl.load(v_in_ptr + v_index, mask=real, other=0.0)
    else:
        v = make_rest([P, 64], reset_value, RESET)
    activity = tl.zeros([P, 2], tl.int32)
    current = tl.zeros([P, 64], tl.float32)
    if STEADY:
        product = multiply_windows(
            x_ptr, window, weight_ptr, weight, first, inside, X_CHUNK, K * G * 64, CHUNKS, EXACT
        )
        current = product * beta + bias[None, :]
    for t in range(T):
        if not STEADY:
            step = x_ptr + tl.cast(t, tl.int64) * x_step
            product = multiply_windows(
                step, window, weight_ptr, weight, first, inside, X_CHUNK, K * G * 64, CHUNKS, EXACT
            )
            current = product * beta + bias[None, :]
        v, fired = fire(v, current, alpha, threshold, reset_value, RESET)
        if PACKED:
            half = gather_bits(fired & real, P, 64)
            pointer = out_ptr + (tl.cast(t, tl.int64) * word_step + word) * 2
            tl.store(pointer[:, None] + tl.arange(0, 2)[None, :], half, mask=inside[:, None])
            if TILE > 0:
                activity = record_activity(activity, half, t)
        if DENSE:
            value = fired.to(dense_ptr.dtype.element_ty)
            tl.store(dense_ptr + tl.cast(t, tl.int64) * dense_step + flat, value, mask=real)
    if TILE > 0:
        store_activity(act_ptr, activity, tl.program_id(0) * (P // TILE), tiles, block, G, P, 1, 2, TILE)
    if WRITE_V:
        tl.store(v_out_ptr + v_index, v, mask=real)


def get_stem_unsupported_reason(geometry: ConvGeometry, in_channels: int) -> str | None:
    """Return why the kernel cannot run a convolution (a sentence), or None."""
    if in_channels * geometry.kernel_size[0] * geometry.kernel_size[1] > MAX_PRODUCTS:
        return f"an output is the sum of more than {MAX_PRODUCTS} products"
    if geometry.groups != 1 or isinstance(geometry.padding, str):
        return "its channels are in groups or its padding differs between sides"
    return None


def pack_weight(weight: Tensor, geometry: ConvGeometry) -> Tensor:
    """Lay out the weights of a convolution, [C, C_in, kh, kw], for the kernel: [chunks, K, blocks * 64].

    A chunk holds whole rows of the window. A row holds its columns (zeros between them if they are dilated)
    and their channels, both padded with zeros to powers of two.
    """
    channels, row = _pad_window(weight.shape[1], weight.shape[3], geometry)
    k = max(_MIN_DOT_SIZE, row * next_power_of_2(weight.shape[2]))
    if k > (_CHUNK_SIZE if weight.dtype == torch.float32 else _MAX_DOT_SIZE):
        k = max(_CHUNK_SIZE, row)
    chunks = ceil_div(weight.shape[2], k // row)
    packed = weight.new_zeros(chunks * k // row, row // channels, channels, ceil_div(len(weight), 64) * 64)
    window = packed[: weight.shape[2], :: geometry.dilation[1]]
    window[:, : weight.shape[3], : weight.shape[1], : len(weight)] = weight.permute(2, 3, 1, 0)
    return packed.view(chunks, k, -1)


def _pad_window(channels: int, columns: int, geometry: ConvGeometry) -> tuple[int, int]:
    """Return the channels of a padded pixel, and the elements of a row of a window."""
    channels = max(_MIN_CHANNELS, next_power_of_2(channels))
    return channels, channels * next_power_of_2((columns - 1) * geometry.dilation[1] + 1)


def run_stem(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    spec: NeuronSpec,
    geometry: ConvGeometry,
    *,
    steps: int,
    v: Tensor | None = None,
    packed: PackedSpikes | None = None,
    dense: torch.dtype | None = None,
    write_v: bool = True,
    v_columns: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Run neurons over time on a convolution.

    One kernel copies the input to channels-last maps with a border of zeros, in the precision of the weights;
    another computes products and neurons.

    Args:
        x: Input, [T, N, C_in, H_in, W_in], or [1, ...] if it is constant over time; any strides.
        weight: See `pack_weight`; its dtype is that of the products.
        bias: fp32 [C].
        spec: The neuron.
        geometry: Of the convolution.
        steps: T.
        v: Initial membrane, contiguous fp32 [N, H, W, C]; by default the rest value.
        packed: Destination of packed spikes [T, N, C, H, W]; None for none.
        dense: dtype of the dense spikes; None for none.
        write_v: Whether to write the membrane after the last step.
        v_columns: Channel of both membranes for each channel, int32 [C]; None for the identity.

    Returns:
        The dense spikes [T, N, C, H, W], channels last, or None; and the membrane after the last step, fp32
        [N, H, W, C], or None.

    Raises:
        InputError: A time step has too many elements.
        DeviceError: The tensors are not on a GPU.
    """
    check_launchable(x, weight)
    n, c = x.shape[1], bias.shape[0]
    h, w = geometry.compute_out_sizes(x.shape[3], x.shape[4])
    check_step_size(torch.empty((1, n, h, w, c), device="meta"))
    channels, row = _pad_window(x.shape[2], geometry.kernel_size[1], geometry)
    rows = weight.shape[0] * weight.shape[1] // row
    maps = _pad_input(
        x,
        geometry,
        channels,
        height=(h - 1) * geometry.stride[0] + (rows - 1) * geometry.dilation[0] + 1,
        width=(w - 1) * geometry.stride[1] + row // channels,
        dtype=weight.dtype,
    )
    v_out = torch.empty((n, h, w, c), dtype=torch.float32, device=x.device) if write_v else None
    flat = None if dense is None else torch.empty((steps, n, h, w, c), dtype=dense, device=x.device)
    is_exact, has_chunks = weight.dtype == torch.float32, weight.shape[0] > 1
    pixels, pixels_per_program = n * h * w, _PIXELS // 2 if is_exact else _PIXELS << has_chunks
    tile, activity = (0, None) if packed is None else get_activity(packed, pixels_per_program)
    launch(
        stem_kernel, (ceil_div(pixels, pixels_per_program), ceil_div(c, 64)),
        maps, weight, bias, bias if v is None else v, bias if v_out is None else v_out,
        bias if v_columns is None else v_columns,
        bias if packed is None else packed.data.view(torch.int32), bias if activity is None else activity,
        bias if flat is None else flat, maps.stride(0),
        spec.alpha, spec.beta, spec.delta, spec.v_threshold, spec.reset_value,
        pixels, 0 if activity is None else activity.shape[1],
        0 if packed is None else packed.words.stride(0), 0 if flat is None else flat.stride(0),
        CHUNKS=weight.shape[0], K=weight.shape[1], ROW=row, SY=geometry.stride[0], SX=geometry.stride[1],
        DY=geometry.dilation[0], CP=maps.shape[4], IH=maps.shape[2], IW=maps.shape[3], C=c,
        G=ceil_div(c, 64), H=h, W=w, P=pixels_per_program, T=steps, STEADY=x.shape[0] == 1,
        RESET=spec.reset_mode, EXACT=is_exact, READ_V=v is not None,
        WRITE_V=v_out is not None, V_COLUMNS=v_columns is not None, PACKED=packed is not None, TILE=tile,
        DENSE=flat is not None,
        num_warps=8 if is_exact else 4, num_stages=4,
    )  # fmt: skip
    return None if flat is None else flat.permute(0, 1, 4, 2, 3), v_out


def _pad_input(
    x: Tensor, geometry: ConvGeometry, channels: int, *, height: int, width: int, dtype: torch.dtype
) -> Tensor:
    """Copy [T, N, C, H, W] to [T, N, height, width or more, channels], with zeros around it."""
    width = ceil_div(width, 4) * 4  # rows start at multiples of 16 bytes or more
    padding_y, padding_x = geometry.padding
    assert isinstance(padding_y, int) and isinstance(padding_x, int)
    maps = torch.empty((x.shape[0], x.shape[1], height, width, channels), dtype=dtype, device=x.device)
    check_step_size(maps)
    pixels = x.shape[1] * height * width
    launch(
        pad_kernel, (ceil_div(pixels, _PADDED_PIXELS), x.shape[0]),
        x, maps, *x.stride(), pixels, maps.stride(0),
        C=x.shape[2], CP=channels, IH=x.shape[3], IW=x.shape[4], PY=padding_y, PX=padding_x,
        OH=height, OW=width, B=_PADDED_PIXELS, num_warps=4,
    )  # fmt: skip
    return maps
