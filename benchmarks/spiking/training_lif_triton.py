"""The Triton kernels of :mod:`training_lif`; imported only where Triton is used.

Each program owns BLOCK neurons and all T time steps. Memory is seen flat: time step t of a tensor starts at
``t * M`` (``t * stride_t`` for x, whose steps may be one and the same), and the neurons' order inside a step
is the same in all tensors, whatever their memory format.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def forward_kernel(
    x_ptr, s_ptr, M, stride_t, decay, theta,
    T: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    if WIDE:
        pid = pid.to(tl.int64)
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    mask = offs < M
    v = tl.zeros((BLOCK,), tl.float32)
    for t in tl.static_range(T):
        x = tl.load(x_ptr + (t * stride_t + offs), mask=mask, other=0.0).to(tl.float32)
        h = v + (x - v) * decay
        fired = h >= theta
        tl.store(s_ptr + (t * M + offs), fired.to(s_ptr.dtype.element_ty), mask=mask)
        v = tl.where(fired, 0.0, h)


@triton.jit
def backward_kernel(
    x_ptr, grad_ptr, rate_grad_ptr, out_ptr, M, stride_t, stride_c, C, decay, theta,
    HAS_RATE: tl.constexpr, T: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # The membrane is cheap to recompute and dear to store. Step t replays the steps before it:
    # T * (T + 1) / 2 updates in registers, with x from the L1 cache.
    pid = tl.program_id(0)
    if WIDE:
        pid = pid.to(tl.int64)
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    mask = offs < M
    extra = tl.zeros((BLOCK,), tl.float32)
    if HAS_RATE:
        extra = tl.load(rate_grad_ptr + (offs // stride_c) % C, mask=mask, other=0.0)
    grad_v = tl.zeros((BLOCK,), tl.float32)
    for back in tl.static_range(T):
        v = tl.zeros((BLOCK,), tl.float32)
        for before in tl.static_range(T - 1 - back):
            x = tl.load(x_ptr + (before * stride_t + offs), mask=mask, other=0.0).to(tl.float32)
            h = v + (x - v) * decay
            v = tl.where(h >= theta, 0.0, h)
        x = tl.load(x_ptr + ((T - 1 - back) * stride_t + offs), mask=mask, other=0.0).to(tl.float32)
        h = v + (x - v) * decay
        u = h - theta
        index = (T - 1 - back) * M + offs
        grad_s = tl.load(grad_ptr + index, mask=mask, other=0.0).to(tl.float32) + extra
        z = 3.141592653589793 * u  # pi / 2 * alpha, alpha = 2
        grad_h = grad_s / (1.0 + z * z) + tl.where(u >= 0.0, 0.0, grad_v)
        tl.store(out_ptr + index, (grad_h * decay).to(out_ptr.dtype.element_ty), mask=mask)
        grad_v = grad_h * (1.0 - decay)
