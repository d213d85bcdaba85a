"""`run`, `stress`, `collect`, `load` and `exporter`: what things take, beside which load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparseflow.cli.latency.base import (
    Json,
    Labels,
    MaxAge,
    Provider,
    Shapes,
    Url,
    app,
    clock,
    labels_of,
    shapes_of,
)

if TYPE_CHECKING:
    from rich.console import Console

    from sparseflow.latency.collect import Collected


@app.command("run")
def run_model(
    model: Annotated[Path, typer.Argument(help="An ONNX file: a model, or a kernel from `latency extract`.")],
    provider: Provider = "cpu",
    warmup: Annotated[
        int, typer.Option(min=0, help="Runs before the first sample; 0 keeps the first one.")
    ] = 5,
    loops: Annotated[int, typer.Option(min=1, help="Samples.")] = 50,
    level: Annotated[
        str | None,
        typer.Option(
            help="What onnxruntime may optimise: disable (the default of a kernel), …, all (of a model)."
        ),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads within an operator.")] = None,
    shape: Shapes = None,
    conv_search: Annotated[
        str, typer.Option(help="How cuDNN chooses: EXHAUSTIVE, HEURISTIC, DEFAULT.")
    ] = "EXHAUSTIVE",
    gpu: Annotated[int, typer.Option(min=0, help="Number of the GPU.")] = 0,
    seed: Annotated[int, typer.Option(help="What the inputs are drawn from.")] = 0,
    as_json: Json = False,
) -> None:
    """Time a model or a kernel, its inputs and outputs on the device; every sample is kept."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from sparseflow.latency.runner import Runner

    runner = Runner(
        model, provider, level=level, threads=threads, shapes=shapes_of(shape), conv_search=conv_search,
        gpu=gpu, seed=seed,
    )  # fmt: skip
    timing = runner.measure(warmup=warmup, loops=loops)
    if as_json:
        typer.echo(json.dumps(timing.to_dict(), ensure_ascii=False))
        return
    search = f", {timing.conv_search}" if timing.conv_search else ""
    title = f"{timing.model}, {timing.provider}, {timing.level}{search}"
    table = Table("mean", "p50", "p95", "p99", "min", "max", title=escape(title), title_justify="left")
    shown = (timing.mean_ms, *(timing.quantile_ms(q) for q in (0.5, 0.95, 0.99)))
    table.add_row(*(f"{value:.4f} ms" for value in (*shown, min(timing.latency_ms), max(timing.latency_ms))))
    console = Console()
    console.print(table)
    console.print(
        f"{len(timing.latency_ms)} runs after {warmup} of warm-up ({timing.warmup_ms:.1f} ms), from "
        f"{clock(timing.start_s)} to {clock(timing.end_s)}; CPU time / wall time {timing.cpu_ratio:.2f}",
        markup=False,
    )


@app.command()
def stress(
    kind: Annotated[str, typer.Option(help="cpu-fma, cpu-stream, gpu-matmul or gpu-copy.")] = "cpu-fma",
    level: Annotated[
        list[float] | None,
        typer.Option(help="Share of the device's time, 0 to 1; of several, one after the other."),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.0, help="How long each level is kept once reached.")] = 10.0,
    workers: Annotated[int | None, typer.Option(min=1, help="CPUs to load; by default all.")] = None,
    device: Annotated[str, typer.Option(help="The GPU of a GPU load.")] = "cuda",
    timeout: Annotated[float, typer.Option(min=0.0, help="Longest wait for a level, seconds.")] = 30.0,
    as_json: Json = False,
) -> None:
    """Load a CPU or a GPU to a level that is measured and corrected, and show what is achieved.

    Exits with 1 where a level is not reached.
    """
    import time

    from sparseflow.cli.progress import progress_bar
    from sparseflow.core.load import Stressor

    levels = level or [0.6]
    reached: list[dict[str, float]] = []
    with Stressor(kind, levels[0], workers=workers, device=device) as load, progress_bar() as progress:
        for number, asked in enumerate(levels):
            load.set_level(asked)
            progress(f"{kind} {asked:g}: waiting until it is steady", number / len(levels))
            load.wait_until_steady(timeout)
            begin = time.monotonic()
            while (passed := time.monotonic() - begin) < seconds:
                share = (number + passed / seconds) / len(levels)
                progress(
                    f"{kind} {asked:g}: achieved {load.measure_share():.3f}, duty {load.mean_duty():.3f}",
                    share,
                )
                time.sleep(min(0.25, seconds - passed))
            kept = load.measure_share_between(begin, time.monotonic())
            reached.append({"asked": asked, "achieved": kept, "duty": load.mean_duty()})
            if not as_json:
                typer.echo(f"asked {asked:.2f}  achieved {kept:.3f}  duty {load.mean_duty():.3f}")
    if as_json:
        typer.echo(
            json.dumps({"kind": kind, "device": load.device, "cpus": list(load.cpus), "levels": reached})
        )


@app.command()
def collect(
    config: Annotated[Path, typer.Argument(help="A collection's YAML file.")],
    out: Annotated[
        Path, typer.Option(help="Folder of the collection; what is in it is gone on with.")
    ] = Path("collection"),
    gpus: Annotated[
        str | None, typer.Option(help="Measure a part on each of these GPUs at the same time: 0,1.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Measure parts on a Ray cluster; auto is the one of this machine.")
    ] = None,
    parts: Annotated[int | None, typer.Option(min=1, help="Parts on the cluster.")] = None,
    as_json: Json = False,
) -> None:
    """Measure kernels and models at several levels of load, and read the load meanwhile.

    The same command goes on with a collection that was stopped, by whatever: no row is lost or repeated.
    Parts land in a folder each, and `latency train` takes all of them.
    """
    from rich.console import Console

    from sparseflow.cli.progress import progress_bar
    from sparseflow.latency.campaign import read_config
    from sparseflow.latency.collect import collect as gather
    from sparseflow.latency.fanout import fan_out

    settings = read_config(config)
    with progress_bar() as progress:
        if gpus is None and cluster is None and parts is None:
            found = [gather(settings, out, progress=progress)]
        else:
            found = fan_out(
                settings, out, gpus=numbers_of(gpus), cluster=cluster, parts=parts, progress=progress
            )
    if as_json:
        whole = [part.to_dict() for part in found]
        typer.echo(json.dumps(whole[0] if len(whole) == 1 else {"parts": whole}, ensure_ascii=False))
        return
    for part in found:
        _show_collected(Console(), part)


def numbers_of(given: str | None) -> list[int]:
    """`"0,1"` as numbers of GPUs."""
    from sparseflow.errors import InputError

    try:
        return [int(number) for number in given.split(",")] if given else []
    except ValueError as error:
        raise InputError(f"`--gpus {given}` must be numbers with commas between, such as 0,1") from error


def _show_collected(console: Console, found: Collected) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(
        "load asked",
        "alone",
        "beside the work",
        "slowdown",
        title=escape(str(found.path)),
        title_justify="left",
    )
    for row in found.levels:
        slowdown = row["slowdown"]
        table.add_row(
            f"{row['level']:.2f}", f"{row['stress_alone']:.3f}", f"{row['stress_achieved']:.3f}",
            "–" if slowdown is None else f"{slowdown:.2f}x",
        )  # fmt: skip
    console.print(table)
    drift = "–" if found.drift is None else f"{100 * found.drift:.1f} %"
    console.print(
        f"{found.items} items, {found.rows} rows ({found.added} new, {found.failed} failed), drift of the "
        f"reference {drift}",
        markup=False,
    )


@app.command()
def load(
    source: Annotated[str, typer.Option(help="host, gpm (an NVIDIA GPU by NVML) or prometheus.")] = "host",
    url: Url = None,
    label: Labels = None,
    metric: Annotated[list[str] | None, typer.Option(help="Read only this. Several times.")] = None,
    window: Annotated[float, typer.Option(help="Seconds to average over.")] = 1.0,
    max_age: MaxAge = 30.0,
    device: Annotated[str, typer.Option(help="The GPU that gpm reads.")] = "cuda",
    as_json: Json = False,
) -> None:
    """Show how busy a device is right now, as the predictor sees it. Missing or stale is an error."""
    from rich.console import Console
    from rich.table import Table

    from sparseflow.core.telemetry.readers import open_reader

    reader = open_reader(
        source, device=device, metrics=metric, url=url, labels=labels_of(label), max_age_s=max_age
    )
    found = reader.read(window)
    if as_json:
        typer.echo(json.dumps(found.to_row(prefix=""), ensure_ascii=False))
        return
    console = Console()
    title = f"{found.device} by {found.source}, {found.interval_s:.2f} s up to {clock(found.timestamp_s)}"
    console.print(title, markup=False)
    table = Table("metric", "share")
    for name, value in found.shares.items():
        table.add_row(name, f"{100 * value:.1f} %")
    console.print(table)


@app.command()
def exporter(
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 9400,
    listen: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 lets others in.")] = "127.0.0.1",
    source: Annotated[str, typer.Option(help="host, or gpm: an NVIDIA GPU by NVML.")] = "host",
    device: Annotated[str, typer.Option(help="The GPU that gpm reads.")] = "cuda",
    metric: Annotated[list[str] | None, typer.Option(help="Publish only this. Several times.")] = None,
    interval: Annotated[float, typer.Option(help="Seconds that one reading takes.")] = 1.0,
    as_json: Json = False,
) -> None:
    """Publish this machine's load under DCGM's names for Prometheus to scrape, until it is stopped."""
    from sparseflow.core.telemetry.readers import open_reader
    from sparseflow.errors import InputError
    from sparseflow.latency.exporter import Exporter, serve

    if source not in ("host", "gpm"):
        raise InputError(f"`--source` (={source}) must be host or gpm: what is published must be read here")
    reader = open_reader(source, device=device, metrics=metric)

    def ready(address: str) -> None:
        if as_json:
            typer.echo(json.dumps({"url": address, "source": source, "metrics": list(reader.metrics)}))
        else:
            typer.echo(f"serving {', '.join(reader.metrics)} at {address}; stop with Ctrl-C")

    serve(Exporter(reader, host=listen, port=port, interval_s=interval), ready=ready)
