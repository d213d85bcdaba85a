"""Report page of an evaluation: predicted and measured latencies and their errors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparseflow.core.report import Page, plot_predicted_vs_measured
from sparseflow.latency.measure.fingerprint import describe_threads
from sparseflow.latency.model.evaluation import PredictorEvaluation

PAGE = "report.html"

_SPLITS = {
    "by_kernel": "held-out kernels",
    "by_network": "held-out networks",
    "leaky": "held-out rows (leaky: other rows of the kernel are in the training data)",
}
_CONDITIONS = {"rest": "idle", "loaded": "under load", "loaded_blind": "under load, load unknown"}
_MODEL_COLUMNS = {
    "model": "model",
    "level": "target load",
    "achieved": "load",
    "predicted_ms": "predicted mean, ms",
    "measured_ms": "measured mean, ms",
    "error_percent": "error, %",
    "low_ms": "interval from, ms",
    "high_ms": "to, ms",
    "in_interval": "within interval",
    "predicted_p95_ms": "predicted p95, ms",
    "measured_p95_ms": "measured p95, ms",
    "coverage": "learned share",
}
_SCORE_COLUMNS = {
    "subject": "predicted",
    "split": "held out",
    "count": "predictions",
    "mape": "mean error, %",
    "within_10": "within 10 %, %",
}


def write_report(
    evaluation: PredictorEvaluation,
    out_dir: Path | str,
    *,
    quality: Mapping[str, Any] | None = None,
    environment: Mapping[str, Any] | None = None,
    reproduce: str = "",
    note: str = "",
) -> Path:
    """Write `report.html` and return its path.

    Args:
        evaluation: Predictions and measurements.
        out_dir: Output directory; created if missing.
        quality: `Predictor.quality`.
        environment: Measurement conditions, as `collect_environment` returns them.
        reproduce: Command line that creates this page again.
        note: Remark about the models, such as that the predictor was trained on them.
    """
    root = Path(out_dir)
    root.mkdir(parents=True, exist_ok=True)
    num_models = len({row.model for row in evaluation.rows})
    page = Page(
        "Latency: predicted and measured",
        f"{num_models} models on {evaluation.device}, {evaluation.provider}, "
        f"{describe_threads(evaluation.threads)}.",
        environment=environment,
        reproduce=reproduce,
    )
    for summary in evaluation.summarize():
        page.headline(
            f"{100 * summary.mape:.1f} %",
            f"mean error, {_format_level(summary.level)}",
            note=f"{100 * summary.within_10:.0f} % of {summary.models} models within 10 %",
            tone="good" if summary.within_10 >= 0.9 else "neutral",
        )
    _add_models(page, evaluation, note)
    if quality:
        _add_quality(page, quality)
    return page.write(root / PAGE)


def _add_models(page: Page, evaluation: PredictorEvaluation, note: str) -> None:
    points: dict[str, list[tuple[float, float]]] = {}
    for row in evaluation.rows:
        points.setdefault(_format_level(row.level), []).append((row.measured_ms, row.predicted_ms))
    page.section(
        "Models",
        "Each prediction uses the model's graph and the load that was read just before the measurement.",
        *([note] if note else []),
    )
    if not evaluation.rows:
        return
    page.figure(plot_predicted_vs_measured("Mean latency", points))
    page.table(
        "All models",
        [{**row.to_dict(), "error_percent": 100 * row.error} for row in evaluation.rows],
        columns=_MODEL_COLUMNS,
        digits={"level": 2, "achieved": 3, "error_percent": 1, "coverage": 2},
    )


def _add_quality(page: Page, quality: Mapping[str, Any]) -> None:
    entries = [
        (f"kernels, {kind}", _SPLITS[split], scores)
        for kind, splits in quality["kernels"].items()
        for split, scores in splits.items()
    ]
    entries += [
        (f"models, {_CONDITIONS[condition]}", "the model's network", scores)
        for condition, scores in quality["models"].items()
    ]
    rows = [
        {
            "subject": subject,
            "split": split,
            "count": scores["count"],
            "mape": 100 * scores["mape"],
            "within_10": 100 * scores["within_10"],
        }
        for subject, split, scores in entries
    ]
    page.section("Errors on held-out data", f"The predictor uses the regressor `{quality['kind']}`.")
    page.table("Scores", rows, columns=_SCORE_COLUMNS, digits={"mape": 1, "within_10": 0})


def _format_level(level: float) -> str:
    return f"load {level:g}" if level else "idle"
