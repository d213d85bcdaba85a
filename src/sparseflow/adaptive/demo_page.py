"""The demo's page: what budgets kept, what was given up for them, and every request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparseflow.core.report import Column, Headline, Report, Section, Table, plot_curves, plot_samples
from sparseflow.core.run import Run

WHOLE, QUICKEST = "whole model", "quickest plan"
"""What answers without a budget, for comparison."""


@dataclass(frozen=True, kw_only=True)
class BudgetSummary:
    """How requests with one budget did.

    Attributes:
        budget_ms: The budget.
        in_time, right, goodput: Share in time; right; both.
        p50_ms: Median of what they took.
        plan: The plan that was chosen most often.
        plans: How many different ones were.
        whole, quickest: Share right and in time of the whole model and of its quickest plan, always.
    """

    budget_ms: float
    in_time: float
    right: float
    goodput: float
    p50_ms: float
    plan: str
    plans: int
    whole: float
    quickest: float


@dataclass(frozen=True, kw_only=True)
class AdaptiveDemoResult:
    """What the demo found.

    Attributes:
        model: Its folder's name.
        questions: How many were asked.
        budgets: By budget, ascending.
        in_time: Share in time of all requests with a budget.
        whole_ms, quickest_ms: Median milliseconds of the whole model and of its quickest plan.
        whole_right, quickest_right: Share of their answers that is right, however long they take.
        held_out: Relative error of predicted medians of plans and lengths that a fit had not seen; None where
            too little was measured to tell.
        run: Folder of the run.
        report: The page.
    """

    model: str
    questions: int
    budgets: tuple[BudgetSummary, ...]
    in_time: float
    whole_ms: float
    quickest_ms: float
    whole_right: float
    quickest_right: float
    held_out: float | None
    run: Path
    report: Path

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self) | {"run": str(self.run), "report": str(self.report)}


def write_page(result: AdaptiveDemoResult, rows: Sequence[Mapping[str, Any]], run: Run) -> None:
    """Write the page to `result.report`.

    Args:
        result: What was found.
        rows: A request each.
        run: Whose environment it tells.
    """
    budgets = [each.budget_ms for each in result.budgets]
    table = Table(
        title="Budgets",
        columns=[
            Column(key="budget", title="budget, ms"),
            Column(key="in_time", title="in time, %"),
            Column(key="goodput", title="right and in time, %"),
            Column(key="whole", title="whole model, %"),
            Column(key="quickest", title="quickest plan, %"),
            Column(key="ms", title="took, ms (median)"),
            Column(key="plan", title="plan, most often"),
            Column(key="plans", title="plans"),
        ],
        rows=[
            {
                "budget": each.budget_ms, "in_time": 100 * each.in_time, "goodput": 100 * each.goodput,
                "whole": 100 * each.whole, "quickest": 100 * each.quickest, "ms": each.p50_ms,
                "plan": each.plan, "plans": each.plans,
            }
            for each in result.budgets
        ],
        caption="The whole model and the quickest plan answered the same questions; an answer of theirs "
        "counts where it is right and would have been in time.",
    )  # fmt: skip
    shares = {
        "budget kept": [each.goodput for each in result.budgets],
        WHOLE: [each.whole for each in result.budgets],
        QUICKEST: [each.quickest for each in result.budgets],
        "in time": [each.in_time for each in result.budgets],
    }
    picture = plot_curves(
        "Right and in time", {name: (budgets, values) for name, values in shares.items()},
        x="budget, ms", y="share of questions", log_x=True,
        caption="In time: wrong answers, too.",
    )  # fmt: skip
    took = {
        f"{each.budget_ms:.3g} ms": [row["measured_ms"] for row in rows if row["budget_ms"] == each.budget_ms]
        for each in result.budgets
    } | {way: [row["measured_ms"] for row in rows if row["way"] == way] for way in (WHOLE, QUICKEST)}
    Report(
        title="Answers within a budget",
        summary=(
            f"The model {result.model} answered {result.questions} questions about images, each under "
            f"{len(budgets)} budgets, by whichever plan fits, as a predictor says, and is worth most. The "
            "predictor was fitted on this machine a moment before. The least budget is what 99 of 100 "
            "requests of the quickest plan stay below; times count from the pixels on, to the last token."
        ),
        headlines=(
            Headline(
                value=f"{100 * result.in_time:.1f} %", label="of requests within their budget",
                tone="good" if result.in_time >= 0.95 else "bad",
            ),
            Headline(
                value=f"{result.quickest_ms:.0f} to {result.whole_ms:.0f} ms",
                label="from the quickest plan to the whole model",
            ),
            Headline(
                value=f"{100 * result.quickest_right:.0f} to {100 * result.whole_right:.0f} %",
                label="of their answers are right",
            ),
        ),
        sections=(
            Section(title="What budgets kept", items=(picture, table)),
            Section(
                title="Every request",
                text=("Each dot is a request; all ways took turns in random order.",),
                items=(plot_samples("What requests took", took, unit="ms"),),
            ),
        ),
        environment=run.info["environment"],
        reproduce=_command(run.info["config"]),
    ).write(result.report)  # fmt: skip


def _command(config: Mapping[str, Any]) -> str:
    options = {"model": "model", "questions": "num-questions", "budgets": "num-budgets", "device": "device"}
    arguments = [f"--{option} {config[key]}" for key, option in options.items() if config[key] is not None]
    return " ".join(["sparseflow adaptive demo", *arguments])
