"""Atomic writes, bounded JSON, Parquet."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseflow.core import files
from sparseflow.core.files import (
    check_output,
    parse_json,
    read_json,
    read_parquet,
    write_atomic,
    write_json,
    write_parquet,
)
from sparseflow.errors import FileFormatError, InputError, OutputError


def test_write_atomic_replaces_text_and_bytes(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a", "naïve\n")
    write_atomic(tmp_path / "a", b"\x00\x01")
    assert (tmp_path / "a").read_bytes() == b"\x00\x01"
    assert os.listdir(tmp_path) == ["a"]


def test_write_atomic_file_has_the_usual_permissions(tmp_path: Path) -> None:
    (tmp_path / "usual").touch()
    write_atomic(tmp_path / "ours", "x")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_write_atomic_failure_leaves_only_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_atomic(tmp_path / "a", "old")

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(OutputError, match="No space"):
        write_atomic(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("name", ["missing/a", "directory", "n" * 300])
def test_write_atomic_failure_saves_the_content_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    spare = tmp_path / "spare"
    for directory in (spare, tmp_path / "directory" / "content"):
        directory.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(spare))
    with pytest.raises(OutputError) as caught:
        write_atomic(tmp_path / name, "result")
    (saved,) = (file for file in spare.rglob("*") if file.is_file())
    assert saved.read_text() == "result" and str(saved) in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)


def test_write_atomic_failure_of_a_cache_saves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    with pytest.raises(OutputError, match="cannot write"):
        write_atomic(tmp_path / "missing" / "decisions.json", "x", rescue=False)
    assert os.listdir(tmp_path) == []


def test_write_atomic_removes_the_files_of_killed_writers(tmp_path: Path) -> None:
    killed = tmp_path / ".sparseflow-tmp-1"
    living = tmp_path / ".sparseflow-tmp-2"
    foreign = tmp_path / ".a.tmp"
    for file in (killed, living, foreign):
        file.write_text("x")
    with living.open() as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        write_atomic(tmp_path / "a", "x")
    assert sorted(os.listdir(tmp_path)) == sorted([living.name, foreign.name, "a"])


def test_check_output_of_a_writable_place_creates_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    check_output(tmp_path / "file")
    check_output(tmp_path / "a" / "b")
    check_output(tmp_path, directory=True)
    check_output(tmp_path / "a" / "b", directory=True)
    assert os.listdir(tmp_path) == ["file"]


def test_check_output_of_an_impossible_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, directory in [
        (tmp_path, False),
        (tmp_path / "file", True),
        (tmp_path / "file" / "a", False),
        (tmp_path / "file" / "a", True),
        (tmp_path / ("n" * 300), False),
    ]:
        with pytest.raises(OutputError, match=path.name[:200]):
            check_output(path, directory=directory)


def test_names_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    name = os.fsdecode(b"\xff")
    with pytest.raises(OutputError, match="not UTF-8"):
        check_output(tmp_path / name)
    with pytest.raises(InputError, match="not UTF-8"):
        write_json(tmp_path / "a.json", {"source": name})
    assert os.listdir(tmp_path) == []


def test_check_output_on_a_read_only_file_system_is_refused() -> None:
    if not Path("/proc").is_dir():
        pytest.skip("needs /proc")
    with pytest.raises(OutputError, match="/proc/a"):
        check_output("/proc/a")


def test_check_output_on_a_full_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(OutputError, match="No space"):
        check_output(tmp_path / "a")
    assert os.listdir(tmp_path) == []


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False) | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("ab[]{}\"\\é"), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@given(JSON)
def test_parse_json_reads_what_json_writes(content: Any) -> None:
    for text in (json.dumps(content), json.dumps(content, ensure_ascii=False, indent=1)):
        assert parse_json(text) == parse_json(text.encode()) == content


@pytest.mark.parametrize(
    "text",
    ["", "NaN", "[-Infinity]", "1e999", "[-1E+0400]", "9" * 400 + ".0", '{"a": 1, "a": 2}', "{", "[1,]",
     "1 2", "'a'", "9" * 310, "[-" + "9" * 400 + "]", '"\\ud800"', '{"\\uDFFF": 1}', '"\\ud83d\\ud83d"',
     "[" * 65 + "]" * 65, "[" * 200_000, '{"a":' * 100 + "1" + "}" * 100, '"' + '\\"' * 1000, "9" * 5000],
)  # fmt: skip
def test_parse_json_refuses_invalid_text(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_json(text)


@pytest.mark.parametrize("data", [b"\xff", b"\xef\xbb\xbf1", "1".encode("utf-16")])
def test_parse_json_refuses_other_encodings(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_json(data)


def test_parse_json_counts_only_real_brackets_as_nesting() -> None:
    assert parse_json(json.dumps(["[{" * 100, '"[' * 100])) == ["[{" * 100, '"[' * 100]
    assert len(parse_json("[" + ",".join(["[]"] * 1000) + "]")) == 1000
    assert parse_json('"\\ud83d\\ude00"') == "\U0001f600" and parse_json("9" * 300) == int("9" * 300)
    assert parse_json("1e300") == 1e300 and parse_json("[1e-400]") == [0.0]
    depth = files.MAX_JSON_DEPTH
    assert parse_json("[" * depth + "]" * depth)
    with pytest.raises(ValueError, match=str(depth)):
        parse_json("[" * (depth + 1) + "]" * (depth + 1))


@settings(max_examples=200)
@given(st.binary(max_size=40) | st.text('[]{}",:\\0123eE+-.ntf', max_size=40).map(str.encode))
def test_parse_json_accepts_only_what_json_accepts(data: bytes) -> None:
    try:
        value = parse_json(data)
    except ValueError:
        return
    assert json.loads(data) == value


def test_read_json_of_a_large_or_missing_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with pytest.raises(InputError, match=r"a\.json"):
        read_json(path)
    write_json(path, {"a": "é" * 10})
    assert read_json(path) == {"a": "é" * 10}
    with pytest.raises(FileFormatError, match="8"):
        read_json(path, max_bytes=8)
    path.write_text("{")
    with pytest.raises(FileFormatError, match=r"a\.json"):
        read_json(path)
    for invalid in (tmp_path, tmp_path / ("n" * 300), "/dev/zero"):
        with pytest.raises(InputError):
            read_json(invalid)


def test_write_json_refuses_nan(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "a.json", [float("nan")])
    assert os.listdir(tmp_path) == []


def test_parquet_round_trip_keeps_rows_and_metadata(tmp_path: Path) -> None:
    table = pa.table({"t": [0.1, 0.2], "name": ["a", None]}).replace_schema_metadata({"k": "v"})
    encoding = {"t": "BYTE_STREAM_SPLIT"}
    write_parquet(tmp_path / "a.parquet", table, use_dictionary=["name"], column_encoding=encoding)
    read = read_parquet(tmp_path / "a.parquet")
    assert read.equals(table) and read.schema.metadata[b"k"] == b"v"


def test_read_parquet_of_a_bomb_is_refused(tmp_path: Path) -> None:
    table = pa.table({"a": pa.repeat(pa.scalar(1), 10**6)})
    write_parquet(tmp_path / "a.parquet", table)
    with pytest.raises(FileFormatError, match="1000000 rows"):
        read_parquet(tmp_path / "a.parquet")


def test_read_parquet_of_a_repeated_text_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    texts = pa.DictionaryArray.from_arrays(pa.array([0, 1, None] * 100, pa.int32()), ["x" * 50, "é"])
    pq.write_table(pa.table({"a": texts, "b": pa.array(range(300))}), path, store_schema=False)
    plain = read_parquet(path)
    assert plain.schema.field("a").type == pa.string()
    assert plain["a"].to_pylist() == ["x" * 50, "é", None] * 100
    monkeypatch.setattr(files, "_MAX_TEXT_BYTES", 100 * 52 - 1)
    with pytest.raises(FileFormatError, match="5200 bytes"):
        read_parquet(path)


def test_read_parquet_of_a_damaged_or_missing_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    with pytest.raises(InputError, match=r"a\.parquet"):
        read_parquet(path)
    write_parquet(path, pa.table({"a": list(range(1000))}), use_dictionary=False)
    content = bytearray(path.read_bytes())
    content[200] ^= 0xFF
    for damaged in (content[:-4], b"", content):
        path.write_bytes(damaged)
        with pytest.raises(FileFormatError, match=r"a\.parquet"):
            read_parquet(path)
