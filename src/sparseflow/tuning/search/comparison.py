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
from sparseflow.tuning.search.methods import GUIDED_PREFIX, Prior
from sparseflow.tuning.search.session import TuningSession

COMPARED_METHODS = ("evolutionary", "random", "annealing", "qlearning")
"""The method of the default search, and the search methods of AutoSparse."""

_GOAL_TOLERANCE = 1.05
"""A search reaches its goal within 5 % of the best ratio of all searches of the problem."""


class SearchRecord(Artifact):
    """Result of one search.

    Attributes:
        problem: Name of matrix, operator and columns.
        method: Search method.
        ratios: Time over the reference's of every schedule in order; None for failures.
        trial_s: Duration of each measurement, with building and compiling, seconds.
        seconds: Phase -> duration, seconds: "propose", "build", "compile", "measure", "rerank", "other".
    """

    FORMAT: ClassVar[str] = "sparseflow.tuning.search"
    VERSION: ClassVar[int] = 3
    HINT: ClassVar[str] = "remove the file to search again"

    problem: str
    method: str
    ratios: tuple[float | None, ...]
    trial_s: tuple[float, ...]
    seconds: Mapping[str, float]

    def best_ratios(self) -> list[float]:
        """Return the best ratio after each measurement; infinite before the first success."""
        return list(accumulate((math.inf if ratio is None else ratio for ratio in self.ratios), min))

    def count_until(self, goal: float) -> int | None:
        """Count the measurements until the best ratio is within 5 % of `goal`; None if it never is."""
        reached = (best <= _GOAL_TOLERANCE * goal for best in self.best_ratios())
        return next((count for count, is_reached in enumerate(reached, start=1) if is_reached), None)

    def compute_time_until(self, goal: float) -> float | None:
        """Return the seconds until the best ratio is within 5 % of `goal`; None if it never is.

        Proposals count with the mean time of a proposal.
        """
        count = self.count_until(goal)
        if count is None:
            return None
        return sum(self.trial_s[:count]) + self.seconds.get("propose", 0.0) * count / len(self.ratios)


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
                warm_start=False,
            )
            result = session.run()
            SearchRecord(
                problem=problem,
                method=method,
                ratios=tuple(None if trial.error else trial.ratio for trial in result.trials),
                trial_s=tuple(sum(trial.seconds.values()) for trial in result.trials),
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
    methods = {record.method: record for record in searches}
    goal = min(record.best_ratios()[-1] for record in searches)
    until_s = {method: record.compute_time_until(goal) for method, record in methods.items()}
    pairs = {
        method: (plain_s, guided_s)
        for method, plain_s in until_s.items()
        if plain_s is not None and (guided_s := until_s.get(GUIDED_PREFIX + method)) is not None
    }
    if pairs:
        page.figure(
            plot_before_after(
                "Time until within 5 % of the best schedule",
                list(pairs),
                [plain_s for plain_s, _ in pairs.values()],
                [guided_s for _, guided_s in pairs.values()],
                unit="s",
                names=("without the model", "with the model"),
                caption="Methods that reach it both with and without the model.",
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
    page.figure(
        plot_stacked_bars(
            "Time of each search phase",
            list(methods),
            times,
            unit="s",
            remainder="other",
            caption="'rerank' measures the best schedules again, in turns.",
        )
    )
    rows = [
        {
            "method": record.method,
            "measured": len(record.ratios),
            "until_goal": record.count_until(goal),
            "factor": _compute_factor(methods, record, goal),
            "until_s": until_s[record.method],
            "best": record.best_ratios()[-1],
            "seconds": sum(record.seconds.values()),
        }
        for record in searches
    ]
    columns = {
        "method": "method",
        "measured": "schedules measured",
        "until_goal": "measured until within 5 % of the best",
        "factor": "times fewer than without the model",
        "until_s": "seconds until then",
        "best": "best time / reference",
        "seconds": "seconds",
    }
    page.table("Searches", rows, columns=columns, digits={"factor": 1, "until_s": 1, "best": 3, "seconds": 1})


def _compute_factor(methods: Mapping[str, SearchRecord], record: SearchRecord, goal: float) -> float | None:
    """Return how many times fewer measurements a guided search needs; None if one of the two misses."""
    plain = methods.get(record.method.removeprefix(GUIDED_PREFIX))
    if plain is None or plain is record:
        return None
    before, after = plain.count_until(goal), record.count_until(goal)
    return None if before is None or after is None else before / after
