"""Predicted against measured: models run here, at rest and beside loads, and compared."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pydantic

from sparseflow.core import metrics
from sparseflow.errors import InputError, RunError
from sparseflow.latency import descriptions
from sparseflow.latency.campaign import Config, Telemetry
from sparseflow.latency.collect import collect, read
from sparseflow.latency.dataset import load_before
from sparseflow.latency.predictor import Predictor

Progress = Callable[[str, float], None]


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """One model at one level.

    Attributes:
        model: Its name.
        level: Load asked for, in [0, 1].
        achieved: Share that the load got while the model rested.
        measured_ms: Mean latency, milliseconds, over all visits.
        measured_p50_ms: Median.
        measured_p95_ms: 95th percentile.
        predicted_ms: What was expected.
        predicted_p50_ms: Likewise the median.
        predicted_p95_ms: Likewise the 95th percentile.
        low_ms: Lower end of the interval.
        high_ms: Upper end.
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
        """Of the mean, as a share of what was measured; above 0 where too much was predicted."""
        return self.predicted_ms / self.measured_ms - 1.0

    @property
    def within(self) -> bool:
        """Whether the interval holds what was measured."""
        return self.low_ms <= self.measured_ms <= self.high_ms

    def to_dict(self) -> dict[str, Any]:
        """The row in JSON's types."""
        return {**asdict(self), "error": self.error, "within": self.within}


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Every model at every level.

    Attributes:
        rows: One a model and level.
        device: Name of the device.
        provider: onnxruntime's name of the provider.
    """

    rows: tuple[Evaluated, ...]
    device: str
    provider: str

    def summary(self) -> list[dict[str, Any]]:
        """One entry a level: `level`, `models`, `mape`, `within_10`, `intervals` (share that hold),
        `slowdown`
        and `predicted_slowdown`.
        """
        found = []
        rest = {row.model: row for row in self.rows if row.level == 0.0}
        for level in sorted({row.level for row in self.rows}):
            here = [row for row in self.rows if row.level == level]
            predicted, measured = [r.predicted_ms for r in here], [r.measured_ms for r in here]
            both = [(row, rest[row.model]) for row in here if row.model in rest]
            found.append(
                {
                    "level": level,
                    "models": len(here),
                    "mape": metrics.mape(predicted, measured),
                    "within_10": metrics.fraction_within(predicted, measured),
                    "intervals": metrics.interval_coverage(
                        [r.low_ms for r in here], [r.high_ms for r in here], measured
                    ),
                    "slowdown": _mean([r.measured_ms / q.measured_ms for r, q in both]),
                    "predicted_slowdown": _mean([r.predicted_ms / q.predicted_ms for r, q in both]),
                }
            )
        return found

    def to_dict(self) -> dict[str, Any]:
        """The evaluation in JSON's types."""
        return {
            "device": self.device,
            "provider": self.provider,
            "summary": self.summary(),
            "rows": [row.to_dict() for row in self.rows],
        }


def evaluate(
    models: Sequence[Path | str],
    predictor: Predictor | Path | str,
    *,
    levels: Sequence[float] = (0.0,),
    rounds: int = 3,
    seconds: float = 0.5,
    stressor: str | None = None,
    telemetry: Telemetry | None = None,
    out: Path | str | None = None,
    gpu: int = 0,
    seed: int = 0,
    progress: Progress | None = None,
) -> Evaluation:
    """Run models and compare with what the predictor says, load by load.

    The load that a prediction is told is the one that was read just before each visit, as a caller would.

    Args:
        models: ONNX files, or folders of them.
        predictor: A predictor or its file; it must be of this device.
        levels: Loads to make, in [0, 1].
        rounds: Visits to each model at each level, in an order drawn anew.
        seconds: Least time of a visit.
        stressor: Kind of load; by default `cpu-fma` or `gpu-matmul`.
        telemetry: Where load is read from; by default as the predictor was trained.
        out: Folder that keeps the measurements, taken up again when it holds some; None keeps nothing.
        gpu: Number of the GPU.
        seed: What orders and quantiles are drawn from.
        progress: Called with (what is done, fraction done).

    Raises:
        InputError: A file is missing, or the predictor is of another device.
        FileFormatError, ModelError: A file cannot be used.
        DeviceError: The device or the readings are not there.
        RunError: A load was not reached, or every run of a model failed.
    """
    one = predictor if isinstance(predictor, Predictor) else Predictor.load(predictor)
    one.fingerprint.check_here(gpu)
    mark = one.fingerprint
    settings: dict[str, Any] = {
        "models": [Path(path) for path in models],
        "provider": "cpu" if mark.kind == "cpu" else "cuda",
        "threads": mark.threads,
        "conv_search": mark.conv_search or "EXHAUSTIVE",
        "gpu": gpu,
        "levels": list(levels),
        "rounds": rounds,
        "loops": 10,
        "min_time_s": seconds,
        "max_time_s": max(2.0 * seconds, 2.0),
        "telemetry": telemetry or Telemetry(source=mark.telemetry),
        "seed": seed,
    }
    if stressor is not None:
        settings["stressor"] = stressor
    try:
        config = Config(**settings)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        named = ".".join(map(str, first["loc"]))
        raise InputError(f"{named}: {first['msg']}" if named else str(first["msg"])) from error
    with tempfile.TemporaryDirectory(prefix="sparseflow-evaluate-") as temporary:
        folder = Path(out) if out is not None else Path(temporary)
        collect(config, folder, progress=progress)
        rows = read(folder)
        failed = [row for row in rows if row["error"] is not None]
        good = [row for row in rows if row["error"] is None and row["role"] == "item"]
        ran = {(row["kernel_id"], row["level"]) for row in good}
        for row in failed:
            if row["role"] == "item" and (row["kernel_id"], row["level"]) not in ran:
                raise RunError(
                    f"{row['kernel_id']} failed every time at load {row['level']:g}: {row['error']}"
                )
        graphs = descriptions.read_graphs(folder)
    groups: dict[tuple[str, float], list[Mapping[str, Any]]] = {}
    for row in good:
        groups.setdefault((row["kernel_id"], row["level"]), []).append(row)
    return Evaluation(
        rows=tuple(
            _row(one, name, level, found, graphs[name], seed)
            for (name, level), found in sorted(groups.items())
        ),
        device=mark.name,
        provider=mark.provider,
    )


def _row(
    predictor: Predictor,
    name: str,
    level: float,
    rows: Sequence[Mapping[str, Any]],
    graph: Any,
    seed: int,
) -> Evaluated:
    predictions = [predictor.predict(graph, load_before(row) if level else None, seed=seed) for row in rows]

    def middle(name: str) -> float:
        return statistics.median(row[name] for row in rows)

    return Evaluated(
        model=name,
        level=level,
        achieved=statistics.fmean(row["stress_alone"] for row in rows),
        # At rest what is slower was disturbed; beside a load the mean over visits is what is asked about.
        measured_ms=statistics.fmean(row["latency_ms"] for row in rows) if level else middle("p50_ms"),
        measured_p50_ms=middle("p50_ms"),
        measured_p95_ms=middle("p95_ms"),
        predicted_ms=statistics.fmean(p.mean_ms for p in predictions),
        predicted_p50_ms=statistics.fmean(p.p50_ms for p in predictions),
        predicted_p95_ms=statistics.fmean(p.p95_ms for p in predictions),
        low_ms=statistics.fmean(p.interval[0] for p in predictions),
        high_ms=statistics.fmean(p.interval[1] for p in predictions),
        coverage=statistics.fmean(p.coverage for p in predictions),
    )


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
