"""The page of an evaluation: loss curves, rankings, and what the model saves a search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from sparseflow.core.metrics import bootstrap_mean
from sparseflow.core.report import (
    Column,
    Figure,
    Report,
    Section,
    Table,
    plot_before_after,
    plot_curves,
    plot_intervals,
    plot_stacked_bars,
)
from sparseflow.core.training.history import read_history, smooth_curve
from sparseflow.tuning.model.comparison import BOOSTED, Row, read_study, training
from sparseflow.tuning.model.ranking import TOP, summary
from sparseflow.tuning.search.comparison import Searched, read_searched
from sparseflow.tuning.search.guided import GUIDED

PAGE = "report.html"
SCORES = "scores.json"
"""What the page tells, for programs."""

SEARCHES = "searches"
"""Folder of a study that `compare_searches` fills."""


def write_page(
    folder: Path | str, *, environment: Mapping[str, Any] | None = None, reproduce: str = ""
) -> Path:
    """Write `report.html` into a study's folder; gives its path.

    Args:
        folder: What `study` filled, and perhaps `compare_searches`.
        environment: Circumstances, as `core.environment` writes them.
        reproduce: The command line that makes this page again.

    Raises:
        InputError: The folder holds no study.
        FileFormatError: A file in it is damaged.
    """
    root = Path(folder)
    rows = read_study(root)
    searched = [read_searched(path) for path in sorted((root / SEARCHES).glob("*.json"))]
    sections = [_rankings(rows), *_losses(root, rows), *_searches(searched)]
    page = Report(
        title="AutoSparse Net: how well it ranks, and what that saves",
        summary=f"{len({row.entry for row in rows})} models, judged on families of matrices they never saw.",
        sections=sections,
        environment=environment or {},
        reproduce=reproduce,
    )
    return page.write(root / PAGE)


def scores(rows: Sequence[Row], *, known: bool = False) -> list[dict[str, Any]]:
    """A line for each model and operator: `judge.summary` over all folds and seeds.

    With `"over_boosted"`, for each k how much higher a model's top-k score is than that of boosted trees: the
    difference of means over seeds, its mean over matrices and that one's interval; None without trees.

    Args:
        rows: Of a study.
        known: Whether to look only at matrices whose pattern is known.
    """
    found = []
    trees: dict[str, dict[str, dict[int, float]]] = {}
    entries = dict.fromkeys(row.entry for row in rows)
    for entry in sorted(entries, key=lambda name: not name.startswith(BOOSTED)):
        judged = [one for row in rows if row.entry == entry for one in row.judged if one.known or not known]
        for operator in dict.fromkeys(one.operator for one in judged):
            those = [one for one in judged if one.operator == operator]
            means = {
                matrix: {k: mean(one.top_k[k] for one in those if one.matrix == matrix) for k in TOP}
                for matrix in dict.fromkeys(one.matrix for one in those)
            }
            if entry == f"{BOOSTED}_{operator}":
                trees[operator] = means
            over = None
            if trees.get(operator, {}).keys() >= means.keys():
                gains = {k: [means[name][k] - trees[operator][name][k] for name in means] for k in TOP}
                ends = {k: bootstrap_mean(gains[k]) for k in TOP}
                over = {
                    f"top{k}": {"mean": mean(gains[k]), "low": ends[k][0], "high": ends[k][1]} for k in TOP
                }
            found.append({"model": entry, "operator": operator, **summary(those), "over_boosted": over})
    return found


def _rankings(rows: Sequence[Row]) -> Section:
    lines = scores(rows)
    figures: list[Table | Figure] = [
        plot_intervals(
            f"Top-{k} score",
            [f"{line['model']}, {line['operator']}" for line in lines],
            [line[f"top{k}"]["mean"] for line in lines],
            [line[f"top{k}"]["low"] for line in lines],
            [line[f"top{k}"]["high"] for line in lines],
            unit=f"best latency of the pool / best among the {k} ranked highest",
            caption="Mean over tasks, with 95 % bootstrap intervals over matrices.",
        )
        for k in TOP[:2]
    ]
    seeds = len({row.seed for row in rows})
    told = "" if seeds == 1 else f" Every network was trained {seeds} times; scores are means over that, too."
    return Section(
        title="Rankings of held-out matrices",
        text=[
            "A model ranks all labelled schedules of a task, its pool. Its top-k score is the best true "
            "latency of the pool over the best true latency among the k that it ranks highest; 1 is perfect. "
            "Beside it stands what a random pick of k from the same pool is expected to get." + told
        ],
        items=[
            *figures,
            _table("Scores", lines),
            _table("Scores on matrices whose pattern is known", scores(rows, known=True)),
        ],
    )


def _table(title: str, lines: Sequence[Mapping[str, Any]]) -> Table:
    columns = [
        Column(key="model", title="model"),
        Column(key="operator", title="operator"),
        Column(key="matrices", title="matrices"),
        Column(key="pool", title="schedules in a pool", digits=0),
        *(
            Column(key=f"top{k}{part}", title=f"top-{k}{told}", digits=3)
            for k in TOP
            for part, told in (("", ""), ("_low", " from"), ("_high", " to"), ("_random", ", random pick"))
        ),
        *(
            Column(key=f"over{k}{part}", title=f"top-{k} over boosted trees{told}", digits=3)
            for k in TOP
            for part, told in (("", ""), ("_low", " from"), ("_high", " to"))
        ),
        Column(key="pairs", title="pairs in order", digits=3),
    ]
    shown = []
    for line in lines:
        row = {key: line[key] for key in ("model", "operator", "matrices", "pool")}
        for k in TOP:
            for part in ("mean", "low", "high", "random"):
                row[f"top{k}{'' if part == 'mean' else f'_{part}'}"] = line[f"top{k}"][part]
            for part in ("mean", "low", "high"):
                over = line["over_boosted"]
                row[f"over{k}{'' if part == 'mean' else f'_{part}'}"] = over and over[f"top{k}"][part]
        shown.append(row | {"pairs": line["pair_accuracy"]["mean"]})
    return Table(title=title, columns=columns, rows=shown)


def _losses(root: Path, rows: Sequence[Row]) -> list[Section]:
    """Losses of the first fold of every network, in training and on what it held out."""
    kinds = {"train": "Loss in training", "held_out": "Loss on what is held out"}
    found: dict[str, dict[str, tuple[list[float], list[float]]]] = {kind: {} for kind in kinds}
    for entry in dict.fromkeys(row.entry for row in rows):
        folder = training(root, entry, 0, 0)
        lines = list(read_history(folder)) if folder.is_dir() else []
        for kind in kinds:
            curve = smooth_curve((line for line in lines if line.get("kind") == kind), "loss")
            if curve[0]:
                found[kind][entry] = curve
    items = [
        plot_curves(
            title,
            found[kind],
            x="step",
            y="loss",
            caption="Margin, rank and LambdaRank losses have scales of their own.",
        )
        for kind, title in kinds.items()
        if found[kind]
    ]
    return [Section(title="Losses", items=items)] if items else []


def _searches(found: Sequence[Searched]) -> list[Section]:
    sections = []
    for problem in dict.fromkeys(one.problem for one in found):
        those = [one for one in found if one.problem == problem]
        goal = min(one.best()[-1] for one in those)
        plain = [one for one in those if GUIDED + one.method in {other.method for other in those}]
        guided = {one.method.removeprefix(GUIDED): one for one in those if one.method.startswith(GUIDED)}
        items: list[Table | Figure] = []
        if plain:
            items.append(
                plot_before_after(
                    "Seconds of search",
                    [one.method for one in plain],
                    [sum(one.seconds.values()) for one in plain],
                    [sum(guided[one.method].seconds.values()) for one in plain],
                    unit="s",
                    names=("without the model", "with it"),
                )
            )
        converged = {
            one.method: ([float(at) for at in range(1, len(one.ratios) + 1)], one.best()) for one in those
        }
        items.append(
            plot_curves(
                "Best schedule so far",
                {
                    name: (
                        [x for x, y in zip(*both, strict=True) if y < float("inf")],
                        [y for y in both[1] if y < float("inf")],
                    )
                    for name, both in converged.items()
                },
                x="schedules measured",
                y="time over the reference's",
                log_x=True,
            )
        )
        parts = dict.fromkeys(part for one in those for part in one.seconds)
        items.append(
            plot_stacked_bars(
                "Where search time goes",
                [one.method for one in those],
                {part: [one.seconds.get(part, 0.0) for one in those] for part in parts},
                unit="s",
            )
        )
        items.append(
            Table(
                title="Searches",
                columns=[
                    Column(key="method", title="method"),
                    Column(key="measured", title="schedules measured"),
                    Column(key="arrived", title="measured until within 5 % of the best"),
                    Column(key="best", title="best over reference", digits=3),
                    Column(key="seconds", title="seconds", digits=1),
                ],
                rows=[
                    {
                        "method": one.method,
                        "measured": len(one.ratios),
                        "arrived": one.arrived(goal),
                        "best": one.best()[-1],
                        "seconds": sum(one.seconds.values()),
                    }
                    for one in those
                ],
            )
        )
        sections.append(Section(title=f"Searches: {problem}", items=items))
    return sections
