"""Fused stem: a convolution of few input channels and the neurons that read it, in one kernel.

A network's first convolution has few products per output, so that the library's convolution and the neurons
mostly write and read its output. This kernel keeps that in registers: it gathers the window of each output
pixel as a row of a matrix product.
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
    record_activity,
    store_activity,
)
from sparseflow.spiking.backends.spec import NeuronSpec

_PIXELS = 32
"""Pixels that one program of the kernel processes."""

_MIN_DOT_SIZE = 16

MAX_PRODUCTS = 256
"""Largest number of products per output: a program keeps all weights of its channels."""


@triton.jit
def multiply_windows(
    x_ptr, weight, base, row, column, inside, offset_y, offset_x, exists,
    IH: tl.constexpr, IW: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Multiply the windows of pixels by the weights: fp32 [P, 64].

    Args:
        x_ptr: One time step of the input.
        weight: [KP, 64].
        base: Offset of each product's input value, [P, KP].
        row, column: Row and column of each window's first input pixel, [P].
        inside: Which pixels exist, [P].
        offset_y, offset_x: Row and column of each product in its window, [KP].
        exists: Which products exist, [KP].
    """
    y = row[:, None] + offset_y[None, :]
    x = column[:, None] + offset_x[None, :]
    mask = inside[:, None] & exists[None, :] & (y >= 0) & (y < IH) & (x >= 0) & (x < IW)
    window = tl.load(x_ptr + base, mask=mask, other=0.0).to(weight.dtype)
    if EXACT:
        return tl.dot(window, weight, input_precision="ieee")
    else:
        return tl.dot(window, weight)


@triton.jit
def stem_kernel(
    x_ptr, weight_ptr, bias_ptr, v_in_ptr, v_out_ptr, v_columns_ptr, out_ptr, act_ptr, dense_ptr,
    x_t, x_n, x_c, x_y, x_x, alpha, beta, delta, threshold, reset_value, pixels, tiles, word_step, dense_step,
    K: tl.constexpr, KP: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SY: tl.constexpr, SX: tl.constexpr,
    PY: tl.constexpr, PX: tl.constexpr, DY: tl.constexpr, DX: tl.constexpr, IH: tl.constexpr,
    IW: tl.constexpr, C: tl.constexpr, G: tl.constexpr, H: tl.constexpr, W: tl.constexpr, P: tl.constexpr,
    T: tl.constexpr, STEADY: tl.constexpr, RESET: tl.constexpr, EXACT: tl.constexpr, READ_V: tl.constexpr,
    V_COLUMNS: tl.constexpr, PACKED: tl.constexpr, TILE: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Run a convolution and its neurons over time. Grid (tiles of P pixels, blocks of 64 channels).

    Args:
        x_ptr: Input, addressed by the strides x_t, x_n, x_c, x_y and x_x.
        weight_ptr: [K, C], a row per input channel and position in the window.
        bias_ptr: fp32 [C].
        v_in_ptr: Initial membrane, fp32 [N, H, W, C]; read with READ_V.
        v_out_ptr: Membrane after the last step.
        v_columns_ptr: int32 [C], the channel of both membranes for each channel; read with V_COLUMNS.
        out_ptr: Words of the packed output as int32 halves; written with PACKED.
        act_ptr: Activity words of the packed output, [blocks, tiles].
        dense_ptr: Dense output, [T, N, H, W, C]; written with DENSE.
        alpha, beta, delta, threshold, reset_value: Neuron dynamics, see `spec.py`.
        pixels: Pixels of all images of a time step.
        tiles: Activity words of a block.
        word_step: Words from one time step of the output to the next.
        dense_step: Elements from one time step of the dense output to the next.
        K: Products per output.
        KP: K, padded to a power of two that `tl.dot` takes.
        KH, KW, SY, SX, PY, PX, DY, DX: Size, stride, padding and dilation of the windows.
        IH, IW: Rows and columns of the input.
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
    row = (pixel // W) % H * SY - PY
    column = pixel % W * SX - PX

    k = tl.arange(0, KP)
    offset_y = (k // KW) % KH * DY
    offset_x = k % KW * DX
    base = (pixel // (H * W)).to(tl.int64) * x_n + row.to(tl.int64) * x_y + column.to(tl.int64) * x_x
    base = base[:, None] + ((k // (KH * KW)).to(tl.int64) * x_c + offset_y * x_y + offset_x * x_x)[None, :]
    weight = tl.load(
        weight_ptr + k[:, None] * C + c[None, :], mask=(k < K)[:, None] & (c < C)[None, :], other=0.0
    )
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
    for t in range(T):
        if not STEADY or t == 0:
            step = x_ptr + tl.cast(t, tl.int64) * x_t
            product = multiply_windows(
                step, weight, base, row, column, inside, offset_y, offset_x, k < K, IH, IW, EXACT
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
    tl.store(v_out_ptr + v_index, v, mask=real)


def get_stem_unsupported_reason(geometry: ConvGeometry, in_channels: int) -> str | None:
    """Return why the kernel cannot run a convolution (a sentence), or None."""
    if in_channels * geometry.kernel_size[0] * geometry.kernel_size[1] > MAX_PRODUCTS:
        return f"an output is the sum of more than {MAX_PRODUCTS} products"
    if geometry.groups != 1 or isinstance(geometry.padding, str):
        return "its channels are in groups or its padding differs between sides"
    return None


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
    v_columns: Tensor | None = None,
) -> tuple[Tensor | None, Tensor]:
    """Run neurons over time on a convolution, in one kernel.

    Args:
        x: Input, [T, N, C_in, H_in, W_in], or [1, ...] if it is constant over time; any strides.
        weight: [C_in * kernel height * kernel width, C], contiguous; its dtype is that of the products.
        bias: fp32 [C].
        spec: The neuron.
        geometry: Of the convolution.
        steps: T.
        v: Initial membrane, contiguous fp32 [N, H, W, C]; by default the rest value.
        packed: Destination of packed spikes [T, N, C, H, W]; None for none.
        dense: dtype of the dense spikes; None for none.
        v_columns: Channel of both membranes for each channel, int32 [C]; None for the identity.

    Returns:
        The dense spikes [T, N, C, H, W], channels last, or None; and the membrane after the last step, fp32
        [N, H, W, C].

    Raises:
        InputError: A time step has too many elements.
        DeviceError: The tensors are not on a GPU.
    """
    check_launchable(x, weight)
    n, c = x.shape[1], weight.shape[1]
    h, w = geometry.compute_out_sizes(x.shape[3], x.shape[4])
    v_out = torch.empty((n, h, w, c), dtype=torch.float32, device=x.device)
    flat = None if dense is None else torch.empty((steps, n, h, w, c), dtype=dense, device=x.device)
    tile, activity = (0, None) if packed is None else get_activity(packed, _PIXELS)
    check_step_size(v_out[None], x)
    pixels = n * h * w
    padding_y, padding_x = geometry.padding
    assert isinstance(padding_y, int) and isinstance(padding_x, int)
    launch(
        stem_kernel, (ceil_div(pixels, _PIXELS), ceil_div(c, 64)),
        x, weight, bias, v_out if v is None else v, v_out, bias if v_columns is None else v_columns,
        bias if packed is None else packed.data.view(torch.int32), bias if activity is None else activity,
        bias if flat is None else flat, *x.stride(),
        spec.alpha, spec.beta, spec.delta, spec.v_threshold, spec.reset_value,
        pixels, 0 if activity is None else activity.shape[1],
        0 if packed is None else packed.words.stride(0), 0 if flat is None else flat.stride(0),
        K=weight.shape[0], KP=max(_MIN_DOT_SIZE, 1 << (weight.shape[0] - 1).bit_length()),
        KH=geometry.kernel_size[0], KW=geometry.kernel_size[1], SY=geometry.stride[0], SX=geometry.stride[1],
        PY=padding_y, PX=padding_x, DY=geometry.dilation[0], DX=geometry.dilation[1],
        IH=x.shape[3], IW=x.shape[4], C=c, G=ceil_div(c, 64), H=h, W=w, P=_PIXELS, T=steps,
        STEADY=x.shape[0] == 1, RESET=spec.reset_mode, EXACT=weight.dtype == torch.float32,
        READ_V=v is not None, V_COLUMNS=v_columns is not None, PACKED=packed is not None, TILE=tile,
        DENSE=flat is not None, num_warps=4,
    )  # fmt: skip
    return None if flat is None else flat.permute(0, 1, 4, 2, 3), v_out
