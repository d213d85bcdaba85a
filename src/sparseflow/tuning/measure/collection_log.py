"""What a collection measured so far, as lines of JSON that survive the death of their writer.

::

    {"sparseflow": "collection", "version": 1}
    {"begins": {"operator": "spmm", "matrix": …, …}}        the first task; tasks are counted from 0
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
from sparseflow.tuning.measure.labels import Measurement, Task
from sparseflow.tuning.measure.trial_log import TrialRow
from sparseflow.tuning.schedule.operators import OPERATORS
from sparseflow.tuning.schedule.schedule import Schedule

FILE = "measured.jsonl"

_HEAD = {"sparseflow": "collection", "version": 1}

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
    def _known(self) -> _TaskRow:
        if self.operator not in OPERATORS:
            raise ValueError(f"no operator is called {self.operator!r}")
        if bool(OPERATORS[self.operator].dense_axes) != (self.n_cols is not None):
            raise ValueError(f"n_cols (={self.n_cols}) does not fit {self.operator}")
        return self


class _Begins(_Strict):
    begins: _TaskRow


class _Row(TrialRow):
    task: Annotated[int, Field(ge=0)]


class Journal:
    """The rows of one folder; close it, or use it in a `with` block.

    Args:
        folder: It must exist; locked until `close`.

    Attributes:
        trials: Task -> its trials in the order in which they came.

    Raises:
        FileFormatError: A line is damaged, or the file is something else.
        RunError: Another process writes into the folder.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self.trials: dict[Task, dict[Schedule, Trial]] = {}
        self._tasks: list[Task] = []
        self._number: dict[Task, int] = {}
        self._writer = JsonLinesWriter(self._path)
        try:
            rows = read_json_lines(self._path)
            if not rows:
                self._writer.write(_HEAD)
            elif rows[0] != _HEAD:
                raise FileFormatError(f"{self._path} is no collection of this version; name another folder")
            for number, row in enumerate(rows[1:], start=2):
                self._take(row, f"{self._path}, line {number},")
        except BaseException:
            self._writer.close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, task: Task, trial: Trial) -> None:
        """Add a trial. Raises RunError where the disk is full."""
        if task not in self.trials:
            self._writer.write({"begins": asdict(task)})
            self._begin(task)
        self._writer.write({"task": self._number[task], **trial.to_dict()})
        self.trials[task][trial.schedule] = trial

    def measurements(self) -> Iterator[tuple[Task, Measurement]]:
        """Every row as a label set takes it, task by task."""
        for task, trials in self.trials.items():
            for trial in trials.values():
                worked = trial.error is None
                yield (
                    task,
                    Measurement(
                        schedule=str(trial.schedule),
                        latency_ms=trial.latency_ms if worked else None,
                        ratio=trial.ratio if worked else None,
                        error=trial.error,
                        disturbed=trial.disturbed,
                    ),
                )

    def close(self) -> None:
        self._writer.sync()
        self._writer.close()

    def _begin(self, task: Task) -> None:
        self._number[task] = len(self._tasks)
        self._tasks.append(task)
        self.trials[task] = {}

    def _take(self, row: dict[str, Any], where: str) -> None:
        try:
            if "begins" in row:
                begun = _Begins.model_validate(row).begins
                height, width = begun.shape
                self._begin(Task(**{**begun.model_dump(), "shape": (height, width)}))
                return
            read = _Row.model_validate(row)
            if read.task >= len(self._tasks):
                raise FileFormatError(f"task {read.task} has not begun")
            schedule = Schedule.parse(read.schedule)
        except ValidationError as error:
            raise FileFormatError(
                f"{where} is no row: {describe_validation_error(error)}; remove the line"
            ) from error
        except InputError as error:
            raise FileFormatError(f"{where} is no row: {error}; remove the line") from error
        self.trials[self._tasks[read.task]][schedule] = read.trial(schedule)
