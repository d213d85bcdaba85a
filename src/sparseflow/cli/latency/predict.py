"""`train`, `predict`, `evaluate`, `overlap` and `quickstart`: predictors of latency."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sparseflow.cli.latency.base import (
    LabelsOption,
    MaxAgeOption,
    ModelArgument,
    PredictorOption,
    StressorOption,
    UrlOption,
    WindowOption,
    app,
    is_set,
    parse_predictor_gpu,
    parse_provider,
    parse_shapes,
    select_telemetry,
)
from sparseflow.cli.options import (
    ConfigOption,
    DeviceOption,
    InferredDeviceOption,
    JsonOption,
    LoadOption,
    LoadsOption,
    OptionalConfigOption,
    OptionalOutDirOption,
    OutDirOption,
    OutFileOption,
    RoundsOption,
    SeedOption,
    ShapesOption,
    get_command_line,
)
from sparseflow.cli.output import emit, fail, make_table
from sparseflow.cli.progress import progress_bar

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.table import Table

    from sparseflow.latency.model.evaluation import PredictorEvaluation
    from sparseflow.latency.model.predictor import Prediction
    from sparseflow.latency.model.training_table import TrainingTable

_MAX_KERNEL_ROWS = 15
_MAX_TRAINING_ROWS = 5
_TRAINING_COLUMNS = ("batch", "flops", "bytes", "rows", "depth", "columns")


@app.command()
def train(
    collections: Annotated[list[Path], typer.Argument(help="Directories written by `latency collect`.")],
    out: OutFileOption = Path("predictor.json"),
    regressor: Annotated[
        Literal["ratio", "xgboost", "random_forest"] | None,
        typer.Option(help="Regressor; by default the best one on held-out kernels."),
    ] = None,
    composition: Annotated[
        Literal["sum", "critical_path", "queue"] | None,
        typer.Option(
            help="Composition of kernels: sum, critical_path (see `overlap`) or queue; by default queue if "
            "the kernels were collected in a stream."
        ),
    ] = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Train a predictor for this device; show its error on held-out kernels and models."""
    from sparseflow.latency.model.dataset import load_dataset
    from sparseflow.latency.model.training import train as train_predictor
    from sparseflow.latency.model.training_table import TrainingTable

    with progress_bar() as progress:
        progress("reading the collections", 0.0)
        data = load_dataset(collections)
        predictor = train_predictor(data, kind=regressor, mode=composition, seed=seed, progress=progress)
    table = TrainingTable.from_dataset(data)
    head = table.list_rows(_MAX_TRAINING_ROWS)
    path = predictor.save(out)
    fingerprint = predictor.fingerprint
    emit(
        {
            "path": str(path),
            **predictor.quality,
            "table": {"rows": len(table.kernel_ids), "columns": list(table.columns), "head": head},
            "fingerprint": fingerprint.to_dict(),
        },
        as_json,
        _format_training_table(table),
        _kernel_quality_table(predictor.quality),
        *([_model_quality_table(predictor.quality)] if predictor.quality["models"] else []),
        f"{fingerprint.name}, {fingerprint.provider}: {path}",
    )


@app.command()
def predict(
    context: typer.Context,
    model: Annotated[Path, typer.Argument(help="ONNX model, or the directory of an analyzed one.")],
    predictor: PredictorOption = Path("predictor.json"),
    config: OptionalConfigOption = None,
    load: LoadOption = None,
    live: Annotated[
        Literal["host", "gpm", "prometheus"] | None,
        typer.Option(help="Source to read the current load from."),
    ] = None,
    url: UrlOption = None,
    label: LabelsOption = None,
    max_age_s: MaxAgeOption = 30.0,
    window_s: WindowOption = 1.0,
    shape: ShapesOption = None,
    device: InferredDeviceOption = None,
    seed: SeedOption = 0,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="Exit with 1 if more than 5 % of the latency is a guess or nothing bounds it."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Predict the latency of a model: mean, quantiles and interval, by kernel.

    The configuration can contain `predictor`, `telemetry` and `window_s`; options have precedence.
    """
    from sparseflow.errors import InputError
    from sparseflow.latency.api import predict as predict_latency
    from sparseflow.latency.inference_config import InferenceConfig, load_inference_config
    from sparseflow.latency.model.predictor import Predictor

    if load is not None and live is not None:
        raise InputError(f"`--load {load}` and `--live {live}` exclude each other")
    settings = InferenceConfig() if config is None else load_inference_config(config)
    telemetry = select_telemetry(context, settings, live=live, url=url, labels=label, max_age_s=max_age_s)
    fitted = Predictor.load(predictor if is_set(context, "predictor") else settings.predictor or predictor)
    prediction = predict_latency(
        model,
        fitted,
        load=None if load is None else {fitted.contention.metric: load},
        live=telemetry if load is None else None,
        window_s=window_s if is_set(context, "window_s") else settings.window_s,
        shapes=parse_shapes(shape),
        gpu=parse_predictor_gpu(device, fitted),
        seed=seed,
    )
    metric = fitted.contention.metric
    guess = f"; {100 * (1.0 - prediction.coverage):.0f} % of it is a guess" if prediction.is_guess else ""
    share = f"{metric} {100 * prediction.load[metric]:.0f} %" if prediction.load else "no load"
    emit(
        {"model": str(model), **prediction.to_dict()},
        as_json,
        _prediction_table(model, prediction),
        f"mean {prediction.mean_ms:.3f} ms ({100 * prediction.interval_coverage:.0f} % interval "
        f"{_format_interval(*prediction.interval, separator=' to ')}{guess}), "
        f"p50 {prediction.p50_ms:.3f} ms, p95 {prediction.p95_ms:.3f} ms",
        f"idle {prediction.idle_ms:.3f} ms; {share}: {prediction.slowdown:.2f}x; "
        f"{100 * prediction.coverage:.0f} % of it from kernels with a measured operator",
        *(f"note: {note}" for note in prediction.notes),
    )
    if strict and prediction.is_guess:
        fail(prediction.notes[0], code=1)


@app.command()
def evaluate(
    context: typer.Context,
    models: Annotated[list[Path], typer.Argument(help="ONNX models, or directories of them.")],
    predictor: PredictorOption = Path("predictor.json"),
    load: LoadsOption = None,
    stressor: StressorOption = None,
    rounds: RoundsOption = 3,
    min_time_s: Annotated[float, typer.Option(min=0.1, help="Minimum time of a measurement, seconds.")] = 0.5,
    out: OptionalOutDirOption = None,
    device: InferredDeviceOption = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Compare predictions with measurements, idle and under load.

    Creates no load by default; the default stressor is cpu-fma or gpu-matmul. The output directory receives
    the measurements and report.html. A model that fails is reported and does not stop the others; the exit
    code is then 1.
    """
    from sparseflow.latency.model.evaluation import evaluate as evaluate_predictor
    from sparseflow.latency.model.predictor import Predictor
    from sparseflow.latency.report import write_report

    fitted = Predictor.load(predictor)
    gpu = parse_predictor_gpu(device, fitted)
    with progress_bar() as progress:
        evaluation = evaluate_predictor(
            models,
            fitted,
            levels=load or [0.0],
            stressor=stressor,
            rounds=rounds,
            min_time_s=min_time_s,
            out_dir=None if out is None else out / "measurements",
            gpu=gpu,
            seed=seed,
            progress=progress,
        )
    report = None
    if out is not None:
        from sparseflow.core.environment import collect_environment

        report = write_report(
            evaluation,
            out,
            quality=fitted.quality,
            environment=collect_environment(
                "cpu" if fitted.fingerprint.kind == "cpu" else f"cuda:{gpu}", seed=seed
            ),
            reproduce=get_command_line(context),
        )
    emit(
        evaluation.to_dict() | {"report": None if report is None else str(report)},
        as_json,
        *_format_evaluation(evaluation),
        *([] if report is None else [f"report: {report}"]),
        *(f"failed: {name}: {problem}" for name, problem in evaluation.problems.items()),
    )
    if evaluation.problems:
        fail(f"{len(evaluation.problems)} models could not be evaluated", code=1)


@app.command()
def overlap(
    model: ModelArgument,
    device: DeviceOption = "cpu",
    parallel: Annotated[
        bool, typer.Option("--parallel", help="Use onnxruntime's parallel executor.")
    ] = False,
    shape: ShapesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure whether kernels overlap: the latency is their sum or the critical path."""
    from sparseflow.latency.measure.overlap import measure_overlap

    provider, gpu = parse_provider(device)
    result = measure_overlap(model, provider, parallel=parallel, shapes=parse_shapes(shape), gpu=gpu)
    emit(
        {"model": str(model), **result.to_dict()},
        as_json,
        f"{result.nodes} nodes ran {result.busy_ms:.2f} ms in {result.span_ms:.2f} ms, "
        f"{100 * result.share:.1f} % of it in parallel: {result.mode}",
    )


@app.command()
def quickstart(
    out: OutDirOption = Path("runs/latency-quickstart"),
    config: ConfigOption = "quickstart",
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Run all steps on a few networks, from export to evaluation under load, and write a report.

    Takes a few minutes. If other work prevents a load, the predictor contains what was measured before.
    """
    from sparseflow.latency.quickstart import run_quickstart as run_quickstart

    provider, _ = parse_provider(device)
    with progress_bar() as progress:
        result = run_quickstart(out, zoo_config=config, provider=provider, progress=progress)
    emit(
        result.to_dict(),
        as_json,
        *_format_evaluation(result.evaluation),
        "The predictor was trained on these models. Errors on held-out networks:",
        _model_quality_table(result.quality),
        *(f"note: {problem}" for problem in result.problems),
        f"predictor: {result.predictor_path}",
        f"report: {result.report_path}",
    )


def _format_training_table(table: TrainingTable) -> Table:
    """Format the first rows, with sizes, the first column of an operator, and latencies."""
    head = table.list_rows(_MAX_TRAINING_ROWS)
    names = (*_TRAINING_COLUMNS, next(name for name in table.columns if name.startswith("op=")))
    rows = [
        (row["kernel_id"], *(f"{row[name]:.4g}" for name in names), f"{row['latency_ms']:.4f}")
        for row in head
    ]
    title = f"training data: {len(table.kernel_ids)} kernels, {len(table.columns)} features (sizes as log2)"
    return make_table(("kernel", *(f">{name}" for name in names), ">latency ms"), rows, title=title)


def _kernel_quality_table(quality: Mapping[str, Any]) -> Table:
    names = {"by_kernel": "kernels", "by_network": "networks", "leaky": "rows (leaky: do not trust it)"}
    rows = [
        (kind + (" *" if kind == quality["kind"] else ""), names[split], *_format_scores(scores))
        for kind, splits in quality["kernels"].items()
        for split, scores in splits.items()
    ]
    columns = ("regressor", "held out", ">kernels", ">MAPE", ">within 10 %")
    return make_table(columns, rows, title="kernels")


def _model_quality_table(quality: Mapping[str, Any]) -> Table:
    names = {"rest": "idle", "loaded": "under load", "loaded_blind": "under load, load unknown"}
    rows = [(names[summary], *_format_scores(scores)) for summary, scores in quality["models"].items()]
    return make_table(
        ("condition", ">models", ">MAPE", ">within 10 %"), rows, title="models of held-out networks"
    )


def _format_scores(scores: Mapping[str, float]) -> tuple[str, str, str]:
    return str(scores["count"]), f"{100 * scores['mape']:.1f} %", f"{100 * scores['within_10']:.0f} %"


def _prediction_table(model: Path, prediction: Prediction) -> Table:
    kernels, hidden = prediction.per_kernel[:_MAX_KERNEL_ROWS], prediction.per_kernel[_MAX_KERNEL_ROWS:]
    entries = [(k.kernel_id, k.count, f"{k.mean_ms:.4f} ms", k.count * k.mean_ms, k.source) for k in kernels]
    if hidden:
        total_ms = sum(k.count * k.mean_ms for k in hidden)
        entries.append((f"… {len(hidden)} more", sum(k.count for k in hidden), "", total_ms, ""))
    rows = [
        (name, str(count), mean, f"{total_ms:.3f} ms", f"{100 * total_ms / prediction.mean_ms:.1f} %", source)
        for name, count, mean, total_ms, source in entries
    ]
    if round(prediction.call_ms, 3):
        rows.append(("call overhead", "1", "", f"{prediction.call_ms:.3f} ms", "", "learned"))
    columns = ("kernel", ">nodes", ">mean", ">total", ">share", "source")
    return make_table(columns, rows, title=str(model))


def _format_interval(low_ms: float, high_ms: float, *, separator: str = "–") -> str:
    return f"{low_ms:.3f}{separator}{'unbounded' if math.isinf(high_ms) else f'{high_ms:.3f}'}"


def _format_evaluation(evaluation: PredictorEvaluation) -> list[Table | str]:
    rows = [
        (
            row.model,
            f"{row.level:.2f}",
            f"{row.predicted_ms:.3f}",
            f"{row.measured_ms:.3f}",
            f"{100 * row.error:+.1f} %",
            f"{_format_interval(row.low_ms, row.high_ms)}{'' if row.in_interval else ' (missed)'}",
        )
        for row in evaluation.rows
    ]
    columns = ("model", ">load", ">predicted ms", ">measured ms", ">error", "interval ms")
    lines: list[Table | str] = [make_table(columns, rows)]
    for summary in evaluation.summarize():
        measured, predicted = summary.slowdown, summary.predicted_slowdown
        slowdown = (
            ""
            if measured is None or predicted is None
            else f", slowdown {measured:.2f}x (predicted {predicted:.2f}x)"
        )
        lines.append(
            f"load {summary.level:.2f}: MAPE {100 * summary.mape:.1f} %, {100 * summary.within_10:.0f} % of "
            f"{summary.models} models within 10 %{slowdown}"
        )
    return lines
