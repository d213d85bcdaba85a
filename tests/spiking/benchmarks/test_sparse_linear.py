"""The sparse linear layer against plain torch in float64, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the sparse linear kernel needs triton")

from benchmarks.spiking.sparse_linear import COLUMNS, FEATURES, ROWS, run_linear_reference, sparse_linear
from sparseflow.errors import InputError

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float16: 2e-3, torch.float32: 2e-6}
"""Largest error, as a fraction of the largest output."""

pytestmark = [
    pytest.mark.usefixtures("poisoned_empty"),
    # Triton's interpreter turns its one-element arrays into loop bounds this way; numpy below 2.4 allows it.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(1, 10, 1), (17, 65, 100), (48, 10, 130), (16, 64, 64)])
@pytest.mark.parametrize("rate", [0.0, 0.02, 1.0])
def test_matches_float64(shape: tuple[int, int, int], rate: float, dtype: torch.dtype) -> None:
    m, n, k = shape
    g = torch.Generator().manual_seed(m)
    x = ((torch.rand((m, k), generator=g) < rate) * torch.randn((m, k), generator=g)).to(dtype).to(DEVICE)
    weight = (torch.randn((n, k), generator=g) / k**0.5).to(dtype).to(DEVICE)
    bias = torch.randn(n, generator=g).to(dtype).to(DEVICE)
    for inputs in (bias, None):
        y = sparse_linear(x, weight, inputs)
        expected = run_linear_reference(x, weight, inputs)
        assert y.dtype == dtype and y.shape == (m, n)
        scale = max(expected.abs().max().item(), 1.0)
        assert (y - expected).abs().max().item() <= TOLERANCE[dtype] * scale


@pytest.mark.parametrize("row", [0, ROWS - 1, ROWS, 2 * ROWS])
@pytest.mark.parametrize("feature", [0, FEATURES - 1, FEATURES, 2 * FEATURES])
def test_one_spike_at_each_edge_of_a_chunk(row: int, feature: int) -> None:
    x = torch.zeros(2 * ROWS + 1, 2 * FEATURES + 1, device=DEVICE)
    x[row, feature] = 1
    weight = torch.arange((COLUMNS + 1) * x.shape[1], dtype=torch.float32, device=DEVICE).view(
        COLUMNS + 1, -1
    )
    expected = torch.zeros(x.shape[0], COLUMNS + 1, device=DEVICE)
    expected[row] = weight[:, feature]
    assert torch.equal(sparse_linear(x, weight), expected)


def test_zero_chunks_are_skipped() -> None:
    x = torch.zeros(ROWS, 2 * FEATURES, device=DEVICE)
    x[3, 5] = 1
    weight = torch.ones(4, 2 * FEATURES, device=DEVICE)
    weight[:, FEATURES:] = float("nan")
    assert torch.equal(sparse_linear(x, weight)[3], torch.ones(4, device=DEVICE))


def test_any_strides() -> None:
    g = torch.Generator().manual_seed(3)
    x = (torch.rand((70, 20), generator=g) < 0.3).float().to(DEVICE).t()
    weight = torch.randn((70, 12), generator=g).to(DEVICE).t()
    assert torch.allclose(sparse_linear(x, weight), x @ weight.t(), atol=1e-5)


def test_refusals() -> None:
    x, weight = torch.zeros(2, 8, device=DEVICE), torch.zeros(3, 8, device=DEVICE)
    with pytest.raises(InputError, match=r"\[M, K\]"):
        sparse_linear(x, weight[:, :4])
    with pytest.raises(InputError, match="share one dtype"):
        sparse_linear(x, weight.half())
    with pytest.raises(InputError, match="share one dtype"):
        sparse_linear(x.double(), weight.double())
    assert sparse_linear(x[:0], weight).shape == (0, 3)
