"""Fuzzes every parser of the package: `make fuzz ARGS="--inputs 20000 --target tuning-matrix"`.

Each target runs in a worker process, which may die without ending the run. An input fails if the process
dies, takes more than 5 s, needs more than 1 GB, or raises an exception that is not of
`sparseflow/errors.py`. The tally lists all failures; their inputs are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sparseflow.core.environment import get_git_revision
from sparseflow.core.files import write_json
from sparseflow.errors import RunError
from tests.harness.targets import CORPUS, COUNTERS, TARGETS
from tests.killed import ROOT, environment

KINDS = ("death", "hang", "exception", "memory")
WORKER = "tests.harness.fuzz_worker"
"""Module of the worker process."""

MAX_DEATHS = 100
"""Deaths after which a target is given up."""


def fuzz(name: str, out_dir: Path, *, inputs: int, time_s: float | None, seed: int) -> dict[str, Any]:
    """Run one target.

    Args:
        name: Target.
        out_dir: Directory that receives `<target>/` with the log and the failing inputs.
        inputs: Number of inputs.
        time_s: Time after which no further worker starts and the running one is stopped; None for no limit.
        seed: Random seed.

    Returns:
        Numbers of inputs, accepted inputs and failures by kind, and the distinct failures.
    """
    state = out_dir / name
    shutil.rmtree(state, ignore_errors=True)
    shutil.copytree(CORPUS / name, state / "corpus")
    (state / "input").mkdir()
    (state / "counters").write_bytes(bytes(COUNTERS.size))
    (state / "failures.jsonl").touch()
    end_s = None if time_s is None else time.monotonic() + time_s
    deaths: list[dict[str, Any]] = []
    while len(deaths) < MAX_DEATHS:
        remaining = inputs - _read_counters(state)[0]
        left_s = None if end_s is None else end_s - time.monotonic()
        if remaining <= 0 or (left_s is not None and left_s <= 0):
            break
        code = _run_worker(name, state, runs=remaining, seed=seed + len(deaths), time_s=left_s)
        if code is None or code == 0:
            break
        if not _read_counters(state)[0]:
            raise RunError(f"the worker of {name} does not start; see {state / 'log.txt'}")
        deaths.append(_record_death(name, state, code))
    started, accepted = _read_counters(state)
    failures = [json.loads(line) for line in (state / "failures.jsonl").read_text().splitlines()] + deaths
    numbers = Counter(failure["kind"] for failure in failures)
    distinct = {(row["kind"], row["error"], row["location"]): row for row in reversed(failures)}
    for directory in ("corpus", "input"):
        shutil.rmtree(state / directory)
    return {
        "inputs": started,
        "accepted": accepted,
        **{kind: numbers[kind] for kind in KINDS},
        "failures": [row | {"count": _count(failures, row)} for row in distinct.values()],
    }


def _run_worker(name: str, state: Path, *, runs: int, seed: int, time_s: float | None) -> int | None:
    """Return the exit code, negative for a signal; None if the time is over."""
    command = [sys.executable, "-m", WORKER, name, "--state", str(state)]
    with (state / "log.txt").open("ab") as log:
        process = subprocess.Popen(
            [*command, "--runs", str(runs), "--seed", str(seed)],
            cwd=ROOT, stdout=log, stderr=log, env=environment(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""),
        )  # fmt: skip
        try:
            return process.wait(time_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return None


def _record_death(name: str, state: Path, code: int) -> dict[str, Any]:
    hang = code in (-signal.SIGPROF, -signal.SIGALRM)
    name_of_copy = f"{'hang' if hang else 'death'}-{_read_counters(state)[0]}"
    shutil.copy(state / "input" / TARGETS[name].file, state / name_of_copy)
    reason = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return {
        "kind": "hang" if hang else "death",
        "error": reason,
        "message": "",
        "location": "",
        "input": name_of_copy,
    }


def _read_counters(state: Path) -> tuple[int, int]:
    return COUNTERS.unpack((state / "counters").read_bytes())


def _count(failures: list[dict[str, Any]], row: dict[str, Any]) -> int:
    return sum(all(other[name] == row[name] for name in ("kind", "error", "location")) for other in failures)


def main(arguments: list[str] | None = None) -> int:
    """Fuzz the targets and write the tally.

    Returns:
        1 if an input failed, else 0.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--target", action="append", choices=sorted(TARGETS), help="Repeatable; by default all."
    )
    parser.add_argument("--inputs", type=int, default=20_000, help="Inputs of each target.")
    parser.add_argument("--time-s", type=float, help="Time of each target, seconds; by default no limit.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--out", type=Path, default=Path("runs/fuzz"), help="Directory of the tally and inputs."
    )
    options = parser.parse_args(arguments)
    names = options.target or sorted(TARGETS)
    options.out.mkdir(parents=True, exist_ok=True)

    def run(name: str) -> dict[str, Any]:
        tally = fuzz(name, options.out, inputs=options.inputs, time_s=options.time_s, seed=options.seed)
        numbers = ", ".join(f"{tally[kind]} {kind}" for kind in KINDS)
        print(f"{name}: {tally['inputs']} inputs, {tally['accepted']} accepted, {numbers}", flush=True)
        for row in tally["failures"]:
            print(
                f"  {row['count']} x {row['kind']} {row['error']} {row['location']}: {row['message'][:100]}",
                flush=True,
            )
        return tally

    tallies: dict[str, dict[str, Any]] = {}
    total: dict[str, int] = {}
    with ThreadPoolExecutor(options.workers) as pool:
        for name, tally in zip(names, pool.map(run, names), strict=True):
            tallies[name] = tally
            total = {kind: sum(other[kind] for other in tallies.values()) for kind in ("inputs", *KINDS)}
            # An interrupted run has the tally of the targets that it finished.
            record = {"git": get_git_revision(), "python": platform.python_version(), "seed": options.seed}
            write_json(options.out / "tally.json", record | {"total": total, "targets": tallies}, indent=1)
    print(f"total: {total}; tally: {options.out / 'tally.json'}")
    return int(any(total[kind] for kind in KINDS))


if __name__ == "__main__":
    sys.exit(main())
