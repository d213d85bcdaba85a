"""The root command: exit codes, output streams and lazy imports."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Annotated

import pytest
import typer

from sparseflow import __version__
from sparseflow.cli import root
from sparseflow.errors import (
    DeviceError,
    FileFormatError,
    MissingExtraError,
    ModelError,
    RunError,
    SampleError,
)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch):
    """Register a function as the command `probe`, and in the group `wing` as `inner`."""

    def register(function) -> None:
        module = ModuleType("probe_module")
        app = typer.Typer()
        app.command("inner")(function)
        module.function, module.app = function, app  # pyright: ignore[reportAttributeAccessIssue]
        monkeypatch.setitem(sys.modules, "probe_module", module)
        monkeypatch.setitem(
            root.COMMANDS, "probe", root.LazyCommand(target="probe_module:function", help="Probe.")
        )
        monkeypatch.setitem(
            root.COMMANDS, "wing", root.LazyCommand(target="probe_module:app", help="A wing.")
        )

    return register


def test_version_prints_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert root.run(["--version"]) == 0
    assert re.fullmatch(
        rf"sparseflow {re.escape(__version__)} \(revision ([0-9a-f]+\+?|unknown)\)\n", capsys.readouterr().out
    )


def test_no_command_prints_one_line_for_each_wing(capsys: pytest.CaptureFixture[str]) -> None:
    assert root.run([]) == 0
    *lines, more = capsys.readouterr().out.splitlines()
    assert len(lines) == 6 and all(" sparseflow " in line and len(line) <= 80 for line in lines)
    assert all(line.split("sparseflow ")[1].split()[0] in root.COMMANDS for line in lines)
    assert "sparseflow --help" in more and "sparseflow doctor" in more


def test_help_fills_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert root.run(["latency", "evaluate", "--help"]) == 0
    text = capsys.readouterr().out.partition("╭")[0]
    paragraph = text.split("Creates no load")[1].rstrip().splitlines()
    assert len(paragraph) > 2 and all(len(line) > 60 for line in paragraph[:-1])


@pytest.mark.parametrize(("words", "expected"), [("lat", "latency"), ("latency pre", "predict")])
def test_shell_completion(words: str, expected: str) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "sparseflow"],
        env=os.environ
        | {
            "_SPARSEFLOW_COMPLETE": "complete_bash",
            "COMP_WORDS": f"sparseflow {words}",
            "COMP_CWORD": str(len(words.split())),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert process.stdout.split() == [expected] and not process.stderr


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert root.run(["--help"]) == 0
    output = capsys.readouterr().out
    for name in root.COMMANDS:
        assert f" {name} " in output


def test_run_command_and_group_receive_arguments(command, capsys: pytest.CaptureFixture[str]) -> None:
    def probe(count: int, as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
        typer.echo(f"{count} {as_json}")

    command(probe)
    assert root.run(["probe", "3", "--json"]) == 0
    assert root.run(["wing", "inner", "4"]) == 0
    assert capsys.readouterr().out == "3 True\n4 False\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ModelError("no spiking neuron"), 2),
        (SampleError("wrong shape"), 2),
        (FileFormatError("torn"), 2),
        (MissingExtraError("numba", "spiking"), 2),
        (DeviceError("GPU 9 is absent"), 1),
        (RunError("timed out"), 1),
        (typer.Abort(), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_run_error_returns_exit_code_and_prints_json(
    command, capsys: pytest.CaptureFixture[str], error: BaseException, code: int
) -> None:
    def probe(as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
        raise error

    command(probe)
    assert root.run(["probe"]) == code
    out, err = capsys.readouterr()
    assert out == "" and str(error) in err and "Traceback" not in err
    assert root.run(["probe", "--json"]) == code
    out, err = capsys.readouterr()
    record = json.loads(out)["error"]
    assert set(record) == {"type", "message"} and str(error) in record["message"] and str(error) in err


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (PermissionError(13, "Permission denied", "/runs/a"), "/runs/a: Permission denied"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (MemoryError("Unable to allocate 7 EiB"), "out of memory: Unable to allocate 7 EiB"),
        (RuntimeError("CUDA out of memory.\nTried to allocate"), "out of memory: CUDA out of memory. Tried"),
        (ZeroDivisionError("oops"), "internal error: ZeroDivisionError: oops"),
    ],
)
def test_run_foreign_error_prints_one_line(
    command, capsys: pytest.CaptureFixture[str], error: Exception, message: str
) -> None:
    def probe(as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
        raise error

    command(probe)
    assert root.run(["probe", "--json"]) == 1
    out, err = capsys.readouterr()
    record = json.loads(out)["error"]
    assert record["type"] == type(error).__name__ and message in record["message"]
    assert err == f"sparseflow: {record['message']}\n"


def test_run_verbose_shows_the_traceback_of_an_unexpected_error(
    command, capsys: pytest.CaptureFixture[str]
) -> None:
    def probe() -> None:
        raise ZeroDivisionError("oops")

    command(probe)
    assert root.run(["--verbose", "probe"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_error_of_a_background_thread_is_one_line(
    command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise OSError(28, "No space left on device", "/runs/a")

    def probe() -> None:
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()

    monkeypatch.setattr(threading, "excepthook", root.report_thread_error)
    command(probe)
    assert root.run(["probe"]) == 0
    err = capsys.readouterr().err
    assert "/runs/a: No space left on device" in err and "Traceback" not in err


@pytest.mark.parametrize("redirection", [">/dev/full", "| true", ">&-"])
def test_run_without_a_writable_output_prints_at_most_one_line(redirection: str) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    script = f"set -o pipefail; {sys.executable} -m sparseflow --help {redirection}"
    process = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert process.returncode in (0, 1) and len(process.stderr.splitlines()) <= 1


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["doctor", "--nonsense"], ["doctor", "surplus"], ["runs", "--out"]]
)
def test_run_bad_usage_returns_2(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert root.run(arguments) == 2
    assert "sparseflow: " in capsys.readouterr().err


def test_run_bad_usage_with_json_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert root.run(["nonsense", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["type"] == "UsageError"


def test_run_keeps_exit_code_of_command(command) -> None:
    def probe() -> None:
        raise typer.Exit(7)

    command(probe)
    assert root.run(["probe"]) == 7


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_error_with_a_name_that_is_not_utf8_is_valid_json(encoding: str) -> None:
    command = [sys.executable, "-m", "sparseflow", "runs", "list", b"a\xff\xc3\xa9", "--json"]
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    process = subprocess.run(command, capture_output=True, env=environment, check=False)
    assert process.returncode == 2 and b"Traceback" not in process.stderr
    assert json.loads(process.stdout)["error"]["type"] == "InputError"


def test_help_imports_no_wing_and_no_heavy_package() -> None:
    script = (
        "import sys; from sparseflow.cli.root import run; code = run(['--help']); "
        "heavy = {'torch', 'numpy', 'numba', 'matplotlib', 'sparseflow.cli.spiking'} & set(sys.modules); "
        "print(sorted(heavy), file=sys.stderr); sys.exit(code)"
    )
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert process.stderr == "[]\n"


def test_module_runs_as_command() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "sparseflow", "nonsense"], capture_output=True, text=True, check=False
    )
    assert process.returncode == 2 and "'nonsense'" in process.stderr
