"""`check`: limits of predicted latencies for continuous integration."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from sparseflow.cli.latency.base import (
    PredictorOption,
    app,
    parse_inputs,
    parse_shapes,
    select_predictor,
)
from sparseflow.cli.options import (
    InferredDeviceOption,
    InputValuesOption,
    JsonOption,
    LoadOption,
    OptionalBudgetMsOption,
    SeedOption,
    ShapesOption,
    check_out_file,
)
from sparseflow.cli.output import emit, fail, make_table
from sparseflow.cli.progress import progress_bar

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.table import Table

    from sparseflow.latency.check import CheckResult


@app.command()
def check(
    models: Annotated[
        list[Path], typer.Argument(help="ONNX models, directories of them, or of analyzed models.")
    ],
    predictor: PredictorOption = None,
    budget_ms: OptionalBudgetMsOption = None,
    statistic: Annotated[
        Literal["mean", "p95", "high"],
        typer.Option(help="Latency that the budget limits; high is the high end of the interval."),
    ] = "mean",
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="Exit with 1 if more than 5 % of the latency is a guess or nothing bounds it."
        ),
    ] = False,
    max_guess: Annotated[
        str | None,
        typer.Option(metavar="PERCENT", help="Largest share of guesses, such as 10%; implies --strict."),
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Latencies of an earlier check, as JSON."),
    ] = None,
    max_regression: Annotated[
        str, typer.Option(metavar="PERCENT", help="Largest increase over the baseline.")
    ] = "5%",
    update_baseline: Annotated[
        bool, typer.Option("--update-baseline", help="Write the latencies to the baseline.")
    ] = False,
    junit: Annotated[
        Path | None,
        typer.Option(metavar="FILE", callback=check_out_file, help="Write a JUnit report to this file."),
    ] = None,
    load: LoadOption = None,
    shape: ShapesOption = None,
    value: InputValuesOption = None,
    device: InferredDeviceOption = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Check predicted latencies against a budget or a baseline, without running the models.

    Exits with 1 if a model is beyond a limit, and with 2 if a model has no prediction. `--shape` and
    `--input` apply to all models with this input or open dimension, and as MODEL:NAME=VALUE to one.
    """
    from sparseflow.errors import InputError
    from sparseflow.latency.check import LatencyBaseline, check_models
    from sparseflow.latency.junit import write_junit
    from sparseflow.latency.model.predictor import MAX_GUESS_SHARE

    if budget_ms is None and baseline is None and not strict and max_guess is None:
        raise InputError("there is no limit to check: give `--budget-ms`, `--baseline` or `--strict`")
    if update_baseline and baseline is None:
        raise InputError("`--update-baseline` needs the file to write, `--baseline FILE`")
    if update_baseline and baseline is not None:
        check_out_file(baseline)
    max_guess_share = MAX_GUESS_SHARE if strict else None
    if max_guess is not None:
        max_guess_share = _parse_percentage("--max-guess", max_guess)
    fitted, gpu = select_predictor(predictor, device)
    with progress_bar() as progress:
        result = check_models(
            models,
            fitted,
            budget_ms=budget_ms,
            statistic=statistic,
            max_guess=max_guess_share,
            baseline=None if baseline is None or update_baseline else LatencyBaseline.load(baseline),
            max_regression=_parse_percentage("--max-regression", max_regression),
            load=load,
            shapes=parse_shapes(shape),
            inputs=parse_inputs(value),
            gpu=gpu,
            seed=seed,
            progress=progress,
        )
    if junit is not None:
        write_junit(result, junit)
    if update_baseline and baseline is not None:
        previous = LatencyBaseline.load(baseline) if baseline.is_file() else None
        result.make_baseline(previous).save(baseline, indent=1)
    emit(result.to_dict(), as_json, _result_table(result), *_format_problems(result))
    num_failed, num_errors = result.counts["failed"], result.counts["error"]
    if num_failed or num_errors:
        num_models = len(result.models)
        texts = [f"{num_failed} of {num_models} models are beyond a limit"] if num_failed else []
        texts += [f"{num_errors} of {num_models} models have no prediction"] if num_errors else []
        fail("; ".join(texts), code=2 if num_errors else 1)


def _parse_percentage(option: str, text: str) -> float:
    """Parse a percentage such as `5%` as a share.

    Raises:
        InputError: It has another form, or is negative.
    """
    from sparseflow.errors import InputError

    try:
        share = float(text.removesuffix("%")) / 100.0
    except ValueError:
        share = math.nan
    if not text.endswith("%") or not 0.0 <= share < math.inf:
        raise InputError(f"`{option} {text}` must be a percentage, such as 5%")
    return share


def _result_table(result: CheckResult) -> Table:
    rows = []
    for model in result.models:
        cells = ["–"] * 4
        if model.prediction is not None:
            _, high_ms = model.prediction.interval
            cells[0] = f"{model.prediction.mean_ms:.3f}"
            cells[1] = "unbounded" if math.isinf(high_ms) else f"{high_ms:.3f}"
            cells[2] = f"{100 * (1.0 - model.prediction.coverage):.0f} %"
        if model.change is not None:
            cells[3] = f"{100 * model.change:+.1f} %"
        rows.append((model.name, model.status, *cells))
    columns = ("model", "status", ">mean ms", ">high ms", ">guess", ">change")
    return make_table(columns, rows)


def _format_problems(result: CheckResult) -> Iterator[str]:
    for model in result.models:
        yield from (f"{model.name}: {problem}" for problem in model.problems)
