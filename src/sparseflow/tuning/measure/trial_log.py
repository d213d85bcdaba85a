"""The trials of a search on disk, so that one that was stopped goes on."""

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
from sparseflow.tuning.schedule.problem import Problem
from sparseflow.tuning.schedule.schedule import Schedule

FILE = "trials.jsonl"

_Time = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class TrialRow(BaseModel):
    """A trial as `Trial.to_dict` writes it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    schedule: str
    latency_ms: _Time | None
    ratio: _Time | None
    error: str | None
    disturbed: bool
    seconds: dict[str, Annotated[float, Field(ge=0.0, allow_inf_nan=False)]]
    times: Annotated[int, Field(ge=1)] = 1

    @model_validator(mode="after")
    def _either(self) -> TrialRow:
        if (self.error is None) != (self.ratio is not None and self.latency_ms is not None):
            raise ValueError("a trial has either an error or both times")
        return self

    def trial(self, schedule: Schedule) -> Trial:
        """The trial; `schedule` is the line, read."""
        return Trial(
            schedule=schedule,
            latency_ms=math.inf if self.latency_ms is None else self.latency_ms,
            ratio=math.inf if self.ratio is None else self.ratio,
            error=self.error,
            disturbed=self.disturbed,
            seconds=self.seconds,
            times=self.times,
        )


class Log:
    """What was measured for one problem, in one folder.

    Args:
        folder: Made when absent.
        facts: What the trials hold for: the problem, the threads, the processor.

    Raises:
        InputError: `folder` is a file, or holds the trials of something else.
        FileFormatError: A line is damaged.
        RunError: Another process writes into it.
    """

    def __init__(self, folder: Path | str, problem: Problem, facts: dict[str, Any]) -> None:
        root = Path(folder)
        if root.exists() and not root.is_dir():
            raise InputError(f"`folder` (={root}) is a file; name a folder")
        root.mkdir(parents=True, exist_ok=True)
        self._writer = JsonLinesWriter(root / FILE)
        try:
            try:
                rows = read_json_lines(root / FILE)
            except FileFormatError as error:
                raise FileFormatError(f"{error}; remove the line") from error
            if not rows:
                self._writer.write(facts)
            elif rows[0] != facts:
                raise InputError(
                    f"{root} holds the trials of something else ({rows[0]}) than this ({facts}): another "
                    "problem, number of threads or machine; name another folder"
                )
            self.trials = tuple(
                _trial(row, f"{root / FILE}, line {number}", problem)
                for number, row in enumerate(rows[1:], start=2)
            )
        except BaseException:
            self._writer.close()
            raise

    def write(self, trial: Trial) -> None:
        """Add one. Raises RunError where the disk is full."""
        self._writer.write(trial.to_dict())

    def close(self) -> None:
        self._writer.sync()
        self._writer.close()


@contextmanager
def kept(folder: Path | str | None, problem: Problem, facts: dict[str, Any]) -> Iterator[Log | None]:
    """The log of a folder, closed at the end; None without a folder."""
    if folder is None:
        yield None
        return
    log = Log(folder, problem, facts)
    try:
        yield log
    finally:
        log.close()


def _trial(row: dict[str, Any], where: str, problem: Problem) -> Trial:
    try:
        read = TrialRow.model_validate(row)
        schedule = Schedule.parse(read.schedule).checked(problem.operator, problem.extents)
    except ValidationError as error:
        raise FileFormatError(
            f"{where}, is no trial: {describe_validation_error(error)}; remove the line"
        ) from error
    except InputError as error:
        raise FileFormatError(f"{where}, is no trial of this: {error}; remove the line") from error
    return read.trial(schedule)
