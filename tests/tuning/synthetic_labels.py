"""A small label set for tests that was never measured: latencies follow from schedules by a rule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sparseflow.tuning.measure.labels import LabelSet, Measurement, Rows, Task, write_labels, write_pattern
from sparseflow.tuning.model.dataset import Dataset
from sparseflow.tuning.model.net.network import NetConfig
from sparseflow.tuning.model.net.pattern_net import PatternConfig
from sparseflow.tuning.schedule.matrices import Pattern
from sparseflow.tuning.schedule.operators import OPERATORS
from sparseflow.tuning.schedule.schedule import Schedule
from sparseflow.tuning.schedule.space import Space

SMALL = NetConfig(
    pattern=PatternConfig(channels=4, width=8, most_cells=64), layers=1, width=16, heads=2, feed_forward=16
)
NO_PATTERN = NetConfig(pattern=None, layers=1, width=16, heads=2, feed_forward=16)


def pattern_of(seed: int, shape: tuple[int, int] = (60, 40), density: float = 0.1) -> Pattern:
    rows, cols = np.nonzero(np.random.default_rng(seed).random(shape) < density)
    return Pattern.of(rows, cols, shape)


class MadeUp(LabelSet):
    """Labels of some operators on some matrices; the last matrix' pattern is not known."""

    def __init__(
        self,
        operators: Sequence[str] = ("spmm", "spmv"),
        *,
        matrices: int = 3,
        schedules: int = 12,
        seed: int = 0,
    ) -> None:
        self.patterns = {str(at): pattern_of(seed + at) for at in range(matrices)}
        self._rows: dict[Task, Rows] = {}
        for name in operators:
            for at in range(matrices):
                self._add(name, at, schedules, known=at < matrices - 1)
        self.tasks = tuple(self._rows)

    def _add(self, operator: str, at: int, schedules: int, *, known: bool) -> None:
        op, pattern = OPERATORS[operator], self.patterns[str(at)]
        task = Task(
            operator=operator, matrix=f"m{at}", family=f"f{at}", shape=pattern.shape,
            nnz=pattern.nnz if known else None, n_cols=32 if op.dense_axes else None, dtype="float32",
            threads=2, device="none", pattern=str(at) if known else None,
        )  # fmt: skip
        random = np.random.default_rng(at)
        space = Space(op, task.extents(), threads=[1, 2])
        drawn = tuple(dict.fromkeys(str(space.sample(random)) for _ in range(2 * schedules)))[:schedules]
        self._rows[task] = Rows(
            schedules=drawn,
            latency_ms=np.array([latency_ms(Schedule.parse(line)) for line in drawn]),
            ratio=np.full(len(drawn), np.nan),
            repeats=random.integers(1, 4, len(drawn)),
        )

    def rows(self, task: Task) -> Rows:
        return self._rows[task]

    def pattern(self, task: Task) -> Pattern | None:
        return None if task.pattern is None else self.patterns[task.pattern]


def latency_ms(schedule: Schedule) -> float:
    """Easy to learn: threads and vectors help, and so do few loops."""
    slow = 1.0 if schedule.parallel is not None else 3.0
    slow *= 1.0 if schedule.vectorize is not None else 2.0
    return slow * (1.0 + 0.1 * len(schedule.lreorder))


def on_disk(folder: Path, **options: Any) -> Path:
    """The same as files."""
    made = MadeUp(**options)
    digests = {name: write_pattern(folder, pattern) for name, pattern in made.patterns.items()}

    def measured() -> Iterator[tuple[Task, Measurement]]:
        for task in made.tasks:
            rows = made.rows(task)
            kept = replace(task, pattern=None if task.pattern is None else digests[task.pattern])
            for line, latency in zip(rows.schedules, rows.latency_ms, strict=True):
                yield kept, Measurement(schedule=line, latency_ms=float(latency))

    write_labels(folder, measured())
    return folder


def made_up(**options: Any) -> Dataset:
    return Dataset.of([MadeUp(**options)])
