"""Figures of a study: plans by latency and accuracy, policies by budget, and coverage of predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparseflow.core.report import (
    Figure,
    from_matplotlib,
    plot_curves,
    plot_intervals,
    plot_predicted_vs_measured,
)
from sparseflow.core.report.figures import open_axes, set_plain_log_ticks
from sparseflow.core.report.svg import AFTER, BEFORE, GRID, INK, MUTED, PAPER

Row = Mapping[str, Any]

_MAX_LABELS = 24
"""Maximum number of plans with a label."""


def select_front(plans: Sequence[Row]) -> list[Row]:
    """Plans on the Pareto front, fastest first."""
    return sorted((row for row in plans if row["front"]), key=lambda row: row["p50_ms"])


def plot_plans(plans: Sequence[Row], *, size: Row) -> Figure:
    """Plot accuracy over latency of every plan, with all samples of plans on the Pareto front.

    Args:
        plans: Plans, as in `results.json`.
        size: Request size.
    """
    from matplotlib.ticker import PercentFormatter

    front = select_front(plans)
    dominated = [row for row in plans if not row["front"]]
    with open_axes(rows=1, row_in=4.8) as (figure, axes):
        for measured, face, name in (
            (True, BEFORE, "other plans"),
            (False, "none", "other plans, predicted"),
        ):
            rows = [row for row in dominated if row["measured"] == measured]
            if rows:
                axes.plot(
                    [row["p50_ms"] for row in rows], [row["accuracy"] for row in rows], "o", markersize=4.5,
                    markerfacecolor=face, markeredgecolor=BEFORE, markeredgewidth=0.0 if measured else 0.8,
                    alpha=0.7, label=name,
                )  # fmt: skip
        axes.plot(
            [row["p50_ms"] for row in front], [row["accuracy"] for row in front], color=AFTER, linewidth=1.2,
            drawstyle="steps-post", alpha=0.5,
        )  # fmt: skip
        for number, row in enumerate(front, start=1):
            samples_ms = row["samples_ms"]
            axes.plot(
                samples_ms, [row["accuracy"]] * len(samples_ms), "|", color=AFTER, markersize=7, alpha=0.6,
                label="each measured request" if number == 1 else None,
            )  # fmt: skip
            if "low" in row:
                axes.plot(
                    [row["p50_ms"]] * 2, [row["low"], row["high"]], color=AFTER, linewidth=1.2, alpha=0.7
                )
            axes.plot(
                [row["p50_ms"]], [row["accuracy"]], "o", color=AFTER, markersize=7, markeredgecolor=PAPER,
                label="Pareto front" if number == 1 else None,
            )  # fmt: skip
            if len(front) <= _MAX_LABELS:
                axes.annotate(
                    str(number), (row["p50_ms"], row["accuracy"]), xytext=(0, 9), textcoords="offset points",
                    ha="center", fontsize=8.5, color=INK,
                )  # fmt: skip
        axes.set_xscale("log")
        set_plain_log_ticks(axes.xaxis)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.grid(True, axis="both")
        axes.margins(x=0.06, y=0.1)
        axes.set_xlabel(
            f"ms, one request of {size['text_tokens']} text tokens with {size['new_tokens']} new ones"
        )
        axes.set_ylabel("correct answers")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=4, borderaxespad=0, handlelength=1.1)
        first, last = front[0], front[-1]
        return from_matplotlib(
            figure,
            title="Plans by latency and accuracy",
            alt=f"{len(plans)} plans, {len(front)} on the Pareto front: from {first['p50_ms']:.3g} ms "
            f"at {first['accuracy']:.1%} to {last['p50_ms']:.3g} ms at {last['accuracy']:.1%}.",
            caption="Points are medians, vertical bars 95 % intervals of the accuracy, short strokes single "
            "requests. Numbers are those of the table below.",
        )


def plot_budget_curves(policies: Sequence[Row], attainment: float) -> list[Figure]:
    """Plot attainment and goodput of each policy over budgets."""
    budgets_ms = [row["budget_ms"] for row in policies[0]["curve"]]

    def make_curves(metric: str) -> dict[str, tuple[Sequence[float], Sequence[float]]]:
        return {policy["name"]: (budgets_ms, [row[metric] for row in policy["curve"]]) for policy in policies}

    target = {"requested, over all budgets": ([budgets_ms[0], budgets_ms[-1]], [attainment, attainment])}
    return [
        plot_curves(
            "Attainment", make_curves("attainment") | target, x="budget, ms", y="answers in time", log_x=True
        ),
        plot_curves("Goodput", make_curves("goodput"), x="budget, ms", y="correct and in time", log_x=True),
    ]


def plot_regret(policies: Sequence[Row]) -> Figure:
    """Plot the goodput that each policy loses to the oracle."""
    rows = [policy for policy in policies if policy["name"] != "oracle"]
    intervals = [[100.0 * row["regret"][end] for row in rows] for end in ("mean", "low", "high")]
    return plot_intervals(
        "Regret", [row["name"] for row in rows], *intervals, unit="points of goodput below the oracle",
        caption="Means over requests with 95 % bootstrap intervals over samples. The oracle sees each "
        "request's outcome under every plan beforehand, which no policy can.",
    )  # fmt: skip


def plot_gains(gains: Sequence[Row], baseline: str) -> Figure:
    """Plot the gain of the first policy over a baseline on each subset."""
    rows = [row for row in gains if row["baseline"] == baseline]
    intervals = [[100.0 * row["goodput"][end] for row in rows] for end in ("mean", "low", "high")]
    return plot_intervals(
        f"{rows[0]['policy'].capitalize()} against {baseline}", [row["subset"] for row in rows], *intervals,
        unit="points of goodput", reference=0.0,
    )  # fmt: skip


def plot_quantile_coverage(predictor: Row) -> Figure:
    """Plot predicted quantiles and the fraction of requests below them."""
    rows = predictor["quantiles"]
    with open_axes(rows=1, row_in=3.4) as (figure, axes):
        positions = range(len(rows))
        for x, row in zip(positions, rows, strict=True):
            axes.plot([x - 0.16, x + 0.16], [100 * row["quantile"]] * 2, color=MUTED, linewidth=1.4,
                      label="predicted quantile" if x == 0 else None)  # fmt: skip
            axes.plot([x] * 2, [100 * row["low"], 100 * row["high"]], color=AFTER, linewidth=2.2)
            axes.plot([x], [100 * row["coverage"]], "o", color=AFTER, markersize=6.5, markeredgecolor=PAPER,
                      label="observed" if x == 0 else None)  # fmt: skip
            axes.annotate(f"{row['coverage']:.1%}", (x, 100 * row["coverage"]), xytext=(16, 0),
                          textcoords="offset points", va="center", fontsize=8, color=INK)  # fmt: skip
        axes.set_xticks(list(positions), [f"{100 * row['quantile']:g} %" for row in rows])
        axes.set_xlim(-0.6, len(rows) - 0.2)
        axes.grid(False, axis="x")
        axes.grid(True, axis="y", color=GRID)
        axes.set_xlabel("predicted quantile")
        axes.set_ylabel("requests below it, %")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, borderaxespad=0, handlelength=1.1)
        text = "; ".join(f"{row['quantile']:.0%}: {row['coverage']:.1%} observed" for row in rows)
        return from_matplotlib(
            figure, title="Coverage of predicted quantiles", alt=f"{text}.",
            caption=f"{predictor['requests']} requests of the profile, predicted from other plans and "
            "lengths; 95 % intervals over plans and lengths.",
        )  # fmt: skip


def plot_medians(predictor: Row) -> Figure:
    """Plot predicted and measured medians of held-out plans and lengths."""
    groups: dict[str, list[tuple[float, float]]] = {}
    for load, measured, predicted in sorted(predictor["cells"]):
        groups.setdefault(f"load {load:.0%}", []).append((measured, predicted))
    return plot_predicted_vs_measured(
        "Medians, predicted and measured", groups,
        caption=f"One point per plan and length; the mean error is {predictor['p50_error']:.1%}.",
    )  # fmt: skip
