"""`generate` and `serve`: answer requests within their latency budgets."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sparseflow.cli.adaptive.base import (
    ControllerOption,
    ModelArgument,
    OptionalMaxBatchSizeOption,
    OptionalProfileOption,
    PlanQualityOption,
    ProfileOption,
    app,
    silence_transformers,
)
from sparseflow.cli.options import (
    ClusterOption,
    DeviceOption,
    HostOption,
    JsonOption,
    PortOption,
    open_device,
)
from sparseflow.cli.output import emit
from sparseflow.cli.progress import progress_bar

if TYPE_CHECKING:
    from fastapi import FastAPI


@app.command()
def generate(
    model: ModelArgument,
    prompt: Annotated[str, typer.Argument(help="Prompt.")],
    image: Annotated[list[Path] | None, typer.Option(help="Image of the prompt. Repeatable.")] = None,
    profile: OptionalProfileOption = None,
    controller: ControllerOption = None,
    plan_quality: PlanQualityOption = None,
    budget_ms: Annotated[
        float | None, typer.Option(help="Latency budget up to the last token, ms; needs --profile.")
    ] = None,
    on_infeasible: Annotated[
        Literal["reject", "best_effort", "truncate"],
        typer.Option(help="Handling of a budget that no plan meets."),
    ] = "best_effort",
    max_new_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum tokens to generate; by default 64, or what fits at the top tier."),
    ] = None,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Answer one prompt within a latency budget."""
    from sparseflow.adaptive.api import attach
    from sparseflow.adaptive.prompts.model_folder import open_folder

    silence_transformers()
    folder = open_folder(model, device=open_device(device))
    attached = attach(folder.model, profile, controller, plan_quality=plan_quality)
    inputs = folder.prompt(prompt, image or []).inputs
    with attached:
        with progress_bar() as progress:
            attached.warm_up(progress=progress, **inputs)
        result = attached.generate(
            latency_budget_ms=budget_ms,
            on_infeasible=on_infeasible,
            max_new_tokens=max_new_tokens,
            **inputs,
        )
    text = folder.tokenizer.decode(result.new_tokens[0], skip_special_tokens=True)
    record = {
        "text": text,
        "plan": result.plan.to_dict(),
        "predicted_ms": result.predicted_ms,
        "measured_ms": result.measured_ms,
        "budget_ms": budget_ms,
        "budget_met": result.budget_met,
        "feasible": result.feasible,
    }
    emit(record, as_json, text)
    if not as_json:
        prediction = "" if result.predicted_ms is None else f", {result.predicted_ms:.1f} ms predicted"
        outcome = "" if result.budget_met is None else f"; budget {'met' if result.budget_met else 'missed'}"
        typer.echo(f"{result.plan.id}: {result.measured_ms:.1f} ms{prediction}{outcome}", err=True)
        if not result.feasible:
            typer.echo(
                f"no plan is predicted to meet {budget_ms:g} ms for the requested length "
                "(--max-new-tokens); the fastest plan ran",
                err=True,
            )


@app.command()
def serve(
    model: ModelArgument,
    profile: ProfileOption,
    controller: ControllerOption = None,
    plan_quality: PlanQualityOption = None,
    model_name: Annotated[
        str | None, typer.Option(help="Model name for clients; by default the directory's name.")
    ] = None,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8000,
    max_plans: Annotated[
        int, typer.Option(min=2, help="Maximum number of plans; requests of one plan share a batch.")
    ] = 12,
    max_batch_size: OptionalMaxBatchSizeOption = None,
    drain_s: Annotated[
        float, typer.Option(help="Time for running requests to finish at shutdown, seconds.")
    ] = 30.0,
    replicas: Annotated[
        int, typer.Option(min=1, help="Servers behind one address with Ray Serve, one for each GPU.")
    ] = 1,
    cluster: ClusterOption = None,
    device: DeviceOption = "cpu",
) -> None:
    """Serve a model with OpenAI's API; requests take `latency_budget_ms` as an additional field.

    By default, the maximum of concurrent requests is that of the profile, else 8.
    """
    from sparseflow.adaptive.serve import run_server, serve_replicas
    from sparseflow.errors import InputError

    torch_device = open_device(device)
    # Absolute paths: a replica may run in another working directory.
    create_app = functools.partial(
        _create_app,
        model.resolve(),
        profile.resolve(),
        controller=None if controller is None else controller.resolve(),
        plan_quality=None if plan_quality is None else plan_quality.resolve(),
        model_name=model_name or model.resolve().name,
        max_plans=max_plans,
        max_batch_size=max_batch_size,
        device=torch_device,
    )
    if replicas == 1 and cluster is None:
        run_server(create_app, host=host, port=port, drain_s=drain_s)
        return
    if torch_device.index is not None:
        raise InputError(f"`--device {device}` is one GPU, and each replica takes its own; use cuda")
    serve_replicas(
        create_app,
        replicas=replicas,
        host=host,
        port=port,
        gpus_per_replica=float(torch_device.type == "cuda"),
        cluster=cluster,
        drain_s=drain_s,
    )


def _create_app(model: Path, profile: Path, **options: Any) -> FastAPI:
    from sparseflow.adaptive.serve.model_app import create_model_app

    silence_transformers()
    with progress_bar() as progress:
        return create_model_app(model, profile, **options, progress=progress)
