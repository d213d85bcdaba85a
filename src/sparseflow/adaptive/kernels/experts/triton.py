"""Mixture of gated experts for few tokens: two kernels that read the selected experts' weights once each.

A decode step has too few tokens for tensor cores; its cost is reading the weights, 6 f d bytes per expert in
bf16. A program owns some output rows of one matrix and multiplies them with a vector elementwise,
accumulating in float32 (float64 for float64). The first kernel runs over pairs of token and expert and writes
silu(G x) * U x; the second runs over tokens and adds their experts' outputs in the order of `expert_ids`, so
a token's result does not depend on other tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

MAX_TOKENS = 16
"""Tokens above which a grouped matrix product is faster, because experts are shared and read once."""

TILE = 4096
"""Weight elements per tile in registers."""

ROWS = 8
"""Output rows per program of the first kernel."""

OUT_ROWS = 4
"""Output rows per program of the second kernel, which handles all experts of a token."""


@triton.jit
def hidden_kernel(
    x_ptr, chosen_ptr, gate_up_ptr, out_ptr, K, D, F, stride_e, stride_r,
    BR: tl.constexpr, BD: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0)
    r = tl.program_id(1) * BR + tl.arange(0, BR)
    cols = tl.arange(0, BD)
    token = (pair // K).to(tl.int64)
    expert = tl.load(chosen_ptr + pair).to(tl.int64)
    gate_at = gate_up_ptr + expert * stride_e + r[:, None] * stride_r
    up_at = gate_at + F * stride_r
    gate_values = tl.zeros([BR, BD], ACC)
    up = tl.zeros([BR, BD], ACC)
    for first in range(0, D, BD):
        c = first + cols
        inside = (r < F)[:, None] & (c < D)[None, :]
        x = tl.load(x_ptr + token * D + c, mask=c < D, other=0.0).to(ACC)[None, :]
        gate_values += tl.load(gate_at + c[None, :], mask=inside, other=0.0).to(ACC) * x
        up += tl.load(up_at + c[None, :], mask=inside, other=0.0).to(ACC) * x
    g = tl.sum(gate_values, axis=1)
    h = g / (1.0 + tl.exp(-g)) * tl.sum(up, axis=1)
    tl.store(out_ptr + pair.to(tl.int64) * F + r, h, mask=r < F)


@triton.jit
def output_kernel(
    hidden_ptr, chosen_ptr, weights_ptr, down_ptr, out_ptr, K, D, F, stride_e, stride_r,
    BR: tl.constexpr, BF: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    r = tl.program_id(1) * BR + tl.arange(0, BR)
    cols = tl.arange(0, BF)
    total = tl.zeros([BR, BF], ACC)
    for k in range(0, K):
        pair = token * K + k
        expert = tl.load(chosen_ptr + pair).to(tl.int64)
        weight = tl.load(weights_ptr + pair).to(ACC)
        down_at = down_ptr + expert * stride_e + r[:, None] * stride_r
        for first in range(0, F, BF):
            c = first + cols
            inside = (r < D)[:, None] & (c < F)[None, :]
            h = tl.load(hidden_ptr + pair * F + c, mask=c < F, other=0.0) * weight
            total += tl.load(down_at + c[None, :], mask=inside, other=0.0).to(ACC) * h[None, :]
    tl.store(out_ptr + token * D + r, tl.sum(total, axis=1).to(out_ptr.dtype.element_ty), mask=r < D)


def fits(x: Tensor, gate_up: Tensor, down: Tensor) -> bool:
    """Whether the kernels support these experts and tokens."""
    return (
        x.dtype in DTYPES
        and x.dtype == gate_up.dtype == down.dtype
        and len(x) <= MAX_TOKENS
        and gate_up.stride(2) == down.stride(2) == 1
        and gate_up.shape[1] == 2 * down.shape[2]
        and gate_up.shape[2] == down.shape[1] == x.shape[1]
    )


def experts(x: Tensor, expert_ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Apply experts to tokens; see the reference. Not differentiable; never synchronizes."""
    (n, d), k, f = x.shape, expert_ids.shape[1], down.shape[2]
    x, expert_ids, weights = x.contiguous(), expert_ids.contiguous(), weights.contiguous()
    acc, acc_dtype = (tl.float64, torch.float64) if x.dtype == torch.float64 else (tl.float32, torch.float32)
    hidden = x.new_empty(n * k, f, dtype=acc_dtype)
    out = torch.empty_like(x)
    if out.numel() == 0:
        return out
    first: Any = hidden_kernel
    second: Any = output_kernel
    wide = max(16, min(TILE // ROWS, triton.next_power_of_2(d)))
    block_width = max(16, min(TILE // OUT_ROWS, triton.next_power_of_2(f)))
    with torch.cuda.device_of(x):
        first[(n * k, triton.cdiv(f, ROWS))](
            x, expert_ids, gate_up, hidden, k, d, f, gate_up.stride(0), gate_up.stride(1),
            BR=ROWS, BD=wide, ACC=acc, num_warps=4,
        )  # fmt: skip
        second[(n, triton.cdiv(d, OUT_ROWS))](
            hidden, expert_ids, weights, down, out, k, d, f, down.stride(0), down.stride(1),
            BR=OUT_ROWS, BF=block_width, ACC=acc, num_warps=4,
        )  # fmt: skip
    return out
