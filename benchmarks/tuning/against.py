"""Tuned kernels against sparse libraries, on files of matrices and generated matrices (line 3).

::

    export PYTHONPATH=src:.
    python benchmarks/tuning/against.py matrices/*.mtx.gz --mkl libmkl_rt.so.3 --graphblas libgraphblas.so \\
        --librsb librsb.so.0 --eigen /usr/include/eigen3 --out runs/against.jsonl

Every matrix of `matrix_suite.py` is tuned for each of `--problems` and each dtype. The kernel is then timed
in pairs with each baseline: the libraries of the command line, torch, scipy, and CSR kernels. A baseline runs
on one thread or on as many as the kernel, in each of its forms; the fastest counts. Its preparation, such as
MKL's inspector or the tuning of librsb, is timed separately. Results are compared with scipy's in float64.
scipy and torch are called from Python, as is the kernel that is compared with them; scipy has one thread.
Libraries that allocate results reuse freed memory with huge pages.

The same command resumes an interrupted run and may select other matrices, families, problems or dtypes.
`python -m benchmarks.claims record` makes the claims.

Libraries:

- MKL: `pip install mkl` (`lib/libmkl_rt.so.3` of the environment).
- GraphBLAS: `pip install suitesparse-graphblas` (`suitesparse_graphblas.libs/libgraphblas-*.so.*` in the
  folder of packages), or `apt-get install libgraphblas7`, which is older.
- librsb: `apt-get install librsb0`.
- Eigen: `apt-get install libeigen3-dev`; only the headers are needed, and `g++`.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from libraries import CALLED, COMPILED, TITLES, MakeJobs, register_jobs
from matrix_suite import SuiteMatrix, list_matrices
from paired_times import MALLOC_ENVIRONMENT, checker, strongest, strongest_call

from benchmarks.claims import Claim, slugify, write_samples
from sparseflow.core.environment import collect_environment
from sparseflow.core.journal import Journal
from sparseflow.core.metrics import bootstrap_mean
from sparseflow.errors import RunError
from sparseflow.tuning.codegen.kernel import CompiledKernel
from sparseflow.tuning.codegen.program import build_program
from sparseflow.tuning.measure.evaluator import make_job
from sparseflow.tuning.search.session import DEFAULT_METHOD, TuneResult, TuningSession

FIVE_POINTS = "stencil5-"
"""Prefix of the names of five-point stencils."""

Row = dict[str, Any]


def tune(
    matrix: SuiteMatrix, label: str, dtype: str, args: argparse.Namespace
) -> tuple[TuneResult, CompiledKernel]:
    """Tune one problem; if scipy is the fastest, the kernel is the fastest compiled schedule."""
    kind, _, width = label.partition(":")
    session = TuningSession(
        kind, matrix.make(np.dtype(dtype)), n_cols=int(width) if width else None, budget_s=args.budget_s,
        method=args.method, threads=args.threads, seed=args.seed, warm_start=False,
    )  # fmt: skip
    result = session.run()
    if isinstance(result.kernel, CompiledKernel):
        return result, result.kernel
    best = min(result.trials, key=lambda trial: trial.ratio)
    return result, CompiledKernel(build_program(session.problem, best.schedule))


def compare(
    matrix: SuiteMatrix, label: str, dtype: str, baselines: dict[str, MakeJobs], args: argparse.Namespace
) -> Row:
    """Tune one problem and measure the kernel against the baselines."""
    result, kernel = tune(matrix, label, dtype, args)
    problem = kernel.problem
    inputs = problem.generate_inputs(args.seed)
    right = checker(problem, inputs)
    tuned = make_job(kernel.program, inputs)

    def compare_compiled(make_jobs: MakeJobs) -> Row:
        jobs = {
            f"{form}, {threads} threads": job
            for threads in sorted({1, args.threads})
            for form, job in make_jobs(problem, inputs, threads).items()
        }
        return strongest(jobs, tuned, right, args.processes)

    comparisons: dict[str, Callable[[], Row]] = {
        **{name: lambda jobs=jobs: compare_compiled(jobs) for name, jobs in baselines.items()},
        **{
            name: lambda calls=calls: strongest_call(calls, kernel, inputs, args.threads)
            for name, calls in CALLED.items()
        },
    }
    against: dict[str, Row] = {}
    for name, measure in comparisons.items():
        try:
            against[name] = measure()
        except RunError as error:  # a library may lack the operation; the row says so
            against[name] = {"error": str(error)}
    return {
        "matrix": matrix.name,
        "family": matrix.family,
        "problem": label,
        "dtype": dtype,
        "shape": problem.matrix.shape,
        "nnz": problem.matrix.nnz,
        "pattern": problem.matrix.digest(values=False)[:12],
        "schedule": str(kernel.schedule),
        "trials": len(result.trials),
        "failed": sum(trial.error is not None for trial in result.trials),
        "seconds": result.seconds,
        "break_even_scipy": result.break_even,
        "against": against,
    }


def list_ratios(row: Row) -> dict[str, float]:
    """Return baseline -> its time over the tuned kernel's."""
    return {name: other["ratio"] for name, other in row["against"].items() if "error" not in other}


def best_baseline(row: Row) -> str:
    ratios = list_ratios(row)
    return min(ratios, key=lambda name: ratios[name])


def break_even(row: Row) -> float:
    """Calls that save the time of the search against the best baseline; infinite if the kernel is slower.

    The preparation of the baseline counts for the kernel. The kernel's time is the baseline's over the ratio.
    """
    best = row["against"][best_baseline(row)]
    saved_ms = best["ms"] * (1.0 - 1.0 / best["ratio"])
    return 1e3 * (sum(row["seconds"].values()) - best["setup_s"]) / saved_ms if saved_ms > 0 else math.inf


def geometric_means(rows: Sequence[Row], ratios: Sequence[float], field: str) -> dict[str, float]:
    """Return the geometric mean of the ratios by a field of their rows."""
    groups: dict[str, list[float]] = {}
    for row, ratio in zip(rows, ratios, strict=True):
        groups.setdefault(row[field], []).append(ratio)
    return {name: round(statistics.geometric_mean(values), 2) for name, values in sorted(groups.items())}


def make_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims of a record: tuned kernels against the baselines.

    A record of JSON lines is copied to `results/tuning` without its samples, a file for each operator.
    """
    for operator_name in sorted({row["problem"].partition(":")[0] for row in record["rows"]}):
        rows = [row for row in record["rows"] if row["problem"].partition(":")[0] == operator_name]
        yield from _make_operator_claims(operator_name, rows, record)


def _make_operator_claims(operator_name: str, rows: Sequence[Row], record: dict[str, Any]) -> Iterator[Claim]:
    settings = record["settings"]
    conditions: dict[str, Any] = {
        "device": record["environment"]["device"]["name"],
        "command": "python benchmarks/tuning/against.py MATRICES --mkl LIBRARY --graphblas LIBRARY "
        "--librsb LIBRARY --eigen HEADERS --out RUN",
        "samples": write_samples(f"tuning/against-{operator_name}.json", _make_samples(rows, record)),
    }

    def make_ratio_claim(
        slug: str, baseline: str, pairs: Sequence[tuple[Row, float]], target: str | None
    ) -> Claim:
        subset, ratios = [row for row, _ in pairs], [ratio for _, ratio in pairs]
        interval = bootstrap_mean([math.log(ratio) for ratio in ratios], [row["matrix"] for row in subset])
        return Claim(
            id=f"tuning/3-{operator_name}-{slug}",
            claim=f"Speedup of tuned {operator_name} over {baseline}, geometric mean of {len(subset)} cases "
            f"of {len({row['matrix'] for row in subset})} matrices.",
            value=round(statistics.geometric_mean(ratios), 2),
            unit="x",
            target=target,
            baseline=baseline,
            details={
                "low": round(math.exp(interval[0]), 2),
                "high": round(math.exp(interval[1]), 2),
                "min": round(min(ratios), 2),
                "max": round(max(ratios), 2),
                "threads": settings["threads"],
                "budget_s": settings["budget_s"],
                **geometric_means(subset, ratios, "family"),
                **geometric_means(subset, ratios, "dtype"),
                **geometric_means(subset, ratios, "problem"),
            },
            **conditions,
        )

    targets = {"mkl": ">= 1.2", "scipy": ">= 2.5", "registers": ">= 1.1"}
    for name, title in TITLES.items():
        pairs = [(row, ratios[name]) for row in rows if name in (ratios := list_ratios(row))]
        if pairs:
            yield make_ratio_claim(slugify(name), title, pairs, targets.get(name))
    best = [(row, min(list_ratios(row).values())) for row in rows]
    yield make_ratio_claim("best", "the best baseline of each case", best, ">= 1.5")
    yield Claim(
        id=f"tuning/3-{operator_name}-floor",
        claim=f"Speedup of tuned {operator_name} over the best baseline, worst of {len(rows)} cases.",
        value=round(min(ratio for _, ratio in best), 3),
        unit="x",
        target=">= 0.97",
        details={
            "slower_cases": sum(ratio < 0.97 for _, ratio in best),
            "disturbed_cases": sum(row["against"][best_baseline(row)]["disturbed"] > 0 for row in rows),
        }
        | {f"best_{name}": sum(best_baseline(row) == name for row in rows) for name in TITLES},
        **conditions,
    )
    points = [
        (row, ratios["mkl"])
        for row in rows
        if row["matrix"].startswith(FIVE_POINTS) and "mkl" in (ratios := list_ratios(row))
    ]
    if points:
        yield make_ratio_claim("five-points", "Intel MKL on five-point stencils", points, ">= 1")
    calls = [break_even(row) for row in rows]
    scipy_calls = [math.inf if row["break_even_scipy"] is None else row["break_even_scipy"] for row in rows]
    yield Claim(
        id=f"tuning/3-{operator_name}-break-even",
        claim=f"Calls of tuned {operator_name} that save the time of its search against the best "
        f"baseline, median of {len(rows)} cases.",
        value=_count_calls(statistics.median(calls)),
        unit="calls",
        details={
            "never": sum(map(math.isinf, calls)),
            "against_scipy": _count_calls(statistics.median(scipy_calls)),
            "budget_s": settings["budget_s"],
        },
        **conditions,
    )


def _count_calls(calls: float) -> int | str:
    return math.ceil(calls) if math.isfinite(calls) else "never"


def _make_samples(rows: Sequence[Row], record: dict[str, Any]) -> dict[str, Any]:
    """Return a record with a short list for each row, because a file of samples has a maximum size."""
    fields = ("matrix", "family", "problem", "dtype", "nnz", "pattern", "trials", "break_even_scipy")
    baseline_fields = ("ratio", "ms", "setup_s", "form")
    shortened = [
        [
            *(row[field] for field in fields),
            sum(row["seconds"].values()),
            {
                name: other.get("error") or [other[field] for field in baseline_fields]
                for name, other in row["against"].items()
            },
        ]
        for row in rows
    ]
    return record | {"fields": [*fields, "search_s", list(baseline_fields)], "rows": shortened}


def describe_libraries(paths: dict[str, Path]) -> dict[str, str]:
    """Describe the versions of the baselines: file name and checksum, or version of the package."""
    described = {name: version(name) for name in CALLED}
    for name, path in paths.items():
        file = path.resolve()
        file = file / "Eigen/src/Core/util/Macros.h" if file.is_dir() else file
        described[name] = f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()[:12]}"
    return described


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "files", type=Path, nargs="*", help="files of matrices, in addition to generated ones"
    )
    parser.add_argument("--mkl", type=Path, help="libmkl_rt.so")
    parser.add_argument("--graphblas", type=Path, help="libgraphblas.so")
    parser.add_argument("--librsb", type=Path, help="librsb.so")
    parser.add_argument("--eigen", type=Path, help="folder of Eigen's headers")
    parser.add_argument("--families", nargs="+", help="families of matrices; by default all")
    parser.add_argument("--matrices", nargs="+", help="names of matrices; by default all")
    parser.add_argument("--problems", nargs="+", default=["spmv", "spmm:8", "spmm:32", "spmm:128"])
    parser.add_argument("--dtype", nargs="+", default=["float32", "float64"])
    parser.add_argument("--budget-s", type=float, default=60.0, help="seconds to tune each problem")
    parser.add_argument("--time-limit-s", type=float, default=math.inf, help="start no case after this time")
    parser.add_argument("--method", default=DEFAULT_METHOD)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--processes", type=int, default=6, help="processes of each comparison")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines")
    args = parser.parse_args()
    os.environ.update(MALLOC_ENVIRONMENT)
    deadline_s = time.monotonic() + args.time_limit_s
    paths = {name: path for name in COMPILED if (path := getattr(args, name)) is not None}
    baselines: dict[str, MakeJobs] = {name: COMPILED[name](path) for name, path in paths.items()}
    baselines["registers"] = register_jobs
    settings = {name: getattr(args, name) for name in ("budget_s", "method", "threads", "processes", "seed")}
    settings["libraries"] = describe_libraries(paths)
    cases = [
        (matrix, label, dtype)
        for dtype in args.dtype
        for label in args.problems
        for matrix in list_matrices(args.files)
        if args.families is None or matrix.family in args.families
        if args.matrices is None or matrix.name in args.matrices
    ]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    journal: Journal[Row]
    with Journal(args.out, dict) as journal:
        if not journal.rows:
            journal.append({"environment": collect_environment("cpu"), "settings": settings})
        elif (existing := journal.rows[0]["settings"]) != settings:
            raise RunError(f"{args.out} holds a run with {existing}, not {settings}; name another file")
        completed = {(row["matrix"], row["problem"], row["dtype"]) for row in journal.rows[1:]}
        for number, (matrix, label, dtype) in enumerate(cases, start=1):
            if (matrix.name, label, dtype) in completed:
                continue
            if time.monotonic() > deadline_s:
                print("the time limit is reached; the same command continues")
                break
            row = compare(matrix, label, dtype, baselines, args)
            journal.append(row)
            ratios = {
                name: other["error"] if "error" in other else round(other["ratio"], 2)
                for name, other in row["against"].items()
            }
            print(
                f"{number}/{len(cases)} {matrix.name} {label} {dtype}: {row['trials']} schedules, {ratios}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
