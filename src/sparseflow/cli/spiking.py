"""`sparseflow spiking`: the commands of the spiking wing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import torch
    from torch import nn

app = typer.Typer(name="spiking", help="Spiking networks: skip what does not fire.", no_args_is_help=True)

Model = Annotated[
    str,
    typer.Option(
        help="A shipped network, spiking_resnet18 (34, 50, …), sew_resnet18 (…), or package.module:factory."
    ),
]
Weights = Annotated[Path | None, typer.Option(help="Weights to load, a safetensors file.")]
Batch = Annotated[int, typer.Option(min=1, help="Images a batch.")]
Steps = Annotated[int, typer.Option("--steps", "-T", min=1, help="Time steps of a network built by name.")]
Image = Annotated[int, typer.Option(min=8, help="Height and width of the input, pixels.")]
Width = Annotated[int, typer.Option(min=8, help="Channels of the first stage of a network built by name.")]
Classes = Annotated[int, typer.Option(min=2, help="Outputs of a network built by name.")]
Gpu = Annotated[int | None, typer.Option(help="GPU to use; by default the one with most free memory.")]
Cpu = Annotated[bool, typer.Option("--cpu", help="Use the CPU even where there is a GPU.")]
Policy = Annotated[str, typer.Option(help="measured, or static: the rule by feature-map height.")]
Cache = Annotated[bool, typer.Option(help="Remember decisions on disk.")]
Models = Annotated[list[str] | None, typer.Option("--model", help="As --model; may be given several times.")]
Batches = Annotated[list[int] | None, typer.Option("--batch", help="May be given several times.")]
StepCounts = Annotated[list[int] | None, typer.Option("--steps", "-T", help="May be given several times.")]
Half = Annotated[bool, typer.Option("--half", help="On a GPU: let the optimised network use fp16.")]
Dataset = Annotated[str, typer.Option(help="cifar10 or cifar100: 10 or 100 outputs.")]
Grid = Annotated[
    bool, typer.Option("--grid", help="Every depth, both datasets, T 4 and 16, batches of 1, 8 and 32.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]

CLASSES = {"cifar10": 10, "cifar100": 100}
DEFAULT_MODEL = "cifar10-sew-resnet18"


@app.callback()
def spiking() -> None:
    """Spiking networks: skip what does not fire."""


def _prepare(
    model: str, weights: Path | None, batch: int, steps: int, image: int, width: int, classes: int,
    gpu: int | None, cpu: bool,
) -> tuple[nn.Module, torch.Tensor]:  # fmt: skip
    from sparseflow.spiking import catalog

    settings = catalog.Settings(steps=steps, classes=classes, image=image, width=width)
    net, x, _ = catalog.Case(model=model, settings=settings, batch=batch).build(weights)
    place = _place(gpu, cpu)
    return net.to(place), x.to(place)


def _place(gpu: int | None, cpu: bool) -> torch.device:
    """The GPU that was named, or the one with most free memory, or the CPU where there is none."""
    import torch

    from sparseflow.core import device

    no_gpu = gpu is None and not torch.cuda.is_available()
    return torch.device("cpu") if cpu or no_gpu else device.select_device(gpu)


@app.command()
def optimize(
    model: Model = DEFAULT_MODEL, weights: Weights = None, batch: Batch = 32, steps: Steps = 4,
    image: Image = 32, width: Width = 64, classes: Classes = 10, gpu: Gpu = None, cpu: Cpu = False,
    policy: Policy = "measured", cache: Cache = True, as_json: Json = False,
) -> None:  # fmt: skip
    """Optimise a network for this machine and show, layer by layer, what was done and why."""
    from rich.console import Console

    import sparseflow
    from sparseflow.cli.progress import progress_bar
    from sparseflow.errors import InputError

    if policy not in ("measured", "static"):
        raise InputError(f"`--policy` (={policy}) must be measured or static")
    net, x = _prepare(model, weights, batch, steps, image, width, classes, gpu, cpu)
    with progress_bar() as progress:
        sparseflow.optimize(
            net,
            x,
            policy=policy,  # type: ignore[arg-type]
            cache=cache,
            progress=lambda what, done, total: progress(f"measuring {what}", done / max(total, 1)),
        )
    explanation = sparseflow.explain(net)
    if as_json:
        typer.echo(json.dumps(explanation.to_dict(), ensure_ascii=False))
    else:
        Console().print(explanation)


@app.command()
def profile(
    model: Model = DEFAULT_MODEL, weights: Weights = None, batch: Batch = 32, steps: Steps = 4,
    image: Image = 32, width: Width = 64, classes: Classes = 10, gpu: Gpu = None, cpu: Cpu = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Show what feeds each convolution, how much of it is zero, and its group's time when optimised."""
    from dataclasses import asdict

    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    import sparseflow
    from sparseflow.spiking.graph import analyze
    from sparseflow.spiking.profile import activities

    net, x = _prepare(model, weights, batch, steps, image, width, classes, gpu, cpu)
    graph = analyze(net, x)
    seen = activities(net, (x,), [site.name for site in graph.sites])
    sparseflow.optimize(net, x)
    times = sparseflow.layer_times(net, x)
    rows: list[dict[str, Any]] = [
        {
            "name": site.name,
            "fed_by": list(site.fed_by),
            "values": site.value.kind,
            "replaceable": site.replaceable,
            "reason": site.reason,
            "latency_ms": times.get(site.name),
            **(asdict(seen[site.name]) if site.name in seen else {}),
        }
        for site in graph.sites
    ]
    if as_json:
        typer.echo(json.dumps({"model": model, "batch": batch, "layers": rows}, ensure_ascii=False))
        return
    table = Table(title=escape(f"{model}, batch {batch}"), title_justify="left")
    for heading in (
        "layer",
        "fed by",
        "values",
        "firing",
        "zero blocks",
        "silent channels",
        "H x W",
        "ms",
        "note",
    ):
        # On a narrow screen the numbers and the layer's name stay whole.
        table.add_column(heading, no_wrap=heading in ("layer", "H x W", "ms"), overflow="fold")
    for row in rows:
        spikes = bool(row["fed_by"])
        table.add_row(
            escape(row["name"]),
            escape(", ".join(row["fed_by"])) or "–",
            row["values"],
            f"{100 * row['firing_rate']:.2f} %" if spikes else "–",
            f"{100 * row['zero_block_ratio']:.1f} %" if spikes else "–",
            f"{100 * row['silent_channels']:.0f} %" if spikes else "–",
            f"{row['height']} x {row['width']}" if "height" in row else "–",
            "–" if row["latency_ms"] is None else f"{row['latency_ms']:.3f}",
            escape(row["reason"] or ""),
        )
    Console().print(table)


@app.command()
def bench(
    model: Models = None, batch: Batches = None, steps: StepCounts = None,
    image: Image = 32, width: Width = 64, dataset: Dataset = "cifar10", grid: Grid = False,
    gpu: Gpu = None, cpu: Cpu = False,
    half: Half = False,
    rounds: Annotated[int, typer.Option(min=4, help="Paired timing rounds.")] = 20,
    compiled: Annotated[bool, typer.Option(help="Let the dense side use torch.compile too.")] = True,
    cache: Cache = True,
    out: Annotated[Path, typer.Option(help="Folder that gets the run's own folder.")] = Path("runs"),
    resume: Annotated[Path | None, typer.Option(help="A run's folder to go on with.")] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Measure networks against their strongest dense form.

    One row a network, dataset, T and batch size. `--resume` goes on with a run that was stopped.
    """
    import torch
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from sparseflow.cli.progress import progress_bar
    from sparseflow.core.run import Run
    from sparseflow.errors import InputError
    from sparseflow.spiking.bench import bench_grid
    from sparseflow.spiking.catalog import Case, Settings

    if dataset not in CLASSES:
        raise InputError(f"`--dataset` (={dataset}) must be one of: {', '.join(CLASSES)}")
    place = _place(gpu, cpu)
    depths = [f"spiking_resnet{depth}" for depth in (18, 34, 50, 101, 152)]
    cases = [
        Case(model=m, settings=Settings(steps=t, classes=CLASSES[d], image=image, width=width), batch=b)
        for m in model or (depths if grid else [DEFAULT_MODEL])
        for d in (CLASSES if grid else [dataset])
        for t in steps or ([4, 16] if grid else [4])
        for b in batch or ([1, 8, 32] if grid else [32])
    ]
    settings = {"cases": [case.name for case in cases], "half": half, "rounds": rounds, "compiled": compiled}
    opened = (
        Run.open(resume) if resume else Run.start(out, "sparseflow spiking bench", settings, 0, device=place)
    )
    with opened as run, progress_bar() as progress:
        results = bench_grid(
            cases, run, device=place, dtype=torch.float16 if half else None, rounds=rounds, compiled=compiled,
            cache=cache, progress=progress,
        )  # fmt: skip
    if as_json:
        typer.echo(json.dumps({"run": str(run.path), "cases": results}, ensure_ascii=False))
        return
    table = Table(title=escape(str(run.path)), title_justify="left")
    for heading in (
        "case",
        "strongest dense",
        "ms dense → ours",
        "speed-up (95 %)",
        "over eager",
        "firing",
        "top-1 agrees",
    ):
        table.add_column(heading)
    for name, row in results.items():
        if "error" in row:
            table.add_row(escape(name), escape(f"failed: {row['error']}"))
            continue
        speed, ms = row["speedup"], row["latency_ms"]
        table.add_row(
            escape(name),
            row["baseline"],
            f"{ms[row['baseline']]:.3f} → {ms['optimised']:.3f}",
            f"{speed['median']:.2f}x ({speed['low']:.2f}–{speed['high']:.2f})",
            f"{row['speedup_eager']['median']:.2f}x",
            "–" if row["firing_rate"] is None else f"{100 * row['firing_rate']:.1f} %",
            f"{100 * row['top1_agreement']:.1f} %",
        )
    Console().print(table)
