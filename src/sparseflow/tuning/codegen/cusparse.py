"""Products of cuSPARSE's generic API, by each of its algorithms, with preprocessing.

torch calls cuSPARSE with its default algorithm. The other algorithms are often faster, and preprocessing once
for a matrix makes later calls faster. Declarations follow the documentation of cuSPARSE 12.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from sparseflow.errors import DeviceError, RunError

_LIBRARIES = ("libcusparse.so.12", "libcusparse.so.13", "libcusparse.so.11", "libcusparse.so")

_TYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 14}
"""dtype -> cudaDataType."""

_INDEX_32, _ZERO_BASED = 2, 0
_ROW_MAJOR, _NO_TRANSPOSE, _TRANSPOSE = 2, 0, 1
_NOT_SUPPORTED = 10

ALGORITHMS: Mapping[str, Mapping[str, int]] = {
    "spmm": {
        "csr_alg1": 4, "csr_alg2": 6, "csr_alg3": 12,
        "coo_alg1": 1, "coo_alg2": 2, "coo_alg3": 3, "coo_alg4": 5,
    },
    "sddmm": {"csr_default": 0},
}  # fmt: skip
"""Operator -> name of the algorithm -> number in cuSPARSE. The format is the start of the name."""


def list_algorithms(operator: str, dtype: torch.dtype) -> list[str]:
    """List the algorithms of an operator for a dtype."""
    # cuSPARSE has no SDDMM of bfloat16, and prints each attempt.
    return [] if (operator, dtype) == ("sddmm", torch.bfloat16) else list(ALGORITHMS[operator])


@cache
def load_library() -> ctypes.CDLL:
    """Load cuSPARSE, which torch for CUDA has loaded already.

    Raises:
        DeviceError: It is missing.
    """
    for name in _LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise DeviceError(f"cuSPARSE is missing: none of {', '.join(_LIBRARIES)} can be loaded")


@dataclass(kw_only=True)
class _Setup:
    """What a product with inputs of one dtype and number of columns needs.

    Attributes:
        matrix: Descriptor of the sparse matrix.
        buffer: Memory of the algorithm, with the result of the preprocessing.
        tensors: Arrays that the descriptor refers to.
        values: Values that the descriptor refers to.
    """

    matrix: ctypes.c_void_p
    buffer: Tensor
    tensors: tuple[Tensor, ...]
    values: Tensor = field(repr=False)


class CusparseProduct:
    """SpMM or SDDMM of one matrix by one algorithm.

    Calls of one product share a buffer, so they must not overlap.

    Args:
        operator: `"spmm"` or `"sddmm"`.
        algorithm: Name of the algorithm, of `ALGORITHMS`.
        shape: Rows and columns of A.
        offsets: Start of each row, int32 [rows + 1], on the GPU.
        rows: Row of each element, int32 [elements], on the GPU.
        cols: Column of each element, int32 [elements], on the GPU.

    Raises:
        DeviceError: cuSPARSE is missing.
    """

    def __init__(
        self,
        operator: str,
        algorithm: str,
        shape: tuple[int, int],
        offsets: Tensor,
        rows: Tensor,
        cols: Tensor,
    ) -> None:
        self._library = load_library()
        self._is_sampled = operator == "sddmm"
        self._number = ALGORITHMS[operator][algorithm]
        self._is_coo = algorithm.startswith("coo")
        self._shape, self._cols = shape, cols
        self._index = rows if self._is_coo else offsets
        self._handle = ctypes.c_void_p()
        self._call("cusparseCreate", ctypes.byref(self._handle))
        self._setups: dict[tuple[torch.dtype, int], _Setup] = {}

    def multiply(self, dense: Tensor, values: Tensor) -> Tensor:
        """Compute C = A B from contiguous B [columns of A, n] and the values of A of the same dtype."""
        out = dense.new_empty(self._shape[0], dense.shape[1])
        self._run(values, (dense, out), (_NO_TRANSPOSE, _NO_TRANSPOSE), dense.shape[1])
        return out

    def sample(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute the products of rows of contiguous X and Y at the elements of A, in the order of A."""
        out = x.new_empty(len(self._cols))
        self._run(out, (x, y), (_NO_TRANSPOSE, _TRANSPOSE), x.shape[1])
        return out

    def _run(
        self, values: Tensor, dense: tuple[Tensor, Tensor], transposed: tuple[int, int], n_cols: int
    ) -> None:
        dtype = values.dtype
        # float16 and bfloat16 are summed in float32.
        real = ctypes.c_double if dtype == torch.float64 else ctypes.c_float
        compute_type = _TYPES[torch.float64 if dtype == torch.float64 else torch.float32]
        alpha, beta = real(1.0), real(0.0)
        stream = torch.cuda.current_stream(values.device).cuda_stream
        self._call("cusparseSetStream", self._handle, ctypes.c_void_p(stream))
        first, second = (self._describe_dense(tensor) for tensor in dense)
        try:
            key = dtype, n_cols
            setup = self._setups.get(key)
            matrix = self._describe_matrix(values) if setup is None else setup.matrix
            if setup is not None and setup.values is not values:
                self._call("cusparseSpMatSetValues", matrix, _pointer(values))
                setup.values = values
            operands = (first, second, matrix) if self._is_sampled else (matrix, first, second)
            arguments = (
                self._handle, *transposed, ctypes.byref(alpha), *operands[:2], ctypes.byref(beta),
                operands[2], compute_type, self._number,
            )  # fmt: skip
            name = "cusparseSDDMM" if self._is_sampled else "cusparseSpMM"
            if setup is None:
                size = ctypes.c_size_t()
                self._call(f"{name}_bufferSize", *arguments, ctypes.byref(size))
                buffer = torch.empty(max(size.value, 1), dtype=torch.uint8, device=values.device)
                self._call(f"{name}_preprocess", *arguments, _pointer(buffer))
                setup = _Setup(matrix=matrix, buffer=buffer, tensors=(self._index, self._cols), values=values)
                self._setups[key] = setup
            self._call(name, *arguments, _pointer(setup.buffer))
        finally:
            for descriptor in (first, second):
                self._call("cusparseDestroyDnMat", descriptor)

    def _describe_matrix(self, values: Tensor) -> ctypes.c_void_p:
        descriptor = ctypes.c_void_p()
        sizes = [ctypes.c_int64(size) for size in (*self._shape, len(self._cols))]
        arrays = [_pointer(tensor) for tensor in (self._index, self._cols, values)]
        types = [_INDEX_32, _ZERO_BASED, _TYPES[values.dtype]]
        if self._is_coo:
            self._call("cusparseCreateCoo", ctypes.byref(descriptor), *sizes, *arrays, *types)
        else:
            self._call("cusparseCreateCsr", ctypes.byref(descriptor), *sizes, *arrays, _INDEX_32, *types)
        return descriptor

    def _describe_dense(self, tensor: Tensor) -> ctypes.c_void_p:
        descriptor = ctypes.c_void_p()
        rows, cols = tensor.shape
        sizes = [ctypes.c_int64(size) for size in (rows, cols, cols)]
        self._call(
            "cusparseCreateDnMat", ctypes.byref(descriptor), *sizes, _pointer(tensor), _TYPES[tensor.dtype],
            _ROW_MAJOR,
        )  # fmt: skip
        return descriptor

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            reason = "not supported" if status == _NOT_SUPPORTED else f"status {status}"
            raise RunError(f"{name} of cuSPARSE failed: {reason}")

    def __del__(self) -> None:
        for setup in getattr(self, "_setups", {}).values():
            self._library.cusparseDestroySpMat(setup.matrix)
        if getattr(self, "_handle", None):
            self._library.cusparseDestroy(self._handle)


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
