"""A small label set for tests that was never measured: latencies follow from schedules by a rule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from sparseflow.core.config import StrictModel
from sparseflow.tuning.measure.labels import (
    LabelSet,
    ScheduleLatencies,
    ScheduleMeasurement,
    TuningTask,
    write_labels,
    write_pattern,
)
from sparseflow.tuning.model.dataset import RankingDataset
from sparseflow.tuning.model.net.network import AutoSparseNet, NetConfig
from sparseflow.tuning.model.net.pattern_net import PatternConfig
from sparseflow.tuning.model.net.scoring import score_token_ids
from sparseflow.tuning.model.net.tokenizer import ScheduleTokenizer
from sparseflow.tuning.schedule.matrices import SparsityPattern
from sparseflow.tuning.schedule.operators import OPERATORS, Operator
from sparseflow.tuning.schedule.schedule import Schedule
from sparseflow.tuning.schedule.space import ScheduleSpace

Config = TypeVar("Config", bound=StrictModel)

SMALL = NetConfig(
    pattern=PatternConfig(channels=4, width=8, max_cells=64), layers=1, width=16, heads=2, feed_forward=16
)
NO_PATTERN = NetConfig(pattern=None, layers=1, width=16, heads=2, feed_forward=16)


def change(config: Config, **fields: Any) -> Config:
    """Copy a configuration with other values of some fields."""
    return type(config).model_validate(config.model_dump() | fields)


def pattern_of(seed: int, shape: tuple[int, int] = (60, 40), density: float = 0.1) -> SparsityPattern:
    rows, cols = np.nonzero(np.random.default_rng(seed).random(shape) < density)
    return SparsityPattern.from_coords(rows, cols, shape)


def score_schedules(
    net: AutoSparseNet,
    schedules: Sequence[Schedule],
    operator: Operator,
    extents: Mapping[str, int],
    context: torch.Tensor,
) -> np.ndarray:
    """Encode and score schedules with a new tokenizer."""
    encoder = ScheduleTokenizer()
    ids = encoder.encode(schedules, operator, extents)
    return score_token_ids(net, ids, encoder.table, context)


class MadeUp(LabelSet):
    """Made-up labels; the pattern of the last matrix is unknown."""

    def __init__(
        self,
        operators: Sequence[str] = ("spmm", "spmv"),
        *,
        matrices: int = 3,
        schedules: int = 12,
        seed: int = 0,
    ) -> None:
        self.patterns = {str(index): pattern_of(seed + index) for index in range(matrices)}
        self._rows: dict[TuningTask, ScheduleLatencies] = {}
        for name in operators:
            for index in range(matrices):
                self._add(name, index, schedules, known=index < matrices - 1)
        self.tasks = tuple(self._rows)

    def _add(self, operator: str, index: int, schedules: int, *, known: bool) -> None:
        op, pattern = OPERATORS[operator], self.patterns[str(index)]
        task = TuningTask(
            operator=operator, matrix=f"m{index}", family=f"f{index}", shape=pattern.shape,
            nnz=pattern.nnz if known else None, n_cols=32 if op.dense_axes else None, dtype="float32",
            threads=2, device="none", pattern=str(index) if known else None,
        )  # fmt: skip
        random = np.random.default_rng(index)
        space = ScheduleSpace(op, task.extents(), threads=[1, 2])
        samples = tuple(dict.fromkeys(str(space.sample(random)) for _ in range(2 * schedules)))[:schedules]
        self._rows[task] = ScheduleLatencies(
            schedules=samples,
            latency_ms=np.array([latency_ms(Schedule.parse(line)) for line in samples]),
            ratio=np.full(len(samples), np.nan),
            repeats=random.integers(1, 4, len(samples)),
        )

    def read_latencies(self, task: TuningTask) -> ScheduleLatencies:
        return self._rows[task]

    def read_pattern(self, task: TuningTask) -> SparsityPattern | None:
        return None if task.pattern is None else self.patterns[task.pattern]


def latency_ms(schedule: Schedule) -> float:
    """Compute an easily learned latency: threads, vectors and few loops are fast."""
    slow = 1.0 if schedule.parallel is not None else 3.0
    slow *= 1.0 if schedule.vectorize is not None else 2.0
    return slow * (1.0 + 0.1 * len(schedule.lreorder))


def on_disk(folder: Path, **options: Any) -> Path:
    """Write the labels of `MadeUp` to files."""
    created = MadeUp(**options)
    digests = {name: write_pattern(folder, pattern) for name, pattern in created.patterns.items()}

    def measured() -> Iterator[tuple[TuningTask, ScheduleMeasurement]]:
        for task in created.tasks:
            rows = created.read_latencies(task)
            retained = replace(task, pattern=None if task.pattern is None else digests[task.pattern])
            for line, latency in zip(rows.schedules, rows.latency_ms, strict=True):
                yield retained, ScheduleMeasurement(schedule=line, latency_ms=float(latency))

    write_labels(folder, measured())
    return folder


def made_up(**options: Any) -> RankingDataset:
    return RankingDataset.from_label_sets([MadeUp(**options)])
