"""Sparse convolutions against dense convolutions on grids with zeros at inactive sites."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv2d

from sparseflow.errors import InputError
from sparseflow.tuning.model.net import sparse_conv
from sparseflow.tuning.model.net.sparse_conv import (
    ActiveSites,
    SiteBatch,
    StridedConv2d,
    SubmanifoldConv2d,
    pool,
)

GRIDS = [[(1, 1)], [(1, 9)], [(9, 1)], [(7, 11)], [(8, 8), (5, 13)], [(6, 4), (1, 7), (11, 2)]]
DENSITIES = [0.0, 0.15, 0.6, 1.0]


def batch(grids: list[tuple[int, int]], density: float, channels: int) -> tuple[SiteBatch, Tensor, Tensor]:
    """Sites, their features, and the mask of sites, shape (items, rows, columns)."""
    generator = torch.Generator().manual_seed(sum(map(sum, grids)))
    masks = [torch.rand(grid, generator=generator) < density for grid in grids]
    sites = SiteBatch(
        [ActiveSites.from_coords(mask.nonzero(), grid) for mask, grid in zip(masks, grids, strict=True)]
    )
    full = torch.zeros(len(grids), *map(max, *grids, (0, 0)), dtype=torch.bool)
    for item, (mask, grid) in enumerate(zip(masks, grids, strict=True)):
        full[item, : grid[0], : grid[1]] = mask
    features = torch.randn(sum(sites.lengths), channels, generator=generator, dtype=torch.float64)
    return sites, features.requires_grad_(), full


def dense(features: Tensor, mask: Tensor) -> Tensor:
    """Dense features, shape (items, channels, rows, columns)."""
    grid = features.new_zeros(*mask.shape, features.shape[1])
    return grid.index_put((mask,), features).permute(0, 3, 1, 2)


def dense_weight(conv: SubmanifoldConv2d | StridedConv2d) -> Tensor:
    return conv.weight.view(conv.kernel, conv.kernel, *conv.weight.shape[1:]).permute(3, 2, 0, 1)


def same_gradients(result: Tensor, expected: Tensor, parent: list[Tensor]) -> None:
    torch.testing.assert_close(result, expected)
    seed = torch.randn(result.shape, generator=torch.Generator().manual_seed(1), dtype=result.dtype)
    pairs = zip(
        torch.autograd.grad(result, parent, seed), torch.autograd.grad(expected, parent, seed), strict=True
    )
    for item, other in pairs:
        torch.testing.assert_close(item, other)


@pytest.mark.parametrize("grids", GRIDS, ids=str)
@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize(("kernel", "dilation"), [(1, 1), (3, 1), (3, 2), (3, 5), (5, 1)])
def test_submanifold_matches_dense_convolution(
    grids: list[tuple[int, int]], density: float, kernel: int, dilation: int
) -> None:
    sites, features, mask = batch(grids, density, 3)
    conv = SubmanifoldConv2d(3, 4, kernel, dilation).double()
    pad = dilation * (kernel // 2)
    wide = conv2d(dense(features, mask), dense_weight(conv), conv.bias, padding=pad, dilation=dilation)
    expected = wide.permute(0, 2, 3, 1)[mask]
    same_gradients(conv(features, sites), expected, [features, conv.weight, conv.bias])


@pytest.mark.parametrize("grids", GRIDS, ids=str)
@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize("kernel", [1, 3, 5])
def test_strided_matches_dense_convolution(grids: list[tuple[int, int]], density: float, kernel: int) -> None:
    sites, features, mask = batch(grids, density, 3)
    conv = StridedConv2d(3, 4, kernel).double()
    result, below = conv(features, sites)
    halves = torch.nn.functional.max_pool2d(mask[:, None].float(), 2, ceil_mode=True)[:, 0] > 0
    for item, half, grid in zip(below.items, halves, grids, strict=True):
        assert item.grid == tuple(-(-extent // 2) for extent in grid)
        assert item.rows.tolist() == half.nonzero()[:, 0].tolist()
        assert item.cols.tolist() == half.nonzero()[:, 1].tolist()
    wide = conv2d(dense(features, mask), dense_weight(conv), conv.bias, stride=2, padding=kernel // 2)
    expected = wide.permute(0, 2, 3, 1)[halves]
    same_gradients(result, expected, [features, conv.weight, conv.bias])


def test_gradients_match_finite_differences() -> None:
    sites, features, _ = batch([(6, 5), (4, 7)], 0.4, 2)
    same, halving = SubmanifoldConv2d(2, 3, 3, 2).double(), StridedConv2d(3, 2).double()

    def chain(value: Tensor) -> Tensor:
        return pool(*halving(same(value, sites), sites))

    assert torch.autograd.gradcheck(chain, (features,))


def test_kernel_maps_are_cached() -> None:
    sites = batch([(6, 5)], 0.4, 2)[0].items[0]
    assert sites.neighbor_map(3, 2) is sites.neighbor_map(3, 2)
    assert sites.neighbor_map(3, 2) is not sites.neighbor_map(3, 1)
    assert sites.strided_map(3) is sites.strided_map(3)
    assert sites.downsampled is sites.downsampled


def test_downsampling_ends_at_one_site() -> None:
    sites = batch([(9, 6), (3, 3)], 1.0, 1)[0]
    for _ in range(6):
        sites = sites.downsampled
    assert [item.grid for item in sites.items] == [(1, 1), (1, 1)]
    assert [item.keys.tolist() for item in sites.items] == [[0], [0]]


def test_pool_mean_and_maximum() -> None:
    coords = [torch.tensor([[0, 0], [2, 1]]), torch.empty(0, 2, dtype=torch.int64), torch.tensor([[1, 1]])]
    sites = SiteBatch([ActiveSites.from_coords(coord, (3, 2)) for coord in coords])
    result = pool(torch.tensor([[1.0, -4.0], [3.0, -2.0], [-5.0, 7.0]]), sites)
    assert result.tolist() == [[2.0, -3.0, 3.0, -2.0], [0.0] * 4, [-5.0, 7.0, -5.0, 7.0]]


def test_empty_batch_raises() -> None:
    with pytest.raises(InputError):
        SiteBatch([])


def test_chunked_gather_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    sites, features, _ = batch([(8, 8), (5, 13)], 0.6, 3)
    conv = SubmanifoldConv2d(3, 4, 3, 1).double()
    full = conv(features, sites)
    expected = torch.autograd.grad(full.square().sum(), [features, conv.weight])
    monkeypatch.setitem(sparse_conv._GATHER_NUMBERS, "cpu", 200)
    parts = conv(features, sites)
    torch.testing.assert_close(parts, full)
    result = torch.autograd.grad(parts.square().sum(), [features, conv.weight])
    for item, other in zip(result, expected, strict=True):
        torch.testing.assert_close(item, other)


def test_even_kernel_raises() -> None:
    with pytest.raises(InputError):
        StridedConv2d(1, 1, 2)
    with pytest.raises(InputError):
        SubmanifoldConv2d(1, 1, 3, 0)


@pytest.mark.gpu
def test_gpu_matches_and_is_deterministic() -> None:
    sites, features, _ = batch([(40, 50), (60, 30)], 0.4, 8)
    conv, halving = SubmanifoldConv2d(8, 16, 3, 2), StridedConv2d(16, 16)
    results = []
    for device in ("cpu", "cuda", "cuda"):
        present = SiteBatch([ActiveSites(item.keys.to(device), item.grid) for item in sites.items])
        value = features.detach().float().to(device).requires_grad_()
        conv.to(device)
        halving.to(device)
        result = pool(*halving(conv(value, present), present))
        parent = torch.autograd.grad(result.square().sum(), [value, conv.weight, halving.weight])
        results.append([tensor.detach().cpu() for tensor in (result, *parent)])
    for cpu, gpu, repeated in zip(*results, strict=True):
        torch.testing.assert_close(gpu, cpu, rtol=1e-3, atol=1e-4)
        assert torch.equal(gpu, repeated)
