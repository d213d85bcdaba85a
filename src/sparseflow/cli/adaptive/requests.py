"""`generate` and `serve`: answer requests within their latency budgets."""

from __future__ import annotations

import functools
import os
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
    OptionalBudgetMsOption,
    PortOption,
    open_device,
)
from sparseflow.cli.output import emit
from sparseflow.cli.progress import progress_bar

if TYPE_CHECKING:
    from fastapi import FastAPI


_ACCESS, _LIMITS = "Access", "Limits"
_API_KEY = "SPARSEFLOW_API_KEY"


@app.command()
def generate(
    model: ModelArgument,
    prompt: Annotated[str, typer.Argument(help="Prompt.")],
    image: Annotated[list[Path] | None, typer.Option(help="Image of the prompt. Repeatable.")] = None,
    profile: OptionalProfileOption = None,
    controller: ControllerOption = None,
    plan_quality: PlanQualityOption = None,
    budget_ms: OptionalBudgetMsOption = None,
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
    """Answer one prompt within a latency budget.

    The budget covers the time up to the last token and needs `--profile`.
    """
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
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar=_API_KEY,
            show_envvar=True,
            rich_help_panel=_ACCESS,
            help="Key that clients must send; without one, everybody has access. Repeatable.",
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=_ACCESS, help="Origin of web pages that may send requests, or *. Repeatable."
        ),
    ] = None,
    request_log: Annotated[
        bool, typer.Option(rich_help_panel=_ACCESS, help="Write a line per request to standard error.")
    ] = True,
    max_body_bytes: Annotated[
        int, typer.Option(min=1, rich_help_panel=_LIMITS, help="Size of a request with its images.")
    ] = 32 * 2**20,
    max_total_body_bytes: Annotated[
        int, typer.Option(min=1, rich_help_panel=_LIMITS, help="Size of all requests being received.")
    ] = 256 * 2**20,
    body_timeout_s: Annotated[
        float, typer.Option(rich_help_panel=_LIMITS, help="Time to receive a request, seconds.")
    ] = 30.0,
    max_messages: Annotated[
        int, typer.Option(min=1, rich_help_panel=_LIMITS, help="Messages of a request.")
    ] = 1024,
    max_parts: Annotated[
        int, typer.Option(min=1, rich_help_panel=_LIMITS, help="Content parts of a request.")
    ] = 2048,
    max_text_chars: Annotated[
        int | None,
        typer.Option(
            min=1,
            rich_help_panel=_LIMITS,
            help="Characters of text of a request; by default what the context can hold.",
        ),
    ] = None,
    max_images: Annotated[int, typer.Option(min=0, rich_help_panel=_LIMITS, help="Images of a request.")] = 8,
    max_image_bytes: Annotated[
        int, typer.Option(min=1, rich_help_panel=_LIMITS, help="Size of an image file.")
    ] = 16 * 2**20,
    max_image_pixels: Annotated[
        int, typer.Option(min=1, rich_help_panel=_LIMITS, help="Pixels of an image.")
    ] = 16_000_000,
    default_answer_tokens: Annotated[
        int,
        typer.Option(
            min=1, rich_help_panel=_LIMITS, help="Answer length of a request with a budget and no length."
        ),
    ] = 64,
    max_answer_tokens: Annotated[
        int, typer.Option(min=1, rich_help_panel=_LIMITS, help="Longest answer, tokens.")
    ] = 4096,
    max_queued: Annotated[
        int, typer.Option(min=1, rich_help_panel=_LIMITS, help="Requests that wait or are prepared.")
    ] = 64,
    prepare_threads: Annotated[
        int, typer.Option(min=1, rich_help_panel=_LIMITS, help="Threads that decode images and tokenize.")
    ] = 2,
    max_connections: Annotated[
        int, typer.Option(min=1, rich_help_panel=_LIMITS, help="Open connections.")
    ] = 1024,
    header_timeout_s: Annotated[
        float,
        typer.Option(rich_help_panel=_LIMITS, help="Time to receive the head of a request, seconds."),
    ] = 10.0,
    keep_alive_s: Annotated[
        float, typer.Option(rich_help_panel=_LIMITS, help="Time to keep an idle connection open, seconds.")
    ] = 5.0,
) -> None:
    """Serve a model with OpenAI's API; requests take `latency_budget_ms` as an additional field.

    By default, the maximum of concurrent requests is that of the profile, else 8. With replicas, Ray Serve
    sets the limits of connections.
    """
    from sparseflow.adaptive.prompts.messages import RequestLimits
    from sparseflow.adaptive.serve import run_server, serve_replicas
    from sparseflow.adaptive.serve.access import check_api_keys
    from sparseflow.adaptive.serve.connections import ConnectionLimits
    from sparseflow.errors import InputError

    if not api_key and _API_KEY in os.environ:
        raise InputError(f"{_API_KEY} is empty, which would give everybody access; set a key, or unset it")
    check_api_keys(api_key or ())
    limits = RequestLimits(
        body_bytes=max_body_bytes, total_body_bytes=max_total_body_bytes, body_s=body_timeout_s,
        messages=max_messages, parts=max_parts, text_chars=max_text_chars, images=max_images,
        image_bytes=max_image_bytes, image_pixels=max_image_pixels, new_tokens=default_answer_tokens,
        max_new_tokens=max_answer_tokens, max_queued=max_queued, prepare_threads=prepare_threads,
    )  # fmt: skip
    connection_limits = ConnectionLimits(
        max_connections=max_connections, head_s=header_timeout_s, keep_alive_s=keep_alive_s
    )
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
        limits=limits,
        api_keys=tuple(api_key or ()),
        cors_origins=tuple(cors_origin or ()),
        request_log=request_log,
    )
    if replicas == 1 and cluster is None:
        run_server(create_app, host=host, port=port, drain_s=drain_s, connection_limits=connection_limits)
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
    from sparseflow.adaptive.serve.access import write_request_log
    from sparseflow.adaptive.serve.model_app import create_model_app

    silence_transformers()
    write_request_log()
    with progress_bar() as progress:
        return create_model_app(model, profile, **options, progress=progress)
