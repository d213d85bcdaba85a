"""Searches that a cost model guides against a long one without it, on files of matrices (line 4).

::

    export PYTHONPATH=src
    python benchmarks/tuning/guided.py matrices/*.mtx.gz --out runs/guided/guided.jsonl

For every matrix and problem there is one search of `--measurements` without a model, and then for each seed
one with a model and, as a control, one without, with a tenth of the measurements. Schedules written by hand
are measured first in all of them, and count. The best few of each search are measured thoroughly; the fastest
of them is timed in turn with that of the long search, pair by pair.

A search that is done is a row of `--out`, and each of its measurements is kept in a folder beside it: the
same command goes on with what was stopped, even killed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sparseflow.core.environment import environment
from sparseflow.core.jsonl import LineWriter, read_lines
from sparseflow.errors import RunError
from sparseflow.tuning.costmodel import BoostedTrees
from sparseflow.tuning.evaluate import Evaluator, Trial, job_of
from sparseflow.tuning.features import Features
from sparseflow.tuning.matrices import read_matrix
from sparseflow.tuning.operators import operator
from sparseflow.tuning.presets import REFERENCE, presets
from sparseflow.tuning.problem import Problem
from sparseflow.tuning.program import build
from sparseflow.tuning.runner import measure
from sparseflow.tuning.schedule import Schedule
from sparseflow.tuning.search import Guided, Strategy, strategy
from sparseflow.tuning.space import Space
from sparseflow.tuning.trials import kept

WITHIN = 1.05
"""As fast as the long search: at most this many times its winner's time."""

SHARE = 10
"""A short search has so many times fewer measurements."""

FINALISTS = 4
PAIRS = 60
TRIES = 3
"""Times that a pair of kernels is measured where others disturb it."""

REPEATS = 200
"""Proposals in a row that were measured before, after which a search has found all there is."""


def begun(method: str, problem: Problem, threads: int, seed: Sequence[int]) -> Strategy:
    chosen = strategy(method)
    space = Space(problem.operator, problem.extents, threads=sorted({1, threads}))
    rng = np.random.default_rng(seed)
    if issubclass(chosen, Guided):
        return chosen(space, rng, BoostedTrees(Features(problem, threads)))
    return chosen(space, rng)


def search(
    problem: Problem, evaluator: Evaluator, method: str, seed: int, count: int, threads: int, folder: Path
) -> list[Trial]:
    """So many trials, each with the seconds that its proposal took as the part "propose"."""
    extents = problem.extents
    by_hand = presets(problem.operator, extents, threads).values()
    waiting = list(dict.fromkeys(each.canonical(problem.operator, extents) for each in by_hand))
    facts = {
        "operator": problem.operator.name, "extents": dict(extents), "dtype": str(problem.dtype),
        "pattern": problem.matrix.digest(values=False), "threads": threads, "method": method, "seed": seed,
    }  # fmt: skip
    with kept(folder, problem, facts) as log:
        assert log is not None
        found = {trial.schedule: trial for trial in log.trials}
        # Going on, it must not propose once more what it proposed before.
        walk = begun(method, problem, threads, [seed, len(found)])
        for trial in found.values():
            walk.tell(trial)
        again = 0
        while len(found) < count and again < REPEATS:
            begin = time.perf_counter()
            schedule = waiting.pop(0) if waiting else walk.ask().canonical(problem.operator, extents)
            took = time.perf_counter() - begin
            if schedule in found:
                again += 1
                continue
            again = 0
            trial = evaluator.measure(schedule)
            begin = time.perf_counter()
            walk.tell(trial)
            took += time.perf_counter() - begin
            found[schedule] = trial = replace(trial, seconds={**trial.seconds, "propose": took})
            log.write(trial)
    return list(found.values())


def winner(evaluator: Evaluator, trials: Iterable[Trial]) -> Schedule:
    """The fastest when the best few are measured thoroughly."""
    best = sorted((trial for trial in trials if trial.error is None), key=lambda one: one.ratio)[:FINALISTS]
    again = [evaluator.measure(trial.schedule, thorough=True) for trial in best]
    first = min(again, key=lambda one: one.ratio)
    if first.error is not None:
        raise RunError(f"no winner ran when it was measured again: {first.error}")
    return first.schedule


def against(evaluator: Evaluator, schedule: Schedule, other: Schedule) -> dict[str, Any]:
    """The time of a schedule over another's, in pairs."""
    if schedule == other:
        return {"ratio": 1.0, "pairs": [], "disturbed": False, "attempts": 0}
    one, two = (job_of(build(evaluator.problem, each), evaluator.inputs) for each in (schedule, other))
    attempts = 0
    while True:
        attempts += 1
        found = measure(one, two, repeats=PAIRS, min_time_s=0.3, max_time_s=3.0)
        if found.error is not None:
            raise RunError(f"a winner failed: {found.error}; it is {schedule} or {other}")
        disturbed = found.contended or found.drifted
        if attempts >= TRIES or not disturbed:
            break
    pairs = [a / b for a, b in zip(found.latency_ms, found.reference_ms, strict=True)]
    return {
        "ratio": statistics.median(pairs),
        "pairs": [round(pair, 4) for pair in pairs],
        "disturbed": disturbed,
        "attempts": attempts,
    }


def curve(trials: Iterable[Trial]) -> list[list[float]]:
    """Wherever a search found a better one: measurements, seconds so far, its ratio to the reference."""
    points: list[list[float]] = []
    seconds = 0.0
    for number, trial in enumerate(trials, start=1):
        seconds += sum(trial.seconds.values())
        if trial.error is None and (not points or trial.ratio < points[-1][2]):
            points.append([number, round(seconds, 3), round(trial.ratio, 5)])
    return points


def row_of(trials: Sequence[Trial], found: Schedule) -> dict[str, Any]:
    seconds: dict[str, float] = {}
    for trial in trials:
        for part, took in trial.seconds.items():
            seconds[part] = seconds.get(part, 0.0) + took
    return {
        "measurements": len(trials),
        "failed": sum(trial.error is not None for trial in trials),
        "seconds": {part: round(took, 3) for part, took in seconds.items()},
        "curve": curve(trials),
        "winner": str(found),
    }


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each way to search: its winners' times over the long search's, over seeds and then over problems."""
    told = []
    short = [row for row in rows if "against" in row]
    for method in dict.fromkeys(row["method"] for row in short):
        by_problem: dict[tuple[str, str], list[float]] = {}
        for row in short:
            if row["method"] == method:
                by_problem.setdefault((row["matrix"], row["problem"]), []).append(row["against"]["ratio"])
        medians = [statistics.median(ratios) for ratios in by_problem.values()]
        told.append(
            {
                "method": method,
                "problems": len(medians),
                "searches": sum(map(len, by_problem.values())),
                "median": statistics.median(medians),
                "within": statistics.mean(median <= WITHIN for median in medians),
            }
        )
    return told


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("matrices", type=Path, nargs="+")
    parser.add_argument("--problems", nargs="+", default=["spmm:64", "spmv"])
    parser.add_argument("--measurements", type=int, default=1000, help="of the long search")
    parser.add_argument("--long", default="evolutionary", help="how the long search is done")
    parser.add_argument("--methods", nargs="+", default=["guided-evolutionary", "evolutionary"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, required=True, help="JSON lines")
    asked = parser.parse_args()
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    settings = {name: getattr(asked, name) for name in ("measurements", "long", "threads")}
    writer = LineWriter(asked.out)
    try:
        rows = read_lines(asked.out)
        if not rows:
            writer.write({"environment": environment("cpu"), "settings": settings})
        elif rows[0]["settings"] != settings:
            raise RunError(f"{asked.out} holds searches with {rows[0]['settings']}; name another file")
        rows = rows[1:]
        for path in sorted(asked.matrices):
            name = path.name.removesuffix(".gz").removesuffix(".mtx")
            for label in asked.problems:
                rows += compare(name, path, label, asked, rows, writer)
    finally:
        writer.close()
    for line in summary(rows):
        print(json.dumps(line))
    return 0


def compare(
    name: str,
    path: Path,
    label: str,
    asked: argparse.Namespace,
    rows: Sequence[dict[str, Any]],
    writer: LineWriter,
) -> list[dict[str, Any]]:
    """All searches of one problem that are not among the rows yet."""
    done = {(row["method"], row["seed"], row["measurements_asked"]): row
            for row in rows if (row["matrix"], row["problem"]) == (name, label)}  # fmt: skip
    few = asked.measurements // SHARE
    wanted = [(asked.long, 0, asked.measurements)]
    wanted += [(method, seed, few) for seed in range(1, asked.seeds + 1) for method in asked.methods]
    if all(each in done for each in wanted):
        return []
    kind, _, width = label.partition(":")
    matrix = read_matrix(path, dtype=np.float32)
    problem = Problem(operator=operator(kind), matrix=matrix, n_cols=int(width) if width else None)
    reference = presets(problem.operator, problem.extents, asked.threads)[REFERENCE[kind]]
    added = []
    with Evaluator(problem, reference) as evaluator:
        for method, seed, count in wanted:
            if (method, seed, count) in done:
                continue
            folder = asked.out.parent / f"{asked.out.stem}-trials" / f"{name} {label} {method} {seed} {count}"
            trials = search(problem, evaluator, method, seed, count, asked.threads, folder)
            found = winner(evaluator, trials)
            row = {"matrix": name, "problem": label, "nnz": matrix.nnz, "shape": matrix.shape}
            row |= {"method": method, "seed": seed, "measurements_asked": count, **row_of(trials, found)}
            if seed:
                long = Schedule.parse(done[wanted[0]]["winner"])
                row["against"] = against(evaluator, found, long)
            writer.write(row)
            done[method, seed, count] = row
            added.append(row)
            told = f"{row['against']['ratio']:.3f} of the long search's time" if seed else ""
            print(
                f"{name:32s} {label:9s} {method:20s} {seed} {len(trials):5d} measurements  {told}", flush=True
            )
    return added


if __name__ == "__main__":
    sys.exit(main())
