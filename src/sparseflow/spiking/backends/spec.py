"""What one fused group computes, in words that every backend shares.

A *group* is everything between two layers of spikes::

    x[t] = bias + sum_i conv_i(spikes_i[t]) + sum_j skip_j[t] + sum_k dense_k[t]
    v[t] = alpha * u[t-1] + beta * x[t] + delta             (charge)
    s[t] = 1 if v[t] >= v_threshold else 0                  (fire)
    u[t] = v_reset if s[t] else v[t]                        (hard reset, v_reset is a number)
    u[t] = v[t] - s[t] * v_threshold                        (soft reset, v_reset is None)

BatchNorm in eval mode is already folded into `weight` and `bias`. A residual branch that is itself a
convolution of spikes (the down-sampling 1x1) is one more `SpikeSource`; an identity residual is a skip.

Shapes: T time steps, N images, C channels, H x W pixels. Spikes are [T, N, C, H, W].
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, kw_only=True)
class NeuronSpec:
    """Charge, fire and reset of one layer of neurons (no unit; membrane values share the input's scale).

    IF is alpha=1, beta=1; LIF with decayed input is alpha=1-1/tau, beta=1/tau; without, beta=1.
    `delta` carries `v_reset/tau` when `v_reset` is neither None nor 0.
    """

    alpha: float
    beta: float
    delta: float
    v_threshold: float
    v_reset: float | None

    @property
    def v_rest(self) -> float:
        """The membrane's value after a reset of the network."""
        return 0.0 if self.v_reset is None else self.v_reset


@dataclass(frozen=True, kw_only=True)
class SpikeSource:
    """One convolution of spikes that feeds the group.

    Attributes:
        weight: float32 [C_out, C_in, k, k], k in {1, 3}, BatchNorm folded in.
        stride: 1 or 2, the same in both directions.
        padding: zeros on every side, 0 or 1.
    """

    weight: torch.Tensor
    stride: int = 1
    padding: int = 0

    def out_size(self, size: int) -> int:
        """Output height (or width) for an input height (or width) of `size`."""
        return (size + 2 * self.padding - self.weight.shape[-1]) // self.stride + 1


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """One group: its convolutions, its residuals and its neuron.

    Attributes:
        sources: Convolutions of spikes, summed. May be empty when `dense_inputs` > 0.
        bias: float32 [C_out].
        neuron: The dynamics.
        skips: How many spike tensors [T, N, C_out, H_out, W_out] are added to the neuron's *input*.
        dense_inputs: How many real tensors are added to the neuron's input, each [T, N, C_out, H_out, W_out]
            or, when constant over time, [1, N, C_out, H_out, W_out].
        post_skips: How many spike tensors are added to the neuron's *output* (SEW ADD); the group's
            output is then small integers rather than bits.
    """

    sources: tuple[SpikeSource, ...]
    bias: torch.Tensor
    neuron: NeuronSpec
    skips: int = 0
    dense_inputs: int = 0
    post_skips: int = 0

    def without_weights(self) -> GroupSpec:
        """The same with weights on `meta`: what a prepared group needs to remember of its convolutions."""
        sources = tuple(replace(source, weight=source.weight.to("meta")) for source in self.sources)
        return replace(self, sources=sources)
