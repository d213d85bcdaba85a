"""Comparison of search methods with and without a cost model, with equally many measurements."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import geometric_mean
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from sparseflow.core.artifact import Artifact
from sparseflow.core.progress import Progress
from sparseflow.core.report import Page, plot_before_after, plot_stacked_bars
from sparseflow.tuning.search.methods import DEFAULT_METHOD, GUIDED_PREFIX, Prior
from sparseflow.tuning.search.session import TuningSession

COMPARED_METHODS = ("evolutionary", "random", "annealing", "qlearning")
"""The method of the default search, and the search methods of AutoSparse."""

_GOAL_TOLERANCE = 1.05
"""A ratio within 5 % of another one is as good."""

_MEASURE_PHASES = ("measure", "rerank")
"""Phases of a session that measure: the search, and the final measurement of the best schedules."""


class SearchRecord(Artifact):
    """Result of one search.

    Attributes:
        problem: Name of matrix, operator and columns.
        method: Search method.
        ratios: Time over the reference's of every schedule in order; None for failures.
        elapsed_s: Seconds from the start of the session to the end of each measurement.
        seconds: Phase -> duration, seconds: "propose", "build", "compile", "measure", "rerank", "other".
    """

    FORMAT: ClassVar[str] = "sparseflow.tuning.search"
    VERSION: ClassVar[int] = 4
    HINT: ClassVar[str] = "remove the file to search again"

    problem: str
    method: str
    ratios: tuple[float | None, ...]
    elapsed_s: tuple[float, ...]
    seconds: Mapping[str, float]

    def best_ratios(self) -> list[float]:
        """Return the best ratio after each measurement; infinite before the first success."""
        return list(accumulate((math.inf if ratio is None else ratio for ratio in self.ratios), min))

    def count_until(self, goal: float) -> int | None:
        """Count the measurements until a ratio is as good as `goal`; None if none is."""
        reached = (best <= _GOAL_TOLERANCE * goal for best in self.best_ratios())
        return next((count for count, is_reached in enumerate(reached, start=1) if is_reached), None)

    def compute_time_until(self, goal: float) -> float | None:
        """Return the seconds until a ratio is as good as `goal`; None if none is."""
        count = self.count_until(goal)
        return None if count is None else self.elapsed_s[count - 1]

    def sum_phases(self) -> dict[str, float]:
        """Return the duration of each phase; the final measurement is part of "measure"."""
        phases = {phase: duration_s for phase, duration_s in self.seconds.items() if phase != "rerank"}
        return phases | {"measure": sum(self.seconds.get(phase, 0.0) for phase in _MEASURE_PHASES)}


@dataclass(frozen=True, kw_only=True)
class ModelGain:
    """Cost of a search method with and without a cost model, until both are as good.

    The goal is the worse of the two best ratios, so both searches reach it.

    Attributes:
        method: Search method without a cost model.
        counts: Measurements without and with the model, including the hand-written schedules.
        seconds: Seconds without and with the model.
    """

    method: str
    counts: tuple[int, int]
    seconds: tuple[float, float]

    @property
    def factor(self) -> float:
        """How many times fewer measurements the model needs."""
        return self.counts[0] / self.counts[1]


def compute_gains(records: Sequence[SearchRecord]) -> list[ModelGain]:
    """Compare the searches of one problem with and without a model; methods with only one are left out."""
    methods = {record.method: record for record in records}
    gains = []
    for method, plain in methods.items():
        guided = methods.get(GUIDED_PREFIX + method)
        if guided is None:
            continue
        goal = max(plain.best_ratios()[-1], guided.best_ratios()[-1])
        counts = plain.count_until(goal), guided.count_until(goal)
        if math.isfinite(goal) and counts[0] is not None and counts[1] is not None:
            seconds = plain.elapsed_s[counts[0] - 1], guided.elapsed_s[counts[1] - 1]
            gains.append(ModelGain(method=method, counts=(counts[0], counts[1]), seconds=seconds))
    return gains


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
            prior_of_method = prior if method.startswith(GUIDED_PREFIX) else None
            options = {"n_cols": n_cols, "max_trials": max_trials, "threads": threads, "seed": seed}
            _run_search(problem, operator, matrix, method=method, prior=prior_of_method, **options).save(path)
        records.append(SearchRecord.load(path))
        if progress is not None:
            progress(f"{problem}: {method}", number / len(all_methods))
    return records


def _run_search(problem: str, operator: str, matrix: Any, **options: Any) -> SearchRecord:
    elapsed_s: list[float] = []
    start_s = time.monotonic()
    # Code that another search has compiled would make this one faster.
    with TemporaryDirectory() as cache_dir:
        session = TuningSession(
            operator,
            matrix,
            budget_s=math.inf,
            cache_dir=Path(cache_dir),
            warm_start=False,
            # Called after each measurement, and once before the final measurement.
            progress=lambda *_: elapsed_s.append(time.monotonic() - start_s),
            **options,
        )
        result = session.run()
    return SearchRecord(
        problem=problem,
        method=options["method"],
        ratios=tuple(None if trial.error else trial.ratio for trial in result.trials),
        elapsed_s=tuple(elapsed_s[: len(result.trials)]),
        seconds=result.seconds,
    )


def add_searches(page: Page, records: Sequence[SearchRecord]) -> None:
    """Add a section for each problem: time until as good, convergence and time of each phase."""
    factors = []
    for problem in dict.fromkeys(record.problem for record in records):
        searches = sorted((record for record in records if record.problem == problem), key=_sort_key)
        gains = compute_gains(searches)
        factors += [gain.factor for gain in gains if GUIDED_PREFIX + gain.method == DEFAULT_METHOD]
        page.section(f"Searches: {problem}", *map(_describe_gain, gains))
        _add_problem(page, searches, gains)
    if factors:
        factor = geometric_mean(factors)
        page.headline(
            f"{factor:.2g}×",
            "fewer measurements with the model",
            note=f"{DEFAULT_METHOD}, geometric mean over {len(factors)} problems",
            tone="good" if factor > 1.0 else "bad",
        )


def _sort_key(record: SearchRecord) -> tuple[bool, str, bool]:
    """Sort the method of the default search first, and the two searches of a method together."""
    method = record.method.removeprefix(GUIDED_PREFIX)
    return GUIDED_PREFIX + method != DEFAULT_METHOD, method, record.method != method


def _describe_gain(gain: ModelGain) -> str:
    (before, after), (before_s, after_s) = gain.counts, gain.seconds
    return (
        f"{gain.method}: {after} measurements with the model are as good as {before} without it, "
        f"{gain.factor:.1f} times fewer; they take {after_s:.1f} s instead of {before_s:.1f} s."
    )


def _add_problem(page: Page, searches: Sequence[SearchRecord], gains: Sequence[ModelGain]) -> None:
    if gains:
        page.figure(
            plot_before_after(
                "Time until as good",
                [gain.method for gain in gains],
                [gain.seconds[0] for gain in gains],
                [gain.seconds[1] for gain in gains],
                unit="s",
                names=("without the model", "with the model"),
                caption="Seconds until within 5 % of the best schedule that the method finds both with and "
                "without the model.",
            )
        )
    by_count, by_time = {}, {}
    for record in searches:
        points = [
            (float(count), elapsed_s, ratio)
            for count, (elapsed_s, ratio) in enumerate(
                zip(record.elapsed_s, record.best_ratios(), strict=True), start=1
            )
            if math.isfinite(ratio)
        ]
        ratios = [ratio for _, _, ratio in points]
        by_count[record.method] = ([count for count, _, _ in points], ratios)
        by_time[record.method] = ([elapsed_s for _, elapsed_s, _ in points], ratios)
    for title, curves, x in (
        ("Best schedule so far, by measurements", by_count, "measured schedules"),
        ("Best schedule so far, by time", by_time, "seconds"),
    ):
        page.curves(title, curves, x=x, y="time / reference", log_x=True)
    phases = [record.sum_phases() for record in searches]
    names = dict.fromkeys(name for durations in phases for name in durations)
    page.figure(
        plot_stacked_bars(
            "Time of each search phase",
            [record.method for record in searches],
            {name: [durations.get(name, 0.0) for durations in phases] for name in names},
            unit="s",
            remainder="other",
            caption="All searches measure equally many schedules. 'measure' includes the final measurement "
            "of the best schedules.",
        )
    )
    goal = min(record.best_ratios()[-1] for record in searches)
    factors = {GUIDED_PREFIX + gain.method: gain.factor for gain in gains}
    rows = [
        {
            "method": record.method,
            "measured": len(record.ratios),
            "factor": factors.get(record.method),
            "until_goal": record.count_until(goal),
            "until_s": record.compute_time_until(goal),
            "best": record.best_ratios()[-1],
            "seconds": sum(record.seconds.values()),
        }
        for record in searches
    ]
    columns = {
        "method": "method",
        "measured": "schedules measured",
        "factor": "times fewer than without the model until as good",
        "until_goal": "measured until within 5 % of the best of all",
        "until_s": "seconds until then",
        "best": "best time / reference",
        "seconds": "seconds",
    }
    page.table("Searches", rows, columns=columns, digits={"factor": 1, "until_s": 1, "best": 3, "seconds": 1})
