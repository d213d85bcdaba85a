"""Selection of experts; a program selects one expert after another for several tokens.

Replaces a copy, a softmax, a selection and a sort, which are four to six launches.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_EXPERTS = 512
"""Maximum number of experts whose probabilities a program keeps in registers per token."""

MAX_TOP_K = 32


@triton.jit
def choose_kernel(
    logits_ptr, weights_ptr, chosen_ptr, N, E, stride,
    K: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr, NORMALIZED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    e = tl.arange(0, BE)
    inside = (row < N)[:, None] & (e < E)[None, :]
    logits = tl.load(logits_ptr + row[:, None] * stride + e[None, :], mask=inside, other=float("-inf"))
    # Padding rows are zeros, to avoid computing with infinities.
    logits = tl.where((row < N)[:, None], logits.to(tl.float32), 0.0)
    top = tl.max(logits, axis=1)
    odds = tl.exp(logits - top[:, None])
    total = tl.sum(odds, axis=1)
    probs = odds / total[:, None]
    remaining = tl.where((e < E)[None, :], probs, -1.0)
    slots = tl.arange(0, BK)
    values = tl.zeros([BN, BK], tl.float32)
    selected = tl.zeros([BN, BK], tl.int32)
    for k in tl.static_range(K):
        best = tl.max(remaining, axis=1)
        expert = tl.min(tl.where(remaining == best[:, None], e[None, :], BE), axis=1)
        # With NaN no expert matches; clamp to a valid index.
        expert = tl.minimum(expert, E - 1)
        values = tl.where((slots == k)[None, :], best[:, None], values)
        selected = tl.where((slots == k)[None, :], expert[:, None], selected)
        remaining = tl.where(e[None, :] == expert[:, None], -1.0, remaining)
    # Rows with NaN return NaN, like a softmax.
    values = tl.where((total == total)[:, None], values, total[:, None])
    if NORMALIZED:
        values = values / tl.sum(values, axis=1)[:, None]
    out = row[:, None] * K + slots[None, :]
    mask = (row < N)[:, None] & (slots < K)[None, :]
    tl.store(weights_ptr + out, values.to(weights_ptr.dtype.element_ty), mask=mask)
    tl.store(chosen_ptr + out, selected.to(tl.int64), mask=mask)


def fits(logits: Tensor, k: int) -> bool:
    """Whether the kernel supports these logits."""
    return (
        logits.ndim == 2
        and logits.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and 0 < k <= min(MAX_TOP_K, logits.shape[1])
        and logits.shape[1] <= MAX_EXPERTS
        and logits.stride(1) == 1
    )


def top_experts(logits: Tensor, k: int, *, normalized: bool) -> tuple[Tensor, Tensor]:
    """Select experts; see the reference. Not differentiable; never synchronizes."""
    count, experts = logits.shape
    weights = logits.new_empty(count, k)
    expert_ids = torch.empty(count, k, dtype=torch.int64, device=logits.device)
    kernel: Any = choose_kernel
    if count:
        wide = triton.next_power_of_2(experts)
        rows = max(1, min(16, 1024 // wide))
        with torch.cuda.device_of(logits):
            kernel[(triton.cdiv(count, rows),)](
                logits, weights, expert_ids, count, experts, logits.stride(0),
                K=k, BK=triton.next_power_of_2(k), BN=rows, BE=wide, NORMALIZED=normalized, num_warps=4,
            )  # fmt: skip
    return weights, expert_ids
