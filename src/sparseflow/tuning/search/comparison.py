"""Comparison of search methods with and without a cost model, with equally many measurements."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparseflow.core.files import write_atomic
from sparseflow.core.progress import Progress
from sparseflow.core.report import Page, plot_before_after, plot_curves, plot_stacked_bars
from sparseflow.errors import FileFormatError
from sparseflow.tuning.search.guided import GUIDED_PREFIX
from sparseflow.tuning.search.session import Prior, TuningSession

METHODS = ("random", "annealing", "qlearning")
"""Search methods of AutoSparse."""

_GOAL_TOLERANCE = 1.05
"""A search reaches its goal within 5 % of the best ratio of all searches of the problem."""


@dataclass(frozen=True, kw_only=True)
class SearchRecord:
    """Result of one search.

    Attributes:
        problem: Name of matrix, operator and columns.
        method: Search method.
        ratios: Time over the reference's of every schedule in order; None for failures.
        seconds: Phase -> duration, seconds: "propose", "build", "compile", "measure", "rest".
    """

    problem: str
    method: str
    ratios: tuple[float | None, ...]
    seconds: Mapping[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types."""
        return {**vars(self), "ratios": list(self.ratios), "seconds": dict(self.seconds)}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> SearchRecord:
        """Create a record from the result of `to_dict`. Raises KeyError, TypeError or ValueError for other
        content.
        """
        return cls(
            problem=str(record["problem"]),
            method=str(record["method"]),
            ratios=tuple(None if ratio is None else float(ratio) for ratio in record["ratios"]),
            seconds={str(part): float(elapsed_s) for part, elapsed_s in record["seconds"].items()},
        )

    def best_ratios(self) -> list[float]:
        """Return the best ratio after each measurement; infinite before the first success."""
        best_ratios, best = [], float("inf")
        for ratio in self.ratios:
            best = min(best, float("inf") if ratio is None else ratio)
            best_ratios.append(best)
        return best_ratios

    def count_until(self, goal: float) -> int | None:
        """Count the measurements until the best ratio is within 5 % of `goal`; None if it never is."""
        return next(
            (
                count
                for count, best in enumerate(self.best_ratios(), start=1)
                if best <= _GOAL_TOLERANCE * goal
            ),
            None,
        )


def compare_searches(
    name: str,
    operator: str,
    matrix: Any,
    out_dir: Path | str,
    *,
    n_cols: int | None = None,
    methods: Sequence[str] = METHODS,
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
    root.mkdir(parents=True, exist_ok=True)
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
            record = SearchRecord(
                problem=problem,
                method=method,
                ratios=tuple(None if trial.error else trial.ratio for trial in result.trials),
                seconds=result.seconds,
            )
            write_atomic(path, json.dumps(record.to_dict()))
        records.append(read_search_record(path))
        if progress is not None:
            progress(f"{problem}: {method}", number / len(all_methods))
    return records


def read_search_record(path: Path) -> SearchRecord:
    """Read a record from its file. Raises FileFormatError if it is damaged."""
    try:
        return SearchRecord.from_dict(json.loads(path.read_bytes()))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FileFormatError(f"{path} is not a search record ({error}); remove it") from error


def add_searches(page: Page, records: Sequence[SearchRecord]) -> None:
    """Add a section for each problem: search time, convergence and time of each phase."""
    for problem in dict.fromkeys(record.problem for record in records):
        page.section(f"Searches: {problem}")
        searches = [record for record in records if record.problem == problem]
        goal = min(record.best_ratios()[-1] for record in searches)
        by_method = {record.method: record for record in searches}
        pairs = [
            (record, by_method[GUIDED_PREFIX + record.method])
            for record in searches
            if GUIDED_PREFIX + record.method in by_method
        ]
        if pairs:
            page.figure(
                plot_before_after(
                    "Search time",
                    [unguided.method for unguided, _ in pairs],
                    [sum(unguided.seconds.values()) for unguided, _ in pairs],
                    [sum(guided.seconds.values()) for _, guided in pairs],
                    unit="s",
                    names=("without the model", "with the model"),
                )
            )
        curves = {}
        for record in searches:
            points = [
                (float(count), ratio)
                for count, ratio in enumerate(record.best_ratios(), start=1)
                if math.isfinite(ratio)
            ]
            curves[record.method] = ([x for x, _ in points], [y for _, y in points])
        page.figure(
            plot_curves(
                "Best schedule so far",
                curves,
                x="measured schedules",
                y="time / reference",
                log_x=True,
            )
        )
        phases = dict.fromkeys(phase for record in searches for phase in record.seconds)
        page.figure(
            plot_stacked_bars(
                "Time of each search phase",
                [record.method for record in searches],
                {phase: [record.seconds.get(phase, 0.0) for record in searches] for phase in phases},
                unit="s",
            )
        )
        rows = [
            {
                "method": record.method,
                "measured": len(record.ratios),
                "until_goal": record.count_until(goal),
                "best": record.best_ratios()[-1],
                "seconds": sum(record.seconds.values()),
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
