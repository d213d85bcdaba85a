"""A LIF neuron for training: all time steps in one pass forward and one pass backward.

Notation, for one neuron over ``t = 0 … T-1`` with time constant ``tau`` and threshold ``theta``::

    h[t] = v[t-1] + (x[t] - v[t-1]) / tau        v[-1] = 0
    s[t] = 1 if h[t] >= theta else 0
    v[t] = h[t] * (1 - s[t])                     hard reset to 0, no gradient through s here

The gradient of s uses the ATan surrogate ``g(u) = (a/2) / (1 + (pi/2 * a * u)^2)`` with ``u = h - theta``
and ``a = 2``. This equals spikingjelly's ``LIFNode(tau, decay_input=True, v_reset=0, detach_reset=True,
surrogate_function=ATan())``. Two implementations: plain torch (`lif_torch`, the reference) and Triton, which
reads x and writes s once and recomputes h in the backward pass. Both also return each channel's firing rate
with its gradient, so that a penalty on firing costs no pass over memory of its own.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

Backend = Literal["torch", "triton"]
ALPHA = 2.0


class _Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u: Tensor) -> Tensor:
        ctx.save_for_backward(u)
        return (u >= 0).to(u.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (u,) = ctx.saved_tensors
        return grads[0] * (ALPHA / 2) / (1 + (math.pi / 2 * ALPHA * u).square())


def lif_torch(x: Tensor, tau: float, v_threshold: float) -> tuple[Tensor, Tensor]:
    """The reference: a loop over time, in float32 inside.

    Args:
        x: Input current ``[T, N, C, …]``.
        tau: Membrane time constant.
        v_threshold: Firing threshold.

    Returns:
        Spikes like ``x``, and the firing rate of each channel, ``float32 [C]``.
    """
    v = torch.zeros_like(x[0], dtype=torch.float32)
    spikes = []
    for step in x:
        h = v + (step.float() - v) / tau
        s = _Spike.apply(h - v_threshold)
        v = h * (1 - s.detach())
        spikes.append(s)
    out = torch.stack(spikes)
    rate = out.mean(dim=[d for d in range(out.dim()) if d != 2])
    return out.to(x.dtype), rate


def _dense(x: Tensor) -> bool:
    """Whether ``x`` covers one gapless stretch of memory, in any order of its dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(x.stride(), x.shape, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True


_BLOCK = 1024
_INT32_MAX = 2**31 - 1


class _FusedLIF(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, tau: float, v_threshold: float, with_rate: bool
    ) -> tuple[Tensor, Tensor]:
        import training_lif_triton

        elements = x[0].numel()
        if not _dense(x[0]) or x.stride(0) not in (0, elements):
            x = x.contiguous()
        ctx.save_for_backward(x)
        ctx.constants = (1.0 / tau, v_threshold, with_rate)
        spikes = x.new_empty_strided(x.shape, (elements, *x.stride()[1:]))
        kernel: Any = training_lif_triton.forward_kernel
        kernel[(-(-elements // _BLOCK),)](
            x, spikes, elements, x.stride(0), 1.0 / tau, v_threshold,
            T=x.shape[0], WIDE=x.numel() > _INT32_MAX, BLOCK=_BLOCK,
        )  # fmt: skip
        if not with_rate:
            return spikes, x.new_zeros((x.shape[2],), dtype=torch.float32)
        dims = [d for d in range(x.dim()) if d != 2]
        return spikes, spikes.sum(dim=dims, dtype=torch.float32) / (x.numel() / x.shape[2])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        import training_lif_triton

        (x,) = ctx.saved_tensors
        decay, v_threshold, with_rate = ctx.constants
        elements, channels = x[0].numel(), x.shape[2]
        strides = (elements, *x.stride()[1:])
        grad, rate_grad = grads
        if grad.stride() != strides or grad.dtype != x.dtype:
            grad = x.new_empty_strided(x.shape, strides).copy_(grad)
        out = x.new_empty_strided(x.shape, strides)
        kernel: Any = training_lif_triton.backward_kernel
        kernel[(-(-elements // _BLOCK),)](
            x, grad, rate_grad / (x.numel() / channels), out,
            elements, x.stride(0), max(1, x.stride(2)), channels, decay, v_threshold,
            HAS_RATE=with_rate, T=x.shape[0], WIDE=x.numel() > _INT32_MAX, BLOCK=_BLOCK,
        )  # fmt: skip
        return out, None, None, None


class TrainingLIF(nn.Module):
    """Drop-in for a multi-step ``LIFNode`` while training; keeps no state between calls.

    Attributes:
        rate: Firing rate of each channel at the last call, ``float32 [C]`` with gradient; None where
            ``record_rate`` is off.
    """

    def __init__(
        self,
        *,
        tau: float = 2.0,
        v_threshold: float = 1.0,
        backend: Backend = "torch",
        record_rate: bool = False,
    ) -> None:
        super().__init__()
        self.tau, self.v_threshold, self.backend, self.record_rate = tau, v_threshold, backend, record_rate
        self.rate: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.backend == "triton":
            spikes, rate = _FusedLIF.apply(x, self.tau, self.v_threshold, self.record_rate)
        else:
            spikes, rate = lif_torch(x, self.tau, self.v_threshold)
        self.rate = rate if self.record_rate else None
        return spikes


def disagreement(device: torch.device) -> float:
    """Largest difference between the Triton and the torch neuron on ``device``: spikes, rate and gradient.

    float32, odd shapes, a channels-last, a contiguous and a time-expanded input; an exact match of the
    spikes is not asked for where the membrane is within rounding of the threshold, so inputs are drawn on a
    grid that never comes near it.
    """
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for layout in ("contiguous", "channels_last", "expanded"):
        # Multiples of 1/4 shifted by 1/64: after T = 4 halvings the membrane is exact in float32, and its
        # fraction can never land on the threshold.
        base = torch.randint(-8, 14, (4, 3, 5, 7, 3), generator=generator) / 4 + 1 / 64
        x = base.to(device)
        if layout == "channels_last":
            x = x.flatten(0, 1).to(memory_format=torch.channels_last).view(4, 3, 5, 7, 3)
        if layout == "expanded":
            x = x[0].expand(4, -1, -1, -1, -1)
        weight = torch.randn(x.shape, generator=generator).to(device)
        channel_weight = torch.randn(5, generator=generator).to(device)
        results = []
        for backend in ("torch", "triton"):
            leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
            current = leaf if layout != "expanded" else leaf[0].expand(4, -1, -1, -1, -1)
            if backend == "triton":
                spikes, rate = _FusedLIF.apply(current, 2.0, 1.0, True)
            else:
                spikes, rate = lif_torch(current, 2.0, 1.0)
            ((spikes * weight).sum() + 50 * (rate * channel_weight).sum()).backward()
            assert leaf.grad is not None
            results.append((spikes.detach(), rate.detach(), leaf.grad))
        for fused, spikingjelly in zip(*results, strict=True):
            worst = max(worst, (fused - spikingjelly).abs().max().item())
    return worst
