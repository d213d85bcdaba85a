"""Mixture of gated experts for many tokens: all experts for each token, with weight 0 for those not selected.

This needs E / k times the arithmetic of the selected experts, but is faster on a GPU if experts are small:
sorting tokens by expert, one product per expert and the final sum are twenty launches of about 100 µs in
total.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

SPARED_FLOPS = 1.5e10
"""Wasted operations that take as long as the twenty launches, at about 150 TFLOP/s."""

MAX_BYTES = 2**28
"""Maximum size of the first product's output."""


TILE = 2048
"""Elements of each operand that a program of the gating kernel keeps in registers."""


@triton.jit
def gated_kernel(
    wide_ptr, chosen_ptr, weights_ptr, out_ptr, E, F,
    K: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    weight = tl.zeros([BE], ACC)
    for k in tl.static_range(K):
        expert = tl.load(chosen_ptr + token * K + k).to(tl.int32)
        weight += tl.where(e == expert, tl.load(weights_ptr + token * K + k).to(ACC), 0.0)
    for first in range(0, F, BF):
        c = first + tl.arange(0, BF)
        inside = (e < E)[:, None] & (c < F)[None, :]
        input_ptr = wide_ptr + (token * E + e[:, None]) * 2 * F + c[None, :]
        gate_values = tl.load(input_ptr, mask=inside, other=0.0).to(ACC)
        up = tl.load(input_ptr + F, mask=inside, other=0.0).to(ACC)
        hidden = gate_values / (1.0 + tl.exp(-gate_values)) * up * weight[:, None]
        # Also discards overflows of experts that were not selected.
        hidden = tl.where((weight != 0.0)[:, None], hidden, 0.0)
        out = out_ptr + (token * E + e[:, None]) * F + c[None, :]
        tl.store(out, hidden.to(out_ptr.dtype.element_ty), mask=inside)


def is_profitable(tokens: int, k: int, gate_up: Tensor) -> bool:
    """Whether dense experts are faster than sorting for this number of tokens."""
    count, double_width, width = gate_up.shape
    flops = 3.0 * tokens * count * double_width * width * (1.0 - k / count)
    return flops <= SPARED_FLOPS and tokens * count * double_width * gate_up.element_size() <= MAX_BYTES


def experts(x: Tensor, expert_ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Apply experts to tokens; see the reference. Not differentiable; never synchronizes.

    The k experts of a token must be distinct.
    """
    (n, d), k, (count, _, f) = x.shape, expert_ids.shape[1], down.shape
    expert_ids, weights = expert_ids.contiguous(), weights.contiguous()
    wide = functional.linear(x, gate_up.reshape(-1, d))
    hidden = x.new_empty(n, count * f)
    kernel: Any = gated_kernel
    if n:
        block_width = min(TILE, triton.next_power_of_2(f))
        experts_per_program = max(1, min(TILE // block_width, triton.next_power_of_2(count)))
        with torch.cuda.device_of(x):
            kernel[(n, triton.cdiv(count, experts_per_program))](
                wide, expert_ids, weights, hidden, count, f, K=k, BE=experts_per_program, BF=block_width,
                ACC=tl.float64 if x.dtype == torch.float64 else tl.float32, num_warps=4,
            )  # fmt: skip
    return functional.linear(hidden, down.permute(1, 0, 2).reshape(d, -1))
