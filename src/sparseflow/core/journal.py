"""Append-only JSON-lines journals that survive the death of their writer.

The first line is an optional header, an `Artifact` that says what the rows belong to. Every other line is a
row. Opening an existing journal resumes it: rows are validated, a torn last line is cut off, and a header
that differs from the given one is refused::

    with Journal(path, TrialRow, header=TrialHeader(threads=8), key=lambda row: row.schedule) as journal:
        for schedule in schedules:
            if schedule not in journal:
                journal.append(measure(schedule))

An appended row survives the death of the process at once and a power cut after the next sync.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from pydantic import TypeAdapter, ValidationError

from sparseflow.core.artifact import Artifact
from sparseflow.core.config import describe_validation_error
from sparseflow.core.files import parse_json
from sparseflow.errors import FileFormatError, InputError, OutputError, RunError

SYNC_ROWS = 64

_LOCK_TIMEOUT_S = 2.0
"""A killed writer can hold the lock this long: a child process inherits it until it executes its program."""

Row = TypeVar("Row")
Header = TypeVar("Header", bound=Artifact)


class Journal(Generic[Row]):
    """A journal that is open for appending; a context manager that syncs and closes.

    Args:
        path: File; created if it does not exist. Its directory must exist and is locked until `close`.
        row_type: Type of rows: a pydantic model, a dataclass, `TypeAdapter(A | B)` for several kinds of rows,
            or `dict` for unchecked objects.
        header: What the rows belong to; None for a journal without a header line.
        key: Unique key of a row; None allows duplicates and disables `in`.
        sync_rows: Rows between two syncs to disk.

    Attributes:
        path: File.
        rows: All rows, in the order appended.

    Raises:
        InputError: The header differs from the journal's; the message names the fields.
        FileFormatError: The file is foreign or of another version, a row is invalid, or a key is duplicated.
        RunError: Another process writes into the directory.
    """

    def __init__(
        self,
        path: Path | str,
        row_type: type[Row] | TypeAdapter[Row],
        *,
        header: Artifact | None = None,
        key: Callable[[Row], Hashable] | None = None,
        sync_rows: int = SYNC_ROWS,
    ) -> None:
        self.path = Path(path)
        self.rows: list[Row] = []
        self._adapter = _make_adapter(row_type)
        self._header, self._key = header, key
        self._keys: set[Hashable] = set()
        self._writer: _LineWriter | None = _LineWriter(self.path, sync_rows=sync_rows)
        try:
            header_type = None if header is None else type(header)
            existing, self.rows = _parse_lines(self.path, self._adapter, header_type)
            if header is not None:
                if existing is None:
                    self._writer.write(header.to_dict())
                else:
                    _check_same_header(self.path, existing, header)
            for index, row in enumerate(self.rows):
                try:
                    is_new = self._add_key(row)
                except (TypeError, LookupError) as error:
                    raise FileFormatError(f"{self.locate(index)}: invalid key; remove the line") from error
                if not is_new:
                    raise FileFormatError(f"{self.locate(index)}: duplicate key; remove the line")
        except BaseException:
            self._writer.close()
            raise

    def __contains__(self, key: Hashable) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self.rows)

    def append(self, row: Row) -> None:
        """Append a row.

        Raises:
            InputError: The row's key exists already, or a value cannot be stored as JSON.
            RunError: The journal is closed, or the disk is full; the file then ends after the previous row.
        """
        if self._writer is None:
            raise RunError(f"{self.path} is closed; open it again to append rows")
        if self._key is not None and self._key(row) in self._keys:
            raise InputError(f"{self.path} already contains a row with the key {self._key(row)!r}")
        try:
            record: Any = row if isinstance(row, dict) else self._adapter.dump_python(row, mode="json")
            self._writer.write(record)
        except (TypeError, ValueError) as error:
            raise InputError(f"{self.path}: a row must contain finite JSON values: {error}") from error
        self._add_key(row)
        self.rows.append(row)

    def locate(self, index: int) -> str:
        """Return `<path>, line <n>` of a row, for error messages about its content."""
        return f"{self.path}, line {index + 1 + (self._header is not None)}"

    def truncate(self, num_rows: int) -> None:
        """Remove all rows after the first `num_rows`.

        Raises:
            FileFormatError: The journal has fewer rows.
        """
        assert self._writer is not None
        if num_rows > len(self.rows):
            raise FileFormatError(f"{self.path}: expected at least {num_rows} rows, got {len(self.rows)}")
        self._writer.truncate(num_rows + (self._header is not None))
        del self.rows[num_rows:]
        self._keys = set() if self._key is None else {self._key(row) for row in self.rows}

    def sync(self) -> None:
        """Make all appended rows survive a power cut."""
        if self._writer is not None:
            self._writer.sync()

    def close(self, *, delete: bool = False) -> None:
        """Sync and close the file, and unlock its directory. Closing twice changes nothing.

        Args:
            delete: Whether to delete the file, for journals whose rows are now in another file.
        """
        if self._writer is None:
            return
        try:
            if delete:
                self.path.unlink(missing_ok=True)
            else:
                self._writer.sync()
        finally:
            self._writer.close()
            self._writer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _add_key(self, row: Row) -> bool:
        """Add the row's key, if rows have keys; return whether it is new."""
        if self._key is None:
            return True
        key = self._key(row)
        is_new = key not in self._keys
        self._keys.add(key)
        return is_new


def read_journal(
    path: Path | str,
    row_type: type[Row] | TypeAdapter[Row],
    *,
    header_type: type[Header] | None = None,
) -> tuple[Header | None, list[Row]]:
    """Read a journal without locking it.

    Args:
        path: File. A torn last line is ignored.
        row_type: As in `Journal`.
        header_type: Type of the header; None for a journal without a header line.

    Returns:
        The header and all rows; None and no rows if the file does not exist or is empty.

    Raises:
        FileFormatError: The file is foreign or of another version, or a row is invalid.
    """
    return _parse_lines(Path(path), _make_adapter(row_type), header_type)


def lock_directory(directory: Path, *, timeout_s: float) -> int:
    """Lock a directory against other writers.

    The kernel releases the lock with its process, so a killed writer does not block the next one.

    Args:
        directory: Existing directory.
        timeout_s: Time to wait for another writer.

    Returns:
        File descriptor; closing it releases the lock.

    Raises:
        RunError: Another process has the lock, or the file system has no locks.
        OSError: The directory cannot be opened.
    """
    handle = os.open(directory, os.O_RDONLY)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except BlockingIOError as error:
            if time.monotonic() >= deadline:
                os.close(handle)
                raise RunError(f"another process writes into {directory}; wait for it or stop it") from error
            time.sleep(0.02)
        except OSError as error:
            os.close(handle)
            raise RunError(f"cannot lock {directory}: {error.strerror}; use a local directory") from error


class _LineWriter:
    """Appends whole lines to a file of JSON lines and locks its directory until `close`.

    Opening the file cuts off a line that was torn when an earlier writer died. A written line survives the
    death of this process at once and a power cut after the next `sync`.

    Args:
        path: File; created if it does not exist.
        sync_rows: Rows between two syncs.

    Raises:
        RunError: Another process holds the lock.
    """

    def __init__(self, path: Path, *, sync_rows: int = SYNC_ROWS) -> None:
        self._directory = lock_directory(path.parent, timeout_s=_LOCK_TIMEOUT_S)
        self._path, self._sync_rows = path, sync_rows
        try:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError:
            os.close(self._directory)
            raise
        self._unsynced = 0
        self._length = self._path.read_bytes().rfind(b"\n") + 1
        os.ftruncate(self._file, self._length)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row.

        Raises:
            OutputError: The disk is full; the file then ends after the previous row.
        """
        line = json.dumps(dict(row), ensure_ascii=False, allow_nan=False).encode() + b"\n"
        remaining = memoryview(line)
        try:
            while remaining:
                remaining = remaining[os.write(self._file, remaining) :]
        except OSError as error:
            # A full disk can take half a line; the next row must start on a new line.
            os.ftruncate(self._file, self._length)
            raise OutputError(f"cannot write {self._path}: {error.strerror}") from error
        self._length += len(line)
        self._unsynced += 1
        if self._unsynced >= self._sync_rows:
            self.sync()

    def truncate(self, num_lines: int) -> None:
        """Remove all lines after the first `num_lines`."""
        lines = self._path.read_bytes().split(b"\n")[:num_lines]
        self._length = sum(len(line) + 1 for line in lines)
        os.ftruncate(self._file, self._length)

    def sync(self) -> None:
        """Make all written lines survive a power cut.

        Raises:
            OutputError: The disk is full.
        """
        try:
            os.fsync(self._file)
        except OSError as error:
            raise OutputError(f"cannot write {self._path}: {error.strerror}") from error
        self._unsynced = 0

    def close(self) -> None:
        """Close the file and unlock its directory."""
        os.close(self._file)
        os.close(self._directory)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Read all whole lines; a torn last line is ignored, and a missing file has no lines.

    Raises:
        FileFormatError: A line is not a JSON object.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    rows = []
    for number, line in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), start=1):
        try:
            row = parse_json(line)
        except ValueError as error:
            raise FileFormatError(f"{path}, line {number}: {error}; remove the line") from error
        if not isinstance(row, dict):
            raise FileFormatError(
                f"{path}, line {number}: expected an object, got {type(row).__name__}; remove the line"
            )
        rows.append(row)
    return rows


def _make_adapter(row_type: type[Row] | TypeAdapter[Row]) -> TypeAdapter[Row]:
    return row_type if isinstance(row_type, TypeAdapter) else TypeAdapter(row_type)


def _parse_lines(
    path: Path, adapter: TypeAdapter[Row], header_type: type[Header] | None
) -> tuple[Header | None, list[Row]]:
    records = _read_lines(path)
    header = None
    if header_type is not None and records:
        header = header_type.from_dict(records[0], f"{path}, line 1")
        records = records[1:]
    rows: list[Row] = []
    for number, record in enumerate(records, start=1 + (header is not None)):
        try:
            rows.append(adapter.validate_python(record))
        except ValidationError as error:
            problem = describe_validation_error(error)
            raise FileFormatError(f"{path}, line {number}: {problem}; remove the line") from error
    return header, rows


def _check_same_header(path: Path, existing: Artifact, requested: Artifact) -> None:
    old, new = existing.to_dict(), requested.to_dict()
    differences = [
        f"{name} (={_shorten(old.get(name))}, now {_shorten(new.get(name))})"
        for name in new
        if old.get(name) != new.get(name)
    ]
    if differences:
        raise InputError(
            f"{path} was written with other settings: {', '.join(differences)}; use another file or directory"
        )


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
