"""`train`, `predict`, `evaluate`, `overlap` and `quickstart`: predictors of latency."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
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
    format_age,
    is_set,
    parse_inputs,
    parse_provider,
    parse_shapes,
    select_predictor,
    select_telemetry,
)
from sparseflow.cli.latency.sweeps import (
    LoadRangeOption,
    PlotOption,
    SweepOption,
    format_interval,
    make_load_table,
    make_sweep_table,
    parse_load_range,
    parse_sweeps,
    plot_loads,
    plot_sweep,
)
from sparseflow.cli.options import (
    BudgetSOption,
    ConfigOption,
    DeviceOption,
    InferredDeviceOption,
    InputValuesOption,
    JsonOption,
    LoadOption,
    LoadsOption,
    OptionalConfigOption,
    OptionalOutDirOption,
    OptionalOutFileOption,
    OutDirOption,
    OutFileOption,
    RoundsOption,
    SeedOption,
    ShapesOption,
    ThreadsOption,
    get_command_line,
    split_list,
)
from sparseflow.cli.output import emit, fail, make_table
from sparseflow.cli.progress import progress_bar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.table import Table

    from sparseflow.latency.model.evaluation import PredictorEvaluation
    from sparseflow.latency.model.predictor import Prediction, Predictor
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
    from sparseflow.latency.measure.fingerprint import describe_threads
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
            "notes": predictor.list_training_notes(),
        },
        as_json,
        _format_training_table(table),
        _kernel_quality_table(predictor.quality),
        *([_model_quality_table(predictor.quality)] if predictor.quality["models"] else []),
        *(f"note: {note}" for note in predictor.list_training_notes()),
        f"{fingerprint.name}, {fingerprint.provider}, {describe_threads(fingerprint.threads)}: {path}",
    )


@app.command()
def predict(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            help="ONNX model, the directory of an analyzed one, or hf:FOLDER, a Hugging Face model on disk."
        ),
    ],
    predictor: PredictorOption = None,
    config: OptionalConfigOption = None,
    peaks: Annotated[
        str | None,
        typer.Option(
            metavar="RATES",
            help="Peak rates of another machine to predict: operations/s, bytes/s and µs per launch, such as "
            "flops=1e11,bytes=2e10,launch_us=4.",
        ),
    ] = None,
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
    value: InputValuesOption = None,
    co_runner: Annotated[
        str | None,
        typer.Option(
            "--beside",
            metavar="MODEL@RATE/s",
            help="Model that runs beside this one, such as detector.onnx@20/s.",
        ),
    ] = None,
    co_runner_shape: Annotated[
        list[str] | None,
        typer.Option("--beside-shape", help="As `--shape`, of the model of `--beside`. Repeatable."),
    ] = None,
    co_runner_cpus: Annotated[
        int | None,
        typer.Option("--beside-cpus", min=1, help="CPUs that both models use; by default all of the device."),
    ] = None,
    sweep: SweepOption = None,
    loads: LoadRangeOption = None,
    plot: PlotOption = None,
    exporter: Annotated[
        Literal["torchscript", "dynamo"], typer.Option(help="Exporter of torch for hf:FOLDER.")
    ] = "torchscript",
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

    With `--sweep` or `--loads`, one line for each point; exits with 1 if a point failed. The configuration
    can contain `predictor`, `telemetry` and `window_s`; options have precedence.
    """
    from sparseflow.errors import InputError
    from sparseflow.latency.api import CoRunner
    from sparseflow.latency.api import predict as predict_latency
    from sparseflow.latency.inference_config import InferenceConfig, load_inference_config
    from sparseflow.latency.measure.peaks import parse_peaks

    if load is not None and live is not None:
        raise InputError(f"`--load {load}` and `--live {live}` exclude each other")
    config_settings = InferenceConfig() if config is None else load_inference_config(config)
    telemetry = select_telemetry(
        context, config_settings, live=live, url=url, labels=label, max_age_s=max_age_s
    )
    exclusive = {"--sweep": sweep, "--loads": loads, "--live": live, "--beside": co_runner}
    if sum(map(bool, exclusive.values())) > 1 or (load is not None and bool(loads or co_runner)):
        raise InputError(
            f"{', '.join(f'`{name}`' for name in exclusive)} exclude each other, and `--load` excludes all "
            "but `--sweep`"
        )
    if co_runner is None and (co_runner_shape or co_runner_cpus):
        raise InputError("`--beside-shape` and `--beside-cpus` need `--beside`")
    if plot is not None and not sweep and loads is None:
        raise InputError(f"`--plot {plot}` needs `--sweep` or `--loads`")
    fitted, gpu = select_predictor(
        predictor or config_settings.predictor,
        device,
        peaks=None if peaks is None else parse_peaks(peaks),
    )
    shares = None if load is None else {fitted.contention.metric: load}
    settings: dict[str, Any] = {
        "shapes": parse_shapes(shape),
        "inputs": parse_inputs(value),
        "exporter": exporter,
        "gpu": gpu,
        "seed": seed,
    }
    if sweep or loads is not None:
        predictions = _predict_points(model, fitted, sweep, loads, shares, settings, plot, as_json)
        if strict:
            _check_guesses(predictions)
        return
    prediction = predict_latency(
        model,
        fitted,
        load=shares,
        co_runner=None
        if co_runner is None
        else replace(CoRunner.parse(co_runner), shapes=parse_shapes(co_runner_shape), cpus=co_runner_cpus),
        live=telemetry if load is None and co_runner is None else None,
        window_s=window_s if is_set(context, "window_s") else config_settings.window_s,
        **settings,
    )
    emit(
        {"model": model, **prediction.to_dict()},
        as_json,
        _prediction_table(model, prediction),
        _format_predictor(fitted),
        *_describe_prediction(prediction, fitted.contention.metric),
    )
    if strict:
        _check_guesses([prediction])


@app.command()
def evaluate(
    context: typer.Context,
    models: Annotated[list[Path], typer.Argument(help="ONNX models, or directories of them.")],
    predictor: PredictorOption = None,
    load: LoadsOption = None,
    stressor: StressorOption = None,
    rounds: RoundsOption = 3,
    min_time_s: Annotated[float, typer.Option(min=0.1, help="Minimum time of a measurement, seconds.")] = 0.5,
    shape: ShapesOption = None,
    value: InputValuesOption = None,
    out: OptionalOutDirOption = None,
    device: InferredDeviceOption = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Compare predictions with measurements, idle and under load.

    Creates no load by default; the default stressor is cpu-fma or gpu-matmul. The output directory receives
    the measurements and report.html. A model that fails is reported and does not stop the others; the exit
    code is then 1. `--shape` and `--input` apply to all models with this input or open dimension, and as
    MODEL:NAME=VALUE to one.
    """
    from sparseflow.latency.model.evaluation import evaluate as evaluate_predictor
    from sparseflow.latency.report import write_report

    fitted, gpu = select_predictor(predictor, device)
    with progress_bar() as progress:
        evaluation = evaluate_predictor(
            models,
            fitted,
            levels=load or [0.0],
            stressor=stressor,
            rounds=rounds,
            min_time_s=min_time_s,
            shapes=parse_shapes(shape),
            inputs=parse_inputs(value),
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
    value: InputValuesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure whether kernels overlap: the latency is their sum or the critical path."""
    from sparseflow.latency.measure.overlap import measure_overlap

    provider, gpu = parse_provider(device)
    result = measure_overlap(
        model, provider, parallel=parallel, shapes=parse_shapes(shape), inputs=parse_inputs(value), gpu=gpu
    )
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
    loads: Annotated[
        str, typer.Option(help="Loads to measure, shares of the device such as 0.3,0.6,0.9, or none.")
    ] = "0.3,0.6,0.9",
    threads: ThreadsOption = None,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Run all steps on a few networks, from export to evaluation under load, and write a report.

    Takes a few minutes. Other work on the machine counts to the loads. The predictor contains what could be
    measured and is valid for one number of threads, 1 by default.
    """
    from sparseflow.latency.measure.fingerprint import describe_threads
    from sparseflow.latency.quickstart import run_quickstart as run_quickstart

    provider, _ = parse_provider(device)
    with progress_bar() as progress:
        result = run_quickstart(
            out,
            zoo_config=config,
            provider=provider,
            loads=_parse_loads(loads),
            threads=threads or 1,
            progress=progress,
        )
    emit(
        result.to_dict(),
        as_json,
        *_format_evaluation(result.evaluation),
        "The predictor was trained on these models. Errors on held-out networks:",
        _model_quality_table(result.quality),
        *(f"note: {problem}" for problem in result.problems),
        f"predictor: {result.predictor_path} ({describe_threads(result.threads)})",
        f"report: {result.report_path}",
    )


def _parse_loads(text: str) -> list[float]:
    """Parse `--loads`.

    Raises:
        InputError: It is neither none nor a list of numbers.
    """
    from sparseflow.errors import InputError

    if text == "none":
        return []
    try:
        return [float(item) for item in split_list(text) or []]
    except ValueError:
        raise InputError(f"`--loads {text}` must be none, or shares such as 0.3,0.6,0.9") from None


@app.command()
def calibrate(
    budget_s: BudgetSOption = 60.0,
    out: OptionalOutFileOption = None,
    device: DeviceOption = "cpu",
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Correct the shipped predictor or the first answer from peaks by measurements on this machine.

    Measures the kernels of a few small networks. Without --out the predictor is written to the cache
    directory, where `predict` and `evaluate` find it. The same command resumes.
    """
    from sparseflow.latency.calibration import calibrate as run_calibration

    provider, gpu = parse_provider(device)
    with progress_bar() as progress:
        result = run_calibration(
            out, budget_s=budget_s, provider=provider, gpu=gpu, seed=seed, progress=progress
        )
    emit(
        result.to_dict(),
        as_json,
        f"median error on {result.networks} small networks: {100 * result.error_before:.1f} % before, "
        f"{100 * result.error_after:.1f} % after, each without its own measurement",
        f"{result.kernels} kernels corrected the {'first answer' if result.base == 'peaks' else result.base} "
        f"predictor in {result.seconds:.0f} s: {result.path}",
    )


def _format_predictor(predictor: Predictor) -> str:
    """Return which predictor answers, for which device, and how old it is."""
    fingerprint = predictor.fingerprint
    kind = "first answer from peaks" if predictor.origin == "peaks" else f"{predictor.origin} predictor"
    threads = "all threads" if fingerprint.threads is None else f"threads {fingerprint.threads}"
    age = format_age(predictor.measured_s)
    return f"{kind}, measured {age} ago: {fingerprint.name}, {fingerprint.provider}, {threads}"


def _predict_points(
    model: str,
    fitted: Predictor,
    sweep_options: list[str] | None,
    loads: str | None,
    shares: Mapping[str, float] | None,
    settings: Mapping[str, Any],
    plot: Path | None,
    as_json: bool,
) -> list[Prediction]:
    """Predict over shapes or loads, print a table and write the picture."""
    from sparseflow.latency.sweeps import predict_loads, sweep

    metric = fitted.contention.metric
    problems: list[str] = []
    if loads is not None:
        predictions = predict_loads(model, fitted, parse_load_range(loads), **settings)
        record = {"loads": [prediction.to_dict() for prediction in predictions]}
        table = make_load_table(model, metric, predictions)
        make_figure = partial(plot_loads, model, metric, predictions)
    else:
        with progress_bar() as progress:
            points = sweep(
                model, fitted, parse_sweeps(sweep_options), load=shares, progress=progress, **settings
            )
        predictions = [point.prediction for point in points if point.prediction is not None]
        problems = [point.problem for point in points if point.problem is not None]
        record = {"points": [point.to_dict() for point in points]}
        table = make_sweep_table(model, points)
        make_figure = partial(plot_sweep, model, points)
    if plot is not None:
        from sparseflow.core.report import save_picture

        save_picture(make_figure(), plot)
    notes = dict.fromkeys(note for prediction in predictions for note in prediction.notes)
    emit(
        {"model": model, **record, "plot": None if plot is None else str(plot)},
        as_json,
        table,
        _format_predictor(fitted),
        *(f"note: {note}" for note in notes),
        *([] if plot is None else [f"picture: {plot}"]),
    )
    if problems:
        fail(f"{len(problems)} points failed: {problems[0]}", code=1)
    return predictions


def _describe_prediction(prediction: Prediction, metric: str) -> list[str]:
    from sparseflow.latency.measure.fingerprint import describe_threads

    guess = f"; {100 * (1.0 - prediction.coverage):.0f} % of it is a guess" if prediction.is_guess else ""
    share = f"{metric} {100 * prediction.load[metric]:.0f} %" if prediction.load else "no load"
    memory, co_runner = prediction.memory, prediction.co_runner
    if co_runner is not None:
        share = (
            f"beside {co_runner.model} ({co_runner.mean_ms:.3f} ms), active "
            f"{100 * co_runner.active_share:.0f} % of the time"
        )
    return [
        f"mean {prediction.mean_ms:.3f} ms ({100 * prediction.interval_coverage:.0f} % interval "
        f"{format_interval(*prediction.interval, separator=' to ')}{guess}), "
        f"p50 {prediction.p50_ms:.3f} ms, p95 {prediction.p95_ms:.3f} ms",
        f"{describe_threads(prediction.threads)}; idle {prediction.idle_ms:.3f} ms; "
        f"{share}: {prediction.slowdown:.2f}x; "
        f"{100 * prediction.coverage:.0f} % of it from kernels with a measured operator",
        f"memory {memory.peak_bytes / 1e6:.1f} MB: weights {memory.weight_bytes / 1e6:.1f} MB, activations "
        f"{memory.activation_bytes / 1e6:.1f} MB",
        *(f"note: {note}" for note in prediction.notes),
    ]


def _check_guesses(predictions: Sequence[Prediction]) -> None:
    """Exit with 1 if a prediction is a guess."""
    guess = next((prediction for prediction in predictions if prediction.is_guess), None)
    if guess is not None:
        fail(guess.notes[0], code=1)


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


def _prediction_table(model: str, prediction: Prediction) -> Table:
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
    return make_table(columns, rows, title=model)


def _format_evaluation(evaluation: PredictorEvaluation) -> list[Table | str]:
    from sparseflow.latency.measure.fingerprint import describe_threads

    rows = [
        (
            row.model,
            f"{row.level:.2f}",
            f"{row.predicted_ms:.3f}",
            f"{row.measured_ms:.3f}",
            f"{100 * row.error:+.1f} %",
            f"{format_interval(row.low_ms, row.high_ms)}{'' if row.in_interval else ' (missed)'}",
        )
        for row in evaluation.rows
    ]
    columns = ("model", ">load", ">predicted ms", ">measured ms", ">error", "interval ms")
    lines: list[Table | str] = [make_table(columns, rows, title=describe_threads(evaluation.threads))]
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
