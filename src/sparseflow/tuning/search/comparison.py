"""Comparison of search methods with and without a cost model, with equally many measurements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

from sparseflow.core.artifact import Artifact
from sparseflow.core.progress import Progress
from sparseflow.core.report import Page, plot_before_after, plot_stacked_bars
from sparseflow.tuning.search.session import GUIDED_PREFIX, Prior, TuningSession

COMPARED_METHODS = ("random", "annealing", "qlearning")
"""Search methods of AutoSparse."""

_GOAL_TOLERANCE = 1.05
"""A search reaches its goal within 5 % of the best ratio of all searches of the problem."""


class SearchRecord(Artifact):
    """Result of one search.

    Attributes:
        problem: Name of matrix, operator and columns.
        method: Search method.
        ratios: Time over the reference's of every schedule in order; None for failures.
        seconds: Phase -> duration, seconds: "propose", "build", "compile", "measure", "rest".
    """

    FORMAT: ClassVar[str] = "sparseflow.tuning.search"
    VERSION: ClassVar[int] = 2
    HINT: ClassVar[str] = "remove the file to search again"

    problem: str
    method: str
    ratios: tuple[float | None, ...]
    seconds: Mapping[str, float]

    def best_ratios(self) -> list[float]:
        """Return the best ratio after each measurement; infinite before the first success."""
        return list(accumulate((math.inf if ratio is None else ratio for ratio in self.ratios), min))

    def count_until(self, goal: float) -> int | None:
        """Count the measurements until the best ratio is within 5 % of `goal`; None if it never is."""
        reached = (best <= _GOAL_TOLERANCE * goal for best in self.best_ratios())
        return next((count for count, is_reached in enumerate(reached, start=1) if is_reached), None)


def compare_searches(
    name: str,
    operator: str,
    matrix: Any,
    out_dir: Path | str,
    *,
    n_cols: int | None = None,
    methods: Sequence[str] = COMPARED_METHODS,
    max_trials: int = 100,
    prior: Prior | None = None,
    threads: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[SearchRecord]:
    """Run each search method with and without a cost model; finished searches are read from `out_dir`.

    Args:
        name: Matrix name.
        operator: `"spmm"`, `"spmv"` or `"sddmm"`.
        matrix: Matrix that `TuningSession` accepts.
        out_dir: Output directory with one JSON file for each search.
        n_cols: Columns of the dense operands; None for SpMV.
        methods: Search methods without a cost model.
        max_trials: Schedules that each search measures besides the baselines.
        prior: Initial scores of the guided searches; see `TuningSession`.
        threads: Number of threads; by default all CPUs.
        seed: Random seed.
        progress: Progress callback.

    Raises:
        FileFormatError: A file of `out_dir` is damaged.
        InputError, RunError: See `TuningSession`.
    """
    root = Path(out_dir)
    problem = f"{name}, {operator}" + ("" if n_cols is None else f", {n_cols} columns")
    all_methods = [variant for method in methods for variant in (method, GUIDED_PREFIX + method)]
    records = []
    for number, method in enumerate(all_methods, start=1):
        path = root / f"{name} {operator} {n_cols or ''} {method} {max_trials}.json"
        if not path.is_file():
            session = TuningSession(
                operator,
                matrix,
                n_cols=n_cols,
                max_trials=max_trials,
                budget_s=math.inf,
                method=method,
                prior=prior if method.startswith(GUIDED_PREFIX) else None,
                threads=threads,
                seed=seed,
            )
            result = session.run()
            SearchRecord(
                problem=problem,
                method=method,
                ratios=tuple(None if trial.error else trial.ratio for trial in result.trials),
                seconds=result.seconds,
            ).save(path)
        records.append(SearchRecord.load(path))
        if progress is not None:
            progress(f"{problem}: {method}", number / len(all_methods))
    return records


def add_searches(page: Page, records: Sequence[SearchRecord]) -> None:
    """Add a section for each problem: search time, convergence and time of each phase."""
    for problem in dict.fromkeys(record.problem for record in records):
        page.section(f"Searches: {problem}")
        _add_problem(page, [record for record in records if record.problem == problem])


def _add_problem(page: Page, searches: Sequence[SearchRecord]) -> None:
    methods = [record.method for record in searches]
    total_s = {record.method: sum(record.seconds.values()) for record in searches}
    pairs = [(method, GUIDED_PREFIX + method) for method in methods if GUIDED_PREFIX + method in total_s]
    if pairs:
        page.figure(
            plot_before_after(
                "Search time",
                [method for method, _ in pairs],
                [total_s[method] for method, _ in pairs],
                [total_s[guided] for _, guided in pairs],
                unit="s",
                names=("without the model", "with the model"),
            )
        )
    curves = {}
    for record in searches:
        ratios = record.best_ratios()
        counts = [count for count, ratio in enumerate(ratios, start=1) if math.isfinite(ratio)]
        curves[record.method] = (list(map(float, counts)), [ratios[count - 1] for count in counts])
    page.curves("Best schedule so far", curves, x="measured schedules", y="time / reference", log_x=True)
    phases = dict.fromkeys(phase for record in searches for phase in record.seconds)
    times = {phase: [record.seconds.get(phase, 0.0) for record in searches] for phase in phases}
    page.figure(plot_stacked_bars("Time of each search phase", methods, times, unit="s"))
    goal = min(record.best_ratios()[-1] for record in searches)
    rows = [
        {
            "method": record.method,
            "measured": len(record.ratios),
            "until_goal": record.count_until(goal),
            "best": record.best_ratios()[-1],
            "seconds": total_s[record.method],
        }
        for record in searches
    ]
    columns = {
        "method": "method",
        "measured": "schedules measured",
        "until_goal": "measured until within 5 % of the best",
        "best": "best time / reference",
        "seconds": "seconds",
    }
    page.table("Searches", rows, columns=columns, digits={"best": 3, "seconds": 1})
