"""`sparseflow tuning`: labels, the network that learns from them, and how well it ranks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from sparseflow.tuning.collect import Wanted

app = typer.Typer(
    name="tuning", help="Tuning: labels and a learned cost model for sparse kernels.", no_args_is_help=True
)

Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
Sets = Annotated[
    list[Path], typer.Argument(metavar="SET...", help="Folders of labels, as collect and import write them.")
]
Operators = Annotated[
    str | None, typer.Option(help="What to learn, such as spmm,spmv; by default all that has labels.")
]
Device = Annotated[str, typer.Option(help="Where to compute: cpu or cuda.")]
Families = Annotated[
    Path | None,
    typer.Option(help='JSON file {"net100": "net", …}: what to hold out together; by default names tell.'),
]


@app.callback()
def tuning() -> None:
    """Tuning: labels and a learned cost model for sparse kernels."""


@app.command()
def collect(
    out: Annotated[Path, typer.Option(help="Folder of the labels; what is in it is gone on with.")],
    matrices: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[MATRIX]...", help="Matrix Market files, .mtx or .mtx.gz, or folders of them."
        ),
    ] = None,
    synthetic: Annotated[int, typer.Option(min=0, help="Patterns to draw besides.")] = 0,
    operators: Annotated[
        str, typer.Option(help="What to measure on each, with the columns of dense operands.")
    ] = "spmm:64,spmm:256,spmv,sddmm:64",
    schedules: Annotated[int, typer.Option(min=1, help="Schedules to measure of each task.")] = 128,
    budget: Annotated[float | None, typer.Option(help="Seconds after which to stop.")] = None,
    dtype: Annotated[str, typer.Option(help="float32 or float64.")] = "float32",
    families: Families = None,
    seed: Annotated[int, typer.Option(min=0, help="What patterns and schedules are drawn from.")] = 0,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads; by default all CPUs.")] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Measure on a Ray cluster; auto is the one of this machine.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure schedules on real and drawn patterns, and write a label set.

    The same command goes on with a collection that was stopped, by whatever: no row is lost or repeated.
    """
    from sparseflow.cli.progress import progress_bar
    from sparseflow.errors import InputError
    from sparseflow.tuning.collect import collect as gather
    from sparseflow.tuning.families import read_families

    wanted_operators = _operators(operators)
    files = list(_files(matrices or []))
    if not files and not synthetic:
        raise InputError("there is nothing to measure on; name .mtx files or folders, or give --synthetic")
    known = {} if families is None else read_families(families)
    wanted = _wanted(files, synthetic, seed, wanted_operators, dtype, known)
    with progress_bar() as progress:
        found = gather(
            wanted, out, schedules=schedules, budget_s=budget, seed=seed, threads=threads, cluster=cluster,
            progress=progress,
        )  # fmt: skip
    if as_json:
        typer.echo(json.dumps(found.to_dict(), ensure_ascii=False))
        return
    rate = f", {found.added / found.seconds:.1f} a second" if found.added else ""
    typer.echo(f"{found.tasks} tasks, {found.fewest} rows or more of each")
    typer.echo(
        f"{found.rows} rows ({found.added} new{rate}), {found.failed} of them failed, {found.disturbed} were "
        "disturbed"
    )
    for where, why in found.broken.items():
        typer.echo(f"passed over: {where}: {why}")
    typer.echo(f"labels: {found.folder}")


@app.command("import")
def import_labels(
    file: Annotated[
        Path,
        typer.Argument(help="A table of matrix, schedule and latency_ms, or AutoSparse's lines; or .gz."),
    ],
    operator: Annotated[str, typer.Option(help="What was measured: spmm, spmv or sddmm.")],
    out: Annotated[Path, typer.Option(help="Folder that the labels are written to.")],
    n_cols: Annotated[
        int | None, typer.Option(help="Columns of dense operands; by default what schedules' splits cover.")
    ] = None,
    matrix: Annotated[str | None, typer.Option(help="Name of the matrix that plain lines are of.")] = None,
    matrices: Annotated[
        Path | None, typer.Option(help="Folder of the matrices' .mtx or .mtx.gz files, for their patterns.")
    ] = None,
    families: Families = None,
    device: Annotated[
        str | None, typer.Option(help="What it was measured on; by default the file's name.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32 or float64.")] = "float32",
    as_json: Json = False,
) -> None:
    """Make a label set of what AutoSparse measured; lines that are no label are counted and listed."""
    from sparseflow.cli.progress import progress_bar
    from sparseflow.tuning import importing
    from sparseflow.tuning.families import read_families

    known = None if families is None else read_families(families)
    with progress_bar() as progress:
        found = importing.import_labels(
            file, out, operator=operator, n_cols=n_cols, matrix=matrix, matrices=matrices, families=known,
            device=device, dtype=dtype, progress=progress,
        )  # fmt: skip
    told = found.to_dict()
    if as_json:
        typer.echo(json.dumps(told, ensure_ascii=False))
        return
    typer.echo(f"{found.rows} rows of {len(found.tasks)} tasks, of {found.patterns} the pattern is known")
    for kind, of in told["rejected"].items():
        typer.echo(f"rejected: {of['rows']} rows, {kind}; line {of['first_line']}: {of['first_reason']}")
    for doubt in found.doubts:
        typer.echo(f"in doubt: {doubt}")
    typer.echo(f"labels: {found.folder}; rejected lines: {found.folder / importing.REJECTED}")


@app.command()
def train(
    sets: Sets,
    out: Annotated[Path, typer.Option(help="Folder of the training; one that was stopped goes on.")],
    operators: Operators = None,
    hold_out: Annotated[
        str | None, typer.Option(help="Families not to learn from, such as Trec,net, but to be judged on.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="JSON file with settings of a training; options go before it.")
    ] = None,
    begin: Annotated[
        str | None, typer.Option(help="Network to go on from: a .safetensors file, or shipped.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Updates of the weights.")] = None,
    rate: Annotated[float | None, typer.Option(help="Highest learning rate.")] = None,
    loss: Annotated[str | None, typer.Option(help="margin, rank or lambda.")] = None,
    sampling: Annotated[
        str | None, typer.Option(help="naive: one operator and one matrix a step; mix: several of both.")
    ] = None,
    pattern: Annotated[
        str | None, typer.Option(help="How patterns are read: hdc, strided, or none of them.")
    ] = None,
    pooling: Annotated[str | None, typer.Option(help="Layers of the pattern's: concat or last.")] = None,
    joined: Annotated[
        str | None, typer.Option(help="How a pattern meets a schedule: input, cross or perceptron.")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers of the transformer.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="What weights and batches are drawn from.")] = None,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Train AutoSparse Net on labels; under torchrun, on several GPUs."""
    from sparseflow.cli.progress import progress_bar
    from sparseflow.errors import InputError
    from sparseflow.tuning.labels import LabelSet
    from sparseflow.tuning.net import train as training
    from sparseflow.tuning.net.dataset import Dataset
    from sparseflow.tuning.net.judge import summary

    settings = _settings(
        config, begin=begin, steps=steps, rate=rate, loss=loss, sampling=sampling, pattern=pattern,
        pooling=pooling, joined=joined, layers=layers, seed=seed,
    )  # fmt: skip
    wanted = training.TrainConfig.from_dict(settings)
    if device.partition(":")[0] not in ("cpu", "cuda"):
        raise InputError(f"`--device {device}` must be cpu or cuda")
    with progress_bar() as progress:
        data = Dataset.of([LabelSet.open(each) for each in sets], progress=progress)
        if operators is not None:
            chosen = _names(operators)
            data = data.only(lambda task: task.operator in chosen)
        held = None
        if hold_out is not None:
            data, held = data.hold_out(each.strip() for each in hold_out.split(","))
        trained = training.train(wanted, data, out, held_out=held, device=device, progress=progress)
    told = {
        "net": str(out / training.NET),
        "tasks": len(data.groups),
        "labels": data.schedules,
        "held_out": summary(trained.judged) if trained.judged else None,
        "limits": dict(trained.limits),
    }
    if as_json:
        typer.echo(json.dumps(told, ensure_ascii=False))
        return
    typer.echo(f"learnt from {data.schedules} labels of {len(data.groups)} tasks")
    if told["held_out"]:
        _echo_scores([{"model": "net", "operator": "all", **told["held_out"]}])
    for digest, cells in trained.limits.items():
        kept = f"at most {cells} cells of it" if cells else "nothing of it"
        typer.echo(f"did not fit into memory: the pattern of {data.names(digest)}; {kept} was looked at")
    typer.echo(f"network: {told['net']}")


@app.command("eval")
def evaluate(
    sets: Sets,
    out: Annotated[Path, typer.Option(help="Folder of the evaluation; one that was stopped goes on.")],
    models: Annotated[
        str, typer.Option(help="named: AutoSparse's networks and boosted trees; ablation; or both.")
    ] = "named",
    operators: Operators = None,
    folds: Annotated[int, typer.Option(min=2, help="Parts that families are held out in.")] = 4,
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each network in each fold.")] = 1,
    config: Annotated[
        Path | None, typer.Option(help="JSON file with what all trainings share; options go before it.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Updates of each network's weights.")] = None,
    device: Device = "cpu",
    workers: Annotated[int, typer.Option(min=1, help="Trainings at the same time.")] = 1,
    search: Annotated[
        list[Path] | None,
        typer.Option(help="A .mtx file to search for, with the model and without."),
    ] = None,
    problems: Annotated[str, typer.Option(help="What to search for there.")] = "spmm:64,spmv",
    trials: Annotated[int, typer.Option(min=1, help="Schedules that each search measures.")] = 100,
    net: Annotated[
        Path | None,
        typer.Option(help="A network that guided searches begin with; not one of this matrix."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Train networks without some families of matrices, judge them on those, and draw a page.

    The page shows losses and scores and, with --search, what the model saves a search: time, convergence, and
    where the time goes.
    """
    from sparseflow.cli.progress import progress_bar
    from sparseflow.core.environment import collect_environment
    from sparseflow.core.files import write_atomic
    from sparseflow.errors import InputError
    from sparseflow.tuning.comparing import compare_searches
    from sparseflow.tuning.labels import LabelSet
    from sparseflow.tuning.matrices import matrix_name, read_matrix
    from sparseflow.tuning.net.page import SCORES, SEARCHES, scores, write_page
    from sparseflow.tuning.net.saved import load
    from sparseflow.tuning.net.scoring import scorer
    from sparseflow.tuning.net.study import ablation, named, study
    from sparseflow.tuning.net.train import TrainConfig

    makers = {"named": (named,), "ablation": (ablation,), "both": (named, ablation)}
    if models not in makers:
        raise InputError(f"`--models {models}` must be one of: {', '.join(makers)}")
    base = TrainConfig.from_dict(_settings(config, steps=steps))
    there = dict.fromkeys(task.operator for each in sets for task in LabelSet.open(each).tasks)
    chosen = [name for name in there if operators is None or name in _names(operators)]
    entries = [entry for maker in makers[models] for entry in maker(base, chosen)]
    with progress_bar() as progress:
        rows = study(
            entries, sets, out, folds=folds, seeds=seeds, device=device, workers=workers, progress=progress
        )
        prior = None if net is None else partial(scorer, load(net))
        for path in search or []:
            matrix = read_matrix(path)
            for operator, n_cols in _operators(problems):
                compare_searches(
                    matrix_name(path), operator, matrix, out / SEARCHES, n_cols=n_cols, trials=trials,
                    prior=prior, progress=progress,
                )  # fmt: skip
    lines, circumstances = scores(rows), collect_environment(device)
    command = f"sparseflow tuning eval … --models {models} --folds {folds} --seeds {seeds}"
    page = write_page(out, environment=circumstances, reproduce=command)
    told = {"environment": circumstances, "command": command, "training": base.to_dict(), "scores": lines}
    told |= {"scores_known": scores(rows, known=True)}
    write_atomic(out / SCORES, json.dumps(told) + "\n")
    if as_json:
        typer.echo(json.dumps(told | {"page": str(page)}, ensure_ascii=False))
        return
    _echo_scores(lines)
    typer.echo(f"page: {page}")


@app.command()
def plot(
    folder: Annotated[Path, typer.Argument(help="Folder of an evaluation.")],
    as_json: Json = False,
) -> None:
    """Draw the page of an evaluation again."""
    from sparseflow.tuning.net.page import write_page

    page = write_page(folder)
    typer.echo(json.dumps({"page": str(page)}) if as_json else f"page: {page}")


def _settings(config: Path | None, **given: Any) -> dict[str, Any]:
    """Settings of a training as `TrainConfig.from_dict` reads them: a file's, then those of options."""
    from sparseflow.errors import FileFormatError, InputError
    from sparseflow.tuning.net.model import NetConfig
    from sparseflow.tuning.net.pattern import PatternConfig
    from sparseflow.tuning.net.shipped import network

    found: dict[str, Any] = {}
    if config is not None:
        if not config.is_file():
            raise InputError(f"there is no file {config}")
        try:
            found = json.loads(config.read_bytes())
        except ValueError as error:
            raise FileFormatError(f"{config} is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise FileFormatError(f"{config} must hold one object of settings")
    options = {name: value for name, value in given.items() if value is not None}
    begin = options.get("begin", found.get("begin"))
    made = NetConfig() if begin is None else network(begin).config
    net = made.to_dict() | found.get("net", {})
    reader = options.pop("pattern", None)
    pooling = options.pop("pooling", None)
    if reader == "none":
        net["pattern"] = None
    elif reader is not None or pooling is not None:
        before = net["pattern"] or PatternConfig().to_dict()
        net["pattern"] = (
            before | ({"kind": reader} if reader else {}) | ({"pooling": pooling} if pooling else {})
        )
    net |= {name: options.pop(name) for name in ("joined", "layers") if name in options}
    if "sampling" in options:
        options["sampling"] = found.get("sampling", {}) | {"mode": options["sampling"]}
    return found | options | {"net": net}


def _names(given: str) -> tuple[str, ...]:
    """`"spmm,spmv"` as names of operators."""
    from sparseflow.tuning.operators import operator

    return tuple(operator(name.strip()).name for name in given.split(","))


def _echo_scores(lines: Iterable[Mapping[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    from sparseflow.tuning.net.judge import TOP

    table = Table(title="Scores on held-out matrices, and in brackets a random pick's from the same pools")
    table.title_justify = "left"
    table.add_column("model", no_wrap=True)
    table.add_column("operator")
    for k in TOP:
        table.add_column(f"top-{k}", justify="right")
    for line in lines:
        shown = (line[f"top{k}"] for k in TOP)
        table.add_row(
            line["model"],
            line["operator"],
            *(f"{one['mean']:.3f} ({one['random']:.3f})" for one in shown),
        )
    Console().print(table)


def _operators(given: str) -> list[tuple[str, int | None]]:
    """`"spmm:64,spmv"` as names and columns."""
    from sparseflow.errors import InputError
    from sparseflow.tuning.operators import operator

    found: list[tuple[str, int | None]] = []
    for text in given.split(","):
        name, colon, width = text.partition(":")
        wide = bool(operator(name).dense_axes)
        if wide != bool(colon) or (wide and not (width.isascii() and width.isdigit() and int(width) > 0)):
            expected = f"{name}:64, with its columns" if wide else f"{name} alone"
            raise InputError(f"`--operators {given}`: {text!r} must be {expected}")
        found.append((name, int(width) if wide else None))
    return list(dict.fromkeys(found))


def _files(given: Iterable[Path]) -> Iterator[Path]:
    """The Matrix Market files that are named, and those in folders that are."""
    from sparseflow.errors import InputError
    from sparseflow.tuning.matrices import SUFFIXES

    for path in given:
        if path.is_dir():
            inside = sorted(file for file in path.iterdir() if file.name.endswith(SUFFIXES))
            if not inside:
                raise InputError(f"{path} holds no {' or '.join(SUFFIXES)} file")
            yield from inside
        elif path.is_file():
            yield path
        else:
            raise InputError(f"there is no file {path}")


def _wanted(
    files: Iterable[Path],
    synthetic: int,
    seed: int,
    operators: list[tuple[str, int | None]],
    dtype: str,
    families: dict[str, str],
) -> Iterator[Wanted]:
    """What labels are wanted of, read and drawn one pattern after the other."""
    import numpy as np

    from sparseflow.tuning.collect import Wanted
    from sparseflow.tuning.families import family_of
    from sparseflow.tuning.matrices import Pattern, matrix_name, read_matrix
    from sparseflow.tuning.synthetic import KINDS, draw

    def patterns() -> Iterator[tuple[str, Pattern]]:
        for file in files:
            yield matrix_name(file), read_matrix(file).pattern
        kinds = tuple(KINDS)
        for number in range(synthetic):
            # Each has a generator of its own: more of them begin with the same ones.
            rng = np.random.default_rng([seed, number])
            yield draw(rng, kind=kinds[number % len(kinds)])

    for name, pattern in patterns():
        for operator, n_cols in operators:
            yield Wanted(
                operator=operator,
                matrix=name,
                pattern=pattern,
                n_cols=n_cols,
                dtype=dtype,
                family=family_of(name, families),
            )
