"""A run on disk: its samples and the circumstances they were taken in.

::

    runs/<id>/
      run.json          command, config, environment, status: running | finished | failed
      samples.jsonl     one row a line, until the run is finished
      samples.parquet   the same rows, once it is finished
      run.log           what was logged (see `logging.py`)
      report.html       the page (see `report/`)

Whatever kills the process, the folder stays readable: rows are appended whole and reach the kernel at
once, the disk every few rows; a line torn at the end of the file is dropped on reading; everything
else is written beside its place and renamed. A row is flat: names to text, numbers, booleans or None.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from sparseflow.core.environment import collect_environment
from sparseflow.core.files import sync_dir, write_atomic
from sparseflow.core.journal import JsonLinesWriter, read_json_lines
from sparseflow.errors import FileFormatError, InputError, RunError

if TYPE_CHECKING:
    import torch

Value = str | int | float | bool | None
Row = Mapping[str, Value]

STATUSES = ("running", "finished", "failed")


class Run:
    """One run, open for appending or closed for reading.

    Make one with `Run.start`, take one up again with `Run.open`. As a context manager it is finished at the
    end, and failed, with the error's text, when the block raises.

    Attributes:
        path: The run's folder.
        info: What `run.json` holds.
    """

    def __init__(self, path: Path, info: dict[str, Any], writer: JsonLinesWriter | None) -> None:
        self.path = path
        self.info = info
        self._writer = writer
        self._kinds: dict[str, str] = {}

    @classmethod
    def start(
        cls,
        root: Path | str,
        command: str,
        config: Mapping[str, Any],
        seed: int | None = None,
        *,
        device: str | torch.device = "cpu",
    ) -> Run:
        """Begin a run in a new folder `root/<id>`.

        Args:
            root: Folder that holds the runs; made when absent.
            command: What was asked for, such as `"sparseflow spiking bench"`.
            config: Its settings, as JSON types.
            seed: What randomness is drawn from, None where there is none.
            device: Where the work runs.

        Raises:
            InputError: `config` is not made of JSON types.
            DeviceError: `device` is not there.
        """
        info = {
            "id": _new_id(command),
            "status": "running",
            "command": command,
            "config": dict(config),
            "environment": collect_environment(device, seed=seed),
            "started": _now(),
            "ended": None,
            "error": None,
            "rows": None,
        }
        try:
            text = _json(info)
        except (TypeError, ValueError) as error:
            raise InputError(f"`config` of a run must hold JSON types only: {error}") from error
        path = Path(root) / info["id"]
        path.mkdir(parents=True)
        write_atomic(path / "run.json", text)
        sync_dir(path.parent)
        return cls(path, info, JsonLinesWriter(path / "samples.jsonl"))

    @classmethod
    def open(cls, path: Path | str) -> Run:
        """Read a run, and take it up again if it was not finished.

        A line that was torn when its writer died is cut off; the next row starts on a line of its own.

        Raises:
            FileFormatError: `path` holds no run, or one that is damaged elsewhere than at its end.
            RunError: Another process is still writing it.
        """
        path = Path(path)
        info = _read_info(path)
        if info["status"] == "finished":
            return cls(path, info, None)
        writer = JsonLinesWriter(path / "samples.jsonl")
        try:
            # Between the rename of the Parquet file and that of run.json a kill leaves both files.
            (path / "samples.parquet").unlink(missing_ok=True)
            run = cls(path, {**info, "status": "running", "ended": None, "error": None, "rows": None}, writer)
            for row in read_json_lines(path / "samples.jsonl"):
                run._check(row)
            run._write_info()
        except BaseException:
            writer.close()
            raise
        return run

    @property
    def id(self) -> str:
        return self.info["id"]

    @property
    def status(self) -> str:
        """`"running"`, `"finished"` or `"failed"`."""
        return self.info["status"]

    def append(self, row: Row) -> None:
        """Add one row. It survives the death of this process as soon as this returns.

        Raises:
            InputError: A value is not text, a finite number, a boolean or None, or a column changes its kind.
            RunError: The run is over, or the disk took no more; the file then ends after the row before.
        """
        if self._writer is None:
            raise RunError(f"run {self.id} is {self.status}; open it again before adding rows")
        self._check(row)
        self._writer.write(row)

    def extend(self, rows: Iterable[Row]) -> None:
        """Add several rows, in order."""
        for row in rows:
            self.append(row)

    def read_rows(self) -> list[dict[str, Value]]:
        """Every row so far, in the order added.

        Raises:
            FileFormatError: A line other than a torn last one is not a row.
        """
        if self.status == "finished":
            return _read_parquet(self.path / "samples.parquet")
        return read_json_lines(self.path / "samples.jsonl")

    def update_results(self, **facts: Any) -> None:
        """Keep results of the whole run in `run.json`, under `results`.

        Raises:
            InputError: A fact is not made of JSON types.
        """
        results = {**self.info.get("results", {}), **facts}
        try:
            _json(results)
        except (TypeError, ValueError) as error:
            raise InputError(f"results of a run must hold JSON types only: {error}") from error
        self.info["results"] = results
        self._write_info()

    def finish(self) -> None:
        """Close the run as finished: its rows become `samples.parquet`. Closing twice changes nothing."""
        self._close("finished", None)

    def fail(self, error: str) -> None:
        """Close the run as failed, keeping its rows and saying why. `Run.open` takes it up again."""
        self._close("failed", error)

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        else:
            self.fail(f"{kind.__name__}: {error}" if str(error) else kind.__name__)

    def _close(self, status: str, error: str | None) -> None:
        if self._writer is None:
            return
        self._writer.sync()
        rows = self.read_rows()
        if status == "finished":
            _write_parquet(self.path / "samples.parquet", rows)
        self.info |= {"status": status, "ended": _now(), "error": error, "rows": len(rows)}
        self._write_info()
        if status == "finished":
            # Last, so that the rows are always in one of the two files.
            (self.path / "samples.jsonl").unlink()
        self._writer.close()
        self._writer = None

    def _check(self, row: Row) -> None:
        kinds = {name: kind for name, value in row.items() if (kind := _kind(name, value)) is not None}
        for name, kind in kinds.items():
            before = self._kinds.get(name, kind)
            if before != kind:
                raise InputError(f"column `{name}` held {before} so far and was now given {row[name]!r}")
        self._kinds |= kinds

    def _write_info(self) -> None:
        write_atomic(self.path / "run.json", _json(self.info))


def _kind(name: str, value: object) -> str | None:
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
        "None; for a measurement that failed write None and say why in another column"
    )


def _new_id(command: str) -> str:
    # Sorted by time, told apart at a glance, unique even when two start within a second.
    slug = re.sub(r"[^a-z0-9]+", "-", command.lower().removeprefix("sparseflow")).strip("-")[:40] or "run"
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{slug}-{secrets.token_hex(4)}"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _json(content: object) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _read_info(path: Path) -> dict[str, Any]:
    file = path / "run.json"
    try:
        info = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileFormatError(f"{path} holds no readable run: {error}") from error
    if (
        not isinstance(info, dict)
        or info.get("status") not in STATUSES
        or not isinstance(info.get("id"), str)
    ):
        raise FileFormatError(
            f"{file} must be an object with an `id` and a `status` among {', '.join(STATUSES)}"
        )
    return info


def _write_parquet(path: Path, rows: list[dict[str, Value]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    # The union over all rows: pyarrow alone would take the first row's names and drop the others.
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = pa.table({name: pa.array([row.get(name) for row in rows]) for name in names})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    write_atomic(path, sink.getvalue().to_pybytes())


def _read_parquet(path: Path) -> list[dict[str, Value]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_table(path).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise FileFormatError(f"{path} is not a Parquet file that can be read: {error}") from error
