"""Calls after which a search has paid: short searches for SpMM with 64 columns (line 8).

::

    export PYTHONPATH=src:.
    python benchmarks/tuning/break_even.py matrices/*.mtx.gz --out runs/break_even.jsonl

Every matrix of `matrix_suite.py` is tuned with each budget, without winners of similar matrices. The searches
of a run follow each other in one process, whose cache of compiled code is empty at first, so the first ones
import packages and compile schedules that later ones have. The time of a search is the time from the call of
`tune` to the kernel. The kernel is then timed in pairs with scipy and with each form of torch, called from
Python. The search has paid after as many calls as save its time.

The same command resumes an interrupted run. `python -m benchmarks.claims record` makes the claims.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from libraries import CALLED
from matrix_suite import list_matrices
from paired_times import strongest_call

from benchmarks.claims import Claim, write_samples
from sparseflow.core.environment import collect_environment
from sparseflow.core.journal import Journal
from sparseflow.tuning.api import tune
from sparseflow.tuning.codegen.kernel import CompiledKernel
from sparseflow.tuning.codegen.program import build_program
from sparseflow.tuning.schedule.matrices import CooMatrix
from sparseflow.tuning.schedule.operators import get_operator
from sparseflow.tuning.schedule.problem import SparseProblem
from sparseflow.tuning.schedule.schedule import Schedule

N_COLS = 64
BUDGETS_S = (0.0, 0.5, 1.0, 2.0)
THREADS = 2
MAX_CALLS = 100
"""Target of the median of the budget with the lowest one."""

Row = dict[str, Any]


def search(matrix: CooMatrix, budget_s: float, threads: int, cache_dir: Path) -> tuple[float, str | None]:
    """Tune in this process; return the seconds and the schedule, which is None if scipy is the fastest."""
    start_s = time.perf_counter()
    schedule = tune(
        "spmm", matrix, n_cols=N_COLS, budget_s=budget_s, threads=threads, cache_dir=cache_dir,
        warm_start=False,
    ).schedule  # fmt: skip
    return time.perf_counter() - start_s, None if schedule is None else str(schedule)


def measure(
    matrix: CooMatrix, budget_s: float, threads: int, pool: ProcessPoolExecutor, cache_dir: Path
) -> Row:
    """Tune a matrix in the process of a pool and compare the kernel with the libraries."""
    search_s, line = pool.submit(search, matrix, budget_s, threads, cache_dir).result()
    row: Row = {"search_s": round(search_s, 3), "schedule": line, "against": {}}
    if line is None:
        return row
    problem = SparseProblem(operator=get_operator("spmm"), matrix=matrix, n_cols=N_COLS)
    kernel = CompiledKernel(build_program(problem, Schedule.parse(line)))
    inputs = problem.generate_inputs(0)
    for name, make_calls in CALLED.items():
        result = strongest_call(make_calls, kernel, inputs, threads)
        saved_s = 1e-3 * result["ms"] * (1.0 - 1.0 / result["ratio"])
        fields = ("ratio", "ms", "form", "disturbed")
        row["against"][name] = {field: result[field] for field in fields} | {
            "calls": math.ceil(search_s / saved_s) if saved_s > 0 else None
        }
    return row


def count_calls(row: Row, baseline: str) -> float:
    """Return the calls after which the search has paid; infinite if the kernel is not faster."""
    calls = row["against"].get(baseline, {}).get("calls")
    return math.inf if calls is None else calls


def make_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims of a record: the budget that pays after the fewest calls, for each baseline."""
    rows = record["rows"]
    samples = write_samples("tuning/break-even.json", record)
    for baseline in CALLED:
        medians = {
            budget_s: statistics.median(
                count_calls(row, baseline) for row in rows if row["budget_s"] == budget_s
            )
            for budget_s in sorted({row["budget_s"] for row in rows})
        }
        best_s = min(medians, key=lambda budget_s: medians[budget_s])
        selected = [row for row in rows if row["budget_s"] == best_s]
        yield Claim(
            id=f"tuning/8-break-even-{baseline}",
            claim=f"Calls of SpMM with {N_COLS} columns that save the time of a search with a budget of "
            f"{best_s:g} s against {baseline}, median of {len(selected)} matrices.",
            value=math.ceil(medians[best_s]),
            unit="calls",
            target=f"<= {MAX_CALLS}" if baseline == "scipy" else None,
            baseline=baseline,
            device=record["environment"]["device"]["name"],
            details={f"budget_{budget_s:g}_s": _format_calls(calls) for budget_s, calls in medians.items()}
            | {
                "never": sum(math.isinf(count_calls(row, baseline)) for row in selected),
                "search_s": round(statistics.median(row["search_s"] for row in selected), 2),
                "within_100": sum(count_calls(row, baseline) <= MAX_CALLS for row in selected),
            },
            command="python benchmarks/tuning/break_even.py MATRICES --out RUN",
            samples=samples,
        )


def _format_calls(calls: float) -> int | str:
    return math.ceil(calls) if math.isfinite(calls) else "never"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="*", help="files of matrices")
    parser.add_argument("--budgets-s", type=float, nargs="+", default=BUDGETS_S, help="seconds")
    parser.add_argument("--threads", type=int, default=THREADS)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--time-limit-s", type=float, default=math.inf, help="start no case after this time")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines")
    args = parser.parse_args(arguments)
    deadline_s = time.monotonic() + args.time_limit_s
    args.out.parent.mkdir(parents=True, exist_ok=True)
    journal: Journal[Row]
    with (
        Journal(args.out, dict) as journal,
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool,
    ):
        if not journal.rows:
            settings = {"threads": args.threads, "dtype": args.dtype}
            journal.append({"environment": collect_environment("cpu"), "settings": settings})
        completed = {(row["matrix"], row["budget_s"]) for row in journal.rows[1:]}
        for item in list_matrices(args.files):
            for budget_s in args.budgets_s:
                if (item.name, budget_s) in completed or time.monotonic() > deadline_s:
                    continue
                matrix = item.make(np.dtype(args.dtype))
                row = {"matrix": item.name, "family": item.family, "nnz": matrix.nnz, "budget_s": budget_s}
                row |= measure(matrix, budget_s, args.threads, pool, Path(folder))
                journal.append(row)
                calls = {name: other["calls"] for name, other in row["against"].items()}
                print(f"{item.name}, {budget_s:g} s: {row['search_s']} s, {calls} calls", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
