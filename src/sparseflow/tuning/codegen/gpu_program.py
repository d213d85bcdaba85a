"""A schedule of a GPU kernel with its matrix on the device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparseflow.core.extras import require
from sparseflow.errors import InputError
from sparseflow.tuning.codegen.cusparse import CusparseProduct
from sparseflow.tuning.codegen.extrema import Extremum
from sparseflow.tuning.codegen.torch_ops import build_csr_tensor
from sparseflow.tuning.schedule.formats import LevelSpec, PackedMatrix, pack
from sparseflow.tuning.schedule.gpu import GpuMapping
from sparseflow.tuning.schedule.matrices import CooMatrix
from sparseflow.tuning.schedule.parser import LevelMode
from sparseflow.tuning.schedule.problem import SparseProblem
from sparseflow.tuning.schedule.schedule import Schedule

_MAX_POSITIONS = 2**31 - 1


class _ValuesByDtype:
    """Values of a matrix on the device, converted once to each dtype that inputs have."""

    def __init__(self, values: Tensor) -> None:
        self._values, self._converted = values, {values.dtype: values}

    def convert(self, dtype: torch.dtype) -> Tensor:
        if dtype not in self._converted:
            self._converted[dtype] = self._values.to(dtype)
        return self._converted[dtype]


class GpuProgram:
    """A schedule for a problem on a GPU, ready to run.

    Args:
        problem: SpMM or SDDMM.
        schedule: Schedule of a GPU kernel.
        device: The GPU, or the CPU if Triton interprets its kernels (TRITON_INTERPRET=1).
        max_bytes: Limit of the packed matrix.

    Raises:
        InputError: The schedule is not one of a GPU kernel, or the packed matrix is too large.
    """

    def __init__(
        self, problem: SparseProblem, schedule: Schedule, device: torch.device, *, max_bytes: int
    ) -> None:
        self.problem, self.schedule, self.device = problem, schedule, device
        self.mapping = GpuMapping.from_schedule(schedule, problem.operator, problem.extents)
        self._storage = _store(problem.matrix, self.mapping, max_bytes)
        self._arrays = {
            name: torch.from_numpy(array).to(device) for name, array in self._storage.arrays.items()
        }
        self._values = _ValuesByDtype(self.pack_values(torch.tensor(problem.matrix.values)))

    def replace_values(self, values: Tensor) -> GpuProgram:
        """Create a program with other values, in the order of the matrix, that shares the storage."""
        program = copy.copy(self)
        program._values = _ValuesByDtype(self.pack_values(values))
        return program

    def pack_values(self, values: Tensor) -> Tensor:
        """Bring values of the matrix into the order of the storage.

        Args:
            values: Values in the order of the matrix; shape [elements].
        """
        values = values.to(self.device)
        positions = self._element_positions
        if positions is None:
            return values.contiguous()
        packed = values.new_zeros(self._storage.num_values)
        packed[positions] = values
        return packed

    @cached_property
    def _element_positions(self) -> Tensor | None:
        positions = self._storage.element_positions
        return None if positions is None else torch.from_numpy(positions).to(self.device)

    def run(self, *inputs: Tensor, values: Tensor | None = None) -> Tensor:
        """Compute C, or the values of D in the order of the matrix.

        Args:
            inputs: Contiguous tensors of one dtype on the device, of the shapes of the problem, except that
                the number of columns can be another.
            values: Values of A of the same dtype, in the order of the storage; by default the matrix's.
        """
        return self._execute(_launch, inputs, values)

    def request_compilation(self, *inputs: Tensor) -> None:
        """Request the compilation of the kernel for inputs; see `core.kernel_compilation`."""
        self._execute(_request_compilation, inputs, None)

    def _execute(self, launch: _Launch, inputs: tuple[Tensor, ...], values: Tensor | None) -> Tensor:
        values = self._values.convert(inputs[0].dtype) if values is None else values
        if self.problem.operator.sparse_output:
            return self._sample(launch, inputs[0], inputs[1], values)
        return self._multiply(launch, inputs[0], values)

    def _multiply(self, launch: _Launch, dense: Tensor, values: Tensor) -> Tensor:
        kernels: Any = import_kernels()
        mapping, arrays = self.mapping, self._arrays
        rows, num_cols = self.problem.matrix.shape[0], dense.shape[1]
        grid_columns = -(-num_cols // mapping.tile)
        options: dict[str, Any] = {
            "TILE": mapping.tile, "EVEN": num_cols % mapping.tile == 0, "num_warps": mapping.warps
        }  # fmt: skip
        wide = max(dense.numel(), rows * num_cols) > _MAX_POSITIONS
        if mapping.template == "segments":
            split = mapping.chunk is not None
            out = dense.new_empty(rows, num_cols)
            if split:
                sums = torch.float64 if dense.dtype == torch.float64 else torch.float32
                out = dense.new_zeros(rows, num_cols, dtype=sums)
            launch(
                kernels.spmm_segments, (len(arrays["starts"]), grid_columns),
                arrays["rows"], arrays["starts"], arrays["ends"], arrays["shared"], arrays["crd"], values,
                dense, out, num_cols, STEP=mapping.step, SPLIT=split, WIDE=wide, **options,
            )  # fmt: skip
            return out.to(dense.dtype)
        out = dense.new_empty(rows, num_cols)
        grid = -(-rows // mapping.rows), grid_columns
        operands = arrays["pos"], arrays["crd"], values, dense, out, rows
        options["ROWS"] = mapping.rows
        if mapping.template == "rows":
            launch(kernels.spmm_rows, grid, *operands, num_cols, WIDE=wide, **options)
        elif mapping.template == "panels":
            launch(kernels.spmm_panels, grid, *operands, num_cols, STEP=mapping.step, **options)
        else:
            precision = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
            launch(
                kernels.spmm_blocks, grid, *operands, dense.shape[0], num_cols, INNER=mapping.inner,
                PRECISION=precision, **options,
            )  # fmt: skip
        return out

    def _sample(self, launch: _Launch, x: Tensor, y: Tensor, values: Tensor) -> Tensor:
        kernels: Any = import_kernels()
        mapping, arrays = self.mapping, self._arrays
        num_cols, out = x.shape[1], torch.empty_like(values)
        options: dict[str, Any] = {
            "STEP": mapping.step, "TILE": mapping.tile, "num_warps": mapping.warps,
            "EVEN": num_cols % mapping.tile == 0, "WIDE": max(x.numel(), y.numel()) > _MAX_POSITIONS,
        }  # fmt: skip
        if mapping.template == "elements":
            launch(
                kernels.sddmm_elements, (-(-len(values) // mapping.step),),
                arrays["rows"], arrays["crd"], values, x, y, out, len(values), num_cols, **options,
            )  # fmt: skip
        else:
            launch(
                kernels.sddmm_segments, (len(arrays["starts"]),),
                arrays["rows"], arrays["starts"], arrays["ends"], arrays["crd"], values, x, y, out, num_cols,
                SPLIT=mapping.chunk is not None, ONCE=num_cols <= mapping.tile, **options,
            )  # fmt: skip
        return out


_Launch = Callable[..., object]
"""(kernel, grid, *arguments, **options) -> None."""


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    kernel[grid](*arguments, **options)


def _request_compilation(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    kernel.warmup(*arguments, grid=grid, **options)


class GpuLibraryProgram:
    """The library's implementation (cuSPARSE), with the interface of `GpuProgram`.

    Args:
        problem: SpMM or SDDMM.
        device: The GPU.
        algorithm: Algorithm of cuSPARSE, of `cusparse.ALGORITHMS`; by default torch calls cuSPARSE.

    Raises:
        DeviceError: `algorithm` is not None and cuSPARSE cannot be loaded.
    """

    schedule = None

    def __init__(self, problem: SparseProblem, device: torch.device, algorithm: str | None = None) -> None:
        self.problem, self.device, self.algorithm = problem, device, algorithm
        matrix = problem.matrix
        csr = matrix.to_scipy()
        self._indices = tuple(
            torch.from_numpy(part.astype(np.int32)).to(device) for part in (csr.indptr, csr.indices)
        )
        self._values = _ValuesByDtype(torch.tensor(matrix.values, device=device))
        self._product: CusparseProduct | None = None
        if algorithm is not None:
            rows = torch.from_numpy(matrix.rows.astype(np.int32)).to(device)
            offsets, cols = self._indices
            self._product = CusparseProduct(
                problem.operator.name, algorithm, matrix.shape, offsets, rows, cols
            )

    def replace_values(self, values: Tensor) -> GpuLibraryProgram:
        program = copy.copy(self)
        program._values = _ValuesByDtype(self.pack_values(values))
        return program

    def pack_values(self, values: Tensor) -> Tensor:
        return values.to(self.device)

    def run(self, *inputs: Tensor, values: Tensor | None = None) -> Tensor:
        dtype = inputs[0].dtype
        values = self._values.convert(dtype) if values is None else values.to(dtype)
        if self.problem.operator.sparse_output:
            x, y = inputs
            if self._product is not None:
                return self._product.sample(x, y) * values
            zeros = self._build_matrix(torch.zeros_like(values))
            return torch.sparse.sampled_addmm(zeros, x, y.t()).values() * values
        if self._product is not None:
            return self._product.multiply(inputs[0], values)
        return torch.sparse.mm(self._build_matrix(values), inputs[0])

    def _build_matrix(self, values: Tensor) -> Tensor:
        indptr, indices = self._indices
        return build_csr_tensor(indptr, indices, values, self.problem.matrix.shape)


def find_tensor_extrema(
    pos: Tensor, crd: Tensor, values: Tensor, dense: Tensor, reduce: Extremum
) -> tuple[Tensor, Tensor]:
    """Find the largest or smallest products of every row on a GPU; see `extrema.find_extrema`.

    Args:
        pos, crd: First element of each row, and the end, and columns; int32.
        values: Values of the elements.
        dense: Contiguous; shape [columns, n], with the dtype of the values.
        reduce: `"max"` or `"min"`.
    """
    num_rows, num_cols = len(pos) - 1, dense.shape[1]
    out = dense.new_empty(num_rows, num_cols)
    elements = torch.empty_like(out, dtype=torch.int64 if dense.itemsize == 8 else torch.int32)
    tile = min(max(16, 1 << (num_cols - 1).bit_length()), 128)
    import_kernels().spmm_extrema[(num_rows, -(-num_cols // tile))](
        pos, crd, values, dense, out, elements, num_cols, TILE=tile, EVEN=num_cols % tile == 0,
        LARGEST=reduce == "max", num_warps=1,
    )  # fmt: skip
    return out, elements


def import_kernels() -> Any:
    """Import the Triton kernels.

    Raises:
        MissingExtraError: Triton is missing.
    """
    require("triton", "tuning")
    from sparseflow.tuning.codegen import triton_kernels

    return triton_kernels


@dataclass(frozen=True, kw_only=True)
class _Storage:
    """Index arrays by the names of the kernels' arguments, and the order of the values.

    Attributes:
        arrays: Name -> array.
        num_values: Stored values.
        element_positions: Position of each element of the matrix; None if they have the order of the matrix.
    """

    arrays: dict[str, np.ndarray]
    num_values: int
    element_positions: np.ndarray | None = None


def _store(matrix: CooMatrix, mapping: GpuMapping, max_bytes: int) -> _Storage:
    if matrix.nnz > _MAX_POSITIONS:
        raise InputError(f"the matrix has {matrix.nnz} elements; GPU kernels take at most {_MAX_POSITIONS}")
    if mapping.template in ("blocks", "panels"):
        return _store_blocks(matrix, mapping, max_bytes)
    pos, crd = matrix.to_scipy().indptr.astype(np.int32), matrix.cols.astype(np.int32)
    if mapping.template == "elements":
        return _Storage(arrays={"rows": matrix.rows.astype(np.int32), "crd": crd}, num_values=matrix.nnz)
    if mapping.template == "rows":
        return _Storage(arrays={"pos": pos, "crd": crd}, num_values=matrix.nnz)
    starts, ends, rows = pos[:-1], pos[1:], np.arange(matrix.shape[0], dtype=np.int32)
    shared = np.zeros(1, np.int8)
    if mapping.chunk is not None:
        # Empty rows stay zero; the output is zeroed.
        counts = -(-np.diff(pos) // mapping.chunk)
        rows = np.repeat(rows, counts)
        number = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        starts = (starts[rows] + mapping.chunk * number).astype(np.int32)
        ends = np.minimum(starts + mapping.chunk, ends[rows])
        shared = (counts[rows] > 1).astype(np.int8)
    arrays = {"rows": rows, "starts": starts.copy(), "ends": ends.copy(), "shared": shared, "crd": crd}
    return _Storage(arrays=arrays, num_values=matrix.nnz)


def _store_blocks(matrix: CooMatrix, mapping: GpuMapping, max_bytes: int) -> _Storage:
    sizes, dense = (mapping.rows, mapping.inner), LevelMode.DENSE
    outer = [-(-extent // size) for extent, size in zip(matrix.shape, sizes, strict=True)]
    specs = [
        LevelSpec(axis="i0", dim=0, weight=sizes[0], extent=outer[0], mode=dense),
        LevelSpec(axis="k0", dim=1, weight=sizes[1], extent=outer[1], mode=LevelMode.COMPRESSED),
        LevelSpec(axis="i1", dim=0, weight=1, extent=sizes[0], mode=dense),
        LevelSpec(axis="k1", dim=1, weight=1, extent=sizes[1], mode=dense),
    ]
    packed: PackedMatrix = pack(matrix, specs, max_bytes=max_bytes)
    level = packed.levels[1]
    assert level.pos is not None and level.crd is not None
    arrays = {"pos": level.pos.astype(np.int32), "crd": level.crd.astype(np.int32)}
    return _Storage(arrays=arrays, num_values=len(packed.values), element_positions=packed.element_positions)
