"""Commands that train controllers and judge them against what needs no training: `train`, `eval`, `plot`."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparseflow.cli.adaptive.base import Archives, Device, Json, Model, QuestionsFile, Set, app

if TYPE_CHECKING:
    from sparseflow.adaptive.study import StudyConfig

ProfileFile = Annotated[Path, typer.Option("--profile", help="What `profile` measured (Parquet).")]
Out = Annotated[Path, typer.Option(help="Folder of the study; one that was stopped goes on.")]
Samples = Annotated[int, typer.Option(min=1, help="Questions that are learnt from, at most.")]
Validation = Annotated[
    int, typer.Option(min=1, help="Questions that margins and weights are chosen by, at most.")
]
Test = Annotated[int, typer.Option(min=1, help="Questions to judge on, at most.")]
Budgets = Annotated[int, typer.Option(min=3, help="Budgets to judge at, at equal ratios.")]
Attainment = Annotated[float | None, typer.Option(help="Share of answers that must be in time.")]


@app.command()
def train(
    context: typer.Context,
    model: Model,
    profile_file: ProfileFile,
    out: Out,
    questions: QuestionsFile = None,
    config: Annotated[str, typer.Option(help="A YAML file, or one that is shipped: grpo.")] = "grpo",
    changes: Set = None,
    seeds: Annotated[int, typer.Option(min=1, help="Trainings, each from another seed.")] = 3,
    samples: Samples = 2048,
    validation: Validation = 1024,
    test: Test = 2048,
    budgets: Budgets = 24,
    attainment: Attainment = None,
    archives: Archives = None,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Train controllers of a model by GRPO, and judge them against their rivals; under torchrun, on several
    GPUs."""
    from sparseflow.adaptive.study import train as run
    from sparseflow.adaptive.training.config import read_config
    from sparseflow.cli.progress import progress_bar
    from sparseflow.core.config import parse_overrides

    settings = read_config(config, parse_overrides(changes or [], extra="adaptive"))
    asked = _asked(
        context, model, profile_file, out, questions, (samples, validation, test), budgets, attainment,
        archives, device,
    )  # fmt: skip
    with progress_bar() as progress:
        found = run(asked, settings, seeds=seeds, progress=progress)
    if found is not None:  # else another process tells
        _tell(found, out, as_json)


@app.command("eval")
def evaluate(
    context: typer.Context,
    model: Model,
    profile_file: ProfileFile,
    out: Out,
    questions: QuestionsFile = None,
    controller: Annotated[Path | None, typer.Option(help="Trained controllers (safetensors).")] = None,
    samples: Samples = 2048,
    validation: Validation = 1024,
    test: Test = 2048,
    budgets: Budgets = 24,
    attainment: Attainment = None,
    archives: Archives = None,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Judge plans of a model, what chooses among them without training, and controllers if given."""
    from sparseflow.adaptive.study import evaluate as run
    from sparseflow.cli.progress import progress_bar

    asked = _asked(
        context, model, profile_file, out, questions, (samples, validation, test), budgets, attainment,
        archives, device,
    )  # fmt: skip
    with progress_bar() as progress:
        found = run(asked, controllers=controller, progress=progress)
    if found is not None:
        _tell(found, out, as_json)


@app.command()
def plot(
    context: typer.Context,
    folder: Annotated[
        Path | None, typer.Argument(help="Of a study: its judged.json and histories are drawn.")
    ] = None,
    profile_file: Annotated[
        Path | None, typer.Option("--profile", help="Without a folder: what `profile` measured.")
    ] = None,
    worth: Annotated[
        Path | None, typer.Option(help="Without a folder: how good its plans are, as `eval` writes it.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The page; report.html in the folder.")] = None,
    as_json: Json = False,
) -> None:
    """Draw a study's page again, or one of a profile and the worth of its plans alone."""
    from sparseflow.adaptive.profile import PlanProfile
    from sparseflow.adaptive.profile.plan_quality import PlanQuality
    from sparseflow.adaptive.study.page import PAGE, write_findings, write_page
    from sparseflow.adaptive.study.results import of_worth
    from sparseflow.errors import InputError

    alone = profile_file is not None and worth is not None
    if (folder is None) != alone or (folder is not None and (profile_file or worth)):
        raise InputError("give the folder of a study, or both --profile and --worth")
    if folder is not None:
        page = write_page(folder, _beside(out or folder / PAGE))
    else:
        assert profile_file is not None and worth is not None
        found = of_worth(PlanProfile.read(profile_file), PlanQuality.read(worth))
        page = write_findings(found | {"command": _command(context)}, _beside(out or Path(PAGE)))
    typer.echo(json.dumps({"page": str(page)}) if as_json else f"page: {page}")


def _asked(
    context: typer.Context, model: Path, profile_file: Path, out: Path, questions: Path | None,
    counts: tuple[int, int, int], budgets: int, attainment: float | None, archives: list[Path] | None,
    device: str,
) -> StudyConfig:  # fmt: skip
    from sparseflow.adaptive.study import SampleCounts, StudyConfig
    from sparseflow.cli.adaptive.base import quiet
    from sparseflow.cli.options import open_device

    quiet()
    train, validation, test = counts
    return StudyConfig(
        model=model, profile=profile_file, out=out, device=open_device(device),
        counts=SampleCounts(train=train, validation=validation, test=test), questions=questions, budgets=budgets,
        attainment=attainment, archives=archives or (), command=_command(context),
    )  # fmt: skip


def _tell(found: dict[str, Any], out: Path, as_json: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    from sparseflow.adaptive.study.page import PAGE
    from sparseflow.adaptive.study.results import FILE
    from sparseflow.adaptive.study.run import WORTH
    from sparseflow.adaptive.training.train import CONTROLLERS

    made = {"controllers": CONTROLLERS, "worth": WORTH, "judged": FILE, "page": PAGE}
    files = {name: str(out / file) for name, file in made.items() if (out / file).exists()}
    if as_json:
        kept = ("policies", "compared", "verdict", "attainment", "budgets_ms", "samples", "judged_at")
        typer.echo(json.dumps({name: found[name] for name in kept if name in found} | files))
        return
    measures = ("goodput", "accuracy", "attainment", "regret")
    table = Table("policy", "right and in time, %", "right, %", "in time, %", "regret, points", "mean, ms")
    for each in found["policies"]:
        cells = [
            f"{100 * row['mean']:.1f} ({100 * row['low']:.1f} to {100 * row['high']:.1f})"
            for row in (each[name] for name in measures)
        ]
        late = "" if each["met"] is not False else " (later than asked)"
        table.add_row(f"{each['name']}{late}", *cells, f"{each['latency_ms']:.3g}")
    console = Console()
    # Where output goes to a file, there is no edge to break lines at.
    (console if console.is_terminal else Console(width=160)).print(table)
    for sentence in found["verdict"]:
        typer.echo(sentence)
    if (source := found.get("judged_at")) is not None:
        typer.echo(
            f"judged at {found['attainment']:.1%} in time ({source['attainment']}) and budgets of "
            f"{found['budgets_ms'][0]:.3g} to {found['budgets_ms'][-1]:.3g} ms ({source['budgets']})"
        )
    for name, path in files.items():
        typer.echo(f"{name}: {path}")


def _beside(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _command(context: typer.Context) -> str:
    """What was called, as it can be pasted into a shell."""
    words = context.command_path.split()
    for each in context.command.params:
        value = context.params.get(str(each.name))
        source = context.get_parameter_source(str(each.name))
        if source is None or source.name != "COMMANDLINE":
            continue
        option = each.opts[0] if each.opts[0].startswith("-") else None
        for one in value if isinstance(value, list | tuple) else [value]:
            words += [str(one)] if option is None else [option] if one is True else [option, str(one)]
    return shlex.join(words)
