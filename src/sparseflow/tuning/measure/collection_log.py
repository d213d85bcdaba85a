"""Log of a collection, as JSON lines that survive the death of the writer.

::

    {"sparseflow": "collection", "version": 2}
    {"start": {"operator": "spmm", "matrix": …, …}}        start of a task; tasks are numbered from 0
    {"task": 0, "schedule": …, "latency_ms": …, "ratio": …, "error": …, "disturbed": …, "seconds": {…}}
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sparseflow.core.config import describe_validation_error
from sparseflow.core.journal import JsonLinesWriter, read_json_lines
from sparseflow.errors import FileFormatError, InputError
from sparseflow.tuning.measure.evaluator import Trial
from sparseflow.tuning.measure.labels import ScheduleMeasurement, TuningTask
from sparseflow.tuning.measure.trial_log import TrialRecord
from sparseflow.tuning.schedule.operators import OPERATORS
from sparseflow.tuning.schedule.schedule import Schedule

COLLECTION_FILE = "measured.jsonl"

_HEADER = {"sparseflow": "collection", "version": 2}

_Count = Annotated[int, Field(ge=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _TaskRow(_Strict):
    operator: str
    matrix: str
    family: str
    shape: Annotated[list[_Count], Field(min_length=2, max_length=2)]
    nnz: Annotated[int, Field(ge=0)]
    n_cols: _Count | None
    dtype: Literal["float32", "float64"]
    threads: _Count
    device: str
    pattern: str

    @model_validator(mode="after")
    def _check_operator(self) -> _TaskRow:
        if self.operator not in OPERATORS:
            raise ValueError(f"unknown operator {self.operator!r}")
        if bool(OPERATORS[self.operator].dense_axes) != (self.n_cols is not None):
            raise ValueError(f"n_cols (={self.n_cols}) does not fit {self.operator}")
        return self


class _TaskStart(_Strict):
    start: _TaskRow


class _Row(TrialRecord):
    task: Annotated[int, Field(ge=0)]


class CollectionLog:
    """Trials of one collection; a context manager.

    Args:
        folder: Existing directory, locked until `close`.

    Attributes:
        trials: Task -> its trials in order.

    Raises:
        FileFormatError: A line is damaged, or the file has another format.
        RunError: Another process writes to the directory.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / COLLECTION_FILE
        self.trials: dict[TuningTask, dict[Schedule, Trial]] = {}
        self._tasks: list[TuningTask] = []
        self._task_index: dict[TuningTask, int] = {}
        self._writer = JsonLinesWriter(self._path)
        try:
            rows = read_json_lines(self._path)
            if not rows:
                self._writer.write(_HEADER)
            elif rows[0] != _HEADER:
                raise FileFormatError(
                    f"{self._path} is not a collection of this version; choose another directory"
                )
            for number, row in enumerate(rows[1:], start=2):
                self._read_row(row, f"{self._path}, line {number},")
        except BaseException:
            self._writer.close()
            raise

    def __enter__(self) -> CollectionLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, task: TuningTask, trial: Trial) -> None:
        """Append a trial. Raises RunError if the disk is full."""
        if task not in self.trials:
            self._writer.write({"start": asdict(task)})
            self._add_task(task)
        self._writer.write({"task": self._task_index[task], **trial.to_dict()})
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

    def close(self) -> None:
        self._writer.sync()
        self._writer.close()

    def _add_task(self, task: TuningTask) -> None:
        self._task_index[task] = len(self._tasks)
        self._tasks.append(task)
        self.trials[task] = {}

    def _read_row(self, row: dict[str, Any], location: str) -> None:
        try:
            if "start" in row:
                task_row = _TaskStart.model_validate(row).start
                height, width = task_row.shape
                self._add_task(TuningTask(**{**task_row.model_dump(), "shape": (height, width)}))
                return
            trial_row = _Row.model_validate(row)
            if trial_row.task >= len(self._tasks):
                raise FileFormatError(f"task {trial_row.task} is not defined")
            schedule = Schedule.parse(trial_row.schedule)
        except ValidationError as error:
            raise FileFormatError(
                f"{location} is not a valid row: {describe_validation_error(error)}; remove the line"
            ) from error
        except InputError as error:
            raise FileFormatError(f"{location} is not a valid row: {error}; remove the line") from error
        self.trials[self._tasks[trial_row.task]][schedule] = trial_row.to_trial(schedule)
