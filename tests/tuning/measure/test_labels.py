"""Label sets on disk."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from sparseflow.errors import FileFormatError, InputError
from sparseflow.tuning.measure.labels import (
    FILE,
    PATTERNS,
    LabelSet,
    Measurement,
    Task,
    read_pattern,
    write_labels,
    write_pattern,
)
from sparseflow.tuning.schedule.matrices import Pattern

PATTERN = Pattern.of(np.array([0, 1, 1]), np.array([1, 0, 2]), (2, 3))
SPMV = Task(
    operator="spmv", matrix="net100", family="net", shape=(9, 8), nnz=None, n_cols=None, dtype="float32",
    threads=104, device="far away", pattern=None,
)  # fmt: skip
SPMM = Task(
    operator="spmm", matrix="small", family="small", shape=(2, 3), nnz=3, n_cols=64, dtype="float64",
    threads=2, device="here", pattern=PATTERN.digest(),
)  # fmt: skip


def ran(schedule: str, latency_ms: float, **others: Any) -> Measurement:
    return Measurement(schedule=schedule, latency_ms=latency_ms, **others)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_pattern(tmp_path, PATTERN)
    write_labels(
        tmp_path,
        [
            (SPMV, ran("b", 3.0)),
            (SPMM, ran("c", 5.0, ratio=0.5, disturbed=True)),
            (SPMV, ran("a", 1.0)),
            (SPMV, ran("b", 9.0)),
            (SPMM, Measurement(schedule="d", error="it crashed", disturbed=False)),
            (SPMV, ran("b", 4.0, ratio=2.0)),
            (SPMV, ran("a", 2.0)),
        ],
    )
    return tmp_path


def test_there_and_back(folder: Path) -> None:
    found = LabelSet.open(folder)
    assert found.tasks == (SPMV, SPMM)
    rows = found.rows(SPMV)
    assert rows.schedules == ("b", "a")
    assert rows.latency_ms.tolist() == [4.0, 1.5] and rows.latency_ms.dtype == np.float64
    assert rows.repeats.tolist() == [3, 2] and rows.repeats.dtype == np.int64
    assert rows.ratio[0] == 2.0 and np.isnan(rows.ratio[1])
    rows = found.rows(SPMM)
    assert rows.schedules == ("c",), "what failed has no latency"
    assert (rows.latency_ms.tolist(), rows.ratio.tolist()) == ([5.0], [0.5])
    assert found.pattern(SPMV) is None
    pattern = found.pattern(SPMM)
    assert pattern is not None and pattern.digest() == PATTERN.digest() and pattern.shape == (2, 3)
    assert SPMM.extents() == {"i": 2, "k": 3, "j": 64} and SPMV.extents() == {"i": 9, "j": 8}


def test_tasks_differ_by_any_of_their_columns(tmp_path: Path) -> None:
    others: list[Task] = [
        replace(SPMM, **{name: value})
        for name, value in {
            "operator": "sddmm", "matrix": "m", "family": "f", "shape": (3, 2), "nnz": None, "n_cols": 65,
            "dtype": "float32", "threads": 1, "device": "d", "pattern": None,
        }.items()
    ]  # fmt: skip
    tasks = [SPMM, *others, SPMV]
    write_labels(tmp_path, [(task, ran(f"{at}", 1.0 + at)) for at, task in enumerate(tasks)])
    found = LabelSet.open(tmp_path)
    assert found.tasks == tuple(tasks)
    assert [found.rows(task).schedules for task in tasks] == [(f"{at}",) for at in range(len(tasks))]


def test_medians_are_numpys(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lines, times = rng.integers(20, size=500), rng.uniform(0.1, 9.0, 500)
    write_labels(
        tmp_path, [(SPMV, ran(str(line), time)) for line, time in zip(lines, times.tolist(), strict=True)]
    )
    rows = LabelSet.open(tmp_path).rows(SPMV)
    for schedule, latency, repeats in zip(rows.schedules, rows.latency_ms, rows.repeats, strict=True):
        own = times[lines == int(schedule)]
        assert (latency, repeats) == (np.median(own), len(own))


def test_an_empty_set(tmp_path: Path) -> None:
    write_labels(tmp_path, [])
    assert LabelSet.open(tmp_path).tasks == ()


def test_a_set_of_failures(tmp_path: Path) -> None:
    write_labels(tmp_path, [(SPMV, Measurement(schedule="a", error="no"))])
    found = LabelSet.open(tmp_path)
    assert found.tasks == (SPMV,) and found.rows(SPMV).schedules == ()


def test_no_such_task(folder: Path) -> None:
    with pytest.raises(InputError, match="has no labels of this task"):
        LabelSet.open(folder).rows(replace(SPMV, threads=1))


def test_no_labels(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(InputError, match="holds no labels"):
            LabelSet.open(folder)


def test_damage_anywhere_is_found(folder: Path) -> None:
    whole = (folder / FILE).read_bytes()
    for at in range(0, len(whole), 53):
        damaged = bytearray(whole)
        damaged[at] ^= 0x10
        (folder / FILE).write_bytes(damaged)
        with suppress(FileFormatError):
            # Some bytes mean nothing; where the file is read all the same, it says what it said.
            found = LabelSet.open(folder)
            assert found.tasks == (SPMV, SPMM) and found.rows(SPMV).latency_ms.tolist() == [4.0, 1.5]
    for length in range(0, len(whole), 500):
        (folder / FILE).write_bytes(whole[:length])
        with pytest.raises(FileFormatError):
            LabelSet.open(folder)


def rewritten(folder: Path, name: str, value: object) -> None:
    """The file with another value in the first row of a column."""
    table = parquet.read_table(folder / FILE)
    place = table.schema.get_field_index(name)
    values = table[name].to_pylist()
    kind = table.schema.field(name).type
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    table = table.set_column(place, name, pa.array([value, *values[1:]], plain))
    parquet.write_table(table, folder / FILE)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("operator", "spmx"), ("operator", None), ("operator", "spmm"), ("dtype", "float16"), ("rows", 0),
        ("cols", -1), ("threads", 0), ("n_cols", 5), ("latency_ms", None), ("latency_ms", 0.0),
        ("latency_ms", float("nan")), ("latency_ms", float("inf")), ("ratio", -1.0), ("error", "but it ran"),
        ("schedule", None), ("device", None),
    ],
)  # fmt: skip
def test_what_cannot_be(name: str, value: object, folder: Path) -> None:
    rewritten(folder, "matrix", "net101")
    assert LabelSet.open(folder).tasks[0].matrix == "net101", "others may write such files, too"
    rewritten(folder, name, value)
    with pytest.raises(FileFormatError, match=r"labels\.parquet"):
        LabelSet.open(folder)


def test_other_peoples_parquet(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"a": [1]}), tmp_path / FILE)
    with pytest.raises(FileFormatError, match="holds no labels of this version"):
        LabelSet.open(tmp_path)


def test_patterns_are_kept_once_and_checked(tmp_path: Path) -> None:
    digest = write_pattern(tmp_path, PATTERN)
    (path,) = (tmp_path / PATTERNS).iterdir()
    stamp = path.stat().st_mtime_ns
    assert write_pattern(tmp_path, PATTERN) == digest and path.stat().st_mtime_ns == stamp
    whole = path.read_bytes()
    for damaged in (b"", whole[:-1], whole[:-1] + b"\x07", whole.replace(b"rows", b"rowz"), b"{}" + whole):
        path.write_bytes(damaged)
        with pytest.raises(FileFormatError, match=digest):
            read_pattern(tmp_path, digest)
    path.write_bytes(whole.replace(json.dumps((2, 3)).encode(), b"[2, 4]"))
    with pytest.raises(FileFormatError, match="does not hold the pattern of its name"):
        read_pattern(tmp_path, digest)
    path.unlink()
    with pytest.raises(FileFormatError, match="is missing"):
        read_pattern(tmp_path, digest)
