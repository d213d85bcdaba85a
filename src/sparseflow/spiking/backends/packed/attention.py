"""Fused attention of spikes: a product of three spike tensors and the neurons that read it.

Spikformer's attention (Zhou et al. 2023) has no softmax, so `(q @ k.T) @ v` is computed as `q @ (k.T @ v)`,
whose inner product is as small as a head. All factors are small integers and all sums stay below the
integers that fp16 represents exactly, so no order of the sums changes the result.
"""

# Kernels are Triton's subset of Python.
# pyright: reportGeneralTypeIssues=false
# ruff: noqa: SIM108
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseflow.errors import InputError
from sparseflow.spiking.backends.attention import AttentionShape
from sparseflow.spiking.backends.packed.neuron import fire, make_rest
from sparseflow.spiking.backends.packed.words import ceil_div, check_launchable, launch, next_power_of_2
from sparseflow.spiking.backends.spec import NeuronSpec

_MIN_DOT_SIZE = 16
_TOKENS = 64
"""Tokens that one program of the kernel processes."""


@triton.jit
def attention_kernel(
    query_ptr, key_ptr, value_ptr, out_ptr, v_in_ptr, v_out_ptr,
    query_t, query_n, query_h, query_l, query_d, key_t, key_n, key_h, key_l, key_d,
    value_t, value_n, value_h, value_l, value_e,
    scale, alpha, delta, threshold, reset_value, tokens, heads, out_t,
    M: tl.constexpr, T: tl.constexpr, D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr,
    P: tl.constexpr, RESET: tl.constexpr, READ_V: tl.constexpr,
):  # fmt: skip
    """Run attention and its neurons over time. Grid (tiles of P tokens, images x heads).

    Args:
        query_ptr: [T, N, H, tokens, D], addressed by its strides, as are the next two.
        key_ptr: [T, N, H, key tokens, D].
        value_ptr: [T, N, H, key tokens, E].
        out_ptr: Spikes, [T, N, tokens, H, E].
        v_in_ptr: Initial membrane, fp32 [N, tokens, H, E]; read with READ_V.
        v_out_ptr: Membrane after the last step.
        query_t, query_n, query_h, query_l, query_d: Strides of the query, in elements; others alike.
        scale: Factor of the product, including the neuron's factor of its input.
        alpha: Factor of the membrane in each step.
        delta: Constant added to the input.
        threshold: Membrane at which a neuron fires.
        reset_value, RESET: As `reset_value` and `reset_mode` of `NeuronSpec`.
        tokens: Tokens of the query.
        heads: H.
        out_t: Elements from one time step of the output to the next.
        M: Tokens of key and value.
        DP: D, padded to a power of two that `tl.dot` takes.
        EP: E, padded alike.
    """
    n = (tl.program_id(1) // heads).to(tl.int64)
    h = tl.program_id(1) % heads
    token = tl.program_id(0) * P + tl.arange(0, P)
    d = tl.arange(0, DP)
    e = tl.arange(0, EP)
    key = tl.arange(0, P)
    real = (token < tokens)[:, None] & (e < E)[None, :]
    index = ((n * tokens + token) * heads + h)[:, None] * E + e[None, :]
    if READ_V:
        v = tl.load(v_in_ptr + index, mask=real, other=0.0)
    else:
        v = make_rest([P, EP], reset_value, RESET)
    queries = query_ptr + n * query_n + h * query_h
    keys = key_ptr + n * key_n + h * key_h
    values = value_ptr + n * value_n + h * value_h
    for t in range(T):
        summary = tl.zeros([DP, EP], tl.float32)
        for start in range(0, M, P):
            inside = start + key < M
            k = tl.load(
                keys + (start + key)[None, :] * key_l + d[:, None] * key_d,
                mask=inside[None, :] & (d < D)[:, None], other=0.0,
            )  # fmt: skip
            x = tl.load(
                values + (start + key)[:, None] * value_l + e[None, :] * value_e,
                mask=inside[:, None] & (e < E)[None, :], other=0.0,
            )  # fmt: skip
            summary += tl.dot(k.to(tl.float16), x.to(tl.float16))
        q = tl.load(
            queries + token[:, None] * query_l + d[None, :] * query_d,
            mask=(token < tokens)[:, None] & (d < D)[None, :], other=0.0,
        )  # fmt: skip
        product = tl.dot(q.to(tl.float16), summary.to(tl.float16))
        v, fired = fire(v, product * scale + delta, alpha, threshold, reset_value, RESET)
        tl.store(out_ptr + t * out_t + index, fired.to(out_ptr.dtype.element_ty), mask=real)
        queries += query_t
        keys += key_t
        values += value_t
    tl.store(v_out_ptr + index, v, mask=real)


def run_attention(
    first: Tensor,
    second: Tensor,
    third: Tensor,
    spec: NeuronSpec,
    *,
    rows_are_tokens: bool,
    scale: float = 1.0,
    v: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Run neurons over time on `scale * first @ second @ third`, in one kernel.

    Args:
        first, second, third: Spikes or small integers, [T, N, H, rows, columns] of any strides.
        spec: The neuron.
        rows_are_tokens: How to read the product, see `AttentionShape`.
        scale: Factor of the product.
        v: Initial membrane, contiguous fp32 [N, tokens, H, channels]; by default the rest value.
        dtype: dtype of the spikes.

    Returns:
        The spikes, contiguous [T, N, tokens, H, channels], and the membrane after the last step, fp32
        [N, tokens, H, channels]. `AttentionShape.to_product` converts both to the order of the product.

    Raises:
        InputError: The shapes are not supported.
        DeviceError: The tensors are not on a GPU.
    """
    check_launchable(first, second, third)
    shape = AttentionShape.from_factors(first, second, third, rows_are_tokens=rows_are_tokens)
    reason = shape.get_unsupported_reason((1, 1, 1))
    if reason is not None:
        raise InputError(f"the attention kernel does not support these factors: {reason}")
    query, key, value = (first, second.mT, third) if shape.rows_are_tokens else (third.mT, second, first.mT)
    size = (shape.images, shape.tokens, shape.heads, shape.value_channels)
    out = torch.empty((shape.steps, *size), dtype=dtype, device=first.device)
    v_out = torch.empty(size, dtype=torch.float32, device=first.device)
    launch(
        attention_kernel, (ceil_div(shape.tokens, _TOKENS), shape.images * shape.heads),
        query, key, value, out, v_out if v is None else v, v_out,
        *query.stride(), *key.stride(), *value.stride(),
        scale * spec.beta, spec.alpha, spec.delta, spec.v_threshold, spec.reset_value,
        shape.tokens, shape.heads, out.stride(0),
        M=shape.key_tokens, T=shape.steps, D=shape.channels, E=shape.value_channels,
        DP=_pad(shape.channels), EP=_pad(shape.value_channels), P=_TOKENS,
        RESET=spec.reset_mode, READ_V=v is not None, num_warps=4 if shape.value_channels <= 32 else 8,
    )  # fmt: skip
    return out, v_out


def _pad(size: int) -> int:
    """Return the next power of two that `tl.dot` takes."""
    return max(_MIN_DOT_SIZE, next_power_of_2(size))
