"""The log of a collection."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparseflow.errors import FileFormatError
from sparseflow.tuning.measure.collection_log import COLLECTION_FILE, CollectionLog
from sparseflow.tuning.measure.evaluator import Trial
from sparseflow.tuning.measure.labels import ScheduleMeasurement, TuningTask
from sparseflow.tuning.schedule.schedule import Schedule
from tests.conformance import check_journal_file

CSR = Schedule.parse("0 1 A 2 i j A 2 i 0 j 1 0 2 i j None None None 0 1 1")
OTHER = Schedule.parse("0 1 A 2 i j A 2 i 1 j 1 0 2 i j None None None 0 1 1")
TASK = TuningTask(
    operator="spmv", matrix="net1", family="net", shape=(9, 8), nnz=7, n_cols=None, dtype="float32",
    threads=1, device="here", pattern="0a",
)  # fmt: skip
RAN = Trial(schedule=CSR, latency_ms=2.0, ratio=1.5, disturbed=True, seconds={"build": 0.5})
FAILED = Trial(schedule=OTHER, error="it crashed")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with CollectionLog(tmp_path) as log:
        log.append(TASK, RAN)
        log.append(TASK, FAILED)
    return tmp_path


def test_log_round_trip(folder: Path) -> None:
    with CollectionLog(folder) as log:
        assert log.trials == {TASK: {CSR: RAN, OTHER: FAILED}}
        assert list(log.measurements()) == [
            (TASK, ScheduleMeasurement(schedule=str(CSR), latency_ms=2.0, ratio=1.5, disturbed=True)),
            (TASK, ScheduleMeasurement(schedule=str(OTHER), error="it crashed", disturbed=False)),
        ]


def test_log_conforms(folder: Path, refused_at_once: None) -> None:
    def open_rows() -> list[object]:
        with CollectionLog(folder) as log:
            return list(log.measurements())

    check_journal_file(open_rows, folder / COLLECTION_FILE)


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        (1, "start", {}), (1, "start", None), (2, "task", 1), (2, "task", -1),
        (2, "schedule", "0 1"), (2, "schedule", 3), (2, "latency_ms", None), (2, "latency_ms", -1.0),
        (2, "error", "but it ran"), (2, "disturbed", None), (2, "more", 1), (3, "error", None),
    ],
)  # fmt: skip
def test_log_damaged_line_raises(line: int, field: str, value: object, folder: Path) -> None:
    rows = [json.loads(text) for text in (folder / COLLECTION_FILE).read_text().splitlines()]
    row = rows[line] if field in rows[line] or line < 2 else rows[line]["trial"]
    row[field] = value
    before = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / COLLECTION_FILE).write_text(before)
    with pytest.raises(FileFormatError, match=f"line {line + 1}"):
        CollectionLog(folder)
    assert (folder / COLLECTION_FILE).read_text() == before
    with pytest.raises(FileFormatError):
        CollectionLog(folder)  # the directory is not locked


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("operator", "spmx"),
        ("n_cols", 3),
        ("shape", [0, 3]),
        ("shape", [3]),
        ("dtype", "float16"),
        ("threads", 0),
    ],
)
def test_log_damaged_task_raises(field: str, value: object, folder: Path) -> None:
    rows = [json.loads(text) for text in (folder / COLLECTION_FILE).read_text().splitlines()]
    rows[1]["start"][field] = value
    (folder / COLLECTION_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(FileFormatError):
        CollectionLog(folder)
