"""Commands that make a model and find out what its blocks are worth: `grid-vqa`, `importance`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from sparseflow.cli.adaptive.base import Archives, Device, Json, Model, QuestionsFile, Set, app


@app.command("grid-vqa")
def grid_vqa(
    out: Annotated[Path, typer.Option(help="Folder of the training; one that was stopped goes on.")],
    config: Annotated[
        str, typer.Option(help="A YAML file, or one that is shipped: digits, demo, gpu, large.")
    ] = "digits",
    changes: Set = None,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Train a small model that answers questions about images, under random plans."""
    from sparseflow.adaptive.grid_vqa.config import read_settings
    from sparseflow.adaptive.grid_vqa.train import train
    from sparseflow.cli.adaptive.base import quiet
    from sparseflow.cli.options import open_device
    from sparseflow.cli.progress import progress_bar
    from sparseflow.core.config import parse_overrides

    settings = read_settings(config, parse_overrides(changes or [], extra="adaptive"))
    quiet()
    with progress_bar() as progress:
        trained = train(settings, out, device=open_device(device), progress=progress)
    if trained.report is None:
        return  # another process tells
    told = {"folder": str(trained.folder), **trained.report}
    if as_json:
        typer.echo(json.dumps(told))
        return
    typer.echo(f"accuracy of the full plan: {trained.report['accuracy']:.1%}")
    typer.echo(f"model: {told['folder']}")


@app.command()
def importance(
    model: Model,
    out: Annotated[Path, typer.Option(help="JSON file of what was found; a journal beside it goes on.")],
    questions: QuestionsFile = None,
    samples: Annotated[
        int, typer.Option(min=1, help="Questions to score each set of blocks on, at most.")
    ] = 512,
    beam: Annotated[int, typer.Option(min=1, help="Sets of each size that larger ones are made of.")] = 4,
    archives: Archives = None,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Find which blocks of a model can be skipped, alone and together, by what it still answers right."""
    from sparseflow.adaptive.adapters import adapter_of
    from sparseflow.adaptive.grid_vqa.task import GridVqaTask
    from sparseflow.adaptive.profile import weights_id
    from sparseflow.adaptive.profile.importance import measure_importance as search
    from sparseflow.adaptive.questions.file_task import QuestionTask
    from sparseflow.cli.adaptive.base import quiet
    from sparseflow.cli.options import open_device
    from sparseflow.cli.progress import progress_bar
    from sparseflow.errors import InputError

    quiet()
    where, journal = open_device(device), out.with_suffix(".jsonl")
    if questions is None:
        task = GridVqaTask.open(model, device=where, archives=archives or ())
        score: Any = task.scorer(samples)
    elif archives:
        raise InputError("--archives are of Grid-VQA's questions; leave them out, or --questions")
    else:
        task = QuestionTask.open(model, questions, device=where)
        score = task.scorer(samples)
        # Scores of other questions are not to be held against these.
        journal = out.with_name(f"{out.stem}-{score.digest[:8]}.jsonl")
    network = task.model
    geometry = adapter_of(network).geometry
    out.parent.mkdir(parents=True, exist_ok=True)
    with progress_bar() as progress:
        found = search(
            score, geometry, beam=beam, journal=journal, model_id=weights_id(network), progress=progress
        )
    found.write(out)
    if as_json:
        typer.echo(json.dumps(found.to_dict()))
        return
    typer.echo(f"all blocks: {found.full:.1%} of {found.samples}; {found.evaluations} sets were scored")
    for drop in found.singles:
        typer.echo(
            f"without block {drop.without[0]}: {-drop.drop:+.1%} ({-drop.high:+.1%} to {-drop.low:+.1%})"
        )
    typer.echo(f"written: {out}")
