"""The page of an evaluation: what was predicted, what was measured, and how far the two are apart."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparseflow.core.report import Column, Headline, Report, Section, Table, plot_predicted_vs_measured
from sparseflow.latency.evaluate import Evaluation

PAGE = "report.html"

SPLITS = {
    "by_kernel": "whole kernels held out",
    "by_network": "whole networks held out",
    "leaky": "rows held out (leaky: other rows of the kernel give it away)",
}
PARTS = {
    "rest": "at rest",
    "loaded": "beside loads",
    "loaded_blind": "beside loads, not told of them",
}


def write_report(
    found: Evaluation,
    folder: Path | str,
    *,
    quality: Mapping[str, Any] | None = None,
    environment: Mapping[str, Any] | None = None,
    reproduce: str = "",
    note: str = "",
) -> Path:
    """Write `report.html`; gives its path.

    Args:
        found: The evaluation.
        folder: Where the page goes; made when absent.
        quality: What training said of the predictor, as `Predictor.quality`.
        environment: Circumstances, as `core.environment` writes them.
        reproduce: The command line that makes this page again.
        note: What a reader must know of these models, such as that they were learned from.
    """
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    summary = found.summary()
    page = Report(
        title="Latency: predicted against measured",
        summary=f"{len({row.model for row in found.rows})} models on {found.device}, {found.provider}.",
        headlines=[
            Headline(
                value=f"{100 * part['mape']:.1f} %",
                label="mean error " + (f"at load {part['level']:g}" if part["level"] else "at rest"),
                note=f"{100 * part['within_10']:.0f} % of {part['models']} models within 10 %",
                tone="good" if part["within_10"] >= 0.9 else "neutral",
            )
            for part in summary
        ],
        sections=[_models(found, note), *([_quality(quality)] if quality else [])],
        environment=environment or {},
        reproduce=reproduce,
    )
    return page.write(root / PAGE)


def _models(found: Evaluation, note: str) -> Section:
    groups: dict[str, list[tuple[float, float]]] = {}
    for row in found.rows:
        name = f"load {row.level:g}" if row.level else "at rest"
        groups.setdefault(name, []).append((row.measured_ms, row.predicted_ms))
    columns = [
        Column(key="model", title="model"),
        Column(key="level", title="load asked", digits=2),
        Column(key="achieved", title="load achieved", digits=3),
        Column(key="predicted_ms", title="predicted mean, ms"),
        Column(key="measured_ms", title="measured mean, ms"),
        Column(key="error", title="error, %", digits=1),
        Column(key="low_ms", title="interval from, ms"),
        Column(key="high_ms", title="to, ms"),
        Column(key="within", title="holds"),
        Column(key="predicted_p95_ms", title="predicted p95, ms"),
        Column(key="measured_p95_ms", title="measured p95, ms"),
        Column(key="coverage", title="learned share", digits=2),
    ]
    shown = {column.key for column in columns}
    rows = [
        {key: value for key, value in row.to_dict().items() if key in shown} | {"error": 100 * row.error}
        for row in found.rows
    ]
    return Section(
        title="Models",
        text=[
            "A prediction is made from the model's graph and the load that was read just before each visit.",
            *([note] if note else []),
        ],
        items=[
            plot_predicted_vs_measured("Mean latency", groups),
            Table(title="Every model", columns=columns, rows=rows),
        ],
    )


def _quality(quality: Mapping[str, Any]) -> Section:
    columns = [
        Column(key="what", title="what"),
        Column(key="held", title="judged on"),
        Column(key="count", title="predictions"),
        Column(key="mape", title="mean error, %", digits=1),
        Column(key="within_10", title="within 10 %, %", digits=0),
    ]

    def row(what: str, held: str, scores: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "what": what,
            "held": held,
            "count": scores["count"],
            "mape": 100 * scores["mape"],
            "within_10": 100 * scores["within_10"],
        }

    rows = [
        row(f"kernels, {kind}", SPLITS[split], scores)
        for kind, splits in quality["kernels"].items()
        for split, scores in splits.items()
    ]
    rows += [
        row(f"models {PARTS[part]}", "the model's whole network held out", scores)
        for part, scores in quality["models"].items()
    ]
    return Section(
        title="What was held out in training",
        text=[f"The predictor uses the regressor `{quality['kind']}`."],
        items=[Table(title="Scores", columns=columns, rows=rows)],
    )
