"""A mixture of gated experts for many tokens, all experts for each: two products, and a kernel between them.

What a token did not choose is multiplied by 0. That is E / k times the arithmetic of the chosen experts, and
on a GPU faster all the same where experts are small: sorting tokens by expert, a product for each expert and
putting the sum together are twenty launches, of about 100 µs, whatever there is to compute.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

SPARED_FLOPS = 1.5e10
"""Operations for nothing that take as long as those twenty launches, at about 150 TFLOP/s."""

MOST_BYTES = 2**28
"""Of what the first product gives."""


TILE = 2048
"""Numbers that a program of the kernel between has in registers, of each kind."""


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
        at = wide_ptr + (token * E + e[:, None]) * 2 * F + c[None, :]
        gate = tl.load(at, mask=inside, other=0.0).to(ACC)
        up = tl.load(at + F, mask=inside, other=0.0).to(ACC)
        hidden = gate / (1.0 + tl.exp(-gate)) * up * weight[:, None]
        # Of an expert that was not chosen, also where it overflows.
        hidden = tl.where((weight != 0.0)[:, None], hidden, 0.0)
        out = out_ptr + (token * E + e[:, None]) * F + c[None, :]
        tl.store(out, hidden.to(out_ptr.dtype.element_ty), mask=inside)


def pays(tokens: int, k: int, gate_up: Tensor) -> bool:
    """Whether so many tokens are better sent through all experts than sorted."""
    count, twice, width = gate_up.shape
    flops = 3.0 * tokens * count * twice * width * (1.0 - k / count)
    return flops <= SPARED_FLOPS and tokens * count * twice * gate_up.element_size() <= MOST_BYTES


def experts(x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Send tokens through their experts; see the reference. Not differentiable, and never synchronises.

    A token's experts are k different ones, as a router chooses them.
    """
    (n, d), k, (count, _, f) = x.shape, chosen.shape[1], down.shape
    chosen, weights = chosen.contiguous(), weights.contiguous()
    wide = functional.linear(x, gate_up.reshape(-1, d))
    hidden = x.new_empty(n, count * f)
    kernel: Any = gated_kernel
    if n:
        deep = min(TILE, triton.next_power_of_2(f))
        many = max(1, min(TILE // deep, triton.next_power_of_2(count)))
        with torch.cuda.device_of(x):
            kernel[(n, triton.cdiv(count, many))](
                wide, chosen, weights, hidden, count, f, K=k, BE=many, BF=deep,
                ACC=tl.float64 if x.dtype == torch.float64 else tl.float32, num_warps=4,
            )  # fmt: skip
    return functional.linear(hidden, down.permute(1, 0, 2).reshape(d, -1))
