"""Traces: rows that count, rows that were torn, and objectives that come out again to the last bit."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from sparseflow.codesign.design.decision import CostReference
from sparseflow.codesign.joint.trace import TRACE_FILE, TraceWriter, read_trace, replay
from sparseflow.codesign.joint.trainer import JointTrainer
from sparseflow.codesign.workload.layers import layers_to_records, parse_layers, to_float
from sparseflow.core.journal import JsonLinesWriter
from sparseflow.errors import FileFormatError, InputError, RunError
from tests.codesign.toys import Toy, chain, hardware, quick


@pytest.fixture(scope="module")
def rows_before(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The rows of a run."""
    folder = tmp_path_factory.mktemp("run")
    JointTrainer(Toy(4), hardware(hardware={"link": "ucie"}), quick(hardware={"link": "ucie"}), folder).run()
    return [json.loads(line) for line in (folder / TRACE_FILE).read_bytes().splitlines()]


def written(folder: Path, rows: Sequence[Any]) -> Path:
    path = folder / TRACE_FILE
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    with TraceWriter(tmp_path / TRACE_FILE, num_rows=0) as trace:
        for number in range(4):
            trace.write({"row": number, "text": "a\nb\r\u2028\x85"})
            assert trace.num_rows == number + 1
    yield tmp_path / TRACE_FILE


def test_rows_go_on_after_those_that_count(path: Path) -> None:
    with TraceWriter(path, num_rows=4) as trace:
        trace.write({"row": 4})
    assert [row["row"] for row in rows_of(path)] == [0, 1, 2, 3, 4]
    with TraceWriter(path, num_rows=2) as trace:
        trace.write({"row": "two"})
    assert [row["row"] for row in rows_of(path)] == [0, 1, "two"]
    with TraceWriter(path, num_rows=0):
        pass
    assert path.read_bytes() == b""


@pytest.mark.parametrize("torn", [b'{"row": 4', b'{"row": 4}', b"{", b"\xff\xfe"])
def test_a_torn_last_line_is_taken_away(path: Path, torn: bytes) -> None:
    before = path.read_bytes()
    path.write_bytes(before + torn)
    with TraceWriter(path, num_rows=4) as trace:
        trace.write({"row": "next"})
    assert path.read_bytes() == before + b'{"row": "next"}\n'
    path.write_bytes(before + torn)
    with TraceWriter(path, num_rows=1):
        pass
    assert path.read_bytes() == before.splitlines(keepends=True)[0]


def test_a_trace_that_was_cut_short_is_refused(path: Path) -> None:
    content = path.read_bytes()
    for remaining in (content[: content.rfind(b"{")], content[:-1], b""):
        path.write_bytes(remaining)
        with pytest.raises(FileFormatError, match="4"):
            TraceWriter(path, num_rows=4)
        assert path.read_bytes() == remaining
    path.unlink()
    with pytest.raises(FileFormatError, match="0"):
        TraceWriter(path, num_rows=4)


@pytest.mark.parametrize("line", [b"no\n", b"[1]\n", b"\n", b"\xff\n", b'{"row": 1\n'])
def test_a_damaged_line_is_refused(path: Path, line: bytes) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], line, *lines[3:]]))
    with pytest.raises(FileFormatError, match="3"):
        TraceWriter(path, num_rows=4)
    with pytest.raises(FileFormatError, match="3"):
        replay(path)


@pytest.mark.usefixtures("refused_at_once")
def test_a_trace_that_another_process_writes_is_left_alone(path: Path) -> None:
    before = path.read_bytes()
    writer = JsonLinesWriter(path)
    try:
        with pytest.raises(RunError):
            TraceWriter(path, num_rows=4)
        # The other one is between a row and its checkpoint.
        with pytest.raises(RunError):
            TraceWriter(path, num_rows=3)
    finally:
        writer.close()
    assert path.read_bytes() == before


def test_a_full_disk_costs_no_row_that_counts(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, content: bytes) -> int:
        with self.open("wb") as file:
            file.write(content[:10])
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with suppress(OSError):
        TraceWriter(path, num_rows=2).__exit__()
    monkeypatch.undo()
    with TraceWriter(path, num_rows=2):
        assert [row["row"] for row in rows_of(path)] == [0, 1]


def test_layers_there_and_back() -> None:
    layers = chain(seed=4)
    assert parse_layers(json.loads(json.dumps(layers_to_records(layers)))) == layers
    soft = Toy().differentiable_layers(8)
    assert [layer.flops for layer in parse_layers(layers_to_records(soft))] == [
        to_float(item.flops) for item in soft
    ]


@pytest.mark.parametrize(
    "change",
    [{"name": ...}, {"more": 1}, {"flops": "many"}, {"flops": None}, {"id": "zero"}, {"memory_bytes": None}],
)
def test_layers_that_cannot_be_read(change: dict[str, Any]) -> None:
    (first, *overrides) = layers_to_records(chain())
    wrong = {name: value for name, value in (first | change).items() if value is not ...}
    with pytest.raises(FileFormatError):
        parse_layers([wrong, *overrides])


@pytest.mark.parametrize("records", [None, 3, [3], ["layer"], {"a": 1}])
def test_what_are_no_layers(records: Any) -> None:
    with pytest.raises(FileFormatError):
        parse_layers(records)


def test_a_trace_replays_to_the_last_bit(tmp_path: Path, rows_before: list[dict[str, Any]]) -> None:
    rows = replay(written(tmp_path, rows_before))
    assert [row.row for row in rows] == list(range(1, len(rows_before))) and len(rows) == 5
    assert all(row.is_exact and row.recomputed == rows_before[row.row]["priced"]["objective"] for row in rows)
    assert rows == replay(str(tmp_path / TRACE_FILE))


def test_the_run_holds_what_a_replay_needs(tmp_path: Path, rows_before: list[dict[str, Any]]) -> None:
    hw, rows = read_trace(written(tmp_path, rows_before))
    assert rows == rows_before and hw.reference == CostReference(**rows_before[0]["reference"])
    assert [row["kind"] for row in rows] == ["begin", *["epoch"] * 4, "end"]
    assert hw.config == quick(hardware={"link": "ucie"})
    record = {"epoch", "accuracy", "lambda_hw", "guard", "numbers", "alpha", "layers", "decision", "priced"}
    assert all(record < set(row) for row in rows[1:])
    assert len(rows[1]["alpha"]) == 3 and len(rows[1]["alpha"][0]) == 4


TAMPERED = [
    ("priced", "objective"), ("layers", 2, "flops"), ("layers", 1, "memory_bytes"), ("decision", "chips", 0),
    ("decision", "mapping", 0), ("decision", "positions_mm", 0, 0), ("layers", 3, "traffic_in_bytes"),
]  # fmt: skip


@pytest.mark.parametrize("location", TAMPERED)
def test_a_row_that_was_tampered_with_is_told(
    tmp_path: Path, rows_before: list[dict[str, Any]], location: tuple[Any, ...]
) -> None:
    rows = json.loads(json.dumps(rows_before))
    index = rows[3]
    for name in location[:-1]:
        index = index[name]
    old = index[location[-1]]
    if location[0] == "decision" and isinstance(old, str):
        index[location[-1]] = "memory-m"
    elif location[1] == "mapping":
        index[location[-1]] = (old + 1) % 3
    else:
        index[location[-1]] = old + (abs(old) * 2**-50 if location[1] == "objective" else 3 + abs(old))
    result = replay(written(tmp_path, rows))
    wrong = [item.row for item in result if not item.is_exact]
    # Memory costs nothing as long as it fits.
    assert wrong == ([] if "memory_bytes" in location else [3])


def test_a_reference_that_was_tampered_with_changes_all(
    tmp_path: Path, rows_before: list[dict[str, Any]]
) -> None:
    rows = json.loads(json.dumps(rows_before))
    rows[0]["reference"]["latency_ms"] *= 2.0
    assert not any(item.is_exact for item in replay(written(tmp_path, rows)))


@pytest.mark.parametrize("name", ["settings", "library", "reference"])
def test_a_beginning_that_lacks_something_is_damage(
    tmp_path: Path, rows_before: list[dict[str, Any]], name: str
) -> None:
    for value in (..., None, 3):
        first = {key: item for key, item in (rows_before[0] | {name: value}).items() if item is not ...}
        with pytest.raises(FileFormatError):
            replay(written(tmp_path, [first, *rows_before[1:]]))


@pytest.mark.parametrize("name", ["layers", "decision", "priced"])
@pytest.mark.parametrize("removed", [True, False])
def test_a_row_that_lacks_something_is_damage(
    tmp_path: Path, rows_before: list[dict[str, Any]], name: str, removed: bool
) -> None:
    for value in [...] if removed else [None, 3, {}, []]:
        row = {key: item for key, item in (rows_before[2] | {name: value}).items() if item is not ...}
        with pytest.raises(FileFormatError):
            replay(written(tmp_path, [*rows_before[:2], row, *rows_before[3:]]))


def test_a_trace_without_a_beginning_or_an_epoch(tmp_path: Path, rows_before: list[dict[str, Any]]) -> None:
    for rows in ([], rows_before[:1], rows_before[1:]):
        with pytest.raises(FileFormatError):
            read_trace(written(tmp_path, rows))
    with pytest.raises(InputError):
        replay(tmp_path / "none.jsonl")
    with pytest.raises(InputError):
        replay(tmp_path)


def test_a_trace_that_was_cut_replays_as_far_as_it_goes(
    tmp_path: Path, rows_before: list[dict[str, Any]]
) -> None:
    path = written(tmp_path, rows_before)
    path.write_bytes(path.read_bytes()[:-7])
    assert [item.row for item in replay(path)] == list(range(1, len(rows_before) - 1))
