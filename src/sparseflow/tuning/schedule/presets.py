"""Schedules that experts write by hand: every search measures them, so that tuning never loses to one."""

from __future__ import annotations

from collections.abc import Mapping

from sparseflow.tuning.schedule.operators import Operator
from sparseflow.tuning.schedule.rules import CHUNKS
from sparseflow.tuning.schedule.schedule import Level, Mode, Schedule, SparseFormat, Split

REFERENCE: Mapping[str, str] = {"spmm": "tiled_csr", "spmv": "csr", "sddmm": "csr"}
"""Operator -> the preset that everything is timed beside."""

_TILE = 64
"""Columns whose sums are kept in registers: four vectors of 16 floats."""

_BLOCK = 4
"""Rows of a block."""

_SLICE = 16
"""Rows that are walked side by side."""

_PIECES = 16
"""Pieces of work that each thread gets at least, so that none waits for long at the end."""


def presets(operator: Operator, extents: Mapping[str, int], threads: int) -> dict[str, Schedule]:
    """Name -> schedule: CSR, CSR with sums in registers or elements in vectors, blocks of 4 rows, sliced ELL.

    Sliced ELL (Monakov et al., HiPEAC 2010) walks 16 rows side by side; only SpMV gains by that.

    Args:
        operator: What is computed.
        extents: Axis -> extent.
        threads: Threads to use.
    """
    rows, cols = operator.sparse_axes

    def schedule(*loops: str, vectorize: str | None, block: int = 1, tile: int = 1) -> Schedule:
        """One whose rows are dense, in blocks or not, and whose columns are compressed."""
        levels = [
            Level(axis=loop, mode=Mode.COMPRESSED if loop == cols else Mode.DENSE)
            for loop in loops
            if loop[0] in operator.sparse_axes
        ]
        steps = -(-extents[rows] // block)
        return Schedule(
            fsplit=(Split.in_two(rows, extents[rows], block),) if block > 1 else (),
            formats=tuple(
                SparseFormat(tensor=name, order=tuple(level.axis for level in levels), modes=tuple(levels))
                for name in operator.tensors
            ),
            lsplit=tuple(Split.in_two(axis, extents[axis], tile) for axis in operator.dense_axes),
            lreorder=loops,
            parallel=loops[0],
            vectorize=vectorize,
            unroll=None,
            unroll_factor=0,
            threads=threads,
            chunk=max(chunk for chunk in CHUNKS if chunk <= max(steps // (_PIECES * threads), 1)),
        )

    first, last = f"{rows}0", f"{rows}1"
    if operator.name == "spmv":
        return {
            "csr": schedule(rows, cols, vectorize=None),
            "csr_gathered": schedule(rows, cols, vectorize=cols),
            "bcsr4x1": schedule(first, cols, last, block=_BLOCK, vectorize=last),
            "sliced_ell": schedule(first, last, cols, block=_SLICE, vectorize=last),
        }
    (axis,) = operator.dense_axes
    outer, inner = f"{axis}0", f"{axis}1"
    tile = min(_TILE, 1 << (extents[axis].bit_length() - 1))
    csr = schedule(rows, cols, outer, inner, vectorize=inner, tile=tile)
    if operator.name == "sddmm":
        return {"csr": csr}
    return {
        "csr": csr,
        "tiled_csr": schedule(rows, outer, cols, inner, vectorize=inner, tile=tile),
        "bcsr4x1": schedule(first, outer, cols, last, inner, block=_BLOCK, vectorize=inner, tile=tile),
    }
