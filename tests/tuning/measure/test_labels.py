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
import torch

from sparseflow.errors import FileFormatError, InputError
from sparseflow.tuning.measure.labels import (
    LABELS_FILE,
    PATTERNS_DIR,
    LabelSet,
    PatternHeader,
    ScheduleMeasurement,
    TuningTask,
    read_pattern,
    write_labels,
    write_pattern,
)
from sparseflow.tuning.schedule.matrices import SparsityPattern

PATTERN = SparsityPattern.from_coords(np.array([0, 1, 1]), np.array([1, 0, 2]), (2, 3))
SPMV = TuningTask(
    operator="spmv", matrix="net100", family="net", shape=(9, 8), nnz=None, n_cols=None, dtype="float32",
    threads=104, device="far away", pattern=None,
)  # fmt: skip
SPMM = TuningTask(
    operator="spmm", matrix="small", family="small", shape=(2, 3), nnz=3, n_cols=64, dtype="float64",
    threads=2, device="here", pattern=PATTERN.digest(),
)  # fmt: skip


def ran(schedule: str, latency_ms: float, **other_items: Any) -> ScheduleMeasurement:
    return ScheduleMeasurement(schedule=schedule, latency_ms=latency_ms, **other_items)


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
            (SPMM, ScheduleMeasurement(schedule="d", error="it crashed", disturbed=False)),
            (SPMV, ran("b", 4.0, ratio=2.0)),
            (SPMV, ran("a", 2.0)),
        ],
    )
    return tmp_path


def test_labels_round_trip(folder: Path) -> None:
    labels = LabelSet.open(folder)
    assert labels.tasks == (SPMV, SPMM)
    rows = labels.read_latencies(SPMV)
    assert rows.schedules == ("b", "a")
    assert rows.latency_ms.tolist() == [4.0, 1.5] and rows.latency_ms.dtype == np.float64
    assert rows.repeats.tolist() == [3, 2] and rows.repeats.dtype == np.int64
    assert rows.ratio[0] == 2.0 and np.isnan(rows.ratio[1])
    rows = labels.read_latencies(SPMM)
    assert rows.schedules == ("c",), "failed schedules have no latency"
    assert (rows.latency_ms.tolist(), rows.ratio.tolist()) == ([5.0], [0.5])
    assert labels.read_pattern(SPMV) is None
    pattern = labels.read_pattern(SPMM)
    assert pattern is not None and pattern.digest() == PATTERN.digest() and pattern.shape == (2, 3)
    assert SPMM.extents() == {"i": 2, "k": 3, "j": 64} and SPMV.extents() == {"i": 9, "j": 8}


def test_labels_tasks_differ_by_any_column(tmp_path: Path) -> None:
    other_items: list[TuningTask] = [
        replace(SPMM, **{name: value})
        for name, value in {
            "operator": "sddmm", "matrix": "m", "family": "f", "shape": (3, 2), "nnz": None, "n_cols": 65,
            "dtype": "float32", "threads": 1, "device": "d", "pattern": None,
        }.items()
    ]  # fmt: skip
    tasks = [SPMM, *other_items, SPMV]
    write_labels(tmp_path, [(task, ran(f"{index}", 1.0 + index)) for index, task in enumerate(tasks)])
    labels = LabelSet.open(tmp_path)
    assert labels.tasks == tuple(tasks)
    assert [labels.read_latencies(task).schedules for task in tasks] == [
        (f"{index}",) for index in range(len(tasks))
    ]


def test_labels_medians_match_numpy(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lines, times = rng.integers(20, size=500), rng.uniform(0.1, 9.0, 500)
    write_labels(
        tmp_path, [(SPMV, ran(str(line), time)) for line, time in zip(lines, times.tolist(), strict=True)]
    )
    rows = LabelSet.open(tmp_path).read_latencies(SPMV)
    for schedule, latency, repeats in zip(rows.schedules, rows.latency_ms, rows.repeats, strict=True):
        repeats_ms = times[lines == int(schedule)]
        assert (latency, repeats) == (np.median(repeats_ms), len(repeats_ms))


def test_labels_empty_set(tmp_path: Path) -> None:
    write_labels(tmp_path, [])
    assert LabelSet.open(tmp_path).tasks == ()


def test_labels_failures_only(tmp_path: Path) -> None:
    write_labels(tmp_path, [(SPMV, ScheduleMeasurement(schedule="a", error="no"))])
    labels = LabelSet.open(tmp_path)
    assert labels.tasks == (SPMV,) and labels.read_latencies(SPMV).schedules == ()


def test_labels_unknown_task_raises(folder: Path) -> None:
    with pytest.raises(InputError):
        LabelSet.open(folder).read_latencies(replace(SPMV, threads=1))


def test_labels_missing_raises(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(InputError):
            LabelSet.open(folder)


def test_labels_damage_raises(folder: Path) -> None:
    full = (folder / LABELS_FILE).read_bytes()
    for index in range(0, len(full), 53):
        damaged = bytearray(full)
        damaged[index] ^= 0x10
        (folder / LABELS_FILE).write_bytes(damaged)
        with suppress(FileFormatError):
            # Some bytes do not matter; a file that can be read has the same content.
            labels = LabelSet.open(folder)
            assert labels.tasks == (SPMV, SPMM) and labels.read_latencies(SPMV).latency_ms.tolist() == [
                4.0,
                1.5,
            ]
    for length in range(0, len(full), 500):
        (folder / LABELS_FILE).write_bytes(full[:length])
        with pytest.raises(FileFormatError):
            LabelSet.open(folder)


def rewritten(folder: Path, name: str, value: object) -> None:
    """Rewrite the file with another value in the first row of a column."""
    table = parquet.read_table(folder / LABELS_FILE)
    position = table.schema.get_field_index(name)
    values = table[name].to_pylist()
    kind = table.schema.field(name).type
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    table = table.set_column(position, name, pa.array([value, *values[1:]], plain))
    parquet.write_table(table, folder / LABELS_FILE)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("operator", "spmx"), ("operator", None), ("operator", "spmm"), ("dtype", "float16"), ("rows", 0),
        ("cols", -1), ("threads", 0), ("n_cols", 5), ("latency_ms", None), ("latency_ms", 0.0),
        ("latency_ms", float("nan")), ("latency_ms", float("inf")), ("ratio", -1.0), ("error", "but it ran"),
        ("schedule", None), ("device", None),
    ],
)  # fmt: skip
def test_labels_impossible_values_raise(name: str, value: object, folder: Path) -> None:
    rewritten(folder, "matrix", "net101")
    assert LabelSet.open(folder).tasks[0].matrix == "net101", "the rewritten file is readable"
    rewritten(folder, name, value)
    with pytest.raises(FileFormatError):
        LabelSet.open(folder)


def test_labels_foreign_parquet_raises(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"a": [1]}), tmp_path / LABELS_FILE)
    with pytest.raises(FileFormatError):
        LabelSet.open(tmp_path)


def test_patterns_are_written_once_and_checked(tmp_path: Path) -> None:
    digest = write_pattern(tmp_path, PATTERN)
    (path,) = (tmp_path / PATTERNS_DIR).iterdir()
    stamp = path.stat().st_mtime_ns
    assert write_pattern(tmp_path, PATTERN) == digest and path.stat().st_mtime_ns == stamp
    full = path.read_bytes()
    for damaged in (b"", full[:-1], full[:-1] + b"\x07", full.replace(b"rows", b"rowz"), b"{}" + full):
        path.write_bytes(damaged)
        with pytest.raises(FileFormatError, match=digest):
            read_pattern(tmp_path, digest)
    path.write_bytes(full.replace(json.dumps((2, 3)).encode(), b"[2, 4]"))
    with pytest.raises(FileFormatError):
        read_pattern(tmp_path, digest)
    path.unlink()
    with pytest.raises(InputError, match=digest):
        read_pattern(tmp_path, digest)


def test_read_unsorted_pattern_raises(tmp_path: Path) -> None:
    unsorted = SparsityPattern(rows=PATTERN.rows[::-1].copy(), cols=PATTERN.cols[::-1].copy(), shape=(2, 3))
    digest = write_pattern(tmp_path, unsorted)
    with pytest.raises(FileFormatError, match=digest):
        read_pattern(tmp_path, digest)


@pytest.mark.parametrize("name", ["../labels", "/etc/passwd", "0", ""])
def test_read_pattern_outside_of_directory_raises(name: str, tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="digest"):
        read_pattern(tmp_path, name)


def test_read_pattern_of_other_dtype_raises(tmp_path: Path) -> None:
    digest = write_pattern(tmp_path, PATTERN)
    path = tmp_path / PATTERNS_DIR / f"{digest}.safetensors"
    header, tensors = PatternHeader.load_tensors(path)
    header.save_tensors(path, {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()})
    with pytest.raises(FileFormatError, match=digest):
        read_pattern(tmp_path, digest)
