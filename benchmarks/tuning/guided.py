"""Short guided searches against a long search without a cost model, on files of matrices (line 4).

::

    export PYTHONPATH=src:.
    python benchmarks/tuning/guided.py matrices/*.mtx.gz --out runs/guided/guided.jsonl

For every matrix and problem there is one search of `--long` schedules without a model. For each seed there
is a search of `--short` schedules with a model and, as a control, one without. Presets and repeated
measurements of the best schedules count. With them a short search has at most a tenth of the measurements of
the long search, which its row records. The selected schedules of short and long search are then timed in
pairs in several processes.

A finished search is a row of `--out`, and its trials are in a directory next to it. The same command resumes
an interrupted run. `python -m benchmarks.claims record` makes the claims.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from paired_times import checker, slower

from benchmarks.claims import Claim, write_samples
from sparseflow.core.environment import collect_environment
from sparseflow.core.journal import Journal
from sparseflow.errors import RunError
from sparseflow.tuning.codegen.program import build_program
from sparseflow.tuning.measure.evaluator import Trial, make_job
from sparseflow.tuning.model.net.pretrained import load_prior
from sparseflow.tuning.schedule.matrix_files import parse_matrix_name, read_matrix
from sparseflow.tuning.schedule.operators import get_operator
from sparseflow.tuning.schedule.presets import build_presets
from sparseflow.tuning.schedule.problem import SparseProblem
from sparseflow.tuning.schedule.schedule import Schedule
from sparseflow.tuning.search.methods import GUIDED_PREFIX
from sparseflow.tuning.search.session import TuneResult, TuningSession

WITHIN = 1.05
"""Largest time relative to the schedule of the long search that counts as equally fast."""


def against(problem: SparseProblem, schedule: Schedule, other: Schedule) -> dict[str, Any]:
    """Measure the time of a schedule over another's, in pairs."""
    if schedule == other:
        return {"ratio": 1.0, "pairs": [], "disturbed": 0, "attempts": 0}
    inputs = problem.generate_inputs(0)
    item_value, two = (make_job(build_program(problem, item), inputs) for item in (schedule, other))
    return slower(item_value, two, checker(problem, inputs))


def curve(trials: Iterable[Trial]) -> list[list[float]]:
    """List each improvement of a search: number of measurements, measuring time in seconds, ratio."""
    points: list[list[float]] = []
    seconds = 0.0
    for number, trial in enumerate(trials, start=1):
        seconds += sum(trial.seconds.values())
        if trial.error is None and (not points or trial.ratio < points[-1][2]):
            points.append([number, round(seconds, 3), round(trial.ratio, 5)])
    return points


def row_of(result: TuneResult) -> dict[str, Any]:
    """Summarize a search for its row."""
    if result.kernel.schedule is None:
        raise RunError("scipy was the fastest; there is no schedule to compare")
    return {
        "schedules": len(result.trials),
        "measurements": sum(trial.times for trial in result.trials),
        "failed": sum(trial.error is not None for trial in result.trials),
        "seconds": {part: round(elapsed_s, 3) for part, elapsed_s in result.seconds.items()},
        "curve": curve(result.trials),
        "winner": str(result.kernel.schedule),
    }


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Summarize the times of each method and operator relative to the long search.

    The summary is the median over problems of the medians over seeds.
    """
    messages = []
    short = [row for row in rows if "against" in row]
    kinds = dict.fromkeys((row["method"], row["problem"].partition(":")[0]) for row in short)
    for method, kind in kinds:
        by_problem: dict[tuple[str, str], list[float]] = {}
        for row in short:
            if (row["method"], row["problem"].partition(":")[0]) == (method, kind):
                by_problem.setdefault((row["matrix"], row["problem"]), []).append(row["against"]["ratio"])
        medians = [statistics.median(ratios) for ratios in by_problem.values()]
        messages.append(
            {
                "method": method,
                "operator": kind,
                "problems": len(medians),
                "searches": sum(map(len, by_problem.values())),
                "median": statistics.median(medians),
                "within": sum(median <= WITHIN for median in medians),
                "worst": max(medians),
            }
        )
    return messages


def make_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims of a record: short guided searches against a long search.

    A record of JSON lines is copied to `results/tuning/guided.json`.
    """
    rows, settings = record["rows"], record["settings"]
    samples = write_samples("tuning/guided.json", record)
    long = {(row["matrix"], row["problem"]): row for row in rows if not row["seed"]}
    summaries = {(line["method"], line["operator"]): line for line in summary(rows)}
    for (method, operator_name), line in summaries.items():
        if not method.startswith(GUIDED_PREFIX):
            continue
        unguided = summaries.get((method.removeprefix(GUIDED_PREFIX), operator_name))
        guided = [
            row
            for row in rows
            if row["seed"] and (row["method"], row["problem"].partition(":")[0]) == (method, operator_name)
        ]
        share = max(
            row["measurements"] / long[row["matrix"], row["problem"]]["measurements"] for row in guided
        )
        if share > 0.1:
            raise RunError(f"{method} took {share:.1%} of the measurements of the long search, more than 10%")
        yield Claim(
            id=f"tuning/4-{operator_name}-{method}",
            claim=f"Time of the {operator_name} schedule from {method} search over that of a search of "
            f"{settings['long']} schedules, median of {line['problems']} matrices.",
            value=round(line["median"], 3),
            unit="x",
            target="<= 1.05",
            baseline=f"{settings['long_method']} search, {settings['long']} schedules",
            command="python benchmarks/tuning/guided.py MATRICES --out RUN",
            samples=samples,
            details={
                "max_share_of_measurements": round(share, 4),
                "seeds": len({row["seed"] for row in guided}),
                "matrices_within_5_percent": line["within"],
                "worst": round(line["worst"], 3),
                **(
                    {
                        "without_model": round(unguided["median"], 3),
                        "searches_without_model": unguided["searches"],
                    }
                    if unguided
                    else {}
                ),
            },
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("matrices", type=Path, nargs="+")
    parser.add_argument("--problems", nargs="+", default=["spmm:64", "spmv"])
    parser.add_argument("--long", type=int, default=1000, help="schedules of the long search")
    parser.add_argument("--short", type=int, default=80, help="schedules of a short search")
    parser.add_argument("--long-method", default="evolutionary", help="method of the long search")
    parser.add_argument("--methods", nargs="+", default=["guided-evolutionary", "evolutionary"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--net", type=Path, help="network of the guided searches; by default the shipped one")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, required=True, help="JSON lines")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    settings = {name: getattr(args, name) for name in ("long", "short", "long_method", "threads")}
    settings["net"] = None if args.net is None else hashlib.sha256(args.net.read_bytes()).hexdigest()
    journal: Journal[dict[str, Any]]
    with Journal(args.out, dict) as journal:
        if not journal.rows:
            journal.append({"environment": collect_environment("cpu"), "settings": settings})
        elif (existing := journal.rows[0]["settings"]) != settings:
            raise RunError(f"{args.out} holds searches with {existing}; name another file")
        rows = journal.rows[1:]
        for label in args.problems:
            for path in sorted(args.matrices):
                name = parse_matrix_name(path)
                rows += compare(name, path, label, args, rows, journal)
    for line in summary(rows):
        print(json.dumps(line))
    return 0


def compare(
    name: str,
    path: Path,
    label: str,
    args: argparse.Namespace,
    rows: Sequence[dict[str, Any]],
    journal: Journal[dict[str, Any]],
) -> list[dict[str, Any]]:
    """Run the searches of one problem that have no row yet."""
    completed = {(row["method"], row["seed"], row["asked"]): row
            for row in rows if (row["matrix"], row["problem"]) == (name, label)}  # fmt: skip
    expected = [(args.long_method, 0, args.long)]
    expected += [(method, seed, args.short) for seed in range(1, args.seeds + 1) for method in args.methods]
    if all(build_preset in completed for build_preset in expected):
        return []
    kind, _, width = label.partition(":")
    matrix = read_matrix(path, dtype=np.float32)
    problem = SparseProblem(operator=get_operator(kind), matrix=matrix, n_cols=int(width) if width else None)
    presets = build_presets(problem.operator, problem.extents, args.threads)
    by_hand = {preset.canonicalize(problem.operator, problem.extents) for preset in presets.values()}
    added = []
    for method, seed, count in expected:
        if (method, seed, count) in completed:
            continue
        folder = args.out.parent / f"{args.out.stem}-trials" / f"{name} {label} {method} {seed} {count}"
        result = TuningSession(
            kind, matrix, n_cols=problem.n_cols, budget_s=math.inf, max_trials=count - len(by_hand),
            method=method, threads=args.threads, seed=seed, out_dir=folder,
            warm_start=False,
            prior=load_prior(args.net) if args.net and method.startswith(GUIDED_PREFIX) else None,
        ).run()  # fmt: skip
        row = {"matrix": name, "problem": label, "nnz": matrix.nnz, "shape": matrix.shape}
        row |= {"method": method, "seed": seed, "asked": count, "git": collect_environment("cpu")["git"]}
        row |= row_of(result)
        if seed:
            long = Schedule.parse(completed[expected[0]]["winner"])
            row["against"] = against(problem, Schedule.parse(row["winner"]), long)
        journal.append(row)
        completed[method, seed, count] = row
        added.append(row)
        messages = f"{row['against']['ratio']:.3f} of the long search's time" if seed else ""
        print(
            f"{name:32s} {label:9s} {method:20s} {seed} {row['measurements']:5d} measurements  {messages}",
            flush=True,
        )
    return added


if __name__ == "__main__":
    sys.exit(main())
