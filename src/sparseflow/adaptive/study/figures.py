"""The pictures of a study: plans by latency and accuracy, what policies keep, and what predictions keep."""

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

_LABELLED = 24
"""Most plans of the front whose numbers are written beside them."""


def front_of(plans: Sequence[Row]) -> list[Row]:
    """Plans that no other one beats, the quickest first."""
    return sorted((row for row in plans if row["front"]), key=lambda row: row["p50_ms"])


def plans_picture(plans: Sequence[Row], *, size: Row) -> Figure:
    """Every plan by what it takes and how often it is right; those that none beats, with all their samples.

    Args:
        plans: As `judged.json` has them.
        size: Of the request that times are of.
    """
    from matplotlib.ticker import PercentFormatter

    front = front_of(plans)
    others = [row for row in plans if not row["front"]]
    with open_axes(rows=1, row_in=4.8) as (figure, axes):
        for there, face, name in ((True, BEFORE, "other plans"), (False, "none", "other plans, predicted")):
            mine = [row for row in others if row["measured"] == there]
            if mine:
                axes.plot(
                    [row["p50_ms"] for row in mine], [row["accuracy"] for row in mine], "o", markersize=4.5,
                    markerfacecolor=face, markeredgecolor=BEFORE, markeredgewidth=0.0 if there else 0.8,
                    alpha=0.7, label=name,
                )  # fmt: skip
        axes.plot(
            [row["p50_ms"] for row in front], [row["accuracy"] for row in front], color=AFTER, linewidth=1.2,
            drawstyle="steps-post", alpha=0.5,
        )  # fmt: skip
        for number, row in enumerate(front, start=1):
            every = row["samples_ms"]
            axes.plot(
                every, [row["accuracy"]] * len(every), "|", color=AFTER, markersize=7, alpha=0.6,
                label="each measured request" if number == 1 else None,
            )  # fmt: skip
            if "low" in row:
                axes.plot(
                    [row["p50_ms"]] * 2, [row["low"], row["high"]], color=AFTER, linewidth=1.2, alpha=0.7
                )
            axes.plot(
                [row["p50_ms"]], [row["accuracy"]], "o", color=AFTER, markersize=7, markeredgecolor=PAPER,
                label="plans that none beats" if number == 1 else None,
            )  # fmt: skip
            if len(front) <= _LABELLED:
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
        axes.set_ylabel("right answers")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=4, borderaxespad=0, handlelength=1.1)
        first, last = front[0], front[-1]
        return from_matplotlib(
            figure, title="Plans by latency and accuracy",
            alt=f"{len(plans)} plans, {len(front)} of them beaten by none: from {first['p50_ms']:.3g} ms "
            f"at {first['accuracy']:.1%} to {last['p50_ms']:.3g} ms at {last['accuracy']:.1%}.",
            caption="Places are medians. Vertical bars, where there are some, are 95 % intervals of the "
            "accuracy; short strokes are single requests. Numbers are those of the table below.",
        )  # fmt: skip


def budget_pictures(policies: Sequence[Row], attainment: float) -> list[Figure]:
    """Attainment and goodput of each policy over budgets."""
    places = [row["budget_ms"] for row in policies[0]["curve"]]

    def over(measure: str) -> dict[str, tuple[Sequence[float], Sequence[float]]]:
        return {each["name"]: (places, [row[measure] for row in each["curve"]]) for each in policies}

    asked = {"asked for, over all budgets": ([places[0], places[-1]], [attainment, attainment])}
    return [
        plot_curves(
            "Attainment", over("attainment") | asked, x="budget, ms", y="answers in time", log_x=True
        ),
        plot_curves("Goodput", over("goodput"), x="budget, ms", y="right and in time", log_x=True),
    ]


def regret_picture(policies: Sequence[Row]) -> Figure:
    """How much more goodput the oracle has than each policy."""
    mine = [each for each in policies if each["name"] != "oracle"]
    figures = [[100.0 * each["regret"][end] for each in mine] for end in ("mean", "low", "high")]
    return plot_intervals(
        "Regret", [each["name"] for each in mine], *figures, unit="points of goodput less than the oracle's",
        caption="Means over requests with 95 % bootstrap intervals over images. The oracle sees each "
        "request's outcome under every plan beforehand: no policy can have what it has.",
    )  # fmt: skip


def gains_picture(compared: Sequence[Row], other: str) -> Figure:
    """What the first policy has over another, everywhere that they were compared."""
    mine = [row for row in compared if row["other"] == other]
    figures = [[100.0 * row["goodput"][end] for row in mine] for end in ("mean", "low", "high")]
    return plot_intervals(
        f"{mine[0]['one'].capitalize()} against {other}", [row["where"] for row in mine], *figures,
        unit="points of goodput", reference=0.0,
    )  # fmt: skip


def promises_picture(predictor: Row) -> Figure:
    """Quantiles that were promised, against the share of requests that were within them."""
    observed = predictor["observed"]
    with open_axes(rows=1, row_in=3.4) as (figure, axes):
        places = range(len(observed))
        for place, row in zip(places, observed, strict=True):
            axes.plot([place - 0.16, place + 0.16], [100 * row["promised"]] * 2, color=MUTED, linewidth=1.4,
                      label="promised" if place == 0 else None)  # fmt: skip
            axes.plot([place] * 2, [100 * row["low"], 100 * row["high"]], color=AFTER, linewidth=2.2)
            axes.plot([place], [100 * row["share"]], "o", color=AFTER, markersize=6.5, markeredgecolor=PAPER,
                      label="observed" if place == 0 else None)  # fmt: skip
            axes.annotate(f"{row['share']:.1%}", (place, 100 * row["share"]), xytext=(16, 0),
                          textcoords="offset points", va="center", fontsize=8, color=INK)  # fmt: skip
        axes.set_xticks(list(places), [f"{100 * row['promised']:g} %" for row in observed])
        axes.set_xlim(-0.6, len(observed) - 0.2)
        axes.grid(False, axis="x")
        axes.grid(True, axis="y", color=GRID)
        axes.set_xlabel("promised: so many requests take no longer than predicted")
        axes.set_ylabel("observed, %")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, borderaxespad=0, handlelength=1.1)
        words = "; ".join(f"{row['promised']:.0%} promised, {row['share']:.1%} observed" for row in observed)
        return from_matplotlib(
            figure, title="What the predictor promises", alt=f"{words}.",
            caption=f"{predictor['requests']} requests of the profile, each predicted by what was fitted to "
            "other plans and lengths; 95 % intervals over plans and lengths.",
        )  # fmt: skip


def medians_picture(predictor: Row) -> Figure:
    """Predicted and measured medians of plans and lengths that a fit had not seen."""
    groups: dict[str, list[tuple[float, float]]] = {}
    for load, measured, predicted in sorted(predictor["cells"]):
        groups.setdefault(f"load {load:.0%}", []).append((measured, predicted))
    return plot_predicted_vs_measured(
        "Medians, predicted and measured", groups,
        caption=f"Each plan and length once; {predictor['p50_error']:.1%} off on average.",
    )  # fmt: skip
