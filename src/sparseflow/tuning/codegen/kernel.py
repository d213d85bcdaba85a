"""Tuned operators that are called like functions, and their files."""

from __future__ import annotations

import ctypes
import os
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from sparseflow.core.artifact import Artifact
from sparseflow.core.device import describe_cpu
from sparseflow.errors import DeviceError, FileFormatError, InputError, RunError
from sparseflow.tuning.codegen.c_source import SYMBOL
from sparseflow.tuning.codegen.program import (
    KernelProgram,
    allocate_aligned,
    build_program,
    compute_storage_limit,
)
from sparseflow.tuning.schedule.matrices import CooMatrix, as_coo, is_tensor
from sparseflow.tuning.schedule.operators import get_operator
from sparseflow.tuning.schedule.problem import SparseProblem
from sparseflow.tuning.schedule.schedule import Schedule, ScheduleLine

_ARRAYS = ("rows", "cols", "values")

_PROCESS_ID = os.getpid()
"""Process that imported this module. Another one is a fork of it, in which OpenMP may have dead threads."""

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


class Kernel(ABC):
    """One operator with one sparse matrix.

    SpMM takes B of shape [columns of A, n_cols] and returns C = A B. SpMV takes x of shape [columns of A] and
    returns y = A x. SDDMM takes X of shape [rows of A, n_cols] and Y of shape [columns of A, n_cols] and
    returns D, the elementwise product of A and X Yᵀ, as a sparse matrix. Torch inputs give torch outputs.

    Formats with dense levels multiply padding zeros. If B contains an infinity or NaN, other results in the
    same blocks become NaN.

    Kernels can be copied and pickled; the copy is compiled again, or read from the compile cache. In a forked
    process kernels run with one thread.

    Attributes:
        problem: Problem.
        speedup: Time of the best baseline over the time of this kernel; None if it was not tuned.
    """

    def __init__(self, problem: SparseProblem, speedup: float | None, cache_dir: Path | None = None) -> None:
        self.problem = problem
        self.speedup = speedup
        self._cache_dir = cache_dir
        self._shapes, self._dtype = problem.input_shapes, problem.dtype

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
    def compute(self, *inputs: np.ndarray) -> np.ndarray:
        """Compute C or y, or the values of D in the order of the matrix, without checking the inputs."""

    def __call__(self, *inputs: Any) -> Any:
        """Compute the result.

        Args:
            inputs: numpy arrays or CPU tensors with the dtype of the matrix (float32 or float64).

        Raises:
            InputError: The number, a shape or a dtype of the inputs is wrong, or an input requires a gradient
                while torch records gradients.
        """
        shapes = self._shapes
        if len(inputs) != len(shapes):
            raise InputError(
                f"{self.problem.operator.name} expects {len(shapes)} inputs ({', '.join(shapes)}), "
                f"got {len(inputs)}"
            )
        as_torch = any(is_tensor(value) for value in inputs)
        output = self.compute(
            *(
                self._validate_input(name, value, shape)
                for value, (name, shape) in zip(inputs, shapes.items(), strict=True)
            )
        )
        if self.problem.operator.sparse_output:
            return _build_sparse_output(self.problem.matrix, output, as_torch)
        if not as_torch:
            return output
        import torch

        return torch.from_numpy(output)

    def _validate_input(self, name: str, value: Any, shape: tuple[int, ...]) -> np.ndarray:
        if (
            type(value) is np.ndarray
            and value.shape == shape
            and value.dtype == self._dtype
            and value.flags.c_contiguous
        ):
            return value
        if isinstance(value, np.ma.MaskedArray):
            raise InputError(
                f"`{name}` is a masked array; fill the masked values, such as `{name}.filled(0)`"
            )
        try:
            array = _read_tensor(name, value) if is_tensor(value) else np.asarray(value)
        except (ValueError, TypeError, RuntimeError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"`{name}` is a {type(value).__name__} that numpy cannot read: {error}"
            ) from error
        if array.dtype.hasobject and not isinstance(value, np.ndarray):
            raise InputError(f"`{name}` is a {type(value).__name__}; pass a numpy array or a dense tensor")
        if array.shape != shape:
            raise InputError(f"`{name}` has shape {array.shape}; the kernel was tuned for {shape}")
        if array.dtype != self.problem.dtype:
            raise InputError(
                f"`{name}` has dtype {array.dtype}; the kernel was tuned for {self.problem.dtype}"
            )
        return np.ascontiguousarray(array)

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
        )
        # `from_numpy` warns of read-only arrays.
        file.save_tensors(path, {name: torch.tensor(getattr(matrix, name)) for name in _ARRAYS})


class CompiledKernel(Kernel):
    """A compiled schedule.

    Args:
        program: Program.
        speedup: Time of the best baseline over the time of this kernel.
        cache_dir: Directory of compiled code; see `compile_source`.

    Raises:
        DeviceError: There is no C compiler.
        RunError: The compilation or loading of the code fails.
    """

    def __init__(
        self, program: KernelProgram, *, speedup: float | None = None, cache_dir: Path | None = None
    ) -> None:
        super().__init__(program.problem, speedup, cache_dir)
        self.program = program
        path = program.compile(cache_dir=cache_dir)
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise RunError(
                f"cannot load the compiled kernel: {error}; set SPARSEFLOW_CACHE to a directory that allows "
                "execution"
            ) from error
        self._function = getattr(self._library, SYMBOL)
        self._function.restype = None
        self._is_parallel = program.nest.threads > 1
        for array in program.leading_arrays:
            array.flags.writeable = False  # as the matrix, which `save` writes
        self._leading_addresses = [array.ctypes.data for array in program.leading_arrays]
        self._trailing_addresses = [array.ctypes.data for array in program.trailing_arrays]
        count = len(self._leading_addresses) + len(self.problem.input_shapes) + len(self._trailing_addresses)
        self._input_array_type = ctypes.c_void_p * count
        self._shape = program.output_shape
        self._rows = None if program.problem.operator.sparse_output else program.problem.matrix.shape[0]
        self._free_buffers: list[tuple[np.ndarray, Any]] = []

    @property
    def schedule(self) -> Schedule:
        return self.program.schedule

    def compute(self, *inputs: np.ndarray) -> np.ndarray:
        # Calls often take microseconds, so everything that does not change is prepared in advance.
        if self._is_parallel and os.getpid() != _PROCESS_ID:
            # libgomp waits forever for threads that exist in the parent only. Without active parallel regions
            # it needs none.
            self._library.omp_set_max_active_levels(0)
        buffer = self._acquire_buffer()
        output, pointer = buffer
        addresses = [array.ctypes.data for array in inputs]
        self._function(
            self._input_array_type(*self._leading_addresses, *addresses, *self._trailing_addresses), pointer
        )
        result = self.program.extract_result(output) if self._rows is None else output[: self._rows]
        # Returned after use: another thread that takes the buffer checks for views of it.
        self._free_buffers.append(buffer)
        return result

    def _acquire_buffer(self) -> tuple[np.ndarray, Any]:
        """Return an output buffer and its pointer, reusing the last one if no view of it exists.

        Touching the pages of a new large array can take longer than the computation.
        """
        try:
            buffer = self._free_buffers.pop()
        except IndexError:
            pass
        else:
            if sys.getrefcount(buffer[0].base) == _EXCLUSIVE_REFERENCES:
                return buffer
        output = allocate_aligned(self._shape, self.problem.dtype)
        return output, (ctypes.c_void_p * 1)(output.ctypes.data)


class LibraryKernel(Kernel):
    """The library's implementation, if it is the fastest or nothing can be compiled."""

    def __init__(self, problem: SparseProblem, *, speedup: float | None = None) -> None:
        super().__init__(problem, speedup)
        self._function = problem.get_library_function()

    @property
    def schedule(self) -> None:
        return None

    def compute(self, *inputs: np.ndarray) -> np.ndarray:
        return self._function(*inputs)


def load(path: Path | str, *, any_cpu: bool = False, cache_dir: Path | None = None) -> Kernel:
    """Read a kernel from a file of `Kernel.save`.

    Args:
        path: File.
        any_cpu: Accept a kernel that was tuned on another CPU; it is correct but may be slow.
        cache_dir: Directory of compiled code.

    Raises:
        InputError: The file does not exist.
        FileFormatError: The file is not a kernel, or damaged.
        DeviceError: The kernel was tuned on another CPU, or there is no C compiler.
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
        if file.schedule is None and 8 * file.shape[0] > limit:  # the row pointers of scipy
            raise FileFormatError(f"the matrix has {file.shape[0]} rows and only {matrix.nnz} elements")
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


def _read_tensor(name: str, tensor: Any) -> np.ndarray:
    """Return a tensor as an array that shares its memory."""
    import torch
    from torch.autograd import forward_ad

    if tensor.requires_grad and torch.is_grad_enabled():
        raise InputError(
            f"`{name}` requires a gradient, which kernels do not compute; pass `{name}.detach()`, or call "
            "the kernel within `torch.no_grad()`"
        )
    if forward_ad.unpack_dual(tensor).tangent is not None:
        raise InputError(f"`{name}` has a tangent of forward-mode differentiation; kernels compute none")
    if tensor.device.type != "cpu":
        raise InputError(f"`{name}` is on {tensor.device}; pass a CPU tensor")
    if tensor.layout is not torch.strided:
        raise InputError(f"`{name}` is sparse ({tensor.layout}); pass a dense tensor")
    if tensor.dtype is torch.bfloat16:
        raise InputError(f"`{name}` has dtype bfloat16; pass float32 or float64, the dtype of the matrix")
    return tensor.detach().resolve_neg().numpy()


def _build_sparse_output(matrix: CooMatrix, values: np.ndarray, as_torch: bool) -> Any:
    csr = CooMatrix(rows=matrix.rows, cols=matrix.cols, values=values, shape=matrix.shape).to_scipy()
    if not as_torch:
        return csr
    import torch

    parts = (torch.from_numpy(part) for part in (csr.indptr, csr.indices, csr.data))
    return torch.sparse_csr_tensor(*parts, size=csr.shape, check_invariants=False)
