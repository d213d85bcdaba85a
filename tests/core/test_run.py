"""Runs on disk: rows, status, results, resume after a kill, damaged files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sparseflow.core import journal
from sparseflow.core.run import STATUSES, Run
from sparseflow.errors import FileFormatError, InputError, RunError


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.start(tmp_path / "runs", "sparseflow spiking bench", {"batch": [1, 8]}, seed=3)


def test_finish_converts_rows_to_parquet(run: Run) -> None:
    assert json.loads((run.path / "run.json").read_text())["status"] == "running"
    run.append({"layer": "conv1", "latency_ms": 1.5, "ok": True})
    run.extend([{"layer": "conv2", "latency_ms": 2}, {"layer": None, "note": "unstable"}])
    run.finish()
    assert sorted(os.listdir(run.path)) == ["run.json", "samples.parquet"]
    reopened = Run.open(run.path)
    assert reopened.status == "finished" and reopened.info["rows"] == 3
    assert reopened.read_rows() == [
        {"layer": "conv1", "latency_ms": 1.5, "ok": True, "note": None},
        {"layer": "conv2", "latency_ms": 2.0, "ok": None, "note": None},
        {"layer": None, "latency_ms": None, "ok": None, "note": "unstable"},
    ]


def test_start_records_command_config_and_environment(run: Run) -> None:
    assert run.info["command"] == "sparseflow spiking bench"
    assert run.info["config"] == {"batch": [1, 8]}
    assert run.info["environment"]["seed"] == 3
    assert "spiking-bench" in run.id and run.path.name == run.id


def test_start_twice_in_a_second_gives_two_directories(tmp_path: Path) -> None:
    paths = {Run.start(tmp_path, "bench", {}).path for _ in range(4)}
    assert len(paths) == 4


def test_append_to_a_finished_run_is_refused(run: Run) -> None:
    run.finish()
    run.finish()
    for closed in (run, Run.open(run.path)):
        with pytest.raises(RunError, match="finished"):
            closed.append({"a": 1})


def test_finish_without_rows_is_readable(run: Run) -> None:
    run.finish()
    assert Run.open(run.path).read_rows() == []


def test_exception_in_the_block_fails_the_run_and_open_resumes_it(run: Run) -> None:
    with pytest.raises(ValueError, match="out of memory"), run:
        run.append({"a": 1})
        raise ValueError("out of memory")
    info = json.loads((run.path / "run.json").read_text())
    assert (info["status"], info["error"], info["rows"]) == ("failed", "ValueError: out of memory", 1)
    with Run.open(run.path) as resumed_run:
        resumed_run.append({"a": 2})
    assert resumed_run.status == "finished" and resumed_run.info["error"] is None
    assert resumed_run.read_rows() == [{"a": 1}, {"a": 2}]


def test_update_results_stores_them_in_run_json(run: Run) -> None:
    run.update_results(speedup=1.4)
    run.update_results(identical=True)
    run.finish()
    assert Run.open(run.path).info["results"] == {"speedup": 1.4, "identical": True}
    with pytest.raises(InputError, match="`results`"):
        run.update_results(bad=float("nan"))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2**60, [1], {"a": 1}, b"x", 1j])
def test_append_unsupported_value_names_the_column(run: Run, value: object) -> None:
    with pytest.raises(InputError, match="column `x`"):
        run.append({"fine": 1, "x": value})  # pyright: ignore[reportArgumentType]
    run.append({"fine": "and its column is still free"})


def test_append_other_type_names_the_column_also_after_reopening(run: Run) -> None:
    run.append({"x": 1})
    run.append({"x": 2.5})
    with pytest.raises(InputError, match=r"column `x`.*numbers"):
        run.append({"x": "two"})
    run.fail("stopped")
    with pytest.raises(InputError, match=r"column `x`.*numbers"):
        Run.open(run.path).append({"x": True})


def test_start_with_a_config_that_is_not_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="`config`"):
        Run.start(tmp_path, "bench", {"path": tmp_path})
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("refused_at_once")
def test_open_while_another_process_writes_is_refused(run: Run) -> None:
    with pytest.raises(RunError):
        Run.open(run.path)
    run.fail("over")
    Run.open(run.path)


WRITER = """
import sys
from sparseflow.core.run import Run
run = Run.open(sys.argv[1])
for index in range(10**9):
    run.append({"index": index, "text": "x" * 200})
    if index == 500:
        print("running", flush=True)
"""


@pytest.mark.usefixtures("refused_at_once")
def test_open_after_a_kill_resumes_all_whole_rows(run: Run) -> None:
    run.fail("over")
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(run.path)], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "running\n"
        with pytest.raises(RunError):
            Run.open(run.path)
        child.send_signal(signal.SIGKILL)
    assert json.loads((run.path / "run.json").read_text())["status"] == "running"
    with Run.open(run.path) as resumed_run:
        indices = [row["index"] for row in resumed_run.read_rows()]
        assert indices == list(range(len(indices))) and len(indices) > 500
        resumed_run.append({"index": len(indices), "text": "after"})
    assert [row["index"] for row in Run.open(run.path).read_rows()] == list(range(len(indices) + 1))


def test_kill_between_parquet_and_run_json_loses_no_rows(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.append({"a": 1})

    def kill(_: Run) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Run, "_write_info", kill)
        with pytest.raises(KeyboardInterrupt):
            run.finish()
    assert sorted(os.listdir(run.path)) == ["run.json", "samples.jsonl", "samples.parquet"]
    assert run._journal is not None
    run._journal.close()
    with Run.open(run.path) as resumed_run:
        resumed_run.append({"a": 2})
    assert Run.open(run.path).read_rows() == [{"a": 1}, {"a": 2}]


def test_append_to_a_full_disk_leaves_whole_lines(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.append({"a": 1})
    real_write = os.write
    # Half of the line fits, then nothing does.
    results = iter([lambda fd, data: real_write(fd, data[:3]), None])

    def write(fd: int, data: memoryview) -> int:
        step = next(results)
        if step is None:
            raise OSError(28, "No space left on device")
        return step(fd, data)

    with monkeypatch.context() as patch:
        patch.setattr(journal.os, "write", write)
        with pytest.raises(RunError, match="No space left"):
            run.append({"a": 2})
    run.append({"a": 3})
    assert run.read_rows() == [{"a": 1}, {"a": 3}]


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"id": "x", "status": "flying"}', '{"id": 3, "status": "failed"}']
)
def test_open_of_something_else_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(FileFormatError):
        Run.open(tmp_path)


def test_open_with_a_damaged_line_names_it(run: Run) -> None:
    run.append({"a": 1})
    run.fail("x")
    lines = run.path / "samples.jsonl"
    lines.write_bytes(b'{"a": 1}\n{"a": \n{"a": 3}\n')
    with pytest.raises(FileFormatError, match="line 2"):
        Run.open(run.path)
    lines.write_bytes(b"[1]\n")
    with pytest.raises(FileFormatError, match="list"):
        Run.open(run.path)


def test_read_rows_of_a_damaged_parquet_file_names_it(run: Run) -> None:
    run.finish()
    (run.path / "samples.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(FileFormatError, match=r"samples\.parquet"):
        Run.open(run.path).read_rows()


def test_statuses_are_stable() -> None:
    assert STATUSES == ("running", "finished", "failed")
