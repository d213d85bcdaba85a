"""Tuned operators that are called like functions, and their files."""

from __future__ import annotations

import ctypes
import itertools
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args
from weakref import WeakValueDictionary

import numpy as np

from sparseflow.core.artifact import Artifact
from sparseflow.core.checks import check_one_of
from sparseflow.core.device import describe_cpu
from sparseflow.errors import DeviceError, FileFormatError, InputError, RunError
from sparseflow.tuning.codegen.c_source import SYMBOL
from sparseflow.tuning.codegen.export import DEFAULT_PREFIX, ExportResult, export_schedule
from sparseflow.tuning.codegen.extrema import Extremum, find_extrema
from sparseflow.tuning.codegen.program import (
    KernelProgram,
    allocate_aligned,
    build_program,
    compute_storage_limit,
)
from sparseflow.tuning.codegen.variants import KernelFamily, VariantKey, adapt_program
from sparseflow.tuning.schedule.matrices import FLOAT_DTYPES, CooMatrix, as_coo, is_tensor
from sparseflow.tuning.schedule.operators import get_operator
from sparseflow.tuning.schedule.problem import SparseProblem
from sparseflow.tuning.schedule.schedule import Schedule, ScheduleLine

if TYPE_CHECKING:
    import scipy.sparse
    import torch
    from torch import Tensor

Reduction = Literal["sum", "mean", "max", "min"]
"""How the products of the elements of a row are combined."""

REDUCTIONS: tuple[Reduction, ...] = get_args(Reduction)

_ARRAYS = ("rows", "cols", "values")

_COUNTER = itertools.count()
_KERNELS: WeakValueDictionary[int, Kernel] = WeakValueDictionary()
"""Kernels by number; operators of torch take tensors and numbers only."""

_PROCESS_ID = os.getpid()
"""Process that imported this module. Another one is a fork of it, in which OpenMP may have dead threads."""

_OutputArray = ctypes.c_void_p * 1

_Buffer = tuple[np.ndarray, Any, Any]
"""Output of a call, and the addresses of its output and inputs, which only one call at a time uses."""

_EXCLUSIVE_REFERENCES = 2
"""References to a buffer that is used by one view only: the view's and the one of `sys.getrefcount`."""


class KernelFile(Artifact):
    """Metadata of a kernel file; the tensors are those of the matrix.

    Attributes:
        operator: Operator.
        n_cols: Columns of the dense operands; None for SpMV.
        shape: Rows and columns of the matrix.
        schedule: Schedule; None for a library kernel.
        speedup: Time of the best baseline over the time of the kernel; None if it was not tuned.
        cpu: CPU that the kernel was tuned on.
        sha256: Checksum of the matrix.
        gpu: Name of the GPU that the kernel was tuned on; None for a CPU.
        dtype: Dtype of the dense operands on a GPU.
        algorithm: Algorithm of cuSPARSE of a library kernel on a GPU; None for the one that torch uses.
    """

    FORMAT: ClassVar[str] = "sparseflow.tuning.kernel"
    VERSION: ClassVar[int] = 2
    HINT: ClassVar[str] = "tune again with `sparseflow tune`"

    operator: str
    n_cols: int | None
    shape: tuple[int, int]
    schedule: ScheduleLine | None
    speedup: float | None
    cpu: str
    sha256: str
    gpu: str | None = None
    dtype: Literal["float32", "float64", "float16", "bfloat16"] = "float32"
    algorithm: str | None = None


class Kernel(ABC):
    """One operator with one sparse matrix A.

    SpMM takes B of shape [columns of A, n_cols] and returns C = A B. SpMV takes x of shape [columns of A] and
    returns y = A x. SDDMM takes X of shape [rows of A, n_cols] and Y of shape [columns of A, n_cols] and
    returns D, the elementwise product of A and X Yᵀ, as a sparse matrix. Torch inputs give torch outputs.

    Torch computes gradients of all inputs and, after `with_values`, of the values of A. SpMM and SpMV kernels
    are linear operators of scipy, too: `A @ B`, `B @ A`, and the solvers of `scipy.sparse.linalg` take them.

    A kernel also runs on other numbers of columns, batches and dtypes, and as its transpose `T`. The first
    use of each compiles a *variant*, whose schedule is derived from that of this kernel; see `explain`.

    Formats with dense levels multiply padding zeros. If B contains an infinity or NaN, other results in the
    same blocks become NaN.

    Kernels can be copied and pickled; the copy is compiled again, or read from the compile cache. In a forked
    process kernels run with one thread.

    Attributes:
        problem: Problem.
        speedup: Time of the best baseline over the time of this kernel; None if it was not tuned.
        origin: Where the schedule comes from.
    """

    __array_ufunc__ = None  # numpy leaves `array @ kernel` to the kernel
    device = "cpu"

    def __init__(self, problem: SparseProblem, speedup: float | None, cache_dir: Path | None = None) -> None:
        self.problem = problem
        self.speedup = speedup
        self.origin = "library" if self.schedule is None else "tuned"
        self._cache_dir = cache_dir
        self._shapes, self._dtype = problem.input_shapes, problem.dtype
        # The shape of the only input; sampled products have two.
        self._input_shape = next(iter(self._shapes.values())) if len(self._shapes) == 1 else None
        self._key = VariantKey(
            operator=problem.operator.name, n_cols=problem.n_cols, dtype=problem.dtype.name
        )
        self._family = KernelFamily()
        self._base: Kernel | None = None
        self._transpose: Kernel | None = None
        self._number = next(_COUNTER)
        _KERNELS[self._number] = self
        self._value_tensor: Any = None
        self._value_version = 0

    def __repr__(self) -> str:
        problem = self.problem
        (rows, cols), nnz = problem.matrix.shape, problem.matrix.nnz
        n_cols = "" if problem.n_cols is None else f", n_cols={problem.n_cols}"
        matrix = f"{rows} x {cols}, {nnz} elements, {problem.dtype}"
        return f"<{type(self).__name__} {problem.operator.name}: {matrix}{n_cols}>"

    def __reduce__(self) -> tuple[Any, ...]:
        matrix, schedule = self.problem.matrix, self.schedule
        line = None if schedule is None else str(schedule)
        arrays = tuple(getattr(matrix, name) for name in _ARRAYS)
        operator, n_cols = self.problem.operator.name, self.problem.n_cols
        return _rebuild_kernel, (operator, n_cols, matrix.shape, arrays, line, self.speedup, self._cache_dir)

    @property
    @abstractmethod
    def schedule(self) -> Schedule | None:
        """Schedule; None for a library kernel."""

    @abstractmethod
    def compute(self, *inputs: np.ndarray, values: np.ndarray | None = None) -> np.ndarray:
        """Compute C or y, or the values of D in the order of the matrix, without checking the inputs.

        Args:
            inputs: Contiguous arrays of the shapes and the dtype of the problem.
            values: Values of A to use instead of its own, in the order of the matrix.
        """

    @abstractmethod
    def replace_values(self, values: np.ndarray) -> Kernel:
        """Create a kernel with the same code and pattern and other values, in the order of the matrix."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of A."""
        return self.problem.matrix.shape

    @property
    def dtype(self) -> np.dtype:
        """float32 or float64."""
        return self.problem.dtype

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as a dtype of torch, which inputs of other dtypes are promoted with."""
        import torch

        return getattr(torch, self._key.dtype)

    @property
    def T(self) -> Kernel:
        """The same operator with Aᵀ; inputs of SDDMM swap their places, too."""
        if self._transpose is not None:
            return self._transpose
        kernel = self._get_variant(transposed=not self._key.transposed)
        if (
            self._family.template is None
        ):  # otherwise a cycle of references would keep kernels of one step alive
            self._transpose = kernel
        return kernel

    def with_values(self, values: Any) -> Kernel:
        """Create a kernel for the same pattern with other values, without compiling.

        Args:
            values: Values of the elements of A, sorted by row and column, as in `scipy.sparse.csr_array`
                with sorted indices; shape [elements], any real dtype. Torch computes gradients of a tensor
                that requires them.

        Raises:
            InputError: The shape is wrong, or a value is not a finite real number.
        """
        if is_tensor(values):
            self.check_tensor("values", values)
        array = read_tensor(values) if is_tensor(values) else np.asarray(values)
        if array.shape != self.problem.matrix.values.shape:
            raise InputError(
                f"`values` has shape {array.shape}; the matrix has {self.problem.matrix.nnz} elements"
            )
        if array.dtype.kind not in "fiub" or not np.isfinite(array).all():
            raise InputError("`values` must be finite real numbers")
        kernel = self.replace_values(array.astype(self.dtype))
        kernel.speedup, kernel.origin = self.speedup, self.origin
        kernel._family = KernelFamily(self)
        if is_tensor(values):
            kernel._value_tensor, kernel._value_version = values, values._version
        return kernel

    def holds_values(self, values: Any) -> bool:
        """Return whether a tensor is the one of `with_values` and has not changed since."""
        tensor = self._value_tensor
        if tensor is None or tensor.data_ptr() != values.data_ptr() or tensor.stride() != values.stride():
            return False
        return values._version == self._value_version

    def check_tensor(self, name: str, tensor: Any) -> None:
        """Raise an InputError if a tensor is not a dense tensor on the kernel's device."""
        import torch

        if tensor.device != torch.device(self.device):
            device = "CPU tensor" if self.device == "cpu" else f"tensor on {self.device}"
            raise InputError(f"`{name}` is on {tensor.device}; pass a {device}")
        if tensor.layout is not torch.strided:
            raise InputError(f"`{name}` is sparse ({tensor.layout}); pass a dense tensor")

    def multiply_tensor(self, dense: Tensor, values: Tensor | None) -> Tensor:
        """Compute A times a vector, a matrix or a batch of matrices; see `multiply`."""
        import torch

        array = None if values is None or self.holds_values(values) else to_array(values)
        return torch.from_numpy(self.multiply(to_array(dense), array))

    def sample_tensors(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute the values of D, in the order of the matrix; see `sample`."""
        import torch

        return torch.from_numpy(self.sample(to_array(x), to_array(y)))

    def sample_products(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute products of rows of `x` and `y` at the elements of A, in the order of the matrix.

        The operator is SDDMM with the pattern of A, whatever the kernel computes.
        """
        import torch

        arrays = to_array(x), to_array(y)
        ones = self._get_variant(
            operator="sddmm", n_cols=x.shape[1], dtype=arrays[0].dtype.name, values="ones"
        )
        return torch.from_numpy(ones.compute(*arrays))

    @abstractmethod
    def build_variant(self, problem: SparseProblem) -> Kernel:
        """Build a kernel of a similar problem; its `origin` says what its schedule is derived from."""

    def explain(self) -> str:
        """Describe this kernel and the variants that were compiled so far, a line each."""
        lines: list[str] = []
        for kernel in self._family.list_variants(self.base):
            key = kernel._key
            name = f"{kernel!r}"[1:-1] + (", transposed" if key.transposed else "")
            name += ", mean" if key.values.endswith("means") else ""
            lines.append(f"{name}: {kernel.origin}; schedule {kernel.schedule or 'of the library'}")
        return "\n".join(lines)

    def _get_variant(self, **changes: Any) -> Kernel:
        """Return the kernel of the same matrix that differs in some fields of `VariantKey`."""
        return self._family.get(self.base, replace(self._key, **changes))

    @property
    def base(self) -> Kernel:
        """The kernel that this one is a variant of, or itself."""
        return self if self._base is None else self._base

    def __call__(
        self,
        *inputs: Any,
        reduce: Reduction = "sum",
        out: Any = None,
        alpha: float = 1.0,
        beta: float = 0.0,
        bias: Any = None,
        activation: Literal["relu"] | None = None,
        **named_inputs: Any,
    ) -> Any:
        """Compute `alpha` times the result, plus `beta` times `out`, plus `bias`, and apply the activation.

        Inputs of another dtype than the matrix are promoted as numpy does for arrays and torch for tensors.
        SpMM and SpMV take matrices and vectors; more dimensions than two are batches.

        Args:
            inputs: numpy arrays or CPU tensors.
            reduce: Combination of the products of a row, `"sum"`, `"mean"`, `"max"` or `"min"`, over all
                elements that the matrix stores; 0 for rows without elements. SDDMM takes `"sum"` only.
            out: Array or tensor of the shape and dtype of the result, which it is written to; not for SDDMM.
            alpha: Factor of the result.
            beta: Factor of `out`.
            bias: Array or tensor of shape [n_cols] that is added to each row, without a copy of the result.
            activation: `"relu"`, which is applied without a copy of the result; None for none. SDDMM takes
                neither a bias nor an activation.
            named_inputs: Inputs by name: `B`, `x`, `X` or `Y`.

        Raises:
            InputError: The number, a shape or a dtype of the inputs is wrong, or `reduce` is not possible.
        """
        plain = out is None and alpha == 1.0 and beta == 0.0
        is_product = plain and reduce == "sum" and bias is None and activation is None
        if (
            is_product
            and len(inputs) == 1
            and self._input_shape is not None
            and not named_inputs
            and self._value_tensor is None
        ):
            value = inputs[0]
            if (
                type(value) is np.ndarray
                and value.shape == self._input_shape
                and value.dtype == self._dtype
                and value.flags.c_contiguous
            ):
                return self.compute(value)
            if is_tensor(value):
                from sparseflow.tuning.codegen.torch_ops import multiply_directly

                result = multiply_directly(self, inputs[0])
                if result is not None:
                    return result
        if out is not None and self.problem.operator.sparse_output:
            raise InputError("`out` is for dense results; that of sddmm is sparse")
        if not (bias is None and activation is None) and self.problem.operator.sparse_output:
            raise InputError("`bias` and `activation` are for dense results; that of sddmm is sparse")
        if reduce not in REDUCTIONS or (reduce != "sum" and self.problem.operator.sparse_output):
            allowed = "sum" if self.problem.operator.sparse_output else ", ".join(REDUCTIONS)
            raise InputError(
                f"`reduce` (={reduce!r}) of {self.problem.operator.name} must be one of: {allowed}"
            )
        if not self.problem.matrix.nnz:
            reduce = "sum"  # all are zeros
        if reduce == "mean" and self._value_tensor is None:
            kernel = self._get_variant(values="column_means" if self._key.transposed else "row_means")
            return kernel(
                *inputs, out=out, alpha=alpha, beta=beta, bias=bias, activation=activation, **named_inputs
            )
        arguments = self._bind_inputs(inputs, named_inputs)
        if any(is_tensor(value) for value in arguments):
            from sparseflow.tuning.codegen import torch_ops

            result = torch_ops.call_kernel(self, arguments, reduce)
        else:
            arrays = [_read_array(name, value) for name, value in zip(self._shapes, arguments, strict=True)]
            result = self._apply(arrays, reduce)
        if reduce == "mean":
            result = self._divide_by_counts(result)
        result = result if plain else _combine(result, out, alpha, beta)
        if bias is None and activation is None:
            return result
        return _add_bias_and_activate(result, bias, activation)

    def _divide_by_counts(self, result: Any) -> Any:
        """Divide the sums of rows by their numbers of elements."""
        counts = np.maximum(np.diff(self._csr_indices[0]), 1).astype(self.dtype)
        counts = counts if result.ndim == 1 else counts[:, None]
        if not is_tensor(result):
            return result / counts
        import torch

        return result / torch.from_numpy(counts).to(result.device)

    def __matmul__(self, other: Any) -> Any:
        return NotImplemented if self.problem.operator.sparse_output else self(other)

    def __rmatmul__(self, other: Any) -> Any:
        if self.problem.operator.sparse_output:
            return NotImplemented
        other = other if is_tensor(other) else np.asarray(other)
        if other.ndim == 1:
            return self.T(other)
        return self.T(other.swapaxes(-1, -2)).swapaxes(-1, -2)

    def matvec(self, x: np.ndarray) -> np.ndarray:
        """Compute A x, for `scipy.sparse.linalg`."""
        return self @ x

    def rmatvec(self, x: np.ndarray) -> np.ndarray:
        """Compute Aᵀ x, for `scipy.sparse.linalg`."""
        return self.T @ x

    matmat, rmatmat = matvec, rmatvec

    def _bind_inputs(self, inputs: tuple[Any, ...], named_inputs: dict[str, Any]) -> list[Any]:
        """Return the inputs in order."""
        names = list(self._shapes)
        arguments = dict(zip(names, inputs, strict=False)) | named_inputs
        if len(inputs) + len(named_inputs) != len(names) or set(arguments) != set(names):
            count, named = len(inputs) + len(named_inputs), ", ".join(named_inputs)
            raise InputError(
                f"{self.problem.operator.name} expects {len(names)} inputs ({', '.join(names)}), got {count}"
                + (f", by name {named}" if named else "")
            )
        return [arguments[name] for name in names]

    def _apply(self, inputs: list[np.ndarray], reduce: Reduction) -> Any:
        """Compute the result for arrays of any dtype."""
        dtype = np.result_type(self.dtype, *inputs)
        is_complex = dtype.kind == "c"
        real = {"F": np.dtype(np.float32), "D": np.dtype(np.float64)}.get(dtype.char, dtype)
        if real not in FLOAT_DTYPES or (is_complex and self.problem.operator.sparse_output):
            types = ", ".join(str(value.dtype) for value in inputs)
            raise InputError(
                f"{self.problem.operator.name} of a {self.dtype} matrix does not take {types}; pass real "
                "numbers of at most 64 bits" + ("" if is_complex else ", or convert the inputs")
            )
        if self.problem.operator.sparse_output:
            return self.build_sparse_output(self.sample(*(np.ascontiguousarray(x, real) for x in inputs)))
        (dense,) = (np.ascontiguousarray(value, dtype) for value in inputs)
        if reduce in ("max", "min"):
            return self._reduce_rows(dense, reduce)
        values = self._read_new_values()
        if not is_complex:
            return self.multiply(dense, values)
        # Real and imaginary parts are neighboring columns.
        columns = dense.reshape(-1, 1) if dense.ndim == 1 else dense
        result = np.ascontiguousarray(self.multiply(columns.view(real), values)).view(dtype)
        return result[:, 0] if dense.ndim == 1 else result

    def multiply(self, dense: np.ndarray, values: np.ndarray | None = None) -> np.ndarray:
        """Compute A times a vector, a matrix or a batch of matrices.

        Args:
            dense: Contiguous float32 or float64 array.
            values: Values of A to use instead of its own, in the order of the matrix that `T` refers to.
        """
        if values is None and dense.shape == self._input_shape and dense.dtype == self._dtype:
            return self.compute(dense)
        kernel = self.get_fitting_variant((dense.shape[-2:],), dense.dtype.name)
        values = None if values is None else kernel.reorder(values.astype(dense.dtype, copy=False))
        if dense.ndim <= 2:
            return kernel.compute(dense, values=values)
        result = np.empty((*dense.shape[:-2], self.shape[0], dense.shape[-1]), dense.dtype)
        for index in np.ndindex(dense.shape[:-2]):
            result[index] = kernel.compute(dense[index], values=values)
        return result

    def _reduce_rows(self, dense: np.ndarray, reduce: Extremum) -> np.ndarray:
        """Compute the largest or smallest products for a vector, a matrix or a batch of matrices."""
        if dense.dtype.kind == "c":
            raise InputError(f"`reduce` (={reduce!r}) needs an order, which complex numbers do not have")
        self.check_shapes((dense.shape[-2:],))
        columns = dense[:, None] if dense.ndim == 1 else np.moveaxis(dense, -2, 0)
        values = self._read_new_values()
        values = None if values is None else self.reorder(values)
        result, _ = self.find_extrema(columns.reshape(len(columns), -1), reduce, values)
        result = np.moveaxis(result.reshape(len(result), *columns.shape[1:]), 0, -2)
        return result[:, 0] if dense.ndim == 1 else result

    def find_extrema(
        self, dense: np.ndarray, reduce: Extremum, values: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Find the largest or smallest products of every row and their elements; see `extrema.find_extrema`.

        Args:
            dense: float32 or float64 array of shape [columns of A, n].
            reduce: `"max"` or `"min"`.
            values: Values of A to use instead of its own, in the order of this kernel's matrix.
        """
        values = self.problem.matrix.values if values is None else values
        threads = 1 if self.schedule is None or os.getpid() != _PROCESS_ID else self.schedule.threads
        return find_extrema(
            *self._csr_indices,
            np.ascontiguousarray(values, dense.dtype),
            np.ascontiguousarray(dense),
            reduce,
            threads=threads,
            cache_dir=self._cache_dir,
        )

    def find_tensor_extrema(
        self, dense: Tensor, values: Tensor | None, reduce: Extremum
    ) -> tuple[Tensor, Tensor]:
        """Compute `find_extrema` of tensors."""
        import torch

        array = None if values is None else to_array(values)
        result, elements = self.find_extrema(to_array(dense), reduce, array)
        return torch.from_numpy(result), torch.from_numpy(elements)

    def sample(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Compute the values of D, in the order of the matrix, from contiguous arrays of one dtype."""
        kernel = self.get_fitting_variant((x.shape, y.shape), x.dtype.name)
        return kernel.compute(x, y, values=self._read_new_values(kernel))

    def get_fitting_variant(self, shapes: tuple[tuple[int, ...], ...], dtype: str) -> Kernel:
        """Return the variant for inputs without batches.

        Args:
            shapes: Shape of each input.
            dtype: `"float32"` or `"float64"`.

        Raises:
            InputError: A shape is wrong.
        """
        n_cols = self.check_shapes(shapes)
        if self.problem.operator.sparse_output:
            return self._get_variant(n_cols=n_cols, dtype=dtype)
        operator = "spmv" if n_cols is None else "spmm"
        return self._get_variant(operator=operator, n_cols=n_cols, dtype=dtype)

    def check_shapes(self, shapes: tuple[tuple[int, ...], ...]) -> int | None:
        """Check the shapes of inputs without batches; return their number of columns, None for a vector.

        Raises:
            InputError: A shape is wrong.
        """
        rows, cols = self.shape
        extents = {"X": rows, "Y": cols, "B": cols, "x": cols}
        is_sampled = self.problem.operator.sparse_output
        for (name, tuned_shape), shape in zip(self._shapes.items(), shapes, strict=True):
            has_rank = len(shape) == 2 or (len(shape) == 1 and not is_sampled)
            if not has_rank or shape[0] != extents[name] or 0 in shape:
                raise InputError(
                    f"`{name}` has shape {shape}; the kernel takes {extents[name]} rows, and was tuned for "
                    f"shape {tuned_shape}"
                )
        n_cols = shapes[0][1] if len(shapes[0]) == 2 else None
        if is_sampled and shapes[1][1] != n_cols:
            raise InputError(
                f"`X` has shape {shapes[0]} and `Y` has shape {shapes[1]}; both need as many columns"
            )
        return n_cols

    def _read_new_values(self, kernel: Kernel | None = None) -> np.ndarray | None:
        """Return the values of the tensor of `with_values` if it has changed since.

        Args:
            kernel: Variant whose dtype and order they get; by default those of the tensor.
        """
        tensor = self._value_tensor
        if tensor is None or self.holds_values(tensor):
            return None
        values = read_tensor(tensor)
        return values if kernel is None else kernel.reorder(values.astype(kernel.dtype))

    def reorder(self, values: np.ndarray) -> np.ndarray:
        """Bring values of the matrix that `T` refers to into the order of this kernel's matrix."""
        return values[self.transposition] if self._key.transposed else values

    @property
    def transposition(self) -> np.ndarray:
        """Positions of the transposed matrix's elements in the base's matrix, int64 [elements]."""
        return self._family.get_transposition(self.base)

    @cached_property
    def transposition_tensor(self) -> Tensor:
        """`transposition` as a tensor on the kernel's device."""
        import torch

        return torch.from_numpy(self.transposition).to(self.device)

    @cached_property
    def _csr_indices(self) -> tuple[np.ndarray, np.ndarray]:
        template = self._family.template
        if template is not None:
            return self._family.get_similar(template, self._key)._csr_indices
        csr = self.problem.matrix.to_scipy()
        return csr.indptr, csr.indices

    @cached_property
    def csr_tensors(self) -> tuple[Tensor, Tensor]:
        """Start of each row, and column of each element, on the kernel's device.

        All sparse tensors that the kernel returns share them.
        """
        import torch

        indptr, indices = (torch.tensor(part) for part in self._csr_indices)
        return indptr, indices

    def build_sparse_output(self, values: np.ndarray) -> scipy.sparse.csr_array:
        """Build D from its values."""
        from scipy import sparse

        indptr, indices = self._csr_indices
        return sparse.csr_array((values, indices.copy(), indptr.copy()), shape=self.shape)

    def save(self, path: Path | str) -> None:
        """Write the schedule and the matrix to a file; `load` compiles again if the compile cache is gone.

        Raises:
            OSError: The file cannot be written.
        """
        import torch

        matrix = self.problem.matrix
        file = KernelFile(
            operator=self.problem.operator.name,
            n_cols=self.problem.n_cols,
            shape=matrix.shape,
            schedule=self.schedule,
            speedup=self.speedup,
            cpu=describe_cpu(),
            sha256=matrix.digest(),
            **self._describe_gpu(),
        )
        # `from_numpy` warns of read-only arrays.
        file.save_tensors(path, {name: torch.tensor(getattr(matrix, name)) for name in _ARRAYS})

    def _describe_gpu(self) -> dict[str, Any]:
        """Return the fields of a kernel file that only kernels on a GPU have."""
        return {}

    def export_c(self, folder: Path | str, *, prefix: str = DEFAULT_PREFIX) -> ExportResult:
        """Write C code, the packed matrix and a test program, for C and C++ programs without Python.

        A library kernel is exported as the reference preset, on one thread.

        Args:
            folder: Directory to create; it may exist if it is empty.
            prefix: Start of the names of files and symbols. Kernels with different prefixes can be linked
                into one program.

        Raises:
            InputError: `prefix` is no C identifier, or `folder` is not empty.
            OutputError: The folder cannot be written.
        """
        return export_schedule(self.problem, self.schedule, Path(folder), prefix=prefix)


class CompiledKernel(Kernel):
    """A compiled schedule.

    Args:
        program: Program.
        speedup: Time of the best baseline over the time of this kernel.
        cache_dir: Directory of compiled code; see `compile_source`.
        library: The compiled code, if it is loaded already.

    Raises:
        DeviceError: There is no C compiler.
        RunError: The compilation or loading of the code fails.
    """

    def __init__(
        self,
        program: KernelProgram,
        *,
        speedup: float | None = None,
        cache_dir: Path | None = None,
        library: ctypes.CDLL | None = None,
    ) -> None:
        self.program = program
        super().__init__(program.problem, speedup, cache_dir)
        self._library = _load_library(program, cache_dir) if library is None else library
        self._function = getattr(self._library, SYMBOL)
        self._function.restype = None
        self._is_parallel = program.nest.threads > 1
        for array in program.leading_arrays:
            array.flags.writeable = False  # as the matrix, which `save` writes
        addresses = [array.ctypes.data for array in program.leading_arrays]
        self._num_leading = len(addresses)
        addresses += [0] * len(self.problem.input_shapes)
        addresses += [array.ctypes.data for array in program.trailing_arrays]
        self._input_array = (ctypes.c_void_p * len(addresses))(*addresses)
        self._shape = program.output_shape
        self._rows = None if program.problem.operator.sparse_output else program.problem.matrix.shape[0]
        self._free_buffers: list[_Buffer] = []

    @property
    def schedule(self) -> Schedule:
        return self.program.schedule

    def build_variant(self, problem: SparseProblem) -> CompiledKernel:
        program, origin = adapt_program(self, problem)
        kernel = CompiledKernel(program, cache_dir=self._cache_dir)
        kernel.origin = origin
        return kernel

    def replace_values(self, values: np.ndarray) -> CompiledKernel:
        problem = replace(self.problem, matrix=replace(self.problem.matrix, values=values))
        packed_values = self._pack_values(values)
        if packed_values is None:
            return self.build_variant(problem)
        packed = replace(self.program.packed, values=packed_values)
        program = replace(self.program, problem=problem, packed=packed)
        return CompiledKernel(program, cache_dir=self._cache_dir, library=self._library)

    def _pack_values(self, values: np.ndarray) -> np.ndarray | None:
        """Return the packed values; None if the storage is symmetric and the values are not."""
        packed = self.program.packed
        result = np.zeros_like(packed.values)
        result[packed.element_positions] = values
        if self.schedule.is_symmetric and not np.array_equal(result[packed.element_positions], values):
            return None
        return result

    def compute(self, *inputs: np.ndarray, values: np.ndarray | None = None) -> np.ndarray:
        return self.compute_at([array.ctypes.data for array in inputs], values)

    def compute_at(self, addresses: Sequence[int], values: np.ndarray | None = None) -> np.ndarray:
        """Compute the result of inputs at some addresses; see `compute`."""
        # Calls often take microseconds, so everything that does not change is prepared in advance.
        if self._is_parallel and os.getpid() != _PROCESS_ID:
            # libgomp waits forever for threads that exist in the parent only. Without active parallel regions
            # it needs none.
            self._library.omp_set_max_active_levels(0)
        packed = None if values is None else self._pack_values(values)
        if values is not None and packed is None:
            return self.replace_values(values).compute_at(addresses)
        buffer = self._acquire_buffer()
        output, output_array, input_array = buffer
        for index, address in enumerate(addresses, self._num_leading):
            input_array[index] = address
        if packed is None:
            self._function(input_array, output_array)
        else:
            index = self._num_leading - 1
            input_array[index] = packed.ctypes.data
            self._function(input_array, output_array)
            input_array[index] = self._input_array[index]
        result = self.program.extract_result(output) if self._rows is None else output[: self._rows]
        # Returned after use: another thread that takes the buffer checks for views of it.
        self._free_buffers.append(buffer)
        return result

    def _acquire_buffer(self) -> _Buffer:
        """Return an output buffer and the arguments of a call, reusing the last ones if no view exists.

        Touching the pages of a new large array can take longer than the computation.
        """
        try:
            buffer = self._free_buffers.pop()
        except IndexError:
            pass
        else:
            if sys.getrefcount(buffer[0].base) == _EXCLUSIVE_REFERENCES:
                return buffer
        output = allocate_aligned(self._shape, self._dtype)
        input_array = type(self._input_array).from_buffer_copy(self._input_array)
        return output, _OutputArray(output.ctypes.data), input_array


def _load_library(program: KernelProgram, cache_dir: Path | None) -> ctypes.CDLL:
    path = program.compile(cache_dir=cache_dir)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise RunError(
            f"cannot load the compiled kernel: {error}; set SPARSEFLOW_CACHE to a directory that allows "
            "execution"
        ) from error


class LibraryKernel(Kernel):
    """The library's implementation, if it is the fastest or nothing can be compiled."""

    def __init__(self, problem: SparseProblem, *, speedup: float | None = None) -> None:
        super().__init__(problem, speedup)
        self._function = problem.get_library_function()

    @property
    def schedule(self) -> None:
        return None

    def build_variant(self, problem: SparseProblem) -> LibraryKernel:
        return LibraryKernel(problem)

    def replace_values(self, values: np.ndarray) -> LibraryKernel:
        problem = replace(self.problem, matrix=replace(self.problem.matrix, values=values))
        return LibraryKernel(problem)

    def compute(self, *inputs: np.ndarray, values: np.ndarray | None = None) -> np.ndarray:
        if values is not None:
            return self.replace_values(values).compute(*inputs)
        return self._function(*inputs)


def get_kernel(number: int) -> Kernel:
    """Return the kernel with a number.

    Raises:
        RunError: It does not exist any more.
    """
    kernel = _KERNELS.get(int(number))  # torch.compile passes a symbol for the second kernel of the same code
    if kernel is None:
        raise RunError("the kernel of this operation was deleted; keep a reference to it")
    return kernel


def load(
    path: Path | str,
    *,
    any_cpu: bool = False,
    device: str | torch.device = "cuda",
    cache_dir: Path | None = None,
) -> Kernel:
    """Read a kernel from a file of `Kernel.save`.

    Args:
        path: File.
        any_cpu: Accept a kernel that was tuned on another CPU or GPU; it is correct but may be slow.
        device: The GPU of a kernel that was tuned on a GPU.
        cache_dir: Directory of compiled code.

    Raises:
        InputError: The file does not exist.
        FileFormatError: The file is not a kernel, or damaged.
        DeviceError: The kernel was tuned on another CPU or GPU, or there is no C compiler or no GPU.
        RunError: The compilation fails.
    """
    file, tensors = KernelFile.load_tensors(path)
    try:
        matrix = CooMatrix(**{name: tensors[name].numpy() for name in _ARRAYS}, shape=file.shape)
        if matrix.digest() != file.sha256:
            raise FileFormatError("the checksum of the matrix is wrong")
        problem = SparseProblem(
            operator=get_operator(file.operator), matrix=as_coo(matrix), n_cols=file.n_cols
        )
        limit = compute_storage_limit(problem)
        has_row_pointers = file.schedule is None or file.gpu is not None
        if has_row_pointers and 8 * file.shape[0] > limit:
            raise FileFormatError(f"the matrix has {file.shape[0]} rows and only {matrix.nnz} elements")
        if file.gpu is not None:
            from sparseflow.tuning.codegen.gpu_kernel import build_saved_kernel

            return build_saved_kernel(file, problem, device, any_gpu=any_cpu, max_bytes=limit)
        program = None if file.schedule is None else build_program(problem, file.schedule, max_bytes=limit)
    except (KeyError, ValueError, TypeError) as error:
        raise FileFormatError(f"{path} is not a readable kernel: {error}; {file.HINT}") from error
    if file.cpu != describe_cpu() and not any_cpu:
        raise DeviceError(
            f"{path} was tuned on another CPU: {file.cpu}; this CPU is {describe_cpu()}. Tune again, or load "
            "with any_cpu=True"
        )
    if program is None:
        return LibraryKernel(problem, speedup=file.speedup)
    return CompiledKernel(program, speedup=file.speedup, cache_dir=cache_dir)


def _rebuild_kernel(
    operator: str,
    n_cols: int | None,
    shape: tuple[int, int],
    arrays: tuple[np.ndarray, ...],
    line: str | None,
    speedup: float | None,
    cache_dir: Path | None,
) -> Kernel:
    """Build a kernel from its pickled state."""
    matrix = CooMatrix(**dict(zip(_ARRAYS, arrays, strict=True)), shape=shape)
    problem = SparseProblem(operator=get_operator(operator), matrix=matrix, n_cols=n_cols)
    if line is None:
        return LibraryKernel(problem, speedup=speedup)
    return CompiledKernel(build_program(problem, Schedule.parse(line)), speedup=speedup, cache_dir=cache_dir)


def read_tensor(tensor: Any) -> np.ndarray:
    """Return a tensor as an array that shares its memory, or has a copy in float32 for bfloat16."""
    import torch

    tensor = tensor.detach()
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.float()
    return tensor.resolve_neg().resolve_conj().numpy()


def to_array(tensor: Tensor) -> np.ndarray:
    """Return a tensor as a contiguous array; see `read_tensor`."""
    return np.ascontiguousarray(read_tensor(tensor))


def _read_array(name: str, value: Any) -> np.ndarray:
    """Return an input as a numeric array."""
    if isinstance(value, np.ma.MaskedArray):
        raise InputError(f"`{name}` is a masked array; fill the masked values, such as `{name}.filled(0)`")
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:
        raise InputError(f"`{name}` is a {type(value).__name__} that numpy cannot read: {error}") from error
    if array.dtype.kind not in "fciub":
        raise InputError(
            f"`{name}` is a {type(value).__name__} of dtype {array.dtype}; pass a numpy array or a dense "
            "tensor of numbers"
        )
    return array


def _combine(result: Any, out: Any, alpha: float, beta: float) -> Any:
    """Compute `alpha * result + beta * out`, into `out` if there is one."""
    if out is None and beta == 0.0:
        return result * alpha
    if out is None:
        raise InputError(f"`beta` (={beta}) is the factor of `out`; pass `out`, too")
    if is_tensor(out) != is_tensor(result) or not (is_tensor(out) or isinstance(out, np.ndarray)):
        raise InputError(f"`out` is a {type(out).__name__}; the result is a {type(result).__name__}")
    if tuple(out.shape) != tuple(result.shape) or out.dtype != result.dtype:
        raise InputError(
            f"`out` has shape {tuple(out.shape)} and dtype {out.dtype}; the result has {tuple(result.shape)} "
            f"and {result.dtype}"
        )
    if beta == 0.0:
        out[...] = result if alpha == 1.0 else result * alpha
    else:
        out *= beta
        out += result if alpha == 1.0 else result * alpha
    return out


def _add_bias_and_activate(result: Any, bias: Any, activation: str | None) -> Any:
    """Add a bias to each row and apply an activation, in place."""
    if bias is not None:
        if is_tensor(bias) != is_tensor(result):
            raise InputError(f"`bias` is a {type(bias).__name__}; the result is a {type(result).__name__}")
        bias = bias if is_tensor(bias) else _read_array("bias", bias)
        if result.ndim < 2 or tuple(bias.shape) != tuple(result.shape[-1:]):
            raise InputError(
                f"`bias` has shape {tuple(bias.shape)}; the result has shape {tuple(result.shape)} and takes "
                "one element for each column of a matrix"
            )
        result += bias
    if activation is None:
        return result
    check_one_of(("relu",), activation=activation)
    if "complex" in str(result.dtype):
        raise InputError(f"`activation` (={activation!r}) needs an order, which complex numbers do not have")
    if not is_tensor(result):
        return np.maximum(result, 0, out=result)
    return result.relu_()
