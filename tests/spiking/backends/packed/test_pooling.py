"""Pooling on packed spikes against plain torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the packed kernels need triton")

from sparseflow.errors import InputError
from sparseflow.spiking.backends.packed.format import pack, unpack
from sparseflow.spiking.backends.packed.pooling import (
    max_pool,
    run_max_pool_reference,
    run_spatial_mean_reference,
    spatial_mean,
)
from tests.spiking.backends.packed.cases import DEVICE, assert_activity, seeded, spikes

pytestmark = pytest.mark.usefixtures("poisoned_empty")


@pytest.mark.parametrize(
    "window", [(3, 2, 1), (2, 2, 0), (3, 1, 1), (3, 3, 0), (2, 1, 1), (5, 2, 1), (1, 2, 0)]
)
@pytest.mark.parametrize("size", [(8, 8), (7, 9), (5, 6)])
def test_max_pool(window: tuple[int, int, int], size: tuple[int, int]) -> None:
    packed = pack(spikes(seeded(1), 2, 2, 70, *size, rate=0.05))
    actual, expected = max_pool(packed, *window), run_max_pool_reference(packed, *window)
    assert actual.shape == expected.shape
    assert torch.equal(actual.data, expected.data)


@pytest.mark.parametrize("shape", [(4, 3, 70, 7, 9), (32, 2, 64, 6, 5), (3, 2, 600, 7, 7), (1, 1, 200, 2, 2)])
@pytest.mark.parametrize("tile", [8, 16])
def test_max_pool_marks_what_fires(shape: tuple[int, ...], tile: int) -> None:
    packed = pack(spikes(seeded(4), *shape, rate=0.001))
    actual = max_pool(packed, 3, 2, 1, tile=tile)
    assert torch.equal(actual.data, run_max_pool_reference(packed, 3, 2, 1).data)
    assert_activity(actual, tile)
    with pytest.raises(InputError, match="power of two"):
        max_pool(packed, 3, 2, 1, tile=12)


@pytest.mark.parametrize("stride", [1, 2])
def test_nothing_leaks_from_image_to_image(stride: int) -> None:
    x = torch.zeros(2, 3, 64, 5, 3, device=DEVICE)
    x[0, 1] = 1
    actual = unpack(max_pool(pack(x), 3, stride, 1))
    assert actual[0, 1].all() and actual.sum() == actual[0, 1].sum()
    mean = spatial_mean(pack(x))
    assert torch.equal(mean, x.mean((-2, -1)))


def test_max_pool_steps_by_its_window() -> None:
    packed = pack(spikes(seeded(2), 1, 1, 64, 6, 6, rate=0.1))
    assert torch.equal(max_pool(packed, 2).data, run_max_pool_reference(packed, 2, 2, 0).data)


@pytest.mark.parametrize("window", [(3, 2, 2), (1, 1, 1), (7, 1, 0)])
def test_max_pool_refuses_windows(window: tuple[int, int, int]) -> None:
    with pytest.raises(InputError, match="cannot pool 6x4"):
        max_pool(pack(torch.zeros(1, 1, 3, 6, 4, device=DEVICE)), *window)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 1), (2, 3, 200, 7, 7), (3, 1, 64, 4, 9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_spatial_mean(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for rate in (0.0, 0.3, 1.0):
        packed = pack(spikes(seeded(3), *shape, rate=rate))
        actual = spatial_mean(packed, dtype)
        assert actual.dtype == dtype and actual.shape == shape[:3]
        assert torch.equal(actual, run_spatial_mean_reference(packed, dtype))
