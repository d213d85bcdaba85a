"""A run on disk: samples and the environment they were measured in.

::

    runs/<id>/
      run.json          command, config, environment, status: running | finished | failed
      samples.jsonl     one row per line, until the run is finished
      samples.parquet   the same rows, once the run is finished
      report.html       page (see `report/`)

The directory stays readable if the process is killed: rows are a `Journal`, all other files are written
atomically. A row is flat: column name -> text, number, boolean or None.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from sparseflow.core.environment import collect_environment
from sparseflow.core.files import read_json, read_parquet, sync_dir, write_atomic, write_parquet
from sparseflow.core.journal import Journal, lock_directory, read_journal
from sparseflow.errors import FileFormatError, InputError, RunError

if TYPE_CHECKING:
    import torch

Value = str | int | float | bool | None
Row = Mapping[str, Value]

INFO_FILE = "run.json"
STATUSES = ("running", "finished", "failed")


class Run:
    """A run that is open for appending or, once finished, for reading.

    Create one with `Run.start`, resume or read one with `Run.open`. As a context manager it is finished at
    the end of the block, or failed with the error's text if the block raises.

    Attributes:
        path: Directory of the run.
        info: Content of `run.json`.
    """

    def __init__(self, path: Path, info: dict[str, Any], journal: Journal[dict[str, Any]] | None) -> None:
        self.path = path
        self.info = info
        self._journal = journal
        self._column_types: dict[str, str] = {}

    @classmethod
    def start(
        cls,
        root: Path | str,
        command: str,
        config: Mapping[str, Any],
        seed: int | None = None,
        *,
        device: str | torch.device = "cpu",
    ) -> Self:
        """Create a run in a new directory `root/<id>`.

        Args:
            root: Directory of all runs; created if it does not exist.
            command: Command line, such as `"sparseflow spiking bench"`.
            config: Settings, as JSON types.
            seed: Random seed; None if nothing is random.
            device: Device that is measured.

        Raises:
            InputError: `config` contains something that JSON cannot represent.
            DeviceError: `device` does not exist.
        """
        info = {
            "id": _make_id(command),
            "status": "running",
            "command": command,
            "config": dict(config),
            "environment": collect_environment(device, seed=seed),
            "started": _format_time(),
            "ended": None,
            "error": None,
            "rows": None,
        }
        text = _to_json(info, "`config`")
        path = Path(root) / info["id"]
        path.mkdir(parents=True)
        write_atomic(path / INFO_FILE, text)
        sync_dir(path.parent)
        return cls(path, info, Journal(path / "samples.jsonl", dict))

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Read a run, and resume it if it is not finished.

        Raises:
            FileFormatError: `path` contains no run, or a damaged one.
            RunError: Another process writes the run.
        """
        path = Path(path)
        info = _read_info(path)
        if info["status"] == "finished":
            return cls(path, info, None)
        journal: Journal[dict[str, Any]] = Journal(path / "samples.jsonl", dict)
        try:
            # A process killed between writing the Parquet file and run.json leaves both files.
            (path / "samples.parquet").unlink(missing_ok=True)
            run = cls(
                path, {**info, "status": "running", "ended": None, "error": None, "rows": None}, journal
            )
            for row in journal.rows:
                run._check_columns(row)
            run._write_info()
        except BaseException:
            journal.close()
            raise
        return run

    @property
    def id(self) -> str:
        """Name of the run's directory."""
        return self.info["id"]

    @property
    def status(self) -> str:
        """`"running"`, `"finished"` or `"failed"`."""
        return self.info["status"]

    def append(self, row: Row) -> None:
        """Append a row. It survives the death of this process as soon as this returns.

        Raises:
            InputError: A value is not text, a finite number, a boolean or None, or a column changes its type.
            RunError: The run is closed, or the disk is full; the file then ends after the previous row.
        """
        if self._journal is None:
            raise RunError(f"run {self.id} is {self.status}; open it again before appending rows")
        self._check_columns(row)
        self._journal.append(dict(row))

    def extend(self, rows: Iterable[Row]) -> None:
        """Append several rows."""
        for row in rows:
            self.append(row)

    def read_rows(self) -> list[dict[str, Value]]:
        """Return all rows in the order appended.

        Raises:
            FileFormatError: The file of rows is damaged.
        """
        if self._journal is not None:
            return list(self._journal.rows)
        if self.status == "finished":
            return read_parquet(self.path / "samples.parquet").to_pylist()
        return read_journal(self.path / "samples.jsonl", dict)[1]

    def update_results(self, **results: Any) -> None:
        """Store results of the whole run in `run.json`, under `results`.

        Raises:
            InputError: A result contains something that JSON cannot represent.
        """
        updated = {**self.info.get("results", {}), **results}
        _to_json(updated, "`results`")
        self.info["results"] = updated
        self._write_info()

    def finish(self) -> None:
        """Close the run as finished and convert its rows to Parquet. Closing twice changes nothing."""
        self._close("finished", None)

    def fail(self, error: str) -> None:
        """Close the run as failed; `Run.open` resumes it.

        Args:
            error: Reason, stored in `run.json`.
        """
        self._close("failed", error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        else:
            self.fail(f"{kind.__name__}: {error}" if str(error) else kind.__name__)

    def _close(self, status: str, error: str | None) -> None:
        if self._journal is None:
            return
        self._journal.sync()
        rows = self._journal.rows
        if status == "finished":
            write_parquet(self.path / "samples.parquet", _build_table(rows))
        self.info |= {"status": status, "ended": _format_time(), "error": error, "rows": len(rows)}
        self._write_info()
        # The journal is deleted last, so the rows are always in at least one of the two files.
        self._journal.close(delete=status == "finished")
        self._journal = None

    def _check_columns(self, row: Row) -> None:
        types = {name: kind for name, value in row.items() if (kind := _classify(name, value)) is not None}
        for name, kind in types.items():
            previous = self._column_types.get(name, kind)
            if previous != kind:
                raise InputError(f"column `{name}` contains {previous}, got {row[name]!r}")
        self._column_types |= types

    def _write_info(self) -> None:
        write_atomic(self.path / INFO_FILE, _to_json(self.info, "`run.json`"))


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """State of a run on disk.

    Attributes:
        path: Directory.
        state: `"running"`, `"finished"`, `"failed"`, `"interrupted"` (its process no longer exists), or
            `"damaged"` (`run.json` is not readable).
        command: Command line; empty if damaged.
        started: Start in ISO 8601, UTC; empty if damaged.
        error: Why the run failed or is damaged; None otherwise.
    """

    path: Path
    state: str
    command: str
    started: str
    error: str | None

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types."""
        return {**asdict(self), "path": str(self.path)}


def list_runs(root: Path | str) -> list[RunSummary]:
    """List the runs in a directory and below, sorted by path. Links to directories are not followed.

    Raises:
        InputError: The directory does not exist.
    """
    if not Path(root).is_dir():
        raise InputError(f"{root} is not a directory; name the output directory of the runs")
    paths = sorted(Path(directory) for directory, _, names in os.walk(root) if INFO_FILE in names)
    return [_summarize(path) for path in paths]


def remove_interrupted(path: Path | str) -> None:
    """Delete the directory of an interrupted run.

    Raises:
        InputError: The run is not interrupted, or its directory was renamed and may have another purpose.
        RunError: Another process has just resumed the run.
    """
    run = _summarize(Path(path))
    if run.state != "interrupted":
        raise InputError(f"{path} is {run.state}; only interrupted runs are removed")
    if _read_info(run.path)["id"] != run.path.absolute().name:
        raise InputError(f"{path} was renamed; check its content and delete it yourself")
    lock = lock_directory(run.path, timeout_s=0.0)
    try:
        shutil.rmtree(run.path)
    finally:
        os.close(lock)


def _summarize(path: Path) -> RunSummary:
    try:
        info = _read_info(path)
    except FileFormatError as error:
        return RunSummary(path=path, state="damaged", command="", started="", error=str(error))
    state = info["status"]
    if state == "running":
        try:
            os.close(lock_directory(path, timeout_s=0.0))
            state = "interrupted"
        except RunError:
            pass  # Its writer holds the lock.
    error = info.get("error")
    return RunSummary(
        path=path,
        state=state,
        command=str(info.get("command") or ""),
        started=str(info.get("started") or ""),
        error=None if error is None else str(error),
    )


def _classify(name: str, value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, bool):
        return "booleans"
    if isinstance(value, int) and abs(value) < 2**53:
        return "numbers"
    if isinstance(value, float) and math.isfinite(value):
        return "numbers"
    if isinstance(value, str):
        return "text"
    raise InputError(
        f"column `{name}` (={value!r}) must be text, a finite number (integers below 2^53), a boolean or "
        "None; for a failed measurement, write None and the error in another column"
    )


def _make_id(command: str) -> str:
    # Sorts by time and is unique even if two runs start within a second.
    slug = re.sub(r"[^a-z0-9]+", "-", command.lower().removeprefix("sparseflow")).strip("-")[:40] or "run"
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{slug}-{secrets.token_hex(4)}"


def _format_time() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _to_json(content: object, name: str) -> str:
    try:
        return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise InputError(f"{name} of a run must contain finite JSON values: {error}") from error


def _read_info(path: Path) -> dict[str, Any]:
    file = path / INFO_FILE
    try:
        info = read_json(file)
    except InputError as error:
        raise FileFormatError(f"{path} is not a run: {error}") from error
    valid = isinstance(info, dict) and info.get("status") in STATUSES and isinstance(info.get("id"), str)
    if not valid:
        statuses = ", ".join(STATUSES)
        raise FileFormatError(f"{file} must be an object with an `id` and a `status` of {statuses}")
    return info


def _build_table(rows: list[dict[str, Any]]) -> Any:
    import pyarrow as pa

    # pyarrow alone would take the columns of the first row and drop all others.
    names = list(dict.fromkeys(name for row in rows for name in row))
    return pa.table({name: pa.array([row.get(name) for row in rows]) for name in names})
