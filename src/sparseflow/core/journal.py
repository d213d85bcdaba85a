"""Files of JSON lines that survive the death of their writer."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparseflow.errors import FileFormatError, RunError

SYNC_ROWS = 64

_PATIENCE_S = 2.0
"""That a lock is waited for: what a killed writer just started holds it until it runs its own program."""


class JsonLinesWriter:
    """The open end of a file of JSON lines: whole lines only, by one process only.

    Opening it cuts off a line that was torn when an earlier writer died. When `write` returns, the line has
    reached the kernel and so survives the death of this process; it reaches the disk at the next `sync`.

    Args:
        path: The file; made when absent. Its folder is locked until `close`.

    Raises:
        RunError: Another process holds the folder.
    """

    def __init__(self, path: Path) -> None:
        # The kernel drops the lock with its process, so a killed run can be taken up at once.
        self._folder = os.open(path.parent, os.O_RDONLY)
        try:
            _lock(self._folder)
        except OSError as error:
            os.close(self._folder)
            raise RunError(
                f"{path.parent} is being written by another process; wait for it or stop it"
            ) from error
        self._path = path
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        self._unsynced = 0
        self._length = _whole_lines(self._path)
        os.ftruncate(self._file, self._length)

    def write(self, row: Mapping[str, Any]) -> None:
        """Add one row.

        Raises:
            RunError: The disk took no more; the file then ends after the row before.
        """
        line = json.dumps(dict(row), ensure_ascii=False, allow_nan=False).encode() + b"\n"
        left = memoryview(line)
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError as error:
            # A full disk takes half a line; the next one must not be glued to it.
            os.ftruncate(self._file, self._length)
            raise RunError(f"{self._path} could not be written: {error.strerror}") from error
        self._length += len(line)
        self._unsynced += 1
        if self._unsynced >= SYNC_ROWS:
            self.sync()

    def truncate(self, num_rows: int) -> None:
        """Cut off what comes after the first `num_rows` rows."""
        lines = self._path.read_bytes().split(b"\n")[:num_rows]
        self._length = sum(len(line) + 1 for line in lines)
        os.ftruncate(self._file, self._length)

    def sync(self) -> None:
        """Make what was written survive a power cut."""
        os.fsync(self._file)
        self._unsynced = 0

    def close(self) -> None:
        """Let go of the file and of its folder."""
        os.close(self._file)
        os.close(self._folder)


def _lock(folder: int) -> None:
    until = time.monotonic() + _PATIENCE_S
    while True:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                raise
            time.sleep(0.02)
        else:
            return


def _whole_lines(path: Path) -> int:
    """Bytes up to and with the last newline; what follows it was torn when its writer died."""
    return path.read_bytes().rfind(b"\n") + 1


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Every whole row of a file of JSON lines; a torn last line is not one, and no file is no rows.

    Raises:
        FileFormatError: A whole line is not a JSON object.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    rows = []
    for number, line in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise FileFormatError(f"{path}, line {number}, is not a row: {error}") from error
        if not isinstance(row, dict):
            raise FileFormatError(f"{path}, line {number}, must be an object, not {type(row).__name__}")
        rows.append(row)
    return rows
