"""What sums of two-part weights are worth on tensor cores that truncate: a model of the hardware, in fp64.

One step of a tensor core adds 16 products to an fp32 accumulator. The model: all 17 numbers are cut off two
bits below the last bit of the largest one, added exactly, and the sum is cut off to fp32. It gave, digit for
digit, the error that an H200 made where all parts of all units were one chain.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the packed kernels need triton")

from sparseflow.spiking.backends.packed.format import BLOCK, K_CHANNEL, K_EXPONENT
from sparseflow.spiking.backends.packed.hopper.group import pack_hopper_weights
from sparseflow.spiking.backends.packed.hopper.variants import MAX_SPLIT_UNITS, list_hopper_variants
from sparseflow.spiking.backends.packed.triton_fallback import pack_fallback_weights
from sparseflow.spiking.backends.spec import GroupSpec, SpikeSource
from tests.spiking.backends.neurons import IF
from tests.spiking.backends.packed.cases import seeded

STEP = 16
FP32_LIKE = 3e-7
"""Relative error; a plain fp32 sum over the same numbers has 1e-7 to 2e-7."""


def _cut(x: Tensor, exponent: Tensor, bits: int) -> Tensor:
    """Multiples of 2^(exponent - bits), toward zero."""
    grain = torch.exp2((exponent - bits).double())
    return torch.trunc(x / grain) * grain


def _exponent(x: Tensor) -> Tensor:
    return torch.frexp(x.abs().clamp_min(2.0**-140)).exponent - 1


def truncating_sum(total: Tensor, spikes: Tensor, weights: Tensor) -> Tensor:
    """`total` [P, C] plus `spikes` [P, K] times `weights` [K, C], as a tensor core adds it up (all fp64)."""
    for k in range(0, len(weights), STEP):
        products = spikes[:, None, k : k + STEP] * weights.T[None, :, k : k + STEP]
        terms = torch.cat([total[..., None], products], -1)
        actual = _cut(terms, _exponent(terms.abs().amax(-1, keepdim=True)), 25).sum(-1)
        total = _cut(actual, _exponent(actual), 23)
    return total


def chained_sum(spikes: Tensor, parts: Tensor, chain: int) -> Tensor:
    """What the kernels compute: `chain` units a truncating sum, small parts first; fp32 adds these.

    Args:
        spikes: fp64 [P, units, 64].
        parts: fp64 [units, parts, 64, C], the largest part first.
        chain: Units of a chain.
    """
    total = torch.zeros(len(spikes), parts.shape[-1])
    for first in range(0, len(parts), chain):
        units = range(first, min(first + chain, len(parts)))
        fresh = torch.zeros(total.shape, dtype=torch.float64)
        for part in reversed(range(parts.shape[1])):
            for unit in units:
                fresh = truncating_sum(fresh, spikes[:, unit], parts[unit, part])
        total = total + fresh.float()
    return total.double()


def _case(c_in: int, k: int = 3, uneven: bool = False) -> tuple[GroupSpec, Tensor, Tensor]:
    """A group, random spikes fp64 [P, blocks, 64, taps] and the exact sums [P, C]."""
    g = seeded(c_in)
    weight = torch.randn(64, c_in, k, k, generator=g) * 0.05
    if uneven:
        weight *= torch.exp(2 * torch.randn(weight.shape, generator=g))
    spec = GroupSpec(sources=(SpikeSource(weight=weight, padding=k // 2),), bias=torch.zeros(64), neuron=IF)
    spikes = (torch.rand(8, c_in // BLOCK, BLOCK, k * k, generator=g) < 0.2).double()
    exact = spikes.flatten(1) @ weight.double().flatten(1).T
    return spec, spikes, exact


def _gluon(spec: GroupSpec, spikes: Tensor) -> tuple[Tensor, Tensor]:
    """Spikes and weight parts in the Hopper kernel's order along K, and with its powers."""
    laid, scale = pack_hopper_weights(spec, 2)
    value = torch.tensor([2.0**e for e in K_EXPONENT], dtype=torch.float64) * scale
    parts = laid.double().view(len(laid), -1, 2, BLOCK) * value
    order = torch.tensor(K_CHANNEL)
    return spikes[:, :, order].transpose(2, 3).flatten(1, 2), parts.permute(1, 2, 3, 0)


def _run_fallback(spec: GroupSpec, spikes: Tensor) -> tuple[Tensor, Tensor]:
    laid, scale = pack_fallback_weights(spec, 2)
    parts = laid.double().view(-1, 2, BLOCK, laid.shape[1]) * (2 * scale)
    return spikes.transpose(2, 3).flatten(1, 2), parts


def _error(actual: Tensor, exact: Tensor) -> float:
    return ((actual - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("c_in", [64, 128, 256, 512])
def test_short_chains_are_as_accurate_as_fp32(c_in: int) -> None:
    spec, spikes, exact = _case(c_in)
    for chain in range(1, MAX_SPLIT_UNITS + 1):
        assert _error(chained_sum(*_gluon(spec, spikes), chain), exact) < FP32_LIKE
    assert _error(chained_sum(*_run_fallback(spec, spikes), 1), exact) < FP32_LIKE


def test_one_long_chain_of_parts_is_inaccurate() -> None:
    """Long chains of truncating sums are inaccurate, so the kernels avoid them."""
    spec, spikes, exact = _case(256)
    fed, parts = _run_fallback(spec, spikes)
    total = torch.zeros_like(exact)
    for unit in range(len(parts)):
        for part in (0, 1):
            total = truncating_sum(total, fed[:, unit], parts[unit, part])
    assert _error(total, exact) > 2e-6


@pytest.mark.parametrize(("c_in", "k"), [(64, 3), (256, 3), (1024, 1)])
def test_uneven_weights_need_short_chains(c_in: int, k: int) -> None:
    spec, spikes, _ = _case(c_in, k, uneven=True)
    fed, parts = _gluon(spec, spikes)
    exact = fed.flatten(1) @ parts.sum(1).flatten(0, 1)  # of the weights as they are kept
    short, selected, long = (
        _error(chained_sum(fed, parts, chain), exact) for chain in (1, MAX_SPLIT_UNITS, 9)
    )
    assert short < FP32_LIKE and selected < FP32_LIKE and long > 2 * selected, (short, selected, long)


@pytest.mark.parametrize("steps", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(("c_in", "k"), [(64, 3), (512, 3), (64, 1), (2048, 1)])
def test_every_variant_of_two_parts_has_short_chains(steps: int, c_in: int, k: int) -> None:
    weight = torch.ones(128, c_in, k, k)
    spec = GroupSpec(sources=(SpikeSource(weight=weight, padding=k // 2),), bias=torch.zeros(128), neuron=IF)
    actual = list_hopper_variants(spec, T=steps, N=32, H=14, W=14, parts=2)
    assert all(v.ub <= MAX_SPLIT_UNITS and v.tc // v.pair * v.bn <= 128 for v in actual)
    assert actual or steps == 1  # one time step at a time pays only where all weights stay in shared memory
