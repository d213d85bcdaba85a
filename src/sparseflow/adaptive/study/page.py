"""HTML page of a study: comparison of policies, latency and accuracy of plans, validation of predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparseflow.adaptive.study.figures import (
    plot_budget_curves,
    plot_gains,
    plot_medians,
    plot_plans,
    plot_quantile_coverage,
    plot_regret,
    select_front,
)
from sparseflow.adaptive.study.results import RESULTS_FILE, load_results
from sparseflow.adaptive.study.training import GRPO
from sparseflow.core.report import Page
from sparseflow.core.training.history import read_history, smooth_curve
from sparseflow.errors import FileFormatError

PAGE_FILE = "report.html"

Row = Mapping[str, Any]


def write_page(study_dir: Path | str, path: Path | str) -> Path:
    """Write the page of a study from the files in its directory.

    Args:
        study_dir: Directory with `results.json` and, after a training, the training histories.
        path: HTML file.

    Returns:
        `path`.

    Raises:
        InputError: `results.json` does not exist.
        FileFormatError: A file is damaged.
    """
    root = Path(study_dir)
    return write_results_page(load_results(root), path, histories=sorted((root / GRPO).glob("seed-*")))


def write_results_page(results: Row, path: Path | str, *, histories: Sequence[Path] = ()) -> Path:
    """Write the page of results.

    Args:
        results: Results, as in `results.json`.
        path: HTML file in an existing directory.
        histories: Training directories.

    Returns:
        `path`.

    Raises:
        FileFormatError: The results lack an entry, or a history is damaged.
    """
    try:
        page = Page(
            "Adaptive plans, controllers and latency budgets", _summarize(results),
            environment=results.get("environment", {}), reproduce=results.get("command", ""),
        )  # fmt: skip
        _add_headlines(page, results)
        if results.get("policies"):
            _add_policies(page, results)
        _add_plans(page, results)
        if results.get("policies"):
            _add_policy_figures(page, results)
        _add_predictor(page, results)
        _add_training(page, histories)
        page.section("Method", *_describe_method(results))
        return page.write(Path(path))
    except (KeyError, TypeError, IndexError) as error:
        raise FileFormatError(
            f"{RESULTS_FILE} lacks an entry of the page: {error!r}; repeat the evaluation"
        ) from error


def _summarize(results: Row) -> str:
    if results.get("verdict"):
        return results["verdict"][0]
    front = select_front(results["plans"])
    return f"{len(front)} of {len(results['plans'])} plans are on the Pareto front of latency and accuracy."


def _add_headlines(page: Page, results: Row) -> None:
    front = select_front(results["plans"])
    if results.get("policies"):
        policy = results["policies"][0]
        goodput, attainment = policy["goodput"], policy["attainment"]
        page.headline(
            f"{goodput['mean']:.1%}", f"correct and in time, {policy['name']}", note=_format_interval(goodput)
        )
        page.headline(
            f"{attainment['mean']:.1%}", f"in time, {policy['name']}",
            note=f"requested: {results['attainment']:.1%}",
        )  # fmt: skip
    fastest_ms, slowest_ms = front[0]["p50_ms"], front[-1]["p50_ms"]
    page.headline(
        f"{slowest_ms / fastest_ms:.2f}×", f"latency range of {len(front)} plans",
        note=f"{fastest_ms:.3g} to {slowest_ms:.3g} ms",
    )  # fmt: skip
    if results["predictor"] is not None:
        page.headline(
            f"{results['predictor']['p50_error']:.1%}", "error of medians on held-out plans and lengths"
        )


def _add_policies(page: Page, results: Row) -> None:
    metrics = ("accuracy", "attainment", "goodput", "regret")
    rows = [
        {"name": policy["name"], "met": policy["met"]}
        | {name: f"{100 * policy[name]['mean']:.1f} ({_format_interval(policy[name])})" for name in metrics}
        for policy in results["policies"]
    ]
    budgets_ms = results["budgets_ms"]
    page.section("Comparison of policies", *results["verdict"])
    page.table(
        "Policies", rows,
        columns={
            "name": "policy", "goodput": "correct and in time, %", "accuracy": "correct, %",
            "attainment": "in time, %", "regret": "regret, points", "met": "attainment met",
        },
        caption=f"{results['samples']['test']} test questions, each with {len(budgets_ms)} budgets from "
        f"{budgets_ms[0]:.3g} to {budgets_ms[-1]:.3g} ms; 95 % intervals over samples. Each policy is given "
        "a fraction of every budget at which its answers on the validation split are in time at the "
        f"requested rate, {results['attainment']:.1%}, or at the nearest rate if none reaches it. The "
        "oracle, the reference of regret, is given the full budget.",
    )  # fmt: skip


def _add_policy_figures(page: Page, results: Row) -> None:
    policies, gains = results["policies"], results["compared"]
    page.section("Budgets")
    for figure in plot_budget_curves(policies, results["attainment"]):
        page.figure(figure)
    page.section(
        "Paired differences",
        "Differences are between the same requests, so the difficulty of a request cancels out.",
    )
    page.figure(plot_regret(policies))
    for baseline in dict.fromkeys(row["baseline"] for row in gains):
        page.figure(plot_gains(gains, baseline))


def _add_plans(page: Page, results: Row) -> None:
    front, depth = select_front(results["plans"]), results["depth"]
    rows = []
    for number, row in enumerate(front, start=1):
        plan = row["plan"]
        skipped = [block for block in range(depth) if block not in plan["blocks"]]
        interval = f" ({_format_interval(row)})" if "low" in row else ""
        rows.append(
            {
                "number": number, "tier": plan["tier"] or "text", "position": plan["insertion_position"],
                "top_k": plan["top_k"], "skipped": ", ".join(map(str, skipped)) or None, "ms": row["p50_ms"],
                "range": f"{row['p5_ms']:.3g} to {row['p95_ms']:.3g}",
                "accuracy": f"{100 * row['accuracy']:.1f}{interval}", "measured": row["measured"],
            }
        )  # fmt: skip
    page.section("Plans")
    page.figure(plot_plans(results["plans"], size=results["size"]))
    page.table(
        "Plans on the Pareto front", rows,
        columns={
            "number": "", "tier": "tier", "position": "insertion", "top_k": "top-k", "skipped": "skipped",
            "ms": "ms, median", "range": "5 to 95 %", "accuracy": "correct, %", "measured": "measured",
        },
        caption=f"The model has {depth} blocks; those before the insertion position run in full.",
    )  # fmt: skip
    kinds = list(front[0].get("by_kind", {}))
    if kinds:
        page.table(
            "Correct answers by kind of question",
            [
                {"number": number} | {kind: 100.0 * row["by_kind"][kind] for kind in kinds}
                for number, row in enumerate(front, start=1)
            ],
            columns={"number": ""} | {kind: f"{kind}, %" for kind in kinds},
            digits=1,
        )


def _add_predictor(page: Page, results: Row) -> None:
    if results["predictor"] is None:
        page.section(
            "Predictions",
            "The profile has too few plans and lengths to validate predictions on held-out ones.",
        )
        return
    page.section("Predictions")
    page.figure(plot_quantile_coverage(results["predictor"]))
    page.figure(plot_medians(results["predictor"]))


def _add_training(page: Page, histories: Sequence[Path]) -> None:
    validation: dict[str, tuple[list[float], list[float]]] = {}
    multiplier: dict[str, tuple[list[float], list[float]]] = {}
    for directory in histories:
        rows = list(read_history(directory))
        held_out = [row for row in rows if row["kind"] == "held_out"]
        for name in ("accuracy", "attainment"):
            validation[f"{name}, {directory.name}"] = smooth_curve(held_out, name)
        multiplier[directory.name] = smooth_curve(
            [row for row in rows if row["kind"] == "train"], "multiplier"
        )
    if any(xs for xs, _ in [*validation.values(), *multiplier.values()]):
        page.section("Training")
        page.curves("Validation", validation, x="step", y="fraction")
        page.curves("Lagrange multiplier of late answers", multiplier, x="step", y="answers")


def _describe_method(results: Row) -> list[str]:
    plans = results["plans"]
    num_measured = sum(row["measured"] for row in plans)
    paragraphs = [
        "Latency is that of requests with batch size 1 on the profile's device, "
        f"{results['device'].get('name', 'unknown')}, at a load of {results['load']:.0%}. For a request "
        "length that was not measured, measured requests are scaled by the ratio of predicted medians.",
        f"{num_measured} of {len(plans)} plans were measured."
        + (
            " The others take their predicted median, times the ratio of measured to held-out predicted time "
            "of requests of a measured plan."
            if num_measured < len(plans)
            else ""
        ),
    ]
    if "task" in results:
        paragraphs.append(f"Task: {results['task']['name']}. {results['task']['description']}")
    if results.get("policies"):
        samples = results["samples"]
        paragraphs.append(
            "An answer takes as many tokens as the correct one, even if it is wrong. Controllers and lookup "
            f"tables were fitted to {samples['train']} questions and calibrated on {samples['validation']} "
            "others."
        )
    return paragraphs


def _format_interval(row: Row) -> str:
    return f"{100 * row['low']:.1f} to {100 * row['high']:.1f}"
