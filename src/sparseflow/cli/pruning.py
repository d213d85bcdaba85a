"""`sparseflow pruning`: train, judge, cut and time a video transformer that drops tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Callable


app = typer.Typer(add_completion=False, no_args_is_help=True)

Config = Annotated[str, typer.Option(help="A YAML file, or one that is shipped: moving_digits, ast2_ucf101.")]
Set = Annotated[
    list[str] | None, typer.Option("--set", help="train.epochs=3: goes before the file's; may be repeated.")
]
Device = Annotated[str, typer.Option(help="Where to compute: cpu or cuda.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output and nothing else.")]
Model = Annotated[Path, typer.Argument(help="A model.safetensors of a training, or a compact one.")]


@app.callback()
def pruning() -> None:
    """Train, judge, cut and time a video transformer that drops tokens."""


@app.command()
def train(
    config: Config,
    out: Annotated[Path, typer.Option(help="Folder of the training; one that was stopped goes on.")],
    changes: Set = None,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Train a model; under torchrun, on several GPUs."""
    from sparseflow.cli.options import open_device
    from sparseflow.cli.progress import progress_bar
    from sparseflow.pruning.train import MODEL
    from sparseflow.pruning.train import train as run

    settings = _settings(config, changes)
    with progress_bar() as progress:
        trained = run(settings, out, device=open_device(device), progress=progress)
    if trained.accuracy is None:
        return  # another process tells
    told = {
        "model": str(out / MODEL), "report": str(out / "report.html"), **trained.accuracy.to_dict(),
        **trained.stats,
    }  # fmt: skip
    if as_json:
        typer.echo(json.dumps(told))
        return
    _echo_accuracy(told)
    for name, value in trained.stats.items():
        if name.startswith("sparsity_") and value:
            typer.echo(f"{name}: {value:.1%}")
    typer.echo(f"model: {told['model']}")
    typer.echo(f"page: {told['report']}")


@app.command("eval")
def evaluate(
    model: Model,
    config: Config,
    changes: Set = None,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Judge a model on the test side of the data, by clips and by videos."""
    from sparseflow.cli.options import open_device
    from sparseflow.cli.progress import progress_bar
    from sparseflow.errors import InputError
    from sparseflow.pruning.datasets import data_of
    from sparseflow.pruning.evaluate import evaluate as judge
    from sparseflow.pruning.saved import load

    settings, chosen = _settings(config, changes), open_device(device)
    loaded = load(model)
    with progress_bar() as progress:
        data = data_of(settings, progress=_of(progress, "counting frames"))
        if len(data.classes) != loaded.config.num_classes:
            raise InputError(
                f"{model} tells {loaded.config.num_classes} classes apart, and the data of {config} has "
                f"{len(data.classes)}: judge it on what it was trained for"
            )
        found = judge(
            loaded, data.test, batch_size=settings.train.batch_size, workers=settings.train.workers,
            device=chosen, progress=_of(progress, "judging clips"),
        )  # fmt: skip
    if as_json:
        typer.echo(json.dumps(found.to_dict() | {"videos": len(found.right)}))
        return
    _echo_accuracy(found.to_dict())


@app.command()
def compact(
    model: Model,
    out: Annotated[Path, typer.Option(help="The .safetensors file to write.")],
    as_json: Json = False,
) -> None:
    """Cut a model to what its gates leave and its stages keep."""
    from sparseflow.pruning import compact as cut
    from sparseflow.pruning.compact import units
    from sparseflow.pruning.flops import flops
    from sparseflow.pruning.profile import dense
    from sparseflow.pruning.saved import load, save

    whole = load(model)
    found = cut(whole)
    save(found, out)
    told = {
        "model": str(out),
        "units": units(found),
        "gflops": flops(found)["total"] / 1e9,
        "dense_gflops": (flops(whole) if whole.compacted else flops(dense(whole)))["total"] / 1e9,
        "parameters": sum(each.numel() for each in found.parameters()),
        "parameters_before": sum(each.numel() for each in whole.parameters()),
    }
    if as_json:
        typer.echo(json.dumps(told))
        return
    typer.echo(f"{told['gflops']:.3f} GFLOP a clip, {told['dense_gflops']:.3f} before")
    typer.echo(f"{told['parameters']:,} weights, {told['parameters_before']:,} before")
    typer.echo(f"model: {out}")


@app.command()
def profile(
    model: Annotated[Path | None, typer.Argument(help="A model of a training; else random weights.")] = None,
    config: Annotated[str | None, typer.Option(help="What to make with random weights.")] = None,
    changes: Set = None,
    batch: Annotated[int, typer.Option(min=1, help="Clips of a call.")] = 8,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    compiled: Annotated[bool, typer.Option("--compile", help="Compile each with torch.compile.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Timed calls of each.")] = 20,
    fit: Annotated[
        Path | None, typer.Option(help="Fit a cost model for the latency loss, too, and write it here.")
    ] = None,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Time a model dense, masked and compact against each other."""
    import torch

    from sparseflow.cli.options import open_device
    from sparseflow.cli.progress import progress_bar
    from sparseflow.errors import InputError
    from sparseflow.pruning import latency
    from sparseflow.pruning.profile import profile as measure
    from sparseflow.pruning.saved import load

    if (model is None) == (config is None):
        raise InputError("name a model, or a `--config` to make one with random weights")
    if changes and config is None:
        raise InputError("`--set` changes a `--config`, and there is none: a model is what it is")
    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype not in kinds:
        raise InputError(f"`--dtype {dtype}` must be one of: {', '.join(kinds)}")
    if model is not None:
        loaded = load(model)
    else:
        assert config is not None
        settings = _settings(config, changes)
        classes, channels = (8, 1) if settings.data.kind == "moving_digits" else (101, 3)
        torch.manual_seed(settings.train.seed)
        loaded = settings.make(classes, channels).eval()
    chosen = open_device(device)
    with progress_bar() as progress:
        found = measure(
            loaded, batch=batch, device=chosen, dtype=kinds[dtype], compiled=compiled, rounds=rounds,
            progress=_of(progress, "timing"),
        )  # fmt: skip
        cost = None
        if fit is not None:
            cost = latency.fit(
                loaded, batch=batch, device=chosen, dtype=kinds[dtype], progress=_of(progress, "fitting")
            )
            cost.save(fit)
    names = list(found.comparison.times_ms)
    rows = [
        {
            "model": name,
            "clips_per_s": found.clips_per_s(name),
            "latency_ms": found.comparison.samples(name).median_ms,
            "speedup": vars(found.comparison.speedup(name)),
            "gflops": found.flops[name] / 1e9,
        }
        for name in names
    ]
    if as_json:
        told: dict[str, Any] = {"profile": rows, "error": found.error}
        if cost is not None:
            told["fit"] = {"file": str(fit), "error": cost.error, "coefficients": cost.coefficients}
        typer.echo(json.dumps(told))
        return
    for row in rows:
        speedup = row["speedup"]
        typer.echo(
            f"{row['model']:12s} {row['clips_per_s']:9.1f} clips/s  {speedup['median']:.2f}x "
            f"({speedup['low']:.2f} to {speedup['high']:.2f})  {row['gflops']:.3f} GFLOP a clip"
        )
    typer.echo(f"the compact model's scores differ by {found.error:.1e} of the largest")
    if cost is not None:
        typer.echo(f"cost model: {fit}; off by {cost.error:.1%} on models that it had not seen, median")


@app.command()
def compare(
    config: Config,
    out: Annotated[Path, typer.Option(help="Folder of the comparison; one that was stopped goes on.")],
    changes: Set = None,
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each model.")] = 5,
    only: Annotated[
        str | None, typer.Option(help="Models to train, such as dense,ast,random; by default all.")
    ] = None,
    parts: Annotated[
        bool, typer.Option("--ablations", help="Also AST without one of its parts, and one frame.")
    ] = False,
    workers: Annotated[int, typer.Option(min=1, help="Trainings at the same time.")] = 1,
    batch: Annotated[int, typer.Option(min=1, help="Clips of a call that is timed.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Timed calls of each.")] = 20,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Train AST and its rivals at equal kept tokens, and set accuracy against measured latency."""
    from sparseflow.cli.options import open_device
    from sparseflow.cli.progress import progress_bar
    from sparseflow.errors import InputError
    from sparseflow.pruning import compare as comparing
    from sparseflow.pruning.page import write_comparison

    settings = _settings(config, changes)
    entries = comparing.rivals(settings) + (comparing.ablations(settings) if parts else [])
    if only is not None:
        names = [each.strip() for each in only.split(",")]
        unknown = sorted(set(names) - {entry.name for entry in entries})
        if unknown:
            there = ", ".join(entry.name for entry in entries)
            raise InputError(f"`--only` names {', '.join(unknown)}; there are: {there}")
        entries = [entry for entry in entries if entry.name in names]
    open_device(device)
    with progress_bar() as progress:
        rows = comparing.compare(entries, out, seeds=seeds, device=device, workers=workers, progress=progress)
        times = []
        if comparing.DENSE in {entry.name for entry in entries}:
            times = comparing.latencies(
                entries, out, batch=batch, device=device, rounds=rounds, progress=_of(progress, "timing")
            )
    chosen = {
        "--set": changes or [],
        "--only": [only] if only else [],
        "--batch": [batch],
        "--rounds": [rounds],
    }
    options = " ".join(f"{name} {value}" for name, values in chosen.items() for value in values)
    command = (
        f"sparseflow pruning compare --config {config} --seeds {seeds} {options} --device {device}"
        f"{' --ablations' if parts else ''} --out …"
    )
    told = comparing.write_results(out, rows, times, settings=settings, device=device, command=command)
    page = write_comparison(out, told)
    if as_json:
        shown = {name: told[name] for name in ("models", "latency")}
        typer.echo(json.dumps(shown | {"page": str(page)}))
        return
    speed = {line["model"]: line for line in times}
    for line in told["models"]:
        cost = speed.get(line["model"])
        typer.echo(
            f"{line['model']:18s} {line['accuracy']:.2%} ({line['accuracy_low']:.2%} to "
            f"{line['accuracy_high']:.2%})"
            + (f"  {cost['speedup']:.2f}x dense, {cost['gflops']:.3f} GFLOP a clip" if cost else "")
        )
    typer.echo(f"page: {page}")


def _settings(config: str, changes: list[str] | None) -> Any:
    """The settings of a file, with what `--set` says."""
    from sparseflow.core.config import parse_overrides
    from sparseflow.pruning.settings import read_settings

    return read_settings(config, parse_overrides(changes or [], extra="pruning"))


def _of(progress: Callable[[str, float], None], what: str) -> Callable[[int, int], None]:
    return lambda done, of: progress(f"{what}, {done} of {of}", done / of)


def _echo_accuracy(told: dict[str, Any]) -> None:
    typer.echo(
        f"{told['video_top1']:.2%} of videos right (top-5 {told['video_top5']:.2%}), "
        f"{told['clip_top1']:.2%} of clips"
    )
