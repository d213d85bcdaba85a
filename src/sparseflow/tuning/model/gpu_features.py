"""Features of GPU kernels for cost models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import get_args

import numpy as np

from sparseflow.tuning.model.block_counts import BlockCounts
from sparseflow.tuning.schedule.gpu import GpuMapping, Template
from sparseflow.tuning.schedule.problem import SparseProblem
from sparseflow.tuning.schedule.schedule import Schedule

_TEMPLATES = get_args(Template)
_PROGRAM_COST = 8.0
"""Time of a program's start and end, in steps."""


class GpuScheduleFeatures:
    """Computes features of schedules of GPU kernels of one problem.

    Args:
        problem: SpMM or SDDMM.
    """

    names: tuple[str, ...] = (
        "log2 rows", "log2 cols", "log2 dense", "log2 elements a row", "spread of rows", "log2 longest row",
        *(f"template {name}" for name in _TEMPLATES),
        "log2 tile", "log2 warps", "log2 step", "log2 chunk", "log2 rows of a program", "log2 block columns",
        "log2 sums of a thread", "log2 programs", "log2 longest program", "log2 stored per element",
        "log2 column use",
    )  # fmt: skip

    def __init__(self, problem: SparseProblem) -> None:
        self.problem = problem
        self.blocks = BlockCounts(problem.matrix)
        self._lengths = self.blocks.count_per_line(0)
        self._cache: dict[Schedule, np.ndarray] = {}

    def compute(self, schedules: Sequence[Schedule]) -> np.ndarray:
        """Compute the features of schedules, float32, shape [schedules, features].

        Raises:
            InputError: A schedule is not one of a GPU kernel.
        """
        for schedule in schedules:
            if schedule not in self._cache:
                self._cache[schedule] = np.array(self._describe(schedule), np.float32)
        rows = [self._cache[schedule] for schedule in schedules]
        return np.stack(rows) if rows else np.empty((0, len(self.names)), np.float32)

    def score(self, schedules: Sequence[Schedule]) -> np.ndarray:
        """Score schedules before anything is measured; higher is faster."""
        column = dict(zip(self.names, self.compute(schedules).T.astype(float), strict=True))
        # Work of all programs, and of the longest, which may end last.
        work = 2.0 ** (column["log2 stored per element"] - column["log2 column use"])
        start = _PROGRAM_COST * 2.0 ** column["log2 programs"] / max(self.problem.matrix.nnz, 1)
        longest = 2.0 ** column["log2 longest program"] / max(self.problem.matrix.nnz, 1)
        return -np.log(work + start / 32.0 + 4.0 * longest)

    def _describe(self, schedule: Schedule) -> list[float]:
        problem, lengths = self.problem, self._lengths
        mapping = GpuMapping.from_schedule(schedule, problem.operator, problem.extents)
        (rows, cols), nnz = problem.matrix.shape, max(problem.matrix.nnz, 1)
        n_cols = problem.n_cols or 1
        limit = mapping.chunk or max(int(lengths.max()), 1)
        if mapping.template == "segments":
            num_programs = float(np.maximum(-(-lengths // limit), 0 if mapping.chunk else 1).sum())
            stored = float((-(-lengths // mapping.step)).sum()) * mapping.step
            longest = float(min(limit, lengths.max()))
        elif mapping.template == "elements":
            num_programs = float(-(-nnz // mapping.step))
            stored = num_programs * mapping.step
            longest = float(mapping.step)
        elif mapping.template == "rows":
            num_programs = float(-(-rows // mapping.rows))
            stored = float(self.blocks.count_padded(mapping.rows, None))
            longest = float(lengths.max()) * mapping.rows
        else:
            num_programs = float(-(-rows // mapping.rows))
            stored = float(self.blocks.count(mapping.rows, mapping.inner)) * mapping.rows * mapping.inner
            longest = stored / num_programs
        num_tiles = -(-n_cols // mapping.tile)
        threads = 32 * mapping.warps
        return [
            math.log2(rows),
            math.log2(cols),
            math.log2(n_cols),
            _log2(problem.matrix.nnz / rows),
            float(lengths.std() / max(lengths.mean(), 1e-9)),
            _log2(float(lengths.max())),
            *(float(mapping.template == name) for name in _TEMPLATES),
            math.log2(mapping.tile),
            math.log2(mapping.warps),
            math.log2(mapping.step),
            math.log2(mapping.chunk or 2**12),
            math.log2(mapping.rows),
            math.log2(mapping.inner),
            _log2(mapping.tile * mapping.lanes / threads),
            _log2(num_programs * num_tiles),
            _log2(longest),
            _log2(stored / nnz),
            _log2(n_cols / (num_tiles * mapping.tile)),
        ]


def _log2(value: float) -> float:
    return math.log2(max(value, 2.0**-30))
