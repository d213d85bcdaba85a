"""Choosing experts: a program takes some tokens, and finds one expert after the other.

In place of a copy, a softmax, a selection and a sort, which are four to six launches.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_EXPERTS = 512
"""Whose chances a program keeps in registers for each of its tokens."""

MOST_CHOSEN = 32


@triton.jit
def choose_kernel(
    logits_ptr, weights_ptr, chosen_ptr, N, E, stride,
    K: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr, NORMALIZED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    e = tl.arange(0, BE)
    inside = (row < N)[:, None] & (e < E)[None, :]
    logits = tl.load(logits_ptr + row[:, None] * stride + e[None, :], mask=inside, other=float("-inf"))
    # Rows beyond the last are zeros, so that nothing is computed with infinities alone.
    logits = tl.where((row < N)[:, None], logits.to(tl.float32), 0.0)
    top = tl.max(logits, axis=1)
    odds = tl.exp(logits - top[:, None])
    total = tl.sum(odds, axis=1)
    chances = odds / total[:, None]
    left = tl.where((e < E)[None, :], chances, -1.0)
    at = tl.arange(0, BK)
    values = tl.zeros([BN, BK], tl.float32)
    chosen = tl.zeros([BN, BK], tl.int32)
    for k in tl.static_range(K):
        best = tl.max(left, axis=1)
        which = tl.min(tl.where(left == best[:, None], e[None, :], BE), axis=1)
        # NaN equals nothing: whatever expert it is, it must be one, for kernels that go by it.
        which = tl.minimum(which, E - 1)
        values = tl.where((at == k)[None, :], best[:, None], values)
        chosen = tl.where((at == k)[None, :], which[:, None], chosen)
        left = tl.where(e[None, :] == which[:, None], -1.0, left)
    # A row with NaN gives NaN, as a softmax does.
    values = tl.where((total == total)[:, None], values, total[:, None])
    if NORMALIZED:
        values = values / tl.sum(values, axis=1)[:, None]
    out = row[:, None] * K + at[None, :]
    kept = (row < N)[:, None] & (at < K)[None, :]
    tl.store(weights_ptr + out, values.to(weights_ptr.dtype.element_ty), mask=kept)
    tl.store(chosen_ptr + out, chosen.to(tl.int64), mask=kept)


def fits(logits: Tensor, k: int) -> bool:
    """Whether the kernel takes such logits."""
    return (
        logits.ndim == 2
        and logits.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and 0 < k <= min(MOST_CHOSEN, logits.shape[1])
        and logits.shape[1] <= MOST_EXPERTS
        and logits.stride(1) == 1
    )


def top_experts(logits: Tensor, k: int, *, normalized: bool) -> tuple[Tensor, Tensor]:
    """Choose experts; see the reference. Not differentiable, and never synchronises."""
    count, experts = logits.shape
    weights = logits.new_empty(count, k)
    chosen = torch.empty(count, k, dtype=torch.int64, device=logits.device)
    kernel: Any = choose_kernel
    if count:
        wide = triton.next_power_of_2(experts)
        rows = max(1, min(16, 1024 // wide))
        with torch.cuda.device_of(logits):
            kernel[(triton.cdiv(count, rows),)](
                logits, weights, chosen, count, experts, logits.stride(0),
                K=k, BK=triton.next_power_of_2(k), BN=rows, BE=wide, NORMALIZED=normalized, num_warps=4,
            )  # fmt: skip
    return weights, chosen
