"""Evaluation of a predictor: predictions against measurements, idle and under load."""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sparseflow.core import metrics
from sparseflow.core.config import validate_config
from sparseflow.core.progress import Progress
from sparseflow.errors import RunError
from sparseflow.latency.graph import onnx_file
from sparseflow.latency.measure import descriptions
from sparseflow.latency.measure.collection import collect, read_rows
from sparseflow.latency.measure.config import CollectionConfig, TelemetryConfig
from sparseflow.latency.measure.idle import (
    combine_idle_ms,
    compute_idle_ms,
    get_load_before,
    is_quiet,
    select_idle_rows,
)
from sparseflow.latency.model.predictor import Predictor


@dataclass(frozen=True, kw_only=True)
class EvaluationRow:
    """One model at one level.

    Attributes:
        model: Name of the model.
        level: Requested load, in [0, 1].
        achieved: Load just before the measurements, with other work; without such a reading the share of the
            stressor.
        measured_ms: Mean latency over all measurements; if idle, the latency without other work, see
            `measure.idle`.
        measured_p50_ms: Measured median.
        measured_p95_ms: Measured 95th percentile.
        predicted_ms: Predicted mean latency.
        predicted_p50_ms: Predicted median.
        predicted_p95_ms: Predicted 95th percentile.
        low_ms: Lower end of the interval.
        high_ms: Upper end of the interval; infinite if an operator's work is unknown.
        coverage: Share of the prediction from kernels whose operator was measured.
    """

    model: str
    level: float
    achieved: float
    measured_ms: float
    measured_p50_ms: float
    measured_p95_ms: float
    predicted_ms: float
    predicted_p50_ms: float
    predicted_p95_ms: float
    low_ms: float
    high_ms: float
    coverage: float

    @property
    def error(self) -> float:
        """Relative error of the predicted mean; positive if it is too high."""
        return self.predicted_ms / self.measured_ms - 1.0

    @property
    def in_interval(self) -> bool:
        """Whether the measured mean is within the interval."""
        return self.low_ms <= self.measured_ms <= self.high_ms

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types; an infinite end of the interval is None."""
        return {
            **asdict(self),
            "high_ms": None if math.isinf(self.high_ms) else self.high_ms,
            "error": self.error,
            "in_interval": self.in_interval,
        }


@dataclass(frozen=True, kw_only=True)
class LevelSummary:
    """Errors at one level.

    Attributes:
        level: Requested load, in [0, 1].
        models: Number of models.
        mape: Mean absolute relative error of the predicted mean.
        within_10: Share of predictions within 10 %.
        intervals: Share of measurements within their intervals.
        slowdown: Mean measured slowdown; None without idle measurements.
        predicted_slowdown: Mean predicted slowdown; None without idle measurements.
    """

    level: float
    models: int
    mape: float
    within_10: float
    intervals: float
    slowdown: float | None
    predicted_slowdown: float | None


@dataclass(frozen=True, kw_only=True)
class PredictorEvaluation:
    """All models at all levels.

    Attributes:
        rows: One row per model and level.
        device: Name of the device.
        provider: onnxruntime's name of the provider.
        threads: Threads within an operator; None is onnxruntime's choice.
        problems: File or model that could not be evaluated -> message.
    """

    rows: tuple[EvaluationRow, ...]
    device: str
    provider: str
    threads: int | None
    problems: Mapping[str, str] = field(default_factory=dict)

    def summarize(self) -> list[LevelSummary]:
        """Summarize each level, in ascending order."""
        summaries = []
        idle_rows = {row.model: row for row in self.rows if row.level == 0.0}
        for level in sorted({row.level for row in self.rows}):
            rows = [row for row in self.rows if row.level == level]
            predicted, measured = [row.predicted_ms for row in rows], [row.measured_ms for row in rows]
            pairs = [(row, idle_rows[row.model]) for row in rows if row.model in idle_rows]
            summaries.append(
                LevelSummary(
                    level=level,
                    models=len(rows),
                    mape=metrics.mape(predicted, measured),
                    within_10=metrics.fraction_within(predicted, measured),
                    intervals=metrics.interval_coverage(
                        [row.low_ms for row in rows], [row.high_ms for row in rows], measured
                    ),
                    slowdown=_compute_mean([row.measured_ms / idle.measured_ms for row, idle in pairs]),
                    predicted_slowdown=_compute_mean(
                        [row.predicted_ms / idle.predicted_ms for row, idle in pairs]
                    ),
                )
            )
        return summaries

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types."""
        return {
            "device": self.device,
            "provider": self.provider,
            "threads": self.threads,
            "summary": [asdict(summary) for summary in self.summarize()],
            "rows": [row.to_dict() for row in self.rows],
            "problems": dict(self.problems),
        }


def evaluate(
    models: Sequence[Path | str],
    predictor: Predictor | Path | str,
    *,
    levels: Sequence[float] = (0.0,),
    rounds: int = 3,
    min_time_s: float = 0.5,
    stressor: str | None = None,
    telemetry: TelemetryConfig | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    inputs: Mapping[str, Any] | None = None,
    out_dir: Path | str | None = None,
    gpu: int = 0,
    seed: int = 0,
    progress: Progress | None = None,
) -> PredictorEvaluation:
    """Measure models and compare the latencies with predictions.

    Each prediction uses the load that was read just before the measurement, as a caller would. A model that
    cannot be analyzed or measured is one of `problems` and does not stop the others.

    Args:
        models: ONNX files, or directories of them.
        predictor: A predictor or its file, of this device.
        levels: Loads to create, in [0, 1].
        rounds: Measurements of each model at each level, in random order.
        min_time_s: Minimum time of a measurement.
        stressor: Kind of load; by default `cpu-fma` or `gpu-matmul`.
        telemetry: Source of the load readings; by default that of the training.
        shapes: Input -> shape, or open dimension -> its extent as a shape of one entry, for the models that
            have it, or MODEL:NAME -> shape for one of them.
        inputs: Likewise, input -> value: a number, a list or the path of a `.npy` file.
        out_dir: Directory of the measurements, resumed if it exists; None discards them.
        gpu: Index of the GPU.
        seed: Random seed.
        progress: Receives a message and the fraction done.

    Raises:
        InputError: A path does not exist, the predictor is of another device, or a load is requested of one
            that was trained on idle measurements only.
        FileFormatError, ModelError: The only file is invalid.
        DeviceError: The device or the readings are not available.
        RunError: The load ended, or no model could be evaluated.
    """
    fitted = predictor if isinstance(predictor, Predictor) else Predictor.load(predictor)
    fitted.fingerprint.check_local_device(gpu)
    if any(levels):
        fitted.contention.check_fitted()
    fingerprint = fitted.fingerprint
    settings: dict[str, Any] = {
        "models": [onnx_file.check_path(path) for path in models],
        "shapes": {name: list(shape) for name, shape in (shapes or {}).items()},
        "inputs": dict(inputs or {}),
        "provider": fingerprint.provider,
        "threads": fingerprint.threads,
        "conv_search": fingerprint.conv_search or "EXHAUSTIVE",
        "gpu": gpu,
        "levels": list(levels),
        "rounds": rounds,
        "loops": 10,
        "min_time_s": min_time_s,
        "max_time_s": max(2.0 * min_time_s, 2.0),
        "telemetry": telemetry or TelemetryConfig(source=fingerprint.telemetry),
        "seed": seed,
    }
    if stressor is not None:
        settings["stressor"] = stressor
    config = validate_config(CollectionConfig, settings, "evaluation")
    with tempfile.TemporaryDirectory(prefix="sparseflow-evaluate-") as temporary:
        folder = Path(out_dir) if out_dir is not None else Path(temporary)
        problems = dict(collect(config, folder, progress=progress).problems)
        rows = [row for row in read_rows(folder) if row["role"] == "item"]
        graphs = descriptions.read_graphs(folder)
    groups: dict[tuple[str, float], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["kernel_id"], row["level"]), []).append(row)
    evaluated = []
    for (name, level), group in sorted(groups.items()):
        valid = [row for row in group if row["error"] is None]
        if valid:
            evaluated.append(_make_row(fitted, name, level, valid, graphs[name], seed))
        else:
            problems[name] = f"every run at load {level:g} failed: {group[0]['error']}"
    if not evaluated:
        name, problem = next(iter(problems.items()))
        raise RunError(f"none of {len(problems)} models could be evaluated; {name}: {problem}")
    return PredictorEvaluation(
        rows=tuple(evaluated),
        device=fingerprint.name,
        provider=fingerprint.provider,
        threads=fingerprint.threads,
        problems=problems,
    )


def _make_row(
    predictor: Predictor,
    name: str,
    level: float,
    rows: Sequence[Mapping[str, Any]],
    graph: Any,
    seed: int,
) -> EvaluationRow:
    predictions = [
        predictor.predict(graph, get_load_before(row) if level else None, seed=seed) for row in rows
    ]

    metric = predictor.contention.metric

    def median_of(name: str) -> float:
        return statistics.median(row[name] for row in rows)

    return EvaluationRow(
        model=name,
        level=level,
        achieved=statistics.fmean(
            {metric: row["stress_alone"], **get_load_before(row)}[metric] for row in rows
        ),
        # Slower idle runs were disturbed; under load the mean over measurements is predicted.
        measured_ms=statistics.fmean(row["latency_ms"] for row in rows)
        if level
        else _measure_idle_ms(rows, metric),
        measured_p50_ms=median_of("p50_ms"),
        measured_p95_ms=median_of("p95_ms"),
        predicted_ms=statistics.fmean(p.mean_ms for p in predictions),
        predicted_p50_ms=statistics.fmean(p.p50_ms for p in predictions),
        predicted_p95_ms=statistics.fmean(p.p95_ms for p in predictions),
        low_ms=statistics.fmean(p.interval[0] for p in predictions),
        high_ms=statistics.fmean(p.interval[1] for p in predictions),
        coverage=statistics.fmean(p.coverage for p in predictions),
    )


def _measure_idle_ms(rows: Sequence[Mapping[str, Any]], metric: str) -> float:
    selected = select_idle_rows(rows, metric)
    return combine_idle_ms([compute_idle_ms(row) for row in selected], is_quiet(selected[0], metric))


def _compute_mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
