"""Aggregation of neighbors in graph neural networks, as in PyG (PyTorch Geometric)."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from sparseflow.core.checks import check_one_of
from sparseflow.tuning.api import tune
from sparseflow.tuning.codegen.kernel import REDUCTIONS, Kernel, Reduction
from sparseflow.tuning.schedule.matrices import is_tensor

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class _CacheEntry:
    """Kernels of a matrix.

    Attributes:
        reference: The matrix.
        version: Version counter of a tensor; 0 for other matrices.
        kernels: Dtype -> kernel.
    """

    reference: weakref.ref[Any]
    version: int
    kernels: dict[np.dtype, Kernel] = field(default_factory=dict)


_CACHE: dict[int, _CacheEntry] = {}
"""`id` of a matrix -> its kernels, as long as the matrix exists; sparse matrices have no hash."""


def spmm(src: Any, other: Tensor, reduce: Reduction | Literal["add"] = "sum") -> Tensor:
    """Aggregate the rows of `other` along the rows of a sparse matrix.

    Arguments and result are those of `torch_geometric.utils.spmm`. The first call with a matrix selects and
    compiles a kernel, as `tune` does with `budget_s=0`; later calls with the same object reuse it.

    Example::

        class Convolution(torch_geometric.nn.GCNConv):
            def message_and_aggregate(self, adj_t, x):
                return gnn.spmm(adj_t, x, reduce=self.aggr)

    Args:
        src: Kernel of `tune`, sparse torch tensor (CSR, CSC or COO) or scipy.sparse matrix. Torch computes
            the gradient of a tensor that requires it. A tensor that is modified in place gets a new kernel;
            changes of a scipy matrix, and of arrays that a tensor was built from, are not noticed.
        other: Dense matrix of shape [columns of `src`, features]. `src` is converted to its dtype.
        reduce: `"sum"` or `"add"`, `"mean"`, `"max"` or `"min"`; see `Kernel`.

    Raises:
        InputError: A shape, a type or `reduce` is wrong.
    """
    reduce = "sum" if reduce == "add" else reduce
    check_one_of(REDUCTIONS, reduce=reduce)
    if isinstance(src, Kernel):
        return src(other, reduce=reduce)
    kernel = _get_kernel(src, other)
    if is_tensor(src) and src.requires_grad:
        kernel = kernel.with_values(_get_values(src, kernel))
    return kernel(other, reduce=reduce)


def _get_kernel(matrix: Any, other: Any) -> Kernel:
    """Return the kernel of a matrix for the dtype of `other`, selected at the first call."""
    dtype = np.dtype(np.float64 if str(other.dtype).endswith("float64") else np.float32)
    version = matrix._version if is_tensor(matrix) and not matrix.is_inference() else 0
    key = id(matrix)
    entry = _CACHE.get(key)
    if entry is None or entry.version != version:
        reference = weakref.ref(matrix, lambda _: _CACHE.pop(key, None))
        entry = _CACHE[key] = _CacheEntry(reference=reference, version=version)
    if dtype not in entry.kernels:
        n_cols = other.shape[-1] if other.ndim > 1 else 1
        entry.kernels[dtype] = tune("spmm", matrix, n_cols=n_cols, budget_s=0, dtype=dtype)
    return entry.kernels[dtype]


def _get_values(matrix: Tensor, kernel: Kernel) -> Tensor:
    """Return the values of a sparse tensor in the order of `Kernel.with_values`, with their gradients."""
    import torch

    if matrix.layout is torch.sparse_csc:
        return matrix.values()[torch.from_numpy(np.argsort(kernel.transposition))]
    return (matrix if matrix.layout is torch.sparse_csr else matrix.coalesce()).values()
