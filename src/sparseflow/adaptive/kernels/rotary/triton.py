"""Rotary position embedding with one program per token and tensor; replaces ten launches.

Products are rounded to the tensors' dtype before they are added, as in the reference.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

MAX_WIDTH = 8192
"""Maximum elements of half a token's query, limited by registers."""


@triton.jit
def rotate_kernel(
    query_ptr, key_ptr, cosine_ptr, sine_ptr, query_out_ptr, key_out_ptr, T, H, G,
    query_b, query_h, query_t, key_b, key_h, key_t, places_b, places_t,
    D: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    batch, token_index = token // T, token % T
    h = tl.arange(0, BH)[:, None]
    c = tl.arange(0, BD)[None, :]
    half: tl.constexpr = D // 2
    inside = c < half
    offset = batch * places_b + token_index * places_t + c
    cos_low = tl.load(cosine_ptr + offset, mask=inside, other=0.0).to(ACC)
    cos_high = tl.load(cosine_ptr + offset + half, mask=inside, other=0.0).to(ACC)
    sin_low = tl.load(sine_ptr + offset, mask=inside, other=0.0).to(ACC)
    sin_high = tl.load(sine_ptr + offset + half, mask=inside, other=0.0).to(ACC)
    kind = query_out_ptr.dtype.element_ty
    if tl.program_id(1) == 0:
        x_ptr = query_ptr + batch * query_b + token_index * query_t + h * query_h + c
        out_ptr = query_out_ptr + (token * H + h) * D + c
        mask = inside & (h < H)
    else:
        x_ptr = key_ptr + batch * key_b + token_index * key_t + h * key_h + c
        out_ptr = key_out_ptr + (token * G + h) * D + c
        mask = inside & (h < G)
    low = tl.load(x_ptr, mask=mask, other=0.0).to(ACC)
    high = tl.load(x_ptr + half, mask=mask, other=0.0).to(ACC)
    new_low = (low * cos_low).to(kind).to(ACC) + (-high * sin_low).to(kind).to(ACC)
    new_high = (high * cos_high).to(kind).to(ACC) + (low * sin_high).to(kind).to(ACC)
    tl.store(out_ptr, new_low.to(kind), mask=mask)
    tl.store(out_ptr + half, new_high.to(kind), mask=mask)


def fits(query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor) -> bool:
    """Whether the kernel supports these tensors."""
    if not (query.ndim == key.ndim == 4 and cosine.ndim == sine.ndim == 3):
        return False
    batch, heads, tokens, width = query.shape
    padded_heads, half = (
        int(triton.next_power_of_2(size)) for size in (max(heads, key.shape[1]), width // 2)
    )
    return (
        query.dtype in DTYPES
        and query.dtype == key.dtype == cosine.dtype == sine.dtype
        and query.is_cuda == cosine.is_cuda
        and key.shape[0] == batch
        and key.shape[2:] == query.shape[2:]
        and cosine.shape == sine.shape
        and cosine.shape[0] in (1, batch)
        and cosine.shape[1:] == (tokens, width)
        and width % 2 == 0
        and query.stride(3) == key.stride(3) == cosine.stride(2) == sine.stride(2) == 1
        and cosine.stride() == sine.stride()
        and padded_heads * half <= MAX_WIDTH
    )


def rotate(query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys; see the reference. Not differentiable; never synchronizes.

    The heads of a token are contiguous in the results, as in a projection's output.
    """
    batch, heads, tokens, width = query.shape
    key_heads = key.shape[1]
    outputs = [
        torch.empty(batch, tokens, count, width, dtype=query.dtype, device=query.device)
        for count in (heads, key_heads)
    ]
    kernel: Any = rotate_kernel
    if batch * tokens:
        with torch.cuda.device_of(query):
            kernel[(batch * tokens, 2)](
                query, key, cosine, sine, *outputs, tokens, heads, key_heads, *query.stride()[:3],
                *key.stride()[:3], 0 if len(cosine) == 1 else cosine.stride(0), cosine.stride(1),
                D=width, BH=triton.next_power_of_2(max(heads, key_heads)),
                BD=triton.next_power_of_2(width // 2),
                ACC=tl.float64 if query.dtype == torch.float64 else tl.float32, num_warps=4,
            )  # fmt: skip
    return outputs[0].transpose(1, 2), outputs[1].transpose(1, 2)
