"""Log of a collection: a journal of tasks and their trials.

::

    {"format": "sparseflow.tuning.collection", "version": 3}
    {"start": {"operator": "spmm", "matrix": …, …}}               start of a task; tasks are numbered from 0
    {"task": 0, "trial": {"schedule": …, "latency_ms": …, …}}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pydantic import ConfigDict, TypeAdapter

from sparseflow.core.artifact import Artifact
from sparseflow.core.journal import Journal
from sparseflow.errors import FileFormatError
from sparseflow.tuning.measure.evaluator import Trial
from sparseflow.tuning.measure.labels import ScheduleMeasurement, TuningTask
from sparseflow.tuning.schedule.schedule import Schedule

COLLECTION_FILE = "measured.jsonl"


class CollectionHeader(Artifact):
    """Header of the log of a collection."""

    FORMAT: ClassVar[str] = "sparseflow.tuning.collection"
    VERSION: ClassVar[int] = 3
    HINT: ClassVar[str] = "choose another directory"


@dataclass(frozen=True, kw_only=True)
class _TaskStart:
    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    start: TuningTask


@dataclass(frozen=True, kw_only=True)
class _TaskTrial:
    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    task: int
    trial: Trial


class CollectionLog:
    """Trials of one collection; a context manager.

    Args:
        folder: Existing directory, locked until the end of the `with` block.

    Attributes:
        trials: Task -> schedule -> trial, in order.

    Raises:
        FileFormatError: A line is damaged, or the file has another format.
        RunError: Another process writes to the directory.
    """

    def __init__(self, folder: Path) -> None:
        self.trials: dict[TuningTask, dict[Schedule, Trial]] = {}
        self._tasks: list[TuningTask] = []
        self._trials_by_key: dict[tuple[object, ...], dict[str, dict[Schedule, Trial]]] = {}
        row_type: TypeAdapter[_TaskStart | _TaskTrial] = TypeAdapter(_TaskStart | _TaskTrial)
        self._journal = Journal(folder / COLLECTION_FILE, row_type, header=CollectionHeader())
        for index, row in enumerate(self._journal.rows):
            if isinstance(row, _TaskStart):
                self._add_task(row.start)
            elif 0 <= row.task < len(self._tasks):
                self.trials[self._tasks[row.task]][row.trial.schedule] = row.trial
            else:
                self._journal.close()
                raise FileFormatError(
                    f"{self._journal.locate(index)}: task {row.task} is not defined; remove the line"
                )

    def __enter__(self) -> CollectionLog:
        return self

    def __exit__(self, *_: object) -> None:
        self._journal.close()

    @property
    def num_trials(self) -> int:
        return sum(map(len, self.trials.values()))

    def find(self, task: TuningTask) -> Mapping[str, Mapping[Schedule, Trial]]:
        """Return device -> schedule -> trial of a task; names and device of `task` do not matter."""
        return self._trials_by_key.get(task.key, {})

    def append(self, task: TuningTask, trial: Trial) -> None:
        """Append a trial. Raises RunError if the disk is full."""
        if task not in self.trials:
            self._journal.append(_TaskStart(start=task))
            self._add_task(task)
        self._journal.append(_TaskTrial(task=self._tasks.index(task), trial=trial))
        self.trials[task][trial.schedule] = trial

    def measurements(self) -> Iterator[tuple[TuningTask, ScheduleMeasurement]]:
        """Yield every trial as a row of a label set, task by task."""
        for task, trials in self.trials.items():
            for trial in trials.values():
                succeeded = trial.error is None
                yield (
                    task,
                    ScheduleMeasurement(
                        schedule=str(trial.schedule),
                        latency_ms=trial.latency_ms if succeeded else None,
                        ratio=trial.ratio if succeeded else None,
                        error=trial.error,
                        disturbed=trial.disturbed,
                    ),
                )

    def _add_task(self, task: TuningTask) -> None:
        self._tasks.append(task)
        self.trials[task] = self._trials_by_key.setdefault(task.key, {})[task.device] = {}
