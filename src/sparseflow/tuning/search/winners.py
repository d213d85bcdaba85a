"""Fastest schedules of earlier sessions, by the kind of problem they were tuned for.

Two problems are of one family if operator, dtype, threads and processor are equal and the statistics of their
patterns are similar. A session measures the schedules of its family right after the reference, so a second
matrix of a family starts from the result of the first one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import ConfigDict

from sparseflow.core.artifact import Artifact
from sparseflow.core.device import describe_cpu
from sparseflow.errors import FileFormatError, InputError
from sparseflow.tuning.codegen.compile import CompileCache
from sparseflow.tuning.schedule.adaptation import adapt_schedule
from sparseflow.tuning.schedule.problem import SparseProblem
from sparseflow.tuning.schedule.schedule import Schedule

WINNERS_FILE = "winners.json"
"""Name of the file in the directory of compiled code."""

_MAX_WINNERS = 256
"""Winners in the file; the oldest are dropped."""

_MAX_DIFFERENCE = 1.0
"""Largest difference of each statistic within a family: a factor of two, or a quarter of a share."""

_SHARE_SCALE = 4.0
"""Factor of statistics that are shares from 0 to 1."""

_MAX_SCHEDULES = 2
"""Schedules of a family that a session measures first."""


@dataclass(frozen=True, kw_only=True)
class Winner:
    """Fastest schedule of one session.

    Attributes:
        settings: Operator, dtype, threads and processor, which are equal in a family.
        statistics: Result of `describe_problem`.
        schedule: A line of the schedule language.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    settings: str
    statistics: Mapping[str, float]
    schedule: str


class WinnerFile(Artifact):
    """File of winners, oldest first."""

    FORMAT: ClassVar[str] = "sparseflow.tuning.winners"
    VERSION: ClassVar[int] = 1
    HINT: ClassVar[str] = "remove the file"

    winners: tuple[Winner, ...] = ()


class WinnerCache:
    """File of the fastest schedules of earlier sessions.

    A file that is damaged or of another version is ignored and replaced. Of two processes that add a winner
    at the same time, one may lose its winner.

    Args:
        cache_dir: Directory of compiled code; see `compile_source`.
    """

    def __init__(self, cache_dir: Path | None = None) -> None:
        self._cache = CompileCache(cache_dir)
        self.path = self._cache.cache_dir / WINNERS_FILE

    def find(self, problem: SparseProblem, threads: int) -> list[Schedule]:
        """Find the schedules of the family of a problem, adapted to its extents, most similar first."""
        settings, statistics = _describe_settings(problem, threads), describe_problem(problem)
        matches: list[tuple[float, str]] = []
        for winner in reversed(self._read()):
            distance = _measure_distance(winner.statistics, statistics)
            if winner.settings == settings and distance <= _MAX_DIFFERENCE:
                matches.append((distance, winner.schedule))
        schedules: dict[Schedule, None] = {}
        for _, line in sorted(matches, key=lambda match: match[0]):
            try:
                schedule = Schedule.parse(line)
            except InputError:
                continue
            adapted = adapt_schedule(schedule, problem.operator, problem.extents)
            if adapted is not None:
                schedules[adapted] = None
        return list(schedules)[:_MAX_SCHEDULES]

    def add(self, problem: SparseProblem, threads: int, schedule: Schedule) -> None:
        """Store the fastest schedule of a problem; it replaces that of an equal problem.

        Raises:
            RunError: The directory is not writable.
        """
        winner = Winner(
            settings=_describe_settings(problem, threads),
            statistics=describe_problem(problem),
            schedule=str(schedule),
        )
        winners = [
            other
            for other in self._read()
            if (other.settings, other.statistics) != (winner.settings, winner.statistics)
        ]
        file = WinnerFile(winners=(*winners, winner)[-_MAX_WINNERS:])
        # Not synced to disk, as compiled code is not: syncing can take longer than a search.
        with self._cache.open_build_dir() as folder:
            draft = folder / WINNERS_FILE
            draft.write_text(json.dumps(file.to_dict()))
            draft.replace(self.path)

    def _read(self) -> tuple[Winner, ...]:
        try:
            return WinnerFile.load(self.path).winners
        except (InputError, FileFormatError):
            return ()


def describe_problem(problem: SparseProblem) -> dict[str, float]:
    """Compute the statistics that families are based on.

    Returns:
        Base-2 logarithms of the extents, the elements, the mean and the longest row, the standard deviation
        of row lengths and the mean distance from the diagonal; and scaled shares: elements directly right of
        another, and mean distance from the diagonal over the columns. Rounded to two digits.
    """
    matrix, (num_rows, num_cols) = problem.matrix, problem.matrix.shape
    lengths = np.bincount(matrix.rows, minlength=num_rows)
    rows, cols = matrix.rows.astype(np.int64), matrix.cols.astype(np.int64)
    num_elements = max(matrix.nnz, 1)
    adjacent = float(((rows[1:] == rows[:-1]) & (cols[1:] == cols[:-1] + 1)).sum()) / num_elements
    off_diagonal = float(np.abs(cols - rows * (num_cols / num_rows)).sum()) / num_elements
    statistics = {
        "rows": math.log2(num_rows),
        "cols": math.log2(num_cols),
        "n_cols": math.log2(problem.n_cols or 1),
        "elements": math.log2(num_elements),
        "mean_row": math.log2(1.0 + matrix.nnz / num_rows),
        "longest_row": math.log2(1.0 + float(lengths.max())),
        "row_deviation": math.log2(1.0 + float(lengths.std())),
        "adjacent": _SHARE_SCALE * adjacent,
        "off_diagonal": _SHARE_SCALE * off_diagonal / num_cols,
    }
    return {name: round(value, 2) for name, value in statistics.items()}


def _describe_settings(problem: SparseProblem, threads: int) -> str:
    return f"{problem.operator.name}, {problem.dtype.name}, {threads} threads, {describe_cpu()}"


def _measure_distance(statistics: Mapping[str, float], other: Mapping[str, float]) -> float:
    """Return the largest difference of a statistic."""
    if statistics.keys() != other.keys():
        return math.inf
    return max(abs(value - other[name]) for name, value in statistics.items())
