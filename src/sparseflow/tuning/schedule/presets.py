"""Hand-written schedules that searches measure as baselines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sparseflow.tuning.schedule.formats import count_diagonals, find_mirror_elements
from sparseflow.tuning.schedule.operators import Operator
from sparseflow.tuning.schedule.parser import AxisSplit, FormatLevel, LevelMode, SparseFormat
from sparseflow.tuning.schedule.problem import SparseProblem
from sparseflow.tuning.schedule.rules import BALANCED, CHUNK_SIZES
from sparseflow.tuning.schedule.schedule import Schedule

REFERENCE_PRESETS: Mapping[str, str] = {"spmm": "tiled_csr", "spmv": "csr", "sddmm": "csr"}
"""Operator name -> preset that all schedules are timed against."""

_TILE_COLUMNS = 64
"""Columns whose sums fit registers: four vectors of 16 floats."""

_BLOCK_ROWS = 4
"""Rows of a block."""

_SLICE_ROWS = 16
"""Rows that are interleaved."""

_DIAGONAL_ROWS = 128
"""Rows of a block of diagonals; more rows store more zeros."""

_MIN_DIAGONAL_FILL = 0.5
"""Minimum share of elements in what a format with diagonals stores; CSR stores an index for each element."""

_MIN_SYMMETRIC_BYTES = 8 << 20
"""Minimum size of a symmetric matrix in CSR, bytes. Half of the elements are faster to read if they come from
memory, but take longer to multiply."""

_MIN_CHUNKS_PER_THREAD = 16
"""Minimum number of chunks for each thread, for load balance."""


def build_presets(operator: Operator, extents: Mapping[str, int], threads: int) -> dict[str, Schedule]:
    """Build the presets of all matrices: CSR, tiled or gathered CSR, blocks of 4 rows, sliced ELL.

    Sliced ELL (Monakov et al., HiPEAC 2010) interleaves 16 rows; only SpMV benefits from it.

    Args:
        operator: Operator.
        extents: Axis name -> extent.
        threads: Number of threads.

    Returns:
        Preset name -> schedule.
    """
    rows, cols = operator.sparse_axes

    def make_schedule(*loops: str, vectorize: str | None, block: int = 1, tile: int = 1) -> Schedule:
        return _make_schedule(operator, extents, threads, loops, vectorize, block=block, tile=tile)

    first, last = f"{rows}0", f"{rows}1"
    if operator.name == "spmv":
        return {
            "csr": make_schedule(rows, cols, vectorize=None),
            "csr_gathered": make_schedule(rows, cols, vectorize=cols),
            "bcsr4x1": make_schedule(first, cols, last, block=_BLOCK_ROWS, vectorize=last),
            "sliced_ell": make_schedule(first, last, cols, block=_SLICE_ROWS, vectorize=last),
        }
    (axis,) = operator.dense_axes
    outer, inner = f"{axis}0", f"{axis}1"
    tile = min(_TILE_COLUMNS, 1 << (extents[axis].bit_length() - 1))
    csr = make_schedule(rows, cols, outer, inner, vectorize=inner, tile=tile)
    if operator.name == "sddmm":
        return {"csr": csr}
    return {
        "csr": csr,
        "tiled_csr": make_schedule(rows, outer, cols, inner, vectorize=inner, tile=tile),
        "bcsr4x1": make_schedule(
            first, outer, cols, last, inner, block=_BLOCK_ROWS, vectorize=inner, tile=tile
        ),
    }


def build_matrix_presets(problem: SparseProblem, threads: int) -> dict[str, Schedule]:
    """Build the presets of SpMV with special matrices.

    `"dia"` stores diagonals, if they are full. Otherwise `"symmetric"` stores half of a large symmetric
    matrix.

    Args:
        problem: Problem.
        threads: Number of threads.

    Returns:
        Preset name -> schedule; empty if other formats are better.
    """
    operator, matrix = problem.operator, problem.matrix
    if operator.name != "spmv":
        return {}
    rows = min(_DIAGONAL_ROWS, 1 << (matrix.shape[0].bit_length() - 1))
    if rows > 1 and matrix.nnz >= _MIN_DIAGONAL_FILL * rows * count_diagonals(matrix, rows):
        return {
            "dia": _make_schedule(
                operator, problem.extents, threads, ("i0", "j", "i1"), "i1", block=rows,
                columns=LevelMode.DIAGONAL,
            )
        }  # fmt: skip
    if matrix.nnz * (4 + problem.dtype.itemsize) < _MIN_SYMMETRIC_BYTES:
        return {}
    if find_mirror_elements(matrix) is None:
        return {}
    schedule = _make_schedule(
        operator, problem.extents, threads, ("i", "j"), None, columns=LevelMode.SYMMETRIC
    )
    return {"symmetric": replace(schedule, chunk=BALANCED)}


def _make_schedule(
    operator: Operator,
    extents: Mapping[str, int],
    threads: int,
    loops: tuple[str, ...],
    vectorize: str | None,
    *,
    block: int = 1,
    tile: int = 1,
    columns: LevelMode = LevelMode.COMPRESSED,
) -> Schedule:
    """Build a schedule with dense rows, blocked or not, and a mode of the columns."""
    rows, cols = operator.sparse_axes
    levels = [
        FormatLevel(axis=loop, mode=columns if loop == cols else LevelMode.DENSE)
        for loop in loops
        if loop[0] in operator.sparse_axes
    ]
    steps = -(-extents[rows] // block)
    return Schedule(
        fsplit=(AxisSplit.from_inner_size(rows, extents[rows], block),) if block > 1 else (),
        formats=tuple(
            SparseFormat(tensor=name, order=tuple(level.axis for level in levels), modes=tuple(levels))
            for name in operator.tensors
        ),
        lsplit=tuple(AxisSplit.from_inner_size(axis, extents[axis], tile) for axis in operator.dense_axes),
        lreorder=loops,
        parallel=loops[0],
        vectorize=vectorize,
        unroll=None,
        unroll_factor=0,
        threads=threads,
        chunk=max(
            chunk for chunk in CHUNK_SIZES if chunk <= max(steps // (_MIN_CHUNKS_PER_THREAD * threads), 1)
        ),
    )
