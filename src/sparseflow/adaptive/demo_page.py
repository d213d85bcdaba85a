"""Results and report page of the demo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparseflow.core.report import Page
from sparseflow.core.report.figures import format_value
from sparseflow.core.run import Run

FULL_MODEL, FASTEST_PLAN = "full model", "fastest plan"
"""Baselines without a budget."""


@dataclass(frozen=True, kw_only=True)
class BudgetSummary:
    """Results of the requests with one budget.

    Attributes:
        budget_ms: Latency budget.
        in_time: Fraction of requests within the budget.
        accuracy: Fraction of correct answers.
        goodput: Fraction of correct answers within the budget.
        p50_ms: Median latency.
        plan: Plan that was selected most often.
        num_plans: Number of different plans.
        full_model_goodput: Fraction of answers of the full model that are correct and within the budget.
        fastest_plan_goodput: The same for the fastest plan.
    """

    budget_ms: float
    in_time: float
    accuracy: float
    goodput: float
    p50_ms: float
    plan: str
    num_plans: int
    full_model_goodput: float
    fastest_plan_goodput: float


@dataclass(frozen=True, kw_only=True)
class AdaptiveDemoResult:
    """Results of the demo.

    Attributes:
        model: Name of the model's directory.
        num_questions: Number of questions.
        budgets: Results by budget, ascending.
        in_time: Fraction of requests with a budget that met it.
        full_model_ms: Median latency of the full model.
        fastest_plan_ms: Median latency of the fastest plan.
        full_model_accuracy: Accuracy of the full model.
        fastest_plan_accuracy: Accuracy of the fastest plan.
        held_out_error: Mean relative error of predicted medians on held-out plans and lengths; None if there
            are too few measurements.
        run: Directory of the run.
        report: Report page.
    """

    model: str
    num_questions: int
    budgets: tuple[BudgetSummary, ...]
    in_time: float
    full_model_ms: float
    fastest_plan_ms: float
    full_model_accuracy: float
    fastest_plan_accuracy: float
    held_out_error: float | None
    run: Path
    report: Path

    def to_dict(self) -> dict[str, Any]:
        """Return the results in JSON types."""
        return asdict(self) | {"run": str(self.run), "report": str(self.report)}


def write_page(result: AdaptiveDemoResult, rows: Sequence[Mapping[str, Any]], run: Run) -> None:
    """Write the page to `result.report`.

    Args:
        result: Results.
        rows: One row per request.
        run: Run, for its environment and configuration.
    """
    page = Page(
        "Answers within a latency budget",
        f"The model {result.model} answered {result.num_questions} questions about images under "
        f"{len(result.budgets)} budgets each. For each request the plan with the highest expected accuracy "
        "was selected among those that are predicted to meet the budget in 90 % of the cases; accuracies "
        "that differ by less than two standard errors count as equal. The predictor was fitted on this "
        "machine at the start. The budgets lie between 1.5 times the median latency of the fastest plan and "
        "4 times that of the full model. Latency is measured from the input pixels to the last token.",
        environment=run.info["environment"],
        reproduce=_format_command(run.info["config"]),
    )
    page.headline(
        f"{100 * result.in_time:.1f} %",
        "of requests within their budget",
        tone="good" if result.in_time >= 0.95 else "bad",
    )
    page.headline(
        f"{result.fastest_plan_ms:.0f} to {result.full_model_ms:.0f} ms",
        "median latency from the fastest plan to the full model",
    )
    page.headline(
        f"{100 * result.fastest_plan_accuracy:.0f} to {100 * result.full_model_accuracy:.0f} %",
        "accuracy from the fastest plan to the full model",
    )
    _add_budgets(page, result)
    _add_requests(page, result, rows)
    page.write(result.report)


def _add_budgets(page: Page, result: AdaptiveDemoResult) -> None:
    budgets_ms = [budget.budget_ms for budget in result.budgets]
    curves = {
        "with budget": [budget.goodput for budget in result.budgets],
        FULL_MODEL: [budget.full_model_goodput for budget in result.budgets],
        FASTEST_PLAN: [budget.fastest_plan_goodput for budget in result.budgets],
        "in time": [budget.in_time for budget in result.budgets],
    }
    page.section("Budgets")
    page.curves(
        "Correct and in time",
        {name: (budgets_ms, fractions) for name, fractions in curves.items()},
        x="budget, ms",
        y="fraction of questions",
        log_x=True,
        caption="The curve 'in time' includes wrong answers.",
    )
    page.table(
        "Budgets",
        [
            {
                "budget, ms": budget.budget_ms,
                "in time, %": 100 * budget.in_time,
                "correct and in time, %": 100 * budget.goodput,
                "full model, %": 100 * budget.full_model_goodput,
                "fastest plan, %": 100 * budget.fastest_plan_goodput,
                "median latency, ms": budget.p50_ms,
                "most used plan": budget.plan,
                "plans": budget.num_plans,
            }
            for budget in result.budgets
        ],
        caption="The full model and the fastest plan answered the same questions; their answers count if "
        "they are correct and within the budget.",
    )


def _add_requests(page: Page, result: AdaptiveDemoResult, rows: Sequence[Mapping[str, Any]]) -> None:
    latencies = {
        f"{format_value(budget.budget_ms)} ms": [
            row["measured_ms"] for row in rows if row["budget_ms"] == budget.budget_ms
        ]
        for budget in result.budgets
    } | {
        method: [row["measured_ms"] for row in rows if row["method"] == method]
        for method in (FULL_MODEL, FASTEST_PLAN)
    }
    page.section("Requests", "Each dot is one request. The order of budgets and baselines is random.")
    page.samples("Latency of requests", latencies, unit="ms")


def _format_command(config: Mapping[str, Any]) -> str:
    options = {
        "model": "model",
        "num_questions": "num-questions",
        "num_budgets": "num-budgets",
        "device": "device",
    }
    arguments = [f"--{option} {config[key]}" for key, option in options.items() if config[key] is not None]
    return " ".join(["sparseflow adaptive demo", *arguments])
