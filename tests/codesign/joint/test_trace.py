"""Traces: conformance of the journal, bit-exact replay, and damaged content."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sparseflow.codesign.joint.trace import TRACE_FILE, open_trace, read_trace, replay
from sparseflow.codesign.joint.trainer import JointTrainer
from sparseflow.errors import FileFormatError, InputError
from tests.codesign.toys import Toy, hardware, quick

LINK = {"link": "ucie"}


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Header and rows of a run."""
    run_dir = tmp_path_factory.mktemp("run")
    JointTrainer(Toy(4), hardware(hardware=LINK), quick(hardware=LINK), run_dir).run()
    return [json.loads(line) for line in (run_dir / TRACE_FILE).read_bytes().splitlines()]


def write(out_dir: Path, lines: Sequence[Any]) -> Path:
    path = out_dir / TRACE_FILE
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_open_trace_keeps_the_rows_up_to_the_checkpoint(tmp_path: Path, lines: list[dict[str, Any]]) -> None:
    path, hw = write(tmp_path, lines), hardware(hardware=LINK)
    for num_rows in (5, 2):
        with open_trace(path, hw, mode="joint", seed=0, num_rows=num_rows) as trace:
            assert len(trace) == num_rows
    assert [json.loads(line) for line in path.read_bytes().splitlines()] == lines[:3]
    before = path.read_bytes()
    with pytest.raises(FileFormatError, match="3"):
        open_trace(path, hw, mode="joint", seed=0, num_rows=3)
    assert path.read_bytes() == before


def test_open_trace_without_a_checkpoint_starts_again(tmp_path: Path, lines: list[dict[str, Any]]) -> None:
    path, hw = write(tmp_path, lines), hardware(hardware=LINK)
    hw.initial_decision(Toy().export_model().describe_layers(8))
    with open_trace(path, hw, mode="two-stage", seed=3, num_rows=None) as trace:
        assert len(trace) == 0
    (header,) = path.read_bytes().splitlines()
    record = json.loads(header)
    assert record["mode"] == "two-stage" and record["environment"]["seed"] == 3


@pytest.mark.parametrize("exists", [False, True])
def test_open_trace_that_was_deleted_is_refused(exists: bool, tmp_path: Path) -> None:
    path = tmp_path / TRACE_FILE
    if exists:
        path.write_bytes(b"")
    with pytest.raises(FileFormatError, match="checkpoint"):
        open_trace(path, hardware(), mode="joint", seed=0, num_rows=1)


@pytest.mark.usefixtures("refused_at_once")
def test_trace_file_conforms(tmp_path: Path, lines: list[dict[str, Any]]) -> None:
    path, hw = write(tmp_path, lines[:3]), hardware(hardware=LINK)

    def open_rows() -> list[Any]:
        with open_trace(path, hw, mode="joint", seed=0, num_rows=1) as trace:
            rows = list(trace.rows)
        write(tmp_path, lines[:3])
        return rows

    path.write_bytes(write(tmp_path, lines[:3]).read_bytes())
    assert len(open_rows()) == 1


def test_replay_is_exact(tmp_path: Path, lines: list[dict[str, Any]]) -> None:
    path = write(tmp_path, lines)
    rows = replay(path)
    assert [row.row for row in rows] == [1, 2, 3, 4, 5]
    assert all(row.is_exact and row.recomputed == lines[row.row]["cost"]["objective"] for row in rows)
    # A torn last line is ignored.
    path.write_bytes(path.read_bytes()[:-7])
    assert replay(str(path)) == rows[:-1]


def test_read_trace_returns_all_rows(tmp_path: Path, lines: list[dict[str, Any]]) -> None:
    hw, header, rows = read_trace(write(tmp_path, lines))
    assert hw.config == quick(hardware=LINK) and hw.reference == header.reference
    assert [row.model_dump(mode="json") for row in rows] == lines[1:]
    assert [row.kind for row in rows] == [*["epoch"] * 4, "end"]
    assert len(rows[0].alpha) == 3 and len(rows[0].alpha[0]) == 4


CHANGED = [
    ("cost", "objective"), ("layers", 2, "flops"), ("layers", 1, "memory_bytes"), ("decision", "chips", 0),
    ("decision", "mapping", 0), ("decision", "positions_mm", 0, 0), ("layers", 3, "traffic_in_bytes"),
]  # fmt: skip


@pytest.mark.parametrize("location", CHANGED)
def test_replay_detects_a_changed_row(
    tmp_path: Path, lines: list[dict[str, Any]], location: tuple[Any, ...]
) -> None:
    changed = json.loads(json.dumps(lines))
    node = changed[3]
    for name in location[:-1]:
        node = node[name]
    old = node[location[-1]]
    if location[0] == "decision" and isinstance(old, str):
        node[location[-1]] = "memory-m"
    elif location[1] == "mapping":
        node[location[-1]] = (old + 1) % 3
    else:
        node[location[-1]] = old + (abs(old) * 2**-50 if location[1] == "objective" else 3 + abs(old))
    if location[-1] == "traffic_in_bytes":
        changed[3]["layers"][2]["traffic_out_bytes"] = node["traffic_in_bytes"]
    inexact = [row.row for row in replay(write(tmp_path, changed)) if not row.is_exact]
    # Memory costs nothing as long as it fits.
    assert inexact == ([] if "memory_bytes" in location else [3])


def test_replay_detects_a_changed_reference(tmp_path: Path, lines: list[dict[str, Any]]) -> None:
    changed = json.loads(json.dumps(lines))
    changed[0]["reference"]["latency_ms"] *= 2.0
    assert not any(row.is_exact for row in replay(write(tmp_path, changed)))


@pytest.mark.parametrize(
    ("line", "name"),
    [(0, "settings"), (0, "library"), (0, "reference"), (2, "layers"), (2, "decision"), (2, "cost")],
)
def test_replay_with_a_missing_or_wrong_part_is_refused(
    tmp_path: Path, lines: list[dict[str, Any]], line: int, name: str
) -> None:
    for value in (..., None, 3, {}, []):
        if (name, value) == ("settings", {}):  # the default configuration
            continue
        record = {key: item for key, item in (lines[line] | {name: value}).items() if item is not ...}
        with pytest.raises(FileFormatError, match=f"line {line + 1}"):
            replay(write(tmp_path, [*lines[:line], record, *lines[line + 1 :]]))


@pytest.mark.parametrize(
    "values",
    [{"flops": "many"}, {"flops": None}, {"id": "zero"}, {"id": 7}, {"memory_bytes": None}, {"more": 1}],
)
def test_replay_with_an_invalid_layer_is_refused(
    tmp_path: Path, lines: list[dict[str, Any]], values: dict[str, Any]
) -> None:
    first, *remaining = lines[1]["layers"]
    changed = [lines[0], lines[1] | {"layers": [first | values, *remaining]}]
    with pytest.raises(FileFormatError, match="line 2"):
        replay(write(tmp_path, changed))


def test_read_trace_without_rows_or_header_is_refused(tmp_path: Path, lines: list[dict[str, Any]]) -> None:
    for remaining in ([], lines[:1], lines[1:]):
        with pytest.raises(FileFormatError):
            read_trace(write(tmp_path, remaining))
    for missing in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(InputError, match="codesign train"):
            replay(missing)
