"""Schedules of GPU kernels: their form, and the space that a search samples.

A GPU kernel has a template and a few parameters, which a schedule states in the language of all schedules:

==========  ================================  ===============  ===============================================
template    storage of A                      parallel loop    other parts of the schedule
==========  ================================  ===============  ===============================================
segments    rows dense, columns compressed    rows             unrolled columns: elements of one step
segments    rows dense, columns compressed    columns          chunk: longest part of a row in one program
rows        blocks of rows, rows, columns     blocks of rows   size of a block: rows of one program
panels      blocks of rows, columns, rows     blocks of rows   size of a block: rows that share columns;
                                                               unrolled columns: columns of one step
elements    rows and columns of each element  rows             unrolled columns: elements of one program
blocks      blocks in both directions, dense  blocks of rows   sizes of a block: tiles of tensor cores
==========  ================================  ===============  ===============================================

The vectorized loop is the inner part of the dense axis, whose size is the tile of one program, and the number
of threads is that of one program. A program that takes a part of a row adds to the output atomically.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np

from sparseflow.errors import InputError
from sparseflow.tuning.schedule.operators import Operator
from sparseflow.tuning.schedule.parser import AxisSplit, FormatLevel, LevelMode, SparseFormat
from sparseflow.tuning.schedule.schedule import Schedule

Template = Literal["segments", "rows", "panels", "blocks", "elements"]

WARP_THREADS = 32

_TILES = (16, 32, 64, 128, 256)
_WARPS = (1, 2, 4, 8)
_STEPS = (1, 2, 4, 8, 16, 32)
_CHUNKS = (None, 32, 64, 128, 256, 512)
_ROWS = (2, 4, 8, 16, 32)
_BLOCKS = ((16, 16), (32, 16), (32, 32), (64, 16), (64, 32), (64, 64))
_PANEL_ROWS = (2, 4, 8, 16)
_PANEL_STEPS = (1, 2, 4, 8)
_ELEMENT_STEPS = (4, 8, 16, 32, 64)
_TEMPLATES: Mapping[bool, tuple[Template, ...]] = {
    False: ("segments", "rows", "panels", "blocks"),
    True: ("segments", "elements"),
}
"""Whether the output is sparse -> templates."""

_MAX_THREAD_SUMS = 64
"""Largest number of sums of one thread, which are in registers."""


@dataclass(frozen=True, kw_only=True)
class GpuMapping:
    """Template and parameters of a GPU kernel.

    Attributes:
        template: Template.
        tile: Columns of one program, or of one step of SDDMM; a power of two.
        warps: Warps of one program.
        step: Elements of one step; of `segments`, `panels` and `elements`.
        chunk: Most elements of one program; None for whole rows; of `segments`.
        rows: Rows of one program; of `rows`, `panels` and `blocks`.
        inner: Columns of a block of A; of `blocks`.
    """

    template: Template
    tile: int
    warps: int
    step: int = 1
    chunk: int | None = None
    rows: int = 1
    inner: int = 1

    @property
    def lanes(self) -> int:
        """Rows of a tile of sums: rows of the matrix, or elements."""
        return self.step if self.template in ("segments", "elements") else self.rows

    @classmethod
    def from_schedule(cls, schedule: Schedule, operator: Operator, extents: Mapping[str, int]) -> GpuMapping:
        """Read a schedule.

        Args:
            schedule: Schedule.
            operator: SpMM or SDDMM.
            extents: Extent of every axis.

        Raises:
            InputError: The schedule is not one of a GPU kernel.
        """
        rows, cols = operator.sparse_axes
        (dense,) = operator.dense_axes or (None,)
        sizes = {split.axis: split.inner_size for split in (*schedule.fsplit, *schedule.lsplit)}
        split = schedule.parallel == cols
        template: Template = "segments"
        if schedule.formats[0].modes[0].mode == LevelMode.COMPRESSED_NONUNIQUE:
            template = "elements"
        elif cols in sizes:
            template = "blocks"
        elif rows in sizes:
            template = "rows" if schedule.formats[0].order[-1] == cols else "panels"
        mapping = cls(
            template=template,
            tile=sizes.get(dense or "", 1),
            warps=max(schedule.threads // WARP_THREADS, 1),
            step=max(schedule.unroll_factor, 1),
            chunk=schedule.chunk if split else None,
            rows=sizes.get(rows, 1),
            inner=sizes.get(cols, 1),
        )
        if dense is None or mapping.to_schedule(operator, extents) != schedule:
            raise InputError(
                f"the schedule {schedule} is not one of a GPU kernel for {operator.name}; tune on a GPU"
            )
        return mapping

    def to_schedule(self, operator: Operator, extents: Mapping[str, int]) -> Schedule:
        """Write the schedule.

        Args:
            operator: SpMM or SDDMM.
            extents: Extent of every axis.
        """
        rows, cols = operator.sparse_axes
        (dense,) = operator.dense_axes
        tile = AxisSplit.from_inner_size(dense, extents[dense], self.tile)
        fsplit: tuple[AxisSplit, ...] = ()
        if self.template not in ("segments", "elements"):
            fsplit = (AxisSplit.from_inner_size(rows, extents[rows], self.rows),)
        if self.template == "blocks":
            fsplit = (*fsplit, AxisSplit.from_inner_size(cols, extents[cols], self.inner))
        full, compressed = LevelMode.DENSE, LevelMode.COMPRESSED
        storage: dict[Template, dict[str, LevelMode]] = {
            "segments": {rows: full, cols: compressed},
            "rows": {f"{rows}0": full, f"{rows}1": full, cols: compressed},
            "panels": {f"{rows}0": full, cols: compressed, f"{rows}1": full},
            "blocks": {f"{rows}0": full, f"{cols}0": compressed, f"{rows}1": full, f"{cols}1": full},
            "elements": {rows: LevelMode.COMPRESSED_NONUNIQUE, cols: LevelMode.SINGLETON},
        }
        order = tuple(storage[self.template])
        levels = tuple(FormatLevel(axis=axis, mode=mode) for axis, mode in storage[self.template].items())
        outer = (f"{dense}0",)
        # SDDMM sums over the dense axis for each element.
        loops = (*order, *outer) if operator.sparse_output else (order[0], *outer, *order[1:])
        return Schedule(
            fsplit=tuple(sorted(fsplit, key=lambda split: split.axis)),
            formats=tuple(SparseFormat(tensor=name, order=order, modes=levels) for name in operator.tensors),
            lsplit=(tile,),
            lreorder=(*loops, f"{dense}1"),
            parallel=cols if self.chunk else order[0],
            vectorize=f"{dense}1",
            unroll=cols if self.step > 1 else None,
            unroll_factor=self.step if self.step > 1 else 0,
            threads=WARP_THREADS * self.warps,
            chunk=self.chunk or 1,
        )


class GpuScheduleSpace:
    """All schedules of GPU kernels of one operator for one shape.

    Args:
        operator: SpMM or SDDMM.
        shape: Extent of every axis.
    """

    def __init__(self, operator: Operator, shape: Mapping[str, int]) -> None:
        self.operator, self.shape = operator, operator.extents(shape)
        (dense,) = operator.dense_axes
        # One tile wider than the matrix is enough.
        widest = max(16, 1 << (self.shape[dense] - 1).bit_length())
        tiles = [tile for tile in _TILES if tile <= widest]
        self._options: dict[str, list[Any]] = {
            "template": list(_TEMPLATES[operator.sparse_output]),
            "tile": tiles,
            "warps": list(_WARPS),
            "step": list(_STEPS),
            "chunk": list(_CHUNKS),
            "block": list(_BLOCKS),
            "rows": list(_ROWS),
        }

    def sample(self, rng: np.random.Generator) -> Schedule:
        """Sample a schedule."""
        return self._build({name: _sample(rng, options) for name, options in self._options.items()}, rng)

    def mutate(self, schedule: Schedule, rng: np.random.Generator) -> Schedule:
        """Change one parameter, or the template and its parameters."""
        parent = self._read(schedule)
        for _ in range(8):
            name = _sample(rng, list(self._options))
            child = self._build(parent | {name: _sample(rng, self._options[name])}, rng)
            if child != schedule:
                return child
        return schedule

    def crossover(self, a: Schedule, b: Schedule, rng: np.random.Generator) -> Schedule:
        """Take each parameter from one of two parents."""
        pair = self._read(a), self._read(b)
        return self._build({name: pair[int(rng.integers(2))][name] for name in self._options}, rng)

    def _read(self, schedule: Schedule) -> dict[str, Any]:
        mapping = GpuMapping.from_schedule(schedule, self.operator, self.shape)
        parameters = {field.name: getattr(mapping, field.name) for field in fields(mapping)}
        block = (mapping.rows, mapping.inner) if mapping.template == "blocks" else _BLOCKS[0]
        return parameters | {"block": block}

    def _build(self, parameters: Mapping[str, Any], rng: np.random.Generator) -> Schedule:
        template = parameters["template"]
        mapping = GpuMapping(template=template, tile=parameters["tile"], warps=parameters["warps"])
        if template == "segments":
            mapping = replace(mapping, step=parameters["step"], chunk=parameters["chunk"])
        elif template == "rows":
            mapping = replace(mapping, rows=_keep(parameters["rows"], _ROWS, rng))
        elif template == "elements":
            mapping = replace(mapping, step=_keep(parameters["step"], _ELEMENT_STEPS, rng))
        elif template == "panels":
            rows = _keep(parameters["rows"], _PANEL_ROWS, rng)
            mapping = replace(mapping, rows=rows, step=_keep(parameters["step"], _PANEL_STEPS, rng))
        else:
            rows, inner = parameters["block"]
            mapping = replace(mapping, rows=rows, inner=inner)
        max_sums = _MAX_THREAD_SUMS * WARP_THREADS * mapping.warps
        while mapping.tile > _TILES[0] and mapping.tile * mapping.lanes > max_sums:
            mapping = replace(mapping, tile=mapping.tile // 2)
        return mapping.to_schedule(self.operator, self.shape)


def build_gpu_presets(operator: Operator, extents: Mapping[str, int]) -> dict[str, Schedule]:
    """Build hand-written schedules of GPU kernels.

    Args:
        operator: SpMM or SDDMM.
        extents: Extent of every axis.

    Returns:
        Preset name -> schedule; the first is the reference.
    """
    (dense,) = operator.dense_axes
    tile = min(max(16, 1 << (extents[dense] - 1).bit_length()), 128)
    mappings = {
        "csr": GpuMapping(template="segments", tile=tile, warps=1, step=4),
        "csr_split": GpuMapping(template="segments", tile=tile, warps=1, step=4, chunk=256),
    }
    if operator.sparse_output:
        mappings["coo"] = GpuMapping(template="elements", tile=tile, warps=4, step=16)
    else:
        mappings["csr_rows"] = GpuMapping(template="rows", tile=tile, warps=4, rows=8)
        mappings["csr_panels"] = GpuMapping(template="panels", tile=tile, warps=1, rows=4, step=4)
        mappings["bsr16x16"] = GpuMapping(template="blocks", tile=tile, warps=2, rows=16, inner=16)
    return {name: mapping.to_schedule(operator, extents) for name, mapping in mappings.items()}


def _keep(value: int, options: Sequence[int], rng: np.random.Generator) -> int:
    """Return a value if it is an option, else a random option."""
    return value if value in options else _sample(rng, list(options))


def _sample(rng: np.random.Generator, options: list[Any]) -> Any:
    return options[int(rng.integers(len(options)))]
