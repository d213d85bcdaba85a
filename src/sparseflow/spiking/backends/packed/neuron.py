"""Fused neuron kernel: runs IF or LIF neurons over time on the sum of currents, bias and residuals.

The kernel is for groups whose convolution runs elsewhere (cuDNN). One pass reads the currents, keeps the
membrane in registers over all time steps, and writes packed spikes, dense spikes, or both. The reference is
`reference.run_group_reference` of a group without sources.
"""

# Kernels are Triton's subset of Python: tuples grow by `+`, constexpr branches stay `if` statements.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
# ruff: noqa: RUF005, SIM108
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseflow.errors import InputError
from sparseflow.spiking.backends.packed.format import PackedSpikes, allocate_packed
from sparseflow.spiking.backends.packed.words import (
    ceil_div,
    check_launchable,
    check_step_size,
    choose_time_chunk,
    flat_to_padded_index,
    gather_bits,
    get_activity,
    launch,
    record_activity,
    spread_bits,
    store_activity,
    to_channels_last,
    with_time_strides,
)
from sparseflow.spiking.backends.spec import MaxPooling, NeuronSpec

_PIXELS = 32
"""Pixels that one program of the kernel processes."""


@triton.jit
def make_rest(shape: tl.constexpr, reset_value, RESET: tl.constexpr):
    """Make membranes at rest: 0, or the value after a hard reset."""
    v = tl.zeros(shape, tl.float32)
    if RESET % 2 == 0:
        v += reset_value
    return v


@triton.jit
def fire(v, current, alpha, threshold, reset_value, RESET: tl.constexpr):
    """Step neurons by one time step; `current` is already scaled by beta and includes delta.

    Returns:
        Membrane (after the reset, unless that is delayed), and spikes as bool.
    """
    if RESET == 3:
        current -= tl.where(v >= threshold, reset_value, 0.0)
    elif RESET == 2:
        v = tl.where(v >= threshold, reset_value, v)
    v = v * alpha + current
    fired = v >= threshold
    if RESET == 1:
        v = tl.where(fired, v - reset_value, v)
    elif RESET == 0:
        v = tl.where(fired, reset_value, v)
    return v, fired


@triton.jit
def load_current(
    ptr, flat, real, n, y, x, c, C: tl.constexpr, IH: tl.constexpr, IW: tl.constexpr,
    POOL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr,
):  # fmt: skip
    """Load currents as fp32 [P, 64]: elements `flat`, or the maxima of their windows.

    Args:
        ptr: One time step, [N, IH, IW, C].
        flat: Positions without a pooling.
        real: Which elements exist.
        n, y, x: Image, row and column of each pixel after the pooling, [P].
        c: Channels, [64].
        POOL: Rows and columns of a window of a max pooling; 0 for no pooling.
        STRIDE, PADDING: Of the windows, in pixels.
    """
    if POOL == 0:
        current = tl.load(ptr + flat, mask=real, other=0.0).to(tl.float32)
    else:
        current = tl.full([flat.shape[0], flat.shape[1]], float("-inf"), tl.float32)
        for tap in tl.static_range(POOL * POOL):
            row = y * STRIDE + (tap // POOL - PADDING)
            column = x * STRIDE + (tap % POOL - PADDING)
            inside = (row >= 0) & (row < IH) & (column >= 0) & (column < IW)
            index = (((n * IH + row) * IW + column) * C)[:, None] + c[None, :]
            window = tl.load(ptr + index, mask=real & inside[:, None], other=float("-inf"))
            current = tl.maximum(current, window.to(tl.float32))
    return current


@triton.jit
def neuron_kernel(
    steady, varying, varying_steps, skips, posts, post_denses, post_steps,
    bias_ptr, v_in_ptr, v_out_ptr, v_columns_ptr, out_ptr, act_ptr, dense_ptr,
    alpha, beta, delta, threshold, reset_value, pixels, tiles, word_step, dense_step,
    C: tl.constexpr, G: tl.constexpr, H: tl.constexpr, W: tl.constexpr, IH: tl.constexpr, IW: tl.constexpr,
    POOL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, P: tl.constexpr, T: tl.constexpr,
    TC: tl.constexpr, RESET: tl.constexpr, BIAS: tl.constexpr, READ_V: tl.constexpr, WRITE_V: tl.constexpr,
    V_COLUMNS: tl.constexpr, PACKED: tl.constexpr, TILE: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Run a layer of neurons over time. Grid (tiles of P pixels, blocks of 64 channels).

    The current of a time step is beta times the sum of `steady`, `varying`, `skips` and the bias, plus delta.

    Args:
        steady: Currents that are constant over time, [N, H, W, C].
        varying: Currents that vary over time, [T, N, H, W, C].
        varying_steps: Elements from one time step of each to the next.
        skips: Words of packed spikes that are added to the currents.
        posts: Words of packed spikes that are added to the dense output.
        post_denses: Tensors that are added to the dense output, [T or 1, N, H, W, C].
        post_steps: Elements from one time step of each to the next; 0 if it is constant.
        bias_ptr: fp32 [C]; read with BIAS.
        v_in_ptr: Initial membrane, fp32 [N, H, W, C]; read with READ_V.
        v_out_ptr: Membrane after the last step; written with WRITE_V.
        v_columns_ptr: int32 [C], the channel of both membranes for each channel; read with V_COLUMNS.
        out_ptr: Words of the packed output as int32 halves; written with PACKED.
        act_ptr: Activity words of the packed output, [blocks, tiles].
        dense_ptr: Dense output, [T, N, H, W, C]; written with DENSE.
        alpha: Factor of the membrane in each step.
        beta: Factor of the input.
        delta: Constant added to the input.
        threshold: Membrane at which a neuron fires.
        reset_value, RESET: As `reset_value` and `reset_mode` of `NeuronSpec`.
        pixels: Pixels of all images of a time step.
        tiles: Activity words of a block.
        word_step: Words from one time step of packed spikes to the next.
        dense_step: Elements from one time step of the dense output to the next.
        C: Channels.
        G: Blocks of 64 channels.
        H: Rows of an image.
        W: Columns of an image.
        IH: Rows of a current.
        IW: Columns of a current.
        POOL, STRIDE, PADDING: Max pooling of each current, see `load_current`.
        P: Pixels of a program.
        T: Time steps.
        TC: Time steps whose currents a program loads before it stores any spikes.
        TILE: Pixels per activity word; 0 for no activity.
    """
    pixel = tl.program_id(0) * P + tl.arange(0, P)
    block = tl.program_id(1)
    inside = pixel < pixels
    lane = tl.arange(0, 64)
    c = block * 64 + lane
    real = inside[:, None]
    if C % 64 != 0:
        real = real & (c < C)[None, :]
    flat = (pixel * C)[:, None] + c[None, :]
    word = flat_to_padded_index(pixel, H, W) * G + block
    n = pixel // (H * W)
    y = (pixel // W) % H
    x = pixel % W

    base = tl.zeros([P, 64], tl.float32)
    if BIAS:
        base += tl.load(bias_ptr + c, mask=c < C, other=0.0)[None, :]
    for i in tl.static_range(len(steady)):
        base += load_current(steady[i], flat, real, n, y, x, c, C, IH, IW, POOL, STRIDE, PADDING)
    base = base * beta + delta
    v_index = flat
    if V_COLUMNS:
        v_channel = tl.load(v_columns_ptr + c, mask=c < C, other=0)
        v_index = (pixel * C)[:, None] + v_channel[None, :]
    if READ_V:
        v = tl.load(v_in_ptr + v_index, mask=real, other=0.0)
    else:
        v = make_rest([P, 64], reset_value, RESET)

    activity = tl.zeros([P, 2], tl.int32)
    start = tl.full((), 0, tl.int64)
    for t0 in range(0, T, TC):
        # Issue all loads of TC steps before the first store, so that they overlap.
        currents = ()
        for u in tl.static_range(TC):
            t = start + (t0 + u)
            current = base
            if len(varying) + len(skips) > 0:
                total = base
                for i in tl.static_range(len(varying)):
                    pointer = varying[i] + t * varying_steps[i]
                    term = load_current(pointer, flat, real, n, y, x, c, C, IH, IW, POOL, STRIDE, PADDING)
                    total = term if i == 0 else total + term
                for i in tl.static_range(len(skips)):
                    bits = tl.load(skips[i] + t * word_step + word, mask=inside, other=0)
                    term = spread_bits(bits, lane).to(tl.float32)
                    total = term if len(varying) + i == 0 else total + term
                current = total * beta + base
            currents = currents + (current,)
        for u in tl.static_range(TC):
            t = start + (t0 + u)
            v, fired = fire(v, currents[u], alpha, threshold, reset_value, RESET)
            if PACKED:
                if C % 64 != 0:
                    half = gather_bits(fired & real, P, 64)
                else:
                    half = gather_bits(fired, P, 64)
                pointer = out_ptr + (t * word_step + word) * 2
                tl.store(pointer[:, None] + tl.arange(0, 2)[None, :], half, mask=inside[:, None])
                if TILE > 0:
                    # Rows after the last pixel may hold any bits.
                    activity = record_activity(activity, tl.where(inside[:, None], half, 0), t0 + u)
            if DENSE:
                value = fired.to(tl.float32)
                for i in tl.static_range(len(posts)):
                    bits = tl.load(posts[i] + t * word_step + word, mask=inside, other=0)
                    value += spread_bits(bits, lane).to(tl.float32)
                for i in tl.static_range(len(post_denses)):
                    pointer = post_denses[i] + t * post_steps[i] + flat
                    value += tl.load(pointer, mask=real, other=0.0).to(tl.float32)
                tl.store(dense_ptr + t * dense_step + flat, value.to(dense_ptr.dtype.element_ty), mask=real)
    if TILE > 0:
        store_activity(act_ptr, activity, tl.program_id(0) * (P // TILE), tiles, block, G, P, 1, 2, TILE)
    if WRITE_V:
        tl.store(v_out_ptr + v_index, v, mask=real)


@dataclass(frozen=True, kw_only=True)
class NeuronOutput:
    """Output of a layer of neurons.

    Attributes:
        packed: Packed spikes, if requested.
        dense: Spikes plus SEW shortcuts, [T, N, C, H, W] channels last, if requested.
        v: Membrane after the last step, fp32 [N, H, W, C], if requested.
    """

    packed: PackedSpikes | None = None
    dense: Tensor | None = None
    v: Tensor | None = None


def run_neuron(
    currents: Sequence[Tensor],
    spec: NeuronSpec,
    *,
    steps: int | None = None,
    bias: Tensor | None = None,
    skips: Sequence[PackedSpikes] = (),
    post_skips: Sequence[PackedSpikes | Tensor] = (),
    v: Tensor | None = None,
    packed: PackedSpikes | bool = True,
    dense: torch.dtype | None = None,
    write_v: bool = False,
    v_columns: Tensor | None = None,
    pooling: MaxPooling | None = None,
) -> NeuronOutput:
    """Run a layer of neurons over time, in one pass.

    Args:
        currents: Tensors [T, N, C, H, W], or [1, N, C, H, W] if constant over time; fp16, bf16 or fp32.
            Channels-last memory ([T, N, H, W, C]) is read in place, other orders are copied first.
        spec: The neuron.
        steps: T; needed if all currents are constant over time.
        bias: fp32 [C], added to the currents.
        skips: Packed spikes [T, N, C, H, W]; each spike adds exactly 1.0 to the currents.
        post_skips: Packed spikes or tensors [T or 1, N, C, H, W] added to the output (SEW ADD), which must
            then be dense.
        v: Initial membrane, fp32 [N, H, W, C], contiguous; by default the rest value.
        packed: Whether to write packed spikes, or their destination. If the destination has activity words,
            they are written; each must cover a power of two of at most 32 pixels.
        dense: dtype of the dense spikes; None writes no dense spikes.
        write_v: Whether to write the membrane after the last step.
        v_columns: Channel of both membranes for each channel of the neurons, int32 [C] on the currents'
            device (`format.make_channel_table`); None for the identity.
        pooling: Max pooling of each current before it is added; the other shapes are those after it.

    Raises:
        InputError: The neuron has no input, or shapes disagree.
        DeviceError: The tensors are not on a GPU.
    """
    if post_skips and packed is not False:
        raise InputError("spikes plus shortcuts are integers; request dense spikes with packed=False")
    if packed is False and dense is None:
        raise InputError("request packed spikes, dense spikes, or both")
    pooled = [x if pooling is None else pooling.make_output(x) for x in currents]
    full_shape = _validate_inputs([*pooled, *skips], post_skips, steps, v, v_columns)
    steps, n, c, h, w = full_shape
    rows = [to_channels_last(x) for x in currents]
    in_height, in_width = (h, w) if pooling is None else rows[0].shape[2:4]
    check_launchable(*rows, *(s.words for s in skips))
    device = rows[0].device if rows else skips[0].data.device

    bits = allocate_packed(steps, n, c, h, w, device) if packed is True else packed or None
    if bits is not None and bits.shape != full_shape:
        raise InputError(f"`packed` is for spikes of shape {bits.shape}, expected {full_shape}")
    flat = None if dense is None else torch.empty((steps, n, h, w, c), dtype=dense, device=device)
    last = torch.empty((n, h, w, c), device=device) if write_v else None
    steady = [x for x in rows if x.shape[0] == 1]
    varying, varying_steps = with_time_strides([x for x in rows if x.shape[0] > 1])
    posts = tuple(x.words for x in post_skips if isinstance(x, PackedSpikes))
    post_denses, post_steps = with_time_strides(
        [to_channels_last(x) for x in post_skips if isinstance(x, Tensor)]
    )
    skip_words = tuple(s.words for s in skips)
    placeholder = [*rows, *skip_words][0]  # passed for absent pointers
    words = next(iter([*([bits.words] if bits is not None else []), *posts, *skip_words]), None)
    check_step_size(*steady, *varying, *post_denses, *([] if words is None else [words]))
    pixels = n * h * w
    tile, activity = (0, None) if bits is None else get_activity(bits, _PIXELS)
    launch(
        neuron_kernel, (ceil_div(pixels, _PIXELS), ceil_div(c, 64)),
        tuple(steady), varying, varying_steps, skip_words, posts, post_denses, post_steps,
        bias if bias is not None else placeholder, v if v is not None else placeholder,
        last if last is not None else placeholder,
        v_columns if v_columns is not None else placeholder,
        bits.data.view(torch.int32) if bits is not None else placeholder,
        activity if activity is not None else placeholder, flat if flat is not None else placeholder,
        spec.alpha, spec.beta, spec.delta, spec.v_threshold, spec.reset_value,
        pixels, 0 if activity is None else activity.shape[1],
        words.stride(0) if words is not None else 0, flat.stride(0) if flat is not None else 0,
        C=c, G=ceil_div(c, 64), H=h, W=w, IH=in_height, IW=in_width,
        POOL=0 if pooling is None else pooling.size, STRIDE=0 if pooling is None else pooling.stride,
        PADDING=0 if pooling is None else pooling.padding, P=_PIXELS, T=steps, TC=choose_time_chunk(steps),
        RESET=spec.reset_mode, BIAS=bias is not None, READ_V=v is not None, WRITE_V=last is not None,
        V_COLUMNS=v_columns is not None, PACKED=bits is not None, TILE=tile, DENSE=flat is not None,
        num_warps=4 if bits is None else 8,
    )  # fmt: skip
    return NeuronOutput(packed=bits, dense=None if flat is None else flat.permute(0, 1, 4, 2, 3), v=last)


def _validate_inputs(
    inputs: Sequence[Tensor | PackedSpikes],
    post_skips: Sequence[PackedSpikes | Tensor],
    steps: int | None,
    v: Tensor | None,
    v_columns: Tensor | None,
) -> tuple[int, int, int, int, int]:
    """Check shapes and dtypes of a neuron's inputs; return the shape of its output, (T, N, C, H, W)."""
    if not inputs:
        raise InputError("a neuron needs at least one current or skip")
    shapes = [tuple(x.shape) for x in inputs]
    n, c, h, w = shapes[0][1:]
    full_shape = (steps or max(shape[0] for shape in shapes), n, c, h, w)
    for x in (*inputs, *post_skips):
        constant = isinstance(x, Tensor) and tuple(x.shape) == (1, n, c, h, w)
        if tuple(x.shape) != full_shape and not constant:
            raise InputError(
                f"the neuron's inputs must have shape {full_shape}, got one of shape {tuple(x.shape)}"
            )
    if v is not None and (v.shape != (n, h, w, c) or v.dtype != torch.float32 or not v.is_contiguous()):
        raise InputError(
            f"the membrane must be contiguous fp32 {(n, h, w, c)} (N, H, W, C), "
            f"got {v.dtype} {tuple(v.shape)}"
        )
    if v_columns is not None and (
        v_columns.shape != (c,) or v_columns.dtype != torch.int32 or not v_columns.is_contiguous()
    ):
        raise InputError(
            f"the membrane's channels must be contiguous int32 [{c}], got {v_columns.dtype} "
            f"{tuple(v_columns.shape)}"
        )
    return full_shape
