"""Fused group in portable Triton: 1-bit spikes -> tensor cores -> bias -> IF/LIF over T -> 1-bit spikes.

This kernel replaces `hopper/kernel.py` on other GPUs and for groups that the Hopper kernel does not support.
It also runs in Triton's interpreter, and tests compare the Hopper kernel with it. One program owns a tile of
`bm` output pixels x `bn` output channels and keeps its membrane in registers over all time steps. Sums of
`tc` time steps share each read of the weights, which come from the L2 cache through a software pipeline. A
spike reaches the tensor core as fp16 2.0, because its bit is shifted to the exponent's top bit; the weights
are halved to compensate.

For fp32 accuracy, each weight is split into two or three fp16 numbers (`parts`), and the K steps are added in
fp32 rather than in the tensor cores, which truncate. A sum is then about as accurate as that of an fp32
convolution, 1e-7 of its size (tests/spiking/backends/packed/test_accuracy.py models the hardware).
"""

# Kernels are Triton's subset of Python: tuples grow by `+`, constexpr branches stay `if` statements.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
# ruff: noqa: RUF005, B007
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseflow.spiking.backends.packed.format import BLOCK, PackedSpikes, count_blocks
from sparseflow.spiking.backends.packed.group import PackedGroup, get_unsupported_reason, split_into_halves
from sparseflow.spiking.backends.packed.neuron import fire, make_rest
from sparseflow.spiking.backends.packed.words import (
    ceil_div,
    choose_time_chunk,
    flat_to_padded_index,
    gather_bits,
    get_activity,
    launch,
    padded_index,
    record_activity,
    spread_bits,
    store_activity,
    with_time_strides,
)
from sparseflow.spiking.backends.spec import GroupSpec


@triton.jit
def spikes_as_fp16(halves, P: tl.constexpr):
    """Convert the halfwords of a block of channels, int16 [P, 4], to fp16 [P, 64], 2.0 for a spike.

    Lane q of a matrix fragment needs the bits of halfword q, two adjacent bits per register, so the compiler
    keeps all of this inside the fragment.
    """
    word = halves.to(tl.int32) & 0xFFFF
    word = word | (word << 15)  # Bits b and b + 1 are now 16 apart.
    turn = 14 - 2 * tl.arange(0, 8)
    pair = ((word[:, None, :] << turn[None, :, None]) & 0x40004000).reshape([P, 32])
    first = pair.to(tl.int16).to(tl.float16, bitcast=True)
    second = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.join(first, second).reshape([P, 64])


@triton.jit
def _convolve(
    sums, x_ptr, src, x_step, w_ptr, column, first_k,
    G: tl.constexpr, K: tl.constexpr, IW: tl.constexpr, COLUMNS: tl.constexpr, BM: tl.constexpr,
    TC: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Add the convolution of time step u to `sums[u]`; `src` is the start of each pixel's halfwords.

    With one part, the tensor cores accumulate into the sums. They truncate when they add. With more parts,
    each K step therefore starts from zero with the smallest part, and fp32 adds the steps.

    Args:
        sums: TC tensors, fp32 [BM, columns of the tile].
        x_ptr: Halfwords of the input at the first time step.
        src: Index of the halfwords of the first tap and block, [BM, 4].
        x_step: Words from one time step to the next.
        w_ptr: Weights; see `pack_fallback_weights`.
        column: Output channel of each column of the tile.
        first_k: First K step of the source among those of all sources.
        G: Blocks of 64 input channels.
        K: Kernel size.
        IW: Columns of an input image.
        COLUMNS: Output channels with padding.
        BM: Output pixels of the tile.
        TC: Time steps.
        PARTS: fp16 numbers per weight.
    """
    c = tl.arange(0, 64)
    weights = w_ptr + first_k * (PARTS * 64 * COLUMNS) + c[:, None] * COLUMNS + column[None, :]
    for step in range(G * K * K):
        tap = step % (K * K)
        shift = ((tap // K) * (IW + 1) + tap % K) * G + step // (K * K)
        added = ()
        parts = ()
        for part in tl.static_range(PARTS):  # The smallest part comes first.
            parts = parts + (tl.load(weights + (step * PARTS + (PARTS - 1 - part)) * (64 * COLUMNS)),)
        for u in tl.static_range(TC):
            a = spikes_as_fp16(tl.load(x_ptr + (u * x_step + shift) * 4 + src), BM)
            if PARTS == 1:
                added = added + (tl.dot(a, parts[0], sums[u]),)
            else:
                total = tl.dot(a, parts[0])
                for part in tl.static_range(1, PARTS):
                    total = tl.dot(a, parts[part], total)
                added = added + (sums[u] + total,)
        sums = added
    return sums


@triton.jit
def triton_group_kernel(
    x_ptr, x2_ptr, w_ptr, bias_ptr, out_ptr, act_ptr, skips, denses, dense_steps, v_in_ptr, v_out_ptr,
    v_columns_ptr, scale, alpha, beta, threshold, reset_value, pixels, tiles, x_step, x2_step, out_step,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    G: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr,
    IH: tl.constexpr, IW: tl.constexpr,
    G2: tl.constexpr, K2: tl.constexpr, STRIDE2: tl.constexpr, PADDING2: tl.constexpr,
    IH2: tl.constexpr, IW2: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, T: tl.constexpr, TC: tl.constexpr, PARTS: tl.constexpr,
    RESET: tl.constexpr, READ_V: tl.constexpr, WRITE_V: tl.constexpr, V_COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Run a group over all time steps. Grid (tiles of BM output pixels, tiles of BN output channels).

    The parameters of the second source end in 2. Packed tensors are described in `format.py`.

    Args:
        x_ptr, x2_ptr: Packed spikes of the sources, as halfwords.
        w_ptr: Weights of both sources; see `pack_fallback_weights`.
        bias_ptr: Bias, scaled by beta and with delta added, fp32 [channels with padding].
        out_ptr: Packed output, as int32 halves of words.
        act_ptr: Activity words of the output, [blocks, tiles].
        skips: Words of packed spikes that are added to the currents.
        denses: Tensors that are added to the currents, [T or 1, N, H, W, C].
        dense_steps: Elements from one time step of each to the next; 0 if it is constant.
        v_in_ptr: Initial membrane, fp32 [N, H, W, C]; read with READ_V.
        v_out_ptr: Membrane after the last step; written with WRITE_V.
        v_columns_ptr: int32 [C], the channel of both membranes for each channel; read with V_COLUMNS.
        scale: beta times the power of two that the weights were divided by.
        alpha, beta, threshold: See `NeuronSpec`.
        reset_value, RESET: As `reset_value` and `reset_mode` of `NeuronSpec`.
        pixels: Output pixels of all images of a time step.
        tiles: Activity words of a block.
        x_step, x2_step, out_step: Words from one time step to the next.
        C, H, W: Channels, rows and columns of the output.
        G, G2: Blocks of 64 input channels; G2 is 0 without a second source.
        K, STRIDE, PADDING, K2, STRIDE2, PADDING2: Convolutions of the sources.
        IH, IW, IH2, IW2: Rows and columns of the inputs.
        BM, BN: Output pixels and output channels of a program.
        T: Time steps.
        TC: Time steps whose sums are held at once.
        PARTS: fp16 numbers per weight.
        TILE: Pixels per activity word; 0 for no activity.
    """
    GO: tl.constexpr = (C + 63) // 64
    COLUMNS: tl.constexpr = GO * 64
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = row < pixels
    pixel = tl.minimum(row, pixels - 1)
    n = pixel // (H * W)
    y = (pixel // W) % H
    x = pixel % W
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    lane = tl.arange(0, 4)[None, :]
    src = padded_index(n, y * STRIDE - PADDING, x * STRIDE - PADDING, IH, IW) * G
    src = (src * 4)[:, None] + lane
    src2 = src
    if G2 > 0:
        src2 = padded_index(n, y * STRIDE2 - PADDING2, x * STRIDE2 - PADDING2, IH2, IW2) * G2
        src2 = (src2 * 4)[:, None] + lane
    word = flat_to_padded_index(pixel, H, W) * GO
    half = tl.program_id(1) * (BN // 32) + tl.arange(0, BN // 32)
    real = inside[:, None]
    if C % 64 != 0:
        real = real & (column < C)[None, :]
    flat = (pixel * C)[:, None] + column[None, :]
    bias = tl.load(bias_ptr + column)[None, :]
    v_index = flat
    if V_COLUMNS:
        v_channel = tl.load(v_columns_ptr + column, mask=column < C, other=0)
        v_index = (pixel * C)[:, None] + v_channel[None, :]
    if READ_V:
        v = tl.load(v_in_ptr + v_index, mask=real, other=0.0)
    else:
        v = make_rest([BM, BN], reset_value, RESET)

    activity = tl.zeros([BM, BN // 32], tl.int32)
    start = tl.full((), 0, tl.int64)
    for t0 in range(0, T, TC):
        sums = ()
        for u in tl.static_range(TC):
            sums = sums + (tl.zeros([BM, BN], tl.float32),)
        t_start = start + t0
        sums = _convolve(
            sums,
            x_ptr + t_start * x_step * 4,
            src,
            x_step,
            w_ptr,
            column,
            0,
            G,
            K,
            IW,
            COLUMNS,
            BM,
            TC,
            PARTS,
        )
        if G2 > 0:
            sums = _convolve(
                sums, x2_ptr + t_start * x2_step * 4, src2, x2_step, w_ptr, column, G * K * K,
                G2, K2, IW2, COLUMNS, BM, TC, PARTS,
            )  # fmt: skip
        for u in tl.static_range(TC):
            t = t_start + u
            current = sums[u] * scale + bias
            for i in tl.static_range(len(denses)):
                pointer = denses[i] + t * dense_steps[i] + flat
                current += tl.load(pointer, mask=real, other=0.0).to(tl.float32) * beta
            for i in tl.static_range(len(skips)):
                for g in tl.static_range(BN // 64):
                    word_bits = tl.load(skips[i] + t * out_step + word + (tl.program_id(1) * (BN // 64) + g))
                    in_block = (tl.arange(0, BN) // 64 == g)[None, :]
                    ones = spread_bits(word_bits, tl.arange(0, BN) & 63)
                    current += tl.where(in_block & (ones != 0), beta, 0.0)
            v, fired = fire(v, current, alpha, threshold, reset_value, RESET)
            if C % 64 != 0:
                fired = fired & (column < C)[None, :]
            pointer = out_ptr + (t * out_step + word) * 2
            bits = gather_bits(fired, BM, BN)
            tl.store(pointer[:, None] + half[None, :], bits, mask=inside[:, None])
            if TILE > 0:
                # Rows after the last pixel repeat it.
                activity = record_activity(activity, bits, t0 + u)
    if TILE > 0:
        first = tl.program_id(0) * (BM // TILE)
        store_activity(
            act_ptr, activity, first, tiles, tl.program_id(1) * (BN // 64), GO, BM, BN // 64, 2, TILE
        )
    if WRITE_V:
        tl.store(v_out_ptr + v_index, v, mask=real)


@dataclass(frozen=True, kw_only=True)
class FallbackVariant:
    """Tile sizes of the kernel; all variants give the same result up to the order of sums.

    Attributes:
        bm: Output pixels of a tile.
        bn: Output channels of a tile, 64 or 128.
        tc: Time steps whose sums are held at once.
        warps: Warps per program.
        stages: Depth of the pipeline that loads weights and spikes.
        activity_tile: Pixels per activity word of the output; a Hopper group that reads the output expects
            this number.
    """

    bm: int = 64
    bn: int = 64
    tc: int = 1
    warps: int = 4
    stages: int = 3
    activity_tile: ClassVar[int] = 16

    @property
    def name(self) -> str:
        """Unique name such as `m64n64t1w4s3`."""
        return f"m{self.bm}n{self.bn}t{self.tc}w{self.warps}s{self.stages}"


def list_fallback_variants(spec: GroupSpec, *, T: int, parts: int = 1) -> list[FallbackVariant]:
    """List the variants that fit, the default first."""
    wide = count_blocks(spec.sources[0].weight.shape[0]) % 2 == 0
    time_chunk = choose_time_chunk(T, 2)
    choices = [FallbackVariant(tc=time_chunk)] if parts == 1 else []
    choices += [FallbackVariant(), FallbackVariant(stages=4), FallbackVariant(bm=128, warps=8)]
    if wide:
        choices += [FallbackVariant(bn=128, warps=8)]
    return list(dict.fromkeys(choices))


def pack_fallback_weights(spec: GroupSpec, parts: int) -> tuple[Tensor, float]:
    """Lay out the weights for the kernel, and return the factor that its sums must be multiplied by.

    Returns:
        (fp16 [K, C], scale): C is zero-padded to a multiple of 64; rows are in the order (source, block of
        64 channels, tap, part, channel). Part 0 is the weight rounded to fp16, each further part the
        remaining error.
    """
    largest = max(float(s.weight.abs().max()) for s in spec.sources)
    # The largest weight is just under 2^13, so that residuals stay clear of fp16's subnormals.
    shift = 12 - math.floor(math.log2(largest)) if largest > 0 else 0
    steps = []
    for source in spec.sources:
        c_out, c_in, k, _ = source.weight.shape
        blocks = count_blocks(c_in)
        shape = (blocks * BLOCK, k * k, count_blocks(c_out) * BLOCK)
        w = torch.zeros(shape, dtype=torch.float64, device=source.weight.device)
        w[:c_in, :, :c_out] = source.weight.double().reshape(c_out, c_in, k * k).permute(1, 2, 0) * 2.0**shift
        steps.append(
            split_into_halves(w.view(blocks, BLOCK, k * k, -1).transpose(1, 2), parts, 2).flatten(0, 3)
        )
    return torch.cat(steps).contiguous(), 2.0 ** (-shift - 1)


class TritonFallbackGroup(PackedGroup):
    """A group on any CUDA GPU, or on the CPU if Triton interprets its kernels."""

    get_unsupported_reason = staticmethod(get_unsupported_reason)
    pack_weights = staticmethod(pack_fallback_weights)

    @staticmethod
    def list_variants(
        spec: GroupSpec, *, T: int, N: int, H: int, W: int, parts: int = 1
    ) -> list[FallbackVariant]:
        return list_fallback_variants(spec, T=T, parts=parts)

    def launch(
        self,
        spikes: Sequence[PackedSpikes],
        skips: Sequence[PackedSpikes] = (),
        dense: Sequence[Tensor] = (),
        v: Tensor | None = None,
        write_v: bool = False,
    ) -> Any:
        spec, c, neuron = self.spec, self.variant, self.spec.neuron
        first, second = spec.sources[0], spec.sources[-1]
        two = len(spec.sources) > 1
        denses, dense_steps = with_time_strides(dense)
        x, x2 = spikes[0].words, spikes[-1].words
        tile, activity = get_activity(self.out, c.bm)
        return launch(
            triton_group_kernel,
            (ceil_div(self.N * self.H * self.W, c.bm), count_blocks(self.c_out) * BLOCK // c.bn),
            spikes[0].data, spikes[-1].data, self.weights, self.bias, self.out.data.view(torch.int32),
            self.bias if activity is None else activity,
            tuple(s.words for s in skips), denses, dense_steps, self.v if v is None else v, self.v,
            self.bias if self._v_columns is None else self._v_columns,
            self.scale, neuron.alpha, neuron.beta, neuron.v_threshold, neuron.reset_value,
            self.N * self.H * self.W, 0 if activity is None else activity.shape[1],
            x.stride(0), x2.stride(0), self.out.words.stride(0),
            C=self.c_out, H=self.H, W=self.W,
            G=spikes[0].blocks, K=first.weight.shape[-1], STRIDE=first.stride, PADDING=first.padding,
            IH=self.in_sizes[0][0], IW=self.in_sizes[0][1],
            G2=spikes[-1].blocks if two else 0, K2=second.weight.shape[-1], STRIDE2=second.stride,
            PADDING2=second.padding, IH2=self.in_sizes[-1][0], IW2=self.in_sizes[-1][1],
            BM=c.bm, BN=c.bn, T=self.T, TC=c.tc, PARTS=self.parts, RESET=neuron.reset_mode,
            READ_V=v is not None, WRITE_V=write_v, V_COLUMNS=self._v_columns is not None, TILE=tile,
            num_warps=c.warps, num_stages=c.stages,
        )  # fmt: skip
