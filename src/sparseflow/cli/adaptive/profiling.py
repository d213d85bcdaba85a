"""`sparseflow adaptive profile`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from sparseflow.cli.adaptive.base import MaxBatchSizeOption, ModelArgument, app, silence_transformers
from sparseflow.cli.options import (
    BatchSizesOption,
    DeviceOption,
    JsonOption,
    LoadsOption,
    OutFileOption,
    RoundsOption,
    SeedOption,
    open_device,
)
from sparseflow.cli.output import emit
from sparseflow.cli.progress import progress_bar


@app.command()
def profile(
    model: ModelArgument,
    out: OutFileOption,
    importance: Annotated[
        Path | None, typer.Option(help="Block importance file, as written by `importance`.")
    ] = None,
    num_plans: Annotated[int, typer.Option(min=0, help="Plans to measure, spread over all; 0 for all.")] = 48,
    num_text_plans: Annotated[
        int, typer.Option(min=0, help="Additional plans to measure without an image.")
    ] = 6,
    text_tokens: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Text tokens of a prompt; by default 16 and 64, or what fits. Repeatable."),
    ] = None,
    load: LoadsOption = None,
    batch_size: BatchSizesOption = None,
    max_batch_size: MaxBatchSizeOption = 8,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Maximum tokens of a request with images and answer; by default the model's context, up to "
            "4096.",
        ),
    ] = None,
    plans_per_group: Annotated[
        int | None, typer.Option(min=1, help="Plans recorded at the same time; by default what fits.")
    ] = None,
    runner: Annotated[
        Literal["engine", "eager"],
        typer.Option(help="Run requests with the engine, as `serve` does, or with the model's forward."),
    ] = "engine",
    rounds: RoundsOption = 5,
    decode_steps: Annotated[int, typer.Option(min=1, help="Tokens to generate after the first.")] = 16,
    seed: SeedOption = 0,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Measure the latency of plans and fit a predictor, which is written next to the profile.

    By default, loads are 0 and 0.7 and batch sizes 1 and --max-batch-size; with eager, load 0 and batch size
    1. --load and --batch-size are repeatable. The predictor of profile.parquet is predictor.json, that of
    NAME.parquet is NAME.predictor.json.
    """
    from sparseflow.adaptive.profile.model_profile import ModelProfileConfig, profile_model
    from sparseflow.adaptive.prompts.model_folder import open_folder

    silence_transformers()
    config = ModelProfileConfig(
        importance=importance,
        num_plans=num_plans,
        num_text_plans=num_text_plans,
        text_tokens=text_tokens,
        loads=load,
        batch_sizes=batch_size,
        max_batch_size=max_batch_size,
        max_tokens=max_tokens,
        plans_per_group=plans_per_group,
        runner=runner,
        rounds=rounds,
        decode_steps=decode_steps,
        seed=seed,
    )
    folder = open_folder(model, device=open_device(device))
    with progress_bar() as progress:
        result = profile_model(folder, out, config, progress=progress)
    emit(
        result.to_dict(),
        as_json,
        f"{result.requests} requests measured, {result.failed} failed",
        f"error of predicted medians on held-out plans and lengths: {result.held_out_error:.1%}",
        f"profile: {result.profile}",
        f"predictor: {result.predictor}",
    )
