"""Commands that answer requests within their budgets: `generate`, `serve`."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparseflow.cli.adaptive.base import Device, Json, Model, app

if TYPE_CHECKING:
    from fastapi import FastAPI

    from sparseflow.adaptive.api import Attached
    from sparseflow.adaptive.prompts.model_folder import ModelFolder

Controller = Annotated[Path | None, typer.Option(help="Trained controllers (safetensors).")]
WorthFile = Annotated[Path | None, typer.Option("--worth", help="How good plans are, as `eval` writes it.")]


@app.command()
def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(help="What to ask.")],
    image: Annotated[list[Path] | None, typer.Option(help="An image; may be repeated.")] = None,
    profile_file: Annotated[
        Path | None, typer.Option("--profile", help="A profile, or a predictor.json; needed for budgets.")
    ] = None,
    controller: Controller = None,
    worth: WorthFile = None,
    budget_ms: Annotated[float | None, typer.Option(help="From now to the last token.")] = None,
    on_infeasible: Annotated[str, typer.Option(help="reject, best_effort or truncate.")] = "best_effort",
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Answer one prompt within a budget."""
    from sparseflow.cli.progress import progress_bar

    there, attached = _attached(model, profile_file, controller, worth, device)
    inputs = there.prompt(prompt, image or []).inputs
    with attached:
        with progress_bar() as progress:
            attached.warm(
                progress=lambda done, of: progress(f"warmed {done} of {of} steps", done / of), **inputs
            )
        found = attached.generate(
            latency_budget_ms=budget_ms, on_infeasible=on_infeasible,  # pyright: ignore[reportArgumentType]
            max_new_tokens=max_new_tokens, **inputs,
        )  # fmt: skip
    text = there.tokenizer.decode(found.new_tokens[0], skip_special_tokens=True)
    told = {
        "text": text, "plan": found.plan.to_dict(), "predicted_ms": found.predicted_ms,
        "measured_ms": found.measured_ms, "budget_ms": budget_ms, "budget_met": found.budget_met,
        "feasible": found.feasible,
    }  # fmt: skip
    if as_json:
        typer.echo(json.dumps(told))
        return
    typer.echo(text)
    expected = ""
    if found.predicted_ms is not None:
        expected = f", {found.predicted_ms:.1f} ms expected for up to {max_new_tokens} tokens"
    kept = "" if found.budget_met is None else f"; budget {'kept' if found.budget_met else 'missed'}"
    typer.echo(f"{found.plan.id}: {found.measured_ms:.1f} ms{expected}{kept}", err=True)
    if not found.feasible:
        typer.echo(
            f"no plan is sure to keep {budget_ms:g} ms for up to {max_new_tokens} tokens (--max-new-tokens), "
            "so the quickest one ran",
            err=True,
        )


@app.command()
def serve(
    model: Model,
    profile_file: Annotated[Path, typer.Option("--profile", help="A profile, or a predictor.json.")],
    controller: Controller = None,
    worth: WorthFile = None,
    name: Annotated[
        str | None, typer.Option(help="What clients ask for; by default the folder's name.")
    ] = None,
    host: str = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    plans: Annotated[
        int, typer.Option(min=2, help="Most plans to run; requests of one meet in a batch.")
    ] = 12,
    batch: Annotated[
        int | None,
        typer.Option(
            min=1, help="Most requests that decode at a time; by default as the profile has it, else 8."
        ),
    ] = None,
    drain_s: Annotated[float, typer.Option(help="Seconds that running requests have after a signal.")] = 30.0,
    replicas: Annotated[
        int, typer.Option(min=1, help="Servers behind one address, by Ray Serve; each has a GPU of its own.")
    ] = 1,
    cluster: Annotated[
        str | None, typer.Option(help="Ray cluster for replicas: its address, or auto; else one here.")
    ] = None,
    device: Device = "cpu",
) -> None:
    """Serve a model as OpenAI's API does, with `latency_budget_ms` as one more field of a request."""
    from sparseflow.adaptive.serve import run_server as run
    from sparseflow.adaptive.serve import serve_replicas
    from sparseflow.cli.options import open_device
    from sparseflow.errors import InputError

    where = open_device(device)
    make = functools.partial(
        app_of, model.resolve(), profile_file.resolve(), controller=_whole(controller), worth=_whole(worth),
        name=name or model.resolve().name, plans=plans, batch=batch, device=device,
    )  # fmt: skip
    if replicas == 1 and cluster is None:
        run(make, host=host, port=port, drain_s=drain_s)
        return
    if where.index is not None:
        raise InputError(f"`--device {device}` is one GPU; replicas take one each: use cuda")
    serve_replicas(
        make, replicas=replicas, host=host, port=port, gpus_each=float(where.type == "cuda"), cluster=cluster,
        drain_s=drain_s,
    )  # fmt: skip


def app_of(
    model: Path,
    profile_file: Path,
    *,
    controller: Path | None,
    worth: Path | None,
    name: str,
    plans: int,
    batch: int | None,
    device: str,
) -> FastAPI:
    """The app of one server, its engine warmed; in the process of a replica, too."""
    from sparseflow.adaptive.engine.engine import Engine
    from sparseflow.adaptive.plan.space import TIERS, Tier
    from sparseflow.adaptive.prompts.chat import PromptBuilder
    from sparseflow.adaptive.serve import EngineBackend, PredictorForecast, Service, create_app, deciding
    from sparseflow.cli.adaptive.base import MOST_TOKENS, example_of
    from sparseflow.cli.progress import progress_bar

    there, attached = _attached(model, profile_file, controller, worth, device)
    chooser = attached.chooser
    assert chooser is not None
    limit = chooser.predictor.about.how.get("max_tokens", min(there.context, MOST_TOKENS))
    chooser = replace(chooser, most_tokens=limit).few(plans)
    kept = chooser.plans
    assert kept is not None
    tiers: list[Tier] = [tier for tier in TIERS if any(plan.tier == tier for plan in kept)]
    # Before the engine: what is wrong with a tokenizer or a profile is said before minutes of recording.
    prompts = PromptBuilder(
        there.tokenizer,
        context=limit,
        sight=there.sight,
        stop=attached.stop,
        lowest=tiers[0] if tiers else "low",
    )
    slots = batch or chooser.predictor.about.how.get("max_batch", 8)
    forecast = PredictorForecast(
        chooser.predictor, kept, load=lambda: engine.load, idle=lambda: not engine.busy, max_batch=slots,
        max_tokens=limit,
    )  # fmt: skip
    engine = Engine(attached.adapter, attached.knobs, plans=kept, max_batch=slots, max_tokens=limit)
    with progress_bar() as progress:
        engine.warm(
            None if there.sight is None else example_of(there).inputs,
            progress=lambda done, of: progress(f"warmed {done} of {of} steps", done / of),
        )
    backend = EngineBackend(engine, decider=deciding(chooser), forecast=forecast, stop=attached.stop)
    return create_app(Service(name, backend, prompts))


def _attached(
    model: Path, profile_file: Path | None, controller: Path | None, worth: Path | None, device: str
) -> tuple[ModelFolder, Attached]:
    from sparseflow.adaptive.api import attach
    from sparseflow.cli.adaptive.base import opened
    from sparseflow.cli.options import open_device

    there = opened(model, open_device(device))
    return there, attach(there.model, profile_file, controller, worth=worth)


def _whole(path: Path | None) -> Path | None:
    """A replica may run in another folder."""
    return None if path is None else path.resolve()
