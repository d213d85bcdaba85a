"""Journals: resume, torn lines, headers, keys, locks and syncs."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from sparseflow.core import journal
from sparseflow.core.artifact import Artifact
from sparseflow.core.config import StrictModel
from sparseflow.core.journal import Journal, read_journal
from sparseflow.errors import FileFormatError, InputError, RunError
from tests.conformance import check_journal_file


class Header(Artifact):
    FORMAT: ClassVar[str] = "sparseflow.test.trials"
    VERSION: ClassVar[int] = 1
    HINT: ClassVar[str] = "use another directory"

    problem: str
    threads: int = 1


class Row(StrictModel):
    name: str
    ms: float | None = None


class Failure(StrictModel):
    error: str


@dataclass(frozen=True)
class Point:
    x: int
    y: tuple[float, ...] = ()


def get_name(row: Row) -> str:
    return row.name


def open_journal(path: Path, header: Header | None = None) -> Journal[Row]:
    return Journal(path, Row, header=header or Header(problem="spmm"), key=get_name)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rows.jsonl"


def test_journal_reopened_has_all_rows_and_keys(path: Path) -> None:
    with open_journal(path) as first:
        first.append(Row(name="a", ms=0.1))
        first.append(Row(name="é\n"))
        assert "a" in first and "b" not in first and len(first) == 2
    with open_journal(path) as second:
        assert second.rows == [Row(name="a", ms=0.1), Row(name="é\n")]
        assert "é\n" in second and second.locate(1) == f"{path}, line 3"
        second.append(Row(name="b"))
    header, rows = read_journal(path, Row, header_type=Header)
    assert header == Header(problem="spmm") and [row.name for row in rows] == ["a", "é\n", "b"]


def test_journal_of_another_header_names_each_difference(path: Path) -> None:
    open_journal(path).close()
    with pytest.raises(InputError, match=r"problem \(='spmm', now 'spmv'\), threads \(=1, now 2\)"):
        open_journal(path, Header(problem="spmv", threads=2))
    open_journal(path).close()


@pytest.mark.parametrize(
    ("line", "expected_text"),
    [
        ('{"format": "other"}', "other"),
        ('{"format": "sparseflow.test.trials", "version": 2, "problem": "spmm"}', "newer"),
        ('{"format": "sparseflow.test.trials", "version": 1}', "problem"),
        ("[]", "list"),
        ("{", "line 1"),
    ],
)
def test_journal_with_a_foreign_header_is_refused(path: Path, line: str, expected_text: str) -> None:
    path.write_text(line + "\n")
    with pytest.raises(FileFormatError, match=expected_text):
        open_journal(path)
    with pytest.raises(FileFormatError, match=expected_text):
        read_journal(path, Row, header_type=Header)
    assert path.read_text() == line + "\n"


@pytest.mark.parametrize(
    "line",
    ['{"name": 1}', "{}", '{"name": "b", "extra": 1}', '{"name": "b", "ms": NaN}', "x", "3", '{"name": "a"}',
     '{"name": "b", "name": "c"}', "[" * 2000],
)  # fmt: skip
def test_journal_with_an_invalid_row_names_the_line(path: Path, line: str) -> None:
    with open_journal(path) as first:
        first.append(Row(name="a"))
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(FileFormatError, match="line 3"):
        open_journal(path)


def test_append_duplicate_key_is_refused(path: Path) -> None:
    with open_journal(path) as rows:
        rows.append(Row(name="a"))
        with pytest.raises(InputError, match="'a'"):
            rows.append(Row(name="a", ms=2.0))
    assert len(read_journal(path, dict)[1]) == 2


@pytest.mark.parametrize("line", ['{"name": [1]}', "{}"])
def test_open_with_a_row_without_a_valid_key_names_the_line(path: Path, line: str) -> None:
    path.write_text(f'{{"name": "a"}}\n{line}\n')
    with pytest.raises(FileFormatError, match="line 2"):
        Journal(path, dict, key=lambda row: row["name"])


@pytest.mark.parametrize("value", [np.nan, {1, 2}, b"\xff", object()])
def test_append_value_that_json_cannot_hold_is_refused(path: Path, value: object) -> None:
    rows: Journal[dict[str, Any]] = Journal(path, dict)
    with pytest.raises(InputError):
        rows.append({"a": value})
    rows.append({"a": 1})
    assert rows.rows == read_journal(path, dict)[1] == [{"a": 1}]
    rows.close()


def test_append_after_close_is_refused(path: Path) -> None:
    rows = open_journal(path)
    rows.close()
    rows.close()
    with pytest.raises(RunError):
        rows.append(Row(name="a"))


def test_journal_accepts_unions_and_dataclasses(path: Path) -> None:
    adapter: TypeAdapter[Row | Failure] = TypeAdapter(Row | Failure)
    with Journal(path, adapter) as mixed:
        mixed.append(Row(name="a"))
        mixed.append(Failure(error="b"))
    assert read_journal(path, adapter)[1] == [Row(name="a"), Failure(error="b")]
    other = path.with_name("points.jsonl")
    points = [Point(1, (0.5,)), Point(2)]
    with Journal(other, Point, key=lambda point: point.x) as points_journal:
        for point in points:
            points_journal.append(point)
    assert read_journal(other, Point) == (None, points)


@pytest.mark.parametrize("header", [None, Header(problem="spmm")])
def test_truncate_removes_rows_and_their_keys(path: Path, header: Header | None) -> None:
    with Journal(path, Row, header=header, key=get_name) as rows:
        for name in "abc":
            rows.append(Row(name=name))
        rows.truncate(1)
        assert "b" not in rows and [row.name for row in rows.rows] == ["a"]
        with pytest.raises(FileFormatError, match="2"):
            rows.truncate(2)
        rows.append(Row(name="c"))
    with Journal(path, Row, header=header, key=get_name) as rows:
        assert [row.name for row in rows.rows] == ["a", "c"]


def test_close_with_delete_removes_the_file(path: Path) -> None:
    rows = open_journal(path)
    rows.close(delete=True)
    assert not path.exists()
    assert read_journal(path, Row, header_type=Header) == (None, [])


@settings(max_examples=60)
@given(cut=st.integers(0, 400), junk=st.binary(max_size=20).filter(lambda data: b"\n" not in data))
def test_journal_with_a_torn_end_resumes_with_its_whole_lines(
    tmp_path_factory: pytest.TempPathFactory, cut: int, junk: bytes
) -> None:
    path = tmp_path_factory.mktemp("torn") / "rows.jsonl"
    with open_journal(path) as rows:
        for index in range(6):
            rows.append(Row(name=f"é{index}\n"))
    content = path.read_bytes()
    torn = content[: max(0, len(content) - cut)]
    path.write_bytes(torn + junk if not torn or torn.endswith(b"\n") else torn)
    num_rows = max(0, torn.count(b"\n") - 1)
    assert len(read_journal(path, Row, header_type=Header)[1]) == num_rows
    with open_journal(path) as rows:
        assert [row.name for row in rows.rows] == [f"é{index}\n" for index in range(num_rows)]
        rows.append(Row(name="next"))
    assert read_journal(path, Row, header_type=Header)[1][-1].name == "next"


@pytest.mark.usefixtures("refused_at_once")
def test_journal_passes_the_conformance_checks(path: Path) -> None:
    def open_rows() -> list[Row]:
        with open_journal(path) as rows:
            return rows.rows

    with open_journal(path) as rows:
        rows.append(Row(name="a"))
        rows.append(Row(name="b", ms=0.5))
    check_journal_file(open_rows, path)


def test_read_journal_of_a_missing_file_is_empty(path: Path) -> None:
    assert read_journal(path, dict) == (None, [])


@pytest.mark.usefixtures("refused_at_once")
def test_second_writer_is_refused_until_the_first_closes(path: Path) -> None:
    first = open_journal(path)
    with pytest.raises(RunError):
        open_journal(path.with_name("other.jsonl"))
    first.close()
    open_journal(path).close()


def test_refused_journal_releases_its_lock(path: Path) -> None:
    path.write_text("x\n")
    with pytest.raises(FileFormatError):
        open_journal(path)
    open_journal(path.with_name("other.jsonl")).close()


def test_lock_held_for_a_moment_is_waited_for(path: Path) -> None:
    first = open_journal(path)
    timer = threading.Timer(0.1, first.close)
    timer.start()
    open_journal(path).close()
    timer.join()


def test_rows_are_synced_at_intervals(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(journal.os, "fsync", synced.append)
    rows: Journal[dict[str, Any]] = Journal(path, dict, sync_rows=4)
    for index in range(9):
        rows.append({"i": index})
    assert len(synced) == 2
    rows.sync()
    rows.close()
    assert len(synced) == 4


def test_full_disk_leaves_the_previous_rows(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: Journal[dict[str, Any]] = Journal(path, dict, key=lambda row: row["a"])
    rows.append({"a": 1})
    write = journal.os.write

    def write_half(file: int, data: memoryview) -> int:
        if len(data) > 4:
            return write(file, data[:4])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(journal.os, "write", write_half)
    with pytest.raises(RunError, match="No space left"):
        rows.append({"a": 2})
    monkeypatch.undo()
    rows.append({"a": 2})
    rows.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"a": 1}, {"a": 2}]
