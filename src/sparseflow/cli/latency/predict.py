"""`train`, `predict`, `evaluate`, `overlap` and `quickstart`: from measurements to what a model will take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparseflow.cli.latency.base import (
    Json,
    Labels,
    MaxAge,
    PredictorFile,
    Provider,
    Shapes,
    Url,
    app,
    shapes_of,
    telemetry_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sparseflow.latency.evaluate import Evaluation
    from sparseflow.latency.predictor import Prediction

SHOWN_KERNELS = 15


@app.command()
def train(
    collections: Annotated[list[Path], typer.Argument(help="Folders that `latency collect` wrote.")],
    out: Annotated[Path, typer.Option(help="File that gets the predictor.")] = Path("predictor.json"),
    kind: Annotated[
        str | None,
        typer.Option(help="Regressor: ratio, xgboost or random_forest; by default the best of them."),
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            help="How kernels compose: sum, critical_path where `overlap` says so, or queue, the default "
            "where kernels were collected in a stream."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="What splits and trees are drawn from.")] = 0,
    as_json: Json = False,
) -> None:
    """Learn a predictor of this device, and show how good it is on kernels and models held out."""
    from rich.console import Console

    from sparseflow.cli.progress import progress_bar
    from sparseflow.latency.train import train as learn

    with progress_bar() as progress:
        predictor = learn(collections, kind=kind, mode=mode, seed=seed, progress=progress)
    path = predictor.save(out)
    if as_json:
        record = {"path": str(path), **predictor.quality, "fingerprint": predictor.fingerprint.to_dict()}
        typer.echo(json.dumps(record, ensure_ascii=False))
        return
    console = Console()
    console.print(_kernel_quality(predictor.quality))
    if predictor.quality["models"]:
        console.print(_model_quality(predictor.quality))
    mark = predictor.fingerprint
    console.print(f"{mark.name}, {mark.provider}: {path}", markup=False)


def _kernel_quality(quality: Mapping[str, Any]) -> Any:
    from rich.table import Table

    table = Table(
        "regressor", "held out", "kernels", "MAPE", "within 10 %", title="kernels", title_justify="left"
    )
    said = {
        "by_kernel": "whole kernels",
        "by_network": "whole networks",
        "leaky": "rows (leaky: never trust it)",
    }
    for kind, splits in quality["kernels"].items():
        chosen = " *" if kind == quality["kind"] else ""
        for split, scores in splits.items():
            table.add_row(kind + chosen, said[split], *_scores(scores))
    return table


def _model_quality(quality: Mapping[str, Any]) -> Any:
    from rich.table import Table

    table = Table(
        "", "models", "MAPE", "within 10 %", title="models, their network held out", title_justify="left"
    )
    said = {"rest": "at rest", "loaded": "beside loads", "loaded_blind": "beside loads, not told of them"}
    for part, scores in quality["models"].items():
        table.add_row(said[part], *_scores(scores))
    return table


def _scores(scores: Mapping[str, float]) -> tuple[str, str, str]:
    return str(scores["count"]), f"{100 * scores['mape']:.1f} %", f"{100 * scores['within_10']:.0f} %"


@app.command()
def predict(
    model: Annotated[Path, typer.Argument(help="An ONNX file, or the folder of an analysed one.")],
    predictor: PredictorFile = Path("predictor.json"),
    load: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Share of the device that others use; by default none."),
    ] = None,
    live: Annotated[
        str | None, typer.Option(help="Read the load that is there now: host, gpm or prometheus.")
    ] = None,
    url: Url = None,
    label: Labels = None,
    max_age: MaxAge = 30.0,
    window: Annotated[float, typer.Option(help="Seconds that live load is averaged over.")] = 1.0,
    shape: Shapes = None,
    gpu: Annotated[int, typer.Option(min=0, help="Number of the GPU.")] = 0,
    seed: Annotated[int, typer.Option(help="What quantiles are drawn from.")] = 0,
    as_json: Json = False,
) -> None:
    """Say what a model will take: mean, median, 95th percentile and interval, kernel by kernel."""
    from rich.console import Console

    from sparseflow.errors import InputError
    from sparseflow.latency.predicting import predict as ask
    from sparseflow.latency.predictor import Predictor

    if load is not None and live is not None:
        raise InputError("give `--load` or `--live`, not both")
    if (url is not None or label) and live != "prometheus":
        raise InputError("`--url` and `--label` need `--live prometheus`")
    one = Predictor.load(predictor)
    found = ask(
        model,
        one,
        load=None if load is None else {one.sharing.metric: load},
        live=None if live is None else telemetry_of(live, url, label, max_age),
        window_s=window,
        shapes=shapes_of(shape),
        gpu=gpu,
        seed=seed,
    )
    if as_json:
        typer.echo(json.dumps({"model": str(model), **found.to_dict()}, ensure_ascii=False))
        return
    _show(Console(), model, found, one.sharing.metric)


def _show(console: Any, model: Path, found: Prediction, metric: str) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table("kernel", "nodes", "each", "together", "share", "from", title=escape(str(model)))
    table.title_justify = "left"
    for kernel in found.per_kernel[:SHOWN_KERNELS]:
        together = kernel.count * kernel.mean_ms
        table.add_row(
            kernel.kernel_id, str(kernel.count), f"{kernel.mean_ms:.4f} ms", f"{together:.3f} ms",
            f"{100 * together / found.mean_ms:.1f} %", kernel.source,
        )  # fmt: skip
    rest = found.per_kernel[SHOWN_KERNELS:]
    if rest:
        together = sum(k.count * k.mean_ms for k in rest)
        table.add_row(
            f"… {len(rest)} more", str(sum(k.count for k in rest)), "", f"{together:.3f} ms",
            f"{100 * together / found.mean_ms:.1f} %", "",
        )  # fmt: skip
    if round(found.call_ms, 3):
        table.add_row("the call", "1", "", f"{found.call_ms:.3f} ms", "", "learned")
    console.print(table)
    low, high = found.interval
    console.print(
        f"mean {found.mean_ms:.3f} ms ({100 * found.interval_coverage:.0f} % interval {low:.3f} to "
        f"{high:.3f}), p50 {found.p50_ms:.3f} ms, p95 {found.p95_ms:.3f} ms",
        markup=False,
    )
    load = f"beside {metric} {100 * found.load[metric]:.0f} %" if found.load else "no load"
    console.print(
        f"at rest {found.rest_ms:.3f} ms; {load}: {found.slowdown:.2f}x; {100 * found.coverage:.0f} % of it "
        f"from kernels whose operator was measured",
        markup=False,
    )


@app.command()
def evaluate(
    models: Annotated[list[Path], typer.Argument(help="ONNX files, or folders of them.")],
    predictor: PredictorFile = Path("predictor.json"),
    level: Annotated[
        list[float] | None, typer.Option(help="Load to make, 0 to 1; several times. By default none.")
    ] = None,
    stressor: Annotated[str | None, typer.Option(help="cpu-fma, cpu-stream, gpu-matmul or gpu-copy.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Visits to each model at each level.")] = 3,
    seconds: Annotated[float, typer.Option(min=0.1, help="Least time of a visit.")] = 0.5,
    out: Annotated[
        Path | None, typer.Option(help="Folder that keeps the measurements, and gets report.html.")
    ] = None,
    gpu: Annotated[int, typer.Option(min=0, help="Number of the GPU.")] = 0,
    seed: Annotated[int, typer.Option(help="What orders and quantiles are drawn from.")] = 0,
    as_json: Json = False,
) -> None:
    """Run models and compare with what the predictor says, at rest and beside loads."""
    from rich.console import Console

    from sparseflow.cli.progress import progress_bar
    from sparseflow.core.environment import collect_environment
    from sparseflow.latency.evaluate import evaluate as judge
    from sparseflow.latency.predictor import Predictor
    from sparseflow.latency.report import write_report

    one = Predictor.load(predictor)
    with progress_bar() as progress:
        found = judge(
            models, one, levels=level or [0.0], stressor=stressor, rounds=rounds, seconds=seconds,
            out=None if out is None else out / "measurements", gpu=gpu, seed=seed, progress=progress,
        )  # fmt: skip
    page = None
    if out is not None:
        told = " ".join(f"--level {each:g}" for each in level or [0.0])
        named = " ".join(map(str, models))
        page = write_report(
            found,
            out,
            quality=one.quality,
            environment=collect_environment(
                "cpu" if one.fingerprint.kind == "cpu" else f"cuda:{gpu}", seed=seed
            ),
            reproduce=f"sparseflow latency evaluate {named} --predictor {predictor} {told}",
        )
    if as_json:
        record = found.to_dict() | {"report": None if page is None else str(page)}
        typer.echo(json.dumps(record, ensure_ascii=False))
        return
    _show_evaluation(Console(), found)
    if page is not None:
        typer.echo(f"report: {page}")


def _show_evaluation(console: Any, found: Evaluation) -> None:
    from rich.table import Table

    table = Table("model", "load", "predicted ms", "measured ms", "error", "interval ms")
    for row in found.rows:
        table.add_row(
            row.model, f"{row.level:.2f}", f"{row.predicted_ms:.3f}", f"{row.measured_ms:.3f}",
            f"{100 * row.error:+.1f} %",
            f"{row.low_ms:.3f}–{row.high_ms:.3f}{'' if row.within else ' (missed)'}",
        )  # fmt: skip
    console.print(table)
    for part in found.summary():
        slow = part["slowdown"], part["predicted_slowdown"]
        told = "" if None in slow else f", slowdown {slow[0]:.2f}x (predicted {slow[1]:.2f}x)"
        console.print(
            f"load {part['level']:.2f}: MAPE {100 * part['mape']:.1f} %, {100 * part['within_10']:.0f} % of "
            f"{part['models']} models within 10 %{told}",
            markup=False,
        )


@app.command()
def overlap(
    model: Annotated[Path, typer.Argument(help="An ONNX file.")],
    provider: Provider = "cpu",
    parallel: Annotated[
        bool, typer.Option("--parallel", help="Use onnxruntime's parallel executor.")
    ] = False,
    shape: Shapes = None,
    gpu: Annotated[int, typer.Option(min=0, help="Number of the GPU.")] = 0,
    as_json: Json = False,
) -> None:
    """See whether kernels of a model run at the same time: what adds up is their sum or the longest path."""
    from sparseflow.latency.overlap import analyze

    found = analyze(model, provider, parallel=parallel, shapes=shapes_of(shape), gpu=gpu)
    if as_json:
        typer.echo(json.dumps({"model": str(model), **found.to_dict()}, ensure_ascii=False))
        return
    typer.echo(
        f"{found.nodes} nodes ran {found.busy_ms:.2f} ms in {found.span_ms:.2f} ms, "
        f"{100 * found.share:.1f} % of it beside another: {found.mode}"
    )


@app.command()
def quickstart(
    out: Annotated[Path, typer.Option(help="Folder that gets everything.")] = Path("latency-quickstart"),
    provider: Provider = "cpu",
    zoo: Annotated[
        str, typer.Option(help="Models to learn from: a zoo's YAML file or a shipped one.")
    ] = "quickstart",
    as_json: Json = False,
) -> None:
    """From export to evaluation on a few networks, beside loads too: some minutes, and a report at the end.

    The same command goes on with what was stopped.
    """
    from rich.console import Console

    from sparseflow.cli.progress import progress_bar
    from sparseflow.latency.quickstart import quickstart as go

    with progress_bar() as progress:
        found = go(out, zoo_config=zoo, provider=provider, progress=progress)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), ensure_ascii=False))
        return
    console = Console()
    _show_evaluation(console, found.evaluation)
    console.print("These models were learned from. Networks that were held out instead:")
    console.print(_model_quality(found.quality))
    typer.echo(f"predictor: {found.predictor_path}")
    typer.echo(f"report: {found.report_path}")
