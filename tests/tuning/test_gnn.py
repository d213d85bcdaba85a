"""`gnn.spmm` against the products of torch."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from sparseflow import tuning
from sparseflow.errors import InputError
from sparseflow.tuning import gnn

MATRIX = sp.random_array(
    (30, 20),
    density=0.1,
    rng=np.random.default_rng(0),
    format="csr",
    data_sampler=np.random.default_rng(1).normal,
)
LAYOUTS = {
    "csr": torch.Tensor.to_sparse_csr,
    "csc": torch.Tensor.to_sparse_csc,
    "coo": torch.Tensor.to_sparse,
}
REDUCTIONS: dict[Any, str] = {"sum": "sum", "add": "sum", "mean": "mean", "max": "amax", "min": "amin"}

pytestmark = pytest.mark.filterwarnings("ignore:Sparse:UserWarning")


def make_tensor(layout: str) -> torch.Tensor:
    return LAYOUTS[layout](torch.from_numpy(MATRIX.toarray()))


def sample(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_spmm_matches_torch(reduce: Any) -> None:
    dense = sample(20, 5)
    expected = torch.sparse.mm(make_tensor("csr"), dense, REDUCTIONS[reduce])
    kernel = tuning.tune("spmm", MATRIX, n_cols=5, budget_s=0)
    for src in (kernel, *map(make_tensor, LAYOUTS), MATRIX, MATRIX.tocoo(), sp.csc_matrix(MATRIX)):
        torch.testing.assert_close(gnn.spmm(src, dense, reduce), expected)
    assert gnn.spmm(MATRIX, dense.float(), reduce).dtype == torch.float32


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
def test_gradients_of_matrix_and_features(layout: str, reduce: Any) -> None:
    weights = sample(30, 5)

    def differentiate(layout: str, multiply: Any) -> list[torch.Tensor]:
        inputs = make_tensor(layout).requires_grad_(), sample(20, 5).requires_grad_()
        gradients = torch.autograd.grad((multiply(*inputs) * weights).sum(), inputs)
        return [gradient.to_dense() for gradient in gradients]

    actual = differentiate(layout, lambda matrix, dense: gnn.spmm(matrix, dense, reduce))
    expected = differentiate("csr", lambda matrix, dense: torch.sparse.mm(matrix, dense, REDUCTIONS[reduce]))
    torch.testing.assert_close(actual, expected)


def test_kernels_live_as_long_as_their_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned: list[object] = []
    monkeypatch.setattr(
        gnn, "tune", lambda *args, **kwargs: tuned.append(args) or tuning.tune(*args, **kwargs)
    )
    monkeypatch.setattr(gnn, "_CACHE", {})
    matrix, other, dense = make_tensor("csr"), MATRIX.copy(), sample(20, 5)
    first = gnn.spmm(matrix, dense)
    for _ in range(2):
        gnn.spmm(matrix, sample(20, 3))
        gnn.spmm(other, dense)
    assert len(tuned) == 2
    matrix.values().mul_(2)
    torch.testing.assert_close(gnn.spmm(matrix, dense), 2 * first)
    tuned.clear()
    del matrix, other
    gc.collect()
    assert not gnn._CACHE


def test_wrong_arguments_raise() -> None:
    with pytest.raises(InputError, match="'prod'"):
        gnn.spmm(MATRIX, sample(20, 5), "prod")  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match=r"\(19, 5\)"):
        gnn.spmm(MATRIX, sample(19, 5))
