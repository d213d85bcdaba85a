"""Tuned kernels against MKL, scipy and CSR with sums in registers, on files of matrices (line 3).

::

    export PYTHONPATH=src:.
    python benchmarks/tuning/against.py matrices/*.mtx.gz --mkl libmkl_rt.so.3 --out runs/against.jsonl

Every matrix is tuned for each of `--problems`. The kernel is then timed in pairs with each baseline on one
thread or on as many as the kernel, whichever is faster; scipy has one thread. The same command resumes an
interrupted run. `python -m benchmarks.claims record` makes the claims.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from mkl import mkl_job

from benchmarks.claims import Claim, write_samples
from sparseflow.core.environment import collect_environment
from sparseflow.core.journal import Journal
from sparseflow.core.metrics import bootstrap_mean
from sparseflow.errors import RunError
from sparseflow.tuning.codegen.kernel import CompiledKernel, LibraryKernel
from sparseflow.tuning.codegen.program import build_program
from sparseflow.tuning.measure.evaluator import TOLERANCE, make_job
from sparseflow.tuning.measure.runner import KernelJob, KernelTiming, MeasurementSession
from sparseflow.tuning.schedule.matrices import CooMatrix
from sparseflow.tuning.schedule.matrix_files import parse_matrix_name, read_matrix
from sparseflow.tuning.schedule.operators import get_operator
from sparseflow.tuning.schedule.presets import build_presets
from sparseflow.tuning.schedule.problem import SparseProblem
from sparseflow.tuning.search.session import TuningSession

REGISTERS = {"spmm": ("tiled_csr",), "spmv": ("csr", "csr_gathered")}
"""Operator -> presets that keep the sums of a row in registers."""

PAIRS = 30
PROCESSES = 6
"""Processes of a comparison; the memory layout of a process changes the time of a kernel by some percent."""

TRIES = 2
"""Maximum number of processes relative to `PROCESSES`, if some are disturbed."""


def checker(problem: SparseProblem, inputs: tuple[np.ndarray, ...]) -> Callable[[np.ndarray], bool]:
    """Create a function that compares an output with scipy's result in float64."""
    expected = problem.compute_reference(inputs)
    scale = float(np.abs(expected).max(initial=0.0)) or 1.0

    def right(output: np.ndarray) -> bool:
        error = np.abs(output[: len(expected)] - expected).max(initial=0.0)
        return bool(error <= TOLERANCE[problem.dtype] * scale)

    return right


def slower(
    baseline: KernelJob, tuned: KernelJob, right: Callable[[np.ndarray], bool], processes: int = PROCESSES
) -> dict[str, Any]:
    """Measure the time of a baseline over the tuned kernel's: median over processes of medians over pairs.

    The two kernels take turns in loading their arrays first, because the first arrays may get better pages.
    """
    result: list[tuple[KernelTiming, list[float]]] = []
    attempts = 0
    while len(result) < processes:
        attempts += 1
        tuned_first = len(result) % 2 == 1
        first, second = (tuned, baseline) if tuned_first else (baseline, tuned)
        with MeasurementSession(second) as session:
            item = session.measure(first, repeats=PAIRS, min_time_s=0.1, max_time_s=1.0)
        if item.error is not None:
            raise RunError(f"a kernel failed: {item.error}")
        if not right(item.output):
            raise RunError("a result is wrong")
        if attempts >= TRIES * processes or not (item.contended or item.drifted):
            pairs = [a / b for a, b in zip(item.latency_ms, item.reference_ms, strict=True)]
            result.append((item, [1.0 / pair for pair in pairs] if tuned_first else pairs))
    times = [
        (item.reference_ms, item.latency_ms) if index % 2 == 0 else (item.latency_ms, item.reference_ms)
        for index, (item, _) in enumerate(result)
    ]
    return {
        "ratio": statistics.median(statistics.median(pairs) for _, pairs in result),
        "pairs": [[round(pair, 3) for pair in pairs[:PAIRS]] for _, pairs in result],
        "tuned_ms": min(min(tuned_ms) for tuned_ms, _ in times),
        "ms": min(min(baseline_ms) for _, baseline_ms in times),
        "disturbed": sum(item.contended or item.drifted for item, _ in result),
        "attempts": attempts,
    }


def strongest(
    baselines: Mapping[str, KernelJob], tuned: KernelJob, right: Callable[[np.ndarray], bool]
) -> dict[str, Any]:
    """Measure the fastest form of a baseline; two processes select it."""
    result = {name: slower(job, tuned, right, 2)["ratio"] for name, job in baselines.items()}
    best = min(result, key=lambda name: result[name])
    return slower(baselines[best], tuned, right) | {"form": best, "forms": result}


def slower_library(kernel: CompiledKernel, inputs: tuple[np.ndarray, ...]) -> dict[str, Any]:
    """Measure scipy against the tuned kernel, both called from Python."""
    library = LibraryKernel(kernel.problem)
    calls = [library.compute, kernel.compute]
    samples: list[list[float]] = [[], []]
    for turn in range(PROCESSES * PAIRS + 3):
        for call, retained in zip(calls, samples, strict=True):
            start = time.perf_counter()
            call(*inputs)
            if turn >= 3:
                retained.append(1e3 * (time.perf_counter() - start))
    pairs = [a / b for a, b in zip(*samples, strict=True)]
    return {
        "ratio": statistics.median(pairs),
        "pairs": [round(pair, 4) for pair in pairs],
        "tuned_ms": min(samples[1]),
        "ms": min(samples[0]),
    }


def compare(name: str, matrix: CooMatrix, label: str, args: argparse.Namespace) -> dict[str, Any]:
    """Tune one problem and measure the kernel against the baselines."""
    kind, _, width = label.partition(":")
    problem = SparseProblem(operator=get_operator(kind), matrix=matrix, n_cols=int(width) if width else None)
    result = TuningSession(
        kind, matrix, n_cols=problem.n_cols, budget_s=args.budget, method=args.method,
        threads=args.threads, seed=args.seed,
    ).run()  # fmt: skip
    if not isinstance(result.kernel, CompiledKernel):
        raise RunError(f"{name}, {label}: scipy was the fastest; compare it by hand")
    inputs = problem.generate_inputs(args.seed)
    right = checker(problem, inputs)
    tuned = make_job(result.kernel.program, inputs)
    mkl, registers = {}, {}
    for threads in sorted({1, args.threads}, reverse=True):
        mkl[f"{threads} threads"] = mkl_job(problem, inputs, args.mkl, threads)
        known = build_presets(problem.operator, problem.extents, threads)
        for preset in REGISTERS[kind]:
            registers[f"{preset}, {threads} threads"] = make_job(
                build_program(problem, known[preset]), inputs
            )
    against = {
        "mkl": strongest(mkl, tuned, right),
        "registers": strongest(registers, tuned, right),
        "scipy": slower_library(result.kernel, inputs),
    }
    return {
        "matrix": name,
        "problem": label,
        "shape": matrix.shape,
        "nnz": matrix.nnz,
        "schedule": str(result.kernel.schedule),
        "trials": len(result.trials),
        "failed": sum(trial.error is not None for trial in result.trials),
        "seconds": result.seconds,
        "against": against,
    }


def make_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims of a record: tuned kernels against the baselines.

    A record of JSON lines is copied to `results/tuning`, with the name of its operators.
    """
    settings = record["settings"]
    for operator_name in sorted({row["problem"].partition(":")[0] for row in record["rows"]}):
        rows = [row for row in record["rows"] if row["problem"].partition(":")[0] == operator_name]
        conditions: dict[str, Any] = {
            "device": record["environment"]["device"]["name"],
            "command": "python benchmarks/tuning/against.py MATRICES --mkl libmkl_rt.so --out RUN",
            "samples": write_samples(f"tuning/against-{operator_name}.json", record | {"rows": rows}),
        }
        for key, baseline, target in (
            ("mkl", "Intel MKL", 1.2),
            ("scipy", "scipy", 2.5),
            ("registers", "CSR with sums in registers", 1.1),
        ):
            ratios = [row["against"][key]["ratio"] for row in rows]
            interval = bootstrap_mean([math.log(ratio) for ratio in ratios], [row["matrix"] for row in rows])
            yield Claim(
                id=f"tuning/3-{operator_name}-{key}",
                claim=f"Speedup of tuned {operator_name} over {baseline}, geometric mean of {len(rows)} "
                f"cases of {len({row['matrix'] for row in rows})} real matrices.",
                value=round(statistics.geometric_mean(ratios), 2),
                unit="x",
                target=f">= {target:g}",
                baseline=baseline,
                details={
                    "low": round(math.exp(interval[0]), 2),
                    "high": round(math.exp(interval[1]), 2),
                    "min": round(min(ratios), 2),
                    "max": round(max(ratios), 2),
                    "threads": settings["threads"],
                    "budget_s": settings["budget"],
                },
                **conditions,
            )
        yield Claim(
            id=f"tuning/3-{operator_name}-floor",
            claim=f"Speedup of tuned {operator_name} over the best of three baselines, worst of {len(rows)} "
            "cases.",
            value=round(min(min(other["ratio"] for other in row["against"].values()) for row in rows), 3),
            unit="x",
            target=">= 0.97",
            **conditions,
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("matrices", type=Path, nargs="+")
    parser.add_argument("--mkl", type=Path, required=True, help="libmkl_rt.so, from `pip install mkl`")
    parser.add_argument("--problems", nargs="+", default=["spmm:64", "spmm:256", "spmv"])
    parser.add_argument("--budget", type=float, default=60.0, help="seconds to tune each problem")
    parser.add_argument("--method", default="evolutionary")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    journal: Journal[dict[str, Any]]
    with Journal(args.out, dict) as journal:
        if not journal.rows:
            settings = {name: getattr(args, name) for name in ("budget", "method", "threads", "seed")}
            journal.append({"environment": collect_environment("cpu"), "settings": settings})
        completed = {(row["matrix"], row["problem"]) for row in journal.rows[1:]}
        for path in sorted(args.matrices):
            name = parse_matrix_name(path)
            for label in args.problems:
                if (name, label) in completed:
                    continue
                row = compare(name, read_matrix(path, dtype=np.float32), label, args)
                journal.append(row)
                ratios = {key: round(value["ratio"], 2) for key, value in row["against"].items()}
                print(f"{name:32s} {label:9s} {row['trials']:4d} schedules  {ratios}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
