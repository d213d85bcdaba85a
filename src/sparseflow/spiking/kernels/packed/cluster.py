"""Gather rarely firing channels into the same blocks of 64, so that whole blocks fall silent.

An exact change: the producer's output channels are permuted (weights, bias, and with them BatchNorm), and
every consumer's input channels by the same permutation. Layers whose spikes or currents are added to each
other need one permutation together: cluster by the largest of their rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sparseflow.errors import InputError
from sparseflow.spiking.kernels.spec import GroupSpec, SpikeSource


def cluster_channels(rates: Tensor) -> Tensor:
    """An order of channels, the most active first, in which blocks are silent as often as can be.

    A block is silent where none of its channels fires. If channels fire independently, no other order has
    more silent blocks: the sum over blocks of the products of (1 - rate) is largest when equals sit together.

    Args:
        rates: How often each channel fires, [C]: a fraction of pixels and time steps, or better of the tiles
            in which it fires at all.

    Returns:
        int64 [C], a permutation: place i gets channel `order[i]`. Channels of equal rates keep their order.

    Raises:
        InputError: `rates` is not one-dimensional, or holds NaN.
    """
    if rates.dim() != 1 or rates.isnan().any():
        raise InputError(f"rates must be [C] without NaN, got {rates.dtype} {tuple(rates.shape)}")
    return torch.argsort(rates, descending=True, stable=True)


def inverse_order(order: Tensor) -> Tensor:
    """The permutation that undoes `order`."""
    return torch.argsort(order)


def permute_group(
    spec: GroupSpec, *, outputs: Tensor | None = None, inputs: Sequence[Tensor | None] = ()
) -> GroupSpec:
    """A group that reads and writes permuted channels.

    Args:
        spec: The group. Its skips and dense inputs must come in the order of `outputs`.
        outputs: Order of its output channels; None leaves them.
        inputs: Order of every source's input channels, None for those that stay; empty leaves all.

    Raises:
        InputError: An order is not a permutation of the channels it is for, or `inputs` has not one for
            every source.
    """
    if inputs and len(inputs) != len(spec.sources):
        raise InputError(f"{len(inputs)} orders of inputs for {len(spec.sources)} sources")
    sources = []
    for i, source in enumerate(spec.sources):
        weight = source.weight
        if outputs is not None:
            weight = weight[_checked(outputs, weight.shape[0])]
        order = inputs[i] if inputs else None
        if order is not None:
            weight = weight[:, _checked(order, weight.shape[1])]
        sources.append(SpikeSource(weight=weight, stride=source.stride, padding=source.padding))
    bias = spec.bias if outputs is None else spec.bias[_checked(outputs, spec.bias.shape[0])]
    return replace(spec, sources=tuple(sources), bias=bias)


def _checked(order: Tensor, channels: int) -> Tensor:
    if order.shape != (channels,) or not torch.equal(order.sort().values.cpu(), torch.arange(channels)):
        raise InputError(f"not a permutation of {channels} channels: {order.dtype} {tuple(order.shape)}")
    return order
