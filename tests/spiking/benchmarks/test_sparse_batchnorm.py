"""The sparse BatchNorm against plain torch in float64, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the sparse BatchNorm kernel needs triton")

from benchmarks.spiking.sparse_batchnorm import BLOCK, run_batchnorm2d_reference, sparse_batchnorm2d
from sparseflow.errors import InputError

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float16: 1e-3, torch.float32: 1e-6}
"""Largest error, as a fraction of the largest output."""

pytestmark = [
    pytest.mark.usefixtures("poisoned_empty"),
    # Triton's interpreter turns its one-element arrays into loop bounds this way; numpy below 2.4 allows it.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]


def _parameters(channels: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(channels)
    mean, weight, bias = torch.randn((3, channels), generator=g).to(DEVICE)
    return mean, (torch.rand(channels, generator=g) + 0.1).to(DEVICE), weight, bias


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (3, 5, 7, 9), (2, 64, 8, 8)])
@pytest.mark.parametrize("rate", [0.0, 0.0005, 1.0])
def test_matches_float64(
    shape: tuple[int, int, int, int], rate: float, dtype: torch.dtype, channels_last: bool
) -> None:
    g = torch.Generator().manual_seed(1)
    x = ((torch.rand(shape, generator=g) < rate) * torch.randn(shape, generator=g)).to(dtype).to(DEVICE)
    x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
    parameters = _parameters(shape[1])
    y = sparse_batchnorm2d(x, *parameters)
    expected = run_batchnorm2d_reference(x, *parameters)
    assert y.dtype == dtype and y.stride() == x.stride()
    scale = max(expected.abs().max().item(), 1.0)
    assert (y - expected).abs().max().item() <= TOLERANCE[dtype] * scale


@pytest.mark.parametrize("position", [0, BLOCK - 1, BLOCK, 2 * BLOCK - 1])
def test_one_spike_at_each_edge_of_a_block(position: int) -> None:
    x = torch.zeros(2, 4, 16, 20, device=DEVICE)
    x.view(-1)[position] = 1
    parameters = _parameters(4)
    assert torch.allclose(
        sparse_batchnorm2d(x, *parameters).double(), run_batchnorm2d_reference(x, *parameters), atol=1e-6
    )


def test_refusals() -> None:
    x = torch.zeros(2, 4, 6, 6, device=DEVICE)
    parameters = _parameters(4)
    with pytest.raises(InputError, match="four tensors"):
        sparse_batchnorm2d(x[:, :3].contiguous(), *parameters)
    with pytest.raises(InputError, match="dtype"):
        sparse_batchnorm2d(x.double(), *parameters)
    with pytest.raises(InputError, match="contiguous"):
        sparse_batchnorm2d(x[:, :, ::2], *parameters)
    assert sparse_batchnorm2d(x[:0], *parameters).shape == (0, 4, 6, 6)
