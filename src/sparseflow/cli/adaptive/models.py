"""Commands that make a model and find out about it: `grid-vqa`, `importance`, `profile`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from sparseflow.cli.adaptive.base import Archives, Device, Json, Model, Set, app


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
    from sparseflow.adaptive.grid_vqa.settings import read_settings
    from sparseflow.adaptive.grid_vqa.training import train
    from sparseflow.cli.adaptive.base import quiet
    from sparseflow.cli.options import changes_of, device_of
    from sparseflow.cli.progress import bar

    settings = read_settings(config, changes_of(changes, extra="adaptive"))
    quiet()
    with bar() as tell:
        trained = train(settings, out, device=device_of(device), progress=tell)
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
    samples: Annotated[int, typer.Option(min=1, help="Questions to score each set of blocks on.")] = 512,
    beam: Annotated[int, typer.Option(min=1, help="Sets of each size that larger ones are made of.")] = 4,
    archives: Archives = None,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Find which blocks of a Grid-VQA model can be skipped, alone and together."""
    from sparseflow.adaptive.adapters import adapter_of
    from sparseflow.adaptive.grid_vqa.dataset import Data
    from sparseflow.adaptive.grid_vqa.evaluate import Scorer
    from sparseflow.adaptive.grid_vqa.model import load
    from sparseflow.adaptive.importance import importance as search
    from sparseflow.adaptive.plan import Plan
    from sparseflow.adaptive.profile import weights_id
    from sparseflow.adaptive.study.run import placed
    from sparseflow.cli.adaptive.base import quiet
    from sparseflow.cli.options import device_of
    from sparseflow.cli.progress import bar

    quiet()
    where = device_of(device)
    network, _, settings = load(model, device=where)
    geometry = adapter_of(network).geometry
    right = Scorer(network, Data(placed(settings, archives), where), split="val", count=samples)

    def score(blocks: tuple[int, ...]) -> Any:
        plan = Plan(tier="high", insertion_position=1, top_k=geometry.top_k, blocks=blocks)
        return right([plan])[:, 0].numpy()

    out.parent.mkdir(parents=True, exist_ok=True)
    with bar() as tell:
        found = search(
            score, geometry, beam=beam, journal=out.with_suffix(".jsonl"), model_id=weights_id(network),
            progress=tell,
        )  # fmt: skip
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


@app.command()
def profile(
    model: Model,
    out: Annotated[Path, typer.Option(help="Parquet file; one that was stopped goes on.")],
    importance_of: Annotated[
        Path | None,
        typer.Option("--importance", help="What `importance` found; without it early blocks are kept."),
    ] = None,
    plans: Annotated[
        int, typer.Option(min=0, help="How many plans to measure, spread over all; 0 for all.")
    ] = 48,
    text_plans: Annotated[
        int, typer.Option(min=0, help="How many more to measure without image, where a model takes some.")
    ] = 6,
    tokens: Annotated[list[int] | None, typer.Option(help="Text tokens of prompts; may be repeated.")] = None,
    loads: Annotated[
        list[float] | None,
        typer.Option("--load", help="Share of the device that others want; several."),
    ] = None,
    batches: Annotated[
        list[int] | None,
        typer.Option("--batch", help="Requests that run at a time; several. By default 1 and --max-batch."),
    ] = None,
    max_batch: Annotated[int, typer.Option(min=1, help="Most at a time: --batch of `serve`.")] = 8,
    group: Annotated[
        int | None, typer.Option(min=1, help="Plans whose recordings are held at once; by default what fits.")
    ] = None,
    way: Annotated[
        str, typer.Option("--runner", help="engine, as `serve` runs requests, or eager, as the model does.")
    ] = "engine",
    repeats: Annotated[int, typer.Option(min=1, help="Rounds.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Tokens after the first, in each request.")] = 16,
    seed: int = 0,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Measure what plans take here, and fit a predictor to it: predictor.json beside the profile."""
    from sparseflow.adaptive.adapters import adapter_of
    from sparseflow.adaptive.importance import space_of
    from sparseflow.adaptive.knobs import Knobs
    from sparseflow.adaptive.predictor import Predictor
    from sparseflow.adaptive.profile import EagerRunner, EngineRunner, Mix, by_group, spread
    from sparseflow.adaptive.profile import profile as measure
    from sparseflow.cli.adaptive.base import example_of, opened
    from sparseflow.cli.options import device_of
    from sparseflow.cli.progress import bar
    from sparseflow.errors import InputError

    where = device_of(device)
    found_there = opened(model, where)
    adapter = adapter_of(found_there.model)
    space = space_of(found_there.model, adapter.geometry, importance_of)
    example = None if found_there.sight is None else example_of(found_there).inputs
    chosen = spread(space, min(plans, len(space)) if plans else len(space), seed=seed, text_only=text_plans)
    knobs, lengths, options = Knobs(adapter), tokens or [16, 64], {"example": example, "seed": seed}
    how: dict[str, Any] = {
        "buckets": lengths, "loads": loads or [0.0], "repeats": repeats, "steps": steps, "seed": seed,
    }  # fmt: skip
    with bar() as tell:
        if way == "engine":
            with EngineRunner(
                knobs, chosen, max_batch=max_batch, max_tokens=found_there.context, group=group,
                mix=Mix(lengths=lengths, new_tokens=steps + 1), **options,
            ) as runner:  # fmt: skip
                sizes = batches or sorted({1, max_batch})
                found = by_group(runner, space, out, batches=sizes, progress=tell, **how)
        elif way == "eager":
            eager = EagerRunner(knobs, device=where, **options)
            found = measure(eager, space, out, plans=chosen, batches=batches or [1], progress=tell, **how)
        else:
            raise InputError(f"--runner {way!r} must be engine or eager")
    predictor = Predictor.fit(found, seed=seed)
    place = out.with_name("predictor.json")
    predictor.save(place)
    told = {
        "profile": str(out), "predictor": str(place), "requests": len(found.timed),
        "failed": len(found.visits) - len(found.timed), "held_out_error": predictor.held_out,
    }  # fmt: skip
    if as_json:
        typer.echo(json.dumps(told))
        return
    typer.echo(f"{told['requests']} requests measured, {told['failed']} failed")
    typer.echo(f"medians of plans and lengths that a fit had not seen: {predictor.held_out:.1%} off")
    typer.echo(f"written: {out}, {place}")
