"""Results of random compiled schedules against scipy (line 2).

::

    export PYTHONPATH=src:.
    python benchmarks/tuning/equal.py --out results/tuning/equal.json

Matrices are small, because only the results matter. Their extents are odd, so that the last blocks are
partial.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.claims import Claim, record_claims
from sparseflow.core.environment import collect_environment
from sparseflow.core.files import write_atomic
from sparseflow.core.parallel import map_unordered
from sparseflow.errors import InputError, RunError
from sparseflow.tuning.codegen.program import build_program
from sparseflow.tuning.measure.evaluator import TOLERANCE, make_job
from sparseflow.tuning.measure.runner import MeasurementSession
from sparseflow.tuning.schedule.matrices import CooMatrix, as_coo
from sparseflow.tuning.schedule.operators import OPERATORS
from sparseflow.tuning.schedule.problem import SparseProblem
from sparseflow.tuning.schedule.space import ScheduleSpace

RTOL = {dtype.name: largest for dtype, largest in TOLERANCE.items()}
"""Largest error, relative to the largest result."""

SHAPES = ((173, 211, 0.05), (64, 64, 0.2), (1000, 30, 0.02), (31, 900, 0.1), (257, 255, 0.004), (3, 5, 0.5))
WIDTHS = (1, 20, 64, 100, 33, 256)
LIMIT_BYTES = 256 << 20
BATCH = 25


def matrix(shape: tuple[int, int, float], dtype: str, seed: int) -> CooMatrix:
    rows, cols, density = shape
    generator = np.random.default_rng(seed)
    values = generator.standard_normal((rows, cols)) * (generator.random((rows, cols)) < density)
    return as_coo(values, dtype=np.dtype(dtype))


def try_some(task: tuple[str, int, int], cache: Path | None) -> list[dict[str, Any]]:
    """Sample and run schedules `first` to `last` of an operator."""
    name, first, last = task
    return [try_one(name, number, cache) for number in range(first, last)]


def try_one(name: str, number: int, cache: Path | None) -> dict[str, Any]:
    operator = OPERATORS[name]
    case = number % len(SHAPES)
    dtype = "float64" if number % 5 == 4 else "float32"
    problem = SparseProblem(
        operator=operator,
        matrix=matrix(SHAPES[case], dtype, number),
        n_cols=WIDTHS[number // len(SHAPES) % len(WIDTHS)] if operator.dense_axes else None,
    )
    space = ScheduleSpace(operator, problem.extents, threads=(1, 2))
    schedule = space.sample(np.random.default_rng([number, 1]))
    row: dict[str, Any] = {
        "operator": name, "number": number, "dtype": dtype, "extents": dict(problem.extents),
        "schedule": str(schedule),
    }  # fmt: skip
    inputs = problem.generate_inputs(number)
    try:
        program = build_program(problem, schedule, max_bytes=LIMIT_BYTES)
        job = make_job(program, inputs, cache_dir=cache)
    except InputError as error:
        return row | {"outcome": "refused", "why": str(error)}
    except RunError as error:
        return row | {"outcome": "failed", "why": str(error)}
    with MeasurementSession(cache_dir=cache) as session:
        result = session.measure(job, repeats=1, min_time_s=0.0)
    if result.error is not None:
        return row | {"outcome": "failed", "why": result.error}
    error = largest_error(program.extract_result(result.output), problem.compute_reference(inputs))
    return row | {"outcome": "equal" if error <= RTOL[dtype] else "wrong", "error": error}


def largest_error(result: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference, relative to the largest result."""
    if not np.isfinite(result).all():
        return float("inf")
    difference = float(np.abs(result - expected).max(initial=0.0))
    scale = float(np.abs(expected).max(initial=0.0))
    return difference / scale if scale else difference


def summed_up(rows: list[dict[str, Any]]) -> dict[str, Any]:
    errors = {
        dtype: [row["error"] for row in rows if row["dtype"] == dtype and "error" in row] for dtype in RTOL
    }
    return {
        "drawn": len(rows),
        "distinct": len({row["schedule"] for row in rows}),
        "outcomes": dict(Counter(row["outcome"] for row in rows)),
        "largest_error": {dtype: max(result, default=None) for dtype, result in errors.items()},
    }


def make_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims of a record: random schedules against scipy."""
    for name, summary in record["summary"].items():
        count = summary["drawn"]
        yield Claim(
            id=f"tuning/2-{name}",
            claim=f"Random {name} schedules of {count} that run and match scipy.",
            value=round(100.0 * summary["outcomes"].get("equal", 0) / count, 2),
            unit="%",
            target=">= 100",
            command="python benchmarks/tuning/equal.py --out results/tuning/equal.json",
            details={
                "distinct": summary["distinct"],
                "largest_float32_error": summary["largest_error"]["float32"],
            },
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedules", type=int, default=1300, help="of each operator")
    parser.add_argument("--operators", nargs="+", default=list(OPERATORS), choices=OPERATORS)
    parser.add_argument("--jobs", type=int, default=2, help="processes that compile and run")
    parser.add_argument("--cache", type=Path, help="folder of compiled code")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    tasks = [
        (name, first, min(first + BATCH, args.schedules))
        for name in args.operators
        for first in range(0, args.schedules, BATCH)
    ]
    rows: list[dict[str, Any]] = []
    for _, result in map_unordered(partial(try_some, cache=args.cache), tasks, workers=args.jobs):
        rows += result
        print(len(rows), dict(Counter(f"{row['operator']} {row['outcome']}" for row in rows)), flush=True)
    rows.sort(key=lambda row: (row["operator"], row["number"]))
    for row in rows:
        if row["outcome"] in ("wrong", "failed"):
            print(row)
    summary = {name: summed_up([row for row in rows if row["operator"] == name]) for name in args.operators}
    # A schedule is drawn again from its number alone.
    retained = {
        name: [
            [row["outcome"], float(f"{row.get('error', -1):.2e}")] for row in rows if row["operator"] == name
        ]
        for name in args.operators
    }
    record = {
        "environment": collect_environment("cpu"),
        "rtol": RTOL,
        "summary": summary,
        "schedules": retained,
    }
    write_atomic(args.out, json.dumps(record) + "\n")
    record_claims(make_claims(record), record, args.out)
    print(json.dumps(summary, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
