"""A tuned operator that is called like a function."""

from __future__ import annotations

import ctypes
import json
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sparseflow.core.config import describe_validation_error
from sparseflow.core.device import describe_cpu
from sparseflow.core.files import write_atomic
from sparseflow.errors import DeviceError, FileFormatError, InputError
from sparseflow.tuning.codegen.c_source import SYMBOL
from sparseflow.tuning.codegen.program import Program, aligned, build
from sparseflow.tuning.schedule.matrices import Coo, as_coo
from sparseflow.tuning.schedule.operators import operator
from sparseflow.tuning.schedule.problem import Problem
from sparseflow.tuning.schedule.schedule import Schedule

VERSION = 1
"""Of the files that `Kernel.save` writes."""

_ARRAYS = ("rows", "cols", "values")

_UNSHARED = 2
"""References to memory that one view has: the view's, and the question's own."""


class _Record(BaseModel):
    """What a file says besides the matrix."""

    model_config = ConfigDict(extra="forbid", strict=True)

    version: int
    operator: str
    n_cols: int | None
    shape: Annotated[tuple[int, int], Field(strict=False)]
    schedule: str | None
    speedup: float | None
    cpu: str
    sha256: str


class Kernel(ABC):
    """One operator with one sparse matrix.

    SpMM takes B of shape (columns of A, n_cols) and gives C = A B; SpMV takes x of shape (columns of A,) and
    gives y = A x; SDDMM takes X of shape (rows of A, n_cols) and Y of shape (columns of A, n_cols) and gives
    D, A times X Yᵀ element by element, as a sparse matrix. Given tensors of torch it gives such back.

    Formats with dense levels multiply zeros that only fill blocks: where B holds an infinity or NaN, results
    in the same blocks become NaN.

    Attributes:
        problem: What it computes.
        speedup: Time of the best baseline over its own, as tuning measured them; None where it did not.
    """

    def __init__(self, problem: Problem, speedup: float | None) -> None:
        self.problem = problem
        self.speedup = speedup
        self._shapes, self._dtype = problem.input_shapes, problem.dtype

    @property
    @abstractmethod
    def schedule(self) -> Schedule | None:
        """What it runs; None where it is a library's."""

    @abstractmethod
    def compute(self, *inputs: np.ndarray) -> np.ndarray:
        """C or y, or the values of D in the order of the matrix; nothing is checked."""

    def __call__(self, *inputs: Any) -> Any:
        """Compute.

        Args:
            inputs: Arrays of numpy or CPU tensors of torch, of the matrix's type (float32 or float64).

        Raises:
            InputError: Their number, a shape or a type does not fit.
        """
        shapes = self._shapes
        if len(inputs) != len(shapes):
            raise InputError(
                f"{self.problem.operator.name} takes {len(shapes)} inputs ({', '.join(shapes)}), and "
                f"{len(inputs)} were given"
            )
        as_torch = any(_is_torch(value) for value in inputs)
        found = self.compute(
            *(
                self._checked(name, value, shape)
                for value, (name, shape) in zip(inputs, shapes.items(), strict=True)
            )
        )
        if self.problem.operator.sparse_output:
            return _sparse(self.problem.matrix, found, as_torch)
        if not as_torch:
            return found
        import torch

        return torch.from_numpy(found)

    def _checked(self, name: str, value: Any, shape: tuple[int, ...]) -> np.ndarray:
        if (
            type(value) is np.ndarray
            and value.shape == shape
            and value.dtype == self._dtype
            and value.flags.c_contiguous
        ):
            return value
        if _is_torch(value):
            value = _strided(name, value)
        array = np.asarray(value)
        if array.dtype.hasobject and not isinstance(value, np.ndarray):
            raise InputError(
                f"`{name}` is a {type(value).__name__}; give an array of numpy or a dense tensor"
            )
        if array.shape != shape:
            raise InputError(f"`{name}` has the shape {array.shape}, and this kernel was tuned for {shape}")
        if array.dtype != self.problem.dtype:
            raise InputError(
                f"`{name}` holds {array.dtype}, and this kernel was tuned for {self.problem.dtype}"
            )
        return np.ascontiguousarray(array)

    def save(self, path: Path | str) -> None:
        """Write the schedule and the matrix; `load` compiles again only where the compiler's cache is gone.

        Raises:
            OSError: The folder is missing or cannot be written.
        """
        from safetensors.numpy import save

        matrix = self.problem.matrix
        record = {
            "version": VERSION,
            "operator": self.problem.operator.name,
            "n_cols": self.problem.n_cols,
            "shape": matrix.shape,
            "schedule": None if self.schedule is None else str(self.schedule),
            "speedup": self.speedup,
            "cpu": describe_cpu(),
            "sha256": matrix.digest(),
        }
        arrays = {name: getattr(matrix, name) for name in _ARRAYS}
        write_atomic(Path(path), save(arrays, metadata={"sparseflow": json.dumps(record)}))


class CompiledKernel(Kernel):
    """A schedule, compiled.

    Args:
        program: What to run.
        speedup: What tuning measured.
        cache: Folder for compiled code; see `compile_source`.

    Raises:
        DeviceError: There is no C compiler.
        RunError: It fails.
    """

    def __init__(self, program: Program, *, speedup: float | None = None, cache: Path | None = None) -> None:
        super().__init__(program.problem, speedup)
        self.program = program
        self._function = getattr(ctypes.CDLL(str(program.compiled(cache=cache))), SYMBOL)
        self._function.restype = None
        self._before = [array.ctypes.data for array in program.before]
        self._after = [array.ctypes.data for array in program.after]
        count = len(self._before) + len(self.problem.input_shapes) + len(self._after)
        self._inputs = ctypes.c_void_p * count
        self._shape = program.output_shape
        self._rows = None if program.problem.operator.sparse_output else program.problem.matrix.shape[0]
        self._spare: list[tuple[np.ndarray, Any]] = []

    @property
    def schedule(self) -> Schedule:
        return self.program.schedule

    def compute(self, *inputs: np.ndarray) -> np.ndarray:
        # Calls of microseconds are common: what does not change from one to the next is not done again.
        room = self._room()
        output, pointer = room
        addresses = [array.ctypes.data for array in inputs]
        self._function(self._inputs(*self._before, *addresses, *self._after), pointer)
        found = self.program.result(output) if self._rows is None else output[: self._rows]
        # Only now: who takes it from here, in another thread, looks whether somebody has a view of it.
        self._spare.append(room)
        return found

    def _room(self) -> tuple[np.ndarray, Any]:
        """Memory for a result, and a pointer to it: the last one's, unless somebody still has a view of it.

        The system hands out a large array page by page, as it is written, which can take longer than to
        compute it.
        """
        try:
            room = self._spare.pop()
        except IndexError:
            pass
        else:
            if sys.getrefcount(room[0].base) == _UNSHARED:
                return room
        output = aligned(self._shape, self.problem.dtype)
        return output, (ctypes.c_void_p * 1)(output.ctypes.data)


class LibraryKernel(Kernel):
    """What a library does with the problem: where that is fastest, or where nothing can be compiled."""

    def __init__(self, problem: Problem, *, speedup: float | None = None) -> None:
        super().__init__(problem, speedup)
        self._function = problem.library()

    @property
    def schedule(self) -> None:
        return None

    def compute(self, *inputs: np.ndarray) -> np.ndarray:
        return self._function(*inputs)


def load(path: Path | str, *, any_cpu: bool = False, cache: Path | None = None) -> Kernel:
    """Read a kernel that `Kernel.save` wrote.

    Args:
        path: The file.
        any_cpu: Take one that was tuned on another CPU, too: it is right, and perhaps slow.
        cache: Folder for compiled code.

    Raises:
        InputError: There is no such file.
        FileFormatError: It is no kernel, or damaged.
        DeviceError: It was tuned on another CPU, or there is no C compiler.
        RunError: It does not compile.
    """
    from safetensors import SafetensorError, safe_open

    file = Path(path)
    if not file.is_file():
        raise InputError(f"there is no file {file}")
    try:
        with safe_open(str(file), framework="numpy") as opened:
            record = _Record.model_validate_json((opened.metadata() or {})["sparseflow"])
            arrays = {name: opened.get_tensor(name) for name in _ARRAYS}
        if record.version != VERSION:
            raise FileFormatError(f"it is of version {record.version}, and this reads {VERSION}")
        matrix = Coo(**arrays, shape=record.shape)
        if matrix.digest() != record.sha256:
            raise FileFormatError("its matrix is not the one that was saved")
        problem = Problem(operator=operator(record.operator), matrix=as_coo(matrix), n_cols=record.n_cols)
        program = None if record.schedule is None else build(problem, Schedule.parse(record.schedule))
    except ValidationError as error:
        problem = describe_validation_error(error)
        raise FileFormatError(f"{file} is not a kernel that can be read: {problem}; tune again") from error
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise FileFormatError(f"{file} is not a kernel that can be read: {error}; tune again") from error
    if record.cpu != describe_cpu() and not any_cpu:
        raise DeviceError(
            f"{file} was tuned on another CPU: {record.cpu}; this one is {describe_cpu()}; tune again, or load "
            "the kernel with any_cpu=True"
        )
    if program is None:
        return LibraryKernel(problem, speedup=record.speedup)
    return CompiledKernel(program, speedup=record.speedup, cache=cache)


def _strided(name: str, tensor: Any) -> Any:
    """A tensor of torch, if numpy can read it."""
    import torch

    if tensor.device.type != "cpu":
        raise InputError(f"`{name}` lies on {tensor.device}, and this runs on the CPU: give a tensor there")
    if tensor.layout is not torch.strided:
        raise InputError(f"`{name}` is sparse ({tensor.layout}); give a dense tensor")
    if tensor.dtype is torch.bfloat16:
        raise InputError(f"`{name}` holds bfloat16; give float32 or float64, as the matrix does")
    return tensor.detach()


def _is_torch(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "torch"


def _sparse(matrix: Coo, values: np.ndarray, as_torch: bool) -> Any:
    found = Coo(rows=matrix.rows, cols=matrix.cols, values=values, shape=matrix.shape).to_scipy()
    if not as_torch:
        return found
    import torch

    parts = (torch.from_numpy(part) for part in (found.indptr, found.indices, found.data))
    return torch.sparse_csr_tensor(*parts, size=found.shape, check_invariants=False)
