"""Shared cases of the packed kernels' tests: device, exact numbers, neurons."""

from __future__ import annotations

import torch

from sparseflow.spiking.backends.packed.format import PackedSpikes, add_activity, pack
from sparseflow.spiking.backends.spec import SpikeSource

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""On a GPU the kernels are compiled, elsewhere Triton interprets them (see conftest.py)."""


def seeded(seed: int) -> torch.Generator:
    """A generator on the CPU, so that every device sees the same numbers."""
    return torch.Generator().manual_seed(seed)


def grid(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Multiples of 1/64 in [-0.5, 0.5]: exact in fp16, and sums of thousands of them exact in fp32."""
    return (torch.randint(-32, 33, shape, generator=generator).float() / 64).to(DEVICE)


def spikes(generator: torch.Generator, *shape: int, rate: float = 0.2) -> torch.Tensor:
    """Zeros and ones."""
    return (torch.rand(shape, generator=generator) < rate).float().to(DEVICE)


def source(generator: torch.Generator, c_in: int, c_out: int, k: int, stride: int = 1) -> SpikeSource:
    """A convolution with weights on the grid."""
    return SpikeSource(weight=grid(generator, c_out, c_in, k, k), stride=stride, padding=k // 2)


def rows(x: torch.Tensor) -> torch.Tensor:
    """[T, N, C, H, W] as contiguous [T, N, H, W, C]."""
    return x.permute(0, 1, 3, 4, 2).contiguous()


def assert_packed(actual: PackedSpikes, expected: torch.Tensor) -> None:
    """Every bit, border and padding included."""
    assert actual.shape == tuple(expected.shape)
    assert torch.equal(actual.data, pack(expected).data)


def assert_activity(actual: PackedSpikes, tile: int) -> None:
    """The activity words are exactly what the spikes say."""
    expected = add_activity(actual, tile).activity
    assert expected is not None and actual.activity is not None and actual.tile == tile
    assert torch.equal(actual.activity, expected)
