"""Kills every long job of the package at random moments: `make kill ARGS="--kills 100 --job tune"`.

A job is started, killed by SIGKILL and started again until it ends; its result must equal that of a run
that nobody interrupted. Every other time the whole session dies, otherwise only the process itself, whose
children must then end. Jobs are forked from this process, which imports what they need once and starts no
threads.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import shlex
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, NoReturn

from sparseflow.core.environment import get_git_revision
from sparseflow.core.files import write_json
from tests.harness.jobs import JOBS, Job

ORPHAN_TIMEOUT_S = 30.0
"""Time in which the children of a killed process must end."""


class Workspace:
    """Directory in which one job runs again and again.

    Args:
        name: Job.
        root: Directory of all workspaces.
    """

    def __init__(self, name: str, root: Path) -> None:
        self.job: Job = JOBS[name]
        self.directory = (root / name).absolute()
        self.out_dir = self.directory / "out"
        self._rows = b""
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True)
        for file, content in self.job.inputs.items():
            (self.directory / file).write_bytes(content)

    def start(self) -> int:
        """Fork the job in a session of its own; return its process id."""
        process = os.fork()
        if not process:
            self._execute()
        return process

    def reset(self) -> None:
        """Remove the output; what the job cached stays."""
        shutil.rmtree(self.out_dir, ignore_errors=True)
        self._rows = b""

    def check_rows(self) -> bool:
        """Return whether the journal still begins with all rows that it had at the last call."""
        path = None if self.job.journal is None else self.out_dir / self.job.journal
        # A finished job may have moved the rows into another file.
        if path is None or not path.is_file():
            return True
        previous, content = self._rows, path.read_bytes()
        self._rows = content[: content.rfind(b"\n") + 1]
        return self._rows.startswith(previous)

    def read(self) -> Any:
        """Return the result in JSON types.

        Raises:
            AssertionError: A row occurs twice, or a temporary file is left.
        """
        temporary = [str(path) for path in self.out_dir.rglob("*") if "tmp" in path.name]
        assert not temporary, f"temporary files are left: {temporary}"
        return json.loads(json.dumps(self.job.read(self.out_dir)))

    def read_log(self) -> str:
        """Return the end of the last output."""
        return (self.directory / "log.txt").read_text(errors="replace")[-500:]

    def _execute(self) -> NoReturn:
        code = 1
        try:
            os.setsid()
            os.chdir(self.directory)
            log = os.open("log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for stream in (1, 2):
                os.dup2(log, stream)
            os.environ["SPARSEFLOW_CACHE"] = str(self.directory / "cache")
            from sparseflow.cli.root import run

            code = run(shlex.split(self.job.command.replace("OUT", str(self.out_dir))))
            (self.directory / "modules.json").write_text(json.dumps(list(sys.modules)))
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def storm(name: str, root: Path, *, kills: int, seed: int) -> dict[str, Any]:
    """Kill a job at random moments and compare its results.

    Args:
        name: Job.
        root: Directory of workspaces.
        kills: Number of kills.
        seed: Random seed of the moments.

    Returns:
        Numbers of kills, finished runs and orphans, and what went wrong.

    Raises:
        AssertionError: The uninterrupted run fails.
    """
    random, workspace = Random(seed), _prepare(name, root)
    # The first run fills the caches and tells what to import; the second has the duration of all others.
    duration_s = 0.0
    for _ in range(2):
        workspace.reset()
        start_s = time.monotonic()
        code = _wait(workspace.start(), None)
        assert code == 0, f"{name}: exit code {code}: {workspace.read_log()}"
        duration_s = time.monotonic() - start_s
        for module in json.loads((workspace.directory / "modules.json").read_text()):
            with suppress(Exception):
                importlib.import_module(module)
    expected = workspace.read()
    workspace.reset()
    tally: dict[str, Any] = {"kills": 0, "finished": 0, "orphans": 0, "problems": []}
    while True:
        process = workspace.start()
        timeout_s = None if tally["kills"] >= kills else random.uniform(0.0, duration_s)
        code = _wait(process, timeout_s)
        if code is None:
            if tally["kills"] % 2 == 0:
                with suppress(ProcessLookupError):  # it has no session yet
                    os.killpg(process, signal.SIGKILL)
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            tally["kills"] += 1
            tally["orphans"] += _count_orphans(process)
            if not workspace.check_rows():
                tally["problems"].append("rows of the journal are lost")
            continue
        problem = None if code == 0 else f"exit code {code}: {workspace.read_log()}"
        if problem is None:
            try:
                result = workspace.read()
                problem = None if result == expected else _describe_difference(expected, result)
            except (AssertionError, OSError, ValueError, KeyError) as error:
                problem = f"{type(error).__name__}: {error}"
        if problem is not None:
            tally["problems"].append(problem)
            shutil.copytree(workspace.out_dir, workspace.directory / f"problem-{len(tally['problems'])}")
        tally["finished"] += 1
        workspace.reset()
        if tally["kills"] >= kills:
            return tally


def _prepare(name: str, root: Path) -> Workspace:
    """Create a workspace with the outputs of the jobs that the job needs."""
    workspace = Workspace(name, root)
    for needed in workspace.job.needs:
        source = _prepare(needed, root / f"{name}-needs")
        code = _wait(source.start(), None)
        assert code == 0, f"{needed}: exit code {code}: {source.read_log()}"
        shutil.copytree(source.out_dir, workspace.directory / needed)
    return workspace


def _describe_difference(expected: Any, result: Any, path: str = "") -> str:
    """Return the first difference of two results in JSON types."""
    if type(expected) is type(result) and isinstance(expected, dict | list) and len(expected) == len(result):
        for key in expected if isinstance(expected, dict) else range(len(expected)):
            if isinstance(result, dict) and key not in result:
                break
            if expected[key] != result[key]:
                return _describe_difference(expected[key], result[key], f"{path}/{key}")
    return f"the result differs at {path or '/'}: {expected!s:.100}, then {result!s:.100}"


def _wait(process: int, timeout_s: float | None) -> int | None:
    """Return the exit code, negative for a signal; None if the process still runs after the time."""
    end_s = None if timeout_s is None else time.monotonic() + timeout_s
    while end_s is None or time.monotonic() < end_s:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return None


def _count_orphans(session: int) -> int:
    """Return how many processes of a session do not end, and kill them."""
    end_s = time.monotonic() + ORPHAN_TIMEOUT_S
    while (orphans := _list_session(session)) and time.monotonic() < end_s:
        time.sleep(0.05)
    for process in orphans:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    return len(orphans)


def _list_session(session: int) -> list[int]:
    processes = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, _, owner = path.read_text().rpartition(")")[2].split()[:4]
            if int(owner) == session and state != "Z":
                processes.append(int(path.parent.name))
    return processes


def main(arguments: list[str] | None = None) -> int:
    """Kill the jobs and write the tally.

    Returns:
        1 if a result differs, a resumed job fails, or a process is left; else 0.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--job", action="append", choices=sorted(JOBS), help="Repeatable; by default all.")
    parser.add_argument("--kills", type=int, default=100, help="Kills of each job.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=Path("runs/kill"), help="Directory of workspaces and tally."
    )
    options = parser.parse_args(arguments)
    tallies: dict[str, dict[str, Any]] = {}
    for name in options.job or sorted(JOBS):
        tallies[name] = tally = storm(name, options.out, kills=options.kills, seed=options.seed)
        print(f"{name}: {json.dumps(tally)}", flush=True)
        record = {"git": get_git_revision(), "python": platform.python_version(), "jobs": tallies}
        write_json(options.out / "tally.json", record, indent=1)
    return int(any(tally["problems"] or tally["orphans"] for tally in tallies.values()))


if __name__ == "__main__":
    sys.exit(main())
