"""Arithmetic of one fused group, shared by all backends.

A *group* is everything between two layers of spikes::

    x[t] = bias + sum_i conv_i(spikes_i[t]) + sum_j skip_j[t] + sum_k dense_k[t]
    v[t] = alpha * u[t-1] + beta * x[t] + delta             (charge)
    s[t] = 1 if v[t] >= v_threshold else 0                  (fire)
    u[t] = v_reset if s[t] else v[t]                        (hard reset, v_reset is a number)
    u[t] = v[t] - s[t] * v_subtract                         (soft reset, v_reset is None)

The membrane between two calls is u. With a delayed reset it is v, and the charge of the next step applies the
reset: after a hard reset `u[t-1]` is v_reset where the neuron fired, and a soft reset subtracts `s[t-1] *
v_subtract` after the leak::

    v[t] = alpha * v[t-1] + beta * x[t] + delta - s[t-1] * v_subtract

BatchNorm in eval mode is already folded into `weight` and `bias`. A residual branch that is a convolution of
spikes (the downsampling 1x1) is one more `SpikeSource`; an identity residual is a skip.

Shapes: T time steps, N images, C channels, H x W pixels. Spikes are [T, N, C, H, W].
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, kw_only=True)
class NeuronSpec:
    """Charge, fire and reset of one layer of neurons, in the scale of its input.

    IF is alpha=1, beta=1. LIF is alpha=1-1/tau with beta=1/tau (decayed input) or beta=1.

    Attributes:
        alpha: Factor of the previous membrane.
        beta: Factor of the input.
        delta: Constant term of the charge: `v_reset / tau` if `v_reset` is neither None nor 0.
        v_threshold: Membrane value from which the neuron fires.
        v_reset: Membrane after a spike; None for a soft reset.
        v_subtract: Amount that a soft reset subtracts, 0 for no reset; `v_threshold` if None.
        delays_reset: Whether the next step applies the reset, and the membrane is the value before it.
    """

    alpha: float
    beta: float
    delta: float
    v_threshold: float
    v_reset: float | None
    v_subtract: float | None = None
    delays_reset: bool = False

    @property
    def amount(self) -> float:
        """Amount that a soft reset subtracts."""
        return self.v_threshold if self.v_subtract is None else self.v_subtract

    @property
    def reset_mode(self) -> int:
        """Kind of the reset: 1 if it is soft, plus 2 if it is delayed."""
        return (self.v_reset is None) + 2 * self.delays_reset

    @property
    def reset_value(self) -> float:
        """The number that the reset needs: the amount of a soft one, the membrane after a hard one."""
        return self.amount if self.v_reset is None else self.v_reset

    @property
    def v_rest(self) -> float:
        """Membrane value after the network is reset."""
        return 0.0 if self.v_reset is None else self.v_reset


NEVER_FIRES = NeuronSpec(alpha=0.0, beta=1.0, delta=0.0, v_threshold=math.inf, v_reset=None)
"""Placeholder for the neuron of a group that is only convolved."""


@dataclass(frozen=True)
class MaxPooling:
    """A max pooling of feature maps, the same in both directions.

    Attributes:
        size, stride, padding: Of the windows, in pixels; the padding is at most half the size.
    """

    size: int
    stride: int
    padding: int = 0

    def compute_out_size(self, size: int) -> int:
        """Compute the output height (or width) for an input height (or width) of `size`."""
        return (size + 2 * self.padding - self.size) // self.stride + 1

    def make_output(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor without memory that has the shape of the pooled [..., H, W]."""
        sizes = map(self.compute_out_size, x.shape[-2:])
        return torch.empty((*x.shape[:-2], *sizes), dtype=x.dtype, device="meta")


@dataclass(frozen=True, kw_only=True)
class SpikeSource:
    """One convolution of spikes that feeds a group.

    Attributes:
        weight: float32 [C_out, C_in, k, k], BatchNorm folded in.
        stride: The same in both directions.
        padding: Zeros on each side; at most 1, or k - 1 if that is more.
    """

    weight: torch.Tensor
    stride: int = 1
    padding: int = 0

    def compute_out_size(self, size: int) -> int:
        """Compute the output height (or width) for an input height (or width) of `size`."""
        return (size + 2 * self.padding - self.weight.shape[-1]) // self.stride + 1


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """Convolutions, residuals and neuron of one group.

    Attributes:
        sources: Convolutions of spikes, summed; may be empty if `dense_inputs` > 0.
        bias: float32 [C_out].
        neuron: Neuron dynamics.
        skips: Number of spike tensors [T, N, C_out, H_out, W_out] added to the neuron's input.
        dense_inputs: Number of real tensors added to the neuron's input, each [T, N, C_out, H_out, W_out], or
            [1, N, C_out, H_out, W_out] if constant over time.
        post_skips: Number of spike tensors added to the neuron's output (SEW ADD); the output then holds
            small integers.
        pooling: Max pooling between the convolution, which is then the only input, and the neuron.
        keeps_membrane: Whether anything reads the membrane after the last step.
    """

    sources: tuple[SpikeSource, ...]
    bias: torch.Tensor
    neuron: NeuronSpec
    skips: int = 0
    dense_inputs: int = 0
    post_skips: int = 0
    pooling: MaxPooling | None = None
    keeps_membrane: bool = True

    def without_weights(self) -> GroupSpec:
        """Return the spec with its weights on `meta`, which keeps shapes and frees memory."""
        sources = tuple(replace(source, weight=source.weight.to("meta")) for source in self.sources)
        return replace(self, sources=sources)
