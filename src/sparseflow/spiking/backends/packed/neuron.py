"""The fused neuron: what a dense convolution left, plus bias and residuals, through IF/LIF over T to bits.

For groups whose convolution ran elsewhere (cuDNN): one pass reads the currents, keeps the membrane in
registers over all time steps and writes packed spikes, dense spikes, or both. The reference is
`kernels.reference.run_group_reference` of a group without sources.
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
from sparseflow.spiking.backends.packed.format import PackedSpikes, empty_packed
from sparseflow.spiking.backends.packed.words import (
    activity_of,
    as_pairs,
    cdiv,
    channels_last,
    check_launchable,
    check_step_size,
    fires_at,
    gather_bits,
    launch,
    padded_pixel,
    spread_bits,
    store_activity,
    time_steps_held,
)
from sparseflow.spiking.backends.spec import NeuronSpec

_PIXELS = 32


@triton.jit
def fire(v, current, alpha, threshold, v_reset, SOFT: tl.constexpr):
    """One time step: (membrane after the reset, bool spikes); `current` holds beta and delta."""
    v = v * alpha + current
    fired = v >= threshold
    if SOFT:
        v = tl.where(fired, v - threshold, v)
    else:
        v = tl.where(fired, v_reset, v)
    return v, fired


@triton.jit
def neuron_kernel(
    steady, varying, varying_steps, skips, posts, post_denses, post_steps,
    bias_ptr, v_in_ptr, v_out_ptr, v_columns_ptr, out_ptr, act_ptr, dense_ptr,
    alpha, beta, delta, threshold, v_reset, pixels, tiles, word_step, dense_step,
    C: tl.constexpr, G: tl.constexpr, H: tl.constexpr, W: tl.constexpr, P: tl.constexpr,
    T: tl.constexpr, TC: tl.constexpr, SOFT: tl.constexpr, BIAS: tl.constexpr,
    READ_V: tl.constexpr, WRITE_V: tl.constexpr, V_COLUMNS: tl.constexpr,
    PACKED: tl.constexpr, TILE: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of P pixels, blocks of channels). `steady` currents are constant over time.

    TILE pixels an activity word, 0 for none.
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
    word = padded_pixel(pixel, H, W) * G + block

    base = tl.zeros([P, 64], tl.float32)
    if BIAS:
        base += tl.load(bias_ptr + c, mask=c < C, other=0.0)[None, :]
    for i in tl.static_range(len(steady)):
        base += tl.load(steady[i] + flat, mask=real, other=0.0).to(tl.float32)
    base = base * beta + delta
    at_v = flat
    if V_COLUMNS:
        found = tl.load(v_columns_ptr + c, mask=c < C, other=0)
        at_v = (pixel * C)[:, None] + found[None, :]
    if READ_V:
        v = tl.load(v_in_ptr + at_v, mask=real, other=0.0)
    else:
        v = tl.zeros([P, 64], tl.float32) + v_reset

    seen = tl.zeros([P, 2], tl.int32)
    start = tl.full((), 0, tl.int64)
    for t0 in range(0, T, TC):
        # All loads of TC steps before the first store, so that they are in flight together.
        currents = ()
        for u in tl.static_range(TC):
            t = start + (t0 + u)
            current = base
            if len(varying) + len(skips) > 0:
                total = base
                for i in tl.static_range(len(varying)):
                    at = varying[i] + t * varying_steps[i] + flat
                    term = tl.load(at, mask=real, other=0.0).to(tl.float32)
                    total = term if i == 0 else total + term
                for i in tl.static_range(len(skips)):
                    bits = tl.load(skips[i] + t * word_step + word, mask=inside, other=0)
                    term = spread_bits(bits, lane).to(tl.float32)
                    total = term if len(varying) + i == 0 else total + term
                current = total * beta + base
            currents = currents + (current,)
        for u in tl.static_range(TC):
            t = start + (t0 + u)
            v, fired = fire(v, currents[u], alpha, threshold, v_reset, SOFT)
            if PACKED:
                if C % 64 != 0:
                    half = gather_bits(fired & real, P, 64)
                else:
                    half = gather_bits(fired, P, 64)
                at = out_ptr + (t * word_step + word) * 2
                tl.store(at[:, None] + tl.arange(0, 2)[None, :], half, mask=inside[:, None])
                if TILE > 0:
                    # Behind the last pixel anything may fire.
                    seen = fires_at(seen, tl.where(inside[:, None], half, 0), t0 + u)
            if DENSE:
                value = fired.to(tl.float32)
                for i in tl.static_range(len(posts)):
                    bits = tl.load(posts[i] + t * word_step + word, mask=inside, other=0)
                    value += spread_bits(bits, lane).to(tl.float32)
                for i in tl.static_range(len(post_denses)):
                    at = post_denses[i] + t * post_steps[i] + flat
                    value += tl.load(at, mask=real, other=0.0).to(tl.float32)
                tl.store(dense_ptr + t * dense_step + flat, value.to(dense_ptr.dtype.element_ty), mask=real)
    if TILE > 0:
        store_activity(act_ptr, seen, tl.program_id(0) * (P // TILE), tiles, block, G, P, 1, 2, TILE)
    if WRITE_V:
        tl.store(v_out_ptr + at_v, v, mask=real)


@dataclass(frozen=True, kw_only=True)
class NeuronOutput:
    """What a neuron leaves.

    Attributes:
        packed: Its spikes, if packed ones were asked for.
        dense: Its spikes plus the SEW shortcuts, [T, N, C, H, W] channels last, if asked for.
        v: fp32 [N, H, W, C], the membrane after the last step, if asked for.
    """

    packed: PackedSpikes | None = None
    dense: Tensor | None = None
    v: Tensor | None = None


def neuron(
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
    v_out: Tensor | bool = False,
    v_columns: Tensor | None = None,
) -> NeuronOutput:
    """Run a layer of neurons over time, in one pass.

    Args:
        currents: Tensors [T, N, C, H, W], or [1, N, C, H, W] where constant over time; fp16, bf16 or fp32.
            Channels-last memory ([T, N, H, W, C]) is read as it is, another order is copied first.
        spec: The neuron.
        steps: T, needed where every current is constant over time.
        bias: fp32 [C], added to the currents.
        skips: Packed spikes [T, N, C, H, W], each added to the currents as exactly 1.0.
        post_skips: Packed spikes or tensors [T or 1, N, C, H, W] added to the output (SEW ADD), which must
            then be dense.
        v: Membrane to start from, fp32 [N, H, W, C], contiguous; None starts at rest.
        packed: Whether to write packed spikes, or where to; activity words there, each for a power of two
            of at most 32 pixels, are filled along.
        dense: dtype of the dense spikes to write; None for none.
        v_out: Whether to write the last membrane, or where to (fp32 [N, H, W, C]; may be `v`).
        v_columns: int32 [C] on the currents' device (`format.channel_table`): at which channel of `v` and
            `v_out` each of the neurons' channels is. None: as they lie.

    Raises:
        InputError: There is nothing to feed the neuron, or shapes disagree.
        DeviceError: The tensors are not on a GPU.
    """
    inputs = [*currents, *skips]
    if not inputs:
        raise InputError("a neuron needs a current or a skip")
    shapes = [tuple(x.shape) for x in inputs]
    steps = steps or max(shape[0] for shape in shapes)
    n, c, h, w = shapes[0][1:]
    whole = (steps, n, c, h, w)
    for x in (*inputs, *post_skips):
        constant = isinstance(x, Tensor) and tuple(x.shape) == (1, *whole[1:])
        if tuple(x.shape) != whole and not constant:
            raise InputError(f"the neuron's inputs have shape {whole}, got one of shape {tuple(x.shape)}")
    if post_skips and packed is not False:
        raise InputError("spikes plus shortcuts are integers: ask for dense spikes with packed=False")
    if packed is False and dense is None:
        raise InputError("ask for packed spikes, dense ones, or both")
    rows = [channels_last(x) for x in currents]
    check_launchable(*rows, *(s.words for s in skips))
    device = rows[0].device if rows else skips[0].data.device
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

    bits = empty_packed(steps, n, c, h, w, device) if packed is True else packed or None
    if bits is not None and bits.shape != whole:
        raise InputError(f"`packed` is for spikes of shape {bits.shape}, the neuron's have {whole}")
    flat = None if dense is None else torch.empty((steps, n, h, w, c), dtype=dense, device=device)
    last = None
    if v_out is not False:
        last = torch.empty((n, h, w, c), device=device) if v_out is True else v_out
    steady = [x for x in rows if x.shape[0] == 1]
    varying, varying_steps = as_pairs([x for x in rows if x.shape[0] > 1])
    posts = tuple(x.words for x in post_skips if isinstance(x, PackedSpikes))
    post_denses, post_steps = as_pairs([channels_last(x) for x in post_skips if isinstance(x, Tensor)])
    skip_words = tuple(s.words for s in skips)
    some = [*rows, *skip_words][0]  # stands in for what is not there
    words = next(iter([*([bits.words] if bits is not None else []), *posts, *skip_words]), None)
    check_step_size(*steady, *varying, *post_denses, *([] if words is None else [words]))
    pixels = n * h * w
    tile, activity = (0, None) if bits is None else activity_of(bits, _PIXELS)
    launch(
        neuron_kernel, (cdiv(pixels, _PIXELS), cdiv(c, 64)),
        tuple(steady), varying, varying_steps, skip_words, posts, post_denses, post_steps,
        bias if bias is not None else some, v if v is not None else some, last if last is not None else some,
        v_columns if v_columns is not None else some,
        bits.data.view(torch.int32) if bits is not None else some,
        activity if activity is not None else some, flat if flat is not None else some,
        spec.alpha, spec.beta, spec.delta, spec.v_threshold, spec.v_rest,
        pixels, 0 if activity is None else activity.shape[1],
        words.stride(0) if words is not None else 0, flat.stride(0) if flat is not None else 0,
        C=c, G=cdiv(c, 64), H=h, W=w, P=_PIXELS, T=steps, TC=time_steps_held(steps),
        SOFT=spec.v_reset is None, BIAS=bias is not None, READ_V=v is not None, WRITE_V=last is not None,
        V_COLUMNS=v_columns is not None, PACKED=bits is not None, TILE=tile, DENSE=flat is not None,
        num_warps=4,
    )  # fmt: skip
    return NeuronOutput(packed=bits, dense=None if flat is None else flat.permute(0, 1, 4, 2, 3), v=last)
