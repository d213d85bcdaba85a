"""Log of the trials of a search, from which an interrupted search is resumed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sparseflow.core.config import describe_validation_error
from sparseflow.core.journal import JsonLinesWriter, read_json_lines
from sparseflow.errors import FileFormatError, InputError
from sparseflow.tuning.measure.evaluator import Trial
from sparseflow.tuning.schedule.problem import SparseProblem
from sparseflow.tuning.schedule.schedule import Schedule

TRIALS_FILE = "trials.jsonl"

_PositiveFloat = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class TrialRecord(BaseModel):
    """A trial in the format of `Trial.to_dict`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    schedule: str
    latency_ms: _PositiveFloat | None
    ratio: _PositiveFloat | None
    error: str | None
    disturbed: bool
    seconds: dict[str, Annotated[float, Field(ge=0.0, allow_inf_nan=False)]]
    times: Annotated[int, Field(ge=1)] = 1

    @model_validator(mode="after")
    def _check_outcome(self) -> TrialRecord:
        if (self.error is None) != (self.ratio is not None and self.latency_ms is not None):
            raise ValueError("a trial has either an error or both times")
        return self

    def to_trial(self, schedule: Schedule) -> Trial:
        """Convert to a trial; `schedule` is the parsed line."""
        return Trial(
            schedule=schedule,
            latency_ms=math.inf if self.latency_ms is None else self.latency_ms,
            ratio=math.inf if self.ratio is None else self.ratio,
            error=self.error,
            disturbed=self.disturbed,
            seconds=self.seconds,
            times=self.times,
        )


class TrialLog:
    """Trials of one problem in one directory.

    Args:
        out_dir: Directory; created if absent.
        problem: Problem.
        header: Settings that the trials depend on: problem, threads, processor.

    Raises:
        InputError: `out_dir` is a file, or has the trials of another problem.
        FileFormatError: A line is damaged.
        RunError: Another process writes to the directory.
    """

    def __init__(self, out_dir: Path | str, problem: SparseProblem, header: dict[str, Any]) -> None:
        root = Path(out_dir)
        if root.exists() and not root.is_dir():
            raise InputError(f"`out_dir` (={root}) is a file; pass a directory")
        root.mkdir(parents=True, exist_ok=True)
        self._writer = JsonLinesWriter(root / TRIALS_FILE)
        try:
            try:
                rows = read_json_lines(root / TRIALS_FILE)
            except FileFormatError as error:
                raise FileFormatError(f"{error}; remove the line") from error
            if not rows:
                self._writer.write(header)
            elif rows[0] != header:
                raise InputError(
                    f"{root} has the trials of another search ({rows[0]}) than this one ({header}): another "
                    "problem, number of threads or machine; choose another directory"
                )
            self.trials = tuple(
                _parse_trial(row, f"{root / TRIALS_FILE}, line {number}", problem)
                for number, row in enumerate(rows[1:], start=2)
            )
        except BaseException:
            self._writer.close()
            raise

    def write(self, trial: Trial) -> None:
        """Append a trial. Raises RunError if the disk is full."""
        self._writer.write(trial.to_dict())

    def close(self) -> None:
        self._writer.sync()
        self._writer.close()


@contextmanager
def open_trial_log(
    out_dir: Path | str | None, problem: SparseProblem, header: dict[str, Any]
) -> Iterator[TrialLog | None]:
    """Open the log of a directory in a `with` block; None without a directory."""
    if out_dir is None:
        yield None
        return
    log = TrialLog(out_dir, problem, header)
    try:
        yield log
    finally:
        log.close()


def _parse_trial(row: dict[str, Any], location: str, problem: SparseProblem) -> Trial:
    try:
        record = TrialRecord.model_validate(row)
        schedule = Schedule.parse(record.schedule).validate(problem.operator, problem.extents)
    except ValidationError as error:
        raise FileFormatError(
            f"{location}, is not a valid trial: {describe_validation_error(error)}; remove the line"
        ) from error
    except InputError as error:
        raise FileFormatError(
            f"{location}, is not a trial of this problem: {error}; remove the line"
        ) from error
    return record.to_trial(schedule)
