"""Time budgets, busy machines and similar matrices in searches (line 7).

::

    export PYTHONPATH=src:.
    python benchmarks/tuning/budgets.py --out runs/budgets.json

- Every budget of `BUDGETS_S` is given to a search on matrices of several sizes. The wall time of a search is
  compared with its budget; the time to compile its winner is measured afterwards.
- A search runs while a busy loop occupies every CPU. Its winner is timed in pairs with that of a search
  without them.
- A search with a short budget on a second matrix of a family starts from the winner of the first one. Its
  winner is timed in pairs with that of a search with a long budget, as is the winner without this start.

Every search has a process of its own and an empty cache of compiled code, except for the family. `python -m
benchmarks.claims record` makes the claims.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
from paired_times import PROCESSES, checker, slower

from benchmarks.claims import Claim, write_samples
from sparseflow.core.environment import collect_environment
from sparseflow.core.files import write_json
from sparseflow.tuning.codegen.compile import compile_source
from sparseflow.tuning.codegen.kernel import CompiledKernel, LibraryKernel
from sparseflow.tuning.codegen.program import build_program
from sparseflow.tuning.measure.evaluator import make_job
from sparseflow.tuning.schedule.matrices import CooMatrix, as_coo
from sparseflow.tuning.schedule.operators import get_operator
from sparseflow.tuning.schedule.problem import SparseProblem
from sparseflow.tuning.schedule.schedule import Schedule
from sparseflow.tuning.search.rerank import measure_call_times
from sparseflow.tuning.search.session import TuningSession

BUDGETS_S = (1.0, 2.0, 5.0, 10.0, 20.0)
SIZES = (3, 1_000, 100_000, 1_000_000)
"""Elements of the matrices; 3 is the identity."""

OPERATORS = ("spmv", "spmm", "sddmm")
N_COLS = 64
DEFAULT_BUDGET_S = 60.0
SHORT_BUDGET_S = 2.0
LONG_BUDGET_S = 20.0

MAX_OVERRUN = 1.2
"""Wall time over the budget, without the time to compile the winner."""

_BUSY = "while True: pass"


def make_matrix(nnz: int, seed: int = 0) -> CooMatrix:
    """Make a matrix with ten random elements in each row, or the identity."""
    if nnz == 3:
        return as_coo(scipy.sparse.eye_array(3), dtype=np.float32)
    size, rng = max(nnz // 10, 10), np.random.default_rng(seed)
    shape = (size, size)
    return as_coo(scipy.sparse.random_array(shape, density=nnz / size**2, rng=rng), dtype=np.float32)


def make_problem(operator: str, nnz: int, seed: int = 0) -> SparseProblem:
    n_cols = None if operator == "spmv" else N_COLS
    return SparseProblem(operator=get_operator(operator), matrix=make_matrix(nnz, seed), n_cols=n_cols)


def search(
    operator: str, nnz: int, budget_s: float, cache_dir: Path, seed: int, warm_start: bool
) -> dict[str, Any]:
    """Tune one matrix in this process; return a row of the record."""
    matrix, n_cols = make_matrix(nnz, seed), None if operator == "spmv" else N_COLS
    start_s = time.perf_counter()
    session = TuningSession(
        operator, matrix, n_cols=n_cols, budget_s=budget_s, cache_dir=cache_dir, warm_start=warm_start
    )
    result = session.run()
    wall_s = time.perf_counter() - start_s
    schedule, compile_s = result.kernel.schedule, 0.0
    if schedule is not None:
        source = build_program(session.problem, schedule).source
        with tempfile.TemporaryDirectory() as empty:
            start_s = time.perf_counter()
            compile_source(source, cache_dir=Path(empty))
            compile_s = time.perf_counter() - start_s
    return {
        "operator": operator,
        "nnz": nnz,
        "budget_s": budget_s,
        "wall_s": round(wall_s, 3),
        "compile_s": round(compile_s, 3),
        "schedules": len(result.trials),
        "disturbed": sum(trial.disturbed for trial in result.trials),
        "baselines": len(result.baselines),
        "similar": len(result.similar),
        "best_ratio": result.best_ratio,
        "winner": None if schedule is None else str(schedule),
        "warnings": list(result.warnings),
        "seconds": {part: round(elapsed_s, 3) for part, elapsed_s in result.seconds.items()},
    }


def run_search(
    operator: str,
    nnz: int,
    budget_s: float,
    *,
    cache_dir: Path | None = None,
    seed: int = 0,
    warm_start: bool = False,
) -> dict[str, Any]:
    """Tune one matrix in a new process, by default with an empty cache."""
    with tempfile.TemporaryDirectory() as empty:
        arguments = (operator, nnz, budget_s, cache_dir or Path(empty), seed, warm_start)
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            row = pool.submit(search, *arguments).result()
    print(
        f"{operator:5s} {nnz:8d} elements, {budget_s:4g} s: {row['wall_s']:6.2f} s, {row['schedules']:3d} "
        f"schedules, {row['best_ratio']:.3f}, {row['warnings']}",
        flush=True,
    )
    return row


@contextmanager
def occupy_cpus() -> Iterator[None]:
    """Run a busy loop on every CPU."""
    processes = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def compare(problem: SparseProblem, winner: str | None, other: str | None) -> dict[str, Any]:
    """Measure the time of one winner over the other's, in pairs; None is scipy."""
    if winner == other:
        return {"ratio": 1.0, "pairs": [], "disturbed": 0}
    inputs = problem.generate_inputs(0)
    if winner is None or other is None:
        program = build_program(problem, Schedule.parse(winner or other or ""))
        kernels = [CompiledKernel(program), LibraryKernel(problem)]
        (tuned_ms, library_ms), is_disturbed = measure_call_times(kernels, inputs)
        ratio = library_ms / tuned_ms if winner is None else tuned_ms / library_ms
        return {"ratio": ratio, "pairs": [], "disturbed": int(is_disturbed)}
    programs = [build_program(problem, Schedule.parse(line)) for line in (winner, other)]
    is_right = checker(problem, inputs)

    def check(output: np.ndarray) -> bool:
        # SDDMM's values are in the order of the storage.
        return any(
            output.shape == program.output_shape and is_right(program.extract_result(output))
            for program in programs
        )

    tuned, reference = (make_job(program, inputs) for program in programs)
    result = slower(tuned, reference, check)
    if result["disturbed"] == PROCESSES:  # the fastest samples are the least disturbed
        result["ratio"] = result["ms"] / result["tuned_ms"]
    return result


def measure_budgets() -> Iterator[dict[str, Any]]:
    """Search with each budget on each size; the operators take turns. The identity has the default, too."""
    for index, nnz in enumerate(SIZES):
        for number, budget_s in enumerate(BUDGETS_S):
            operator = "spmv" if nnz == 3 else OPERATORS[(index + number) % len(OPERATORS)]
            yield run_search(operator, nnz, budget_s)
    yield run_search("spmv", 3, DEFAULT_BUDGET_S)


def measure_busy(nnz: int = 100_000) -> Iterator[dict[str, Any]]:
    """Compare the winner of a search on busy CPUs with that of a search without the load."""
    for operator in OPERATORS:
        idle = run_search(operator, nnz, LONG_BUDGET_S)
        with occupy_cpus():
            busy = run_search(operator, nnz, LONG_BUDGET_S)
        against = compare(make_problem(operator, nnz), busy["winner"], idle["winner"])
        print(f"{operator}: the winner on busy CPUs takes {against['ratio']:.3f} times as long", flush=True)
        yield {"operator": operator, "nnz": nnz, "idle": idle, "busy": busy, "against": against}


def measure_family(nnz: int = 100_000) -> Iterator[dict[str, Any]]:
    """Compare short searches on a second matrix, with and without the first one's winner, with a long one."""
    for operator in OPERATORS:
        problem = make_problem(operator, nnz, seed=1)
        with tempfile.TemporaryDirectory() as folder:
            first = run_search(operator, nnz, LONG_BUDGET_S, cache_dir=Path(folder), warm_start=True)
            warm = run_search(operator, nnz, SHORT_BUDGET_S, cache_dir=Path(folder), seed=1, warm_start=True)
        cold = run_search(operator, nnz, SHORT_BUDGET_S, seed=1)
        long = run_search(operator, nnz, LONG_BUDGET_S, seed=1)
        against = {
            name: compare(problem, row["winner"], long["winner"])
            for name, row in (("warm", warm), ("cold", cold))
        }
        ratios = {name: round(value["ratio"], 3) for name, value in against.items()}
        print(f"{operator}: time over that of a long search {ratios}", flush=True)
        rows = {"first": first, "warm": warm, "cold": cold, "long": long}
        yield {"operator": operator, "nnz": nnz, "against": against} | rows


def compute_overrun(row: dict[str, Any]) -> float:
    """Return the wall time without the winner's compile time over the budget."""
    return (row["wall_s"] - row["compile_s"]) / row["budget_s"]


def make_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims of a record, which is copied to `results/tuning/budgets.json`."""
    rows = record["budgets"]
    conditions: dict[str, Any] = {
        "command": "python benchmarks/tuning/budgets.py --out RUN",
        "samples": write_samples("tuning/budgets.json", record),
    }
    overruns = [compute_overrun(row) for row in rows]
    yield Claim(
        id="tuning/7-budget",
        claim=f"Longest wall time over the budget of {len(rows)} searches, without the compile time of the "
        f"winner; 3 to {max(SIZES)} elements.",
        value=round(max(overruns), 2),
        unit="x",
        target=f"<= {MAX_OVERRUN}",
        details={
            "min_budget_s": min(BUDGETS_S),
            "max_budget_s": max(BUDGETS_S),
            "within": sum(overrun <= MAX_OVERRUN for overrun in overruns),
        },
        **conditions,
    )
    yield Claim(
        id="tuning/7-tiny",
        claim="Longest search on a 3x3 matrix with an empty cache, without imports.",
        value=max(row["wall_s"] for row in rows if row["nnz"] == 3),
        unit="s",
        target="< 1",
        **conditions,
    )
    for row in record["busy"]:
        yield Claim(
            id=f"tuning/7-busy-{row['operator']}",
            claim=f"Time of the {row['operator']} kernel of a search beside a busy loop on every CPU over "
            "that of a search without the loops.",
            value=round(row["against"]["ratio"], 3),
            unit="x",
            target="<= 1.1",
            baseline="search without the loops",
            details={
                "budget_s": row["busy"]["budget_s"],
                "disturbed": row["busy"]["disturbed"],
                "schedules": row["busy"]["schedules"],
                "disturbed_without_loops": row["idle"]["disturbed"],
                "schedules_without_loops": row["idle"]["schedules"],
                "disturbed_pairs": row["against"]["disturbed"],
            },
            **conditions,
        )
    for row in record["family"]:
        yield Claim(
            id=f"tuning/7-family-{row['operator']}",
            claim=f"Time of the {row['operator']} kernel of a {SHORT_BUDGET_S:g} s search from a similar "
            f"matrix's winner over that of a {LONG_BUDGET_S:g} s search.",
            value=round(row["against"]["warm"]["ratio"], 3),
            unit="x",
            target="<= 1.1",
            baseline=f"{LONG_BUDGET_S:g} s search",
            details={"without_similar": round(row["against"]["cold"]["ratio"], 3)},
            **conditions,
        )


PARTS = {"budgets": measure_budgets, "busy": measure_busy, "family": measure_family}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    args = parser.parse_args(arguments)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"environment": collect_environment("cpu")}
    record |= {name: list(measure()) if name in args.parts else [] for name, measure in PARTS.items()}
    write_json(args.out, record, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
