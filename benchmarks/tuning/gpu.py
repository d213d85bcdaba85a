"""Tuned SpMM and SDDMM on a GPU against cuSPARSE, torch and hand-written CSR kernels (line 9).

::

    export PYTHONPATH=src:.
    python benchmarks/tuning/gpu.py matrices/*.mtx.gz --out runs/gpu.jsonl

Matrices of `matrix_suite.py` are tuned on the GPU for each of `--problems` and each dtype. The kernel takes
turns with every algorithm of cuSPARSE that runs, with preprocessing, with torch, and with hand-written
kernels, three of which are of CSR: one program for each row, for each part of a long row, and for several
rows. Samples are replays of CUDA graphs, and the results are compared with scipy's in float64. cuSPARSE's
SDDMM does not multiply by the values of A; a multiplication follows.

The same command resumes an interrupted run. `python -m benchmarks.claims record` makes the claims.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matrix_suite import SuiteMatrix, list_matrices

from benchmarks.claims import Claim, write_samples
from sparseflow.core.environment import collect_environment
from sparseflow.core.journal import Journal
from sparseflow.core.metrics import bootstrap_mean
from sparseflow.tuning.search.gpu_session import tune_on_gpu

CSR = ("csr", "csr_split", "csr_rows")
"""Hand-written kernels of CSR."""

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

Row = dict[str, Any]


def measure(matrix: SuiteMatrix, label: str, dtype: str, budget_s: float, device: str) -> Row:
    """Tune one problem and compare the kernel with the libraries."""
    kind, _, width = label.partition(":")
    start_s = time.perf_counter()
    coo = matrix.make(np.dtype(np.float32))
    result = tune_on_gpu(kind, coo, device, n_cols=int(width), dtype=DTYPES[dtype], budget_s=budget_s)
    assert result.best_ratio is not None
    against = {name: round(ratio / result.best_ratio, 4) for name, ratio in result.baselines.items()}
    libraries = {name: ratio for name, ratio in against.items() if name.startswith(("library", "cusparse_"))}
    best_library = min(libraries, key=libraries.__getitem__, default=None)
    schedule = result.kernel.schedule
    return {
        "matrix": matrix.name,
        "family": matrix.family,
        "problem": label,
        "dtype": dtype,
        "shape": coo.shape,
        "nnz": coo.nnz,
        "schedule": None if schedule is None else str(schedule),
        "trials": len(result.trials),
        "failed": sorted({trial.error for trial in result.trials if trial.error is not None}),
        "warnings": list(result.warnings),
        "seconds": round(time.perf_counter() - start_s, 2),
        "against": against,
        "library": min(libraries.values(), default=None),
        "samples_ms": {
            name: [round(sample, 6) for sample in result.samples_ms[name]]
            for name in ("kernel", best_library)
            if name is not None
        },
    }


def make_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims of a record, which is copied to `results/tuning/gpu.json`."""
    samples = write_samples("tuning/gpu.json", record)
    rows = [row for row in record["rows"] if row["library"] is not None]
    for operator in sorted({row["problem"].partition(":")[0] for row in rows}):
        subset = [row for row in rows if row["problem"].startswith(operator)]
        ratios = [row["library"] for row in subset]
        low, high = bootstrap_mean([math.log(ratio) for ratio in ratios], [row["matrix"] for row in subset])
        conditions: dict[str, Any] = {
            "unit": "x",
            "baseline": "cuSPARSE",
            "device": record["environment"]["device"]["name"],
            "command": "python benchmarks/tuning/gpu.py MATRICES --out RUN",
            "samples": samples,
        }
        matrices = len({row["matrix"] for row in subset})
        yield Claim(
            id=f"tuning/9-{operator}-cusparse",
            claim=f"Speedup of tuned {operator} on a GPU over the best algorithm of cuSPARSE, geometric mean "
            f"of {len(subset)} cases of {matrices} matrices.",
            value=round(statistics.geometric_mean(ratios), 2),
            target=">= 1.5",
            details={
                "low": round(math.exp(low), 2),
                "high": round(math.exp(high), 2),
                "max": round(max(ratios), 2),
                "fallbacks": sum(row["schedule"] is None for row in subset),
                **_group_means(subset, "dtype"),
                **_group_means(subset, "problem"),
                **_group_means(subset, "family"),
                "csr_kernels": round(
                    statistics.geometric_mean(
                        min(row["against"][name] for name in CSR if name in row["against"]) for row in subset
                    ),
                    2,
                ),
            },
            **conditions,
        )
        yield Claim(
            id=f"tuning/9-{operator}-floor",
            claim=f"Speedup of tuned {operator} on a GPU over the best algorithm of cuSPARSE, worst of "
            f"{len(subset)} cases.",
            value=round(min(ratios), 3),
            target=">= 1",
            **conditions,
        )


def _group_means(rows: Sequence[Row], field: str) -> dict[str, float]:
    groups: dict[str, list[float]] = {}
    for row in rows:
        groups.setdefault(row[field], []).append(row["library"])
    return {name: round(statistics.geometric_mean(values), 2) for name, values in sorted(groups.items())}


def select_matrices(files: Sequence[Path], names: Sequence[str] | None) -> list[SuiteMatrix]:
    """Select matrices by name; by default the files and the first generated matrix of each family."""
    suite = list_matrices(files)
    if names is not None:
        return [matrix for matrix in suite if matrix.name in names]
    generated = list_matrices([])
    known = {matrix.name for matrix in generated}
    first = {matrix.family: matrix for matrix in reversed(generated)}
    return [*(matrix for matrix in suite if matrix.name not in known), *first.values()]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="*", help="files of matrices")
    parser.add_argument("--matrices", nargs="+", help="names of matrices")
    parser.add_argument("--problems", nargs="+", default=["spmm:64", "sddmm:64"])
    parser.add_argument("--dtype", nargs="+", default=["float32", "float16"], choices=DTYPES)
    parser.add_argument("--budget-s", type=float, default=10.0, help="seconds to tune each problem")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--time-limit-s", type=float, default=math.inf, help="start no case after this time")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines")
    args = parser.parse_args(arguments)
    deadline_s = time.monotonic() + args.time_limit_s
    args.out.parent.mkdir(parents=True, exist_ok=True)
    journal: Journal[Row]
    with Journal(args.out, dict) as journal:
        if not journal.rows:
            settings = {"budget_s": args.budget_s, "torch": torch.__version__, "cuda": torch.version.cuda}
            journal.append({"environment": collect_environment(args.device), "settings": settings})
        completed = {(row["matrix"], row["problem"], row["dtype"]) for row in journal.rows[1:]}
        for label in args.problems:
            for dtype in args.dtype:
                for matrix in select_matrices(args.files, args.matrices):
                    case = (matrix.name, label, dtype)
                    if case in completed or time.monotonic() > deadline_s:
                        continue
                    row = measure(matrix, label, dtype, args.budget_s, args.device)
                    journal.append(row)
                    print(f"{' '.join(case)}: {row['trials']} schedules, {row['against']}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
