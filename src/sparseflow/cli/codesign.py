"""`sparseflow codesign`: choose chips, partition a model over them, place them and run the plan."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from sparseflow.cli.options import (
    ConfigOption,
    DeviceOption,
    JsonOption,
    MethodOption,
    OptionalBudgetSOption,
    OptionalModelOption,
    OptionalOutDirOption,
    OptionalSeedOption,
    OutDirOption,
    SeedOption,
    SeedsOption,
    SetOption,
    WorkersOption,
    get_command_line,
    open_device,
)
from sparseflow.cli.output import emit
from sparseflow.cli.progress import progress_bar

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def codesign() -> None:
    """Co-design: choose chips, partition a model over them and run it.

    Shipped configuration: version_c. A model is a file of `sparseflow pruning`; by default the task of the
    configuration with random weights.
    """


@app.command()
def profile(
    out: OutDirOption,
    num_points: Annotated[int, typer.Option(min=8, help="Number of layers to measure.")] = 300,
    precision: Annotated[
        list[str] | None, typer.Option(help="Precision of the layers; by default float32. Repeatable.")
    ] = None,
    device: DeviceOption = "cpu",
    tdp_w: Annotated[
        float | None,
        typer.Option(help="Power at full load, W; by default a GPU's power limit, or 65 for a CPU."),
    ] = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Measure layers on this machine, fit the hardware proxy and evaluate it on held-out layers."""
    from sparseflow.codesign.api import profile_device

    torch_device = open_device(device)
    with progress_bar() as progress:
        result = profile_device(
            out,
            num_points=num_points,
            precisions=precision or ["float32"],
            device=torch_device,
            tdp_w=tdp_w,
            seed=seed,
            progress=progress,
        )
    emit(result.to_dict(), as_json)


@app.command()
def plan(
    context: typer.Context,
    config: ConfigOption,
    out: OutDirOption,
    model: OptionalModelOption = None,
    overrides: SetOption = None,
    search: Annotated[
        bool, typer.Option("--search/--no-search", help="Also change the chips of slots and their placement.")
    ] = True,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Choose chips, mapping, splits and placement for a model, and write a report.

    The seed is that of the weights, without a model file.
    """
    from sparseflow.codesign.api import plan_design
    from sparseflow.pruning.api import open_layered_model

    settings = _read_settings(config, overrides)
    layered_model = open_layered_model(model, settings.task, seed=seed)
    with progress_bar() as progress:
        result = plan_design(
            settings,
            layered_model,
            out,
            search=search,
            command=get_command_line(context),
            progress=progress,
        )
    emit(result.to_dict(), as_json)


@app.command()
def layout(
    context: typer.Context,
    source: Annotated[
        Path, typer.Argument(help="Plan, its directory, or a quadratic assignment problem (QAPLIB).")
    ],
    out: OptionalOutDirOption = None,
    method: MethodOption = "auto",
    restarts: Annotated[int | None, typer.Option(min=1, help="Number of restarts of the search.")] = None,
    budget_s: OptionalBudgetSOption = None,
    seed: OptionalSeedOption = None,
    as_json: JsonOption = False,
) -> None:
    """Place a plan's chips on the wafer again, or solve a quadratic assignment problem.

    Methods are auto, tabu and annealing. Restarts and seed are those of the plan by default, 5 and 0 for an
    assignment problem. The default output directory is `layout` next to the plan.
    """
    from sparseflow.codesign.api import place_chips, solve_assignment
    from sparseflow.codesign.design.placement import PlacementSearch
    from sparseflow.errors import InputError

    search = PlacementSearch(method=method, restarts=restarts, budget_s=budget_s, seed=seed)
    if source.is_dir() or source.suffix == ".json":
        result = place_chips(source, out, search, command=get_command_line(context))
    elif out is not None:
        raise InputError(f"`--out {out}` needs a plan; the solution of an assignment problem is printed")
    else:
        result = solve_assignment(source, search)
    emit(result.to_dict(), as_json)


@app.command()
def train(
    context: typer.Context,
    config: ConfigOption,
    out: OutDirOption,
    seeds: SeedsOption = 1,
    mode: Annotated[
        Literal["joint", "two-stage", "all"],
        typer.Option(help="Joint training, two-stage training with its baselines, or all."),
    ] = "all",
    workers: WorkersOption = 1,
    overrides: SetOption = None,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Train a model together with its hardware, and two-stage baselines."""
    from sparseflow.codesign.api import compare_designs
    from sparseflow.pruning.api import make_video_task

    settings = _read_settings(config, overrides)
    open_device(device)  # Fails early; the trainings open it by name.
    with progress_bar() as progress:
        result = compare_designs(
            settings,
            make_video_task,
            out,
            seeds=seeds,
            mode=mode,
            device=device,
            workers=workers,
            command=get_command_line(context),
            progress=progress,
        )
    rows = []
    for row in result.modes:
        ratio = "" if row["ratio"] is None else f", {row['ratio']:.3f} of two-stage"
        rows.append(
            f"{row['mode']}: accuracy {row['accuracy']:.2%}, predicted energy-delay product "
            f"{row['energy_delay']:.4g} mJ ms{ratio}"
        )
    emit(result.to_dict(), as_json, *rows, result.verdict, result.prediction, f"report: {result.page}")


@app.command()
def verify(
    source: Annotated[Path, typer.Argument(help="Plan, or the directory of a plan or run.")],
    model: OptionalModelOption = None,
    num_clips: Annotated[int, typer.Option(min=1, help="Number of random clips to run.")] = 4,
    ranks: Annotated[bool, typer.Option(help="Also run each slot in its own process.")] = False,
    device: DeviceOption = "cpu",
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Run the partitioned model, compare logits and moved bytes with the plan, and replay a trace."""
    from sparseflow.codesign.api import verify_design
    from sparseflow.pruning.api import make_random_clips, open_layered_model

    result = verify_design(
        source,
        functools.partial(open_layered_model, seed=seed),
        functools.partial(make_random_clips, count=num_clips, seed=seed),
        model=model,
        device=open_device(device),
        ranks=ranks,
    )
    emit(result.to_dict(), as_json)


@app.command()
def report(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(help="Directory of a run, with its trace.jsonl.")],
    as_json: JsonOption = False,
) -> None:
    """Write the report of a run again."""
    from sparseflow.codesign.report.page import write_run_page

    emit({"page": str(write_run_page(run, command=get_command_line(context)))}, as_json)


def _read_settings(config: str, overrides: list[str] | None) -> Any:
    from sparseflow.codesign.design.config import read_config
    from sparseflow.core.config import parse_overrides
    from sparseflow.pruning.config import parse_config

    settings = read_config(config, parse_overrides(overrides or [], extra="codesign"))
    parse_config(settings.task, "`task`")
    return settings
