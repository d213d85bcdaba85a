"""`sparseflow codesign`: choose chips, partition a model over them, place them, and run what was planned."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sparseflow.codesign.design.placement import Search
    from sparseflow.pruning.settings import MovingDigitsSettings, UCF101Settings
    from sparseflow.pruning.steps import Steps

app = typer.Typer(add_completion=False, no_args_is_help=True)

Config = Annotated[str, typer.Option(help="A YAML file, or one that is shipped: version_c.")]
Set = Annotated[
    list[str] | None, typer.Option("--set", help="hardware.slots=4: goes before the file's; may be repeated.")
]
Device = Annotated[str, typer.Option(help="Where to compute: cpu or cuda.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output and nothing else.")]
Model = Annotated[
    Path | None,
    typer.Option(help="A model.safetensors of `sparseflow pruning`; random weights of the task by default."),
]
Seed = Annotated[int, typer.Option(min=0, help="What is drawn from.")]
WeightSeed = Annotated[int, typer.Option(min=0, help="What weights are drawn from, where no model is given.")]


@app.callback()
def codesign() -> None:
    """Choose chips, partition a model over them, place them, and run what was planned."""


@app.command()
def profile(
    out: Annotated[Path, typer.Option(help="Folder of points and the proxy; one that was stopped goes on.")],
    points: Annotated[int, typer.Option(min=8, help="Layers to measure.")] = 300,
    precision: Annotated[list[str] | None, typer.Option(help="May be repeated; float32 by default.")] = None,
    device: Device = "cpu",
    tdp_w: Annotated[
        float | None,
        typer.Option(
            help="Watts at full load; what the folder says, a GPU's power limit or 65 for a CPU by default."
        ),
    ] = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Measure layers here, fit the hardware proxy to them, and judge it on others."""
    from sparseflow.cli.options import open_device
    from sparseflow.cli.progress import progress_bar
    from sparseflow.codesign.hardware.proxy import Grid, fit, read_points
    from sparseflow.codesign.hardware.proxy.profiling import Measuring, device_held, device_here, profile_grid
    from sparseflow.errors import InputError

    chosen = open_device(device)
    kinds = tuple(precision or ["float32"])
    grid = Grid.small(kinds) if chosen.type == "cpu" else Grid(precisions=kinds)
    out.mkdir(parents=True, exist_ok=True)
    file = out / "points.parquet"
    how = Measuring(mode="graph" if chosen.type == "cuda" else "eager")
    with progress_bar() as progress:
        spec = device_held(file, chosen)
        if spec is None:
            progress("what the device can do at best", 0.0)
            watts = 65.0 if tdp_w is None and chosen.type == "cpu" else tdp_w
            spec = device_here(chosen, tdp_w=watts)
        elif tdp_w not in (None, spec.tdp_w):
            raise InputError(
                f"`--tdp-w {tdp_w:g}`: {file} says {spec.tdp_w:g} W; leave it out, or name another"
            )
        found = profile_grid(
            file, spec, num_points=points, grid=grid, device=chosen, config=how, seed=seed,
            progress=lambda done, of: progress(f"layer {done} of {of}", done / of),
        )  # fmt: skip
        proxy = fit(
            found, environments=read_points(file).environments, seed=seed,
            progress=lambda done, of: progress(f"fit {done} of {of}", done / of),
        )  # fmt: skip
    proxy.save(out / "proxy.safetensors")
    told = {"proxy": str(out / "proxy.safetensors"), "device": spec.to_dict()}
    _tell(proxy.provenance["held_out"] | told, as_json)


@app.command()
def plan(
    config: Config,
    out: Annotated[Path, typer.Option(help="Folder of plan.json and report.html.")],
    model: Model = None,
    changes: Set = None,
    search: Annotated[bool, typer.Option(help="Also change chips, slot by slot, and their places.")] = True,
    seed: WeightSeed = 0,
    as_json: Json = False,
) -> None:
    """Decide chips, mapping, splits and places for a model, and draw them."""
    from sparseflow.cli.progress import progress_bar
    from sparseflow.codesign.design.decision import figures
    from sparseflow.codesign.design.hardware import Hardware
    from sparseflow.codesign.design.saved_plan import save_plan
    from sparseflow.codesign.report.page import BOUNDS, write_page
    from sparseflow.core.environment import collect_environment

    settings = _settings(config, changes)
    steps = _steps(settings.task, model, seed)
    with progress_bar() as progress:
        hardware = Hardware(settings)
        layers, orders = steps.describe_layers(hardware.batch), Hardware.orders(steps)
        fine = settings.joint.use_fine_split
        decision = hardware.begin(layers)
        if search:
            decision = hardware.polish(layers, decision, fine=fine, orders=orders, progress=progress)
        decision, extra = hardware.concluded(layers, decision, fine=fine, orders=orders)
    out.mkdir(parents=True, exist_ok=True)
    saved = save_plan(out, hardware, layers, decision, extra=extra)
    command = _command("plan", config=config, set=changes, model=model, search=search, seed=seed, out=out)
    page = write_page(
        out, hardware, layers, decision, told=extra, environment=collect_environment("cpu"), command=command
    )
    told = figures(hardware.price(layers, decision)) | {name: extra[name] for name in BOUNDS}
    told |= {"plan": str(saved), "page": str(page), "layers_split": len(decision.splits(layers))}
    _tell(told | {"splits_considered": len(extra["considered"])}, as_json)


@app.command()
def layout(
    source: Annotated[
        Path, typer.Argument(help="A plan.json, its folder, or a quadratic assignment in QAPLIB's format.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the new plan and its page; `layout` beside the plan by default."),
    ] = None,
    method: Annotated[str, typer.Option(help="auto, tabu or annealing.")] = "auto",
    restarts: Annotated[
        int | None, typer.Option(min=1, help="What the plan's settings say by default; 5 of an assignment.")
    ] = None,
    seconds: Annotated[float | None, typer.Option(min=0.0, help="Time for all restarts.")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="What the search draws from; the plan's, or 0, by default.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Place a plan's chips on the wafer anew, or solve a quadratic assignment."""
    from sparseflow.codesign.design.placement import Search
    from sparseflow.errors import InputError

    search = Search(method=method, restarts=restarts, seconds=seconds, seed=seed)
    if source.is_dir() or source.suffix == ".json":
        told = _placed(source, out, search)
    elif out is not None:
        raise InputError(f"`--out {out}` is for a plan: the answer to an assignment is printed")
    else:
        told = _assigned(source, search)
    _tell(told, as_json)


@app.command()
def train(
    config: Config,
    out: Annotated[Path, typer.Option(help="Folder of the runs; what was stopped goes on.")],
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each, with seeds from 0.")] = 1,
    mode: Annotated[str, typer.Option(help="joint, two-stage (with its baselines), or all.")] = "all",
    workers: Annotated[int, typer.Option(min=1, help="Runs at the same time.")] = 1,
    changes: Set = None,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Train a model together with its hardware, and the baselines beside it."""
    from sparseflow.cli.options import open_device
    from sparseflow.cli.progress import progress_bar
    from sparseflow.codesign.joint import comparison as comparing
    from sparseflow.codesign.joint.trainer import MODES, Mode
    from sparseflow.codesign.report.page import page_of_run, write_comparison
    from sparseflow.errors import InputError

    settings = _settings(config, changes)
    if mode not in (*MODES, "all"):
        raise InputError(f"`--mode {mode}` must be one of: {', '.join(MODES)}, all")
    open_device(device)
    modes: tuple[Mode, ...] = tuple(each for each in MODES if mode in (each, "all"))
    with progress_bar() as progress:
        found = comparing.compare(
            settings,
            make_task,
            out,
            seeds=seeds,
            modes=modes,
            device=device,
            workers=workers,
            progress=progress,
        )
    command = _command(
        "train", config=config, set=changes, mode=mode, seeds=seeds, workers=workers, device=device,
        out="runs",
    )  # fmt: skip
    for seed in range(seeds):
        for each in modes:
            page_of_run(out / f"{each}-{seed}", command=command)
    told = comparing.results(found, settings, device=device, command=command)
    comparing.write_results(out, told)
    page = write_comparison(out, told)
    if as_json:
        typer.echo(json.dumps({"modes": told["modes"], "verdict": told["verdict"], "page": str(page)}))
        return
    for line in told["modes"]:
        ratio = "" if line["ratio"] is None else f"  {line['ratio']:.3f} of two-stage's"
        typer.echo(
            f"{line['mode']:13s} accuracy {line['accuracy']:.2%}  energy-delay "
            f"{line['energy_delay']:.4g} mJ ms{ratio}"
        )
    typer.echo(told["verdict"])
    typer.echo(f"page: {page}")


@app.command()
def verify(
    source: Annotated[Path, typer.Argument(help="A plan.json, or the folder of a plan or a run.")],
    model: Model = None,
    clips: Annotated[int, typer.Option(min=1, help="Random clips to run.")] = 4,
    ranks: Annotated[bool, typer.Option(help="Run with a process for each slot.")] = False,
    device: Device = "cpu",
    seed: Annotated[int, typer.Option(min=0, help="What clips, and weights without a model, are.")] = 0,
    as_json: Json = False,
) -> None:
    """Run the partitioned model: same logits, bytes as planned, undone whole; and replay a trace."""
    from sparseflow.cli.options import open_device
    from sparseflow.codesign.design.saved_plan import PLAN, load_plan
    from sparseflow.codesign.execution.verification import verify as run
    from sparseflow.codesign.joint.trace import TRACE, replay
    from sparseflow.codesign.joint.trainer import MODEL
    from sparseflow.errors import InputError, RunError

    told: dict[str, Any] = {}
    if not source.exists():
        raise InputError(f"there is no plan {source}; `sparseflow codesign plan` makes one")
    if source.name == TRACE:
        source = source.parent
    folder = source if source.is_dir() else source.parent
    if model is None and (folder / MODEL).is_file():
        model = folder / MODEL  # as it was trained
    if (folder / TRACE).is_file():
        rows = replay(folder / TRACE)
        wrong = [row.row for row in rows if not row.same]
        if wrong:
            raise RunError(f"{folder / TRACE}: rows {wrong} come to another objective when priced again")
        told["replayed"] = len(rows)
    elif source.is_dir() and not (folder / PLAN).is_file():
        raise InputError(f"{source} holds neither {PLAN} nor {TRACE}")
    plan_file = folder / PLAN if source.is_dir() else source
    if plan_file.is_file():
        saved = load_plan(plan_file)
        steps = _steps(saved.hardware.settings.task, model, seed)
        told |= run(
            steps, saved.decision, _clips(steps, clips, seed), planned=saved.layers,
            device=open_device(device), ranks=ranks,
        )  # fmt: skip
    _tell(told, as_json)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="Folder of a run, with its trace.jsonl.")],
    as_json: Json = False,
) -> None:
    """Write the page of a run anew."""
    from sparseflow.codesign.report.page import page_of_run

    _tell({"page": str(page_of_run(folder, command=_command("report", folder)))}, as_json)


def make_task(settings: Mapping[str, Any], seed: int, device: str) -> Any:
    """The training of a video transformer: what `codesign train` drives."""
    from sparseflow.pruning.settings import settings_of
    from sparseflow.pruning.task import VideoTask

    train = {**settings.get("train", {}), "seed": seed}
    return VideoTask(settings_of({**settings, "train": train}, "`task`"), device=device)


def _placed(source: Path, out: Path | None, search: Search) -> dict[str, Any]:
    """A plan with its chips at better places, beside the plan unless told otherwise."""
    from sparseflow.codesign.design.decision import figures
    from sparseflow.codesign.design.saved_plan import PLAN, load_plan, save_plan
    from sparseflow.codesign.report.page import BOUNDS, write_page
    from sparseflow.core.environment import collect_environment

    file = source / PLAN if source.is_dir() else source
    saved = load_plan(file)
    hardware, layers = saved.hardware, saved.layers
    tried = hardware.replaced(layers, saved.decision, search)
    decision = hardware.better(layers, saved.decision, tried)
    folder = file.parent / "layout" if out is None else out
    folder.mkdir(parents=True, exist_ok=True)
    # Bounds of a mapping are of the places that it was made for.
    stale = BOUNDS if decision != saved.decision else ()
    extra = {name: value for name, value in saved.extra.items() if name not in stale}
    plan = save_plan(folder, hardware, layers, decision, extra=extra)
    command = _command("layout", file, **vars(search), out=folder)
    page = write_page(
        folder,
        hardware,
        layers,
        decision,
        told=extra,
        environment=collect_environment("cpu"),
        command=command,
    )
    before, after = (hardware.price(layers, each) for each in (saved.decision, decision))
    return {
        "layout_before": before.layout, **figures(after), "layout": after.layout, "plan": str(plan),
        "page": str(page),
    }  # fmt: skip


def _assigned(source: Path, search: Search) -> dict[str, Any]:
    """The answer to a quadratic assignment."""
    import math

    from sparseflow.codesign.layout import assign, read_qaplib

    instance = read_qaplib(source)
    found = assign(
        instance.flow, instance.distance, method=search.method, restarts=search.restarts or 5,
        seconds=search.seconds, seed=search.seed or 0,
    )  # fmt: skip
    return {
        "cost": found.cost, "best_known": instance.best_known, "lower_bound": found.lower_bound,
        "gap_to_bound": found.gap if math.isfinite(found.gap) else None, "costs": list(found.costs),
        "seconds": found.seconds, "finished": found.finished, "permutation": found.permutation.tolist(),
    }  # fmt: skip


def _settings(config: str, changes: list[str] | None) -> Any:
    from sparseflow.codesign.design.config import read_settings
    from sparseflow.core.config import parse_overrides
    from sparseflow.pruning.settings import settings_of

    found = read_settings(config, parse_overrides(changes or [], extra="codesign"))
    settings_of(found.task, "`task`")
    return found


def _steps(task: Mapping[str, Any], model: Path | None, seed: int) -> Steps:
    """A compact model: what a file holds, or the task's with random weights."""
    import torch

    from sparseflow.pruning import compact
    from sparseflow.pruning.saved import load
    from sparseflow.pruning.settings import settings_of
    from sparseflow.pruning.steps import Steps

    if model is not None:
        return Steps(compact(load(model)))
    settings = settings_of(task, "`task`")
    classes, channels = _shown(settings.data)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Steps(compact(settings.make(classes, channels).eval()))


def _shown(data: MovingDigitsSettings | UCF101Settings) -> tuple[int, int]:
    """Classes of some data, and channels of its frames; no video is looked for."""
    if data.kind == "moving_digits":
        from sparseflow.pruning.data.moving_digits import MovingDigits

        return len(MovingDigits.classes), 1
    from sparseflow.pruning.data.lists import read_split

    return len(read_split(data.lists, data.split).classes), 3


def _clips(steps: Steps, count: int, seed: int) -> Any:
    import torch

    config = steps.model.config
    shape = (count, config.num_frames, config.in_chans, config.img_size, config.img_size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _command(name: str, *arguments: object, **options: object) -> str:
    """A command line that can be pasted into a shell; options that are None or on by default are left out."""
    words = ["sparseflow", "codesign", name, *map(str, arguments)]
    for option, value in options.items():
        if value is False:
            words.append(f"--no-{option}")
        elif value is not None and value is not True:
            words += [part for each in (value if isinstance(value, list) else [value])
                      for part in (f"--{option}", str(each))]  # fmt: skip
    return shlex.join(words)


def _tell(told: Mapping[str, Any], as_json: bool) -> None:
    """Print for scripts, or for readers."""
    if as_json:
        typer.echo(json.dumps(told))
        return
    for name, value in told.items():
        shown = f"{value:.6g}" if isinstance(value, float) else value
        typer.echo(f"{name.replace('_', ' ')}: {shown}")
