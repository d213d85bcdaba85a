"""Schedules that experts write by hand: every search measures them, so that tuning never loses to one."""

from __future__ import annotations

from collections.abc import Mapping

from sparseflow.tuning.operators import Operator
from sparseflow.tuning.schedule import Level, Mode, Schedule, SparseFormat, Split

_TILE = 64
"""Columns whose sums are kept in registers: four vectors of 16 floats."""

_ROWS = 4
"""Rows of a block."""

_ROW_CHUNK = 16
"""Rows that a thread takes at a time."""


def presets(operator: Operator, extents: Mapping[str, int], threads: int) -> dict[str, Schedule]:
    """Name -> schedule: CSR, CSR with sums in registers or elements in vectors, and blocks of 4 rows.

    Args:
        operator: What is computed.
        extents: Axis -> extent.
        threads: Threads to use.
    """
    rows, cols = operator.sparse_axes
    csr = _format(operator, ((rows, Mode.DENSE), (cols, Mode.COMPRESSED)))
    block = _format(operator, ((f"{rows}0", Mode.DENSE), (cols, Mode.COMPRESSED), (f"{rows}1", Mode.DENSE)))
    blocked = (Split.in_two(rows, extents[rows], _ROWS),)
    if operator.name == "spmv":
        return {
            "csr": _schedule(formats=csr, loops=(rows, cols), parallel=rows, vectorize=None, threads=threads),
            "csr_gathered": _schedule(
                formats=csr, loops=(rows, cols), parallel=rows, vectorize=cols, threads=threads
            ),
            "bcsr4x1": _schedule(
                fsplit=blocked, formats=block, loops=(f"{rows}0", cols, f"{rows}1"),
                parallel=f"{rows}0", vectorize=f"{rows}1", threads=threads,
            ),
        }  # fmt: skip
    (dense,) = operator.dense_axes
    tile = min(_TILE, 1 << (extents[dense].bit_length() - 1))
    outer, inner = f"{dense}0", f"{dense}1"
    split = (Split.in_two(dense, extents[dense], tile),)
    if operator.name == "sddmm":
        return {
            "csr": _schedule(
                formats=csr, lsplit=split, loops=(rows, cols, outer, inner), parallel=rows, vectorize=inner,
                threads=threads,
            ),
        }  # fmt: skip
    return {
        "csr": _schedule(
            formats=csr, lsplit=split, loops=(rows, cols, outer, inner), parallel=rows, vectorize=inner,
            threads=threads,
        ),
        "tiled_csr": _schedule(
            formats=csr, lsplit=split, loops=(rows, outer, cols, inner), parallel=rows, vectorize=inner,
            threads=threads,
        ),
        "bcsr4x1": _schedule(
            fsplit=blocked, formats=block, lsplit=split, loops=(f"{rows}0", outer, cols, f"{rows}1", inner),
            parallel=f"{rows}0", vectorize=inner, threads=threads,
        ),
    }  # fmt: skip


def _format(operator: Operator, levels: tuple[tuple[str, Mode], ...]) -> tuple[SparseFormat, ...]:
    stored = tuple(Level(axis=axis, mode=mode) for axis, mode in levels)
    order = tuple(level.axis for level in stored)
    return tuple(SparseFormat(tensor=name, order=order, modes=stored) for name in operator.tensors)


def _schedule(
    *,
    formats: tuple[SparseFormat, ...],
    loops: tuple[str, ...],
    parallel: str,
    vectorize: str | None,
    threads: int,
    fsplit: tuple[Split, ...] = (),
    lsplit: tuple[Split, ...] = (),
) -> Schedule:
    return Schedule(
        fsplit=fsplit,
        formats=formats,
        lsplit=lsplit,
        lreorder=loops,
        parallel=parallel,
        vectorize=vectorize,
        unroll=None,
        unroll_factor=0,
        threads=threads,
        chunk=_ROW_CHUNK,
    )
